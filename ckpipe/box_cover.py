"""Putting regions together from boxes: which boxes, and the proof that nothing is left out."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from ckpipe.boxes import Box, box_volume, intersection


class BoxIndex:
    """Finds which of many boxes meet a region, by a sweep along one dimension.

    Theory. The boxes are sorted by where they begin in the dimension that tells them apart best.
    Beside each stands how far any box up to it reaches; these numbers only grow, so two binary
    searches bound the boxes that can meet a region. The boxes of any mesh of devices form rows
    and columns, and little is looked at in vain.

    Args:
        boxes: The boxes, all of as many dimensions.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        self._axis = axis = _telling_axis(boxes)
        if axis is not None:
            self._order = sorted(range(len(boxes)), key=lambda n: boxes[n][0][axis])
            self._lowers = [boxes[n][0][axis] for n in self._order]
            self._reach = list(accumulate((boxes[n][1][axis] for n in self._order), max))

    def meeting(self, region: Box) -> list[tuple[int, Box]]:
        """The numbers of the boxes that meet a region, in order, and what they have of it."""
        numbers: Sequence[int] = range(len(self._boxes))
        if self._axis is not None:
            stop = bisect_left(self._lowers, region[1][self._axis])
            start = bisect_right(self._reach, region[0][self._axis])
            numbers = sorted(self._order[start:stop])
        found = []
        for number in numbers:
            common = intersection(region, self._boxes[number])
            if common is not None:
                found.append((number, common))
        return found

    def cover(self, region: Box) -> tuple[list[tuple[int, Box]], list[Box]]:
        """Puts a region together from parts of the boxes, no element twice.

        Args:
            region: A box.

        Returns:
            Numbers of boxes, each with the part of the region that it is to give; and the parts
            of the region that no box has. Where boxes overlap, one that has all of the region is
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
        if sum(map(box_volume, parts)) == volume and disjoint(list(parts)):
            return [(number, part) for part, number in parts.items()], []
        return _chosen(region, parts)


_FEW = 12


def _telling_axis(boxes: Sequence[Box]) -> int | None:
    """The dimension in which most boxes begin differently; None if a sweep is not worth it."""
    if len(boxes) <= _FEW or not boxes[0][0]:
        return None
    return max(range(len(boxes[0][0])), key=lambda axis: len({box[0][axis] for box in boxes}))


def _chosen(region: Box, parts: Mapping[Box, int]) -> tuple[list[tuple[int, Box]], list[Box]]:
    """The same for parts that overlap or leave something out, which is rare."""
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
    """What is left of a box without a part of it, as boxes."""
    lower, upper = list(box[0]), list(box[1])
    for axis, (low, high) in enumerate(zip(*part, strict=True)):
        if lower[axis] < low:
            yield tuple(lower), (*upper[:axis], low, *upper[axis + 1 :])
        if high < upper[axis]:
            yield (*lower[:axis], high, *lower[axis + 1 :]), tuple(upper)
        lower[axis], upper[axis] = low, high


def disjoint(boxes: Sequence[Box]) -> bool:
    """Whether no element is in two of some boxes that are not empty.

    Boxes whose shadows on one axis fall into several groups are looked at group by group, which
    takes those of any mesh apart; a group that no axis divides is compared pair by pair.
    """
    if len(boxes) < 2:
        return True
    for axis in range(len(boxes[0][0])):
        groups = _shadows(boxes, axis)
        if len(groups) > 1:
            return all(disjoint(group) for group in groups if len(group) > 1)
    return not _any_overlap(list(boxes))


def _shadows(boxes: Sequence[Box], axis: int) -> list[list[Box]]:
    groups: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda each: each[0][axis]):
        if box[0][axis] >= end:
            groups.append([])
        groups[-1].append(box)
        end = max(end, box[1][axis])
    return groups


def covers_exactly(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether boxes cover every element of a shape once: none twice, none left out."""
    full = tuple(shape)
    volume = 0
    for lower, upper in boxes:
        if not len(lower) == len(upper) == len(full):
            return False
        if not all(0 <= low <= high <= n for low, high, n in zip(lower, upper, full, strict=True)):
            return False
        volume += box_volume((lower, upper))
    # Disjoint boxes inside a shape that have its volume leave nothing out.
    return volume == math.prod(full) and disjoint([box for box in boxes if box_volume(box)])


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
