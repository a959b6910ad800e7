"""``ckpipe.report``: the page of a run."""

from __future__ import annotations

import functools
import math
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from ckpipe.calls import Url, called
from ckpipe.format.summary import REMEDY
from ckpipe.pages.facts import Checkpoint, Run
from ckpipe.pages.gather import gather
from ckpipe.pages.render import Axis, number_axis, render, templates, time_axis, write_page
from ckpipe.running.validation import location
from ckpipe.settings import PipelineFields, Settings

MOST_METRICS, MOST_LANES, MOST_ROWS = 12, 40, 500
"""The most metrics and launches that are drawn, and rows of the table of checkpoints."""


class Report:
    """A look at a run; a notebook shows it as its page.

    Args:
        run: Its facts.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    @property
    def verdict(self) -> str:
        """The state of the run in a few short sentences."""
        return " ".join(render("verdict.txt", run=self.run).split())

    @functools.cached_property
    def html(self) -> str:
        """The page, which loads nothing from elsewhere."""
        return render("report.html", verdict=self.verdict, **_page(self.run))

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to a file, whole or not at all; return its path.

        Raises:
            UsageError: If it cannot be written.
        """
        file = Path(path)
        write_page(file, self.html)
        return file

    def __repr__(self) -> str:
        return f"<Report of {self.run.url}: {self.verdict}>"

    def _repr_html_(self) -> str:
        return render("frame.html", page=self.html, title=self.verdict)


def report(
    url: Url,
    *,
    verify: bool = False,
    weights: bool = False,
    match: Sequence[str] | None = None,
    settings: Settings | None = None,
    **fields: Unpack[PipelineFields],
) -> Report:
    """Look at a whole run: its launches, metrics, costs, bytes and retention; write nothing.

    It reads the list of the root, and the index and the report of each checkpoint. A checkpoint
    that is damaged or deleted meanwhile does not stop it.

    Args:
        url: The root of the checkpoints: a plain path, ``file:///…``, or the URL of another
            backend.
        verify: Whether to read and check every byte of all complete checkpoints.
        weights: Whether to read the weights of up to 24 checkpoints, for their norms by layer.
        match: Globs of the labels of these weights; None for those of the model.
        settings: The options of backends, the retry settings, lanes, and the retention rules.
        fields: Fields of :class:`~ckpipe.Settings`; they override ``settings``.

    Returns:
        The report: its ``verdict``, its page as ``html``, and ``write(path)``.

    Raises:
        UsageError: If jinja2, of the extra ``cli``, is not installed, the place has a format that
            is known and not opened, or ``match`` matches no tensor.
        StoreError: If the store failed.
    """

    templates()  # raises before anything is read

    async def work(settings: Settings) -> Report:
        place = location(url) or ""
        run = await gather(place, settings, verify=verify, weights=weights, match=match)
        return Report(run)

    return called(work, settings, fields)


Point = tuple[Checkpoint, float]


def _panel(name: str, run: Run, values: Iterable[float | None]) -> dict[str, Any]:
    """Chart one number over the steps; each point has the one that its line comes from."""
    last: dict[str | None, Point] = {}  # by attempt, and by the id that an attempt resumed from
    points: list[tuple[Checkpoint, float, Point | None]] = []
    for each, value in zip(run.complete, values, strict=True):
        attempt = each.key.attempt
        if value is None:
            continue
        points.append((each, value, last.get(attempt) or last.get(each.resumed_from)))
        if math.isfinite(value):
            last[attempt] = last[each.id] = (each, value)
    finite = [value for _, value, _ in points if math.isfinite(value)]
    return {"name": name, "y": number_axis(finite, about=3), "points": points}


def _page(run: Run) -> dict[str, Any]:
    """Return the variables of the template."""
    counts = Counter(name for each in run.complete for name in each.metrics)
    names = sorted(name for name, _ in counts.most_common(MOST_METRICS))
    metrics = [_panel(name, run, [e.metrics.get(name) for e in run.complete]) for name in names]
    blocked = _panel("training blocked, seconds", run, [e.blocked for e in run.complete])
    durable = _panel("durable after, seconds", run, [e.durable for e in run.complete])
    lanes = run.launches[-MOST_LANES:]
    times = [time for each in lanes for time in (each.began, each.ended)]
    slowest = Counter(each.slowest for each in run.complete if each.slowest)
    steps = [each.step for each in run.checkpoints]
    return {
        "run": run, "lanes": lanes, "hidden_lanes": len(run.launches) - len(lanes),
        "x": number_axis(steps, max(1, 20 // len(str(max(steps, default=0)))), digits=12),
        "time": time_axis(times or [run.now]),
        "metrics": metrics, "more_metrics": len(counts) - len(names),
        "costs": [each for each in (blocked, durable) if each["points"]],
        "slowest": slowest.most_common(1), "reported": slowest.total(),
        "most_rows": MOST_ROWS, "remedy": REMEDY, "quoted": shlex.quote(run.url),
        "mark": mark, "shades": shades,
    }  # fmt: skip


def mark(each: Checkpoint) -> str:
    """Name the mark of a checkpoint, which tells its state by its shape."""
    if each.state != "complete":
        return each.state
    return "best" if each.best else "pinned" if each.pinned else "goes" if each.goes else "kept"


def shades(rows: Mapping[str, Sequence[float | None]]) -> Axis:
    """Return an axis of the logarithms of the numbers in a table that are finite and not 0."""
    usual = [
        math.log(each) for row in rows.values() for each in row if each and math.isfinite(each)
    ]
    return Axis(min(usual, default=0.0), max(usual, default=0.0))
