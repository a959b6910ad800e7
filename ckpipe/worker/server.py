"""The worker: it serves its trainer, and finishes staged saves after the trainer's end.

A save in the worker runs the same stages as in the trainer, over blocks in shared memory.

The trainer has priority for the processor, by two settings. Between threads, their niceness counts,
sched(7). If the kernel groups processes by session (autogroup, sched(7) too), it first divides the
processor between sessions: there a worker alone would weigh as much as a trainer with all its
threads. So the session gets the same niceness as the threads. Batch scheduling keeps a thread that
wakes up, as writing threads do for every block, from preempting a running one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import logging
import math
import os
import signal
import socket
import sys
import time
from concurrent.futures import Future
from typing import Any

import anyio
import anyio.to_thread
from anyio import create_memory_object_stream
from anyio.abc import TaskGroup

from ckpipe.catalog.leases import under_lease
from ckpipe.errors import SaveCancelled, first_error
from ckpipe.events import BlockUploaded, Event, EventBus
from ckpipe.format.checksum import prepare
from ckpipe.format.data_file import DataFiles
from ckpipe.format.manifest import Structure
from ckpipe.format.names import launch_id
from ckpipe.memory.mapping import map_to_read
from ckpipe.save.context import StoreContext
from ckpipe.save.deliver import deliver
from ckpipe.save.record import FilledBlock, SaveRecord
from ckpipe.store.registry import backend_of
from ckpipe.types import CheckpointInfo
from ckpipe.worker import protocol
from ckpipe.worker.channel import Channel
from ckpipe.worker.protocol import IGNORED, TELL_STACKS

logger = logging.getLogger("ckpipe")

NOTICE_SECONDS = 0.05
"""Seconds that a message may be delayed if the trainer does not wait for it. Each message that
arrives alone wakes a thread of the trainer, which takes the GIL from the training thread."""


class RemoteSave(SaveRecord):
    """The record of a save in the worker.

    Args:
        begin: The trainer's message that began it.
        files: Its data files.
        rank: The rank.
        channel: The channel to the trainer.
    """

    def __init__(
        self, begin: protocol.Begin, files: DataFiles, rank: int, channel: Channel
    ) -> None:
        super().__init__(begin.id, rank, begin.began, begin.token)
        self.redelivered, self.files = begin.redelivered, files
        self.committed.add_done_callback(self._tell_committed)
        self._plans = {(each.file, each.offset): each for each in files.blocks}
        self._number, self._waits, self._channel = begin.save, begin.waits, channel
        self._filled, self._blocks = create_memory_object_stream[FilledBlock](math.inf)
        self._scope = anyio.CancelScope()
        self.settled = anyio.Event()

    def take(self, block: protocol.BlockCopied, segment: memoryview) -> None:
        """Pass a block on to the stages."""
        import numpy as np

        plan = self._plans[block.place]
        view = segment[block.at : block.at + plan.nbytes]
        sums = np.frombuffer(block.sums, np.int64).copy()  # unknown ones are filled in later
        with contextlib.suppress(anyio.BrokenResourceError):  # the save has failed
            self._filled.send_nowait(FilledBlock(self, plan, view, sums))

    def seal(self, sealed: protocol.Sealed, structure: Structure) -> None:
        """Take the manifest; no blocks come after it."""
        self.clock.absorb(sealed.clock)
        self.replanned = sealed.planned
        self.captured_seconds, self.staged_seconds = sealed.captured_seconds, sealed.staged_seconds
        self.sealed = structure, sealed.part
        self.copied.set()
        self._filled.close()

    def give_up(self) -> None:
        """Cancel its stages."""
        self._scope.cancel()

    @property
    def waits(self) -> bool:
        """See :class:`~ckpipe.save.record.SaveRecord`."""
        return self._waits and self.sealed is None

    def free(self, filled: FilledBlock) -> None:
        """Tell the trainer that a block is no longer in use."""
        place = filled.plan.file, filled.plan.offset
        released = protocol.BlockReleased(self._number, place)
        if self.waits:
            self._channel.post(released)
        else:
            self._channel.post_soon(released, NOTICE_SECONDS)

    def _tell_committed(self, committed: Future[CheckpointInfo]) -> None:
        self.settled.set()
        assert self.durable_seconds is not None
        logger.info("%s is committed by rank %d", self.name, self.rank)
        unsettled = self.unsettled is not None
        self._channel.post(
            protocol.Committed(
                self._number, committed.result(), self.durable_seconds, unsettled, self.clock
            )
        )

    async def run(self, context: StoreContext) -> None:
        """Run the stages, and report their end.

        If it is cancelled because the worker as a whole fails, it reports nothing: the end of the
        worker gives a better error than a save that was given up without a request.
        """
        error: Exception | None = SaveCancelled("The save was given up")
        try:
            with self._scope:
                await deliver(self, context, self._blocks)
                error = None
        except Exception as group:
            error = first_error(group)
            # Only for the worker's log: the trainer raises the error.
            logger.info("%s: %s: %s", self.name, type(error).__name__, error)
        unsettled = self.unsettled is not None
        try:
            self._channel.post(protocol.Ended(self._number, error, unsettled, self.clock))
        except Exception as reason:  # an error that cannot cross must not end the worker
            logger.info("%s: its error cannot be sent: %s", self.name, reason)
            told = RuntimeError(f"{type(error).__name__}: {error}")
            self._channel.post(protocol.Ended(self._number, told, unsettled, self.clock))


class Service:
    """The work of one worker.

    Args:
        channel: The channel to the trainer.
        init: The first message of the trainer.
    """

    def __init__(self, channel: Channel, init: protocol.Init) -> None:
        self._channel, self._init = channel, init
        self._segments: dict[int, memoryview] = {}
        self._files: DataFiles | None = None
        self._structure: Structure | None = None
        self._saves: dict[int, RemoteSave] = {}
        self._listening = anyio.CancelScope()
        self._end: protocol.Finish | None = None

    async def run(self) -> bool:
        """Serve until the trainer sends ``Finish`` or is gone; False if it cannot serve."""
        init = self._init
        try:
            backend = await anyio.to_thread.run_sync(backend_of, init.settings)
        except Exception as error:
            # Only for the worker's log: the trainer raises the error.
            logger.info("The store cannot be used", exc_info=True)
            self._channel.post(protocol.StartFailed(error))
            return False
        events = EventBus()
        events.add(self._tell)
        async with backend:
            self._context = StoreContext.of(
                init.settings, backend, events, init.rank, init.world_size
            )
            async with anyio.create_task_group() as beside:
                beside.start_soon(self._beat, name="heartbeat")
                beside.start_soon(self._watch, name="watch of the trainer")
                beside.start_soon(self._step_back, name="priority of the session")
                # Otherwise the loop waits for imports in the first save.
                beside.start_soon(anyio.to_thread.run_sync, prepare, name="imports")
                async with anyio.create_task_group() as saves:
                    await self._listen(saves)
                    await self._wind_up(beside)
                beside.cancel_scope.cancel()
        return True

    # Messages of the trainer

    async def _listen(self, tasks: TaskGroup) -> None:
        with self._listening, contextlib.suppress(anyio.EndOfStream):
            while self._end is None:
                self._hear(await self._channel.receive(), tasks)
        with contextlib.suppress(anyio.EndOfStream):  # messages of a trainer that has ended
            while self._end is None and (message := self._channel.receive_nowait()) is not None:
                self._hear(message, tasks)

    def _hear(self, message: protocol.Message, tasks: TaskGroup) -> None:
        match message:
            case protocol.NewSegment():
                descriptor = self._channel.take_descriptor()
                try:
                    view = map_to_read(descriptor, message.nbytes, message.offset)
                finally:
                    os.close(descriptor)
                self._segments[message.number] = view
            case protocol.Dropped():  # it is unmapped with the last view of it
                self._segments.pop(message.number, None)
            case protocol.Begin():
                self._begin(message, tasks)
            case protocol.BlockCopied():
                if message.save in self._saves:
                    self._saves[message.save].take(message, self._segments[message.segment])
            case protocol.Sealed():
                self._structure = message.structure or self._structure
                assert self._structure is not None
                if message.save in self._saves:
                    self._saves[message.save].seal(message, self._structure)
            case protocol.GiveUp():
                if message.save in self._saves:
                    self._saves[message.save].give_up()
            case protocol.Finish():
                self._end = message

    def _begin(self, begin: protocol.Begin, tasks: TaskGroup) -> None:
        catalog = self._context.catalog
        catalog.resumed_from, catalog.line = begin.resumed_from, begin.line
        self._files = begin.files or self._files
        assert self._files is not None
        save = RemoteSave(begin, self._files, self._init.rank, self._channel)
        self._saves[begin.save] = save
        tasks.start_soon(self._run, begin.save, save, name=f"save {save.name}")

    async def _run(self, number: int, save: RemoteSave) -> None:
        try:
            await save.run(self._context)
        finally:
            del self._saves[number]

    # Beside the saves

    async def _beat(self) -> None:
        while True:
            await anyio.sleep(self._init.heartbeat)
            if self._channel.idle:
                self._channel.post(protocol.Alive())

    async def _step_back(self) -> None:
        if niceness := self._init.settings.worker.niceness:
            await anyio.to_thread.run_sync(step_back_together, niceness, abandon_on_cancel=True)

    def _tell(self, event: Event) -> None:
        """Send an event to the trainer; events of progress are frequent, and batched."""
        if isinstance(event, BlockUploaded):
            self._channel.post_soon(event, NOTICE_SECONDS)
        else:
            self._channel.post(event)

    async def _watch(self) -> None:
        """Notice the trainer's end, also while another process holds its socket open."""
        try:
            watched = os.pidfd_open(self._init.trainer)
        except OSError:  # it has ended, as the socket will show
            return
        try:
            if os.getppid() == self._init.trainer:  # otherwise another process has the id by now
                await anyio.wait_readable(watched)
            self._listening.cancel()
        finally:
            os.close(watched)

    # The end

    async def _wind_up(self, beside: TaskGroup) -> None:
        """End the saves after the last message of the trainer; the caller waits for them."""
        if self._end is None:
            logger.warning("The trainer (process %d) is gone", self._init.trainer)
        survive = self._init.settings.worker.survive
        keep = survive if self._end is None else not self._end.give_up
        for save in list(self._saves.values()):
            if not keep or save.sealed is None:
                save.give_up()
            elif self._end is None and not save.settled.is_set():
                logger.warning("%s was staged and is brought to its end", save.name)
                for subject in (save.name, launch_id(save.id.attempt)):
                    beside.start_soon(self._hold, save, subject, name=f"lease on {subject}")

    async def _hold(self, save: RemoteSave, subject: str) -> None:
        """Hold a lease until a save is committed: loads wait for it, and no sweep removes it."""
        async with under_lease(self._context.retrying, subject):
            await save.settled.wait()


