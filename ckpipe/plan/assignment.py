"""Assign bytes to the ranks that write them, from the offers of all ranks. Pure.

An *offer* lists tensors that other ranks may hold too: DTensors, and plain tensors that are marked
as replicated. The private tensors of a rank count only as a number of bytes, and may change without
notice to other ranks.

Offers are checked against each other first. All tensors of one name must be the same tensor on the
ranks that hold it alike: those of its replica group if the name is marked as replicated, else those
of its mesh. The boxes that these ranks hold must cover the tensor, each element in one box. So a
finished plan provably writes each element once, by a rank that has it.

Bytes are balanced by water-filling. Tensors of few holders are placed before those of many, and of
equal ones the large before the small. So the tensors that can go to any rank come last and level
the differences that the others left. A tensor that is large enough is divided over the emptiest of
its ranks up to a common level; a smaller one goes whole to the emptiest. The final imbalance is
about the size of a small tensor.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from ckpipe.errors import SaveError, UnsupportedState
from ckpipe.format.box_cover import BoxIndex
from ckpipe.format.boxes import Box, box_shape, box_volume, whole
from ckpipe.format.dtypes import DTYPES
from ckpipe.format.labels import Numbering
from ckpipe.plan.division import MIN_PIECE_BYTES, Share, cut_dimension, shares
from ckpipe.state.kinds import ReplicaGroup
from ckpipe.state.placements import Mesh, Placement, Sharding, sharding
from ckpipe.state.tensors import TensorLeaf
from ckpipe.types import first_of

_VERSION = 2


class TensorSpec(NamedTuple):
    """One name of an offered tensor: the facts that must agree between all its holders.

    Args:
        label: The name.
        dtype: The name of its dtype.
        shape: Its global shape.
    """

    label: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Offered:
    """A share of a rank's state that other ranks may hold too.

    Args:
        name: Its name on all ranks that hold it.
        specs: All its tensors, in the order of their labels.
        sharding: Its layout on its mesh; None for a plain tensor.
        replicated: The ranks on which all tensors of this name are marked as the same, on any mesh;
            empty if they are not marked.
        overlapping: True if its tensors overlap and are not all the same.
        window: Bytes in which overlapping tensors are written; 0 for others.
    """

    name: str
    specs: tuple[TensorSpec, ...]
    sharding: Sharding | None
    replicated: tuple[int, ...]
    overlapping: bool
    window: int = 0


@dataclass(frozen=True, slots=True)
class DescribedState:
    """A rank's state, divided into shares, and its offer to other ranks.

    Args:
        shares: All its shares, each with its offer; None if it is private.
        offer: The shares that others may hold too, in the order of the walk.
        private: Bytes of the private shares.
        data: The offer, encoded; equal offers have equal data.
        digest: A hash of ``data``.
    """

    shares: list[tuple[Share, Offered | None]]
    offer: tuple[Offered, ...]
    private: int
    data: bytes
    digest: str


def describe(
    leaves: list[TensorLeaf], marked: Mapping[int, ReplicaGroup], *, rank: int, world_size: int
) -> DescribedState:
    """Divide a rank's state into shares, and make its offer.

    Args:
        leaves: The tensors.
        marked: The numbers of the tensors that are marked as replicated, each with its ranks.
        rank: The rank.
        world_size: Number of ranks.

    Raises:
        UnsupportedState: If the shape of a DTensor's local tensor contradicts its placements.
        UnsupportedTopology: If a mesh has ranks outside of this world.
    """
    found: list[tuple[Share, Offered | None]] = []
    elsewhere: list[TensorLeaf] = []
    private, everywhere = 0, tuple(range(world_size))
    for share in shares(leaves, marked, rank=rank, world_size=world_size):
        members = [leaves[number] for number in share.members]
        first, nbytes = members[0], members[0].nbytes
        if share.overlapping:
            top = max(leaf.address + leaf.window for leaf in members)
            nbytes = top - min(leaf.address for leaf in members)
        groups = [marked[number] for number in share.members if number in marked]
        alike = (groups[0] or everywhere) if groups else ()
        # A rank that holds no element of a tensor cannot see with which others it is tied.
        if share.holding.boxes == () or not (alike or first.sharding is not None):
            private += nbytes
            elsewhere += [leaf for leaf in members if leaf.sharding is not None]
            found.append((share, None))
            continue
        specs = [TensorSpec(leaf.label, leaf.dtype, leaf.full_shape) for leaf in members]
        specs.sort(key=lambda spec: spec.label)
        window = nbytes if share.overlapping else 0
        offered = Offered(
            share.name, tuple(specs), first.sharding, alike, share.overlapping, window
        )
        found.append((share, offered))
    offer = tuple(each for _, each in found if each is not None)
    data = _encode(offer, elsewhere)
    return DescribedState(found, offer, private, data, sha256(data).hexdigest()[:32])


def _encode(offered: Sequence[Offered], elsewhere: Sequence[TensorLeaf]) -> bytes:
    """Encode an offer for other ranks: compressed JSON.

    ``elsewhere`` is never decoded. It has the tensors of which this rank holds no element: if their
    layout changes, the encoded bytes differ, so this rank notices too that old plans do not fit.
    """
    # Each sharding is listed once, for any number of tensors.
    spreads, groups = Numbering(), Numbering()

    def row_of(spread: Sharding | None) -> int | None:
        return None if spread is None else spreads.number(spread, id)

    content = {
        "version": _VERSION,
        "shares": [
            (
                each.specs,
                row_of(each.sharding),
                groups.number(each.replicated),
                int(each.overlapping),
                each.window,
            )
            for each in offered
        ],
        "groups": groups.items,
        "elsewhere": [
            (leaf.label, leaf.dtype, leaf.full_shape, row_of(leaf.sharding)) for leaf in elsewhere
        ],
        "shardings": [
            (
                spread.mesh.shape,
                spread.mesh.ranks,
                [(cut.dim, cut.split_factor) for cut in spread.placements],
                spread.shape,
            )
            for spread in spreads.items
        ],
    }
    return zlib.compress(json.dumps(content).encode(), 1)


def decode_description(data: bytes) -> tuple[Offered, ...]:
    """Decode the shares of an offer that :func:`describe` encoded.

    Raises:
        SaveError: If another version of ckpipe made it.
    """
    content = json.loads(zlib.decompress(data))
    if content["version"] != _VERSION:
        raise SaveError(
            "Ranks run different versions of ckpipe, which do not plan together",
            hint='Install one version everywhere, or set plan="local"',
        )
    groups = [tuple(each) for each in content["groups"]]
    table = [
        sharding(
            Mesh(tuple(mesh), tuple(ranks)),
            tuple(Placement(dim, factor) for dim, factor in cuts),
            tuple(shape),
        )
        for mesh, ranks, cuts, shape in content["shardings"]
    ]
    return tuple(
        Offered(
            min(label for label, _, _ in specs),
            tuple(TensorSpec(label, dtype, tuple(shape)) for label, dtype, shape in specs),
            None if where is None else table[where],
            groups[replicated],
            bool(overlapping),
            window,
        )
        for specs, where, replicated, overlapping, window in content["shares"]
    )


class Cut(NamedTuple):
    """The division of a box between ranks.

    Args:
        stops: The writing ranks, each with the row behind its last one.
        dim: The dimension of the rows; None if one rank writes all of the box.
    """

    stops: tuple[tuple[int, int], ...]
    dim: int | None = None


Answer = tuple[tuple[Cut | None, ...], ...]
"""For each share of an offer, for each box of it: its division; None if only one rank has it."""


def assign(offers: Sequence[Sequence[Offered]], private: Sequence[int]) -> list[Answer]:
    """Assign all offered boxes to ranks that write them.

    Args:
        offers: The offers of all ranks, in the order of ranks.
        private: The private bytes that each rank writes besides.

    Returns:
        For each rank the answer to its offer.

    Raises:
        UnsupportedState: If ranks contradict each other, or no rank offers some element of a
            tensor; names the tensor and a rank.
    """
    load = list(private)
    boxes = _Boxes()
    held: dict[str, _Holders] = defaultdict(dict)
    for rank, offer in enumerate(offers):
        for share in offer:
            held[share.name][rank] = share
    places: list[dict[str, list[_SharedBox | None]]] = [{} for _ in offers]
    parts: list[_SharedBox] = []
    for name, holders in held.items():
        for tensor in _tensors(name, holders, boxes):
            boxes.check_cover(name, tensor)
            parts += _parts(name, tensor, boxes, places, load)
    parts.sort(key=lambda part: (len(part.holders), -part.nbytes, part.name, part.number))
    rows: dict[tuple[object, ...], _Rows] = {}
    for part in parts:
        part.cut = _divided(part, load, rows)
    return [
        tuple(
            tuple(None if part is None else part.cut for part in places[rank][share.name])
            for share in offer
        )
        for rank, offer in enumerate(offers)
    ]


_Holders = dict[int, Offered]
"""The offers of one tensor by rank."""


@dataclass(slots=True)
class _SharedBox:
    """A box that several ranks hold; a box without a shape is not cut."""

    name: str
    number: int
    holders: list[int]
    nbytes: int
    shape: tuple[int, ...]
    cut: Cut | None = None


def _tensors(name: str, holders: _Holders, boxes: _Boxes) -> Iterator[_Holders]:
    """Yield the different tensors of one name, each with the ranks that have it.

    Raises:
        UnsupportedState: If ranks contradict each other about one of them.
    """
    left = dict(holders)
    while left:
        rank, share = next(iter(left.items()))
        if share.replicated:
            ranks = [each for each in share.replicated if each in holders]
            for each in ranks:
                if not _alike(holders[each], share):
                    raise _contradiction(rank, share, each, holders[each])
            yield {each: left.pop(each) for each in ranks}
            continue
        assert share.sharding is not None  # only replicated tensors may be plain
        ranks = [each for each in sorted(share.sharding.mesh.ranks) if boxes.of(share, each)]
        for each in ranks:
            other = holders.get(each)
            if other is None:
                raise UnsupportedState(
                    f"This DTensor lies on a mesh with rank {each}, which lacks it in its state",
                    key=name,
                    rank=each,
                    hint="Save the same sharded tensors on all ranks of their mesh",
                )
            if other is share:
                continue
            if not _alike(other, share) or other.sharding != share.sharding:
                raise _contradiction(rank, share, each, other)
        yield {each: left.pop(each) for each in ranks}


def _alike(one: Offered, other: Offered) -> bool:
    facts = [(each.specs, each.overlapping, each.replicated) for each in (one, other)]
    return facts[0] == facts[1]


def _contradiction(rank: int, share: Offered, other_rank: int, other: Offered) -> UnsupportedState:
    """Make the error that names a tensor and the contradictory facts of two ranks."""
    mine = {spec.label: spec for spec in share.specs}
    theirs = {spec.label: spec for spec in other.specs}
    for label in mine.keys() & theirs.keys():
        said, heard = _said(mine[label]), _said(theirs[label])
        if said != heard:
            return _two_ways(label, rank, f"is {said}", other_rank, heard)
    if mine.keys() != theirs.keys() or share.overlapping != other.overlapping:
        return _two_ways(
            share.name, rank, f"shares memory as {sorted(mine)}", other_rank, f"as {sorted(theirs)}"
        )
    if share.replicated != other.replicated:
        said, heard = "its mesh's own", "replicated"
        if other.replicated and share.replicated:
            said = f"replicated over the ranks {first_of(share.replicated, 8)}"
            heard = f"over the ranks {first_of(other.replicated, 8)}"
        elif share.replicated:
            said, heard = heard, said
        return _two_ways(share.name, rank, f"is {said}", other_rank, heard)
    return _two_ways(
        share.name, rank, f"lies on {_where(share.sharding)}", other_rank,
        f"on {_where(other.sharding)}",
    )  # fmt: skip


def _two_ways(label: str, rank: int, said: str, other: int, heard: str) -> UnsupportedState:
    return UnsupportedState(
        f"This tensor {said} on rank {rank} and {heard} on rank {other}",
        key=label,
        rank=other,
        hint="Tensors of one name on several ranks must be the same. Give it another name, or "
        "correct plan.replicated",
    )


def _said(spec: TensorSpec) -> str:
    return f"{spec.dtype} of shape {list(spec.shape)}"


def _where(spread: Sharding | None) -> str:
    if spread is None:
        return "no mesh"
    mesh, cuts = spread.mesh, [cut.dim for cut in spread.placements]
    return f"a mesh {list(mesh.shape)} of ranks {first_of(mesh.ranks, 8)} cut along {cuts}"


class _Boxes:
    """Cache of the boxes of shardings by rank, and of proved covers."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], tuple[Box, ...]] = {}
        self._proved: set[object] = set()

    def of(self, share: Offered, rank: int) -> tuple[Box, ...]:
        """Return the boxes that a rank holds of a share, in the rank's own order."""
        spread = share.sharding
        if spread is None:
            return (whole(share.specs[0].shape),)
        key = (id(spread), rank)
        if key not in self._held:
            self._held[key] = tuple(held.box for held in spread.held(rank))
        return self._held[key]

    def check_cover(self, name: str, holders: _Holders) -> None:
        """Prove that the boxes of all ranks cover each element of a tensor exactly once.

        Raises:
            UnsupportedState: If they do not.
        """
        ranks = list(holders)
        region = whole(holders[ranks[0]].specs[0].shape)
        what = (region, tuple((rank, id(share.sharding)) for rank, share in holders.items()))
        if what in self._proved:
            return
        boxes = {box for rank, share in holders.items() for box in self.of(share, rank)}
        _, missing = BoxIndex(sorted(boxes)).cover(region)
        if missing or sum(map(box_volume, boxes)) != box_volume(region):
            how = f"lack its box {missing[0]}" if missing else "overlap without being the same"
            raise UnsupportedState(
                f"The boxes of this tensor on ranks {first_of(ranks, 8)} {how}",
                key=name,
                rank=ranks[0],
                hint="Save all of it, and place it alike wherever it is called replicated",
            )
        self._proved.add(what)


