"""How a user is told of failures that nobody waited for."""

from __future__ import annotations

import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Literal

from ckpipe.errors import PipelineClosed, first_error
from ckpipe.saves.saving import Save

logger = logging.getLogger("ckpipe")


def raise_or_warn(failures: list[Exception], on_error: Literal["raise", "warn"]) -> None:
    """Brings failures of the background before the user."""
    if on_error == "warn":
        for each in failures:
            warnings.warn(f"A checkpoint failed: {each}", RuntimeWarning, stacklevel=3)
        return
    if failures:
        error = failures[0]
        for other in failures[1:]:
            error.add_note(f"Besides: {other!r}")
        raise error


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


def tell_forgotten(
    url: str, process: int, under_way: Callable[[], Iterable[Save]], *, outlived: bool
) -> None:
    """Says that a pipeline was never left, when nobody has it any more or the program ends.

    Args:
        url: Where its checkpoints lie.
        process: The process that opened it.
        under_way: Tells its saves that have not ended.
        outlived: Whether staged ones are finished by a worker process.
    """
    if os.getpid() != process:
        return
    left = [save for save in under_way() if not save.committed.done()]
    finished = [save for save in left if outlived and save.staged.done()]
    if finished:
        logger.warning(
            "The pipeline of %s was never left. Its worker process brings what is staged to the "
            "store: %s. Use it inside its (async) with block, which raises if that fails",
            url,
            _counted(finished),
        )
    if saves := _counted(save for save in left if save not in finished):
        logger.error(
            "The pipeline of %s was never left, and saves under way may be lost: %s. Use it "
            "inside its (async) with block, or wait for the handles of its saves",
            url,
            saves,
        )


def _counted(saves: Iterable[Save]) -> str:
    counts = Counter(save.status for save in saves)
    return ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
