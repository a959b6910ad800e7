"""The record of one save and its blocks, as the stages see them that bring it to the store.

Nothing here refers to the trainer's objects or to torch, so these stages run as well in a process
that has neither. :class:`ckpipe.save.save.Save` is the record of a save in the trainer; the worker
makes one from what the trainer tells it.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio

from ckpipe.format.data_file import BlockRange, DataFiles
from ckpipe.format.manifest import RankManifest, Structure
from ckpipe.types import (
    BlockReport,
    CheckpointId,
    CheckpointInfo,
    SaveReport,
    SaveStatus,
    StageReport,
    busy_seconds,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

UNKNOWN = -1
"""Stands for a checksum that is still to be computed."""


@dataclass(eq=False)
class FilledBlock:
    """A block of a data file, in host memory.

    Args:
        save: The save.
        plan: The place where it belongs.
        data: Its bytes.
        sums: The checksum of each piece that :class:`BlockCuts` names. Most are known since the
            block was copied. Those of bytes that came from a device, were copied by torch or joined
            from several tensors are ``UNKNOWN`` until the serialize stage computes them.
    """

    save: SaveRecord
    plan: BlockRange
    data: memoryview
    sums: NDArray[np.int64]

    def release(self) -> None:
        """Give its memory back; the store has its bytes."""
        self.save.free(self)


class SaveRecord(abc.ABC):
    """One save on its way to the store; used on one event loop.

    Args:
        id: The checkpoint.
        rank: The rank.
        began: When ``save`` was called, by ``time.perf_counter``.
        token: By which its manifest is known again, whichever process has committed it.
    """

    def __init__(self, id: CheckpointId, rank: int, began: float, token: str) -> None:
        self.id, self.rank, self.began, self.token = id, rank, began, token
        self.name = str(id)
        """The exact name of the checkpoint."""
        self.status: SaveStatus = "queued"
        self.clock = StageTimings(began)
        self.files: DataFiles | None = None
        """What is to be stored; None until that is planned."""
        self.sealed: tuple[Structure, RankManifest] | None = None
        """Its manifest, from a trainer in another process; None until all blocks are there."""
        self.copied = anyio.Event()
        """Set when every block is filled, and nothing has changed while it was copied."""
        self.replanned = False
        """Whether a plan had to be made."""
        self.captured_seconds: float | None = None
        self.staged_seconds: float | None = None
        self.durable_seconds: float | None = None
        self.checksums: list[int] = []
        """The checksum of every mebibyte of every entry; there before the files are durable."""
        self.stored: list[str] = []
        """Keys of its data files that are complete, or may be."""
        self.commit_may_exist = False
        """Whether its commit was begun and may have landed: what is stored must stay then."""
        self.again = False
        """Whether a worker process died with it: its data files, and its commit, may be there."""
        self.unsettled: CheckpointInfo | None = None
        """The checkpoint, once this rank has committed and while others may not have."""
        self.committed: Future[CheckpointInfo] = Future()

    @property
    def where(self) -> tuple[str, int, int]:
        """The name, the step and the rank, with which all of its events begin."""
        return self.name, self.id.step, self.rank

    @property
    def elapsed(self) -> float:
        """Seconds since ``save`` was called."""
        return time.perf_counter() - self.began

    def report(self) -> SaveReport:
        """The report of how the save has spent its time until now; for any thread."""
        files = self.files
        return SaveReport(
            stages=self.clock.stages(),
            staged_seconds=self.staged_seconds,
            durable_seconds=self.durable_seconds,
            bytes=files.size if files else 0,
            tensors=len(files.layout.chunks) if files else 0,
            planned=self.replanned,
            captured_seconds=self.captured_seconds,
            blocks=self.clock.blocks(),
            copied_bytes=self.clock.copied_bytes,
        )

    def contents(self) -> tuple[Structure, RankManifest]:
        """The structure and the manifest, but for data files and checksums.

        Called in a worker thread once all blocks are there. Saves of one structure have the same
        object of it.
        """
        assert self.sealed is not None
        return self.sealed

    @abc.abstractmethod
    def free(self, filled: Any) -> None:
        """Give back the memory of a block of it, a :class:`FilledBlock`, that is in use no more."""

    def settle(self, info: CheckpointInfo) -> None:
        """Tell all waiters that this rank's part is durable."""
        self.status = "committed"
        resolve(self.committed, info)


