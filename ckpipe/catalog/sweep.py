"""Find the remains of crashed runs: incomplete checkpoints, uploads, old tombstones and leases.

Theory. From outside, a run that has written half a checkpoint may be dead or slow. So a launch
counts as running in three cases: there is a live lease on it or on the checkpoint; its claim is as
young as a live lease, since it takes its first lease later; or one of its objects is younger than a
threshold, by the store's own clock. An incomplete checkpoint of a dead launch is completed if it
lacks only its index. Else it is deleted like any checkpoint, with a tombstone first: if the launch
was merely slow, it finds the tombstone and does not complete a half-deleted checkpoint. If the
store fails meanwhile, such as for want of room for the index, the checkpoint stays.

Only names that ckpipe writes are considered. Retention handles complete checkpoints. What is found
here, :meth:`ckpipe.catalog.catalog.Catalog.sweep` removes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from ckpipe.backend import Backend, ObjectInfo
from ckpipe.catalog.find import NO_INDEX, has_own, list_root, list_summaries
from ckpipe.catalog.leases import (
    LEASE_LIFE,
    live_subjects,
    protected_subjects,
    read_leases,
)
from ckpipe.format.names import (
    ATTEMPTS,
    BENCH,
    LEASES,
    is_own,
    launch_id,
    manifest_key,
    prefix,
)
from ckpipe.types import CheckpointId, CheckpointInfo, age_text

_LEASE = re.compile(re.escape(LEASES) + r"[^/]+/[0-9A-Za-z_-]+\.[0-9]+")


@dataclass(frozen=True, slots=True)
class Leftovers:
    """The objects of a root besides complete checkpoints.

    Args:
        incomplete: Checkpoints without an index or a tombstone.
        active: For each launch by its id, the time of its newest object.
        leases: All leases.
        tombstones: The tombstones of deleted checkpoints.
        unfinished: Deleted checkpoints with remaining objects.
        scratch: Objects of benchmarks.
        agreed: For each launch by its id, the keys of its ranks' decisions.
        claims: For each launch by its id, the times of its ranks' first and last claim.
        summaries: Summaries of checkpoints without an index.
        hollow: A key in each empty folder of a checkpoint; its deletion removes the folder.
        sizes: The bytes of each incomplete or deleted checkpoint, by its id.
    """

    incomplete: Sequence[CheckpointInfo]
    active: Mapping[str, datetime]
    leases: Sequence[ObjectInfo]
    tombstones: Sequence[ObjectInfo]
    unfinished: Sequence[str]
    scratch: Sequence[ObjectInfo] = ()
    agreed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    claims: Mapping[str, tuple[datetime, datetime]] = field(default_factory=dict)
    summaries: Sequence[ObjectInfo] = ()
    hollow: Sequence[str] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SweepReport:
    """The result of a sweep: removed and left objects.

    Args:
        remove: Incomplete checkpoints that are removed, each with the reason.
        keep: Incomplete checkpoints that stay, each with the reason.
        unfinished: Deleted checkpoints whose interrupted deletion is finished.
        tombstones: Keys of old tombstones that are removed.
        leases: Keys of old leases that are removed.
        scratch: Keys of old benchmark objects that are removed.
        agreements: Keys of the decisions of old launches' ranks, which are removed.
        summaries: Keys of old summaries of deleted checkpoints, which are removed.
        uploads: Number of stale uploads removed; None in a dry run, which cannot count them.
        bytes: The size of each of these checkpoints, by its id.
    """

    remove: Mapping[str, str]
    keep: Mapping[str, str]
    unfinished: tuple[str, ...]
    tombstones: tuple[str, ...]
    leases: tuple[str, ...]
    scratch: tuple[str, ...] = ()
    agreements: tuple[str, ...] = ()
    uploads: int | None = None
    summaries: tuple[str, ...] = ()
    bytes: Mapping[str, int] = field(default_factory=dict)


def plan_sweep(
    found: Leftovers, now: datetime, sweep_after: timedelta, running: Collection[str] = ()
) -> SweepReport:
    """Decide which objects a sweep removes: pure.

    Args:
        found: The objects of the root.
        now: The time by the store's own clock.
        sweep_after: The age from which leftovers may be removed.
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
            keep[info.id] = "a process holds a lease on it or its launch"
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
        summaries=old(found.summaries),
        bytes=found.sizes,
    )


def uploads_before(
    found: Leftovers, now: datetime, sweep_after: timedelta, running: Collection[str] = ()
) -> datetime:
    """Return the time before which stale uploads began: before any launch that may run opened.

    Args:
        found: The objects of the root.
        now: The time by the store's own clock.
        sweep_after: The age from which uploads may be removed.
        running: Names of attempts that are known to be running.
    """
    alive = _just_opened(found, now) | {launch_id(each) for each in running}
    for subject in protected_subjects(live_subjects(found.leases, now)):
        id = CheckpointId.parse(subject)
        alive.add(subject if id is None else launch_id(id.attempt))
    opened = [found.claims[launch][0] for launch in alive if launch in found.claims]
    return min([now - sweep_after, *opened])


def _just_opened(found: Leftovers, now: datetime) -> set[str]:
    """Return the launches that may not have taken their first lease yet."""
    return {launch for launch, (_, last) in found.claims.items() if now - last <= LEASE_LIFE}


def _ago(last: datetime | None, now: datetime) -> str:
    return "at an unknown time" if last is None else f"{age_text((now - last).total_seconds())} ago"


async def look_around(backend: Backend) -> Leftovers:
    """List the objects of a root besides complete checkpoints; changes nothing.

    Costs a list of the root, one for each incomplete checkpoint, and a few of internal prefixes.

    Raises:
        StoreError: If the store failed.
    """
    listing = await list_root(backend)
    infos = listing.infos()
    incomplete, hollow, sizes = [], [], {}
    active: dict[str, datetime] = {}
    for info in infos:
        if info.saved_at is not None:
            _note(active, launch_id(info.attempt), [info.saved_at])
        elif info.reason == NO_INDEX:
            below = [each async for each in backend.list(prefix(info.key))]
            own = [each for each in below if is_own(info.key, each.key)]
            _note(active, launch_id(info.attempt), [each.modified for each in own])
            sizes[info.id] = sum(each.size for each in own)
            if own:  # else other programs' files are in the place of a deleted checkpoint
                incomplete.append(info)
            elif not below:
                hollow.append(manifest_key(info.key, 0))
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
    unfinished = {
        str(id): id for id in listing.tombstones if await has_own(backend, id, behind_link=False)
    }
    for name, id in unfinished.items():
        sizes[name] = sum([e.size async for e in backend.list(prefix(id)) if is_own(id, e.key)])
    scratch = [each async for each in backend.list(BENCH)]
    there = {info.key for info in infos if info.saved_at is not None}
    owned = await list_summaries(backend)
    # Summaries of deleted checkpoints remain if they were written after the deletion.
    summaries = [each for id, keys in owned.items() if id not in there for each in keys]
    marks = list(listing.tombstones.values())
    return Leftovers(
        incomplete, active, leases, marks, [*unfinished], scratch, agreed, claims, summaries,
        hollow, sizes,
    )  # fmt: skip


def _note(active: dict[str, datetime], launch: str, times: Iterable[datetime]) -> None:
    for time in times:
        active[launch] = max(time, active.get(launch, time))
