"""The name of a launch: unique for each start and restart, and claimed so that it stays so."""

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
from ckpipe.format.names import attempt_start_key, claim_key, launch_id
from ckpipe.ranks.meeting import Meeting
from ckpipe.types import attempt_name, attempt_parts

_FORMAT = "%Y%m%dT%H%M%S%f"
_MAX_BYTES = 4096
_REMOVE_SECONDS = 5.0


async def open_attempt(
    backend: Backend, attempt_id: str | None, *, rank: int, meeting: Meeting | None = None
) -> str:
    """Claims an attempt for a rank and returns its name, which begins with its start time.

    All ranks that give the same id agree on one start: the first of them writes it. The start is
    later than that of every attempt on the root, even if this machine's clock is behind.

    Args:
        backend: The store.
        attempt_id: The user's own id; None for a random one.
        rank: The rank that claims.
        meeting: How several ranks that were given no id agree on one; rank 0 makes it up.

    Raises:
        AttemptReused: If this rank has claimed the attempt before.
        SettingsError: If the id has characters that names cannot have.
        UnsupportedTopology: If ranks did not come to the meeting in time.
        StoreError: If the store failed.
    """
    if attempt_id is None and meeting is not None and rank:
        name = await anyio.to_thread.run_sync(meeting.join, abandon_on_cancel=True)
    else:
        name = await _named(backend, attempt_id)
        if attempt_id is None and meeting is not None:
            await anyio.to_thread.run_sync(meeting.host, name, abandon_on_cancel=True)
    await _claim(backend, launch_id(name), rank)
    return name


def unclaimed_attempt() -> str:
    """The name of an attempt that never writes, and so is nowhere on the store."""
    return attempt_name(datetime.now(UTC), secrets.token_hex(4))


async def remove_claim(backend: Backend, attempt: str) -> None:
    """Remove what a launch of one rank left that has saved nothing, as far as the store lets it."""
    chosen = launch_id(attempt)
    with anyio.move_on_after(_REMOVE_SECONDS, shield=True), contextlib.suppress(StoreError):
        await backend.delete([claim_key(chosen, 0), attempt_start_key(chosen)])


async def _named(backend: Backend, attempt_id: str | None) -> str:
    chosen = attempt_id or secrets.token_hex(4)
    try:
        attempt_name(datetime.now(UTC), chosen)
    except ValueError as error:
        raise SettingsError(f"attempt_id is no name: {error}") from error
    # Of many ranks that give one id, all but the first few find the start without a list.
    started = await _start(backend, chosen) if attempt_id else None
    return attempt_name(started or await _agree_on_start(backend, chosen), chosen)


async def _claim(backend: Backend, chosen: str, rank: int) -> None:
    key = claim_key(chosen, rank)
    claim = json.dumps({"token": secrets.token_hex(16)}).encode()
    try:
        await backend.put(key, claim, PutMode.CREATE)
    except StoreError as error:
        # The answer may have been lost: a claim with our token is ours, whatever was said.
        if await _found(backend, key) == claim:
            return
        if not isinstance(error, ObjectExists):
            raise
        raise AttemptReused(
            f"The attempt id {chosen!r} was used here before",
            rank=rank,
            hint="Give every launch and restart an id of its own, or none to have one made up",
        ) from None


async def _found(backend: Backend, key: str) -> bytes | None:
    try:
        return await backend.get(key, max_bytes=_MAX_BYTES)
    except StoreError:
        return None


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


async def _agree_on_start(backend: Backend, attempt_id: str) -> datetime:
    key = attempt_start_key(attempt_id)
    started = await _after_all_others(backend)
    body = json.dumps({"started": started.strftime(_FORMAT)}).encode()
    with contextlib.suppress(ObjectExists):
        await backend.put(key, body, PutMode.CREATE)
        return started
    found = await _start(backend, attempt_id)
    if found is None:
        raise InvalidManifest("The start of the attempt was deleted", key=key)
    return found


async def _after_all_others(backend: Backend) -> datetime:
    now = datetime.now(UTC)
    for attempt in sorted({info.attempt for info in await discover(backend)}, reverse=True):
        # What spells no date is not ckpipe's, and neither is what nothing can come after.
        with contextlib.suppress(ValueError, OverflowError):
            return max(now, attempt_parts(attempt)[0] + timedelta(milliseconds=1))
    return now
