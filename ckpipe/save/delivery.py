"""A save from its copy on, as the stages see it that bring it to the store, and its timings.

Nothing here refers to the trainer's objects or to torch, so these stages run as well in a process
that has neither. Times are those of ``time.perf_counter``, which on Linux all processes of a
machine share: what one process has noted, another can take over (:meth:`StageTimings.to_data`,
:meth:`StageTimings.absorb`).

The checksums of a block are computed once for the two stages that need them. The manifest has a
checksum for each mebibyte of each entry, and a store that verifies what it is sent wants one of
the whole block. That one follows from the others and from the few bytes that lie between entries.
Most are known since the block was copied. The first of the two stages computes the others, and the
other one waits: those of bytes that came from a device, were copied by torch or put together from
several tensors, and all where the processor cannot sum while it copies.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import anyio

from ckpipe import threads
from ckpipe.backend import Backend
from ckpipe.catalog.leases import (
    live_subjects,
    protected_subjects,
    read_leases,
    store_time,
    time_now,
)
from ckpipe.catalog.metadata_cache import MetadataCache
from ckpipe.catalog.prune import BEHIND_LINK, decide_on, missing_text, prune
from ckpipe.errors import ObjectNotFound
from ckpipe.events import EventBus
from ckpipe.format.checksum import BlockCuts, Parts, combine, crc32c, crc32c_of_each
from ckpipe.format.data_file import BlockRange, DataFiles
from ckpipe.format.keys import Json
from ckpipe.format.manifest import Structure
from ckpipe.format.names import index_key
from ckpipe.reports import BlockReport, SaveReport, Span, StageReport, busy_seconds
from ckpipe.retention import Decision, Rule
from ckpipe.store.retry import AimdLimiter, RetryPolicy
from ckpipe.types import CheckpointId, CheckpointInfo

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger("ckpipe")

_MOST_UNPRUNED, _MOST_UNPRUNED_SHARE = 16, 4
"""So many complete checkpoints, or this many times those that are kept, may wait for a prune before
the next save waits too."""


class Filled(Protocol):
    """A block of a data file, in host memory."""

    @property
    def plan(self) -> BlockRange:
        """The place where it belongs."""
        ...

    @property
    def data(self) -> memoryview:
        """Its bytes."""
        ...

    @property
    def sums(self) -> BlockSums:
        """Its checksums."""
        ...


B = TypeVar("B", bound=Filled)


@dataclass(frozen=True, slots=True)
class StoredFiles:
    """All data files are durable.

    Args:
        header_sums: CRC-32C of each file's header.
    """

    header_sums: list[int]


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


class Delivery(abc.ABC, Generic[B]):
    """One save on its way to the store.

    Args:
        id: The checkpoint.
        rank: The rank.
        began: When ``save`` was called, by ``time.perf_counter``.
        token: By which its manifest is known again, whichever process has committed it.
    """

    def __init__(self, id: CheckpointId, rank: int, began: float, token: str) -> None:
        self.id, self.rank, self.began, self.token = id, rank, began, token
        self.clock = StageTimings(began)
        self.cargo: DataFiles | None = None
        """What is to be stored; None until that is planned."""
        self.replanned = False
        """Whether a plan had to be made."""
        self.captured_seconds: float | None = None
        self.staged_seconds: float | None = None
        self.durable_seconds: float | None = None
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
        cargo = self.cargo
        return SaveReport(
            stages=self.clock.stages(),
            staged_seconds=self.staged_seconds,
            durable_seconds=self.durable_seconds,
            bytes=cargo.size if cargo else 0,
            tensors=len(cargo.layout.chunks) if cargo else 0,
            planned=self.replanned,
            captured_seconds=self.captured_seconds,
            blocks=self.clock.blocks(),
            copied_bytes=self.clock.copied_bytes,
        )

    @abc.abstractmethod
    def release(self, filled: B) -> None:
        """Takes a block back from one of the two stages that use it."""

    @abc.abstractmethod
    def contents(self) -> ManifestFields:
        """The fields of the manifest; called in a worker thread once all blocks are there."""

    @abc.abstractmethod
    def settle(self, info: CheckpointInfo) -> None:
        """Tell all waiters that this rank's part is durable."""


