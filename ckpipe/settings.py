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

import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self, TypedDict, Unpack

from pydantic import (
    BaseModel,
    Field,
    ValidationError,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from ckpipe._settings_input import (
    explained,
    grouped,
    merged,
    read_environment,
    read_toml,
)
from ckpipe.backend import without_secrets
from ckpipe.retention import Rule
from ckpipe.settings_groups import (
    Export,
    Load,
    Lock,
    Plan,
    Preemption,
    Retention,
    Staging,
    Upload,
    Worker,
)
from ckpipe.types import Planner


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


class Settings(BaseSettings):
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

    model_config = SettingsConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

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
    """Whether a failed save that nobody waited for raises from the pipeline later, or warns."""

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
            super().__init__(**grouped(given))
        except ValidationError as error:
            # The explanation has all of it, without the values that may be secret.
            raise explained(error, type(self)) from None

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, without_secrets(value) if name == "url" and value else value

    @property
    def keep_last(self) -> int | None:
        """How many checkpoints are kept: short for ``retention.keep_last``."""
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
        file, given = grouped(read_toml(path, table)), grouped(overrides)
        return cls(**merged(file, grouped(read_environment(os.environ)), given))

    def override(self, **fields: Unpack[SettingsFields]) -> Self:
        """New settings: these, with some of them changed.

        Args:
            fields: As for the class. Of a group, only what is named is changed.

        Raises:
            SettingsError: If a name is unknown or a value out of range.
        """
        # Not model_dump, which would need a plain form of every rule.
        present = {name: dict(v) if isinstance(v, BaseModel) else v for name, v in self}
        return type(self)(**merged(present, grouped(fields)))

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Keywords first, then the environment as this module reads it."""
        return init_settings, _Environment(settings_cls)


class _Environment(PydanticBaseSettingsSource):
    """The environment, unknown names included, so that a misspelt variable is refused."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        return grouped(read_environment(os.environ))


__all__ = [
    "Export",
    "Load",
    "Lock",
    "PipelineFields",
    "Plan",
    "Preemption",
    "Retention",
    "Settings",
    "SettingsFields",
    "Staging",
    "Upload",
    "Worker",
]
