"""The world of a process: its rank among those that save together, as its surroundings tell it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from ckpipe.errors import UnsupportedTopology


@dataclass(frozen=True, slots=True)
class Topology:
    """The rank of a process among those that save together.

    Args:
        rank: Its rank, from 0.
        world_size: Number of ranks.
    """

    rank: int
    world_size: int


ALONE = Topology(0, 1)


def find_topology(environment: Mapping[str, str] = os.environ) -> Topology:
    """Return the topology of this process from its process group, else from the environment.

    ``torchrun`` and most other launchers set ``RANK`` and ``WORLD_SIZE``. The function calls no
    collective, and waits for no other rank.

    Args:
        environment: The environment with the launcher's variables.

    Raises:
        UnsupportedTopology: If the variables contradict each other.
    """
    if dist.is_available() and dist.is_initialized():
        return Topology(dist.get_rank(), dist.get_world_size())
    rank, world_size = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
    if not rank or not world_size:
        return ALONE
    if not (rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
        raise UnsupportedTopology(
            f"RANK is {rank!r} and WORLD_SIZE is {world_size!r}, which is no valid rank",
            hint="Correct or remove these variables, or set solo=True",
        )
    return Topology(int(rank), int(world_size))
