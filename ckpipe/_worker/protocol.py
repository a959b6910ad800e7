"""The protocol of trainer and worker: messages, and their values as plain tuples.

Both ends are one installation of one interpreter, started one by the other, so the tuples go
through :mod:`marshal`: it takes plain values only, runs no code, and is many times faster than
JSON on the tables of twenty thousand tensors.

A message is a frozen dataclass; on the socket it is eight bytes with its length, little-endian,
and then the version of this protocol, its name and its fields. A descriptor that belongs to a
message travels with its first byte (``SCM_RIGHTS``, unix(7)). Messages keep their order.

The life of a save: ``NewCargo`` if its plan is new, ``Begin``, a ``Block`` for each block and each
of the two stages that need it, ``Handed`` once all is copied; from then on the trainer is not
needed. Back come ``Free`` for each block, ``Told`` for each event, ``Settled`` at the commit and
``Ended`` at the end. If the worker dies, another one is told the same.
"""

from __future__ import annotations

import builtins
import marshal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from operator import attrgetter
from typing import Any, Generic, TypeVar

from ckpipe import errors, events
from ckpipe.errors import CkpipeError
from ckpipe.events import Event
from ckpipe.format.data_file import BlockRange, DataFile, DataFiles, EntryRange
from ckpipe.format.keys import Json
from ckpipe.format.manifest import Chunks, Entries, Layout, Structure, TensorRow
from ckpipe.types import CheckpointId, CheckpointInfo

T = TypeVar("T")
Part = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""How a field is packed, and unpacked again."""


class Form(Generic[T]):
    """The plain form of the instances of a dataclass, field by field.

    Args:
        kind: The class.
        nested: The fields that hold more than plain values, each with how it crosses.
    """

    def __init__(self, kind: type[T], **nested: Part) -> None:
        self._kind = kind
        names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
        self._get = attrgetter(*names) if len(names) > 1 else None
        self._only = names[0] if len(names) == 1 else None
        self._nested = [(names.index(name), *part) for name, part in nested.items()]

    def pack(self, value: T) -> tuple[Any, ...]:
        """The fields of an instance, in order."""
        if self._get is None:
            packed: tuple[Any, ...] = () if self._only is None else (getattr(value, self._only),)
        else:
            packed = self._get(value)
        if not self._nested:
            return packed
        cells = list(packed)
        for at, pack, _ in self._nested:
            cells[at] = pack(cells[at])
        return tuple(cells)

    def unpack(self, packed: tuple[Any, ...]) -> T:
        """The instance that has these fields."""
        if not self._nested:
            return self._kind(*packed)
        cells = list(packed)
        for at, _, unpack in self._nested:
            cells[at] = unpack(cells[at])
        return self._kind(*cells)

    @property
    def part(self) -> Part:
        """A field that holds such an instance."""
        return self.pack, self.unpack

    @property
    def rows(self) -> Part:
        """A field that holds a tuple of such instances."""
        return (
            lambda values: [self.pack(each) for each in values],
            lambda packed: tuple(self.unpack(each) for each in packed),
        )


def optional(part: Part) -> Part:
    """A field that may be None."""
    pack, unpack = part
    return (
        lambda value: None if value is None else pack(value),
        lambda packed: None if packed is None else unpack(packed),
    )


ENTRIES: Part = (
    lambda value: (value.start, value.stop),
    lambda packed: range(*packed),
)
TIME: Part = (datetime.isoformat, datetime.fromisoformat)

ID = Form(CheckpointId)
INFO = Form(CheckpointInfo, saved_at=optional(TIME))
STRUCTURE = Form(Structure, tensors=Form(TensorRow).rows)
LAYOUT: Part = (
    lambda layout: (layout.entries.columns, layout.chunks.columns),
    lambda packed: Layout(Entries(*packed[0]), Chunks(*packed[1])),
)
CARGO = Form(
    DataFiles,
    files=Form(DataFile, entries=ENTRIES).rows,
    layout=LAYOUT,
    blocks=Form(BlockRange, spans=Form(EntryRange).rows).rows,
)

_EVENTS: dict[str, Form[Any]] = {
    name: Form(kind, **({"info": INFO.part} if name == "Completed" else {}))
    for name, kind in vars(events).items()
    if isinstance(kind, type) and issubclass(kind, Event)
}


def pack_event(event: Event) -> tuple[Any, ...]:
    """An event of any kind."""
    name = type(event).__name__
    return name, _EVENTS[name].pack(event)


def unpack_event(packed: tuple[Any, ...]) -> Event:
    """The event again."""
    name, cells = packed
    event: Event = _EVENTS[name].unpack(cells)
    return event


EVENT: Part = (pack_event, unpack_event)

_DEEPEST_CAUSE = 8


def pack_error(error: BaseException, depth: int = 0) -> tuple[Any, ...]:
    """An error: its kind, what it says, and what caused it."""
    names = [kind.__name__ for kind in type(error).__mro__ if _known(kind.__name__) is kind]
    cause = error.__cause__
    return (
        names[0],
        type(error).__name__,
        error.message if isinstance(error, CkpipeError) else str(error),
        {name: value for name, value in vars(error).items() if is_plain(value)},
        None if cause is None or depth > _DEEPEST_CAUSE else pack_error(cause, depth + 1),
    )


def unpack_error(packed: tuple[Any, ...]) -> Exception:
    """The error again; one of a kind that only its own process knows is of the next known kind."""
    known, name, message, attributes, cause = packed
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
        error.__cause__ = unpack_error(cause)
    return error


def _known(name: str) -> type[BaseException] | None:
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, BaseException) else None


ERROR: Part = (pack_error, unpack_error)


def is_plain(value: Any) -> bool:
    """Tell whether a value can cross as it is."""
    try:
        marshal.dumps(value)
    except ValueError:
        return False
    return True


def plain(value: Any) -> Any:
    """The same value of exactly the built-in types, for what is of a subclass of one."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, list):
        return list(map(plain, value))
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


