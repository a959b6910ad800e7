"""Decide alike on all ranks of an attempt: the first decision wins, or a leaderless vote.

Theory. No rank waits for another. The first to come decides for all, by what it knows, and the
others read what was decided. An agreement is about one question, whose name is the same on all
ranks and never asked twice in an attempt. Saves agree through create-only objects, so that they go
on when rank 0 has ended. Loads agree through the ``torch.distributed`` Store where there is one,
and so leave nothing on the store of the checkpoints.

A vote is a number in the name of a small create-only object, so that one list shows all votes of a
directory. Directories hold a hundred ranks, as those of manifests do. A rank that votes lists its
directory then, and if that is full puts its greatest vote into a directory one level higher. Lists
show every vote whose write has returned, so the last rank to vote sees all, and knows the greatest
of them. Each rank costs one write and one list.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import anyio.to_thread

from ckpipe.backend import Backend, PutMode
from ckpipe.errors import InvalidManifest, ObjectExists, ObjectNotFound, UnsupportedTopology
from ckpipe.format.keys import Json
from ckpipe.format.names import GROUP_SIZE, agreement_key, members, merged_into, votes_prefix

if TYPE_CHECKING:
    from ckpipe.ranks.launch import Topology


class Vote:
    """The votes of all ranks on one question.

    Args:
        backend: The store; its requests may be tried again.
        attempt: The name of the attempt.
        question: What it is about, of letters, digits, ``.``, ``_`` and ``-``; asked once.
        rank: The rank that votes.
        world_size: How many vote.
    """

    def __init__(
        self, backend: Backend, attempt: str, question: str, rank: int, world_size: int
    ) -> None:
        self._backend, self._rank, self._world_size = backend, rank, world_size
        self._prefix = votes_prefix(attempt, question)

    async def cast(self, vote: int) -> int | None:
        """Vote with a number of zero or more; to be called once.

        Returns:
            The greatest of all votes, if this was the last one; else None.

        Raises:
            StoreError: If the store failed.
        """
        level, number = 0, self._rank
        while True:
            group = number // GROUP_SIZE
            directory = f"{self._prefix}{level}/{group:03d}/"
            # It exists if the answer was lost, or if another rank found the directory full as well.
            with contextlib.suppress(ObjectExists):
                await self._backend.put(f"{directory}{number:05d}.{vote}", b"{}", PutMode.CREATE)
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
        """The votes that are known, by rank.

        Raises:
            StoreError: If the store failed.
        """
        return await self._votes(f"{self._prefix}0/")

    async def clear(self) -> None:
        """Remove all votes, once they are not needed any more.

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
        topology: This rank, and how many there are.
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
        """Return what was decided on a question, in a tuple of one; None before."""
        await self._claim()
        return await agreed(self._backend, self._attempt, question)

    async def decide(self, question: str, proposal: Json) -> Json:
        """Decide a question, unless it is decided already; return the decision."""
        await self._claim()
        return await agree(self._backend, self._attempt, question, proposal)

    async def accept(self, question: str, proposal: Json) -> tuple[Json] | None:
        """Accept a proposal; the last of all ranks decides and gets the decision, others None."""
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
        store: The Store, below a prefix that no other launch or pipeline has.
        topology: This rank, and how many there are.
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
            if question in self._accepted:  # a load that is tried again counts once
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

    async def _asked(self, ask: Callable[[], T]) -> T:
        try:
            return await anyio.to_thread.run_sync(ask, abandon_on_cancel=True)
        except RuntimeError as error:
            raise UnsupportedTopology(
                f"The ranks cannot agree on what to load: {error}",
                rank=self._topology.rank,
                hint="Keep rank 0 running while others load: it may hold the Store of "
                "torch.distributed",
            ) from error


Agreements = ObjectAgreements | TorchAgreements
"""Where the ranks that load together agree."""


async def agreed(backend: Backend, attempt: str, question: str) -> tuple[Json] | None:
    """Read the decision on a question, in a tuple of one; None if there is none yet.

    Raises:
        InvalidManifest: If the decision cannot be read.
        StoreError: If the store failed.
    """
    key = agreement_key(attempt, question)
    return await read_decision(backend, key, _AGREEMENT, _decision)


async def agree(backend: Backend, attempt: str, question: str, proposal: Json) -> Json:
    """Decide a question, unless it is decided already; return the decision, on all ranks alike.

    Args:
        backend: The store; its requests may be tried again, since the object that is there is
            read back.
        attempt: The name of the attempt.
        question: What it is about, of letters, digits, ``.``, ``_`` and ``-``.
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
    """Create the object of a decision, unless there is one; return what is decided.

    Args:
        backend: The store.
        key: The object.
        what: What to call it in an error.
        document: What to decide, as JSON.
        parse: Gets the decision out of its JSON.

    Raises:
        InvalidManifest: If the object that is there cannot be read.
        StoreError: If the store failed.
    """
    # Whether the object that exists is ours, after a lost answer, or another rank's is the same.
    with contextlib.suppress(ObjectExists):
        await backend.put(key, json.dumps(document).encode(), PutMode.CREATE)
        return parse(document)
    found = await read_decision(backend, key, what, parse)
    if found is None:
        raise InvalidManifest(f"{what} was deleted", key=key)
    return found[0]


async def read_decision(
    backend: Backend, key: str, what: str, parse: Callable[[Json], T]
) -> tuple[T] | None:
    """Read what an object decides, in a tuple of one; None if there is no such object.

    Args:
        backend: The store.
        key: The object.
        what: What to call it in an error.
        parse: Gets the decision out of its JSON.

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
