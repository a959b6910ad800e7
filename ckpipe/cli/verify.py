"""The work of ``verify``: read checkpoints whole and check every byte."""

from __future__ import annotations

import time
from typing import Any

from rich.text import Text

from ckpipe.backend import Backend
from ckpipe.catalog.find import check_still_there, discover, read_index
from ckpipe.catalog.inspect import data_bytes
from ckpipe.catalog.leases import reading
from ckpipe.cli.running import FOUND, OK, chosen
from ckpipe.cli.screen import Meter, Screen, size, visible
from ckpipe.errors import (
    CheckpointIncomplete,
    CheckpointNotFound,
    CorruptCheckpoint,
    UsageError,
)
from ckpipe.loading.reader import verify
from ckpipe.memory.arena import Arena
from ckpipe.settings import Settings
from ckpipe.store.registry import Access, open_store
from ckpipe.types import CheckpointInfo, VerifyResult


async def verify_run(screen: Screen, url: str, step: str | None, *, every: bool) -> int:
    """Verify a checkpoint, or every complete one, the oldest first; return the exit code."""
    if every and step is not None:
        raise UsageError("--all verifies every checkpoint", hint="Leave the step out")
    results = []
    with screen.meter("verifying") as meter:
        async with open_store(url, screen.settings, Access.READ, meter.advance) as backend:
            if every:
                infos = [each for each in reversed(await discover(backend)) if each.complete]
            else:
                infos = [await chosen(backend, step)]
            for each in infos:
                try:
                    results.append(await _verified(backend, each, screen.settings, meter))
                except CheckpointIncomplete:
                    if not every:
                        raise
                    screen.left_out(each)
    if not results:
        raise CheckpointNotFound("There is no complete checkpoint here")
    screen.result({"url": url, "results": results}, *(Text(_sentence(r)) for r in results))
    return OK if all(each["ok"] for each in results) else FOUND


async def _verified(
    backend: Backend, info: CheckpointInfo, settings: Settings, meter: Meter
) -> dict[str, Any]:
    arena = Arena(settings.staging.block_bytes)
    began = time.perf_counter()
    data: dict[str, Any] = {"id": info.id, "step": info.step, "ok": True, "files": 0, "bytes": 0}

    async def work() -> VerifyResult:
        bundle = await read_index(backend, info.key)
        meter.expect(data_bytes(bundle))
        return await verify(backend, bundle, arena, lanes=settings.load.lanes)

    try:
        done = await reading(backend, info.key, work)
        data |= {"files": done.files, "bytes": done.bytes}
    except CorruptCheckpoint as error:
        # Should the lease not have been written, it is no wonder that parts are gone.
        await check_still_there(backend, info.key)
        data |= {"ok": False, "error": type(error).__name__, "message": str(error)}
    finally:
        arena.close()
    return data | {"seconds": round(time.perf_counter() - began, 3)}


def _sentence(result: dict[str, Any]) -> str:
    if result["ok"]:
        files = "1 file" if result["files"] == 1 else f"{result['files']} files"
        return (
            f"ok       step {result['step']}: {size(result['bytes'])} in {files} "
            f"read in {result['seconds']:.1f} s ({result['id']})"
        )
    return visible(f"damaged  step {result['step']}: {result['message']} ({result['id']})")