def _parts(
    name: str,
    tensor: _Holders,
    boxes: _Boxes,
    places: list[dict[str, list[_SharedBox | None]]],
    load: list[int],
) -> list[_SharedBox]:
    """Return the boxes that several ranks hold; add the boxes of a single rank to its load."""
    holders: dict[Box, list[int]] = defaultdict(list)
    for rank, share in tensor.items():
        for box in boxes.of(share, rank):
            holders[box].append(rank)
    known: dict[Box, _SharedBox | None] = {}
    first = next(iter(tensor.values()))
    item = DTYPES[first.specs[0].dtype].itemsize
    for number, (box, held_by) in enumerate(holders.items()):
        nbytes = first.window if first.overlapping else box_volume(box) * item
        if len(held_by) == 1:
            load[held_by[0]] += nbytes
            known[box] = None
        else:
            shape = () if first.overlapping else box_shape(box)
            known[box] = _SharedBox(name, number, held_by, nbytes, shape)
    for rank, share in tensor.items():
        places[rank][name] = [known[box] for box in boxes.of(share, rank)]
    return [part for part in known.values() if part is not None]


_Rows = tuple[int, list[int]]
"""The dimension along which a box is cut, and the row behind the last one of each piece."""


def _divided(part: _SharedBox, load: list[int], known: dict[tuple[object, ...], _Rows]) -> Cut:
    """Divide a box between its holders.

    Args:
        part: The box.
        load: The load of each rank so far, in bytes.
        known: The rows of boxes that were divided before. The same box of another group of as many
            ranks is cut alike, so that the checksums of both groups' copies can be compared.
    """
    key = (part.name, part.number, part.shape, len(part.holders))
    if key in known:
        dim, stops = known[key]
        emptiest = sorted(part.holders, key=lambda rank: (load[rank], rank))
        pieces = list(zip(sorted(emptiest[: len(stops)]), stops, strict=True))
    else:
        fractions = water_fill(load, part.holders, part.nbytes)
        dim, pieces = 0, [(fractions[0][0], 1)]
        if part.shape and len(fractions) > 1:
            dim = cut_dimension(part.shape, len(fractions))
            pieces = in_rows(fractions, part.shape[dim])
        known[key] = dim, [stop for _, stop in pieces]
    if len(pieces) > 1:
        before = 0
        for rank, stop in pieces:
            load[rank] += part.nbytes * (stop - before) // part.shape[dim]
            before = stop
        return Cut(tuple(pieces), dim)
    owner = min(part.holders, key=lambda rank: (load[rank], rank))
    load[owner] += part.nbytes
    return Cut(((owner, 1),))


