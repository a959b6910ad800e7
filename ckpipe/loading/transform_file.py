"""Read transforms from a TOML file, for commands; a file names classes and never runs code."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import GenericAlias
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ckpipe.errors import UsageError
from ckpipe.loading import reshapes, transforms
from ckpipe.loading.transforms import Transform

_KINDS = {
    name: each
    for home in (reshapes, transforms)
    for name, each in vars(home).items()
    if isinstance(each, type) and issubclass(each, Transform) and each is not Transform
}
"""The transforms, by the names of their classes."""

_FORM = '[[transform]] with kind = "Rename" and its arguments, such as names = {"0.*" = "up.*"}'


def read_transforms(path: Path) -> tuple[Transform, ...]:
    """Return the transforms of an array of tables ``transform``, in their order.

    The ``kind`` of a table is the name of a class of transforms; its other members are the
    arguments of the class.

    Raises:
        UsageError: If the file cannot be read, or an entry is wrong; names file and entry.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # also of wrong bytes
        raise UsageError(f"{path} is not TOML: {error}", hint=f"It holds {_FORM}") from None
    entries = data.get("transform")
    if set(data) != {"transform"} or not isinstance(entries, list):
        others = ", ".join(sorted(set(data) - {"transform"})) or "no such array"
        raise UsageError(f"{path} holds {others}", hint=f"It is an array of tables: {_FORM}")
    found = []
    for number, entry in enumerate(entries, 1):
        try:
            found.append(_made(entry))
        except UsageError as error:
            error.message = f"{path}, transform {number}: {error.message}"
            raise
    return tuple(found)


def _made(entry: object) -> Transform:
    given = dict(entry) if isinstance(entry, Mapping) else {}
    kind = given.pop("kind", None)
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise UsageError(
            f"there is no kind {kind!r:.100}", hint=f"The kinds are {', '.join(sorted(_KINDS))}"
        )
    parameters, hints = inspect.signature(cls).parameters, get_type_hints(cls.__init__)
    required = {name for name, each in parameters.items() if each.default is each.empty}
    if unfit := sorted((given.keys() - parameters.keys()) | (required - given.keys())):
        raise UsageError(
            f"{kind} has no {unfit[0]}" if unfit[0] in given else f"{kind} needs {unfit[0]}",
            hint=f"Its members are {', '.join(parameters)}",
        )
    several: list[Any] = []
    for name, value in list(given.items()):
        is_several = parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        wanted: Any = GenericAlias(list, (hints[name],)) if is_several else hints[name]
        try:
            adapter = TypeAdapter(wanted, config=ConfigDict(arbitrary_types_allowed=True))
            adapter.validate_python(value, strict=True)
        except ValidationError as error:
            said = error.errors()[0]["msg"]
            raise UsageError(f"{kind}: {name} is {value!r:.100}: {said}") from None
        if is_several:
            several = given.pop(name)
    return cls(*several, **given)
