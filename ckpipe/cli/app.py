"""Join the commands, and handle their common options and errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from ckpipe.cli.commands import (
    ABOUT,
    COMMANDS,
    EPILOG,
    NOBODY_READS,
    OUTPUT_FAILED,
    Command,
    drop,
    version_text,
)
from ckpipe.cli.screen import Screen

_ASKED = "COMP_WORDS", "_TYPER_COMPLETE_ARGS"
"""The variables in which bash, and other shells, give the line that they complete."""

_NO_BRACES = str.maketrans("", "", "{}")
"""Typer writes ``{URL}`` for an argument that must be given."""


def _show_version(ctx: typer.Context, value: bool) -> None:
    if value:
        typer.echo(version_text(bool(ctx.params.get("json"))))
        raise typer.Exit


def _begin(
    ctx: typer.Context,
    json: Annotated[
        bool,
        # Eager, so that --version knows of it.
        typer.Option("--json", is_eager=True, help="Print one JSON object; may stand anywhere."),
    ] = False,
    settings: Annotated[
        Path | None,
        typer.Option(help="A TOML file of settings: options of backends, lanes, retention."),
    ] = None,
    version: Annotated[
        bool | None,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = None,
) -> None:
    ctx.obj = Screen(json, settings)


def make_app(words: Sequence[str]) -> typer.Typer:
    """Make the program; import only the commands that the words name.

    The others have only a name and a summary. Some commands need torch, which takes longer to
    import than most commands run; help and lists must not wait for it.

    Args:
        words: The arguments after ``ckpipe``.
    """
    if "_CKPIPE_COMPLETE" in os.environ:  # a shell asks, in its own way, and no command runs
        asked = (os.environ.get(name, "").split() for name in _ASKED)
        words = [*chain(*asked), "--help"]
    app = typer.Typer(
        name="ckpipe",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        epilog=EPILOG,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(help=ABOUT)(_begin)
    for command in COMMANDS:
        function = _function_of(command, words) if command.name in words else _not_called
        app.command(command.name, short_help=command.summary)(function)
    return app


def _function_of(command: Command, words: Sequence[str]) -> Callable[..., None]:
    module, _, name = command.home.partition(":")
    if command.needs is not None and not {"-h", "--help"} & set(words):
        # Here, and not at its use, since an interrupt does no harm here.
        with Screen(False).spinner:
            import_module(command.needs)
    function: Callable[..., None] = getattr(import_module(f"ckpipe.cli.{module}"), name)
    return function


def _not_called() -> None:
    """Stand for a command that the words do not name."""


def run(arguments: Sequence[str], app: typer.Typer | None = None) -> int:
    """Run the command.

    Args:
        arguments: The arguments after ``ckpipe``.
        app: The program of :func:`make_app` for them, if that was called before.

    Returns:
        The exit code.
    """
    options = _json_first(arguments)
    app = app or make_app(options)
    try:
        code = _call(app, options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has closed the pipe
        drop(sys.stdout)
        return NOBODY_READS
    except OSError as error:  # backends raise errors of ckpipe, so this is about the output
        drop(sys.stdout)
        Screen(False).note(f"error: the output cannot be written: {error.strerror or error}")
        return OUTPUT_FAILED
    return code


def _call(app: typer.Typer, options: Sequence[str]) -> int:
    """Run a command; with ``--json``, report wrong use as JSON too."""
    try:
        code = app(options, prog_name="ckpipe", standalone_mode=False)
    except SystemExit as exit:
        if isinstance(exit.__context__, BrokenPipeError):  # typer exits as if there were damage
            raise exit.__context__ from None
        raise
    except Exception as caught:
        error: Any = caught
        # Typer bundles click under a private name; only click's errors have a message.
        explain = getattr(error, "format_message", None)
        if explain is None:
            raise
        if getattr(error, "option_name", None) == "--settings":
            place = "Put it before the command: ckpipe --settings FILE COMMAND"
            error.message = f"{error.message.rstrip('.')}. {place}"
        # Typer checks choices by pydantic, which puts this before its message.
        error.message = error.message.removeprefix("Value error, ")
        screen = Screen(options[:1] == ["--json"])
        if not options:  # the help of the whole program
            screen.note(explain())
            return 2
        screen.failure("UsageError", " ".join(explain().split()))
        if (ctx := getattr(error, "ctx", None)) is not None and not screen.as_json:
            screen.note(_usage(ctx))
        return 2
    return code if isinstance(code, int) else 0


def _usage(ctx: typer.Context) -> str:
    usage = " ".join(ctx.get_usage().translate(_NO_BRACES).split())
    return f"{usage}; {ctx.command_path} --help tells more"


def _json_first(arguments: Sequence[str]) -> list[str]:
    """Move ``--json`` to the front, where typer accepts it, unless it comes after ``--``."""
    options = list(arguments)
    end = options.index("--") if "--" in options else len(options)
    if "--json" not in options[:end]:
        return options
    kept = [each for each in options[:end] if each != "--json"]
    return ["--json", *kept, *options[end:]]
