"""Boxes: rectangular parts of a shape, and how they lie in its row-major order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Lower and upper bounds, one of each for every dimension."""


def flat_range_boxes(
    shape: Sequence[int], lo: int, hi: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cuts a range of a shape's row-major order into boxes.

    A range begins in the middle of a row, goes on over whole rows and ends in the middle of one,
    and so on inside of these rows: at most two boxes for each dimension, and one.

    Args:
        shape: The shape.
        lo: The first element of the range.
        hi: Behind its last element; at most the number of elements of the shape.

    Yields:
        Starts and sizes of boxes that, flattened one behind the other, are exactly the range.
    """
    if lo >= hi:
        return
    if not shape:
        yield (), ()
        return
    rest = shape[1:]
    inner = math.prod(rest)
    (first, skip), (last, tail) = divmod(lo, inner), divmod(hi, inner)
    if first == last:
        yield from _in_row(first, rest, skip, tail)
        return
    if skip:
        yield from _in_row(first, rest, skip, inner)
        first += 1
    if first < last:
        yield (first, *(0 for _ in rest)), (last - first, *rest)
    if tail:
        yield from _in_row(last, rest, 0, tail)


def _in_row(
    row: int, shape: Sequence[int], lo: int, hi: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for starts, sizes in flat_range_boxes(shape, lo, hi):
        yield (row, *starts), (1, *sizes)


def box_shape(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(high - low for low, high in zip(*box, strict=True))


def covers_exactly(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether boxes cover every element of a shape once: none twice, none left out."""
    full = tuple(shape)
    volume = 0
    for lower, upper in boxes:
        if not len(lower) == len(upper) == len(full):
            return False
        if not all(0 <= low <= high <= n for low, high, n in zip(lower, upper, full, strict=True)):
            return False
        volume += math.prod(box_shape((lower, upper)))
    # Disjoint boxes inside a shape that have its volume leave nothing out.
    return volume == math.prod(full) and not _any_overlap([box for box in boxes if _volume(box)])


def _volume(box: Box) -> int:
    return math.prod(box_shape(box))


def _any_overlap(boxes: list[Box]) -> bool:
    """Sweeps along the first dimension and compares only the boxes that are open together."""
    if len(boxes) < 2 or not boxes[0][0]:
        return len(boxes) > 1
    still_open: list[Box] = []
    for box in sorted(boxes):
        still_open = [other for other in still_open if other[1][0] > box[0][0]]
        if any(_overlap(box, other) for other in still_open):
            return True
        still_open.append(box)
    return False


def _overlap(a: Box, b: Box) -> bool:
    return all(
        max(low_a, low_b) < min(high_a, high_b)
        for low_a, high_a, low_b, high_b in zip(*a, *b, strict=True)
    )
