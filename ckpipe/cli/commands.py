"""List the commands, and hold the code that needs no package of the extra ``cli``."""

from __future__ import annotations

import os
import sys
from json import dumps
from typing import NamedTuple, TextIO

from ckpipe.version import __version__, install_line

INSTALL = install_line("cli")

ABOUT = """Inspect, copy and clean up checkpoints.

A URL is the URL of a pipeline: a plain path, file:///path, s3://bucket/prefix, and so on.
"""

EPILOG = (
    "Exit codes: 0 success, 1 a check found damage or a difference, 2 the command or a name in it "
    "is wrong, 3 the store failed, 130 interrupted."
)


class Command(NamedTuple):
    """A command.

    Args:
        name: Its name.
        home: The module and the function in it whose parameters are the command's arguments.
        summary: Its effect, in one line.
        needs: A module that it needs and that takes seconds to import, as all modules on torch do.
    """

    name: str
    home: str
    summary: str
    needs: str | None = None


_CALLS = "ckpipe.calls"

COMMANDS = (
    Command("ls", "ls_info:list_", "List checkpoints, the newest first."),
    Command("info", "ls_info:info", "Show what a checkpoint holds."),
    Command("verify", "reading:verify", "Read a whole checkpoint and check every byte.", _CALLS),
    Command("diff", "reading:diff", "Compare two checkpoints.", "ckpipe.cli.diff"),
    Command("cp", "reading:cp", "Copy checkpoints to another store, verified."),
    Command("import", "reading:import_", "Take over a checkpoint of another program.", _CALLS),
    Command("export", "reading:export", "Write a checkpoint in a form for other programs.", _CALLS),
    Command("rm", "housekeeping:rm", "Delete a checkpoint."),
    Command("pin", "housekeeping:pin_", "Protect a checkpoint from retention."),
    Command("unpin", "housekeeping:unpin_", "End that protection."),
    Command("prune", "housekeeping:prune_", "Delete checkpoints that no rule keeps."),
    Command("sweep", "housekeeping:sweep_", "Remove the remains of crashed runs."),
    Command("bench", "bench:bench", "Measure machine and store; propose settings.", "torch"),
    Command("report", "report:report", "Show a run at a glance; draw it.", "ckpipe.pages.gather"),
    Command("timeline", "timeline:timeline", "Show or draw the stages of a save over time."),
)


def version_text(as_json: bool) -> str:
    """Name the version of the program."""
    return dumps({"version": __version__}) if as_json else f"ckpipe {__version__}"


def plain_help() -> str:
    """Write the help of the whole program without the packages of the extra ``cli``."""
    width = max(len(command.name) for command in COMMANDS)
    lines = (f"  {command.name:{width}}  {command.summary}\n" for command in COMMANDS)
    return (
        "Usage: ckpipe [OPTIONS] COMMAND [ARGS]...\n\n"
        f"{ABOUT}\n"
        f"The commands need packages that are not installed: {INSTALL}\n\n"
        f"Commands:\n{''.join(lines)}"
    )


OUTPUT_FAILED = 3
"""The exit code when the output could not be written."""

NOBODY_READS = 141
"""The exit code when the reader of a pipe went away: the code of a shell for SIGPIPE."""


def open_closed_streams() -> None:
    """Occupy the descriptors of closed standard streams, so that no file of a store gets them.

    Writing to standard output then fails, and is not lost in silence.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            place = os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)
            if place != number:
                os.dup2(place, number)
                os.close(place)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  for good


def drop(stream: TextIO) -> None:
    """Keep the interpreter from flushing the stream, and complaining, when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
