"""What happens in a pipeline, as typed events: the one source of logs, reports and progress."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from ckpipe.reports import SaveReport
from ckpipe.tasks.user_code import user_code
from ckpipe.types import CheckpointInfo, SaveStatus

logger = logging.getLogger("ckpipe")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to one save.

    Args:
        id: Exact name of the checkpoint.
        step: Its step.
        rank: The rank it happened on.
    """

    id: str
    step: int
    rank: int


@dataclass(frozen=True, slots=True)
class SaveStarted(Event):
    """``save`` was called and accepted."""


@dataclass(frozen=True, slots=True)
class SaveSkipped(Event):
    """A save was not begun, since earlier ones hold the staging memory.

    Args:
        reason: Why, as a sentence.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Staged(Event):
    """The state has been copied; training may go on.

    Args:
        seconds: Since ``save`` was called.
        bytes: Size of the data files.
    """

    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True)
class BlockUploaded(Event):
    """A block has reached the store; it is durable only with its checkpoint.

    Args:
        bytes: Size of the block.
        bytes_done: Bytes of this save that have reached the store.
        bytes_total: Size of the data files.
    """

    bytes: int
    bytes_done: int
    bytes_total: int


@dataclass(frozen=True, slots=True)
class Retrying(Event):
    """An operation failed with an error that may pass, and will be tried again.

    Args:
        error: The error.
        seconds: How long it waits before that.
    """

    error: str
    seconds: float


@dataclass(frozen=True, slots=True)
class RankCommitted(Event):
    """This rank's part is durable.

    Args:
        seconds: Since ``save`` was called.
        bytes: What the rank wrote, metadata included.
    """

    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Completed(Event):
    """The checkpoint is complete: every rank's part is durable.

    Of many ranks those say so that found it: at least one, and seldom all.

    Args:
        info: The checkpoint.
    """

    info: CheckpointInfo


@dataclass(frozen=True, slots=True)
class IncompleteCheckpoint(Event):
    """This rank's part is durable, and some other rank's was not when there was time enough.

    Args:
        absent: Ranks that have not committed, in order; of very many only the first hundreds.
        seconds: Since this rank's commit.
    """

    absent: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class SaveFailed(Event):
    """A save failed or was cancelled; older checkpoints are intact.

    Args:
        error: What went wrong.
    """

    error: str

    def __str__(self) -> str:
        return f"The save of {self.id} failed on rank {self.rank}: {self.error}"


@dataclass(frozen=True, slots=True)
class CheckpointDamaged(Event):
    """A load found a checkpoint damaged, and goes on to an older one if there is one.

    Args:
        error: What is damaged, and how.
    """

    error: str

    def __str__(self) -> str:
        return f"The checkpoint {self.id} is damaged: {self.error}"


@dataclass(frozen=True, slots=True)
class Pruned(Event):
    """Retention removed a checkpoint.

    Args:
        removed: Exact name of the checkpoint that was removed.
        reason: Why it was not kept.
    """

    removed: str
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointExported(Event):
    """A final checkpoint was written in another form besides.

    Args:
        folder: Where it lies, relative to the root.
        files: Names of its files.
        bytes: Their size together.
    """

    folder: str
    files: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class SaveEnded(Event):
    """Nothing more happens to a save, whatever became of it; every save ends once.

    Args:
        status: What became of it: ``committed``, ``skipped``, ``failed`` or ``cancelled``.
        report: How it spent its time.
    """

    status: SaveStatus
    report: SaveReport


Listener = Callable[[Event], None]


class EventBus:
    """Hands every event to the log and to all listeners, on the pipeline's own thread."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def add(self, listener: Listener) -> None:
        """Has ``listener`` called with every event from now on. It must not block for long."""
        self._listeners.append(listener)

    def emit(self, event: Event) -> None:
        """Logs an event and tells the listeners; one that raises is logged and stays."""
        logger.log(_LEVELS.get(type(event), logging.DEBUG), "%s", event)
        for listener in list(self._listeners):
            try:
                with user_code("A listener", ""):
                    listener(event)
            except Exception:
                logger.exception("A listener failed on %s", event)


_LEVELS: dict[type[Event], int] = {
    SaveFailed: logging.ERROR,
    CheckpointDamaged: logging.ERROR,
    SaveSkipped: logging.WARNING,
    Retrying: logging.WARNING,
    IncompleteCheckpoint: logging.WARNING,
    Completed: logging.INFO,
    Pruned: logging.INFO,
    CheckpointExported: logging.INFO,
}
