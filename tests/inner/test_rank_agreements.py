"""Ranks agree on a launch, in votes, and on the steps to save."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import FileStore, HashStore

import ckpipe
from ckpipe.errors import UnsupportedTopology
from ckpipe.format import names as object_names
from ckpipe.preemption.signals import SignalWatch, StopRequest
from ckpipe.ranks import agree
from ckpipe.ranks.agree import Vote
from ckpipe.ranks.launch import CheckpointNames, Launch, Rendezvous, draft_launch
from ckpipe.ranks.schedule import (
    Pace,
    SaveSchedule,
    SaveStepAgreement,
)
from ckpipe.ranks.world import ALONE, Topology, find_topology
from ckpipe.running.coordinated_saves import CoordinatedSaves
from ckpipe.testing import MemoryBackend
from ckpipe.types import CheckpointId, attempt_parts
from tests.support.stored_files import ATTEMPTS

Make = Callable[[], Any]


@pytest.fixture(params=["hash", "file"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Make connections to one store that stays what it is between launches."""
    if request.param == "hash":
        store = HashStore()
        return lambda: store
    return lambda: FileStore(str(tmp_path / "store"), -1)


def meeting(
    store: Any, rank: int, size: int = 3, seconds: float = 20, url: str = "u"
) -> Rendezvous:
    return Rendezvous(store, Topology(rank, size), url, seconds)


def launch(connect: Make, name: str, order: list[int], url: str = "u") -> list[str]:
    """All ranks of one launch, which come in an order; returns what each took for the name."""
    with ThreadPoolExecutor(len(order)) as pool:
        futures: dict[int, Future[str]] = {}
        for rank in order:
            futures[rank] = pool.submit(attend, connect(), rank, len(order), name, url)
        return [futures[rank].result() for rank in sorted(futures)]


def attend(store: Any, rank: int, size: int, name: str, url: str) -> str:
    each = meeting(store, rank, size, url=url)
    if rank:
        return each.join()
    each.host(name)
    return name


