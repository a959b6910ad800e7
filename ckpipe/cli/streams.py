"""The streams of the process, and what a command comes to that cannot write its output."""

from __future__ import annotations

import os
import sys
from typing import TextIO

OUTPUT_FAILED = 3
"""The exit code when the output could not be written."""

NOBODY_READS = 141
"""The exit code when the reader of a pipe went away: what a shell shows for SIGPIPE."""


def open_closed_streams() -> None:
    """Takes the places of standard streams that are closed, which a store's file would take else.

    What is written to standard output fails then, and is not lost in silence.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            place = os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)
            if place != number:
                os.dup2(place, number)
                os.close(place)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  for good


def drop(stream: TextIO) -> None:
    """Keeps the interpreter from writing what is left, and complaining, when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


__all__ = ["NOBODY_READS", "OUTPUT_FAILED", "drop", "open_closed_streams"]
