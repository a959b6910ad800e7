"""A line with bytes, rate and time left, for what takes longer than a second on a terminal."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

SILENT_SECONDS = 1.0
"""How long an action may take before it shows how far it is."""


class Meter:
    """Shows how far an action is; silent where nobody looks on, and at first.

    Args:
        console: Where to show it; nothing is shown unless it is a terminal.
        action: What is done.
        total: How many bytes it will take; None if that is not known yet.
    """

    def __init__(self, console: Console, action: str, total: int | None) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task(action, total=total)
        self._silent = not console.is_terminal
        self._since = time.monotonic()
        self._shown = False

    def expect(self, nbytes: int) -> None:
        """Says how many more bytes there will be than was known."""
        total = self._progress.tasks[0].total or 0
        self._progress.update(self._task, total=total + nbytes)

    def advance(self, nbytes: int) -> None:
        """Says that so many more bytes are done."""
        self._progress.update(self._task, advance=nbytes)
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
