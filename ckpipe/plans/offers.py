"""What a rank tells the others of its state, so that one of them can plan for all.

An *offer* lists what other ranks may hold too: DTensors, and plain tensors that are said to be
replicated. What is a rank's own takes part as a number of bytes, and may change without anybody
being told.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from ckpipe.errors import SaveError
from ckpipe.plans.division import Share, shares
from ckpipe.state.placements import Mesh, Placement, Sharding, sharding
from ckpipe.state.tensors import TensorLeaf

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Form:
    """One name of an offered tensor: what must be the same wherever it is held.

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
        name: What ranks that hold it call it.
        forms: All its tensors, in the order of their labels.
        sharding: How it lies on its mesh; None for a plain tensor.
        replicated: Whether all that is called so is said to be the same, on whatever mesh.
        overlapping: Whether its tensors overlap in other ways than by being the same.
        window: How many bytes overlapping tensors are written as; 0 for others.
    """

    name: str
    forms: tuple[Form, ...]
    sharding: Sharding | None
    replicated: bool
    overlapping: bool
    window: int = 0


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank offers.

    Args:
        shares: What others may hold too, in the order of the walk.
        private: Bytes of what is the rank's own.
    """

    shares: tuple[Offered, ...]
    private: int


def offered_shares(
    leaves: list[TensorLeaf], marked: frozenset[int], *, rank: int, world_size: int
) -> list[tuple[Share, Offered | None]]:
    """Divides a rank's state, and says of each share what is offered of it; None if it is private.

    Args:
        leaves: The tensors.
        marked: The numbers of those that are said to be replicated.
        rank: The rank.
        world_size: How many ranks there are.

    Raises:
        UnsupportedState: If a DTensor's local part has another shape than its placements say.
        UnsupportedTopology: If a mesh has ranks that are not of this world.
    """
    found = []
    for share in shares(leaves, marked, rank=rank, world_size=world_size):
        first = leaves[share.members[0]]
        alike = not marked.isdisjoint(share.members)
        # Where nothing of it is held, it cannot be seen which tensors are tied.
        empty = share.holding.boxes == ()
        shared = not empty and (alike or first.sharding is not None)
        found.append((share, _offered(leaves, share, replicated=alike) if shared else None))
    return found


def private_bytes(leaves: list[TensorLeaf], found: Iterable[tuple[Share, Offered | None]]) -> int:
    """Bytes of the shares that are not offered."""
    return sum(_nbytes(leaves, share) for share, offered in found if offered is None)


def _offered(leaves: list[TensorLeaf], share: Share, *, replicated: bool) -> Offered:
    members = [leaves[number] for number in share.members]
    forms = [Form(leaf.label, leaf.dtype, leaf.full_shape) for leaf in members]
    if len(forms) > 1:
        forms.sort(key=lambda form: form.label)
    window = _nbytes(leaves, share) if share.overlapping else 0
    spread = members[0].sharding
    return Offered(share.name, tuple(forms), spread, replicated, share.overlapping, window)


def _nbytes(leaves: list[TensorLeaf], share: Share) -> int:
    first = leaves[share.members[0]]
    if not share.overlapping:
        return first.nbytes
    members = [leaves[number] for number in share.members]
    top = max(leaf.address + leaf.window for leaf in members)
    return top - min(leaf.address for leaf in members)


def not_held(
    leaves: list[TensorLeaf], found: Iterable[tuple[Share, Offered | None]]
) -> list[tuple[Form, Sharding]]:
    """The DTensors of which this rank has nothing, so that it offers nothing of them."""
    members = (share.members for share, offered in found if offered is None)
    return [
        (Form(leaf.label, leaf.dtype, leaf.full_shape), leaf.sharding)
        for leaf in (leaves[number] for numbers in members for number in numbers)
        if leaf.sharding is not None
    ]


def encode_offer(
    offered: Iterable[Offered], elsewhere: Iterable[tuple[Form, Sharding]] = ()
) -> bytes:
    """What is offered, as other ranks read it: compressed JSON, the same for equal offers.

    Args:
        offered: The shares.
        elsewhere: What only others have. Nobody reads that, but when it lies in another way, the
            bytes differ: whoever has nothing of a tensor, too, tells that plans no longer fit.
    """
    table = _Table()
    rows = []
    for each in offered:
        where = None if each.sharding is None else table.row(each.sharding)
        forms = [(form.label, form.dtype, form.shape) for form in each.forms]
        rows.append((forms, where, int(each.replicated), int(each.overlapping), each.window))
    others = [(form.label, form.dtype, form.shape, table.row(spread)) for form, spread in elsewhere]
    content = {"version": _VERSION, "shardings": table.rows, "shares": rows, "elsewhere": others}
    return zlib.compress(json.dumps(content).encode(), 1)


class _Table:
    """Shardings that stand in a list once each, however many tensors lie so."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self._known: dict[int, int] = {}

    def row(self, spread: Sharding) -> int:
        if id(spread) not in self._known:
            self._known[id(spread)] = len(self.rows)
            mesh, cuts = spread.mesh, [(cut.dim, cut.split_factor) for cut in spread.placements]
            self.rows.append((mesh.shape, mesh.ranks, cuts, spread.shape))
        return self._known[id(spread)]


def decode_offer(data: bytes) -> tuple[Offered, ...]:
    """Reads what :func:`encode_offer` made.

    Raises:
        SaveError: If another version of ckpipe made it.
    """
    content = json.loads(zlib.decompress(data))
    if content["version"] != _VERSION:
        raise SaveError(
            "Ranks run different versions of ckpipe, which do not plan together",
            hint='Install one version everywhere, or set plan="local"',
        )
    table = [
        sharding(
            Mesh(tuple(mesh), tuple(ranks)),
            tuple(Placement(dim, factor) for dim, factor in cuts),
            tuple(shape),
        )
        for mesh, ranks, cuts, shape in content["shardings"]
    ]
    return tuple(_decoded(row, table) for row in content["shares"])


def _decoded(row: list[Any], table: list[Sharding]) -> Offered:
    forms, where, replicated, overlapping, window = row
    return Offered(
        min(label for label, _, _ in forms),
        tuple(Form(label, dtype, tuple(shape)) for label, dtype, shape in forms),
        None if where is None else table[where],
        bool(replicated),
        bool(overlapping),
        window,
    )


def digest_of(data: bytes) -> str:
    """A short text that tells offers apart."""
    return sha256(data).hexdigest()[:32]


__all__ = [
    "Form",
    "Offer",
    "Offered",
    "decode_offer",
    "digest_of",
    "encode_offer",
    "not_held",
    "offered_shares",
    "private_bytes",
]
