"""The command ``export``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from ckpipe.cli.running import Expanded, MaybeStep, Url, serve


class Form(StrEnum):
    """What an export is written as."""

    TORCH = "torch"
    HF = "hf"


def export_(
    ctx: typer.Context,
    url: Url,
    step: MaybeStep = None,
    *,
    form: Annotated[
        Form, typer.Option("--format", help="One file for torch.load, or sharded safetensors.")
    ],
    target: Annotated[
        str | None,
        typer.Option("--to", metavar="URL", help="Where the folder goes; else beside it."),
    ] = None,
    part: Annotated[
        str | None, typer.Option(help="The label of what to export; else export.part.")
    ] = None,
    max_shard: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The largest shard, such as 2GB.")
    ] = None,
    expanded: Expanded = False,
) -> None:
    """Writes a checkpoint, verified, in a form that other programs load.

    It is written to a folder <id>.torch or <id>.hf, in which nothing is ever replaced.
    """

    from ckpipe.cli.export_run import Order, export_run  # needs torch, for which no help waits

    options = {"part": part, "max_shard_bytes": max_shard}
    given = {name: value for name, value in options.items() if value is not None}
    order = Order(url, step, "torch" if form is Form.TORCH else "hf", target, given, expanded)
    serve(ctx, lambda screen: export_run(screen, order))
