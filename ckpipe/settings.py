"""Everything about a pipeline that can be set, in one frozen value.

A setting comes from the first of these that has it: a keyword, the environment, a TOML file
(:meth:`Settings.from_file`), its default. Variables are called ``CKPIPE_`` and the setting's
name, with ``__`` between a group and what is in it: ``CKPIPE_UPLOAD__LANES=8``. Values that
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
from ckpipe.types import Planner

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


def _grouped(fields: Mapping[str, Any]) -> dict[str, Any]:
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


def _merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """One nested dict of several; where they differ, the later wins."""
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
    # A group's own variable sorts before those of its parts, which therefore win over it.
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


def _explained(error: ValidationError, settings: type[BaseModel]) -> SettingsError:
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
    """The hint: the valid name that is meant, or the place of all valid names."""
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
    """The valid name that is most alike, as it is written or as what follows its group, if any."""
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

RuleData = Annotated[
    Rule, PlainValidator(from_data), PlainSerializer(lambda rule: rule.to_data(), return_type=Any)
]
"""A retention rule, or its plain form as :func:`ckpipe.retention.from_data` reads it."""


class _Group(BaseModel):
    """A group of settings. Made by itself it raises pydantic's own ValidationError."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Staging(_Group):
    """Host memory that holds saves between the trainer's tensors and the store."""

    bytes: Size | None = Field(None, ge=0)
    """Host memory of all saves together, in bytes. By default the first save's size, rounded
    up, and at most 40 % of the memory that is available, to the container if it is in one, divided
    by ``LOCAL_WORLD_SIZE``, the ranks of the machine. More saves in flight need more. It stays with
    the pipeline until closing, for the next save: a state of 1 GiB keeps 1 GiB of host memory.
    ``pipeline.trim()`` gives it back, and a lower bound has the state stream through less. At least
    one block; also written ``staging_bytes=`` at the top level."""

    block_bytes: BlockSize = 16 * 1024 * 1024
    """The unit of staging and upload, in bytes, or the smallest that the store takes if that is
    more. A store that limits the number of blocks in one upload gets several files from a rank
    with more than they hold: on S3 with 16 MiB one for each 156 GiB. A single tensor larger than
    that needs larger blocks."""

    pinned: Literal["auto", "never"] = "auto"
    """Whether staging memory is page-locked for fast copies from a GPU: ``auto`` does so where
    CUDA is in use, and logs one warning where it is not; ``never`` says that none is wanted."""

    overlap: bool = True
    """Whether upload starts while staging still runs. Without it ``save`` returns a little
    sooner and the checkpoint is durable later."""

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
    """Who decides it: ``"local"`` each rank by itself, ``"global"`` one rank for all, through the
    store of the default process group (:class:`~ckpipe.GlobalPlanner`), or a
    :class:`~ckpipe.Planner`, whose own arguments then hold instead of the settings below."""

    timeout_seconds: float = Field(60.0, gt=0)
    """With ``"global"``, how long a save waits for the other ranks, in seconds, before it fails
    and names those that did not come."""

    replicated: Literal["auto", "none"] | tuple[str, ...] = "auto"
    """Which plain tensors all ranks hold alike, so that each byte is written by one rank only:
    ``"auto"`` the parameters of ``DistributedDataParallel`` and what other objects in the state
    say of themselves (:mod:`ckpipe.state.kinds`), ``"none"`` none, and a list of globs on
    labels those that match besides. DTensors need no mention."""


class Upload(_Group):
    """Writes to the store, and the one policy of trying again."""

    lanes: int = Field(4, ge=1)
    """Writes of one save to the store at the same time."""

    retries: int = Field(5, ge=0)
    """How often a request is tried again after an error that the backend calls transient."""

    backoff_seconds: float = Field(0.2, ge=0)
    """The longest wait before the first new try, in seconds. It doubles with each further one,
    and the actual wait is drawn at random below it."""

    backoff_max_seconds: float = Field(20.0, ge=0)
    """The longest wait before any new try, in seconds. Not less than ``backoff_seconds``."""

    attempt_timeout_seconds: float = Field(120.0, gt=0)
    """How long one request may take, in seconds, before it counts as failed and is tried again."""

    deadline_seconds: float | None = Field(None, gt=0)
    """How long one request may go on being tried, in seconds, waits included. None: until its
    retries are used up."""

    @model_validator(mode="after")
    def _backoff_grows(self) -> Self:
        if self.backoff_max_seconds < self.backoff_seconds:
            raise ValueError("backoff_max_seconds must not be less than backoff_seconds")
        return self


