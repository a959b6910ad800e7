"""Loading a checkpoint into a state, and reading one through to verify it.

A load has three steps. *Match* walks the target and the saved tree together, proves that they
fit and that every element has bytes, and changes nothing. *Read* brings the bytes, each chunk
verified before it reaches a tensor. *Apply* puts everything else in place.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio.to_thread

from ckpipe.backend import Backend
from ckpipe.errors import CkpipeError, CorruptCheckpoint, StructureMismatch, UsageError
from ckpipe.format.keys import LabelFilter, decode_float
from ckpipe.format.manifest import Bundle
from ckpipe.format.trees import children_of, shared_containers
from ckpipe.loads.delivering import ReadTally
from ckpipe.loads.load_planning import EntryTable, PartData, entry_table
from ckpipe.loads.making import Make
from ckpipe.loads.matching import Matching
from ckpipe.loads.per_rank import PerRankPolicy
from ckpipe.loads.reading import Reader, lane_buffers
from ckpipe.loads.rebuild import Rebuild
from ckpipe.loads.saved_state import fitted, labels_of, lacks, state_for, without
from ckpipe.loads.selecting import pruned, unmatched
from ckpipe.loads.sources import Elsewhere, Sources
from ckpipe.loads.stored_tensors import StoredTensors
from ckpipe.loads.targets import Targets
from ckpipe.memory.arena import Arena
from ckpipe.reports import LoadReport, StageReport
from ckpipe.tasks.ahead import Ahead
from ckpipe.tasks.collector import collector_paused
from ckpipe.types import LoadResult, VerifyResult

_MOST_NAMED = 10


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What the caller of ``load`` asked for.

    Args:
        into: The target; None for a fresh state.
        select: Which labels to load.
        strict: Whether plain containers must have the keys that were saved, and no others.
        cast: Whether values may be converted to the dtype of a target tensor.
        pickling: Whether pickled objects may be made.
        per_rank: What becomes of values that were different on each rank, if the number of ranks
            is another now.
    """

    into: Any | None
    select: LabelFilter
    strict: bool
    cast: bool
    pickling: bool
    per_rank: PerRankPolicy = "raise"


@dataclass(frozen=True, slots=True)
class _Matched:
    """A load that can begin: where bytes go, and what to do once they are there."""

    data: EntryTable
    targets: Targets
    make: Make
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FittingLoad:
    """A load of which everything was found to fit; nothing is read or changed yet.

    Args:
        bundle: The checkpoint's index, or some of its parts.
        rank: The rank that loads.
        in_place: Whether there is a target.
        matched: What fits where.
        started: When the load began.
        seconds: How long it took to find that out.
    """

    bundle: Bundle
    rank: int
    in_place: bool
    matched: _Matched
    started: float
    seconds: float


@dataclass(frozen=True, slots=True)
class ReadyLoad:
    """A load whose bytes are all read and verified: tensors in place are filled.

    Args:
        bundle: The checkpoint's index.
        rank: The rank that loads.
        matched: What fits where.
        stages: Reports of what was done.
        tally: What was read.
        views: What the store has shown of its memory, which is not needed any more.
        started: When the load began.
    """

    bundle: Bundle
    rank: int
    matched: _Matched
    stages: Mapping[str, StageReport]
    tally: ReadTally
    views: list[memoryview]
    started: float

    async def apply(self) -> LoadResult:
        """Puts everything else in place: objects get their state, and values are replaced.

        Raises:
            CkpipeError: If an object refuses its state.
        """
        began = time.perf_counter()
        freed = Ahead(partial(anyio.to_thread.run_sync, self.views.clear))
        with _located(self.bundle, self.rank):
            async with freed.started():
                state = await anyio.to_thread.run_sync(_apply, self.matched)
        ended = time.perf_counter()
        stages = {**self.stages, "apply": StageReport(ended - began, began=began - self.started)}
        report = LoadReport(stages, ended - self.started, self.tally.bytes, self.tally.reads)
        return _result(self.bundle, self.matched, state, report)


