"""The protocol of trainer and worker: the messages, and how their values cross.

Both ends are one installation of one interpreter, started one by the other over a socket that no
other process has, so values go through :mod:`pickle`, as they do in :mod:`multiprocessing`. Only
what the other end knows crosses: ckpipe's own classes and plain values. What is of a subclass of a
plain type crosses as that type, and an error as one of ckpipe's or of Python's (:class:`_Pickler`).

A message is a frozen dataclass; on the socket it is eight bytes with its length, little-endian,
and then the version of this protocol and the message. A descriptor that belongs to a message
travels with its first byte (``SCM_RIGHTS``, unix(7)). Messages keep their order.

The life of a save: ``Begin``, a ``BlockCopied`` for each block, ``Sealed`` once all is copied;
from then on the trainer is not needed. Back come ``BlockReleased`` for each block, each event of
ckpipe, ``Committed`` at the commit and ``Ended`` at the end. If the worker dies, another one is
told the same.
"""

from __future__ import annotations

import builtins
import pickle
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import timedelta
from functools import cache
from io import BytesIO
from typing import Any, cast

from ckpipe import errors
from ckpipe.errors import CkpipeError
from ckpipe.events import Event
from ckpipe.format.data_file import BlockRange, DataFiles
from ckpipe.format.manifest import Layout, RankManifest, Structure
from ckpipe.save.record import StageTimings
from ckpipe.store.retry import RetryPolicy
from ckpipe.types import CheckpointId, CheckpointInfo

VERSION = 1
"""Of the protocol. Both ends are one installation; another version is a mixture of two."""

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""What the trainer may be sent with all its processes; what then becomes of saves, it decides."""

MARK = "_CKPIPE_WORKER"
"""The variable of the environment by which a process knows that it was started as a worker."""

TELL_STACKS = signal.SIGQUIT
"""Has the worker write to its log where each of its threads is."""


# ---- messages ----


@dataclass(frozen=True, slots=True)
class Init:
    """The first message of the trainer: all that a worker has to know.

    Args:
        trainer: The trainer's process id.
        path: Its ``sys.path``.
        directory: Its working directory, to which a relative root refers.
        environment: Its environment.
        url: The root.
        options: The backend's options.
        rank: The rank.
        world_size: How many ranks save together.
        block_bytes: The size of a block.
        lanes: Blocks of one save under way at the same time.
        retry: How often and how long to try requests.
        sweep_after: How long tombstones stay.
        rule: The retention rule in its plain form; None for all.
        keep_reports: Whether manifests keep the reports of their saves.
        survive: Whether to finish what was staged when the trainer is gone.
        heartbeat: Seconds after which the worker says again that it is alive.
        niceness: How much the worker gives way to others.
    """

    trainer: int
    path: list[str]
    directory: str
    environment: Mapping[str, str] = field(repr=False)
    url: str = field(repr=False)
    options: Mapping[str, Any] = field(repr=False)
    rank: int
    world_size: int
    block_bytes: int
    lanes: int
    retry: RetryPolicy
    sweep_after: timedelta
    rule: Mapping[str, Any] | None
    keep_reports: bool
    survive: bool
    heartbeat: float
    niceness: int


@dataclass(frozen=True, slots=True)
class NewSegment:
    """A piece of shared memory; its descriptor comes with it, and maps from an offset on."""

    number: int
    nbytes: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Dropped:
    """The trainer has given a piece of shared memory back."""

    number: int


@dataclass(frozen=True, slots=True)
class Begin:
    """A save has begun to copy.

    Args:
        save: Its number on this socket.
        id: The checkpoint.
        began: When it was called for, by ``time.perf_counter``, which all processes share.
        token: By which its manifest is known again.
        again: Whether another worker died with it.
        files: What it stores; None for the same as the save before.
        resumed_from: Id of the checkpoint that the run had loaded.
        waits: Whether the copy waits for blocks to come back.
    """

    save: int
    id: CheckpointId
    began: float
    token: str
    again: bool
    files: DataFiles | None
    resumed_from: str | None
    waits: bool


@dataclass(frozen=True, slots=True)
class BlockCopied:
    """A block is filled.

    Args:
        save: The number of the save.
        place: The number of its file, and where it begins there.
        segment: Where in the shared memory it lies.
        at: The same, in bytes from the segment's beginning.
        sums: Its checksums as far as they are known, as 64-bit numbers.
    """

    save: int
    place: tuple[int, int]
    segment: int
    at: int
    sums: bytes


@dataclass(frozen=True, slots=True)
class Sealed:
    """All blocks were announced: the save needs its trainer no more.

    Args:
        save: The number of the save.
        structure: The form of the state; None for the same as of the save sealed before.
        part: Its manifest, but for data files and checksums.
        clock: What was noted of its stages so far.
        planned: Whether a plan had to be made.
        captured_seconds: When forward and backward could go on, after the call.
        staged_seconds: When the state was copied, after the call.
    """

    save: int
    structure: Structure | None
    part: RankManifest
    clock: StageTimings
    planned: bool
    captured_seconds: float | None
    staged_seconds: float | None


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The save is not wanted any more."""

    save: int


