"""The trainer's end of one worker process: what it is told, and how its end is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from copy import copy

import anyio

from ckpipe import threads
from ckpipe._worker.channel import Channel
from ckpipe._worker.protocol import (
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
    encode,
)
from ckpipe._worker.server import MOST_CARGOES
from ckpipe.errors import CkpipeError, WorkerDied
from ckpipe.format.data_file import DataFiles
from ckpipe.format.manifest import Structure
from ckpipe.memory.arena import Segment as ArenaSegment
from ckpipe.save.context import StoreContext
from ckpipe.save.save import Save, StagedBlock
from ckpipe.worker.process import LOOKS, HangJudge, WorkerProcess

logger = logging.getLogger("ckpipe")

ANNOUNCE_SECONDS = 0.002
"""How long a block that is filled waits for others to be announced with: much less than it takes
the store to have written those before it."""

STACKS_SECONDS = 0.5
"""How long a worker that hangs has to write to its log where its threads are."""

REAP_SECONDS = 5.0
"""How long the end of a process that was killed is waited for."""


class Errand:
    """One save that a worker has to bring to the store.

    Args:
        save: The save.
        number: Its number on the socket.
        places: The number of each block, by file and offset.
    """

    def __init__(self, save: Save, number: int, places: dict[tuple[int, int], int]) -> None:
        self.save, self.number, self.places = save, number, places
        self.blocks: dict[int, StagedBlock] = {}
        self.freed: list[tuple[StagedBlock, int]] = []
        """The blocks that the worker was through with, and how often each was handed out then."""
        self.error: Exception | None = None
        self.ended = anyio.Event()

    def end(self, error: Exception | None) -> None:
        """Lets those go on who wait for its end."""
        self.error = error
        self.ended.set()


class Link:
    """One worker process, from its start to its end. All of it is used on the pipeline's loop.

    Args:
        process: The process, just started.
        hello: What it is told first.
        depot: Where its events go.
        hang_seconds: How long it hangs until it is killed.
    """

    def __init__(
        self, process: WorkerProcess, hello: Hello, depot: StoreContext, hang_seconds: float
    ) -> None:
        self.process, self._depot = process, depot
        self._hang_seconds = hang_seconds
        self._channel = Channel(process.socket)
        self._errands: dict[int, Errand] = {}
        self._begun = 0
        self._segments: set[int] = set()
        self._cargoes: dict[int, tuple[DataFiles, dict[tuple[int, int], int]]] = {}
        self._cargo_number = 0
        self._structure: Structure | None = None
        self._shaping = anyio.Lock()
        self._closing = self._heard = self._abandoned = False
        self._failure: Exception | None = None
        self._killed, self._listening = anyio.Event(), anyio.CancelScope()
        self.ending = False
        self.over = anyio.Event()
        self._channel.post(hello)

    @property
    def idle(self) -> bool:
        """Tell whether no save is under way."""
        return not self._errands

    # What the worker is told

    def begin(self, save: Save) -> Errand:
        """Announces a save, of which it is known what it stores."""
        assert save.files is not None
        cargo, places = self._cargo(save.files)
        self._begun += 1
        errand = self._errands[self._begun] = Errand(save, self._begun, places)
        waits = save.ration is None or save.ration.waits
        resumed_from = self._depot.resumed_from
        self._channel.post(
            Begin(
                errand.number, save.id, save.began, save.token, save.again, cargo,
                resumed_from, waits,
            )
        )  # fmt: skip
        return errand

    def _cargo(self, cargo: DataFiles) -> tuple[int, dict[tuple[int, int], int]]:
        for number, (known, places) in self._cargoes.items():
            if known is cargo:
                return number, places
        self._cargo_number += 1
        places = {(each.file, each.offset): n for n, each in enumerate(cargo.blocks)}
        self._cargoes[self._cargo_number] = (cargo, places)
        while len(self._cargoes) > MOST_CARGOES:  # the worker forgets the same one
            del self._cargoes[min(self._cargoes)]
        self._channel.post(NewCargo(self._cargo_number, cargo))
        return self._cargo_number, places

    def announce(self, errand: Errand, filled: StagedBlock) -> None:
        """Says that the stages may have a block."""
        segment = filled.block.segment
        if segment.number not in self._segments:
            assert segment.descriptor is not None
            self._segments.add(segment.number)
            message = Segment(segment.number, len(segment.memory), segment.offset)
            self._channel.post(message, segment.descriptor)
        number = errand.places[filled.plan.file, filled.plan.offset]
        errand.blocks[number] = filled
        at, sums = filled.block.at, filled.sums.tobytes()
        block = Block(errand.number, number, segment.number, at, sums)
        self._channel.post_soon(block, ANNOUNCE_SECONDS)

    def drop(self, segment: ArenaSegment) -> None:
        """Says that a piece of memory was given back."""
        if segment.number in self._segments:
            self._segments.remove(segment.number)
            self._channel.post(Dropped(segment.number))

    async def hand_over(self, errand: Errand) -> None:
        """Says that all blocks were announced, and returns when the worker will get to know it."""
        async with self._shaping:  # the shape that was sent last is that of the save sent next
            frames = await threads.run_sync(self._last_words, errand)
            for frame in frames:
                self._channel.post(frame)
        await self._channel.flush()

    def _last_words(self, errand: Errand) -> list[bytes]:
        save = errand.save
        contents = save.contents()
        handed = Handed(
            errand.number, contents.values, contents.started, contents.writer,
            contents.metadata, contents.metrics, contents.final,
            save.clock.to_data(), save.replanned, save.captured_seconds,
            save.staged_seconds or save.elapsed,
        )  # fmt: skip
        frames = [encode(handed)]
        # Saves of one structure have the same object; equal ones may still differ, as 1 and True.
        if contents.structure is not self._structure:
            frames.insert(0, encode(NewShape(contents.structure)))
            self._structure = contents.structure
        return frames

    def give_up(self, errand: Errand) -> None:
        """Says that a save is not wanted any more; its end is told as ever."""
        self._channel.post(GiveUp(errand.number))

    # What the worker says

    async def run(self) -> None:
        """Listens until the worker has ended; no errand is left open then.

        Cancelled, it leaves the worker to itself, which finishes what is staged and ends.
        """
        left = True
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._channel.serve, name="worker channel")
                tasks.start_soon(self._watch, name="watch of the worker")
                tasks.start_soon(self._let_go, name="end of the worker")
                self._loop = asyncio.get_running_loop()
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
                with anyio.CancelScope(shield=True):
                    await self._bury()
            self.over.set()

    async def _listen(self) -> None:
        """Hears the worker to its end; kills one that says what cannot be understood."""
        try:
            with self._listening:
                while True:
                    self._hear(await self._channel.receive())
            # It has ended. A child of it may hold its socket open, but says nothing.
            while (message := self._channel.receive_nowait()) is not None:
                self._hear(message)
        except anyio.EndOfStream:
            return
        except Exception as error:  # as of another version of ckpipe, installed meanwhile
            said = f"{type(error).__name__}: {error}"
            self._failure = WorkerDied(f"it said what cannot be understood ({said}) and was killed")
            self.process.kill()

    def _stop_listening_soon(self, _: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended before the worker
            self._loop.call_soon_threadsafe(self._listening.cancel)

    def _hear(self, message: Message) -> None:
        self._heard = True
        match message:
            case Free():
                self._free(message)
            case Told():
                self._depot.events.emit(message.event)
            case Settled():
                self._settle(message)
            case Ended():
                errand = self._errands.pop(message.save)
                errand.save.clock.absorb(message.clock)
                if not message.unsettled:
                    errand.save.unsettled = None
                errand.end(message.error)
            case Logged():
                logger.log(message.level, "The worker says: %s", message.text)
            case Unable():
                self._failure = message.error

    def _free(self, free: Free) -> None:
        errand = self._errands.get(free.save)
        if errand is not None:
            filled = errand.blocks.pop(free.number)
            errand.freed.append((filled, filled.block.uses))
            filled.release()

    def _settle(self, settled: Settled) -> None:
        save = self._errands[settled.save].save
        save.durable_seconds = settled.seconds
        save.clock.absorb(settled.clock)
        save.unsettled = settled.info if settled.unsettled else None
        save.settle(settled.info)

    # How its end is noticed

    async def _watch(self) -> None:
        """Kill the worker if it hangs; one that has ended is noticed at once, and not here."""
        judge, hangs = HangJudge(), False
        while not hangs:
            await anyio.sleep(self._hang_seconds / LOOKS)
            now = await threads.run_sync(self.process.state)
            if now is not None and now.killed:
                self._killed.set()
            hangs = judge.hangs(now, spoke=self._heard)
            self._heard = False
        self._failure = WorkerDied(
            f"it hung: each of {LOOKS} times in {self._hang_seconds:g} s that the trainer looked, "
            "it had said nothing, all its threads slept (S) and it had used no processor time "
            "(worker.hang_seconds). It was killed"
        )
        self.process.tell_stacks()
        await anyio.sleep(STACKS_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kills the worker. One that the system does not end is soon left to the system."""
        self.process.kill()
        self._killed.set()

    async def _let_go(self) -> None:
        await self._killed.wait()
        await anyio.sleep(REAP_SECONDS)  # it ends at once, unless it waits for a device
        self._abandoned = True
        self._listening.cancel()

    async def _bury(self) -> None:
        """Sees to it that the process is gone, and fails what it left undone."""
        gone = self.process.end.done() or (not self._abandoned and await self._reaped())
        if not gone:
            logger.error(
                "The worker process %d was killed and does not end. It will once the device that "
                "it waits for answers; look at the disk and at /proc/%d/stack",
                self.process.id,
                self.process.id,
            )
        if self._closing and not self._errands and self._failure is None:
            if gone:
                await threads.run_sync(self.process.forget_log)
            return
        error = await self._obituary()
        if not self._errands:
            logger.warning("%s", error)
        self._end_all(error)

    async def _reaped(self) -> bool:
        process = self.process
        if await threads.run_sync(process.ended, REAP_SECONDS if self._closing else 1.0):
            return True
        process.kill()
        return await threads.run_sync(process.ended, REAP_SECONDS)

    def _end_all(self, error: Exception) -> None:
        for errand in self._errands.values():
            errand.end(copy(error))  # each gets the step of its own save
        self._errands.clear()

    async def _obituary(self) -> Exception:
        """The error for callers that still waited for the worker."""
        failure = self._failure
        if isinstance(failure, CkpipeError) and not isinstance(failure, WorkerDied):
            return failure
        lines = await threads.run_sync(self.process.last_lines)
        said = f"; its log ends with:\n{lines}" if lines else ", and logged nothing"
        return WorkerDied(
            f"The worker process {self.process.id} is dead: {_cause(failure)}, "
            f"{self.process.describe_end()}{said}",
            hint=f"Another is started. The whole log is {self.process.log}",
        )

    # How it is ended

    async def close(self, seconds: float) -> None:
        """Ends the worker: lets it finish for so long, then has it give up, then kills it."""
        self._closing = True
        if self.idle:
            self.kill()  # it has nothing to lose
        else:
            self._channel.post(Finish())
        if not await self._over_within(seconds):
            self._channel.post(Stop())
            if not await self._over_within(seconds):
                self.kill()
        await self.over.wait()

    async def _over_within(self, seconds: float) -> bool:
        with anyio.move_on_after(seconds):
            await self.over.wait()
        return self.over.is_set()


def _cause(failure: Exception | None) -> str:
    if failure is None:
        return "it is gone"
    if isinstance(failure, WorkerDied):
        return failure.message
    return f"it failed ({type(failure).__name__}: {failure})"
