"""Decide which checkpoints of a root stay and which go, and which is the best.

With many ranks, the rank that commits last prunes: it sees all commits, whichever rank writes the
index. There is always such a rank and seldom more than one. Ranks that prune at the same time
create one tombstone; a deletion of objects that are gone is no error.

A load holds a lease on its checkpoint. A leased checkpoint is not chosen for removal. If a lease
appears at the last moment, the tombstone stays and the data waits for the lease to end
(:mod:`ckpipe.catalog.leases` says why this has no gap). A checkpoint that is pinned at the last
moment stays (:mod:`ckpipe.catalog.delete` says why). Checkpoints that other launches resumed from
stay too, as far as the store shows them; a pipeline knows more of its own.

**Why no wrong summary deletes anything.** Before a deletion, the indexes of three groups are read:
the checkpoints to remove, those kept in their place (:meth:`ckpipe.retention.Rule.rivals`), and
those that always stay: the newest of all and of each running launch. Let *R* be the checkpoints to
remove and *V* the rivals; what is known of both is certain then. No checkpoint of *R* is kept among
*V* and *R*. A rule that keeps a checkpoint among many keeps it among fewer
(:mod:`ckpipe.retention`), so it keeps none of *R* among all either, whatever is true of the others.
A wrong summary can only keep a checkpoint that might be removed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Literal

from ckpipe.backend import Backend
from ckpipe.catalog.delete import Removal, delete, finish_deletions
from ckpipe.catalog.find import (
    NO_INDEX,
    Listing,
    check_not_deleted,
    discover,
    list_root,
    list_summaries,
    pick,
    read_index,
)
from ckpipe.catalog.leases import (
    live_subjects,
    protected_subjects,
    read_leases,
    store_time,
    under_lease,
)
from ckpipe.catalog.summaries import Summaries, SummaryQuery
from ckpipe.errors import (
    CheckpointIncomplete,
    CheckpointNotFound,
    CorruptCheckpoint,
    LinkRefused,
    UnsupportedVersion,
    UsageError,
)
from ckpipe.format.names import launch_id, pin_key, summary_key
from ckpipe.retention import Candidate, Decision, KeepBest, Rule, decide
from ckpipe.store.retry import create_once
from ckpipe.types import CheckpointId, CheckpointInfo

PINNED = "it is pinned"
RESUMED = "the newest checkpoint's run resumed from it"
RUNNING_NEWEST = "it is the newest of a launch that is running"
BEHIND_LINK = "it can only be deleted by hand"
UNREAD = "its index cannot be read, so nothing is known of it"

_FEW = 4
"""Number of unknown checkpoints up to which indexes are read, not stored summaries. So a running
pipeline never lists summaries."""


async def decide_on(
    backend: Backend,
    rule: Rule | None,
    protected: Mapping[str, str],
    summaries: Summaries,
    *,
    now: datetime,
    listing: Listing | None = None,
) -> Decision:
    """Decide which checkpoints of a root stay, and change nothing.

    Besides the protected ones, pinned checkpoints stay, and so does the checkpoint from which the
    newest one's run resumed, for every caller. If several launches run on one root, rules count the
    checkpoints of all of them together. So the newest checkpoint of each launch that is known to be
    running stays too. Checkpoints whose index cannot be read stay as well, and take no other's
    place: rules, and the newest that always stays, apply to the others.

    Unknown checkpoints cost a list of summaries, a read of each summary, the indexes of those
    without one, the indexes of checkpoints to remove, and of those that stay in their place.

    Args:
        backend: The store.
        rule: The retention rule; None keeps all.
        protected: Ids that must stay, each with its reason, and ids of launches that are running.
        summaries: The known ones; new ones are added, those of deleted checkpoints dropped.
        now: The time by the store's own clock, which also dates the checkpoints.
        listing: The names of the root, if the caller has just listed them.

    Raises:
        StoreError: If the store failed.
    """
    listing = await listed(backend, summaries) if listing is None else listing
    infos = listing.infos()
    complete = [each for each in infos if each.complete]
    keep = dict(protected) | {each.id: PINNED for each in complete if each.pinned}
    inquiry = SummaryQuery(backend, complete, summaries, few=_FEW)
    while True:
        candidates = await inquiry.candidates()
        kept = dict.fromkeys(newest_of_launches(candidates, keep), RUNNING_NEWEST)
        newest = summaries.known.get(candidates[0].id) if candidates else None
        if newest is not None and newest.resumed_from:
            kept[newest.resumed_from] = RESUMED
        decision = decide(candidates, rule, now=now, protected=kept | keep)
        # The indexes of these must be read before a checkpoint is deleted or reported.
        deciding = {each.id for each in candidates[:1]}
        deciding.update(newest_of_launches(candidates, protected))
        if rule is not None and decision.remove:
            losers = set(decision.remove)
            deciding |= losers | rule.rivals(candidates, losers, now)
        if await inquiry.is_sure(deciding):
            break
    unread = {each.id: keep.get(each.id, UNREAD) for each in complete if each.id not in summaries}
    stays = {*decision.keep, *unread}
    return Decision(
        keep=tuple(each.id for each in complete if each.id in stays),
        remove=decision.remove,
        reasons={**decision.reasons, **unread},
        missing_metrics=decision.missing_metrics,
    )


def missing_text(metric: str, summaries: Summaries) -> str:
    """Return the message that a rule lacks a metric and removes nothing; names other metrics."""
    everything = [summaries[each] for each in summaries.names()]
    known = sorted({name for each in everything for name in each.metrics} - {metric})
    there = ", ".join(known) or "none"
    return (
        f"No checkpoint has a number for the metric {metric!r}, so KeepBest removes nothing; other "
        f"metrics there are: {there}. Name one of them, or give save() this one"
    )


def newest_of_launches(
    checkpoints: Iterable[Candidate | CheckpointInfo], launches: Container[str]
) -> list[str]:
    """Return the newest checkpoint of each of some launches.

    Args:
        checkpoints: Checkpoints, the newest first.
        launches: The ids of the launches.
    """
    first: dict[str, str] = {}
    for each in checkpoints:
        launch = launch_id(each.attempt)
        if launch in launches:
            first.setdefault(launch, each.id)
    return list(first.values())


async def best(
    backend: Backend, metric: str, mode: Literal["min", "max"], summaries: Summaries
) -> CheckpointInfo | None:
    """Find the complete checkpoint with the best value of a metric.

    Costs the three lists of :func:`ckpipe.catalog.find.list_root`. If more than one checkpoint is
    unknown, also a list of summaries and a read of each; and once the index of the winner and of
    each checkpoint without a summary. NaN never wins; among equals the newest wins.

    Args:
        backend: The store.
        metric: The name of the metric.
        mode: Whether the least or the greatest value is the best.
        summaries: The known ones; new ones are added, those of deleted checkpoints dropped.

    Returns:
        The checkpoint; None if no checkpoint is complete.

    Raises:
        CheckpointNotFound: If there are complete checkpoints, and none has a number for the metric.
        StoreError: If the store failed.
    """
    complete = [each for each in (await listed(backend, summaries)).infos() if each.complete]
    inquiry = SummaryQuery(backend, complete, summaries, few=1)
    while True:
        candidates = await inquiry.candidates()
        winner = next(iter(KeepBest(metric, mode, 1).winners(candidates)), None)
        # One index must confirm even that no checkpoint has the metric.
        deciding = winner or next((each.id for each in candidates), None)
        if deciding is None or await inquiry.is_sure([deciding]):
            break
    if complete and winner is None:
        raise _without_metric(metric, candidates)
    return next((summaries.filled(each) for each in complete if each.id == winner), None)


def _without_metric(metric: str, candidates: Sequence[Candidate]) -> CheckpointNotFound:
    """Return the error to raise if no complete checkpoint has a number for a metric."""
    if not candidates:
        return CheckpointNotFound(
            f"No index can be read, so no checkpoint has the metric {metric!r}",
            hint="verify() reports the damage of a checkpoint",
        )
    known = sorted({name for each in candidates for name in each.metrics})
    if metric in known:
        return CheckpointNotFound(
            f"The metric {metric!r} is NaN in every checkpoint that has it",
            hint="Name a step, or load the newest checkpoint",
        )
    return CheckpointNotFound(
        f"No complete checkpoint has the metric {metric!r}; the metrics there are: "
        f"{', '.join(known) or 'none'}",
        hint="Name one of those" if known else "Give save() metrics",
    )


async def prune(
    backend: Backend,
    rule: Rule | None,
    protected: Mapping[str, str],
    summaries: Summaries,
    *,
    sweep_after: timedelta,
    now: datetime | None = None,
) -> Decision:
    """Delete the checkpoints that a rule does not keep; idempotent.

    Args:
        backend: The store.
        rule: The retention rule; None keeps all.
        protected: As for :func:`decide_on`.
        summaries: The known ones; new ones are added, those of deleted checkpoints dropped.
        sweep_after: The age at which tombstones are removed.
        now: The time by the store's own clock; None asks for it.

    Returns:
        The decision as it was carried out.

    Raises:
        StoreError: If the store failed; another prune goes on where this one stopped.
    """
    now = await store_time(backend) if now is None else now
    listing = await listed(backend, summaries)
    await finish_deletions(
        backend, summaries.deleted, forget_before=now - sweep_after, listing=listing,
        retired=summaries.retired, now=now,
    )  # fmt: skip
    decision = await decide_on(backend, rule, protected, summaries, now=now, listing=listing)
    ids = {info.id: info.key for info in listing.infos()}
    ended = [name for name in decision.remove if launch_id(ids[name].attempt) not in protected]
    if ended and summaries.listed is None:
        # Launches of earlier versions may have written summaries under other names.
        summaries.listed = await list_summaries(backend)
    stored = summaries.listed or {}
    stayed: dict[str, str] = {}
    for name in decision.remove:
        id = ids[name]
        keys = {summary_key(id), *(each.key for each in stored.get(id, ()))}
        try:
            removal = await delete(backend, id, sorted(keys))
        except LinkRefused as error:
            stayed[name] = f"{BEHIND_LINK}: {error}"
            continue
        if removal is Removal.GONE:
            summaries.deleted.add(id)
            summaries.retired.add(id)
            summaries.forget(name)
        elif removal is Removal.PINNED:
            stayed[name] = PINNED
    if not stayed:
        return decision
    kept = {*decision.keep, *stayed}
    return replace(
        decision,
        keep=tuple(each.id for each in listing.infos() if each.id in kept),
        remove=tuple(each for each in decision.remove if each not in stayed),
        reasons={**decision.reasons, **stayed},
    )


async def listed(backend: Backend, summaries: Summaries) -> Listing:
    """List the names of a root; drop the summaries of those that other processes have removed."""
    # Summaries that are added meanwhile may be of a checkpoint that is newer than the list.
    before = summaries.names()
    listing = await list_root(backend)
    for name in before.difference(map(str, listing.named())):
        summaries.forget(name)
    return listing


async def pin(backend: Backend, id: CheckpointId) -> None:
    """Protect a checkpoint from retention until it is unpinned.

    :mod:`ckpipe.catalog.delete` says why a prune in progress cannot miss the pin.

    Raises:
        CheckpointIncomplete: If its deletion has begun.
        StoreError: If the store failed.
    """

    async with under_lease(backend, str(id)):
        created = await create_once(backend, pin_key(id))
        try:
            await check_not_deleted(backend, id)
        except CheckpointIncomplete:
            if created:
                await backend.delete([pin_key(id)])
            raise


async def unpin(backend: Backend, id: CheckpointId) -> None:
    """End the protection of a checkpoint; one that is not pinned is no error."""
    await backend.delete([pin_key(id)])


IN_USE = "a process holds a lease on it: it is being loaded or written"
RUNNING = "its launch is running and may still write it"
NEWEST = "it is the newest complete checkpoint"


async def in_use(
    backend: Backend, infos: Sequence[CheckpointInfo], now: datetime
) -> dict[str, str]:
    """Return the checkpoints under a live lease, and those that running launches need.

    A running launch needs its incomplete checkpoints and its newest complete one.

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
    complete = [each for each in infos if each.complete]
    newest = dict.fromkeys(newest_of_launches(complete, live), RUNNING_NEWEST)
    return unfinished | newest | {each.id: IN_USE for each in infos if each.id in live}


