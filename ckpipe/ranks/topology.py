"""Find the number of ranks that save together, and this process's place, without communication."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from ckpipe.errors import UnsupportedTopology


@dataclass(frozen=True, slots=True)
class Topology:
    """The place of a process among those that save together.

    Args:
        rank: Its rank, from 0.
        world_size: How many ranks there are.
    """

    rank: int
    world_size: int


ALONE = Topology(0, 1)


def find_topology(environment: Mapping[str, str] = os.environ) -> Topology:
    """The topology of this process: of its process group, else of what a launcher has set.

    ``torchrun`` and most other launchers set ``RANK`` and ``WORLD_SIZE``. No collective is
    called, and no other rank is waited for.

    Args:
        environment: Where to look for the launcher's variables.

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
            f"RANK is {rank!r} and WORLD_SIZE is {world_size!r}, which is no place in a world",
            hint="Correct or remove these variables, or set solo=True",
        )
    return Topology(int(rank), int(world_size))
