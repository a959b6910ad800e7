"""Listeners of a pipeline's events: the user's hooks, and the statistics of its work.

Hooks. A hook may be slow, block, wait for the trainer's thread, or raise; none of that may affect a
save. So no stage waits for a hook: an event only starts a task. Plain functions run in threads of
their own, coroutine functions on the pipeline's loop. A hook is called for one event after the
other, in order; different hooks do not wait for each other. A hook of a save waits until the call
of ``save`` is over, so that it finds what the caller keeps of the save, such as the handle.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import anyio
from anyio.abc import TaskGroup

from ckpipe import threads
from ckpipe.errors import UsageError
from ckpipe.events import (
    Event,
    EventBus,
    RankCommitted,
    Retrying,
    SaveEnded,
    SaveStarted,
    Staged,
)
from ckpipe.interpreter import refuse_exit, user_code
from ckpipe.notebook import html_table
from ckpipe.save.context import SaveContext
from ckpipe.save.request import SaveCall
from ckpipe.save.save import Save
from ckpipe.store.retry import pauses
from ckpipe.types import SaveReport, SaveStatus, size_text

logger = logging.getLogger("ckpipe")

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.001, 0.05
_CLOSING_SECONDS = 1.0

E = TypeVar("E", bound=Event)
_inside: ContextVar[bool] = ContextVar("ckpipe_hook", default=False)


def in_hook() -> bool:
    """True if a hook is calling, on the event loop or in the hook's thread."""
    return _inside.get()


@dataclass(eq=False, slots=True)
class _Hook:
    function: Callable[[Any], object]
    turn: anyio.Lock = field(default_factory=anyio.Lock)

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__qualname__", self.function))

    async def call(self, event: Event) -> None:
        _inside.set(True)
        if inspect.iscoroutinefunction(self.function):
            await self.function(event)
            return
        # A limiter of its own: a blocked hook must not occupy a thread of the pipeline's work.
        limiter = anyio.CapacityLimiter(1)
        returned = await threads.run_sync(
            _call_inside, self, event, limiter=limiter, abandon_on_cancel=True
        )
        if inspect.isawaitable(returned):  # an object or lambda may hide a coroutine function
            await returned


def _call_inside(hook: _Hook, event: Event) -> object:
    _inside.set(True)  # a thread of the reserve lacks the context of the task
    with user_code(f"The hook {hook.name}", ""):
        return hook.function(event)


