"""Putting together what the stages of a pipeline work with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpipe.events import EventBus
from ckpipe.lock.lock import StateLock
from ckpipe.memory.arena import Arena, Pinning
from ckpipe.memory.budget import ByteBudget
from ckpipe.running.entering import Entry
from ckpipe.save.context import Site, block_size, initial_budget
from ckpipe.save.upload_pipeline import Here
from ckpipe.store.retry import logging_policy
from ckpipe.worker.crossing import make_hello
from ckpipe.worker.uploader import WorkerCarrier

if TYPE_CHECKING:
    from ckpipe.settings import Settings

_PRUNE_DELAY_SECONDS = 0.1
"""So long after a commit, so that both do not hit the same training step."""


def make_site(
    settings: Settings, entry: Entry, lock: StateLock, events: EventBus
) -> tuple[Site, WorkerCarrier | None]:
    """The site of a pipeline, and what starts its worker processes if it has any.

    Args:
        settings: The settings.
        entry: The store that it has entered.
        lock: Keeps trainers and copies apart.
        events: Where events go.
    """
    around = entry.around
    block = block_size(settings, entry.backend.limits)
    site = Site(
        backend=entry.backend,
        patient=entry.patient,
        settings=settings,
        lock=lock,
        events=events,
        arena=Arena(block, Pinning(settings.staging.pinned), shared=around is not None),
        budget=ByteBudget(initial_budget(settings, block)),
        planner=entry.planner,
        rank=entry.topology.rank,
        world_size=entry.topology.world_size,
        attempt=entry.launch.attempt,
        carrier=Here(),
        rule=settings.retention.rule,
        block_bytes=block,
        lanes=settings.upload.lanes,
        retry=logging_policy(settings.upload),
        sweep_after=settings.retention.sweep_after,
        keep_reports=settings.keep_reports,
        switch_interval=settings.switch_interval_seconds,
        prune_delay=_PRUNE_DELAY_SECONDS,
    )
    if around is None:
        return site, None
    worker = WorkerCarrier(settings.worker, lambda: make_hello(settings, site, around), site)
    site.carrier = worker
    site.arena.on_drop = worker.drop
    return site, worker


__all__ = ["make_site"]
