"""Retention against a model: any history, any crash, and a healer and a pruner step by step."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ckpipe.backend import PutMode
from ckpipe.catalog.catalog import Catalog
from ckpipe.catalog.complete import publish_up, repaired
from ckpipe.catalog.delete import delete, pin
from ckpipe.catalog.find import discover
from ckpipe.catalog.leases import Lease
from ckpipe.catalog.summaries import Summaries
from ckpipe.errors import CheckpointIncomplete, CheckpointNotFound, UsageError
from ckpipe.format.codec import encode_document
from ckpipe.format.labels import encode_float
from ckpipe.format.manifest import ManifestDocument
from ckpipe.format.names import index_key, manifest_key, pin_key, prefix, tombstone_key
from ckpipe.retention import KeepBest, KeepEvery, KeepLast, Rule
from ckpipe.testing import FaultyBackend, Landing, MemoryBackend
from ckpipe.testing.wrappers import Operation, WrappedBackend
from ckpipe.types import CheckpointId
from tests.inner.made_up_ranks import manifest_of
from tests.support.sampling import EVERY, sample

DAY = timedelta(days=1)
NOW = datetime(2025, 2, 1, tzinfo=UTC)
RULES = [
    KeepLast(1),
    KeepLast(2) | KeepBest("loss"),
    KeepEvery(steps=2) & KeepLast(3),
    KeepBest("loss", "max", 2),
]
T = TypeVar("T")
Action = tuple[Any, ...]


class Crash(BaseException):
    """What ends a process; nobody handles it."""


def manifest(id: CheckpointId, rank: int, loss: float) -> ManifestDocument:
    document = _manifest_of_rank(rank)
    (part,) = document.parts
    return replace(document, id=id, parts=(replace(part, metrics={"loss": encode_float(loss)}),))


@functools.cache
def _manifest_of_rank(rank: int) -> ManifestDocument:
    document, _ = manifest_of({"t": torch.tensor([rank])}, rank, 2)
    return document


@dataclass
class World:
    """A store with a history, and what the model knows of it."""

    store: MemoryBackend = field(default_factory=MemoryBackend)
    attempt: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    complete: set[str] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)
    pinned: set[str] = field(default_factory=set)
    leases: dict[str, Lease] = field(default_factory=dict)

    def next_id(self, step: int) -> CheckpointId:
        attempt = f"202501{self.attempt + 1:02d}T000000000Z-x{self.attempt}"
        key = f"{attempt} {step}"
        self.counts[key] = count = self.counts.get(key, -1) + 1
        return CheckpointId(attempt, step, count)

    def newest(self) -> str | None:
        ids = [each for each in map(CheckpointId.parse, self.complete) if each is not None]
        return str(max(ids)) if ids else None

    async def save(self, step: int, loss: float, committed: int) -> None:
        """Save with two ranks, of which so many commit; the index may be left to a healer."""
        id = self.next_id(step)
        for rank in range(2):
            await self.store.put(f"{id}/rank-{rank:05d}.safetensors", b"x", PutMode.CREATE)
            if rank < min(committed, 2):
                data = encode_document(manifest(id, rank, loss))
                await self.store.put(manifest_key(id, rank), data, PutMode.CREATE)
        if committed == 3:
            await publish_up(self.store, id, 1, 2)
            self.complete.add(str(id))

    async def heal(self) -> None:
        """What anybody does who lists the root."""
        found = await repaired(self.store, await discover(self.store))
        self.complete |= {each.id for each in found if each.complete}
        await self.check()

    async def prune(self, rule: Rule, crash: tuple[int, Landing] | None) -> bool:
        """Prune, and die in the middle or tell what was done; return whether it came through."""
        faulty = FaultyBackend(self.store)
        planned = await Catalog(self.store, rule).prune(now=datetime.now(UTC), dry_run=True)
        if crash is not None:
            faulty.fail(Crash(), crash[0], crash[1])
        through = False
        try:
            done = await Catalog(faulty, rule).prune()
            assert (done.keep, done.remove) == (planned.keep, planned.remove), "as the dry run said"
            again = await Catalog(self.store, rule).prune(now=datetime.now(UTC), dry_run=True)
            assert again.remove == (), "twice is as good as once"
            assert set(again.keep) == set(planned.keep)
            through = True
        except* Crash:  # in a task of its own or not
            pass
        now = {each.id for each in await discover(self.store) if each.complete}
        assert set(planned.keep) <= now <= self.complete
        assert self.newest() in now or self.newest() is None, "the newest complete one stays"
        assert now >= self.pinned & self.complete
        assert now >= self.leases.keys() & self.complete
        self.deleted |= self.complete - now
        self.complete = now
        return through

    async def lease(self, name: str) -> None:
        self.leases[name] = Lease(self.store, name)
        await self.leases[name].renew()

    async def check(self) -> None:
        now = {each.id for each in await discover(self.store) if each.complete}
        assert now == self.complete
        assert not now & self.deleted, "what was deleted does not come back"

    async def check_deleted(self) -> None:
        keys = [each.key async for each in self.store.list("")]
        left = {key.partition("/")[0].removesuffix(".json") for key in keys}
        assert not left & self.deleted, "no file of a deleted one is left"

    async def choose(self, number: int) -> str | None:
        names = sorted(self.complete)
        return names[number % len(names)] if names else None


LOSSES = st.sampled_from([0.5, 1.0, 2.0, float("nan"), float("inf")])
CRASHES = st.none() | st.tuples(st.integers(1, 30), st.sampled_from(list(Landing)))
ACTIONS = st.one_of(
    st.tuples(st.just("save"), st.integers(0, 5), LOSSES, st.sampled_from([3, 3, 3, 2, 1, 0])),
    st.tuples(st.just("prune"), st.sampled_from(RULES), CRASHES),
    st.tuples(st.sampled_from(["heal", "restart"])),
    st.tuples(st.sampled_from(["pin", "unpin", "lease", "release"]), st.integers(0, 9)),
)


async def act(world: World, action: Action) -> None:
    kind = action[0]
    if kind == "save":
        await world.save(*action[1:])
    elif kind == "prune":
        await world.prune(*action[1:])
    elif kind == "heal":
        await world.heal()
    elif kind == "restart":
        world.attempt += 1
    else:
        name = await world.choose(action[1])
        id = CheckpointId.parse(name or "")
        if name is None or id is None:
            return
        if kind == "pin":
            await pin(world.store, id)
            world.pinned.add(name)
        elif kind == "unpin":
            await Catalog(world.store).unpin(str(id))
            world.pinned.discard(name)
        elif kind == "lease" and name not in world.leases:
            await world.lease(name)
        elif kind == "release" and name in world.leases:
            await world.leases.pop(name).release()


@hypothesis_settings(max_examples=1000 if EVERY else 40)
@given(st.lists(ACTIONS, min_size=3, max_size=25))
async def test_any_history_keeps_what_it_should(actions: list[Action]) -> None:
    world = World()
    for action in actions:
        await act(world, action)
    await world.heal()
    await world.prune(KeepLast(1), None)
    await world.heal()
    await world.check_deleted()


LASTING = [KeepLast(1), KeepEvery(steps=2) | KeepBest("loss"), KeepLast(2) | KeepBest("loss", n=2)]
"""Rules that keep the same of what is left when some of the others are gone."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("landing", list(Landing))
@hypothesis_settings(max_examples=4)
@given(st.data())
async def test_a_crash_of_a_prune_at_any_operation_is_made_good(
    landing: Landing, data: st.DataObject
) -> None:
    losses = data.draw(st.lists(LOSSES, min_size=2, max_size=5))
    leased, rule = data.draw(st.integers(0, len(losses) - 1)), data.draw(st.sampled_from(LASTING))
    for number in range(1, 200):
        world = World()
        for step, loss in enumerate(losses):
            await world.save(step, loss, 3)
        await world.lease(sorted(world.complete)[leased])
        planned = await Catalog(world.store, rule).prune(now=NOW, dry_run=True)
        through = await world.prune(rule, (number, landing))
        await world.prune(rule, None)
        assert world.complete == set(planned.keep), "what was planned is what happens"
        await world.check_deleted()
        if through:
            return
    raise AssertionError("it never got through")


