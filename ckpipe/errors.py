"""Every error that ckpipe raises, grouped by the remedy.

::

    CkpipeError
    ├── UsageError                  change the call (also a ValueError)
    │   ├── SettingsError           a setting is unknown or out of range
    │   ├── UnsupportedState        an object in the state cannot be saved
    │   ├── UnsupportedTopology     this number of ranks needs another set-up
    │   ├── AttemptReused           this attempt id was already used on this root
    │   ├── BackendNotFound         no backend is registered for the URL
    │   ├── LockMisuse              the lock was used in a way that would deadlock
    │   └── PipelineClosed          the pipeline is not open
    ├── CheckpointNotFound          name another step (also a FileNotFoundError)
    │   └── CheckpointIncomplete    it was begun and never completed
    ├── TargetMismatch              change the load target or the arguments of load
    │   ├── StructureMismatch       keys are missing or unexpected
    │   ├── ShapeMismatch           a tensor has another shape
    │   ├── DtypeMismatch           a tensor has another dtype and cast is off
    │   ├── SharingConflict         the target shares bytes that differ in the checkpoint
    │   └── PerRankValue            ranks saved different values under one name
    ├── CorruptCheckpoint           load another one (``fallback=True`` does)
    │   ├── ChecksumMismatch        bytes differ from the saved ones
    │   ├── TruncatedObject         an object is shorter than it was saved
    │   ├── MissingObject           an object is gone
    │   └── InvalidManifest         the metadata contradicts itself or the format
    │       ├── UnsafePath          a name leaves its checkpoint
    │       ├── InvalidExtent       an extent overlaps or lies outside its file
    │       ├── DuplicateName       a name stands twice
    │       ├── OversizedMetadata   a header or a decompressed body is too large
    │       └── WrongWorldSize      ranks do not fit the world size
    ├── UnsupportedVersion          upgrade ckpipe
    ├── SaveError                  this save is lost; older ones and the pipeline are not
    │   ├── SaveSkipped             the settings ask for no checkpoint here
    │   ├── SaveCancelled           the handle was cancelled
    │   ├── PipelineBusy            no room, and on_busy is "fail"
    │   ├── PlanTimeout             some ranks did not join the plan in time
    │   ├── StateChanged            the state was changed without the lock
    │   ├── StateLockTimeout        the lock was held for too long
    │   ├── CaptureTooSlow          a step would have waited too long for the copy
    │   ├── DrainTimeout            the pipeline closed before the save was through
    │   ├── WorkerDied              the worker process is gone, and no other can take the save over
    │   ├── CommitConflict          another writer owns the name
    │   └── CommitUnknown           the commit may have landed or not
    ├── ReplicasDiffer              ranks hold different copies of a tensor that is declared equal
    └── StoreError                  check the store
        ├── ObjectNotFound          no object has this key
        ├── ObjectExists            an object already has this key
        ├── PermissionDenied        the store refuses the operation
        ├── StoreFull               no space or quota is left
        ├── InvalidKey              the store cannot hold this key
        ├── LinkRefused             a symbolic link is in the path of a write or delete
        ├── LinkUnavailable         the store cannot link this object; write it instead
        └── StoreUnavailable        try again later (``transient`` is true)
            └── Throttled           try again later, and slower

Tests freeze this tree. Errors pickle, so that they cross process boundaries.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class CkpipeError(Exception):
    """Base of all errors of ckpipe.

    Args:
        message: The failure, as a sentence without its full stop.
        step: The step concerned.
        rank: The rank concerned.
        key: The state key or object key concerned.
        hint: The next step for the caller, as a sentence without its full stop.
    """

    transient = False
    """True if the same operation may succeed when it is tried again."""

    target_touched = False
    """True if a load had put values into its target before it failed."""

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        rank: int | None = None,
        key: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.message, self.step, self.rank, self.key, self.hint = message, step, rank, key, hint
        super().__init__(message)

    def __str__(self) -> str:
        named = (("step", self.step), ("rank", self.rank), ("key", self.key))
        where = ", ".join(f"{name} {value!r}" for name, value in named if value is not None)
        text = f"{self.message} [{where}]" if where else self.message
        return f"{text}. {self.hint}." if self.hint else text

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.message,), self.__dict__)

    def located(self, *, step: int | None = None, rank: int | None = None) -> CkpipeError:
        """Set the step and rank if they are unknown, and return the error."""
        self.step = step if self.step is None else self.step
        self.rank = rank if self.rank is None else self.rank
        return self


class UsageError(CkpipeError, ValueError):
    """The call cannot work as it stands."""


class SettingsError(UsageError):
    """A setting is unknown or out of range."""


class UnsupportedState(UsageError):
    """An object in the state cannot be saved; ``key`` is its path in the state."""


class UnsupportedTopology(UsageError):
    """This number of ranks needs another set-up, or is not that of the pipeline's opening."""


