"""Ranges of a shape as boxes, and the proof that boxes cover a shape."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckpipe.format.box_cover import covers_exactly
from ckpipe.format.boxes import Box, box_shape, flat_range_boxes

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


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


@given(shapes, st.data())
def test_a_cut_shape_is_covered_and_a_changed_cut_is_not(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    boxes = [(tuple(0 for _ in shape), shape)]
    for _ in range(data.draw(st.integers(0, 4)) if shape else 0):
        boxes = _cut(boxes, data)
    assert covers_exactly(shape, boxes)
    full = [box for box in boxes if all(box_shape(box))]
    if full:
        victim = data.draw(st.sampled_from(full))
        assert not covers_exactly(shape, [*boxes, victim])
        assert not covers_exactly(shape, [box for box in boxes if box is not victim])


def _cut(boxes: list[Box], data: st.DataObject) -> list[Box]:
    at = data.draw(st.integers(0, len(boxes) - 1))
    lower, upper = boxes[at]
    dim = data.draw(st.integers(0, len(lower) - 1))
    middle = data.draw(st.integers(lower[dim], upper[dim]))
    left = (lower, (*upper[:dim], middle, *upper[dim + 1 :]))
    right = ((*lower[:dim], middle, *lower[dim + 1 :]), upper)
    return [*boxes[:at], left, right, *boxes[at + 1 :]]


def test_boxes_that_overlap_do_not_cover_even_if_their_volume_fits() -> None:
    assert not covers_exactly((4, 2), [((0, 0), (3, 2)), ((2, 0), (3, 2))])
    assert not covers_exactly((4,), [((0,), (5,))])
    assert not covers_exactly((), [((), ()), ((), ())])
    assert covers_exactly((), [((), ())])