async def restore(
    backend: Backend,
    bundle: Bundle,
    request: LoadRequest,
    arena: Arena,
    *,
    lanes: int,
    rank: int = 0,
    world_size: int = 1,
) -> LoadResult:
    """Loads a checkpoint: :func:`fitting`, :func:`read_all` and :meth:`ReadyLoad.apply`."""
    found = await fitting(bundle, request, rank=rank, world_size=world_size)
    ready = await read_all(backend, found, arena, lanes=lanes)
    return await ready.apply()


async def fitting(
    bundle: Bundle, request: LoadRequest, *, rank: int = 0, world_size: int = 1
) -> FittingLoad:
    """Finds out whether a checkpoint of any number of ranks fits one rank of any number.

    Nothing is read, and nothing of the target is changed.

    Args:
        bundle: The checkpoint's index, validated; or some of its parts, if they suffice.
        request: What to load, and into what.
        rank: The rank that loads.
        world_size: How many ranks load.

    Raises:
        Elsewhere: If the parts do not suffice.
        TargetMismatch: If the target does not fit.
        PerRankValue: If the target wants what each rank had for itself, and the number of ranks
            is another now.
        UnsupportedState: If the checkpoint holds pickled objects and these are refused.
        CorruptCheckpoint: If the checkpoint is not what was saved.
    """
    started = time.perf_counter()
    with _located(bundle, rank):
        matched = await anyio.to_thread.run_sync(_match, bundle, request, rank, world_size)
    seconds = time.perf_counter() - started
    return FittingLoad(bundle, rank, request.into is not None, matched, started, seconds)


async def read_all(
    backend: Backend,
    found: FittingLoad,
    arena: Arena,
    *,
    lanes: int,
    sure: Callable[[], Awaitable[None]] | None = None,
) -> ReadyLoad:
    """Reads all that a load needs; no byte reaches the target unverified.

    Args:
        backend: The store.
        found: What to load.
        arena: Lends the blocks that are read into; used on the caller's thread only.
        lanes: How many reads run at once.
        sure: Is awaited before any byte reaches the target; None if nothing need be.

    Raises:
        CorruptCheckpoint: If the checkpoint is not what was saved; ``target_touched`` says
            whether parts had been loaded by then.
        SharingConflict: If tensors of the target share memory, and the checkpoint has different
            values for them.
        StoreError: If the store failed.
    """
    bundle, rank, matched, began = found.bundle, found.rank, found.matched, time.perf_counter()
    with _located(bundle, rank), lane_buffers(arena, backend, lanes) as buffers:
        reader = Reader(backend, bundle.id, buffers, sure)
        await _read(reader, matched, in_place=found.in_place)
    tally = reader.tally
    stages = {
        "match": StageReport(found.seconds),
        "read": StageReport(time.perf_counter() - began, tally.bytes, began - found.started),
    }
    return ReadyLoad(bundle, rank, matched, stages, tally, reader.views, found.started)


@contextmanager
def _located(bundle: Bundle, rank: int) -> Iterator[None]:
    try:
        yield
    except CkpipeError as error:
        error.located(step=bundle.id.step, rank=rank)
        raise


def _match(bundle: Bundle, request: LoadRequest, rank: int, world_size: int) -> _Matched:
    try:
        with collector_paused():
            return _match_all(bundle, request, rank, world_size)
    except CkpipeError:
        if not bundle.whole:
            raise Elsewhere from None  # The parts of all ranks may fit, or tell what is wrong.
        raise
    except RecursionError:
        raise UsageError(
            "The checkpoint is nested too deeply to be walked",
            hint="Raise sys.setrecursionlimit",
        ) from None