class AttemptReused(UsageError):
    """The attempt id was already used on this root by this rank; raised by the first save."""


class BackendNotFound(UsageError):
    """No backend is registered for the scheme of the URL."""


class LockMisuse(UsageError):
    """The state lock was used in a way that would deadlock."""


class PipelineClosed(UsageError):
    """The pipeline is not open: not entered yet, or closed."""


class CheckpointNotFound(CkpipeError, LookupError, FileNotFoundError):
    """No complete checkpoint has this step or id."""


class CheckpointIncomplete(CheckpointNotFound):
    """The checkpoint was begun and never completed."""


class TargetMismatch(CkpipeError):
    """The saved state does not fit the target. The target is untouched."""


class StructureMismatch(TargetMismatch):
    """Keys are missing in the checkpoint or unexpected in it."""


class ShapeMismatch(TargetMismatch):
    """A tensor has another shape in the checkpoint than in the target."""


class DtypeMismatch(TargetMismatch):
    """A tensor has another dtype in the checkpoint than in the target, and ``cast`` is off."""


class SharingConflict(TargetMismatch):
    """Target tensors share bytes for which the checkpoint holds different values."""


class PerRankValue(TargetMismatch):
    """Ranks saved different values under one name, and the world size is another now."""


class CorruptCheckpoint(CkpipeError):
    """The store has other bytes than were saved. Nothing unverified reached the target."""


class ChecksumMismatch(CorruptCheckpoint):
    """Bytes on the store differ from the bytes that were saved."""


class TruncatedObject(CorruptCheckpoint):
    """An object on the store is shorter than it was when it was saved."""


class MissingObject(CorruptCheckpoint):
    """An object that the checkpoint needs is not on the store."""


class InvalidManifest(CorruptCheckpoint):
    """A manifest, group object or index contradicts itself or the format."""


class UnsafePath(InvalidManifest):
    """A name in a manifest leaves its checkpoint."""


class InvalidExtent(InvalidManifest):
    """An extent overlaps another or lies outside its file, entry or tensor."""


class DuplicateName(InvalidManifest):
    """A name that must be unique stands twice."""


class OversizedMetadata(InvalidManifest):
    """A header, or a body once decompressed, is larger than the format allows."""


class WrongWorldSize(InvalidManifest):
    """The ranks in a manifest do not fit its world size."""


class UnsupportedVersion(CkpipeError):
    """The checkpoint was written in a newer format than this ckpipe reads."""


class SaveError(CkpipeError):
    """This save is lost; older checkpoints are intact and the pipeline goes on."""


class SaveSkipped(SaveError):
    """The settings ask for no checkpoint here; the handle's status is ``skipped``."""


class SaveCancelled(SaveError):
    """The save was cancelled through its handle, or its pipeline was torn down."""

    def __init__(self, message: str, *, hint: str | None = None, **where: Any) -> None:
        hint = hint or "Older checkpoints are whole; save again if this one is needed"
        super().__init__(message, hint=hint, **where)


class PipelineBusy(SaveError):
    """Earlier saves hold the staging memory, and ``on_busy`` is ``"fail"``."""


class PlanTimeout(SaveError):
    """Some ranks did not join the plan in time; the message names them."""


class StateChanged(SaveError):
    """The state was changed without the lock: its structure, or a tensor while it was copied."""


class StateLockTimeout(SaveError):
    """The state lock was not free in time; the message names its holder and for how long."""


class CaptureTooSlow(SaveError):
    """A copy beside training would have held a step too long: the save failed, the step went on."""


class DrainTimeout(SaveError):
    """The pipeline had to close before the save was through."""


