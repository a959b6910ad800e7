"""Cache and query what retention and ``best`` know of checkpoints.

Theory. What an index says is known for good. What a digest says
(:mod:`ckpipe.format.metrics_sidecar`) is taken for a first answer, and then whatever decides that
answer is looked up in its index: for ``best`` the winner, for a decision of what to delete see
:func:`ckpipe.catalog.prune.decide_on`. If an index cannot be read, its checkpoint is out, as it was
before there were digests; if an index says something else than the digest, no digest of this root
is believed any more, and all indexes are read. Then it is decided again. Every round knows more
than the one before, so it ends.
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
"""Indexes that are read at the same time."""


class MetadataSummary(NamedTuple):
    """The facts of a checkpoint that retention needs, from its index.

    Args:
        digest: Its metrics, whether it is a run's final checkpoint, and its size.
        resumed_from: Id of the checkpoint that its run had loaded.
        metadata: What ``save`` was given as metadata.
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
    """The summaries that one process has read of the checkpoints of a root, by id.

    Args:
        known: What indexes say, or said when they were written.
        told: What digests say of others.
        trusting: Whether digests are believed: none has contradicted its index yet.
        deleted: Deletions that are known to be through.
        retired: Complete checkpoints that retention has removed in this process.
    """

    known: dict[str, MetadataSummary] = field(default_factory=dict)
    told: dict[str, MetricsSidecar] = field(default_factory=dict)
    trusting: bool = True
    deleted: set[CheckpointId] = field(default_factory=set)
    retired: set[CheckpointId] = field(default_factory=set)

    def learn(self, name: str, found: MetadataSummary) -> None:
        """Note what an index says; what was told of it counts no longer."""
        self.known[name] = found
        told = self.told.pop(name, None)
        # A digest from before copies were counted says nothing of them.
        if (
            told is not None
            and told.text != replace(found.digest, copied_bytes=told.copied_bytes).text
        ):
            logger.warning("The digest of %s is not what its index says: all are left out", name)
            self.trusting = False
            self.told.clear()

    def forget(self, name: str) -> None:
        """Drop what is known of a checkpoint that is no more."""
        self.known.pop(name, None)
        self.told.pop(name, None)

    def names(self) -> set[str]:
        """The checkpoints of which something is known or told."""
        return {*self.known, *self.told}

    def __contains__(self, name: str) -> bool:
        return name in self.known or name in self.told

    def digests(self) -> list[MetricsSidecar]:
        """All that is known or told of checkpoints."""
        return [*(each.digest for each in list(self.known.values())), *self.told.values()]

    def digest(self, name: str) -> MetricsSidecar:
        """The summary of a checkpoint if it was read, else its sidecar."""
        return self.known[name].digest if name in self.known else self.told[name]


def described(info: CheckpointInfo, facts: MetadataCache) -> CheckpointInfo:
    """Fill in what is known of what was saved in a complete checkpoint."""
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
    """Fill in what the indexes of complete checkpoints say, each of which is read once.

    Raises:
        StoreError: If the store failed.
    """
    complete = [each for each in infos if each.complete]
    await MetadataQuery(backend, complete, facts, few=0).is_sure({each.id for each in complete})
    return [described(each, facts) for each in infos]


class MetadataQuery:
    """One question about the complete checkpoints of a root.

    Args:
        backend: The store.
        complete: The checkpoints, the newest first.
        facts: What is known of them already; added to.
        few: So many indexes are read rather than asking for digests.
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
        """Those of which something is known or told, in the same order.

        Raises:
            StoreError: If the store failed.
        """
        if len(self._open()) > self._few:
            await self.hear()
        await self._read(self._open())
        return [_candidate(each, self._facts) for each in self._complete if each.id in self._facts]

    async def hear(self) -> None:
        """Ask digests of what is not known, by one delimited list.

        Raises:
            StoreError: If the store failed.
        """
        if self._facts.trusting and self._open():
            digests = await list_sidecars(self._backend)
            told = {each.id: digests.get(each.key) for each in self._open()}
            self._facts.told.update({name: each for name, each in told.items() if each})

    async def is_sure(self, names: Collection[str]) -> bool:
        """Read the indexes of those whose sidecar was used; True if no answer can change by it.

        If it is True, no other task ran meanwhile that could forget what is gone.

        Raises:
            StoreError: If the store failed.
        """
        known = self._facts.known
        doubtful = [each for each in self._complete if each.id in names and each.id not in known]
        if doubtful:
            await self._read(doubtful)
        return not doubtful

    def _open(self) -> list[CheckpointInfo]:
        """The ids of which neither index nor sidecar is known, as far as this process can tell."""
        return [
            each
            for each in self._complete
            if each.id not in self._facts and each.id not in self._unread
        ]

    async def _read(self, infos: Iterable[CheckpointInfo]) -> None:
        """Read the indexes of checkpoints, several at once."""

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
