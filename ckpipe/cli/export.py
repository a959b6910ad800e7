"""The work of ``export``: write a checkpoint in a form that other programs load."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Literal

from rich.text import Text

from ckpipe.backend import Backend, without_secrets
from ckpipe.catalog.find import read_index
from ckpipe.catalog.inspect import data_bytes
from ckpipe.catalog.leases import reading
from ckpipe.cli.running import OK, chosen
from ckpipe.cli.screen import Meter, Screen, size, visible
from ckpipe.export import Exported, ExportSettings, export
from ckpipe.memory.arena import Arena
from ckpipe.settings import Settings
from ckpipe.store.registry import Access, open_store
from ckpipe.store.retry import AimdLimiter, logging_policy
from ckpipe.types import CheckpointInfo


@dataclass(frozen=True, slots=True)
class Order:
    """The request for an export.

    Args:
        url: Where the checkpoint lies.
        step: Its step or id; None for the newest.
        form: What it is written as.
        target: Where the folder goes; None for beside it.
        given: Settings of the group ``export`` that the command names.
        expanded: Whether expanded tensors may take far more than the checkpoint stores.
    """

    url: str
    step: str | None
    form: Literal["torch", "hf"]
    target: str | None
    given: Mapping[str, str]
    expanded: bool

    @property
    def place(self) -> str:
        """The root that the folder lies below."""
        return self.target or self.url


async def export_run(screen: Screen, order: Order) -> int:
    """Exports a checkpoint; returns the exit code."""
    settings = screen.settings
    if order.given:
        settings = settings.override(export=dict(order.given))
    access = Access.CHANGE if order.target is None else Access.READ
    began = time.perf_counter()
    with screen.meter("exporting") as meter:
        async with AsyncExitStack() as stores:
            origin = await stores.enter_async_context(
                open_store(order.url, settings, access, meter.advance)
            )
            info = await chosen(origin, order.step)
            place = origin
            if order.target is not None:
                place = await stores.enter_async_context(
                    open_store(order.target, settings, Access.CREATE)
                )
            how = _export_settings(settings, order)
            done = await _exported(origin, place, info, how, meter)
    data = {
        "url": order.url,
        "target": order.place,
        "id": info.id,
        "step": info.step,
        "format": order.form,
        "folder": done.folder.rstrip("/"),
        "files": done.files,
        "bytes": done.bytes,
        "seconds": round(time.perf_counter() - began, 3),
    }
    files = "1 file" if len(done.files) == 1 else f"{len(done.files)} files"
    where = without_secrets(f"{order.place.rstrip('/')}/{data['folder']}")
    sentence = f"exported step {info.step}: {size(done.bytes)} in {files} to {where}"
    screen.result(data, Text(visible(sentence)))
    return OK


def _export_settings(settings: Settings, order: Order) -> ExportSettings:
    """Derive the settings of the export: a store that throttles gets fewer writes at a time."""
    return ExportSettings(
        order.form,
        settings.export.part,
        settings.export.max_shard_bytes,
        settings.staging.block_bytes,
        settings.load.lanes,
        replace(logging_policy(settings.upload), limiter=AimdLimiter()),
        pickling=settings.pickle == "allow",
        expanded=order.expanded,
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