class WorkerDied(SaveError):
    """The worker process that brought the save to the store was killed, hung or did not start.

    The next worker, or a thread, takes a save over. So this is raised only if the staging memory of
    the save holds other bytes by now, or if every worker crashed with it. The message has the exit
    code and the last lines of the log.
    """


class CommitConflict(SaveError):
    """Another writer committed under the same name."""


class CommitUnknown(SaveError):
    """The commit may have landed or not, and the store does not tell. Nothing was deleted."""


class ReplicasDiffer(CkpipeError):
    """Ranks hold different bytes of a tensor that is declared equal; the checkpoint is complete."""


class StoreError(CkpipeError):
    """The store refused or failed an operation; ``key`` is the object's key."""

    unreadable = False
    """True if the device failed to read this object, as at a bad sector, and may read others."""


class ObjectNotFound(StoreError):
    """No object has this key."""


class ObjectExists(StoreError):
    """An object already has this key and the mode was create-only."""


class PermissionDenied(StoreError):
    """The store refuses this operation to these credentials or this user."""


class StoreFull(StoreError):
    """No space or quota is left on the store."""


class InvalidKey(StoreError):
    """The store cannot hold an object of this key."""


class LinkRefused(StoreError):
    """A directory is a symbolic link; ckpipe writes and deletes nothing through links."""


class LinkUnavailable(StoreError):
    """The store cannot link this object, for a reason that a write does not have."""

    def __init__(self, message: str, *, hint: str | None = None, **where: Any) -> None:
        super().__init__(message, hint=hint or "Write the object instead", **where)


class StoreUnavailable(StoreError):
    """The store did not answer, or answered that it cannot serve now."""

    transient = True


class Throttled(StoreUnavailable):
    """The store asks for fewer requests."""

    retry_after: float | None = None
    """Seconds to wait as the store asked; None if it named no time."""


def first_error(error: Exception) -> Exception:
    """Return the error that represents a group: the first of ckpipe's own, else the first."""
    if not isinstance(error, ExceptionGroup):
        return error
    leaves = [first_error(each) for each in error.exceptions]
    return next((each for each in leaves if isinstance(each, CkpipeError)), leaves[0])


def refusal_of(error: Exception, kind: type[CkpipeError] = CkpipeError) -> CkpipeError | None:
    """Return the error for memory, a thread or a depth that the system refused, or None."""
    cause = first_error(error)
    said = f"{type(cause).__name__}: {cause}"
    by_torch = isinstance(cause, RuntimeError) and "CPUAllocator: can't allocate memory" in said
    by_system = isinstance(cause, OSError) and cause.errno == errno.ENOMEM
    if by_torch or by_system or isinstance(cause, MemoryError):
        message = f"The system has no memory left ({said})"
        hint = "Free memory, raise its limit (ulimit -v), or lower load.lanes if this is a load"
    elif said == "RuntimeError: can't start new thread":
        message = f"The system cannot start another thread ({said})"
        hint = (
            "Raise the limit of processes and threads (ulimit -u, or pids.max of the container), "
            "or of memory for their stacks (ulimit -v)"
        )
    elif isinstance(cause, RecursionError):
        message = f"Containers are nested too deeply ({said})"
        hint = "Flatten them, or raise sys.setrecursionlimit"
    else:
        return None
    refusal = kind(message, hint=hint)
    refusal.__cause__ = cause
    return refusal


_VALUES = re.compile(r"(Parameter containing: )?\b(tensor|array|DTensor|Parameter)\(.*\)?")


def reason_of(error: BaseException) -> str:
    """Describe an error of the user's code in one line, without values of tensors."""
    text = _VALUES.sub("a tensor", " ".join(str(error).split())).rstrip(".")
    return f"{type(error).__name__}: {text:.500}"


@contextmanager
def naming_refusals(
    kind: type[CkpipeError] = CkpipeError, *, step: int | None = None
) -> Iterator[None]:
    """Raise what the system refuses in the block, memory or a thread, as an error of ckpipe.

    An error of the store gets the step.

    Args:
        kind: The class of the error.
        step: The step concerned.
    """
    try:
        yield
    except Exception as error:
        if (refusal := refusal_of(error, kind)) is None:
            if isinstance(error, StoreError):
                error.located(step=step)
            raise
        raise refusal.located(step=step) from error