@dataclass(slots=True, kw_only=True)
class StoreContext:
    """The context of the stages that bring saves to the store.

    Args:
        backend: Where checkpoints go; open.
        patient: The same store, each request tried again after an error that may pass.
        events: Where events go.
        rank: This process's rank.
        world_size: How many ranks save together.
        block_bytes: The size of all blocks of a file but the last.
        lanes: Blocks of one save under way to the store at the same time.
        retry: How often and how long to try.
        sweep_after: How long the mark of a deleted checkpoint stays.
        rule: Which checkpoints to keep; None for all.
        keep_reports: Whether manifests keep the reports of their saves.
        switch_interval: The switch interval of the GIL while a save is brought to the store, in
            seconds; None leaves it alone.
        limiter: Admits writes of blocks, of all saves together.
        told_missing: Metrics of rules that no checkpoint has, as was said already.
        told_copies: Whether it was said already that ranks write the same bytes.
        told_links: Checkpoints that cannot be deleted through links, as was said already.
        prune_delay: How many seconds retention waits after a commit.
        pruning: Held while retention waits or prunes, by one at a time.
        prune_pending: Whether a prune is to begin, which serves all that is complete by then.
        kept: How many checkpoints the last prune kept.
        unpruned: How many have become complete here and wait for a prune, or for its end.
    """

    backend: Backend
    patient: Backend
    events: EventBus
    rank: int
    world_size: int
    block_bytes: int
    lanes: int
    retry: RetryPolicy
    sweep_after: timedelta
    rule: Rule | None = None
    keep_reports: bool = True
    switch_interval: float | None = None
    resumed_from: str | None = None
    facts: MetadataCache = field(default_factory=MetadataCache)
    deleted: set[CheckpointId] = field(default_factory=set)
    retired: set[CheckpointId] = field(default_factory=set)
    loading: Counter[str] = field(default_factory=Counter)
    limiter: AimdLimiter = field(default_factory=AimdLimiter)
    told_missing: set[str] = field(default_factory=set)
    told_copies: bool = False
    told_links: set[str] = field(default_factory=set)
    prune_delay: float = 0.0
    pruning: anyio.Lock = field(default_factory=anyio.Lock)
    prune_pending: bool = False
    kept: int = 0
    unpruned: int = 0

    def protected(self) -> dict[str, str]:
        """Ids that retention must not remove, each with its reason."""
        kept = {name: "it is being loaded" for name, count in self.loading.items() if count}
        if self.resumed_from is not None:
            kept[self.resumed_from] = "this run resumed from it"
        return kept

    async def decide(self, launch: str) -> Decision:
        """Decide what :meth:`prune` would do, and why.

        Args:
            launch: The id of this launch.

        Raises:
            StoreError: If the store failed.
        """
        now = await time_now(self.patient)
        protected = await self._protected_by_all(now, launch)
        return await decide_on(self.patient, self.rule, protected, self.facts, now=now)

    async def let_retention_catch_up(self) -> None:
        """Wait until what is being pruned is gone, if many checkpoints wait for it.

        Saves that are quicker than deletions would else leave ever more of them on the store.
        """
        if self.unpruned > max(_MOST_UNPRUNED, _MOST_UNPRUNED_SHARE * self.kept):
            await self.pruned()

    async def pruned(self) -> bool:
        """Wait for the prunes that are pending or under way; False if there are none."""
        if not self.pruning.locked():
            return False
        async with self.pruning:
            return True

    async def prune(self, launch: str, after: CheckpointId | None = None) -> Decision:
        """Deletes the checkpoints that the rules do not keep, and says why each stays or went.

        Args:
            launch: The id of this launch, of which the newest checkpoint stays.
            after: A checkpoint whose index this process has written just now. It tells the time,
                which costs several writes else.

        Raises:
            StoreError: If the store failed; pruning again goes on where it stopped.
        """
        pruned = self.unpruned
        now = await self._time(after)
        protected = await self._protected_by_all(now, launch)
        decision = await prune(
            self.patient, self.rule, protected, self.facts, self.deleted,
            sweep_after=self.sweep_after, now=now, retired=self.retired,
        )  # fmt: skip
        self.kept, self.unpruned = len(decision.keep), max(0, self.unpruned - pruned)
        self._tell_missing(decision)
        self._tell_links(decision)
        return decision

    def _tell_links(self, decision: Decision) -> None:
        """Warns once of each checkpoint that should go and cannot be deleted through a link."""
        for name in decision.keep:
            reason = decision.reasons[name]
            if reason.startswith(BEHIND_LINK) and name not in self.told_links:
                self.told_links.add(name)
                logger.warning("Retention leaves %s: %s", name, reason)

    def _tell_missing(self, decision: Decision) -> None:
        """Warns once of a metric that no checkpoint has, from the second checkpoint on."""
        if len(decision.keep) > 1:
            for metric in set(decision.missing_metrics) - self.told_missing:
                self.told_missing.add(metric)
                logger.warning("%s", missing_text(metric, self.facts))

    async def _time(self, after: CheckpointId | None) -> datetime:
        """The time by the store's own clock, if anything early, which keeps more and not less."""
        if after is not None:
            with contextlib.suppress(ObjectNotFound):  # somebody has deleted it already
                return (await self.patient.stat(index_key(after))).modified
        return await store_time(self.patient)

    async def _protected_by_all(self, now: datetime, launch: str) -> dict[str, str]:
        """Ids that retention must not remove, also since others load them, and running launches."""
        leases = protected_subjects(live_subjects(await read_leases(self.patient), now))
        return dict.fromkeys([*leases, launch], "somebody holds a lease on it") | self.protected()


