"""Load a checkpoint into a state.

A load has three steps. *Match* walks the target and the saved tree together, proves that they fit
and that every element has bytes, and changes nothing. *Read* reads the bytes and verifies each
chunk before it copies it to a tensor. *Apply* puts all other values in place.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio.to_thread

from ckpipe.catalog.find import read_index
from ckpipe.catalog.opened import Opened
from ckpipe.errors import (
    CkpipeError,
    CorruptCheckpoint,
    StructureMismatch,
    TargetMismatch,
    UsageError,
)
from ckpipe.format.dtypes import NAMES
from ckpipe.format.labels import LabelFilter, decode_float
from ckpipe.format.manifest import ManifestDocument, trees_of
from ckpipe.format.tree import children_of, shared_containers
from ckpipe.interpreter import gc_paused, short_switch_interval
from ckpipe.loading.factories import Factory
from ckpipe.loading.foreign_target import fitted, has_place_for, parameters_of
from ckpipe.loading.match import Matching
from ckpipe.loading.match_record import MatchRecord
from ckpipe.loading.request import LoadRequest
from ckpipe.loading.stateful import InspectionMemo
from ckpipe.loop_thread import on_caller
from ckpipe.memory.arena import Arena
from ckpipe.reading.chunks import NeedsFullIndex, StoredTensors
from ckpipe.reading.reader import Reader, ReadTally, lane_buffers
from ckpipe.reading.saved_state import (
    SavedState,
    exclude_labels,
    keep_generators_apart,
    labels_of,
    state_for,
)
from ckpipe.reading.select import LenientFilter, pruned, unmatched
from ckpipe.reading.targets import LiveTensor, Targets
from ckpipe.transforms.scales import refuse_codes, with_scales
from ckpipe.transforms.transform import transformed
from ckpipe.types import LoadReport, LoadResult, StageReport, first_of


class LeavesUnfilled(CorruptCheckpoint):
    """Raised if a checkpoint would leave values of a damaged one, read before it, in the target."""


@dataclass(slots=True)
class MatchedLoad:
    """A load whose target fits: the destinations of bytes, and the function to apply the rest.

    Args:
        document: The checkpoint's index.
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

    document: ManifestDocument
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
        with located(self.document.step, self.rank):
            state = await on_caller(self.request.caller, self._put_in_place)
        ended = time.perf_counter()
        stages = {**self.stages, "apply": StageReport(ended - began, began=began - asked)}
        nbytes = self.tally.bytes
        report = LoadReport(
            stages,
            ended - asked,
            nbytes,
            self.tally.reads,
            unverified_bytes=0 if self.document.source is None else nbytes,
        )
        part = self.document.parts[0]
        return LoadResult(
            id=None if self.document.source else str(self.document.id),
            step=self.document.step or 0,
            state=state,
            metadata=part.metadata,
            metrics={name: decode_float(value) for name, value in part.metrics.items()},
            missing=self.missing,
            unexpected=self.unexpected,
            report=report,
            transformed=self.transformed,
            source=self.document.source,
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
                        f"The target is half loaded from {self.document.name}: {touched}. "
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
    opened: Opened,
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
        opened: The checkpoint, with its index or with some of its parts, that of the rank among
            them. If they do not suffice, the index is read.
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
    found, document = time.perf_counter(), opened.document
    quick = short_switch_interval(request.switch_interval)
    with located(document.step, rank), _refusing_to_mix(request), quick:
        if request.hold is not None:
            await request.hold.take()
        began = time.perf_counter()
        place, memo = (rank, world_size), InspectionMemo()
        if before_match is not None:
            await before_match(memo)
        load = await on_caller(request.caller, _match, document, request, *place, memo)
        if load is None:
            document = await read_index(opened.store, document.id)
            load = await on_caller(request.caller, _match, document, request, *place, memo)
            assert load is not None, "the index has the parts of all ranks"
        _check_fills(load.targets, request.filled)
        matched = time.perf_counter()
        load.tally = done = load.tally if tally is None else tally
        request.begun.append((done, load.targets.noted))
        await read_rounds(opened, load.targets, arena, lanes, done)
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
    opened: Opened, targets: Targets, arena: Arena, lanes: int, done: ReadTally
) -> None:
    """Read and verify the bytes of all targets."""
    with lane_buffers(arena, opened.store, lanes) as buffers:
        reader = Reader(opened, targets.stored.data, buffers, done)
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
    document: ManifestDocument,
    request: LoadRequest,
    rank: int,
    world_size: int,
    memo: InspectionMemo,
) -> MatchedLoad | None:
    """Match the target with a checkpoint; return None if the given parts may not suffice."""
    try:
        with gc_paused(), request.holding():
            return match_all(document, request, rank, world_size, memo)
    except NeedsFullIndex:
        return None
    except CkpipeError:
        if not document.whole:
            return None  # The parts of all ranks may fit, or give a better error.
        raise
    except RecursionError:
        raise UsageError(
            "The checkpoint is nested too deeply to be walked",
            hint="Raise sys.setrecursionlimit",
        ) from None


