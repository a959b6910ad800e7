"""Loading what several ranks saved: into any other number of ranks, meshes and placements."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import anyio
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ckpipe.errors import (
    DtypeMismatch,
    InvalidManifest,
    PerRankValue,
    ShapeMismatch,
    SharingConflict,
    StructureMismatch,
)
from ckpipe.testing import MemoryBackend
from tests.inner.made_up_ranks import Held, load_as, request, store_ranks
from tests.support.placed_tensors import placed, rank_of

Box = tuple[tuple[int, ...], tuple[int, ...]]


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor whose elements are all different."""
    return torch.arange(1, math.prod(shape) + 1, dtype=dtype).reshape(shape)


def rows(n: int, world_size: int, *inner: int) -> list[Held]:
    """Blocks of rows, one for each rank, as ``torch.chunk`` makes them."""
    size = -(-n // world_size)
    bounds = [(min(n, rank * size), min(n, (rank + 1) * size)) for rank in range(world_size)]
    zeros = (0,) * len(inner)
    return [
        [(((lo, *zeros), (hi, *inner)), rank)] if lo < hi else []
        for rank, (lo, hi) in enumerate(bounds)
    ]


async def sharded(backend: MemoryBackend, full: torch.Tensor, world_size: int) -> Any:
    """A checkpoint of one tensor ``w`` of which each rank wrote a block of rows."""
    held = rows(full.shape[0], world_size, *full.shape[1:])
    return await store_ranks(backend, [{"w": full}] * world_size, [{"w": boxes} for boxes in held])


async def test_a_plain_target_is_put_together_in_every_world_size() -> None:
    backend, full = MemoryBackend(), numbered(5, 3)
    document = await sharded(backend, full, 3)
    for rank, world_size in ((0, 1), (1, 2), (2, 3)):
        for target in (torch.zeros(5, 3), torch.zeros(3, 5).t(), torch.zeros(10, 3)[::2]):
            await load_as(backend, document, rank, world_size, request({"w": target}))
            assert torch.equal(target, full)


async def test_values_are_converted_only_if_asked_to() -> None:
    backend, full = MemoryBackend(), numbered(5, 3)
    document = await sharded(backend, full, 3)
    with rank_of(1, 2):
        target = {"w": placed(torch.zeros(5, 3, dtype=torch.float64), (2,), (Shard(0),))}
        with pytest.raises(DtypeMismatch):
            await load_as(backend, document, 1, 2, request(target))
        await load_as(backend, document, 1, 2, request(target, cast=True))
        assert torch.equal(target["w"].to_local(), full[3:].double())


async def test_what_does_not_fit_is_refused_untouched() -> None:
    backend, full = MemoryBackend(), numbered(4, 2)
    document = await sharded(backend, full, 2)
    with rank_of(0, 2):
        larger = {"w": placed(torch.zeros(6, 2), (2,), (Shard(0),))}
        with pytest.raises(ShapeMismatch):
            await load_as(backend, document, 0, 2, request(larger))
        assert not larger["w"].to_local().any()
        summed: dict[str, Any] = {"w": placed(torch.zeros(4, 2), (2,), (Replicate(),))}
        summed["w"]._spec.placements = (Partial(),)
        with pytest.raises(StructureMismatch, match="sum of several"):
            await load_as(backend, document, 0, 2, request(summed))


async def test_a_rank_that_gets_no_place_for_its_part_is_told_what_to_pass() -> None:
    backend, full = MemoryBackend(), numbered(4, 2)
    document = await sharded(backend, full, 2)
    for world_size in (2, 3):
        with pytest.raises(StructureMismatch, match="training_state") as caught:
            await load_as(backend, document, 0, world_size, request())
        assert caught.value.key == "w"


async def test_elements_that_no_rank_wrote_are_named_before_anything_is_touched() -> None:
    backend, full = MemoryBackend(), numbered(6, 2)
    held = rows(6, 3, 2)
    held[1] = [(((2, 0), (3, 2)), 1)]
    states = [{"first": torch.ones(2), "w": full}] * 3
    document = await store_ranks(backend, states, [{"w": each} for each in held])
    target = {"first": torch.zeros(2), "w": torch.zeros(6, 2)}
    with pytest.raises(InvalidManifest, match=r"\[3, 0\] to \[4, 2\]") as caught:
        await load_as(backend, document, 0, 1, request(target))
    assert caught.value.key == "w"
    assert not target["first"].any()
    with rank_of(0, 3):
        fine: dict[str, Any] = {
            "first": torch.zeros(2),
            "w": placed(torch.zeros(6, 2), (3,), (Shard(0),)),
        }
        await load_as(backend, document, 0, 3, request(fine))
        assert torch.equal(fine["w"].to_local(), full[:2])


def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that together are a shape, cut anywhere."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        lower, upper = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        middle = draw(st.integers(lower[dim], upper[dim]))
        boxes.append((lower, (*upper[:dim], middle, *upper[dim + 1 :])))
        boxes.append(((*lower[:dim], middle, *lower[dim + 1 :]), upper))
    return boxes


@st.composite
def worlds(draw: st.DrawFn) -> tuple[tuple[int, ...], list[dict[str, Held]]]:
    """A shape, and ranks that hold boxes of it, some of them several times and overlapping."""
    shape = draw(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4)))
    world_size = draw(st.integers(1, 8))
    held: list[dict[str, Held]] = [defaultdict(list) for _ in range(world_size)]
    for _ in range(draw(st.integers(1, 2))):
        for box in cuts(draw, shape):
            holders = draw(st.sets(st.integers(0, world_size - 1), min_size=1))
            owner = draw(st.sampled_from(sorted(holders)))
            for rank in holders:
                if not any(known == box for known, _ in held[rank]["w"]):
                    held[rank]["w"] = [*held[rank]["w"], (box, owner)]
    for each in held:
        each["w"]  # a rank that holds nothing of it says so
    return shape, [_owned(each, held) for each in held]


