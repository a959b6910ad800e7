"""The worker: it serves its trainer, and finishes what was staged when that is gone.

One save in the worker runs the same stages as in the trainer, over blocks in shared memory.

The trainer has the processor first. Two things decide that. Between threads it is their niceness,
sched(7). Where the kernel groups processes by session (autogroup, sched(7) too), it first shares
out between sessions, in which a worker alone would weigh as much as a trainer with all its
threads; so the session is made as nice as the threads. Batch scheduling keeps a thread that wakes
up, as those that write do for every block, from taking the place of one that runs.
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
from ckpipe.retention import from_data
from ckpipe.save.context import StoreContext
from ckpipe.save.deliver import deliver
from ckpipe.save.record import FilledBlock, SaveRecord
from ckpipe.store.registry import create_backend
from ckpipe.store.retry import RetryingBackend
from ckpipe.types import CheckpointInfo
from ckpipe.worker import protocol
from ckpipe.worker.channel import Channel
from ckpipe.worker.protocol import IGNORED, TELL_STACKS

logger = logging.getLogger("ckpipe")

NOTICE_SECONDS = 0.05
"""How long a notice may lie here that nobody waits for. Each that arrives by itself wakes a thread
of the trainer, which takes the interpreter from the one that trains."""


class RemoteSave(SaveRecord):
    """A save on its way through the worker.

    Args:
        begin: What the trainer said of it.
        files: What it stores.
        rank: The rank.
        channel: Where the trainer is told how it goes.
    """

    def __init__(
        self, begin: protocol.Begin, files: DataFiles, rank: int, channel: Channel
    ) -> None:
        super().__init__(begin.id, rank, begin.began, begin.token)
        self.again, self.files = begin.again, files
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
        sums = np.frombuffer(block.sums, np.int64).copy()  # what is unknown is filled in
        with contextlib.suppress(anyio.BrokenResourceError):  # the save has failed
            self._filled.send_nowait(FilledBlock(self, plan, view, sums))

    def seal(self, sealed: protocol.Sealed, structure: Structure) -> None:
        """Take what the manifest says; no blocks come after it."""
        self.clock.absorb(sealed.clock)
        self.replanned = sealed.planned
        self.captured_seconds, self.staged_seconds = sealed.captured_seconds, sealed.staged_seconds
        self.sealed = structure, sealed.part
        self.copied.set()
        self._filled.close()

    def give_up(self) -> None:
        """Cancel what is not done yet."""
        self._scope.cancel()

    def free(self, filled: FilledBlock) -> None:
        """Tell the trainer that a block is in use no more."""
        place = filled.plan.file, filled.plan.offset
        released = protocol.BlockReleased(self._number, place)
        if self._waits and self.sealed is None:
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
        """Run the stages, and say how they ended.

        If it is cancelled because the worker as a whole fails, it says nothing: the end of the
        worker says more than that the save was given up without a request.
        """
        error: Exception | None = SaveCancelled("The save was given up")
        try:
            with self._scope:
                await deliver(self, context, self._blocks)
                error = None
        except Exception as group:
            error = first_error(group)
            # For the log of the worker only: the trainer raises it.
            logger.info("%s: %s: %s", self.name, type(error).__name__, error)
        unsettled = self.unsettled is not None
        try:
            self._channel.post(protocol.Ended(self._number, error, unsettled, self.clock))
        except Exception as reason:  # an error that cannot cross ends no worker
            logger.info("%s: its error cannot be sent: %s", self.name, reason)
            told = RuntimeError(f"{type(error).__name__}: {error}")
            self._channel.post(protocol.Ended(self._number, told, unsettled, self.clock))


class Service:
    """The work of one worker.

    Args:
        channel: The way to the trainer.
        init: What the trainer has said first.
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
        """Serve until the trainer has had enough or is gone; False if it cannot."""
        init = self._init
        try:
            backend = await anyio.to_thread.run_sync(create_backend, init.url, init.options)
        except Exception as error:
            # For the log of the worker only: the trainer raises it.
            logger.info("The store cannot be used", exc_info=True)
            self._channel.post(protocol.StartFailed(error))
            return False
        events = EventBus()
        events.add(self._tell)
        async with backend:
            self._context = StoreContext(
                backend=backend,
                patient=RetryingBackend(backend, init.retry),
                events=events,
                rank=init.rank,
                world_size=init.world_size,
                block_bytes=init.block_bytes,
                lanes=init.lanes,
                retry=init.retry,
                sweep_after=init.sweep_after,
                rule=None if init.rule is None else from_data(init.rule),
                keep_reports=init.keep_reports,
            )
            async with anyio.create_task_group() as beside:
                beside.start_soon(self._beat, name="heartbeat")
                beside.start_soon(self._watch, name="watch of the trainer")
                beside.start_soon(self._step_back, name="priority of the session")
                # Else the first save has the loop wait for imports.
                beside.start_soon(anyio.to_thread.run_sync, prepare, name="imports")
                async with anyio.create_task_group() as saves:
                    await self._listen(saves)
                    await self._wind_up(beside)
                beside.cancel_scope.cancel()
        return True

    # What the trainer says

    async def _listen(self, tasks: TaskGroup) -> None:
        with self._listening, contextlib.suppress(anyio.EndOfStream):
            while self._end is None:
                self._hear(await self._channel.receive(), tasks)
        with contextlib.suppress(anyio.EndOfStream):  # what a trainer said that is gone
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
            case protocol.Dropped():  # it is unmapped when the last view of it is gone
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
        self._context.resumed_from = begin.resumed_from
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
        if niceness := self._init.niceness:
            await anyio.to_thread.run_sync(step_back_together, niceness, abandon_on_cancel=True)

    def _tell(self, event: Event) -> None:
        """Tell the trainer of an event; of progress, which is frequent, with some delay."""
        if isinstance(event, BlockUploaded):
            self._channel.post_soon(event, NOTICE_SECONDS)
        else:
            self._channel.post(event)

    async def _watch(self) -> None:
        """Notice the trainer's death, also while another process holds its socket open."""
        try:
            watched = os.pidfd_open(self._init.trainer)
        except OSError:  # it is gone, and its socket tells
            return
        try:
            if os.getppid() == self._init.trainer:  # else the number is somebody else's by now
                await anyio.wait_readable(watched)
            self._listening.cancel()
        finally:
            os.close(watched)

    # The end

    async def _wind_up(self, beside: TaskGroup) -> None:
        """End the saves as the end of the trainer's words asks; the caller waits for them."""
        if self._end is None:
            logger.warning("The trainer (process %d) is gone", self._init.trainer)
        keep = self._init.survive if self._end is None else not self._end.give_up
        for save in list(self._saves.values()):
            if not keep or save.sealed is None:
                save.give_up()
            elif self._end is None and not save.settled.is_set():
                logger.warning("%s was staged and is brought to its end", save.name)
                for subject in (save.name, launch_id(save.id.attempt)):
                    beside.start_soon(self._hold, save, subject, name=f"lease on {subject}")

    async def _hold(self, save: RemoteSave, subject: str) -> None:
        """Hold a lease until a save is committed: others wait for it, and no sweep removes it."""
        async with under_lease(self._context.patient, subject):
            await save.settled.wait()


