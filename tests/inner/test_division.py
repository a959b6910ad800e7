"""Plans of many ranks: local ones, each made by itself, and joint ones, decided by one rank.

Together ranks write every element once, and evenly, or are told why not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpipe.errors import SaveError, UnsupportedState, UnsupportedTopology
from ckpipe.format.boxes import Box
from ckpipe.format.checksum import crc32c
from ckpipe.format.data_file import STORED_ITEM_BYTES
from ckpipe.format.manifest import Chunk, Entry
from ckpipe.format.names import data_file_name
from ckpipe.format.tree import Node
from ckpipe.plan import assignment, division
from ckpipe.plan.assignment import decode_description, describe, in_rows, water_fill
from ckpipe.plan.division import MIN_PIECE_BYTES
from ckpipe.plan.plan import files_by_size, header_of
from ckpipe.planning import Captured, LocalPlanner, RankPlan, fingerprint
from ckpipe.state.placements import Mesh, Placement, Sharding, sharding
from ckpipe.state.tensors import TensorLeaf
from tests.inner.made_up_ranks import (
    Tensor,
    capture,
    captured_by,
    check_balance,
    gpt2,
    held_by,
    jointly,
    llama70b,
    mesh,
    nbytes,
    on,
    planned,
    unwritten,
    written_bytes,
)

WORLD = 12


@st.composite
def spread_tensors(draw: st.DrawFn) -> list[Tensor]:
    """Tensors of up to three dimensions on meshes of some of the ranks, some of them tied."""
    found: list[Tensor] = []
    for number in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        mesh_shape = draw(st.sampled_from([(1,), (4,), (12,), (3, 4), (2, 3), (2, 2, 3)]))
        ranks = draw(st.permutations(range(WORLD)))[: math.prod(mesh_shape)]
        dims = st.none() | st.integers(0, len(shape) - 1) if shape else st.none()
        placements = tuple(Placement(draw(dims), draw(st.integers(1, 3))) for _ in mesh_shape)
        spread = sharding(Mesh(mesh_shape, tuple(ranks)), placements, shape)
        found.append(Tensor(f"t{number}", spread))
        if draw(st.booleans()):
            found.append(Tensor(f"t{number}-again", spread, tied=f"t{number}"))
    found += [Tensor("own", (3, 2)), Tensor("alike", (5, 3)), Tensor("scalar", ())]
    return found


def elements(shape: Sequence[int], box: Box | None) -> list[int]:
    """The places of a box's elements in the row-major order of a shape."""
    places = torch.arange(math.prod(shape)).view(tuple(shape))
    if box is not None:
        places = places[tuple(map(slice, *box))]
    found: list[int] = places.flatten().tolist()
    return found


def check_written_once(states: Sequence[Captured], plans: Sequence[RankPlan]) -> None:
    """Check that each element is written once by a rank that has it, and listed by all of these.

    Of ``own`` and ``size`` each rank has one of its own.
    """
    assert unwritten(plans, states) == []
    wanted: dict[str, Counter[int]] = {}
    found: dict[str, Counter[int]] = {}
    for state, plan in zip(states, plans, strict=True):
        listed: dict[str, list[int]] = {}
        for row in plan.layout.chunks:
            leaf = state.tensors[row.tensor]
            places = elements(leaf.full_shape, row.box)
            listed[leaf.label] = listed.get(leaf.label, []) + places
            if row.owner is None:
                found.setdefault(leaf.label, Counter()).update(places)
        for leaf in state.tensors:
            assert sorted(listed.get(leaf.label, [])) == _held(leaf, plan.rank)
            if leaf.label not in ("own", "size"):
                every = range(math.prod(leaf.full_shape))
                wanted[leaf.label] = Counter(dict.fromkeys(every, 1))
    assert {label: found.get(label, Counter()) for label in wanted} == wanted
    assert found["own"] == dict.fromkeys(range(6), len(states))


def _held(leaf: TensorLeaf, rank: int) -> list[int]:
    if leaf.sharding is None:
        return elements(leaf.shape, None)
    boxes = leaf.sharding.held(rank)
    return sorted(place for held in boxes for place in elements(leaf.full_shape, held.box))


@pytest.fixture(params=[1, 24, 1 << 20])
def piece_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (division, assignment):
        monkeypatch.setattr(module, "MIN_PIECE_BYTES", request.param)


