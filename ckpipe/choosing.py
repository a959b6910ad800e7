"""Which checkpoints a load takes, the same on all ranks."""

from __future__ import annotations

from ckpipe.agreements import agree, agreed
from ckpipe.discovery import discover
from ckpipe.errors import CheckpointIncomplete, InvalidManifest, UnsupportedTopology
from ckpipe.healing import find_healed, newest_healed
from ckpipe.site import Site
from ckpipe.types import CheckpointInfo


async def choices(
    site: Site, which: int | str | None, call: int, *, fallback: bool
) -> list[CheckpointInfo]:
    """The checkpoints to try, the best first; none if none was named and there is none.

    Without a name, the first of many ranks that looks decides for all: a checkpoint that becomes
    complete between the looks of two ranks does not part them.

    Args:
        site: Where to look.
        which: The step or id that was named.
        call: How often a load without a name was called before in this attempt.
        fallback: Whether older ones than the first may be tried.

    Raises:
        CheckpointNotFound: If the one named is absent or incomplete, or the one that the ranks
            agreed on is gone.
        UnsupportedTopology: If many ranks are to fall back.
        StoreError: If the store failed.
    """
    if fallback and site.world_size > 1:
        raise UnsupportedTopology(
            "Ranks cannot fall back from a damaged checkpoint together",
            rank=site.rank,
            hint="Load without fallback, and name an older step on all ranks if that fails",
        )
    if which is not None:
        first = await find_healed(site.patient, which)
    elif site.world_size == 1:
        found = await newest_healed(site.patient)
        if found is None:
            return []
        first = found
    else:
        together = await _agreed_on(site, f"load-{call}")
        return [] if together is None else [together]
    if not fallback:
        return [first]
    complete = [each for each in await discover(site.patient) if each.complete]
    ids = [each.id for each in complete]
    return complete[ids.index(first.id) :] if first.id in ids else [first]


async def _agreed_on(site: Site, question: str) -> CheckpointInfo | None:
    decided = await agreed(site.patient, site.attempt, question)
    if decided is None:
        newest = await newest_healed(site.patient)
        proposal = None if newest is None else newest.id
        decided = (await agree(site.patient, site.attempt, question, proposal),)
    (name,) = decided
    if name is None:
        return None
    if not isinstance(name, str):
        raise InvalidManifest(f"The ranks agreed to load {name!r:.100}, which is no checkpoint")
    try:
        return await find_healed(site.patient, name)
    except CheckpointIncomplete as error:
        error.hint = "Another process has deleted it since; load again on all ranks"
        raise