class Load(_Group):
    """Reads of a checkpoint."""

    lanes: int = Field(6, ge=1)
    """Reads under way at the same time. Each holds a block of staging memory."""

    agreement_timeout_seconds: float = Field(600.0, gt=0)
    """How long a load waits for other ranks, in seconds: with ``fallback``, after its own reading,
    until they have said whether the checkpoint is whole for them; of a step, until they have
    committed what this run saves at it, if an older checkpoint would be loaded else."""


class Lock(_Group):
    """Limits of the time that trainer and pipeline wait for each other."""

    timeout_seconds: float = Field(60.0, gt=0)
    """How long a save waits until it may look at the state, in seconds, before it fails. The
    training step goes on in any case."""

    max_step_wait_seconds: float = Field(1.0, gt=0)
    """How long a guarded step may wait, in seconds, for a copy made beside training
    (``until="captured"``). If it would take longer, the save fails and the step goes on, once what
    is being copied just then is: 256 MiB at the most, or a block by each thread if that is more."""


class Retention(_Group):
    """Rules for the complete checkpoints that stay. Without ``keep_last`` and ``rules`` all do."""

    keep_last: int | None = Field(None, ge=0)
    """How many of the newest to keep. 0 allows no intermediate checkpoints, only final ones
    and the one that a preempted run is saved in. Also written ``keep_last=`` at the top level."""

    rules: RuleData | None = None
    """What to keep besides: a rule such as ``KeepEvery(steps=1000) | KeepBest("loss")``, or its
    plain form, ``[{keep = "every", steps = 1000}, {keep = "best", metric = "loss"}]``."""

    sweep_after_seconds: float = Field(86_400.0, ge=0)
    """How old leftovers of runs are that ``sweep`` removes, and how long the mark of a deleted
    checkpoint stays, so that a straggling writer cannot bring it back to life; in seconds by the
    store's clock."""

    @model_validator(mode="after")
    def _zero_stands_alone(self) -> Self:
        if self.keep_last == 0 and self.rules is not None:
            raise ValueError("keep_last=0 allows no intermediate checkpoints for rules to keep")
        return self

    @property
    def sweep_after(self) -> timedelta:
        """``sweep_after_seconds`` as a period."""
        return timedelta(seconds=self.sweep_after_seconds)

    @property
    def rule(self) -> Rule | None:
        """``keep_last`` and ``rules`` as one rule; None keeps all."""
        if self.keep_last is None:
            return self.rules
        newest = KeepLast(self.keep_last)
        return newest if self.rules is None else newest | self.rules


class Export(_Group):
    """The content that ``final_format`` writes beside the checkpoint of ``save(final=True)``."""

    part: str | None = None
    """The label of the part of the state that is exported. None: all of it as ``"torch"``; as
    ``"hf"`` what lies under ``model``, at the top of the state or one level below, where there is
    such a thing."""

    max_shard_bytes: Annotated[Size, Field(ge=1)] = 5_000_000_000
    """How large a file of the form ``"hf"`` may be, in bytes, unless one tensor is larger."""


