"""What a user's call may be given: checked on the caller's thread, before anything happens."""

from __future__ import annotations

import contextlib
import json
import operator
from collections.abc import Mapping
from typing import Any

from ckpipe.errors import UsageError
from ckpipe.format.keys import encode_float
from ckpipe.types import CheckpointInfo

Which = int | str | CheckpointInfo
"""A step, the exact id of a checkpoint, or what is known of one."""


def which(checkpoint: Which) -> int | str:
    """The step or id that names a checkpoint.

    Raises:
        UsageError: If it is none of the three.
    """
    if isinstance(checkpoint, CheckpointInfo):
        return checkpoint.id
    if isinstance(checkpoint, str):
        return checkpoint
    with contextlib.suppress(TypeError):
        if not isinstance(checkpoint, bool):
            return operator.index(checkpoint)
    raise UsageError(f"A checkpoint is named by its step, its id or its info, not {checkpoint!r}")


def check_step(step: int) -> None:
    """Looks whether this is a step.

    Raises:
        UsageError: If it is not.
    """
    if type(step) is not int or not 0 <= step < 10**12:
        raise UsageError(f"A step is an int from 0 to 10**12 - 1, not {step!r}")


def check_until(until: str, step: int | None) -> None:
    """Looks whether a save can return then.

    Raises:
        UsageError: If there is no such moment.
    """
    if until not in ("captured", "staged", "committed"):
        raise UsageError(f"until is 'captured', 'staged' or 'committed', not {until!r}", step=step)


def check_load(per_rank: object, pickle: str) -> None:
    """Looks whether a load can be done in this way.

    Raises:
        UsageError: If one of the two is nothing that there is.
    """
    if pickle not in ("refuse", "allow"):
        raise UsageError(f"pickle is 'refuse' or 'allow', not {pickle!r}")
    if not callable(per_rank) and per_rank not in ("raise", "drop", "rank0"):
        raise UsageError(f"per_rank is 'raise', 'drop', 'rank0' or a function, not {per_rank!r}")


def plain_metrics(metrics: Mapping[str, float], step: int | None) -> dict[str, Any]:
    """Metrics as they stand in a manifest.

    Raises:
        UsageError: If one is no number.
    """
    try:
        return {str(name): encode_float(float(value)) for name, value in metrics.items()}
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UsageError(f"Metrics are numbers by name: {error}", step=step) from error


def plain_metadata(metadata: Mapping[str, Any], step: int | None) -> dict[str, Any]:
    """A copy of metadata, as plain JSON.

    Raises:
        UsageError: If it is none.
    """
    try:
        plain = json.loads(json.dumps(dict(metadata), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"Metadata must be plain JSON: {error}", step=step, hint="Put other things in the state"
        ) from error
    assert isinstance(plain, dict)
    return plain
