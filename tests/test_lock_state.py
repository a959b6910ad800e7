"""The state machine of the state lock, under any order of events."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from ckpipe.lock.lock_state import (
    PATIENCE,
    LockState,
    Request,
    Side,
    Transition,
    arrive,
    blocks_itself,
    defer,
    leave,
    revocable,
    stops_a_load,
    waits_already,
)

TRAINERS = st.integers(0, 4)
LOOPS = st.integers(10, 11)
THREADS = TRAINERS | LOOPS


class LockMachine(RuleBasedStateMachine):
    """Owners arrive and leave as they like; what each event let in is judged at once.

    Leaving stands for a release, a timeout and a cancellation, which are one event. A thread that
    waits does nothing else; one that has an event loop does what the loop's tasks do, too.
    """

    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.state = LockState()
        self.next_ticket = 0
        self.arrived: list[Request] = []
        self.blocking: dict[int, int] = {}

    def arrival(
        self,
        side: Side,
        owner: Hashable = None,
        *,
        caller: int,
        saver: int | None = None,
        home: int | None = None,
        within: int | None = None,
        blocking: bool = True,
    ) -> int:
        self.next_ticket += 1
        owner = f"task {self.next_ticket}" if owner is None else owner
        request = Request(self.next_ticket, side, owner, saver, home, within=within)
        if blocks_itself(self.state, request) or {caller, home} & self.stopped():
            return self.next_ticket
        before = self.state
        self.arrived.append(request)
        if blocking:
            self.blocking[request.ticket] = caller
        self.judge(before, arrive(before, request))
        return self.next_ticket

    def stopped(self) -> set[int | None]:
        """The threads that wait."""
        tickets = {request.ticket for request in self.state.waiting} & self.blocking.keys()
        return {self.blocking[ticket] for ticket in tickets}

    @rule(target=tickets, owner=THREADS)
    def trainer_comes(self, owner: int) -> int:
        # It relies on going before captures, which ends where it must have some patience.
        waits = any(request.home == owner for request in self.state.waiting_for(Side.CAPTURING))
        patient = waits and self.state.passed > PATIENCE // 2
        return 0 if patient else self.arrival(Side.MUTATING, owner, caller=owner)

    @rule(target=tickets, owner=THREADS)
    def capture_comes(self, owner: int) -> int:
        return self.arrival(Side.CAPTURING, owner, caller=owner)

    @rule(target=tickets, saver=TRAINERS, home=LOOPS, blocking=st.booleans())
    def save_comes(self, saver: int, home: int, *, blocking: bool) -> int:
        return self.arrival(Side.CAPTURING, caller=saver, saver=saver, home=home, blocking=blocking)

    @rule(target=tickets, caller=THREADS, home=LOOPS, blocking=st.booleans())
    def load_comes(self, caller: int, home: int, *, blocking: bool) -> int:
        if blocking and caller == home:
            return 0  # refused before it gets here
        mutating = [held.owner for held in self.state.holding if held.side is Side.MUTATING]
        return self.arrival(
            Side.MUTATING,
            caller=caller,
            saver=caller if blocking else None,
            home=home,
            within=caller if caller in mutating else None,
            blocking=blocking,
        )

    @rule(ticket=tickets)
    def anyone_leaves(self, ticket: int) -> None:
        before = self.state
        self.arrived = [request for request in self.arrived if request.ticket != ticket]
        self.judge(before, leave(before, ticket))
        everyone = (*self.state.holding, *self.state.waiting)
        assert all(request.ticket != ticket for request in everyone)

    @precondition(lambda self: self.state.holding)
    @rule()
    def oldest_holder_leaves(self) -> None:
        self.anyone_leaves(self.state.holding[0].ticket)

    @rule(ticket=tickets)
    def anyone_is_deferred(self, ticket: int) -> None:
        """Deferring changes who may be pressed, and nothing else."""
        before, self.state = self.state, defer(self.state, ticket)
        self.arrived = [self.as_it_is(request) for request in self.arrived]
        assert self.state.waiting == before.waiting
        assert [held.ticket for held in self.state.holding] == [h.ticket for h in before.holding]
        newly = set(self.state.holding) - set(before.holding)
        assert all(held.ticket == ticket and held.side is Side.CAPTURING for held in newly)

    def as_it_is(self, request: Request) -> Request:
        held = {each.ticket: each for each in self.state.holding}
        return held.get(request.ticket, request)

    @precondition(lambda self: bool(revocable(self.state)))
    @rule()
    def a_trainer_presses(self) -> None:
        """Taking the lock from those who may be pressed lets the first trainer in."""
        first = self.state.waiting_for(Side.MUTATING)[0]
        for capture in revocable(self.state):
            assert capture.deferred
            assert capture.side is Side.CAPTURING
            assert not self.state.holds(first.ticket)
            self.anyone_leaves(capture.ticket)
        due = self.state.passed == 0 and self.state.mutator is None and self.state.holding
        assert self.state.holds(first.ticket) or due

    @invariant()
    def only_those_who_can_help_are_pressed(self) -> None:
        pressed = revocable(self.state)
        trainers = self.state.waiting_for(Side.MUTATING)
        captures = [held for held in self.state.holding if held.side is Side.CAPTURING]
        undisturbed = not trainers or any(not held.deferred for held in captures)
        assert pressed == (() if undisturbed else tuple(captures))

    def judge(self, before: LockState, transition: Transition) -> None:
        self.state, granted = transition
        newly = set(self.state.holding) - set(before.holding)
        assert newly == set(granted)
        owners_before = {held.owner for held in before.holding}
        entering = [each for each in granted if not {each.owner, each.within} & owners_before]
        homes = {held.home for held in before.holding}
        if before.mutator is None:
            threads = owners_before | homes
            entering = [
                each for each in entering if not {each.owner, each.saver} & threads - {None}
            ]
        waited = before.waiting_for(Side.MUTATING)
        for request in entering:
            if request.side is Side.CAPTURING and waited:
                left = set(waited) & set(self.state.waiting)
                assert not left or before.passed >= PATIENCE, "a capture overtook a trainer"
            if request.side is Side.MUTATING and waited:
                still = [other for other in waited if other in self.arrived]
                assert request == still[0], "trainers were not served in their order"

    @invariant()
    def sides_exclude_each_other(self) -> None:
        mutations = [held for held in self.state.holding if held.side is Side.MUTATING]
        captures = [held for held in self.state.holding if held.side is Side.CAPTURING]
        roots = {held.owner if held.within is None else held.within for held in mutations}
        assert len(roots) <= 1
        assert not (mutations and captures)
        assert self.state.mutator == (mutations[0].owner if mutations else None)

    @invariant()
    def nobody_waits_for_one_that_waits(self) -> None:
        """Whoever has to let go of a hold can do so."""
        keepers = {held.owner if held.home is None else held.home for held in self.state.holding}
        assert not keepers & self.stopped()

    @invariant()
    def nobody_is_forgotten(self) -> None:
        """Who waits has a reason to, and everybody who came and did not leave is known."""
        trainers = self.state.waiting_for(Side.MUTATING)
        captures = self.state.waiting_for(Side.CAPTURING)
        if trainers or captures:
            assert self.state.holding
        if captures and self.state.mutator is None:
            assert trainers
        known = {*self.state.holding, *self.state.waiting}
        assert known == set(self.arrived)

    def teardown(self) -> None:
        for request in list(self.arrived):
            self.anyone_leaves(request.ticket)
        assert self.state == LockState()


TestLockMachine = LockMachine.TestCase
TestLockMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def after(*events: Request | int, state: LockState | None = None) -> LockState:
    """The state after arrivals (requests) and departures (tickets)."""
    state = state or LockState()
    for event in events:
        state = (leave(state, event) if isinstance(event, int) else arrive(state, event)).state
    return state


def trainer(ticket: int, owner: str) -> Request:
    return Request(ticket, Side.MUTATING, owner)


def capture(ticket: int, owner: str, **threads: str) -> Request:
    return Request(ticket, Side.CAPTURING, owner, threads.get("saver"), threads.get("home"))


def load(ticket: int, **threads: str) -> Request:
    within, owner = threads.get("inside"), f"load {ticket}"
    saver, home = threads.get("saver"), threads.get("home")
    return Request(ticket, Side.MUTATING, owner, saver, home, within=within)


def held(state: LockState) -> list[int]:
    return [request.ticket for request in state.holding]


def test_captures_share_and_a_trainer_waits_for_those_that_run_only() -> None:
    state = after(capture(1, "a"), capture(2, "b"), trainer(3, "t"), capture(4, "c"))
    assert held(state) == [1, 2]
    assert held(after(1, state=state)) == [2]
    assert held(after(1, 2, state=state)) == [3]
    assert held(after(1, 2, 3, state=state)) == [4]


def test_a_trainer_that_gives_up_lets_the_captures_behind_it_in() -> None:
    state = after(capture(1, "a"), trainer(2, "t"), capture(3, "b"))
    assert held(after(2, state=state)) == [1, 3]


def test_an_owner_enters_again_past_those_who_wait() -> None:
    assert held(after(trainer(1, "t"), trainer(2, "u"), trainer(3, "t"))) == [1, 3]
    assert held(after(capture(1, "a"), trainer(2, "t"), capture(3, "a"))) == [1, 3]
    assert held(after(capture(1, "a"), trainer(2, "t"), capture(3, "task", saver="a"))) == [1, 3]
    assert held(after(capture(1, "task", home="a"), trainer(2, "t"), capture(3, "a"))) == [1, 3]


def test_a_capture_that_trainers_overtake_without_end_goes_once() -> None:
    state = after(trainer(1, "t1"), capture(1000, "a"))
    turns = 0
    while not state.holds(1000):
        current = state.holding[0].ticket
        state = after(trainer(current + 1, f"t{current + 1}"), current, state=state)
        turns += 1
        assert turns <= PATIENCE + 1
    assert turns == PATIENCE + 1
    waiting = state.waiting_for(Side.MUTATING)
    after_capture = after(capture(1001, "b"), 1000, state=state)
    assert after_capture.mutator == waiting[0].owner


def test_a_capture_that_cannot_be_hurried_protects_the_others() -> None:
    state = defer(after(capture(1, "a"), capture(2, "b"), trainer(3, "t")), 1)
    assert revocable(state) == ()
    assert [each.ticket for each in revocable(after(2, state=state))] == [1]
    assert revocable(after(2, 3, state=state)) == ()
    assert revocable(defer(after(trainer(1, "t"), trainer(2, "u")), 1)) == ()


def test_waiting_for_oneself_is_seen() -> None:
    mutating = after(trainer(1, "t"))
    assert blocks_itself(mutating, capture(2, "t"))
    assert blocks_itself(mutating, capture(2, "worker", saver="t"))
    assert blocks_itself(mutating, capture(2, "task", home="t"))
    assert not blocks_itself(mutating, replace(capture(2, "worker", saver="t"), awaited=False))
    assert not blocks_itself(mutating, capture(2, "worker", saver="u"))
    assert not blocks_itself(mutating, trainer(2, "t"))
    capturing = after(capture(1, "worker", saver="t", home="loop"))
    assert blocks_itself(capturing, trainer(2, "worker"))
    assert blocks_itself(capturing, trainer(2, "loop"))
    assert not blocks_itself(capturing, trainer(2, "t"))


def test_a_load_is_a_mutation_of_its_own_or_of_its_caller() -> None:
    loading = after(load(1, saver="t", home="loop"))
    assert held(after(capture(2, "a"), trainer(3, "t"), load(4), state=loading)) == [1]
    inside = after(trainer(1, "t"), capture(2, "a"), load(3, inside="t"))
    assert held(inside) == [1, 3]
    assert held(after(trainer(4, "t"), trainer(5, "load 3"), state=inside)) == [1, 3, 4, 5]
    assert held(after(1, trainer(4, "t"), trainer(5, "load 3"), state=inside)) == [3, 5]
    assert not blocks_itself(after(1, state=inside), capture(4, "task", saver="t"))


def test_waiting_for_a_load_on_its_own_loop_is_seen() -> None:
    holding = after(load(1, home="loop"))
    for state in (holding, after(trainer(1, "u"), load(2, home="loop"))):
        for request in (trainer(9, "loop"), capture(9, "loop"), load(9, saver="loop", home="b")):
            assert blocks_itself(state, request)
            assert stops_a_load(state, request)
        for request in (
            trainer(9, "t"),
            load(9, saver="t", home="loop"),
            capture(9, "task", saver="loop", home="loop"),  # which waits without its thread
        ):
            assert not blocks_itself(state, request)
    assert not blocks_itself(after(trainer(1, "loop"), load(2, home="loop")), trainer(3, "loop"))


def test_waiting_behind_oneself_is_seen() -> None:
    waiting = after(capture(1, "a"), trainer(2, "t"))
    for request in (trainer(3, "t"), load(3, saver="t", home="loop")):
        assert blocks_itself(waiting, request)
        assert waits_already(waiting, request)
        assert not blocks_itself(after(1, state=waiting), load(3, inside="t", saver="t"))
    assert not blocks_itself(waiting, load(3, home="loop"))
    assert not blocks_itself(waiting, capture(3, "task", saver="t"))


def test_a_load_whose_blocked_caller_keeps_a_capture_is_seen() -> None:
    capturing = after(capture(1, "task", home="t"))
    assert blocks_itself(capturing, load(2, saver="t", home="loop"))
    assert not blocks_itself(capturing, load(2, home="loop"))
    assert not stops_a_load(capturing, load(2, saver="t", home="loop"))
