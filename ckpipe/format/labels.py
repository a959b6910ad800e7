"""Labels of tensors, for people; the keys and JSON values of a state, exact, for a manifest.

A label names a tensor for people and for other readers of the data file. It is the path of keys
joined by dots. It need not distinguish ``{1: …}`` from ``{"1": …}``; the manifest does. JSON values
are compared by their canonical text: Python's ``==`` would take True for 1, and 0.0 for -0.0.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ckpipe.errors import InvalidManifest, UnsupportedState, UsageError

Json = Any
"""A value that the json module reads and writes."""

_SPECIAL = re.compile(r"[~@\ud800-\udfff]")
MAX_SAFE_INT = 2**53
"""The bound beyond which integers are written as text, since many JSON readers use doubles."""

MAX_DIGITS = 4300
"""Most digits of an integer that is written; Python's default limit for reading integers."""

BEYOND_DIGITS: int = 10**MAX_DIGITS
"""The smallest integer with more digits."""


def encode_key(key: object, label: str = "") -> Json:
    """Return the JSON form of a dict key: strings, bools, None and small ints as they are.

    Raises:
        UnsupportedState: If the key is not a str, int, bool, float, None or a tuple of them.
    """
    kind = type(key)
    if kind is str or kind is bool or key is None:
        return key
    if kind is int and abs(key) < BEYOND_DIGITS:  # type: ignore[arg-type]
        return key if abs(key) < MAX_SAFE_INT else {"int": str(key)}  # type: ignore[arg-type]
    if kind is float:
        return {"float": encode_float(key)}  # type: ignore[arg-type]
    if kind is tuple:
        return {"tuple": [encode_key(part, label) for part in key]}  # type: ignore[attr-defined]
    if kind is int:
        raise UnsupportedState(
            f"A dict has a key of more than {MAX_DIGITS} digits",
            key=label or None,
            hint="Save it as text under another key",
        )
    raise UnsupportedState(
        f"A dict has a key of type {kind.__qualname__}: {key!r:.100}",
        key=label or None,
        hint="Keys may be str, int, bool, float, None or tuples of them",
    )


def decode_key(data: Json) -> Any:
    """Decode a key of :func:`encode_key`.

    Raises:
        InvalidManifest: If it is not such a form.
    """
    if data is None or type(data) in (str, bool, int):
        return data
    if isinstance(data, dict) and len(data) == 1:
        ((kind, value),) = data.items()
        if kind == "int" and isinstance(value, str):
            return decode_int(value)
        if kind == "float":
            return decode_float(value)
        if kind == "tuple" and isinstance(value, list):
            return tuple(decode_key(part) for part in value)
    raise InvalidManifest(f"This is not a key: {data!r:.100}")


def encode_float(value: float) -> float | str:
    """Return a finite float as it is, any other as ``"nan"``, ``"inf"`` or ``"-inf"``."""
    return value if math.isfinite(value) else repr(value)


def decode_float(data: Json) -> float:
    """Decode a float of :func:`encode_float`."""
    if type(data) in (float, int) or data in ("nan", "inf", "-inf"):
        with contextlib.suppress(OverflowError):  # a whole number may be too large for a float
            return float(data)
    raise InvalidManifest(f"This is not a float: {data!r:.100}")


def decode_int(text: str) -> int:
    """Decode an integer written as decimal text, of at most ``MAX_DIGITS`` digits."""
    if not re.fullmatch(rf"-?[0-9]{{1,{MAX_DIGITS}}}", text):
        raise InvalidManifest(f"This is not an integer: {text!r:.100}")
    return int(text)


def label_part(key: object) -> str:
    """Escape one key for a label: ``~`` becomes ``~0``, ``@`` becomes ``~1``.

    ``@`` is reserved for the bounds of shards. A lone surrogate, which is not valid in UTF-8,
    becomes ``~u`` and its four hex digits.
    """
    return _escaped(key if isinstance(key, str) else repr(key))


@functools.lru_cache(maxsize=1 << 16)  # a state has the same keys at every save
def _escaped(text: str) -> str:
    return _SPECIAL.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    char = match[0]
    return {"~": "~0", "@": "~1"}.get(char) or f"~u{ord(char):04x}"


def key_of(part: str) -> str:
    """Return the text of which :func:`label_part` made a part; surrogates stay ``~u…``."""
    return part.replace("~1", "@").replace("~0", "~")


def join(prefix: str, key: object) -> str:
    """Return the label of the item under ``key`` in the container labelled ``prefix``."""
    return f"{prefix}.{label_part(key)}" if prefix else label_part(key)


def joined(prefix: str, keys: Iterable[object]) -> list[str]:
    """Return the labels of the items under some keys in one container."""
    parts = [_escaped(key) if type(key) is str else label_part(key) for key in keys]
    return [f"{prefix}.{part}" for part in parts] if prefix else parts


def label_order(keys: Sequence[Any]) -> list[int]:
    """Return the indices of distinct keys in an order that depends on no order of insertion.

    Ranks that have some keys in common visit those in the same order.
    """
    numbers = range(len(keys))
    if len(kinds := set(map(type, keys))) == 1 and not kinds.isdisjoint((str, int)):
        return sorted(numbers, key=keys.__getitem__)
    return sorted(numbers, key=lambda number: _comparable(keys[number]))


