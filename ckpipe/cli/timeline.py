"""The command ``timeline``: read the reports that manifests keep, show them, or draw a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from anyio import to_thread
from rich.console import RenderableType
from rich.text import Text

from ckpipe.backend import Backend
from ckpipe.catalog.complete import read_members
from ckpipe.catalog.find import read_index
from ckpipe.cli.running import OK, MaybeStep, Url, serve, wanted
from ckpipe.cli.screen import Screen, table, visible
from ckpipe.errors import CkpipeError, UsageError
from ckpipe.foreign.source import open_place
from ckpipe.format.manifest import ManifestDocument
from ckpipe.pages.render import write_page
from ckpipe.pages.timeline import HEADINGS, stage_rows, timeline_page
from ckpipe.types import CheckpointId, RankReport, save_report_from_data


def timeline(
    ctx: typer.Context,
    url: Url,
    step: MaybeStep = None,
    html: Annotated[
        Path | None, typer.Option(help="Draw it, with every block, as a page in one file.")
    ] = None,
    rank: Annotated[
        list[int] | None,
        typer.Option(min=0, help="A rank to show; repeatable. By default the lowest 32."),
    ] = None,
) -> None:
    """Show when each stage of a checkpoint's save ran, and which took longest."""

    async def work(screen: Screen) -> int:
        async with open_place(url, screen.settings) as place:
            info = await place.own(wanted(step))
            ranks, world_size = await _read_reports(place.store, info.key, rank or ())
        if html is not None:
            page = await to_thread.run_sync(timeline_page, info, ranks, world_size)
            await to_thread.run_sync(write_page, html, page)
        data = {
            "url": url,
            "id": info.id,
            "step": info.step,
            "world_size": world_size,
            "html": None if html is None else str(html),
            "ranks": [
                {
                    "rank": each.rank,
                    "started": each.started,
                    "report": None if each.report is None else each.report.to_data(),
                }
                for each in ranks
            ],
        }
        wrote = [] if html is None else [Text(visible(f"wrote {html}"))]
        screen.result(data, *_shown(ranks), *wrote)
        return OK

    serve(ctx, work)


def _shown(ranks: list[RankReport]) -> Iterator[RenderableType]:
    for each in ranks:
        if each.report is None:
            yield Text(f"rank {each.rank}: it kept no report of its save")
            continue
        yield Text(visible(f"rank {each.rank}: {each.report.bottleneck}"))
        yield table(HEADINGS, list(stage_rows(each.report)), *HEADINGS[1:])


MOST_RANKS = 32
"""The number of ranks that are shown if none are named: the lowest."""


async def _read_reports(
    backend: Backend, id: CheckpointId, ranks: Sequence[int]
) -> tuple[list[RankReport], int]:
    """Read the reports of a checkpoint's ranks; also return the number of its ranks.

    Costs the index, and with many ranks the manifest of each rank that is shown.

    Args:
        backend: The store.
        id: A complete checkpoint.
        ranks: The ranks to show; empty for all, or the lowest :data:`MOST_RANKS` of many.

    Raises:
        UsageError: If the checkpoint lacks a named rank.
        CorruptCheckpoint: If the index, a manifest or a report is damaged, or one is missing.
        StoreError: If the store failed.
    """
    index = await read_index(backend, id)
    world_size = index.world_size
    chosen = sorted(set(ranks)) or list(range(min(world_size, MOST_RANKS)))
    if chosen[-1] >= world_size:
        those = "rank 0 only" if world_size == 1 else f"the ranks 0 to {world_size - 1}"
        raise UsageError(f"The checkpoint has {those}", step=id.step)
    if world_size == 1:
        return [_report(index)], world_size
    manifests = await read_members(backend, id, [(0, rank) for rank in chosen], world_size)
    return [_report(each) for each in manifests], world_size


def _report(document: ManifestDocument) -> RankReport:
    part = document.parts[0]
    try:
        report = None if document.report is None else save_report_from_data(document.report)
    except CkpipeError as error:
        raise error.located(step=document.id.step, rank=part.rank) from None
    return RankReport(part.rank, part.started, report)
