"""Commands for deletion and protection: ``rm``, ``pin``, ``unpin``, ``prune`` and ``sweep``."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from ckpipe.catalog.catalog import OTHER_LINE, UNREAD, Catalog
from ckpipe.catalog.find import discover, matching
from ckpipe.catalog.sweep import SweepReport
from ckpipe.cli.running import NO_LINE, OK, Ids, Step, Url, serve, which
from ckpipe.cli.screen import Screen, marks, sized, table
from ckpipe.errors import SettingsError, UsageError
from ckpipe.format.names import prefix
from ckpipe.retention import Rule, from_data
from ckpipe.settings import Settings
from ckpipe.store.registry import Access, open_store
from ckpipe.types import CheckpointInfo, size_text

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show the decisions and reasons; change nothing.")
]


def rm(
    ctx: typer.Context,
    url: Url,
    step: Step,
    force: Annotated[
        bool, typer.Option("--force", help="Also if it is pinned, in use, or the newest one.")
    ] = False,
) -> None:
    """Delete one checkpoint; an exact id also names an incomplete one."""

    async def work(screen: Screen) -> int:
        async with open_store(url, screen.settings, Access.CHANGE) as backend:
            sizes = {
                each.id: sum([info.size async for info in backend.list(prefix(each.key))])
                for each in matching(await discover(backend), which(step))
            }
            info = await Catalog(backend).delete(which(step), force=force)
        freed = sizes.get(info.id, 0)
        data = {"url": url, "removed": info.id, "bytes": freed}
        screen.result(data, Text(f"removed {info.id}, which frees {size_text(freed)}"))
        return OK

    serve(ctx, work)


def pin_(ctx: typer.Context, url: Url, step: Step) -> None:
    """Protect a checkpoint from retention until it is unpinned."""
    _change(ctx, url, step, Catalog.pin, "pinned")


def unpin_(ctx: typer.Context, url: Url, step: Step) -> None:
    """End the protection of a checkpoint."""
    _change(ctx, url, step, Catalog.unpin, "unpinned")


def _change(
    ctx: typer.Context,
    url: str,
    step: str,
    change: Callable[[Catalog, int | str], Awaitable[CheckpointInfo]],
    done: str,
) -> None:
    async def work(screen: Screen) -> int:
        async with open_store(url, screen.settings, Access.CHANGE) as backend:
            info = await change(Catalog(backend), which(step))
        screen.result({"url": url, done: info.id}, Text(f"{done} {info.id}"))
        return OK

    serve(ctx, work)


def prune_(
    ctx: typer.Context,
    url: Url,
    keep_last: Annotated[int | None, typer.Option(min=1, help="Keep the newest N.")] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(help='A rule as JSON, {"keep": "every", "steps": 1000}; repeatable.'),
    ] = None,
    line: Annotated[
        str | None,
        typer.Option(help="Of this line, as ls shows it; by default that of the newest."),
    ] = None,
    all_lines: Annotated[
        bool, typer.Option("--all-lines", help="Of all lines, counted together.")
    ] = False,
    dry_run: DryRun = False,
    ids: Ids = False,
) -> None:
    """Delete the complete checkpoints of a line that the rules do not keep.

    A line is a launch with all launches that resumed from its checkpoints. One rule is enough to
    keep a checkpoint. Without rules here, those of the settings file and the environment hold. The
    newest of the line, pinned ones, those in use and the one that its newest run resumed from
    always stay.
    """

    async def work(screen: Screen) -> int:
        settings = screen.settings
        chosen = _rule(settings, keep_last, rule or [])
        if line is not None and all_lines:
            raise UsageError("--line and --all-lines are given, and only one of them can be")
        async with open_store(url, settings, Access.READ if dry_run else Access.CHANGE) as backend:
            every = all_lines or (line is None and settings.retention.lines == "all")
            catalog = Catalog(backend, chosen, settings.retention.sweep_after, all_lines=every)
            # A dry run may not write, so the clock is this machine's.
            now = datetime.now(UTC) if dry_run else None
            decide = partial(catalog.prune, now=now, line="" if line == NO_LINE else line)
            decision = await decide(dry_run=True)
            known = {each: catalog.summaries[each].bytes for each in catalog.summaries.names()}
            if not dry_run:
                with screen.meter("deleting", len(decision.remove), "things") as meter:
                    catalog.on_removed = partial(meter.advance, 1)
                    decision = await decide()
        if line is not None and {*decision.reasons.values()} <= {OTHER_LINE, UNREAD}:
            raise UsageError(f"No complete checkpoint is of line {line!r}", hint="ls shows lines")
        data: dict[str, Any] = {
            "url": url,
            "rule": repr(chosen),
            "dry_run": dry_run,
            "keep": _listed(decision.keep, decision.reasons, known),
            "remove": _listed(decision.remove, decision.reasons, known),
            "missing_metrics": list(decision.missing_metrics),
        }
        shown = [*_verdicts(screen, data["keep"], data["remove"][::-1], ids, dry_run)]
        screen.result(data, *(shown or [Text("no complete checkpoints here")]))
        for metric in decision.missing_metrics:
            screen.note(f"warning: {catalog.missing_text(metric)}")
        return OK

    serve(ctx, work)


_Rows = list[dict[str, Any]]


def _listed(ids: Iterable[str], reasons: Mapping[str, str], sizes: Mapping[str, int]) -> _Rows:
    return [
        {"id": id, "step": int(id[5:].partition(".")[0]), "bytes": sizes.get(id),
         "reason": reasons[id]}
        for id in ids
    ]  # fmt: skip


def _verdicts(
    screen: Screen, keep: _Rows, remove: _Rows, ids: bool, dry_run: bool
) -> Iterator[RenderableType]:
    """Show which checkpoints stay and which go; on a terminal also the bytes that this frees."""
    if not keep and not remove:
        return
    names = screen.names([each["id"] for each in keep + remove], ids)
    rows = [
        (marks(verdict), each["step"], sized(each["bytes"]), each["reason"], names[each["id"]])
        for verdict, listed in (("stays", keep), ("goes", remove))
        for each in listed
    ]
    yield table(("", "step", "size", "why", "id"), rows, "step", "size", flexible=[("why", 16)])
    if screen.terminal:
        kept, freed = (size_text(sum(e["bytes"] or 0 for e in each)) for each in (keep, remove))
        frees = "would free" if dry_run else "freed"
        yield Text(f"\n{len(keep)} stay with {kept}, {len(remove)} go: {frees} {freed}")


def _rule(settings: Settings, keep_last: int | None, rules: list[str]) -> Rule:
    given: list[Any] = [] if keep_last is None else [{"keep": "last", "n": keep_last}]
    for text in rules:
        try:
            given.append(json.loads(text))
        except ValueError as error:
            raise SettingsError(f"This rule is not JSON: {text}") from error
    found = from_data(given) if given else settings.retention.rule
    if found is None:
        raise SettingsError(
            "There is no retention rule",
            hint="Give --keep-last or --rule, or set retention in the settings",
        )
    return found


def sweep_(
    ctx: typer.Context,
    url: Url,
    older_than: Annotated[
        float | None, typer.Option(min=0, help="Hours; by default retention.sweep_after_seconds.")
    ] = None,
    dry_run: DryRun = False,
    ids: Ids = False,
) -> None:
    """Remove the remains of crashed runs: incomplete checkpoints, uploads, old marks and leases.

    It leaves alone a launch that wrote anything lately or has a live lease, and every name that
    ckpipe did not write.
    """

    async def work(screen: Screen) -> int:
        after = screen.settings.retention.sweep_after
        if older_than is not None:
            try:
                after = timedelta(hours=older_than)
            except (OverflowError, ValueError):
                message = f"--older-than is a number of hours, not {older_than}"
                raise UsageError(message) from None
        access = Access.READ if dry_run else Access.CHANGE
        async with open_store(url, screen.settings, access) as backend:
            report = await Catalog(backend, sweep_after=after).sweep(dry_run=dry_run)
        data = asdict(report) | {"url": url, "dry_run": dry_run}
        for name in ("remove", "keep"):
            data[name] = _listed(data[name], data[name], report.bytes)
        del data["bytes"]
        screen.result(data, *_swept(screen, report, data, ids))
        return OK

    serve(ctx, work)


def _swept(
    screen: Screen, report: SweepReport, data: Mapping[str, Any], ids: bool
) -> Iterator[RenderableType]:
    reasons = dict.fromkeys(report.unfinished, "its deletion was cut short")
    remove = data["remove"] + _listed(reasons, reasons, report.bytes)
    yield from _verdicts(screen, data["keep"], remove, ids, data["dry_run"])
    counts = [
        ("old marks of deletions", report.tombstones),
        ("old leases", report.leases),
        ("old objects of measurements", report.scratch),
        ("agreements of old launches", report.agreements),
        ("summaries of deleted checkpoints", report.summaries),
    ]
    for what, keys in counts:
        if keys:
            yield Text(f"{len(keys)} {what} go")
    if report.uploads:
        yield Text(f"{report.uploads} stale uploads were removed")
    if not (remove or report.keep or report.uploads or any(keys for _, keys in counts)):
        yield Text("nothing to sweep")
