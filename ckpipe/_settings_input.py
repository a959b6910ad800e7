"""From what people write (keywords, variables, TOML) to nested dicts, and from errors to text."""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ckpipe.errors import SettingsError
from ckpipe.retention import Rule

PREFIX = "CKPIPE_"
_NOT_SETTINGS = ("CKPIPE_TEST_", "CKPIPE_BENCH_", "CKPIPE_DEMO_", "CKPIPE_NATIVE")
_SHORT = {"staging_bytes": ("staging", "bytes"), "keep_last": ("retention", "keep_last")}
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= dict.fromkeys((f"{_letter}i", f"{_letter}ib"), 1024**_power)
    _UNITS |= dict.fromkeys((_letter, f"{_letter}b"), 1000**_power)
# Names that other libraries have for the same: Orbax, torchtitan, Lightning, transformers, DCP.
_OF_PEERS = {
    "max_to_keep": "keep_last",
    "keep_latest_k": "keep_last",
    "save_total_limit": "keep_last",
    "save_top_k": "retention=KeepBest(metric, n=...)",
    "best_fn": "retention=KeepBest(metric)",
    "best_mode": "retention=KeepBest(metric, mode=...)",
    "monitor": "retention=KeepBest(metric)",
    "keep_period": "retention=KeepEvery(steps=...)",
    "save_interval_steps": "save_every_steps",
    "save_steps": "save_every_steps",
    "every_n_train_steps": "save_every_steps",
    "train_time_interval": "save_every_seconds",
    "async_mode": "save(..., until=...), which is asynchronous in any case",
    "async_save": "save(..., until=...), which is asynchronous in any case",
    "enable_async_checkpointing": "save(..., until=...), which is asynchronous in any case",
    "dirpath": "url",
    "output_dir": "url",
    "folder": "url",
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: Any) -> Any:
    """Read ``"256 MiB"`` as bytes; leave what is not text alone.

    Raises:
        ValueError: If the text is no size, or no whole number of bytes.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(
            "a size is a number with B, kB, MB, GB, TB, KiB, MiB, GiB or TiB; 4G is 4 GB, 4Gi 4 GiB"
        )
    whole, _, fraction = match[1].partition(".")
    size, rest = divmod(int(whole + fraction) * unit, 10 ** len(fraction))
    if rest:
        raise ValueError("a size is a whole number of bytes")
    return size


def grouped(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with groups as dicts and shorthands moved into their groups.

    Raises:
        SettingsError: If a shorthand and what it is short for are both given.
    """
    plain = {name: _as_group(name, value) for name, value in fields.items()}
    for short, (group, name) in _SHORT.items():
        if short not in plain:
            continue
        inside = plain.setdefault(group, {})
        if not isinstance(inside, dict) or name in inside:
            raise SettingsError(
                f"{short} and {group}.{name} are the same setting; give one of them"
            )
        inside[name] = plain.pop(short)
    retention = plain.get("retention")
    if isinstance(retention, dict) and isinstance(retention.get("rules"), Mapping):
        # A list of one means the same, and layers replace lists where they would mix dicts.
        plain["retention"] = retention | {"rules": [retention["rules"]]}
    return plain


def _as_group(name: str, value: Any) -> Any:
    if isinstance(value, BaseModel):
        return {each: getattr(value, each) for each in value.model_fields_set}
    if name == "retention" and isinstance(value, Rule):
        return {"rules": value}
    if name == "plan" and value is not None and not isinstance(value, Mapping):
        return {"planner": value}
    if name == "preemption" and isinstance(value, bool | str):
        return {"enabled": value}
    if name == "worker" and isinstance(value, str):
        return {"mode": value}
    return dict(value) if isinstance(value, Mapping) else value


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """One nested dict of several; where they differ, the later wins."""
    result: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            below = result.get(name)
            both = isinstance(below, Mapping) and isinstance(value, Mapping)
            result[name] = merged(below, value) if both else value  # type: ignore[arg-type]
    return result


