"""The name of a launch: unique for each start and restart, and claimed before its first write.

Theory. The name is found at open by reading alone, and begins with a time that is later than that
of every checkpoint there. Nothing of a launch lies on the store before its claim: a create-only
object of each rank, so that an id that was used before is noticed before anything is written, and
before an agreement of another launch is taken for one of this. Ranks that were given an id agree
on the start by one more object, which the first of them creates before its claim.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from datetime import UTC, datetime, timedelta

import anyio
import anyio.to_thread

from ckpipe.backend import Backend, PutMode
from ckpipe.catalog.find import discover
from ckpipe.errors import (
    AttemptReused,
    InvalidManifest,
    ObjectExists,
    ObjectNotFound,
    SettingsError,
    StoreError,
)
from ckpipe.format.names import ATTEMPTS, attempt_start_key, claim_key, launch_id
from ckpipe.ranks.ballots import Ballot
from ckpipe.ranks.meeting import Meeting
from ckpipe.ranks.topology import Topology
from ckpipe.types import attempt_name, attempt_parts

_FORMAT = "%Y%m%dT%H%M%S%f"
_MAX_BYTES = 4096
_REMOVE_SECONDS = 5.0


class Launch:
    """The name of a launch, and the claim of one of its ranks.

    Args:
        backend: The store.
        attempt: The name; its start may change with the claim.
        topology: This rank, and how many there are.
        shares_start: Whether the ranks agree on the start by an object.
    """

    def __init__(
        self, backend: Backend, attempt: str, topology: Topology, *, shares_start: bool = False
    ) -> None:
        self.attempt = attempt
        self.id = launch_id(attempt)
        self.claimed = anyio.Event()
        self._backend, self._topology, self._shares_start = backend, topology, shares_start
        # One token for all tries, so that a claim whose answer was lost is known again.
        self._claim = json.dumps({"token": secrets.token_hex(16)}).encode()
        self._claiming = anyio.Lock()

    async def claim(self) -> str:
        """Claim the id for this rank, unless that is done; to be awaited before the first write.

        Returns:
            The name of the attempt, the same on all ranks from now on.

        Raises:
            AttemptReused: If this rank of an earlier launch has claimed the id.
            StoreError: If the store failed, or is not fit; may be called again.
        """
        async with self._claiming:
            if not self.claimed.is_set():
                if self._shares_start:
                    self.attempt = await _agree_on_start(self._backend, self.attempt)
                await self._put_claim()
                self.claimed.set()
        return self.attempt

    async def withdraw(self) -> None:
        """Remove what the launch has written if none of its ranks has saved, as the last of them.

        Each rank that closes without a save says so; the last removes everything, the claims at the
        end, since an id is free without them. What a store refuses to delete stays.
        """
        if not self.claimed.is_set():
            return
        rank, world_size = self._topology.rank, self._topology.world_size
        with anyio.move_on_after(_REMOVE_SECONDS, shield=True), contextlib.suppress(StoreError):
            ballot = Ballot(self._backend, self.attempt, "unsaved", rank, world_size)
            if await ballot.cast(0) is not None:
                below = f"{ATTEMPTS}{self.id}/"
                keys = [each.key async for each in self._backend.list(below)]
                claims = [key for key in keys if key.startswith(f"{below}claim-")]
                await self._backend.delete([key for key in keys if key not in set(claims)])
                await self._backend.delete(claims)

    async def _put_claim(self) -> None:
        key = claim_key(self.id, self._topology.rank)
        try:
            await self._backend.put(key, self._claim, PutMode.CREATE)
        except ObjectExists:
            # It may be ours, if an answer was lost.
            if await self._backend.get(key, max_bytes=_MAX_BYTES) != self._claim:
                raise AttemptReused(
                    f"The attempt id {self.id!r} was used here before",
                    rank=self._topology.rank,
                    hint="Give every launch and restart an id of its own, or none to have one "
                    "made up",
                ) from None


async def draft_launch(
    backend: Backend, attempt_id: str | None, topology: Topology, meeting: Meeting | None = None
) -> Launch:
    """Find the name of a launch by reading alone.

    Its start is later than that of every attempt on the root, even if this machine's clock is
    behind.

    Args:
        backend: The store.
        attempt_id: The user's own id; None for a random one.
        topology: This rank, and how many there are.
        meeting: How several ranks that were given no id agree on one; rank 0 makes it up.

    Raises:
        SettingsError: If the id has characters that names cannot have.
        UnsupportedTopology: If ranks did not come to the meeting in time.
        StoreError: If the store failed.
    """
    if attempt_id is None and meeting is not None and topology.rank:
        name = await anyio.to_thread.run_sync(meeting.join, abandon_on_cancel=True)
        return Launch(backend, name, topology)
    chosen = attempt_id or secrets.token_hex(4)
    try:
        attempt_name(datetime.now(UTC), chosen)
    except ValueError as error:
        raise SettingsError(f"attempt_id is no name: {error}") from error
    name = attempt_name(await _after_all_others(backend), chosen)
    if attempt_id is None and meeting is not None:
        await anyio.to_thread.run_sync(meeting.host, name, abandon_on_cancel=True)
    shares_start = attempt_id is not None and topology.world_size > 1
    return Launch(backend, name, topology, shares_start=shares_start)


def unclaimed_attempt() -> str:
    """Name an attempt that never writes, and so is nowhere on the store."""
    return attempt_name(datetime.now(UTC), secrets.token_hex(4))


async def _start(backend: Backend, attempt_id: str) -> datetime | None:
    key = attempt_start_key(attempt_id)
    try:
        data = await backend.get(key, max_bytes=_MAX_BYTES)
    except ObjectNotFound:
        return None
    try:
        return datetime.strptime(json.loads(data)["started"], _FORMAT).replace(tzinfo=UTC)
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidManifest("The start of the attempt cannot be read", key=key) from error


async def _agree_on_start(backend: Backend, attempt: str) -> str:
    """Take the start that the first rank has written; the name with it."""
    started, chosen = attempt_parts(attempt)
    found = await _start(backend, chosen)
    if found is None:
        key = attempt_start_key(chosen)
        body = json.dumps({"started": started.strftime(_FORMAT)}).encode()
        with contextlib.suppress(ObjectExists):
            await backend.put(key, body, PutMode.CREATE)
            return attempt
        found = await _start(backend, chosen)
        if found is None:
            raise InvalidManifest("The start of the attempt was deleted", key=key)
    return attempt_name(found, chosen)


async def _after_all_others(backend: Backend) -> datetime:
    now = datetime.now(UTC)
    for attempt in sorted({info.attempt for info in await discover(backend)}, reverse=True):
        # What spells no date is not ckpipe's, and neither is what nothing can come after.
        with contextlib.suppress(ValueError, OverflowError):
            return max(now, attempt_parts(attempt)[0] + timedelta(milliseconds=1))
    return now