class Stepped(WrappedBackend):
    """One process's way to the store, which can be stopped at an operation.

    Args:
        inner: The store.
        stop: The number of the operation to stop at, from 1.
        landing: Before it or after it has landed.
    """

    def __init__(self, inner: MemoryBackend, stop: int, landing: Landing) -> None:
        super().__init__(inner)
        self._left, self._landing = stop, landing
        self.stopped, self.go_on = asyncio.Event(), asyncio.Event()

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        self._left -= 1
        here = self._left == 0
        if here and self._landing is Landing.BEFORE:
            await self._wait()
        result = await call()
        if here and self._landing is Landing.AFTER:
            await self._wait()
        return result

    async def _wait(self) -> None:
        self.stopped.set()
        await self.go_on.wait()


async def run_until_stopped(backend: Stepped, work: Awaitable[object]) -> asyncio.Task[object]:
    """Start a process and let it run until it stops or is through."""
    task = asyncio.ensure_future(work)
    stop = asyncio.ensure_future(backend.stopped.wait())
    await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    return task


async def raced(race: Callable[..., Awaitable[None]], cases: Iterable[Any], count: int) -> None:
    """Run a race in a sample of its cases."""
    for case in sample(cases, count):
        try:
            await race(*case)
        except BaseException as error:
            error.add_note(f"in the case {case}")
            raise