def water_fill(load: Sequence[int], ranks: Iterable[int], nbytes: int) -> list[tuple[int, float]]:
    """Divide bytes over the emptiest of some ranks, so that their loads end up level.

    Args:
        load: The load of each rank so far, in bytes.
        ranks: The candidates; at least one.
        nbytes: The bytes to divide.

    Returns:
        Ranks with their fractions, in the order of ranks. Fractions are positive, and no piece is
        much smaller than ``MIN_PIECE_BYTES``, unless there is only one.
    """
    most = max(1, nbytes // MIN_PIECE_BYTES)
    chosen = sorted(ranks, key=lambda rank: (load[rank], rank))[:most]
    total = nbytes + sum(load[rank] for rank in chosen)
    while len(chosen) > 1 and total / len(chosen) - load[chosen[-1]] < MIN_PIECE_BYTES // 2:
        total -= load[chosen.pop()]
    if len(chosen) == 1:
        return [(chosen[0], 1.0)]
    level = total / len(chosen)
    return [(rank, (level - load[rank]) / nbytes) for rank in sorted(chosen)]


def in_rows(fractions: Sequence[tuple[int, float]], rows: int) -> list[tuple[int, int]]:
    """Round fractions to whole numbers of rows.

    Args:
        fractions: Ranks with their fractions.
        rows: Number of rows; at least one.

    Returns:
        Ranks, each with the row behind its last one, without ranks that get no row.
    """
    found: list[tuple[int, int]] = []
    passed, before = 0.0, 0
    for turn, (rank, fraction) in enumerate(fractions, start=1):
        passed += fraction
        stop = rows if turn == len(fractions) else min(rows, round(passed * rows))
        if stop > before:
            found.append((rank, stop))
            before = stop
    return found
