"""What a planner is: apart from those that ckpipe has, so that settings need no torch for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from ckpipe.plans.planning import RankPlan
    from ckpipe.state.captured import Captured


class Planner(Protocol):
    """Makes the plan of a rank from the structure of its state."""

    def plan(self, captured: Captured, *, rank: int, world_size: int) -> RankPlan:
        """Plans a save; pure, and called in a worker thread.

        Args:
            captured: The structure; the bytes of its tensors may change meanwhile.
            rank: The rank to plan for, from 0.
            world_size: How many ranks save together.

        Raises:
            UnsupportedState: If a tensor cannot be saved.
            UnsupportedTopology: If the planner cannot serve this world size.
        """
        ...


@runtime_checkable
class JointPlanner(Planner, Protocol):
    """A planner whose plan of a save depends on what other ranks have.

    It is asked in every save, by this method alone, and never while the state lock is held.
    """

    def prepare(self, *, rank: int, world_size: int, max_file_bytes: int | None) -> None:
        """Gets ready when a pipeline is opened; blocking, called in a worker thread.

        Args:
            rank: This rank.
            world_size: How many ranks save together.
            max_file_bytes: The largest data file that the store takes, in bytes; None for no
                limit.

        Raises:
            UnsupportedTopology: If ranks cannot plan together here.
        """
        ...

    def plan_save(self, captured: Captured, *, save: str, rank: int, world_size: int) -> RankPlan:
        """Plans a save together with the other ranks; blocking, called in a worker thread.

        A plan that fits again should be the same object again, since work is remembered with it.

        Args:
            captured: The structure.
            save: What names the save: ``<run>/<number>``, the same on all ranks, where the run
                is this launch on this root. It may be asked again for one save, if the state has
                changed since.
            rank: The rank to plan for, from 0.
            world_size: How many ranks save together.

        Raises:
            PlanTimeout: If ranks do not take part in time; names them.
            UnsupportedState: If a tensor cannot be saved, or ranks contradict each other.
            SaveError: If there is no plan for this save for another reason.
        """
        ...


__all__ = ["JointPlanner", "Planner"]
