"""The work of ``export``: write a checkpoint in a form that other programs load."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Literal

from rich.text import Text

from ckpipe.backend import without_secrets
from ckpipe.catalog.find import read_index
from ckpipe.catalog.inspect import data_bytes
from ckpipe.catalog.leases import reading
from ckpipe.cli.running import OK, chosen
from ckpipe.cli.screen import Screen, size, visible
from ckpipe.export import Exported, ExportSettings, export
from ckpipe.memory.arena import Arena
from ckpipe.store.registry import Access, open_store
from ckpipe.store.retry import AimdLimiter, logging_policy


async def export_run(
    screen: Screen,
    url: str,
    step: str | None,
    form: Literal["torch", "hf"],
    target: str | None,
    given: Mapping[str, str],
    *,
    expanded: bool,
) -> int:
    """Export a checkpoint and return the exit code.

    Args:
        screen: Where the result goes.
        url: Where the checkpoint lies.
        step: Its step or id; None for the newest.
        form: What it is written as.
        target: The root of the folder; None for beside it.
        given: Settings of the group ``export`` that the command names.
        expanded: Whether expanded tensors may take far more than the checkpoint stores.
    """
    settings = screen.settings
    if given:
        settings = settings.override(export=dict(given))
    how = ExportSettings(
        form,
        settings.export.part,
        settings.export.max_shard_bytes,
        settings.staging.block_bytes,
        settings.load.lanes,
        # A store that throttles gets fewer writes at a time.
        replace(logging_policy(settings.upload), limiter=AimdLimiter()),
        pickling=settings.pickle == "allow",
        expanded=expanded,
    )
    began = time.perf_counter()
    arena = Arena(how.block_bytes)
    try:
        with screen.meter("exporting") as meter:
            async with AsyncExitStack() as stores:
                access = Access.CHANGE if target is None else Access.READ
                origin = place = await stores.enter_async_context(
                    open_store(url, settings, access, meter.advance)
                )
                info = await chosen(origin, step)
                if target is not None:
                    place = await stores.enter_async_context(
                        open_store(target, settings, Access.CREATE)
                    )

                async def work() -> Exported:
                    bundle = await read_index(origin, info.key)
                    meter.expect(data_bytes(bundle))
                    return await export(origin, bundle, arena, how, place)

                done = await reading(origin, info.key, work)
    finally:
        arena.close()
    data = {
        "url": url,
        "target": target or url,
        "id": info.id,
        "step": info.step,
        "format": form,
        "folder": done.folder.rstrip("/"),
        "files": done.files,
        "bytes": done.bytes,
        "seconds": round(time.perf_counter() - began, 3),
    }
    files = "1 file" if len(done.files) == 1 else f"{len(done.files)} files"
    where = without_secrets(f"{(target or url).rstrip('/')}/{data['folder']}")
    sentence = f"exported step {info.step}: {size(done.bytes)} in {files} to {where}"
    screen.result(data, Text(visible(sentence)))
    return OK
