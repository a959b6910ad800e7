"""Boxes and the shards made of them, against the dullest way of doing it: element by element."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ckpipe.format.box_cover import BoxIndex
from ckpipe.format.boxes import (
    Box,
    box_shape,
    flat_index,
    flat_ranges,
    flat_start,
)
from ckpipe.state.placements import Mesh, Placement, Sharding, sharding

SHAPE = (6, 5, 4)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...] = SHAPE) -> Box:
    sides = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return tuple(low for low, _ in sides), tuple(high for _, high in sides)


many_boxes = st.lists(boxes_in(), max_size=30)


def mask(box: Box) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    found = np.zeros(SHAPE, dtype=np.int64)
    found[slices(box)] = 1
    return found


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in zip(*box, strict=True))


@given(boxes_in(), many_boxes)
def test_a_region_is_covered_as_far_as_boxes_reach_and_nowhere_twice(
    region: Box, boxes: list[Box]
) -> None:
    parts, missing = BoxIndex(boxes).cover(region)
    given_once = sum((mask(part) for _, part in parts), np.zeros(SHAPE, dtype=np.int64))
    left_out = sum((mask(part) for part in missing), np.zeros(SHAPE, dtype=np.int64))
    held = np.minimum(sum((mask(box) for box in boxes), np.zeros(SHAPE, dtype=np.int64)), 1)
    assert (given_once == held * mask(region)).all()
    assert (left_out == (1 - held) * mask(region)).all()
    for number, part in parts:
        assert (mask(part) <= mask(boxes[number])).all()


def test_boxes_without_dimensions_are_given_once() -> None:
    assert BoxIndex([((), ()), ((), ())]).cover(((), ())) == ([(0, ((), ()))], [])


def test_a_pinwheel_that_no_axis_divides_covers_a_square() -> None:
    wheel = [
        ((0, 0), (2, 1)), ((2, 0), (3, 2)), ((1, 2), (3, 3)), ((0, 1), (1, 3)), ((1, 1), (2, 2)),
    ]  # fmt: skip
    assert BoxIndex(wheel).cover(((0, 0), (3, 3))) == (list(enumerate(wheel)), [])


def test_columns_with_row_cuts_of_their_own_cover_a_tensor() -> None:
    # Ranks that replicate a column write unequal shares of it, by what else each of them has. All
    # columns are open together, so that comparing each part with what is left would take minutes.
    columns, rows = 2048, 8192
    cuts = [[0, *(1 + n % 7 + 2000 * k for k in range(1, 4)), rows] for n in range(columns)]
    boxes = [
        ((low, n), (high, n + 1))
        for n, each in enumerate(cuts)
        for low, high in itertools.pairwise(each)
    ]
    parts, missing = BoxIndex(boxes).cover(((0, 0), (rows, columns)))
    assert parts == list(enumerate(boxes))
    assert missing == []


def test_a_gap_among_many_boxes_is_found() -> None:
    grid = [((row, column), (row + 1, column + 1)) for row in range(64) for column in range(64)]
    gap = grid.pop(1000)
    assert BoxIndex(grid).cover(((0, 0), (64, 64))) == (list(enumerate(grid)), [gap])


def test_one_box_that_has_everything_is_preferred_to_pieces() -> None:
    boxes = [((0,), (2,)), ((2,), (4,)), ((0,), (9,))]
    assert BoxIndex(boxes).cover(((0,), (4,))) == ([(2, ((0,), (4,)))], [])


@given(st.data(), st.integers(0, 50))
def test_ranges_of_a_box_hold_it_and_are_as_few_as_asked_for(
    data: st.DataObject, most: int
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=4)))
    box = data.draw(boxes_in(shape).filter(lambda box: 0 not in box_shape(box)))
    numbers = np.arange(math.prod(shape)).reshape(shape)
    wanted = set(numbers[slices(box)].ravel().tolist())
    ranges = list(flat_ranges(shape, box, most))
    covered = [n for lo, hi in ranges for n in range(lo, hi)]
    assert wanted <= set(covered)
    assert covered == sorted(set(covered))
    assert {lo for lo, _ in ranges} | {hi - 1 for _, hi in ranges} <= wanted
    if most == 0:
        assert set(covered) == wanted
    start = flat_start(shape, box)
    runs = sorted(wanted) == list(range(min(wanted), max(wanted) + 1))
    assert (start == min(wanted)) if runs else (start is None)
    assert flat_index(shape, box[0]) == min(wanted)


# ---- shards, by mesh and placements, are what torch makes of them ----


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
                found[slices(held.local)] = full[slices(held.box)]
            assert torch.equal(found, expected)


def test_rank_that_is_not_on_the_mesh_holds_nothing() -> None:
    spread = sharding(Mesh((2,), (4, 6)), (Placement(0),), (8,))
    assert (spread.held(5), spread.replicas(5), spread.local_shape(5)) == ((), (), None)


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
