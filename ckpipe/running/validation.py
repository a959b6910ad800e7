"""Check the arguments of a user's call, and report failures that no call waited for.

Arguments are checked on the caller's thread, before the call has any effect.
"""

from __future__ import annotations

import contextlib
import json
import logging
import operator
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any, Literal, SupportsIndex

from torch.optim import Optimizer

from ckpipe.errors import PermissionDenied, PipelineClosed, UsageError, first_error
from ckpipe.format.labels import encode_float
from ckpipe.lock.guard import StepGuard
from ckpipe.lock.holds import callers
from ckpipe.types import CheckpointInfo

_DEEPEST = 200

Which = int | str | CheckpointInfo
"""A step, the exact id of a checkpoint, or its info."""


def place_of_call() -> str:
    """Return file and line of the code that calls ckpipe."""
    within = ("ckpipe", "contextlib")
    for frame in callers(sys._getframe(1)):
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in within:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return "an unknown place"


def location(url: str | os.PathLike[str] | None) -> str | None:
    """Return the root as text, or None if it is None.

    Raises:
        UsageError: If it is neither a URL nor a path.
    """
    try:
        return None if url is None else os.fsdecode(url)
    except TypeError as error:
        raise UsageError(
            f"The root is a URL or a path, not {type(url).__qualname__}",
            hint="Write it as text: '/ckpts'",
        ) from error


def absolute(root: str) -> str:
    """Return a root as a URL, or as a path that stays right if the folder of the process changes.

    If that folder was deleted, a relative path stays as it is, and opening it fails.
    """
    if "://" not in root:
        with contextlib.suppress(FileNotFoundError):
            return os.path.abspath(os.path.expanduser(root))
    return root


def which(checkpoint: Which) -> int | str:
    """Return the step or id of a checkpoint.

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
    raise UsageError(
        f"A checkpoint is named by its step, its id or its info, not {_shown(checkpoint)}",
        hint="In load(state, step) the state comes first",
    )


def plain_step(step: SupportsIndex) -> int:
    """Convert a step to an int, also from integers of numpy and torch.

    Raises:
        UsageError: If it is no step.
    """
    number = -1
    with contextlib.suppress(TypeError):
        number = -1 if isinstance(step, bool) else operator.index(step)
    if not 0 <= number < 10**12:
        raise UsageError(
            f"A step is an int from 0 to 10**12 - 1, not {_shown(step)}",
            hint="In save(state, step) the state comes first",
        )
    return number


def _shown(value: object) -> str:
    """Show a short value; name the type of other values."""
    short = isinstance(value, str | int | float)
    return f"{value!r:.100}" if short else f"a {type(value).__qualname__}"


def check_savable(state: Any, step: int | None, *, read_only: bool) -> None:
    """Check that there is a state and that it may be saved.

    Raises:
        PermissionDenied: If the pipeline was opened to read only.
        UsageError: If the state is None.
    """
    if read_only:
        raise PermissionDenied(
            "The pipeline was opened to read only",
            step=step,
            hint="Open a pipeline without read_only=True to save",
        )
    if state is None:
        raise UsageError(
            "There is no state to save: it is None",
            step=step,
            hint="Pass a state, such as a dict of model and optimizer",
        )


def late_owners(until: str, guards: Iterable[StepGuard], step: int | None) -> tuple[Optimizer, ...]:
    """Return the optimizers whose tensors a save copies late, by ``until`` of ``save``.

    Raises:
        UsageError: If there is no such ``until``, or no optimizer is guarded that it needs.
    """
    if until not in ("captured", "staged", "committed"):
        raise UsageError(f"until is 'captured', 'staged' or 'committed', not {until!r}", step=step)
    if until != "captured":
        return ()
    owners = tuple(optimizer for each in guards for optimizer in each.optimizers)
    if not owners:
        raise UsageError(
            "until='captured' needs a guarded optimizer: without one, a step may change "
            "tensors that are not copied yet",
            step=step,
            hint="Open the pipeline with guard=optimizer, or save with until='staged'",
        )
    return owners


def plain_metrics(metrics: Mapping[str, float], step: int | None) -> dict[str, Any]:
    """Return metrics in the form of the manifest.

    Raises:
        UsageError: If one is no number, or two have one name.
    """
    name: Any = None
    pairs = []
    try:
        for name, number in metrics.items():
            pairs.append((str(name), encode_float(float(number))))
        name = None
        return _by_name(pairs)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UsageError(
            f"Metrics are numbers by name: {error}",
            step=step,
            key=None if name is None else str(name),
            hint="Pass one number for each, such as loss.mean().item()",
        ) from error


def plain_metadata(metadata: Mapping[str, Any], step: int | None) -> dict[str, Any]:
    """Return a copy of metadata as plain JSON.

    Raises:
        UsageError: If it is not plain JSON, or two keys of a dict become one in JSON.
    """
    name: Any = None
    pairs: list[tuple[str, Any]] = []
    try:
        for name, value in dict(metadata).items():
            text = json.dumps({name: value}, allow_nan=False)
            pairs += json.loads(text, object_pairs_hook=_by_name).items()
        name, found = None, _by_name(pairs)
        _check_depth(found)
        return found
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"Metadata must be plain JSON: {error}",
            step=step,
            key=None if name is None else str(name),
            hint="Put other objects in the state",
        ) from error


def _check_depth(metadata: dict[str, Any]) -> None:
    """Refuse a depth that another program's recursion limit might not let it read.

    Raises:
        ValueError: If containers are nested too deeply.
    """
    level: list[Any] = [metadata]
    for _ in range(_DEEPEST):
        inside = [each.values() if isinstance(each, dict) else each for each in level]
        level = [item for each in inside for item in each if isinstance(item, dict | list)]
    if level:
        raise ValueError(f"it is nested more than {_DEEPEST} deep")


def _by_name(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of pairs; two keys such as ``1`` and ``"1"`` may have become one name.

    Raises:
        ValueError: If two pairs have one name.
    """
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"two of them are called {name!r:.100}")
        found[name] = value
    return found


