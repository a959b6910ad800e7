"""Decide the steps that all ranks save at: by steps, by time, or since this process will be
stopped.

Theory. Ranks are not at the same step, and a rank that is told of a step that it has left behind
cannot save it. So a step is agreed on in two rounds. Each rank promises a bound: its trainer goes
no further than that before the step is decided. Then the greatest of all bounds is decided, which
no rank can have passed. The bounds lie ahead by as many steps as the agreement should take at the
pace of training, so that as a rule no trainer ever waits. The trainer asks in its own thread and
the pipeline promises on its loop, so all of it is under one lock, which is held for microseconds.

Preemption. A signal handler runs between any two instructions of the main thread, which may hold
any lock, so ours only writes two attributes and hands on to the handler that was there before. The
training loop asks; nothing interrupts it.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from ckpipe.errors import UsageError


class SaveSchedule:
    """Says at which steps to save.

    **Steps.** The marks are the multiples of ``steps``. A save is due as soon as one has been
    reached or passed since the last save or load, so that a mark that is skipped, or that lay
    before a crash, is made up for at the next step asked about. Step 0 of a new run is no mark:
    nothing has been learned by then.

    **Seconds.** A save is due when so much time has passed since the last save or load, or since
    the beginning.

    **The last step** of a run, if it is told, is due too, unless that state is saved already.

    Asking changes nothing: a save stays due until one has begun. It may be asked in any thread.

    Args:
        steps: The distance of marks; None for none.
        seconds: The longest time between saves in seconds; None for none.
        clock: Tells the time in seconds.
    """

    def __init__(
        self,
        steps: int | None,
        seconds: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps, self._seconds, self._clock = steps, seconds, clock
        self._last = (0, clock())
        self._begun = False

    @property
    def is_set(self) -> bool:
        """Tell whether there is anything to go by."""
        return self._steps is not None or self._seconds is not None

    def due(self, step: int) -> bool:
        """Tell whether to save at a step."""
        return self.is_marked(step) or self.is_overdue()

    def is_marked(self, step: int) -> bool:
        """Tell whether a mark has been reached or passed."""
        return self._steps is not None and step // self._steps > self._last[0] // self._steps

    def is_last(self, step: int, last: int | None) -> bool:
        """Tell whether this is the run's last step, and its state is neither saved nor loaded."""
        return last is not None and step >= last and not (self._begun and self._last[0] == step)

    def is_overdue(self) -> bool:
        """Tell whether the longest time between saves is over."""
        return self._seconds is not None and self._elapsed() >= self._seconds

    def is_near(self, slack: float) -> bool:
        """Tell whether the time is over in so many seconds or a tenth of it, whichever is more."""
        if self._seconds is None:
            return False
        return self._elapsed() >= self._seconds - max(slack, 0.1 * self._seconds)

    def _elapsed(self) -> float:
        return self._clock() - self._last[1]

    def begin_at(self, step: int) -> None:
        """Note that the state of a step is being saved, or has been loaded."""
        self._last = (step, self._clock())
        self._begun = True


logger = logging.getLogger("ckpipe")

_SAMPLES = 32
"""How many steps the pace is measured over."""


