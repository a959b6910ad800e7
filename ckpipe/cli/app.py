"""The commands together, and what all of them have in common."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ckpipe.cli import changing, comparing, exporting, looking, measuring, timeline, transferring
from ckpipe.cli.screen import Screen
from ckpipe.version import __version__

EPILOG = (
    "Exit codes: 0 all is well, 1 a check found damage or a difference, 2 the command or a name "
    "in it is wrong, 3 the store failed, 130 interrupted."
)

app = typer.Typer(
    name="ckpipe",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"ckpipe {__version__}")
        raise typer.Exit


@app.callback()
def _begin(
    ctx: typer.Context,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; may stand anywhere.")
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
    """Looks at checkpoints and keeps house.

    A URL is what a pipeline is given: a plain path, file:///path, s3://bucket/prefix, and so on.
    """
    ctx.obj = Screen(json, settings)


for _group in (looking, comparing, transferring, exporting, changing, measuring, timeline):
    for _command in _group.COMMANDS:
        app.command(_command.name, short_help=_command.summary)(_command.function)


def run(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: What stands behind ``ckpipe``.

    Returns:
        The exit code.
    """
    options = _json_first(arguments)
    try:
        if options[:1] == ["--json"]:
            return _run_for_programs(options)
        app(options, prog_name="ckpipe")
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else 2
    return 0


def _run_for_programs(options: Sequence[str]) -> int:
    """Runs a command with ``--json``: what is wrong with the command itself is JSON too."""
    try:
        code = app(options, prog_name="ckpipe", standalone_mode=False)
    except Exception as error:
        # Typer brings a copy of click, whose name it does not promise; only these have a message.
        explain = getattr(error, "format_message", None)
        if explain is None:
            raise
        Screen(True).failure("UsageError", explain())
        return 2
    return code if isinstance(code, int) else 0


def _json_first(arguments: Sequence[str]) -> list[str]:
    """Moves ``--json`` to the front, where it is understood, unless it stands behind ``--``."""
    options = list(arguments)
    end = options.index("--") if "--" in options else len(options)
    if "--json" not in options[:end]:
        return options
    kept = [each for each in options[:end] if each != "--json"]
    return ["--json", *kept, *options[end:]]
