"""Large objects on their way to the store.

Each block is sent as a temporary object of its own, straight from the caller's memory and several
at a time; when all are there, the store composes them into the object, which appears whole under
its name, and the temporary ones are deleted. Large blocks go through sessions, so that a broken
connection costs what was on its way, and not the block.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Mapping, Sequence

import anyio

from ckpipe.backend import Upload
from ckpipe.errors import ObjectExists, ObjectNotFound, StoreError, StoreUnavailable, UsageError
from ckpipe.stores.body_checksums import checksum_of
from ckpipe.tasks.lanes import run_lanes
from ckpipe_gcs.composing import MAX_SOURCES, Piece, joined, request, runs
from ckpipe_gcs.leftovers import Leftovers
from ckpipe_gcs.objects import BYTES, NEW, Objects, check_stored, owned_by, owner_of
from ckpipe_gcs.requests import FIELDS, Requests, Resource, json_body
from ckpipe_gcs.sessions import Session

logger = logging.getLogger("ckpipe")

COMPOSE_LANES = 8
"""How many requests that compose are under way at a time."""

TEMPORARY = {"storageClass": "STANDARD"}
"""Other classes charge for a month at least, also for what lives for a minute. A composed object
has the class of its parts."""


class CompositeUpload(Upload):
    """An object that is sent in parts, and composed of them.

    Args:
        requests: Sends the requests.
        objects: Writes and looks at objects.
        leftovers: The temporary objects on the store.
        key: The object's key.
        size: Its size in bytes.
        block_bytes: The size of all parts but the last.
        resumable_bytes: The size from which a part is sent through a session.
    """

    takes_checksums = True

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
        self._requests, self._objects, self._leftovers = requests, objects, leftovers
        self._key, self._size, self._block_bytes = key, size, block_bytes
        self._resumable_bytes = resumable_bytes
        self._token = secrets.token_hex(8)
        self._name = requests.address.name(key)
        self._where = f"{requests.address}{key}"
        self._parts: dict[int, Piece] = {}
        self._sessions: dict[int, Session] = {}
        self._names: set[str] = set()
        self._temporary(0, 0)  # raises if there is no room for such names

    def __repr__(self) -> str:
        done = f"{len(self._parts)} of {self._count} parts"
        return f"<CompositeUpload {self._key} {self._size} bytes [{done}]>"

    @property
    def _count(self) -> int:
        return -(-self._size // self._block_bytes)

    def _temporary(self, level: int, number: int) -> str:
        return self._requests.address.part(self._key, self._token, level, number)

    def _note(self, level: int, number: int) -> str:
        name = self._temporary(level, number)
        self._names.add(name)
        self._leftovers.note(name)
        return name

    async def write(self, offset: int, data: memoryview) -> None:
        await self.write_summed(offset, data, await checksum_of(data))

    async def write_summed(self, offset: int, data: memoryview, checksum: int) -> None:
        number, beside = divmod(offset, self._block_bytes)
        if beside or len(data) != min(self._block_bytes, self._size - offset):
            message = f"{len(data)} bytes at {offset} are no block of {self._size} bytes"
            raise UsageError(message, key=self._key)
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
            return await self._objects.write(name, data, NEW, TEMPORARY, self._key)
        session = self._sessions.get(number)
        if session is None:
            session = Session(self._requests, name, self._key, TEMPORARY, self._objects.writing)
            self._sessions[number] = session
            self._leftovers.note_session(session)
        made = await session.send(data, value)
        self._leftovers.forget_session(session)
        del self._sessions[number]
        return made

    async def _checked(self, name: str, made: Resource, value: int, size: int) -> Piece:
        """The temporary object that the store told of, if it is what it should be."""
        try:
            check_stored(made, value, size, self._where, self._key)
        except StoreUnavailable:
            with contextlib.suppress(StoreError):
                await self._objects.remove({name: None})  # makes room for another try
            raise
        piece = Piece(name, str(made["generation"]), size, value)
        self._leftovers.note(name, piece.generation)
        return piece

    async def complete(self) -> None:
        if len(self._parts) != self._count:
            message = f"The upload has {len(self._parts)} of its {self._count} parts"
            raise UsageError(message, key=self._key)
        pieces: Sequence[Piece] = [self._parts[number] for number in range(self._count)]
        level = 0
        while len(pieces) > MAX_SOURCES:
            level += 1
            pieces = await self._composed(level, list(runs(pieces)))
        resource = {"contentType": BYTES, **owned_by(self._token)}
        await self._finish(await self._compose(self._name, pieces, resource))

    async def _composed(self, level: int, groups: Sequence[Sequence[Piece]]) -> Sequence[Piece]:
        """One temporary object for each group of pieces."""
        made: dict[int, Piece] = {}
        waiting = iter(enumerate(groups))

        async def lane() -> None:
            for number, group in waiting:
                made[number] = await self._compose_group(level, number, group)

        await run_lanes(COMPOSE_LANES, lane)
        return [made[number] for number in range(len(groups))]

    async def _compose_group(self, level: int, number: int, group: Sequence[Piece]) -> Piece:
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
        """Checks the object, and deletes what it was composed of.

        Raises:
            StoreError: If it is not what was sent; it is removed then.
        """
        size, value = joined([self._parts[number] for number in range(self._count)])
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
        self, name: str, pieces: Sequence[Piece], resource: Mapping[str, object]
    ) -> Resource:
        query = {**NEW, **self._objects.writing, "fields": FIELDS}
        url = self._requests.object_url(name, "/compose", **query)
        nbytes = sum(piece.size for piece in pieces) // 100
        body = json_body(request(pieces, resource))
        return await self._requests.ask(
            "complete", "POST", url, key=self._key, nbytes=nbytes, body=body
        )

    async def _end(self) -> None:
        await self._leftovers.end(tuple(self._names), tuple(self._sessions.values()))
        self._names.clear()

    async def abort(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._end()
