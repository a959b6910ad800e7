"""Regions put together from boxes, against the dullest way of doing it: element by element."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckpipe.format.box_cover import BoxIndex
from ckpipe.format.boxes import (
    Box,
    box_shape,
    flat_index,
    flat_range_boxes,
    flat_ranges,
    flat_start,
    intersection,
    moved,
)

SHAPE = (6, 5, 4)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


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


@given(boxes_in(), many_boxes)
def test_the_index_finds_all_boxes_that_meet_a_region(region: Box, boxes: list[Box]) -> None:
    found = dict(BoxIndex(boxes).meeting(region))
    for number, box in enumerate(boxes):
        common = mask(box) * mask(region)
        assert (number in found) == bool(common.any())
        if number in found:
            assert (mask(found[number]) == common).all()


@given(st.data())
def test_boxes_of_a_grid_cover_it_whole_in_any_order(data: st.DataObject) -> None:
    cuts = [
        sorted({0, n, *data.draw(st.sets(st.integers(1, n - 1), max_size=n - 1))}) for n in SHAPE
    ]
    rows = itertools.product(*map(itertools.pairwise, cuts))
    grid = [(tuple(lo for lo, _ in row), tuple(hi for _, hi in row)) for row in rows]
    boxes = data.draw(st.permutations(grid))
    parts, missing = BoxIndex(boxes).cover(((0, 0, 0), SHAPE))
    assert parts == list(enumerate(boxes))
    assert missing == []


def test_boxes_without_dimensions_are_given_once() -> None:
    assert BoxIndex([((), ()), ((), ())]).cover(((), ())) == ([(0, ((), ()))], [])


def test_a_pinwheel_that_no_axis_divides_covers_a_square() -> None:
    wheel = [
        ((0, 0), (2, 1)), ((2, 0), (3, 2)), ((1, 2), (3, 3)), ((0, 1), (1, 3)), ((1, 1), (2, 2)),
    ]  # fmt: skip
    assert BoxIndex(wheel).cover(((0, 0), (3, 3))) == (list(enumerate(wheel)), [])


def test_one_box_that_has_everything_is_preferred_to_pieces() -> None:
    boxes = [((0,), (2,)), ((2,), (4,)), ((0,), (9,))]
    assert BoxIndex(boxes).cover(((0,), (4,))) == ([(2, ((0,), (4,)))], [])


@given(boxes_in().filter(lambda box: 0 not in box_shape(box)), st.integers(0, 50))
def test_ranges_of_a_box_hold_it_and_are_as_few_as_asked_for(box: Box, most: int) -> None:
    numbers = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    wanted = set(numbers[slices(box)].ravel().tolist())
    ranges = list(flat_ranges(SHAPE, box, most))
    covered = [n for lo, hi in ranges for n in range(lo, hi)]
    assert wanted <= set(covered)
    assert covered == sorted(set(covered))
    assert {lo for lo, _ in ranges} | {hi - 1 for _, hi in ranges} <= wanted
    if most == 0:
        assert set(covered) == wanted
    start = flat_start(SHAPE, box)
    runs = sorted(wanted) == list(range(min(wanted), max(wanted) + 1))
    assert (start == min(wanted)) if runs else (start is None)
    assert flat_index(SHAPE, box[0]) == min(wanted)


@given(boxes_in(), boxes_in())
def test_intersections_are_those_of_the_elements(a: Box, b: Box) -> None:
    common = intersection(a, b)
    expected = mask(a) * mask(b)
    assert (common is None) == (not expected.any())
    if common is not None:
        assert (mask(common) == expected).all()
        assert box_shape(moved(common, a[0])) == box_shape(common)


@given(shapes, st.data())
def test_the_boxes_of_a_range_flatten_to_the_range(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    array = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    lo = data.draw(st.integers(0, array.size))
    hi = data.draw(st.integers(lo, array.size))
    boxes = list(flat_range_boxes(shape, lo, hi))
    found: list[int] = []
    for starts, sizes in boxes:
        where = tuple(slice(start, start + n) for start, n in zip(starts, sizes, strict=True))
        assert array[where].shape == sizes
        found += array[where].ravel().tolist()
    assert found == list(range(lo, hi))
    assert len(boxes) <= 2 * len(shape) + 1


def test_whole_rows_are_one_box() -> None:
    assert list(flat_range_boxes((4, 3), 3, 9)) == [((1, 0), (2, 3))]
