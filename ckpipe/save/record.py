"""The record of one save and its blocks, for the stages that bring it to the store.

The record references neither the trainer's objects nor torch, so these stages also run in a process
without them. :class:`ckpipe.save.save.Save` is the record of a save in the trainer; the worker
makes one from the trainer's message.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio

from ckpipe.errors import CkpipeError
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

    from ckpipe.save.links import CommittedFiles

UNKNOWN = -1
"""The value of a checksum that is not computed yet."""


@dataclass(eq=False)
class FilledBlock:
    """A block of a data file, in host memory.

    Args:
        save: The save.
        plan: Its range in the data file.
        data: Its bytes.
        sums: The checksum of each range of :class:`BlockCuts`. The copy has computed most of them.
            A checksum is ``UNKNOWN`` until the serialize stage computes it if its bytes came from a
            device, were copied by torch or were joined from several tensors.
        rests: True if its bytes are those of its place in the base of the save.
        users: Number of users: the upload, the count of NaN, and each view of the staged state.
    """

    save: SaveRecord
    plan: BlockRange
    data: memoryview
    sums: NDArray[np.int64]
    rests: bool = field(default=False, init=False)
    users: int = field(default=1, init=False)

    def release(self) -> None:
        """End the use by one user; its memory is free once all users have released it."""
        self.users -= 1
        if not self.users:
            self.save.free(self)


class SaveRecord(abc.ABC):
    """One save on its way to the store; used on one event loop.

    Args:
        id: The checkpoint.
        rank: The rank.
        began: Time of the call of ``save``, by ``time.perf_counter``.
        token: Identifies its manifest, no matter which process has committed it.
    """

    def __init__(self, id: CheckpointId, rank: int, began: float, token: str) -> None:
        self.id, self.rank, self.began, self.token = id, rank, began, token
        self.name = str(id)
        """The exact name of the checkpoint."""
        self.status: SaveStatus = "queued"
        self.clock = StageTimings(began)
        self.files: DataFiles | None = None
        """The data files; None until they are planned."""
        self.sealed: tuple[Structure, RankManifest] | None = None
        """Its manifest, from a trainer in another process; None until all blocks have arrived."""
        self.copied = anyio.Event()
        """Set when every block is filled, and no tensor has changed while it was copied."""
        self.replanned = False
        """True if a plan had to be made."""
        self.captured_seconds: float | None = None
        self.staged_seconds: float | None = None
        self.durable_seconds: float | None = None
        self.checksums: list[int] = []
        """The checksum of every mebibyte of every entry; complete before the files are durable."""
        self.base: CommittedFiles | None = None
        """The committed files to which it may link; None if it writes all."""
        self.may_link = False
        """True if it links to the base; else blocks that rest are only digested."""
        self.link_number = 0
        """The number of the save among those of its process."""
        self.digests: dict[tuple[int, int], str] = {}
        """The digests of blocks, by file and offset."""
        self.linked: set[int] = set()
        """The numbers of files that are linked."""
        self.nan: tuple[tuple[int, int], ...] = ()
        """The entries with NaN and their counts; complete like the checksums."""
        self.differs: CkpipeError | None = None
        """The error of copies that differ, to be raised once all stages have ended."""
        self.stored: list[str] = []
        """Keys of its data files that are complete, or may be."""
        self.taken = False
        """True if another writer uses its name: none of these objects is surely its own."""
        self.commit_may_exist = False
        """True if its commit was begun and may have landed: its data files must stay then."""
        self.redelivered = False
        """True if a worker process died with it: its data files and its commit may exist."""
        self.unsettled: CheckpointInfo | None = None
        """The checkpoint, once this rank has committed and while others may not have."""
        self.committed: Future[CheckpointInfo] = Future()

    @property
    def where(self) -> tuple[str, int, int]:
        """Its name, step and rank: the first fields of all its events."""
        return self.name, self.id.step, self.rank

    @property
    def elapsed(self) -> float:
        """Seconds since the call of ``save``."""
        return time.perf_counter() - self.began

    def report(self) -> SaveReport:
        """Make the report of the save until now; for any thread."""
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
            linked_bytes=self.clock.linked_bytes,
        )

    def contents(self) -> tuple[Structure, RankManifest]:
        """Return the structure and the manifest, still without data files and checksums.

        Called in a worker thread once all blocks have arrived. Saves of one structure share the
        structure object.
        """
        assert self.sealed is not None
        return self.sealed

    def resting_digest(self, plan: BlockRange) -> str | None:
        """Return the digest with which a block rests; None if it is written in any case."""
        if self.base is None or self.files is None or not self.may_link:
            return None
        return self.base.digest(self.files.rows[plan.file], plan.offset)

    @property
    def waits(self) -> bool:
        """True if its copy waits until the memory of earlier blocks is given back."""
        return False

    @abc.abstractmethod
    def free(self, filled: Any) -> None:
        """Give back the memory of one of its blocks that is no longer in use."""

    def settle(self, info: CheckpointInfo) -> None:
        """Tell all waiters that this rank's files are durable."""
        self.status = "committed"
        resolve(self.committed, info)


