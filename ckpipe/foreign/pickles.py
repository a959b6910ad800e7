"""Read pickles of other programs without running anything that they name.

Theory. A pickle is a program for a small stack machine, which may call whatever it names. Here a
name leads to a function of ours that makes plain data, or to a placeholder. So a pickle can call
these functions only, and cannot reach any other object. A placeholder stands for an object that is
not made: all that the file calls, gives to it or puts into it makes nothing else. It is refused if
a load asks for it. Python's own unpickler in Python is used: the one in C makes room for sizes and
numbers that a file only claims. An instruction of one byte may make
an object of hundreds, so their memory is bounded by the size of the pickle. Keys are small, since
the hash of a tuple is made anew of those of its items, which can be the same tuple many times.
"""

from __future__ import annotations

import io
import pathlib
import pickle
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ckpipe.errors import CkpipeError, InvalidManifest, UnsupportedState
from ckpipe.foreign.files import DAMAGED

Make = Callable[..., Any]
_Load = Callable[["_PlainUnpickler"], None]

_BASE_BYTES, _BYTES_PER_BYTE = 4 << 20, 36
"""Bytes of memory for the objects of any pickle, and for each byte of it. Real ones take at most
33: small parameters with short names, in protocol 4 or 5."""

_FREE_ITEMS, _ITEM_BYTES = 40, 32
"""Items of the arguments of a call that cost no more than it, and bytes of memory for each more."""

_MOST_NAME, _MOST_PATH = 1000, 33_000
"""Most characters of the name of a class or function, and of a path of a file system."""

_MOST_KEY_PARTS, _MOST_KEY_BITS = 100, 1000
"""Most items of a tuple that is a key, with those inside, and most bits of a number."""


class Record:
    """An object of a class that ckpipe knows: what the file calls it with, and gives it.

    Attributes:
        state: Its attributes; under an empty name a state of another form.

    Args:
        name: The name of the class.
        args: The arguments with which it is made.
    """

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...] = ()) -> None:
        self.name, self.args = name, args
        self.state: dict[str, Any] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Unread:
    """A placeholder of an object that is not made.

    Args:
        what: The kind of the object, for the error of a load that asks for it.
    """

    what: str


def read_pickle(
    data: bytes,
    key: str,
    known: Mapping[str, Any],
    persistent: Callable[[Any], Any] | None = None,
    *,
    strict: bool = False,
) -> Any:
    """Return the object of a pickle.

    Args:
        data: The pickle.
        key: The file that it is in, for errors.
        known: By ``module.name``, the functions that are called in place of those that the pickle
            names, plain objects, and placeholders.
        persistent: Makes the objects that the pickle names by a persistent id.
        strict: Whether to refuse any other name, in place of a placeholder.

    Raises:
        UnsupportedState: If it names anything else, and that is refused.
        InvalidManifest: If it is malformed, or makes far more than its bytes.
    """

    unpickler = _PlainUnpickler(io.BytesIO(data))
    unpickler.known, unpickler.persistent, unpickler.strict = known, persistent, strict
    unpickler.left, unpickler.unread = _BASE_BYTES + _BYTES_PER_BYTE * len(data), {}
    try:
        return unpickler.load()
    except CkpipeError as error:
        error.key = error.key or key
        raise
    except Exception as error:  # any may come of any bytes
        raise InvalidManifest(
            f"The pickle is malformed: {error!r:.200}",
            key=key,
            hint=DAMAGED,
        ) from None


def _costly(load: _Load, nbytes: int) -> _Load:
    def checked(self: _PlainUnpickler) -> None:
        self.pay(nbytes)
        load(self)

    return checked


def _keyed(load: _Load, keys: slice) -> _Load:
    def checked(self: _PlainUnpickler) -> None:
        _check_keys(self.stack[keys])
        load(self)

    return checked


def _for_made(load: _Load, items: int | None) -> _Load:
    """Drop items for a placeholder: a number of them, or all to the mark."""

    def checked(self: _PlainUnpickler) -> None:
        made = self.metastack[-1][-1] if items is None else self.stack[-1 - items]
        if not isinstance(made, Unread):
            load(self)
        elif items is None:
            self.pop_mark()  # type: ignore[attr-defined]
        else:
            del self.stack[-items:]

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