class Pace:
    """The pace at which a trainer goes through its steps.

    Args:
        clock: Tells the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[int, float]] = deque(maxlen=_SAMPLES)

    def note(self, step: int) -> None:
        """Note that a step is asked about now."""
        if self._seen and step < self._seen[-1][0]:
            self._seen.clear()  # the run was rolled back
        self._seen.append((step, self._clock()))

    def ahead(self, seconds: float) -> int:
        """The number of steps that are likely to go by in so many seconds; at least one."""
        if len(self._seen) < 2:
            return 1
        (first, began), (last, ended) = self._seen[0], self._seen[-1]
        if ended <= began:
            return 1
        return max(1, math.ceil((last - first) / (ended - began) * seconds))


class SaveStepAgreement:
    """The appointments of a rank, each under the name of its occasion.

    All methods may be called in any thread. Only :meth:`ask` waits, and only if training went
    faster than expected.

    Args:
        patience: How long a trainer waits at a bound at most, in seconds.
        clock: Tells the time in seconds.
    """

    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience, self._pace = patience, Pace(clock)
        self._changed = threading.Condition()
        # For each occasion a bound that is not passed before a step is decided, and that step.
        self._open: dict[str, tuple[int, int | None]] = {}
        self._passed = -1

    def ask(self, step: int) -> frozenset[str]:
        """The occasions that a save is due for at a step; waits until that is decided.

        Args:
            step: The step that the trainer has just taken.
        """
        with self._changed:
            self._pace.note(step)
            if not self._changed.wait_for(lambda: not self._undecided(step), self._patience):
                for occasion in self._undecided(step):
                    del self._open[occasion]
                    logger.error(
                        "Step %d goes on: the ranks did not agree within %g s on the step to save "
                        "at (%s)",
                        step,
                        self._patience,
                        occasion,
                    )
            self._passed = step
            return frozenset(
                occasion
                for occasion, (_, decided) in self._open.items()
                if decided is not None and step >= decided
            )

    def propose(self, occasion: str, seconds: float) -> int:
        """Promise not to reach a step before it is decided whether to save there.

        Args:
            occasion: What for.
            seconds: How long the decision should take.

        Returns:
            That step, which lies ahead.
        """
        with self._changed:
            bound = self._passed + self._pace.ahead(seconds)
            self._open[occasion] = (bound, None)
            return bound

    def decide(self, occasion: str, step: int) -> bool:
        """Note the step that was decided.

        Returns:
            False if it is too late, since the trainer has left that step behind.
        """
        with self._changed:
            missed = self._passed >= step
            if missed:
                self._open.pop(occasion, None)
            else:
                self._open[occasion] = (step, step)
            self._changed.notify_all()
            return not missed

    def consume(self, step: int) -> None:
        """Note that a save of a step begins; appointments for it or for before it are kept."""
        with self._changed:
            for occasion, (_, decided) in list(self._open.items()):
                if decided is not None and decided <= step:
                    del self._open[occasion]

    def has(self, beginning: str) -> bool:
        """Tell whether an appointment is not kept yet, for an occasion whose name begins like
        this.
        """
        with self._changed:
            return any(occasion.startswith(beginning) for occasion in self._open)

    def _undecided(self, step: int) -> list[str]:
        return [
            occasion
            for occasion, (bound, decided) in self._open.items()
            if decided is None and step >= bound
        ]


class StopRequest:
    """A request to stop this process: since when, and whether a save has answered it.

    All methods may be called in any thread and in signal handlers.

    Args:
        clock: Tells the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None
        self._answered = self._arrived = False
        self.alone = True
        """Whether no other rank takes part. If one does, all ranks leave together: what
        this one was told counts once the step that they agreed on is there (:meth:`arrive`)."""

    def tell(self) -> None:
        """Note that the process will be stopped; the first time counts."""
        if self._since is None:
            self._since = self._clock()

    def arrive(self) -> None:
        """Note that the step has come that all ranks save at."""
        self.tell()
        self._arrived = True

    @property
    def signalled(self) -> bool:
        """Tell whether the process is known to be stopped, by itself or by another rank."""
        return self._since is not None

    @property
    def told(self) -> bool:
        """Tell whether it is time to save and to leave."""
        return self.signalled and (self.alone or self._arrived)

    @property
    def wants_save(self) -> bool:
        """Tell whether it is time, and no save has begun since."""
        return self.told and not self._answered

    def answer(self) -> bool:
        """Note that a save begins; return whether it is one that cannot wait for the next."""
        self._answered = self.told
        return self._answered

    def seconds_left(self, grace: float | None) -> float | None:
        """The rest of the time between being told and being stopped.

        Args:
            grace: That time in seconds; None if it is not known.

        Returns:
            Seconds, not less than 0; None if there is no end in sight.
        """
        if self._since is None or grace is None:
            return None
        return max(0.0, self._since + grace - self._clock())


class SignalWatch:
    """Hands signals to a function and then to the handler that was there before.

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
        """Install the handlers.

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
        """Put the handlers back that were there before, unless others have come since.

        Those of ours that cannot be taken off, since other handlers may hand signals on to them or
        this is not the main thread, do from now on what was done before them.
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
        """The handler of a signal before, if this no longer does anything else; else None."""
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
