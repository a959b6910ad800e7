"""Save once more when a signal announces the end of this process.

Theory. A handler in Python runs between any two instructions of the main thread, which may hold any
lock. So ckpipe's handler only writes two attributes and calls the earlier handler. The training
loop polls; nothing interrupts it. While the main thread is in a collective, no handler in Python
runs. A thread learns of the signal from Python's handler in C (:class:`_WakeupSocket`).

Data loaders. Slurm, systemd and ``torchrun`` send the signal to all processes of a job, and it
would end the workers of a data loader before the loop has taken its last step. So workers ignore
it (:func:`worker_init`). But the trainer ends its workers by SIGTERM as well: those that hang when
their loader is closed, and all that are left when it ends, for which it then waits. Only a handler
in C is told the sender. A signal that comes before a worker has its handler stays pending, because
the worker is started with the signals blocked.

Handlers that raise. When a worker dies, torch raises an exception between any two instructions of
the main thread, in ``save`` too. There it is deferred until the state is copied
(:func:`errors_of_handlers_deferred`).
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.resource_tracker
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from ckpipe.errors import UsageError
from ckpipe.memory import native

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

__all__ = ["worker_init"]

logger = logging.getLogger("ckpipe")

SIGNALS = ("SIGTERM", "SIGUSR1")
"""Signals that announce the end unless the settings name others."""


class StopRequest:
    """A request to stop this process: its time, and whether a save has answered it.

    All methods may be called in any thread and in signal handlers.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None
        self._answered = self._arrived = False
        self.alone = True
        """True if no other rank takes part. If one does, all ranks leave together: the request
        takes effect once the agreed step is reached (:meth:`arrive`)."""

    def tell(self) -> None:
        """Record that the process will be stopped; only the first call counts."""
        if self._since is None:
            self._since = self._clock()

    def arrive(self) -> None:
        """Record that the step at which all ranks save is reached."""
        self.tell()
        self._arrived = True

    @property
    def signalled(self) -> bool:
        """True if this process or another rank will be stopped."""
        return self._since is not None

    @property
    def told(self) -> bool:
        """True if it is time to save and to leave."""
        return self.signalled and (self.alone or self._arrived)

    @property
    def answered(self) -> bool:
        """True if a save has begun since it was time."""
        return self._answered

    @property
    def wants_save(self) -> bool:
        """True if it is time, and no save has begun since."""
        return self.told and not self._answered

    def answer(self) -> bool:
        """Record that a save begins; return True if it must not be skipped before the stop."""
        self._answered = self.told
        return self._answered

    def seconds_left(self, grace: float | None) -> float | None:
        """Return the rest of the time between the request and the stop.

        Args:
            grace: That time in seconds; None if it is not known.

        Returns:
            Seconds, at least 0; None without a request or a known time.
        """
        if self._since is None or grace is None:
            return None
        return max(0.0, self._since + grace - self._clock())


