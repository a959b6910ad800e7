"""Cache and query the summaries of checkpoints that retention and ``best`` need.

Theory. A summary of an index is final. A summary that was stored beside it
(:mod:`ckpipe.format.summary`) gives a first answer. Then the indexes of the checkpoints that decide
this answer are read: for ``best`` the winner's; for a decision on deletions see
:mod:`ckpipe.catalog.catalog`. If an index cannot be read, its checkpoint is left out. If
an index contradicts its stored summary, no stored summary of this root is trusted any more, and all
indexes are read. Then the decision is made again. Every round knows more than the one before, so
the loop ends. ``best`` and a search for a name then raise the error of an unreadable index, unless
its stored summary shows that its checkpoint is not the answer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial

from ckpipe.backend import Backend, ObjectInfo
from ckpipe.catalog.find import list_summaries, read_index, read_summary, recheck
from ckpipe.errors import CorruptCheckpoint, MissingObject, UnsupportedVersion
from ckpipe.format.summary import Summary, summary_of
from ckpipe.retention import Candidate
from ckpipe.threads import all_of
from ckpipe.types import CheckpointId, CheckpointInfo

logger = logging.getLogger("ckpipe")

_INDEXES_AT_ONCE, _SUMMARIES_AT_ONCE = 16, 32
"""Number of objects that are read at the same time; a bucket has 32 connections by default."""

_KEPT_CHARS = 4096
"""Longest metadata that are cached, as JSON: a trainer may put its log into each checkpoint."""

_MIGHT_BE = (
    "It might be the one that is asked for: delete it with `ckpipe rm`, or name another step"
)

_Unreadable = CorruptCheckpoint | UnsupportedVersion


@dataclass(slots=True)
class Summaries:
    """The summaries that one process knows of the checkpoints of a root, by id.

    Args:
        known: Those of indexes that were read or written; without metadata that are long.
        stored: Stored ones of other checkpoints.
        trusting: Whether stored ones are trusted: none has contradicted its index yet.
        listed: The objects of stored ones, as last listed; None if they never were.
        deleted: Checkpoints whose deletion is known to be finished.
        retired: Complete checkpoints that retention has removed in this process.
    """

    known: dict[str, Summary] = field(default_factory=dict)
    stored: dict[str, Summary] = field(default_factory=dict)
    trusting: bool = True
    listed: dict[CheckpointId, list[ObjectInfo]] | None = None
    deleted: set[CheckpointId] = field(default_factory=set)
    retired: set[CheckpointId] = field(default_factory=set)

    def learn(self, name: str, found: Summary) -> None:
        """Note the summary of an index; it replaces the stored one."""
        long = found.metadata and len(json.dumps(found.metadata)) > _KEPT_CHARS
        self.known[name] = replace(found, metadata=None) if long else found
        told = self.stored.pop(name, None)
        if told is not None and not told.members.items() <= found.members.items():
            logger.warning("The summary of %s contradicts its index: no summary is used", name)
            self.trusting = False
            self.stored.clear()

    def forget(self, name: str) -> None:
        """Drop the summary of a checkpoint that is gone."""
        self.known.pop(name, None)
        self.stored.pop(name, None)

    def names(self) -> set[str]:
        """Return the checkpoints with a summary."""
        return {*self.known, *self.stored}

    def __contains__(self, name: str) -> bool:
        return name in self.known or name in self.stored

    def __getitem__(self, name: str) -> Summary:
        return self.known[name] if name in self.known else self.stored[name]

    def filled(self, info: CheckpointInfo) -> CheckpointInfo:
        """Fill in the summary of a complete checkpoint, if it is known."""
        return filled(info, self[info.id]) if info.complete and info.id in self else info


def filled(info: CheckpointInfo, found: Summary) -> CheckpointInfo:
    """Fill in a copy of a summary, which the caller may change."""
    return replace(
        info,
        metrics=dict(found.metrics),
        metadata=deepcopy(found.metadata),
        bytes=found.bytes,
        world_size=found.world_size,
        line=found.line,
        nan=found.nan,
        differences=found.differences,
    )


async def inspected(
    backend: Backend, infos: Sequence[CheckpointInfo], summaries: Summaries
) -> list[CheckpointInfo]:
    """Fill in complete checkpoints, with metadata; each index is read if its own are not cached.

    If one cannot be read, ``reason`` says so, and a warning is logged.

    Raises:
        StoreError: If the store failed.
    """
    whole: dict[str, CheckpointInfo] = {}

    async def read(info: CheckpointInfo) -> None:
        try:
            found = summary_of(await read_index(backend, info.key))
        except MissingObject:
            whole[info.id] = await recheck(backend, info)
        except (CorruptCheckpoint, UnsupportedVersion) as error:
            logger.warning("The metrics and metadata of %s are unknown: %s", info.id, error)
            whole[info.id] = replace(info, reason=f"its index cannot be read: {error}")
        else:
            summaries.learn(info.id, found)
            whole[info.id] = filled(info, found)

    for info in infos:
        known = summaries.known.get(info.id) if info.complete else None
        if known is not None and known.metadata is not None:
            whole[info.id] = filled(info, known)
    unread = [each for each in infos if each.complete and each.id not in whole]
    await all_of([partial(read, each) for each in unread], _INDEXES_AT_ONCE)
    return [whole.get(each.id, each) for each in infos]


class SummaryQuery:
    """One query about the complete checkpoints of a root.

    Args:
        backend: The store.
        complete: The checkpoints, the newest first.
        summaries: Those that are known already; new ones are added.
        few: Number of unknown checkpoints up to which indexes are read, not stored summaries.
    """

    def __init__(
        self,
        backend: Backend,
        complete: Sequence[CheckpointInfo],
        summaries: Summaries,
        *,
        few: int,
    ) -> None:
        self._backend, self._summaries, self._few = backend, summaries, few
        self._complete = complete
        self._unread: dict[str, tuple[_Unreadable, Summary | None]] = {}

    @property
    def unread(self) -> Collection[str]:
        """The checkpoints whose index could not be read."""
        return self._unread.keys()

    async def candidates(self) -> list[Candidate]:
        """Return the checkpoints with a summary, in the same order.

        Raises:
            StoreError: If the store failed.
        """
        if len(self._open()) > self._few:
            await self.read_stored()
        await self._read(self._open())
        return [
            candidate_of(each, self._summaries[each.id])
            for each in self._complete
            if each.id in self._summaries
        ]

    async def read_stored(self) -> None:
        """Read the stored summaries of unknown checkpoints, after one delimited list.

        Raises:
            StoreError: If the store failed.
        """
        cache = self._summaries
        if not cache.trusting or not self._open():
            return
        listed = cache.listed = await list_summaries(self._backend)

        async def read(info: CheckpointInfo) -> None:
            found = await read_summary(self._backend, info.key, listed)
            if found is not None and cache.trusting and info.id not in cache.known:
                cache.stored[info.id] = found

        await all_of([partial(read, each) for each in self._open()], _SUMMARIES_AT_ONCE)

    async def is_sure(self, names: Collection[str]) -> bool:
        """Read the indexes of those without a summary; return True if there were none.

        If it returns True, no other task ran meanwhile that could forget a deleted checkpoint.

        Raises:
            StoreError: If the store failed.
        """
        known = self._summaries.known
        doubtful = [each for each in self._complete if each.id in names and each.id not in known]
        if doubtful:
            await self._read(doubtful)
        return not doubtful

    async def check_unread(
        self, might_be: Callable[[CheckpointInfo, Summary | None], bool]
    ) -> None:
        """Raise the error of an index that could not be read if its checkpoint might be the answer.

        Args:
            might_be: Tells so, by the stored summary; None if none was read or is trusted.

        Raises:
            CorruptCheckpoint: If it is damaged.
            UnsupportedVersion: If it is of a newer format.
            StoreError: If the store failed.
        """
        for info in self._complete:
            error, told = self._unread.get(info.id, (None, None))
            if error is None or not might_be(info, told if self._summaries.trusting else None):
                continue
            is_gone = isinstance(error, MissingObject)
            if is_gone and not (await recheck(self._backend, info)).complete:
                continue  # it was deleted meanwhile
            error.hint = error.hint or _MIGHT_BE
            raise error

    def _open(self) -> list[CheckpointInfo]:
        """Return the checkpoints without a summary, except those with an unreadable index."""
        return [
            each
            for each in self._complete
            if each.id not in self._summaries and each.id not in self._unread
        ]

    async def _read(self, infos: Iterable[CheckpointInfo]) -> None:
        """Read the indexes of checkpoints, several at a time."""

        async def read(info: CheckpointInfo) -> None:
            try:
                found = summary_of(await read_index(self._backend, info.key))
            except (CorruptCheckpoint, UnsupportedVersion) as error:
                self._unread[info.id] = error, self._summaries.stored.pop(info.id, None)
            else:
                self._summaries.learn(info.id, found)

        await all_of([partial(read, info) for info in infos], _INDEXES_AT_ONCE)


def candidate_of(info: CheckpointInfo, summary: Summary) -> Candidate:
    """Return the facts of a checkpoint by which rules decide."""
    created = info.saved_at or datetime.now(UTC)
    return Candidate(
        info.id, info.step, info.attempt, info.count, created, summary.metrics, summary.final,
        summary.line, summary.nan,
    )  # fmt: skip
