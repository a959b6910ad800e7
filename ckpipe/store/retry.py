"""Retry requests with exponential backoff and full jitter, bound them when throttled, and poll.

Source of the backoff: "Exponential Backoff And Jitter", AWS Architecture Blog, 2015. If a store
throttles, additive increase and multiplicative decrease (AIMD) bound the number of concurrent
requests. Of the simple rules, only AIMD leads independent senders to fair shares (D.-M. Chiu and
R. Jain, "Analysis of the increase and decrease algorithms for congestion avoidance in computer
networks", 1989).
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import anyio

from ckpipe import threads
from ckpipe.backend import Backend, ObjectReader, PutMode, Upload
from ckpipe.errors import (
    CkpipeError,
    CorruptCheckpoint,
    ObjectExists,
    PermissionDenied,
    StoreError,
    StoreUnavailable,
    Throttled,
)
from ckpipe.events import EventBus, Retrying
from ckpipe.store.wrapper import Operation, Result, WrappedBackend
from ckpipe.types import CheckpointId

if TYPE_CHECKING:
    from ckpipe.settings import Upload as UploadSettings

logger = logging.getLogger("ckpipe")

T = TypeVar("T")
Corrupt = TypeVar("Corrupt", bound=CorruptCheckpoint)

_QUIET_SECONDS = 600.0

OnRead = Callable[[int], None]
"""Called with the number of bytes that one read of a large object added."""

_CHANGES = ("put", "link", "open_upload", "delete", "remove_stale_uploads")

# A separate generator: the random numbers of training must not depend on answers of a store.
_jitter = random.Random()

_PROBES, _PROBE_BYTES = 3, 4096

_LOOK = "Look at the network, at the disk's connection and at this machine's memory"


class AimdLimiter:
    """Bound the number of concurrent requests by AIMD, once a store throttles.

    There is no bound until then. A refusal sets it to half the number of requests under way. Each
    round of successes raises it by one, until it reaches the number of requests under way at the
    store's first refusal; then it is lifted. Refusals of requests that were under way together
    count once. For this, a request knows its *era*: how often the bound had been halved when it
    began. Times are seconds on any one clock. All requests that share a limiter slow down together,
    on one event loop.
    """

    def __init__(self) -> None:
        self.bound = math.inf
        self.under_way = 0
        self.not_before = -math.inf
        self._ceiling = 0.0
        self._era = 0
        self._ended = anyio.Event()

    def may_begin(self, now: float) -> bool:
        """Tell whether one more request may begin."""
        return self.under_way + 1 <= self.bound and now >= self.not_before

    def begin(self) -> int:
        """Count a request as under way until one of the three methods below; return its era."""
        self.under_way += 1
        return self._era

    def succeeded(self, era: int) -> None:
        """End a request that the store served."""
        self.under_way -= 1
        if era == self._era:
            self.bound += 1 / self.bound
        if self.bound >= self._ceiling:
            self.bound = math.inf

    def failed(self) -> None:
        """End a request whose outcome says nothing about the store's load."""
        self.under_way -= 1

    def throttled(self, era: int, now: float, retry_after: float | None = None) -> None:
        """End a request that the store refused because of too many requests.

        Args:
            era: Its era.
            now: The time.
            retry_after: Seconds for which the store wants no more requests, if it said so.
        """
        if era == self._era:
            before = self.bound
            if before == math.inf:
                self._ceiling = float(self.under_way)
            self.bound = max(1.0, min(before, self.under_way) / 2)
            self._era += 1
            if self.bound < before:
                logger.info("The store throttles: %d requests at a time", int(self.bound))
        self.under_way -= 1
        self.not_before = max(self.not_before, now + (retry_after or 0.0))

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Wait until a request may be sent, and adapt the bound to its outcome.

        The request itself must not wait for the same limiter.
        """
        while not self.may_begin(now := time.monotonic()):
            if self._ended.is_set():
                self._ended = anyio.Event()
            seconds = self.not_before - now
            with anyio.move_on_after(seconds if seconds > 0 else math.inf):
                await self._ended.wait()
        era = self.begin()
        try:
            yield
        except Throttled as error:
            self.throttled(era, time.monotonic(), error.retry_after)
            raise
        except BaseException:
            self.failed()
            raise
        else:
            self.succeeded(era)
        finally:
            self._ended.set()


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The bounds on the retries of an operation.

    Args:
        retries: The number of retries of an operation.
        backoff_seconds: The longest wait before the first retry; it doubles each time.
        backoff_max_seconds: The longest wait before any retry.
        attempt_timeout_seconds: The time limit of one try.
        deadline_seconds: The time limit of all tries together; None for no limit.
        on_retry: Called with each retried error and the seconds until the retry.
        limiter: Admits each try, so that a store that throttles gets fewer requests at a time;
            None for operations that are few anyway.
    """

    retries: int
    backoff_seconds: float
    backoff_max_seconds: float
    attempt_timeout_seconds: float
    deadline_seconds: float | None = None
    on_retry: Callable[[CkpipeError, float], None] = lambda error, seconds: None
    limiter: AimdLimiter | None = None

    def pause(self, failures: int, error: CkpipeError) -> float:
        """Draw the seconds to wait after so many failures, at least those the store asked for."""
        longest = min(self.backoff_max_seconds, self.backoff_seconds * 2 ** (failures - 1))
        asked = error.retry_after if isinstance(error, Throttled) else None
        return max(_jitter.uniform(0, longest), asked or 0.0)


