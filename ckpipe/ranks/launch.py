"""The launch that a process belongs to: its name, and the names of its checkpoints.

The name is unique for each start and restart, and claimed before the first write. It is made at
open by reads alone, and begins with a time that is later than that of every checkpoint on the root.
The claim is a create-only object of each rank. So the reuse of an id is noticed before a checkpoint
is written, and before an agreement of another launch is mistaken for one of this launch. A launch
writes at most one object before its claims: if ranks have an id from the user, the first of them
creates an object with the start, and all ranks use that start.

Ranks find the name by a rendezvous through a ``torch.distributed`` store. A store and the ids in a
launcher's environment may survive a restart, so they do not prove that two processes belong to the
same launch. A fresh random number does. Rank 0 writes a *call* that no process can have seen
before. Every other rank answers the call with a random *hello* of its own, under a key that
contains the call, so an answer to an older call cannot be mistaken for one to this call. Rank 0
publishes the name of the attempt with the list of the hellos that it found. A rank takes the name
only from a list that has its own hello at its own index. A rank that has read the call of an
earlier launch finds a list without its own hello, or no list, and waits for another call. No
collective is used, and no process group.

The newest checkpoint is the one with the greatest (attempt, step, count). So after a launch resumes
from step 500, the step 1000 of the earlier launch is older than its checkpoints. The same must hold
if one launch goes back, by a load, from step 1000 to step 500: a restart must find, and retention
must keep, the saves after the rollback. So after it the attempt begins a millisecond later, under
the same id. That needs no clock and no store, and it is the same on all ranks that see it. It is
still earlier than the next launch, which begins after all attempts on the root.

A save is a rollback if its step is less than a saved step, and there was a load in between. Steps
that are saved in another order are no rollback. A repeated save of a step increments its count.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Collection, Iterable
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import torch.distributed as dist

from ckpipe.backend import Backend
from ckpipe.catalog.find import discover
from ckpipe.errors import (
    AttemptReused,
    SettingsError,
    StoreError,
    UnsupportedTopology,
)
from ckpipe.format.names import ATTEMPTS, attempt_start_key, claim_key, launch_id
from ckpipe.ranks.agree import Vote, create_decision, read_decision
from ckpipe.ranks.world import Topology, group_topology
from ckpipe.store.retry import create_once
from ckpipe.types import CheckpointId, CheckpointInfo, attempt_name, attempt_parts, first_of

if TYPE_CHECKING:
    from ckpipe.settings import Settings


Store = Any
"""A ``torch.distributed.Store``; torch's type hints lack some of its methods."""

_PREFIX = "ckpipe/meeting"
_SLICE_SECONDS = 1.0
_PAUSE_SECONDS = 0.02


