"""The command ``diff``."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpipe.cli.running import Expanded, Url, serve


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
    """Compares two checkpoints: structure, inline values, and norms of differences of tensors.

    Exits with 1 if they differ.
    """

    from ckpipe.cli.differences import Sides, differences  # needs torch, for which no help waits

    sides = Sides((url, other or url), (first, second), match, expanded)
    serve(ctx, lambda screen: differences(screen, sides, structure=structure))
