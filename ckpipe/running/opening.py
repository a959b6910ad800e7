"""Open a store: its backend, the name of this launch there, its planner, and the saves' context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from ckpipe.backend import Backend
from ckpipe.events import EventBus
from ckpipe.lock.lock import StateLock
from ckpipe.memory.arena import Arena, Pinning
from ckpipe.memory.budget import ByteBudget
from ckpipe.plan.check import choose_planner
from ckpipe.ranks.launch import Launch, Rendezvous, draft_launch, unclaimed_attempt
from ckpipe.ranks.topology import Topology
from ckpipe.save.context import SaveContext, block_size, initial_budget
from ckpipe.settings import Settings
from ckpipe.store.registry import create_backend, create_reader, scheme_of
from ckpipe.store.retry import ReadOnlyBackend, RetryingBackend, logging_policy
from ckpipe.types import Planner
from ckpipe.worker.crossing import Surroundings, make_hello, surroundings, uses_process
from ckpipe.worker.uploader import WorkerUploader

if TYPE_CHECKING:
    from ckpipe.settings import Settings


@dataclass(frozen=True, slots=True)
class Entry:
    """A store that a pipeline has entered.

    Args:
        backend: The store; open.
        patient: The same store, each request tried again after an error that may pass.
        topology: Which rank this is, and how many save together.
        planner: Makes plans.
        launch: The name of this launch, not claimed yet.
        around: What worker processes have to know of this one; None if there are none.
    """

    backend: Backend
    patient: RetryingBackend
    topology: Topology
    planner: Planner
    launch: Launch
    around: Surroundings | None


def store_of(settings: Settings) -> Backend:
    """The backend of the settings' URL, not open yet; blocks, since it may be imported first.

    Raises:
        BackendNotFound: If the scheme is not registered.
        SettingsError: If the backend does not take its options.
    """
    assert settings.url is not None
    create = create_reader if settings.read_only else create_backend
    return create(settings.url, settings.backends.get(scheme_of(settings.url), {}))


async def enter(
    backend: Backend, settings: Settings, topology: Topology, meeting: Rendezvous | None
) -> Entry:
    """Find the name of this launch and the planner; write nothing.

    Args:
        backend: The store; open.
        settings: The settings.
        topology: Which rank this is, and how many save together.
        meeting: Where ranks meet to agree on the name; None if they need not.

    Raises:
        UnsupportedTopology: If ranks did not come to the meeting in time.
        SettingsError: If the planner or the worker asked for cannot be had.
        StoreError: If the store failed.
    """
    policy = logging_policy(settings.upload)
    around = await anyio.to_thread.run_sync(_surroundings, settings, backend)
    patient = RetryingBackend(backend, policy)
    if settings.read_only:
        patient = ReadOnlyBackend(backend, policy)
        launch = Launch(patient, unclaimed_attempt(), topology)
    else:
        launch = await draft_launch(patient, settings.attempt_id, topology, meeting)
    most = _max_file_bytes(settings, backend)
    planner = await anyio.to_thread.run_sync(choose_planner, topology, settings, most)
    return Entry(backend, patient, topology, planner, launch, around)


def _surroundings(settings: Settings, backend: Backend) -> Surroundings | None:
    return surroundings() if uses_process(settings, backend) else None


def _max_file_bytes(settings: Settings, backend: Backend) -> int | None:
    """The largest data file that the store takes, in blocks of the size that will be used."""
    most = backend.limits.max_blocks
    return None if most is None else most * block_size(settings, backend.limits)


_PRUNE_DELAY_SECONDS = 0.1
"""So long after a commit, so that both do not hit the same training step."""


def make_site(
    settings: Settings, entry: Entry, lock: StateLock, events: EventBus
) -> tuple[SaveContext, WorkerUploader | None]:
    """The site of a pipeline, and what starts its worker processes if it has any.

    Args:
        settings: The settings.
        entry: The store that it has entered.
        lock: Keeps trainers and copies apart.
        events: Where events go.
    """
    around = entry.around
    block = block_size(settings, entry.backend.limits)
    site = SaveContext(
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
    worker = WorkerUploader(settings.worker, lambda: make_hello(settings, site, around), site)
    site.uploader = worker
    site.arena.on_drop = worker.drop
    return site, worker