class Preemption(_Group):
    """Saving once more when this process, or with several ranks one of them, is to be stopped."""

    enabled: bool = False
    """Whether signals are watched. Also written ``preemption=True`` at the top level."""

    signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1")
    """Their names. Who handled them before is called too; the default action is held back. A
    handler that Python's ``signal`` does not know of, such as one of ``faulthandler``, is lost."""

    grace_seconds: float | None = Field(None, gt=0)
    """How long after the signal the process is stopped for good, in seconds. Leaving the pipeline
    then waits for saves only until that time. None: as long as ``drain_timeout_seconds``."""

    @field_validator("signals")
    @classmethod
    def _can_be_watched(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name in ("SIGKILL", "SIGSTOP") or name not in signal.Signals.__members__:
                raise ValueError(f"the signal {name} cannot be watched")
        return names


class Worker(_Group):
    """The thread or process that brings staged saves to the store."""

    mode: Literal["auto", "thread", "process"] = "auto"
    """``thread``: in a thread of this process. ``process``: in a worker process, which takes no
    turn of this interpreter and finishes what was staged even if this process is killed.
    ``auto``: a process for stores behind a network, a thread for local disks and where something
    cannot cross to another process. Also written ``worker="process"`` at the top level."""

    survive: bool = True
    """Whether the worker process finishes staged saves when this process is gone."""

    niceness: int = Field(10, ge=0, le=19)
    """How much the worker process gives way to training where both want the same processor: 0 not
    at all, 5 leaves it a quarter of one, 10 a tenth, 19 a hundredth. A processor that no other
    wants is all its own."""

    hang_seconds: float = Field(300.0, gt=0)
    """How long a worker process hangs, in seconds, until it is killed and replaced. It hangs while
    it says nothing, all its threads sleep and it uses no processor time, each time the trainer
    looks. One that runs, is stopped or traced, swaps or waits for a disk is never killed."""

    stop_seconds: float = Field(5.0, ge=0)
    """How long a worker process has to end on closing, in seconds, until it is killed."""

    resume_wait_seconds: float = Field(60.0, ge=0)
    """How long a load of the newest checkpoint waits for newer ones that workers of a trainer
    that is gone are still bringing to the store, in seconds."""

    log_dir: str | None = None
    """Where the log of a worker process is kept while it runs, and after one that did not end in
    peace. By default a private directory below that of temporary files."""


class PipelineFields(TypedDict, total=False):
    """The fields of :class:`Settings` but ``url``, and their short forms, as keywords."""

    attempt_id: str | None
    solo: bool
    read_only: bool
    meeting_timeout_seconds: float
    incomplete_after_seconds: float
    incomplete_in_a_row: int | None
    save_every_steps: int | None
    save_every_seconds: float | None
    look_every_seconds: float
    on_busy: Literal["wait", "skip", "fail"]
    on_error: Literal["raise", "warn"]
    drain_timeout_seconds: float
    per_rank: Literal["raise", "drop", "rank0", "derive"]
    pickle: Literal["refuse", "allow"]
    keep_reports: bool
    switch_interval_seconds: float | None
    staging: Staging | Mapping[str, Any]
    staging_bytes: int | str | None
    plan: Plan | Mapping[str, Any] | Literal["local", "global"] | Planner
    upload: Upload | Mapping[str, Any]
    load: Load | Mapping[str, Any]
    lock: Lock | Mapping[str, Any]
    retention: Retention | Mapping[str, Any] | Rule
    keep_last: int | None
    final_format: Literal["ckpipe", "torch", "hf"]
    export: Export | Mapping[str, Any]
    preemption: Preemption | Mapping[str, Any] | bool
    worker: Worker | Mapping[str, Any] | Literal["auto", "thread", "process"]
    backends: Mapping[str, Mapping[str, Any]]


class SettingsFields(PipelineFields, total=False):
    """The fields of :class:`Settings`, and their short forms, as keywords."""

    url: str | os.PathLike[str] | None


class Settings(BaseModel):
    """The settings of a pipeline: checked when made, frozen from then on.

    Args:
        fields: The settings below. A group is given as a dict or as its class; of a group,
            only what is named is set, and the rest comes from the environment or the defaults.
            ``worker`` may be its mode.
            ``staging_bytes`` and ``keep_last`` are short for what they name in their groups,
            a retention rule may stand for the whole group ``retention``, and True or False for
            ``preemption``.

    Raises:
        SettingsError: If a name is unknown, which the message follows with the nearest valid
            one, or a value is out of range. The environment is checked like the keywords.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    url: str | None = None
    """Where the checkpoints lie: a URL such as ``s3://bucket/run-17``, or a plain path. If it holds
    credentials, neither ``repr`` nor logs nor errors show them."""

    attempt_id: str | None = Field(None, min_length=1)
    """The name of this launch, the same on all its ranks, under which no other has saved on this
    root: the first save finds that out. By default the ranks agree on one by themselves."""

    solo: bool = False
    """Whether this process saves alone although other ranks run."""

    read_only: bool = False
    """Whether the pipeline only looks and loads: then it writes nothing at all, so that a
    read-only mount or a key without the right to write will do. Saving raises, and
    what is being loaded is not protected from others who delete. Several ranks that load the
    newest, or fall back, agree through the Store of ``torch.distributed``; without one they name a
    step."""

    meeting_timeout_seconds: float = Field(300.0, gt=0)
    """How long opening waits for the other ranks when they agree on an attempt, in seconds; with
    ``attempt_id`` or ``read_only``, how long the first load on which they have to agree waits."""

    incomplete_after_seconds: float = Field(600.0, ge=0)
    """How long after its own commit a rank, at a later save, calls a checkpoint incomplete that
    other ranks have not committed, in seconds. It tells so by an event and goes on."""

    incomplete_in_a_row: int | None = Field(3, ge=1)
    """After so many incomplete checkpoints one after the other, ``on_error`` applies to that as to
    a failed save. None: never."""

    save_every_steps: int | None = Field(None, ge=1)
    """The distance of the steps at which ``should_save`` asks for a save: their multiples."""

    save_every_seconds: float | None = Field(None, gt=0)
    """The longest time between saves, in seconds, as far as ``should_save`` is asked. Of several
    ranks the first whose clock says so has all of them agree on a step."""

    look_every_seconds: float = Field(1.0, gt=0)
    """How often each of several ranks asks the store, in the background, whether another one calls
    for a save, in seconds: with ``preemption`` all the time, with ``save_every_seconds`` when it is
    near. One small request each; reacting takes a few times as long."""

    on_busy: Literal["wait", "skip", "fail"] = "wait"
    """What ``save`` does while earlier saves hold the staging memory."""

    on_error: Literal["raise", "warn"] = "raise"
    """Whether a failed save that no call waited for raises from the pipeline later, or warns."""

    drain_timeout_seconds: float = Field(600.0, ge=0)
    """How long leaving the pipeline on an exception, or after a signal of ``preemption``, waits for
    staged saves, in seconds. Leaving it normally waits until all is durable, without a limit; this
    one bounds only what follows then, such as retention and hooks."""

    per_rank: Literal["raise", "drop", "rank0", "derive"] = "raise"
    """What a load does with values of one rank each, and with random generators, where another
    number of ranks has saved them; ``load(per_rank=…)`` goes before it and says what each means."""

    pickle: Literal["refuse", "allow"] = "refuse"
    """Whether objects of types that ckpipe does not know are saved and loaded by pickle, which
    runs code from the file. Needed at both ends."""

    keep_reports: bool = True
    """Whether each rank's manifest keeps the report of its save, which ``ckpipe timeline`` shows.
    It costs no request, and some kilobytes for each gibibyte."""

    switch_interval_seconds: float | None = Field(0.001, gt=0)
    """How long a thread of this process may keep the GIL from others while a save is brought to the
    store or a checkpoint is loaded, in seconds. It is set for the whole process by
    ``sys.setswitchinterval``, unless that is as low already, and what was before is put back at the
    end. Beside a loop of plain Python a save takes a third longer at Python's own 5 ms. None leaves
    the interval alone."""

    staging: Staging = Staging()
    """Host memory for saves on their way."""

    plan: Plan = Plan()
    """Who plans, and what is replicated."""

    upload: Upload = Upload()
    """Lanes, retries and deadlines."""

    load: Load = Load()
    """Lanes of reads."""

    lock: Lock = Lock()
    """Waits between trainer and pipeline."""

    retention: Retention = Retention()
    """Which checkpoints stay."""

    final_format: Literal["ckpipe", "torch", "hf"] = "ckpipe"
    """What ``save(final=True)`` writes beside the checkpoint: nothing, one file for
    ``torch.load``, or sharded safetensors with an index as ``transformers`` loads them. Of several
    ranks the first writes it once the checkpoint is complete."""

    export: Export = Export()
    """What that holds."""

    preemption: Preemption = Preemption()
    """Signals that announce the end."""

    worker: Worker = Worker()
    """Where saves are brought to the store."""

    backends: dict[str, dict[str, Any]] = Field(default_factory=dict, repr=False)
    """Options for backends, by URL scheme: ``{"file": {"direct": False}}``. They may hold
    credentials, so neither ``repr`` nor error messages show them."""

    def __init__(self, **fields: Unpack[SettingsFields]) -> None:
        given: dict[str, Any] = {**fields}
        if isinstance(given.get("url"), os.PathLike):
            given["url"] = os.fspath(given["url"])
        try:
            super().__init__(**_merged(_grouped(_read_environment(os.environ)), _grouped(given)))
        except ValidationError as error:
            # The explanation has all of it, without the values that may be secret.
            raise _explained(error, type(self)) from None

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, without_secrets(value) if name == "url" and value else value

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
            SettingsError: If the file cannot be read, is not TOML, has no such table, or holds
                what is not valid.
        """
        file, environment = (
            _grouped(_read_toml(path, table)),
            _grouped(_read_environment(os.environ)),
        )
        return cls(**_merged(file, environment, _grouped(overrides)))

    def override(self, **fields: Unpack[SettingsFields]) -> Self:
        """New settings: these, with some of them changed.

        Args:
            fields: As for the class. Of a group, only what is named is changed.

        Raises:
            SettingsError: If a name is unknown or a value out of range.
        """
        # Not model_dump, which would need a plain form of every rule.
        present = {name: dict(v) if isinstance(v, BaseModel) else v for name, v in self}
        return type(self)(**_merged(present, _grouped(fields)))
