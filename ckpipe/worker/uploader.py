"""Brings saves to the store through a worker process, which is started again when it dies.

Theory. The trainer locks, walks, plans and copies, since that takes the state; what follows takes
the copied bytes only. They lie in memory that the worker maps as well, so a block that is filled
is announced by a few numbers and its checksums, and comes back by two numbers. The stages in the
worker are the very functions that run in a thread else.

*The save belongs to the worker from the moment it is staged.* All that its manifest says is on the
socket before ``staged`` is told, and the system delivers what is on a socket whether or not its
sender lives. So a trainer that dies after ``staged`` leaves a save that is finished without it.

*A save outlives its worker.* What a worker had in hand when it died is delivered again by the next
one, or by a thread of this process, as long as its blocks hold the bytes of the save. The dead one
may have stored data files, and may have committed: the name is the save's alone, so a data file of
the right size counts as stored, and a manifest with the save's token as the commit.

*No memory is used twice.* Blocks come back when the worker says so, or when it is dead: one that
hangs is killed first, since it might wake up and store what lies in its blocks then.
"""

from __future__ import annotations

import logging
import math

import anyio
import anyio.lowlevel
from anyio import create_memory_object_stream
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream

from ckpipe import threads
from ckpipe.errors import WorkerDied
from ckpipe.interpreter import short_switch_interval
from ckpipe.memory.arena import Segment
from ckpipe.save.context import StoreContext
from ckpipe.save.record import FilledBlock
from ckpipe.save.run import deliver_here
from ckpipe.save.save import Save
from ckpipe.settings import Worker
from ckpipe.worker.connection import SaveInTransit, WorkerConnection
from ckpipe.worker.process import WorkerProcess
from ckpipe.worker.protocol import Init

logger = logging.getLogger("ckpipe")

GIVE_UP_SECONDS = 30.0
"""How long a worker has to give a save up, longer than any upload takes to be given up."""


WORKERS = 2
"""How many workers may die with a save in hand before a thread delivers it."""


