"""Large objects on their way to the store.

Each block is sent as a temporary object of its own, straight from the caller's memory and several
at a time; when all are there, the store composes them into the object, which appears whole under
its name, and the temporary ones are deleted. A request composes up to 32 objects into one, so more
are composed in a tree. Large blocks go through sessions, so that a broken connection costs what was
on its way, and not the block.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import anyio
from awscrt.checksums import combine_crc32c

from ckpipe.errors import ObjectExists, ObjectNotFound, StoreError, StoreUnavailable
from ckpipe_gcs.objects import (
    BYTES,
    DELETED_AT_ONCE,
    NEW,
    Objects,
    check_stored,
    for_each,
    modified,
    owned_by,
    owner_of,
    pages,
)
from ckpipe_gcs.requests import FIELDS, Requests, Resource, json_body, upload_of
from ckpipe_gcs.sessions import Session
from ckpipe_http.buckets import BlockUpload

logger = logging.getLogger("ckpipe")

MAX_SOURCES = 32
"""The most objects that one request composes; a limit of the store."""

MAX_LEVELS = 3
"""The greatest height of the tree of an upload."""

MAX_PARTS = MAX_SOURCES**MAX_LEVELS

COMPOSED_AT_ONCE = 8
"""The most requests that compose and are under way at a time."""

TEMPORARY_CLASS = "STANDARD"
"""Other classes charge for a month at least, also for what lives for a minute. A composed object
has the class of its parts."""


@dataclass(frozen=True, slots=True)
class Part:
    """A range of an object's bytes as an object of its own.

    Args:
        name: The whole name of that object.
        generation: Its generation.
        size: Bytes.
        checksum: Their CRC-32C.
    """

    name: str
    generation: str
    size: int
    checksum: int


def runs(parts: Sequence[Part]) -> Iterator[Sequence[Part]]:
    """Cut parts into runs, each of which one request composes."""
    for start in range(0, len(parts), MAX_SOURCES):
        yield parts[start : start + MAX_SOURCES]


def joined(parts: Sequence[Part]) -> tuple[int, int]:
    """Compute the size and CRC-32C of parts one after the other."""
    size = checksum = 0
    for part in parts:
        checksum = combine_crc32c(checksum, part.checksum, part.size)
        size += part.size
    return size, checksum


def composition(parts: Sequence[Part], resource: Mapping[str, Any]) -> Mapping[str, Any]:
    """Make the body of a request that composes parts.

    Args:
        parts: The parts.
        resource: The resource of the object that they become.
    """
    sources = [{"name": part.name, "generation": part.generation} for part in parts]
    return {"sourceObjects": sources, "destination": resource}


class CompositeUpload(BlockUpload[Part]):
    """Send an object in parts, and compose it of them.

    Args:
        requests: Sends the requests.
        objects: Writes and looks at objects.
        leftovers: The temporary objects on the store.
        key: The object's key.
        size: Its size in bytes.
        block_bytes: The size of all parts but the last.
        resumable_bytes: The size from which a part is sent through a session.
    """

    def __init__(
        self,
        requests: Requests,
        objects: Objects,
        leftovers: Leftovers,
        key: str,
        size: int,
        block_bytes: int,
        resumable_bytes: int,
    ) -> None:
        super().__init__(key, size, block_bytes)
        self._requests, self._objects, self._leftovers = requests, objects, leftovers
        self._resumable_bytes = resumable_bytes
        self._name = requests.address.name(key)
        self._where = f"{requests.address}{key}"
        self._sessions: dict[int, Session] = {}
        self._names: set[str] = set()
        self._temporary(0, 0)  # raises if there is no room for such names

    def _temporary(self, level: int, number: int) -> str:
        return self._requests.address.part(self._key, self._token, level, number)

    def _note(self, level: int, number: int) -> str:
        name = self._temporary(level, number)
        self._names.add(name)
        self._leftovers.note(name)
        return name

    async def write_summed(self, offset: int, data: memoryview, checksum: int) -> None:
        number = self._number(offset, data)
        if number in self._parts:
            return  # the same bytes as before, says the contract
        name = self._note(0, number)
        try:
            made = await self._send(number, name, data, checksum)
        except ObjectExists:
            # The name is this part's alone, so an answer was lost and this is the object.
            made = await self._objects.resource(name, self._key)
        self._parts[number] = await self._checked(name, made, checksum, len(data))

    async def _send(self, number: int, name: str, data: memoryview, value: int) -> Resource:
        if len(data) < self._resumable_bytes:
            return await self._objects.write(
                name, data, create=True, key=self._key, storage_class=TEMPORARY_CLASS
            )
        session = self._sessions.get(number)
        if session is None:
            resource = {"storageClass": TEMPORARY_CLASS}
            session = Session(self._requests, name, self._key, resource, self._objects.writing)
            self._sessions[number] = session
            self._leftovers.note_session(session)
        made = await session.send(data, value)
        self._leftovers.forget_session(session)
        del self._sessions[number]
        return made

    async def _checked(self, name: str, made: Resource, value: int, size: int) -> Part:
        """Check a temporary object by the resource that the store told, and note it."""
        try:
            check_stored(made, value, size, self._where, self._key)
        except StoreUnavailable:
            with contextlib.suppress(StoreError):
                await self._objects.remove({name: None})  # makes room for another try
            raise
        part = Part(name, str(made["generation"]), size, value)
        self._leftovers.note(name, part.generation)
        return part

    async def complete(self) -> None:
        parts = self._all_parts()
        level = 0
        while len(parts) > MAX_SOURCES:
            level += 1
            parts = await self._composed(level, list(runs(parts)))
        resource = {"contentType": BYTES, **owned_by(self._token)}
        await self._finish(await self._compose(self._name, parts, resource))

    async def _composed(self, level: int, groups: Sequence[Sequence[Part]]) -> list[Part]:
        """Compose one temporary object of each group of parts."""
        made: dict[int, Part] = {}

        async def compose(numbered: tuple[int, Sequence[Part]]) -> None:
            number, group = numbered
            made[number] = await self._compose_group(level, number, group)

        await for_each(enumerate(groups), compose, at_once=COMPOSED_AT_ONCE)
        return [made[number] for number in range(len(groups))]

    async def _compose_group(self, level: int, number: int, group: Sequence[Part]) -> Part:
        name = self._note(level, number)
        size, value = joined(group)
        try:
            made = await self._compose(name, group, {"contentType": BYTES})
        except ObjectExists:
            made = await self._objects.resource(name, self._key)
        return await self._checked(name, made, value, size)

    async def landed(self) -> bool:
        try:
            found = await self._objects.resource(self._name, self._key)
        except ObjectNotFound:
            return False
        if owner_of(found) != self._token:
            return False
        await self._finish(found)
        return True

    async def _finish(self, made: Resource) -> None:
        """Check the object, and delete the temporary ones.

        Raises:
            StoreError: If it is not what was sent; it is removed then.
        """
        size, value = joined(self._all_parts())
        try:
            check_stored(made, value, size, self._where, self._key)
        except StoreUnavailable as error:
            await self._objects.remove({self._name: str(made["generation"])})
            message = f"{self._where} was composed of other bytes than were sent"
            raise StoreError(message, key=self._key, hint="Save again") from error
        try:
            await self._end()
        except StoreError as error:
            # The object is whole. Closing the backend tries once more, and so does a sweep.
            logger.warning("Temporary objects of %s were left behind: %s", self._where, error)

    async def _compose(
        self, name: str, parts: Sequence[Part], resource: Mapping[str, object]
    ) -> Resource:
        query = {**NEW, **self._objects.writing, "fields": FIELDS}
        url = self._requests.object_url(name, "/compose", **query)
        nbytes = sum(part.size for part in parts) // 100
        body = json_body(composition(parts, resource))
        return await self._requests.ask(
            "complete", "POST", url, key=self._key, nbytes=nbytes, body=body
        )

    async def _end(self) -> None:
        await self._leftovers.end(tuple(self._names), tuple(self._sessions.values()))
        self._names.clear()

    async def abort(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._end()


class Leftovers:
    """Keep account of temporary objects and sessions, so that none of ours stays on the store.

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
        """Note that there may be a temporary object, of a generation once that is known."""
        self._names[name] = generation

    def note_session(self, session: Session) -> None:
        """Note that a session may be open."""
        self._sessions.add(session)

    def forget_session(self, session: Session) -> None:
        """Note that a session has become an object."""
        self._sessions.discard(session)

    async def end(self, names: Iterable[str], sessions: Iterable[Session] = ()) -> None:
        """End sessions and delete temporary objects, as far as they were noted.

        Raises:
            StoreError: If the store failed; what is left stays noted.
        """

        async def cancel(session: Session) -> None:
            await session.cancel()
            self._sessions.discard(session)

        # Sessions first, since one that goes on might make an object again.
        open_ones = [session for session in sessions if session in self._sessions]
        await for_each(open_ones, cancel, at_once=DELETED_AT_ONCE)
        noted = {name: self._names[name] for name in names if name in self._names}
        await self._objects.remove(noted)
        for name in noted:
            self._names.pop(name, None)

    async def close(self) -> None:
        """End what was left open, as far as the store can be reached in the time of one request."""
        with anyio.move_on_after(self._requests.timeout) as scope:
            try:
                await self.end(tuple(self._names), tuple(self._sessions))
            except StoreError as error:
                logger.warning("Temporary objects may be left behind: %s", error)
        if scope.cancelled_caught:
            where = self._requests.address
            logger.warning("Temporary objects may be left behind below %s", where)

    async def remove_stale(self, prefix: str, before: datetime) -> int:
        """Delete the temporary objects of uploads that have written nothing since a time.

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
