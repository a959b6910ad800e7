"""All settings of a pipeline, in one frozen value.

A setting comes from the first of these that has it: a keyword, the environment, a TOML file
(:meth:`Settings.from_file`), its default. Variables are called ``CKPIPE_`` and the setting's
name, with ``__`` between a group and its setting: ``CKPIPE_UPLOAD__LANES=8``. Values that
begin with ``[`` or ``{`` are read as JSON, and so is every value below ``CKPIPE_BACKENDS__``
that is JSON. Empty variables count as unset. ``CKPIPE_TEST_…``, ``CKPIPE_BENCH_…`` and
``CKPIPE_DEMO_…`` are no settings: they belong to the project's own tests, benchmarks and demo.
Neither is ``CKPIPE_NATIVE``, which is read when ckpipe is imported (:mod:`ckpipe.memory.native`).

This module imports pydantic, which is why ``import ckpipe`` does not import it.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import signal
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypedDict, Unpack

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    field_validator,
    model_validator,
)

from ckpipe.backend import without_secrets
from ckpipe.errors import SettingsError
from ckpipe.retention import KeepLast, Rule, from_data
from ckpipe.types import DTYPE_ALIASES, Form, OnError, PerRank, PicklePolicy, Planner

_PREFIX = "CKPIPE_"
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


def _parse_size(value: Any) -> Any:
    """Read text such as ``"256 MiB"`` as bytes; return other values as they are.

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


