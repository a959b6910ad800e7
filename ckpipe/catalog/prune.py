"""Decide which checkpoints of a root stay and which go, and which is the best.

With many ranks, the one that commits last prunes: it sees all commits, whichever rank writes the
index, and there is always such a rank and seldom more. Ranks that prune at the same time create
one tombstone and delete what others may have deleted already.

A load holds a lease on its checkpoint. A leased one is not chosen for removal; should a lease
appear at the last moment, the tombstone stays and the data waits for the lease to end
(:mod:`ckpipe.catalog.leases` says why this has no gap). One that is pinned at the last moment
stays (:mod:`ckpipe.catalog.delete` says why). What other launches resumed from stays too, as
far as the store itself tells; a pipeline knows more of its own.

**Why no wrong sidecar deletes anything.** Before anything is deleted, the indexes are read of what
goes, of what is kept in its place (:meth:`ckpipe.retention.Rule.rivals`), and of what always
stays: the newest, of all and of each launch that runs. Let *R* be what goes and *V* the rivals,
all of them known for sure then. Nothing of *R* is kept among *V* and *R*. A rule that keeps a
checkpoint among many keeps it among fewer (:mod:`ckpipe.retention`), so it keeps nothing of *R*
among all either, whatever is true of the others. All that a sidecar can still do wrong is that
something stays which might go.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Literal

from ckpipe.backend import Backend, PutMode
from ckpipe.catalog.delete import Removal, delete, finish_deletions
from ckpipe.catalog.find import (
    NO_INDEX,
    Listing,
    check_not_deleted,
    discover,
    list_root,
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
from ckpipe.catalog.metadata_cache import MetadataCache, MetadataQuery, described
from ckpipe.errors import (
    CheckpointIncomplete,
    CheckpointNotFound,
    CorruptCheckpoint,
    LinkRefused,
    ObjectExists,
    UnsupportedVersion,
    UsageError,
)
from ckpipe.format.metrics_sidecar import sidecar_keys
from ckpipe.format.names import launch_id, pin_key
from ckpipe.retention import Candidate, Decision, KeepBest, Rule, decide
from ckpipe.types import CheckpointId, CheckpointInfo

PINNED = "it is pinned"
RESUMED = "the newest checkpoint's run resumed from it"
RUNNING_NEWEST = "it is the newest of a launch that is running"
BEHIND_LINK = "it can only be deleted by hand"
UNREAD = "its index cannot be read, so nothing is known of it"

_FEW = 4
"""So many indexes are read rather than asking for digests, which a running pipeline never needs."""


async def decide_on(
    backend: Backend,
    rule: Rule | None,
    protected: Mapping[str, str],
    facts: MetadataCache,
    *,
    now: datetime,
    listing: Listing | None = None,
) -> Decision:
    """Decide which checkpoints of a root stay, and change nothing.

    Besides what is protected, pinned checkpoints stay and the one that the run of the newest
    resumed from, for every caller. If several launches run on one root, rules count the checkpoints
    of all of them together; so of each that is known to be running the newest stays too. Those
    whose index cannot be read stay as well, and take no other's place: rules, and the newest that
    always stays, are found among the others.

    What is not known yet costs a list of digests, the indexes of checkpoints without one, and
    those of what goes and of what stays instead.

    Args:
        backend: The store.
        rule: What to keep; None keeps all.
        protected: Ids that must stay, each with its reason, and ids of launches that are running.
        facts: What is known of checkpoints already; added to, and rid of those that are gone.
        now: The time by the store's own clock, which also tells when checkpoints were written.
        listing: The names of the root, if the caller has just listed them.

    Raises:
        StoreError: If the store failed.
    """
    listing = await listed(backend, facts) if listing is None else listing
    infos = listing.infos()
    complete = [each for each in infos if each.complete]
    keep = dict(protected) | {each.id: PINNED for each in complete if each.pinned}
    inquiry = MetadataQuery(backend, complete, facts, few=_FEW)
    while True:
        candidates = await inquiry.candidates()
        kept = dict.fromkeys(newest_of_launches(candidates, keep), RUNNING_NEWEST)
        newest = facts.known.get(candidates[0].id) if candidates else None
        if newest is not None and newest.resumed_from:
            kept[newest.resumed_from] = RESUMED
        decision = decide(candidates, rule, now=now, protected=kept | keep)
        # The indexes of these must be read before anything is deleted or reported.
        deciding = {each.id for each in candidates[:1]}
        deciding.update(newest_of_launches(candidates, protected))
        if rule is not None and decision.remove:
            losers = set(decision.remove)
            deciding |= losers | rule.rivals(candidates, losers, now)
        if await inquiry.is_sure(deciding):
            break
    unread = {each.id: keep.get(each.id, UNREAD) for each in complete if each.id not in facts}
    stays = {*decision.keep, *unread}
    return Decision(
        keep=tuple(each.id for each in complete if each.id in stays),
        remove=decision.remove,
        reasons={**decision.reasons, **unread},
        missing_metrics=decision.missing_metrics,
    )


def missing_text(metric: str, facts: MetadataCache) -> str:
    """Say that a rule removes nothing for want of a metric, and which metrics there are."""
    known = sorted({name for each in facts.digests() for name in each.metrics} - {metric})
    there = ", ".join(known) or "none"
    return (
        f"No checkpoint has a number for the metric {metric!r}, so KeepBest removes nothing; other "
        f"metrics there are: {there}. Name one of them, or give save() this one"
    )


def newest_of_launches(
    checkpoints: Iterable[Candidate | CheckpointInfo], launches: Container[str]
) -> list[str]:
    """The first checkpoint of each of some launches.

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
    backend: Backend, metric: str, mode: Literal["min", "max"], facts: MetadataCache
) -> CheckpointInfo | None:
    """The complete checkpoint with the best value of a metric.

    Costs the three lists of :func:`ckpipe.catalog.find.list_root`; if more than one is not
    known yet, a list of digests and the index of the winner; and the index of each that has no
    digest, once. NaN never wins, and of equals the newest does.

    Args:
        backend: The store.
        metric: The name of the metric.
        mode: Whether the least or the greatest value is the best.
        facts: What is known of checkpoints already; added to, and rid of those that are gone.

    Returns:
        The checkpoint; None if no checkpoint is complete.

    Raises:
        CheckpointNotFound: If there are complete checkpoints, and none has a number for the metric.
        StoreError: If the store failed.
    """
    complete = [each for each in (await listed(backend, facts)).infos() if each.complete]
    inquiry = MetadataQuery(backend, complete, facts, few=1)
    while True:
        candidates = await inquiry.candidates()
        winner = next(iter(KeepBest(metric, mode, 1).winners(candidates)), None)
        # That none has the metric is not to be believed unseen either.
        deciding = winner or next((each.id for each in candidates), None)
        if deciding is None or await inquiry.is_sure([deciding]):
            break
    if complete and winner is None:
        raise _without_metric(metric, candidates)
    return next((described(each, facts) for each in complete if each.id == winner), None)