FULL = CheckpointId("20250101T000000000Z-x0", 1, 0)
"""What lacks nothing but its index."""


async def race(stops: tuple[int, int], landings: tuple[Landing, Landing], first: str) -> None:
    """A healer and somebody who deletes, each stopped once in the middle of what it does."""
    world = World()
    await world.save(1, 1.0, 2)
    await world.save(2, 1.0, 3)
    healer = Stepped(world.store, stops[0], landings[0])
    pruner = Stepped(world.store, stops[1], landings[1])

    async def heal() -> None:
        await repaired(healer, await discover(healer))

    async def remove_both() -> None:
        # One may be complete by then, and retention deletes it; one that is not, a sweep does.
        await Catalog(pruner, KeepLast(1)).prune()
        await delete(pruner, FULL, force=True)

    work = {"healer": (healer, heal()), "pruner": (pruner, remove_both())}
    assert set((await both(work, first, False, world.store)).values()) == {None}
    keys = {each.key async for each in world.store.list("")}
    assert index_key(FULL) not in keys, "an index must not outlive the tombstone"
    seen = {
        each.id
        for each in await repaired(world.store, await discover(world.store))
        if each.complete
    }
    assert seen == world.complete, "the deleted one is not complete, whoever looks"
    await Catalog(world.store, KeepLast(1)).prune()
    keys = {each.key async for each in world.store.list("")}
    assert not [key for key in keys if key.startswith(prefix(FULL))]
    assert tombstone_key(FULL) in keys


async def test_a_healer_that_races_a_pruner_revives_nothing() -> None:
    every = itertools.product(
        itertools.product(range(1, 17), repeat=2),
        itertools.product(Landing, repeat=2),
        ("healer", "pruner"),
    )
    await raced(race, every, 30)


async def prune_twice(first: int, second: int, turns: int) -> None:
    """Two who prune in one process, each stopped once; the second goes on some turns later."""
    world, known = World(), Summaries()
    for step in range(3):
        await world.save(step, 1.0, 3)
    catalog = Catalog(world.store, KeepLast(1), summaries=known)
    await catalog.prune(now=datetime.now(UTC), dry_run=True)
    pruners = [Stepped(world.store, stop, Landing.AFTER) for stop in (first, second)]
    tasks = [
        await run_until_stopped(each, Catalog(each, KeepLast(1), summaries=known).prune(now=NOW))
        for each in pruners
    ]
    pruners[0].go_on.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    pruners[1].go_on.set()
    await asyncio.gather(*tasks)
    left = {each.id for each in await discover(world.store) if each.complete}
    assert left == {world.newest()} == set(known.known)


async def test_two_who_prune_at_once_do_not_miss_what_the_other_has_forgotten() -> None:
    stops = range(1, 13) if EVERY else (1, 8)
    await raced(prune_twice, itertools.product(stops, stops, range(14)), 20)


async def both(
    work: Mapping[str, tuple[Stepped, Awaitable[object]]], first: str, between: bool, store: Any
) -> dict[str, BaseException | None]:
    """Two, each stopped once, and perhaps a third who prunes while both are; how the two ended."""
    order = [first, *(name for name in work if name != first)]
    tasks = {name: await run_until_stopped(*work[name]) for name in order}
    if between:
        await Catalog(store, KeepLast(1)).prune(now=NOW)
    ended = {}
    for name in order:
        work[name][0].go_on.set()
        await asyncio.wait([tasks[name]])
        ended[name] = tasks[name].exception()
    return ended


