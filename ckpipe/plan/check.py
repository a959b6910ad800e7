"""Choose the planner of a pipeline, and check the plans of planners that are not ckpipe's.

A plan is checked before it copies a byte. This check knows one rank only. Other ranks must write
the bytes that a plan leaves to them: completion checks that, and the checkpoint counts only if they
do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpipe.backend import Backend
from ckpipe.errors import CkpipeError, SettingsError, UsageError
from ckpipe.format.box_cover import BoxIndex
from ckpipe.format.boxes import Box, box_shape, box_volume
from ckpipe.format.check import check_document
from ckpipe.format.dtypes import DTYPES
from ckpipe.format.manifest import Chunk, ManifestDocument, RankManifest
from ckpipe.interpreter import user_code
from ckpipe.plan.division import whole_of
from ckpipe.plan.global_plan import GlobalPlanner
from ckpipe.plan.plan import LocalPlanner, RankPlan, SourceRange, fingerprint, header_of
from ckpipe.ranks.world import Topology
from ckpipe.state.flatten import Captured, structure_of
from ckpipe.state.placements import HeldBox
from ckpipe.state.tensors import TensorLeaf
from ckpipe.types import CheckpointId, JointPlanner, Planner

if TYPE_CHECKING:
    from ckpipe.settings import Settings

OWN_PLANNERS = (LocalPlanner, GlobalPlanner)
"""Planners whose plans are right by construction, and need no check."""


def choose_planner(topology: Topology, settings: Settings, max_file_bytes: int | None) -> Planner:
    """Return the planner of the settings, prepared; blocking.

    Args:
        topology: This rank and the number of ranks that save together.
        settings: The settings.
        max_file_bytes: The largest data file that the store takes, in bytes; None for no limit.

    Raises:
        UnsupportedTopology: If ranks must plan together and cannot reach each other.
        UsageError: If a user's planner raised ``SystemExit`` or ``KeyboardInterrupt``.
    """
    chosen = settings.plan.planner
    if chosen == "local":
        return LocalPlanner(settings.plan.replicated, max_file_bytes=max_file_bytes)
    planner: Planner
    if chosen == "global":
        seconds = settings.plan.timeout_seconds
        planner = GlobalPlanner(replicated=settings.plan.replicated, timeout_seconds=seconds)
    else:
        planner = chosen
    if isinstance(planner, JointPlanner):
        with user_code(f"The planner {type(planner).__name__}", ""):
            planner.prepare(
                rank=topology.rank, world_size=topology.world_size, max_file_bytes=max_file_bytes
            )
    return planner


def refuse_unlinkable(settings: Settings, backend: Backend) -> None:
    """Refuse incremental saves for a store without links, or a planner that is not ckpipe's.

    Raises:
        SettingsError: If they are impossible.
    """
    if not backend.can_link:
        reason = f"{type(backend).__name__} cannot link or copy objects (Backend.can_link)"
    elif settings.plan.planner not in ("local", "global"):
        reason = "the files of a planner of your own are as it made them"
    else:
        return
    raise SettingsError(
        f"incremental saves are impossible: {reason}", hint="Leave the setting incremental out"
    )


_NOBODY = CheckpointId("00000000T000000000Z-plan", 0, 0)


def check_plan(
    plan: object, captured: Captured, planner: Planner, *, rank: int, world_size: int
) -> None:
    """Check that a plan can be carried out, and that it covers all that the rank holds.

    Args:
        plan: The result of the planner.
        captured: The structure that it was made for.
        planner: The planner, to be named.
        rank: The rank.
        world_size: Number of ranks that save together.

    Raises:
        UsageError: If the plan is invalid; names the fault.
    """
    name = type(planner).__name__
    if not isinstance(plan, RankPlan):
        raise _Wrong(f"is no RankPlan but {type(plan).__name__}").of(name, rank)
    try:
        if (plan.rank, plan.world_size) != (rank, world_size):
            raise _Wrong(
                f"is for rank {plan.rank} of {plan.world_size}, not {rank} of {world_size}"
            )
        if plan.fingerprint != fingerprint(captured):
            raise _Wrong("is for another structure, by its fingerprint")
        _check_tables(plan, captured)
        _check_sources(plan, captured.tensors)
        _check_holdings(plan, captured.tensors, rank)
    except _Wrong as wrong:
        raise wrong.of(name, rank) from wrong.__cause__
    except Exception as error:  # a program's own planner may put anything into the fields
        raise _Wrong(f"has malformed fields: {error!r}").of(name, rank) from error


class _Wrong(Exception):  # becomes a UsageError once the planner is known
    def __init__(self, what: str, label: str | None = None) -> None:
        super().__init__(what)
        self.what, self.label = what, label

    def of(self, planner: str, rank: int) -> UsageError:
        return UsageError(
            f"The plan of {planner} {self.what}",
            key=self.label,
            rank=rank,
            hint="Make plans with ckpipe.planning.assemble, which keeps them valid",
        )


def _check_tables(plan: RankPlan, captured: Captured) -> None:
    """Check the plan against the format, as a reader of the manifest would."""
    try:
        part = RankManifest(
            rank=plan.rank, structure=0, layout=0, values=tuple(captured.values),
            files=tuple(file.row for file in plan.files), checksums=(0,) * plan.checksums,
            token="", started="", writer={},
        )  # fmt: skip
        structure = captured.described(structure_of)
        document = ManifestDocument(
            "manifest", _NOBODY, plan.world_size, (structure,), (plan.layout,), (part,)
        )
        check_document(document)
    except CkpipeError as error:
        raise _Wrong(f"is not valid: {error.message}") from error
    for number, file in enumerate(plan.files):
        entries = [entry for entry in plan.layout.entries if entry.file == number]
        if list(plan.layout.entries[file.entries.start : file.entries.stop]) != entries:
            raise _Wrong(f"gives the file {file.row.name} the entries of another")
        if file.header != header_of(entries):
            raise _Wrong(f"gives the file {file.row.name} a header that does not match its entries")
    for chunk in plan.layout.chunks:
        if chunk.owner == plan.rank:
            raise _Wrong("names the rank itself as another owner")


def _check_sources(plan: RankPlan, leaves: Sequence[TensorLeaf]) -> None:
    """Check that existing tensors fill every entry, each byte once."""
    entries = plan.layout.entries
    if len(plan.sources) != len(entries):
        raise _Wrong(f"has {len(entries)} entries and fills {len(plan.sources)}")
    for entry, sources in zip(entries, plan.sources, strict=True):
        end = 0
        for source in sources:
            if not 0 <= source.tensor < len(leaves):
                raise _Wrong(f"fills the entry {entry.name} from tensor {source.tensor}")
            leaf = leaves[source.tensor]
            if source.offset < end or source.nbytes < 0 or source.nbytes != _given(source, leaf):
                raise _Wrong(f"fills the entry {entry.name} with wrong bytes", leaf.label)
            # A window of overlapping tensors may begin with padding, to be aligned.
            if source.offset > end and (end or source.skip is None):
                raise _Wrong(f"leaves a hole in the entry {entry.name}", leaf.label)
            end = source.offset + source.nbytes
        if end != entry.nbytes:
            raise _Wrong(f"fills {end} of the {entry.nbytes} bytes of the entry {entry.name}")


def _given(source: SourceRange, leaf: TensorLeaf) -> int:
    """Return the bytes of a source; -1 if it reaches beyond its tensor."""
    if source.skip is not None:
        return source.nbytes if 0 <= source.skip <= leaf.window - source.nbytes else -1
    if source.part is None:
        return leaf.nbytes
    lower, upper = source.part
    if not len(lower) == len(upper) == len(leaf.shape):
        return -1
    if not all(0 <= lo <= hi <= n for lo, hi, n in zip(lower, upper, leaf.shape, strict=True)):
        return -1
    return box_volume(source.part) * DTYPES[leaf.dtype].itemsize


def _check_holdings(plan: RankPlan, leaves: Sequence[TensorLeaf], rank: int) -> None:
    """Check that chunks cover the rank's boxes, each element once, and have the right bytes."""
    chunks: list[list[Chunk]] = [[] for _ in leaves]
    for chunk in plan.layout.chunks:
        chunks[chunk.tensor].append(chunk)
    for leaf, rows in zip(leaves, chunks, strict=True):
        spread = leaf.sharding
        held = (whole_of(leaf.shape),) if spread is None else spread.held(rank)
        wanted = [each.box for each in held]
        boxes = [row.box or whole_of(leaf.full_shape).box for row in rows]
        index = BoxIndex(boxes) if boxes else None
        missing = [box for box in wanted if index is None or index.cover(box)[1]]
        if (missing and any(map(box_volume, missing))) or bool(rows) != bool(held):
            raise _Wrong("leaves a part of this tensor out", leaf.label)
        if sum(map(box_volume, boxes)) != sum(map(box_volume, wanted)):
            raise _Wrong("has elements of this tensor twice, or of other ranks", leaf.label)
        for row, box in zip(rows, boxes, strict=True):
            if row.entry is not None and row.owner is None:
                _check_bytes(plan, leaves, leaf, row, _local(held, box))