class Tries:
    """The tries of one operation: their number, and the time since the first.

    Args:
        policy: The bounds on retries.
    """

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._began = time.monotonic()
        self._failures = 0

    async def once(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Run an operation once it is admitted, within the time limit of one try.

        Raises:
            StoreUnavailable: If it took too long.
        """
        limiter, limit = self._policy.limiter, self._policy.attempt_timeout_seconds
        async with nullcontext() if limiter is None else limiter.admitted():
            try:
                with anyio.fail_after(limit):
                    return await operation()
            except TimeoutError:
                raise StoreUnavailable(
                    f"The store did not answer within {limit:g} s",
                    hint="Raise upload.attempt_timeout_seconds if it is merely slow",
                ) from None

    async def wait_after(self, error: CkpipeError) -> None:
        """Wait until it is time for the next try.

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
    """Run an operation, and retry it while it fails with a transient error.

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


def pauses(
    until: float, first: float, longest: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[float]:
    """Yield the seconds to sleep before each look of a poll: 0, and then doubling pauses.

    The last pause ends at ``until``, by the clock. So there is a look at the start, and one at the
    end.
    """
    yield 0.0
    pause = first
    while (left := until - clock()) > 0:
        yield min(pause, left)
        pause = min(2 * pause, longest)


async def create_once(
    backend: Backend, key: str, data: bytes = b"{}", *, durable: bool = True
) -> bool:
    """Create an object unless it exists; return whether this call has created it.

    If it exists, another writer has created it, or an earlier try whose answer was lost: a caller
    that must know reads it back. Note 4 of ``docs/design.md`` lists the proofs that
    an object is one's own.

    Args:
        backend: The store.
        key: The key.
        data: The object.
        durable: False if it need not survive a crash of this machine.

    Raises:
        StoreError: If the store failed.
    """
    try:
        if durable:
            await backend.put(key, data, PutMode.CREATE)
        else:
            await backend.put_volatile(key, data)
    except ObjectExists:
        return False
    return True


def telling(policy: RetryPolicy, events: EventBus, id: CheckpointId, rank: int) -> RetryPolicy:
    """Return the policy with its retries emitted as events of a save."""

    def report(error: CkpipeError, seconds: float) -> None:
        said = f"{type(error).__name__}: {error}"
        events.emit(Retrying(str(id), id.step, rank, said, seconds))

    return replace(policy, on_retry=report)


def logging_policy(settings: UploadSettings) -> RetryPolicy:
    """Return the policy of a user's settings, with its retries logged."""
    return RetryPolicy(
        settings.retries,
        settings.backoff_seconds,
        settings.backoff_max_seconds,
        settings.attempt_timeout_seconds,
        settings.deadline_seconds,
        RetryLog(),
    )


class RetryLog:
    """Warn of the first retry, then at most once in ten minutes, with the number since."""

    def __init__(self) -> None:
        self._quiet_until, self._unsaid = -math.inf, 0

    def __call__(self, error: CkpipeError, seconds: float) -> None:
        """Log that an operation is retried."""
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


class RetryingBackend(WrappedBackend):
    """Retry the requests to another backend; for all but a save's own upload and commit.

    A request with a lost answer may have taken effect before its retry. So a create-only put may
    meet its own object and raise :class:`~ckpipe.errors.ObjectExists`; a caller that must know
    reads the object back. A link recognises its own target. An opened upload belongs to its caller,
    which has retries of its own. Reads of large objects are fewer at a time while the store
    throttles.

    Args:
        inner: The backend that does the work; its owner opens and closes it.
        policy: The bounds on retries.
        read_only: Whether to refuse every change, with ``PermissionDenied``.
        on_read: Called in any thread with the number of bytes that a read of a large object added.
    """

    def __init__(
        self,
        inner: Backend,
        policy: RetryPolicy,
        *,
        read_only: bool = False,
        on_read: OnRead | None = None,
    ) -> None:
        super().__init__(inner)
        self._policy, self._read_only, self._on_read = policy, read_only, on_read
        self._reading = replace(policy, limiter=AimdLimiter())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.inner!r}>"

    async def around(self, operation: Operation, call: Callable[[], Awaitable[Result]]) -> Result:
        if self._read_only and operation.verb in _CHANGES:
            if operation.verb == "delete" and not operation.key:
                return await call()  # it deletes nothing
            raise PermissionDenied(
                "The pipeline was opened to read only",
                key=operation.key,
                hint="Open one without read_only=True",
            )
        policy = self._reading if operation.verb == "read_into" else self._policy
        result = await retrying(policy, call)
        if operation.verb == "read_into" and self._on_read is not None:
            self._on_read(operation.size)
        return result

    async def open_upload(self, key: str, *, size: int, block_bytes: int) -> Upload:
        return await self.around(
            Operation("open_upload", key),
            lambda: self.inner.open_upload(key, size=size, block_bytes=block_bytes),
        )

    def open_object(self, key: str) -> ObjectReader | None:
        try:
            opened = self.inner.open_object(key)
        except StoreError as error:
            if error.transient:
                return None  # the caller then uses an ordinary request, which is retried
            raise
        if opened is None or self._on_read is None:
            return opened
        return _CountedReader(opened, self._on_read)


