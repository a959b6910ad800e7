"""Boxes: rectangular parts of a shape, and their places in its row-major order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import lt, mul, sub

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Lower and upper bounds: one of each for every dimension, the upper ones exclusive."""


def flat_range_boxes(
    shape: Sequence[int], lo: int, hi: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a range of a shape's row-major order into boxes.

    A range begins within a row, goes on over whole rows and ends within a row; the ranges within
    those two rows are cut in the same way. So there are at most two boxes for each dimension, and
    one more.

    Args:
        shape: The shape.
        lo: The first element of the range.
        hi: The end of the range, exclusive; at most the number of elements of the shape.

    Yields:
        Starts and sizes of boxes that are exactly the range if flattened one after the other.
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
    """Return the shape of a box."""
    return tuple(map(sub, box[1], box[0]))


def box_volume(box: Box) -> int:
    """Return the number of elements of a box."""
    return math.prod(map(sub, box[1], box[0]))


def intersection(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    lower = tuple(map(max, a[0], b[0]))
    upper = tuple(map(min, a[1], b[1]))
    return (lower, upper) if all(map(lt, lower, upper)) else None


def moved(box: Box, origin: Sequence[int]) -> Box:
    """Return a box relative to another origin."""
    return tuple(map(sub, box[0], origin)), tuple(map(sub, box[1], origin))


def whole(shape: Sequence[int]) -> Box:
    """Return the box that covers a whole shape."""
    return (0,) * len(shape), tuple(shape)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major layout without holes."""
    steps = accumulate((max(n, 1) for n in shape[:0:-1]), mul, initial=1)
    return tuple(steps)[::-1][: len(shape)]


def flat_start(shape: Sequence[int], box: Box) -> int | None:
    """Return the start of a box in a shape's row-major order; None if it is not contiguous there.

    It is contiguous if it has a single index in every dimension before the last one that it cuts.
    """
    lower, upper = box
    rows = shape[1:]
    if shape and upper[1:] == rows and not any(lower[1:]):
        # Whole rows, which is nearly always the case.
        return lower[0] * math.prod(rows)
    start, step, cut = 0, 1, False
    for n, low, high in zip(reversed(shape), reversed(lower), reversed(upper), strict=True):
        if cut and high - low != 1:
            return None
        cut = cut or high - low != n
        start += low * step
        step *= n
    return start


def flat_ranges(shape: Sequence[int], box: Box, most: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a shape's row-major order that contain a box.

    Rows whose starts are at most ``most`` elements apart form one range with the elements between.

    Args:
        shape: The shape.
        box: A box in it that is not empty.
        most: The largest distance of joined rows, in elements.

    Yields:
        Start and end of each range, in their order; the end is exclusive.
    """
    start = flat_start(shape, box)
    if start is not None:
        yield start, start + box_volume(box)
        return
    lower, upper = box
    pitch = math.prod(shape[1:])
    inner = (lower[1:], upper[1:])
    if pitch <= most:
        first = flat_index(shape, lower)
        yield first, flat_index(shape, tuple(n - 1 for n in upper)) + 1
        return
    for row in range(lower[0], upper[0]):
        for lo, hi in flat_ranges(shape[1:], inner, most):
            yield row * pitch + lo, row * pitch + hi


def flat_index(shape: Sequence[int], at: Sequence[int]) -> int:
    """Return the index of an element in a shape's row-major order."""
    found = 0
    for n, index in zip(shape, at, strict=True):
        found = found * n + index
    return found
