"""The checkpoints of a root: find them, protect them, and remove those that no rule keeps.

A pipeline has one :class:`Catalog`, and so has each command of the command line.

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
those that always stay: the newest of all, of the line and of each running launch, and the newest
of the line without NaN. Its own index has none then, so it takes the place of an older one without.
Let *R* be the
checkpoints to remove and *V* the rivals; what is known of both is certain then, also that they are
of the line to prune. No checkpoint of *R* is kept among *V* and *R*. A rule that keeps a checkpoint
among many keeps it among fewer (:mod:`ckpipe.retention`), so it keeps none of *R* among all of the
line either, whatever is true of the others. A wrong summary can only keep a checkpoint that might
be removed.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Container,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Literal

from ckpipe.backend import Backend
from ckpipe.catalog.complete import find_repaired, newest_repaired, repair, repaired
from ckpipe.catalog.delete import Removal, delete, finish_deletions, pin
from ckpipe.catalog.find import (
    DELETING,
    NO_INDEX,
    Listing,
    check_not_deleted,
    check_still_there,
    discover,
    list_root,
    list_summaries,
    pick,
    present,
    read_index,
)
from ckpipe.catalog.leases import (
    live_subjects,
    protected_subjects,
    read_leases,
    store_time,
    time_now,
    under_lease,
)
from ckpipe.catalog.opened import Opened
from ckpipe.catalog.summaries import Summaries, SummaryQuery, candidate_of, filled, inspected
from ckpipe.catalog.sweep import SweepReport, look_around, plan_sweep, uploads_before
from ckpipe.errors import (
    CheckpointIncomplete,
    CheckpointNotFound,
    CorruptCheckpoint,
    LinkRefused,
    StoreError,
    UnsupportedVersion,
    UsageError,
)
from ckpipe.format.manifest import ManifestDocument
from ckpipe.format.names import launch_id, pin_key, summary_key
from ckpipe.format.summary import Summary
from ckpipe.retention import (
    WITHOUT_NAN,
    BestMode,
    Candidate,
    Decision,
    KeepBest,
    Rule,
    decide,
    newest_without_nan,
)
from ckpipe.threads import BackgroundTask
from ckpipe.types import CheckpointId, CheckpointInfo, CheckpointList

PINNED = "it is pinned"
RESUMED = "the newest checkpoint's run resumed from it"
RUNNING_RESUMED = "a launch that is running resumed from it"
RUNNING_NEWEST = "it is the newest of a launch that is running"
BEHIND_LINK = "it can only be deleted by hand"
UNREAD = "its index cannot be read: it stays, and takes no place among those that the rules keep"
IN_USE = "a process holds a lease on it: it is being loaded or written"
RUNNING = "its launch is running and may still write it"
NEWEST = "it is the newest complete checkpoint"
OTHER_LINE = "it is of another line of launches"
NOT_BY_RULE = (PINNED, RESUMED, RUNNING_RESUMED, RUNNING_NEWEST, IN_USE, UNREAD, OTHER_LINE)
"""The reasons to keep a checkpoint that no rule gives."""

_FEW = 4
"""Number of unknown checkpoints up to which indexes are read, not stored summaries. So a running
pipeline never lists summaries."""


@dataclass(slots=True)
class Catalog:
    """The checkpoints of a root.

    Args:
        backend: The store, with retries.
        rule: The rule for checkpoints to keep; None keeps all.
        sweep_after: Age at which remains of runs and tombstones are removed, by the store's clock.
        read_only: True if no lease may be written, so that reads are not protected.
        all_lines: True if the rule counts the checkpoints of all lines of launches together.
        resumed_from: The checkpoint from which this run has resumed, which is kept.
        loaded_line: The line of the checkpoint that this pipeline has loaded last.
        line: The line of this launch, once its first save has settled it.
        greatest: The newest of the complete checkpoints of the greatest step, as last listed.
        summaries: The known summaries of checkpoints; those of deleted ones are dropped.
        loading: Number of loads and copies that read each checkpoint now.
        linked_from: The checkpoint to which each save under way may link, by the name of the save.
        on_removed: Called after each checkpoint that a prune removes.
    """

    backend: Backend
    rule: Rule | None = None
    sweep_after: timedelta = timedelta(days=1)
    read_only: bool = False
    all_lines: bool = False
    resumed_from: str | None = None
    loaded_line: str | None = None
    line: str | None = None
    greatest: CheckpointId | None = None
    summaries: Summaries = field(default_factory=Summaries)
    loading: Counter[str] = field(default_factory=Counter)
    linked_from: dict[str, str] = field(default_factory=dict)
    on_removed: Callable[[], None] = lambda: None
    _last_inspected: CheckpointInfo | None = None

    # Find

    async def steps(self, *, metadata: bool) -> list[CheckpointInfo]:
        """List all checkpoints, the oldest first; complete those that lack only their index.

        Those that are being deleted are left out.
        """
        known = await repaired(self.backend, (await self._listed()).infos())
        infos = [each for each in reversed(known) if each.reason != DELETING]
        if metadata:
            return CheckpointList(await inspected(self.backend, infos, self.summaries))
        complete = [each for each in infos if each.complete]
        await SummaryQuery(self.backend, complete, self.summaries, few=0).read_stored()
        filled = (replace(self.summaries.filled(each), metadata=None) for each in infos)
        return CheckpointList(filled)

    async def latest(self) -> CheckpointInfo | None:
        """Find the newest complete checkpoint."""
        info = await newest_repaired(self.backend)
        return None if info is None else await self.inspected(info)

    async def inspected(self, info: CheckpointInfo) -> CheckpointInfo:
        """Add the summary of the index, which is cached for the last checkpoint asked for.

        It is not read for the info of a commit, which has it, also if a worker has committed.
        """
        known = self.summaries.known.get(info.id)
        if known is not None and known.metadata is not None:
            return filled(info, known)
        last = self._last_inspected if info.metadata is None else info
        if last is None or last.id != info.id or last.bytes is None:
            (last,) = await inspected(self.backend, [info], Summaries())
            self._last_inspected = last
        metrics, metadata = deepcopy((last.metrics, last.metadata))
        return replace(last, pinned=info.pinned, metrics=metrics, metadata=metadata)

    async def best(self, metric: str, mode: BestMode) -> CheckpointInfo | None:
        """Find the complete checkpoint with the best value of a metric.

        Costs the three lists of :func:`ckpipe.catalog.find.list_root`. If more than one checkpoint
        is unknown, also a list of summaries and a read of each; and once the index of the winner
        and of each checkpoint without a summary. NaN never wins; among equals the newest wins.

        Args:
            metric: The name of the metric.
            mode: Whether the least or the greatest value is the best.

        Returns:
            The checkpoint; None if no checkpoint is complete.

        Raises:
            CheckpointNotFound: If there are complete checkpoints, and none has a number for the
                metric.
            CorruptCheckpoint: If the index of one that might be the best is damaged.
            UnsupportedVersion: If it is of a newer format.
            StoreError: If the store failed.
        """
        complete = [each for each in (await self._listed()).infos() if each.complete]
        inquiry = SummaryQuery(self.backend, complete, self.summaries, few=1)
        rule = KeepBest(metric, mode)
        while True:
            candidates = await inquiry.candidates()
            winner = next(iter(rule.winners(candidates)), None)
            # One index must confirm even that no checkpoint has the metric.
            deciding = winner or next((each.id for each in candidates), None)
            if deciding is None or await inquiry.is_sure([deciding]):
                break

        def might_win(info: CheckpointInfo, told: Summary | None) -> bool:
            if told is None:
                return True
            rivals = [candidate_of(info, told), *candidates]
            rivals.sort(key=lambda each: (each.order, each.id), reverse=True)
            return rule.winners(rivals) == [info.id]

        await inquiry.check_unread(might_win)
        if complete and winner is None:
            raise _without_metric(metric, candidates)
        found = next((each for each in complete if each.id == winner), None)
        return None if found is None else await self.inspected(found)

    async def named(self, name: str) -> CheckpointInfo | None:
        """Find the newest complete checkpoint that has this text under ``name`` in its metadata.

        Costs as much as :meth:`best`.

        Raises:
            CorruptCheckpoint: If the index of a newer one that might have the name is damaged.
            UnsupportedVersion: If it is of a newer format.
            StoreError: If the store failed.
        """
        complete = [each for each in (await self._listed()).infos() if each.complete]
        query = SummaryQuery(self.backend, complete, self.summaries, few=1)
        while True:
            known = await query.candidates()
            named = (each.id for each in known if self.summaries[each.id].name == name)
            winner = next(named, None)
            # One index must confirm even that no checkpoint has the name.
            deciding = winner or next((each.id for each in known), None)
            if deciding is None or await query.is_sure([deciding]):
                break
        found = next((each for each in complete if each.id == winner), None)

        def might_be(info: CheckpointInfo, told: Summary | None) -> bool:
            is_newer = found is None or info.key > found.key
            return is_newer and (told is None or told.name == name)

        await query.check_unread(might_be)
        return found

    async def without_nan(
        self,
        *,
        before: CheckpointId | None = None,
        unread: Literal["raise", "skip", "take"] = "raise",
    ) -> CheckpointInfo | None:
        """Find the newest complete checkpoint without NaN.

        Costs as much as :meth:`best`.

        Args:
            before: Only older ones than this.
            unread: What a newer one does whose index cannot be read, and which may have none:
                raise its error, be left out, or be taken, for a load that falls back from it.

        Raises:
            CorruptCheckpoint: With ``"raise"``, if the index of a newer one is damaged.
            UnsupportedVersion: With ``"raise"``, if it is of a newer format.
            StoreError: If the store failed.
        """
        known = await repaired(self.backend, (await self._listed()).infos())
        complete = [each for each in known if each.complete and (not before or each.key < before)]
        query = SummaryQuery(self.backend, complete, self.summaries, few=1)
        while True:
            candidates = await query.candidates()
            winner = newest_without_nan(candidates)
            # Without a winner, the indexes confirm that all have NaN.
            if await query.is_sure([winner] if winner else [each.id for each in candidates]):
                break
        taken = {winner, *(query.unread if unread == "take" else ())}
        found = next((each for each in complete if each.id in taken), None)
        if unread == "raise":
            await query.check_unread(lambda info, _: found is None or info.key > found.key)
        return found

    async def _listed(self) -> Listing:
        """List the names of the root; drop the summaries of those that others have removed."""
        # Summaries that are added meanwhile may be of a checkpoint that is newer than the list.
        before = self.summaries.names()
        listing = await list_root(self.backend)
        for name in before.difference(map(str, listing.named())):
            self.summaries.forget(name)
        return listing

    # Read

    @asynccontextmanager
    async def opened(
        self, id: CheckpointId, look: Callable[[], Awaitable[ManifestDocument]] | None = None
    ) -> AsyncIterator[Opened]:
        """Open a checkpoint, and hold a lease on it, so that no process deletes it meanwhile.

        The index is read concurrently with the requests for the lease, since it is whole or absent
        and never changes. Errors of the block are raised as they are, not in a group.

        Args:
            id: The checkpoint.
            look: Reads other metadata in place of the index.

        Raises:
            CheckpointIncomplete: If it is being deleted already, whatever error the index raised;
                or was deleted meanwhile, which may happen if no lease can be written.
            CorruptCheckpoint: If it is damaged.
            StoreError: If the store failed.
        """
        metadata = BackgroundTask(look or partial(read_index, self.backend, id))
        lease = nullcontext() if self.read_only else under_lease(self.backend, str(id))
        self.loading[str(id)] += 1
        try:
            async with metadata.started(), lease:
                await check_not_deleted(self.backend, id)
                yield Opened(self.backend, await metadata.get())
        except CorruptCheckpoint:
            await check_still_there(self.backend, id)
            raise
        finally:
            self.loading[str(id)] -= 1

    # Protect

    async def pin(self, which: int | str) -> CheckpointInfo:
        """Protect a complete checkpoint from retention until it is unpinned.

        Raises:
            CheckpointNotFound: If it is absent, incomplete, or its deletion has begun.
            StoreError: If the store failed.
        """
        info = await find_repaired(self.backend, which)
        await pin(self.backend, info.key)
        return info

    async def unpin(self, which: int | str) -> CheckpointInfo:
        """End the protection of a complete checkpoint; one that is not pinned is no error."""
        info = await find_repaired(self.backend, which)
        await self.backend.delete([pin_key(info.key)])
        return info

    def _protected(self) -> dict[str, str]:
        """Return ids that this process protects, each with its reason."""
        kept = dict.fromkeys(self.linked_from.values(), "a save under way links to its files")
        kept |= {name: "it is being loaded" for name, count in self.loading.items() if count}
        if self.resumed_from is not None:
            kept[self.resumed_from] = "this run resumed from it"
        return kept

    async def _leased(self, now: datetime) -> set[str]:
        """Return the checkpoints and running launches that processes protect by a lease."""
        return protected_subjects(live_subjects(await read_leases(self.backend), now))

    # Remove

    async def delete(self, which: int | str, *, force: bool = False) -> CheckpointInfo:
        """Delete one checkpoint, unless something protects it.

        Args:
            which: A step, or an exact id, which may also name an incomplete checkpoint.
            force: True to delete it even if it is pinned, the newest, or needed by a launch or
                load.

        Returns:
            The description of the checkpoint before the deletion.

        Raises:
            CheckpointNotFound: If there is none.
            UsageError: If it is protected.
            StoreError: If the store failed; another call goes on where this one stopped.

        If a load begins at this very moment, the checkpoint is deleted for all others, and the next
        prune or sweep removes its data.
        """
        infos = await present(self.backend, await discover(self.backend))
        info = next((each for each in infos if each.id == which), None)
        if info is None:
            try:
                info = pick(infos, which)
            except CheckpointIncomplete as error:
                error.hint = "By its id it is deleted all the same"
                raise
        if force:
            await delete(self.backend, info.key, force=True)
            return info
        reason = self._protected().get(info.id) or await self._protection(infos, info)
        if not reason and await delete(self.backend, info.key) is Removal.PINNED:
            reason, info = PINNED, replace(info, pinned=True)
        if reason:
            hint = "--force or force=True deletes it all the same"
            if info.pinned:
                hint = f"Unpin it; {hint}"
            raise UsageError(f"{info.id} is protected: {reason}", step=info.step, hint=hint)
        return info

    async def _protection(self, infos: Sequence[CheckpointInfo], info: CheckpointInfo) -> str:
        """Return the reason why no process may delete a checkpoint; empty if there is none.

        A running launch needs its incomplete checkpoints and its newest complete one.
        """
        if info.pinned:
            return PINNED
        complete = [each for each in infos if each.complete]
        if complete and complete[0].id == info.id:
            return NEWEST
        origin = sound = None
        for each in complete:
            with contextlib.suppress(CorruptCheckpoint, UnsupportedVersion):
                index = await read_index(self.backend, each.key)
                if each is complete[0]:
                    origin = index.parts[0].resumed_from
                sound = None if index.nan else each.id
            if sound or each.id == info.id:
                break
        leased = await self._leased(await store_time(self.backend))
        if info.id in leased:
            return IN_USE
        if info.id in newest_of_launches(complete, leased):
            return RUNNING_NEWEST
        if info.id == sound:
            return WITHOUT_NAN
        if info.reason == NO_INDEX and launch_id(info.attempt) in leased:
            return RUNNING
        return RESUMED if info.id == origin else ""

    async def prune(
        self,
        attempt: str | None = None,
        *,
        now: datetime | None = None,
        line: str | None = None,
        dry_run: bool = False,
    ) -> Decision:
        """Delete the checkpoints of one line that the rule does not keep; idempotent.

        Args:
            attempt: The name of this process's launch, whose newest checkpoint stays.
            now: The time by the store's own clock; None asks for it.
            line: The line, unless this launch has complete checkpoints, which tell it; None for
                that of the newest checkpoint.
            dry_run: True to only return the decision with its reasons.

        Returns:
            The decision as it was carried out.

        Raises:
            CorruptCheckpoint: If the line of the newest checkpoint is needed, and there are several
                and its index cannot be read.
            StoreError: If the store failed; another prune goes on where this one stopped.
        """
        if now is None:
            now = await (time_now(self.backend) if dry_run else store_time(self.backend))
        leased = await self._leased(now)
        if attempt is not None:
            leased.add(launch_id(attempt))
        protected = dict.fromkeys(leased, IN_USE) | self._protected()
        listing = await self._listed()
        own = None if attempt is None else launch_id(attempt)
        decide_now = partial(self._decide, protected, listing, now, own, line)
        if dry_run:
            return await decide_now()
        summaries = self.summaries
        await finish_deletions(
            self.backend, summaries.deleted, forget_before=now - self.sweep_after, listing=listing,
            retired=summaries.retired, now=now,
        )  # fmt: skip
        decision = await decide_now()
        ids = {info.id: info.key for info in listing.infos()}
        remove = {name: ids[name] for name in decision.remove}
        ended = any(launch_id(id.attempt) not in protected for id in remove.values())
        if ended and summaries.listed is None:
            # Launches of earlier versions may have written summaries under other names.
            summaries.listed = await list_summaries(self.backend)
        stayed = await self._remove(remove)
        if not stayed:
            return decision
        kept = {*decision.keep, *stayed}
        return replace(
            decision,
            keep=tuple(each.id for each in listing.infos() if each.id in kept),
            remove=tuple(each for each in decision.remove if each not in stayed),
            reasons={**decision.reasons, **stayed},
        )

    async def _remove(self, remove: Mapping[str, CheckpointId]) -> dict[str, str]:
        """Delete checkpoints and their summaries; return those that stay, each with its reason."""
        summaries, stayed = self.summaries, dict[str, str]()
        stored = summaries.listed or {}
        for name, id in remove.items():
            keys = {summary_key(id), *(each.key for each in stored.get(id, ()))}
            try:
                removal = await delete(self.backend, id, sorted(keys))
            except LinkRefused as error:
                stayed[name] = f"{BEHIND_LINK}: {error}"
                continue
            self.on_removed()
            if removal is Removal.GONE:
                summaries.deleted.add(id)
                summaries.retired.add(id)
                summaries.forget(name)
            elif removal is Removal.PINNED:
                stayed[name] = PINNED
        return stayed

    async def _decide(
        self,
        protected: Mapping[str, str],
        listing: Listing,
        now: datetime,
        own: str | None,
        line: str | None,
    ) -> Decision:
        """Decide which checkpoints stay, and change nothing.

        Rules count the checkpoints of one line, and those of other lines stay. Besides the
        protected ones, pinned checkpoints stay, and so does the checkpoint from which the newest
        one's run resumed, for every caller. If several launches of one line run, rules count the
        checkpoints of all of them together. So the newest checkpoint of each launch that is known
        to be running stays too, and the one that it resumed from. Checkpoints whose index cannot be
        read stay as well, and take no other's place: rules, and the newest that always stays, apply
        to the others.

        Unknown checkpoints cost a list of summaries, a read of each summary, the indexes of those
        without one, the indexes of checkpoints to remove, and of those that stay in their place.

        Args:
            protected: Ids that must stay, each with its reason, and ids of running launches.
            listing: The names of the root.
            now: The time by the store's own clock, which also dates the checkpoints.
            own: The id of this process's launch; None for a process that saves nothing.
            line: The line, as for :meth:`prune`.

        Raises:
            StoreError: If the store failed.
        """
        rule, summaries = self.rule, self.summaries
        complete = [each for each in listing.infos() if each.complete]
        keep = dict(protected) | {each.id: PINNED for each in complete if each.pinned}
        inquiry = SummaryQuery(self.backend, complete, summaries, few=_FEW)
        while True:
            candidates = await inquiry.candidates()
            mine = [each for each in candidates if launch_id(each.attempt) == own]
            telling = mine[:1] or (candidates[:1] if line is None else [])
            wanted = telling[0].line if telling else line
            counted = [each for each in candidates if self.all_lines or each.line == wanted]
            running = newest_of_launches(candidates, keep)
            firsts = {each.id for each in (*candidates[:1], *counted[:1])}
            kept = dict.fromkeys(running, RUNNING_NEWEST)
            for name in (*running, *firsts):
                known = summaries.known.get(name)
                if known is not None and known.resumed_from:
                    kept[known.resumed_from] = RESUMED if name in firsts else RUNNING_RESUMED
            decision = decide(counted, rule, now=now, protected=kept | keep)
            # The indexes of these must be read before a checkpoint is deleted or reported.
            deciding = {*firsts, *newest_of_launches(candidates, protected)}
            deciding |= {each.id for each in telling}
            if rule is not None and decision.remove:
                losers = set(decision.remove)
                deciding |= losers | rule.rivals(counted, losers, now)
                deciding.add(newest_without_nan(counted) or "")
            if await inquiry.is_sure(deciding):
                break
        others = {each.id for each in candidates} - decision.reasons.keys()
        unknown = [each.id for each in complete if each.id not in summaries]
        if line is None and not mine and telling and not self.all_lines:
            _check_line_known(complete[0], telling[0])
        stay = {name: keep.get(name, UNREAD) for name in unknown}
        stay |= dict.fromkeys(others, OTHER_LINE)
        stays = {*decision.keep, *stay}
        return Decision(
            keep=tuple(each.id for each in complete if each.id in stays),
            remove=decision.remove,
            reasons={**decision.reasons, **stay},
            missing_metrics=decision.missing_metrics,
        )

    def missing_text(self, metric: str) -> str:
        """Return the message that the rule lacks a metric and removes nothing."""
        everything = [self.summaries[each] for each in self.summaries.names()]
        known = sorted({name for each in everything for name in each.metrics} - {metric})
        there = ", ".join(known) or "none"
        return (
            f"No checkpoint has a number for the metric {metric!r}, so KeepBest removes nothing; "
            f"other metrics there are: {there}. Name one of them, or give save() this one"
        )

    async def sweep(self, attempt: str | None = None, *, dry_run: bool = False) -> SweepReport:
        """Remove the remains of crashed runs; idempotent.

        A checkpoint that lacks only its index is completed instead. If that fails for now, such as
        for want of room, it stays for a later sweep.

        Args:
            attempt: The name of this process's launch, whose remains stay.
            dry_run: True to only report what would be done. Nothing is written then, so the clock
                is this machine's, and no checkpoint is completed.

        Raises:
            StoreError: If the store failed; another sweep goes on where this one stopped.
        """
        after, running = self.sweep_after, [] if attempt is None else [attempt]
        if dry_run:
            return plan_sweep(await look_around(self.backend), datetime.now(UTC), after, running)
        now = await store_time(self.backend)
        found = await look_around(self.backend)
        report = plan_sweep(found, now, after, running)
        remove, keep = dict(report.remove), dict(report.keep)
        for info in found.incomplete:
            if info.id not in remove:
                continue
            try:
                known = await repair(self.backend, info, sure=True)
            except (StoreError, UnsupportedVersion) as error:
                # All its data may be there: a full disk ends a save just before its index.
                del remove[info.id]
                keep[info.id] = f"it may lack nothing but its index: {error}"
                continue
            if known.complete:
                del remove[info.id]
                keep[info.id] = "it lacked nothing but its index, which was written"
            else:
                await delete(self.backend, info.key, force=True)
        await finish_deletions(self.backend, set(), forget_before=now - after)
        await self.backend.delete(
            [*report.leases, *report.scratch, *report.agreements, *report.summaries, *found.hollow]
        )
        before = uploads_before(found, now, after, running)
        uploads = await self.backend.remove_stale_uploads("", before=before)
        return replace(report, remove=remove, keep=keep, uploads=uploads)


def _check_line_known(newest: CheckpointInfo, readable: Candidate) -> None:
    """Refuse to take the line of a checkpoint for that of a newer one with an unreadable index.

    Raises:
        CorruptCheckpoint: If they are of different launches.
    """
    if launch_id(newest.attempt) != launch_id(readable.attempt) and newest.id != readable.id:
        raise CorruptCheckpoint(
            f"The index of the newest, {newest.id}, cannot be read: the line to prune is unknown",
            step=newest.step,
            hint="ckpipe prune --line names one, --all-lines takes all",
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