logger = logging.getLogger("ckpipe")


def failure_text(error: Exception) -> str:
    """Describe a failure in the background, which may be of work beside a save that is whole."""
    notes = getattr(error, "__notes__", ())
    beside = any(
        each.startswith(("Raised by the hook", "Raised after the commit")) for each in notes
    )
    return f"{'Work beside the saves' if beside else 'A checkpoint'} failed: {error}"


def raise_or_warn(failures: list[Exception], on_error: Literal["raise", "warn"]) -> None:
    """Raise or warn of failures in the background."""
    if on_error == "warn":
        for each in failures:
            text = "\n".join([failure_text(each), *getattr(each, "__notes__", ())])
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        return
    if failures:
        error = failures[0]
        for other in failures[1:]:
            error.add_note(f"Besides: {other!r}")
        raise error


def note_failures(failures: list[Exception], error: BaseException) -> None:
    """Add failures of saves as notes to the exception that ends the program.

    They are logged too, since they are not raised themselves.
    """
    for each in failures:
        if each is not error:
            logger.error("%s", failure_text(each))
            error.add_note(f"Besides: {failure_text(each)}")


def has_failed(served: Future[None]) -> PipelineClosed:
    """Make the error for callers of a pipeline whose event loop has ended.

    Args:
        served: The future of :func:`ckpipe.running.engine.serve`.
    """
    error = served.exception() if served.done() and not served.cancelled() else None
    first = first_error(error) if isinstance(error, Exception) else error
    why = "" if first is None else f": {first!r}"
    closed = PipelineClosed(
        f"The pipeline has failed{why}",
        hint="Leave its (async) with block, which raises all errors, and open another one",
    )
    closed.__cause__ = error
    return closed
