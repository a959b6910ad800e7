"""The command ``export``."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Literal

import typer
from rich.text import Text

from ckpipe.backend import Backend
from ckpipe.checkpoints.discovery import read_index
from ckpipe.checkpoints.inspection import data_bytes
from ckpipe.checkpoints.leases import reading
from ckpipe.cli.progress import Meter
from ckpipe.cli.running import OK, MaybeStep, Url, chosen, serve
from ckpipe.cli.screen import Screen, size, visible
from ckpipe.exports.exporting import Exported, ExportSettings, export
from ckpipe.memory.arena import Arena
from ckpipe.settings import Settings
from ckpipe.stores.opening import Access, open_store
from ckpipe.stores.pace import Pace
from ckpipe.stores.retrying import logging_policy
from ckpipe.types import CheckpointInfo


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
) -> None:
    """Writes a checkpoint, verified, in a form that other programs load.

    It is written to a folder <id>.torch or <id>.hf, in which nothing is ever replaced.
    """

    async def work(screen: Screen) -> int:
        settings = _with(screen.settings, part, max_shard)
        how = _export_settings(settings, "torch" if form is Form.TORCH else "hf")
        access = Access.CHANGE if target is None else Access.READ
        began = time.perf_counter()
        with screen.meter("exporting") as meter:
            async with AsyncExitStack() as stores:
                origin = await stores.enter_async_context(
                    open_store(url, settings, access, meter.advance)
                )
                info = await chosen(origin, step)
                place = origin
                if target is not None:
                    place = await stores.enter_async_context(
                        open_store(target, settings, Access.CREATE)
                    )
                done = await _exported(origin, place, info, how, meter)
        data = {
            "url": url,
            "target": target or url,
            "id": info.id,
            "step": info.step,
            "format": form.value,
            "folder": done.folder.rstrip("/"),
            "files": done.files,
            "bytes": done.bytes,
            "seconds": round(time.perf_counter() - began, 3),
        }
        where = f"{(target or url).rstrip('/')}/{data['folder']}"
        files = "1 file" if len(done.files) == 1 else f"{len(done.files)} files"
        sentence = f"exported step {info.step}: {size(done.bytes)} in {files}"
        screen.result(data, Text(visible(f"{sentence} to {where}")))
        return OK

    serve(ctx, work)


def _with(settings: Settings, part: str | None, max_shard: str | None) -> Settings:
    given = {"part": part, "max_shard_bytes": max_shard}
    named = {name: value for name, value in given.items() if value is not None}
    return settings.override(export=named) if named else settings


def _export_settings(settings: Settings, form: Literal["torch", "hf"]) -> ExportSettings:
    """How to export: a store that throttles gets fewer writes at a time."""
    return ExportSettings(
        form,
        settings.export.part,
        settings.export.max_shard_bytes,
        settings.staging.block_bytes,
        settings.load.lanes,
        replace(logging_policy(settings.upload), pace=Pace()),
        pickling=settings.pickle == "allow",
    )


async def _exported(
    origin: Backend, place: Backend, info: CheckpointInfo, settings: ExportSettings, meter: Meter
) -> Exported:
    arena = Arena(settings.block_bytes)

    async def work() -> Exported:
        bundle = await read_index(origin, info.key)
        meter.expect(data_bytes(bundle))
        return await export(origin, bundle, arena, settings, place)

    try:
        return await reading(origin, info.key, work)
    finally:
        arena.close()