async def remove(
    backend: Backend,
    which: int | str,
    *,
    protected: Mapping[str, str] = MappingProxyType({}),
    force: bool = False,
) -> CheckpointInfo:
    """Delete one checkpoint, unless something protects it.

    Args:
        backend: The store.
        which: A step, or an exact id, which may also name an incomplete checkpoint.
        protected: Further ids that must stay, each with its reason.
        force: Whether to delete it even if it is pinned, the newest, in ``protected``, or needed by
            a launch or load.

    Returns:
        The description of the checkpoint before the deletion.

    Raises:
        CheckpointNotFound: If there is none.
        UsageError: If it is protected.
        StoreError: If the store failed; another call goes on where this one stopped.

    If a load begins at this very moment, the checkpoint is deleted for all others, and the next
    prune or sweep removes its data.
    """
    infos = await discover(backend)
    info = next((each for each in infos if each.id == which), None)
    if info is None:
        try:
            info = pick(infos, which)
        except CheckpointIncomplete as error:
            error.hint = "By its id it is deleted all the same"
            raise
    if force:
        await delete(backend, info.key, force=True)
        return info
    reason = protected.get(info.id) or await _protection(backend, infos, info)
    if not reason and await delete(backend, info.key) is Removal.PINNED:
        reason, info = PINNED, replace(info, pinned=True)
    if reason:
        hint = "--force or force=True deletes it all the same"
        if info.pinned:
            hint = f"Unpin it; {hint}"
        raise UsageError(f"{info.id} is protected: {reason}", step=info.step, hint=hint)
    return info


async def _protection(
    backend: Backend, infos: Sequence[CheckpointInfo], info: CheckpointInfo
) -> str:
    if info.pinned:
        return PINNED
    newest = next((each for each in infos if each.complete), None)
    if newest is not None and newest.id == info.id:
        return NEWEST
    now = await store_time(backend)
    origin = None
    if newest is not None:
        with contextlib.suppress(CorruptCheckpoint, UnsupportedVersion):
            origin = (await read_index(backend, newest.key)).parts[0].resumed_from
    others = await in_use(backend, infos, now)
    return others.get(info.id, RESUMED if info.id == origin else "")