VERSION = 1
"""Of the protocol. Both ends are one installation; another version is a mixture of two."""


@dataclass(frozen=True, slots=True)
class Hello:
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
class Segment:
    """A piece of shared memory; its descriptor comes with it, and maps from an offset on."""

    number: int
    nbytes: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Dropped:
    """The trainer has given a piece of shared memory back."""

    number: int


@dataclass(frozen=True, slots=True)
class NewCargo:
    """The files that saves from now on are to store under this number."""

    number: int
    cargo: DataFiles


@dataclass(frozen=True, slots=True)
class Begin:
    """A save has begun to copy.

    Args:
        save: Its number on this socket.
        id: The checkpoint.
        began: When it was called for, by ``time.perf_counter``, which all processes share.
        token: By which its manifest is known again.
        again: Whether another worker died with it.
        cargo: The number of what it stores.
        resumed_from: Id of the checkpoint that the run had loaded.
        waits: Whether the copy waits for blocks to come back.
    """

    save: int
    id: CheckpointId
    began: float
    token: str
    again: bool
    cargo: int
    resumed_from: str | None
    waits: bool


@dataclass(frozen=True, slots=True)
class Block:
    """A block is filled.

    Args:
        save: The number of the save.
        number: The number of the block in its cargo.
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
class NewShape:
    """The form of states from now on, until there is another."""

    structure: Structure


@dataclass(frozen=True, slots=True)
class Handed:
    """All blocks were announced: the save needs its trainer no more.

    Args:
        save: The number of the save.
        values: The inline values.
        started: When it began, ISO 8601 in UTC.
        writer: Versions.
        metadata: The user's.
        metrics: The user's, encoded.
        final: Whether it is the run's final checkpoint.
        clock: What was noted of its stages so far.
        planned: Whether a plan had to be made.
        captured_seconds: When forward and backward could go on, after the call.
        staged_seconds: When the state was copied, after the call.
    """

    save: int
    values: tuple[Json, ...]
    started: str
    writer: Mapping[str, str]
    metadata: Mapping[str, Json]
    metrics: Mapping[str, Json]
    final: bool
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
    """No more saves will come."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Nothing is wanted any more."""


@dataclass(frozen=True, slots=True)
class Alive:
    """The worker's loop turns."""


@dataclass(frozen=True, slots=True)
class Unable:
    """The worker cannot serve, and ends."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Free:
    """A block is not needed any more."""

    save: int
    number: int


@dataclass(frozen=True, slots=True)
class Told:
    """Something happened."""

    event: Event


@dataclass(frozen=True, slots=True)
class Logged:
    """The library logged something in the worker."""

    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Settled:
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
    Hello | Segment | Dropped | NewCargo | Begin | Block | NewShape | Handed | GiveUp | Finish
    | Stop | Alive | Unable | Free | Told | Logged | Settled | Ended
)  # fmt: skip

_NESTED: dict[type[Any], dict[str, Any]] = {
    NewCargo: {"cargo": CARGO.part},
    Begin: {"id": ID.part},
    NewShape: {"structure": STRUCTURE.part},
    Unable: {"error": ERROR},
    Told: {"event": EVENT},
    Settled: {"info": INFO.part},
    Ended: {"error": optional(ERROR)},
}
_FORMS: dict[str, Form[Any]] = {
    kind.__name__: Form(kind, **_NESTED.get(kind, {})) for kind in Message.__args__
}


def encode(message: Message) -> bytes:
    """A message as it is sent, its length included.

    Raises:
        ValueError: If it holds what cannot cross.
    """
    name = type(message).__name__
    document = (VERSION, name, _FORMS[name].pack(message))
    try:
        body = marshal.dumps(document)
    except ValueError:
        body = marshal.dumps(plain(document))
    return len(body).to_bytes(8, "little") + body


def decode(body: bytes | memoryview) -> Message:
    """The message of a frame, without its length.

    Raises:
        ValueError: If it is of another version of the protocol.
    """
    version, name, packed = marshal.loads(body)
    if version != VERSION:
        raise ValueError(f"Trainer and worker are of different versions: {version}, {VERSION}")
    message: Message = _FORMS[name].unpack(packed)
    return message
