"""The rules of the state lock as a pure state machine: no threads, no clock, no waiting.

A request arrives, is granted at once or later, and leaves. It leaves in the same way whether it
was released, timed out or was cancelled, so that none of these can leave something behind that
another would not. Who may hold what:

* Any number of captures, or any number of mutations of one owner and of loads within them, never
  both.
* A waiting mutation goes before every capture that is not granted yet, so that a step waits for
  the captures that are already running and for no other.
* Mutations are granted in the order in which they came.
* An owner who holds a side gets it again at once, before all waiters, since those who wait cannot
  be served before that owner is done. So does a capture for which a thread waits that itself
  captures, or lets go of a capture.
* Where several trainers hand the lock to each other without a gap, a capture would wait for
  ever; after :data:`PATIENCE` of them have gone first, the waiting captures go once.
* A capture may be *deferred*: what is left to read is what only trainers with the lock change.
  A trainer that has waited for it for too long may take the lock from it, but only if that lets
  the trainer in: where another capture holds on, nothing is won by breaking this one.
* A load is a mutation that has a *home*, the thread whose event loop lets go of it. That thread
  may not wait for the lock while such a load holds it or waits for it.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import NamedTuple

PATIENCE = 16
"""How many mutations may be granted over the head of a waiting capture."""


class Side(enum.Enum):
    """The side of the lock that a request is for."""

    MUTATING = "mutating"
    """To change the state; excludes everybody else."""

    CAPTURING = "capturing"
    """To read the state; shared with other captures."""


@dataclass(frozen=True, slots=True)
class Request:
    """One wish to hold the lock.

    Args:
        ticket: A number no other request has.
        side: What it is for.
        owner: Who holds the lock once it is granted; the same owner may hold a side repeatedly.
        saver: The thread that asked for it and may be waiting for its end, if that is not the
            owner; of a load, only if it waits without an event loop.
        home: Of a capture or a load, the thread without which it cannot be released.
        deferred: Of a capture, whether a trainer may take the lock from it.
        awaited: Of a capture, whether the saver does nothing else until it is granted. The others
            are coroutines, whose thread goes on and ends what it is at.
        within: Of a load, the owner of a mutation that it is part of. It may outlive that one, and
            then its owner waits for it like any other.
    """

    ticket: int
    side: Side
    owner: Hashable
    saver: Hashable = None
    home: Hashable = None
    deferred: bool = False
    awaited: bool = True
    within: Hashable = None


@dataclass(frozen=True, slots=True)
class LockState:
    """The holders of the lock and the waiters for it.

    Args:
        holding: The granted requests, oldest first; all of one side.
        waiting: The other requests, in the order in which they came.
        passed: How many mutations were granted while a capture waited, since one was granted.
    """

    holding: tuple[Request, ...] = ()
    waiting: tuple[Request, ...] = ()
    passed: int = 0

    @property
    def mutator(self) -> Hashable | None:
        """The owner of the mutating side, or None without one."""
        first = self.holding[0] if self.holding else None
        return first.owner if first is not None and first.side is Side.MUTATING else None

    def holds(self, ticket: int) -> bool:
        """Tell whether the request of this ticket is granted."""
        return any(request.ticket == ticket for request in self.holding)

    def waiting_for(self, side: Side) -> tuple[Request, ...]:
        """The requests that wait for one side, in the order in which they came."""
        return tuple(request for request in self.waiting if request.side is side)


class Transition(NamedTuple):
    """The state after an event, and the requests that the event let in."""

    state: LockState
    granted: tuple[Request, ...]


def blocks_itself(state: LockState, request: Request) -> bool:
    """Tell whether a request would wait for a thread that waits for the request: a deadlock."""
    opposite = [held for held in state.holding if held.side is not request.side]
    if request.side is Side.CAPTURING:
        saver = request.saver if request.awaited else None
        waits = {request.owner, saver, request.home} - {None}
        blocked = any(held.owner in waits for held in opposite)
    else:
        waits = {request.owner, request.saver} - {None}
        blocked = any(held.owner in waits or held.home in waits for held in opposite)
    return blocked or stops_a_load(state, request) or waits_already(state, request)


def stops_a_load(state: LockState, request: Request) -> bool:
    """Tell whether a request would stop the thread without which a load cannot end."""
    if _enters_again(state, request):
        return False
    waits = {request.owner}
    if request.side is Side.MUTATING:
        waits |= {request.saver} - {None}
    mutations = (each for each in (*state.holding, *state.waiting) if each.side is Side.MUTATING)
    return any(each.home in waits for each in mutations)


def waits_already(state: LockState, request: Request) -> bool:
    """Tell whether a mutation would wait behind one that its thread, interrupted, waits for."""
    if request.side is Side.CAPTURING or _enters_again(state, request):
        return False
    waits = {request.owner, request.saver} - {None}
    return any(each.owner in waits for each in state.waiting_for(Side.MUTATING))


def arrive(state: LockState, request: Request) -> Transition:
    """A request comes in: granted at once where that is possible, else it waits.

    Args:
        state: The state before.
        request: Must not block itself; its ticket is new.
    """
    if _enters_again(state, request):
        return Transition(replace(state, holding=(*state.holding, request)), (request,))
    return _settle(replace(state, waiting=(*state.waiting, request)))


def leave(state: LockState, ticket: int) -> Transition:
    """A request is over, in whatever way; does nothing if the ticket is not known (any more)."""
    return _settle(
        replace(
            state,
            holding=tuple(request for request in state.holding if request.ticket != ticket),
            waiting=tuple(request for request in state.waiting if request.ticket != ticket),
        )
    )


def defer(state: LockState, ticket: int, *, deferred: bool = True) -> LockState:
    """Make a capture deferred, or not; does nothing if it does not hold the lock (any more)."""
    holding = tuple(
        replace(held, deferred=deferred)
        if held.ticket == ticket and held.side is Side.CAPTURING
        else held
        for held in state.holding
    )
    return replace(state, holding=holding)


def revocable(state: LockState) -> tuple[Request, ...]:
    """The captures that a trainer would have to take the lock from to be let in.

    Returns:
        All that hold the lock; none if trainers hold it, no trainer waits, or one of the captures
        is not deferred.
    """
    if not state.waiting_for(Side.MUTATING) or not all(held.deferred for held in state.holding):
        return ()
    return state.holding


def _enters_again(state: LockState, request: Request) -> bool:
    again = [held for held in state.holding if held.side is request.side]
    if request.side is Side.MUTATING:
        return any(held.owner in (request.owner, request.within) for held in again)
    waits = {request.owner, request.saver} - {None}
    return any(held.owner in waits or held.home == request.owner for held in again)


def _settle(state: LockState) -> Transition:
    """Grant all requests that may be granted now. One look is enough: letting one side in bars the
    other."""
    trainers, captures = state.waiting_for(Side.MUTATING), state.waiting_for(Side.CAPTURING)
    if not captures:
        state = replace(state, passed=0)
    if captures and state.mutator is None and (not trainers or state.passed >= PATIENCE):
        return _grant(replace(state, passed=0), captures)
    if trainers and not state.holding:
        return _grant(replace(state, passed=state.passed + bool(captures)), trainers[:1])
    return Transition(state, ())


def _grant(state: LockState, granted: tuple[Request, ...]) -> Transition:
    still = tuple(request for request in state.waiting if request not in granted)
    return Transition(replace(state, holding=state.holding + granted, waiting=still), granted)
