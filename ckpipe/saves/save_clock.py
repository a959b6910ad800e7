"""When the stages of one save are at work, and what becomes of each of its blocks.

Times are those of ``time.perf_counter``, which on Linux all processes of a machine share: what one
process has noted, another can take over (:meth:`StageClock.to_data`, :meth:`StageClock.absorb`).
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ckpipe.format.data_file import BlockPlace
from ckpipe.reports import BlockReport, Span, StageReport, busy_seconds

_KINDS = ("copied", "summed", "uploaded")
_WIDTH = 2 * len(_KINDS)
_UNSET = -1.0


class StageClock:
    """Notes when stages begin, work and end, on one thread; reports are made on any.

    Args:
        zero: When the save was called, by ``time.perf_counter``.
    """

    def __init__(self, zero: float) -> None:
        self.zero = zero
        self.copied_bytes = 0
        """What this rank has found in the checkpoint that several ranks wrote alike."""
        self._began: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self._bytes: dict[str, int] = {}
        self._busy: dict[str, float] = {}
        self._workers: dict[str, int] = {}
        self._since: dict[str, float] = {}
        # A row of numbers for each block: 88 bytes, so that a terabyte costs a few megabytes.
        self._rows: dict[tuple[int, int], int] = {}
        self._sizes = array("q")
        self._times = array("d")
        self._places = array("h")
        self._copiers: dict[int, int] = {}

    @contextmanager
    def timing(self, stage: str, nbytes: int = 0) -> Iterator[None]:
        """Notes that a worker of a stage is at work, and has moved so many bytes at its end."""
        now = time.perf_counter()
        self._began.setdefault(stage, now)
        self._ended[stage] = now
        if not self._workers.get(stage):
            self._since[stage] = now
        self._workers[stage] = self._workers.get(stage, 0) + 1
        try:
            yield
        finally:
            now = time.perf_counter()
            self._ended[stage] = now
            self._workers[stage] -= 1
            if not self._workers[stage]:
                self._busy[stage] = self._busy.get(stage, 0.0) + now - self._since[stage]
            self._bytes[stage] = self._bytes.get(stage, 0) + nbytes

    def worked(self, stage: str, began: float, ended: float) -> None:
        """Notes that a worker of a stage was at work, when none else of it was."""
        self._began.setdefault(stage, began)
        self._ended[stage] = ended
        self._busy[stage] = self._busy.get(stage, 0.0) + ended - began
        self._bytes.setdefault(stage, 0)

    def copied(self, plan: BlockPlace, began: float, ended: float, thread: int) -> None:
        """Notes when a block was filled, and by which thread."""
        row = self._row((plan.file, plan.offset), plan.nbytes)
        self._set(row, "copied", began, ended)
        self._places[2 * row] = self._copiers.setdefault(thread, len(self._copiers))

    def summed(self, plan: BlockPlace, began: float, ended: float) -> None:
        """Notes when the checksums of a block were computed."""
        self._set(self._row((plan.file, plan.offset), plan.nbytes), "summed", began, ended)

    @contextmanager
    def uploading(self, plans: Sequence[BlockPlace], lane: int) -> Iterator[None]:
        """Notes when blocks are written to the store, and by which lane.

        Of those that are written together each is taken to have its part of the time.
        """
        began, nbytes = time.perf_counter(), sum(plan.nbytes for plan in plans)
        with self.timing("upload", nbytes):
            yield
        pace = (time.perf_counter() - began) / nbytes
        for plan in plans:
            row = self._row((plan.file, plan.offset), plan.nbytes)
            ended = began + plan.nbytes * pace
            self._set(row, "uploaded", began, ended)
            self._places[2 * row + 1], began = lane, ended

    def _row(self, key: tuple[int, int], nbytes: int) -> int:
        """The row of a block, given its file and its offset there."""
        row = self._rows.get(key)
        if row is None:
            row = len(self._rows)
            self._sizes.append(nbytes)
            self._times.extend([_UNSET] * _WIDTH)
            self._places.extend((0, 0))
            self._rows[key] = row  # last, since reports are made on other threads
        return row

    def _set(self, row: int, kind: str, began: float, ended: float) -> None:
        at = _WIDTH * row + 2 * _KINDS.index(kind)
        self._times[at], self._times[at + 1] = began, ended

    def _span(self, row: int, kind: int) -> Span | None:
        at = _WIDTH * row + 2 * kind
        began, ended = self._times[at : at + 2]
        return None if began == _UNSET else (began - self.zero, ended - self.zero)

    def stages(self) -> dict[str, StageReport]:
        """The report of each stage that has begun."""
        return {stage: self._stage(stage, began) for stage, began in list(self._began.items())}

    def _stage(self, stage: str, began: float) -> StageReport:
        now = time.perf_counter()
        at_work = bool(self._workers.get(stage))
        seconds = (now if at_work else self._ended[stage]) - began
        busy = self._busy.get(stage, 0.0) + (now - self._since[stage] if at_work else 0.0)
        if stage == "stage" and self._rows:
            # The copy as a whole also waits for memory; its blocks tell when it was at work.
            spans = (self._span(row, 0) for row in list(self._rows.values()))
            busy = busy_seconds(span for span in spans if span is not None)
        waited = max(0.0, seconds - busy)
        return StageReport(seconds, self._bytes.get(stage, 0), began - self.zero, waited)

    def blocks(self) -> list[BlockReport]:
        """The way of each block so far, in the order in which they were filled."""
        return [self._block(*key, row) for key, row in list(self._rows.items())]

    def _block(self, file: int, offset: int, row: int) -> BlockReport:
        copied, summed, uploaded = (self._span(row, kind) for kind in range(len(_KINDS)))
        copier, lane = self._places[2 * row : 2 * row + 2]
        return BlockReport(file, offset, self._sizes[row], copied, summed, uploaded, copier, lane)

    def to_data(self) -> dict[str, Any]:
        """All that was noted, as plain JSON, for another process of this machine."""
        return {
            "zero": self.zero,
            "copied_bytes": self.copied_bytes,
            "began": self._began,
            "ended": self._ended,
            "bytes": self._bytes,
            "busy": self._busy,
            "rows": [list(key) for key in self._rows],
            "sizes": self._sizes.tolist(),
            "times": self._times.tolist(),
            "places": self._places.tolist(),
        }

    def absorb(self, data: dict[str, Any]) -> None:
        """Takes over what another process has noted of the same save; its stages win.

        Args:
            data: What :meth:`to_data` of the other clock returned.
        """
        self.zero = min(self.zero, data["zero"])
        self.copied_bytes = data["copied_bytes"]
        self._began.update(data["began"])
        self._ended.update(data["ended"])
        self._busy.update(data["busy"])
        self._bytes.update(data["bytes"])
        for number, (file, offset) in enumerate(data["rows"]):
            row = self._row((file, offset), data["sizes"][number])
            times = data["times"][_WIDTH * number : _WIDTH * (number + 1)]
            for at, value in enumerate(times):
                if value != _UNSET:
                    self._times[_WIDTH * row + at] = value
            for at in (0, 1):
                place = data["places"][2 * number + at]
                self._places[2 * row + at] = max(self._places[2 * row + at], place)


__all__ = ["StageClock"]
