"""Temporary objects and sessions, so that none of ours stays on the store."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import datetime

import anyio

from ckpipe.errors import StoreError
from ckpipe.tasks.lanes import run_lanes
from ckpipe_gcs.address import upload_of
from ckpipe_gcs.listing import modified, pages
from ckpipe_gcs.objects import DELETE_LANES, Objects
from ckpipe_gcs.requests import Requests
from ckpipe_gcs.sessions import Session

logger = logging.getLogger("ckpipe")


class Leftovers:
    """What uploads have on the store besides the object that they make.

    A name is noted before the request that may make the object, and forgotten once it is known
    to be gone: so a lost answer leaves nothing behind.

    Args:
        requests: Sends the requests.
        objects: Deletes objects.
    """

    def __init__(self, requests: Requests, objects: Objects) -> None:
        self._requests, self._objects = requests, objects
        self._names: dict[str, str | None] = {}
        self._sessions: set[Session] = set()

    def __len__(self) -> int:
        return len(self._names) + len(self._sessions)

    def note(self, name: str, generation: str | None = None) -> None:
        """Notes that there may be a temporary object, of a generation once that is known."""
        self._names[name] = generation

    def note_session(self, session: Session) -> None:
        """Notes that a session may be open."""
        self._sessions.add(session)

    def forget_session(self, session: Session) -> None:
        """Notes that a session has become an object."""
        self._sessions.discard(session)

    async def end(self, names: Iterable[str], sessions: Iterable[Session] = ()) -> None:
        """Ends sessions and deletes temporary objects, as far as they were noted.

        Raises:
            StoreError: If the store failed; what is left stays noted.
        """
        open_ones = iter([session for session in sessions if session in self._sessions])

        async def lane() -> None:
            for session in open_ones:
                await session.cancel()
                self._sessions.discard(session)

        # Sessions first, since one that goes on might make an object again.
        await run_lanes(DELETE_LANES, lane)
        noted = {name: self._names[name] for name in names if name in self._names}
        await self._objects.remove(noted)
        for name in noted:
            self._names.pop(name, None)

    async def close(self) -> None:
        """Gives up what nobody ended, as far as the store can be reached in the time of one
        request."""
        with anyio.move_on_after(self._requests.timeout) as scope:
            try:
                await self.end(tuple(self._names), tuple(self._sessions))
            except StoreError as error:
                logger.warning("Temporary objects may be left behind: %s", error)
        if scope.cancelled_caught:
            where = self._requests.address
            logger.warning("Temporary objects may be left behind below %s", where)

    async def remove_stale(self, prefix: str, before: datetime) -> int:
        """Deletes the temporary objects of uploads that have written nothing since a time.

        Args:
            prefix: The whole prefix below which to look.
            before: By the store's own clock.

        Returns:
            How many uploads they belonged to.

        Raises:
            StoreError: If the store failed.
        """
        found: dict[str, dict[str, str | None]] = {}
        latest: dict[str, datetime] = {}
        async for page in pages(self._requests, prefix):
            with self._requests.attempt("list"):
                for resource in page.get("items", ()):
                    token = upload_of(resource["name"])
                    if token is not None:
                        found.setdefault(token, {})[resource["name"]] = resource["generation"]
                        written = modified(resource)
                        latest[token] = max(latest.get(token, written), written)
        stale = [token for token, written in latest.items() if written < before]
        for token in stale:
            await self._objects.remove(found[token])
        return len(stale)