def read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Read the environment into a nested dict with lower-case names.

    Raises:
        SettingsError: If a variable sets a group and is no JSON object.
    """
    values: dict[str, Any] = {}
    # A group's own variable sorts before those of its parts, which therefore win over it.
    for variable in sorted(environment):
        if not variable.startswith(PREFIX) or variable.startswith(_NOT_SETTINGS):
            continue
        if text := environment[variable]:
            _place(values, variable, text)
    return values


def _place(values: dict[str, Any], variable: str, text: str) -> None:
    *groups, last = variable.removeprefix(PREFIX).lower().split("__")
    target = values
    for group in groups:
        inside = target.setdefault(group, {})
        if not isinstance(inside, dict):
            raise SettingsError(f"{variable} goes into {group}, which another variable sets whole")
        target = inside
    target[last] = _decoded(text, any_json=groups[:1] == ["backends"])


def _decoded(text: str, *, any_json: bool) -> Any:
    if not any_json and not text.lstrip().startswith(("[", "{")):
        return text
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except ValueError:
        return text


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)


def read_toml(path: str | os.PathLike[str], table: str | None = None) -> dict[str, Any]:
    """The content of a TOML file, or of a table in it.

    Raises:
        SettingsError: If the file cannot be read, is not TOML or has no such table.
    """
    try:
        found: Any = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"The settings file {str(path)!r} cannot be read: {error}") from error
    except ValueError as error:
        raise SettingsError(f"The settings file {str(path)!r} is not TOML: {error}") from error
    if table is not None:
        found = _table(found, table)
        if found is None:
            raise SettingsError(f"The settings file {str(path)!r} has no table [{table}]")
    for name in ("ckpipe", "tool.ckpipe") if table is None else ():
        if _table(found, name) is not None:
            raise SettingsError(
                f"The settings in {str(path)!r} are in the table [{name}]",
                hint=f"Name it: Settings.from_file(path, table={name!r}); or give it its own file",
            )
    assert isinstance(found, dict)
    return found


def _table(content: Any, table: str) -> dict[str, Any] | None:
    found = content
    for name in table.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None


def explained(error: ValidationError, settings: type[BaseModel]) -> SettingsError:
    """One readable error, with a line for each wrong setting: where it came from, what is valid."""
    texts: dict[str, list[str]] = {}
    hints: dict[str, str] = {}
    for found in map(dict[str, Any], error.errors(include_url=False)):
        place = _place_of(found)
        source = _source(place, found["input"])
        name = f"{'.'.join(place)!r}{source}"
        if found["type"] == "extra_forbidden":
            hints[name] = _suggestion(
                ".".join(place), list(_names(settings)), variable=bool(source)
            )
        # A value that may have several types fails once for each of them.
        texts.setdefault(name, []).append(_reason(found))
    said = [
        (f"The setting {name} {' or '.join(why)}", hints.get(name)) for name, why in texts.items()
    ]
    if len(said) == 1:
        return SettingsError(said[0][0], hint=said[0][1])
    return SettingsError(
        "\n".join(f"{text}. {hint}." if hint else f"{text}." for text, hint in said)
    )


def _place_of(found: dict[str, Any]) -> tuple[str, ...]:
    """The place of the fault, without the names that pydantic gives to the types it tried."""
    *groups, last = map(str, found["loc"])
    unknown = found["type"] == "extra_forbidden"
    return (*filter(str.isidentifier, groups), *([last] if unknown or last.isidentifier() else ()))


def _reason(found: dict[str, Any]) -> str:
    if found["type"] == "extra_forbidden":
        return "does not exist"
    cause = found.get("ctx", {}).get("error")
    reason = str(cause or found["msg"]).rstrip(".")
    reason = f"is not valid: {reason[:1].lower()}{reason[1:]}"
    whole = isinstance(cause, SettingsError) or isinstance(found["input"], dict)
    return (
        reason if whole or found["loc"][0] in ("backends", "url") else reason + _got(found["input"])
    )


def _got(value: Any) -> str:
    text = repr(value)
    return f", not {text if len(text) <= 80 else text[:77] + '...'}"


def _source(place: tuple[str, ...], value: Any) -> str:
    """Name the variable if the value came from one."""
    variable = PREFIX + "__".join(place).upper()
    text = os.environ.get(variable)
    same = text and value == _decoded(text, any_json=place[0] == "backends")
    return f" (from {variable})" if same else ""


def _names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        yield prefix + name
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from _names(info.annotation, f"{prefix}{name}.")
    if not prefix:
        yield from _SHORT


def _suggestion(unknown: str, names: list[str], *, variable: bool) -> str:
    """The hint: the valid name that is meant, or the place of all valid names."""
    if ours := _OF_PEERS.get(unknown):
        return f"Here it is called {ours}"
    joined = {name.replace(".", "_"): name for name in names if "." in name}
    nearest = joined.get(unknown) or _nearest(unknown, names)
    if nearest is None:
        return "help(ckpipe.Settings) names all of them"
    if variable:
        return f"The nearest valid name is {PREFIX + nearest.replace('.', '__').upper()}"
    return f"The nearest valid name is {nearest!r}"


_NEAR = 0.75


def _nearest(unknown: str, names: list[str]) -> str | None:
    """The valid name that is most alike, as it is written or as what follows its group, if any."""
    group, _, last = unknown.rpartition(".")

    def likeness(name: str) -> tuple[float, bool]:
        alike = difflib.SequenceMatcher(None, last, name.rpartition(".")[2]).ratio()
        return (alike, name.rpartition(".")[0] == group)

    best = max(names, key=likeness)
    plain = best.rpartition(".")[2]
    near = likeness(best)[0] >= _NEAR or plain.startswith(last) or last.startswith(plain)
    return best if near else None
