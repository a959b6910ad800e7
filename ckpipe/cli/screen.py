"""The output of a command: text for people, plain text for pipes, JSON for programs, progress.

Results go to standard output, everything else to standard error. Names come from stores and may be
hostile, so characters that would steer a terminal are escaped. An action that takes longer than a
second shows on a terminal how far it is, its rate and the time left.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

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
from ckpipe.reports import size_text

if TYPE_CHECKING:
    from ckpipe.settings import Settings
    from ckpipe.types import CheckpointInfo

SILENT_SECONDS = 1.0
"""How long an action may take before it shows how far it is."""


class _Rate(ProgressColumn):
    """Things done each second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.0f}/s")


def of_bytes() -> tuple[ProgressColumn, ...]:
    """Columns for an action that is counted in bytes."""
    return (DownloadColumn(binary_units=True), TransferSpeedColumn())


def of_things() -> tuple[ProgressColumn, ...]:
    """Columns for an action that is counted in checkpoints or other things."""
    return (MofNCompleteColumn(), _Rate())


Unit = Callable[[], tuple[ProgressColumn, ...]]


class Meter:
    """Shows how far an action is; silent without a terminal, and at first.

    Args:
        console: Where to show it; nothing is shown unless it is a terminal.
        action: What is done.
        total: How much there is to do; None if that is not known yet.
        unit: What is counted: :func:`of_bytes` or :func:`of_things`.
    """

    def __init__(
        self, console: Console, action: str, total: int | None, unit: Unit = of_bytes
    ) -> None:
        text, left = TextColumn("{task.description}"), TimeRemainingColumn()
        columns = (text, BarColumn(), *unit(), left)
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task(action, total=total)
        self._silent = not console.is_terminal
        self._since = time.monotonic()
        self._shown = False

    def expect(self, amount: int) -> None:
        """Says how much more there will be than was known."""
        total = self._progress.tasks[0].total or 0
        self._progress.update(self._task, total=total + amount)

    def advance(self, amount: int) -> None:
        """Says that so much more is done."""
        self._progress.update(self._task, advance=amount)
        if not self._shown and not self._silent and time.monotonic() - self._since > SILENT_SECONDS:
            self._shown = True
            self._progress.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._shown:
            self._progress.stop()


class SubProgress:
    """Tells a meter of an action in parts of known size, never more of a part than its size.

    Args:
        meter: Shows how far the action is.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._left = 0
        self.expect = meter.expect

    def count(self, amount: int) -> None:
        """Says that so much more is done of the part that is being done, if there is one."""
        done = min(amount, self._left)
        self._left -= done
        self._meter.advance(done)

    @contextmanager
    def of(self, amount: int) -> Iterator[None]:
        """Does a part of this size; what was not counted of it counts at its end."""
        self._left = amount
        yield
        self.count(self._left)


class Spinner:
    """Says that a command is at work, if it takes longer than a second and shows nothing else.

    A thread of its own begins to, so that it also shows where nothing is counted.

    Args:
        console: Where to show it; nothing is shown unless it is a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._timer = threading.Timer(SILENT_SECONDS, self._show)
        self._timer.daemon = True
        self._shown: Progress | None = None
        self._over = not console.is_terminal

    def _show(self) -> None:
        with self._lock:
            if not self._over:
                columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
                self._shown = Progress(*columns, console=self._console, transient=True)
                self._shown.add_task("at work", total=None)
                self._shown.start()

    def end(self) -> None:
        """Shows nothing any more; may be called again."""
        with self._lock:
            self._over = True
            self._timer.cancel()
            shown, self._shown = self._shown, None
        if shown is not None:
            shown.stop()

    def __enter__(self) -> Self:
        if not self._over:
            self._timer.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()


_PIPE_WIDTH = 100_000
_ROOTS = ("url", "source", "target")
"""Members of a result that are URLs."""


class Screen:
    """The output of a command's results, notes and progress.

    Args:
        as_json: Whether results are JSON.
        settings: A file of settings.
    """

    def __init__(self, as_json: bool, settings: Path | None = None) -> None:
        self.as_json, self._file = as_json, settings
        self.out = _console(stderr=False)
        self.err = _console(stderr=True)
        self.spinner = Spinner(self.err)

    @functools.cached_property
    def settings(self) -> Settings:
        """The settings of the file and the environment; reading them the first time blocks.

        Raises:
            SettingsError: If one of them is wrong.
        """
        from ckpipe.settings import Settings  # a third of the time of --help, which needs none

        return Settings() if self._file is None else Settings.from_file(self._file)

    def result(self, data: Any, *shown: RenderableType) -> None:
        """Prints a result.

        Args:
            data: The result as a data class or mapping: what ``--json`` prints.
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
        """Says why a command failed: to people, and with ``--json`` to programs as well.

        Args:
            kind: The class of the error.
            message: What it says.
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

    def left_out(self, info: CheckpointInfo) -> None:
        """Says that one of several checkpoints was deleted before its turn was over."""
        self.note(f"{info.id} was deleted meanwhile and is left out")

    def matches_nothing(self, patterns: Sequence[str] | None) -> None:
        """Says that no name of what is looked at matches any of some globs, if there are any."""
        if patterns:
            self.note(f"no name matches {' or '.join(each or repr(each) for each in patterns)}")

    @contextmanager
    def meter(
        self, action: str, total: int | None = None, unit: Unit = of_bytes
    ) -> Iterator[Meter]:
        """Shows how far an action is, if it takes longer than a second and runs in a terminal.

        Args:
            action: What is done, as a word or two.
            total: How much there is to do, if that is known.
            unit: What is counted.
        """
        self.spinner.end()
        with Meter(self.err, action, total, unit) as meter:
            yield meter


class _Console(Console):
    """A console that raises BrokenPipeError, where rich exits as if a check had found damage."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _console(*, stderr: bool) -> Console:
    _escape_what_cannot_be_written(sys.stderr if stderr else sys.stdout)
    console = _Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console = _Console(
            stderr=stderr, markup=False, highlight=False, emoji=False,
            width=_PIPE_WIDTH, color_system=None, force_terminal=False,
        )  # fmt: skip
    return console


def _escape_what_cannot_be_written(stream: TextIO | None) -> None:
    """Keeps a terminal or pipe that does not take Unicode from ending the command."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")


def table(headings: Sequence[str], rows: Sequence[Sequence[object]], *right: str) -> Table:
    """Rows in columns without lines, of which some are aligned to the right."""
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
    """The text with characters that do not print written as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """The same for what stands in a line: a newline is written as an escape too."""
    return visible(text).replace("\n", "\\n")


def size(nbytes: int | None) -> str:
    """A number of bytes for people."""
    return "?" if nbytes is None else size_text(nbytes)


def plain_data(data: Any) -> Any:
    """Convert to what the json module can write: other floats than finite ones to text, sets to
    lists.
    """
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return {
            field.name: plain_data(getattr(data, field.name)) for field in dataclasses.fields(data)
        }
    if isinstance(data, dict):
        return {str(key): plain_data(value) for key, value in data.items()}
    if isinstance(data, list | tuple | set | frozenset):
        return [plain_data(each) for each in data]
    if isinstance(data, float) and not math.isfinite(data):
        return repr(data)
    if data is None or isinstance(data, str | int | float):
        return data
    return data.isoformat() if hasattr(data, "isoformat") else str(data)
