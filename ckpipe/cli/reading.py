"""The commands that read the data of checkpoints: ``verify``, ``diff``, ``cp`` and ``export``.

Modules that need torch are imported when a command runs, so that no help waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import asdict, replace
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.text import Text

from ckpipe.backend import Backend, without_secrets
from ckpipe.catalog.catalog import Catalog
from ckpipe.catalog.copy import CopySettings, copy_checkpoint
from ckpipe.catalog.find import discover
from ckpipe.catalog.inspect import data_bytes
from ckpipe.cli.running import FOUND, OK, Expanded, MaybeStep, Url, chosen, serve
from ckpipe.cli.screen import Screen, visible
from ckpipe.errors import (
    CheckpointIncomplete,
    CheckpointNotFound,
    CorruptCheckpoint,
    UsageError,
)
from ckpipe.settings import Settings
from ckpipe.store.registry import Access, open_store
from ckpipe.store.retry import AimdLimiter, RetryPolicy, logging_policy
from ckpipe.types import CheckpointInfo, size_text


async def _named(backend: Backend, step: str | None, every: bool) -> list[CheckpointInfo]:
    """Find the named checkpoint; with ``--all`` every complete one, the oldest first."""
    if every and step is not None:
        raise UsageError("--all takes every checkpoint", hint="Leave the step out")
    if not every:
        return [await chosen(backend, step)]
    return [each for each in reversed(await discover(backend)) if each.complete]


async def _read_each(
    screen: Screen,
    infos: Sequence[CheckpointInfo],
    every: bool,
    read: Callable[[CheckpointInfo], Awaitable[dict[str, Any]]],
) -> list[dict[str, Any]]:
    """Read checkpoints; if there are several, leave out deleted ones with a note."""
    done = []
    for info in infos:
        try:
            done.append(await read(info))
        except CheckpointIncomplete:
            if not every:
                raise
            screen.note(f"{info.id} was deleted meanwhile and is left out")
    return done


def _seconds_since(began: float) -> float:
    return round(time.perf_counter() - began, 3)


def _files_text(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def verify(
    ctx: typer.Context,
    url: Url,
    step: MaybeStep = None,
    every: Annotated[
        bool, typer.Option("--all", help="Verify all complete checkpoints, the oldest first.")
    ] = False,
) -> None:
    """Read a whole checkpoint and check every byte. Exits with 1 if it is damaged."""
    from ckpipe.loading.reader import verify  # needs torch
    from ckpipe.memory.arena import Arena

    async def work(screen: Screen) -> int:
        settings = screen.settings
        buffers = closing(Arena(settings.staging.block_bytes))
        with buffers as arena, screen.meter("verifying") as meter:
            async with open_store(url, settings, Access.READ, meter.advance) as backend:

                async def check(info: CheckpointInfo) -> dict[str, Any]:
                    began = time.perf_counter()
                    data: dict[str, Any] = {"id": info.id, "step": info.step}
                    try:
                        async with Catalog(backend).checking(info.key) as bundle:
                            meter.expect(data_bytes(bundle))
                            done = await verify(backend, bundle, arena, lanes=settings.load.lanes)
                        data |= {"ok": True, "files": done.files, "bytes": done.bytes}
                    except CorruptCheckpoint as error:
                        data |= {"ok": False, "files": 0, "bytes": 0}
                        data |= {"error": type(error).__name__, "message": str(error)}
                    return data | {"seconds": _seconds_since(began)}

                infos = await _named(backend, step, every)
                results = await _read_each(screen, infos, every, check)
        if not results:
            raise CheckpointNotFound("There is no complete checkpoint here")
        screen.result({"url": url, "results": results}, *(Text(_verdict(r)) for r in results))
        return OK if all(each["ok"] for each in results) else FOUND

    serve(ctx, work)


def _verdict(result: dict[str, Any]) -> str:
    if result["ok"]:
        return (
            f"ok       step {result['step']}: {size_text(result['bytes'])} in "
            f"{_files_text(result['files'])} read in {result['seconds']:.1f} s ({result['id']})"
        )
    return visible(f"damaged  step {result['step']}: {result['message']} ({result['id']})")


def diff(
    ctx: typer.Context,
    url: Url,
    first: Annotated[str, typer.Argument(metavar="A", help="A step or an id.")],
    second: Annotated[str, typer.Argument(metavar="B", help="A step or an id.")],
    other: Annotated[
        str | None, typer.Option("--in", metavar="URL", help="The URL of B, if it is another one.")
    ] = None,
    match: Annotated[
        list[str] | None, typer.Option(help="Only names that this glob matches; repeatable.")
    ] = None,
    structure: Annotated[
        bool, typer.Option("--structure", help="Compare no values of tensors; read no data.")
    ] = False,
    expanded: Expanded = False,
) -> None:
    """Compare two checkpoints: structure, inline values, and norms of differences of tensors.

    Exits with 1 if they differ.
    """

    from ckpipe.cli.diff import differences  # needs torch

    async def work(screen: Screen) -> int:
        urls, steps = (url, other or url), (first, second)
        return await differences(screen, urls, steps, match, structure=structure, expanded=expanded)

    serve(ctx, work)


Source = Annotated[str, typer.Argument(metavar="SRC", help="The URL of the checkpoint.")]
Target = Annotated[str, typer.Argument(metavar="DST", help="The target; created if missing.")]


def cp(
    ctx: typer.Context,
    source: Source,
    target: Target,
    step: MaybeStep = None,
    every: Annotated[
        bool, typer.Option("--all", help="Copy all complete checkpoints, the oldest first.")
    ] = False,
) -> None:
    """Copy a checkpoint to another store, verified; skip files that are there and whole.

    It is complete on the target or absent, even if copying is interrupted.
    """

    async def work(screen: Screen) -> int:
        settings = screen.settings
        with screen.meter("copying") as meter:
            how = CopySettings(
                _policy(settings),
                settings.upload.lanes,
                settings.staging.block_bytes,
                meter.advance,
            )
            async with open_store(source, settings, Access.READ) as origin:
                infos = await _named(origin, step, every)
                async with open_store(target, settings, Access.CREATE) as place:

                    async def copy(info: CheckpointInfo) -> dict[str, Any]:
                        began = time.perf_counter()
                        async with Catalog(origin).checking(info.key) as bundle:
                            meter.expect(data_bytes(bundle))
                            report = asdict(await copy_checkpoint(origin, place, info.key, how))
                        return report | {"step": info.step, "seconds": _seconds_since(began)}

                    done = await _read_each(screen, infos, every, copy)
        screen.result(
            {"source": source, "target": target, "copied": done},
            *(Text(_copy_text(each)) for each in done),
            *([] if infos else [Text("no complete checkpoints here")]),
        )
        return OK

    serve(ctx, work)


def _copy_text(done: dict[str, Any]) -> str:
    kept = done["files"] - done["copied_files"]
    there = f", {kept} of {done['files']} files were there" if kept else ""
    return (
        f"copied step {done['step']}: {size_text(done['copied_bytes'])} in {done['seconds']:.1f} s"
        f"{there} ({done['id']})"
    )


def _policy(settings: Settings) -> RetryPolicy:
    """Make the policy of retries; a store that throttles gets fewer writes at a time."""
    return replace(logging_policy(settings.upload), limiter=AimdLimiter())


class Form(StrEnum):
    """The form of an export."""

    TORCH = "torch"
    HF = "hf"


def export(
    ctx: typer.Context,
    url: Url,
    step: MaybeStep = None,
    *,
    form: Annotated[
        Form, typer.Option("--format", help="One file for torch.load, or sharded safetensors.")
    ],
    target: Annotated[
        str | None,
        typer.Option("--to", metavar="URL", help="The target; else beside the checkpoint."),
    ] = None,
    part: Annotated[
        str | None, typer.Option(help="The label of the part to export; else export.part.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Dequantise wrapper tensors to float32, bfloat16 or float16."),
    ] = None,
    max_shard: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The largest shard, such as 2GB.")
    ] = None,
    expanded: Expanded = False,
) -> None:
    """Write a checkpoint, verified, in a form that other programs load.

    The folder is <id>.torch or <id>.hf. Nothing in it is ever replaced.
    """

    from ckpipe.export import export  # needs torch
    from ckpipe.memory.arena import Arena

    given = {"part": part, "dtype": dtype, "max_shard_bytes": max_shard}
    given = {name: value for name, value in given.items() if value is not None}

    async def work(screen: Screen) -> int:
        settings = screen.settings.override(export=given) if given else screen.settings
        began = time.perf_counter()
        buffers = closing(Arena(settings.staging.block_bytes))
        with buffers as arena, screen.meter("exporting") as meter:
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
                async with Catalog(origin).reading(info.key) as bundle:
                    meter.expect(data_bytes(bundle))
                    done = await export(
                        origin, bundle, arena, settings, form.value, _policy(settings), place,
                        expanded=expanded,
                    )  # fmt: skip
        folder = done.folder.rstrip("/")
        data = {
            "url": url,
            "target": target or url,
            "id": info.id,
            "step": info.step,
            "format": form.value,
            "folder": folder,
            "files": done.files,
            "bytes": done.bytes,
            "seconds": _seconds_since(began),
        }
        where = without_secrets(f"{(target or url).rstrip('/')}/{folder}")
        what = f"{size_text(done.bytes)} in {_files_text(len(done.files))}"
        sentence = f"exported step {info.step}: {what} to {where}"
        screen.result(data, Text(visible(sentence)))
        return OK

    serve(ctx, work)