@dataclass(frozen=True, slots=True)
class Finish:
    """No more saves will come.

    Args:
        give_up: Whether those that are under way are not wanted any more either.
    """

    give_up: bool


@dataclass(frozen=True, slots=True)
class Alive:
    """The worker's loop turns."""


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The worker cannot serve, and ends."""

    error: Exception


@dataclass(frozen=True, slots=True)
class BlockReleased:
    """A block is not needed any more."""

    save: int
    place: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Logged:
    """The library logged something in the worker."""

    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Committed:
    """This rank's part of a save is durable.

    Args:
        save: The number of the save.
        info: The checkpoint.
        seconds: When, after the call.
        unsettled: Whether other ranks may not have committed.
        clock: What was noted of its stages so far.
    """

    save: int
    info: CheckpointInfo
    seconds: float
    unsettled: bool
    clock: StageTimings


@dataclass(frozen=True, slots=True)
class Ended:
    """All stages of a save have ended.

    Args:
        save: The number of the save.
        error: What went wrong; None if nothing did.
        unsettled: Whether other ranks may not have committed.
        clock: What was noted of its stages.
    """

    save: int
    error: Exception | None
    unsettled: bool
    clock: StageTimings


Message = (
    Init | NewSegment | Dropped | Begin | BlockCopied | Sealed | GiveUp | Finish
    | Alive | StartFailed | BlockReleased | Event | Logged | Committed | Ended
)  # fmt: skip


# ---- how values cross ----

_DEEPEST_CAUSE = 8
_PLAIN: tuple[Any, ...] = (int, float, complex, str, bytes, tuple, list, set, frozenset)


def can_cross(value: Any) -> bool:
    """Tell whether a value is of plain types, or of subclasses of these."""
    try:
        return _is_plain(value)
    except RecursionError:  # it is nested too deeply, or holds itself
        return False


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(key) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, _PLAIN)


class _Pickler(pickle.Pickler):
    """Has everything cross as what the other end knows."""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, BaseException):
            return _unpack_error, _pack_error(value)
        if isinstance(value, BlockRange):  # those of the trainer also say how they are filled
            kind = BlockRange
        if is_dataclass(kind):
            return kind, tuple([getattr(value, name) for name in _names(kind)])
        if isinstance(value, Layout):
            return Layout, (value.entries, value.chunks)
        if isinstance(value, type) or kind.__module__.startswith("ckpipe."):
            return NotImplemented
        for plain in _PLAIN:
            if isinstance(value, plain) and kind is not plain:
                return plain, (plain(value),)
        if isinstance(value, Mapping):
            return dict, (dict(value),)
        if kind.__module__ in sys.stdlib_module_names:
            return NotImplemented
        raise ValueError(f"A {kind.__name__} cannot cross to another process")


@cache
def _names(kind: Any) -> list[str]:
    return [each.name for each in fields(kind)]


def _pack_error(error: BaseException, depth: int = 0) -> tuple[Any, ...]:
    """An error: its kind, what it says, and what caused it."""
    names = [kind.__name__ for kind in type(error).__mro__ if _known(kind.__name__) is kind]
    cause = error.__cause__
    return (
        names[0],
        type(error).__name__,
        error.message if isinstance(error, CkpipeError) else str(error),
        {name: value for name, value in vars(error).items() if can_cross(value)},
        None if cause is None or depth > _DEEPEST_CAUSE else _pack_error(cause, depth + 1),
    )


def _unpack_error(
    known: str, name: str, message: str, attributes: dict[str, Any], cause: Any
) -> Exception:
    """The error again; one of a kind that only its own process knows is of the next known kind."""
    kind = _known(known)
    assert kind is not None
    try:
        error = kind(message)
    except TypeError:  # built-in ones may need more than a text
        error = Exception(message)
        known = "Exception"
    if not isinstance(error, Exception):
        error = RuntimeError(f"{name}: {message}")
    vars(error).update(attributes)
    if name != known:
        error.add_note(f"In the worker it was a {name}")
    if cause is not None:
        error.__cause__ = _unpack_error(*cause)
    return error


def _known(name: str) -> type[BaseException] | None:
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, BaseException) else None


def encode(message: Message) -> bytes:
    """A message as it is sent, its length included.

    Raises:
        ValueError: If it holds what cannot cross.
    """
    body = BytesIO()
    _Pickler(body, pickle.HIGHEST_PROTOCOL).dump((VERSION, message))
    return body.tell().to_bytes(8, "little") + body.getbuffer()


def decode(body: bytes | memoryview) -> Message:
    """The message of a frame, without its length.

    Raises:
        ValueError: If it is of another version of the protocol.
    """
    version, message = pickle.loads(body)
    if version != VERSION:
        raise ValueError(f"Trainer and worker are of different versions: {version}, {VERSION}")
    return cast(Message, message)
