"""What all ranks of an attempt say on a question, found out without anybody who collects it.

Theory. A vote is a number in the name of a small create-only object, so that one list shows all
votes of a directory. Directories hold a hundred ranks, as those of manifests do. Who votes lists
its directory then, and if that is full puts its greatest vote into a directory one level higher.
Lists show every vote whose write has returned, so whoever comes last sees all, and knows the
greatest of them. Each rank costs one write and one list, and nobody waits.
"""

from __future__ import annotations

import contextlib

from ckpipe.backend import Backend, PutMode
from ckpipe.errors import ObjectExists
from ckpipe.format.names import GROUP_SIZE, members, merged_into, votes_prefix


class Ballot:
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
        """Votes with a number of zero or more; to be called once.

        Returns:
            The greatest of all votes, if this was the last one; else None.

        Raises:
            StoreError: If the store failed.
        """
        level, number = 0, self._rank
        while True:
            directory = number // GROUP_SIZE
            await self._put(f"{self._directory(level, directory)}{number:05d}.{vote}")
            votes = await self._votes(self._directory(level, directory))
            wanted = members(level, directory, self._world_size)
            if not votes.keys() >= set(wanted):
                return None
            vote = max(votes[each] for each in wanted)
            target = merged_into(level, directory, self._world_size)
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
        """Removes all votes, for when nobody needs them any more.

        Raises:
            StoreError: If the store failed.
        """
        await self._backend.delete([each.key async for each in self._backend.list(self._prefix)])

    def _directory(self, level: int, directory: int) -> str:
        return f"{self._prefix}{level}/{directory:03d}/"

    async def _put(self, key: str) -> None:
        # It exists if the answer was lost, or if another rank found the directory full as well.
        with contextlib.suppress(ObjectExists):
            await self._backend.put(key, b"{}", PutMode.CREATE)

    async def _votes(self, prefix: str) -> dict[int, int]:
        found = {}
        async for each in self._backend.list(prefix):
            number, _, vote = each.key.rpartition("/")[2].partition(".")
            if number.isdecimal() and vote.isdecimal():
                found[int(number)] = int(vote)
        return found


__all__ = ["Ballot"]
