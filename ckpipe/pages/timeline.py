"""The page of one save: its stages and blocks over time, of each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ckpipe.pages.render import number_axis, render
from ckpipe.types import (
    BlockReport,
    CheckpointInfo,
    RankReport,
    SaveReport,
    Span,
    StageReport,
    rate_text,
    size_text,
)

MOST_BLOCKS = 6000
"""The most blocks that a page shows, of all ranks together; of more it shows every n-th."""

HEADINGS = ("stage", "began", "seconds", "waited", "bytes", "rate")

Bar = tuple[str, Span, str]
"""A time span that is drawn: its class, its begin and end, and its text."""


def timeline_page(info: CheckpointInfo, ranks: Sequence[RankReport], world_size: int) -> str:
    """Draw the page of a save.

    Args:
        info: The checkpoint.
        ranks: The reports of ranks to show.
        world_size: The number of its ranks.

    Raises:
        UsageError: If jinja2 is not installed.
    """
    known = [each.report for each in ranks if each.report is not None]
    until = max([report.seconds for report in known], default=0.0) or 1e-6
    axis, most = number_axis([0.0, until]), MOST_BLOCKS // max(1, len(known))
    sections = [_section(each, max(1, most)) for each in ranks]
    return render(
        "timeline.html", info=info, sections=sections, world_size=world_size, axis=axis,
        headings=HEADINGS, started=min((each.started for each in ranks), default=""),
    )  # fmt: skip


def stage_rows(report: SaveReport) -> Iterator[tuple[str, str, str, str, str, str]]:
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


def _section(rank: RankReport, most: int) -> dict[str, Any]:
    report = rank.report
    if report is None:
        return {"rank": rank}
    blocks = report.blocks[:: max(1, -(-len(report.blocks) // most))]
    thinned = len(blocks) < len(report.blocks)
    rows, table = [*_rows(report, blocks)], [*stage_rows(report)]
    return {"rank": rank, "rows": rows, "table": table, "thinned": thinned}


def _rows(report: SaveReport, blocks: Sequence[BlockReport]) -> Iterator[tuple[str, list[Bar]]]:
    for name, stage in _in_order(report):
        span = (stage.began, stage.began + stage.seconds)
        moved = f"\n{size_text(stage.bytes)}" if stage.bytes else ""
        tip = f"{name}: {_when(span)}"
        tip += f"\nat work {stage.busy:.4f} s, waited {stage.waited:.4f} s{moved}"
        yield name, [("stage", span, tip)]
    for kind, title, lane_of in _LANES:
        mine = [(lane_of(block), block) for block in blocks if getattr(block, kind)]
        for number in sorted({number for number, _ in mine}):
            yield title.format(number), [_bar(block, kind) for n, block in mine if n == number]


_LANES: Sequence[tuple[str, str, Callable[[BlockReport], int]]] = (
    ("copied", "copier {}", lambda block: block.copier),
    ("summed", "checksums", lambda block: 0),
    ("uploaded", "lane {}", lambda block: block.lane),
)


def _bar(block: BlockReport, kind: str) -> Bar:
    span: Span = getattr(block, kind)
    seconds = span[1] - span[0]
    # The copy may have checksummed some bytes of a block that was checksummed later.
    rate = f"\n{rate_text(block.bytes, seconds)}" if seconds > 0 and kind != "summed" else ""
    where = f"file {block.file}, offset {block.offset}, {size_text(block.bytes)}"
    return kind, span, f"{kind}: {_when(span)}\n{where}{rate}"


def _when(span: Span) -> str:
    return f"{span[0]:.4f} to {span[1]:.4f} s ({span[1] - span[0]:.4f} s)"
