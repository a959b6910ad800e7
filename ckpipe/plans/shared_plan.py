"""A plan that several ranks share: what each of them keeps of it, and makes its own plan by.

A shared plan binds its ranks: each leaves to others what they are to write. It goes on to hold
when a rank's state changes, as long as that rank still has what others leave to it. What the rank
has besides, it then writes itself, all of it; that is never wrong, only written more than once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckpipe.errors import SaveError
from ckpipe.plans.assignment import Answer, Cut
from ckpipe.plans.division import Piece, Share, Unit, rows_of, whole_of
from ckpipe.plans.offers import Offered
from ckpipe.state.tensors import TensorLeaf


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """One rank's part of what was decided for all.

    Args:
        number: How many were made before it in this run.
        wish: How often ranks had asked for another plan when it was made.
        digest: What tells this rank's offer from others.
        answers: By the names of the shares that the rank offered: the share, and for each box
            of it who writes what.
    """

    number: int
    wish: int
    digest: str
    answers: dict[str, tuple[Offered, tuple[Cut | None, ...]]]


def shared_plan(
    number: int, wish: int, digest: str, offered: Sequence[Offered], answer: Answer
) -> SharedPlan:
    """A rank's part of a shared plan."""
    pairs = zip(offered, answer, strict=True)
    return SharedPlan(number, wish, digest, {each.name: (each, cuts) for each, cuts in pairs})


def fits(plan: SharedPlan, found: Sequence[tuple[Share, Offered | None]], *, rank: int) -> bool:
    """Whether a plan says of all that a rank offers who writes it, and binds it to nothing else."""
    told = all(offered is None or _cuts(plan, offered) is not None for _, offered in found)
    return told and _broken(plan, found, rank) is None


def divide(
    plan: SharedPlan,
    leaves: list[TensorLeaf],
    found: Sequence[tuple[Share, Offered | None]],
    *,
    rank: int,
) -> Iterator[Unit]:
    """The units of a rank's state, divided as a shared plan has it.

    Args:
        plan: The plan.
        leaves: The tensors.
        found: The shares of the state, as it is now.
        rank: The rank.

    Raises:
        SaveError: If the rank no longer has what others leave to it.
    """
    broken = _broken(plan, found, rank)
    if broken is not None:
        raise SaveError(
            "Other ranks leave a part of this tensor to this rank, which has it no longer, or not "
            "as it was",
            key=broken,
            rank=rank,
            hint="Change what is replicated on all ranks together; the next save plans anew",
        )
    for share, offered in found:
        cuts = None if offered is None else _cuts(plan, offered)
        if cuts is None:
            pieces = share.holding.written_by(rank) if share.holding.replicas else ()
        else:
            pieces = tuple(_pieces(leaves[share.members[0]], share, cuts, rank))
        yield Unit(share.members, pieces, share.overlapping)


def _cuts(plan: SharedPlan, offered: Offered) -> tuple[Cut | None, ...] | None:
    known = plan.answers.get(offered.name)
    return known[1] if known is not None and known[0] == offered else None


def _pieces(
    leaf: TensorLeaf, share: Share, cuts: tuple[Cut | None, ...], rank: int
) -> Iterator[Piece]:
    boxes = share.holding.boxes
    for held, cut in zip((None,) if boxes is None else boxes, cuts, strict=True):
        if cut is None:
            yield Piece(rank, held)
        elif cut.dim is None:
            yield Piece(cut.stops[0][0], held)
        else:
            start, box = 0, held or whole_of(leaf.shape)
            for owner, stop in cut.stops:
                yield Piece(owner, rows_of(box, cut.dim, start, stop))
                start = stop


def _broken(
    plan: SharedPlan, found: Sequence[tuple[Share, Offered | None]], rank: int
) -> str | None:
    """The name of something that others leave to a rank which no longer has it; None if it has."""
    now = {offered.name: offered for _, offered in found if offered is not None}
    for name, (promised, cuts) in plan.answers.items():
        owed = any(cut is not None and any(rank == owner for owner, _ in cut.stops) for cut in cuts)
        if owed and now.get(name) != promised:
            return name
    return None


__all__ = ["SharedPlan", "divide", "fits", "shared_plan"]
