"""Read pickles of other programs without running anything that they name.

Theory. A pickle is a program for a small stack machine, which may call whatever it names. Here a
name leads to a function of ours that makes plain data, or is refused. So a pickle can call these
functions only, and cannot reach any other object. Python's own unpickler in Python is used: the one
in C makes room for sizes and numbers that a file only claims. An instruction of one byte may make
an object of hundreds, so their memory is bounded by the size of the pickle. Keys are small, since
the hash of a tuple is made anew of those of its items, which can be the same tuple many times.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import reduce
from typing import Any, ClassVar

from ckpipe.errors import CkpipeError, InvalidManifest, UnsupportedState
from ckpipe.format.labels import join

Make = Callable[..., Any]
_Load = Callable[["_Unpickler"], None]

_BASE_BYTES, _BYTES_PER_BYTE = 4 << 20, 36
"""Bytes of memory for the objects of any pickle, and for each byte of it. Real ones take at most
33: small parameters with short names, in protocol 4 or 5."""

_MOST_DEPTH = 200
"""Most containers around an object whose place is looked for."""

_MOST_KEY_PARTS, _MOST_KEY_BITS = 100, 1000
"""Most items of a tuple that is a key, with those inside, and most bits of a number."""


class Record:
    """An object of a foreign class: its name, and the attributes that the file gives it.

    Attributes:
        state: Its attributes; under an empty name a state of another form.

    Args:
        name: The name of the class, without its module.
    """

    __slots__ = ("name", "state")

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: dict[str, Any] = {}


def read_pickle(
    data: bytes,
    key: str,
    known: Mapping[str, Any],
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Return the object of a pickle.

    Args:
        data: The pickle.
        key: The file that it is in, for errors.
        known: By ``module.name``, the functions that are called in place of those that the pickle
            names, plain objects, and errors to raise.
        persistent: Makes the objects that the pickle names by a persistent id.

    Raises:
        UnsupportedState: If it names anything else.
        InvalidManifest: If it is malformed, or makes far more than its bytes.
    """

    def unpickled(*, placing: bool = False) -> Any:
        unpickler = _Unpickler(io.BytesIO(data))
        unpickler.known, unpickler.persistent = known, persistent
        unpickler.left, unpickler.placing = _BASE_BYTES + _BYTES_PER_BYTE * len(data), placing
        return unpickler.load()

    try:
        return unpickled()
    except UnsupportedState as error:
        error.message, error.key = f"{key}: {error.message}", key
        with suppress(Exception):  # the objects behind it may be malformed
            error.key = _place_of_refused(unpickled(placing=True)) or key
        raise
    except CkpipeError as error:
        error.key = error.key or key
        raise
    except Exception as error:  # any may come of any bytes
        raise InvalidManifest(
            f"The pickle is malformed: {error!r:.200}",
            key=key,
            hint="The file is truncated or damaged; copy or download it again",
        ) from None


class _Refused:
    """An object that is refused, while its place is looked for."""

    def __call__(self, *_: Any) -> _Refused:
        return self


def _place_of_refused(state: Any) -> str | None:
    """Return the label of the first object in dicts, lists and tuples that is refused."""
    pending: list[tuple[Any, tuple[Any, ...]]] = [(state, ())]
    seen: set[int] = set()
    while pending:
        each, path = pending.pop()
        if isinstance(each, _Refused):
            return reduce(lambda label, key: join(label, key)[:200], path, "")
        if id(each) not in seen and len(path) < _MOST_DEPTH:
            seen.add(id(each))
            inside: Iterable[Any] = each.items() if isinstance(each, dict) else ()
            inside = enumerate(each) if type(each) in (list, tuple) else inside
            pending += reversed([(child, (*path, key)) for key, child in inside])
    return None


def _costly(load: _Load, nbytes: int) -> _Load:
    def checked(self: _Unpickler) -> None:
        self.left -= nbytes
        if self.left < 0:
            raise pickle.UnpicklingError("its objects take far more memory than a real file's")
        load(self)

    return checked


def _keyed(load: _Load, keys: slice) -> _Load:
    def checked(self: _Unpickler) -> None:
        _check_keys(self.stack[keys])
        load(self)

    return checked


