"""How the ranks of one launch agree on its name: a handshake through a ``torch.distributed`` store.

Theory. A store and the ids in a launcher's environment may survive a restart, so nothing in them
proves that two processes belong to the same launch. A fresh random number does. Rank 0 writes a
*call* that nobody can have seen before. Every other rank answers the call with a random *hello*
of its own, under a key that holds the call, so that no answer to an older call is taken for one
to this. Rank 0 publishes the name of the attempt with the list of hellos it found, and a rank
takes the name only from a list that has its own hello in its own place. A rank that read the call
of an earlier launch finds a list without its own hello, or none, and waits until there is another
call. No collective is used, and no process group.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable
from datetime import timedelta
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ckpipe.errors import UnsupportedTopology
from ckpipe.ranks.topology import Topology

if TYPE_CHECKING:
    from ckpipe.settings import Settings

Store = Any
"""A ``torch.distributed.Store``; torch's type hints lack parts of it."""

_PREFIX = "ckpipe/meeting"
_SLICE_SECONDS = 1.0
_PAUSE_SECONDS = 0.02
_MOST_NAMED = 20


def default_store() -> Store | None:
    """The store of the default process group, with a connection of its own; None without one.

    A request that waits holds its connection, which a process group may need at the same time.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    store: Store = dist.distributed_c10d._get_default_store()
    return store.clone()


def arrange_meeting(topology: Topology, settings: Settings) -> Meeting | None:
    """How the ranks agree on an attempt; None if there is nothing to agree on. Blocking.

    Raises:
        UnsupportedTopology: If there are several ranks and they have no way to.
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
    return Meeting(store, topology, settings.url or "", settings.meeting_timeout_seconds)


def agreeing_store(topology: Topology, settings: Settings, attempt: str) -> Store | None:
    """Find where ranks that load agree: a Store below a prefix that only this pipeline has.

    Ranks that have not met at open, since they were given a name or need none, meet here. Blocking.

    Returns:
        The Store; None without ``torch.distributed``.

    Raises:
        UnsupportedTopology: If ranks did not come in time.
    """
    store = default_store()
    if store is None:
        return None
    if not _meets_at_open(settings):
        seconds, url = settings.meeting_timeout_seconds, f"{settings.url} load"
        meeting = Meeting(store, topology, url, seconds, "load the newest checkpoint here")
        if topology.rank:
            attempt = meeting.join()
        else:
            attempt = secrets.token_hex(8)
            meeting.host(attempt)
    return _below(f"ckpipe/agreed/{attempt}", store)


def _meets_at_open(settings: Settings) -> bool:
    return settings.attempt_id is None and not settings.read_only


def _below(prefix: str, store: Store) -> Store:
    # Imported only here, where a Store proves that this torch has torch.distributed at all.
    from torch._C._distributed_c10d import PrefixStore

    return PrefixStore(prefix, store)


class Meeting:
    """One handshake; its methods block, and every rank calls one of them.

    Args:
        store: What all ranks can reach.
        topology: This rank and how many there are.
        url: The root, spelt alike on all ranks, so that meetings for two roots stay apart.
        timeout_seconds: How long to wait for the others.
        what: What all ranks do alike, for errors.
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
        self._store = _below(f"{_PREFIX}/{topic}", store)
        self._rank, self._world_size = topology.rank, topology.world_size
        self._seconds, self._what = timeout_seconds, what
        self._until = time.monotonic() + timeout_seconds

    def host(self, attempt: str) -> None:
        """Gives all other ranks the name of the attempt; for rank 0.

        Raises:
            UnsupportedTopology: If ranks did not come in time; names them.
        """
        call = secrets.token_hex(8)
        self._store.set("call", call)
        others = range(1, self._world_size)
        keys = [_hello_key(call, rank) for rank in others]
        if not self._wait_for(keys):
            missing = [rank for rank, key in zip(others, keys, strict=True) if not self._has(key)]
            raise self._late(f"Ranks {_shown(missing)} did not {self._what}")
        hellos = ["", *(self._store.get(key).decode() for key in keys)]
        self._store.set(_list_key(call), json.dumps({"attempt": attempt, "hellos": hellos}))

    def join(self) -> str:
        """Gets the name of the attempt from rank 0; for all other ranks.

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
        hello = secrets.token_hex(8)
        self._store.set(_hello_key(call, self._rank), hello)
        while not self._wait_for([_list_key(call)], _SLICE_SECONDS):
            over = self._store.get("call").decode() != call
            # Rank 0 may have opened one pipeline and called for the next since; the list of the
            # first is there before it does.
            if (over and not self._has(_list_key(call))) or self._left() <= 0:
                return None
        published = json.loads(self._store.get(_list_key(call)))
        hellos = published["hellos"]
        mine = self._rank < len(hellos) and hellos[self._rank] == hello
        return str(published["attempt"]) if mine else None

    def _wait_for(self, keys: Iterable[str], seconds: float | None = None) -> bool:
        """Waits until all keys are there; False if they are not in time."""
        limit = max(0.001, self._left() if seconds is None else min(seconds, self._left()))
        wanted, began = list(keys), time.monotonic()
        if not wanted:
            return True
        try:
            self._store.wait(wanted, timedelta(seconds=limit))
        except RuntimeError as error:
            # Stores have no error of their own for a time that is over.
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


def _hello_key(call: str, rank: int) -> str:
    return f"{call}/hello/{rank}"


def _list_key(call: str) -> str:
    return f"{call}/list"


def _shown(ranks: list[int]) -> str:
    more = len(ranks) - _MOST_NAMED
    named = ", ".join(map(str, ranks[:_MOST_NAMED]))
    return f"{named} and {more} more" if more > 0 else named