def _owned(mine: dict[str, Held], held: list[dict[str, Held]]) -> dict[str, Held]:
    """Whoever is said to have written a box holds it as its own."""
    fixed = []
    for box, owner in mine["w"]:
        while (other := dict(held[owner]["w"])[box]) != owner:
            owner = other
        fixed.append((box, owner))
    return {"w": fixed}


@given(worlds(), st.integers(1, 4), st.integers(1, 4), st.data())
def test_boxes_of_any_ranks_load_into_any_mesh(
    world: tuple[tuple[int, ...], list[dict[str, Held]]], rows: int, columns: int,
    data: st.DataObject,
) -> None:  # fmt: skip
    shape, held = world
    full = numbered(*shape)
    rank = data.draw(st.integers(0, rows * columns - 1))
    kinds = [Shard(0), Shard(1), Shard(2), Replicate(), _StridedShard(0, split_factor=2)]
    placements = (data.draw(st.sampled_from(kinds)), data.draw(st.sampled_from(kinds)))

    async def main() -> None:
        backend = MemoryBackend()
        document = await store_ranks(backend, [{"w": full}] * len(held), held)
        with rank_of(rank, rows * columns):
            target = placed(torch.zeros(shape), (rows, columns), placements)
            try:
                await load_as(backend, document, rank, rows * columns, request({"w": target}))
            except PerRankValue:  # groups of ranks have cut it in two ways, which do not compare
                assert not target.to_local().any()
                whichever = request({"w": target}, per_rank="rank0")
                await load_as(backend, document, rank, rows * columns, whichever)
            expected = placed(full, (rows, columns), placements)
            assert torch.equal(target.to_local(), expected.to_local())

    anyio.run(main)


# What is read


async def test_no_more_is_read_than_the_part_that_is_wanted() -> None:
    backend = MemoryBackend()
    full = torch.randn(64, 1 << 19)  # rows of 2 MiB
    document = await sharded(backend, full, 2)
    with rank_of(1, 4):
        target = {"w": placed(torch.zeros_like(full), (4,), (Shard(0),))}
        result = await load_as(backend, document, 1, 4, request(target))
        assert torch.equal(target["w"].to_local(), full[16:32])
        assert result.report is not None
        assert result.report.bytes <= 1.1 * 16 * (2 << 20)
    with rank_of(1, 4):
        target = {"w": placed(torch.zeros_like(full), (4,), (Shard(1),))}
        result = await load_as(backend, document, 1, 4, request(target))
        assert torch.equal(target["w"].to_local(), full[:, 1 << 17 : 1 << 18])
        assert result.report is not None
        assert result.report.bytes <= 64 * ((1 << 19) + (2 << 20))


# Values that belong to a rank


def own_states(n: int) -> list[dict[str, Any]]:
    return [
        {"seed": rank, "lr": 0.5, "noise": torch.full((2,), float(rank)), "step": torch.tensor(7)}
        for rank in range(n)
    ]


async def test_with_another_number_only_what_is_common_loads_unasked() -> None:
    backend = MemoryBackend()
    document = await store_ranks(backend, own_states(3))
    for key in ("seed", "noise"):
        target = {"lr": 0.0, "step": torch.tensor(0), key: own_states(1)[0][key]}
        with pytest.raises(PerRankValue) as caught:
            await load_as(backend, document, 1, 2, request(target, strict=False))
        assert caught.value.key == key
        assert target["step"].item() == 0
    common = request(include=["lr", "step"])
    state = (await load_as(backend, document, 1, 2, common)).state
    assert state == {"lr": 0.5, "step": torch.tensor(7)}


async def test_what_differs_can_be_dropped_taken_from_rank_0_or_combined() -> None:
    backend = MemoryBackend()
    document = await store_ranks(backend, own_states(3))

    def target() -> dict[str, Any]:
        return {"seed": -1, "lr": 0.0, "noise": torch.zeros(2) - 1, "step": torch.tensor(0)}

    def total(label: str, values: Any) -> Any:
        assert label in ("seed", "noise")
        assert len(values) == 3
        return sum(values)

    for policy, seed in (("drop", -1), ("rank0", 0), (total, 3)):
        for into in (target(), None):
            result = await load_as(backend, document, 0, 1, request(into, per_rank=policy))
            if into is None and policy == "drop":
                assert set(result.state) == {"lr", "step"}
                continue
            assert (result.state["seed"], result.state["step"].item()) == (seed, 7)
            assert result.state["noise"].tolist() == [seed, seed]
            assert result.missing == ()
            assert into is None or result.state["noise"] is into["noise"]


# Tied tensors


async def test_a_target_that_ties_what_differs_is_refused() -> None:
    backend, full = MemoryBackend(), numbered(4, 3)
    held = [{"a": each, "b": each} for each in rows(4, 2, 3)]
    document = await store_ranks(backend, [{"a": full, "b": full + 1}] * 2, held)
    with rank_of(1, 2):
        tied = placed(torch.zeros(4, 3), (2,), (Shard(0),))
        with pytest.raises(SharingConflict):
            await load_as(backend, document, 1, 2, request({"a": tied, "b": tied.view(4, 3)}))
        assert not tied.to_local().any()
