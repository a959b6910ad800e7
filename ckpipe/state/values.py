"""Encode values that are kept inline in a manifest as JSON, and decode them.

A value is a JSON scalar if JSON has it, else a list whose first item names its type.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import enum
import pathlib
import re
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ckpipe.errors import InvalidManifest, StructureMismatch
from ckpipe.format.dtypes import DTYPES, NAMES
from ckpipe.format.labels import (
    BEYOND_DIGITS,
    MAX_SAFE_INT,
    Json,
    decode_float,
    decode_int,
    encode_float,
)

_PATHS: dict[str, type[pathlib.PurePath]] = {
    "path": pathlib.Path,
    "pure_posix_path": pathlib.PurePosixPath,
    "pure_windows_path": pathlib.PureWindowsPath,
}


UNREAD = "unread"
"""The type of a value that stands for an object of another program, which was not made; it is in
the description of such a checkpoint alone. Its kind and its place follow."""


class NotInline(Exception):
    """The object is not an inline value."""


def encode_value(value: Any) -> Json:
    """Return the JSON form of an inline value.

    Raises:
        NotInline: If values of this type are not kept inline.
    """
    encode = _ENCODERS.get(type(value))
    if encode is not None:
        return encode(value)
    for kind, encode in _BASES:
        if isinstance(value, kind):
            return encode(value)
    raise NotInline


def _encode_int(value: int) -> Json:
    if abs(value) < MAX_SAFE_INT:
        return value
    if abs(value) >= BEYOND_DIGITS:
        raise NotInline
    return ["int", str(value)]


def _encode_plain_float(value: float) -> Json:
    data = encode_float(value)
    return data if isinstance(data, float) else ["float", data]


def _encode_bytes(value: bytes | bytearray) -> Json:
    return [type(value).__name__, base64.b64encode(value).decode()]


def _encode_enum(value: enum.Enum) -> Json:
    name = value.name
    if isinstance(value, enum.Flag) and name not in type(value).__members__:
        name = "|".join(str(bit.name) for bit in value)
    data = ["enum", class_path(type(value)), name]
    try:
        same = decode_value(data) is value
    except (InvalidManifest, StructureMismatch):
        same = False
    if not same:  # such as a member of a class inside a function
        raise NotInline
    return data


def _encode_path(value: pathlib.PurePath) -> Json:
    for name, kind in _PATHS.items():
        if isinstance(value, kind):
            return [name, str(value)]
    raise NotInline


def _encode_numpy_scalar(value: np.generic) -> Json:
    dtype = value.dtype
    if dtype.hasobject or dtype.fields or (dtype.itemsize == 0 and dtype.kind not in "SU"):
        raise NotInline
    raw = value.tobytes()[: dtype.itemsize]  # numpy gives an empty text four bytes
    return ["numpy", dtype.str, base64.b64encode(raw).decode()]


_ENCODERS: dict[type[Any], Callable[[Any], Json]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    str: lambda value: value,
    int: _encode_int,
    float: _encode_plain_float,
    complex: lambda value: ["complex", encode_float(value.real), encode_float(value.imag)],
    bytes: _encode_bytes,
    bytearray: _encode_bytes,
    torch.dtype: lambda value: ["dtype", NAMES.get(value) or str(value).removeprefix("torch.")],
    torch.device: lambda value: ["device", str(value)],
    torch.Size: lambda value: ["size", list(value)],
    torch.layout: lambda value: ["layout", str(value).removeprefix("torch.")],
    torch.memory_format: lambda value: ["memory_format", str(value).removeprefix("torch.")],
    dt.datetime: lambda value: ["datetime", value.isoformat(), value.fold],
    dt.date: lambda value: ["date", value.isoformat()],
    dt.time: lambda value: ["time", value.isoformat(), value.fold],
    dt.timedelta: lambda value: ["timedelta", value.days, value.seconds, value.microseconds],
    range: lambda value: ["range", value.start, value.stop, value.step],
    type(Ellipsis): lambda value: ["ellipsis"],
}

PLAIN_VALUES = frozenset(_ENCODERS)
"""Types whose values are always inline."""

_BASES: tuple[tuple[type[Any], Callable[[Any], Json]], ...] = (
    (enum.Enum, _encode_enum),
    (np.generic, _encode_numpy_scalar),
    (pathlib.PurePath, _encode_path),
)


_MALFORMED = (
    AttributeError, TypeError, ValueError, KeyError, IndexError, OverflowError, RuntimeError,
    binascii.Error,
)  # fmt: skip


def decode_value(data: Json) -> Any:
    """Return the value that :func:`encode_value` encoded.

    Raises:
        InvalidManifest: If the data is malformed.
        StructureMismatch: If it needs a class that this program has not imported.
    """
    if not isinstance(data, list):
        if data is None or type(data) in (str, bool, int, float):
            return data
        raise InvalidManifest(f"This is not an inline value: {data!r:.100}")
    try:
        return _DECODERS[data[0]](*data[1:])
    except _MALFORMED as error:
        raise InvalidManifest(f"This is not an inline value: {data!r:.100}") from error


def _decode_bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _decode_enum(path: str, name: str) -> enum.Enum:
    kind = resolve_class(path, enum.Enum)
    members = kind.__members__
    names = name.split("|") if name and name not in members else [name]
    if issubclass(kind, enum.Flag) and not name:
        names = []
    for each in names:
        if each not in members:
            raise StructureMismatch(
                f"The enum {path} has no member {each!r:.100}",
                hint="Define it as the program that saved it did, or leave it out with exclude",
            )
    member: enum.Enum = members[names[0]] if names else kind(0)
    for each in names[1:]:
        member |= members[each]
    return member


_UTF32 = {"<": "utf-32-le", ">": "utf-32-be"}


def _decode_numpy(dtype: str, text: str) -> np.generic:
    raw = _decode_bytes(text)
    kind = _numpy_dtype(dtype)
    # An array would drop the trailing NULs of a text.
    if kind.kind == "S" and len(raw) == kind.itemsize:
        return np.bytes_(raw)
    if kind.kind == "U" and len(raw) == kind.itemsize:
        return np.str_(raw.decode(_UTF32[kind.str[0]], "surrogatepass"))
    (scalar,) = np.frombuffer(raw, dtype=plain_numpy_dtype(dtype))
    return cast("np.generic", scalar)


_NUMPY_DTYPE = re.compile(r"[<>|=]?(?:[?biufcSUV]\d{0,10}|[mM]8(?:\[\w{1,12}\])?)")
"""The form in which numpy writes a plain dtype; it would parse other text as a structure, or run it
as Python code."""


def _numpy_dtype(text: str) -> np.dtype[Any]:
    if not _NUMPY_DTYPE.fullmatch(text):
        raise ValueError("this is not how numpy writes a plain dtype")
    return np.dtype(text)


def plain_numpy_dtype(text: str, key: str | None = None) -> np.dtype[Any]:
    """Return the numpy dtype that a manifest names.

    Raises:
        InvalidManifest: If it is not a plain dtype without Python objects.
    """
    try:
        dtype = _numpy_dtype(text)
    except (TypeError, ValueError):
        dtype = np.dtype("V0")
    if not dtype.itemsize:
        raise InvalidManifest(f"{text!r:.100} is not a plain numpy dtype", key=key)
    return dtype


def _torch_constant(name: str, kind: type[Any]) -> Any:
    value = vars(torch)[name]  # getattr would import modules for some names
    if not isinstance(value, kind):
        raise ValueError(f"torch.{name} is no {kind.__name__}")
    return value


_DECODERS: dict[str, Callable[..., Any]] = {
    "int": decode_int,
    "float": decode_float,
    "complex": lambda real, imag: complex(decode_float(real), decode_float(imag)),
    "bytes": _decode_bytes,
    "bytearray": lambda text: bytearray(_decode_bytes(text)),
    "dtype": lambda name: DTYPES.get(name) or _torch_constant(name, torch.dtype),
    "device": torch.device,
    "size": torch.Size,
    "layout": lambda name: _torch_constant(name, torch.layout),
    "memory_format": lambda name: _torch_constant(name, torch.memory_format),
    "datetime": lambda text, fold: dt.datetime.fromisoformat(text).replace(fold=fold),
    "date": dt.date.fromisoformat,
    "time": lambda text, fold: dt.time.fromisoformat(text).replace(fold=fold),
    "timedelta": lambda days, seconds, micros: dt.timedelta(days, seconds, micros),
    "range": range,
    "ellipsis": lambda: ...,
    "enum": _decode_enum,
    "numpy": _decode_numpy,
    **_PATHS,
}


def class_path(cls: type[Any]) -> str:
    """Return the name of a class in a manifest: its module and qualified name."""
    return f"{cls.__module__}:{cls.__qualname__}"


_TRANSPARENT = (
    "accelerate.optimizer:AcceleratedOptimizer",
    "torch.distributed.optim.named_optimizer:_NamedOptimizer",
    "torch.distributed.optim.zero_redundancy_optimizer:ZeroRedundancyOptimizer",
)
"""Wrappers of an optimizer whose state has its form."""


def optimizer_kind(optimizer: Optimizer) -> str:
    """Return the path of an optimizer's class, with that of an optimizer inside of it, if any.

    A wrapper whose state has the form of the wrapped optimizer's counts as that.
    """
    path = class_path(type(optimizer))
    held = (each for each in vars(optimizer).values() if isinstance(each, Optimizer))
    inner = next((each for each in held if each is not optimizer), None)
    if inner is None:
        return path
    return optimizer_kind(inner) if path in _TRANSPARENT else f"{path}({class_path(type(inner))})"


def shapes_of_parameters(optimizer: Optimizer) -> tuple[tuple[int, ...] | None, ...]:
    """Return the shapes of an optimizer's parameters, in order; None for those that change."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    # FSDP1 gives a parameter the shape of its shard or of all of it, as training goes on.
    return tuple(
        None if is_lazy(each) or hasattr(each, "_fsdp_flattened") else tuple(each.shape)
        for each in parameters
    )


