"""A store that throttles gets fewer requests at a time, and more again when it can serve them."""

from __future__ import annotations

import heapq
import math
import random
from itertools import chain, repeat
from types import SimpleNamespace

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpipe
from ckpipe import register_backend
from ckpipe.backend import PutMode
from ckpipe.errors import StoreUnavailable, Throttled
from ckpipe.store.registry import Access, open_store
from ckpipe.store.retry import AimdLimiter, pauses
from ckpipe.testing import MemoryBackend

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "succeeded", "failed", "throttled", "tick"]),
        st.integers(0, 100),
        st.none() | st.floats(0, 20),
    ),
    max_size=200,
)


@given(EVENTS)
def test_bounds_whatever_happens(events: list[tuple[str, int, float | None]]) -> None:
    limiter, now = AimdLimiter(), 0.0
    tickets: list[int] = []
    for what, which, seconds in events:
        before = limiter.bound
        if what == "tick":
            now += seconds or 0
        elif what == "begin":
            if limiter.may_begin(now):
                tickets.append(limiter.begin())
                assert len(tickets) <= limiter.bound
        elif tickets:
            ticket = tickets.pop(which % len(tickets))
            if what == "succeeded":
                limiter.succeeded(ticket)
                assert before <= limiter.bound
                assert limiter.bound <= before + 1 or limiter.bound == math.inf
            elif what == "failed":
                limiter.failed()
                assert limiter.bound == before
            else:
                limiter.throttled(ticket, now, seconds)
                assert limiter.bound <= before
                assert limiter.not_before >= now + (seconds or 0)
        assert limiter.bound >= 1
        assert limiter.under_way == len(tickets)
    # A waiting request may begin once nothing is under way and the store's time is over.
    for _ in tickets:
        limiter.failed()
    assert limiter.may_begin(max(now, limiter.not_before))


@given(st.integers(1, 50))
def test_refusals_of_one_round_count_once(count: int) -> None:
    limiter = AimdLimiter()
    tickets = [limiter.begin() for _ in range(count)]
    for ticket in tickets:
        limiter.throttled(ticket, 0.0)
    assert limiter.bound == max(1, count / 2)
    limiter.throttled(limiter.begin(), 0.0)
    assert limiter.bound == max(1, count / 4) or limiter.bound == 1


@given(st.integers(2, 50))
def test_rounds_of_successes_lift_the_bound_again(count: int) -> None:
    limiter = AimdLimiter()
    for ticket in [limiter.begin() for _ in range(count)]:
        limiter.throttled(ticket, 0.0)
    rounds = 0
    while limiter.bound < math.inf:
        rounds += 1
        tickets = []
        while limiter.may_begin(0.0):
            tickets.append(limiter.begin())
        for ticket in tickets:
            limiter.succeeded(ticket)
    # One more in each round, about: half as many rounds as there were requests.
    assert count / 2 - 2 <= rounds <= count / 2 + 2


def simulated(capacity: int, lanes: int, requests: int, seed: int) -> tuple[float, int]:
    """The time that lanes take at a store with a capacity, and how many requests it refuses.

    A request takes about one unit of time; a refusal comes at once, and is tried again.
    """
    chance, limiter, now = random.Random(seed), AimdLimiter(), 0.0
    ends: list[tuple[float, int, int]] = []
    done = refused = 0
    while done < requests:
        while len(ends) < lanes and limiter.may_begin(now):
            ticket = limiter.begin()
            if len(ends) >= capacity:
                refused += 1
                limiter.throttled(ticket, now, 0.1)
                break
            heapq.heappush(ends, (now + chance.uniform(0.8, 1.2), chance.getrandbits(64), ticket))
        if not ends:
            now = limiter.not_before
            continue
        now, _, ticket = heapq.heappop(ends)
        limiter.succeeded(ticket)
        done += 1
    return now, refused


@given(st.integers(1, 16), st.integers(1, 32), st.integers(0, 99))
def test_a_store_is_used_well_and_refuses_seldom(capacity: int, lanes: int, seed: int) -> None:
    seconds, refused = simulated(capacity, lanes, 1000, seed)
    served = min(capacity, lanes)
    assert seconds < 1.6 * 1000 / served + 5
    if lanes <= capacity:
        assert refused == 0
    # Each refusal halves the bound, and that many successes at least come before the next.
    assert refused <= 5 + (1000 if served < 3 else 1000 / (served / 2))


async def test_requests_wait_for_each_other_once_the_store_throttles() -> None:
    limiter, under_way, most = AimdLimiter(), 0, 0
    refusing = True

    async def request() -> None:
        nonlocal under_way, most
        async with limiter.admitted():
            under_way += 1
            most = max(most, under_way)
            try:
                for _ in range(3):
                    await anyio.lowlevel.checkpoint()
                if refusing:
                    raise Throttled("Slow down")
            finally:
                under_way -= 1

    async def refused() -> None:
        with pytest.raises(Throttled):
            await request()

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(refused)
    assert (most, limiter.bound) == (8, 4)
    most, refusing = 0, False
    async with anyio.create_task_group() as tasks:
        for _ in range(100):
            tasks.start_soon(request)
        await anyio.wait_all_tasks_blocked()
    # It grew on the way, and is lifted once it is what it was.
    assert 4 <= most <= 100
    assert limiter.bound == math.inf


async def test_all_wait_as_long_as_the_store_asks_one_to() -> None:
    limiter, error = AimdLimiter(), Throttled("Slow down")
    error.retry_after = 3600.0
    with pytest.raises(Throttled):
        async with limiter.admitted():
            raise error

    async def wait() -> None:
        async with limiter.admitted():
            raise AssertionError("an hour has passed")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()


async def test_a_wait_that_ends_while_it_is_looked_at_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limiter, times = AimdLimiter(), chain([9.99], repeat(10.0))
    limiter.not_before = 10.0
    monkeypatch.setattr("ckpipe.store.retry.time", SimpleNamespace(monotonic=lambda: next(times)))
    with anyio.fail_after(600):
        async with limiter.admitted():
            pass


async def test_other_failures_and_cancelled_turns_change_nothing() -> None:
    limiter = AimdLimiter()
    with pytest.raises(Throttled):
        async with limiter.admitted():
            raise Throttled("Slow down")
    assert limiter.bound == 1
    with pytest.raises(StoreUnavailable):
        async with limiter.admitted():
            raise StoreUnavailable("No answer")
    async with limiter.admitted(), anyio.create_task_group() as tasks:

        async def wait() -> None:
            async with limiter.admitted():
                raise AssertionError("there is one turn only")

        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    async with limiter.admitted():
        pass


async def test_reads_of_an_open_store_are_counted() -> None:
    counted: list[int] = []
    register_backend(scheme := "test-counted-reads", MemoryBackend)
    url = f"{scheme}://{scheme}"
    async with open_store(url, ckpipe.Settings(), Access.READ, counted.append) as store:
        await store.put("a", bytes(20), PutMode.CREATE)
        await store.read_into("a", 0, memoryview(bytearray(5)))
        opened = store.open_object("a")
        assert opened is not None
        opened.read_into(10, memoryview(bytearray(7)), cached=opened.is_cached(10, 7))
    assert counted == [5, 7]


def test_a_poll_looks_at_its_start_and_at_its_end() -> None:
    clock, looks = [0.0], []
    for pause in pauses(10.0, 1.0, 3.0, lambda: clock[0]):
        clock[0] += pause
        looks.append(clock[0])
    assert looks == [0, 1, 3, 6, 9, 10]
    assert list(pauses(0.0, 1.0, 3.0, lambda: 0.0)) == [0]
