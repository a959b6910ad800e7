"""Read pickles of other programs without running anything that they name.

Theory. A pickle is a program for a small stack machine, which may call whatever it names. Here a
name leads to a function of ours that makes plain data, or is refused. So a pickle can call these
functions only, and cannot reach any other object. Python's own unpickler in Python is used: the one
in C makes room for sizes and numbers that a file only claims.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from ckpipe.errors import CkpipeError, InvalidManifest, UnsupportedState

Make = Callable[..., Any]

_MALFORMED = (
    AttributeError, EOFError, IndexError, KeyError, MemoryError, OverflowError, RecursionError,
    TypeError, ValueError, NotImplementedError, pickle.UnpicklingError, struct.error,
)  # fmt: skip


class Record:
    """An object of a foreign class: its name, and the attributes that the file gives it.

    Attributes:
        state: Its attributes; under an empty name a state of another form.

    Args:
        name: The name of the class, without its module.
        args: The arguments with which it is made.
    """

    def __init__(self, name: str, args: tuple[Any, ...] = ()) -> None:
        self.name, self.args = name, args
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
        InvalidManifest: If it is malformed.
    """
    unpickler = _Unpickler(io.BytesIO(data))
    unpickler.key, unpickler.known, unpickler.persistent = key, known, persistent
    try:
        return unpickler.load()
    except CkpipeError as error:
        error.key = error.key or key
        raise
    except _MALFORMED as error:
        raise InvalidManifest(
            f"The pickle is malformed: {error!r:.200}",
            key=key,
            hint="The file is truncated or damaged; copy or download it again",
        ) from None


class _Unpickler(pickle._Unpickler):
    """Calls known functions only; attributes are given to records and ordered dicts only."""

    key: str
    known: Mapping[str, Any]
    persistent: Callable[[Any], Any] | None
    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        try:
            found = self.known[f"{module}.{name}"]
        except KeyError:
            raise UnsupportedState(
                f"The file holds an object of {module}.{name}, which ckpipe does not know, and "
                "ckpipe runs nothing that a file names",
                key=self.key,
                hint="If you trust the file's writer, load it with the program that wrote it, and "
                "save its tensors and plain values alone",
            ) from None
        if isinstance(found, CkpipeError):
            raise found
        return found

    def persistent_load(self, pid: Any) -> Any:
        if self.persistent is None:
            raise pickle.UnpicklingError("it has a persistent id")
        return self.persistent(pid)

    def load_build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if isinstance(made, Record):
            made.state |= state if type(state) is dict else {"": state}
        elif type(made) is OrderedDict and set(state) <= {"_metadata"}:
            vars(made).update(state)
        else:
            raise pickle.UnpicklingError(f"a {type(made).__name__} has attributes")

    def load_newobj(self) -> None:
        args, make = self.stack.pop(), self.stack.pop()
        self.stack.append(make(*args))

    def refuse(self) -> None:
        raise pickle.UnpicklingError("it has an instruction that no such file needs")

    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.NEWOBJ[0]] = load_newobj
    for code in (pickle.NEWOBJ_EX, pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4,
                 pickle.NEXT_BUFFER, pickle.READONLY_BUFFER):  # fmt: skip
        dispatch[code[0]] = refuse


def encoded(text: str, encoding: str = "latin1") -> bytes:
    """Return bytes that an old pickle has as text."""
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes are written as latin1, not as {encoding!r:.50}")
    return text.encode("latin1")


PLAIN: dict[str, Any] = {
    "collections.OrderedDict": lambda *items: OrderedDict(*items),
    "collections.Counter": lambda *counts: Counter(*counts),
    "_codecs.encode": encoded,
    **{
        f"{module}.{make.__name__}": make
        for module in ("builtins", "__builtin__")
        for make in (set, frozenset, complex)
    },
}
"""Functions and built-in classes that make plain containers and values."""
