"""The one retry policy: exponential backoff with full jitter, for errors that may pass.

Source of the formula: "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import anyio

from ckpipe.errors import CkpipeError, StoreUnavailable, Throttled
from ckpipe.events import EventBus, Retrying
from ckpipe.stores.pace import Pace
from ckpipe.types import CheckpointId

if TYPE_CHECKING:
    from ckpipe.settings import Upload

logger = logging.getLogger("ckpipe")

T = TypeVar("T")

_QUIET_SECONDS = 600.0

# A generator of its own: what training draws must not depend on what a store answers.
_jitter = random.Random()


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how long to try.

    Args:
        retries: How many times an operation is tried again.
        backoff_seconds: The longest wait before the first of them; it doubles each time.
        backoff_max_seconds: The longest wait before any of them.
        attempt_timeout_seconds: How long one try may take.
        deadline_seconds: How long all tries may take together; None for as long as they do.
        on_retry: Told of each error that is tried again, with the seconds until then.
        pace: Gives each try its turn, so that a store that throttles gets fewer at a time; None
            for those that are few anyway.
    """

    retries: int
    backoff_seconds: float
    backoff_max_seconds: float
    attempt_timeout_seconds: float
    deadline_seconds: float | None = None
    on_retry: Callable[[CkpipeError, float], None] = lambda error, seconds: None
    pace: Pace | None = None

    def pause(self, failures: int, error: CkpipeError) -> float:
        """Seconds to wait after so many failures, at least what the store asked for."""
        longest = min(self.backoff_max_seconds, self.backoff_seconds * 2 ** (failures - 1))
        asked = error.retry_after if isinstance(error, Throttled) else None
        return max(_jitter.uniform(0, longest), asked or 0.0)


class Tries:
    """The tries of one operation: how many there were, and since when.

    Args:
        policy: How often and how long to try.
    """

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._began = time.monotonic()
        self._failures = 0

    async def once(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Runs an operation once, when it is its turn, for as long as one try may take.

        Raises:
            StoreUnavailable: If it took too long.
        """
        if self._policy.pace is None:
            return await self._bounded(operation)
        async with self._policy.pace.turn():
            return await self._bounded(operation)

    async def _bounded(self, operation: Callable[[], Awaitable[T]]) -> T:
        limit = self._policy.attempt_timeout_seconds
        try:
            with anyio.fail_after(limit):
                return await operation()
        except TimeoutError:
            raise StoreUnavailable(
                f"The store did not answer within {limit:g} s",
                hint="Raise upload.attempt_timeout_seconds if it is merely slow",
            ) from None

    async def wait_after(self, error: CkpipeError) -> None:
        """Waits until it is time for the next try.

        Raises:
            CkpipeError: The error itself, if the policy gives up.
        """
        policy = self._policy
        self._failures += 1
        pause = policy.pause(self._failures, error)
        late = policy.deadline_seconds is not None and (
            time.monotonic() - self._began + pause > policy.deadline_seconds
        )
        if not error.transient or self._failures > policy.retries or late:
            raise error
        policy.on_retry(error, pause)
        await anyio.sleep(pause)


async def retrying(policy: RetryPolicy, operation: Callable[[], Awaitable[T]]) -> T:
    """Runs an operation, again and again while it fails with an error that may pass.

    Raises:
        StoreUnavailable: If a try took too long, and no tries are left.
        CkpipeError: The last error, once the policy gives up.
    """
    tries = Tries(policy)
    while True:
        try:
            return await tries.once(operation)
        except CkpipeError as error:
            await tries.wait_after(error)


def telling(policy: RetryPolicy, events: EventBus, id: CheckpointId, rank: int) -> RetryPolicy:
    """A policy whose retries are told as events of a save."""

    def report(error: CkpipeError, seconds: float) -> None:
        said = f"{type(error).__name__}: {error}"
        events.emit(Retrying(str(id), id.step, rank, said, seconds))

    return replace(policy, on_retry=report)


def logging_policy(settings: Upload) -> RetryPolicy:
    """The policy that a user's settings ask for, with its retries logged."""
    return RetryPolicy(
        settings.retries,
        settings.backoff_seconds,
        settings.backoff_max_seconds,
        settings.attempt_timeout_seconds,
        settings.deadline_seconds,
        RetryLog(),
    )


class RetryLog:
    """Warn of the first retry, and once in ten minutes of more, with how many there were."""

    def __init__(self) -> None:
        self._quiet_until, self._unsaid = -math.inf, 0

    def __call__(self, error: CkpipeError, seconds: float) -> None:
        """Log that an operation is tried again."""
        now = time.monotonic()
        level = logging.DEBUG if now < self._quiet_until else logging.WARNING
        more = f" ({self._unsaid} retries since the last warning)" if self._unsaid else ""
        logger.log(
            level, "Trying again in %.1f s after %s: %s%s",
            seconds, type(error).__name__, error, more,
        )  # fmt: skip
        if level == logging.WARNING:
            self._quiet_until, self._unsaid = now + _QUIET_SECONDS, 0
        else:
            self._unsaid += 1
