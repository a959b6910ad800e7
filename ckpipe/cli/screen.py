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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
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
from ckpipe.format.names import short_names
from ckpipe.types import CheckpointId, plain_data, size_text

if TYPE_CHECKING:
    from ckpipe.settings import Settings

SILENT_SECONDS = 1.0
"""The seconds that an action may take before it shows its progress."""


Unit = Literal["bytes", "things"]


class _RateColumn(ProgressColumn):
    """Items a second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.0f}/s")


class Meter:
    """Show the progress of an action, or only that the command is at work.

    Nothing is shown without a terminal, nor in the first second. A separate thread starts the
    display, so it also appears if nothing is counted or the event loop is blocked.

    Args:
        console: The console.
        action: The name of the action.
        total: The amount of work; None if it is not known yet.
        unit: The unit of the amount; None shows the time alone.
    """

    def __init__(
        self, console: Console, action: str, total: int | None = None, unit: Unit | None = "bytes"
    ) -> None:
        text, left = TextColumn("{task.description}"), TimeRemainingColumn()
        columns: tuple[ProgressColumn, ...] = (SpinnerColumn(), text, TimeElapsedColumn())
        if unit == "bytes":
            columns = (text, BarColumn(), DownloadColumn(), TransferSpeedColumn(), left)
        elif unit == "things":
            columns = (text, BarColumn(), MofNCompleteColumn(), _RateColumn(), left)
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
        if self.terminal:
            if isinstance(each, _Rows):
                self._fit(each)
            self.out.print(each, crop=False)
            return
        with self.out.capture() as captured:
            self.out.print(each)
        lines = captured.get().splitlines()
        self.out.file.writelines(line.rstrip() + "\n" for line in lines)

    def _fit(self, rows: _Rows) -> None:
        """Make a table as narrow as the terminal: some columns give way, or else all of them."""
        widths = [
            max(cell_len(str(cell)) for cell in (column.header, *column.cells))
            for column in rows.columns
        ]
        excess = sum(widths) + len(widths) - 1 - self.out.width
        if excess + len(widths) > 1:
            rows.padding = (0, 1, 0, 0)
        places = {str(column.header): place for place, column in enumerate(rows.columns)}
        flexible = [(places[name], least) for name, least in rows.flexible if name in places]
        for place, least in flexible:
            gives = max(0, min(excess, widths[place] - least))
            widths[place], excess = widths[place] - gives, excess - gives
        for place, column in enumerate(rows.columns):
            column.overflow = "fold"
            if excess > 0 or place in dict(flexible):
                column.width, column.no_wrap = None if excess > 0 else widths[place], False

    @property
    def terminal(self) -> bool:
        """True if people look: then tables fit the terminal, and ids are short."""
        return self.out.is_terminal

    def names(self, ids: Iterable[str], full: bool) -> Mapping[str, str]:
        """Name checkpoints: by short names on a terminal, unless full ids are asked for."""
        known = {each: CheckpointId.parse(each) for each in ids}
        keys = [key for key in known.values() if key is not None]
        short = short_names(keys) if self.terminal and not full else {}
        return {each: short.get(each, each) for each in known}

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

    def meter(self, action: str, total: int | None = None, unit: Unit = "bytes") -> Meter:
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


class _Rows(Table):
    """A table some of whose columns give way first on a narrow terminal."""

    flexible: Sequence[tuple[str, int]]


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    *right: str,
    flexible: Sequence[tuple[str, int]] = (),
) -> Table:
    """Make a table without lines.

    Args:
        headings: The headings of its columns.
        rows: Its cells.
        right: The columns to align to the right.
        flexible: The columns that give way on a narrow terminal in this order, with their least
            widths.
    """
    made = _Rows(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    made.flexible = flexible
    for heading in headings:
        made.add_column(
            heading,
            justify="right" if heading in right else "left",
            no_wrap=True,
            overflow="ignore",
        )
    for row in rows:
        made.add_row(*(each if isinstance(each, Text | Few) else plain(each) for each in row))
    return made


class Few:
    """A cell of items: on a terminal the first that fit, and the number of the others.

    Args:
        items: The items.
    """

    def __init__(self, items: Iterable[str]) -> None:
        self._items = [one_line(each) for each in items]

    def __str__(self) -> str:
        return " ".join(self._items)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(4, cell_len(str(self))), cell_len(str(self)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        shown, left = "", len(self._items)
        for item in self._items:
            longer = f"{shown} {item}" if shown else item
            more = f" +{left - 1}" if left > 1 else ""
            if console.is_terminal and cell_len(longer + more) > options.max_width:
                break
            shown, left = longer, left - 1
        more = f"+{left}" if left else ""
        yield Text(" ".join(filter(None, (shown, more))), no_wrap=True, overflow="ignore")


_COLOURS = {
    "complete": "green", "ok": "green", "stays": "green", "+": "green", "incomplete": "yellow",
    "~": "yellow", "damaged": "bold red", "goes": "red", "-": "red", "pinned": "cyan",
    "final": "blue", "best": "bold magenta",
}  # fmt: skip
"""The colours of words and signs with a meaning; each is a name that the terminal defines."""


def plain(text: object, style: str = "") -> Text:
    """Make a text of one line, whatever characters it has."""
    return Text(one_line(str(text)), style)


def marks(*texts: str) -> Text:
    """Join texts by commas; what precedes the colon of each has the colour of its first word."""
    made = Text()
    for each in texts:
        head, colon, rest = one_line(each).partition(":")
        made.append(", " if made else "")
        made.append(head, _COLOURS.get(head.partition(" ")[0], "")).append(colon + rest)
    return made


def sized(nbytes: int | None) -> str:
    """Describe a size; empty if it is unknown."""
    return "" if nbytes is None else size_text(nbytes)


def signed(sign: str, text: str) -> Text:
    """Make a line with a sign, in the colour of its meaning."""
    return plain(f"{sign} {text}", _COLOURS[sign])


def visible(text: str) -> str:
    """Escape the characters of a text that do not print."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """Escape the characters that do not print, including newlines."""
    return visible(text).replace("\n", "\\n")
