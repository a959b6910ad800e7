"""Note when the stages and blocks of one save begin, work and end.

Times are those of ``time.perf_counter``, which on Linux all processes of a machine share: the
trainer takes over what its worker process has noted (:meth:`StageTimings.to_data`,
:meth:`StageTimings.absorb`).
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ckpipe.format.data_file import BlockRange
from ckpipe.reports import BlockReport, Span, StageReport, busy_seconds

_UNSET = -1.0
_SIZE, _COPIED, _SUMMED, _UPLOADED, _COPIER, _LANE = 0, 1, 3, 5, 7, 8
_NEW_ROW = (_UNSET,) * 9


class StageTimings:
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
        # By file and offset: size, three pairs of times, and the numbers of copier and lane.
        self._rows: dict[tuple[int, int], array[float]] = {}
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

    def copied(self, plan: BlockRange, began: float, ended: float, thread: int) -> None:
        """Notes when a block was filled, and by which thread."""
        row = self._row(plan)
        row[_COPIED], row[_COPIED + 1] = began, ended
        row[_COPIER] = self._copiers.setdefault(thread, len(self._copiers))

    def summed(self, plan: BlockRange, began: float, ended: float) -> None:
        """Notes when the checksums of a block were computed."""
        row = self._row(plan)
        row[_SUMMED], row[_SUMMED + 1] = began, ended

    @contextmanager
    def uploading(self, plans: Sequence[BlockRange], lane: int) -> Iterator[None]:
        """Notes when blocks are written to the store, and by which lane.

        Of those that are written together each is taken to have its part of the time.
        """
        began, nbytes = time.perf_counter(), sum(plan.nbytes for plan in plans)
        with self.timing("upload", nbytes):
            yield
        pace = (time.perf_counter() - began) / nbytes
        for plan in plans:
            row, ended = self._row(plan), began + plan.nbytes * pace
            row[_UPLOADED], row[_UPLOADED + 1], row[_LANE] = began, ended, lane
            began = ended

    def _row(self, plan: BlockRange) -> array[float]:
        key = plan.file, plan.offset
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = array("d", (plan.nbytes, *_NEW_ROW[1:]))
        return row

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
            spans = (self._span(row, _COPIED) for row in list(self._rows.values()))
            busy = busy_seconds(span for span in spans if span is not None)
        waited = max(0.0, seconds - busy)
        return StageReport(seconds, self._bytes.get(stage, 0), began - self.zero, waited)

    def blocks(self) -> list[BlockReport]:
        """The way of each block so far, in the order in which they were filled."""
        return [self._block(*key, row) for key, row in list(self._rows.items())]

    def _block(self, file: int, offset: int, row: array[float]) -> BlockReport:
        copied, summed, uploaded = (self._span(row, at) for at in (_COPIED, _SUMMED, _UPLOADED))
        copier, lane = (max(0, int(row[at])) for at in (_COPIER, _LANE))
        return BlockReport(file, offset, int(row[_SIZE]), copied, summed, uploaded, copier, lane)

    def _span(self, row: array[float], at: int) -> Span | None:
        began, ended = row[at : at + 2]
        return None if began == _UNSET else (began - self.zero, ended - self.zero)

    def to_data(self) -> dict[str, Any]:
        """All that was noted, as plain data, for another process of this machine."""
        return {
            "zero": self.zero,
            "copied_bytes": self.copied_bytes,
            "began": self._began,
            "ended": self._ended,
            "bytes": self._bytes,
            "busy": self._busy,
            "rows": [(key, row.tolist()) for key, row in self._rows.items()],
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
        for (file, offset), found in data["rows"]:
            row = self._rows.setdefault((file, offset), array("d", _NEW_ROW))
            for at, value in enumerate(found):
                if value != _UNSET:
                    row[at] = value
