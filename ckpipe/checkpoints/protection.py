"""What must not be deleted, as far as the store itself tells; a pipeline knows more of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from types import MappingProxyType

from ckpipe.backend import Backend
from ckpipe.checkpoints.deleting import Removal, delete, retire
from ckpipe.checkpoints.discovery import NO_INDEX, discover, naming_one, pick, read_index
from ckpipe.checkpoints.leases import live_subjects, protected_subjects, read_leases, store_time
from ckpipe.checkpoints.pruning import PINNED, RESUMED, RUNNING_NEWEST, newest_of_launches
from ckpipe.errors import CheckpointIncomplete, CorruptCheckpoint, UnsupportedVersion, UsageError
from ckpipe.format.object_names import launch_id
from ckpipe.types import CheckpointInfo

IN_USE = "somebody holds a lease on it: it is being loaded or written"
RUNNING = "its launch is running and may still write it"
NEWEST = "it is the newest complete checkpoint"


async def in_use(
    backend: Backend, infos: Sequence[CheckpointInfo], now: datetime
) -> dict[str, str]:
    """Checkpoints that somebody holds a live lease on, or that launches need which are running.

    The latter are those that are incomplete, and of each launch the newest complete one.

    Args:
        backend: The store.
        infos: Its checkpoints, the newest first.
        now: The time by the store's own clock.

    Returns:
        The reason for each id.

    Raises:
        StoreError: If the store failed.
    """
    live = protected_subjects(live_subjects(await read_leases(backend), now))
    unfinished = {
        each.id: RUNNING
        for each in infos
        if each.reason == NO_INDEX and launch_id(each.attempt) in live
    }
    complete = [(each.id, each.attempt) for each in infos if each.complete]
    newest = dict.fromkeys(newest_of_launches(complete, live), RUNNING_NEWEST)
    return unfinished | newest | {each.id: IN_USE for each in infos if each.id in live}


async def protected_by_others(
    backend: Backend, infos: Sequence[CheckpointInfo], now: datetime
) -> dict[str, str]:
    """Checkpoints that others lean on, besides pinned ones and the newest.

    Args:
        backend: The store.
        infos: Its checkpoints, the newest first.
        now: The time by the store's own clock.

    Returns:
        The reason for each id: it is under a live lease, or the newest was resumed from it.

    Raises:
        StoreError: If the store failed.
    """
    kept = {}
    newest = next((each for each in infos if each.complete), None)
    origin = None if newest is None else await _resumed_from(backend, newest)
    if origin is not None:
        kept[origin] = RESUMED
    return kept | await in_use(backend, infos, now)


async def remove(
    backend: Backend,
    which: int | str,
    *,
    protected: Mapping[str, str] = MappingProxyType({}),
    force: bool = False,
) -> CheckpointInfo:
    """Deletes one checkpoint, unless something protects it.

    Args:
        backend: The store.
        which: A step, or an exact id, which may also name an incomplete checkpoint.
        protected: Ids that must stay besides, each with its reason.
        force: Whether to delete a pinned one, the newest, or one that somebody leans on.

    Returns:
        What it was.

    Raises:
        CheckpointNotFound: If there is none.
        UsageError: If it is protected.
        StoreError: If the store failed; removing it again goes on where it stopped.

    Should somebody begin to load it at this very moment, it is deleted for everybody else, and its
    data goes with the next prune or sweep.
    """
    infos = await discover(backend)
    info = next((each for each in infos if each.id == which), None) or _picked(infos, which)
    if force:
        await delete(backend, info.key)
        return info
    reason = protected.get(info.id) or await _protection(backend, infos, info)
    if not reason and await retire(backend, info.key) is Removal.PINNED:
        reason, info = PINNED, replace(info, pinned=True)
    if reason:
        raise UsageError(f"{info.id} is protected: {reason}", step=info.step, hint=_hint(info))
    return info


def _picked(infos: Sequence[CheckpointInfo], which: int | str) -> CheckpointInfo:
    try:
        with naming_one():
            return pick(infos, which)
    except CheckpointIncomplete as error:
        error.hint = "By its id it is deleted all the same"
        raise


def _hint(info: CheckpointInfo) -> str:
    forced = "--force or force=True deletes it all the same"
    return f"Unpin it; {forced}" if info.pinned else forced


async def _protection(
    backend: Backend, infos: Sequence[CheckpointInfo], info: CheckpointInfo
) -> str:
    if info.pinned:
        return PINNED
    newest = next((each for each in infos if each.complete), None)
    if newest is not None and newest.id == info.id:
        return NEWEST
    now = await store_time(backend)
    return (await protected_by_others(backend, infos, now)).get(info.id, "")


async def _resumed_from(backend: Backend, info: CheckpointInfo) -> str | None:
    try:
        return (await read_index(backend, info.key)).parts[0].resumed_from
    except (CorruptCheckpoint, UnsupportedVersion):
        return None


__all__ = ["in_use", "protected_by_others", "remove"]
