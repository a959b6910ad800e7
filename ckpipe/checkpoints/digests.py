"""Digests on the store: written by whoever wrote an index, listed by whoever asks for metrics.

They are advice (:mod:`ckpipe.format.digests`). One that could not be written costs those who ask
later an index, and nobody a save.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable

from ckpipe.backend import Backend, ObjectInfo
from ckpipe.errors import CkpipeError, ObjectExists
from ckpipe.format.digests import Digest, digest_keys, digest_of, digest_owner, read_digests
from ckpipe.format.manifest import Bundle
from ckpipe.format.object_names import DIGESTS
from ckpipe.tasks import to_thread
from ckpipe.tasks.collector import collector_paused
from ckpipe.types import CheckpointId

logger = logging.getLogger("ckpipe")


async def write_digest(backend: Backend, id: CheckpointId, digest: Digest) -> None:
    """Creates the digest of a checkpoint whose index is there; never raises if the store fails.

    Costs one small create-only put, and one more for every hundred bytes or so beyond.
    """
    try:
        for key in digest_keys(id, digest):
            with contextlib.suppress(ObjectExists):
                await backend.put_volatile(key, b"{}")
    except CkpipeError as error:
        logger.info("%s goes without a digest, its index tells as well: %s", id, error)


async def write_digest_of(backend: Backend, index: Bundle | None) -> None:
    """The same for an index that was created just now; None if somebody else has created it."""
    if index is None:
        return
    try:
        digest = digest_of(index)
    except CkpipeError:
        return
    await write_digest(backend, index.id, digest)


async def list_digests(backend: Backend) -> dict[CheckpointId, Digest]:
    """What digests say of the checkpoints of a root; costs one delimited list.

    Raises:
        StoreError: If the store failed.
    """
    found = await backend.children(DIGESTS)
    return await to_thread.run_sync(_read, found.objects)


def _read(objects: Iterable[ObjectInfo]) -> dict[CheckpointId, Digest]:
    with collector_paused():
        return read_digests(each.key for each in objects)


async def owned_digests(backend: Backend) -> dict[CheckpointId, list[ObjectInfo]]:
    """The objects that say something of checkpoints, damaged ones too; costs one delimited list.

    Raises:
        StoreError: If the store failed.
    """
    owned: dict[CheckpointId, list[ObjectInfo]] = {}
    for each in (await backend.children(DIGESTS)).objects:
        if (id := digest_owner(each.key)) is not None:
            owned.setdefault(id, []).append(each)
    return owned


__all__ = ["list_digests", "owned_digests", "write_digest", "write_digest_of"]
