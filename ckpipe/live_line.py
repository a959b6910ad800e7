"""A line on the terminal that shows how far saves are, for interactive runs. Needs rich.

Nothing of ckpipe prints by itself: whoever wants the line enters it and adds it to a pipeline.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from ckpipe.events import BlockUploaded, Event, SaveEnded, SaveStarted, Staged
from ckpipe.reports import rate_text, size_text

try:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "The live line needs rich: pip install 'ckpipe[cli]'", name=error.name
    ) from error

_BAR = 24


@dataclass(slots=True)
class _Save:
    """A save under way."""

    step: int
    since: float = field(default_factory=time.perf_counter)
    doing: str = "copying"
    done: int = 0
    total: int | None = None

    def text(self) -> str:
        if self.total is None:
            return self.doing
        seconds = max(1e-6, time.perf_counter() - self.since)
        rate = self.done / seconds
        left = f", {(self.total - self.done) / rate:.0f} s left" if rate else ""
        share = f"{size_text(self.done)} of {size_text(self.total)}"
        return f"{self.doing} {share}, {rate_text(self.done, seconds)}{left}"


class LiveLine:
    """One line with the saves under way and the last one that ended, while it is entered.

    A listener for ``pipeline.events.add`` and a context manager, which may serve several
    pipelines. Where standard error is no terminal it shows nothing. A thread of its own draws
    the line, so that no save waits for the terminal; what the program prints appears above it.

    Args:
        console: Where to show it; by default standard error.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._saves: dict[str, _Save] = {}
        self._last, self._failed, self._saved = "", False, 0
        self._live = Live(
            get_renderable=self._line,
            console=self._console,
            refresh_per_second=8,
            transient=True,
            auto_refresh=self._console.is_terminal,
        )

    def __call__(self, event: Event) -> None:
        """Takes note of an event; the line shows it when it is drawn next."""
        save = self._saves.get(event.id)
        if isinstance(event, SaveStarted):
            self._saves[event.id] = _Save(event.step)
        elif isinstance(event, SaveEnded):
            self._saves.pop(event.id, None)
            self._end(event)
        elif save is not None and isinstance(event, Staged):
            save.doing = "uploading"
        elif save is not None and isinstance(event, BlockUploaded):
            save.done, save.total = event.bytes_done, event.bytes_total

    def _end(self, event: SaveEnded) -> None:
        report = event.report
        self._failed = event.status == "failed"
        self._last = f"step {event.step} {event.status}"
        if event.status == "committed":
            self._saved += 1
            durable = report.durable_seconds or 0.0
            self._last = f"step {event.step}: {size_text(report.bytes)} durable in {durable:.2f} s"

    def _line(self) -> RenderableType:
        grid = Table.grid(padding=(0, 1))
        cells: list[RenderableType] = [Text("ckpipe", style="bold")]
        saves = list(self._saves.values())
        if saves:
            first = saves[0]
            bar = ProgressBar(first.total or 1, first.done, width=_BAR)
            more = f" and {len(saves) - 1} more" if len(saves) > 1 else ""
            cells += [Text(f"step {first.step}"), bar, Text(first.text() + more)]
        else:
            style = "red" if self._failed else ""
            cells += [
                Text(self._last or "no save yet", style=style),
                Text(f"({self._saved} saved)"),
            ]
        grid.add_row(*cells)
        return grid

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()


__all__ = ["LiveLine"]