def _without_metric(metric: str, candidates: Sequence[Candidate]) -> CheckpointNotFound:
    """The error where no complete checkpoint has a number for a metric."""
    if not candidates:
        return CheckpointNotFound(
            f"No index can be read, so no checkpoint has the metric {metric!r}",
            hint="verify() says what is wrong with a checkpoint",
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
    facts: MetadataCache,
    *,
    sweep_after: timedelta,
    now: datetime | None = None,
) -> Decision:
    """Delete what a rule does not keep; running it twice is as good as once.

    Args:
        backend: The store.
        rule: What to keep; None keeps all.
        protected: As for :func:`decide_on`.
        facts: What is known of checkpoints already; added to, and rid of those that are gone.
        sweep_after: How long tombstones stay.
        now: The time by the store's own clock; None asks for it.

    Returns:
        What was decided, and has been done.

    Raises:
        StoreError: If the store failed; pruning again goes on where it stopped.
    """
    now = await store_time(backend) if now is None else now
    listing = await listed(backend, facts)
    await finish_deletions(
        backend, facts.deleted, forget_before=now - sweep_after, listing=listing,
        retired=facts.retired, now=now,
    )  # fmt: skip
    decision = await decide_on(backend, rule, protected, facts, now=now, listing=listing)
    # All at once: who prunes at the same time forgets what it has removed.
    digests = {name: facts.digest(name) for name in decision.remove}
    stayed: dict[str, str] = {}
    for name, digest in digests.items():
        id = CheckpointId.parse(name)
        assert id is not None
        try:
            removal = await delete(backend, id, sidecar_keys(id, digest))
        except LinkRefused as error:
            stayed[name] = f"{BEHIND_LINK}: {error}"
            continue
        if removal is Removal.GONE:
            facts.deleted.add(id)
            facts.retired.add(id)
            facts.forget(name)
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


async def listed(backend: Backend, facts: MetadataCache) -> Listing:
    """The names of a root; forgets what is known of checkpoints that others have removed."""
    # What is learned meanwhile may be of a checkpoint that is newer than the list.
    before = facts.names()
    listing = await list_root(backend)
    for name in before.difference(map(str, listing.named())):
        facts.forget(name)
    return listing


async def pin(backend: Backend, id: CheckpointId) -> None:
    """Protect a checkpoint from retention until it is unpinned.

    :mod:`ckpipe.catalog.delete` says why a pruning under way cannot miss it.

    Raises:
        CheckpointIncomplete: If its deletion has begun.
        StoreError: If the store failed.
    """

    async with under_lease(backend, str(id)):
        try:
            await backend.put(pin_key(id), b"{}", PutMode.CREATE)
        except ObjectExists:
            await check_not_deleted(backend, id)
            return
        try:
            await check_not_deleted(backend, id)
        except CheckpointIncomplete:
            await backend.delete([pin_key(id)])
            raise


async def unpin(backend: Backend, id: CheckpointId) -> None:
    """End the protection of a checkpoint; one that is not pinned is no error."""
    await backend.delete([pin_key(id)])


IN_USE = "somebody holds a lease on it: it is being loaded or written"
RUNNING = "its launch is running and may still write it"
NEWEST = "it is the newest complete checkpoint"


async def in_use(
    backend: Backend, infos: Sequence[CheckpointInfo], now: datetime
) -> dict[str, str]:
    """Checkpoints under a live lease, and those that running launches need.

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
        protected: Ids that must stay besides, each with its reason.
        force: Whether to delete a pinned one, the newest, or one that others lean on.

    Returns:
        What it was.

    Raises:
        CheckpointNotFound: If there is none.
        UsageError: If it is protected.
        StoreError: If the store failed; removing it again goes on where it stopped.

    Should a load begin at this very moment, it is deleted for all others, and its data goes with
    the next prune or sweep.
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