async def with_three() -> tuple[World, CheckpointId]:
    """Three checkpoints, and the oldest, which is to go."""
    world = World()
    for step in range(3):
        await world.save(step, 1.0, 3)
    oldest = CheckpointId.parse(min(world.complete))
    assert oldest is not None
    return world, oldest


async def left_of(store: MemoryBackend, id: CheckpointId) -> set[str]:
    return {each.key async for each in store.list("") if str(id) in each.key}


async def pin_beside(
    stops: tuple[int, int], landings: tuple[Landing, Landing], first: str, between: bool, by: str
) -> None:
    """Somebody pins what another removes: it stays if he was told so, and else it goes."""
    world, id = await with_three()
    whole = await left_of(world.store, id)
    pinner = Stepped(world.store, stops[0], landings[0])
    remover = Stepped(world.store, stops[1], landings[1])
    removing = (
        Catalog(remover).delete(str(id))
        if by == "rm"
        else Catalog(remover, KeepLast(1)).prune(now=NOW)
    )
    work = {"pin": (pinner, pin(pinner, id)), "remove": (remover, removing)}
    ended = await both(work, first, between, world.store)
    assert isinstance(ended["remove"], None | UsageError | CheckpointNotFound)
    assert isinstance(ended["pin"], None | CheckpointIncomplete)
    for _ in range(2):
        await Catalog(world.store, KeepLast(1)).prune(now=NOW)
    pinned = ended["pin"] is None
    complete = {each.id: each for each in await discover(world.store) if each.complete}
    assert complete.keys() == ({str(id)} if pinned else set()) | {world.newest()}
    expected = {*whole, pin_key(id)} if pinned else {tombstone_key(id)}
    assert await left_of(world.store, id) == expected


async def test_a_removal_sees_a_pin_that_succeeds() -> None:
    every = itertools.product(
        itertools.product(range(1, 9), range(1, 23)),
        itertools.product(Landing, Landing),
        ("pin", "remove"),
        (False, True),
        ("prune", "rm"),
    )
    await raced(pin_beside, every, 60)


async def pin_beside_two(first_stop: int, second_stop: int, pin_stop: int) -> None:
    """The same where two others remove it; the first goes on when the second is done."""
    world, id = await with_three()
    whole = await left_of(world.store, id)
    stops = (first_stop, second_stop, pin_stop)
    backends = [Stepped(world.store, stop, Landing.BEFORE) for stop in stops]
    *pruners, pinner = backends
    work = [Catalog(each, KeepLast(1)).prune() for each in pruners]
    first, second = [await run_until_stopped(*each) for each in zip(pruners, work, strict=True)]
    pinning = await run_until_stopped(pinner, pin(pinner, id))
    for backend, task in zip(backends[1::-1], (second, first), strict=True):
        backend.go_on.set()
        await task
    pinner.go_on.set()
    await asyncio.wait([pinning])
    await Catalog(world.store, KeepLast(1)).prune()
    expected = {tombstone_key(id)} if pinning.exception() else {*whole, pin_key(id)}
    assert await left_of(world.store, id) == expected


async def test_a_pin_is_seen_by_two_who_remove_at_once() -> None:
    every = itertools.product(range(5, 17), range(5, 17), range(1, 8))
    await raced(pin_beside_two, every, 60)


async def force_beside(
    stops: tuple[int, int], landings: tuple[Landing, Landing], first: str
) -> None:
    """Somebody removes a pinned checkpoint by force, and another prunes: it is gone for good."""
    world, id = await with_three()
    await pin(world.store, id)
    remover = Stepped(world.store, stops[0], landings[0])
    pruner = Stepped(world.store, stops[1], landings[1])
    pruning = Catalog(pruner, KeepLast(1)).prune(now=NOW)
    work = {
        "remove": (remover, Catalog(remover).delete(str(id), force=True)),
        "prune": (pruner, pruning),
    }
    assert set((await both(work, first, False, world.store)).values()) == {None}
    assert await left_of(world.store, id) == {tombstone_key(id)}


async def test_what_is_removed_by_force_is_not_kept_by_its_pin() -> None:
    every = itertools.product(
        itertools.product(range(1, 14), range(1, 23)),
        itertools.product(Landing, Landing),
        ("remove", "prune"),
    )
    await raced(force_beside, every, 40)
