"""The output of a command: text for people, plain text for pipes, JSON for programs, progress.

Results go to standard output, everything else to standard error. Names come from stores and may be
hostile, so characters that would control a terminal are escaped. On a terminal, an action that
takes longer than a second shows its progress, its rate and the time left.
"""

from __future__ import annotations

import functools
import io
import json
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from ckpipe.backend import without_secrets
from ckpipe.cli.commands import drop
from ckpipe.types import plain_data

if TYPE_CHECKING:
    from ckpipe.settings import Settings

SILENT_SECONDS = 1.0
"""The seconds that an action may take before it shows its progress."""


class _RateColumn(ProgressColumn):
    """Items a second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.0f}/s")


def of_bytes() -> tuple[ProgressColumn, ...]:
    """Return columns for an action that is counted in bytes."""
    return (DownloadColumn(), TransferSpeedColumn())


def of_things() -> tuple[ProgressColumn, ...]:
    """Return columns for an action that is counted in checkpoints or other items."""
    return (MofNCompleteColumn(), _RateColumn())


Unit = Callable[[], tuple[ProgressColumn, ...]]


class Meter:
    """Show the progress of an action, or only that the command is at work.

    Nothing is shown without a terminal, nor in the first second. A separate thread starts the
    display, so it also appears if nothing is counted or the event loop is blocked.

    Args:
        console: The console.
        action: The name of the action.
        total: The amount of work; None if it is not known yet.
        unit: The unit: :func:`of_bytes` or :func:`of_things`; None shows the time alone.
    """

    def __init__(
        self, console: Console, action: str, total: int | None = None, unit: Unit | None = of_bytes
    ) -> None:
        text = TextColumn("{task.description}")
        columns: tuple[ProgressColumn, ...] = (SpinnerColumn(), text, TimeElapsedColumn())
        if unit is not None:
            columns = (text, BarColumn(), *unit(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task(action, total=total)
        self._lock, self._over = threading.Lock(), not console.is_terminal
        self._timer = threading.Timer(SILENT_SECONDS, self.show)
        self._timer.daemon = True

    def expect(self, amount: int) -> None:
        """Add to the amount of work."""
        total = self._progress.tasks[0].total or 0
        self._progress.update(self._task, total=total + amount)

    def advance(self, amount: int) -> None:
        """Count finished work."""
        self._progress.update(self._task, advance=amount)

    def show(self) -> None:
        """Start the display, unless the action is over."""
        with self._lock:
            if not self._over:
                self._progress.start()

    def end(self) -> None:
        """End the display; may be called again."""
        with self._lock:
            self._over = True
            self._timer.cancel()
            if self._progress.live.is_started:
                self._progress.stop()

    def __enter__(self) -> Self:
        if not self._over:
            self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


_PIPE_WIDTH = 100_000
_ROOTS = ("url", "source", "target")
"""Members of a result that are URLs."""


class Screen:
    """Print the results, notes and progress of a command.

    Args:
        as_json: Whether results are JSON.
        settings: A file of settings.
    """

    def __init__(self, as_json: bool, settings: Path | None = None) -> None:
        self.as_json, self._file = as_json, settings
        self.out = _console(stderr=False)
        self.err = _console(stderr=True)
        self.spinner = Meter(self.err, "at work", unit=None)

    @functools.cached_property
    def settings(self) -> Settings:
        """The settings of the file and the environment; reading them the first time blocks.

        Raises:
            SettingsError: If one of them is wrong.
        """
        from ckpipe.settings import Settings  # a third of the time of --help, which needs none

        return Settings() if self._file is None else Settings.from_file(self._file)

    def result(self, data: Any, *shown: RenderableType) -> None:
        """Print a result.

        Args:
            data: The result as a data class or mapping, for ``--json``.
            shown: The same for people.
        """
        self.spinner.end()
        if self.as_json:
            plain = plain_data(data)
            roots = {name: without_secrets(plain[name]) for name in _ROOTS if plain.get(name)}
            self.out.file.write(json.dumps(plain | roots, allow_nan=False) + "\n")
        else:
            for each in shown:
                self._show(each)

    def _show(self, each: RenderableType) -> None:
        if self.out.is_terminal:
            if isinstance(each, Table):
                # A narrow terminal breaks long lines itself, rather than losing whole columns.
                options = self.out.options.update(width=_PIPE_WIDTH)
                needed = Measurement.get(self.out, options, each).maximum
                self.out.width = max(self.out.width, needed)
            self.out.print(each, crop=False)
            return
        with self.out.capture() as captured:
            self.out.print(each)
        lines = captured.get().splitlines()
        self.out.file.writelines(line.rstrip() + "\n" for line in lines)

    def failure(self, kind: str, message: str) -> None:
        """Report the failure of a command to people, and with ``--json`` to programs as well.

        Args:
            kind: The class of the error.
            message: Its message.
        """
        message = without_secrets(message)
        self.note(f"error: {message}")
        if self.as_json:
            self.out.file.write(json.dumps({"error": kind, "message": message}) + "\n")

    def note(self, text: str) -> None:
        """Print a note beside the result; ignore failures to write it."""
        try:
            self.spinner.end()
            self.err.print(Text(visible(text)))
        except OSError:
            drop(sys.stderr)

    def meter(self, action: str, total: int | None = None, unit: Unit = of_bytes) -> Meter:
        """Replace the spinner by a :class:`Meter` of an action."""
        self.spinner.end()
        return Meter(self.err, action, total, unit)


class _Console(Console):
    """A console that raises BrokenPipeError; rich would exit with the code for damage."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        # A terminal or pipe without Unicode must not end the command.
        stream.reconfigure(errors="backslashreplace")
    plain: dict[str, Any] = {"markup": False, "highlight": False, "emoji": False}
    console = _Console(stderr=stderr, **plain)
    if not console.is_terminal:
        plain |= {"width": _PIPE_WIDTH, "color_system": None, "force_terminal": False}
        console = _Console(stderr=stderr, **plain)
    return console


def table(headings: Sequence[str], rows: Sequence[Sequence[object]], *right: str) -> Table:
    """Make a table without lines; align the columns named in ``right`` to the right."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        made.add_column(
            heading,
            justify="right" if heading in right else "left",
            no_wrap=True,
            overflow="ignore",
        )
    for row in rows:
        made.add_row(*(Text(one_line(str(cell))) for cell in row))
    return made


def visible(text: str) -> str:
    """Escape the characters of a text that do not print."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """Escape the characters that do not print, including newlines."""
    return visible(text).replace("\n", "\\n")
