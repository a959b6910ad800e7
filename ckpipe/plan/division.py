"""Divide tensors that several ranks hold alike: exactly one of the ranks writes each byte.

Ranks do not communicate. Ranks that hold the same shard know its other holders from mesh and
placements, and each derives the same answer by the same rule:

* A *unit* is saved together: a tensor with all its names, or tensors that overlap.
* A unit of at least ``MIN_PIECE_BYTES`` for each of its R replicas is cut into R blocks of rows,
  one for each replica. A smaller unit is cut into as many blocks as have that size, for as many
  consecutive replicas. A unit below that size goes whole to one replica. The smaller the pieces
  that are assigned at random, the more even is the result.
* A unit whose tensors overlap in part goes whole to one replica.
* The first replica is the hash of the unit's name and shard, modulo the number of replicas. It
  depends on nothing else: ranks that also hold tensors which other ranks do not know, as in
  pipeline and expert parallelism, still agree. The modulo costs the same for any number of
  replicas. A rendezvous hash would only help if the group of a shard could change, and it cannot.

The rule has one precondition: ranks that hold the same shard hold it under the same names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise

from ckpipe.errors import UnsupportedState, UnsupportedTopology
from ckpipe.format.boxes import box_shape, whole
from ckpipe.state.kinds import ReplicaGroup
from ckpipe.state.placements import HeldBox, Mesh
from ckpipe.state.tensors import TensorLeaf, alias_groups, overlaps_itself
from ckpipe.types import first_of

MIN_PIECE_BYTES = 128 << 10
"""Smallest mean size of the pieces of a unit, in bytes."""

_UNEVEN = 1.05
"""Largest ratio of the largest piece of a unit to the mean, if a dimension allows it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a unit that one rank writes.

    Args:
        owner: The rank.
        held: The box; None for all of a tensor.
    """

    owner: int
    held: HeldBox | None = None


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that are saved together.

    Args:
        members: Their numbers, in the order of the walk.
        pieces: The pieces in which it is written. Together they are all that the rank holds of it.
        overlapping: True if its tensors overlap and are not all the same.
        private: True if no other rank holds it.
    """

    members: tuple[int, ...]
    pieces: tuple[Piece, ...]
    overlapping: bool = False
    private: bool = False


@dataclass(frozen=True, slots=True)
class Holders:
    """The boxes of a tensor that a rank holds, and all ranks that hold the same.

    Args:
        replicas: All ranks that hold the same, this one included; empty if it holds no element.
        boxes: The boxes that it holds; None for all of the tensor.
    """

    replicas: tuple[int, ...]
    boxes: tuple[HeldBox, ...] | None = None

    def written_by(self, owner: int) -> tuple[Piece, ...]:
        """Return the pieces if one rank writes all of it."""
        boxes = self.boxes
        return (Piece(owner),) if boxes is None else tuple(Piece(owner, held) for held in boxes)


@dataclass(frozen=True, slots=True)
class Share:
    """A unit without owners.

    Args:
        name: Its name on all ranks that hold it: the least of its labels.
        members: The numbers of its tensors, in the order of the walk.
        holding: The boxes that the rank holds of it, and their other holders.
        overlapping: True if its tensors overlap and are not all the same.
    """

    name: str
    members: tuple[int, ...]
    holding: Holders
    overlapping: bool = False


def units(
    leaves: list[TensorLeaf], replicated: Mapping[int, ReplicaGroup], *, rank: int, world_size: int
) -> Iterator[Unit]:
    """Yield the units of a rank's state with their pieces and owners, by the rule above.

    Args:
        leaves: The tensors.
        replicated: The numbers of the plain tensors that several ranks hold alike, each with these
            ranks, or None for all.
        rank: The rank.
        world_size: Number of ranks.

    Raises:
        UnsupportedState: If the shape of a DTensor's local tensor contradicts its placements.
        UnsupportedTopology: If a mesh or a replica group has ranks outside of this world, or a
            replica group lacks this rank.
    """
    for share in shares(leaves, replicated, rank=rank, world_size=world_size):
        pieces = _pieces(share, leaves[share.members[0]])
        private = len(share.holding.replicas) == 1
        yield Unit(share.members, pieces, share.overlapping, private)


def shares(
    leaves: list[TensorLeaf], replicated: Mapping[int, ReplicaGroup], *, rank: int, world_size: int
) -> Iterator[Share]:
    """Divide a rank's state into shares, without owners.

    Arguments and errors are those of :func:`units`.
    """
    held = _holdings(leaves, replicated, rank, world_size)
    groups = {group[0]: group for group in alias_groups(leaves)}
    grouped = {number for group in groups.values() for number in group}
    for number, leaf in enumerate(leaves):
        if number in groups:
            yield from _of_group(leaves, held, groups[number])
        elif number not in grouped:
            yield Share(leaf.label, (number,), held[number])


