"""The events of a pipeline as typed data: the one source of logs, reports and progress."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ckpipe.errors import UsageError
from ckpipe.interpreter import user_code
from ckpipe.types import CheckpointInfo, SaveReport, SaveStatus, first_of, size_text

logger = logging.getLogger("ckpipe")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to one save or load.

    Args:
        id: Exact name of the checkpoint.
        step: Its step.
        rank: The rank on which it happened.
    """

    id: str
    step: int
    rank: int


@dataclass(frozen=True, slots=True)
class SaveStarted(Event):
    """``save`` was called and accepted."""

    def __str__(self) -> str:
        return f"saving step {self.step}"


@dataclass(frozen=True, slots=True)
class SaveSkipped(Event):
    """A save was skipped: memory is short, or ``keep_last=0`` keeps only final ones.

    Args:
        reason: The reason, as a sentence.
    """

    reason: str

    def __str__(self) -> str:
        return f"step {self.step} is not saved: {self.reason}"


@dataclass(frozen=True, slots=True)
class Staged(Event):
    """The state has been copied; training may go on.

    Args:
        seconds: Seconds since the call of ``save``.
        bytes: Size of the data files.
    """

    seconds: float
    bytes: int

    def __str__(self) -> str:
        return f"copied step {self.step}: {size_text(self.bytes)} in {self.seconds:.2f} s"


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

    def __str__(self) -> str:
        done, total = size_text(self.bytes_done), size_text(self.bytes_total)
        return f"uploaded {done} of {total} of step {self.step}"


@dataclass(frozen=True, slots=True)
class FileLinked(Event):
    """A data file did not change: it was linked to that of an earlier checkpoint, and not written.

    Args:
        file: Its key.
        source: The key of the file of the earlier checkpoint.
        bytes: Its size.
    """

    file: str
    source: str
    bytes: int

    def __str__(self) -> str:
        return f"linked {size_text(self.bytes)} of step {self.step} from {self.source}"


@dataclass(frozen=True, slots=True)
class Retrying(Event):
    """An operation failed with a transient error, and will be tried again.

    Args:
        error: The error.
        seconds: Seconds until the retry.
    """

    error: str
    seconds: float

    def __str__(self) -> str:
        return f"step {self.step}: trying again in {self.seconds:.1f} s after {self.error}"


@dataclass(frozen=True, slots=True)
class RankCommitted(Event):
    """This rank's files are durable.

    Args:
        seconds: Seconds since the call of ``save``.
        bytes: Bytes that the rank wrote, metadata included.
    """

    seconds: float
    bytes: int

    def __str__(self) -> str:
        size = size_text(self.bytes)
        return f"rank {self.rank} committed step {self.step}: {size} in {self.seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class Completed(Event):
    """The checkpoint is complete: every rank's files are durable.

    Of many ranks only those emit it that saw the checkpoint complete: at least one, seldom all.

    Args:
        info: The checkpoint, with the ``metadata`` and ``metrics`` that ``save`` was given; those
            of rank 0 if several ranks gave their own.
        seconds: Seconds since the call of ``save``; None if it was found complete later.
    """

    info: CheckpointInfo
    seconds: float | None = None

    def __str__(self) -> str:
        size = "" if self.info.bytes is None else f": {size_text(self.info.bytes)}"
        seconds = "" if self.seconds is None else f" in {self.seconds:.2f} s"
        return f"saved step {self.step}{size}{seconds}"


@dataclass(frozen=True, slots=True)
class ReplicasDiffered(Event):
    """Ranks hold other bytes of a tensor than the rank that wrote it, though declared equal.

    Emitted where the checkpoint was completed, once in a process for each pair of ranks and tensor.
    It does not tell which of the ranks is wrong.

    Args:
        tensor: The label of the tensor.
        owner: The rank that wrote these bytes of it.
        ranks: The ranks that hold others.
    """

    tensor: str
    owner: int
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.tensor} of {self.id} differs on ranks {self.owner} and {self.ranks}"


@dataclass(frozen=True, slots=True)
class IncompleteCheckpoint(Event):
    """This rank has committed, and some other rank has not within ``incomplete_after_seconds``.

    Args:
        absent: Ranks that have not committed, in order; of very many only the first hundreds.
        seconds: Seconds since this rank's commit.
    """

    absent: tuple[int, ...]
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.id} is incomplete {self.seconds:.0f} s after rank {self.rank} committed; "
            f"known to be without a commit: ranks {first_of(self.absent) or 'unknown'}"
        )


@dataclass(frozen=True, slots=True)
class SaveFailed(Event):
    """A save failed or was cancelled; older checkpoints are intact.

    Args:
        error: The error.
    """

    error: str

    def __str__(self) -> str:
        return f"The save of {self.id} failed on rank {self.rank}: {self.error}"


@dataclass(frozen=True, slots=True)
class CheckpointDamaged(Event):
    """A load found a checkpoint damaged, and goes on to an older one if there is one.

    Args:
        error: The damage.
    """

    error: str

    def __str__(self) -> str:
        return f"The checkpoint {self.id} is damaged: {self.error}"


