"""What a terminal shows of what takes longer than a second: how far it is, rate and time left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
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
from rich.text import Text

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
    """Shows how far an action is; silent where nobody looks on, and at first.

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


class Share:
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


class Patience:
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