def default_store() -> Store | None:
    """Return the store of the default process group, or None without one.

    It has a connection of its own: a blocking request occupies its connection, which the process
    group may need at the same time.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    store: Store = dist.distributed_c10d._get_default_store()
    return store.clone()


def arrange_meeting(topology: Topology, settings: Settings) -> Rendezvous | None:
    """Make the rendezvous at which ranks agree on an attempt; None if they need none. Blocking.

    Raises:
        UnsupportedTopology: If several ranks must agree and have no store to do so.
    """
    if topology.world_size == 1 or not _meets_at_open(settings):
        return None
    store = default_store()
    if store is None:
        raise UnsupportedTopology(
            f"This program runs on {topology.world_size} ranks, and they have no way to agree on "
            "a name for this launch",
            rank=topology.rank,
            hint="Call torch.distributed.init_process_group before opening the pipeline, or give "
            "all ranks the same attempt_id, a new one for every launch. To save from one rank "
            "alone, set solo=True there",
        )
    return Rendezvous(store, topology, settings.url or "", settings.meeting_timeout_seconds)


def agreeing_store(topology: Topology, settings: Settings, attempt: str) -> Store | None:
    """Return the Store for agreements of loads, below a prefix that only this pipeline uses.

    Ranks without a rendezvous at open, since they were given a name or need none, have one here.
    Blocking.

    Returns:
        The Store; None if there is no process group of these ranks.

    Raises:
        UnsupportedTopology: If some ranks did not join in time.
    """
    # Ranks that the program has named may have joined a group of others.
    store = default_store() if group_topology() == topology else None
    if store is None:
        return None
    if not _meets_at_open(settings):
        seconds, url = settings.meeting_timeout_seconds, f"{settings.url} load"
        meeting = Rendezvous(store, topology, url, seconds, "load the newest checkpoint here")
        if topology.rank:
            attempt = meeting.join()
        else:
            attempt = secrets.token_hex(8)
            meeting.host(attempt)
    return below(f"ckpipe/agreed/{attempt}", store)


def _meets_at_open(settings: Settings) -> bool:
    return settings.attempt_id is None and not settings.read_only


def below(prefix: str, store: Store) -> Store:
    """Return a store that keeps its keys below a prefix of another one."""
    # Imported only here: the Store proves that this torch has torch.distributed.
    from torch._C._distributed_c10d import PrefixStore

    return PrefixStore(prefix, store)


class Rendezvous:
    """One rendezvous; its methods block, and every rank calls one of them.

    Args:
        store: The store that all ranks can reach.
        topology: This rank and the world size.
        url: The root, spelt alike on all ranks; it keeps the rendezvous of two roots apart.
        timeout_seconds: Seconds to wait for the other ranks at most.
        what: The action of all ranks, for errors.
    """

    def __init__(
        self,
        store: Store,
        topology: Topology,
        url: str,
        timeout_seconds: float,
        what: str = "open a pipeline here",
    ) -> None:
        topic = sha256(url.encode()).hexdigest()[:16]
        self._store = below(f"{_PREFIX}/{topic}", store)
        self._rank, self._world_size = topology.rank, topology.world_size
        self._seconds, self._what = timeout_seconds, what
        self._until = time.monotonic() + timeout_seconds

    def host(self, attempt: str) -> None:
        """Publish the name of the attempt to all other ranks; for rank 0.

        Raises:
            UnsupportedTopology: If some ranks did not join in time; names them.
        """
        call = secrets.token_hex(8)
        self._store.set("call", call)
        others = range(1, self._world_size)
        keys = [f"{call}/hello/{rank}" for rank in others]
        if not self._wait_for(keys):
            missing = [rank for rank, key in zip(others, keys, strict=True) if not self._has(key)]
            raise self._late(f"Ranks {first_of(missing)} did not {self._what}")
        hellos = ["", *(self._store.get(key).decode() for key in keys)]
        self._store.set(f"{call}/list", json.dumps({"attempt": attempt, "hellos": hellos}))

    def join(self) -> str:
        """Get the name of the attempt from rank 0; for all other ranks.

        Raises:
            UnsupportedTopology: If rank 0 did not publish one for this rank in time.
        """
        refused: set[str] = set()
        while self._wait_for(["call"]):
            call = self._store.get("call").decode()
            if call not in refused:
                attempt = self._answer(call)
                if attempt is not None:
                    return attempt
                refused.add(call)
            time.sleep(_PAUSE_SECONDS)
            if self._left() <= 0:
                break
        raise self._late(f"Rank 0 did not {self._what}, or not together with this rank")

    def _answer(self, call: str) -> str | None:
        hello, listed = secrets.token_hex(8), f"{call}/list"
        self._store.set(f"{call}/hello/{self._rank}", hello)
        while not self._wait_for([listed], _SLICE_SECONDS):
            over = self._store.get("call").decode() != call
            # Rank 0 may have opened this pipeline and written the call of the next one meanwhile.
            # The list of the first exists before that.
            if (over and not self._has(listed)) or self._left() <= 0:
                return None
        published = json.loads(self._store.get(listed))
        hellos = published["hellos"]
        mine = self._rank < len(hellos) and hellos[self._rank] == hello
        return str(published["attempt"]) if mine else None

    def _wait_for(self, keys: Iterable[str], seconds: float | None = None) -> bool:
        """Wait until all keys exist; False if they do not in time."""
        limit = max(0.001, self._left() if seconds is None else min(seconds, self._left()))
        wanted, began = list(keys), time.monotonic()
        if not wanted:
            return True
        try:
            self._store.wait(wanted, timedelta(seconds=limit))
        except RuntimeError as error:
            # Stores have no error class of their own for a timeout.
            if time.monotonic() - began < 0.9 * limit - 0.01:
                raise UnsupportedTopology(
                    f"The ranks cannot agree on an attempt: {error}", rank=self._rank
                ) from error
            return all(self._has(key) for key in wanted)
        return True

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _left(self) -> float:
        return self._until - time.monotonic()

    def _late(self, message: str) -> UnsupportedTopology:
        return UnsupportedTopology(
            f"{message} within {self._seconds:g} s",
            rank=self._rank,
            hint="Open the pipeline on every rank, with the same url, or on one with solo=True",
        )


_FORMAT = "%Y%m%dT%H%M%S%f"
_MAX_BYTES = 4096
_REMOVE_SECONDS = 5.0


class Launch:
    """The name of a launch, and the claim of one of its ranks.

    Args:
        backend: The store.
        attempt: The name; its start may change with the claim.
        topology: This rank and the world size.
        greatest: Id of the newest of the complete checkpoints of the greatest step at opening, the
            same on all ranks once it is claimed; empty if there were none.
        names: The ids of the complete checkpoints, as far as this rank has listed them.
        shares_start: True if the ranks agree on the start by an object.
    """

    def __init__(
        self,
        backend: Backend,
        attempt: str,
        topology: Topology,
        greatest: str = "",
        names: Collection[str] = (),
        *,
        shares_start: bool = False,
    ) -> None:
        self.attempt, self.greatest, self.names = attempt, greatest, frozenset(names)
        self.id = launch_id(attempt)
        self.claimed = anyio.Event()
        self._backend, self._topology, self._shares_start = backend, topology, shares_start
        # One token for all tries, so that a claim whose answer was lost is recognized.
        self._claim = json.dumps({"token": secrets.token_hex(16)}).encode()
        self._claiming = anyio.Lock()

    async def claim(self) -> str:
        """Claim the id for this rank, once; to be awaited before the first write.

        Returns:
            The name of the attempt, the same on all ranks from now on.

        Raises:
            AttemptReused: If this rank of an earlier launch has claimed the id.
            StoreError: If the store failed or is unsuitable; the call may be repeated.
        """
        async with self._claiming:
            if self.claimed.is_set():
                return self.attempt
            if self._shares_start:
                self.attempt, self.greatest = await _agree_on_start(
                    self._backend, self.attempt, self.greatest
                )
            if any(launch_id(name.rpartition(".")[0]) == self.id for name in self.names):
                raise self._reused()  # copied from another root, which has its claims
            key = claim_key(self.id, self._topology.rank)
            created = await create_once(self._backend, key, self._claim)
            # An existing one may be our own claim, if an answer was lost.
            if not created and await self._backend.get(key, max_bytes=_MAX_BYTES) != self._claim:
                raise self._reused()
            self.claimed.set()
            return self.attempt

    def _reused(self) -> AttemptReused:
        return AttemptReused(
            f"The attempt id {self.id!r} was used here before",
            rank=self._topology.rank,
            hint="Give every launch and restart an id of its own, or leave attempt_id unset",
        )

    async def withdraw(self) -> None:
        """Remove the objects of a launch if none of its ranks has saved.

        Each rank that closes without a save votes; the last removes all objects of the launch, the
        claims at the end, since the id is free without them. Objects that the store refuses to
        delete stay.
        """
        if not self.claimed.is_set():
            return
        rank, world_size = self._topology.rank, self._topology.world_size
        with anyio.move_on_after(_REMOVE_SECONDS, shield=True), contextlib.suppress(StoreError):
            vote = Vote(self._backend, self.attempt, "unsaved", rank, world_size)
            if await vote.cast(0) is not None:
                below = f"{ATTEMPTS}{self.id}/"
                keys = [each.key async for each in self._backend.list(below)]
                claims = [key for key in keys if key.startswith(f"{below}claim-")]
                await self._backend.delete([key for key in keys if key not in set(claims)])
                await self._backend.delete(claims)


async def draft_launch(
    backend: Backend, attempt_id: str | None, topology: Topology, meeting: Rendezvous | None = None
) -> Launch:
    """Make the name of a launch by reads alone.

    Its start is later than that of every attempt on the root, even if this machine's clock is
    behind.

    Args:
        backend: The store.
        attempt_id: The user's own id; None for a random one.
        topology: This rank and the world size.
        meeting: The rendezvous of several ranks without an id, where they get one from rank 0.

    Raises:
        SettingsError: If the id has characters that names cannot have.
        UnsupportedTopology: If some ranks did not join the rendezvous in time.
        StoreError: If the store failed.
    """
    if attempt_id is None and meeting is not None and topology.rank:
        published = await anyio.to_thread.run_sync(meeting.join, abandon_on_cancel=True)
        name, greatest = json.loads(published)
        return Launch(backend, name, topology, greatest)
    chosen = attempt_id or secrets.token_hex(4)
    try:
        attempt_name(datetime.now(UTC), chosen)
    except ValueError as error:
        raise SettingsError(f"attempt_id is no name: {error}") from error
    known = await discover(backend)
    name = attempt_name(_after_all_others(known), chosen)
    complete = {each.id: each.key for each in known if each.complete}
    greatest = max(complete, key=lambda name: (complete[name].step, complete[name]), default="")
    if attempt_id is None and meeting is not None:
        published = json.dumps([name, greatest])
        await anyio.to_thread.run_sync(meeting.host, published, abandon_on_cancel=True)
    shares_start = attempt_id is not None and topology.world_size > 1
    return Launch(backend, name, topology, greatest, complete, shares_start=shares_start)


def unclaimed_attempt() -> str:
    """Make a name for an attempt that never writes."""
    return attempt_name(datetime.now(UTC), secrets.token_hex(4))


async def _agree_on_start(backend: Backend, attempt: str, greatest: str) -> tuple[str, str]:
    """Return the name with the start that the first rank has written, and the greatest it found."""
    started, chosen = attempt_parts(attempt)
    key, what = attempt_start_key(chosen), "The start of the attempt"

    def parse(document: Any) -> tuple[datetime, str]:
        start = datetime.strptime(document["started"], _FORMAT).replace(tzinfo=UTC)
        return start, str(document["greatest"])

    found = await read_decision(backend, key, what, parse)
    document: Any = {"started": started.strftime(_FORMAT), "greatest": greatest}
    decided = found[0] if found else await create_decision(backend, key, what, document, parse)
    return attempt_name(decided[0], chosen), decided[1]


def _after_all_others(known: Iterable[CheckpointInfo]) -> datetime:
    now = datetime.now(UTC)
    for attempt in sorted({info.attempt for info in known}, reverse=True):
        # A name without a date is not ckpipe's, and neither is one with the last possible date.
        with contextlib.suppress(ValueError, OverflowError):
            return max(now, attempt_parts(attempt)[0] + timedelta(milliseconds=1))
    return now


class CheckpointNames:
    """Gives the checkpoints of a launch their names.

    Args:
        attempt: The name of the launch, which may change until it is claimed.
    """

    def __init__(self, attempt: str) -> None:
        self.attempt = attempt
        self._counts: dict[int, int] = {}
        self._furthest = -1
        self.rollbacks = 0
        """Number of rollbacks in this run."""
        self.has_loaded = False
        """True if there was a load since the last save began."""

    def lies_back(self, step: int) -> bool:
        """True if a later step was saved since the run began or last went back."""
        return step < self._furthest

    def go_back(self) -> None:
        """Make all later saves newer than all earlier ones."""
        started, launch = attempt_parts(self.attempt)
        self.attempt = attempt_name(started + timedelta(milliseconds=1), launch)
        self._counts.clear()
        self._furthest = -1
        self.rollbacks += 1

    def count(self, step: int) -> int:
        """Count the saves of a step since the run began or last went back."""
        return self._counts.get(step, 0)

    def name(self, step: int) -> CheckpointId:
        """Return the name of a save that begins now, and count it."""
        id = CheckpointId(self.attempt, step, self.count(step))
        self._counts[step] = id.count + 1
        self._furthest = max(self._furthest, step)
        self.has_loaded = False
        return id
