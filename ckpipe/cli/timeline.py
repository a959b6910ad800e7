"""The command ``timeline``: read the reports that manifests keep, show them, or draw a page.

The page is SVG without scripts; a browser shows the title of the bar under the pointer. A policy in
the page forbids it to load or run anything. All text comes from a store and may be hostile, so it
is escaped.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Annotated

import anyio.to_thread
import typer
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
from ckpipe.types import (
    BlockReport,
    CheckpointId,
    RankReport,
    SaveReport,
    Span,
    StageReport,
    rate_text,
    save_report_from_data,
    size_text,
)


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
            page = _page(info.id, ranks, world_size)
            await anyio.to_thread.run_sync(_write, html, page)
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
        headings = ("stage", "began", "seconds", "waited", "bytes", "rate")
        yield table(headings, list(_stage_rows(each.report)), *headings[1:])


def _stage_rows(report: SaveReport) -> Iterator[tuple[str, str, str, str, str, str]]:
    """Yield name, begin, seconds, seconds waited, bytes and rate of each stage, in order of begin.

    Bytes and rate may be empty.
    """
    for name, stage in _in_order(report):
        moved = size_text(stage.bytes) if stage.bytes else ""
        rate = rate_text(stage.bytes, stage.busy) if moved and stage.busy else ""
        yield (
            name, f"{stage.began:.4f}", f"{stage.seconds:.4f}", f"{stage.waited:.4f}", moved, rate
        )  # fmt: skip


def _in_order(report: SaveReport) -> list[tuple[str, StageReport]]:
    return sorted(report.stages.items(), key=lambda item: item[1].began)


def _write(path: Path, page: str) -> None:
    """Write a page; a file gets the whole page or none of it."""
    try:
        if path.exists() and not path.is_file():  # a pipe or a device, which must not be replaced
            path.write_text(page, encoding="utf-8")
            return
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            draft.write_text(page, encoding="utf-8")
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"The page cannot be written to {path}: {error.strerror}") from error


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


MOST_BLOCKS = 6000
"""The most blocks that a page shows, of all ranks together; of more it shows every n-th."""

_LABELS, _WIDTH, _ROW, _BAR = 112, 1000, 18, 13
_HEAD = 22

_STYLE = """
:root { color-scheme: light dark; --text: #1c2430; --dim: #5b6676; --ground: #fff; --line: #d9dee6;
  --stage: #8a94a6; --copied: #2f6fde; --summed: #c98a00; --uploaded: #1f9d61; --mark: #c2383a; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e9f1; --dim: #98a4b6; --ground: #12161d;
  --line: #2c3542; --stage: #66728a; --copied: #6ea0ff; --summed: #e7b13c; --uploaded: #4cc98d;
  --mark: #ff7577; } }
body { margin: 2rem auto; max-width: 72rem; padding: 0 1rem; background: var(--ground);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2rem 0 .25rem; }
p { margin: .25rem 0; } .dim { color: var(--dim); }
svg { display: block; width: 100%; height: auto; margin: .75rem 0; }
svg text { fill: var(--text); font: 11px system-ui, sans-serif; } svg text.dim { fill: var(--dim); }
svg line { stroke: var(--line); } svg line.mark { stroke: var(--mark); stroke-dasharray: 3 3; }
svg text.mark { fill: var(--mark); }
.stage { fill: var(--stage); } .copied { fill: var(--copied); } .summed { fill: var(--summed); }
.uploaded { fill: var(--uploaded); } rect:hover { opacity: .65; }
.key::before { content: ""; display: inline-block; width: .8em; height: .8em; margin: 0 .35em 0 1em;
  background: var(--colour); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .1rem 1.25rem .1rem 0; text-align: right; font-weight: normal; }
th:first-child, td:first-child { text-align: left; } th { color: var(--dim); }
"""

_KEYS = (
    ("stage", "stage"),
    ("copied", "block copied"),
    ("summed", "block checksummed"),
    ("uploaded", "block uploaded"),
)

Bar = tuple[Span, str, str]
"""A rectangle: its time span, its class and its title."""


def _page(id: str, ranks: Sequence[RankReport], world_size: int) -> str:
    known = [each.report for each in ranks if each.report is not None]
    until = max([report.seconds for report in known], default=0.0) or 1e-6
    most = MOST_BLOCKS // max(1, len(known))
    shown = "" if len(ranks) == world_size else f", {len(ranks)} of them shown"
    sections = "\n".join(_section(each, until, most) for each in ranks)
    keys = "".join(
        f'<span class="key" style="--colour:var(--{kind})">{name}</span>' for kind, name in _KEYS
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(id)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(id)}</h1>
<p>{world_size} rank{"s" * (world_size != 1)}{shown}. Times are seconds after the call of
<code>save</code> on each rank; all ranks have the same scale. The page ends when the manifest was
made; the write of the manifest, for example, is not on it.</p>
<p>{keys}</p>
{sections}
</body>
</html>
"""


def _section(rank: RankReport, until: float, most: int) -> str:
    heading = f"<h2>Rank {rank.rank}</h2>"
    report = rank.report
    if report is None:
        return f'{heading}\n<p class="dim">It kept no report of its save.</p>'
    blocks = report.blocks[:: max(1, -(-len(report.blocks) // max(1, most)))]
    thinned = "" if len(blocks) == len(report.blocks) else ", of which not all blocks are drawn"
    staged = (
        "" if report.staged_seconds is None else f" Staged after {report.staged_seconds:.3f} s."
    )
    return "\n".join(
        [
            f'<section id="rank-{rank.rank}">',
            heading,
            f"<p>{escape(report.bottleneck)}.{staged}</p>",
            f'<p class="dim">{size_text(report.bytes)} in {report.tensors} tensors{thinned}; '
            f"{'newly planned' if report.planned else 'planned before'}; "
            f"started {escape(rank.started)}</p>",
            _drawing(report, blocks, until),
            _table(report),
            "</section>",
        ]
    )


def _drawing(report: SaveReport, blocks: Sequence[BlockReport], until: float) -> str:
    rows = [*_stage_bars(report), *_block_rows(blocks)]
    height = _HEAD + _ROW * len(rows) + 12
    scale = (_WIDTH - _LABELS - 30) / until
    lines = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="stages and blocks over time">'
    ]
    for tick in _ticks(until):
        x = _LABELS + tick * scale
        lines.append(f'<line x1="{x:.1f}" y1="{_HEAD - 4}" x2="{x:.1f}" y2="{height}"/>')
        lines.append(f'<text class="dim" x="{x:.1f}" y="12" text-anchor="middle">{tick:g} s</text>')
    for number, (name, bars) in enumerate(rows):
        y = _HEAD + number * _ROW
        lines.append(
            f'<text x="{_LABELS - 8}" y="{y + 11}" text-anchor="end">{escape(name)}</text>'
        )
        for (began, ended), kind, tip in bars:
            x, width = _LABELS + began * scale, max(0.6, (ended - began) * scale - 0.4)
            lines.append(
                f'<rect class="{kind}" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BAR}">'
                f"<title>{escape(tip)}</title></rect>"
            )
    if report.staged_seconds is not None:
        x = _LABELS + report.staged_seconds * scale
        lines.append(
            f'<line class="mark" x1="{x:.1f}" y1="{_HEAD - 4}" x2="{x:.1f}" y2="{height}"/>'
        )
        lines.append(f'<text class="mark" x="{x + 3:.1f}" y="{height - 2}">staged</text>')
    return "\n".join([*lines, "</svg>"])


def _stage_bars(report: SaveReport) -> Iterator[tuple[str, list[Bar]]]:
    for name, stage in _in_order(report):
        span = (stage.began, stage.began + stage.seconds)
        moved = f"\n{size_text(stage.bytes)}" if stage.bytes else ""
        tip = f"{name}: {_when(span)}"
        tip += f"\nat work {stage.busy:.4f} s, waited {stage.waited:.4f} s{moved}"
        yield name, [(span, "stage", tip)]


def _block_rows(blocks: Sequence[BlockReport]) -> Iterator[tuple[str, list[Bar]]]:
    for copier in sorted({block.copier for block in blocks}):
        mine = [block for block in blocks if block.copier == copier]
        yield f"copier {copier}", [*_bars(mine, "copied")]
    if any(block.summed for block in blocks):
        yield "checksums", [*_bars(blocks, "summed")]
    for lane in sorted({block.lane for block in blocks if block.uploaded}):
        mine = [block for block in blocks if block.lane == lane]
        yield f"lane {lane}", [*_bars(mine, "uploaded")]


def _bars(blocks: Sequence[BlockReport], kind: str) -> Iterator[Bar]:
    for block in blocks:
        span: Span | None = getattr(block, kind)
        if span is None:
            continue
        seconds = span[1] - span[0]
        # The copy may have checksummed some bytes of a block that was checksummed later.
        told = seconds > 0 and kind != "summed"
        rate = f"\n{rate_text(block.bytes, seconds)}" if told else ""
        where = f"file {block.file}, offset {block.offset}, {size_text(block.bytes)}"
        yield span, kind, f"{kind}: {_when(span)}\n{where}{rate}"


def _when(span: Span) -> str:
    return f"{span[0]:.4f} to {span[1]:.4f} s ({span[1] - span[0]:.4f} s)"


def _ticks(until: float) -> Iterator[float]:
    """Yield round times, about eight of them."""
    rough = until / 8
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= rough)
    for number in range(int(until / step) + 1):
        yield number * step


def _table(report: SaveReport) -> str:
    cells = ("stage", "began, s", "took, s", "waited, s", "bytes", "rate")
    heading = "".join(f"<th>{cell}</th>" for cell in cells)
    rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in _stage_rows(report))
    return "\n".join(["<table>", *(f"<tr>{row}</tr>" for row in (heading, *rows)), "</table>"])
