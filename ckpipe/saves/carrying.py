"""How what is copied gets to the store: by this process, or by another."""

from __future__ import annotations

from typing import Protocol

from anyio.streams.memory import MemoryObjectReceiveStream

from ckpipe.saves.delivery import Depot
from ckpipe.saves.saving import FilledBlock, Save


class Carrier(Protocol):
    """Runs the second half of saves, for each of which all methods are called once."""

    async def deliver(
        self,
        save: Save,
        depot: Depot,
        unsummed: MemoryObjectReceiveStream[FilledBlock],
        filled: MemoryObjectReceiveStream[FilledBlock],
    ) -> None:
        """Brings a save to the store; see :func:`ckpipe.delivery_run.run_delivery`.

        No memory of the save is in use any more when it returns or raises.
        """
        ...

    def set_out(self, save: Save) -> None:
        """Called when it is known what a save stores, before its first block is copied."""
        ...

    async def hand_over(self, save: Save) -> None:
        """Called when all of a save is copied; returns when that is in the hands of whoever
        brings it to the store, so that the trainer may be told."""
        ...


__all__ = ["Carrier"]