def _match_all(bundle: Bundle, request: LoadRequest, rank: int, world_size: int) -> _Matched:
    fresh = request.into is None
    saved = state_for(bundle, rank, world_size, request.per_rank, fresh=fresh)
    saved = saved if fresh else fitted(saved, request.into)
    data = entry_table(bundle)
    first_wins = request.per_rank == "rank0"
    stored = StoredTensors(saved.rows, saved.homes, Sources(bundle), data, first_wins=first_wins)
    targets = Targets(stored, cast=request.cast)
    attributes = (row.attributes for row in saved.rows if row.attributes)
    everything = shared_containers([saved.tree, *attributes])
    select = request.select
    if request.per_rank == "drop":
        select = without(select, labels_of(saved))
    tree, definitions = pruned(saved.tree, select, everything)
    rebuild = Rebuild(
        saved.values,
        targets,
        definitions,
        saved.per_rank,
        pickling=request.pickling,
        distributed=world_size > 1,
    )
    missing = _named_in_vain(bundle, request)
    unexpected: list[str] = []
    if request.into is None:
        make = rebuild.plan(tree, "")
    else:
        matching = Matching(rebuild, targets, select, strict=request.strict)
        make = matching.plan(request.into, tree)
        missing, unexpected = [*missing, *matching.missing], matching.unexpected
        if not bundle.whole and (missing or unexpected or _lack(matching)):
            raise Elsewhere
    targets.settle()
    return _Matched(data, targets, make, tuple(missing), tuple(unexpected))


def _named_in_vain(bundle: Bundle, request: LoadRequest) -> list[str]:
    """What ``include`` names and no rank has saved, if the request is not strict.

    Raises:
        StructureMismatch: If there is such a thing and the request is strict.
    """
    trees = [each.tree for each in bundle.structures]
    absent = unmatched(request.select, trees)
    if absent and not bundle.whole:
        raise Elsewhere
    if absent and request.strict:
        held = sorted({label for tree in trees for _, _, label in children_of(tree, "")})
        shown = ", ".join(held[:_MOST_NAMED]) + (", …" * (len(held) > _MOST_NAMED))
        raise StructureMismatch(
            f"include names what is not in the checkpoint: {', '.join(absent)}",
            hint=f"It holds {shown or 'one value'}; globs begin there, and strict=False lets "
            "those pass that match nothing",
        )
    return absent


def _lack(matching: Matching) -> bool:
    """Whether objects hold what was not saved of them; another rank may have saved it."""
    return any(lacks(node, live) for node, live in matching.objects)


async def _read(reader: Reader, matched: _Matched, *, in_place: bool) -> None:
    data, targets = matched.data, matched.targets
    if targets.first_needs:
        await reader.deliver(data, targets.first_needs, targets.filling.destinations)
        await anyio.to_thread.run_sync(targets.check_disputed)
    reader.tally.delivered = False
    try:
        await reader.deliver(data, targets.needs, targets.filling.destinations)
    except CorruptCheckpoint as error:
        error.target_touched = in_place and reader.tally.delivered
        raise


def _apply(matched: _Matched) -> Any:
    matched.targets.finish()
    return matched.make()


def _result(bundle: Bundle, matched: _Matched, state: Any, report: LoadReport) -> LoadResult:
    part = bundle.parts[0]
    return LoadResult(
        id=str(bundle.id),
        step=bundle.id.step,
        state=state,
        metadata=part.metadata,
        metrics=_metrics(part.metrics),
        missing=matched.missing,
        unexpected=matched.unexpected,
        report=report,
    )


def _metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: decode_float(value) for name, value in metrics.items()}


async def verify(backend: Backend, bundle: Bundle, arena: Arena, *, lanes: int) -> VerifyResult:
    """Reads every byte of every data file of a checkpoint and checks all of them.

    Args:
        backend: The store.
        bundle: The checkpoint's index or manifest, validated.
        arena: Lends the blocks that are read into; used on the caller's thread only.
        lanes: How many reads run at once.

    Raises:
        ChecksumMismatch: If bytes differ from those that were saved, or a file is too long.
        TruncatedObject: If a data file is too short.
        MissingObject: If one is gone.
        StoreError: If the store failed.
    """
    files = 0
    with lane_buffers(arena, backend, lanes) as buffers:
        reader = Reader(backend, bundle.id, buffers)
        for part in bundle.parts:
            make_data = partial(PartData, part, bundle.layouts[part.layout])
            data = await anyio.to_thread.run_sync(make_data)
            for number in range(len(data.files)):
                await reader.size(data, number)
                await reader.header(data, number)
            await reader.deliver(data, data.all_needs(), {})
            await anyio.to_thread.run_sync(reader.views.clear)
            files += len(data.files)
    return VerifyResult(str(bundle.id), files, sum(f.size for p in bundle.parts for f in p.files))
