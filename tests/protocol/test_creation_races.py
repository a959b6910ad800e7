"""Two ranks that come to every object at the very same time: both go on, and by the same one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import ckpipe
from ckpipe.testing import Landing
from ckpipe.testing.wrappers import Operation
from tests.protocol.processes import keys_of
from tests.ranks.test_ranks import is_manifest, state
from tests.support.pipelines import Stores, same
from tests.support.rank_pipelines import ranks
from tests.support.settling import settle
from tests.support.stored_files import ATTEMPTS, DELETED, PINS

T = TypeVar("T")
PATIENCE = 60.0


def kind_of(operation: Operation) -> str | None:
    """What an object is, if both ranks create it."""
    key = operation.key
    if operation.verb != "put":
        return None
    if key == f"{ATTEMPTS}run/start":
        return "start"
    if "/agreed/" in key:
        return key.rpartition("/")[2].partition("-")[0]
    if key.endswith(".json") and "/" not in key:
        return "index"
    kinds = {DELETED: "tombstone", PINS: "pin"}
    return next((kind for prefix, kind in kinds.items() if key.startswith(prefix)), None)


class Crossing:
    """Lets ranks come to an object only together; counts how often they did."""

    def __init__(self) -> None:
        self.met: Counter[str] = Counter()
        self._barriers: dict[str, threading.Barrier] = {}
        self._changing = threading.Lock()

    def at_object(self, operation: Operation) -> None:
        kind = kind_of(operation)
        assert kind is not None
        if self._wait(operation.key) == 0:
            self.met[kind] += 1

    def at_commit(self, operation: Operation) -> None:
        self._wait(f"commit of {operation.key.partition('/')[0]}")

    def _wait(self, name: str) -> int:
        with self._changing:
            barrier = self._barriers.setdefault(name, threading.Barrier(2))
        return barrier.wait(PATIENCE)


def test_two_ranks_race_for_everything_that_is_created_once(store: Stores) -> None:
    crossing = Crossing()
    store.faulty.call(crossing.at_object, lambda each: kind_of(each) is not None, times=None)
    store.faulty.call(crossing.at_commit, is_manifest, Landing.AFTER, times=None)
    with ThreadPoolExecutor(2) as pool, ranks(store.url, 2) as world:

        def both(what: Callable[[int, ckpipe.SyncPipeline], T]) -> list[T]:
            return list(pool.map(what, range(2), world))

        for step in (5, 9, 7):
            ids = both(lambda rank, pipe: pipe.save(state(rank), step=step).wait().id)  # noqa: B023
            assert ids[0] == ids[1]
            both(lambda rank, pipe: settle(pipe))
            loaded = both(lambda rank, pipe: pipe.load())
            for rank, result in enumerate(loaded):
                assert result is not None
                assert (result.id, same(result.state, state(rank))) == (ids[0], True)
        both(lambda rank, pipe: pipe.delete(9, force=True))
        both(lambda rank, pipe: pipe.pin(5))
        found = [(info.step, info.complete, info.pinned) for info in world[0].steps()]
        assert found == [(5, True, True), (7, True, False)]
    assert crossing.met == {"start": 1, "index": 3, "load": 3, "back": 1, "tombstone": 1, "pin": 1}
    # Nobody who comes second writes over the first, or leaves something of its own.
    assert not [key for key in keys_of(store) if "000000000009" in key and "m/" in key]