@pytest.mark.usefixtures("piece_bytes")
class TestEveryWorld:
    """Whatever the pieces' size."""

    @settings(max_examples=25, deadline=None)
    @given(st.data())
    def test_every_element_is_written_once_and_every_rank_lists_what_it_holds(
        self, data: st.DataObject
    ) -> None:
        tensors, alike = data.draw(spread_tensors()), ("alike", "scalar")
        ranks = range(WORLD)
        plans = [planned(rank, WORLD, tensors, alike) for rank in ranks]
        check_written_once([captured_by(rank, tensors, alike) for rank in ranks], plans)

    @settings(max_examples=10, deadline=None)
    @given(st.data())
    def test_joint_plans_are_made_alike_and_write_every_element_once(
        self, data: st.DataObject
    ) -> None:
        world = data.draw(worlds())
        plans = plans_of(world)
        assert plans == plans_of(world)
        check_written_once(states_of(world), plans)


def test_rows_that_do_not_suffice_are_cut_along_another_dimension(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(division, "MIN_PIECE_BYTES", 8)
    sizes = [
        sum(entry.nbytes for entry in planned(rank, 4, [flat]).layout.entries)
        for flat in [Tensor("w", on(mesh(4), (3, 100), None))]
        for rank in range(4)
    ]
    assert sizes == [3 * 25 * 4] * 4


def test_tensor_that_is_spread_over_one_rank_keeps_its_name() -> None:
    plan = planned(0, 1, [Tensor("w", on(mesh(1), (4, 3), 0))])
    assert [entry.name for entry in plan.layout.entries] == ["w"]
    assert plan.layout.chunks == (Chunk(0, 0),)


def test_globs_name_what_is_replicated_besides() -> None:
    tensors = [Tensor("model.w", (4,)), Tensor("ema.w", (4,)), Tensor("own", (4,))]

    def written(planner: LocalPlanner) -> Counter[str]:
        names: Counter[str] = Counter()
        for rank in range(5):
            captured = Captured(Node("absent"), held_by(rank, tensors), [], {0: None})
            plan = planner.plan(captured, rank=rank, world_size=5)
            names.update(entry.name for entry in plan.layout.entries)
        return names

    assert written(LocalPlanner()) == {"model.w": 1, "ema.w": 5, "own": 5}
    assert written(LocalPlanner(["ema.*"])) == {"model.w": 1, "ema.w": 1, "own": 5}
    assert written(LocalPlanner(["ema"])) == {"model.w": 1, "ema.w": 1, "own": 5}
    assert written(LocalPlanner("none")) == {"model.w": 5, "ema.w": 5, "own": 5}


def test_private_and_replicated_tensor_over_the_same_bytes_are_written_apart() -> None:
    tensors = [Tensor("own", (4,)), Tensor("alike", (4,), tied="own")]
    chunks = [planned(rank, 3, tensors, ["alike"]).layout.chunks for rank in range(3)]
    assert [own.owner for own, _ in chunks] == [None] * 3
    assert sorted(alike.entry is None for _, alike in chunks) == [False, True, True]


def test_replicated_views_of_one_memory_are_one_window_of_one_rank() -> None:
    memory = torch.arange(24.0)
    state = {"low": memory[:16], "high": memory[8:]}
    plans = [LocalPlanner(["*"]).plan(capture(state), rank=n, world_size=3) for n in range(3)]
    (winner,) = [plan for plan in plans if plan.layout.entries]
    assert [entry.name for entry in winner.layout.entries] == ["low~window"]
    assert [(row.entry, row.offset) for row in winner.layout.chunks] == [(0, 0), (0, 32)]
    others = [plan.layout.chunks for plan in plans if plan is not winner]
    assert others == [tuple(Chunk(n, None, owner=winner.rank) for n in range(2))] * 2


def test_local_part_that_does_not_fit_its_placements_is_refused() -> None:
    leaves = held_by(0, [Tensor("w", on(mesh(2), (8,), 0))])
    leaves[0].sharding = on(mesh(2), (10,), 0)
    with pytest.raises(UnsupportedState, match=r"\[4\].*\[5\]") as caught:
        LocalPlanner().plan(Captured(Node("absent"), leaves, []), rank=0, world_size=2)
    assert (caught.value.key, caught.value.rank) == ("w", 0)


def test_mesh_placements_and_marks_are_in_the_fingerprint() -> None:
    def of(layout: Sharding, marked: Sequence[int] = ()) -> object:
        leaves = held_by(0, [Tensor("w", layout), Tensor("plain", (2,))])
        return fingerprint(Captured(Node("absent"), leaves, [], dict.fromkeys(marked)))

    shape = (4, 4)
    first = of(on(mesh(2, 2), shape, 0, None))
    assert first == of(on(mesh(2, 2), shape, 0, None))
    others = [
        of(on(mesh(2, 2), shape, None, 0)),
        of(on(Mesh((2, 2), (0, 2, 1, 3)), shape, 0, None)),
        of(on(mesh(2), shape, 0)),
        of(sharding(mesh(2, 2), (Placement(0, 2), Placement()), shape)),
        of(on(mesh(2, 2), shape, 0, None), [1]),
    ]
    assert first not in others
    assert len(set(others)) == len(others)


MODELS = {
    "gpt2, 8 replicas": (8, gpt2(mesh(8), None)),
    "gpt2 in bfloat16, 8 replicas": (8, gpt2(mesh(8), None, dtype="bfloat16")),
    "gpt2, 8 shards": (8, gpt2(mesh(8), 0)),
    "gpt2, 4 replicas of 2 shards": (8, gpt2(mesh(4, 2), None, 0)),
    "70b, 64 replicas": (64, llama70b(mesh(64), None)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("model", MODELS)
def test_bytes_are_balanced_within_five_percent(model: str) -> None:
    world_size, tensors = MODELS[model]
    # Some ranks of the large world, since each looks at 36,000 pieces.
    ranks = range(0, world_size, max(1, world_size // 8))
    sizes = [written_bytes(planned(rank, world_size, tensors)) for rank in ranks]
    check_balance(sizes, sum(nbytes(each) for each in tensors if not each.tied) / world_size)


def test_bytes_of_replicated_shards_are_balanced() -> None:
    tensors = llama70b(mesh(64, 8), None, 0)
    sizes = [written_bytes(planned(rank, 512, tensors)) for rank in range(0, 512, 61)]
    check_balance(sizes, sum(map(nbytes, tensors)) / 512)


def test_cost_of_a_plan_does_not_grow_with_the_world() -> None:
    def rows(world_size: int) -> int:
        where = mesh(world_size // 8, 8)
        tensors = [Tensor(f"t{n}", on(where, (64, 8), None, 0)) for n in range(50)]
        return len(planned(3, world_size, tensors).layout.chunks)

    assert rows(8) == rows(64) == rows(16_384) == 50


# ---- files of entries of one size ----

_SIZES = (0, 8, 4096, 300_000, (1 << 20) - 8, 1 << 20, (1 << 20) + 8, 3 << 20, 5 << 20, 40 << 20)
_RARE = tuple((1 << 20) + 4096 * number for number in range(2, 26))
_LARGE = 1 << 20


@st.composite
def plans_of_one_rank(draw: st.DrawFn) -> RankPlan:
    """A plan for tensors of few sizes, some of which are tied or written by others."""
    tensors = [Tensor("first", (3,), "bool")]
    several = _SIZES + (_RARE if draw(st.booleans()) else ())
    for number in range(draw(st.integers(0, 40))):
        dtype = draw(st.sampled_from(["float32", "bfloat16", "complex64", "uint8", "float64"]))
        size = draw(st.sampled_from(several)) // getattr(torch, dtype).itemsize
        tied = tensors[-1] if not tensors[-1].tied and draw(st.integers(0, 5)) == 0 else None
        layout: tuple[int, ...] = (size,) if tied is None else tied.layout  # type: ignore[assignment]
        name = "t" * draw(st.sampled_from([1, 200])) + str(number)
        dtype = dtype if tied is None else tied.dtype
        tensors.append(Tensor(name, layout, dtype, tied.label if tied else None))
    marks = draw(st.sets(st.sampled_from([each.label for each in tensors if not each.tied])))
    return planned(1, draw(st.sampled_from([2, 3])), tensors, marks)


@given(
    plans_of_one_rank(),
    st.sampled_from([64 << 10, 1 << 20, 16 << 20]),
    st.sampled_from([None, 41 << 20, 100 << 20]),
)
def test_entries_of_one_size_share_files_that_are_full_or_small(
    plan: RankPlan, block_bytes: int, max_file_bytes: int | None
) -> None:
    laid = files_by_size(plan, block_bytes, max_file_bytes)
    assert laid == files_by_size(plan, block_bytes, max_file_bytes)
    entries = list(laid.layout.entries)
    assert _contents(laid) == _contents(plan)
    assert _listed(laid) == _listed(plan)
    assert [each.row.name for each in laid.files] == [
        data_file_name(plan.rank, number) for number in range(len(laid.files))
    ]
    numbers = [number for file in laid.files for number in file.entries]
    assert numbers == list(range(len(entries)))
    share = max(block_bytes, sum(each.nbytes for each in entries) // 256)
    order = {each.name: number for number, each in enumerate(plan.layout.entries)}
    alone = _alone(entries, block_bytes)
    for number, file in enumerate(laid.files):
        own = [entries[each] for each in file.entries]
        assert file.header == header_of(own)
        assert (file.row.header_bytes, file.row.header_crc32c) == (
            len(file.header),
            crc32c(file.header),
        )
        end = 0
        for each in own:
            assert (each.file, each.offset) == (number, end)
            assert (len(file.header) + end) % STORED_ITEM_BYTES[each.dtype] == 0
            end += each.nbytes
        assert file.row.size == len(file.header) + end
        assert max_file_bytes is None or file.row.size <= max_file_bytes
        assert [order[each.name] for each in own] == sorted(order[each.name] for each in own)
        sizes = {each.nbytes if each.nbytes in alone else 0 for each in own}
        assert len(sizes) == 1
        (size,) = sizes
        if size and len(own) > 1 and file.row.size > share:
            # One entry less would leave more than a sixth of the memory of its blocks empty.
            less = (len(own) - 1) * size + _ROOM
            assert -less % block_bytes * 6 > less
        assert size or len(own) == 1 or file.row.size <= share
    if max_file_bytes is None:
        _check_full(laid, entries, block_bytes)


_ROOM = 64 << 10


def _alone(entries: Sequence[Entry], block_bytes: int) -> set[int]:
    """The sizes that share files with no other."""
    counts = Counter(each.nbytes for each in entries if each.nbytes >= _LARGE)
    rare = {n for n, count in counts.items() if 2 * n * count < block_bytes}
    return counts.keys() - (rare if len(rare) > 16 else set())


def _contents(plan: RankPlan) -> dict[str, object]:
    """The entries of a plan, without their places, with the bytes that fill them."""
    entries = list(plan.layout.entries)
    assert len({each.name for each in entries}) == len(entries) == len(plan.sources)
    return {
        each.name: (each._replace(file=0, offset=0), sources)
        for each, sources in zip(entries, plan.sources, strict=True)
    }


def _listed(plan: RankPlan) -> list[tuple[Chunk, str | None]]:
    """The chunks of a plan, with names in place of numbers of entries."""
    names = [each.name for each in plan.layout.entries]
    return [
        (row._replace(entry=None), None if row.entry is None else names[row.entry])
        for row in plan.layout.chunks
    ]


def _check_full(plan: RankPlan, entries: Sequence[Entry], block_bytes: int) -> None:
    """Check that only the last file of a size may be short or waste a sixth of its blocks."""
    by_size: dict[int, list[int]] = {}
    alone = _alone(entries, block_bytes)
    for file in plan.files:
        size = entries[file.entries[0]].nbytes
        if size in alone:
            by_size.setdefault(size, []).append(file.row.size)
    for sizes in by_size.values():
        for size in sizes[:-1]:
            assert -size % block_bytes <= size / 6 + _ROOM
            assert size + sizes[-1] > block_bytes or len(sizes) == 1


# ---- joint plans ----


ALIKE = ("alike", "scalar", "some")


@st.composite
def worlds(draw: st.DrawFn) -> list[list[Tensor]]:
    """What each rank has: tensors on meshes, and plain ones that only some of the ranks hold."""
    tensors = draw(spread_tensors())
    some = Tensor("some", tuple(draw(st.lists(st.integers(0, 9), max_size=2))))
    holders = draw(st.sets(st.integers(0, WORLD - 1), min_size=1))
    private = draw(st.lists(st.integers(0, 5), min_size=WORLD, max_size=WORLD))
    return [
        [*tensors, Tensor("size", (private[rank],)), *([some] if rank in holders else [])]
        for rank in range(WORLD)
    ]


def states_of(world: Sequence[Sequence[Tensor]]) -> list[Captured]:
    return [captured_by(rank, tensors, ALIKE) for rank, tensors in enumerate(world)]


def plans_of(world: Sequence[Sequence[Tensor]]) -> list[RankPlan]:
    return jointly(len(world), states_of(world).__getitem__)


def test_offers_of_another_version_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = describe([], {}, rank=0, world_size=1).data
    monkeypatch.setattr("ckpipe.plan.assignment._VERSION", 3)
    with pytest.raises(SaveError, match="different versions"):
        decode_description(data)


# Balance


@given(
    st.lists(st.integers(0, 1 << 22), min_size=1, max_size=9),
    st.integers(0, 1 << 25),
    st.integers(1, 3000),
)
def test_pouring_levels_as_far_as_rows_and_pieces_allow(
    load: list[int], nbytes: int, rows: int
) -> None:
    fractions = water_fill(load, range(len(load)), nbytes)
    assert math.isclose(sum(part for _, part in fractions), 1)
    stops = in_rows(fractions, rows)
    assert stops[-1][1] == rows
    assert [stop for _, stop in stops] == sorted({stop for _, stop in stops})
    after = {rank: load[rank] + part * nbytes for rank, part in fractions}
    low = (
        min(load[rank] for rank in range(len(load)) if rank not in after)
        if len(after) < len(load)
        else math.inf
    )
    # Who gets nothing has as much already, but for what makes no piece.
    assert max(after.values()) <= max(low, min(after.values())) + nbytes * (len(after) == 1) + (
        MIN_PIECE_BYTES
    )


JOINT_MODELS = {
    "gpt2, 8 replicas": (8, gpt2(mesh(8), None)),
    "gpt2, 4 replicas of 2 shards": (8, gpt2(mesh(4, 2), None, 0)),
    "70b, 16 replicas": (16, llama70b(mesh(16), None)),
}


@pytest.mark.parametrize("model", JOINT_MODELS)
def test_bytes_are_balanced_although_ranks_have_bytes_of_their_own(model: str) -> None:
    size, tensors = JOINT_MODELS[model]
    mean = sum(nbytes(each) for each in tensors if not each.tied) / size
    private = [int(mean / 4 * (rank % 5) / 2) for rank in range(size)]

    def captured(rank: int) -> Captured:
        return captured_by(rank, [*tensors, Tensor("own", (private[rank],), "uint8")])

    # Some ranks of the large world, since each looks at thousands of pieces.
    plans = jointly(size, captured, range(0, size, max(1, size // 6)))
    check_balance(map(written_bytes, plans), mean + sum(private) / size)


# Replicas


def test_replicas_on_some_ranks_and_on_several_meshes_are_written_once() -> None:
    def captured(rank: int) -> Captured:
        half = Mesh((2,), (0, 1)) if rank < 2 else Mesh((2,), (2, 3))
        tensors = [Tensor("w", on(half, (4, 3), 0)), Tensor(f"stage-{rank % 2}", (3,))]
        return captured_by(rank, tensors, ["w", "stage-0", "stage-1"])

    names = Counter(e.name for plan in jointly(4, captured) for e in plan.layout.entries)
    assert names == dict.fromkeys(["w@0,0:2,3", "w@2,0:4,3", "stage-0", "stage-1"], 1)


def test_meshes_of_which_nothing_is_said_write_their_own() -> None:
    def captured(rank: int) -> Captured:
        half = Mesh((2,), (0, 1)) if rank < 2 else Mesh((2,), (2, 3))
        return captured_by(rank, [Tensor("w", on(half, (4 + half.ranks[0], 3), 0))])

    assert [len(plan.layout.entries) for plan in jointly(4, captured)] == [1, 1, 1, 1]


# Contradictions


def _shape(rank: int) -> list[Tensor]:
    return [Tensor("w", (3 + (rank == 2), 2))]


def _dtype(rank: int) -> list[Tensor]:
    return [Tensor("w", (3, 2), "float16" if rank == 2 else "float32")]


def _tied(rank: int) -> list[Tensor]:
    return [Tensor("w", (3, 2)), Tensor("x", (3, 2), tied="w" if rank == 2 else None)]


def _placement(rank: int) -> list[Tensor]:
    return [Tensor("d", on(mesh(3), (6, 6), 0 if rank < 2 else 1))]


def _global_shape(rank: int) -> list[Tensor]:
    return [Tensor("d", on(mesh(3), (6 + 3 * (rank == 2), 6), 0))]


def _absent(rank: int) -> list[Tensor]:
    return [Tensor("d", on(mesh(3), (6, 6), 0))] if rank < 2 else []


def _hole(rank: int) -> list[Tensor]:
    return [Tensor("w", on(mesh(3), (6, 6), 0))] if rank < 2 else []


def _overlap(rank: int) -> list[Tensor]:
    return [Tensor("w", on(mesh(3), (6, 6), 0) if rank < 2 else (6, 6))]


CONTRADICTIONS = {
    _shape: r"float32 of shape \[3, 2\] on rank 0 and float32 of shape \[4, 2\] on rank 2",
    _dtype: r"float32 of shape .* rank 0 and float16 of shape",
    _tied: r"shares memory as \['w'\] on rank 0 and as \['w', 'x'\] on rank 2",
    _placement: r"cut along \[0\] on rank 0 and on a mesh .* cut along \[1\] on rank 2",
    _global_shape: r"\[6, 6\] on rank 0 and float32 of shape \[9, 6\] on rank 2",
    _absent: "lies on a mesh with rank 2, which lacks it",
    _hole: "lack its box",
    _overlap: "overlap without being the same",
}


@pytest.mark.parametrize("tensors", CONTRADICTIONS, ids=lambda each: each.__name__)
def test_ranks_that_contradict_each_other_are_named(tensors: object) -> None:
    assert callable(tensors)
    with pytest.raises(UnsupportedState, match=CONTRADICTIONS[tensors]) as caught:
        jointly(3, lambda rank: captured_by(rank, tensors(rank), ["w", "x"]))
    assert caught.value.key in ("w", "d")
    assert caught.value.hint


def test_a_mark_on_some_ranks_only_is_named() -> None:
    tensors = [Tensor("w", on(mesh(2), (4, 2), None))]
    with pytest.raises(UnsupportedState, match="its mesh's own on rank 0 and replicated on rank 1"):
        jointly(2, lambda rank: captured_by(rank, tensors, ["w"][:rank]))


def test_groups_that_contradict_each_other_are_named() -> None:
    tensors = [Tensor("w", (4, 2))]
    groups = ((0, 1), (0, 1, 2), (0, 1, 2))
    message = "replicated over the ranks 0, 1 on rank 0 and over the ranks 0, 1, 2 on rank 1"
    with pytest.raises(UnsupportedState, match=message):
        jointly(
            3, lambda rank: Captured(Node("absent"), held_by(rank, tensors), [], {0: groups[rank]})
        )


@pytest.mark.parametrize("group", [(1, 2), (0, 3), (-1, 0)])
def test_a_group_without_its_rank_or_outside_of_the_world_is_refused(
    group: tuple[int, ...],
) -> None:
    for layout in ((4, 2), on(mesh(3), (4, 2), None)):
        leaves = held_by(0, [Tensor("w", layout)])
        with pytest.raises(UnsupportedTopology, match="are said to hold this tensor alike"):
            LocalPlanner().plan(
                Captured(Node("absent"), leaves, [], {0: group}), rank=0, world_size=3
            )


def test_each_group_writes_a_tensor_once_and_leaves_it_to_no_other() -> None:
    tensors = [Tensor("large", (400, 250)), Tensor("small", (3,))]
    groups = [(0, 3), (1, 2, 4), (1, 2, 4), (0, 3), (1, 2, 4)]
    states = [
        Captured(Node("absent"), held_by(rank, tensors), [], dict.fromkeys((0, 1), group))
        for rank, group in enumerate(groups)
    ]
    for plans in (
        [LocalPlanner().plan(each, rank=rank, world_size=5) for rank, each in enumerate(states)],
        jointly(5, lambda rank: states[rank]),
    ):
        assert not unwritten(plans, states)
        for rank, plan in enumerate(plans):
            assert {row.owner for row in plan.layout.chunks} <= {None, *groups[rank]}
        for group in set(groups):
            assert sum(written_bytes(plans[rank]) for rank in group) == 400_012


def test_private_tensors_of_one_name_may_differ() -> None:
    plans = jointly(3, lambda rank: captured_by(rank, _shape(rank)))
    assert [plan.layout.entries[0].shape for plan in plans] == [(3, 2), (3, 2), (4, 2)]