class Hooks:
    """Calls hooks on events.

    Attributes:
        closing: True once the pipeline is being closed; may be set on any thread.

    Args:
        events: The source of events.
    """

    def __init__(self, events: EventBus) -> None:
        self._hooks: dict[type[Event], list[_Hook]] = {}
        self._tasks: TaskGroup | None = None
        self._running: list[tuple[_Hook, Event]] = []
        self._calls: dict[str, SaveCall] = {}
        self.closing = False
        self._idle = anyio.Event()
        events.add(self._heard)

    def add(self, function: Callable[[Any], object], *kinds: type[Event]) -> None:
        """Call a function with every event of some kinds from now on; in any thread.

        Raises:
            UsageError: If it cannot be called with one argument.
        """
        try:
            inspect.signature(function).bind(None)
        except TypeError as error:
            raise UsageError(
                f"{function!r:.100} cannot be called with an event: {error}",
                hint="Give a function, or coroutine function, of one argument",
            ) from None
        except ValueError:
            pass  # a C function without a signature
        hook = _Hook(function)  # one for all kinds, which keeps their order
        for kind in kinds:
            self._hooks.setdefault(kind, []).append(hook)

    def start(self, tasks: TaskGroup, failed: Callable[[Exception], None]) -> None:
        """Call hooks from now on.

        Args:
            tasks: Runs them.
            failed: Called with each error of a hook.
        """
        self._tasks, self._failed = tasks, failed

    def await_call(self, id: str, call: SaveCall) -> None:
        """Call no hook of a save before the call that began it is over."""
        self._calls = {each: one for each, one in self._calls.items() if not one.is_over}
        self._calls[id] = call

    async def _call_over(self, event: Event) -> None:
        """Wait until the call that began a save is over; once the pipeline closes, not for long.

        That call may be waiting for the closing, as when a signal handler closes the pipeline in
        the middle of it, or never end, as when its event loop was closed before.
        """
        call, left = self._calls.get(event.id), _CLOSING_SECONDS
        if isinstance(event, Staged) and call is not None and call.until == "committed":
            return  # others may go on with the state long before the call returns
        for pause in pauses(math.inf, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS):
            if call is None or call.is_over or left <= 0:
                return
            await anyio.sleep(pause)
            left -= pause if self.closing else 0

    async def drained(self) -> None:
        """Wait until every hook that was called has returned."""
        while self._running:
            self._idle = anyio.Event()
            await self._idle.wait()

    def describe_running(self) -> str:
        """Name the hooks that have not returned; empty if all have."""
        return ", ".join(f"{hook.name} on {event.id}" for hook, event in self._running)

    def _heard(self, event: Event) -> None:
        for hook in self._hooks.get(type(event), ()):
            if self._tasks is not None:
                self._running.append((hook, event))
                self._tasks.start_soon(self._call, hook, event, name=f"hook {hook.name}")

    async def _call(self, hook: _Hook, event: Event) -> None:
        try:
            async with hook.turn:
                await self._call_over(event)
                await hook.call(event)
        except BaseException as raised:
            task = asyncio.current_task()
            if isinstance(raised, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise
            error = raised
            if not isinstance(error, Exception):
                # The hook raised an exception that would end the loop, such as SystemExit, or
                # awaited a cancelled task; its own task is not cancelled.
                error = refuse_exit(f"The hook {hook.name}", raised)
                error.__cause__ = raised
            error.add_note(
                f"Raised by the hook {hook.name} on {type(event).__name__} of {event.id}"
            )
            logger.debug("The hook %s failed", hook.name, exc_info=error)
            self._failed(error)
        finally:
            self._running.remove((hook, event))
            if not self._running:
                self._idle.set()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Statistics:
    """The work of a pipeline, done and under way, in numbers.

    Args:
        saves: Number of saves by status, of ended saves and of those under way.
        bytes: Size of the data files of all committed saves.
        linked_bytes: Bytes among these that were linked, and not written.
        seconds: Busy seconds of each stage, of all saves that have ended or committed.
        waits: Seconds that each stage waited between its first work and its last.
        staged_seconds: Seconds of all saves together until their state was copied.
        active_seconds: Seconds in which at least one save was under way and not committed.
        retries: Number of retries of requests of saves.
        lanes: Blocks of one save that may be under way to the store at the same time.
        budget_used: Staging memory that saves hold now, in bytes.
        budget_capacity: Staging memory that they may hold, in bytes.
        budget_waiting: Number of saves that wait for staging memory.
        pool_bytes: Host memory of the pool of staging memory now, in bytes; between saves it keeps
            what the last ones needed.
        pool_used: Bytes of the pool that hold data of a save or load now.
    """

    saves: Mapping[SaveStatus, int] = field(default_factory=dict)
    bytes: int = 0
    linked_bytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    waits: Mapping[str, float] = field(default_factory=dict)
    staged_seconds: float = 0.0
    active_seconds: float = 0.0
    retries: int = 0
    lanes: int = 0
    budget_used: int = 0
    budget_capacity: int = 0
    budget_waiting: int = 0
    pool_bytes: int = 0
    pool_used: int = 0

    @property
    def throughput(self) -> float:
        """Committed bytes per second of :attr:`active_seconds`; 0 before the first save."""
        return self.bytes / self.active_seconds if self.active_seconds else 0.0

    def __repr__(self) -> str:
        return f"<Statistics {', '.join(f'{name} {value}' for name, value in self._rows())}>"

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        saves = ", ".join(f"{count} {status}" for status, count in sorted(self.saves.items()))
        rows = [("saves", saves or "none")]
        if self.bytes:
            rate = f"{size_text(self.throughput)}/s"
            linked = f", {size_text(self.linked_bytes)} linked" if self.linked_bytes else ""
            rows.append(("committed", f"{size_text(self.bytes)} at {rate}{linked}"))
        if self.saves:
            rows.append(("staged", f"in {self.staged_seconds:.3g} s"))
        if slowest := max(self.seconds, key=lambda name: self.seconds[name], default=None):
            rows.append(("slowest stage", f"{slowest} {self.seconds[slowest]:.3g} s"))
        if self.retries:
            rows.append(("retries", f"{self.retries}"))
        if self.budget_capacity:
            used = f"{size_text(self.budget_used)} of {size_text(self.budget_capacity)}"
            rows.append(("memory", f"{used}, {size_text(self.pool_bytes)} kept"))
        return rows


def _with(total: Statistics, status: SaveStatus, report: SaveReport | None) -> Statistics:
    """Add a save to the sums; a save under way has no report, and counts by its status only."""
    saves = {**total.saves, status: total.saves.get(status, 0) + 1}
    if report is None:
        return replace(total, saves=saves)
    seconds, waits = dict(total.seconds), dict(total.waits)
    for name, stage in report.stages.items():
        seconds[name] = seconds.get(name, 0.0) + stage.busy
        waits[name] = waits.get(name, 0.0) + stage.waited
    return replace(
        total,
        saves=saves,
        bytes=total.bytes + (report.bytes if status == "committed" else 0),
        linked_bytes=total.linked_bytes + (report.linked_bytes if status == "committed" else 0),
        seconds=seconds,
        waits=waits,
        staged_seconds=total.staged_seconds + (report.staged_seconds or 0.0),
    )


class StatisticsRecorder:
    """Counts the saves of one pipeline.

    It gets events on one thread; any thread may query it. A committed save counts at once, with all
    its numbers, even while its retention is still under way.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may query while its thread does
        self._ended = Statistics()
        self._open: set[str] = set()
        self._uncommitted: set[str] = set()
        self._since = 0.0

    def __call__(self, event: Event) -> None:
        """Count an event."""
        with self._lock:
            if isinstance(event, SaveStarted):
                if not self._uncommitted:
                    self._since = time.perf_counter()
                self._open.add(event.id)
                self._uncommitted.add(event.id)
            elif isinstance(event, RankCommitted):
                self._committed(event.id)
            elif isinstance(event, SaveEnded):
                self._open.discard(event.id)
                self._committed(event.id)
                self._ended = _with(self._ended, event.status, event.report)
            elif isinstance(event, Retrying):
                self._ended = replace(self._ended, retries=self._ended.retries + 1)

    def _committed(self, id: str) -> None:
        if id in self._uncommitted:
            self._uncommitted.remove(id)
            if not self._uncommitted:
                self._ended = replace(self._ended, active_seconds=self._active_seconds())

    def _active_seconds(self) -> float:
        return self._ended.active_seconds + time.perf_counter() - self._since

    def statistics(
        self, under_way: Iterable[Save], *, lanes: int = 0, context: SaveContext | None = None
    ) -> Statistics:
        """Return the numbers until now.

        Args:
            under_way: The saves that have not ended.
            lanes: Number of lanes of a save.
            context: The memory; None if the pipeline is not open.
        """
        with self._lock:
            found = self._ended
            left = [save for save in under_way if save.name in self._open]
            if self._uncommitted:
                found = replace(found, active_seconds=self._active_seconds())
        for save in left:
            status = save.status
            found = _with(found, status, save.report() if status == "committed" else None)
        if context is None:
            return replace(found, lanes=lanes)
        budget, arena = context.budget, context.arena
        blocks = arena.blocks
        return replace(
            found,
            lanes=lanes,
            budget_used=budget.used,
            budget_capacity=budget.capacity,
            budget_waiting=budget.waiting,
            pool_bytes=blocks * arena.block_bytes,
            pool_used=(blocks - arena.free_blocks) * arena.block_bytes,
        )

    def describe(self, under_way: Iterable[Save]) -> str:
        """Describe the saves that have ended or committed, in a few words."""
        found = self.statistics(under_way)
        counts = [f"{found.saves[each]} {each}" for each in _OVER if each in found.saves]
        if found.retries:
            counts.append(f"{found.retries} tried again")
        if found.bytes:
            counts.append(size_text(found.bytes))
        return ", ".join(counts)


_OVER: tuple[SaveStatus, ...] = ("cancelled", "committed", "failed", "skipped")
