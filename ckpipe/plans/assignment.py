"""Who writes what, decided by one rank from what all ranks offer.

Offers are checked against each other first. What goes by one name must be the same thing wherever
it is one thing: everywhere if it is said to be replicated, else on the ranks of its mesh. The boxes
that these ranks hold must cover it, each element in one box. So a plan that is made is known to
write each element once, by a rank that has it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpipe.errors import UnsupportedState
from ckpipe.format.box_cover import BoxIndex
from ckpipe.format.boxes import Box, box_shape, box_volume
from ckpipe.format.dtypes import DTYPES
from ckpipe.plans.balancing import in_rows, poured
from ckpipe.plans.division import cut_dimension
from ckpipe.plans.offers import Form, Offer, Offered
from ckpipe.state.placements import Sharding


@dataclass(frozen=True, slots=True)
class Cut:
    """How a box is divided between ranks.

    Args:
        stops: Who writes, each with the row behind its last one.
        dim: The dimension whose rows are meant; None if one rank writes all of it.
    """

    stops: tuple[tuple[int, int], ...]
    dim: int | None = None


Answer = tuple[tuple[Cut | None, ...], ...]
"""For each share of an offer, for each box of it: how it is divided; None if one rank has it."""


@dataclass(slots=True)
class _Part:
    """A box that several ranks hold; one without a shape is not cut."""

    name: str
    number: int
    holders: tuple[int, ...]
    nbytes: int
    shape: tuple[int, ...]
    cut: Cut | None = None


def assign(offers: Sequence[Offer]) -> list[Answer]:
    """Decides who writes what of all that ranks offer.

    Args:
        offers: Those of all ranks, in their order.

    Returns:
        For each rank the answer to its offer.

    Raises:
        UnsupportedState: If ranks contradict each other, or nobody offers some element of a
            tensor; names the tensor and a rank.
    """
    load = [offer.private for offer in offers]
    boxes = _Boxes()
    places: list[dict[str, list[_Part | None]]] = [{} for _ in offers]
    parts: list[_Part] = []
    for name, holders in _by_name(offers).items():
        for thing in _things(name, holders, boxes):
            boxes.check_cover(thing)
            parts += _parts(thing, boxes, places, load)
    parts.sort(key=lambda part: (len(part.holders), -part.nbytes, part.name, part.number))
    for part in parts:
        part.cut = _divided(part, load)
    return [
        tuple(
            tuple(None if part is None else part.cut for part in places[rank][share.name])
            for share in offer.shares
        )
        for rank, offer in enumerate(offers)
    ]


_Holders = list[tuple[int, Offered]]


@dataclass(frozen=True, slots=True)
class _Thing:
    """What is one thing: a name, and the ranks that have it, each with what it offers of it."""

    name: str
    ranks: tuple[int, ...]
    shares: tuple[Offered, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shares[0].forms[0].shape


def _by_name(offers: Sequence[Offer]) -> dict[str, _Holders]:
    found: dict[str, _Holders] = defaultdict(list)
    for rank, offer in enumerate(offers):
        for share in offer.shares:
            found[share.name].append((rank, share))
    return found


def _things(name: str, holders: _Holders, boxes: _Boxes) -> Iterator[_Thing]:
    """The different things that go by one name.

    Raises:
        UnsupportedState: If ranks contradict each other about one of them.
    """
    first_rank, first = holders[0]
    for rank, share in holders:
        if share is not first and share.replicated != first.replicated:
            raise _contradiction(first_rank, first, rank, share)
    if first.replicated:
        for rank, share in holders:
            if share is not first and not _alike(share, first):
                raise _contradiction(first_rank, first, rank, share)
        ranks, shares = zip(*holders, strict=True)
        yield _Thing(name, ranks, shares)
        return
    by_rank = dict(holders)
    left = dict(holders)
    while left:
        rank, share = next(iter(left.items()))
        ranks = _on_mesh(name, rank, by_rank, boxes)
        yield _Thing(name, ranks, tuple(left.pop(each) for each in ranks))


def _on_mesh(
    name: str, rank: int, holders: Mapping[int, Offered], boxes: _Boxes
) -> tuple[int, ...]:
    """The ranks of a mesh that hold something of what lies on it, which all must have it alike."""
    share = holders[rank]
    assert share.sharding is not None  # only what is replicated may be plain
    ranks = [each for each in sorted(share.sharding.mesh.ranks) if boxes.of(share, each)]
    for each in ranks:
        other = holders.get(each)
        if other is None:
            raise UnsupportedState(
                f"This DTensor lies on a mesh with rank {each}, which has not got it in its state",
                key=name,
                rank=each,
                hint="Save the same sharded tensors on all ranks of their mesh",
            )
        if other is not share and not (_alike(other, share) and other.sharding == share.sharding):
            raise _contradiction(rank, share, each, other)
    return tuple(ranks)


def _alike(one: Offered, other: Offered) -> bool:
    return one.forms == other.forms and one.overlapping == other.overlapping


def _contradiction(rank: int, share: Offered, other_rank: int, other: Offered) -> UnsupportedState:
    """Names a tensor and what two ranks say of it."""
    mine = {form.label: form for form in share.forms}
    theirs = {form.label: form for form in other.forms}
    for label in mine.keys() & theirs.keys():
        said, heard = _said(mine[label]), _said(theirs[label])
        if said != heard:
            return _two_ways(label, rank, f"is {said}", other_rank, heard)
    if mine.keys() != theirs.keys() or share.overlapping != other.overlapping:
        return _two_ways(
            share.name, rank, f"shares memory as {sorted(mine)}", other_rank, f"as {sorted(theirs)}"
        )
    if share.replicated != other.replicated:
        words = ("its mesh's own", "replicated")
        said, heard = words[share.replicated], words[other.replicated]
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
        hint="What goes by one name on several ranks must be the same there. Give it another "
        "name, or correct plan.replicated",
    )


def _said(form: Form) -> str:
    return f"{form.dtype} of shape {list(form.shape)}"


def _where(spread: Sharding | None) -> str:
    if spread is None:
        return "no mesh"
    cuts = [cut.dim for cut in spread.placements]
    ranks = spread.mesh.ranks
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"a mesh {list(spread.mesh.shape)} of ranks {shown} cut along {cuts}"


class _Boxes:
    """The boxes of shardings, worked out once for each rank, and proved to cover once."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], tuple[Box, ...]] = {}
        self._proved: set[object] = set()

    def of(self, share: Offered, rank: int) -> tuple[Box, ...]:
        """The boxes that a rank holds of a share, in the order in which it has them."""
        spread = share.sharding
        if spread is None:
            return (_whole(share.forms[0].shape),)
        key = (id(spread), rank)
        if key not in self._held:
            self._held[key] = tuple(held.box for held in spread.held(rank))
        return self._held[key]

    def check_cover(self, thing: _Thing) -> None:
        """Proves that the boxes of all ranks have each element of a thing exactly once.

        Raises:
            UnsupportedState: If they have not.
        """
        whole = _whole(thing.shape)
        pairs = list(zip(thing.ranks, thing.shares, strict=True))
        what = (thing.shape, tuple((rank, id(share.sharding)) for rank, share in pairs))
        if what in self._proved:
            return
        boxes = {box for rank, share in pairs for box in self.of(share, rank)}
        _, missing = BoxIndex(sorted(boxes)).cover(whole)
        if missing or sum(map(box_volume, boxes)) != box_volume(whole):
            how = f"lack its box {missing[0]}" if missing else "overlap without being the same"
            raise UnsupportedState(
                f"The parts of this tensor that ranks {_listed(thing.ranks)} have {how}",
                key=thing.name,
                rank=thing.ranks[0],
                hint="Save all of it, and place it alike wherever it is called replicated",
            )
        self._proved.add(what)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")


