"""Brings saves to the store through a worker process, which is started again when it dies.

Theory. The trainer locks, walks, plans and copies, since that takes the state; what follows takes
the copied bytes only. They lie in memory that the worker maps as well, so a block that is filled
is announced by a few numbers and its checksums, and comes back by two numbers. The stages in the
worker are the very functions that run in a thread else.

*The save belongs to the worker from the moment it is staged.* All that its manifest says is on the
socket before ``staged`` is told, and the system delivers what is on a socket whether or not its
sender lives. So a trainer that dies after ``staged`` leaves a save that is finished without it.

*No memory is used twice.* Blocks come back when the worker says so, or when it is dead: one that
hangs is killed first, since it might wake up and store what lies in its blocks then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream

from ckpipe._worker.messages import Hello, Use
from ckpipe.errors import WorkerDied
from ckpipe.memory.arena import Segment
from ckpipe.saves.delivery import Depot
from ckpipe.saves.saving import FilledBlock, Save
from ckpipe.settings import Worker
from ckpipe.tasks import to_thread
from ckpipe.tasks.turns import short_turns
from ckpipe.worker.worker_link import Errand, Link
from ckpipe.worker.worker_process import WorkerProcess

logger = logging.getLogger("ckpipe")

GIVE_UP_SECONDS = 30.0
"""How long a worker has to give a save up, longer than any upload takes to be given up."""


class _Voyage:
    """A save while it is copied: which of its blocks were announced."""

    def __init__(self) -> None:
        self.planned = anyio.Event()
        self.copied = anyio.Event()
        self.handed = anyio.Event()
        self.begun = anyio.Event()
        self.booked: tuple[Link, Errand] | None = None
        self.announced = 0
        self.progress = anyio.Event()

    async def ended(self) -> Errand:
        """Waits for the end of the save in the worker, good or bad."""
        await self.begun.wait()
        assert self.booked is not None
        errand = self.booked[1]
        await errand.ended.wait()
        return errand


def _judge(save: Save, error: Exception) -> None:
    """Raises what went wrong in the worker, unless all that is lost is made up for by others.

    What a worker does after a commit, anybody may do: the next save applies the retention rules,
    and whoever commits or looks next completes a checkpoint of many ranks.
    """
    if not (isinstance(error, WorkerDied) and save.committed.done()):
        raise error
    logger.warning("%s was committed before its worker died: %s", save.name, error)


class WorkerCarrier:
    """Starts worker processes, one at a time, and hands saves to them.

    Args:
        settings: How they are started and ended.
        hello: Makes what a worker is told first; called before each start.
        depot: Where events go.
    """

    def __init__(self, settings: Worker, hello: Callable[[], Hello], depot: Depot) -> None:
        self._settings, self._hello, self._depot = settings, hello, depot
        self._tasks: TaskGroup | None = None
        self._link: Link | None = None
        self._starting = anyio.Lock()
        self._voyages: dict[Save, _Voyage] = {}
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

    async def _connected(self) -> Link:
        async with self._starting:
            if self._link is not None and self._link.ending:
                await self._link.over.wait()
                self._link = None
            if self._link is None:
                self._link = await self._new_link()
            return self._link

    async def _new_link(self) -> Link:
        assert self._tasks is not None
        if self._closed:
            raise WorkerDied("The pipeline is closing, and its worker process is gone")
        try:
            with anyio.CancelScope(shield=True):  # a process that was started must not be lost
                hello, process = await to_thread.run_sync(self._spawn)
        except (OSError, RuntimeError) as error:
            raise WorkerDied(
                f"No worker process could be started: {error}",
                hint="Set worker='thread' to do without one",
            ) from error
        link = Link(process, hello, self._depot, self._settings.hang_seconds)
        self._tasks.start_soon(link.run, name=f"worker {process.id}")
        return link

    def _spawn(self) -> tuple[Hello, WorkerProcess]:
        return self._hello(), WorkerProcess(self._settings.log_dir)

    def drop(self, segment: Segment) -> None:
        """Tells the worker that staging memory was given back."""
        if self._link is not None:
            self._link.drop(segment)

    async def deliver(
        self,
        save: Save,
        depot: Depot,
        unsummed: MemoryObjectReceiveStream[FilledBlock],
        filled: MemoryObjectReceiveStream[FilledBlock],
    ) -> None:
        """Has the worker bring a save to the store; returns when it is through.

        Raises:
            WorkerDied: If the worker died before the commit, or there is none to be had.
            CkpipeError: What went wrong in the worker.
        """
        voyage = self._voyage(save)
        try:
            async with unsummed, filled:
                await self._connected()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._set_out, save, voyage)
                    tasks.start_soon(self._announce, save, voyage, unsummed, "serialize")
                    tasks.start_soon(self._announce, save, voyage, filled, "upload")
                    tasks.start_soon(self._seal, save, voyage)
                    await voyage.begun.wait()
                    # Else a loop of Python hears late that all is durable.
                    with short_turns(depot.switch_interval):
                        errand = await voyage.ended()
                    tasks.cancel_scope.cancel()
            if errand.error is not None:
                _judge(save, errand.error)
        finally:
            del self._voyages[save]
            await self._end(save, voyage)

    def set_out(self, save: Save) -> None:
        """Has the worker open the data file while the first block is copied."""
        self._voyage(save).planned.set()

    async def hand_over(self, save: Save) -> None:
        """Returns when a save that is copied will be finished whatever becomes of this process."""
        voyage = self._voyage(save)
        voyage.copied.set()
        await voyage.handed.wait()

    def _voyage(self, save: Save) -> _Voyage:
        return self._voyages.setdefault(save, _Voyage())

    async def _set_out(self, save: Save, voyage: _Voyage) -> None:
        await voyage.planned.wait()
        await self._embarked(save, voyage)

    async def _announce(
        self,
        save: Save,
        voyage: _Voyage,
        inbox: MemoryObjectReceiveStream[FilledBlock],
        use: Use,
    ) -> None:
        async for filled in inbox:
            link, errand = await self._embarked(save, voyage)
            link.announce(errand, filled, use)
            voyage.announced += 1
            voyage.progress.set()

    async def _embarked(self, save: Save, voyage: _Voyage) -> tuple[Link, Errand]:
        """The worker that a save goes by, which stays the same for all of it."""
        if voyage.booked is None:
            link = await self._connected()
            if voyage.booked is None:  # the other stage's blocks may have been faster
                voyage.booked = link, link.begin(save)
                voyage.begun.set()
        return voyage.booked

    async def _seal(self, save: Save, voyage: _Voyage) -> None:
        """Tells the worker what the manifest says, once all blocks are announced."""
        await voyage.copied.wait()
        link, errand = await self._embarked(save, voyage)
        assert save.cargo is not None
        while voyage.announced < 2 * len(save.cargo.blocks):  # once for each stage
            voyage.progress = anyio.Event()
            await voyage.progress.wait()
        await link.hand_over(errand)
        voyage.handed.set()

    async def _end(self, save: Save, voyage: _Voyage) -> None:
        """Makes sure that the worker does not look at the blocks of a save any more."""
        if voyage.booked is None:
            return
        link, errand = voyage.booked
        if errand.ended.is_set():
            return
        if voyage.handed.is_set() and self._settings.survive and not save.cancel_requested:
            return  # the pipeline is torn down, which does not concern what is staged
        link.give_up(errand)
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(GIVE_UP_SECONDS):
                await errand.ended.wait()
            if not errand.ended.is_set():
                link.kill()
                await errand.ended.wait()

    async def close(self) -> None:
        """Ends the worker; saves that it has not finished by then are lost."""
        self._closed = True
        async with self._starting:
            link = self._link
        if link is not None and not link.over.is_set():
            await link.close(self._settings.stop_seconds)


__all__ = ["WorkerCarrier"]