class _Forwarding(logging.Handler):
    """Passes what the library logs on to the trainer's logger, but for events, which it has."""

    def __init__(self, channel: Channel, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(logging.WARNING)
        self._channel, self._loop = channel, loop

    def emit(self, record: logging.LogRecord) -> None:
        if not (isinstance(record.args, tuple) and any(isinstance(a, Event) for a in record.args)):
            message = protocol.Logged(record.levelno, record.getMessage())
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._channel.post, message)


def adopt(init: protocol.Init) -> None:
    """Take the trainer's import path, directory and environment over; blocking."""
    sys.path[:] = init.path
    os.environ.clear()
    os.environ.update(init.environment)
    with contextlib.suppress(OSError):  # the directory is gone
        os.chdir(init.directory)


def _end_without_memory(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """End the process if a callback of the loop had no memory.

    What it was to say or to hear is lost, and the trainer would wait for it for ever, beside a
    heartbeat that goes on. The end of the process it notices.
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
        if init.niceness:
            step_back(init.niceness)  # before there is another thread, for all inherit it
        await anyio.to_thread.run_sync(adopt, init)
        logger.addHandler(_Forwarding(channel, loop))
        logger.info("This worker (process %d) serves process %d", os.getpid(), init.trainer)
        code = 0 if await Service(channel, init).run() else 1
        await channel.flush()
    except anyio.EndOfStream:
        logger.warning("The trainer was gone before it said anything")
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
    """Make the calling thread, and all that it starts from now on, give way to others."""
    os.nice(niceness)
    with contextlib.suppress(OSError):  # a container may forbid it; the niceness is what counts
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def step_back_together(niceness: int) -> bool:
    """Make the whole session give way to others; blocking.

    The kernel takes one such wish in a tenth of a second, of all processes of a machine that are
    not privileged. Where many workers start at once, some have to ask again.

    Returns:
        Whether the kernel has taken it; where it does not group sessions there is no need to.
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
    """Has a worker that somebody has stopped continue once its trainer is dead: prctl(2).

    Nobody else would let it go on, and what is staged would neither be stored nor given up. The
    kernel does the same for process groups that lose their parent within a session.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)


def main() -> int:
    """Serve on the socket whose descriptor is the only argument; return the exit code."""
    for each in IGNORED:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)  # which kept them away until now
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
