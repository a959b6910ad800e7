"""Run the coroutine of a command, and map its errors to exit codes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated

import anyio
import typer

from ckpipe.cli.screen import Screen
from ckpipe.errors import (
    CheckpointNotFound,
    CkpipeError,
    CorruptCheckpoint,
    UnsupportedVersion,
    UsageError,
    naming_refusals,
)

OK, FOUND, WRONG_USE, STORE_FAILED = 0, 1, 2, 3
"""The exit codes of commands that end by themselves."""

NO_LINE = "-"
"""The name of the line of checkpoints that were saved by a version that knew no lines."""

Url = Annotated[
    str, typer.Argument(metavar="URL", help="The root of the checkpoints.", show_default=False)
]
Step = Annotated[str, typer.Argument(metavar="STEP", help="A step, or the id of a checkpoint.")]
MaybeStep = Annotated[
    str | None,
    typer.Argument(
        metavar="STEP", help="A step or an id; by default the newest complete checkpoint."
    ),
]
Ids = Annotated[bool, typer.Option("--ids", help="Whole ids, also on a terminal.")]
Expanded = Annotated[
    bool,
    typer.Option(
        "--expanded", help="Also if expanded tensors take far more bytes than are stored."
    ),
]


def serve(ctx: typer.Context, work: Callable[[Screen], Awaitable[int]]) -> None:
    """Run a command's coroutine and exit with the code that it returns.

    Args:
        ctx: The context of the command's call.
        work: The coroutine function; may raise any error of ckpipe.
    """
    screen = ctx.obj
    assert isinstance(screen, Screen)
    try:
        with screen.spinner:
            _ = screen.settings  # read here, since it would block the loop
            with naming_refusals():
                code = anyio.run(work, screen)
    except CkpipeError as error:
        screen.failure(type(error).__name__, str(error))
        if isinstance(error, CorruptCheckpoint):
            code = FOUND
        elif isinstance(error, UsageError | CheckpointNotFound | UnsupportedVersion):
            code = WRONG_USE
        else:
            code = STORE_FAILED
    raise typer.Exit(code)


def wanted(text: str | None) -> int | str | None:
    """Read the step or id that an argument may name; None for no argument, and for ``-``."""
    return None if text is None or text == "-" else which(text)


def which(text: str) -> int | str:
    """Read the step or id that an argument names."""
    return int(text) if text.isascii() and text.isdecimal() else text
