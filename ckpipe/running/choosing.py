"""Which checkpoint a load takes, the same on all ranks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ckpipe.catalog.complete import find_repaired, newest_likely, newest_repaired
from ckpipe.catalog.find import discover
from ckpipe.errors import CheckpointIncomplete, InvalidManifest
from ckpipe.ranks.agree import Agreements
from ckpipe.ranks.awaiting import until_finished
from ckpipe.save.context import Site
from ckpipe.types import CheckpointInfo


async def first_choice(
    site: Site, which: int | str | None, *, again: bool = False
) -> CheckpointInfo | None:
    """Find the checkpoint to load; None if none was named and there is none.

    Args:
        site: Where to look.
        which: The step or id that was named; None for the newest.
        again: Whether the first choice was one that is being deleted.

    Raises:
        CheckpointNotFound: If the one named is absent or incomplete.
        StoreError: If the store failed.
    """
    if site.world_size == 1 and which is None and not again:
        await until_finished(site.patient, None, site.settings.worker.resume_wait_seconds)
        return await newest_likely(site.patient)
    return await _found(site, which)


async def common_choice(
    site: Site, which: int | str | None, agreements: Agreements, question: str
) -> CheckpointInfo | None:
    """Find the checkpoint to load, the same on all ranks; None if there is none.

    The first rank that looks decides for all, so that a checkpoint that becomes complete between
    the looks of two ranks does not part them.

    Args:
        site: Where to look.
        which: The step or id that was named; None for the newest.
        agreements: Where the ranks agree.
        question: The name of what they agree on.

    Raises:
        CheckpointNotFound: If the one named is absent or incomplete, or the one that the ranks
            agreed on is gone.
        AttemptReused: If ranks agree by objects, and ``attempt_id`` was used before.
        UnsupportedTopology: If the ranks cannot agree.
        StoreError: If the store failed.
    """

    async def is_decided() -> bool:
        return await agreements.decided(question) is not None

    decided = await agreements.decided(question)
    if decided is None:
        found = await _found(site, which, is_decided)
        proposal = None if found is None else found.id
        decided = (await agreements.decide(question, proposal),)
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
