"""The command ``cp``."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich.text import Text

from ckpipe.backend import Backend
from ckpipe.catalog.copy import CopyReport, CopySettings, copy_checkpoint
from ckpipe.catalog.find import check_still_there, discover, read_index
from ckpipe.catalog.inspect import data_bytes
from ckpipe.catalog.leases import reading
from ckpipe.cli.running import OK, MaybeStep, chosen, serve
from ckpipe.cli.screen import Meter, Screen, size
from ckpipe.errors import CheckpointIncomplete, CorruptCheckpoint, UsageError
from ckpipe.settings import Settings
from ckpipe.store.registry import Access, open_store
from ckpipe.store.retry import AimdLimiter, logging_policy
from ckpipe.types import CheckpointInfo

Source = Annotated[str, typer.Argument(metavar="SRC", help="Where the checkpoint lies.")]
Target = Annotated[str, typer.Argument(metavar="DST", help="Where it goes; made if missing.")]


def cp(
    ctx: typer.Context,
    source: Source,
    target: Target,
    step: MaybeStep = None,
    every: Annotated[
        bool, typer.Option("--all", help="Copy all complete checkpoints, the oldest first.")
    ] = False,
) -> None:
    """Copy a checkpoint to another store, verified; what is there and whole is not copied again.

    It is complete on the target or absent, wherever copying breaks off.
    """

    async def work(screen: Screen) -> int:
        if every and step is not None:
            raise UsageError("--all copies every checkpoint", hint="Leave the step out")
        settings = screen.settings
        done = []
        with screen.meter("copying") as meter:
            async with open_store(source, settings, Access.READ) as origin:
                if every:
                    infos = [each for each in reversed(await discover(origin)) if each.complete]
                else:
                    infos = [await chosen(origin, step)]
                async with open_store(target, settings, Access.CREATE) as place:
                    for each in infos:
                        try:
                            done.append(await _copied(origin, place, each, settings, meter))
                        except CheckpointIncomplete:
                            if not every:
                                raise
                            screen.left_out(each)
        screen.result(
            {"source": source, "target": target, "copied": done},
            *(Text(_sentence(each)) for each in done),
            *([] if infos else [Text("no complete checkpoints here")]),
        )
        return OK

    serve(ctx, work)


async def _copied(
    origin: Backend, place: Backend, info: CheckpointInfo, settings: Settings, meter: Meter
) -> dict[str, Any]:
    began = time.perf_counter()
    chosen = CopySettings(
        replace(logging_policy(settings.upload), limiter=AimdLimiter()),
        settings.upload.lanes,
        settings.staging.block_bytes,
        meter.advance,
    )

    async def work() -> CopyReport:
        meter.expect(data_bytes(await read_index(origin, info.key)))
        return await copy_checkpoint(origin, place, info.key, chosen)

    try:
        report = await reading(origin, info.key, work)
    except CorruptCheckpoint:
        # Should the lease not have been written, it is no wonder that parts are gone.
        await check_still_there(origin, info.key)
        raise
    seconds = round(time.perf_counter() - began, 3)
    return {**asdict(report), "step": info.step, "seconds": seconds}


def _sentence(done: dict[str, Any]) -> str:
    kept = done["files"] - done["copied_files"]
    there = f", {kept} of {done['files']} files were there" if kept else ""
    return (
        f"copied step {done['step']}: {size(done['copied_bytes'])} in {done['seconds']:.1f} s"
        f"{there} ({done['id']})"
    )