def _check_keys(keys: Iterable[Any]) -> None:
    for key in keys:
        parts = [key]
        for each in parts:
            if isinstance(each, tuple | frozenset):
                parts += each
            huge = isinstance(each, int) and each.bit_length() > _MOST_KEY_BITS
            if huge or len(parts) > _MOST_KEY_PARTS:
                raise ValueError("a key of a dict, or an item of a set, is huge")


class _Unpickler(pickle._Unpickler):
    """Calls known functions only; attributes are given to records and ordered dicts only."""

    known: Mapping[str, Any]
    persistent: Callable[[Any], Any] | None
    left: int
    placing: bool
    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        found = self.known.get(f"{module}.{name}")
        if found is None:
            found = UnsupportedState(
                f"The file holds an object of {module}.{name}, which ckpipe does not know, and "
                "ckpipe runs nothing that a file names",
                hint="If you trust the file's writer, load it with the program that wrote it, and "
                "save its tensors and plain values alone",
            )
        if isinstance(found, CkpipeError):
            if self.placing:
                return _Refused()
            raise found
        return found

    def persistent_load(self, pid: Any) -> Any:
        if self.persistent is None:
            raise pickle.UnpicklingError("it has a persistent id")
        return self._made(self.persistent, pid)

    def _made(self, make: Make, *args: Any) -> Any:
        try:
            return make(*args)
        except Exception:
            if self.placing:
                return _Refused()
            raise

    def load_build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if isinstance(made, _Refused):
            return
        if isinstance(made, Record):
            made.state = state if type(state) is dict else {"": state}
        elif type(made) is OrderedDict and type(state) is dict and state.keys() <= {"_metadata"}:
            vars(made).update(state)
        else:
            raise pickle.UnpicklingError(f"a {type(made).__name__} has attributes")

    def load_newobj(self) -> None:
        args, make = self.stack.pop(), self.stack.pop()
        self.stack.append(self._made(make, *args))

    def refuse(self) -> None:
        raise pickle.UnpicklingError("it has an instruction that no such file needs")

    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.NEWOBJ[0]] = dispatch[pickle.REDUCE[0]] = load_newobj
    for code in pickle.EMPTY_SET + pickle.FROZENSET + pickle.REDUCE + pickle.NEWOBJ:
        dispatch[code] = _costly(dispatch[code], 200)
    for code in (pickle.EMPTY_LIST + pickle.EMPTY_DICT + pickle.MARK + pickle.TUPLE + pickle.TUPLE1
                 + pickle.TUPLE2 + pickle.TUPLE3 + pickle.LIST + pickle.DICT + pickle.BINPERSID
                 + pickle.PUT + pickle.BINPUT + pickle.LONG_BINPUT + pickle.MEMOIZE):  # fmt: skip
        dispatch[code] = _costly(dispatch[code], 64)
    for code in pickle.SETITEMS + pickle.DICT:
        dispatch[code] = _keyed(dispatch[code], slice(None, None, 2))
    for code in pickle.ADDITEMS + pickle.FROZENSET:
        dispatch[code] = _keyed(dispatch[code], slice(None))
    dispatch[pickle.SETITEM[0]] = _keyed(dispatch[pickle.SETITEM[0]], slice(-2, -1))
    for code in (pickle.NEWOBJ_EX + pickle.INST + pickle.OBJ + pickle.EXT1 + pickle.EXT2
                 + pickle.EXT4 + pickle.NEXT_BUFFER + pickle.READONLY_BUFFER):  # fmt: skip
        dispatch[code] = refuse


def encoded(text: str, encoding: str = "latin1") -> bytes:
    """Return bytes that an old pickle has as text."""
    if encoding not in ("latin1", "latin-1"):
        raise ValueError("bytes are written as latin1")
    return text.encode("latin1")


def _set(items: Iterable[Any] = ()) -> set[Any]:
    _check_keys(items)
    return set(items)


def _counter(counts: dict[Any, Any]) -> Counter[Any]:
    if type(counts) is not dict:
        raise ValueError("a Counter is made of a dict")
    return Counter(counts)


PLAIN: dict[str, Any] = {
    "collections.OrderedDict": lambda: OrderedDict(),
    "collections.Counter": _counter,
    "_codecs.encode": encoded,
    **{
        f"{module}.{name}": make
        for module in ("builtins", "__builtin__")
        for name, make in (
            ("set", _set),
            ("frozenset", lambda items=(): frozenset(_set(items))),
            ("complex", complex),
        )
    },
}
"""Functions and built-in classes that make plain containers and values."""
