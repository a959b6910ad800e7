"""How a user is told of failures that nobody waited for."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Literal

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


def tell_forgotten(url: str, process: int, under_way: Callable[[], Mapping[str, int]]) -> None:
    """Says that a pipeline was never left, when nobody has it any more or the program ends.

    Args:
        url: Where its checkpoints lie.
        process: The process that opened it.
        under_way: Counts its saves that have not ended, by status.
    """
    if os.getpid() != process:
        return
    saves = ", ".join(f"{count} {status}" for status, count in sorted(under_way().items()))
    if saves:
        logger.error(
            "The pipeline of %s was never left, and saves under way may be lost: %s. Use it "
            "inside its (async) with block, or wait for the handles of its saves",
            url,
            saves,
        )
