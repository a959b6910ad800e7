"""Functions of the user's that are called when something has happened to a save.

Theory. A hook is slow, blocks, waits for the trainer's thread, or raises; none of that may touch a
save. So no stage waits for a hook: an event only starts a task. Plain functions run in threads of
their own, coroutine functions on the pipeline's loop. A hook is called for one event after the
other, in order; different hooks do not wait for each other.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
from anyio.abc import TaskGroup

from ckpipe import threads
from ckpipe.errors import UsageError
from ckpipe.events import Event, EventBus
from ckpipe.user_code import LEAVING, refuse_exit

logger = logging.getLogger("ckpipe")
E = TypeVar("E", bound=Event)
_inside: ContextVar[bool] = ContextVar("ckpipe_hook", default=False)


def in_hook() -> bool:
    """Tell whether the caller is called by a hook, on the event loop or in the hook's thread."""
    return _inside.get()


@dataclass(eq=False, slots=True)
class _Hook:
    function: Callable[[Any], object]
    turn: anyio.Lock | None = None

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__qualname__", self.function))

    async def call(self, event: Event) -> None:
        if self.turn is None:  # made on the loop that it is used on
            self.turn = anyio.Lock()
        _inside.set(True)
        async with self.turn:
            if inspect.iscoroutinefunction(self.function):
                await self.function(event)
                return
            # Not the threads of the pipeline's own work, of which a blocked hook would keep one.
            limiter = anyio.CapacityLimiter(1)
            returned = await threads.run_sync(
                _call_inside, self.function, event, limiter=limiter, abandon_on_cancel=True
            )
            if inspect.isawaitable(returned):  # of an object or a lambda that looks like neither
                await returned


def _call_inside(function: Callable[[Any], object], event: Event) -> object:
    _inside.set(True)  # a thread of the reserve has not the context of the task
    return function(event)


class Hooks:
    """Calls hooks on events.

    Args:
        events: Where the events come from.
    """

    def __init__(self, events: EventBus) -> None:
        self._hooks: dict[type[Event], list[_Hook]] = {}
        self._tasks: TaskGroup | None = None
        self._running: list[tuple[_Hook, Event]] = []
        self._idle = anyio.Event()
        events.add(self._heard)

    def add(self, kind: type[E], function: Callable[[E], object]) -> None:
        """Have a function called with every event of a kind from now on; in any thread.

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
            pass  # a function of C that does not say what it takes
        self._hooks.setdefault(kind, []).append(_Hook(function))

    def start(self, tasks: TaskGroup, failed: Callable[[Exception], None]) -> None:
        """Call hooks from now on.

        Args:
            tasks: Runs them.
            failed: Told what a hook raised.
        """
        self._tasks, self._failed = tasks, failed

    async def drained(self) -> None:
        """Wait until every hook that was called has returned."""
        while self._running:
            self._idle = anyio.Event()
            await self._idle.wait()

    def describe_running(self) -> str:
        """The hooks that have not returned; empty if all have."""
        return ", ".join(f"{hook.name} on {event.id}" for hook, event in self._running)

    def _heard(self, event: Event) -> None:
        for hook in self._hooks.get(type(event), ()):
            if self._tasks is not None:
                self._running.append((hook, event))
                self._tasks.start_soon(self._call, hook, event, name=f"hook {hook.name}")

    async def _call(self, hook: _Hook, event: Event) -> None:
        try:
            await hook.call(event)
        except (Exception, *LEAVING, asyncio.CancelledError) as raised:
            task = asyncio.current_task()
            if isinstance(raised, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise
            error = raised
            if not isinstance(error, Exception):
                # It left, or waited for something else that was cancelled; it itself is not.
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
