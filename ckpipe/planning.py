"""Building blocks for a planner of your own.

A :class:`Planner` gets a state as it was :class:`Captured` and divides its tensors into
:class:`Unit` and :class:`Piece`, each written by one rank. :func:`assemble` makes the
:class:`RankPlan` of them.
"""

from __future__ import annotations

from ckpipe.plan.division import Piece, Share, Unit, shares
from ckpipe.plan.plan import LocalPlanner, RankPlan, ReplicatedMarks, assemble, fingerprint
from ckpipe.state.flatten import Captured
from ckpipe.types import JointPlanner, Planner

__all__ = [
    "Captured",
    "JointPlanner",
    "LocalPlanner",
    "Piece",
    "Planner",
    "RankPlan",
    "ReplicatedMarks",
    "Share",
    "Unit",
    "assemble",
    "fingerprint",
    "shares",
]
