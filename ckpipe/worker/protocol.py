"""The protocol of trainer and worker: the messages, and the serialization of their values.

Both ends are one installation of one Python interpreter. The trainer starts the worker, over a
socket that no other process has. So values are pickled (:mod:`pickle`), as in
:mod:`multiprocessing`. Only values that the other end knows cross: ckpipe's own classes and plain
values. A value of a subclass of a plain type crosses as that type, and an error as one of ckpipe's
or of Python's (:class:`_MessagePickler`).

A message is a frozen dataclass; on the socket it is eight bytes with its length, little-endian,
and then the version of this protocol and the message. A descriptor that belongs to a message
travels with its first byte (``SCM_RIGHTS``, unix(7)). Messages keep their order.

The life of a save: the trainer sends ``Begin``, a ``BlockCopied`` for each block, and ``Sealed``
once all blocks are copied. From then on the save does not need the trainer. The worker sends
``BlockReleased`` for each block, each event of ckpipe, ``Committed`` at the commit and ``Ended`` at
the end. If the worker dies, another one gets the same messages.
"""

from __future__ import annotations

import builtins
import pickle
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING, Any, cast

from ckpipe import errors
from ckpipe.errors import CkpipeError
from ckpipe.events import Event
from ckpipe.format.data_file import BlockRange, DataFiles
from ckpipe.format.manifest import Layout, RankManifest, Structure
from ckpipe.format.tree import Node
from ckpipe.retention import Rule, from_data
from ckpipe.save.record import StageTimings
from ckpipe.types import CheckpointId, CheckpointInfo

if TYPE_CHECKING:
    from ckpipe.settings import Settings

VERSION = 1
"""Version of the protocol. Both ends are one installation; a difference means a mixture of two."""

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that the trainer may get with all its processes; the trainer decides about its saves."""

MARK = "_CKPIPE_WORKER"
"""The environment variable that marks a process as a worker."""

TELL_STACKS = signal.SIGQUIT
"""Signal that makes the worker write the stack of each of its threads to its log."""


# ---- messages ----


@dataclass(frozen=True, slots=True)
class Init:
    """The first message of the trainer.

    Args:
        trainer: The trainer's process id.
        path: Its ``sys.path``.
        directory: Its working directory, to which a relative root refers.
        environment: Its environment.
        settings: The settings of the pipeline, but ``plan`` and ``export``, as a record with the
            same names (:func:`ckpipe.worker.crossing.make_init`).
        rank: The rank.
        world_size: Number of ranks that save together.
        heartbeat: Seconds between two ``Alive`` messages.
    """

    trainer: int
    path: list[str]
    directory: str
    environment: Mapping[str, str] = field(repr=False)
    settings: Settings = field(repr=False)
    rank: int
    world_size: int
    heartbeat: float


@dataclass(frozen=True, slots=True)
class NewSegment:
    """A segment of shared memory; its descriptor comes along, and is mapped from ``offset`` on."""

    number: int
    nbytes: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Dropped:
    """The trainer has freed a segment of shared memory."""

    number: int


@dataclass(frozen=True, slots=True)
class Begin:
    """A save has begun to copy.

    Args:
        save: Its number on this socket.
        id: The checkpoint.
        began: Time of the call of ``save``, by ``time.perf_counter``, which all processes share.
        token: Identifies its manifest.
        redelivered: True if another worker died with it.
        files: Its data files; None for the same as those of the save before.
        resumed_from: Id of the checkpoint that the run has loaded.
        line: The line of launches that the run has taken over; None for one of its own.
        waits: True if the copy waits for released blocks.
    """

    save: int
    id: CheckpointId
    began: float
    token: str
    redelivered: bool
    files: DataFiles | None
    resumed_from: str | None
    line: str | None
    waits: bool


@dataclass(frozen=True, slots=True)
class BlockCopied:
    """A block is filled.

    Args:
        save: The number of the save.
        place: The number of its file, and its offset there.
        segment: The number of its segment of shared memory.
        at: Its offset in the segment, in bytes.
        sums: Its checksums as far as they are known, as 64-bit numbers.
    """

    save: int
    place: tuple[int, int]
    segment: int
    at: int
    sums: bytes


@dataclass(frozen=True, slots=True)
class Sealed:
    """All blocks were announced: the save no longer needs its trainer.

    Args:
        save: The number of the save.
        structure: The structure of the state; None for that of the save sealed before.
        part: Its manifest, without data files and checksums.
        clock: The times of its stages so far.
        planned: True if a plan had to be made.
        captured_seconds: Seconds from the call until forward and backward could go on.
        staged_seconds: Seconds from the call until the state was copied.
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
    """The save must be given up."""

    save: int


@dataclass(frozen=True, slots=True)
class Finish:
    """No more saves will come.

    Args:
        give_up: True to give up saves under way too.
    """

    give_up: bool


@dataclass(frozen=True, slots=True)
class Alive:
    """Heartbeat of the worker's event loop."""


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The worker cannot serve, and ends."""

    error: Exception


@dataclass(frozen=True, slots=True)
class BlockReleased:
    """A block is no longer in use."""

    save: int
    place: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Logged:
    """A log line of ckpipe in the worker."""

    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Committed:
    """This rank's files of a save are durable.

    Args:
        save: The number of the save.
        info: The checkpoint.
        seconds: Seconds from the call until the commit.
        unsettled: True if other ranks may not have committed.
        clock: The times of its stages so far.
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
        error: The error; None after success.
        unsettled: True if other ranks may not have committed.
        clock: The times of its stages.
    """

    save: int
    error: Exception | None
    unsettled: bool
    clock: StageTimings


Message = (
    Init | NewSegment | Dropped | Begin | BlockCopied | Sealed | GiveUp | Finish
    | Alive | StartFailed | BlockReleased | Event | Logged | Committed | Ended
)  # fmt: skip


# ---- serialization ----

_DEEPEST_CAUSE = 8
_PLAIN: tuple[Any, ...] = (int, float, complex, str, bytes, tuple, list, set, frozenset)


def can_cross(value: Any) -> bool:
    """True if a value is of plain types, or of subclasses of these."""
    try:
        return _is_plain(value)
    except RecursionError:  # it is nested too deeply, or contains itself
        return False


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(key) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, _PLAIN)


class _MessagePickler(pickle.Pickler):
    """Pickles all values as types that the other end knows."""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, BaseException):
            return _unpack_error, _pack_error(value)
        if isinstance(value, Rule):  # its class may be the program's
            return from_data, (value.to_data(),)
        if isinstance(value, BlockRange):  # the trainer's subclass also has the copies
            kind = BlockRange
        if kind is Node:
            return NotImplemented  # it pickles itself, as lists
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
    """Pack an error as plain values: class, message, attributes and cause."""
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
    """Make the error again; of an unknown class, an error of the nearest known base class."""
    kind = _known(known)
    assert kind is not None
    try:
        error = kind(message)
    except TypeError:  # some built-in classes need more than a text
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
    """Encode a message, with its length.

    Raises:
        ValueError: If it holds a value that cannot cross.
    """
    body = BytesIO()
    _MessagePickler(body, pickle.HIGHEST_PROTOCOL).dump((VERSION, message))
    return body.tell().to_bytes(8, "little") + body.getbuffer()


def decode(body: bytes | memoryview) -> Message:
    """Decode the body of a frame, without its length.

    Raises:
        ValueError: If it is of another version of the protocol.
    """
    version, message = pickle.loads(body)
    if version != VERSION:
        raise ValueError(f"Trainer and worker are of different versions: {version}, {VERSION}")
    return cast(Message, message)
