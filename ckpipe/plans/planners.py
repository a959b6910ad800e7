"""Which planner a pipeline uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpipe.planner_protocols import JointPlanner, Planner
from ckpipe.plans.global_planner import GlobalPlanner
from ckpipe.plans.planning import LocalPlanner
from ckpipe.ranks.topology import Topology
from ckpipe.tasks.user_code import user_code

if TYPE_CHECKING:
    from ckpipe.settings import Settings

OWN_PLANNERS = (LocalPlanner, GlobalPlanner)
"""The planners whose plans are right by construction, and need no check."""


def choose_planner(topology: Topology, settings: Settings, max_file_bytes: int | None) -> Planner:
    """The planner that the settings ask for, ready to be used; blocking.

    Args:
        topology: Which rank this is, and how many save together.
        settings: The settings.
        max_file_bytes: The largest data file that the store takes, in bytes; None for no limit.

    Raises:
        UnsupportedTopology: If ranks are to plan together and cannot reach each other.
        UsageError: If a planner of the user's raised what would end the program.
    """
    chosen = settings.plan.planner
    if chosen == "local":
        return LocalPlanner(settings.plan.replicated, max_file_bytes=max_file_bytes)
    planner: Planner
    if chosen == "global":
        seconds = settings.plan.timeout_seconds
        planner = GlobalPlanner(replicated=settings.plan.replicated, timeout_seconds=seconds)
    else:
        planner = chosen
    if isinstance(planner, JointPlanner):
        with user_code(f"The planner {type(planner).__name__}", ""):
            planner.prepare(
                rank=topology.rank, world_size=topology.world_size, max_file_bytes=max_file_bytes
            )
    return planner


__all__ = ["OWN_PLANNERS", "choose_planner"]
