"""The command ``verify``."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpipe.cli.running import MaybeStep, Url, serve
from ckpipe.cli.screen import Screen
from ckpipe.errors import UsageError


def verify_(
    ctx: typer.Context,
    url: Url,
    step: MaybeStep = None,
    every: Annotated[
        bool, typer.Option("--all", help="Verify all complete checkpoints, the oldest first.")
    ] = False,
) -> None:
    """Reads a checkpoint whole and checks every byte of it. Exits with 1 if it is damaged."""

    from ckpipe.cli import verification  # needs torch, for which no help waits

    async def work(screen: Screen) -> int:
        if not every:
            return await verification.verify_one(screen, url, step)
        if step is not None:
            raise UsageError("--all verifies every checkpoint", hint="Leave the step out")
        return await verification.verify_all(screen, url)

    serve(ctx, work)
