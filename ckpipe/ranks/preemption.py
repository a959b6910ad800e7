"""Being told that this process will be stopped soon, and making something of it.

Theory. A signal handler runs between any two instructions of the main thread, which may hold any
lock, so ours only writes two attributes and hands on to whoever handled the signal before. The
training loop asks; nothing interrupts it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from ckpipe.errors import UsageError


class Preemption:
    """Whether this process was told to stop, since when, and whether a save has answered it.

    All methods may be called in any thread and in signal handlers.

    Args:
        clock: Tells the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None
        self._answered = self._arrived = False
        self.alone = True
        """Whether nobody has to be asked when to save. If not, all ranks leave together: what
        this one was told counts once the step that they agreed on is there (:meth:`arrive`)."""

    def tell(self) -> None:
        """Notes that the process will be stopped; the first time counts."""
        if self._since is None:
            self._since = self._clock()

    def arrive(self) -> None:
        """Notes that the step has come that all ranks save at."""
        self.tell()
        self._arrived = True

    @property
    def signalled(self) -> bool:
        """Whether the process is known to be stopped, by itself or by another rank."""
        return self._since is not None

    @property
    def told(self) -> bool:
        """Whether it is time to save and to leave."""
        return self.signalled and (self.alone or self._arrived)

    @property
    def wants_save(self) -> bool:
        """Whether it is time, and no save has begun since."""
        return self.told and not self._answered

    def answer(self) -> bool:
        """Notes that a save begins; returns whether it is one that cannot wait for the next."""
        self._answered = self.told
        return self._answered

    def seconds_left(self, grace: float | None) -> float | None:
        """What is left of the time between being told and being stopped.

        Args:
            grace: That time in seconds; None if it is not known.

        Returns:
            Seconds, not less than 0; None if there is no end in sight.
        """
        if self._since is None or grace is None:
            return None
        return max(0.0, self._since + grace - self._clock())


class SignalWatch:
    """Hands signals to a function and then to whoever handled them before.

    The default action of a signal, which for most is to end the process, is held back. Processes
    that are forked from this one, such as those of data loaders, inherit the handlers: there they
    only do what was done before them, so that such a process can still be ended.

    Args:
        names: Signals such as ``SIGTERM``.
        told: Called on each of them; safe in a signal handler.
    """

    def __init__(self, names: Iterable[str], told: Callable[[], None]) -> None:
        self._numbers = [signal.Signals[name] for name in names]
        self._told = told
        self._before: dict[int, Any] = {}
        self._watching = False
        self._process = os.getpid()

    def begin(self) -> None:
        """Installs the handlers.

        Raises:
            UsageError: If there are any and this is not the main thread, where alone Python
                allows it.
        """
        if self._numbers and threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "Signals can only be watched from the main thread",
                hint="Open the pipeline there, or set preemption.signals to [] and call "
                "pipeline.preempt() yourself",
            )
        self._watching, self._process = True, os.getpid()
        for number in self._numbers:
            self._before[number] = signal.signal(number, self._handle)

    def end(self) -> None:
        """Puts the handlers back that were there before, unless others have come since.

        Those of ours that cannot be taken off, since somebody may hand signals on to them or this
        is not the main thread, do from now on what was done before them.
        """
        self._watching = False
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                before = _still_of_use(number, before)
                # None stands for a handler that was not installed from Python.
                signal.signal(number, signal.SIG_DFL if before is None else before)

    def before(self, number: int) -> Any:
        """What handled a signal before, if this no longer does anything else; else None."""
        return None if self._watching else self._before.get(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if self._watching and os.getpid() == self._process:
            self._told()
        elif before is signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if callable(before):
            before(number, frame)


def _still_of_use(number: int, handler: Any) -> Any:
    """A handler, or the one before it as long as it is that of a watch that has ended.

    Of two pipelines that were open together the one that came first may have been closed first.
    """
    while isinstance(watch := getattr(handler, "__self__", None), SignalWatch):
        before = watch.before(number)
        if before is None:
            break
        handler = before
    return handler


__all__ = ["Preemption", "SignalWatch"]
