"""Shards by mesh and placements are what torch's DTensor makes of them, element by element."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ckpipe.format.boxes import box_shape, flat_start
from ckpipe.state.placements import Mesh, Placement, Sharding, sharding


@st.composite
def shardings(draw: st.DrawFn) -> Sharding:
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.none() | st.integers(0, len(shape) - 1)
    placements = tuple(Placement(draw(dims), draw(st.integers(1, 4))) for _ in mesh_shape)
    ranks = draw(st.permutations(range(3, 3 + math.prod(mesh_shape))))
    return sharding(Mesh(mesh_shape, tuple(ranks)), placements, shape)


def torch_placement(placement: Placement) -> Any:
    if placement.dim is None:
        return Replicate()
    if placement.split_factor == 1:
        return Shard(placement.dim)
    return _StridedShard(placement.dim, split_factor=placement.split_factor)


def torch_local(full: torch.Tensor, spread: Sharding, coordinate: tuple[int, ...]) -> torch.Tensor:
    """The local tensor as torch cuts it, one placement after another."""
    for n, index, placement in zip(spread.mesh.shape, coordinate, spread.placements, strict=True):
        if placement.dim is not None:
            made = torch_placement(placement)
            pieces, _ = made._split_tensor(full, n, with_padding=False, contiguous=False)
            full = pieces[index]
    return full


def cut(tensor: torch.Tensor, box: Any) -> torch.Tensor:
    return tensor[tuple(map(slice, *box))]


@given(shardings())
def test_boxes_are_what_torch_gives_the_rank(spread: Sharding) -> None:
    full = torch.arange(math.prod(spread.shape)).view(spread.shape)
    for rank in spread.mesh.ranks:
        coordinate = spread.coordinate(rank)
        assert coordinate is not None
        expected = torch_local(full, spread, coordinate)
        made = [torch_placement(each) for each in spread.placements]
        shape, _ = _compute_local_shape_and_global_offset(
            spread.shape, spread.mesh.shape, list(coordinate), made
        )
        assert spread.local_shape(rank) == tuple(expected.shape) == tuple(shape)
        if full.numel():
            found = torch.full(shape, -1)
            for held in spread.held(rank):
                cut(found, held.local).copy_(cut(full, held.box))
            assert torch.equal(found, expected)


@given(shardings())
def test_replicas_hold_the_same_and_others_hold_nothing_of_it(spread: Sharding) -> None:
    for rank in spread.mesh.ranks:
        mine = {held.box for held in spread.held(rank)}
        replicas = spread.replicas(rank)
        assert rank in replicas
        assert len(set(replicas)) == len(replicas)
        for other in spread.mesh.ranks:
            theirs = {held.box for held in spread.held(other)}
            if other in replicas:
                assert spread.replicas(other) == replicas
                assert theirs == mine
            else:
                assert not theirs & mine


def test_rank_that_is_not_on_the_mesh_holds_nothing() -> None:
    spread = sharding(Mesh((2,), (4, 6)), (Placement(0),), (8,))
    assert (spread.held(5), spread.replicas(5), spread.local_shape(5)) == ((), (), None)


def test_strided_shard_of_fsdp_over_tensor_parallel_is_one_box() -> None:
    placements = (Placement(0, split_factor=2), Placement(0))
    spread = sharding(Mesh((2, 2), (0, 1, 2, 3)), placements, (8, 4))
    assert [[held.box for held in spread.held(rank)] for rank in range(4)] == [
        [((low, 0), (low + 2, 4))] for low in (0, 4, 2, 6)
    ]


def test_strided_shard_by_itself_is_several_boxes() -> None:
    spread = sharding(Mesh((2,), (0, 1)), (Placement(0, split_factor=3),), (12,))
    assert [held.box for held in spread.held(1)] == [((2,), (4,)), ((6,), (8,)), ((10,), (12,))]
    assert [held.at for held in spread.held(1)] == [(0,), (2,), (4,)]


@pytest.mark.parametrize(
    ("mesh", "placements", "shape"),
    [
        (Mesh((2,), (0, 1, 2)), (Placement(),), (4,)),
        (Mesh((2,), (0, 1)), (), (4,)),
        (Mesh((2,), (0, 1)), (Placement(1),), (4,)),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    mesh: Mesh, placements: tuple[Placement, ...], shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"place|cut"):
        sharding(mesh, placements, shape)


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_boxes_that_lie_in_one_piece_are_known(shape: list[int], data: st.DataObject) -> None:
    lower = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    upper = tuple(data.draw(st.integers(lo + 1, n)) for lo, n in zip(lower, shape, strict=True))
    places = cut(torch.arange(math.prod(shape)).view(shape), (lower, upper)).flatten().tolist()
    in_one_piece = places == list(range(places[0], places[0] + len(places)))
    assert flat_start(shape, (lower, upper)) == (places[0] if in_one_piece else None)
    assert math.prod(box_shape((lower, upper))) == len(places)
