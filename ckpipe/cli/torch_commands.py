"""The arguments of ``verify``, ``diff`` and ``export``, whose work needs torch.

The work is in modules of its own, which are imported when the command runs: no help waits for
torch.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import typer

from ckpipe.cli.running import Expanded, MaybeStep, Url, serve
from ckpipe.cli.screen import Screen


def verify_(
    ctx: typer.Context,
    url: Url,
    step: MaybeStep = None,
    every: Annotated[
        bool, typer.Option("--all", help="Verify all complete checkpoints, the oldest first.")
    ] = False,
) -> None:
    """Read a checkpoint whole and check every byte of it. Exits with 1 if it is damaged."""

    from ckpipe.cli.verify import verify_run  # needs torch, for which no help waits

    serve(ctx, lambda screen: verify_run(screen, url, step, every=every))


def diff(
    ctx: typer.Context,
    url: Url,
    first: Annotated[str, typer.Argument(metavar="A", help="A step or an id.")],
    second: Annotated[str, typer.Argument(metavar="B", help="A step or an id.")],
    other: Annotated[
        str | None, typer.Option("--in", metavar="URL", help="Where B lies, if elsewhere.")
    ] = None,
    match: Annotated[
        list[str] | None, typer.Option(help="Only names that this glob matches; repeatable.")
    ] = None,
    structure: Annotated[
        bool, typer.Option("--structure", help="Compare no values of tensors, so read no data.")
    ] = False,
    expanded: Expanded = False,
) -> None:
    """Compare two checkpoints: structure, inline values, and norms of differences of tensors.

    Exits with 1 if they differ.
    """

    from ckpipe.cli.diff import differences  # needs torch, for which no help waits

    async def work(screen: Screen) -> int:
        urls, steps = (url, other or url), (first, second)
        return await differences(screen, urls, steps, match, structure=structure, expanded=expanded)

    serve(ctx, work)


class Form(StrEnum):
    """The form of an export."""

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
    """Write a checkpoint, verified, in a form that other programs load.

    It is written to a folder <id>.torch or <id>.hf, in which nothing is ever replaced.
    """

    from ckpipe.cli.export import export_run  # needs torch, for which no help waits

    options = {"part": part, "max_shard_bytes": max_shard}
    given = {name: value for name, value in options.items() if value is not None}

    async def work(screen: Screen) -> int:
        kind: Literal["torch", "hf"] = "torch" if form is Form.TORCH else "hf"
        return await export_run(screen, url, step, kind, target, given, expanded=expanded)

    serve(ctx, work)
