"""Compute from mesh and placements the boxes of a tensor that a rank holds, and their replicas.

A sharding is plain data, so a plan needs no process group and tests can use meshes of any size. The
rules are those of torch's DTensor (``torch.distributed.tensor.placement_types``, torch 2.13).
Placements are applied from left to right, each to the result of the ones before it. A shard is a
chunk of ``torch.chunk``, so the last may be smaller or empty. A strided shard (two-dimensional FSDP
and tensor parallelism) cuts into ``split_factor`` chunks first, and is the concatenation of the
rank's chunk of each.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product

from ckpipe.format.boxes import Box, box_shape

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Mesh:
    """An array of ranks.

    Args:
        shape: Number of ranks in each of its dimensions.
        ranks: The global ranks, row by row.

    Attributes:
        top: The greatest of them.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    top: int = field(init=False, repr=False, compare=False, default=0)
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        # A mesh is in the key of every sharding, and may have many thousand ranks.
        object.__setattr__(self, "top", max(self.ranks, default=0))
        object.__setattr__(self, "_hash", hash((self.shape, self.ranks)))

    def __hash__(self) -> int:
        return self._hash

    def place(self, rank: int) -> int | None:
        """Return the index of a rank in the mesh, row by row; None if it is not on the mesh."""
        if 0 <= rank < len(self.ranks) and self.ranks[rank] == rank:
            return rank  # a mesh of all ranks needs no search
        try:
            return self.ranks.index(rank)
        except ValueError:
            return None


@lru_cache(maxsize=64)
def mesh_of(shape: tuple[int, ...], ranks: bytes) -> Mesh:
    """Intern a mesh, so that meshes of two walks are compared at no cost.

    Args:
        shape: Number of ranks in each dimension.
        ranks: The global ranks, row by row, as native 64-bit integers.
    """
    return Mesh(shape, tuple(array("q", ranks)))


@dataclass(frozen=True, slots=True)
class Placement:
    """The layout of a tensor along one dimension of a mesh.

    Args:
        dim: The dimension of the tensor that is cut; None if every rank holds the same.
        split_factor: Number of chunks into which it is cut before; 1 unless the shard is strided.
    """

    dim: int | None = None
    split_factor: int = 1


