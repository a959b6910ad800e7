"""The command ``timeline``."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import anyio.to_thread
import typer
from rich.console import RenderableType
from rich.text import Text

from ckpipe.checkpoints.kept_reports import read_reports
from ckpipe.checkpoints.timeline_page import stage_rows, timeline_page
from ckpipe.cli.running import OK, MaybeStep, Url, chosen, serve
from ckpipe.cli.screen import Screen, table, visible
from ckpipe.errors import UsageError
from ckpipe.reports import RankReport
from ckpipe.stores.opening import Access, open_store


def timeline(
    ctx: typer.Context,
    url: Url,
    step: MaybeStep = None,
    html: Annotated[
        Path | None, typer.Option(help="Draw it, with every block, as a page that stands alone.")
    ] = None,
    rank: Annotated[
        list[int] | None,
        typer.Option(min=0, help="A rank to look at; repeatable. By default the lowest 32."),
    ] = None,
) -> None:
    """Shows when each stage of a checkpoint's save ran, and what took longest."""

    async def work(screen: Screen) -> int:
        async with open_store(url, screen.settings, Access.READ) as backend:
            info = await chosen(backend, step)
            ranks, world_size = await read_reports(backend, info.key, rank or ())
        if html is not None:
            page = timeline_page(info.id, ranks, world_size)
            await anyio.to_thread.run_sync(_write, html, page)
        data = {
            "url": url,
            "id": info.id,
            "step": info.step,
            "world_size": world_size,
            "html": None if html is None else str(html),
            "ranks": [_data(each) for each in ranks],
        }
        wrote = [] if html is None else [Text(visible(f"wrote {html}"))]
        screen.result(data, *_shown(ranks), *wrote)
        return OK

    serve(ctx, work)


def _data(each: RankReport) -> dict[str, Any]:
    report = None if each.report is None else each.report.to_data()
    return {"rank": each.rank, "started": each.started, "report": report}


def _shown(ranks: list[RankReport]) -> Iterator[RenderableType]:
    for each in ranks:
        if each.report is None:
            yield Text(f"rank {each.rank}: it kept no report of its save")
            continue
        yield Text(visible(f"rank {each.rank}: {each.report.bottleneck}"))
        headings = ("stage", "began", "seconds", "waited", "bytes", "rate")
        yield table(headings, list(stage_rows(each.report)), *headings[1:])


def _write(path: Path, page: str) -> None:
    """Writes a page; to a file whole or not at all."""
    try:
        if path.exists() and not path.is_file():  # a pipe or a device, which must stay what it is
            path.write_text(page, encoding="utf-8")
        else:
            _replace(path, page)
    except OSError as error:
        raise UsageError(f"The page cannot be written to {path}: {error.strerror}") from error


def _replace(path: Path, page: str) -> None:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        draft.write_text(page, encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
