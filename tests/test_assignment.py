"""One rank decides for all: each element is written once, evenly, or ranks are told why not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_ranks import (
    Tensor,
    captured_by,
    check_balance,
    gpt2,
    jointly,
    llama70b,
    mesh,
    nbytes,
    on,
    written_bytes,
)
from test_division import WORLD, check_written_once, spread_tensors

from ckpipe.errors import SaveError, UnsupportedState
from ckpipe.plan import assignment
from ckpipe.plan.assignment import (
    decode_description,
    describe,
    in_rows,
    water_fill,
)
from ckpipe.plan.division import MIN_PIECE_BYTES
from ckpipe.planning import Captured, RankPlan
from ckpipe.state.placements import Mesh, Sharding, sharding

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


@pytest.fixture(params=[1, 24, 1 << 20])
def piece_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignment, "MIN_PIECE_BYTES", request.param)


@pytest.mark.usefixtures("piece_bytes")
class TestEveryWorld:
    """Whatever the pieces' size."""

    @settings(max_examples=10, deadline=None)
    @given(worlds())
    def test_every_element_is_written_once_by_a_rank_that_has_it_in_every_plan_alike(
        self, world: list[list[Tensor]]
    ) -> None:
        plans = plans_of(world)
        assert plans == plans_of(world)
        check_written_once(states_of(world), plans)


def test_offers_of_another_version_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = describe([], frozenset(), rank=0, world_size=1).data
    monkeypatch.setattr("ckpipe.plan.assignment._VERSION", 2)
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


MODELS = {
    "gpt2, 8 replicas": (8, gpt2(mesh(8), None)),
    "gpt2, 4 replicas of 2 shards": (8, gpt2(mesh(4, 2), None, 0)),
    "70b, 16 replicas": (16, llama70b(mesh(16), None)),
}


@pytest.mark.parametrize("model", MODELS)
def test_bytes_are_balanced_although_ranks_have_bytes_of_their_own(model: str) -> None:
    size, tensors = MODELS[model]
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


def test_private_tensors_of_one_name_may_differ() -> None:
    plans = jointly(3, lambda rank: captured_by(rank, _shape(rank)))
    assert [plan.layout.entries[0].shape for plan in plans] == [(3, 2), (3, 2), (4, 2)]


def test_equal_shardings_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[int] = Counter()
    real = Sharding.held

    def held(self: Sharding, rank: int) -> object:
        calls[rank] += 1
        return real(self, rank)

    tensors = [Tensor(f"t{n}", sharding(mesh(8), on(mesh(8), (64, 8), 0).placements, (64, 8)))
               for n in range(50)]  # fmt: skip
    states = [captured_by(rank, tensors) for rank in range(8)]
    monkeypatch.setattr(Sharding, "held", held)
    jointly(8, states.__getitem__)
    # Once for the rank's own division and once where it is decided for all.
    assert calls == dict.fromkeys(range(8), 2)
