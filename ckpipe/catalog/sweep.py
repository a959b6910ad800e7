"""Removing what crashed runs left: pieces of checkpoints, uploads, old marks and leases.

Theory. It cannot be seen from outside whether a run that has written half a checkpoint is dead or
slow. So a launch counts as running while there is a live lease on it or on the checkpoint, while
its claim is as young as a live lease, since it takes its first lease later, and while anything that
it wrote is younger than a threshold, by the store's own clock. What is left of a launch that counts
as dead is completed if nothing but its index lacks, and else deleted like any checkpoint, with a
tombstone first: if it was merely slow, it finds the tombstone and does not complete what is half
gone. Where the store fails to tell or to take the index, it stays.

Only names that ckpipe writes are looked at. Complete checkpoints are the business of retention.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from ckpipe.backend import Backend, ObjectInfo
from ckpipe.catalog.complete import repair
from ckpipe.catalog.delete import delete, finish_deletions, has_own
from ckpipe.catalog.find import NO_INDEX, list_root, owned_sidecars
from ckpipe.catalog.leases import (
    LEASE_LIFE,
    live_subjects,
    protected_subjects,
    read_leases,
    store_time,
)
from ckpipe.errors import StoreError, UnsupportedVersion
from ckpipe.format.names import (
    ATTEMPTS,
    BENCH,
    LEASES,
    is_own,
    launch_id,
    prefix,
)
from ckpipe.types import CheckpointId, CheckpointInfo

_LEASE = re.compile(re.escape(LEASES) + r"[^/]+/[0-9A-Za-z_-]+\.[0-9]+")


@dataclass(frozen=True, slots=True)
class Leftovers:
    """The objects of a root besides complete checkpoints.

    Args:
        incomplete: Checkpoints without an index or a tombstone.
        active: When each launch last wrote something that is still there, by its id.
        leases: All leases.
        tombstones: The marks of deleted checkpoints.
        unfinished: Deleted checkpoints of which something is left.
        scratch: What measurements have written.
        agreed: Keys of what the ranks of each launch have agreed on, by its id.
        claims: When the first and the last rank of each launch claimed it, by its id.
        digests: Digests of checkpoints that have no index.
    """

    incomplete: Sequence[CheckpointInfo]
    active: Mapping[str, datetime]
    leases: Sequence[ObjectInfo]
    tombstones: Sequence[ObjectInfo]
    unfinished: Sequence[str]
    scratch: Sequence[ObjectInfo] = ()
    agreed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    claims: Mapping[str, tuple[datetime, datetime]] = field(default_factory=dict)
    digests: Sequence[ObjectInfo] = ()


@dataclass(frozen=True, slots=True)
class SweepReport:
    """The result of a sweep: removed and left objects.

    Args:
        remove: Incomplete checkpoints that go, each with the reason.
        keep: Incomplete checkpoints that stay, each with the reason.
        unfinished: Deleted checkpoints whose deletion was cut short, and is finished.
        tombstones: Keys of old marks of deletions that go.
        leases: Keys of old leases that go.
        scratch: Keys of old objects of measurements that go.
        agreements: Keys of what the ranks of old launches had agreed on, which go.
        digests: Keys of old digests whose checkpoint is gone, which go.
        uploads: How many stale uploads were removed; None in a dry run, which cannot count them.
    """

    remove: Mapping[str, str]
    keep: Mapping[str, str]
    unfinished: tuple[str, ...]
    tombstones: tuple[str, ...]
    leases: tuple[str, ...]
    scratch: tuple[str, ...] = ()
    agreements: tuple[str, ...] = ()
    uploads: int | None = None
    digests: tuple[str, ...] = ()


def plan_sweep(
    found: Leftovers, now: datetime, sweep_after: timedelta, running: Collection[str] = ()
) -> SweepReport:
    """Decide what a sweep removes: pure.

    Args:
        found: What lies on the root.
        now: The time by the store's own clock.
        sweep_after: How old leftovers are that may go.
        running: Names of attempts that are known to be running.
    """
    live, own = live_subjects(found.leases, now), {launch_id(each) for each in running}
    young = _just_opened(found, now)
    remove, keep = {}, {}
    for info in found.incomplete:
        launch = launch_id(info.attempt)
        last = found.active.get(launch)
        if launch in own:
            keep[info.id] = "its launch is running"
        elif not live.isdisjoint((info.id, info.attempt, launch)):
            keep[info.id] = "somebody holds a lease on it or its launch"
        elif launch in young:
            keep[info.id] = f"its launch began {_ago(found.claims[launch][1], now)}"
        elif last is None or now - last < sweep_after:
            keep[info.id] = f"its launch may be running: it wrote something {_ago(last, now)}"
        else:
            remove[info.id] = f"its launch last wrote something {_ago(last, now)}"

    def old(objects: Iterable[ObjectInfo]) -> tuple[str, ...]:
        return tuple(each.key for each in objects if now - each.modified > sweep_after)

    return SweepReport(
        remove,
        keep,
        tuple(found.unfinished),
        old(found.tombstones),
        old(each for each in found.leases if _LEASE.fullmatch(each.key)),
        old(found.scratch),
        tuple(
            key
            for launch, keys in found.agreed.items()
            if launch in found.active
            and now - found.active[launch] > sweep_after
            and launch not in live | own | young
            for key in keys
        ),
        digests=old(found.digests),
    )


def uploads_before(
    found: Leftovers, now: datetime, sweep_after: timedelta, running: Collection[str] = ()
) -> datetime:
    """Before which time uploads were begun that may go: before any launch opened that may run.

    Args:
        found: What lies on the root.
        now: The time by the store's own clock.
        sweep_after: How old uploads are that may go.
        running: Names of attempts that are known to be running.
    """
    alive = _just_opened(found, now) | {launch_id(each) for each in running}
    for subject in protected_subjects(live_subjects(found.leases, now)):
        id = CheckpointId.parse(subject)
        alive.add(subject if id is None else launch_id(id.attempt))
    opened = [found.claims[launch][0] for launch in alive if launch in found.claims]
    return min([now - sweep_after, *opened])


def _just_opened(found: Leftovers, now: datetime) -> set[str]:
    """Launches that may not have taken their first lease yet."""
    return {launch for launch, (_, last) in found.claims.items() if now - last <= LEASE_LIFE}


def _ago(last: datetime | None, now: datetime) -> str:
    if last is None:
        return "at a time that nothing tells"
    seconds = max(0, int((now - last).total_seconds()))
    for size, unit in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} seconds ago"


async def look_around(backend: Backend) -> Leftovers:
    """List the objects of a root besides complete checkpoints; changes nothing.

    Costs a list of the root, one for each incomplete checkpoint and a few of what is internal.

    Raises:
        StoreError: If the store failed.
    """
    listing = await list_root(backend)
    infos = listing.infos()
    incomplete = []
    active: dict[str, datetime] = {}
    for info in infos:
        if info.saved_at is not None:
            _note(active, launch_id(info.attempt), [info.saved_at])
        elif info.reason == NO_INDEX:
            below = [each async for each in backend.list(prefix(info.key))]
            own = [each.modified for each in below if is_own(info.key, each.key)]
            _note(active, launch_id(info.attempt), own)
            if own:  # else files of another program lie where a deleted one was
                incomplete.append(info)
    agreed: defaultdict[str, list[str]] = defaultdict(list)
    claims: dict[str, tuple[datetime, datetime]] = {}
    async for each in backend.list(ATTEMPTS):
        launch, _, name = each.key.removeprefix(ATTEMPTS).partition("/")
        _note(active, launch, [each.modified])
        if name.startswith("agreed/"):
            agreed[launch].append(each.key)
        elif name.startswith("claim-"):
            first, last = claims.get(launch, (each.modified, each.modified))
            claims[launch] = min(first, each.modified), max(last, each.modified)
    leases = await read_leases(backend)
    unfinished = [str(id) for id in listing.tombstones if await has_own(backend, id)]
    scratch = [each async for each in backend.list(BENCH)]
    there = {info.key for info in infos if info.saved_at is not None}
    owned = await owned_sidecars(backend)
    # Of checkpoints that are gone: one is left whose writer came after the deletion.
    digests = [each for id, keys in owned.items() if id not in there for each in keys]
    marks = list(listing.tombstones.values())
    return Leftovers(
        incomplete, active, leases, marks, unfinished, scratch, agreed, claims, digests
    )


def _note(active: dict[str, datetime], launch: str, times: Iterable[datetime]) -> None:
    for time in times:
        active[launch] = max(time, active.get(launch, time))


async def sweep(
    backend: Backend,
    sweep_after: timedelta,
    *,
    running: Collection[str] = (),
    dry_run: bool = False,
) -> SweepReport:
    """Remove what crashed runs left; running it twice is as good as once.

    A checkpoint that lacks nothing but its index is completed instead. If that fails for now, such
    as for want of room, it stays for a later sweep.

    Args:
        backend: The store.
        sweep_after: How old leftovers are that may go, by the store's own clock.
        running: Names of attempts that are known to be running.
        dry_run: Whether to say only what would be done. Nothing is written then, so that the
            clock is this machine's, and nothing is completed.

    Raises:
        StoreError: If the store failed; sweeping again goes on where it stopped.
    """
    if dry_run:
        return plan_sweep(await look_around(backend), datetime.now(UTC), sweep_after, running)
    now = await store_time(backend)
    found = await look_around(backend)
    report = plan_sweep(found, now, sweep_after, running)
    remove, keep = dict(report.remove), dict(report.keep)
    for info in found.incomplete:
        if info.id not in remove:
            continue
        try:
            known = await repair(backend, info, sure=True)
        except (StoreError, UnsupportedVersion) as error:
            # All of its data may be there: a full disk ends a save just before its index.
            del remove[info.id]
            keep[info.id] = f"it may lack nothing but its index: {error}"
            continue
        if known.complete:
            del remove[info.id]
            keep[info.id] = "it lacked nothing but its index, which was written"
        else:
            await delete(backend, info.key, force=True)
    await finish_deletions(backend, set(), forget_before=now - sweep_after)
    await backend.delete([*report.leases, *report.scratch, *report.agreements, *report.digests])
    before = uploads_before(found, now, sweep_after, running)
    uploads = await backend.remove_stale_uploads("", before=before)
    return replace(report, remove=remove, keep=keep, uploads=uploads)