@dataclass(frozen=True, slots=True)
class HeldBox:
    """A box of a tensor that a rank holds.

    Args:
        box: Its bounds in the global tensor.
        at: Its lower corner in the rank's local tensor.
    """

    box: Box
    at: tuple[int, ...]

    @property
    def local(self) -> Box:
        """Its bounds in the rank's local tensor."""
        sizes = box_shape(self.box)
        return self.at, tuple(start + n for start, n in zip(self.at, sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Sharding:
    """The layout of a tensor on a mesh.

    Args:
        mesh: The mesh.
        placements: One for each dimension of the mesh.
        shape: The global shape of the tensor, in elements.
    """

    mesh: Mesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return the coordinate of a rank on the mesh; None if the rank is not on it."""
        place = self.mesh.place(rank)
        if place is None:
            return None
        found = []
        for n in reversed(self.mesh.shape):
            place, index = divmod(place, n)
            found.append(index)
        return tuple(reversed(found))

    def local_shape(self, rank: int) -> tuple[int, ...] | None:
        """Return the shape of a rank's local tensor; None if the rank is not on the mesh."""
        coordinate = self.coordinate(rank)
        if coordinate is None:
            return None
        return tuple(_length(each) for each in self._intervals(coordinate))

    def held(self, rank: int) -> tuple[HeldBox, ...]:
        """Return the boxes that a rank holds, in the order of its local tensor; may be empty.

        Every rank of the mesh holds a tensor without elements as a whole.
        """
        coordinate = self.coordinate(rank)
        if coordinate is None:
            return ()
        zeros = tuple(0 for _ in self.shape)
        if 0 in self.shape:
            return (HeldBox((zeros, self.shape), zeros),)
        runs = [list(_with_places(each)) for each in self._intervals(coordinate)]
        return tuple(
            HeldBox(
                (tuple(lo for lo, _, _ in picked), tuple(hi for _, hi, _ in picked)),
                tuple(at for _, _, at in picked),
            )
            for picked in product(*runs)
        )

    def replicas(self, rank: int) -> tuple[int, ...]:
        """Return all ranks that hold the same as a rank, itself included, in the order of the mesh.

        They differ from it only along dimensions of the mesh that do not cut the tensor. They are
        all ranks of the mesh if the tensor has no elements.
        """
        coordinate = self.coordinate(rank)
        if coordinate is None:
            return ()
        if 0 in self.shape:
            return self.mesh.ranks
        places = [0]
        sizes = zip(self.mesh.shape, coordinate, self.placements, strict=True)
        for n, index, placement in sizes:
            here = range(n) if placement.dim is None else (index,)
            places = [place * n + each for place in places for each in here]
        return tuple(self.mesh.ranks[place] for place in places)

    def _intervals(self, coordinate: tuple[int, ...]) -> list[list[Interval]]:
        found = [[(0, n)] for n in self.shape]
        sizes = zip(self.mesh.shape, coordinate, self.placements, strict=True)
        for n, index, placement in sizes:
            if placement.dim is not None:
                held = found[placement.dim]
                found[placement.dim] = _shard(held, index, n, placement.split_factor)
        return found


NO_MESH = Mesh((), ())
"""The mesh of a box that belongs to one rank."""


@dataclass(frozen=True, slots=True)
class OwnBox(Sharding):
    """The layout of a tensor of which a rank holds one box that no other rank holds.

    Args:
        box: The bounds of the box.
    """

    box: Box

    def local_shape(self, rank: int) -> tuple[int, ...]:
        return box_shape(self.box)

    def held(self, rank: int) -> tuple[HeldBox, ...]:
        return (HeldBox(self.box, (0,) * len(self.shape)),)

    def replicas(self, rank: int) -> tuple[int, ...]:
        return (rank,)


@lru_cache(maxsize=4096)
def sharding(mesh: Mesh, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> Sharding:
    """Intern a sharding, so that comparisons of those of two saves cost almost nothing.

    Raises:
        ValueError: If mesh, placements and shape do not fit together.
    """
    if math.prod(mesh.shape) != len(mesh.ranks) or len(mesh.shape) != len(placements):
        raise ValueError("A mesh needs a rank for each of its places and a placement per dimension")
    for placement in placements:
        if placement.dim is not None and not 0 <= placement.dim < len(shape):
            raise ValueError(f"Dimension {placement.dim} of a shape of {len(shape)} is cut")
    return Sharding(mesh, placements, shape)


def _length(intervals: Sequence[Interval]) -> int:
    return sum(hi - lo for lo, hi in intervals)


def _with_places(intervals: Sequence[Interval]) -> Iterator[tuple[int, int, int]]:
    at = 0
    for lo, hi in intervals:
        yield lo, hi, at
        at += hi - lo


def _shard(held: list[Interval], index: int, count: int, split_factor: int) -> list[Interval]:
    """Return a rank's shard of the intervals that earlier placements left along a dimension."""
    found: list[Interval] = []
    for lo, hi in _chunks(0, _length(held), split_factor):
        start, stop = _chunk(lo, hi, index, count)
        for piece in _cut(held, start, stop):
            if found and found[-1][1] == piece[0]:
                found[-1] = (found[-1][0], piece[1])
            else:
                found.append(piece)
    return found


def _chunks(lo: int, hi: int, count: int) -> Iterator[Interval]:
    step = -(-(hi - lo) // count)
    while lo < hi:
        yield lo, min(lo + step, hi)
        lo += step


def _chunk(lo: int, hi: int, index: int, count: int) -> Interval:
    step = -(-(hi - lo) // count)
    return min(lo + index * step, hi), min(lo + (index + 1) * step, hi)


def _cut(held: Sequence[Interval], start: int, stop: int) -> Iterator[Interval]:
    """Yield the range ``start`` to ``stop`` of concatenated intervals, as intervals."""
    for lo, hi, at in _with_places(held):
        first, last = max(start, at), min(stop, at + hi - lo)
        if first < last:
            yield lo + first - at, lo + last - at
