"""Commands that only look and read no data: ``ls`` and ``info``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.text import Text

from ckpipe.checkpoints.discovery import discover, read_index
from ckpipe.checkpoints.foreign import said_of_foreign
from ckpipe.checkpoints.inspection import describe, key_paths
from ckpipe.checkpoints.summaries import Summary, read_all, summarise
from ckpipe.cli.name_tree import shown_tree
from ckpipe.cli.progress import of_things
from ckpipe.cli.running import (
    OK,
    MaybeStep,
    Url,
    chosen,
    serve,
)
from ckpipe.cli.screen import Screen, size, table
from ckpipe.format.copies import REMEDY
from ckpipe.format.keys import label_filter
from ckpipe.stores.opening import Access, open_store


def list_(
    ctx: typer.Context,
    url: Url,
    brief: Annotated[bool, typer.Option("--brief", help="Names and times only.")] = False,
    read: Annotated[
        bool, typer.Option("--read", help="Read every index, which tells of damaged ones.")
    ] = False,
) -> None:
    """Lists checkpoints, the newest first: step, time, size, ranks, metrics, and whether whole.

    Names alone tell all that, however many checkpoints there are; those that were written without
    a digest, as by older versions, have their index read.
    """

    async def work(screen: Screen) -> int:
        async with open_store(url, screen.settings, Access.READ) as backend:
            infos = await discover(backend)
            foreign = None if infos else await said_of_foreign(backend)
            found = [Summary(each) for each in infos]
            if read or not brief:
                how = read_all if read else summarise
                with screen.meter("reading indexes", len(infos), of_things) as meter:
                    found = await how(backend, infos, lambda: meter.advance(1))
        rows = [_row(each) for each in found]
        nothing = f"no checkpoints here: {foreign}" if foreign else "no checkpoints here"
        headings = ("step", "saved at", "size", "ranks", "state", "metrics", "id")
        screen.result(
            {"url": url, "checkpoints": [_summary_data(each) for each in found]},
            table(headings, rows, "step", "size", "ranks") if rows else Text(nothing),
        )
        if any(each.copied_bytes for each in found):
            screen.note(f"copies are bytes that several ranks wrote alike. {REMEDY}")
        return OK

    serve(ctx, work)


def _row(each: Summary) -> tuple[object, ...]:
    info = each.info
    state = "complete" if info.complete else "incomplete: " + info.reason.partition(":")[0]
    state = f"damaged: {each.problem}" if each.problem else state
    notes = [state, *(["pinned"] if info.pinned else []), *(["final"] if each.final else [])]
    notes += [f"{size(each.copied_bytes)} of copies"] if each.copied_bytes else []
    metrics = " ".join(f"{name}={value:.6g}" for name, value in each.metrics.items())
    saved = "" if info.saved_at is None else f"{info.saved_at:%Y-%m-%d %H:%M:%S}Z"
    known = "" if each.bytes is None else size(each.bytes)
    return (info.step, saved, known, each.world_size or "", ", ".join(notes), metrics, info.id)


def _summary_data(each: Summary) -> dict[str, Any]:
    data = {**asdict(each.info), **asdict(each)}
    return {name: value for name, value in data.items() if name not in ("info", "metadata")}


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
        screen.result(data, *shown_tree(about, found, key_paths(bundle), depth))
        if not (about.tensors or about.values):
            screen.matches_nothing(match)
        return OK

    serve(ctx, work)
