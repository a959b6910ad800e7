"""Tell of the load of one checkpoint by events."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import anyio

from ckpipe.events import (
    CheckpointDamaged,
    EventBus,
    Loaded,
    LoadFailed,
    LoadProgress,
    LoadStarted,
)
from ckpipe.loading.reader import ReadTally
from ckpipe.types import LoadReport

_PROGRESS_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class LoadEvents:
    """The events of the load of one checkpoint.

    Args:
        bus: Gets them.
        name: The id of the checkpoint, or the place of one of another program.
        step: Its step, or 0.
        rank: The rank that loads.
        address: Where the log finds one that is not below the root; empty for all others.
    """

    bus: EventBus
    name: str
    step: int
    rank: int
    address: str = ""

    @contextmanager
    def told(self) -> Iterator[None]:
        """Tell that the load has begun, and that it failed if the block raises."""
        self.bus.emit(LoadStarted(self.name, self.step, self.rank))
        try:
            yield
        except BaseException as error:
            cancelled = isinstance(error, anyio.get_cancelled_exc_class())
            self.failed("it was cancelled" if cancelled else f"{type(error).__name__}: {error}")
            raise

    async def progress(self, tally: ReadTally) -> None:
        """Tell of the progress, until it is cancelled."""
        told = 0
        while True:
            await anyio.sleep(_PROGRESS_SECONDS)
            done, total = tally.bytes, max(tally.bytes, tally.planned)
            if done != told:
                self.bus.emit(LoadProgress(self.name, self.step, self.rank, done, total))
            told = done

    def failed(self, how: str) -> None:
        """Tell that the load failed."""
        self.bus.emit(LoadFailed(self.name, self.step, self.rank, how))

    def damaged(self, how: str) -> None:
        """Tell that the checkpoint is damaged, also by a warning."""
        self.bus.emit(CheckpointDamaged(self.name, self.step, self.rank, how))
        warnings.warn(f"{self.name} is damaged: {how}", RuntimeWarning, stacklevel=1)

    def loaded(self, report: LoadReport) -> None:
        """Tell that the checkpoint is loaded."""
        event = Loaded(self.name, self.step, self.rank, report.seconds, report.bytes)
        self.bus.emit(event, address=self.address)
