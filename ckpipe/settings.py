"""Everything about a pipeline that can be set, in one frozen value.

A setting comes from the first of these that has it: a keyword, the environment, a TOML file
(:meth:`Settings.from_file`), its default. Variables are called ``CKPIPE_`` and the setting's
name, with ``__`` between a group and what is in it: ``CKPIPE_UPLOAD__LANES=8``. Values that
begin with ``[`` or ``{`` are read as JSON, and so is every value below ``CKPIPE_BACKENDS__``
that is JSON. Empty variables count as unset. ``CKPIPE_TEST_…``, ``CKPIPE_BENCH_…`` and
``CKPIPE_DEMO_…`` are no settings: they belong to the project's own tests, benchmarks and demo.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from ckpipe._settings_input import expanded, explained, merged, parse_size, read_environment
from ckpipe._settings_input import read_toml as _read_toml
from ckpipe.errors import SettingsError
from ckpipe.retention import KeepLast, Rule, from_data

_KIB, _MIB = 1024, 1024 * 1024

type_ = type
Size = Annotated[int, BeforeValidator(parse_size)]
"""A number of bytes; also text such as ``"256MiB"`` or ``"4 GB"``."""

BlockSize = Annotated[Size, Field(ge=64 * _KIB, multiple_of=4096)]
"""The size of a block in bytes: a multiple of 4096, at least 64 KiB."""

Rules = Annotated[Rule, PlainValidator(from_data), PlainSerializer(Rule.to_data, when_used="json")]
"""A retention rule, or its plain form as :func:`ckpipe.retention.from_data` reads it."""
