"""Decide alike on all ranks of an attempt: the first decision wins, or a leaderless vote.

Theory. No rank waits for another. The first rank decides for all, by the facts that it has, and the
others read the decision. An agreement is about one question. Its name is the same on all ranks and
is never used twice in an attempt. Saves agree through create-only objects, so they still can after
rank 0 has ended. Loads agree through the ``torch.distributed`` Store if there is one, and so write
nothing to the store of the checkpoints.

Leaderless vote: each rank creates one small create-only object with its vote, a number, in the
name, so one list shows all votes of a directory. Directories hold a hundred ranks, as those of
manifests do. After its vote, a rank lists its directory. If that is complete, the rank writes the
greatest vote to a directory one level higher. Lists show every vote whose write has returned, so
the last rank to vote sees all votes and returns the maximum. Each rank costs one write and one
list.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import anyio.to_thread

from ckpipe.backend import Backend
from ckpipe.errors import InvalidManifest, ObjectNotFound, UnsupportedTopology
from ckpipe.format.labels import Json
from ckpipe.format.names import GROUP_SIZE, agreement_key, members, merged_into, votes_prefix
from ckpipe.store.retry import create_once

if TYPE_CHECKING:
    from ckpipe.ranks.world import Topology


class Vote:
    """The votes of all ranks on one question.

    Args:
        backend: The store; its requests may be tried again.
        attempt: The name of the attempt.
        question: Its name, of letters, digits, ``.``, ``_`` and ``-``; used once in an attempt.
        rank: The rank that votes.
        world_size: Number of ranks that vote.
    """

    def __init__(
        self, backend: Backend, attempt: str, question: str, rank: int, world_size: int
    ) -> None:
        self._backend, self._rank, self._world_size = backend, rank, world_size
        self._prefix = votes_prefix(attempt, question)

    async def cast(self, vote: int) -> int | None:
        """Vote with a number of zero or more; to be called once.

        Returns:
            The greatest of all votes if this was the last one; else None.

        Raises:
            StoreError: If the store failed.
        """
        level, number = 0, self._rank
        while True:
            group = number // GROUP_SIZE
            directory = f"{self._prefix}{level}/{group:03d}/"
            # It exists if an answer was lost, or if another rank saw the directory complete too.
            await create_once(self._backend, f"{directory}{number:05d}.{vote}")
            votes = await self._votes(directory)
            wanted = members(level, group, self._world_size)
            if not votes.keys() >= set(wanted):
                return None
            vote = max(votes[each] for each in wanted)
            target = merged_into(level, group, self._world_size)
            if target is None:
                return vote
            level, number = target

    async def votes(self) -> dict[int, int]:
        """Return the votes so far, by rank.

        Raises:
            StoreError: If the store failed.
        """
        return await self._votes(f"{self._prefix}0/")

    async def clear(self) -> None:
        """Remove all votes, once they are no longer needed.

        Raises:
            StoreError: If the store failed.
        """
        await self._backend.delete([each.key async for each in self._backend.list(self._prefix)])

    async def _votes(self, prefix: str) -> dict[int, int]:
        found = {}
        async for each in self._backend.list(prefix):
            number, _, vote = each.key.rpartition("/")[2].partition(".")
            if number.isdecimal() and vote.isdecimal():
                found[int(number)] = int(vote)
        return found


T = TypeVar("T")

_MAX_BYTES = 64 << 10


class ObjectAgreements:
    """Agreements through objects below the attempt.

    Args:
        backend: The store; its requests may be tried again.
        attempt: The name of the attempt.
        topology: This rank and the world size.
        claim: Claims the attempt, so that no agreement of an earlier launch is read.
    """

    def __init__(
        self,
        backend: Backend,
        attempt: str,
        topology: Topology,
        claim: Callable[[], Awaitable[object]],
    ) -> None:
        self._backend, self._attempt, self._topology = backend, attempt, topology
        self._claim = claim

    async def decided(self, question: str) -> tuple[Json] | None:
        """Return the decision on a question in a tuple of one, or None if there is none yet."""
        await self._claim()
        return await agreed(self._backend, self._attempt, question)

    async def decide(self, question: str, proposal: Json) -> Json:
        """Decide a question unless it is decided already; return the decision."""
        await self._claim()
        return await agree(self._backend, self._attempt, question, proposal)

    async def accept(self, question: str, proposal: Json) -> tuple[Json] | None:
        """Accept a proposal; the last rank decides and gets the decision, the others get None."""
        vote = self._vote(question)
        if await vote.cast(0) is None:
            return None
        decision = await self.decide(question, proposal)
        await vote.clear()
        return (decision,)

    async def absent(self, question: str) -> list[int]:
        """Return the ranks that have not accepted."""
        votes = await self._vote(question).votes()
        return [rank for rank in range(self._topology.world_size) if rank not in votes]

    def _vote(self, question: str) -> Vote:
        topology = self._topology
        return Vote(self._backend, self._attempt, question, topology.rank, topology.world_size)


class TorchAgreements:
    """The same agreements through a ``torch.distributed`` Store.

    Args:
        store: The Store, below a prefix that no other launch or pipeline uses.
        topology: This rank and the world size.
    """

    def __init__(self, store: Any, topology: Topology) -> None:
        self._store, self._topology = store, topology
        self._accepted: set[str] = set()

    async def decided(self, question: str) -> tuple[Json] | None:
        def ask() -> tuple[Json] | None:
            known = self._store.check([question])
            return (json.loads(self._store.get(question)),) if known else None

        return await self._asked(ask)

    async def decide(self, question: str, proposal: Json) -> Json:
        text = json.dumps(proposal)
        return await self._asked(lambda: json.loads(self._store.compare_set(question, "", text)))

    async def accept(self, question: str, proposal: Json) -> tuple[Json] | None:
        def ask() -> bool:
            if question in self._accepted:  # a repeated load counts once
                return False
            self._accepted.add(question)
            self._store.set(f"{question}.accepted-{self._topology.rank}", "1")
            count: int = self._store.add(f"{question}.accepted", 1)
            return count == self._topology.world_size

        is_last = await self._asked(ask)
        return (await self.decide(question, proposal),) if is_last else None

    async def absent(self, question: str) -> list[int]:
        def ask() -> list[int]:
            ranks = range(self._topology.world_size)
            return [
                rank for rank in ranks if not self._store.check([f"{question}.accepted-{rank}"])
            ]

        return await self._asked(ask)

    async def arrive(self, point: str) -> None:
        """Tell the other ranks that this one has come to a point of a load."""
        key = _arrival(point, self._topology.rank)
        await self._asked(lambda: self._store.set(key, "1"))

    async def behind(self, point: str, ranks: Sequence[int]) -> list[int]:
        """Return the ranks that have not come to a point."""

        def ask() -> list[int]:
            if self._store.check([_arrival(point, rank) for rank in ranks]):
                return []
            return [rank for rank in ranks if not self._store.check([_arrival(point, rank)])]

        return await self._asked(ask)

    async def _asked(self, ask: Callable[[], T]) -> T:
        try:
            return await anyio.to_thread.run_sync(ask, abandon_on_cancel=True)
        except RuntimeError as error:
            raise UnsupportedTopology(
                f"The ranks cannot agree on a checkpoint to load: {error}",
                rank=self._topology.rank,
                hint="Keep rank 0 running while others load: it may hold the Store of "
                "torch.distributed",
            ) from error


def _arrival(point: str, rank: int) -> str:
    return f"{point}.arrived-{rank}"


Agreements = ObjectAgreements | TorchAgreements
"""The agreements of ranks that load together."""


async def agreed(backend: Backend, attempt: str, question: str) -> tuple[Json] | None:
    """Read the decision on a question, in a tuple of one; None if there is none yet.

    Raises:
        InvalidManifest: If the decision cannot be read.
        StoreError: If the store failed.
    """
    key = agreement_key(attempt, question)
    return await read_decision(backend, key, _AGREEMENT, _decision)


async def agree(backend: Backend, attempt: str, question: str, proposal: Json) -> Json:
    """Decide a question unless it is decided already; return the decision, the same on all ranks.

    Args:
        backend: The store; its requests may be tried again, since an existing object is read back.
        attempt: The name of the attempt.
        question: Its name, of letters, digits, ``.``, ``_`` and ``-``.
        proposal: This rank's answer, plain JSON.

    Raises:
        InvalidManifest: If the decision cannot be read.
        StoreError: If the store failed.
    """
    key, document = agreement_key(attempt, question), {"decision": proposal}
    return await create_decision(backend, key, _AGREEMENT, document, _decision)


_AGREEMENT, _decision = "An agreement between ranks", itemgetter("decision")


async def create_decision(
    backend: Backend, key: str, what: str, document: Json, parse: Callable[[Json], T]
) -> T:
    """Create the object of a decision unless it exists; return the decision.

    Args:
        backend: The store.
        key: The object's key.
        what: Its name in errors.
        document: The proposal, as JSON.
        parse: Returns the decision of a document.

    Raises:
        InvalidManifest: If an existing object cannot be read.
        StoreError: If the store failed.
    """
    # After a lost answer, the existing object may be our own; that makes no difference.
    if await create_once(backend, key, json.dumps(document).encode()):
        return parse(document)
    found = await read_decision(backend, key, what, parse)
    if found is None:
        raise InvalidManifest(f"{what} was deleted", key=key)
    return found[0]


async def read_decision(
    backend: Backend, key: str, what: str, parse: Callable[[Json], T]
) -> tuple[T] | None:
    """Read the decision of an object in a tuple of one; None if the object does not exist.

    Args:
        backend: The store.
        key: The object's key.
        what: Its name in errors.
        parse: Returns the decision of a document.

    Raises:
        InvalidManifest: If it cannot be read.
        StoreError: If the store failed.
    """
    try:
        data = await backend.get(key, max_bytes=_MAX_BYTES)
    except ObjectNotFound:
        return None
    try:
        return (parse(json.loads(data)),)
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidManifest(f"{what} cannot be read", key=key) from error
