"""Let all ranks save the same step when only one of them knows that it is time.

A rank whose time is up, or that will be stopped, creates a small object: the call. The others poll
for it in the background; they poll for a timed call only when their own time is nearly up. Then all
ranks agree on a step (:mod:`ckpipe.ranks.schedule`): they vote with the bounds that they propose
(:mod:`ckpipe.ranks.agree`). A rank that sees all votes, or whose patience has ended, decides on the
greatest. A dead rank delays the others no longer than that.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable

import anyio

from ckpipe.errors import (
    AttemptReused,
    CkpipeError,
    InvalidManifest,
    ObjectNotFound,
    StoreError,
    StoreUnavailable,
)
from ckpipe.format.names import agreement_key
from ckpipe.preemption.signals import StopRequest
from ckpipe.ranks.agree import Vote, agree, agreed
from ckpipe.ranks.launch import Launch
from ckpipe.ranks.schedule import SaveSchedule, SaveStepAgreement
from ckpipe.save.context import SaveContext
from ckpipe.store.retry import create_once, pauses
from ckpipe.types import first_of

logger = logging.getLogger("ckpipe")

END, TIME = "end", "time"
"""Reasons to save together: preemption, or the n-th save by the clock."""

_LEAVING = "leaving"

PATIENCE_SECONDS = 30.0
"""Seconds to wait for votes at most; half as long as a trainer waits at its bound."""

_CLEAR_SECONDS = 0.5
_TICK_SECONDS = 0.1
_FIRST_PAUSE_SECONDS = 0.02


class CoordinatedSaves:
    """Calls the ranks to a save, answers calls, and records the decided step; in the background.

    Args:
        context: The pipeline's store, settings and rank.
        launch: The launch, which is claimed before the first write.
        agreement: Keeps the agreed steps.
        schedule: Tells when a timed save is due.
        preemption: Tells whether this process will be stopped.
    """

    def __init__(
        self,
        context: SaveContext,
        launch: Launch,
        agreement: SaveStepAgreement,
        schedule: SaveSchedule,
        preemption: StopRequest,
    ) -> None:
        self._context, self._launch, self._agreement = context, launch, agreement
        self._schedule, self._preemption = schedule, preemption
        self._every = context.settings.look_every_seconds
        self._grace = grace = context.settings.preemption.grace_seconds
        self._patience = PATIENCE_SECONDS if grace is None else min(PATIENCE_SECONDS, grace / 4)

    async def serve(self) -> None:
        """Serve until it is cancelled, or until no further call can come.

        Raises:
            AttemptReused: If ``attempt_id`` was used on this root before: the calls may be those of
                another launch.
        """
        async with anyio.create_task_group() as tasks:
            if self._context.settings.preemption.enabled:
                tasks.start_soon(self._serve_end, name="calls of preempted ranks")
            if self._context.settings.save_every_seconds is not None:
                tasks.start_soon(self._serve_time, name="calls of clocks")

    async def _serve_end(self) -> None:
        patience = self._patience
        await self._called(END, lambda: self._preemption.signalled, lambda: True)
        self._preemption.tell()
        if not await self._settled(END, patience, min(2 * self._every + 0.5, patience)):
            # All others leave after the step that they save, and so does this one.
            self._preemption.arrive()
            self._preemption.answer()

    async def leave_at(self, step: int) -> bool:
        """Agree whether all ranks leave after the same step; for ranks that leave before the end.

        A rank that hears nothing of the others for a while decides that they do not. All ranks get
        the same decision. The rest of the time before the stop is for the save.

        Args:
            step: The step of this rank.

        Raises:
            StoreUnavailable: If the store did not answer in twice the time for votes and a second.
            StoreError: If the store failed.
        """
        left = self._preemption.seconds_left(self._grace)
        patience = self._patience if left is None else min(self._patience, left / 4)
        limit = 2 * patience + 1
        try:
            with anyio.fail_after(limit):
                return await self._left_at(step, time.monotonic() + patience)
        except TimeoutError:
            raise StoreUnavailable(
                f"The store did not answer the vote on a last save within {limit:.1f} s",
                step=step,
                rank=self._context.rank,
            ) from None

    async def _left_at(self, step: int, until: float) -> bool:
        context, retrying = self._context, self._context.store.retrying
        vote = Vote(retrying, context.attempt, _LEAVING, context.rank, context.world_size)
        await self._launch.claim()
        last_to_vote = await vote.cast(step) is not None
        for pause in () if last_to_vote else pauses(until, _FIRST_PAUSE_SECONDS, self._every):
            await anyio.sleep(pause)
            decided = await agreed(retrying, context.attempt, _LEAVING)
            if decided is not None:
                return bool(decided[0] == step)
        votes = await vote.votes()
        together = len(votes) == context.world_size and len(set(votes.values())) == 1
        decision = await agree(retrying, context.attempt, _LEAVING, step if together else None)
        if last_to_vote:  # the others save by now, so no store may keep this rank from it
            with anyio.move_on_after(_CLEAR_SECONDS), contextlib.suppress(StoreError):
                await vote.clear()
        return bool(decision == step)

    async def _serve_time(self) -> None:
        def is_due() -> bool:
            # The agreed save comes first, and restarts the time.
            return self._schedule.is_overdue() and not self._agreement.has(TIME)

        def is_near() -> bool:
            # Others may have saved it already, and call for the next one.
            return self._schedule.is_near(4 * self._every) or self._agreement.has(TIME)

        for number in itertools.count():
            await self._called(f"{TIME}-{number}", is_due, is_near)
            await self._settled(f"{TIME}-{number}", PATIENCE_SECONDS, 2 * self._every + 0.5)

    async def _called(
        self, occasion: str, is_due: Callable[[], bool], is_near: Callable[[], bool]
    ) -> None:
        """Wait until a rank calls, which may be this one.

        Args:
            occasion: The name of the call.
            is_due: Returns True if this rank must call.
            is_near: Returns True if others may call soon.
        """
        retrying, key = (
            self._context.store.retrying,
            agreement_key(self._context.attempt, f"{occasion}.call"),
        )
        looked = -self._every
        while True:
            try:
                if is_due():
                    await self._launch.claim()
                    await create_once(retrying, key)
                    return
                now = time.monotonic()
                if is_near() and now - looked >= self._every:
                    looked = now
                    with contextlib.suppress(ObjectNotFound):
                        await retrying.stat(key)
                        return
            except AttemptReused:
                raise
            except CkpipeError as error:
                logger.warning("Cannot look up whether another rank calls for a save: %s", error)
            await anyio.sleep(min(_TICK_SECONDS, self._every))

    async def _settled(self, occasion: str, patience: float, ahead: float) -> bool:
        """Agree on a step, and record it; return False if this rank has passed it already.

        Args:
            occasion: The name of the call.
            patience: Seconds to wait for votes.
            ahead: Seconds that the agreement should take.
        """
        context, until = self._context, time.monotonic() + patience
        vote = Vote(
            context.store.retrying, context.attempt, occasion, context.rank, context.world_size
        )
        bound: int | None = None
        while True:
            try:
                await self._launch.claim()
                step = await self._decided(occasion)
                if step is None:
                    if bound is None:  # a proposal never changes
                        bound = self._agreement.propose(occasion, ahead)
                    step = await self._voted(vote, occasion, bound, until)
                break
            except AttemptReused:
                raise
            except CkpipeError as error:
                logger.warning("The ranks cannot agree on the step to save at: %s", error)
                await anyio.sleep(self._every)
        in_time = self._agreement.decide(occasion, step)
        if in_time:
            logger.info("All ranks save at step %d (%s)", step, occasion)
        else:
            logger.error("All ranks save at step %d, which this rank has already passed", step)
        return in_time

    async def _voted(self, vote: Vote, occasion: str, bound: int, until: float) -> int:
        """Vote, and wait for the decision; the last rank to vote decides, or one that times out."""
        context, greatest = self._context, await vote.cast(bound)
        if greatest is None:
            for pause in pauses(until, _FIRST_PAUSE_SECONDS, self._every):
                await anyio.sleep(pause)
                decided = await self._decided(occasion)
                if decided is not None:
                    return decided
            votes = await vote.votes()
            absent = [rank for rank in range(context.world_size) if rank not in votes]
            if votes and absent:  # there are no votes if another rank has decided by now
                logger.warning("Ranks %s did not vote on the step to save", first_of(absent))
            greatest = max([bound, *votes.values()])
        step = _step(await agree(context.store.retrying, context.attempt, occasion, greatest))
        await vote.clear()
        return step

    async def _decided(self, occasion: str) -> int | None:
        decided = await agreed(self._context.store.retrying, self._context.attempt, occasion)
        return None if decided is None else _step(decided[0])


def _step(decided: object) -> int:
    if type(decided) is not int or decided < 0:
        raise InvalidManifest(f"The ranks agreed to save at {decided!r:.100}, which is no step")
    return decided
