"""Which checkpoint a load takes, the same on all ranks."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import anyio.to_thread

from ckpipe.catalog.complete import find_repaired, newest_likely, newest_repaired
from ckpipe.catalog.find import discover
from ckpipe.errors import (
    CheckpointIncomplete,
    InvalidManifest,
    StoreUnavailable,
    UnsupportedTopology,
)
from ckpipe.ranks.agreements import agree, agreed
from ckpipe.ranks.awaiting import until_finished
from ckpipe.ranks.meeting import Meeting, default_store
from ckpipe.ranks.topology import Topology
from ckpipe.saves.site import Site
from ckpipe.types import CheckpointInfo


async def first_choice(
    site: Site, which: int | str | None, question: str | None, *, again: bool = False
) -> CheckpointInfo | None:
    """The checkpoint to load; None if none was named and there is none.

    Args:
        site: Where to look.
        which: The step or id that was named; None for the newest.
        question: What many ranks agree on it under: the first that looks decides for all, so that
            a checkpoint that becomes complete between the looks of two ranks does not part them.
            None lets each look for itself.
        again: Whether the first choice was one that is being deleted.

    Raises:
        CheckpointNotFound: If the one named is absent or incomplete, or the one that the ranks
            agreed on is gone.
        StoreError: If the store failed.
    """
    if site.world_size == 1 and which is None and not again:
        await until_finished(site.patient, None, site.settings.worker.resume_wait_seconds)
        return await newest_likely(site.patient)
    if site.world_size == 1 or question is None:
        return await _found(site, which)
    if site.settings.read_only:
        return await _met_on(site, question)
    return await _agreed_on(site, which, question)


async def older_ones(site: Site, info: CheckpointInfo) -> list[CheckpointInfo]:
    """The complete checkpoints that are older than one, the newest first.

    Raises:
        StoreError: If the store failed.
    """
    return [each for each in await discover(site.patient) if each.complete and each.key < info.key]


async def _found(
    site: Site,
    which: int | str | None,
    decided: Callable[[], Awaitable[bool]] | None = None,
) -> CheckpointInfo | None:
    await until_finished(site.patient, which, site.settings.worker.resume_wait_seconds, decided)
    if which is None:
        return await newest_repaired(site.patient)
    return await find_repaired(site.patient, which)


async def _met_on(site: Site, question: str) -> CheckpointInfo | None:
    """Take the newest checkpoint that rank 0 finds, where nothing may be written to agree.

    Raises:
        UnsupportedTopology: If there is no ``torch.distributed`` store to meet in, or ranks did
            not come in time.
        StoreUnavailable: If rank 0 could not look.
    """
    store = await anyio.to_thread.run_sync(default_store)
    if store is None:
        raise UnsupportedTopology(
            "Several ranks that read only can agree on the newest checkpoint through "
            "torch.distributed alone, and it is not initialized",
            rank=site.rank,
            hint="Call torch.distributed.init_process_group before, or name the same step or id "
            "on all ranks; steps() tells what there is",
        )
    meeting = Meeting(
        store,
        Topology(site.rank, site.world_size),
        f"{site.settings.url} {question}",
        site.settings.meeting_timeout_seconds,
        "load the newest checkpoint here",
    )
    if site.rank:
        told = json.loads(await anyio.to_thread.run_sync(meeting.join, abandon_on_cancel=True))
        if told["error"] is not None:
            raise StoreUnavailable(
                f"Rank 0 could not look for the newest checkpoint: {told['error']}",
                rank=site.rank,
                hint="Load again on all ranks",
            )
        return None if told["id"] is None else await find_repaired(site.patient, told["id"])
    said: dict[str, str | None] = {"id": None, "error": None}
    try:
        found = await _found(site, None)
        said["id"] = None if found is None else found.id
    except Exception as error:
        said["error"] = str(error)
        raise
    finally:
        await anyio.to_thread.run_sync(meeting.host, json.dumps(said), abandon_on_cancel=True)
    return found


async def _agreed_on(site: Site, which: int | str | None, question: str) -> CheckpointInfo | None:
    async def is_decided() -> bool:
        return await agreed(site.patient, site.attempt, question) is not None

    decided = await agreed(site.patient, site.attempt, question)
    if decided is None:
        found = await _found(site, which, is_decided)
        proposal = None if found is None else found.id
        decided = (await agree(site.patient, site.attempt, question, proposal),)
    (name,) = decided
    if name is None:
        return None
    if not isinstance(name, str):
        raise InvalidManifest(f"The ranks agreed to load {name!r:.100}, which is no checkpoint")
    try:
        return await find_repaired(site.patient, name)
    except CheckpointIncomplete as error:
        error.hint = "Another process has deleted it since; load again on all ranks"
        raise