class _CountedReader:
    def __init__(self, inner: ObjectReader, on_read: OnRead) -> None:
        self._inner, self._on_read = inner, on_read
        self.size, self.is_cached = inner.size, inner.is_cached

    def read_into(self, offset: int, buffer: memoryview, *, cached: bool) -> None:
        self._inner.read_into(offset, buffer, cached=cached)
        self._on_read(len(buffer))


@asynccontextmanager
async def naming_unreadable(backend: Backend, step: int | None) -> AsyncIterator[None]:
    """Raise damage in place of an unreadable object in a block, if others can be read.

    A mount that has failed reads no object; its error is raised as it is.

    Args:
        backend: The store, with retries.
        step: The step of the checkpoint.

    Raises:
        CorruptCheckpoint: If one object cannot be read, and another one can.
    """
    try:
        yield
    except StoreError as error:
        key = error.key if error.unreadable else None
        if key is None or not await _reads_another(backend, key):
            raise
        raise CorruptCheckpoint(
            f"An object cannot be read while others can: {error.message}",
            step=step,
            rank=error.rank,
            key=key,
        ) from error


async def _reads_another(backend: Backend, key: str) -> bool:
    """Tell whether an index can be read; the one that was just read, perhaps from memory, last."""
    own = key.partition("/")[0]
    try:
        objects = (await backend.children("")).objects
    except StoreError:
        return False
    found = [each for each in objects if each.size and each.key != key]
    for each in sorted(found, key=lambda each: each.key.startswith(own))[:_PROBES]:
        with suppress(StoreError):
            size = min(each.size, _PROBE_BYTES)
            await backend.read_into(each.key, 0, memoryview(bytearray(size)))
            return True
    return False


async def read_decoded(
    backend: Backend, key: str, max_bytes: int, decode: Callable[[bytes], T]
) -> T:
    """Read a small object and decode it; read it once more if it is damaged.

    Args:
        backend: The store.
        key: The object's key.
        max_bytes: The largest size to accept.
        decode: Checks and decodes the object, in a worker thread.

    Raises:
        CorruptCheckpoint: The error of ``decode`` for both reads, by :func:`locate_damage`.
        ObjectNotFound: If no object has the key.
        StoreError: If the store failed.
    """
    data = await backend.get(key, max_bytes=max_bytes)
    try:
        return await threads.run_sync(decode, data)
    except CorruptCheckpoint as error:
        again = await backend.get(key, max_bytes=max_bytes)
        if again == data:
            raise locate_damage(error, same=True) from None
    try:
        found = await threads.run_sync(decode, again)
    except CorruptCheckpoint as error:
        raise locate_damage(error, same=False) from None
    warn_of_damaged_transfer(key)
    return found


def locate_damage(error: Corrupt, *, same: bool) -> Corrupt:
    """Add to the error of two damaged reads whether the store or the transfer damages the bytes.

    Args:
        error: The error of one of the reads.
        same: Whether both reads returned the same bytes.
    """
    if same:
        error.message += "; it was read twice and came the same, so the store has it like this"
    else:
        error.message += "; it was read twice and came differently, so it is damaged on the way"
        error.hint = error.hint or f"{_LOOK}, and load again"
    return error


def warn_of_damaged_transfer(what: str) -> None:
    """Log that bytes were damaged in a transfer and right in the second read."""
    logger.warning("%s came damaged and was right when it was read again. %s", what, _LOOK)