class SignalWatch:
    """Hands signals to a function and then to another handler.

    That is the earlier one, or one that was installed since (:meth:`renew`). Of several, the newest
    is called first. Each of them may call this watch in turn, as the earlier handler that it found,
    and so reaches the next older one.

    The default action of a signal, which for most is to end the process, is suppressed. Forked
    processes, such as those of data loaders, inherit the handlers. There, the handlers only do the
    earlier action, so such a process can still be ended.

    Attributes:
        watches: True from the beginning of the watch to its end.

    Args:
        names: Signals such as ``SIGTERM``.
        told: Called on each of them, in a signal handler and in a thread; it may be called twice
            for one signal.
    """

    def __init__(self, names: Iterable[str], told: Callable[[], None]) -> None:
        self.names = tuple(names)
        self._numbers = [signal.Signals[name] for name in self.names]
        self._told = told
        self._before: dict[int, Any] = {}
        self._later: dict[int, list[Any]] = {}
        self._depths: dict[int, int] = {}
        self.watches = False
        self._process = os.getpid()

    def begin(self) -> None:
        """Install the handlers.

        Raises:
            UsageError: If there are signals and this is not the main thread: Python allows handlers
                only there.
        """
        if self._numbers and threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "Signals can only be watched from the main thread",
                hint="Open the pipeline there, or set preemption.signals to [] and call "
                "pipeline.preempt() yourself",
            )
        self.watches, self._process = True, os.getpid()
        if self._numbers:
            _wakeup.begin()
        _watches.append(self)
        for number in self._numbers:
            self._before[number] = signal.signal(number, self._handle)

    def renew(self) -> None:
        """Install the handlers again where other code has replaced them since.

        The handler of the other code is called after them, and is left when the watch ends. On
        other threads than the main one this does nothing.
        """
        if not self.watches_here:
            return
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._numbers:
            handler = signal.getsignal(number)
            if not self._is_called_by(handler, number) and not _deferred.wraps(number, handler):
                later = self._later.setdefault(number, [])
                if handler in later:
                    later.remove(handler)
                later.append(signal.signal(number, self._handle))

    def _is_called_by(self, handler: Any, number: int) -> bool:
        """Tell whether a handler is that of this watch, or of one that was begun later."""
        while isinstance(watch := getattr(handler, "__self__", None), SignalWatch):
            if watch is self:
                return True
            handler = watch._next(number)
        return False

    def _next(self, number: int, depth: int = 0) -> Any:
        """Return the handler to call: the newest, or an older one if newer ones are running."""
        later = self._later.get(number, ())
        return later[-1 - depth] if depth < len(later) else self._before.get(number)

    def end(self) -> None:
        """Restore the handlers that ckpipe's call, unless others were installed since.

        Some of ckpipe's handlers cannot be removed, since other handlers may call them or this is
        not the main thread. These only do the earlier action from now on.
        """
        self.watches = False
        if self in _watches:
            _watches.remove(self)
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._before:
            if signal.getsignal(number) == self._handle:
                before = _still_of_use(number, self._drop(number))
                # None stands for a handler that was not installed from Python.
                signal.signal(number, signal.SIG_DFL if before is None else before)
        if not any(each.watches_here and each.names for each in _watches):
            _wakeup.end()

    @property
    def watches_here(self) -> bool:
        """True from the beginning to the end, but not in a forked process."""
        return self.watches and os.getpid() == self._process

    def notice(self, numbers: bytes) -> None:
        """Record signals whose handlers may not have run yet; callable on any thread."""
        if self.watches_here and not set(numbers).isdisjoint(self._numbers):
            self._told()

    def _drop(self, number: int) -> Any:
        """Return the handler to install in place of this watch's, which calls it no more."""
        later = self._later.get(number)
        return later.pop() if later else self._before.get(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        depth = self._depths.get(number, 0)
        handler = self._next(number, depth)
        if self.watches_here:
            self._told()
        elif handler is signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if callable(handler):
            self._depths[number] = depth + 1
            try:
                handler(number, frame)
            finally:
                self._depths[number] = depth


_watches: list[SignalWatch] = []
"""The watches that have begun and not ended."""


def _still_of_use(number: int, handler: Any) -> Any:
    """Return a handler; skip handlers of ended watches back to the earlier ones.

    Of two pipelines that were open together, the one that was opened first may be closed first.
    """
    while isinstance(watch := getattr(handler, "__self__", None), SignalWatch):
        if watch.watches:
            break
        handler = watch._drop(number)
    return handler


class _Descriptor:
    """A descriptor of other code, which may close it at any time.

    Args:
        number: Its number; -1 for none.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._file = self._open_file()

    def _open_file(self) -> tuple[int, int] | None:
        try:
            status = os.fstat(self._number)
        except OSError:
            return None
        return status.st_dev, status.st_ino

    @property
    def number(self) -> int:
        """The number; -1 once it stands for no file, or for another one."""
        file = self._open_file()
        return self._number if file is not None and file == self._file else -1

    def write(self, numbers: bytes) -> None:
        """Write numbers of signals; lose them where the owner does not read."""
        if (number := self.number) >= 0:
            with contextlib.suppress(OSError):
                os.write(number, numbers)


class _WakeupSocket:
    """Notices signals at once, also while the main thread cannot run their handlers.

    Python's handler in C writes the number of each signal to one descriptor of the process
    (``signal.set_wakeup_fd``). A thread reads it here, tells the watches, and passes every number
    on to the descriptor that was installed before, such as that of an event loop. Where other code
    installs its own later, only the handlers in Python notice signals.

    Both ends and the thread stay until the process ends, since code that has replaced the
    descriptor may put it back at any time.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a handler in Python may open or close a pipeline
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._begun = False
        self._former = _Descriptor(-1)

    def begin(self) -> None:
        """Install the descriptor; on the main thread only."""
        with self._lock:
            try:
                reader, writer = self._ends = self._ends or self._started()
            except (OSError, RuntimeError):
                return  # the pipeline needs descriptors and threads too, and says that they lack
            self._pass_on(reader, self._former)  # the new watch is not told of earlier signals
            installed = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            self._begun = True
            if installed != writer.fileno():
                self._former = _Descriptor(installed)

    def _started(self) -> tuple[socket.socket, socket.socket]:
        reader, writer = socket.socketpair()
        try:
            reader.setblocking(False)
            writer.setblocking(False)
            if hasattr(socket, "SO_PASSCRED"):
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            name = "ckpipe signals"
            threading.Thread(target=self._serve, args=(reader,), name=name, daemon=True).start()
        except BaseException:
            reader.close()
            writer.close()
            raise
        return reader, writer

    def _serve(self, reader: socket.socket) -> None:
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        while True:
            poll.poll()
            with self._lock:
                self._pass_on(reader, self._former)

    def _pass_on(self, reader: socket.socket, former: _Descriptor) -> None:
        """Tell the watches, and the former owner, of all signals that have come."""
        with contextlib.suppress(BlockingIOError):
            while True:
                space = socket.CMSG_SPACE(_CREDENTIALS.size)
                numbers, items, *_ = reader.recvmsg(4096, space)
                # A signal of a forked process, which shares the socket until begin_in_child.
                if any(_CREDENTIALS.unpack(item)[0] != os.getpid() for *_, item in items):
                    continue
                former.write(numbers)
                for watch in tuple(_watches):
                    watch.notice(numbers)

    def end(self) -> None:
        """Put the former descriptor back, unless other code has installed one since.

        On the main thread only.
        """
        if not self._begun or self._ends is None:
            return
        reader, writer = self._ends
        with self._lock:
            self._begun = False
            self._pass_on(reader, self._former)
            # Only a call that installs a descriptor tells which one was installed.
            installed = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            owner = self._former if installed == writer.fileno() else _Descriptor(installed)
            # The owner's choice whether a full buffer is reported cannot be learned.
            signal.set_wakeup_fd(owner.number, warn_on_full_buffer=False)
            self._pass_on(reader, owner)

    def begin_in_child(self) -> None:
        """Leave the sockets to the process that this one was forked from."""
        if self._ends is not None:
            installed = signal.set_wakeup_fd(-1)
            if installed != self._ends[1].fileno():
                signal.set_wakeup_fd(installed)
            for end in self._ends:
                end.close()
        self._lock, self._ends, self._begun = threading.RLock(), None, False
        self._former = _Descriptor(-1)


_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a sender, as Linux tells them."""

_wakeup = _WakeupSocket()
os.register_at_fork(after_in_child=_wakeup.begin_in_child)


# Workers of data loaders


def worker_init(worker_id: int, signals: Iterable[str] = SIGNALS) -> None:
    """Let a worker of a ``DataLoader`` survive the signals that announce the end of a job.

    A ``worker_init_fn`` for loaders that you iterate without :class:`~ckpipe.Batches`, which does
    the same by itself while a pipeline with ``preemption`` is open::

        DataLoader(dataset, num_workers=4, worker_init_fn=ckpipe.preemption.worker_init)

    From then on the worker ignores these signals, except SIGTERM from the process that made the
    loader. It ends as before when that process closes the loader, ends, or dies. Programs that the
    worker starts are not affected. Works with all start methods.

    Args:
        worker_id: The number of the worker, as torch passes it.
        signals: The names of the signals. Pass others by ``functools.partial``.

    Needs the compiled library of ckpipe. Where it is missing, worker 0 logs a warning, and the
    signals end workers as before.
    """
    trainer = multiprocessing.parent_process()
    if trainer is None or threading.current_thread() is not threading.main_thread():
        return  # the workers of this loader are no processes
    numbers = [signal.Signals[name] for name in signals]
    try:
        assert trainer.pid is not None
        if not native.survive_signals(numbers, trainer.pid):
            if worker_id == 0:
                logger.warning(
                    "Signals that stop the whole job end the workers of the data loader too, since "
                    "the compiled library of ckpipe is missing"
                )
        elif os.getppid() != trainer.pid:
            # The parent is the fork server. The signal may end it, which torch would take for the
            # end of the trainer.
            from torch.utils.data._utils.worker import ManagerWatchdog

            ManagerWatchdog.is_alive = lambda self: trainer.is_alive()  # type: ignore[method-assign]
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def _init_worker(
    inner: Callable[[int], None] | None, signals: tuple[str, ...], worker_id: int
) -> None:
    worker_init(worker_id, signals)
    if inner is not None:
        inner(worker_id)


@contextmanager
def workers_protected(
    loader: DataLoader[Any], init: Callable[[int], None] | None
) -> Iterator[None]:
    """Let the workers that a loader starts in the block survive the signals that are watched.

    Without an open pipeline that watches signals this changes nothing.

    Args:
        loader: The loader; its ``worker_init_fn`` is set.
        init: The ``worker_init_fn`` of the program.
    """
    names = tuple(dict.fromkeys(name for watch in _watches for name in watch.names))
    loader.worker_init_fn = partial(_init_worker, init, names) if names else init
    if not names or not loader.num_workers or not _inherit_the_mask(loader):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.Signals[name] for name in names])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _inherit_the_mask(loader: DataLoader[Any]) -> bool:
    """Tell whether workers begin with this thread's mask, and :func:`worker_init` resets it."""
    if type(loader)._get_iterator.__module__.partition(".")[0] not in ("torch", "torchdata"):
        return False
    method = (loader.multiprocessing_context or multiprocessing).get_start_method()
    if method == "spawn":  # which starts this process first, and that unblocks SIGTERM here
        multiprocessing.resource_tracker.ensure_running()
    # A fork server that is started with signals blocked would hand that on to all its children.
    return bool(method != "forkserver")


# Handlers that raise

_TIMERS = {signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF}
_DEFERRED = tuple(sorted(map(int, signal.valid_signals() - _TIMERS)))


class _DeferredErrors:
    """Handlers that are wrapped so that their exceptions are kept; on the main thread only."""

    def __init__(self) -> None:
        self._blocks: set[object] = set()
        self._wrapped: list[tuple[int, Any, Any]] = []
        self._errors: list[Exception] = []

    def begin(self, block: object) -> None:
        first = not self._blocks  # coroutines of one loop may await several saves
        self._blocks.add(block)
        for number in _DEFERRED if first else ():
            handler = signal.getsignal(number)
            if callable(handler) and handler is not signal.default_int_handler:
                wrapper = partial(self._call, handler)
                self._wrapped.append((number, handler, wrapper))
                signal.signal(number, wrapper)

    def end(self, block: object) -> list[Exception]:
        self._blocks.discard(block)
        while self._wrapped and not self._blocks:
            number, handler, wrapper = self._wrapped.pop()
            if signal.getsignal(number) is wrapper:
                signal.signal(number, handler)
        errors, self._errors = self._errors, []
        return errors

    def wraps(self, number: int, handler: Any) -> bool:
        """True if this is a handler that is wrapped at the moment."""
        return any((number, handler) == (each, wrapper) for each, _, wrapper in self._wrapped)

    def _call(self, handler: Any, number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except Exception as error:
            if not self._blocks:
                raise
            self._errors.append(error)


_deferred = _DeferredErrors()


@contextmanager
def errors_of_handlers_deferred() -> Iterator[None]:
    """Raise exceptions of signal handlers at the end of the block, not inside it.

    ``SystemExit`` and ``KeyboardInterrupt`` are not deferred, nor are exceptions of handlers of
    timers (SIGALRM, SIGVTALRM, SIGPROF), which bound the time of a call. On other threads than the
    main one handlers do not run, and this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    block = object()
    try:
        _deferred.begin(block)
        yield
    except BaseException as error:
        for each in _deferred.end(block):
            error.add_note(f"Meanwhile the handler of a signal raised {each!r}")
        raise
    finally:
        late = _deferred.end(block)
    if late:
        raise late[0]


# Data loaders that fail

_batches_received = 0


def note_batch() -> None:
    """Record that a loop over ``Batches`` receives a batch."""
    global _batches_received
    _batches_received += 1


def batches_received() -> int:
    """Return the number of batches that loops over ``Batches`` have received in this process."""
    return _batches_received


def note_loader_error(error: Exception) -> None:
    """Record that a loader has raised an exception in place of a batch, or of an iteration."""
    error.__ckpipe_loader__ = True  # type: ignore[attr-defined]


def is_loader_error(error: BaseException | None) -> bool:
    """Tell whether an exception, or one that it was raised from, came out of a loader."""
    seen: set[int] = set()  # "raise error from error" makes a cycle
    while error is not None and id(error) not in seen:
        if hasattr(error, "__ckpipe_loader__"):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
