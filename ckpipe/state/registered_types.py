"""Types that a program taught ckpipe to save: how one becomes plain data, and back.

``collections.Counter``, which torch's ``MultiStepLR`` has in its state, is one from the beginning.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ckpipe.errors import InvalidManifest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RegisteredType:
    """How the objects of one class are saved.

    Args:
        name: What a manifest calls the class.
        cls: The class itself; subclasses are not covered.
        to_state: Makes a state of an object: any nesting of what ckpipe saves.
        from_state: Makes an object of such a state.
    """

    name: str
    cls: type[Any]
    to_state: Callable[[Any], Any]
    from_state: Callable[[Any], Any]


_by_class: dict[type[Any], RegisteredType] = {}
_by_name: dict[str, RegisteredType] = {}


def register_type(
    cls: type[T],
    *,
    to_state: Callable[[T], Any],
    from_state: Callable[[Any], T],
    name: str | None = None,
) -> None:
    """Teaches ckpipe to save and load the objects of a class.

    The same call must have been made in a program that loads them.

    Args:
        cls: The class; its subclasses need calls of their own.
        to_state: Makes a state of an object: any nesting of what ckpipe saves, tensors included.
        from_state: Makes an object of such a state.
        name: What checkpoints call the class; by default its module and qualified name. It must
            stay the same for as long as checkpoints with it are to be loaded.

    Raises:
        ValueError: If another class has this name.
    """
    name = name or f"{cls.__module__}:{cls.__qualname__}"
    known = _by_name.get(name)
    if known is not None and known.cls is not cls:
        raise ValueError(f"the name {name!r} already stands for {known.cls!r}")
    _by_class[cls] = _by_name[name] = RegisteredType(name, cls, to_state, from_state)


def registered_for(cls: type[Any]) -> RegisteredType | None:
    """The registration of a class, if it has one."""
    return _by_class.get(cls)


def registered_as(name: str) -> RegisteredType | None:
    """The registration that a manifest names, if this program made it."""
    return _by_name.get(name)


def _counts(counter: Counter[Any]) -> OrderedDict[Any, Any]:
    counts: OrderedDict[Any, Any] = OrderedDict(counter)
    vars(counts).update(vars(counter))
    return counts


def _counter(counts: Any) -> Counter[Any]:
    if not isinstance(counts, dict):
        raise InvalidManifest(f"A Counter was saved as a {type(counts).__qualname__}")
    made: Counter[Any] = Counter(counts)
    vars(made).update(getattr(counts, "__dict__", {}))
    return made


register_type(Counter, to_state=_counts, from_state=_counter)
