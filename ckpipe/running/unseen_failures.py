"""How a user is told of failures that nobody waited for."""

from __future__ import annotations

import logging
import warnings
from concurrent.futures import Future
from typing import Literal

from ckpipe.errors import PipelineClosed, first_error

logger = logging.getLogger("ckpipe")


def raise_or_warn(failures: list[Exception], on_error: Literal["raise", "warn"]) -> None:
    """Brings failures of the background before the user."""
    if on_error == "warn":
        for each in failures:
            text = "\n".join([f"A checkpoint failed: {each}", *getattr(each, "__notes__", ())])
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        return
    if failures:
        error = failures[0]
        for other in failures[1:]:
            error.add_note(f"Besides: {other!r}")
        raise error


def note_failures(failures: list[Exception], error: BaseException) -> None:
    """Note on the exception that ends the program which saves failed or were given up.

    They are logged as well, since they are not raised themselves.
    """
    for each in failures:
        if each is not error:
            logger.error("A checkpoint failed: %s", each)
            error.add_note(f"Besides, a checkpoint failed: {each}")


def has_failed(served: Future[None]) -> PipelineClosed:
    """What whoever goes on using a pipeline is told once something has ended its event loop.

    Args:
        served: What the loop was there for.
    """
    error = served.exception() if served.done() and not served.cancelled() else None
    first = first_error(error) if isinstance(error, Exception) else error
    why = "" if first is None else f": {first!r}"
    closed = PipelineClosed(
        f"The pipeline has failed{why}",
        hint="Leave its (async) with block, which raises all that went wrong, and open another one",
    )
    closed.__cause__ = error
    return closed
