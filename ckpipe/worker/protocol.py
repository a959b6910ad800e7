"""The protocol of trainer and worker: the messages, and how their values cross.

Both ends are one installation of one interpreter, started one by the other, so values go through
:mod:`marshal`: it takes plain values only, runs no code, and is many times faster than JSON on
the tables of twenty thousand tensors. What is more than plain crosses as a tuple of a mark, its
kind and its fields (:func:`pack`).

A message is a frozen dataclass; on the socket it is eight bytes with its length, little-endian,
and then the version of this protocol and the message. A descriptor that belongs to a message
travels with its first byte (``SCM_RIGHTS``, unix(7)). Messages keep their order.

The life of a save: ``Begin``, a ``Block`` for each block, ``Sealed`` once all is copied; from then
on the trainer is not needed. Back come ``BlockReleased`` for each block, ``EventMessage`` for each
event, ``Committed`` at the commit and ``Ended`` at the end. If the worker dies, another one is
told the same.
"""

from __future__ import annotations

import builtins
import marshal
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any

from ckpipe import errors, events
from ckpipe.errors import CkpipeError
from ckpipe.events import Event
from ckpipe.format.data_file import BlockRange, DataFile, DataFiles, EntryRange
from ckpipe.format.manifest import Chunk, Chunks, Entries, Entry, Layout, Structure, TensorRow
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
        retry: Retries, backoff, longest backoff, timeout and deadline of requests.
        sweep_after: How long tombstones stay, in seconds.
        rule: The retention rule in its plain form; None for all.
        keep_reports: Whether manifests keep the reports of their saves.
        survive: Whether to finish what was staged when the trainer is gone.
        heartbeat: Seconds without a message after which the worker says that it is alive.
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
    retry: tuple[int, float, float, float, float | None]
    sweep_after: float
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
class Block:
    """A block is filled.

    Args:
        save: The number of the save.
        number: The number of the block in the save's files.
        segment: Where in the shared memory it lies.
        at: The same, in bytes from the segment's beginning.
        sums: Its checksums as far as they are known, as 64-bit numbers.
    """

    save: int
    number: int
    segment: int
    at: int
    sums: bytes


@dataclass(frozen=True, slots=True)
class Sealed:
    """All blocks were announced: the save needs its trainer no more.

    Args:
        save: The number of the save.
        structure: The form of the state; None for the same as of the save sealed before.
        fields: The other fields of :class:`~ckpipe.save.record.ManifestFields`, in order.
        clock: What was noted of its stages so far.
        planned: Whether a plan had to be made.
        captured_seconds: When forward and backward could go on, after the call.
        staged_seconds: When the state was copied, after the call.
    """

    save: int
    structure: Structure | None
    fields: tuple[Any, ...]
    clock: dict[str, Any]
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
    number: int


@dataclass(frozen=True, slots=True)
class EventMessage:
    """Something happened."""

    event: Event


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
    clock: dict[str, Any]


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
    clock: dict[str, Any]


Message = (
    Init | NewSegment | Dropped | Begin | Block | Sealed | GiveUp | Finish
    | Alive | StartFailed | BlockReleased | EventMessage | Logged | Committed | Ended
)  # fmt: skip


# ---- how values cross ----

_EVENTS = [
    each for each in vars(events).values() if isinstance(each, type) and issubclass(each, Event)
]
_CLASSES = (
    *Message.__args__, *_EVENTS, CheckpointId, CheckpointInfo, Structure, TensorRow, DataFiles,
    DataFile, BlockRange, EntryRange,
)  # fmt: skip
_FIELDS: dict[type[Any], tuple[str, ...]] = {
    **{kind: tuple(each.name for each in fields(kind)) for kind in _CLASSES},
    Layout: ("entries", "chunks"),
    Entries: Entry._fields,
    Chunks: Chunk._fields,
}
_KINDS = {kind.__name__: kind for kind in _FIELDS}
_DEEPEST_CAUSE = 8
_PLAIN = frozenset((bool, int, float, str, bytes, type(None)))
_EXTENDED: tuple[Any, ...] = (int, float, str, bytes)