def _holdings(
    leaves: list[TensorLeaf], replicated: Mapping[int, ReplicaGroup], rank: int, world_size: int
) -> list[Holders]:
    """Return the boxes of each tensor that a rank holds, computed once for each sharding."""
    private, groups = Holders((rank,)), dict[ReplicaGroup, Holders]()
    for number, group in replicated.items():
        if group not in groups:
            _check_group(group, leaves[number].label, rank, world_size)
            groups[group] = Holders(tuple(range(world_size)) if group is None else group)
    replicas: dict[tuple[Mesh, tuple[bool, ...]], tuple[int, ...]] = {}
    known: dict[int, tuple[tuple[int, ...] | None, Holders]] = {}
    found = []
    for number, leaf in enumerate(leaves):
        spread = leaf.sharding
        if spread is None:
            found.append(groups[replicated[number]] if number in replicated else private)
            continue
        # Leaves keep their shardings alive, so an id is unique here.
        if id(spread) not in known:
            if spread.mesh.top >= world_size:
                raise UnsupportedTopology(
                    f"This DTensor lies on a mesh with rank {spread.mesh.top}, and {world_size} "
                    "ranks save",
                    rank=rank,
                    key=leaf.label,
                    hint="Let all ranks of the mesh save",
                )
            # All tensors that are cut alike share one tuple of replicas: it may have many thousand.
            cut = tuple(each.dim is None or 0 in spread.shape for each in spread.placements)
            if (spread.mesh, cut) not in replicas:
                replicas[spread.mesh, cut] = tuple(sorted(spread.replicas(rank)))
            boxes = spread.held(rank)
            all_of_it = [held.box for held in boxes] == [whole(spread.shape)]
            holding = Holders(replicas[spread.mesh, cut], None if all_of_it else boxes)
            known[id(spread)] = (spread.local_shape(rank), holding)
        local_shape, holding = known[id(spread)]
        if local_shape is not None and local_shape != leaf.shape:
            raise UnsupportedState(
                f"The local tensor of this DTensor has the shape {list(leaf.shape)}, and its "
                f"placements give this rank {list(local_shape)}",
                key=leaf.label,
                rank=rank,
                hint="Lay it out with distribute_tensor, or give from_local the true global shape",
            )
        found.append(holding)
    return found


def _check_group(group: ReplicaGroup, label: str, rank: int, world_size: int) -> None:
    if group is None or (rank in group and group[0] >= 0 and group[-1] < world_size):
        return
    raise UnsupportedTopology(
        f"The ranks {first_of(group, 8)} are said to hold this tensor alike, and rank {rank} of "
        f"{world_size} saves it",
        rank=rank,
        key=label,
        hint="Let all ranks of the group save, and declare a tensor on these ranks only",
    )


def _of_group(
    leaves: list[TensorLeaf], held: Sequence[Holders], group: list[int]
) -> Iterator[Share]:
    """Yield the shares of overlapping tensors: one if they can stay together, else one for each.

    Tensors stay together if they are one tensor of several names, or if the same ranks hold all of
    each. Other overlapping tensors, such as a replicated tensor and a private view of it, are
    written more than once, by different ranks.
    """
    classes: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for number in group:
        leaf = leaves[number]
        place = (leaf.address, leaf.shape, leaf.stride, leaf.dtype, leaf.lazy)
        classes[place, leaf.full_shape, held[number]].append(number)
    first, holding = leaves[group[0]], held[group[0]]
    same = len(classes) == 1 and not overlaps_itself(first.shape, first.stride)
    together = all(held[number] == holding for number in group) and holding.boxes is None
    overlapping = together and not (same and len(holding.replicas) > 1)
    for members in [group] if overlapping else classes.values():
        name = min(leaves[number].label for number in members)
        yield Share(name, tuple(members), held[members[0]], overlapping)


def _pieces(share: Share, leaf: TensorLeaf) -> tuple[Piece, ...]:
    holding = share.holding
    replicas, boxes = holding.replicas, holding.boxes
    if len(replicas) < 2:
        return holding.written_by(replicas[0]) if replicas else ()
    shard = "" if boxes is None else repr([held.box for held in boxes])
    digest = blake2b(f"{share.name}\0{shard}".encode(), digest_size=8).digest()
    first = int.from_bytes(digest, "big")
    count = min(len(replicas), leaf.nbytes // MIN_PIECE_BYTES)
    if count < 2 or not leaf.shape or share.overlapping:
        return holding.written_by(replicas[first % len(replicas)])
    return tuple(
        Piece(replicas[(first + turn) % len(replicas)], piece)
        for held in boxes or (whole_of(leaf.shape),)
        for turn, piece in _row_blocks(held, count)
    )


def whole_of(shape: tuple[int, ...]) -> HeldBox:
    """Return the box of a whole tensor."""
    return HeldBox(whole(shape), (0,) * len(shape))


@lru_cache(maxsize=4096)
def _row_blocks(held: HeldBox, count: int) -> tuple[tuple[int, HeldBox], ...]:
    """Cut a box into blocks of equal size as far as possible; number them, and skip empty ones."""
    shape = box_shape(held.box)
    dim = cut_dimension(shape, count)
    stops = [shape[dim] * turn // count for turn in range(count + 1)]
    return tuple(
        (turn, rows_of(held, dim, start, stop))
        for turn, (start, stop) in enumerate(pairwise(stops))
        if start < stop
    )


def rows_of(held: HeldBox, dim: int, start: int, stop: int) -> HeldBox:
    """Return the rows ``start`` to ``stop`` of a box, counted from its lower corner."""
    lower, upper = held.box
    box = (
        (*lower[:dim], lower[dim] + start, *lower[dim + 1 :]),
        (*upper[:dim], lower[dim] + stop, *upper[dim + 1 :]),
    )
    return HeldBox(box, (*held.at[:dim], held.at[dim] + start, *held.at[dim + 1 :]))


def cut_dimension(shape: tuple[int, ...], count: int) -> int:
    """Return the first dimension that can be cut evenly enough, else the most even one."""
    uneven = [-(-n // count) * count / n for n in shape]
    most_even = uneven.index(min(uneven))
    return next((dim for dim, each in enumerate(uneven) if each <= _UNEVEN), most_even)