class _Forwarding(logging.Handler):
    """Forwards ckpipe's log lines to the trainer's logger, except events, which it logs itself."""

    def __init__(self, channel: Channel, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(logging.WARNING)
        self._channel, self._loop = channel, loop

    def emit(self, record: logging.LogRecord) -> None:
        if not (isinstance(record.args, tuple) and any(isinstance(a, Event) for a in record.args)):
            message = protocol.Logged(record.levelno, record.getMessage())
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._channel.post, message)


def adopt(init: protocol.Init) -> None:
    """Adopt the trainer's import path, directory and environment; blocking."""
    sys.path[:] = init.path
    os.environ.clear()
    os.environ.update(init.environment)
    with contextlib.suppress(OSError):  # the directory is gone
        os.chdir(init.directory)


def _end_without_memory(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """End the process if a callback of the loop had no memory.

    The callback's message is lost, and the trainer would wait for it for ever, since the heartbeat
    goes on. But the trainer notices the end of the process.
    """
    loop.default_exception_handler(context)
    if isinstance(context.get("exception"), MemoryError):
        os._exit(1)


async def serve(descriptor: int) -> int:
    """Serve the trainer at the other end of a socket; return the exit code."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_end_without_memory)
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        init = await channel.receive()
        if not isinstance(init, protocol.Init):
            raise ValueError(f"A trainer begins with {type(init).__name__}")
        if niceness := init.settings.worker.niceness:
            step_back(niceness)  # before there is another thread, for all inherit it
        await anyio.to_thread.run_sync(adopt, init)
        logger.addHandler(_Forwarding(channel, loop))
        logger.info("This worker (process %d) serves process %d", os.getpid(), init.trainer)
        code = 0 if await Service(channel, init).run() else 1
        await channel.flush()
    except anyio.EndOfStream:
        logger.warning("The trainer was gone before its first message")
        return 0
    except Exception as group:
        error = first_error(group)
        logger.error("The worker fails", exc_info=error)
        channel.post(protocol.StartFailed(error))
        return 1
    return code


_GROUP = "/proc/self/autogroup"
_TRIES = 20
_PAUSE_SECONDS = 0.1


def step_back(niceness: int) -> None:
    """Lower the priority of the calling thread, and of all threads that it starts from now on."""
    os.nice(niceness)
    with contextlib.suppress(OSError):  # a container may forbid it; niceness is more important
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def step_back_together(niceness: int) -> bool:
    """Lower the priority of the whole session; blocking.

    The kernel accepts one such request in a tenth of a second, from all unprivileged processes of a
    machine together. If many workers start at once, some must retry.

    Returns:
        True if the kernel has accepted it. Without groups by session it is not needed.
    """
    for _ in range(_TRIES):
        try:
            with open(_GROUP, "w") as group:
                group.write(str(niceness))
        except BlockingIOError:
            time.sleep(_PAUSE_SECONDS)
        except OSError:
            return False
        else:
            return True
    return False


_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def go_on_when_the_trainer_dies() -> None:
    """Make a stopped worker (SIGSTOP) continue once its trainer is dead: prctl(2).

    Otherwise it would stay stopped, and staged saves would be neither stored nor given up. The
    kernel does the same for process groups that lose their parent within a session.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)


def main() -> int:
    """Serve on the socket whose descriptor is the only argument; return the exit code."""
    for each in IGNORED:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)  # blocked since the start
    go_on_when_the_trainer_dies()
    faulthandler.enable()
    faulthandler.register(TELL_STACKS)
    log = logging.StreamHandler(sys.stderr)
    log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(log)
    logging.getLogger("ckpipe").setLevel(logging.INFO)
    code = anyio.run(serve, int(sys.argv[1]))
    logging.getLogger("ckpipe").info("The worker ends with %d", code)
    return code