class _PlainUnpickler(pickle._Unpickler):
    """Calls known functions only; attributes are given to records and ordered dicts only."""

    known: Mapping[str, Any]
    persistent: Callable[[Any], Any] | None
    left: int
    strict: bool
    unread: dict[str, Unread]
    stack: list[Any]
    metastack: list[list[Any]]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if len(path) > _MOST_NAME:
            raise pickle.UnpicklingError("it names a class with a huge name")
        found = self.known.get(path)
        if found is None and self.strict:
            raise UnsupportedState(
                f"The file names {path!r:.200}, which ckpipe does not know, and ckpipe runs "
                "nothing that a file names"
            )
        return self._unread(path) if found is None else found

    def _unread(self, path: str) -> Unread:
        if path not in self.unread:
            self.pay(4 * len(path))
            what = f"an object of {path!r:.200}, which ckpipe does not know and does not make"
            self.unread[path] = Unread(what)
        return self.unread[path]

    def pay(self, nbytes: int) -> None:
        self.left -= nbytes
        if self.left < 0:
            raise pickle.UnpicklingError("its objects take far more memory than a real file's")

    def persistent_load(self, pid: Any) -> Any:
        if self.persistent is None:
            raise pickle.UnpicklingError("it has a persistent id")
        unread = _first_unread(pid) if type(pid) is tuple and len(pid) < _FREE_ITEMS else None
        return unread or self.persistent(pid)

    def load_build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if isinstance(made, Unread):
            return
        if isinstance(made, Record) and not made.state:
            made.state = state if type(state) is dict else {"": state}
        elif type(made) is OrderedDict and type(state) is dict:
            known = state.keys() <= {"_metadata"}
            other = Unread("an OrderedDict with attributes that ckpipe does not keep")
            vars(made).update(state if known else {"_metadata": other})
        else:
            raise pickle.UnpicklingError(f"a {type(made).__name__} has attributes")

    def load_newobj(self) -> None:
        args, make = self.stack.pop(), self.stack.pop()
        if isinstance(make, Unread):
            self.stack.append(make)
            return
        if type(args) is not tuple:
            raise pickle.UnpicklingError(f"the arguments of a call are a {type(args).__name__}")
        items = sum(len(each) for each in (args, *args) if isinstance(each, Sized))
        self.pay(_ITEM_BYTES * max(0, items - _FREE_ITEMS))
        self.stack.append(_first_unread(args) or make(*args))

    def load_newobj_ex(self) -> None:
        kwargs = self.stack.pop()
        if not isinstance(self.stack[-2], Unread):
            raise pickle.UnpicklingError(f"an object is made with {type(kwargs).__name__}")
        self.load_newobj()

    def refuse(self) -> None:
        raise pickle.UnpicklingError("it has an instruction that no such file needs")

    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.NEWOBJ[0]] = dispatch[pickle.REDUCE[0]] = load_newobj
    dispatch[pickle.NEWOBJ_EX[0]] = load_newobj_ex
    for codes, items in (
        (pickle.APPEND, 1), (pickle.SETITEM, 2),
        (pickle.APPENDS + pickle.SETITEMS + pickle.ADDITEMS, None),
    ):  # fmt: skip
        for code in codes:
            dispatch[code] = _for_made(dispatch[code], items)
    for code in pickle.GLOBAL + pickle.STACK_GLOBAL:
        dispatch[code] = _costly(dispatch[code], 600)
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
    for code in (pickle.INST + pickle.OBJ + pickle.EXT1 + pickle.EXT2
                 + pickle.EXT4 + pickle.NEXT_BUFFER + pickle.READONLY_BUFFER):  # fmt: skip
        dispatch[code] = refuse


def _first_unread(items: Iterable[Any]) -> Unread | None:
    return next((each for each in items if isinstance(each, Unread)), None)


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


PATHS = {
    f"pathlib{inner}.{kind}Path": made
    for inner in ("", "._local")
    for kinds, made in (
        (("", "Posix", "PurePosix"), pathlib.PurePosixPath),
        (("Windows", "PureWindows"), pathlib.PureWindowsPath),
    )
    for kind in kinds
}
"""Classes of paths by their names in pickles."""

_SPACES = ("argparse.Namespace", "types.SimpleNamespace")
_SCALARS = ("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar")
_OF_ANOTHER = ("copyreg._reconstructor", "copy_reg._reconstructor", "builtins.getattr",
               "__builtin__.getattr", "numpy._core.multiarray._reconstruct",
               "numpy.core.multiarray._reconstruct")  # fmt: skip
_NUMBER = re.compile("b1|[iu][1248]|f[248]|c8|c16")
_DTYPE_STATES = [{"": (3, order, None, None, None, -1, -1, 0)} for order in "<>|="]


@dataclass(frozen=True, slots=True)
class RecordOf:
    """Makes a record in place of an object of a class.

    Args:
        name: The name of the class.
    """

    name: str

    def __call__(self, *args: Any) -> Record:
        return Record(self.name, args)


def _of_another(*_: Any) -> Unread:
    """Stand for functions that make an object of their first argument: its placeholder is taken."""
    return Unread("an object in a form that ckpipe does not know")


RECORDS = {
    **{name: RecordOf(name) for name in (*PATHS, *_SPACES, *_SCALARS, "numpy.dtype")},
    **dict.fromkeys(_OF_ANOTHER, _of_another),
}
"""Makers of records of the classes that :func:`plain_of` knows, and of placeholders."""


def plain_of(record: Record) -> Any:
    """Return the plain value of a record that has the exact form which its class gives it.

    A namespace is a dict of its attributes, a numpy scalar one of the same bytes, and a path or a
    dtype of numpy is text. All other forms are a placeholder.
    """
    args, state = record.args, record.state
    if record.name in _SPACES and not args and all(type(key) is str and key for key in state):
        return state
    texts = not state and all(type(each) is str for each in args)
    if record.name in PATHS and texts and sum(map(len, args)) < _MOST_PATH:
        return str(PATHS[record.name](*args))
    if record.name == "numpy.dtype" and (dtype := _number_dtype(record)):
        return str(dtype)
    if record.name in _SCALARS and len(args) == 2 and not state and type(args[1]) is bytes:
        dtype = _number_dtype(args[0])
        if dtype is not None and len(args[1]) == dtype.itemsize:
            return np.frombuffer(args[1], dtype)[0]
    return Unread(f"an object of {record.name} in a form that ckpipe does not know")


def _number_dtype(record: Any) -> np.dtype[Any] | None:
    """Return the dtype of numbers that a record is; None if it is none."""
    if not isinstance(record, Record) or record.name != "numpy.dtype" or len(record.args) != 3:
        return None
    text, state = record.args[0], record.state
    if type(text) is not str or not _NUMBER.fullmatch(text) or state not in _DTYPE_STATES:
        return None
    return np.dtype(text).newbyteorder(state[""][1])
