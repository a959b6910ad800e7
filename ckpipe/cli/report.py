"""The command ``report``: look at a whole run, in the terminal or as a page."""

from __future__ import annotations

import webbrowser
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from anyio import to_thread
from rich.console import RenderableType
from rich.text import Text

from ckpipe.cli.running import FOUND, OK, Url, serve
from ckpipe.cli.screen import Screen, one_line, table
from ckpipe.errors import UsageError
from ckpipe.pages.facts import Run
from ckpipe.pages.render import when
from ckpipe.types import first_of


def report(
    ctx: typer.Context,
    url: Url,
    html: Annotated[
        Path | None, typer.Option(help="Write it as a page in one file.", show_default=False)
    ] = None,
    show: Annotated[
        bool, typer.Option("--open", help="Open the page of --html in a browser.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read and check every byte of all checkpoints.")
    ] = False,
    weights: Annotated[
        bool, typer.Option("--weights", help="Read weights, and show their norms by layer.")
    ] = False,
    match: Annotated[
        list[str] | None,
        typer.Option(help="Of --weights only names that this glob matches; repeatable."),
    ] = None,
) -> None:
    """Show a run at a glance: launches, lost work, metrics, costs, bytes and retention.

    It reads lists, indexes and reports, and writes nothing to the store.
    """

    from ckpipe.pages.gather import gather  # needs torch
    from ckpipe.pages.report import Report

    async def work(screen: Screen) -> int:
        if show and html is None:
            raise UsageError("--open needs a page", hint="Add --html FILE")
        if match and not weights:
            raise UsageError("--match chooses weights", hint="Add --weights")
        run = await gather(url, screen.settings, verify=verify, weights=weights, match=match)
        page = Report(run)
        verdict = await to_thread.run_sync(lambda: page.verdict)
        if html is not None:
            await to_thread.run_sync(page.write, html)
        data = {"verdict": verdict, "html": None if html is None else str(html)}
        data |= asdict(run) | {"lost": [asdict(each) for each in run.lost]}
        wrote = [] if html is None else [Text(one_line(f"wrote {html}"))]
        screen.result(data, Text(one_line(verdict)), *_shown(run), *wrote)
        if html is not None and show:
            await to_thread.run_sync(webbrowser.open, html.absolute().as_uri())
        return FOUND if run.of_state("damaged") else OK

    serve(ctx, work)


def _shown(run: Run) -> Iterator[RenderableType]:
    rows = []
    for number, launch in enumerate(run.launches):
        origin = "" if launch.resumed_from is None else f"step {launch.resumed_from.step}"
        steps = f"{launch.checkpoints[0].step} to {launch.checkpoints[-1].step}"
        gone = ", ".join(f"{each.first} to {each.last}" for each in run.lost if each.lane == number)
        rows.append((number + 1, when(launch.began), origin, steps, gone))
    if rows:
        yield table(("launch", "began", "resumed from", "steps", "lost"), rows, "launch")
    for each in run.of_state("damaged"):
        yield Text(one_line(f"damaged: step {each.step}: {each.why}"))
    if run.retention.problem:
        yield Text(one_line(f"no decision of retention: {run.retention.problem}"))
    kept = [(verdict, first_of(steps, 8), why) for (verdict, why), steps in run.reasons.items()]
    rules = "no retention rules are given: add them by ckpipe --settings FILE report"
    yield table(("", "steps", "why"), kept) if kept else Text(rules)