def resolve(future: Future[Any], value: Any) -> None:
    """Give a future its value, unless it is done; for any thread."""
    with contextlib.suppress(InvalidStateError):
        future.set_result(value)


def fail(future: Future[Any], error: BaseException) -> None:
    """Give a future its error, unless it is done; for any thread."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)


@dataclass(slots=True)
class _StageTimes:
    began: float
    ended: float
    bytes: int = 0
    busy: float = 0.0
    since: float = 0.0
    workers: int = 0


class StageTimings:
    """Notes when stages begin, work and end, on one thread; reports are made on any.

    Times are those of ``time.perf_counter``, which on Linux all processes of a machine share: the
    trainer takes over what its worker process has noted.

    Args:
        zero: When the save was called, the same for all processes that note something of it.
    """

    def __init__(self, zero: float) -> None:
        self._zero = zero
        self.copied_bytes = 0
        """What this rank has found in the checkpoint that several ranks wrote alike."""
        self._stages: dict[str, _StageTimes] = {}
        self._blocks: dict[tuple[int, int], dict[str, Any]] = {}
        """The fields of a :class:`BlockReport` that are known, by file and offset."""
        self._copiers: dict[int, int] = {}

    @contextlib.contextmanager
    def timing(self, stage: str, nbytes: int = 0) -> Iterator[None]:
        """Note that a worker of a stage is at work, and has moved so many bytes at its end."""
        now = time.perf_counter()
        times = self._stages.setdefault(stage, _StageTimes(now, now))
        if not times.workers:
            times.since = now
        times.workers += 1
        try:
            yield
        finally:
            times.ended = time.perf_counter()
            times.bytes += nbytes
            times.workers -= 1
            if not times.workers:
                times.busy += times.ended - times.since

    def copied(self, plan: BlockRange, began: float, ended: float, thread: int) -> None:
        """Note when a block was filled, and by which thread."""
        copier = self._copiers.setdefault(thread, len(self._copiers))
        self._share("copied", [plan], began, ended, copier=copier)

    def summed(self, plans: Sequence[BlockRange], began: float, ended: float) -> None:
        """Note when the checksums of blocks were computed."""
        self._share("summed", plans, began, ended)

    def uploaded(self, plans: Sequence[BlockRange], began: float, ended: float, lane: int) -> None:
        """Note when blocks were written to the store, and by which lane."""
        self._share("uploaded", plans, began, ended, lane=lane)

    def _share(
        self, field: str, plans: Sequence[BlockRange], began: float, ended: float, **by: int
    ) -> None:
        """Note for each of blocks that were handled together its part of the time, by its size."""
        pace = (ended - began) / max(1, sum(plan.nbytes for plan in plans))
        for plan in plans:
            ended = began + plan.nbytes * pace
            span = began - self._zero, ended - self._zero
            self._note((plan.file, plan.offset), {"bytes": plan.nbytes, field: span, **by})
            began = ended

    def stages(self) -> dict[str, StageReport]:
        """The report of each stage that has begun."""
        return {stage: self._report(stage, each) for stage, each in list(self._stages.items())}

    def _report(self, stage: str, times: _StageTimes) -> StageReport:
        ended, busy = times.ended, times.busy
        if times.workers:
            ended = time.perf_counter()
            busy += ended - times.since
        if stage == "stage" and self._blocks:
            # The copy as a whole also waits for memory; its blocks tell when it was at work.
            blocks = list(self._blocks.values())
            busy = busy_seconds(block["copied"] for block in blocks if "copied" in block)
        seconds = ended - times.began
        return StageReport(
            seconds, times.bytes, times.began - self._zero, waited=max(0.0, seconds - busy)
        )

    def blocks(self) -> list[BlockReport]:
        """The way of each block so far, in the order in which they were filled."""
        return [BlockReport(*place, **block) for place, block in list(self._blocks.items())]

    def absorb(self, other: StageTimings) -> None:
        """Take over what another process has noted of the same save; its stages win."""
        self.copied_bytes = other.copied_bytes
        self._stages |= other._stages
        for place, found in other._blocks.items():
            self._note(place, found)

    def _note(self, place: tuple[int, int], found: dict[str, Any]) -> None:
        # Replaced as a whole: another thread may be making a report.
        self._blocks[place] = self._blocks.get(place, {}) | found
