"""Commands that only look: ``ls``, ``info`` and ``verify``."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.text import Text

from ckpipe.arena import Arena
from ckpipe.backend import Backend
from ckpipe.cli.name_tree import shown_tree
from ckpipe.cli.progress import Meter, of_things
from ckpipe.cli.running import (
    FOUND,
    OK,
    Command,
    MaybeStep,
    Url,
    chosen,
    serve,
)
from ckpipe.cli.screen import Screen, size, table, visible
from ckpipe.discovery import check_not_deleted, discover, read_index
from ckpipe.errors import CheckpointIncomplete, CorruptCheckpoint, UsageError
from ckpipe.inspection import data_bytes, describe
from ckpipe.keys import label_filter
from ckpipe.leases import reading
from ckpipe.opening import Access, open_store
from ckpipe.restore import verify
from ckpipe.settings import Settings
from ckpipe.summaries import Summary, summarise
from ckpipe.types import CheckpointInfo, VerifyResult


def list_(
    ctx: typer.Context,
    url: Url,
    brief: Annotated[
        bool, typer.Option("--brief", help="Names and times only: no index is read.")
    ] = False,
) -> None:
    """Lists checkpoints, the newest first: step, time, size, ranks, metrics, and whether whole."""

    async def work(screen: Screen) -> int:
        async with open_store(url, screen.settings, Access.READ) as backend:
            infos = await discover(backend)
            found = [Summary(each) for each in infos]
            if not brief:
                with screen.meter("reading indexes", len(infos), of_things) as meter:
                    found = await summarise(backend, infos, lambda: meter.advance(1))
        rows = [_row(each) for each in found]
        headings = ("step", "saved at", "size", "ranks", "state", "metrics", "id")
        screen.result(
            {"url": url, "checkpoints": [_summary_data(each) for each in found]},
            table(headings, rows, "step", "size", "ranks") if rows else Text("no checkpoints here"),
        )
        return OK

    serve(ctx, work)


def _row(each: Summary) -> tuple[object, ...]:
    info = each.info
    state = "complete" if info.complete else "incomplete: " + info.reason.partition(":")[0]
    notes = [state, *(["pinned"] if info.pinned else []), *(["final"] if each.final else [])]
    if each.problem:
        notes = [f"damaged: {each.problem}"]
    metrics = " ".join(f"{name}={value:.6g}" for name, value in each.metrics.items())
    saved = "" if info.saved_at is None else f"{info.saved_at:%Y-%m-%d %H:%M:%S}Z"
    known = "" if each.bytes is None else size(each.bytes)
    return (info.step, saved, known, each.world_size or "", ", ".join(notes), metrics, info.id)


def _summary_data(each: Summary) -> dict[str, Any]:
    return {**asdict(each.info), **{k: v for k, v in asdict(each).items() if k != "info"}}


def info(
    ctx: typer.Context,
    url: Url,
    step: MaybeStep = None,
    match: Annotated[
        list[str] | None,
        typer.Option(help="Only names that this glob matches, such as 'model.*'; repeatable."),
    ] = None,
    depth: Annotated[
        int | None, typer.Option(min=1, help="How many levels of names to show.")
    ] = None,
) -> None:
    """Shows what a checkpoint holds: names, shapes, dtypes, sizes, sharing, ranks and values."""

    async def work(screen: Screen) -> int:
        async with open_store(url, screen.settings, Access.READ) as backend:
            found = await chosen(backend, step)
            bundle = await read_index(backend, found.key)
        about = describe(bundle, label_filter(match))
        data = {**asdict(about), "pinned": found.pinned, "saved_at": found.saved_at}
        screen.result(data, *shown_tree(about, found, depth))
        if match and not (about.tensors or about.values):
            screen.note(f"no name matches {' or '.join(match)}")
        return OK

    serve(ctx, work)


def verify_(
    ctx: typer.Context,
    url: Url,
    step: MaybeStep = None,
    every: Annotated[
        bool, typer.Option("--all", help="Verify all complete checkpoints, the oldest first.")
    ] = False,
) -> None:
    """Reads a checkpoint whole and checks every byte of it. Exits with 1 if it is damaged."""

    async def work(screen: Screen) -> int:
        if every and step is not None:
            raise UsageError("--all verifies every checkpoint", hint="Leave the step out")
        settings = screen.settings
        with screen.meter("verifying") as meter:
            async with open_store(url, settings, Access.READ, meter.advance) as backend:
                if every:
                    infos = [each for each in await discover(backend) if each.complete]
                else:
                    infos = [await chosen(backend, step)]
                results = []
                for each in reversed(infos):
                    try:
                        results.append(await _verified(backend, each, settings, meter))
                    except CheckpointIncomplete:
                        if not every:
                            raise
        bad = [each for each in results if not each["ok"]]
        screen.result({"url": url, "results": results}, *(Text(_sentence(r)) for r in results))
        return FOUND if bad else OK

    serve(ctx, work)


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
        await check_not_deleted(backend, info.key)
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


COMMANDS: tuple[Command, ...] = (
    Command("ls", list_, "List checkpoints, the newest first."),
    Command("info", info, "Show what a checkpoint holds."),
    Command("verify", verify_, "Read a checkpoint whole, check every byte."),
)
