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
import logging
import math
import os
import sys
import time
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
from anyio import create_memory_object_stream
from anyio.abc import TaskGroup

from ckpipe._worker.channel import Channel
from ckpipe._worker.protocol import (
    Alive,
    Begin,
    Block,
    Dropped,
    Ended,
    Finish,
    Free,
    GiveUp,
    Handed,
    Hello,
    Logged,
    Message,
    NewCargo,
    NewShape,
    Segment,
    Settled,
    Stop,
    Told,
    Unable,
)
from ckpipe.backend import Backend
from ckpipe.catalog.leases import Lease
from ckpipe.errors import SaveCancelled, first_error
from ckpipe.events import BlockUploaded, Event, EventBus
from ckpipe.format.checksum import prepare
from ckpipe.format.data_file import BlockRange, DataFiles
from ckpipe.format.manifest import Structure
from ckpipe.format.names import launch_id
from ckpipe.memory.mapping import map_to_read
from ckpipe.retention import from_data
from ckpipe.save.context import StoreContext
from ckpipe.save.deliver import deliver
from ckpipe.save.record import FilledBlock, ManifestFields, SaveRecord
from ckpipe.store.registry import create_backend
from ckpipe.store.retry import RetryingBackend, RetryLog, RetryPolicy
from ckpipe.types import CheckpointInfo

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger("ckpipe")

NOTICE_SECONDS = 0.05
"""How long a notice may lie here that nobody waits for. Each that arrives by itself wakes a thread
of the trainer, which takes the interpreter from the one that trains."""


class SharedMemory:
    """The segments of the trainer's staging memory, as this process maps them."""

    def __init__(self) -> None:
        self._segments: dict[int, memoryview] = {}

    def map(self, segment: Segment, descriptor: int) -> None:
        """Maps a segment, and closes its descriptor."""
        try:
            view = map_to_read(descriptor, segment.nbytes, segment.offset)
        finally:
            os.close(descriptor)
        self._segments[segment.number] = view

    def drop(self, number: int) -> None:
        """Forgets a segment; it is unmapped when the last view of it is gone."""
        self._segments.pop(number, None)

    def view(self, segment: int, at: int, nbytes: int) -> memoryview:
        """Bytes of a segment."""
        return self._segments[segment][at : at + nbytes]


class SharedBlock(FilledBlock):
    """A block that lies in shared memory.

    Args:
        job: The save.
        number: Its number among the blocks of the save.
        plan: Where it belongs.
        data: Its bytes.
        sums: Its checksums as far as they are known.
    """

    def __init__(
        self, job: Job, number: int, plan: BlockRange, data: memoryview, sums: NDArray[np.int64]
    ) -> None:
        super().__init__(plan, data, sums)
        self._job, self.number = job, number

    def release(self) -> None:
        """See :class:`~ckpipe.save.record.FilledBlock`."""
        self._job.free(self)


class Job:
    """A save on its way through the worker.

    Args:
        begin: What the trainer said of it.
        cargo: What it stores.
        rank: The rank.
        channel: Where the trainer is told how it goes.
    """

    def __init__(self, begin: Begin, cargo: DataFiles, rank: int, channel: Channel) -> None:
        self.save = SaveRecord(begin.id, rank, begin.began, begin.token)
        self.save.again, self.save.files = begin.again, cargo
        self.save.committed.add_done_callback(self._settle)
        self.number, self._cargo, self._channel = begin.save, cargo, channel
        self._waits = begin.waits
        self._filled, self._blocks = create_memory_object_stream[FilledBlock](math.inf)
        self._scope = anyio.CancelScope()
        self.settled = anyio.Event()

    @property
    def handed(self) -> bool:
        """Tell whether the trainer has announced all of it."""
        return self.save.fields is not None

    def take(self, block: Block, memory: SharedMemory) -> None:
        """Passes a block on to the stages."""
        import numpy as np

        plan = self._cargo.blocks[block.number]
        view = memory.view(block.segment, block.at, plan.nbytes)
        sums = np.frombuffer(block.sums, np.int64).copy()
        with contextlib.suppress(anyio.BrokenResourceError):  # the save has failed
            self._filled.send_nowait(SharedBlock(self, block.number, plan, view, sums))

    def seal(self, handed: Handed, structure: Structure) -> None:
        """Takes what the manifest says; no blocks come after it."""
        save = self.save
        save.clock.absorb(handed.clock)
        save.replanned = handed.planned
        save.captured_seconds, save.staged_seconds = handed.captured_seconds, handed.staged_seconds
        save.fields = ManifestFields(
            structure, handed.values, handed.started, handed.writer, handed.metadata,
            handed.metrics, handed.final,
        )  # fmt: skip
        save.copied.set()
        self._filled.close()

    def give_up(self) -> None:
        """Cancels what is not done yet."""
        self._scope.cancel()

    def free(self, filled: SharedBlock) -> None:
        """Tells the trainer that a block is in use no more."""
        free = Free(self.number, filled.number)
        if self._waits and not self.handed:
            self._channel.post(free)
        else:
            self._channel.post_soon(free, NOTICE_SECONDS)

    def _settle(self, committed: Future[CheckpointInfo]) -> None:
        save = self.save
        self.settled.set()
        assert save.durable_seconds is not None
        logger.info("%s is committed by rank %d", save.name, save.rank)
        unsettled, clock = save.unsettled is not None, save.clock.to_data()
        self._channel.post(
            Settled(self.number, committed.result(), save.durable_seconds, unsettled, clock)
        )

    async def run(self, depot: StoreContext) -> None:
        """Runs the stages, and says how they ended.

        If it is cancelled because the worker as a whole fails, it says nothing: the end of the
        worker says more than that the save was given up without a request.
        """
        error: Exception | None = SaveCancelled("The save was given up")
        try:
            with self._scope:
                await deliver(self.save, depot, self._blocks)
                error = None
        except Exception as group:
            error = first_error(group)
            # For the log of the worker only: the trainer raises it.
            logger.info("%s: %s: %s", self.save.name, type(error).__name__, error)
        unsettled = self.save.unsettled is not None
        self._channel.post(Ended(self.number, error, unsettled, self.save.clock.to_data()))


