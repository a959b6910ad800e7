"""Run the coroutine of a command, and map its errors to exit codes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Annotated

import anyio
import typer

from ckpipe.backend import Backend
from ckpipe.catalog.find import read_summary
from ckpipe.cli.screen import Screen
from ckpipe.errors import (
    CheckpointNotFound,
    CkpipeError,
    CorruptCheckpoint,
    UnsupportedVersion,
    UsageError,
    naming_refusals,
)
from ckpipe.threads import all_of
from ckpipe.types import CheckpointInfo, first_of

OK, FOUND, WRONG_USE, STORE_FAILED = 0, 1, 2, 3
"""The exit codes of commands that end by themselves."""

_MOST_NAMES, _LONGEST_NAME = 2000, 200
"""The names that are compared with a glob which matches none, and their length."""

_AT_ONCE = 16

NO_LINE = "-"
"""The name of the line of checkpoints that were saved by a version that knew no lines."""

Url = Annotated[
    str, typer.Argument(metavar="URL", help="The root of the checkpoints.", show_default=False)
]


def steps_of_root(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Complete a step or id; import what that needs only then."""
    from ckpipe.cli.completion import steps

    return steps(ctx, incomplete)


Step = Annotated[
    str,
    typer.Argument(
        metavar="STEP", help="A step, or the id of a checkpoint.", autocompletion=steps_of_root
    ),
]
MaybeStep = Annotated[
    str | None,
    typer.Argument(
        metavar="STEP",
        help="A step or an id; by default the newest complete checkpoint.",
        autocompletion=steps_of_root,
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


def no_match(patterns: Sequence[str], names: Iterable[str]) -> UsageError:
    """Return the error for globs of ``--match`` that select none of the names of a checkpoint."""
    asked = [each.strip("*?.") for each in patterns]
    most = max(each.count(".") for each in asked) + 1
    cut = (name[:_LONGEST_NAME].split(".") for name in names)
    known = [*dict.fromkeys(".".join(each[:depth]) for each in cut for depth in (1, most))]
    near = [name for each in asked for name in get_close_matches(each, known[:_MOST_NAMES], 3)]
    return UsageError(
        f"No name matches {' or '.join(each or repr(each) for each in patterns)}",
        hint=f"The nearest names are: {first_of([*dict.fromkeys(near)] or known, 5)}"
        if known
        else "The checkpoint has no names",
    )


def wanted(text: str | None) -> int | str | None:
    """Read the step or id that an argument may name; None for no argument, and for ``-``."""
    return None if text is None or text == "-" else which(text)


def which(text: str) -> int | str:
    """Read the step or id that an argument names."""
    return int(text) if text.isascii() and text.isdecimal() else text


def files_text(count: int) -> str:
    """Count files."""
    return "1 file" if count == 1 else f"{count} files"


async def stored_sizes(
    store: Backend, infos: Iterable[CheckpointInfo], below: str = ""
) -> list[int | None]:
    """Read the sizes of complete checkpoints from their summaries; None where there is none.

    Args:
        store: The store.
        infos: The checkpoints.
        below: The prefix of their root, if it lies below that of the store.
    """
    read = [partial(read_summary, store, each.key, below=below) for each in infos]
    return [None if each is None else each.bytes for each in await all_of(read, _AT_ONCE)]
