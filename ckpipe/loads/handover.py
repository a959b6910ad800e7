"""What lanes and deliverers of a load hand to one another, from thread to thread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from queue import SimpleQueue

import anyio

from ckpipe.loads.delivering import Arrived
from ckpipe.loads.load_planning import Read


class Handover:
    """Reads that nobody has taken yet, buffers that are free, and bytes that have arrived.

    Args:
        buffers: The buffers, all of them free.
        lanes: How many threads read at the most.
        deliverers: How many deliver.

    Attributes:
        lanes: How many threads read at the most.
        deliverers: How many deliver.
        asked: Whether lanes have got anything to read.
    """

    def __init__(self, buffers: Iterable[memoryview], lanes: int, deliverers: int) -> None:
        self._reads = SimpleQueue[Read | None]()
        self._free = SimpleQueue[memoryview | None]()
        self._arrived = SimpleQueue[Arrived | None]()
        self.asked = False
        self.lanes, self.deliverers = lanes, deliverers
        for buffer in buffers:
            self._free.put(buffer)

    def ask(self, reads: Sequence[Read]) -> None:
        """Gives lanes something to read, which they take in this order."""
        self.asked = True
        for read in reads:
            self._reads.put(read)

    def all_asked(self) -> None:
        """Notes that there is no more to read: lanes end when they have taken what there is."""
        for _ in range(self.lanes):
            self._reads.put(None)

    def next_read(self) -> tuple[Read, memoryview] | None:
        """A read and where its bytes go; None once there is nothing to read."""
        read = self._reads.get()
        buffer = None if read is None else self._free.get()
        return None if read is None or buffer is None else (read, buffer)

    def arrive(self, arrived: Arrived) -> None:
        """Gives a deliverer what was read."""
        self._arrived.put(arrived)

    def all_arrived(self) -> None:
        """Notes that nothing more comes: deliverers end when they have taken what there is."""
        for _ in range(self.deliverers):
            self._arrived.put(None)

    def next_arrived(self) -> Arrived | None:
        """What was read; None once there is nothing more."""
        return self._arrived.get()

    def give_back(self, buffer: memoryview) -> None:
        """Takes back a buffer that was delivered from."""
        self._free.put(buffer)

    async def closed_at_the_end(self) -> None:
        """Waits to be cancelled; after that no thread waits here any more."""
        try:
            await anyio.sleep_forever()
        finally:
            self.all_asked()
            for _ in range(self.lanes):
                self._free.put(None)
            self.all_arrived()


__all__ = ["Handover"]
