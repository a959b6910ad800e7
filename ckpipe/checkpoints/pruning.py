"""Deletion of checkpoints: one by name, or those that a rule does not keep.

Theory. A tombstone is created first, and from then on the checkpoint does not count as complete,
whoever looks and whatever is still there. Then the index goes, then manifests, then data, until a
list shows nothing. A crash anywhere leaves a tombstone, by which the next prune finds what is
left. The tombstone itself stays for a while, so that a straggling writer of the same checkpoint
cannot bring it back to life.

With many ranks, the one whose request created the index prunes: it knows before anybody else that
there is a newer checkpoint, and there is exactly one such rank. Nothing depends on that. Ranks
that prune at the same time create one tombstone and delete what others may have deleted already.

A full store has no room for a tombstone, and must not stay full for that: then the checkpoint goes
first, in the same order, and the tombstone follows into the room that it leaves. A crash between
the two leaves what a crashed save leaves, or a checkpoint that is whole but for its index and is
completed again. Only a reader whose lease had no room either may find its files gone.

Who loads a checkpoint holds a lease on it. A leased one is not chosen for removal; should a lease
appear at the last moment, the tombstone stays and the data waits for the lease to end
(:mod:`ckpipe.checkpoints.leases` says why this has no gap).
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple

from ckpipe.backend import Backend, PutMode
from ckpipe.checkpoints.discovery import check_not_deleted, discover, read_index
from ckpipe.checkpoints.leases import is_leased, store_time
from ckpipe.errors import (
    CheckpointIncomplete,
    CorruptCheckpoint,
    ObjectExists,
    StoreFull,
    UnsupportedVersion,
)
from ckpipe.format.keys import decode_float
from ckpipe.format.object_names import (
    DELETED,
    index_key,
    launch_id,
    pin_key,
    prefix,
    tombstone_id,
    tombstone_key,
)
from ckpipe.retention import Candidate, Decision, KeepBest, Rule, decide
from ckpipe.tasks.lanes import run_lanes
from ckpipe.types import CheckpointId, CheckpointInfo

_AT_ONCE = 16
"""Indexes that are read at the same time."""

RESUMED = "the newest checkpoint's run resumed from it"
RUNNING_NEWEST = "it is the newest of a launch that is running"
UNREAD = "its index cannot be read, so nothing is known of it"


class Known(NamedTuple):
    """What retention has to know of a checkpoint, which its index says.

    Args:
        metrics: Its metrics.
        final: Whether it is a run's final checkpoint.
        resumed_from: Id of the checkpoint that its run had loaded.
    """

    metrics: Mapping[str, float]
    final: bool
    resumed_from: str | None = None


Facts = dict[str, Known]
"""What is known of checkpoints, by id; read once and kept."""


async def delete(backend: Backend, id: CheckpointId) -> None:
    """Deletes a checkpoint; one that is gone or half deleted already is no error.

    Raises:
        StoreError: If the store failed; deleting again goes on where it stopped.
    """
    try:
        await _mark(backend, id)
    except StoreFull:
        await _remove(backend, id)
        await _mark(backend, id)
    await _remove(backend, id)


async def retire(backend: Backend, id: CheckpointId) -> bool:
    """Deletes a checkpoint for everybody who does not hold a lease on it already.

    Returns:
        Whether its data is gone. If not, somebody is reading it, and
        :func:`finish_deletions` removes it once that has ended.

    Raises:
        StoreError: If the store failed; retiring again goes on where it stopped.
    """
    try:
        await _mark(backend, id)
    except StoreFull:
        if not await _remove_unless_leased(backend, id):
            return False
        await _mark(backend, id)
    return await _remove_unless_leased(backend, id)


async def _mark(backend: Backend, id: CheckpointId) -> None:
    with contextlib.suppress(ObjectExists):
        await backend.put(tombstone_key(id), b"{}", PutMode.CREATE)


async def _remove_unless_leased(backend: Backend, id: CheckpointId) -> bool:
    if await is_leased(backend, str(id)):
        return False
    await _remove(backend, id)
    return True


async def _remove(backend: Backend, id: CheckpointId) -> None:
    await backend.delete([index_key(id)])
    below = prefix(id)
    while keys := [each.key async for each in backend.list(below)]:
        # What vouches for data goes before the data.
        await backend.delete([key for key in keys if key.startswith(f"{below}m/")])
        await backend.delete([key for key in keys if not key.startswith(f"{below}m/")])
    await backend.delete([pin_key(id)])


async def finish_deletions(
    backend: Backend, finished: set[CheckpointId], *, forget_before: datetime
) -> None:
    """Goes on with deletions that a crash or a reader held up, and forgets old tombstones.

    Args:
        backend: The store.
        finished: Deletions known to be through, which cost no request; added to.
        forget_before: Tombstones older than this are removed, by the store's own clock.

    Raises:
        StoreError: If the store failed.
    """
    old = []
    for each in (await backend.children(DELETED)).objects:
        id = tombstone_id(each.key)
        if id is None:
            continue
        forgotten = each.modified < forget_before
        # Once more before the tombstone goes: a straggler may have written since.
        if forgotten or id not in finished:
            if not await _remove_unless_leased(backend, id):
                continue
            finished.add(id)
        if forgotten:
            old.append(each.key)
    if old:
        await backend.delete(old)


async def decide_on(
    backend: Backend,
    rule: Rule | None,
    protected: Mapping[str, str],
    facts: Facts,
    *,
    now: datetime,
) -> Decision:
    """Decides which checkpoints of a root stay, and changes nothing.

    Besides what is protected, pinned checkpoints stay and the one that the run of the newest
    resumed from, whoever asks. If several launches run on one root, rules count the checkpoints of
    all of them together; so of each that is known to be running the newest stays too. Those whose
    index cannot be read stay as well, and take nobody's place: rules, and the newest that always
    stays, are found among the others.

    Args:
        backend: The store.
        rule: What to keep; None keeps all.
        protected: Ids that must stay, each with its reason, and ids of launches that are running.
        facts: What is known of checkpoints already; added to.
        now: The time by the store's own clock, which also tells when checkpoints were written.

    Raises:
        StoreError: If the store failed.
    """
    complete = [each for each in await discover(backend) if each.complete]
    keep = dict(protected) | {each.id: "it is pinned" for each in complete if each.pinned}
    candidates = await _candidates(backend, complete, facts)
    if candidates and (origin := facts[candidates[0].id].resumed_from):
        keep.setdefault(origin, RESUMED)
    for name in newest_of_launches([(each.id, each.attempt) for each in candidates], protected):
        keep.setdefault(name, RUNNING_NEWEST)
    decision = decide(candidates, rule, now=now, protected=keep)
    unread = {each.id: keep.get(each.id, UNREAD) for each in complete if each.id not in facts}
    stays = {*decision.keep, *unread}
    return Decision(
        keep=tuple(each.id for each in complete if each.id in stays),
        remove=decision.remove,
        reasons={**decision.reasons, **unread},
    )


def newest_of_launches(
    checkpoints: Iterable[tuple[str, str]], launches: Container[str]
) -> list[str]:
    """The first checkpoint of each of some launches.

    Args:
        checkpoints: Checkpoints by id and attempt, the newest first.
        launches: The ids of the launches.
    """
    first: dict[str, str] = {}
    for name, attempt in checkpoints:
        launch = launch_id(attempt)
        if launch in launches:
            first.setdefault(launch, name)
    return list(first.values())


async def best(
    backend: Backend, metric: str, mode: Literal["min", "max"], facts: Facts
) -> CheckpointInfo | None:
    """The complete checkpoint with the best value of a metric.

    Reads each index that is not known yet, once. NaN never wins, and of equals the newest does.

    Args:
        backend: The store.
        metric: The name of the metric.
        mode: Whether the least or the greatest value is the best.
        facts: What is known of checkpoints already; added to.

    Returns:
        The checkpoint; None if none has the metric.

    Raises:
        StoreError: If the store failed.
    """
    complete = [each for each in await discover(backend) if each.complete]
    candidates = await _candidates(backend, complete, facts)
    verdicts = KeepBest(metric, mode, 1).judge(candidates, datetime.now(UTC))
    kept = {name for name, verdict in verdicts.items() if verdict.keep}
    return next((each for each in complete if each.id in kept), None)


async def _candidates(
    backend: Backend, complete: Sequence[CheckpointInfo], facts: Facts
) -> list[Candidate]:
    """Those of some checkpoints whose index can be read, in the same order."""
    await _learn(backend, complete, facts)
    return [_candidate(info, facts[info.id]) for info in complete if info.id in facts]


def _candidate(info: CheckpointInfo, known: Known) -> Candidate:
    created = info.saved_at or datetime.now(UTC)
    return Candidate(
        info.id, info.step, info.attempt, info.count, created, known.metrics, known.final
    )


async def _learn(backend: Backend, complete: Sequence[CheckpointInfo], facts: Facts) -> None:
    """Reads the indexes of checkpoints that nothing is known of, several at once."""
    pending = iter([info for info in complete if info.id not in facts])

    async def lane() -> None:
        for info in pending:
            try:
                bundle = await read_index(backend, info.key)
            except (CorruptCheckpoint, UnsupportedVersion):
                continue
            metrics = {name: decode_float(value) for name, value in bundle.parts[0].metrics.items()}
            final = any(part.final for part in bundle.parts)
            facts[info.id] = Known(metrics, final, bundle.parts[0].resumed_from)

    await run_lanes(min(_AT_ONCE, len(complete)), lane)


async def prune(
    backend: Backend,
    rule: Rule | None,
    protected: Mapping[str, str],
    facts: Facts,
    finished: set[CheckpointId],
    *,
    sweep_after: timedelta,
    now: datetime | None = None,
) -> Decision:
    """Deletes what a rule does not keep; running it twice is as good as once.

    Args:
        backend: The store.
        rule: What to keep; None keeps all.
        protected: As for :func:`decide_on`.
        facts: What is known of checkpoints already; added to.
        finished: Deletions known to be through; added to.
        sweep_after: How long tombstones stay.
        now: The time by the store's own clock; None asks for it.

    Returns:
        What was decided, and has been done.

    Raises:
        StoreError: If the store failed; pruning again goes on where it stopped.
    """
    now = await store_time(backend) if now is None else now
    await finish_deletions(backend, finished, forget_before=now - sweep_after)
    decision = await decide_on(backend, rule, protected, facts, now=now)
    for name in decision.remove:
        id = CheckpointId.parse(name)
        assert id is not None
        if await retire(backend, id):
            finished.add(id)
    return decision


async def pin(backend: Backend, id: CheckpointId) -> None:
    """Protects a checkpoint from retention until it is unpinned.

    Raises:
        CheckpointIncomplete: If somebody has begun to delete it.
        StoreError: If the store failed.
    """
    with contextlib.suppress(ObjectExists):
        await backend.put(pin_key(id), b"{}", PutMode.CREATE)
    try:
        await check_not_deleted(backend, id)
    except CheckpointIncomplete:
        await backend.delete([pin_key(id)])
        raise


async def unpin(backend: Backend, id: CheckpointId) -> None:
    """Ends the protection of a checkpoint; one that is not pinned is no error."""
    await backend.delete([pin_key(id)])
