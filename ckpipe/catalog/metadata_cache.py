"""Cache and query the facts of checkpoints that retention and ``best`` need.

Theory. The facts of an index are final. The facts of a digest
(:mod:`ckpipe.format.metrics_sidecar`) give a first answer. Then the indexes of the checkpoints that
decide this answer are read: for ``best`` the winner's; for a decision on deletions see
:func:`ckpipe.catalog.prune.decide_on`. If an index cannot be read, its checkpoint is left out, as
it was before there were digests. If an index contradicts its digest, no digest of this root is
trusted any more, and all indexes are read. Then the decision is made again. Every round knows more
than the one before, so the loop ends.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple

from ckpipe.backend import Backend
from ckpipe.catalog.find import list_sidecars, read_index
from ckpipe.errors import CorruptCheckpoint, UnsupportedVersion
from ckpipe.format.keys import Json
from ckpipe.format.manifest import ManifestDocument
from ckpipe.format.metrics_sidecar import MetricsSidecar, sidecar_of
from ckpipe.retention import Candidate
from ckpipe.threads import all_of
from ckpipe.types import CheckpointId, CheckpointInfo

logger = logging.getLogger("ckpipe")

_AT_ONCE = 16
"""Number of indexes that are read at the same time."""


class MetadataSummary(NamedTuple):
    """The facts of a checkpoint that retention needs, from its index.

    Args:
        digest: Its metrics, whether it is a run's final checkpoint, and its size.
        resumed_from: Id of the checkpoint that its run had loaded.
        metadata: The metadata that was passed to ``save``.
    """

    digest: MetricsSidecar
    resumed_from: str | None = None
    metadata: Mapping[str, Json] | None = None


def summary_of(index: ManifestDocument) -> MetadataSummary:
    """Summarise an index.

    Raises:
        InvalidManifest: If its metrics are not numbers.
    """
    first = index.parts[0]
    return MetadataSummary(sidecar_of(index), first.resumed_from, first.metadata)


@dataclass(slots=True)
class MetadataCache:
    """The facts that one process knows of the checkpoints of a root, by id.

    Args:
        known: Summaries of indexes that were read or written.
        told: Digests of other checkpoints.
        trusting: Whether digests are trusted: none has contradicted its index yet.
        deleted: Checkpoints whose deletion is known to be finished.
        retired: Complete checkpoints that retention has removed in this process.
    """

    known: dict[str, MetadataSummary] = field(default_factory=dict)
    told: dict[str, MetricsSidecar] = field(default_factory=dict)
    trusting: bool = True
    deleted: set[CheckpointId] = field(default_factory=set)
    retired: set[CheckpointId] = field(default_factory=set)

    def learn(self, name: str, found: MetadataSummary) -> None:
        """Note the summary of an index; it replaces the digest."""
        self.known[name] = found
        told = self.told.pop(name, None)
        if told is not None and told.text != found.digest.text:
            logger.warning("The digest of %s contradicts its index: all digests are ignored", name)
            self.trusting = False
            self.told.clear()

    def forget(self, name: str) -> None:
        """Drop the facts of a checkpoint that is gone."""
        self.known.pop(name, None)
        self.told.pop(name, None)

    def names(self) -> set[str]:
        """Return the checkpoints with a summary or a digest."""
        return {*self.known, *self.told}

    def __contains__(self, name: str) -> bool:
        return name in self.known or name in self.told

    def digests(self) -> list[MetricsSidecar]:
        """Return the digests of all checkpoints, from their summaries where those are known."""
        return [*(each.digest for each in list(self.known.values())), *self.told.values()]

    def digest(self, name: str) -> MetricsSidecar:
        """Return the digest of a checkpoint, from its summary if that is known."""
        return self.known[name].digest if name in self.known else self.told[name]


def described(info: CheckpointInfo, facts: MetadataCache) -> CheckpointInfo:
    """Fill in the known facts of a complete checkpoint."""
    if not info.complete or info.id not in facts:
        return info
    digest, known = facts.digest(info.id), facts.known.get(info.id)
    return replace(
        info,
        metrics=dict(digest.metrics),
        metadata=None if known is None else known.metadata,
        bytes=digest.bytes,
        world_size=digest.world_size,
    )


async def inspected(
    backend: Backend, infos: Sequence[CheckpointInfo], facts: MetadataCache
) -> list[CheckpointInfo]:
    """Fill in the facts of complete checkpoints from their indexes; each index is read once.

    Raises:
        StoreError: If the store failed.
    """
    complete = [each for each in infos if each.complete]
    await MetadataQuery(backend, complete, facts, few=0).is_sure({each.id for each in complete})
    return [described(each, facts) for each in infos]


class MetadataQuery:
    """One query about the complete checkpoints of a root.

    Args:
        backend: The store.
        complete: The checkpoints, the newest first.
        facts: The facts that are known already; new ones are added.
        few: Number of unknown checkpoints up to which digests are not listed, but indexes read.
    """

    def __init__(
        self,
        backend: Backend,
        complete: Sequence[CheckpointInfo],
        facts: MetadataCache,
        *,
        few: int,
    ) -> None:
        self._backend, self._facts, self._few = backend, facts, few
        self._complete = complete
        self._unread: set[str] = set()

    async def candidates(self) -> list[Candidate]:
        """Return the checkpoints with a summary or a digest, in the same order.

        Raises:
            StoreError: If the store failed.
        """
        if len(self._open()) > self._few:
            await self.hear()
        await self._read(self._open())
        return [_candidate(each, self._facts) for each in self._complete if each.id in self._facts]

    async def hear(self) -> None:
        """Read the digests of unknown checkpoints by one delimited list.

        Raises:
            StoreError: If the store failed.
        """
        if self._facts.trusting and self._open():
            digests = await list_sidecars(self._backend)
            told = {each.id: digests.get(each.key) for each in self._open()}
            self._facts.told.update({name: each for name, each in told.items() if each})

    async def is_sure(self, names: Collection[str]) -> bool:
        """Read the indexes of those without a summary; return True if there were none.

        If it returns True, no other task ran meanwhile that could forget a deleted checkpoint.

        Raises:
            StoreError: If the store failed.
        """
        known = self._facts.known
        doubtful = [each for each in self._complete if each.id in names and each.id not in known]
        if doubtful:
            await self._read(doubtful)
        return not doubtful

    def _open(self) -> list[CheckpointInfo]:
        """Return the checkpoints without summary and digest, except those with unreadable index."""
        return [
            each
            for each in self._complete
            if each.id not in self._facts and each.id not in self._unread
        ]

    async def _read(self, infos: Iterable[CheckpointInfo]) -> None:
        """Read the indexes of checkpoints, several at a time."""

        async def read(info: CheckpointInfo) -> None:
            try:
                found = summary_of(await read_index(self._backend, info.key))
            except (CorruptCheckpoint, UnsupportedVersion):
                self._unread.add(info.id)
                self._facts.told.pop(info.id, None)
            else:
                self._facts.learn(info.id, found)

        await all_of([partial(read, info) for info in infos], _AT_ONCE)


def _candidate(info: CheckpointInfo, facts: MetadataCache) -> Candidate:
    created, digest = info.saved_at or datetime.now(UTC), facts.digest(info.id)
    return Candidate(
        info.id, info.step, info.attempt, info.count, created, digest.metrics, digest.final
    )