def _local(held: Sequence[HeldBox], box: Box) -> Box:
    """Return the place of a box in the local tensor."""
    for each in held:
        lower, upper = each.box
        if all(lo <= a and b <= hi for lo, a, b, hi in zip(lower, *box, upper, strict=True)):
            start = tuple(at + a - lo for at, a, lo in zip(each.at, box[0], lower, strict=True))
            return start, tuple(a + n for a, n in zip(start, box_shape(box), strict=True))
    raise _Wrong("has a box that spans several that the rank holds")


def _check_bytes(
    plan: RankPlan, leaves: Sequence[TensorLeaf], leaf: TensorLeaf, row: Chunk, local: Box
) -> None:
    """Check that a chunk's place in its entry is filled from the tensor's own memory."""
    assert row.entry is not None
    sources = plan.sources[row.entry]
    if not sources:
        return
    first = next((each for each in sources if each.offset == row.offset), sources[0])
    origin = leaves[first.tensor]
    if first.skip is None:
        part = first.part or whole_of(origin.shape).box
        alike = _memory(origin) == _memory(leaf) and part == local
        if alike and row.offset == first.offset and row.stride is None:
            return
        image = origin.contiguous and not origin.lazy and first.part is None
        starts = {origin.address - first.offset} if image else set()
    else:
        starts = {leaves[s.tensor].address + (s.skip or 0) - s.offset for s in sources}
    strides = (leaf.stride, None) if leaf.contiguous else (leaf.stride,)
    whole = local == whole_of(leaf.shape).box
    if not whole or starts != {leaf.address - row.offset} or row.stride not in strides:
        raise _Wrong("fills this tensor's place in the file with other bytes", leaf.label)


def _memory(leaf: TensorLeaf) -> tuple[object, ...]:
    return leaf.address, leaf.shape, leaf.stride, leaf.dtype, leaf.lazy