@dataclass(frozen=True, slots=True)
class LoadStarted(Event):
    """A checkpoint was chosen and its load begins; it ends with ``Loaded`` or ``LoadFailed``.

    With ``fallback=True`` there is one for each checkpoint that is tried. For a source, ``id`` is
    its place and ``step`` is 0, here and in the other events of the load.
    """

    def __str__(self) -> str:
        return f"loading step {self.step}"


@dataclass(frozen=True, slots=True)
class LoadProgress(Event):
    """A load that takes longer makes progress; emitted five times a second at most.

    Args:
        bytes_done: Bytes of data files that this rank has read.
        bytes_total: Bytes that it has to read.
    """

    bytes_done: int
    bytes_total: int

    def __str__(self) -> str:
        done, total = size_text(self.bytes_done), size_text(self.bytes_total)
        return f"read {done} of {total} of step {self.step}"


@dataclass(frozen=True, slots=True)
class Loaded(Event):
    """A checkpoint is loaded, and every byte that was read and has a checksum is verified.

    Args:
        seconds: Seconds since the call of ``load``.
        bytes: Bytes of data files that this rank has read.
    """

    seconds: float
    bytes: int

    def __str__(self) -> str:
        return f"loaded step {self.step}: {size_text(self.bytes)} in {self.seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class LoadFailed(Event):
    """The load of a checkpoint failed or was cancelled.

    Args:
        error: The error.
    """

    error: str

    def __str__(self) -> str:
        return f"The load of {self.id} failed on rank {self.rank}: {self.error}"


@dataclass(frozen=True, slots=True)
class Pruned(Event):
    """Retention removed a checkpoint.

    Args:
        removed: Exact name of the checkpoint that was removed.
        reason: The reason why no rule keeps it.
    """

    removed: str
    reason: str

    def __str__(self) -> str:
        return f"pruned {self.removed}: {self.reason}"


@dataclass(frozen=True, slots=True)
class CheckpointExported(Event):
    """A checkpoint was also written in another form.

    Args:
        folder: Its folder, relative to the root.
        files: Names of its files.
        bytes: Their total size.
    """

    folder: str
    files: tuple[str, ...]
    bytes: int

    def __str__(self) -> str:
        files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        return f"exported step {self.step}: {size_text(self.bytes)} in {files}"


@dataclass(frozen=True, slots=True)
class SaveEnded(Event):
    """A save has ended, with any outcome; every save ends once.

    Args:
        status: The outcome: ``committed``, ``skipped``, ``failed`` or ``cancelled``.
        report: The report of its times.
    """

    status: SaveStatus
    report: SaveReport

    def __str__(self) -> str:
        return f"step {self.step} ended: {self.status}"


Listener = Callable[[Event], None]


class EventBus:
    """Hands every event to the log and to all listeners, on the pipeline's own thread.

    Attributes:
        place: The root of the checkpoints, as lines of the log show it; empty if it is unknown.
    """

    def __init__(self) -> None:
        self.place = ""
        self._listeners: list[Listener] = []
        self._retries: Counter[str] = Counter()

    def add(self, listener: Listener) -> None:
        """Call ``listener`` with every event from now on. It must not block for long."""
        self._listeners.append(listener)

    def remove(self, listener: Listener) -> None:
        """Stop calling ``listener``; a listener that was added twice is then called once.

        Raises:
            UsageError: If it was not added.
        """
        if listener not in self._listeners:
            raise UsageError(
                f"{listener!r:.100} does not listen to these events",
                hint="Remove the object that was given to events.add, once for each time",
            )
        self._listeners.remove(listener)

    def emit(self, event: Event, address: str = "") -> None:
        """Log an event and call the listeners; an error of a listener is logged, and it stays.

        Args:
            event: The event.
            address: The address of a checkpoint that is not below the root; empty for all others.
        """
        level = _LEVELS.get(type(event), logging.DEBUG)
        if isinstance(event, Retrying):
            self._retries[event.id] += 1
            level = logging.WARNING if self._retries[event.id] == 1 else logging.DEBUG
        elif isinstance(event, RankCommitted | SaveEnded):
            retries = self._retries.pop(event.id, 0)
            if retries > 1:
                logger.info("step %d: the store failed %d times until now", event.step, retries)
        if isinstance(event, Completed) and self.place:
            logger.log(level, "%s to %s/%s", event, self.place, event.id)
        elif isinstance(event, CheckpointExported) and self.place:
            logger.log(level, "%s to %s/%s", event, self.place, event.folder)
        elif isinstance(event, Loaded) and event.rank == 0 and self.place:
            logger.info("%s from %s", event, address or f"{self.place}/{event.id}")
        else:
            logger.log(level, "%s", event)
        for listener in list(self._listeners):
            try:
                with user_code("A listener", ""):
                    listener(event)
            except Exception:
                logger.exception("A listener failed on %s", event)


# Failed saves and loads, and damaged checkpoints, are raised or warned of: the log does not repeat
# them.
_LEVELS: dict[type[Event], int] = {
    SaveSkipped: logging.WARNING,
    IncompleteCheckpoint: logging.WARNING,
    Completed: logging.INFO,
    Pruned: logging.INFO,
    CheckpointExported: logging.INFO,
}
