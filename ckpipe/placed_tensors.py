"""Distributed tensors of the target: the memory that this process has, and what it is part of."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ckpipe.boxes import Box
from ckpipe.stored_tensors import Region

Interval = tuple[int, int]

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_placed(obj: Any) -> bool:
    """Whether a tensor is a DTensor: a local tensor with a mesh and placements."""
    return type(obj) not in _PLAIN and hasattr(obj, "device_mesh") and hasattr(obj, "placements")


def local_tensor(obj: Any) -> torch.Tensor:
    """The part of a DTensor that this process holds, by its own memory, detached."""
    with torch.no_grad():
        local: torch.Tensor = obj.to_local()
    return local.detach()


def why_unplaceable(obj: Any) -> str:
    """What a DTensor does that cannot be loaded into; empty if nothing."""
    for placement in obj.placements:
        if placement.is_partial():
            return f"has the placement {placement}, whose values are the sum of several"
        if not placement.is_replicate() and not hasattr(placement, "dim"):
            return f"has the placement {placement}, which is unknown"
    return ""


def regions_of(obj: Any) -> tuple[Region, ...]:
    """Which parts of the global tensor a DTensor's local tensor holds, and where in it."""
    coordinate = obj.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    splits = [
        (placement.dim, int(getattr(placement, "split_factor", 1)), count, index)
        for placement, count, index in zip(
            obj.placements, tuple(obj.device_mesh.shape), coordinate, strict=True
        )
        if not placement.is_replicate()
    ]
    return held_regions(tuple(obj.shape), splits)


def held_regions(
    shape: Sequence[int], splits: Sequence[tuple[int, int, int, int]]
) -> tuple[Region, ...]:
    """The parts of a tensor that are left to one process after its dimensions were split.

    The rule is that of ``torch.chunk``, as DTensor uses it: the first shards are the largest, and
    the last may be empty. A split factor above 1 is DTensor's ``_StridedShard``: the dimension
    is cut into that many blocks first, and the process has its share of each.

    Args:
        shape: The global shape.
        splits: For each split, in the order of the mesh's dimensions: the dimension of the
            tensor, the split factor, how many share it, and which of these the process is.

    Returns:
        Regions in the order in which they lie in the process's tensor; none if that is empty.
    """
    held: list[list[Interval]] = [[(0, n)] for n in shape]
    for dim, factor, count, index in splits:
        held[dim] = [
            interval
            for block in _chunks(held[dim], factor)
            for interval in _chunks(block, count)[index]
        ]
    placed = [list(_with_places(_joined(intervals))) for intervals in held]
    return tuple(_region(each) for each in itertools.product(*placed))


def _chunks(intervals: list[Interval], count: int) -> list[list[Interval]]:
    """Intervals that lie one behind the other, cut as ``torch.chunk`` does."""
    total = sum(high - low for low, high in intervals)
    size = -(-total // count)
    return [_cut(intervals, n * size, (n + 1) * size) for n in range(count)]


def _cut(intervals: list[Interval], begin: int, end: int) -> list[Interval]:
    found, at = [], 0
    for low, high in intervals:
        first, last = max(low, low + begin - at), min(high, low + end - at)
        if first < last:
            found.append((first, last))
        at += high - low
    return found


def _joined(intervals: list[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for low, high in intervals:
        if joined and joined[-1][1] == low:
            joined[-1] = (joined[-1][0], high)
        else:
            joined.append((low, high))
    return joined


def _with_places(intervals: list[Interval]) -> list[tuple[int, int, int]]:
    places = itertools.accumulate((high - low for low, high in intervals), initial=0)
    return [(low, high, place) for (low, high), place in zip(intervals, places, strict=False)]


def _region(sides: Sequence[tuple[int, int, int]]) -> Region:
    box: Box = (tuple([side[0] for side in sides]), tuple([side[1] for side in sides]))
    return Region(box, tuple([side[2] for side in sides]))