MOST_CARGOES = 4
"""How many of the trainer's plans are remembered; the trainer forgets the same ones."""


class Service:
    """The work of one worker.

    Args:
        channel: The way to the trainer.
        hello: What the trainer has said first.
    """

    def __init__(self, channel: Channel, hello: Hello) -> None:
        self._channel, self._hello = channel, hello
        self._memory = SharedMemory()
        self._cargoes: dict[int, DataFiles] = {}
        self._structure: Structure | None = None
        self._jobs: dict[int, Job] = {}
        self._listening = anyio.CancelScope()
        self._stopped = False
        self._end: Finish | Stop | None = None

    async def run(self) -> bool:
        """Serves until the trainer has had enough or is gone; False if it cannot."""
        backend = await self._open()
        if backend is None:
            return False
        async with backend:
            self._depot = self._make_depot(backend)
            async with anyio.create_task_group() as beside:
                beside.start_soon(self._beat, name="heartbeat")
                beside.start_soon(self._watch, name="watch of the trainer")
                beside.start_soon(self._step_back, name="priority of the session")
                # Else the first save has the loop wait for imports.
                beside.start_soon(anyio.to_thread.run_sync, prepare, name="imports")
                async with anyio.create_task_group() as jobs:
                    await self._listen(jobs)
                    await self._wind_up(beside)
                beside.cancel_scope.cancel()
        return True

    async def _open(self) -> Backend | None:
        hello = self._hello
        try:
            return await anyio.to_thread.run_sync(create_backend, hello.url, hello.options)
        except Exception as error:
            # For the log of the worker only: the trainer raises it.
            logger.info("The store cannot be used", exc_info=True)
            self._channel.post(Unable(error))
            await self._channel.flush()
            return None

    def _make_depot(self, backend: Backend) -> StoreContext:
        hello = self._hello
        policy = RetryPolicy(*hello.retry, on_retry=RetryLog())
        events = EventBus()
        events.add(self._tell)
        return StoreContext(
            backend=backend,
            patient=RetryingBackend(backend, policy),
            events=events,
            rank=hello.rank,
            world_size=hello.world_size,
            block_bytes=hello.block_bytes,
            lanes=hello.lanes,
            retry=policy,
            sweep_after=timedelta(seconds=hello.sweep_after),
            rule=None if hello.rule is None else from_data(hello.rule),
            keep_reports=hello.keep_reports,
        )

    # What the trainer says

    async def _listen(self, jobs: TaskGroup) -> None:
        with self._listening, contextlib.suppress(anyio.EndOfStream):
            while self._end is None:
                self._hear(await self._channel.receive(), jobs)
        with contextlib.suppress(anyio.EndOfStream):  # what a trainer said that is gone
            while self._end is None and (message := self._channel.receive_nowait()) is not None:
                self._hear(message, jobs)

    def _hear(self, message: Message, jobs: TaskGroup) -> None:
        match message:
            case Segment():
                self._memory.map(message, self._channel.take_descriptor())
            case Dropped():
                self._memory.drop(message.number)
            case NewCargo():
                self._cargoes[message.number] = message.cargo
                while len(self._cargoes) > MOST_CARGOES:
                    del self._cargoes[min(self._cargoes)]
            case NewShape():
                self._structure = message.structure
            case Begin():
                self._begin(message, jobs)
            case Block():
                if (job := self._jobs.get(message.save)) is not None:
                    job.take(message, self._memory)
            case Handed():
                job, structure = self._jobs.get(message.save), self._structure
                if job is not None and structure is not None:
                    job.seal(message, structure)
            case GiveUp():
                if (job := self._jobs.get(message.save)) is not None:
                    job.give_up()
            case Finish() | Stop():
                self._end = message

    def _begin(self, begin: Begin, jobs: TaskGroup) -> None:
        self._depot.resumed_from = begin.resumed_from
        job = Job(begin, self._cargoes[begin.cargo], self._hello.rank, self._channel)
        self._jobs[begin.save] = job
        jobs.start_soon(self._run, job, name=f"save {job.save.name}")

    async def _run(self, job: Job) -> None:
        try:
            await job.run(self._depot)
        finally:
            del self._jobs[job.number]

    # Beside the jobs

    async def _beat(self) -> None:
        while True:
            await anyio.sleep(self._hello.heartbeat)
            if self._channel.idle and not self._channel.has_spoken():
                self._channel.post(Alive())

    async def _step_back(self) -> None:
        if niceness := self._hello.niceness:
            await anyio.to_thread.run_sync(step_back_together, niceness, abandon_on_cancel=True)

    def _tell(self, event: Event) -> None:
        """Tells the trainer of an event; of progress, which is frequent, with some delay."""
        if isinstance(event, BlockUploaded):
            self._channel.post_soon(Told(event), NOTICE_SECONDS)
        else:
            self._channel.post(Told(event))

    async def _watch(self) -> None:
        """Notice the trainer's death, also while another process holds its socket open."""
        try:
            watched = os.pidfd_open(self._hello.trainer)
        except OSError:  # it is gone, and its socket tells
            return
        try:
            if os.getppid() == self._hello.trainer:  # else the number is somebody else's by now
                await anyio.wait_readable(watched)
            self._listening.cancel()
        finally:
            os.close(watched)

    # The end

    async def _wind_up(self, beside: TaskGroup) -> None:
        """Ends the jobs as the end of the trainer's words asks; the caller waits for them."""
        if self._end is None:
            logger.warning("The trainer (process %d) is gone", self._hello.trainer)
        keep = isinstance(self._end, Finish) or (self._end is None and self._hello.survive)
        for job in list(self._jobs.values()):
            if not keep or not job.handed:
                job.give_up()
            elif self._end is None and not job.settled.is_set():
                logger.warning("%s was staged and is brought to its end", job.save.name)
                for subject in (job.save.name, launch_id(job.save.id.attempt)):
                    beside.start_soon(self._hold, job, subject, name=f"lease on {subject}")

    async def _hold(self, job: Job, subject: str) -> None:
        """Holds a lease until a save is committed: others wait for it, and no sweep removes it."""
        lease = Lease(self._depot.patient, subject)
        try:
            await lease.renew()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lease.keep)
                await job.settled.wait()
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await lease.release()


