"""The world of a process: its rank among those that save together, as its surroundings tell it.

A pipeline takes its rank and the number of ranks from its surroundings when it is opened. They may
tell more later: a program makes its process group after that, or makes it again with other ranks.
If the pipeline went on then, each of several ranks would write a whole checkpoint of the same step,
and a restart would load the values of one of them into all. So every save and load looks again.

Launchers that do not set ``RANK`` and ``WORLD_SIZE`` tell at least that there are several
processes. Without a process group such a process cannot know which of them save together.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from ckpipe.errors import UnsupportedTopology

if TYPE_CHECKING:
    from ckpipe.settings import Settings

_ALONE_AT_MOST = {
    "SLURM_STEP_NUM_TASKS": 1,
    "OMPI_COMM_WORLD_SIZE": 1,
    "PMI_SIZE": 1,
    "MV2_COMM_WORLD_SIZE": 1,
    "JSM_NAMESPACE_SIZE": 1,
    "HOROVOD_SIZE": 1,
    "PALS_LOCAL_SIZE": 1,
    "WORLD_SIZE": 1,
    "PALS_RANKID": 0,
    "PMIX_RANK": 0,
}
"""Variables of launchers, each with the greatest value that it has in a process started alone.

PMIx has no variable for the number of processes, so it betrays only those of a higher rank.
``SLURM_NTASKS`` and ``SLURM_PROCID`` are also set in a batch script that starts one process.

Sources: ``srun(1)`` and Slurm's plugins pmi2 and cray_shasta, the page "Environment variables set
for MPI applications" of Open MPI, Hydra of MPICH and Intel MPI, ``mpirun_rsh`` of MVAPICH2, PALS of
Cray, ``jsrun``, ``horovodrun``.
"""


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
    return group_topology() or _told_by(*_variables(environment)) or ALONE


def group_topology() -> Topology | None:
    """Return the topology of the default process group; None without one."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return Topology(dist.get_rank(), dist.get_world_size())


def _variables(environment: Mapping[str, str]) -> tuple[str, str]:
    return environment.get("RANK", ""), environment.get("WORLD_SIZE", "")


def _told_by(rank: str, world_size: str) -> Topology | None:
    if not rank or not world_size:
        return None
    if not (rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
        raise UnsupportedTopology(
            f"RANK is {rank!r} and WORLD_SIZE is {world_size!r}, which is no valid rank",
            hint="Correct or remove these variables, or set solo=True",
        )
    return Topology(int(rank), int(world_size))


class World:
    """The world of a pipeline: what its surroundings told at open, and whether they still do.

    Attributes:
        topology: The rank of this process and the number of ranks, for the pipeline's life.

    Args:
        settings: The settings of the pipeline.
        environment: The environment with the launcher's variables.
        given: The topology, if the pipeline's owner knows it; None to find it.

    Raises:
        UnsupportedTopology: If the variables contradict each other.
    """

    def __init__(
        self,
        settings: Settings,
        environment: Mapping[str, str] = os.environ,
        given: Topology | None = None,
    ) -> None:
        group, self._told = group_topology(), _variables(environment)
        self.topology = given or (ALONE if settings.solo else find_topology(environment))
        told = group is None and "" not in self._told
        # The program itself says which processes save together, whatever groups they join.
        named = told and settings.attempt_id is not None
        self._is_given = settings.solo or named or given is not None
        self._environment = environment
        self._launcher = None if group or told else _launcher(environment)

    def check(self, *, saves: bool, step: int | None = None) -> None:
        """Check that the surroundings do not tell another world than at open.

        Takes microseconds. A process group that is gone tells nothing: its ranks still save
        together.

        Args:
            saves: True for a save, which a launch of several processes without a group must not
                begin; a load may.
            step: The step concerned.

        Raises:
            UnsupportedTopology: If a process group has appeared or changed, or the variables have;
                or if there are other processes, and no way to know their ranks.
        """
        if self._is_given:
            return
        found, by = group_topology(), "its process group"
        if found is None and (told := _variables(self._environment)) != self._told:
            found, by = _told_by(*told), "RANK and WORLD_SIZE"
        if found is not None and found != self.topology:
            opened = self.topology
            raise UnsupportedTopology(
                f"The pipeline was opened as rank {opened.rank} of {opened.world_size}, and this "
                f"process is now rank {found.rank} of {found.world_size} by {by}",
                step=step,
                rank=found.rank,
                hint="Open the pipeline after torch.distributed.init_process_group, and another "
                "one when the ranks have changed. To save from one rank alone, set solo=True there",
            )
        if saves and found is None and self._launcher is not None:
            raise UnsupportedTopology(
                f"This process is one of several of a launch, by {self._launcher}, and they have "
                "no way to agree on a name for this launch",
                step=step,
                hint="Call torch.distributed.init_process_group before opening the pipeline, or "
                "set RANK and WORLD_SIZE on all ranks and give them the same attempt_id, a new one "
                "for every launch. To save from this process alone, set solo=True",
            )


def _launcher(environment: Mapping[str, str]) -> str | None:
    """Return the variable that tells of other processes, with its value; None if none does."""
    for name, most in _ALONE_AT_MOST.items():
        value = environment.get(name, "")
        if value.isdecimal() and int(value) > most:
            return f"{name}={value}"
    return None
