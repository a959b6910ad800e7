"""Entering a store: its backend, the name of this launch there, and the planner."""

from __future__ import annotations

from dataclasses import dataclass

import anyio

from ckpipe.backend import Backend
from ckpipe.plan.check import choose_planner
from ckpipe.ranks.launch import Launch, Meeting, draft_launch, unclaimed_attempt
from ckpipe.ranks.topology import Topology
from ckpipe.save.context import block_size
from ckpipe.settings import Settings
from ckpipe.store.registry import create_backend, create_reader, scheme_of
from ckpipe.store.retry import ReadOnlyBackend, RetryingBackend, logging_policy
from ckpipe.types import Planner
from ckpipe.worker.crossing import Surroundings, surroundings, uses_process


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
        BackendNotFound: If nobody has registered the scheme.
        SettingsError: If the backend does not take its options.
    """
    assert settings.url is not None
    create = create_reader if settings.read_only else create_backend
    return create(settings.url, settings.backends.get(scheme_of(settings.url), {}))


async def enter(
    backend: Backend, settings: Settings, topology: Topology, meeting: Meeting | None
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


__all__ = ["Entry", "enter", "store_of"]
