"""Dividing what several ranks could write so that all of them write about the same.

Theory. Loads are vessels that water is poured into. What few ranks hold is placed before what many
hold, and of those the large before the small, so that what can go anywhere comes last and fills
what the others have left uneven. A tensor that is large enough is poured out over the emptiest of
its ranks up to a common level; one that is not goes whole to the emptiest. What is left uneven in
the end is about the size of a small tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckpipe.plans.division import MIN_PIECE_BYTES


def poured(load: Sequence[int], ranks: Iterable[int], nbytes: int) -> list[tuple[int, float]]:
    """Divides bytes over the emptiest of some ranks, so that they end up level.

    Args:
        load: What each rank has to write already, in bytes.
        ranks: Those that could write it; at least one.
        nbytes: What there is to write.

    Returns:
        Who writes which fraction, in the order of ranks; fractions are positive, and no piece is
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
    """Fractions as whole numbers of rows.

    Args:
        fractions: Who takes which fraction.
        rows: How many rows there are; at least one.

    Returns:
        Ranks, each with the row behind its last one; those that get none are left out.
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