def _grouped(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with groups as dicts and shorthands moved into their groups.

    Raises:
        SettingsError: If a shorthand and its full setting are both given.
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
        # A list of one rule means the same. Layers replace lists, but would merge dicts.
        plain["retention"] = retention | {"rules": [retention["rules"]]}
    return plain


def _as_group(name: str, value: Any) -> Any:
    if isinstance(value, BaseModel):
        return {each: getattr(value, each) for each in value.model_fields_set}
    if name == "retention" and isinstance(value, Rule):
        return {"rules": value}
    if name == "plan" and value is not None and not isinstance(value, Mapping):
        return {"planner": value}
    if name in ("preemption", "incremental") and isinstance(value, bool | str):
        return {"enabled": value}
    if name == "worker" and isinstance(value, str):
        return {"mode": value}
    return dict(value) if isinstance(value, Mapping) else value


def _merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested dicts; where they differ, the later wins."""
    result: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            below = result.get(name)
            both = isinstance(below, Mapping) and isinstance(value, Mapping)
            result[name] = _merged(below, value) if both else value  # type: ignore[arg-type]
    return result


def _read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Read the environment into a nested dict with lower-case names.

    Raises:
        SettingsError: If a variable sets a group and is no JSON object.
    """
    values: dict[str, Any] = {}
    # A group's own variable sorts before those of its settings, which therefore win over it.
    for variable in sorted(environment):
        if not variable.startswith(_PREFIX) or variable.startswith(_NOT_SETTINGS):
            continue
        if text := environment[variable]:
            _place(values, variable, text)
    return values


def _place(values: dict[str, Any], variable: str, text: str) -> None:
    *groups, last = variable.removeprefix(_PREFIX).lower().split("__")
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


def _read_toml(path: str | os.PathLike[str], table: str | None = None) -> dict[str, Any]:
    """Read a TOML file, or a table in it.

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


def _explained(error: ValidationError, settings: type[BaseModel]) -> SettingsError:
    """Make one readable error with a line for each wrong setting: its source, and valid values."""
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
        # A setting of several types fails once for each of them.
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
    """Return the path of the wrong setting, without pydantic's names of the types it tried."""
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
    variable = _PREFIX + "__".join(place).upper()
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
    """Make the hint: the nearest valid name, or where to find all valid names."""
    if ours := _OF_PEERS.get(unknown):
        return f"Here it is called {ours}"
    joined = {name.replace(".", "_"): name for name in names if "." in name}
    nearest = joined.get(unknown) or _nearest(unknown, names)
    if nearest is None:
        return "help(ckpipe.Settings) names all of them"
    if variable:
        return f"The nearest valid name is {_PREFIX + nearest.replace('.', '__').upper()}"
    return f"The nearest valid name is {nearest!r}"


_NEAR = 0.75


def _nearest(unknown: str, names: list[str]) -> str | None:
    """Return the most similar valid name, compared without its group, or None."""
    group, _, last = unknown.rpartition(".")

    def likeness(name: str) -> tuple[float, bool]:
        alike = difflib.SequenceMatcher(None, last, name.rpartition(".")[2]).ratio()
        return (alike, name.rpartition(".")[0] == group)

    best = max(names, key=likeness)
    plain = best.rpartition(".")[2]
    near = likeness(best)[0] >= _NEAR or plain.startswith(last) or last.startswith(plain)
    return best if near else None


Size = Annotated[int, BeforeValidator(_parse_size)]
"""A number of bytes; also text such as ``"256MiB"`` or ``"4 GB"``."""

BlockSize = Annotated[Size, Field(ge=64 * 1024, multiple_of=4096)]
"""The size of a block in bytes: a multiple of 4096, at least 64 KiB."""

ExportDtype = Annotated[
    Literal["float32", "bfloat16", "float16"],
    BeforeValidator(lambda text: DTYPE_ALIASES.get(str(text), text)),
]
"""The dtype of an export; also by its short name."""

RuleData = Annotated[
    Rule, PlainValidator(from_data), PlainSerializer(lambda rule: rule.to_data(), return_type=Any)
]
"""A retention rule, or its plain form, which :func:`ckpipe.retention.from_data` reads."""


WorkerMode = Literal["auto", "thread", "process"]
"""A thread or a process for uploads; auto chooses by the store."""

Resume = Literal["auto", "must", "never"]
"""The behaviour of a load while there is no complete checkpoint."""

OnBusy = Literal["wait", "skip", "fail"]
"""The behaviour of a save while earlier saves hold the staging memory."""

FinalFormat = Literal["ckpipe", Form]
"""The form of the export that ``save(final=True)`` writes; ``"ckpipe"`` for none."""


class _Group(BaseModel):
    """A group of settings. On its own it raises pydantic's ValidationError."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Staging(_Group):
    """Host memory that holds saves between the trainer's tensors and the store."""

    bytes: Size | None = Field(None, ge=0)
    """Host memory of all saves together, in bytes. By default the size of the first save, rounded
    up, but at most 40 % of the available memory (of the container, in one), divided by
    ``LOCAL_WORLD_SIZE``, the ranks of the machine. Several saves in flight need more. The pipeline
    keeps the memory for the next save until it is closed: a state of 1 GiB keeps 1 GiB of host
    memory. ``pipeline.trim()`` gives it back. With a lower bound the state streams through less
    memory. At least one block; also written ``staging_bytes=`` at the top level."""

    block_bytes: BlockSize = 16 * 1024 * 1024
    """The unit of staging and upload, in bytes, or the smallest unit of the store if that is more.
    If the store limits the number of blocks in one upload, a rank with more data writes several
    files: on S3 with 16 MiB, one for each 156 GiB. A single tensor larger than that needs larger
    blocks."""

    pinned: Literal["auto", "never"] = "auto"
    """Page-locking of staging memory, for fast copies from a GPU: ``auto`` page-locks it if CUDA is
    in use, and warns once if CUDA refuses; ``never`` does not page-lock it."""

    overlap: bool = True
    """Start the upload while staging still runs. If false, ``save`` returns a little sooner and the
    checkpoint is durable later."""

    @model_validator(mode="after")
    def _holds_a_block(self) -> Self:
        if self.bytes is not None and self.bytes < self.block_bytes:
            raise ValueError(
                f"bytes ({self.bytes}) must hold at least one block (block_bytes is "
                f"{self.block_bytes})"
            )
        return self


def _planner(value: Any) -> Any:
    if value in ("local", "global") if isinstance(value, str) else callable(_plan_method(value)):
        return value
    raise ValueError("a planner is 'local', 'global' or an object with a method plan")


def _plan_method(value: Any) -> Any:
    return None if isinstance(value, type) else getattr(value, "plan", None)


class Plan(_Group):
    """The division of work among ranks.

    Also written ``plan="global"``, or with a planner, at the top level.
    """

    planner: Annotated[Literal["local", "global"] | Planner, PlainValidator(_planner)] = "local"
    """The planner that divides the work: with ``"local"`` each rank plans for itself; with
    ``"global"`` one rank plans for all, through the store of the default process group
    (:class:`~ckpipe.GlobalPlanner`); or a :class:`~ckpipe.Planner` object, whose own arguments
    replace the settings below."""

    timeout_seconds: float = Field(60.0, gt=0)
    """Seconds that a save waits for the other ranks at most, with ``"global"``. After that it fails
    and names the ranks that did not join."""

    replicated: Literal["auto", "none"] | tuple[str, ...] = "auto"
    """Plain tensors that several ranks hold alike, so that only one rank writes each byte: with
    ``"auto"`` the parameters that ``DistributedDataParallel`` keeps equal in its process group, and
    the tensors that other objects in the state declare as replicated
    (:mod:`ckpipe.state.kinds`); with ``"none"`` none; with a list of globs also the tensors whose
    labels match one, on all ranks. DTensors need no mention."""


class Upload(_Group):
    """Writes to the store, and the retries of all requests."""

    lanes: int = Field(4, ge=1)
    """Writes of one save to the store at the same time."""

    retries: int = Field(5, ge=0)
    """Number of retries of a request after errors that the backend calls transient."""

    backoff_seconds: float = Field(0.2, ge=0)
    """The longest wait before the first retry, in seconds. It doubles with each further retry, and
    the actual wait is drawn at random below it."""

    backoff_max_seconds: float = Field(20.0, ge=0)
    """The longest wait before any retry, in seconds. Not less than ``backoff_seconds``."""

    attempt_timeout_seconds: float = Field(120.0, gt=0)
    """Time limit of one try of a request, in seconds. After it the try has failed, and the request
    is tried again."""

    deadline_seconds: float | None = Field(None, gt=0)
    """Time limit of all tries of one request together, in seconds, waits included. None sets no
    limit but the number of retries."""

    @model_validator(mode="after")
    def _backoff_grows(self) -> Self:
        if self.backoff_max_seconds < self.backoff_seconds:
            raise ValueError("backoff_max_seconds must not be less than backoff_seconds")
        return self


class Incremental(_Group):
    """Saves that write only what has changed: unchanged data files are linked.

    Also written ``incremental=True`` at the top level. The first save writes all, the second finds
    out what rests, and the third links it. Every checkpoint stays whole by itself.
    """

    enabled: bool = False
    """Link a data file whose bytes did not change: a hard link on a disk, a copy by the server in a
    bucket. Needs a store that can link, and a planner of ckpipe's own."""

    full_every: int | None = Field(None, ge=1)
    """Write every so-manieth save of the process anew; None for none. A bad sector of a linked file
    is in all checkpoints that share it. Giving it enables incremental saves."""

    @model_validator(mode="before")
    @classmethod
    def _is_wanted(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("full_every") is not None:
            return {"enabled": True, **given}
        return given


class Load(_Group):
    """Reads of a checkpoint."""

    lanes: int = Field(6, ge=1)
    """Reads under way at the same time. Each holds a block of staging memory."""

    agreement_timeout_seconds: float = Field(600.0, gt=0)
    """Seconds that a load waits for other ranks at most. With ``fallback``, it waits after its own
    reading until they report whether the checkpoint is whole for them. If it loads the newest
    checkpoint, or a step, that this run is still saving, it waits until they have committed it,
    instead of loading an older one."""


class Lock(_Group):
    """Limits of the time that trainer and pipeline wait for each other."""

    timeout_seconds: float = Field(60.0, gt=0)
    """Seconds that a save waits at most for the state lock. After that it fails; the training step
    goes on in any case."""

    max_step_wait_seconds: float = Field(1.0, gt=0)
    """Seconds that a guarded step waits at most for a copy beside training (``until="captured"``).
    If the copy would take longer, the save fails. The step then goes on once the copies under way
    have ended: 256 MiB at most, or a block by each thread if that is more."""


class Retention(_Group):
    """Rules for the complete checkpoints that stay. Without ``keep_last`` and ``rules`` all do."""

    keep_last: int | None = Field(None, ge=0)
    """Number of the newest checkpoints to keep. 0 allows no intermediate checkpoints, only final
    ones and the one that a preempted run is saved in. Also written ``keep_last=`` at the top
    level."""

    rules: RuleData | None = None
    """A rule for more checkpoints to keep: ``KeepEvery(steps=1000) | KeepBest("loss")``, or its
    plain form, ``[{keep = "every", steps = 1000}, {keep = "best", metric = "loss"}]``."""

    lines: Literal["own", "all"] = "own"
    """Which checkpoints the rules count. A line is a launch with all launches that resumed from its
    checkpoints, and with those that resumed from theirs. ``"own"`` counts and deletes those of this
    launch's line only. ``"all"`` counts those of the whole root together, for programs that never
    load and would fill the store."""

    sweep_after_seconds: float = Field(86_400.0, ge=0)
    """Age, in seconds by the store's clock, at which ``sweep`` removes the remains of runs. The
    tombstone of a deleted checkpoint stays as long, so that a late writer cannot make the
    checkpoint visible again."""

    @model_validator(mode="after")
    def _zero_stands_alone(self) -> Self:
        if self.keep_last == 0 and self.rules is not None:
            raise ValueError("keep_last=0 allows no intermediate checkpoints for rules to keep")
        return self

    @property
    def sweep_after(self) -> timedelta:
        """``sweep_after_seconds`` as a timedelta."""
        return timedelta(seconds=self.sweep_after_seconds)

    @property
    def rule(self) -> Rule | None:
        """``keep_last`` and ``rules`` as one rule; None keeps all."""
        if self.keep_last is None:
            return self.rules
        newest = KeepLast(self.keep_last)
        return newest if self.rules is None else newest | self.rules


class Nan(_Group):
    """The count of NaN in each save."""

    check: bool = True
    """Count the NaN of tensors of float64, float32, bfloat16, float16, float8_e4m3fn and
    float8_e5m2, behind the copy. Infinities do not count. False counts none: then no checkpoint is
    known to have any."""

    ignore: tuple[str, ...] = ()
    """Globs of the labels of tensors that may have NaN, such as ``["*.mask"]``. Scalars that are
    stored together, as the steps of an optimizer, have one label, that of the first."""


class Replicas(_Group):
    """The comparison of copies that several ranks hold, and that one of them writes."""

    mode: Literal["warn", "raise", "off"] = "warn"
    """The effect of a difference. ``"warn"`` warns and emits an event where the checkpoint is
    completed; ``"raise"`` also makes the next call there raise :class:`~ckpipe.ReplicasDiffer`;
    ``"off"`` compares nothing. The checkpoint is complete in any case."""

    share: Annotated[float, Field(gt=0, le=1)] = 1 / 32
    """The bytes that a save compares, as a share of those that the rank writes. All copies of R
    ranks are compared within ``(R - 1) / share`` saves of one launch."""


class Export(_Group):
    """The content of the export that ``final_format`` asks for."""

    part: str | None = None
    """The label of the part of the state to export. None exports all of it as ``"torch"``. As
    ``"hf"``, None exports ``model``, at the top of the state or one level below, or all of the
    state if there is no ``model``; of several models one must be named."""

    dtype: ExportDtype | None = None
    """The dtype of all floating-point tensors of the export: ``float32``, ``bfloat16`` or
    ``float16``, also written ``fp32``, ``bf16`` or ``fp16``. Tensors that wrap others, such as
    quantised weights, are dequantised to it. None exports tensors as they were saved, and refuses
    those that wrap others."""

    transform: tuple[Any, ...] = ()
    """Transforms of the checkpoint, in their order, such as ``[ckpipe.Rename(…)]``; labels are
    those of the whole state. ``part`` and ``dtype`` apply to their result."""

    extra: tuple[str | os.PathLike[str], ...] = ()
    """Paths of files to copy beside the weights, such as ``config.json`` and those of a tokenizer.
    Rank 0 reads them when the export is made."""

    file_name: Annotated[str, Field(pattern=r"^[^/]+\.safetensors$")] = "model.safetensors"
    """The file of the form ``"hf"``, such as ``diffusion_pytorch_model.safetensors``. Several files
    are ``<stem>-00001-of-00002.safetensors`` and so on, beside ``<name>.index.json``."""

    max_shard_bytes: Annotated[Size, Field(ge=1)] = 5_000_000_000
    """Largest file of the forms ``"hf"`` and ``"dcp"``, in bytes, unless one tensor is larger."""


class Preemption(_Group):
    """The last save before this process, or any one of several ranks, is stopped."""

    enabled: bool = False
    """Watch for signals. Also written ``preemption=True`` at the top level."""

    signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1")
    """Names of the signals. An earlier handler is called too; the default action is suppressed. A
    handler that other code installs later is called too, from the next ``should_save`` or
    ``preempted`` of the main thread on. A handler that Python's ``signal`` does not know, such as
    one of ``faulthandler``, is lost."""

    grace_seconds: float | None = Field(None, gt=0)
    """Seconds from the signal until the process is killed. On exit, the pipeline waits for saves
    only until then. None waits as long as ``drain_timeout_seconds``."""

    @field_validator("signals")
    @classmethod
    def _can_be_watched(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name in ("SIGKILL", "SIGSTOP") or name not in signal.Signals.__members__:
                raise ValueError(f"the signal {name} cannot be watched")
        return names


class Worker(_Group):
    """The thread or process that brings staged saves to the store."""

    mode: WorkerMode = "auto"
    """Thread or process: ``thread`` uploads in a thread of this process. ``process`` uploads in a
    worker process, which takes no GIL time of this process, and finishes staged saves even if this
    process is killed. ``auto`` takes a process for stores behind a network; it takes a thread for
    local disks, and if the settings or the backend cannot be sent to another process. Also written
    ``worker="process"`` at the top level."""

    survive: bool = True
    """Let the worker process finish staged saves after this process has ended."""

    niceness: int = Field(10, ge=0, le=19)
    """The ``nice`` value of the worker process. If training needs the same processor, 0 shares it
    equally; 5 leaves the worker a quarter of it, 10 a tenth, 19 a hundredth. A processor that is
    otherwise idle is all its own."""

    hang_seconds: float = Field(300.0, gt=0)
    """Seconds after which a hanging worker process is killed and replaced. It hangs as long as it
    sends no message, and at each check of the trainer all its threads sleep. A worker that runs, is
    stopped or traced, swaps or waits for a disk is never killed."""

    stop_seconds: float = Field(5.0, ge=0)
    """Seconds that a worker process has to end when the pipeline closes, before it is killed."""

    resume_wait_seconds: float = Field(60.0, ge=0)
    """Seconds that a load of the newest checkpoint waits at most for newer ones that workers of an
    ended trainer are still uploading."""

    log_dir: str | None = None
    """Directory for the log of a worker process. The log is kept while the process runs, and after
    an abnormal end. By default a private directory below that of temporary files."""


class CommonFields(TypedDict, total=False):
    """The fields of :class:`PipelineFields` whose names no option of a load has."""

    attempt_id: str | None
    solo: bool
    read_only: bool
    initial: str | os.PathLike[str] | None
    resume: Resume
    meeting_timeout_seconds: float
    incomplete_after_seconds: float
    incomplete_in_a_row: int | None
    save_every_steps: int | None
    save_every_seconds: float | None
    look_every_seconds: float
    on_busy: OnBusy
    on_error: OnError
    drain_timeout_seconds: float
    keep_reports: bool
    switch_interval_seconds: float | None
    staging: Staging | Mapping[str, Any]
    staging_bytes: int | str | None
    plan: Plan | Mapping[str, Any] | Literal["local", "global"] | Planner
    upload: Upload | Mapping[str, Any]
    incremental: Incremental | Mapping[str, Any] | bool
    load: Load | Mapping[str, Any]
    lock: Lock | Mapping[str, Any]
    retention: Retention | Mapping[str, Any] | Rule
    keep_last: int | None
    nan: Nan | Mapping[str, Any]
    replicas: Replicas | Mapping[str, Any]
    final_format: FinalFormat
    export: Export | Mapping[str, Any]
    preemption: Preemption | Mapping[str, Any] | bool
    worker: Worker | Mapping[str, Any] | WorkerMode
    backends: Mapping[str, Mapping[str, Any]]


class PipelineFields(CommonFields, total=False):
    """The fields of :class:`Settings` but ``url``, and their short forms, as keywords."""

    per_rank: PerRank
    pickle: PicklePolicy


class SettingsFields(PipelineFields, total=False):
    """The fields of :class:`Settings`, and their short forms, as keywords."""

    url: str | os.PathLike[str] | None


class Settings(BaseModel):
    """The settings of a pipeline: checked when made, frozen from then on.

    Args:
        fields: The settings below. A group is given as a dict or as its class. Settings of the
            group that are not given come from the environment or the defaults. ``staging_bytes``
            and ``keep_last`` are short for the settings of that name in their groups. A retention
            rule may replace the whole group ``retention``, a mode the group ``worker``, and True or
            False the groups ``preemption`` and ``incremental``.

    Raises:
        SettingsError: If a name is unknown (the message has the nearest valid one), or a value is
            out of range. The environment is checked like the keywords.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    url: str | None = None
    """The root of the checkpoints, as a URL such as ``s3://bucket/run-17`` or a plain path. If it
    holds credentials, neither ``repr`` nor logs nor errors show them."""

    attempt_id: str | None = Field(None, min_length=1)
    """The name of this launch, the same on all its ranks. No other launch may have used it on this
    root; the first save checks that. By default the ranks agree on a name by themselves."""

    solo: bool = False
    """Save alone, although other ranks run. Without it, a save or load raises once a process group
    appears or changes after opening, and a save of a process raises if ``srun``, ``mpirun`` or the
    like has started several and there is no process group."""

    read_only: bool = False
    """Only list and load checkpoints, and write nothing at all: a read-only mount, or a key without
    the right to write, is enough. A save raises, and a checkpoint that is being loaded is not
    protected from deletion by other processes. Several ranks that load the newest, or fall back,
    agree through the Store of ``torch.distributed``; without one they must name a step."""

    initial: str | None = None
    """The path or URL of a checkpoint of another program, such as a folder of Hugging Face weights,
    which ``load(state)`` takes while the run has no checkpoint: the first start and every restart
    are the same line. :meth:`ckpipe.Pipeline.load` describes it under ``source``."""

    resume: Resume = "auto"
    """Behaviour of ``load(state)`` while there is no complete checkpoint. ``auto`` begins a run. It
    warns if the root holds remains of earlier launches, which are incomplete checkpoints, deleted
    ones or claims, or if the launcher says that this is a restart (``TORCHELASTIC_RESTART_COUNT``,
    ``SLURM_RESTART_COUNT``); the warning names them, and why none counts. ``must`` raises
    ``CheckpointNotFound``, even if ``initial`` is set. ``never`` begins a run even beside complete
    checkpoints; its saves count as newer than those. A load of a named step is as always."""

    meeting_timeout_seconds: float = Field(300.0, gt=0)
    """Seconds that opening waits at most for the other ranks to agree on an attempt. With
    ``attempt_id`` or ``read_only``, the first load that needs their agreement waits instead."""

    incomplete_after_seconds: float = Field(600.0, ge=0)
    """Seconds after a rank's own commit until it counts a checkpoint as incomplete because other
    ranks have not committed. It checks that at a later save, emits an event and goes on."""

    incomplete_in_a_row: int | None = Field(3, ge=1)
    """Number of incomplete checkpoints in a row after which ``on_error`` applies, as to a failed
    save. None: never."""

    save_every_steps: int | None = Field(None, ge=1)
    """Interval between saves, in steps: ``should_save`` asks for a save at each multiple of it."""

    save_every_seconds: float | None = Field(None, gt=0)
    """The longest time between saves, in seconds, if ``should_save`` is called often enough. Of
    several ranks the first whose time is up makes all of them agree on a step."""

    look_every_seconds: float = Field(1.0, gt=0)
    """Seconds between two requests by which each of several ranks asks the store, in the
    background, whether another rank calls for a save. With ``preemption`` it asks all the time,
    with ``save_every_seconds`` shortly before the time is up. Each is one small request; a
    reaction takes a few intervals."""

    on_busy: OnBusy = "wait"
    """Behaviour of ``save`` while earlier saves hold the staging memory: ``wait`` for it, ``skip``
    the save, or ``fail`` with ``PipelineBusy``."""

    on_error: OnError = "raise"
    """Behaviour after a failed save that no call waited for: a later call of the pipeline raises
    the error (``raise``), or warns (``warn``)."""

    drain_timeout_seconds: float = Field(600.0, ge=0)
    """Seconds that the pipeline waits at most for staged saves when it is left on an exception, or
    after a signal of ``preemption``. When it is left normally, it waits until all saves are
    durable, without a limit; this setting then bounds only retention, hooks and the like."""

    per_rank: PerRank = "raise"
    """Treatment of per-rank values and random generators by a load if another number of ranks has
    saved them: ``raise``, ``drop``, ``rank0`` or ``derive``. ``load(per_rank=…)`` overrides it, and
    its documentation explains each value."""

    pickle: PicklePolicy = "refuse"
    """Save and load objects of unknown types by pickle, or refuse them. Pickle runs code from the
    file. ``"allow"`` is needed for the save and for the load; ``load(pickle=…)`` overrides it."""

    keep_reports: bool = True
    """Keep the report of each save in the rank's manifest, where ``ckpipe timeline`` finds it. It
    costs no request, and some kilobytes for each gibibyte."""

    switch_interval_seconds: float | None = Field(0.001, gt=0)
    """Switch interval of the GIL during uploads and loads, in seconds. It is set for the whole
    process by ``sys.setswitchinterval``, unless that is as low already, and the former value is
    restored at the end. Beside a loop of plain Python a save takes a third longer at Python's own
    5 ms. None changes nothing."""

    staging: Staging = Staging()
    """Host memory for saves on their way."""

    plan: Plan = Plan()
    """The planner, and the replicated tensors."""

    upload: Upload = Upload()
    """Lanes, retries and deadlines."""

    incremental: Incremental = Incremental()
    """Links to data files that did not change, in place of writing them again."""

    load: Load = Load()
    """Lanes of reads."""

    lock: Lock = Lock()
    """Waits between trainer and pipeline."""

    retention: Retention = Retention()
    """Rules for the checkpoints that stay."""

    nan: Nan = Nan()
    """The count of NaN in each save."""

    replicas: Replicas = Replicas()
    """The comparison of copies that several ranks hold."""

    final_format: FinalFormat = "ckpipe"
    """Export that ``save(final=True)`` writes beside the checkpoint: ``"ckpipe"`` none, ``"torch"``
    one file for ``torch.load``, ``"hf"`` safetensors as ``transformers`` loads them, ``"dcp"`` a
    folder for ``torch.distributed.checkpoint``. Several ranks write its files together once the
    checkpoint is complete."""

    export: Export = Export()
    """Content of the export."""

    preemption: Preemption = Preemption()
    """Signals that announce the end of the process."""

    worker: Worker = Worker()
    """The thread or process that uploads saves."""

    backends: dict[str, dict[str, Any]] = Field(default_factory=dict, repr=False)
    """Options for backends, by URL scheme: ``{"file": {"direct": False}}``. They may hold
    credentials, so neither ``repr`` nor error messages show them."""

    def __init__(self, **fields: Unpack[SettingsFields]) -> None:
        given: dict[str, Any] = {**fields}
        for name in ("url", "initial"):
            if isinstance(given.get(name), os.PathLike):
                given[name] = os.fspath(given[name])
        try:
            super().__init__(**_merged(_grouped(_read_environment(os.environ)), _grouped(given)))
        except ValidationError as error:
            # The explanation repeats all of it, without values that may be secret.
            raise _explained(error, type(self)) from None

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, without_secrets(value) if name in ("url", "initial") and value else value

    @property
    def keep_last(self) -> int | None:
        """The number of checkpoints that are kept: short for ``retention.keep_last``."""
        return self.retention.keep_last

    @property
    def staging_bytes(self) -> int | None:
        """Host memory of all saves together, in bytes: short for ``staging.bytes``."""
        return self.staging.bytes

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        *,
        table: str | None = None,
        **overrides: Unpack[SettingsFields],
    ) -> Self:
        """Read settings from a TOML file, below keywords and environment. Blocks while reading.

        Args:
            path: The file; its tables are the groups.
            table: The table of a larger file that has the settings, with dots between names:
                ``"tool.ckpipe"``. None: the whole file.
            overrides: Settings that win over the environment and the file.

        Raises:
            SettingsError: If the file cannot be read, is not TOML, has no such table, or holds an
                invalid setting.
        """
        file, environment = (
            _grouped(_read_toml(path, table)),
            _grouped(_read_environment(os.environ)),
        )
        return cls(**_merged(file, environment, _grouped(overrides)))

    def override(self, **fields: Unpack[SettingsFields]) -> Self:
        """Return a copy with some settings changed.

        Args:
            fields: As for the class. Settings of a group that are not given stay as they are.

        Raises:
            SettingsError: If a name is unknown or a value out of range.
        """
        # model_dump would need a plain form of every rule.
        present = {name: dict(v) if isinstance(v, BaseModel) else v for name, v in self}
        return type(self)(**_merged(present, _grouped(fields)))
