"""Show the progress of saves and loads in a line on the terminal or below a cell. Needs rich.

ckpipe prints nothing by itself: a program that wants the line enters it and adds it to a pipeline.
"""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

from ckpipe.events import (
    BlockUploaded,
    Event,
    Loaded,
    LoadFailed,
    LoadProgress,
    LoadStarted,
    SaveEnded,
    SaveStarted,
    Staged,
)
from ckpipe.types import rate_text, size_text
from ckpipe.version import install_line

try:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"The live line needs rich: {install_line('cli')}", name=error.name
    ) from error

_BAR = 24
_DRAWN_PER_SECOND = 8


@dataclass(slots=True)
class _Work:
    """Progress of a save or load."""

    step: int
    doing: str
    since: float = field(default_factory=time.perf_counter)
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
    """One line with the saves and loads under way and the last that ended, while it is entered.

    A listener for ``pipeline.events.add`` and a context manager, which may serve several
    pipelines. On a terminal it stays below the output of the program, and disappears at the end.
    In a notebook it is drawn in place below the cell, and stays. Elsewhere it shows nothing. A
    thread of its own draws it, so no save waits for the screen.

    Args:
        console: The console to show it on; by default standard error.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._saves: dict[str, _Work] = {}
        self._loads: dict[str, _Work] = {}
        self._last, self._failed, self._saved = "", False, 0
        self._shown = contextlib.ExitStack()
        self._live = Live(
            get_renderable=self._line,
            console=self._console,
            refresh_per_second=_DRAWN_PER_SECOND,
            transient=True,
            auto_refresh=self._console.is_terminal,
        )

    def __call__(self, event: Event) -> None:
        """Record an event; the next drawing of the line shows it."""
        save, load = self._saves.get(event.id), self._loads.get(event.id)
        if isinstance(event, SaveStarted):
            self._saves[event.id] = _Work(event.step, "copying")
        elif isinstance(event, LoadStarted):
            self._loads[event.id] = _Work(event.step, "loading")
        elif isinstance(event, SaveEnded):
            self._saves.pop(event.id, None)
            self._end(event)
        elif isinstance(event, Loaded | LoadFailed):
            self._loads.pop(event.id, None)
            self._failed = isinstance(event, LoadFailed)
            self._last = f"load of step {event.step} failed" if self._failed else str(event)
        elif save is not None and isinstance(event, Staged):
            save.doing = "uploading"
        elif save is not None and isinstance(event, BlockUploaded):
            save.done, save.total = event.bytes_done, event.bytes_total
        elif load is not None and isinstance(event, LoadProgress):
            load.done, load.total = event.bytes_done, event.bytes_total

    def _end(self, event: SaveEnded) -> None:
        self._failed = event.status == "failed"
        self._last = f"step {event.step} {event.status}"
        if event.status == "committed":
            self._saved += 1
            size, seconds = size_text(event.report.bytes), event.report.durable_seconds or 0.0
            self._last = f"saved step {event.step}: {size} in {seconds:.2f} s"

    def _line(self) -> RenderableType:
        grid = Table.grid(padding=(0, 1))
        cells: list[RenderableType] = [Text("ckpipe", style="bold")]
        under_way = [*self._loads.values(), *self._saves.values()]
        if under_way:
            first = under_way[0]
            bar = ProgressBar(first.total or 1, first.done, width=_BAR)
            more = f" and {len(under_way) - 1} more" if len(under_way) > 1 else ""
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
        if self._console.is_jupyter:
            self._shown.enter_context(self._drawn_below_the_cell())
        elif self._console.is_terminal:
            self._shown.enter_context(self._live)
        return self

    def __exit__(self, *exc: object) -> None:
        self._shown.close()

    @contextlib.contextmanager
    def _drawn_below_the_cell(self) -> Iterator[None]:
        """Redraw the line in place if it has changed, in a thread of its own; needs no widgets."""
        from IPython.display import display

        width = self._console.width
        plain = Console(file=io.StringIO(), width=width, color_system=None, force_jupyter=False)

        def drawn() -> dict[str, str]:
            with plain.capture() as capture:
                plain.print(self._line())
            return {"text/plain": capture.get().rstrip()}

        first, over = drawn(), threading.Event()
        output = display(first, raw=True, display_id=True)

        def draw() -> None:
            shown, ended = first, False
            while not ended:
                ended = over.wait(1 / _DRAWN_PER_SECOND)
                if (now := drawn()) != shown:
                    shown = now
                    output.update(now, raw=True)

        drawer = threading.Thread(target=draw, name="ckpipe live line", daemon=True)
        drawer.start()
        yield
        over.set()
        drawer.join()


__all__ = ["LiveLine"]