_KINDS = ("copied", "summed", "uploaded")
_WIDTH = 2 * len(_KINDS)
_UNSET = -1.0


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

    def copied(self, plan: BlockRange, began: float, ended: float, thread: int) -> None:
        """Notes when a block was filled, and by which thread."""
        row = self._row((plan.file, plan.offset), plan.nbytes)
        self._set(row, "copied", began, ended)
        self._places[2 * row] = self._copiers.setdefault(thread, len(self._copiers))

    def summed(self, plan: BlockRange, began: float, ended: float) -> None:
        """Notes when the checksums of a block were computed."""
        self._set(self._row((plan.file, plan.offset), plan.nbytes), "summed", began, ended)

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


_ON_LOOP_BYTES, _ON_LOOP_PIECES = 1 << 18, 256


class BlockSums:
    """The checksums of one block; used on one event loop, but for what is learnt before."""

    __slots__ = ("_known", "_ready", "began", "ended", "values")

    def __init__(self) -> None:
        self._known: NDArray[np.int64] | None = None
        self._ready: anyio.Event | None = None
        self.values: list[int] = []
        """Those of the pieces that its cuts name, in their order."""
        self.began = self.ended = 0.0
        """When they were computed, by ``time.perf_counter``; 0 if all were known before."""

    def learn(self, count: int, slots: NDArray[np.int64], values: NDArray[np.uint32]) -> None:
        """Takes some that are known since the block was copied.

        Args:
            count: How many checksums the block has.
            slots: Which of them are known.
            values: What they are.
        """
        import numpy as np

        if self._known is None:
            self._known = np.full(count, _UNKNOWN, np.int64)
        self._known[slots] = values

    @property
    def all_known(self) -> bool:
        """Tell whether there is nothing to compute."""
        return self._known is not None and _UNKNOWN not in self._known

    @property
    def learnt(self) -> bytes:
        """All of them, for another process of this machine; empty if one is not known."""
        if self._known is None or not self.all_known:
            return b""
        return self._known.astype(_SENT).tobytes()

    def learn_all(self, learnt: bytes) -> None:
        """Takes what another process has learnt."""
        import numpy as np

        if learnt:
            self._known = np.frombuffer(learnt, _SENT).astype(np.int64)

    def unknown(self, data: memoryview, cuts: BlockCuts) -> Parts:
        """The sums that are still to be computed.

        Args:
            data: The block.
            cuts: The pieces of it that have checksums.
        """
        if self._known is None:
            return Parts(data, cuts.begins, cuts.ends)
        import numpy as np

        wanted = self._known == _UNKNOWN
        begins, ends = (np.asarray(each, np.int64)[wanted] for each in (cuts.begins, cuts.ends))
        return Parts(data, begins.tolist(), ends.tolist())

    def claim(self) -> bool:
        """Claim the computation; True for exactly one caller."""
        if self._ready is not None:
            return False
        self._ready = anyio.Event()
        return True

    def complete(self, values: Sequence[int]) -> None:
        """Takes those that were not known, in their order; for any thread."""
        if self._known is None:
            self.values = [*values]
            return
        self._known[self._known == _UNKNOWN] = values
        self.values = self._known.tolist()

    def finish(self) -> None:
        """Tells who waits that they are computed."""
        assert self._ready is not None
        self._ready.set()

    async def wait(self) -> None:
        """Waits until they are computed, if they are not yet."""
        assert self._ready is not None
        if not self._ready.is_set():
            await self._ready.wait()