def resolve(future: Future[Any], value: Any) -> None:
    """Set the value of a future unless it is done; for any thread."""
    with contextlib.suppress(InvalidStateError):
        future.set_result(value)


def fail(future: Future[Any], error: BaseException) -> None:
    """Set the error of a future unless it is done; for any thread."""
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
    """Records the times of stages and blocks on one thread; any thread may make reports.

    Times are those of ``time.perf_counter``, which on Linux all processes of a machine share: the
    trainer takes over the times of its worker process.

    Args:
        zero: Time of the call of ``save``, the same for all processes that record times of it.
    """

    def __init__(self, zero: float) -> None:
        self._zero = zero
        self.copied_bytes = 0
        """Bytes of the checkpoint that are redundant copies, as far as this rank has seen."""
        self.linked_bytes = 0
        """Bytes of this rank's data files that were linked."""
        self._stages: dict[str, _StageTimes] = {}
        self._blocks: dict[tuple[int, int], dict[str, Any]] = {}
        """The fields of a :class:`BlockReport` that are known, by file and offset."""
        self._copiers: dict[int, int] = {}

    @contextlib.contextmanager
    def timing(self, stage: str, nbytes: int = 0) -> Iterator[None]:
        """Record the work of one worker of a stage, and the bytes that it has moved at its end."""
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
        """Record the time in which a block was filled, and its thread."""
        copier = self._copiers.setdefault(thread, len(self._copiers))
        self._share("copied", [plan], began, ended, copier=copier)

    def summed(self, plans: Sequence[BlockRange], began: float, ended: float) -> None:
        """Record the time in which the checksums of blocks were computed."""
        self._share("summed", plans, began, ended)

    def uploaded(self, plans: Sequence[BlockRange], began: float, ended: float, lane: int) -> None:
        """Record the time in which blocks were written to the store, and their lane."""
        self._share("uploaded", plans, began, ended, lane=lane)

    def _share(
        self, field: str, plans: Sequence[BlockRange], began: float, ended: float, **by: int
    ) -> None:
        """Divide the time of blocks that were handled together among them, by their sizes."""
        pace = (ended - began) / max(1, sum(plan.nbytes for plan in plans))
        for plan in plans:
            ended = began + plan.nbytes * pace
            span = began - self._zero, ended - self._zero
            self._note((plan.file, plan.offset), {"bytes": plan.nbytes, field: span, **by})
            began = ended

    def stages(self) -> dict[str, StageReport]:
        """Make the report of each stage that has begun."""
        return {stage: self._report(stage, each) for stage, each in list(self._stages.items())}

    def _report(self, stage: str, times: _StageTimes) -> StageReport:
        ended, busy = times.ended, times.busy
        if times.workers:
            ended = time.perf_counter()
            busy += ended - times.since
        if stage == "stage" and self._blocks:
            # The copy as a whole also waits for memory; the times of its blocks are its work.
            blocks = list(self._blocks.values())
            busy = busy_seconds(block["copied"] for block in blocks if "copied" in block)
        seconds = ended - times.began
        return StageReport(
            seconds, times.bytes, times.began - self._zero, waited=max(0.0, seconds - busy)
        )

    def blocks(self) -> list[BlockReport]:
        """Make the report of each block so far, in the order in which they were filled."""
        return [BlockReport(*place, **block) for place, block in list(self._blocks.items())]

    def absorb(self, other: StageTimings) -> None:
        """Merge the times of another process for the same save; its stages win."""
        self.copied_bytes, self.linked_bytes = other.copied_bytes, other.linked_bytes
        self._stages |= other._stages
        for place, found in other._blocks.items():
            self._note(place, found)

    def _note(self, place: tuple[int, int], found: dict[str, Any]) -> None:
        # The dict is replaced as a whole, since another thread may be making a report.
        self._blocks[place] = self._blocks.get(place, {}) | found