def _comparable(key: object) -> tuple[int, Any]:
    kind = type(key)
    if kind is str or kind is int:
        return int(kind is int), key
    return 2, repr(key)


def unique_label(label: str, taken: set[str]) -> str:
    """Return a label that is not taken and is allowed in a safetensors header, and take it.

    ``{1: a, "1": b}`` and ``{"a.b": x, "a": {"b": y}}`` make the same label twice: the second
    gets ``~2``, which no key can spell since keys have their tildes escaped.
    """
    candidate = label or "~"
    if candidate == "__metadata__":
        candidate = "~__metadata__"
    base, number = candidate, 2
    while candidate in taken:
        candidate = f"{base}~{number}"
        number += 1
    taken.add(candidate)
    return candidate


_WRAPPER_NAMES = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def unwrapped(label: str) -> str:
    """Return a label without the names under which wrappers hold a module."""
    return ".".join([part for part in label.split(".") if part not in _WRAPPER_NAMES])


def bare_names(names: Iterable[str]) -> dict[str, str]:
    """Return names of a module without those of wrappers; ``module`` only where all begin so."""
    inside = "|".join(_WRAPPER_NAMES[1:])
    bare = {name: re.sub(rf"(?:^|(?<=\.))(?:{inside})\.", "", name) for name in names}
    while bare and all(each.startswith("module.") for each in bare.values()):
        bare = {name: each.removeprefix("module.") for name, each in bare.items()}
    return bare


class LabelFilter:
    """A filter of labels by globs: a pattern matches a label, and all labels below it.

    Args:
        include: Patterns of which one must match; None for all.
        exclude: Patterns of which none may match.
    """

    def __init__(self, include: list[str] | None = None, exclude: list[str] | None = None) -> None:
        self._include, self._exclude = include, exclude or []
        self.selects_all = include is None and not exclude
        self.patterns = (None if include is None else tuple(include), tuple(self._exclude))

    def __call__(self, label: str) -> bool:
        if self.selects_all:
            return True
        wanted = self._include is None or any(_matches(label, each) for each in self._include)
        return wanted and not any(_matches(label, each) for each in self._exclude)

    def may_select(self, label: str) -> bool:
        """Tell whether the filter may select a label or one below it."""
        if any(_matches(label, each) for each in self._exclude):
            return False
        return self._include is None or any(_reaches(label, each) for each in self._include)


def label_filter(
    include: Sequence[str] | None = None, exclude: Sequence[str] | None = None
) -> LabelFilter:
    """Make the filter for ``include`` and ``exclude`` of a call.

    Raises:
        UsageError: If one of them is no list of texts. A string would be a glob for each letter.
    """
    return LabelFilter(_globs("include", include), _globs("exclude", exclude))


def globs_filter(name: str, globs: Sequence[str]) -> LabelFilter:
    """Make the filter for an argument whose globs select what they match, and nothing else.

    Raises:
        UsageError: If it is no list of texts.
    """
    return LabelFilter(_globs(name, globs) or [])


def _globs(name: str, globs: Sequence[str] | None) -> list[str] | None:
    if isinstance(globs, str):
        raise UsageError(
            f"{name} is a list of globs, not the string {globs!r:.100}",
            hint=f"Write {name}=[{globs!r:.100}]",
        )
    if globs is None:
        return None
    found = list(globs) if isinstance(globs, Iterable) else [globs]
    if not all(isinstance(each, str) for each in found):
        raise UsageError(
            f"{name} is a list of globs, not {globs!r:.100}",
            hint=f"Write labels as text: {name}=['model.*']",
        )
    return found


def _matches(label: str, pattern: str) -> bool:
    return fnmatchcase(label, pattern) or fnmatchcase(label, f"{pattern}.*")


def _reaches(label: str, pattern: str) -> bool:
    """Tell whether a pattern may match a label or one below it: up to the first wildcard."""
    plain = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    below = f"{label}." if label else ""
    is_glob = len(plain) < len(pattern)
    return (
        plain.startswith(below) or (is_glob and below.startswith(plain)) or _matches(label, pattern)
    )


def canonical(data: Json, default: Callable[[Any], Json] | None = None) -> str:
    """Return a text that is equal for two JSON values only if they are equal in type and order.

    Args:
        data: The value.
        default: Returns the JSON form of an object in it that has another type.
    """
    return json.dumps(
        data, separators=(",", ":"), allow_nan=False, check_circular=False, default=default
    )


class Numbering:
    """Consecutive numbers for objects: objects with an equal key have the same number."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._by_key: dict[object, int] = {}
        # The object is kept with its number, since its id could be reused otherwise.
        self._by_id: dict[int, tuple[Any, int]] = {}

    def number(self, item: Any, key: Callable[[Any], object] = canonical) -> int:
        """Return the number of an object; the key is by default its JSON."""
        known = self._by_id.get(id(item))
        if known is None:
            number = self._by_key.setdefault(key(item), len(self.items))
            if number == len(self.items):
                self.items.append(item)
            known = self._by_id[id(item)] = (item, number)
        return known[1]
