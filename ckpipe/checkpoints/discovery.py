"""Which checkpoints a root holds, and what the index of one says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import anyio

from ckpipe.backend import Backend, ObjectInfo
from ckpipe.errors import CheckpointIncomplete, CheckpointNotFound, MissingObject, ObjectNotFound
from ckpipe.format.manifest import Bundle
from ckpipe.format.manifest_codec import MAX_STORED_BYTES, decode_bundle
from ckpipe.format.object_names import (
    DELETED,
    PINS,
    index_id,
    index_key,
    pin_id,
    tombstone_id,
    tombstone_key,
)
from ckpipe.tasks.collector import collector_paused
from ckpipe.tasks.lanes import all_of
from ckpipe.types import CheckpointId, CheckpointInfo

DELETING = "it is being deleted"
NO_INDEX = "it has no index: its save did not finish, or is not finished yet"


async def discover(backend: Backend) -> list[CheckpointInfo]:
    """All checkpoints of a root, complete or not, the newest first.

    Costs one delimited list of the root and one each of tombstones and pins, at the same time. So
    one that is deleted meanwhile may look complete, or incomplete for want of an index; who uses
    or completes it looks for its tombstone again.

    Raises:
        StoreError: If the store failed.
    """
    root, tombstones, pins = await all_of(
        [partial(backend.children, prefix) for prefix in ("", DELETED, PINS)]
    )
    deleted = {tombstone_id(each.key) for each in tombstones.objects}
    pinned = {pin_id(each.key) for each in pins.objects}
    indexes = {index_id(each.key): each.modified for each in root.objects}
    ids = {CheckpointId.parse(prefix.rstrip("/")) for prefix in root.prefixes} | indexes.keys()
    found = []
    for id in sorted((each for each in ids if each is not None), reverse=True):
        reason = DELETING if id in deleted else "" if id in indexes else NO_INDEX
        found.append(
            CheckpointInfo(
                str(id), id.step, id.attempt, id.count, complete=not reason, reason=reason,
                pinned=id in pinned, saved_at=indexes.get(id),
            )
        )  # fmt: skip
    return found


async def find(backend: Backend, which: int | str) -> CheckpointInfo:
    """The newest complete checkpoint of a step, or the one of an exact id.

    Raises:
        CheckpointIncomplete: If there is only an incomplete one.
        CheckpointNotFound: If there is none.
        StoreError: If the store failed.
    """
    return pick(await discover(backend), which)


def pick(everything: Sequence[CheckpointInfo], which: int | str) -> CheckpointInfo:
    """Of the checkpoints of a root, the newest first, what :func:`find` finds.

    Raises:
        CheckpointIncomplete: If there is only an incomplete one.
        CheckpointNotFound: If there is none.
    """
    named = [each for each in everything if which in (each.id, each.step)]
    for info in named:
        if info.complete:
            return info
    step = which if isinstance(which, int) else None
    if named:
        raise CheckpointIncomplete(
            f"The checkpoint {named[0].id} is not complete: {named[0].reason}",
            step=named[0].step,
            hint="Name another step, or none to load the newest complete one",
        )
    steps = sorted({each.step for each in everything if each.complete})
    shown = ", ".join(map(str, steps[-10:])) or "none"
    numeral = isinstance(which, str) and which.isdecimal()
    raise CheckpointNotFound(
        f"There is no checkpoint {which!r} here; the newest complete steps are: {shown}",
        step=step,
        hint=f"A step is an int, not a string: {which}"
        if numeral
        else "Name one of those, or none to load the newest complete one",
    )


async def describe(backend: Backend, info: CheckpointInfo) -> CheckpointInfo:
    """What is known now of a checkpoint that was incomplete, by its index and its tombstone.

    Raises:
        StoreError: If the store failed.
    """
    index = await _stat(backend, index_key(info.key))
    if await _stat(backend, tombstone_key(info.key)) is not None:
        return replace(info, complete=False, reason=DELETING)
    if index is None:
        return replace(info, complete=False, reason=NO_INDEX)
    return replace(info, complete=True, reason="", saved_at=index.modified)


async def _stat(backend: Backend, key: str) -> ObjectInfo | None:
    try:
        return await backend.stat(key)
    except ObjectNotFound:
        return None


async def newest(backend: Backend) -> CheckpointInfo | None:
    """The newest complete checkpoint of a root, or None."""
    return next((each for each in await discover(backend) if each.complete), None)


async def check_not_deleted(backend: Backend, id: CheckpointId) -> None:
    """Makes sure that nobody has begun to delete a checkpoint; for who holds a lease on it.

    Raises:
        CheckpointIncomplete: If it has a tombstone.
        StoreError: If the store failed.
    """
    try:
        await backend.stat(tombstone_key(id))
    except ObjectNotFound:
        return
    raise CheckpointIncomplete(
        f"The checkpoint {id} was deleted just now",
        step=id.step,
        hint="Name another step, or none to load the newest complete one",
    )


async def read_index(backend: Backend, id: CheckpointId) -> Bundle:
    """Reads and validates the index of a checkpoint.

    Raises:
        MissingObject: If there is no index.
        CorruptCheckpoint: If it is damaged or hostile.
        UnsupportedVersion: If it is of a newer format.
        StoreError: If the store failed.
    """
    key = index_key(id)
    try:
        data = await backend.get(key, max_bytes=MAX_STORED_BYTES)
    except ObjectNotFound as error:
        raise MissingObject("The index is gone", step=id.step, key=key) from error
    return await anyio.to_thread.run_sync(_decode, data, key, id)


def _decode(data: bytes, key: str, id: CheckpointId) -> Bundle:
    with collector_paused():
        return decode_bundle(data, key=key, id=id, kind="index")