def match_all(
    document: ManifestDocument,
    request: LoadRequest,
    rank: int,
    world_size: int,
    memo: InspectionMemo,
) -> MatchedLoad:
    """Check that the target fits, and plan the load; nothing is read or changed.

    Raises:
        NeedsFullIndex: If parts of the checkpoint that are not here are needed.
        CkpipeError: As :func:`read_all` does.
    """
    fresh, kept, above = request.into is None, list[str](), ""
    document, told = _edited(document, request)
    if document.source is not None and not fresh:
        document, select, kept, above = fitted(document, request.into, request.select)
        request = request.selecting(select)
    saved = state_for(document, rank, world_size, request.per_rank, fresh=fresh)
    saved = keep_generators_apart(saved, document, rank, world_size, request.per_rank)
    stored = StoredTensors(
        document, saved.rows, saved.homes, first_wins=request.per_rank == "rank0"
    )
    targets = Targets(stored, cast=request.cast, device=request.device)
    select, lenient = _selected(document, request, saved)
    everything = shared_containers(trees_of(saved.tree, saved.rows))
    tree, definitions = pruned(saved.tree, select, everything)
    record = MatchRecord(
        saved,
        targets,
        definitions,
        request,
        select=select,
        distributed=world_size > 1,
        above=above,
        memo=memo,
    )
    matching = Matching(record)
    missing = [*kept, *_named_in_vain(document, request)]
    unexpected: list[str] = []
    if fresh:
        make = matching.plan(tree, "")
    else:
        make = matching.plan_target(request.into, tree)
        missing = [*missing, *record.missing]
        unexpected = record.unexpected
        if not document.whole and (missing or unexpected or record.objects_have_more):
            raise NeedsFullIndex
        missing += record.kept
        unexpected = [*unexpected, *record.left]
    if lenient is not None:
        missing += lenient.missing
        unexpected += lenient.unexpected
    _refuse_codes(record, fresh=fresh)
    targets.settle()
    labels = tuple(missing), tuple(unexpected)
    return MatchedLoad(document, request, rank, targets, make, *labels, matching, transformed=told)


def _edited(
    document: ManifestDocument, request: LoadRequest
) -> tuple[ManifestDocument, Mapping[str, tuple[str, ...]]]:
    """Apply the transforms; return also the new labels of saved ones."""
    target = request.into

    def of_use(label: str) -> bool:
        return request.select(label) and (target is None or has_place_for(target, label))

    if request.cast:
        document = with_scales(document)
    if not request.transform:
        return document, {}
    if not document.whole:
        raise NeedsFullIndex
    return transformed(document, request.transform, of_use, parameters_of(target))


def _selected(
    document: ManifestDocument, request: LoadRequest, saved: SavedState
) -> tuple[LabelFilter, LenientFilter | None]:
    """Select the labels to load; the second filter is the same if labels may differ."""
    select = request.select
    if request.per_rank == "drop":
        select = exclude_labels(select, labels_of(saved))
    allowed = request.allow_missing, request.allow_unexpected
    if request.into is None or not any(each.patterns[0] for each in allowed):
        return select, None
    if not document.whole:
        raise NeedsFullIndex
    lenient = LenientFilter(select, *allowed, saved.tree, request.into)
    return lenient, lenient


def _refuse_codes(record: MatchRecord, *, fresh: bool) -> None:
    """Refuse to convert codes of quantised weights."""
    for each in record.targets.noted:
        if each.stored.row.scale is not None:
            refuse_codes(each.stored.row, NAMES[each.tensor.dtype], each.label)
    for row in record.saved.rows if fresh else ():
        if row.cast is not None and record.select(row.label):
            refuse_codes(row, row.cast, row.label)


def _named_in_vain(document: ManifestDocument, request: LoadRequest) -> list[str]:
    """Return the names of ``include`` that no rank has saved, if the request is not strict.

    Raises:
        StructureMismatch: If there is such a name and the request is strict.
    """
    trees = [each.tree for each in document.structures]
    absent = unmatched(request.select, trees)
    if absent and not document.whole:
        raise NeedsFullIndex
    if absent and request.strict:
        held = sorted({label for tree in trees for _, _, label in children_of(tree, "")})
        raise StructureMismatch(
            f"include names what is not in the checkpoint: {', '.join(absent)}",
            hint=f"It holds {first_of(held, 10) or 'one value'}; globs begin there, and "
            "strict=False lets those pass that match nothing",
        )
    return absent