def pack(value: Any) -> Any:
    """The plain form of a value: of one with fields, a tuple that begins with an ellipsis.

    What is of a subclass of a plain type crosses as that type. Values that cannot cross stay as
    they are, and :mod:`marshal` refuses them.
    """
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    if known := _kind_of(kind):
        return ..., known.__name__, *_pack_each([getattr(value, name) for name in _FIELDS[known]])
    if kind is range:
        return ..., "range", value.start, value.stop
    if kind is datetime:
        return ..., "datetime", value.isoformat()
    if isinstance(value, _EXTENDED):
        return next(plain(value) for plain in _EXTENDED if isinstance(value, plain))
    if isinstance(value, list | Mapping) and _is_plain(value):
        return ..., "plain", value
    if isinstance(value, list):
        return list(_pack_each(value))
    if isinstance(value, Sequence):
        kinds = set(map(type, value))
        row = _kind_of(kinds.pop()) if len(kinds) == 1 else None
        if row is None:
            return tuple(_pack_each(value))
        # A table crosses by columns, which costs a fraction of its rows one by one.
        columns = (list(map(attrgetter(name), value)) for name in _FIELDS[row])
        return ..., "rows", row.__name__, *map(_pack_each, columns)
    if isinstance(value, Mapping):
        return {pack(key): pack(each) for key, each in value.items()}
    if isinstance(value, BaseException):
        return ..., "error", *_pack_error(value)
    return value


@cache
def _kind_of(kind: Any) -> type[Any] | None:
    """The kind as which instances of a class cross: its own, or that which it extends."""
    return next((each for each in kind.__mro__ if each in _FIELDS), None)


def _pack_each(values: Sequence[Any]) -> Sequence[Any]:
    return values if _are_plain(values) else list(map(pack, values))


def unpack(packed: Any) -> Any:
    """The value whose plain form this is; a mapping comes back as a ``dict``."""
    kind = type(packed)
    if kind is list:
        return list(_unpack_each(packed))
    if kind is dict:
        return {unpack(key): unpack(each) for key, each in packed.items()}
    if kind is not tuple:
        return packed
    if packed[:1] != (...,):
        return tuple(_unpack_each(packed))
    _, name, *cells = packed
    if name == "plain":
        return cells[0]
    if name == "rows":
        kind_of_rows, *columns = cells
        return tuple(map(_KINDS[kind_of_rows], *map(_unpack_each, columns)))
    if name == "range":
        return range(*cells)
    if name == "datetime":
        return datetime.fromisoformat(*cells)
    if name == "error":
        return _unpack_error(*cells)
    return _KINDS[name](*_unpack_each(cells))


def _unpack_each(values: Sequence[Any]) -> Sequence[Any]:
    return values if _are_plain(values) else list(map(unpack, values))


def _are_plain(values: Sequence[Any]) -> bool:
    """Tell whether values are plain, or tuples of what is plain such as shapes."""
    kinds = set(map(type, values)) - _PLAIN
    if kinds == {tuple}:
        tuples = [each for each in values if type(each) is tuple]
        kinds = set(map(type, chain.from_iterable(tuples))) - _PLAIN
    return not kinds


def _pack_error(error: BaseException, depth: int = 0) -> tuple[Any, ...]:
    """An error: its kind, what it says, and what caused it."""
    names = [kind.__name__ for kind in type(error).__mro__ if _known(kind.__name__) is kind]
    cause = error.__cause__
    return (
        names[0],
        type(error).__name__,
        error.message if isinstance(error, CkpipeError) else str(error),
        {name: value for name, value in vars(error).items() if _is_plain(value)},
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


def can_cross(value: Any) -> bool:
    """Tell whether a value of plain types, or of subclasses of these, can cross."""
    return _is_plain(pack(value))


def _is_plain(value: Any) -> bool:
    try:
        marshal.dumps(value)
    except ValueError:
        return False
    return True


def encode(message: Message) -> bytes:
    """A message as it is sent, its length included.

    Raises:
        ValueError: If it holds what cannot cross.
    """
    body = marshal.dumps((VERSION, pack(message)))
    return len(body).to_bytes(8, "little") + body


def decode(body: bytes | memoryview) -> Message:
    """The message of a frame, without its length.

    Raises:
        ValueError: If it is of another version of the protocol.
    """
    version, packed = marshal.loads(body)
    if version != VERSION:
        raise ValueError(f"Trainer and worker are of different versions: {version}, {VERSION}")
    message: Message = unpack(packed)
    return message
