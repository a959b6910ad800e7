"""Bring saves to the store through a worker process, which is restarted when it dies.

Theory. The trainer locks, walks, plans and copies, since these stages need the state; the later
stages need only the copied bytes. The worker maps the same memory. So the trainer announces a
filled block by a few numbers and its checksums, and the worker releases it by two numbers. The
worker runs the same stage functions that otherwise run in a thread.

*The save belongs to the worker from the moment it is staged.* Its manifest is on the socket before
``staged`` is resolved, and the system delivers the contents of a socket even if the sender dies. So
if a trainer dies after ``staged``, the worker finishes the save without it.

*A save outlives its worker.* If a worker dies, the next one, or a thread of this process, delivers
its saves again, as long as their blocks hold the bytes of the save. The dead worker may have stored
data files, and may have committed. Only this save uses its name, so a data file of the right size
counts as stored, and a manifest with the save's token as the commit.

*No memory is reused too early.* Blocks come back when the worker releases them, or when it is dead.
A hanging worker is killed first, since it might wake up and store later contents of its blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from copy import copy
from functools import partial

import anyio
import anyio.lowlevel
from anyio import create_memory_object_stream
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream

from ckpipe import threads
from ckpipe.errors import CkpipeError, WorkerDied
from ckpipe.events import Event
from ckpipe.format.data_file import DataFiles
from ckpipe.format.manifest import Structure
from ckpipe.interpreter import short_switch_interval
from ckpipe.memory.arena import Segment
from ckpipe.save.context import StoreContext
from ckpipe.save.record import FilledBlock
from ckpipe.save.run import deliver_here
from ckpipe.save.save import Save, StagedBlock
from ckpipe.worker import protocol
from ckpipe.worker.channel import Channel
from ckpipe.worker.process import LOOKS, WorkerProcess, is_held

logger = logging.getLogger("ckpipe")

ANNOUNCE_SECONDS = 0.002
"""Seconds that the announcement of a filled block waits for others, to be sent together: much less
than the store needs to write the blocks before it."""

STACKS_SECONDS = 10.0
"""Most seconds that a hanging worker has to write the stacks of its threads to its log."""

REAP_SECONDS = 5.0
"""Seconds to wait for the end of a killed process."""

GIVE_UP_SECONDS = 30.0
"""Seconds that a worker has to give a save up, longer than an upload needs to be aborted."""

WORKERS = 2
"""Number of workers that may die with a save before a thread delivers it."""


class SaveInTransit:
    """A save in the trainer while a worker, or one after the other, brings it to the store.

    Args:
        save: The save.
    """

    def __init__(self, save: Save) -> None:
        self.save = save
        self._blocks: list[StagedBlock] = []
        self._all_here = anyio.Event()
        self._pass_on: Callable[[StagedBlock], object] | None = None
        self.number = 0
        """The number of the save in its present worker."""
        self.announced: dict[tuple[int, int], StagedBlock] = {}
        """The blocks that the worker has, by file and offset."""
        self.released: list[tuple[StagedBlock, int]] = []
        """The blocks that the worker has released, each with the use count of its memory then."""
        self.error: Exception | None = None
        self.ended = anyio.Event()

    def end(self, error: Exception | None) -> None:
        """Release the waiter for its end in a worker."""
        self.error = error
        self.ended.set()

    async def collect(self, inbox: MemoryObjectReceiveStream[FilledBlock]) -> None:
        """Collect the blocks as they are filled, and pass them on to the worker or thread."""
        async for filled in inbox:
            assert isinstance(filled, StagedBlock)
            self._blocks.append(filled)
            if self._pass_on is not None:
                self._pass_on(filled)
        if self.save.copied.is_set():
            self._all_here.set()

    def _pass_on_to(self, take: Callable[[StagedBlock], object]) -> None:
        for filled in self._blocks:
            take(filled)
        self._pass_on = take

    async def by_worker(self, worker: WorkerConnection, *, survives: bool) -> None:
        """Send a worker all of the save, and wait for its end there, with success or error.

        Args:
            worker: The worker.
            survives: True if the worker finishes staged saves without its trainer.
        """
        self.announced, self.released = {}, []
        self.error, self.ended = None, anyio.Event()
        worker.begin(self)
        try:
            self._pass_on_to(partial(worker.announce, self))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._seal, worker)
                await self.ended.wait()
                tasks.cancel_scope.cancel()
        finally:
            self._pass_on = None
            await self._leave(worker, survives=survives)

    async def _seal(self, worker: WorkerConnection) -> None:
        await self._all_here.wait()
        await worker.seal(self)
        self.save.handed_over.set()

    async def _leave(self, worker: WorkerConnection, *, survives: bool) -> None:
        """Make sure that the worker no longer reads the blocks."""
        if self.ended.is_set():
            return
        if self.save.handed_over.is_set() and survives and not self.save.cancel_requested:
            return  # the pipeline is torn down, but the worker finishes the staged save
        worker.give_up(self)
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(GIVE_UP_SECONDS):
                await self.ended.wait()
            if not self.ended.is_set():
                worker.kill()
                await self.ended.wait()

    def take_again(self) -> bool:
        """Take back the blocks that a dead worker released; False if one was reused since."""
        taken: dict[StagedBlock, StagedBlock] = {}
        for filled, uses in self.released:
            if (again := self.save.use_again(filled, uses, first=True)) is None:
                for each in taken.values():
                    each.release()
                return False
            taken[filled] = again
        self._blocks = [taken.get(filled, filled) for filled in self._blocks]
        return True

    async def by_thread(self, context: StoreContext) -> None:
        """Deliver the save in this process, without a worker."""
        blocks_out, blocks = create_memory_object_stream[FilledBlock](math.inf)
        async with anyio.create_task_group() as tasks:
            self._pass_on_to(blocks_out.send_nowait)
            tasks.start_soon(deliver_here, self.save, context, blocks)
            await self._all_here.wait()
            blocks_out.close()


class WorkerConnection:
    """The connection to one worker process, from its start to its end; for the pipeline's loop.

    Args:
        process: The process, just started.
        init: The first message for it.
        context: The context that gets its events.
    """

    def __init__(self, process: WorkerProcess, init: protocol.Init, context: StoreContext) -> None:
        self.process, self._context = process, context
        self._heartbeat = init.heartbeat
        self._channel = Channel(process.socket)
        self._saves: dict[int, SaveInTransit] = {}
        self._begun = 0
        self._segments: set[int] = set()
        self._files: DataFiles | None = None
        self._structure: Structure | None = None
        self._closing = False
        self._silent = 0
        """Number of looks at it in a row in which it was silent and asleep."""
        self._failure: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._listening = anyio.CancelScope()
        self.ending = False
        self.over = anyio.Event()
        self._channel.post(init)

    # Messages to the worker

    def begin(self, transit: SaveInTransit) -> None:
        """Announce a save whose data files are planned."""
        save = transit.save
        assert save.files is not None
        # Saves of one plan share the object.
        files = None if save.files is self._files else save.files
        self._begun += 1
        transit.number = self._begun
        self._channel.post(
            protocol.Begin(
                self._begun, save.id, save.began, save.token, save.redelivered, files,
                self._context.catalog.resumed_from, self._context.catalog.line, save.waits,
            )
        )  # fmt: skip
        self._files = save.files  # only now: if the post raises, the worker does not have them
        self._saves[self._begun] = transit

    def announce(self, transit: SaveInTransit, filled: StagedBlock) -> None:
        """Announce a filled block."""
        segment = filled.block.segment
        if segment.number not in self._segments:
            assert segment.descriptor is not None
            self._segments.add(segment.number)
            message = protocol.NewSegment(segment.number, len(segment.memory), segment.offset)
            self._channel.post(message, segment.descriptor)
        place = filled.plan.file, filled.plan.offset
        transit.announced[place] = filled
        at, sums = filled.block.at, filled.sums.tobytes()
        block = protocol.BlockCopied(transit.number, place, segment.number, at, sums)
        self._channel.post_soon(block, ANNOUNCE_SECONDS)

    def drop(self, segment: Segment) -> None:
        """Announce that a segment of memory was freed."""
        if segment.number in self._segments:
            self._segments.remove(segment.number)
            self._channel.post(protocol.Dropped(segment.number))

    async def seal(self, transit: SaveInTransit) -> None:
        """Announce the end of the blocks; return when the worker is sure to get the message."""
        save = transit.save
        structure, part = await threads.run_sync(save.contents)
        # Saves of one structure share the object. Equal ones may still differ, as 1 and True do.
        new = None if structure is self._structure else structure
        self._channel.post(
            protocol.Sealed(
                transit.number, new, part, save.clock, save.replanned, save.captured_seconds,
                save.staged_seconds or save.elapsed,
            )
        )  # fmt: skip
        self._structure = structure  # only now: if the post raises, the worker does not have it
        await self._channel.flush()

    def give_up(self, transit: SaveInTransit) -> None:
        """Ask the worker to give a save up; it still reports the end."""
        self._channel.post(protocol.GiveUp(transit.number))

    # Messages of the worker

    async def run(self) -> None:
        """Listen until the worker has ended; then no save is left open.

        If this is cancelled, the worker stays alone: it finishes staged saves and ends.
        """
        left = True
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, name="watch of the worker")
                self.process.end.add_done_callback(self._stop_listening_soon)
                await self._listen()
                left = False
                tasks.cancel_scope.cancel()
        finally:
            self.ending = True
            self._channel.close()
            if left:
                self._end_all(WorkerDied("The worker process was left to itself"))
            else:
                with anyio.CancelScope(shield=True), contextlib.suppress(RuntimeError):
                    await self._clean_up()
                # Saves are left only if the system started no thread for that.
                self._end_all(WorkerDied(f"The worker process {self.process.id} is gone"))
            self.over.set()

    async def _listen(self) -> None:
        """Receive messages until the worker ends; kill it after an unreadable message."""
        try:
            with self._listening:
                while True:
                    self._hear(await self._channel.receive())
            # The worker has ended. A child of it may hold its socket open, but sends nothing.
            while (message := self._channel.receive_nowait()) is not None:
                self._hear(message)
        except anyio.EndOfStream:
            return
        except Exception as error:  # as of another version of ckpipe, installed meanwhile
            said = f"{type(error).__name__}: {error}"
            self._failure = WorkerDied(f"it sent an unreadable message ({said}) and was killed")
            self.process.kill()

    def _stop_listening_soon(self, _: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended before the worker
            self._loop.call_soon_threadsafe(self._listening.cancel)

    def _hear(self, message: protocol.Message) -> None:
        self._silent = 0
        match message:
            case protocol.BlockReleased():
                if (transit := self._saves.get(message.save)) is not None:
                    filled = transit.announced.pop(message.place)
                    transit.released.append((filled, filled.block.uses))
                    filled.release()
            case Event():
                self._context.events.emit(message)
            case protocol.Committed():
                save = self._saves[message.save].save
                save.durable_seconds = message.seconds
                save.clock.absorb(message.clock)
                save.unsettled = message.info if message.unsettled else None
                save.settle(message.info)
            case protocol.Ended():
                transit = self._saves.pop(message.save)
                transit.save.clock.absorb(message.clock)
                if not message.unsettled:
                    transit.save.unsettled = None
                transit.end(message.error)
            case protocol.Logged():
                logger.log(message.level, "The worker says: %s", message.text)
            case protocol.StartFailed():
                self._failure = message.error

    # Detection of its end

    async def _watch(self) -> None:
        """Kill the worker if it hangs; an end is noticed at once elsewhere."""
        while self._silent < LOOKS:
            await anyio.sleep(self._heartbeat)
            try:
                held = await threads.run_sync(is_held, self.process.id)
            except RuntimeError:  # the system starts no thread
                continue
            self._silent = 0 if held else self._silent + 1
        self._failure = WorkerDied(
            f"it hung: in {LOOKS * self._heartbeat:g} s (worker.hang_seconds) it said nothing, and "
            f"{LOOKS} looks found all its threads asleep (S) or killed. It was killed"
        )
        with anyio.move_on_after(STACKS_SECONDS), contextlib.suppress(RuntimeError):
            first = last = await threads.run_sync(self.process.log_bytes)
            self.process.tell_stacks()
            while last == first or last != await threads.run_sync(self.process.log_bytes):
                last = await threads.run_sync(self.process.log_bytes)
                await anyio.sleep(0.2)
        self.kill()

    def kill(self) -> None:
        """Kill the worker. If it does not end soon, it is left to the system."""
        self.process.kill()
        # A killed process ends at once, unless it waits for a device.
        deadline = anyio.current_time() + REAP_SECONDS
        self._listening.deadline = min(self._listening.deadline, deadline)

    async def _clean_up(self) -> None:
        """Make sure that the process has ended, and fail its unfinished saves."""
        process, abandoned = self.process, self._listening.cancel_called
        gone = process.end.done()
        if not gone and not abandoned:
            seconds = REAP_SECONDS if self._closing else 1.0
            gone = await threads.run_sync(process.ended, seconds)
            if not gone:
                process.kill()
                gone = await threads.run_sync(process.ended, REAP_SECONDS)
        if not gone:
            logger.error(
                "The worker process %d was killed and does not end. It will end once the device "
                "that it waits for answers; check the disk and /proc/%d/stack",
                process.id,
                process.id,
            )
        if self._closing and not self._saves and self._failure is None:
            if gone:
                await threads.run_sync(process.forget_log)
            return
        error = await self._death_error()
        if not self._saves:
            logger.warning("%s", error)
        self._end_all(error)

    def _end_all(self, error: Exception) -> None:
        for transit in self._saves.values():
            transit.end(copy(error))  # each gets the step of its own save
        self._saves.clear()

    async def _death_error(self) -> Exception:
        """Make the error for callers that still wait for the worker."""
        failure, cause = self._failure, "it is gone"
        if isinstance(failure, WorkerDied):
            cause = failure.message
        elif isinstance(failure, CkpipeError):
            return failure
        elif failure is not None:
            cause = f"it failed ({type(failure).__name__}: {failure})"
        lines = await threads.run_sync(self.process.last_lines)
        said = f"; its log ends with:\n{lines}" if lines else ", and logged nothing"
        return WorkerDied(
            f"The worker process {self.process.id} is dead: {cause}, "
            f"{self.process.describe_end()}{said}",
            hint=f"Another is started. The whole log is {self.process.log}",
        )

    # Its end

    async def close(self, seconds: float) -> None:
        """End the worker: give it so many seconds to finish, as many to give up, then kill it."""
        self._closing = True
        if self._saves:
            self._channel.post(protocol.Finish(give_up=False))
        else:
            self.kill()  # it has no saves
        if not await self._over_within(seconds):
            self._channel.post(protocol.Finish(give_up=True))
            if not await self._over_within(seconds):
                self.kill()
        await self.over.wait()

    async def _over_within(self, seconds: float) -> bool:
        with anyio.move_on_after(seconds):
            await self.over.wait()
        return self.over.is_set()


class WorkerUploader:
    """Starts worker processes, one at a time, and hands saves to them.

    Args:
        init: The first message for each.
        context: The context that gets their events.
    """

    def __init__(self, init: protocol.Init, context: StoreContext) -> None:
        self._init, self._context, self._settings = init, context, context.settings.worker
        self._tasks: TaskGroup | None = None
        self._link: WorkerConnection | None = None
        self._starting = anyio.Lock()
        self._closed = False

    def start(self, tasks: TaskGroup) -> None:
        """Start the first worker in the background, so that no save waits for it.

        Args:
            tasks: The task group that watches the workers.
        """
        self._tasks = tasks
        tasks.start_soon(self._start_quietly, name="start of the worker")

    async def _start_quietly(self) -> None:
        try:
            await self._connected()
        except WorkerDied as error:  # a save that needs it raises the error
            logger.warning("%s", error)

    async def _connected(self) -> WorkerConnection:
        """Return the running worker, or start the next one."""
        assert self._tasks is not None
        async with self._starting:
            if self._link is not None and self._link.ending:
                await self._link.over.wait()
                self._link = None
            if self._link is not None:
                return self._link
            if self._closed:
                raise WorkerDied("The pipeline is closing, and its worker process is gone")
            try:
                with anyio.CancelScope(shield=True):  # a started process must not be lost
                    process = await threads.run_sync(WorkerProcess, self._settings.log_dir)
            except (OSError, RuntimeError) as error:
                raise WorkerDied(
                    f"No worker process could be started: {error}",
                    hint="Set worker='thread' to save without one",
                ) from error
            self._link = WorkerConnection(process, self._init, self._context)
            self._tasks.start_soon(self._link.run, name=f"worker {process.id}")
            return self._link

    def drop(self, segment: Segment) -> None:
        """Tell the worker that staging memory was given back."""
        if self._link is not None:
            self._link.drop(segment)

    async def deliver(
        self, save: Save, context: StoreContext, blocks: MemoryObjectReceiveStream[FilledBlock]
    ) -> None:
        """Deliver a save by a worker; return when all stages have ended.

        Raises:
            WorkerDied: If the worker died before the commit, and the save cannot be delivered
                again.
            CkpipeError: The error in the worker.
        """
        transit = SaveInTransit(save)
        async with blocks, anyio.create_task_group() as tasks:
            tasks.start_soon(transit.collect, blocks)
            await self._bring(transit, context)
            tasks.cancel_scope.cancel()

    async def _bring(self, transit: SaveInTransit, context: StoreContext) -> None:
        """Deliver a save by a worker, by the next one if that dies, and then by a thread."""
        save, crashed = transit.save, False
        for _ in range(WORKERS):
            try:
                await self._connected()  # it starts while the data files are still being planned
                await save.ready.wait()
                worker = await self._connected()
            except WorkerDied as error:
                death = error
                continue
            # Otherwise a trainer in plain Python learns late that all is durable.
            with short_switch_interval(context.settings.switch_interval_seconds):
                await transit.by_worker(worker, survives=self._settings.survive)
            if not isinstance(transit.error, WorkerDied):
                if transit.error is not None:
                    raise transit.error
                return
            death, crashed = transit.error, worker.process.crashed
            if save.committed.done():
                # The next save applies the retention rules. A checkpoint of many ranks is completed
                # by the next rank that commits or checks.
                logger.warning("%s was committed before its worker died: %s", save.name, death)
                return
            # A pipeline that is torn down leaves the save to the worker.
            await anyio.lowlevel.checkpoint()
            save.redelivered = True
            if self._closed or not transit.take_again():
                raise death
            logger.warning("%s is delivered again: %s", save.name, death)
        if self._closed or crashed:
            raise death
        logger.warning("%s is delivered by a thread of this process: %s", save.name, death)
        await transit.by_thread(context)

    async def close(self) -> None:
        """End the worker; saves that it has not finished by then are lost."""
        self._closed = True
        async with self._starting:
            link = self._link
        if link is not None and not link.over.is_set():
            await link.close(self._settings.stop_seconds)