class _Forwarding(logging.Handler):
    """Passes what the library logs on to the trainer's logger, but for events, which it has."""

    def __init__(self, channel: Channel, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(logging.WARNING)
        self._channel, self._loop = channel, loop

    def emit(self, record: logging.LogRecord) -> None:
        if not (isinstance(record.args, tuple) and any(isinstance(a, Event) for a in record.args)):
            message = Logged(record.levelno, record.getMessage())
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._channel.post, message)


def adopt(hello: Hello) -> None:
    """Takes the trainer's import path, directory and environment over; blocking."""
    sys.path[:] = hello.path
    os.environ.clear()
    os.environ.update(hello.environment)
    with contextlib.suppress(OSError):  # the directory is gone
        os.chdir(hello.directory)


def _end_without_memory(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Ends the process if a callback of the loop had no memory.

    What it was to say or to hear is lost, and the trainer would wait for it for ever, beside a
    heartbeat that goes on. The end of the process it notices.
    """
    loop.default_exception_handler(context)
    if isinstance(context.get("exception"), MemoryError):
        os._exit(1)


async def serve(channel: Channel) -> int:
    """Serves the trainer at the other end of a channel; returns the exit code."""
    code = 0
    asyncio.get_running_loop().set_exception_handler(_end_without_memory)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(channel.serve, name="channel")
            hello = await channel.receive()
            if not isinstance(hello, Hello):
                raise ValueError(f"A trainer begins with {type(hello).__name__}")
            if hello.niceness:
                step_back(hello.niceness)  # before there is another thread, for all inherit it
            await anyio.to_thread.run_sync(adopt, hello)
            logger.addHandler(_Forwarding(channel, asyncio.get_running_loop()))
            logger.info("This worker (process %d) serves process %d", os.getpid(), hello.trainer)
            code = 0 if await Service(channel, hello).run() else 1
            await channel.flush()
            tasks.cancel_scope.cancel()
    except* anyio.EndOfStream:
        logger.warning("The trainer was gone before it said anything")
    except* Exception as group:
        error = first_error(group)
        logger.error("The worker fails", exc_info=error)
        channel.post(Unable(error))
        code = 1
    return code


_GROUP = "/proc/self/autogroup"
_TRIES = 20
_PAUSE_SECONDS = 0.1


def step_back(niceness: int) -> None:
    """Makes the calling thread, and all that it starts from now on, give way to others."""
    os.nice(niceness)
    with contextlib.suppress(OSError):  # a container may forbid it; the niceness is what counts
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def step_back_together(niceness: int) -> bool:
    """Makes the whole session give way to others; blocking.

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