def _whole(shape: tuple[int, ...]) -> Box:
    return tuple(0 for _ in shape), shape


def _parts(
    thing: _Thing,
    boxes: _Boxes,
    places: list[dict[str, list[_Part | None]]],
    load: list[int],
) -> list[_Part]:
    """The boxes of a thing that several ranks have; what one has alone adds to its load."""
    holders: dict[Box, list[int]] = defaultdict(list)
    for rank, share in zip(thing.ranks, thing.shares, strict=True):
        for box in boxes.of(share, rank):
            holders[box].append(rank)
    known: dict[Box, _Part | None] = {}
    first = thing.shares[0]
    item = DTYPES[first.forms[0].dtype].itemsize
    for number, (box, held_by) in enumerate(holders.items()):
        nbytes = first.window if first.overlapping else box_volume(box) * item
        if len(held_by) == 1:
            load[held_by[0]] += nbytes
            known[box] = None
            continue
        shape = () if first.overlapping else box_shape(box)
        known[box] = _Part(thing.name, number, tuple(held_by), nbytes, shape)
    for rank, share in zip(thing.ranks, thing.shares, strict=True):
        places[rank][thing.name] = [known[box] for box in boxes.of(share, rank)]
    return [part for part in known.values() if part is not None]


def _divided(part: _Part, load: list[int]) -> Cut:
    fractions = poured(load, part.holders, part.nbytes)
    if part.shape and len(fractions) > 1:
        dim = cut_dimension(part.shape, len(fractions))
        stops = in_rows(fractions, part.shape[dim])
        if len(stops) > 1:
            _count(load, part, stops, part.shape[dim])
            return Cut(tuple(stops), dim)
    owner = min(part.holders, key=lambda rank: (load[rank], rank))
    load[owner] += part.nbytes
    return Cut(((owner, 1),))


def _count(load: list[int], part: _Part, stops: list[tuple[int, int]], rows: int) -> None:
    before = 0
    for rank, stop in stops:
        load[rank] += part.nbytes * (stop - before) // rows
        before = stop