class Visited:
    """The store of rank 0, whose time to wait for the others begins with the hello of rank 2."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def wait(self, keys: list[str], limit: timedelta) -> None:
        self._store.wait(keys[1:2])
        self._store.wait(keys, limit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_all_take_the_name_of_rank_0(connect: Make, order: list[int]) -> None:
    for name in ("first", "second", "third"):
        # The store keeps what earlier launches wrote.
        assert launch(connect, name, order) == [name] * 3


def test_rank_of_a_new_launch_waits_for_a_new_call(connect: Make) -> None:
    launch(connect, "old", [0, 1])
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(meeting(connect(), 1, 2).join)
        meeting(connect(), 0, 2).host("new")
        assert early.result() == "new"


class Overtaken:
    """The store of a rank that comes to rest after its first hello, until there is another call."""

    def __init__(self, store: Any) -> None:
        self._store, self._stopped = store, False

    def set(self, key: str, value: str) -> None:
        call = self._store.get("call")
        self._store.set(key, value)
        while not self._stopped and self._store.get("call") == call:
            os.sched_yield()
        self._stopped = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_rank_that_is_overtaken_takes_the_names_of_both_calls(connect: Make) -> None:
    def host() -> None:
        for name in ("first", "second"):
            meeting(connect(), 0, 2).host(name)

    with ThreadPoolExecutor(1) as pool:
        calls = pool.submit(host)
        late = meeting(connect(), 1, 2, seconds=60)
        late._store = Overtaken(late._store)
        assert late.join() == "first"
        assert meeting(connect(), 1, 2).join() == "second"
        calls.result()


def test_rank_that_answered_a_host_that_died_takes_the_next_name(connect: Make) -> None:
    with pytest.raises(UnsupportedTopology):
        # Dies in the middle: rank 2 never comes.
        meeting(connect(), 0, 3, seconds=0.05).host("dead")
    assert launch(connect, "alive", [1, 2, 0]) == ["alive"] * 3


def test_hello_of_a_straggler_keeps_its_rank_out(connect: Make) -> None:
    store = connect()
    straggler = meeting(store, 1, 2, seconds=60)
    host = threading.Thread(target=meeting(connect(), 0, 2).host, args=("name",))
    host.start()
    assert straggler.join() == "name"
    host.join()
    # The true rank 1 of that launch finds its place taken, and never takes the name.
    with pytest.raises(UnsupportedTopology, match=r"Rank 0 did not open.*within 0\.3 s"):
        meeting(connect(), 1, 2, seconds=0.3).join()


def test_missing_ranks_are_named(connect: Make) -> None:
    host, third = meeting(connect(), 0, 5, seconds=0.5), meeting(connect(), 2, 5)
    host._store = Visited(host._store)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(third.join)
        with pytest.raises(UnsupportedTopology, match=r"Ranks 1, 3, 4 did not .* within 0\.5 s"):
            host.host("name")
        third._until = 0.0
        with pytest.raises(UnsupportedTopology, match="Rank 0"):
            waiting.result()


def test_many_missing_ranks_are_counted() -> None:
    with pytest.raises(UnsupportedTopology, match="19, 20 and 79 more did not"):
        meeting(HashStore(), 0, 100, seconds=0.05).host("name")


def test_two_roots_meet_apart(connect: Make) -> None:
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(launch, connect, "one", [0, 1], "u")
        two = pool.submit(launch, connect, "two", [1, 0], "v")
        assert (one.result(), two.result()) == (["one"] * 2, ["two"] * 2)


def test_topology_of_a_launcher() -> None:
    assert find_topology({"RANK": "2", "WORLD_SIZE": "3"}) == Topology(2, 3)
    assert find_topology({}) == ALONE
    assert find_topology({"WORLD_SIZE": "3"}) == ALONE


@pytest.mark.parametrize(("rank", "size"), [("3", "3"), ("-1", "3"), ("x", "3"), ("0", "0")])
def test_contradictory_variables_are_refused(rank: str, size: str) -> None:
    with pytest.raises(UnsupportedTopology, match="WORLD_SIZE"):
        find_topology({"RANK": rank, "WORLD_SIZE": size})


MOVES = st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=30)


@given(MOVES)
def test_names_are_unique_and_all_after_going_back_are_newer(moves: list[tuple[int, bool]]) -> None:
    course = CheckpointNames("20261121T235959999Z-run")
    names: list[list[CheckpointId]] = [[]]
    for step, back in moves:
        if back and course.lies_back(step):
            course.go_back()
            names.append([])
        names[-1].append(course.name(step))
    all_of_them = [each for some in names for each in some]
    assert len(set(all_of_them)) == len(moves)
    for before, after in pairwise(names):
        assert max(before) < min(after)
    for each in all_of_them:
        assert CheckpointId.parse(str(each)) == each
        assert attempt_parts(each.attempt)[1] == "run", "one claim and one lease for all of them"


@pytest.mark.parametrize("name", ["99999999T999999999Z-x", "99991231T235959999Z-x"])
async def test_a_name_that_is_no_time_or_the_last_one_keeps_nobody_out(name: str) -> None:
    backend = MemoryBackend()
    for attempt in (name, "20991231T235959999Z-y"):
        await backend.put(f"{CheckpointId(attempt, 1, 0)}.json", b"{}", ckpipe.PutMode.CREATE)
    launch = await draft_launch(backend, None, ALONE)
    assert launch.attempt.startswith("21000101T000000000Z-")


@given(st.data())
async def test_the_last_to_vote_knows_the_greatest_vote(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 30))
    votes = data.draw(st.lists(st.integers(0, 10**12), min_size=size, max_size=size))
    order = data.draw(st.permutations(range(size)))
    backend = MemoryBackend()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_names, "GROUP_SIZE", 3)
        patch.setattr(agree, "GROUP_SIZE", 3)
        seen = []
        for rank in order:
            ballot = Vote(backend, "s-Z-a", "question", rank, size)
            seen.append(await ballot.cast(votes[rank]))
            assert (await ballot.votes())[rank] == votes[rank]
        assert seen == [None] * (size - 1) + [max(votes)]
        assert await ballot.votes() == dict(enumerate(votes))
        await ballot.clear()
        assert [each async for each in backend.list(ATTEMPTS)] == []


def saved_at(asked: list[int], every: int, begin: int = 0) -> list[int]:
    schedule = SaveSchedule(every, None)
    schedule.begin_at(begin)
    saves = []
    for step in asked:
        if schedule.due(step):
            saves.append(step)
            schedule.begin_at(step)
    return saves


def test_marks_are_the_multiples() -> None:
    assert saved_at(list(range(12)), 5) == [5, 10]
    assert saved_at(list(range(7, 22)), 5, begin=6) == [10, 15, 20]


@given(st.sets(st.integers(0, 300), min_size=1), st.integers(1, 40))
def test_a_mark_passed_is_made_up_for_once_at_the_next_step(asked: set[int], every: int) -> None:
    steps = sorted(asked)
    expected = []
    for before, step in zip([0, *steps], steps, strict=False):
        if any(mark % every == 0 for mark in range(before + 1, step + 1)):
            expected.append(step)
    assert saved_at(steps, every) == expected


def test_asking_changes_nothing_and_a_save_stays_due() -> None:
    schedule = SaveSchedule(10, None)
    assert [schedule.due(step) for step in (9, 10, 10, 11, 9)] == [False, True, True, True, False]
    schedule.begin_at(11)
    assert not schedule.due(12)


def test_seconds_count_from_the_last_save() -> None:
    now = 100.0
    schedule = SaveSchedule(None, 60, clock=lambda: now)
    now = 159.9
    assert not schedule.due(1)
    now = 160.0
    assert schedule.due(2)
    schedule.begin_at(2)
    assert not schedule.due(3)
    now = 220.0
    assert schedule.due(4)


class WatchedAgreement(SaveStepAgreement):
    """Tells when a trainer has to wait; the lock is held then, until it waits or goes on."""

    def __init__(self) -> None:
        super().__init__(patience=600)
        self.waits = threading.Event()

    def _undecided(self, step: int) -> list[str]:
        undecided = super()._undecided(step)
        if undecided:
            self.waits.set()
        return undecided


def test_a_trainer_waits_at_its_bound_until_it_is_decided() -> None:
    agreement = WatchedAgreement()
    assert agreement.ask(7) == frozenset()
    bound = agreement.propose("end", 10)
    assert bound == 8
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(agreement.ask, bound)
        assert agreement.waits.wait(600)
        assert agreement.decide("time", bound), "it has not gone on to that step"
        assert agreement.decide("end", 9)
        assert asked.result(600) == {"time"}
    agreement.consume(8)
    assert agreement.ask(9) == agreement.ask(10) == {"end"}
    assert agreement.has("end")
    agreement.consume(10)
    assert not agreement.has("end")
    assert agreement.ask(11) == frozenset()


def test_a_trainer_waits_no_longer_than_its_patience(caplog: pytest.LogCaptureFixture) -> None:
    agreement = SaveStepAgreement(patience=0.01)
    agreement.propose("end", 10)
    assert agreement.ask(0) == frozenset()
    assert "did not agree" in caplog.text
    assert not agreement.decide("end", 0), "it has been left behind"
    assert agreement.decide("end", 1)
    assert agreement.ask(1) == {"end"}


def test_the_pace_tells_how_far_ahead_a_bound_lies() -> None:
    now = 0.0
    pace = Pace(clock=lambda: now)
    assert pace.ahead(100) == 1
    for step in range(0, 50, 5):
        pace.note(step)
        now += 0.5
    assert pace.ahead(3) == 30
    assert pace.ahead(0.001) == 1
    pace.note(3)
    assert pace.ahead(3) == 1, "after a rollback it is measured anew"


TIMES = st.lists(st.tuples(st.integers(0, 3), st.floats(0.001, 9), st.integers(0, 50)))


@given(TIMES, st.floats(0, 5))
def test_no_rank_has_passed_what_is_decided(
    moves: list[tuple[int, float, int]], ahead: float
) -> None:
    now = 0.0
    agreements = [SaveStepAgreement(0, clock=lambda: now) for _ in range(4)]
    steps, bounds = [0] * 4, dict[int, int]()
    for rank, seconds, by in [*moves, *((rank, 1, 0) for rank in range(4))]:
        now += seconds
        if by == 0 and rank not in bounds:
            bounds[rank] = agreements[rank].propose("time", ahead)
        elif steps[rank] < bounds.get(rank, 10**9):
            assert agreements[rank].ask(steps[rank]) == frozenset()
            steps[rank] += max(1, by)
    decided = max(bounds.values())
    for rank, agreement in enumerate(agreements):
        assert agreement.decide("time", decided), rank
        assert agreement.ask(decided + rank) == {"time"}


def send() -> None:
    os.kill(os.getpid(), signal.SIGUSR2)


def test_time_left_counts_from_the_first_time_it_was_told() -> None:
    now = 10.0
    told = StopRequest(clock=lambda: now)
    assert told.seconds_left(30) is None
    assert not told.answer()
    told.tell()
    now = 15.0
    told.tell()
    assert (told.seconds_left(30), told.seconds_left(None)) == (25, None)
    assert told.wants_save
    assert told.answer()
    assert not told.wants_save
    now = 50.0
    assert told.seconds_left(30) == 0


def test_default_action_is_held_back_only_while_watching() -> None:
    child = os.fork()
    if child == 0:  # pragma: no cover
        watch = SignalWatch(["SIGUSR2"], lambda: None)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        watch.begin()
        ours = signal.getsignal(signal.SIGUSR2)
        send()
        watch.end()
        signal.signal(signal.SIGUSR2, ours)  # somebody has kept it, and puts it back
        send()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGUSR2


async def test_votes_take_a_quarter_of_the_time_that_is_left() -> None:
    times = iter([0.0])
    request = StopRequest(lambda: next(times, 98.0))
    request.tell()
    backend, attempt = MemoryBackend(), "20260101T000000000Z-run"
    context: Any = SimpleNamespace(
        store=SimpleNamespace(retrying=backend),
        settings=SimpleNamespace(
            look_every_seconds=0.1, preemption=SimpleNamespace(grace_seconds=100.0)
        ),
        attempt=attempt,
        rank=0,
        world_size=2,
    )
    schedule = SaveSchedule(None, None)
    launch = Launch(backend, attempt, Topology(0, 2))
    calls = CoordinatedSaves(context, launch, SaveStepAgreement(1.0), schedule, request)
    with anyio.fail_after(10):
        assert not await calls.leave_at(3)