_UNKNOWN = -1
_SENT = "u4"


async def compute(cargo: DataFiles, batch: Sequence[Filled]) -> None:
    """Computes the checksums of some blocks that are not known, in one turn of a worker thread.

    Blocks that are being computed already are waited for instead. If computing fails, so does the
    save, and with it all that wait.
    """
    mine = [filled for filled in batch if filled.sums.claim()]
    if mine:
        spans = sum(len(filled.plan.spans) for filled in mine)
        if spans <= _ON_LOOP_PIECES and all(filled.sums.all_known for filled in mine):
            _fill(cargo, mine)
        else:
            await threads.run_sync(_fill, cargo, mine)
        for filled in mine:
            filled.sums.finish()
    for filled in batch:
        await filled.sums.wait()


def _fill(cargo: DataFiles, batch: list[Filled]) -> None:
    for filled in batch:
        if filled.sums.all_known:
            filled.sums.complete(())
    wanting = [filled for filled in batch if not filled.sums.all_known]
    if not wanting:
        return
    began = time.perf_counter()
    parts = [filled.sums.unknown(filled.data, cargo.cuts(filled.plan)) for filled in wanting]
    values = crc32c_of_each(parts)
    sizes = [sum(each.ends) - sum(each.begins) for each in parts]
    pace = (time.perf_counter() - began) / max(1, sum(sizes))
    for filled, found, nbytes in zip(wanting, values, sizes, strict=True):
        filled.sums.complete(found)
        filled.sums.began = began
        # Each is taken to have its part of the time.
        filled.sums.ended = began = began + nbytes * pace


async def block_checksum(cargo: DataFiles, filled: Filled) -> int:
    """The CRC-32C of a whole block, from those of its pieces."""
    await compute(cargo, [filled])
    between = filled.plan.nbytes - sum(span.hi - span.lo for span in filled.plan.spans)
    if between > _ON_LOOP_BYTES or len(filled.sums.values) > _ON_LOOP_PIECES:
        return await threads.run_sync(joined, cargo, filled)
    return joined(cargo, filled)


def joined(cargo: DataFiles, filled: Filled) -> int:
    """The CRC-32C of a whole block whose pieces have theirs."""
    view, cuts, at, total = filled.data, cargo.cuts(filled.plan), 0, 0
    for begin, end, value in zip(cuts.begins, cuts.ends, filled.sums.values, strict=True):
        if begin < at:  # no plan of ours; the bytes themselves tell in any case
            return crc32c(view)
        if begin > at:
            total = crc32c(view[at:begin], total)
        total, at = combine(total, value, end - begin), end
    return crc32c(view[at:], total) if at < len(view) else total
