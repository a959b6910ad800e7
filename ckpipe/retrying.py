"""The one retry policy: exponential backoff with full jitter, for errors that may pass.

Source of the formula: "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import anyio

from ckpipe.errors import CkpipeError, StoreUnavailable, Throttled

T = TypeVar("T")


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
    """

    retries: int
    backoff_seconds: float
    backoff_max_seconds: float
    attempt_timeout_seconds: float
    deadline_seconds: float | None = None
    on_retry: Callable[[CkpipeError, float], None] = lambda error, seconds: None

    def pause(self, failures: int, error: CkpipeError) -> float:
        """Seconds to wait after so many failures, at least what the store asked for."""
        longest = min(self.backoff_max_seconds, self.backoff_seconds * 2 ** (failures - 1))
        asked = error.retry_after if isinstance(error, Throttled) else None
        return max(random.uniform(0, longest), asked or 0.0)


async def retrying(policy: RetryPolicy, operation: Callable[[], Awaitable[T]]) -> T:
    """Runs an operation, again and again while it fails with an error that may pass.

    Raises:
        StoreUnavailable: If a try took too long, and no tries are left.
        CkpipeError: The last error, once the policy gives up.
    """
    began, failures = time.monotonic(), 0
    while True:
        try:
            with anyio.fail_after(policy.attempt_timeout_seconds):
                return await operation()
        except TimeoutError:
            limit = policy.attempt_timeout_seconds
            error: CkpipeError = StoreUnavailable(
                f"The store did not answer within {limit:g} s",
                hint="Raise upload.attempt_timeout_seconds if it is merely slow",
            )
        except CkpipeError as raised:
            error = raised
        failures += 1
        pause = policy.pause(failures, error)
        late = policy.deadline_seconds is not None and (
            time.monotonic() - began + pause > policy.deadline_seconds
        )
        if not error.transient or failures > policy.retries or late:
            raise error
        policy.on_retry(error, pause)
        await anyio.sleep(pause)
