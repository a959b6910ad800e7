"""Load a checkpoint into a state.

A load has three steps. *Match* walks the target and the saved tree together, proves that they fit
and that every element has bytes, and changes nothing. *Read* reads the bytes and verifies each
chunk before it copies it to a tensor. *Apply* puts all other values in place.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import anyio.to_thread
import torch

from ckpipe.backend import Backend
from ckpipe.catalog.find import read_index
from ckpipe.errors import (
    CkpipeError,
    CorruptCheckpoint,
    StructureMismatch,
    TargetMismatch,
    UsageError,
)
from ckpipe.format.dtypes import NAMES
from ckpipe.format.labels import LabelFilter, decode_float
from ckpipe.format.manifest import ManifestDocument, Structure, trees_of
from ckpipe.format.tree import Node, children_of, mapping, shared_containers, wrappers_in
from ckpipe.interpreter import gc_paused, short_switch_interval
from ckpipe.loading.chunks import NeedsFullIndex, StoredTensors
from ckpipe.loading.factories import Factory
from ckpipe.loading.foreign_target import fitted, has_place_for, parameters_of
from ckpipe.loading.match import Matching
from ckpipe.loading.match_record import MatchRecord, Unwrap
from ckpipe.loading.reader import Reader, ReadTally, lane_buffers
from ckpipe.loading.saved_state import (
    exclude_labels,
    keep_generators_apart,
    labels_of,
    state_for,
)
from ckpipe.loading.scales import refuse_codes, with_scales
from ckpipe.loading.select import LenientFilter, PerRankPolicy, pruned, unmatched
from ckpipe.loading.stateful import InspectionMemo
from ckpipe.loading.targets import LiveTensor, Targets
from ckpipe.loading.transforms import Transform, transformed
from ckpipe.lock.state_lock import LoadHold
from ckpipe.loop_thread import Caller, on_caller
from ckpipe.memory.arena import Arena
from ckpipe.types import LoadReport, LoadResult, StageReport, first_of


class LeavesUnfilled(CorruptCheckpoint):
    """Raised if a checkpoint would leave values of a damaged one, read before it, in the target."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The arguments of a call of ``load``.

    Args:
        into: The target; None for a fresh state.
        select: Selects the labels to load.
        strict: Whether plain containers must have exactly the saved keys; ``"shapes"`` if also
            tensors of another shape are skipped.
        cast: Whether values may be converted to the dtype of a target tensor.
        any_optimizer: Whether an optimizer may get the state of one of another class.
        pickling: Whether pickled objects may be made.
        per_rank: The policy for values that were different on each rank, if the number of ranks
            has changed.
        hold: Taken by the load before it reads the target, and ended by its caller; None for a
            target that no other code knows.
        caller: Runs user code on the calling thread; None to use another thread.
        switch_interval: The switch interval of the GIL meanwhile, in seconds; None leaves it alone.
        began: The time of the call of ``load``, by :func:`time.perf_counter`.
        transform: Transforms of the checkpoint, in their order.
        allow_missing: Selects labels of the target that the checkpoint may lack.
        allow_unexpected: Selects labels of the checkpoint that the target may lack.
        device: The device of the tensors of a fresh state.
        unwrap: Makes plain tensors of the wrapper tensors of a fresh state; None leaves these.
        begun: For each checkpoint that was begun, its count of reads and the tensors to fill.
    """

    into: Any | None = None
    select: LabelFilter = field(default_factory=LabelFilter)
    strict: bool | Literal["shapes"] = True
    cast: bool = False
    any_optimizer: bool = False
    pickling: bool = False
    per_rank: PerRankPolicy = "raise"
    hold: LoadHold | None = None
    caller: Caller | None = None
    switch_interval: float | None = None
    began: float = field(default_factory=time.perf_counter)
    transform: Sequence[Transform] = ()
    allow_missing: LabelFilter = field(default_factory=partial(LabelFilter, []))
    allow_unexpected: LabelFilter = field(default_factory=partial(LabelFilter, []))
    device: torch.device = field(default_factory=partial(torch.device, "cpu"))
    unwrap: Unwrap | None = None
    begun: list[tuple[ReadTally, Sequence[LiveTensor]]] = field(default_factory=list)

    @property
    def filled(self) -> list[LiveTensor]:
        """The tensors of the target that may have got values so far."""
        return [each for tally, tensors in self.begun if tally.delivered for each in tensors]

    def holding(self) -> AbstractContextManager[None]:
        """Let the calling thread work for the load, whose hold is taken."""
        return nullcontext() if self.hold is None else self.hold.here()


@dataclass(slots=True)
class MatchedLoad:
    """A load whose target fits: the destinations of bytes, and the function to apply the rest.

    Args:
        bundle: The checkpoint's index.
        request: The arguments of the load.
        rank: The rank that loads.
        targets: The tensors to fill.
        make: Puts all other values in place.
        missing: Labels that the target has and the checkpoint has not.
        unexpected: Labels that the checkpoint has and the target has not.
        matching: The match, which knows the objects that have taken their state.
        stages: Reports of the finished stages.
        tally: The count of reads.
        transformed: The labels that saved ones are loaded under, as far as transforms changed them.
    """

    bundle: ManifestDocument
    request: LoadRequest
    rank: int
    targets: Targets
    make: Factory
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    matching: Matching
    stages: dict[str, StageReport] = field(default_factory=dict)
    tally: ReadTally = field(default_factory=ReadTally)
    transformed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    async def apply(self) -> LoadResult:
        """Put all other values in place: objects get their state, and values are replaced.

        Raises:
            CkpipeError: If an object refuses its state.
        """
        began, asked = time.perf_counter(), self.request.began
        with located(self.bundle.step, self.rank):
            state = await on_caller(self.request.caller, self._put_in_place)
        ended = time.perf_counter()
        stages = {**self.stages, "apply": StageReport(ended - began, began=began - asked)}
        nbytes = self.tally.bytes
        report = LoadReport(
            stages,
            ended - asked,
            nbytes,
            self.tally.reads,
            unverified_bytes=0 if self.bundle.source is None else nbytes,
        )
        part = self.bundle.parts[0]
        return LoadResult(
            id=None if self.bundle.source else str(self.bundle.id),
            step=self.bundle.step or 0,
            state=state,
            metadata=part.metadata,
            metrics={name: decode_float(value) for name, value in part.metrics.items()},
            missing=self.missing,
            unexpected=self.unexpected,
            report=report,
            transformed=self.transformed,
            source=self.bundle.source,
        )

    def _put_in_place(self) -> Any:
        with self.request.holding():
            self.targets.finish()
            try:
                return self.make()
            except Exception as error:
                touched = self._touched()
                if self.request.into is not None and touched:
                    if isinstance(error, CkpipeError):
                        error.target_touched = True
                    error.add_note(
                        f"The target is half loaded from {self.bundle.name}: {touched}. "
                        "Mend the object that raised, or leave it out with exclude, and load again"
                    )
                raise
            finally:
                self.matching.forget()

    def _touched(self) -> str:
        """Tell what has new values, in words; empty if nothing has."""
        filled = [repr(live.label) for live in self.targets.noted]
        loaded = list(map(repr, self.matching.record.loaded))
        parts = []
        if filled:
            parts.append(f"{len(filled)} tensors are filled, such as {first_of(filled, 3)}")
        if loaded:
            parts.append(f"load_state_dict has returned for {first_of(loaded, 8)}")
        return ", and ".join(parts)


async def read_all(
    backend: Backend,
    bundle: ManifestDocument,
    request: LoadRequest,
    arena: Arena,
    *,
    lanes: int,
    rank: int = 0,
    world_size: int = 1,
    tally: ReadTally | None = None,
    before_match: Callable[[InspectionMemo], Awaitable[None]] | None = None,
) -> MatchedLoad:
    """Match a checkpoint of any number of ranks with the target, and read all needed bytes.

    The target is not changed before all of it fits, and no unverified byte reaches it.

    Args:
        backend: The store.
        bundle: The checkpoint's index, validated; or some of its parts, with that of the rank. If
            they do not suffice, the index is read.
        request: The arguments of the load.
        arena: Lends the read buffers; used on the caller's thread only.
        lanes: The number of concurrent reads.
        rank: The rank that loads.
        world_size: The number of ranks that load.
        tally: Counts the reads, for progress.
        before_match: Looks at objects of the target once the load has its hold.

    Returns:
        A load whose bytes are all read and verified: tensors in place are filled.

    Raises:
        TargetMismatch: If the target does not fit.
        PerRankValue: If the target has a value that each rank had for itself, and the number of
            ranks has changed.
        UnsupportedState: If the checkpoint holds pickled objects and these are refused.
        CorruptCheckpoint: If the checkpoint is damaged, or does not fill all that one which was
            begun before it may have filled.
        SharingConflict: If tensors of the target share memory, and the checkpoint has different
            values for them.
        StoreError: If the store failed.
    """
    found = time.perf_counter()
    quick = short_switch_interval(request.switch_interval)
    with located(bundle.step, rank), _refusing_to_mix(request), quick:
        if request.hold is not None:
            await request.hold.take()
        began = time.perf_counter()
        place, memo = (rank, world_size), InspectionMemo()
        if before_match is not None:
            await before_match(memo)
        load = await on_caller(request.caller, _match, bundle, request, *place, memo)
        if load is None:
            bundle = await read_index(backend, bundle.id)
            load = await on_caller(request.caller, _match, bundle, request, *place, memo)
            assert load is not None, "the index has the parts of all ranks"
        _check_fills(load.targets, request.filled)
        matched = time.perf_counter()
        load.tally = done = load.tally if tally is None else tally
        request.begun.append((done, load.targets.noted))
        await read_rounds(backend, bundle, load.targets, arena, lanes, done)
    asked, ended = request.began, time.perf_counter()
    load.stages = {
        "find": StageReport(found - asked),
        "match": StageReport(matched - began, began=began - asked),
        "read": StageReport(ended - done.began, done.bytes, done.began - asked),
    }
    return load


@contextmanager
def _refusing_to_mix(request: LoadRequest) -> Iterator[None]:
    """Raise :class:`LeavesUnfilled` if a target that is partly filled does not fit."""
    filled = bool(request.filled)
    try:
        yield
    except TargetMismatch as error:
        if not filled:
            raise
        raise LeavesUnfilled(f"It does not fit: {error}") from error


def _check_fills(targets: Targets, filled: Sequence[LiveTensor]) -> None:
    """Refuse a load that would leave values of another checkpoint in the target.

    Raises:
        LeavesUnfilled: If it does not fill all tensors, or regions, that are filled already.
    """
    fills = {(each.label, each.regions) for each in targets.noted} if filled else set()
    left = [each.label for each in filled if (each.label, each.regions) not in fills]
    if left:
        raise LeavesUnfilled(f"It does not fill {first_of(sorted(set(map(repr, left))), 3)}")


async def read_rounds(
    backend: Backend,
    bundle: ManifestDocument,
    targets: Targets,
    arena: Arena,
    lanes: int,
    done: ReadTally,
) -> None:
    """Read and verify the bytes of all targets."""
    with lane_buffers(arena, backend, lanes) as buffers:
        reader = Reader(backend, bundle.step, targets.stored.data, buffers, done)
        for event in targets.queued_before:
            await anyio.to_thread.run_sync(event.synchronize)
        *first, last = targets.rounds
        for each in first:
            try:
                await reader.read(each.needs, each.destinations)
            finally:
                done.delivered = False  # but to fresh tensors
            await anyio.to_thread.run_sync(targets.check_disputed)
        await reader.read(last.needs, last.destinations)


@contextmanager
def telling_touched(request: LoadRequest) -> Iterator[None]:
    """Tell in the errors of a block whether the target is partly filled."""
    try:
        yield
    except CkpipeError as error:
        error.target_touched = error.target_touched or bool(request.filled)
        raise
    except Exception as error:
        if request.filled and not hasattr(error, "__notes__"):
            error.add_note("The target is partly filled: load again before you use it")
        raise


@contextmanager
def located(step: int | None, rank: int | None) -> Iterator[None]:
    """Name step and rank in the errors of a block."""
    try:
        yield
    except CkpipeError as error:
        error.located(step=step, rank=rank)
        raise


def _match(
    bundle: ManifestDocument, request: LoadRequest, rank: int, world_size: int, memo: InspectionMemo
) -> MatchedLoad | None:
    """Match the target with a checkpoint; return None if the given parts may not suffice."""
    try:
        with gc_paused(), request.holding():
            return match_all(bundle, request, rank, world_size, memo)
    except NeedsFullIndex:
        return None
    except CkpipeError:
        if not bundle.whole:
            return None  # The parts of all ranks may fit, or give a better error.
        raise
    except RecursionError:
        raise UsageError(
            "The checkpoint is nested too deeply to be walked",
            hint="Raise sys.setrecursionlimit",
        ) from None


def match_all(
    bundle: ManifestDocument, request: LoadRequest, rank: int, world_size: int, memo: InspectionMemo
) -> MatchedLoad:
    """Check that the target fits, and plan the load; nothing is read or changed.

    Raises:
        NeedsFullIndex: If parts of the checkpoint that are not here are needed.
        CkpipeError: As :func:`read_all` does.
    """
    told: Mapping[str, tuple[str, ...]] = {}
    fresh, above = request.into is None, ""

    def of_use(label: str) -> bool:
        return request.select(label) and (fresh or has_place_for(request.into, label))

    if request.cast:
        bundle = with_scales(bundle)
    if request.transform:
        if not bundle.whole:
            raise NeedsFullIndex
        bundle, told = transformed(bundle, request.transform, of_use, parameters_of(request.into))
    kept: list[str] = []
    if bundle.source is not None and not fresh:
        bundle, select, kept, above = fitted(bundle, request.into, request.select)
        request = replace(request, select=select)
    saved = state_for(bundle, rank, world_size, request.per_rank, fresh=fresh)
    saved = keep_generators_apart(saved, bundle, rank, world_size, request.per_rank)
    first_wins = request.per_rank == "rank0"
    stored = StoredTensors(bundle, saved.rows, saved.homes, first_wins=first_wins)
    targets = Targets(stored, cast=request.cast, device=request.device)
    everything = shared_containers(trees_of(saved.tree, saved.rows))
    select = request.select
    if request.per_rank == "drop":
        select = exclude_labels(select, labels_of(saved))
    lenient = None
    if not fresh and (request.allow_missing.patterns[0] or request.allow_unexpected.patterns[0]):
        if not bundle.whole:
            raise NeedsFullIndex
        allowed = request.allow_missing, request.allow_unexpected
        select = lenient = LenientFilter(select, *allowed, saved.tree, request.into)
    tree, definitions = pruned(saved.tree, select, everything)
    record = MatchRecord(
        saved,
        targets,
        definitions,
        select=select,
        strict=bool(request.strict),
        skips_shapes=request.strict == "shapes",
        any_optimizer=request.any_optimizer,
        pickling=request.pickling,
        unwrap=request.unwrap,
        distributed=world_size > 1,
        by_label=bool(request.transform),
        above=above,
        memo=memo,
    )
    matching = Matching(record)
    missing = [*kept, *_named_in_vain(bundle, request)]
    unexpected: list[str] = []
    if fresh:
        make = matching.plan(tree, "")
    else:
        make = matching.plan_target(request.into, tree)
        missing = [*missing, *record.missing]
        unexpected = record.unexpected
        if not bundle.whole and (missing or unexpected or record.objects_have_more):
            raise NeedsFullIndex
        missing += record.kept
        unexpected = [*unexpected, *record.left]
    if lenient is not None:
        missing += lenient.missing
        unexpected += lenient.unexpected
    for each in targets.noted:
        if each.stored.row.scale is not None:
            refuse_codes(each.stored.row, NAMES[each.tensor.dtype], each.label)
    for row in saved.rows if fresh else ():
        if row.cast is not None and select(row.label):
            refuse_codes(row, row.cast, row.label)
    targets.settle()
    labels = tuple(missing), tuple(unexpected)
    return MatchedLoad(bundle, request, rank, targets, make, *labels, matching, transformed=told)


def _named_in_vain(bundle: ManifestDocument, request: LoadRequest) -> list[str]:
    """Return the names of ``include`` that no rank has saved, if the request is not strict.

    Raises:
        StructureMismatch: If there is such a name and the request is strict.
    """
    trees = [each.tree for each in bundle.structures]
    absent = unmatched(request.select, trees)
    if absent and not bundle.whole:
        raise NeedsFullIndex
    if absent and request.strict:
        held = sorted({label for tree in trees for _, _, label in children_of(tree, "")})
        raise StructureMismatch(
            f"include names what is not in the checkpoint: {', '.join(absent)}",
            hint=f"It holds {first_of(held, 10) or 'one value'}; globs begin there, and "
            "strict=False lets those pass that match nothing",
        )
    return absent


async def read_tensors(
    backend: Backend,
    bundle: ManifestDocument,
    labels: Collection[str],
    arena: Arena,
    *,
    lanes: int,
    rank: int | None = None,
    unwrap: Unwrap | None = None,
    into: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Read tensors whole, every byte verified.

    Args:
        backend: The store.
        bundle: The checkpoint's index, validated.
        labels: Labels of tensors; labels that the checkpoint lacks are skipped.
        arena: Lends the read buffers; used on the caller's thread only.
        lanes: The number of concurrent reads.
        rank: The rank whose tensors to read, if ranks hold different ones; None assembles tensors
            of all ranks, and takes private ones from the lowest rank.
        unwrap: Makes plain tensors of wrapper tensors whose own labels are among those to read.
        into: Tensors to fill, by label; None makes new ones.

    Returns:
        The tensors by label. Tensors that shared memory when they were saved do so again.

    Raises:
        UnsupportedTopology: If ranks saved states of different structure.
        CorruptCheckpoint: If the checkpoint is damaged.
        StoreError: If the store failed.
    """
    flat = flattened(bundle, labels)
    # Not strict: a strict load would need every saved label.
    request = LoadRequest(into, strict=False, per_rank="rank0", unwrap=unwrap)
    place = (0, 1) if rank is None else (rank, bundle.world_size)
    ready = await read_all(
        backend, flat, request, arena, lanes=lanes, rank=place[0], world_size=place[1]
    )
    state = (await ready.apply()).state
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def flattened(bundle: ManifestDocument, labels: Collection[str]) -> ManifestDocument:
    """Return a checkpoint whose state is one dict of plain tensors by label."""
    return replace(bundle, structures=tuple(_flat(each, labels) for each in bundle.structures))


def _flat(structure: Structure, labels: Collection[str]) -> Structure:
    rows = tuple(
        replace(row, kind="tensor", detail=None, requires_grad=False, attributes=None)
        for row in structure.tensors
    )
    wanted = set(labels)
    numbers = [number for number, row in enumerate(rows) if row.label in wanted]
    nodes = {rows[number].label: Node("tensor", number) for number in numbers}
    wrappers = {label: node for label, node in wrappers_in(structure.tree) if label in wanted}
    return replace(structure, tree=mapping(nodes | wrappers), tensors=rows)