class WorkerUploader:
    """Starts worker processes, one at a time, and hands saves to them.

    Args:
        settings: How they are started and ended.
        init: What each is told first.
        depot: Where events go.
    """

    def __init__(self, settings: Worker, init: Init, depot: StoreContext) -> None:
        self._settings, self._init, self._depot = settings, init, depot
        self._tasks: TaskGroup | None = None
        self._link: WorkerConnection | None = None
        self._starting = anyio.Lock()
        self._closed = False

    @property
    def process_id(self) -> int | None:
        """The worker's, if there is one."""
        return None if self._link is None or self._link.ending else self._link.process.id

    def start(self, tasks: TaskGroup) -> None:
        """Starts the first worker in the background, so that no save waits for it.

        Args:
            tasks: Where the workers are watched.
        """
        self._tasks = tasks
        tasks.start_soon(self._start_quietly, name="start of the worker")

    async def _start_quietly(self) -> None:
        try:
            await self._connected()
        except WorkerDied as error:  # the save that needs it says so
            logger.warning("%s", error)

    async def _connected(self) -> WorkerConnection:
        async with self._starting:
            if self._link is not None and self._link.ending:
                await self._link.over.wait()
                self._link = None
            if self._link is None:
                self._link = await self._connect()
            return self._link

    async def _connect(self) -> WorkerConnection:
        assert self._tasks is not None
        if self._closed:
            raise WorkerDied("The pipeline is closing, and its worker process is gone")
        try:
            with anyio.CancelScope(shield=True):  # a process that was started must not be lost
                process = await threads.run_sync(WorkerProcess, self._settings.log_dir)
        except (OSError, RuntimeError) as error:
            raise WorkerDied(
                f"No worker process could be started: {error}",
                hint="Set worker='thread' to do without one",
            ) from error
        link = WorkerConnection(process, self._init, self._depot, self._settings.hang_seconds)
        self._tasks.start_soon(link.run, name=f"worker {process.id}")
        return link

    def drop(self, segment: Segment) -> None:
        """Tells the worker that staging memory was given back."""
        if self._link is not None:
            self._link.drop(segment)

    async def deliver(
        self, save: Save, depot: StoreContext, blocks: MemoryObjectReceiveStream[FilledBlock]
    ) -> None:
        """Has a worker bring a save to the store; returns when it is through.

        Raises:
            WorkerDied: If the worker died before the commit, and the save cannot be delivered
                again.
            CkpipeError: What went wrong in the worker.
        """
        transit = SaveInTransit(save)
        async with blocks, anyio.create_task_group() as tasks:
            tasks.start_soon(transit.collect, blocks)
            await self._bring(transit, depot)
            tasks.cancel_scope.cancel()

    async def _bring(self, transit: SaveInTransit, depot: StoreContext) -> None:
        """Deliver a save by a worker, by the next one if that dies, and then by a thread."""
        save, crashed = transit.save, False
        for _ in range(WORKERS):
            try:
                await self._connected()  # it starts while it is found out what is to be stored
                await save.ready.wait()
                worker = await self._connected()
            except WorkerDied as error:
                death = error
                continue
            await self._by_worker(transit, worker)
            if not isinstance(transit.error, WorkerDied):
                if transit.error is not None:
                    raise transit.error
                return
            death, crashed = transit.error, worker.process.crashed
            if save.committed.done():
                # The next save applies the retention rules, and whichever rank commits or looks
                # next completes a checkpoint of many ranks.
                logger.warning("%s was committed before its worker died: %s", save.name, death)
                return
            # A pipeline that is torn down leaves the save to the worker.
            await anyio.lowlevel.checkpoint()
            save.again = True
            if self._closed or not transit.take_again():
                raise death
            logger.warning("%s is delivered again: %s", save.name, death)
        if self._closed or crashed:
            raise death
        logger.warning("%s is delivered by a thread of this process: %s", save.name, death)
        await _by_thread(transit, depot)

    async def _by_worker(self, transit: SaveInTransit, worker: WorkerConnection) -> None:
        """Tell a worker all of a save, and wait for its end there, good or bad."""
        worker.begin(transit)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_tell, transit, worker)
                # Else a loop of Python hears late that all is durable.
                with short_switch_interval(self._depot.switch_interval):
                    await transit.ended.wait()
                tasks.cancel_scope.cancel()
        finally:
            await self._end(transit, worker)

    async def _end(self, transit: SaveInTransit, worker: WorkerConnection) -> None:
        """Makes sure that the worker does not look at the blocks of a save any more."""
        save = transit.save
        if transit.ended.is_set():
            return
        if save.handed_over.is_set() and self._settings.survive and not save.cancel_requested:
            return  # the pipeline is torn down, which does not concern what is staged
        worker.give_up(transit)
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(GIVE_UP_SECONDS):
                await transit.ended.wait()
            if not transit.ended.is_set():
                worker.kill()
                await transit.ended.wait()

    async def close(self) -> None:
        """Ends the worker; saves that it has not finished by then are lost."""
        self._closed = True
        async with self._starting:
            link = self._link
        if link is not None and not link.over.is_set():
            await link.close(self._settings.stop_seconds)


async def _tell(transit: SaveInTransit, worker: WorkerConnection) -> None:
    """Announce each block to a worker, and then what the manifest says."""
    async for filled in transit.each():
        worker.announce(transit, filled)
    await worker.seal(transit)
    transit.save.handed_over.set()


async def _by_thread(transit: SaveInTransit, depot: StoreContext) -> None:
    """Deliver a save in this process, as if it had no worker."""
    blocks_out, blocks = create_memory_object_stream[FilledBlock](math.inf)

    async def feed() -> None:
        async with blocks_out:
            async for filled in transit.each():
                blocks_out.send_nowait(filled)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feed)
        await deliver_here(transit.save, depot, blocks)