def lasting_path(cls: type[Any]) -> str:
    """Return the path of a class; warn if a load cannot find the class by it.

    It cannot find a class that is defined in a function: every call defines another one.
    """
    path = class_path(cls)
    if _at(path) is not cls:
        warnings.warn(
            f"The class {path} is not found by that name: its objects load only into a state that "
            "has such objects already, never into a fresh state. Define it in a module",
            RuntimeWarning,
            stacklevel=2,
        )
    return path


def _at(path: str) -> Any:
    """Find the class of a path in imported modules; return None if there is none.

    Only the dictionaries of modules and classes are read: an attribute lookup could run code of the
    module, such as a lazy import.
    """
    module_name, _, qualname = path.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in qualname.split("."):
        if not isinstance(found, ModuleType | type):
            return None
        found = vars(found).get(part)
    return found


def resolve_class(path: str, base: type[Any], label: str = "") -> Any:
    """Return the class that a manifest names, if this program has imported it and it fits.

    No module is imported and no constructor runs: a manifest can only name existing classes.

    Args:
        path: The path of the class.
        base: A class of which it must be a subclass.
        label: The label of its object, for errors.

    Raises:
        StructureMismatch: If the class is not defined here, or is no subclass of ``base``.
    """
    module_name, _, _ = path.partition(":")
    found = _at(path)
    if not isinstance(found, type) or not issubclass(found, base):
        raise StructureMismatch(
            f"The checkpoint holds an object of the class {path!r:.200}, which is not defined here",
            key=label or None,
            hint=f"Import {module_name!r:.200} before loading, for an export on the command line "
            f"by --import {module_name:.200}, or leave the object out with exclude",
        )
    return found
