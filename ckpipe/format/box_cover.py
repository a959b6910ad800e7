"""Cover regions by boxes: select the boxes, and find the elements that no box has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from ckpipe.format.boxes import Box, box_volume, intersection


class BoxIndex:
    """An index that finds the boxes which intersect a region.

    Theory. A few boxes are checked one by one. Many boxes are sorted by their lower bounds in the
    dimension with the most distinct ones; beside each is the running maximum of the upper bounds.
    Both sequences only grow, so two binary searches bound the boxes that can intersect a region.
    Those are intersected together, as arrays. The boxes of any mesh of devices form rows and
    columns, so few boxes are checked in vain.

    Args:
        boxes: The boxes, all with the same number of dimensions.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        self._bounds: _Bounds | None = None
        if len(boxes) > _FEW and boxes[0][0]:
            self._bounds = bounds = _as_array(boxes)
            lowers = bounds[:, 0]
            telling = [len(set(lowers[:, axis].tolist())) for axis in range(lowers.shape[1])]
            self._axis = axis = telling.index(max(telling))
            self._order = order = np.argsort(lowers[:, axis], kind="stable")
            self._lowers = lowers[order, axis]
            self._reach = np.maximum.accumulate(bounds[order, 1, axis])

    def meeting(self, region: Box) -> list[tuple[int, Box]]:
        """Return the numbers of the boxes that intersect a region, in order, and intersections."""
        if self._bounds is None:
            parts = ((number, intersection(region, box)) for number, box in enumerate(self._boxes))
            return [(number, part) for number, part in parts if part is not None]
        stop = self._lowers.searchsorted(region[1][self._axis], "left")
        start = self._reach.searchsorted(region[0][self._axis], "right")
        numbers = np.sort(self._order[start:stop])
        near = self._bounds[numbers]
        common = near.copy()
        np.maximum(near[:, 0], region[0], out=common[:, 0])
        np.minimum(near[:, 1], region[1], out=common[:, 1])
        meets = (common[:, 0] < common[:, 1]).all(1)
        inside = (common == near).all((1, 2))
        found = []
        for number, within, (lower, upper) in zip(
            numbers[meets].tolist(), inside[meets].tolist(), common[meets].tolist(), strict=True
        ):
            box = self._boxes[number] if within else (tuple(lower), tuple(upper))
            found.append((number, box))
        return found

    def cover(self, region: Box) -> tuple[list[tuple[int, Box]], list[Box]]:
        """Cover a region by disjoint parts of the boxes.

        Args:
            region: A box.

        Returns:
            Numbers of boxes, each with the part of the region to take from it; and the parts of
            the region that no box has. Among overlapping boxes, one that has all of the region is
            preferred, then the earlier ones.
        """
        volume = box_volume(region)
        if not volume:
            return [], []
        parts: dict[Box, int] = {}
        for number, common in self.meeting(region):
            if common == region:
                return [(number, common)], []
            parts.setdefault(common, number)
        given = sum(map(box_volume, parts))
        if given <= volume and _are_disjoint(list(parts)):
            # Cut out in sorted order, the parts of a mesh leave few intermediate holes.
            left = [] if given == volume else _cut_out(region, dict.fromkeys(sorted(parts), 0))[1]
            return [(number, part) for part, number in parts.items()], left
        return _cut_out(region, parts)


_Bounds = np.ndarray[Any, np.dtype[np.int64]]
_FEW = 12


def _cut_out(region: Box, parts: Mapping[Box, int]) -> tuple[list[tuple[int, Box]], list[Box]]:
    """Cut parts out of a region one after the other.

    Args:
        region: The region.
        parts: Parts of it, with numbers.

    Returns:
        Of each part the boxes that no earlier part has, with its number; and the rest.
    """
    chosen: list[tuple[int, Box]] = []
    left = [region]
    for part, number in parts.items():
        rest = []
        for hole in left:
            common = intersection(hole, part)
            if common is None:
                rest.append(hole)
            else:
                chosen.append((number, common))
                rest += _without(hole, common)
        left = rest
        if not left:
            break
    return chosen, left


def _without(box: Box, part: Box) -> Iterator[Box]:
    """Cut a part out of a box; yield the rest as boxes."""
    lower, upper = list(box[0]), list(box[1])
    for axis, (low, high) in enumerate(zip(*part, strict=True)):
        if lower[axis] < low:
            yield tuple(lower), (*upper[:axis], low, *upper[axis + 1 :])
        if high < upper[axis]:
            yield (*lower[:axis], high, *lower[axis + 1 :]), tuple(upper)
        lower[axis], upper[axis] = low, high


def _are_disjoint(boxes: Sequence[Box]) -> bool:
    """Tell whether boxes, none of them empty, are disjoint.

    If the projections of the boxes on one axis fall into several groups, each group is checked by
    itself, which separates the boxes of any mesh. A group that no axis divides is compared pair by
    pair.
    """
    if len(boxes) < 2:
        return True
    for axis in range(len(boxes[0][0])):
        groups = _shadows(boxes, axis)
        if len(groups) > 1:
            return all(_are_disjoint(group) for group in groups if len(group) > 1)
    return not _any_overlap(list(boxes))


def _as_array(boxes: Sequence[Box]) -> _Bounds:
    """Return boxes of one number of dimensions as an array: by box, corner and dimension."""
    flat = chain.from_iterable(chain.from_iterable(boxes))
    dims = len(boxes[0][0])
    count = len(boxes) * 2 * dims
    return np.fromiter(flat, np.int64, count).reshape(len(boxes), 2, dims)


def _shadows(boxes: Sequence[Box], axis: int) -> list[list[Box]]:
    groups: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda each: each[0][axis]):
        if box[0][axis] >= end:
            groups.append([])
        groups[-1].append(box)
        end = max(end, box[1][axis])
    return groups


def _any_overlap(boxes: list[Box]) -> bool:
    """Sweep along the first dimension and compare only the boxes that are open together."""
    if len(boxes) < 2 or not boxes[0][0]:
        return len(boxes) > 1
    still_open: list[Box] = []
    for box in sorted(boxes):
        still_open = [other for other in still_open if other[1][0] > box[0][0]]
        if any(intersection(box, other) for other in still_open):
            return True
        still_open.append(box)
    return False
