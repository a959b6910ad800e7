"""The record of one save and its blocks, as the stages see them that bring it to the store.

Nothing here refers to the trainer's objects or to torch, so these stages run as well in a process
that has neither. :class:`ckpipe.save.save.Save` is the record of a save in the trainer, and
:mod:`ckpipe._worker.server` has the one in the worker.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from ckpipe import threads
from ckpipe.format.checksum import BlockCuts, Parts, combine, crc32c
from ckpipe.format.data_file import BlockRange, DataFiles
from ckpipe.format.keys import Json
from ckpipe.format.manifest import Structure
from ckpipe.reports import SaveReport
from ckpipe.save.timings import StageTimings
from ckpipe.types import CheckpointId, CheckpointInfo

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class BlockSums:
    """The checksums of one block, one for each piece that :class:`BlockCuts` names.

    Most are known since the block was copied. Those of bytes that came from a device, were copied
    by torch or joined from several tensors are computed by the serialize stage.
    """

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: NDArray[np.int64] | None = None

    def learn(self, count: int, slots: NDArray[np.int64], values: NDArray[np.uint32]) -> None:
        """Takes some that are known since the block was copied.

        Args:
            count: How many checksums the block has.
            slots: Which of them are known.
            values: What they are.
        """
        import numpy as np

        if self._values is None:
            self._values = np.full(count, _UNKNOWN, np.int64)
        self._values[slots] = values

    @property
    def all_known(self) -> bool:
        """Tell whether there is nothing to compute."""
        return self._values is not None and _UNKNOWN not in self._values

    @property
    def values(self) -> list[int]:
        """All of them, in the order of the cuts; once all are known."""
        assert self._values is not None
        values: list[int] = self._values.tolist()
        return values

    def to_bytes(self) -> bytes:
        """All of them, for another process of this machine; empty if one is not known."""
        if self._values is None or not self.all_known:
            return b""
        return self._values.astype(_SENT).tobytes()

    def take_bytes(self, sent: bytes) -> None:
        """Takes what :meth:`to_bytes` of another process returned."""
        import numpy as np

        if sent:
            self._values = np.frombuffer(sent, _SENT).astype(np.int64)

    def unknown(self, data: memoryview, cuts: BlockCuts) -> Parts:
        """The parts of a block whose checksums are still to be computed."""
        import numpy as np

        if self._values is None:
            self._values = np.full(len(cuts.begins), _UNKNOWN, np.int64)
        wanted = self._values == _UNKNOWN
        begins, ends = (np.asarray(each, np.int64)[wanted] for each in (cuts.begins, cuts.ends))
        return Parts(data, begins.tolist(), ends.tolist())

    def complete(self, values: list[int]) -> None:
        """Takes those that were not known, in their order."""
        assert self._values is not None
        self._values[self._values == _UNKNOWN] = values


_UNKNOWN = -1
_SENT = "u4"


@dataclass(eq=False)
class FilledBlock(abc.ABC):
    """A block of a data file, in host memory.

    Args:
        plan: The place where it belongs.
        data: Its bytes.
        sums: Its checksums.
    """

    plan: BlockRange
    data: memoryview
    sums: BlockSums = field(default_factory=BlockSums, init=False)

    @abc.abstractmethod
    def release(self) -> None:
        """Gives its memory back; the store has its bytes."""


@dataclass(frozen=True, slots=True)
class ManifestFields:
    """The fields of a manifest besides the places of bytes.

    Args:
        structure: What the state looks like; the same object in every save of one structure.
        values: The inline values, encoded.
        started: When the save began, ISO 8601 in UTC.
        writer: Versions of ckpipe, torch and Python, and the class of the planner.
        metadata: What the user gave to ``save``.
        metrics: What the user gave to ``save``; non-finite floats encoded.
        final: Whether it is the run's final checkpoint.
    """

    structure: Structure
    values: tuple[Json, ...]
    started: str
    writer: Mapping[str, str]
    metadata: Mapping[str, Json]
    metrics: Mapping[str, Json]
    final: bool


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
        self.clock = StageTimings(began)
        self.files: DataFiles | None = None
        """What is to be stored; None until that is planned."""
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
        self.may_count = False
        """Whether its commit was begun and may have landed: what is stored must stay then."""
        self.again = False
        """Whether a worker process died with it: its data files, and its commit, may be there."""
        self.unsettled: CheckpointInfo | None = None
        """The checkpoint, once this rank has committed and while others may not have."""

    @property
    def name(self) -> str:
        """The exact name of the checkpoint."""
        return str(self.id)

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

    @abc.abstractmethod
    def contents(self) -> ManifestFields:
        """The fields of the manifest; called in a worker thread once all blocks are there."""

    @abc.abstractmethod
    def settle(self, info: CheckpointInfo) -> None:
        """Tell all waiters that this rank's part is durable."""


_ON_LOOP_BYTES, _ON_LOOP_SPANS = 1 << 18, 256


async def block_checksum(files: DataFiles, filled: FilledBlock) -> int:
    """The CRC-32C of a whole block whose pieces have theirs."""
    spans = filled.plan.spans
    between = filled.plan.nbytes - sum(span.hi - span.lo for span in spans)
    if between > _ON_LOOP_BYTES or len(spans) > _ON_LOOP_SPANS:
        return await threads.run_sync(_joined, files, filled)
    return _joined(files, filled)


def _joined(files: DataFiles, filled: FilledBlock) -> int:
    view, cuts, at, total = filled.data, files.cuts(filled.plan), 0, 0
    for begin, end, value in zip(cuts.begins, cuts.ends, filled.sums.values, strict=True):
        if begin < at:  # no plan of ours; the bytes themselves tell in any case
            return crc32c(view)
        if begin > at:
            total = crc32c(view[at:begin], total)
        total, at = combine(total, value, end - begin), end
    return crc32c(view[at:], total) if at < len(view) else total
