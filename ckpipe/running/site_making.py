"""Putting together what the stages of a pipeline work with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpipe.backend import Backend
from ckpipe.delivery_run import Here
from ckpipe.events import EventBus
from ckpipe.locking.lock import StateLock
from ckpipe.memory.arena import Arena
from ckpipe.memory.budget import ByteBudget
from ckpipe.memory.pinning import Pinning
from ckpipe.planner_protocols import Planner
from ckpipe.ranks.topology import Topology
from ckpipe.saves.site import Site, block_size, initial_budget
from ckpipe.stores.retrying import logging_policy
from ckpipe.worker.carrier import WorkerCarrier
from ckpipe.worker.crossing import make_hello

if TYPE_CHECKING:
    from ckpipe.settings import Settings


@dataclass(frozen=True, slots=True)
class Parts:
    """What a site is made of besides settings.

    Args:
        backend: The store; open.
        patient: The same store, each request tried again after an error that may pass.
        lock: Keeps trainers and copies apart.
        events: Where events go.
        topology: Which rank this is, and how many save together.
        planner: Makes plans.
        attempt: The name of this launch.
        shared: Whether a worker process brings saves to the store.
    """

    backend: Backend
    patient: Backend
    lock: StateLock
    events: EventBus
    topology: Topology
    planner: Planner
    attempt: str
    shared: bool


def make_site(settings: Settings, parts: Parts) -> tuple[Site, WorkerCarrier | None]:
    """The site of a pipeline, and what starts its worker processes if it has any."""
    block = block_size(settings, parts.backend.limits)
    site = Site(
        backend=parts.backend,
        patient=parts.patient,
        settings=settings,
        lock=parts.lock,
        events=parts.events,
        arena=Arena(block, Pinning(settings.staging.pinned), shared=parts.shared),
        budget=ByteBudget(initial_budget(settings, block)),
        planner=parts.planner,
        rank=parts.topology.rank,
        world_size=parts.topology.world_size,
        attempt=parts.attempt,
        carrier=Here(),
        rule=settings.retention.rule,
        block_bytes=block,
        lanes=settings.upload.lanes,
        retry=logging_policy(settings.upload),
        sweep_after=settings.retention.sweep_after,
        keep_reports=settings.keep_reports,
    )
    if not parts.shared:
        return site, None
    worker = WorkerCarrier(settings.worker, lambda: make_hello(settings, site), site)
    site.carrier = worker
    site.arena.on_drop = worker.drop
    return site, worker


def max_file_bytes(settings: Settings, backend: Backend) -> int | None:
    """The largest data file that the store takes, in blocks of the size that will be used."""
    most = backend.limits.max_blocks
    return None if most is None else most * block_size(settings, backend.limits)


__all__ = ["Parts", "make_site", "max_file_bytes"]
