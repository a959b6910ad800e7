"""Steps that place the boxes of one tensor in another that is cut, joined, stacked or rearranged.

Theory. The elements of a box lie by strides in a data file: row by row as they were saved. Moved,
clipped and permuted boxes do so too. Only if dimensions are joined to one that has no common
stride, the box is divided into several.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import NamedTuple

from ckpipe.errors import ShapeMismatch
from ckpipe.format.boxes import Box, contiguous_stride, flat_range_boxes

MOST_BOXES = 100_000
"""The most boxes into which a step may divide one box."""


class PlacedBox(NamedTuple):
    """A box of a tensor that is not empty, and where its elements lie.

    Args:
        box: The box.
        start: The place of its first element in the chunk, counted in elements.
        stride: The strides of its elements; those of dimensions with one index are arbitrary.
    """

    box: Box
    start: int
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shift:
    """Move boxes along a dimension, and clip them to a size.

    Args:
        dim: The dimension.
        by: The number of elements, which may be negative.
        size: The size of the new tensor in this dimension.
    """

    dim: int
    by: int
    size: int

    def __call__(self, place: PlacedBox) -> list[PlacedBox]:
        """Return the place in the new tensor, if anything is left."""
        (lower, upper), dim = place.box, self.dim
        moved = lower[dim] + self.by
        low, high = max(moved, 0), min(upper[dim] + self.by, self.size)
        if low >= high:
            return []
        box = (
            (*lower[:dim], low, *lower[dim + 1 :]),
            (*upper[:dim], high, *upper[dim + 1 :]),
        )
        start = place.start + (low - moved) * place.stride[dim]
        return [PlacedBox(box, start, place.stride)]


@dataclass(frozen=True, slots=True)
class Lift:
    """Put a tensor into a stack, under its number in the new first dimension."""

    number: int

    def __call__(self, place: PlacedBox) -> list[PlacedBox]:
        """Return the place in the stack."""
        lower, upper = place.box
        box = (self.number, *lower), (self.number + 1, *upper)
        return [PlacedBox(box, place.start, (0, *place.stride))]


@dataclass(frozen=True, slots=True)
class Take:
    """Take one tensor out of a stack, by its number in the first dimension."""

    number: int

    def __call__(self, place: PlacedBox) -> list[PlacedBox]:
        """Return the place in the tensor, if its number is in the box."""
        (low, *lower), (high, *upper) = place.box
        if not low <= self.number < high:
            return []
        start = place.start + (self.number - low) * place.stride[0]
        return [PlacedBox((tuple(lower), tuple(upper)), start, place.stride[1:])]


@dataclass(frozen=True, slots=True)
class Regroup:
    """Divide dimensions into several, put these in another order, and join some to one.

    Args:
        sizes: For each dimension the sizes into which it is divided.
        order: For each new dimension the numbers of the sizes that become it.
    """

    sizes: tuple[tuple[int, ...], ...]
    order: tuple[tuple[int, ...], ...]

    def __call__(self, place: PlacedBox) -> list[PlacedBox]:
        """Return the places in the new tensor: a box for all that lies by one stride.

        Raises:
            ShapeMismatch: If these are more than ``MOST_BOXES``.
        """
        lower, upper = place.box
        origin = place.start - sum(n * step for n, step in zip(lower, place.stride, strict=True))
        divided = map(_divided, lower, upper, place.stride, self.sizes)
        found: list[PlacedBox] = []
        for each in product(*divided):
            parts = list(chain.from_iterable(each))
            joined = [_joined([parts[n] for n in group]) for group in self.order]
            if len(found) + math.prod(map(len, joined)) > MOST_BOXES:
                raise _too_many()
            for runs in product(*joined):
                low, high, stride, starts = zip(*runs, strict=True)
                found.append(PlacedBox((low, high), origin + sum(starts), stride))
        return found


_Part = tuple[int, int, int, int]
"""A part of a dimension: its first index, its number of indices, its stride, the whole size."""


def _divided(low: int, high: int, stride: int, sizes: tuple[int, ...]) -> list[list[_Part]]:
    """Divide a range of a dimension; return its boxes, each by its part of every new dimension."""
    if len(sizes) == 1:
        return [[(low, high - low, stride, sizes[0])]]
    steps = [step * stride for step in contiguous_stride(sizes)]
    boxes = flat_range_boxes(sizes, low, high)
    return [list(zip(starts, counts, steps, sizes, strict=True)) for starts, counts in boxes]


def _joined(parts: Sequence[_Part]) -> list[tuple[int, int, int, int]]:
    """Join parts of dimensions to parts of one; each of these lies by one stride.

    Returns:
        The start and end of each, its stride, and the place of its first element.
    """
    found, extent = [(0, 1, 0, 0)], 1
    for low, count, step, size in reversed(parts):
        length, inner = found[0][1:3]
        if extent == 1 or (length == extent and step == inner * extent):
            stride = step if extent == 1 else inner
            found = [(low * extent, count * extent, stride, low * step)]
        elif count * len(found) > MOST_BOXES:
            raise _too_many()
        else:
            found = [
                (first + n * extent, length, inner, start + n * step)
                for n in range(low, low + count)
                for first, length, inner, start in found
            ]
        extent *= size
    return [(first, first + length, step, start) for first, length, step, start in found]


def _too_many() -> ShapeMismatch:
    return ShapeMismatch(
        f"Rearrange: its elements lie in more than {MOST_BOXES} pieces in the new order",
        hint="Load it as it is, and rearrange it in the program",
    )


Step = Shift | Lift | Take | Regroup
