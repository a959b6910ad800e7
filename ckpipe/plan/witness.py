"""Choose the bytes that a rank witnesses: copies that it holds and that other ranks write.

Each save takes the next mebibytes of chunks with an owner, from a random chunk on, with a stride
that mixes large and small ones. The owner's manifest has the checksums of all its bytes, so ranks
choose without each other. Tensors that share memory are left out: their entries may have bytes that
belong to no element. A chunk of the layout tells all, so plans have nothing more for it (note 84 of
``docs/design.md``).
"""

from __future__ import annotations

import math
import random
from array import array
from typing import NamedTuple

from ckpipe.format.boxes import Box, box_shape
from ckpipe.format.checksum import CHUNK_BYTES
from ckpipe.plan.plan import RankPlan
from ckpipe.state.flatten import Captured
from ckpipe.state.placements import HeldBox
from ckpipe.state.tensors import MAX_ITEM, TensorLeaf, alias_groups, overlaps_itself

_GOLDEN = (math.sqrt(5) - 1) / 2


class Witnessed(NamedTuple):
    """A mebibyte of a chunk that another rank writes.

    Args:
        chunk: The number of the chunk among those of the rank's layout that have an owner.
        mebibyte: Its number in the chunk.
        tensor: The number of the tensor.
        part: The chunk's box in the rank's tensor; None for all of it.
        at: Its offset among all that are chosen together, in bytes.
        nbytes: Its size, in bytes.
    """

    chunk: int
    mebibyte: int
    tensor: int
    part: Box | None
    at: int
    nbytes: int


class Witnesses:
    """Chooses the bytes to witness in each save of one plan.

    All copies are chosen within ``(world_size - 1) / share`` saves.

    Args:
        plan: The plan.
        captured: A state that it fits.
        share: The share of the bytes that the rank writes.
    """

    def __init__(self, plan: RankPlan, captured: Captured, share: float) -> None:
        self._leaves, self._rank, self._chunks = captured.tensors, plan.rank, plan.layout.chunks
        owners = self._chunks.owner
        self._rows = array("q", [row for row, owner in enumerate(owners) if owner is not None])
        count = len(self._rows)
        again, self._left_out = set[int](), set[int]()
        for group in alias_groups(self._leaves) if count else ():
            same = len({_place(self._leaves[number]) for number in group}) == 1
            first = self._leaves[group[0]]
            if same and not overlaps_itself(first.shape, first.stride):
                again.update(group[1:])
            else:
                self._left_out.update(group)
        self._left_out |= again
        own = sum(plan.layout.entries.nbytes)
        held = sum(leaf.nbytes for n, leaf in enumerate(self._leaves) if n not in again)
        self._wanted = share * max(own, (held - own) / max(1, plan.world_size - 1))
        self._stride = max(1, round(count * _GOLDEN))
        while math.gcd(self._stride, count) > 1:
            self._stride += 1
        self._chunk = random.SystemRandom().randrange(count) if count else 0
        self._mebibyte = 0
        self._due = 0.0
        """The bytes that are still to choose, or less than 0 if more was chosen."""

    def next(self) -> list[Witnessed]:
        """Choose the bytes of the next save: whole mebibytes, or smaller chunks.

        None are chosen if earlier saves have taken more than their share.
        """
        found: list[Witnessed] = []
        at, left = 0, len(self._rows)
        self._due += self._wanted
        while left and self._due > 0:
            tensor, part, nbytes = self._copy(self._rows[self._chunk])
            start = self._mebibyte * CHUNK_BYTES
            size = min(CHUNK_BYTES, nbytes - start)
            if size > 0:
                at = -(-at // MAX_ITEM) * MAX_ITEM
                found.append(Witnessed(self._chunk, self._mebibyte, tensor, part, at, size))
                at, self._due, self._mebibyte = at + size, self._due - size, self._mebibyte + 1
            if start + size >= nbytes:
                self._chunk = (self._chunk + self._stride) % len(self._rows)
                self._mebibyte, left = 0, left - 1
        self._due = min(self._due, 0.0)
        return found

    def _copy(self, row: int) -> tuple[int, Box | None, int]:
        """Return the tensor of a chunk, its box there, and its size, 0 if it is left out."""
        tensor, box = self._chunks.tensor[row], self._chunks.box[row]
        leaf = self._leaves[tensor]
        if tensor in self._left_out:
            return tensor, None, 0
        if box is None:
            return tensor, None, leaf.nbytes
        at = box[0]
        for held in () if leaf.sharding is None else leaf.sharding.held(self._rank):
            lower, upper = held.box
            if all(map(int.__le__, lower, at)) and all(map(int.__le__, box[1], upper)):
                at = tuple(map(sum, zip(held.at, at, (-n for n in lower), strict=True)))
                break
        shape = box_shape(box)
        part = None if shape == leaf.shape else HeldBox(box, at).local
        return tensor, part, math.prod(shape) * leaf.itemsize


def _place(leaf: TensorLeaf) -> tuple[object, ...]:
    return leaf.address, leaf.shape, leaf.stride, leaf.dtype, leaf.lazy, leaf.full_shape
