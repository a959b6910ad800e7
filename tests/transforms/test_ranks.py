"""Transforms of what several ranks saved, into any other number of ranks and placements."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

import ckpipe
from ckpipe import Cast, Fuse, Rearrange, Rename, Split, Stack, Unstack
from ckpipe.errors import PerRankValue, StructureMismatch
from ckpipe.testing import MemoryBackend
from tests.inner.made_up_ranks import Held, load_as, request, store_ranks
from tests.support.pipelines import stores
from tests.support.placed_tensors import placed, rank_of
from tests.support.rank_pipelines import ranks


def numbered(*shape: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + math.prod(shape), dtype=torch.float32).reshape(shape)


def cut(shape: tuple[int, ...], dim: int, world_size: int) -> list[Held]:
    """Blocks along a dimension, one for each rank."""
    size = -(-shape[dim] // world_size)
    found: list[Held] = []
    for rank in range(world_size):
        low, high = min(shape[dim], rank * size), min(shape[dim], (rank + 1) * size)
        box = (
            tuple(low if n == dim else 0 for n in range(len(shape))),
            tuple(high if n == dim else m for n, m in enumerate(shape)),
        )
        found.append([(box, rank)] if low < high else [])
    return found


FULL = {
    "q": numbered(6, 4),
    "k": numbered(3, 4, first=100),
    "e.0": numbered(5, 4, first=200),
    "e.1": numbered(5, 4, first=300),
    "c": numbered(5, 6, first=400),
}
TRANSFORMS = [
    Rename({"q": "query", "k": "key"}),
    Fuse(["query", "key"], "qk"),
    Rearrange("qk", [[3, -1], -1], [[1, 0], 2]),
    Stack("e.{}", "experts"),
    Rearrange("experts", [-1, -1, [2, 2]], [[0, 2], 1, 3]),
    Split("c", ["c0", "c1", "c2"], dim=1, sizes=[1, 2, 3]),
    Fuse(["c2", "c0"], "c20", dim=1),
    Unstack("c20", "row.{}"),
    Cast({"c1": torch.float64}),
]
_TURNED = torch.cat([FULL["c"][:, 3:], FULL["c"][:, :1]], 1)
EXPECTED = {
    "qk": torch.cat([FULL["q"], FULL["k"]]).view(3, 3, 4).transpose(0, 1).reshape(9, 4),
    "experts": torch.stack([FULL["e.0"], FULL["e.1"]])
    .view(2, 5, 2, 2)
    .permute(0, 2, 1, 3)
    .reshape(4, 5, 2),
    "c1": FULL["c"][:, 1:3].double(),
    **{f"row.{n}": row for n, row in enumerate(_TURNED)},
}


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 4), st.integers(0, 1), st.integers(1, 4), st.integers(0, 1), st.integers(0, 3)
)
async def test_any_layout_is_transformed_into_any_other(
    saved_by: int, saved_dim: int, loaded_by: int, loaded_dim: int, rank: int
) -> None:
    backend, rank = MemoryBackend(), rank % loaded_by
    blocks = {label: cut(tuple(each.shape), saved_dim, saved_by) for label, each in FULL.items()}
    held = [{label: blocks[label][n] for label in FULL} for n in range(saved_by)]
    document = await store_ranks(backend, [FULL] * saved_by, held)
    with rank_of(rank, loaded_by):
        wanted, target = {}, {}
        for label, full in EXPECTED.items():
            dim = min(loaded_dim, full.ndim - 1)
            target[label] = placed(torch.zeros_like(full), (loaded_by,), (Shard(dim),))
            wanted[label] = placed(full, (loaded_by,), (Shard(dim),)).to_local()
        await load_as(backend, document, rank, loaded_by, request(target, transform=TRANSFORMS))
        for label, local in wanted.items():
            assert target[label].dtype is local.dtype
            assert torch.equal(target[label].to_local(), local), label


async def test_ranks_that_saved_different_labels_are_put_together() -> None:
    backend = MemoryBackend()
    experts = [numbered(3, 2, first=10 * n) for n in range(4)]
    states = [
        {"e": {str(n): experts[n] for n in own}, "common": torch.ones(2)}
        for own in ((0, 2), (1, 3))
    ]
    document = await store_ranks(backend, states)
    transform = [Stack("e.{}", "e.all")]
    target: Any = {"e": {"all": torch.zeros(4, 3, 2)}, "common": torch.zeros(2)}
    for rank, world_size in ((0, 1), (1, 2), (2, 3)):
        target["e"]["all"].zero_()
        result = await load_as(
            backend, document, rank, world_size, request(target, transform=transform)
        )
        assert torch.equal(target["e"]["all"], torch.stack(experts))
        assert result.transformed["e.3"] == ("e.all",)
    clash = request(target, transform=[Rename({"e.0": "e.1"})])
    with pytest.raises(StructureMismatch, match="one name"):
        await load_as(backend, document, 0, 1, clash)


async def test_values_of_each_rank_are_not_mixed_by_a_transform() -> None:
    for layers in ({}, {"more": torch.ones(1)}):
        backend = MemoryBackend()
        own = [{"q": torch.full((2,), float(n)), "k": torch.full((2,), 1.0 + n)} for n in (0, 1)]
        own[1] |= layers  # ranks of other structures are compared in another way
        document = await store_ranks(backend, own)
        for transform, name in (
            ([Fuse(["q", "k"], "qk")], "qk"),
            ([Split("q", ["a", "b"])], "a"),
        ):
            target = {name: torch.zeros(4 if name == "qk" else 1)}
            loose = request(target, transform=transform, strict=False)
            with pytest.raises(PerRankValue):
                await load_as(backend, document, 0, 1, loose)
            assert not target[name].any()
        fused = {"qk": torch.zeros(4)}
        await load_as(
            backend,
            document,
            1,
            2,
            request(fused, transform=[Fuse(["q", "k"], "qk")], strict=False),
        )
        assert fused["qk"].tolist() == [1, 1, 2, 2]


def test_many_ranks_load_a_transformed_checkpoint_through_pipelines() -> None:
    with stores() as store:
        with ranks(store.url, 18) as world:  # so many do not read the whole index otherwise
            for rank, pipeline in enumerate(world):
                own = {"own": torch.ones(1)} if rank == 3 else {}
                state = {"q": torch.full((2,), float(rank)), "k": torch.ones(2), **own}
                pipeline.save(state, 1).wait()
            result = world[7].load(step=1, transform=[Fuse(["q", "k"], "qk")])
            assert result is not None
            assert result.state["qk"].tolist() == [7, 7, 1, 1]
        again = ckpipe.load(
            store.url, transform=[Split("q", ["a", "b"])], per_rank="rank0", include=["b"]
        )
        assert again.state["b"].tolist() == [0]
        target = {name: torch.zeros(n) for name, n in (("q", 2), ("k", 2), ("own", 1), ("new", 1))}
        lenient = ckpipe.load(store.url, target, per_rank="rank0", allow_missing=["*"])
        assert lenient.missing == ("new",)  # others have what the first rank lacks
        assert target["own"].tolist() == [1]
