"""Values as plain tuples, and back: what may cross between trainer and worker, and nothing else.

Both ends are one installation of one interpreter, started one by the other, so the tuples go
through :mod:`marshal`: it takes plain values only, runs no code, and is many times faster than
JSON on the tables of twenty thousand tensors.
"""

from __future__ import annotations

import builtins
import marshal
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import datetime
from operator import attrgetter
from typing import Any, Generic, TypeVar

from ckpipe import errors, events
from ckpipe.errors import CkpipeError
from ckpipe.events import Event
from ckpipe.format.data_file import BlockPlace, Cargo, FilePlan, Span
from ckpipe.format.manifest import ChunkRow, EntryRow, Layout, Structure, TensorRow
from ckpipe.types import CheckpointId, CheckpointInfo

T = TypeVar("T")
Part = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""How a field is packed, and unpacked again."""


class Form(Generic[T]):
    """How the instances of a dataclass cross, field by field.

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
LAYOUT = Form(Layout, entries=Form(EntryRow).rows, chunks=Form(ChunkRow).rows)
CARGO = Form(
    Cargo,
    files=Form(FilePlan, entries=ENTRIES).rows,
    layout=LAYOUT.part,
    blocks=Form(BlockPlace, spans=Form(Span).rows).rows,
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
    """Whether a value can cross as it is."""
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


__all__ = [
    "CARGO",
    "ERROR",
    "EVENT",
    "ID",
    "INFO",
    "STRUCTURE",
    "Form",
    "Part",
    "is_plain",
    "optional",
    "plain",
]
