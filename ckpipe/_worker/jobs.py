"""One save in the worker: the same stages as in the trainer, over blocks in shared memory."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass, field

import anyio
from anyio import create_memory_object_stream

from ckpipe._worker.channel import Channel
from ckpipe._worker.messages import Begin, Block, Ended, Free, Handed, Segment, Settled
from ckpipe.errors import SaveCancelled, first_error
from ckpipe.format.data_file import BlockPlace, Cargo
from ckpipe.format.manifest import Structure
from ckpipe.memory.mapping import map_to_read
from ckpipe.save.block_sums import BlockSums
from ckpipe.save.delivery import Contents, Delivery, Depot
from ckpipe.save.upload_pipeline import run_delivery
from ckpipe.types import CheckpointInfo

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


@dataclass(eq=False, slots=True)
class SharedBlock:
    """A block that lies in shared memory.

    Args:
        number: Its number in the cargo.
        plan: Where it belongs.
        data: Its bytes.
        users: How many stages still need it.
        sums: Its checksums.
    """

    number: int
    plan: BlockPlace
    data: memoryview
    users: int = 2
    sums: BlockSums = field(default_factory=BlockSums)


class Job(Delivery[SharedBlock]):
    """A save on its way through the worker.

    Args:
        begin: What the trainer said of it.
        cargo: What it stores.
        rank: The rank.
        channel: Where the trainer is told how it goes.
    """

    def __init__(self, begin: Begin, cargo: Cargo, rank: int, channel: Channel) -> None:
        super().__init__(begin.id, rank, begin.began, begin.token)
        self.again = begin.again
        self.number, self.cargo, self._channel = begin.save, cargo, channel
        self._waits = begin.waits
        self._contents: Contents | None = None
        self._blocks: dict[int, SharedBlock] = {}
        self._unsummed, self._sums = create_memory_object_stream[SharedBlock](math.inf)
        self._filled, self._uploads = create_memory_object_stream[SharedBlock](math.inf)
        self._scope = anyio.CancelScope()
        self.settled = anyio.Event()

    @property
    def handed(self) -> bool:
        """Whether the trainer has announced all of it."""
        return self._contents is not None

    def take(self, block: Block, memory: SharedMemory) -> None:
        """Passes a block on to the stage that may have it."""
        assert self.cargo is not None
        known = self._blocks.get(block.number)
        if known is None:
            plan = self.cargo.blocks[block.number]
            view = memory.view(block.segment, block.at, plan.nbytes)
            known = self._blocks[block.number] = SharedBlock(block.number, plan, view)
            known.sums.learn_all(block.sums)
        (self._filled if block.use == "upload" else self._unsummed).send_nowait(known)

    def seal(self, handed: Handed, structure: Structure) -> None:
        """Takes what the manifest says; no blocks come after it."""
        self.clock.absorb(handed.clock)
        self.replanned = handed.planned
        self.captured_seconds, self.staged_seconds = handed.captured_seconds, handed.staged_seconds
        self._contents = Contents(
            structure, handed.values, handed.started, handed.writer, handed.metadata,
            handed.metrics, handed.final,
        )  # fmt: skip
        self._unsummed.close()
        self._filled.close()

    def give_up(self) -> None:
        """Cancels what is not done yet."""
        self._scope.cancel()

    def release(self, filled: SharedBlock) -> None:
        """See :class:`~ckpipe.save.delivery.Delivery`."""
        filled.users -= 1
        if not filled.users:
            del self._blocks[filled.number]
            free = Free(self.number, filled.number)
            if self._waits and not self.handed:
                self._channel.post(free)
            else:
                self._channel.post_soon(free, NOTICE_SECONDS)

    def contents(self) -> Contents:
        """See :class:`~ckpipe.save.delivery.Delivery`."""
        assert self._contents is not None
        return self._contents

    def settle(self, info: CheckpointInfo) -> None:
        """See :class:`~ckpipe.save.delivery.Delivery`."""
        self.settled.set()
        assert self.durable_seconds is not None
        logger.info("%s is committed by rank %d", self.name, self.rank)
        unsettled = self.unsettled is not None
        clock = self.clock.to_data()
        self._channel.post(Settled(self.number, info, self.durable_seconds, unsettled, clock))

    async def run(self, depot: Depot) -> None:
        """Runs the stages, and says how they ended.

        If it is cancelled because the worker as a whole fails, it says nothing: the end of the
        worker says more than that the save was given up, which nobody asked for.
        """
        error: Exception | None = SaveCancelled("The save was given up")
        try:
            with self._scope:
                await run_delivery(self, depot, self._sums, self._uploads)
                error = None
        except Exception as group:
            error = first_error(group)
            # For the log of the worker only: the trainer raises it.
            logger.info("%s: %s: %s", self.name, type(error).__name__, error)
        finally:
            self._blocks.clear()
        unsettled = self.unsettled is not None
        self._channel.post(Ended(self.number, error, unsettled, self.clock.to_data()))


__all__ = ["Job", "SharedBlock", "SharedMemory"]
