"""Check the arguments of a user's call, and report failures that no call waited for.

Arguments are checked on the caller's thread, before the call has any effect.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import sys
import warnings
from concurrent.futures import Future
from typing import Any, SupportsIndex

from ckpipe.errors import PermissionDenied, PipelineClosed, UsageError, first_error
from ckpipe.lock.holds import callers
from ckpipe.types import CheckpointInfo, OnError

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


logger = logging.getLogger("ckpipe")


def failure_text(error: Exception) -> str:
    """Describe a failure in the background, which may be of work beside a save that is whole."""
    notes = getattr(error, "__notes__", ())
    beside = any(
        each.startswith(("Raised by the hook", "Raised after the commit")) for each in notes
    )
    return f"{'Work beside the saves' if beside else 'A checkpoint'} failed: {error}"


def raise_or_warn(failures: list[Exception], on_error: OnError) -> None:
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
