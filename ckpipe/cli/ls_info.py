"""The commands ``ls`` and ``info``. They read no data of tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Literal

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from ckpipe.backend import Backend, ObjectInfo
from ckpipe.catalog.find import (
    DELETING,
    list_root,
    list_summaries,
    read_index,
    read_summary,
    recheck,
)
from ckpipe.catalog.inspect import data_bytes, describe, key_paths
from ckpipe.cli.running import NO_LINE, OK, Ids, MaybeStep, Url, no_match, serve, wanted
from ckpipe.cli.screen import Few, Screen, marks, of_things, one_line, plain, sized, table
from ckpipe.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    StoreError,
    UnsupportedVersion,
    UsageError,
)
from ckpipe.foreign.source import Place, open_place
from ckpipe.format.labels import label_filter
from ckpipe.format.summary import REMEDY, Summary, summary_of
from ckpipe.retention import BestMode, Candidate, KeepBest
from ckpipe.threads import all_of
from ckpipe.types import (
    CheckpointDescription,
    CheckpointId,
    CheckpointInfo,
    TensorDescription,
    age_text,
    first_of,
    size_text,
)

_AT_ONCE = 16


Sort = Literal["time", "step", "size", "metric"]


def list_(
    ctx: typer.Context,
    url: Url,
    brief: Annotated[bool, typer.Option("--brief", help="Names and times only.")] = False,
    read: Annotated[
        bool, typer.Option("--read", help="Read every index, which finds damaged ones.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N.")] = None,
    sort: Annotated[
        Sort, typer.Option(help="The newest, the greatest, or by --metric the best first.")
    ] = "time",
    metric: Annotated[
        str | None, typer.Option(metavar="NAME", help="Show this metric, and mark the best.")
    ] = None,
    mode: Annotated[
        BestMode, typer.Option(help="Whether the least or the greatest value is the best.")
    ] = "min",
    ids: Ids = False,
) -> None:
    """List checkpoints, the newest first: step, time, size, ranks, metrics, and whether complete.

    It reads the summary of each checkpoint, which says what was saved. If there is none, it reads
    the index. In a folder of runs, it lists the runs.
    """

    async def work(screen: Screen) -> int:
        if brief and (metric is not None or sort == "size"):
            raise UsageError("--brief reads neither sizes nor metrics", hint="Leave it out")
        if sort == "metric" and metric is None:
            raise UsageError("--sort metric needs --metric NAME")
        rule = None if metric is None else KeepBest(metric, mode)
        async with open_place(url, screen.settings) as place:
            infos = await place.checkpoints()
            known = {each.id: each for each in infos}
            rows = [_checkpoint_data(each) for each in infos]
            if sort == "step":
                rows.sort(key=lambda each: each["step"], reverse=True)
            if rule is None and sort != "size":
                rows = _first(rows, limit)
            if rows and (read or not brief):
                pairs = {known[each["id"]]: each for each in rows}
                rows = await _described(screen, place.store, pairs, read)
            foreign = None if infos else await _foreign(place)
            runs = [] if infos or foreign else await _runs(screen, place, limit, brief)
        if sort == "size":
            rows.sort(key=lambda each: -1 if each["bytes"] is None else each["bytes"], reverse=True)
        best_first = rows if rule is None else _best_first(rows, rule)
        rows = _first(best_first if sort == "metric" else rows, limit)
        data = {"url": url, "checkpoints": rows, "foreign": foreign, "runs": runs}
        if foreign is not None:
            shown: Iterable[RenderableType] = [Text(_foreign_text(foreign))]
        elif runs:
            shown = [_runs_table(screen, runs)]
        else:
            shown = (
                _shown(screen, infos, rows, metric, ids) if rows else [Text("no checkpoints here")]
            )
        screen.result(data, *shown)
        if any(each["copied_bytes"] for each in rows):
            screen.note(f"copies are equal bytes that several ranks wrote. {REMEDY}")
        return OK

    serve(ctx, work)


async def _described(
    screen: Screen, backend: Backend, rows: Mapping[CheckpointInfo, dict[str, Any]], read: bool
) -> list[dict[str, Any]]:
    """Read the summaries of complete checkpoints, or their indexes, which also show damage."""
    stored = {} if read else await list_summaries(backend)
    with screen.meter("reading checkpoints", len(rows), of_things) as meter:

        async def look(info: CheckpointInfo) -> dict[str, Any]:
            made = await _inspected(backend, info, stored) if info.complete else rows[info]
            meter.advance(1)
            return made

        return await all_of([partial(look, each) for each in rows], _AT_ONCE)


def _best_first(rows: list[dict[str, Any]], rule: KeepBest) -> list[dict[str, Any]]:
    """Mark the best checkpoint, and put those first that have a number for the metric."""
    now = datetime.now(UTC)
    candidates = [Candidate(row["id"], 0, "", 0, now, row["metrics"]) for row in rows]
    ranked = replace(rule, n=max(1, len(rows))).winners(candidates)
    if not ranked and any(each["complete"] for each in rows):
        there = first_of(sorted({name for row in rows for name in row["metrics"]})) or "none"
        raise UsageError(f"No checkpoint has the metric {rule.metric!r}; metrics are: {there}")
    for each in rows:
        each["best"] = each["id"] in ranked[:1]
    places = {id: place for place, id in enumerate(ranked)}
    return sorted(rows, key=lambda each: places.get(each["id"], len(rows)))


def _first(rows: list[dict[str, Any]], limit: int | None) -> list[dict[str, Any]]:
    """Take the first checkpoints, besides those that are being deleted."""
    if limit is None:
        return rows
    deleting = [each for each in rows if each["reason"] == DELETING]
    return [each for each in rows if each["reason"] != DELETING][:limit] + deleting


def _shown(
    screen: Screen,
    infos: Sequence[CheckpointInfo],
    rows: Sequence[dict[str, Any]],
    metric: str | None,
    ids: bool,
) -> Iterator[RenderableType]:
    listed = [each for each in rows if each["reason"] != DELETING]
    deleting = [each for each in rows if each["reason"] == DELETING]
    if deleting and not screen.terminal:
        last = f"{len(deleting)} being deleted, the newest is this"
        listed.append({**deleting[0], "saved_at": None, "state": last})
    columns = _columns(screen, listed, metric, screen.names([each.id for each in infos], ids))
    cells = [[cell(each) for _, cell in columns] for each in listed]
    right = ("step", "age", "size", "ranks")
    yield table([name for name, _ in columns], cells, *right, flexible=_FLEXIBLE)
    if not screen.terminal:
        return
    yield Text()
    reasons = defaultdict(list)
    for each in listed:
        state = "damaged" if each["problem"] else "incomplete"
        reasons[state, each["problem"] or each["reason"]].append(each["step"])
    for (state, reason), steps in reasons.items():
        if reason:
            yield marks(f"{state}: {reason} (step {first_of(steps)})")
    if deleting:
        yield Text(f"{len(deleting)} being deleted, the newest is step {deleting[0]['step']}")
    whole = sum(each.complete for each in infos)
    total = len(infos) - len(deleting)
    texts = [f"{whole} complete"] + [f"{total - whole} incomplete"] * (total > whole)
    texts += [f"{len(listed)} shown"] * (len(listed) < total)
    if known := [each["bytes"] for each in listed if each["bytes"] is not None]:
        texts.append(size_text(sum(known)))
    yield Text(", ".join(texts))


def _columns(
    screen: Screen, rows: Sequence[dict[str, Any]], metric: str | None, names: Mapping[str, str]
) -> list[tuple[str, Callable[[dict[str, Any]], object]]]:
    """Choose the columns; a terminal shows no ranks that are all the same, and a narrow one few."""

    def differ(name: str) -> bool:
        return len({each[name] for each in rows} - {None}) > 1

    def metrics(row: dict[str, Any]) -> Few:
        pairs = row["metrics"].items()
        return Few(f"{name}={number(value)}" for name, value in pairs if name != metric)

    def line(row: dict[str, Any]) -> str:
        return "" if row["line"] is None else row["line"] or NO_LINE

    def chosen(row: dict[str, Any]) -> str:
        value = row["metrics"].get(metric)
        return "" if value is None else number(value)

    now, terminal = datetime.now(UTC), screen.terminal
    number = ("{:.4g}" if terminal else "{:.6g}").format
    others = max(map(len, names.values()), default=0) + len(metric or "")
    roomy = not terminal or screen.out.width >= _WIDE + others
    columns: list[tuple[str, object, Callable[[dict[str, Any]], object]]] = [
        ("step", True, lambda row: row["step"]),
        ("saved at", roomy, lambda row: _time(row["saved_at"])),
        ("age", terminal, lambda row: _age(row["saved_at"], now)),
        ("size", True, lambda row: sized(row["bytes"])),
        ("ranks", not terminal or differ("world_size"), lambda row: row["world_size"] or ""),
        ("state", True, partial(_state, brief=terminal)),
        (metric or "", metric, chosen),
        ("metrics", roomy or not metric, metrics),
        ("line", roomy and differ("line"), line),
        ("id", True, lambda row: names[row["id"]]),
    ]
    return [(one_line(name), cell) for name, wanted, cell in columns if wanted]


_FLEXIBLE = (("metrics", 16), ("state", 11), ("metrics", 7))

_WIDE = 85
"""The width, besides ids and a chosen metric, that has room for times, lines and more metrics."""


def _time(moment: datetime | None) -> str:
    return "" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}Z"


def _age(moment: datetime | None, now: datetime) -> str:
    return "" if moment is None else age_text((now - moment).total_seconds())


def _state(row: dict[str, Any], brief: bool) -> Text:
    if "state" in row:
        return Text(row["state"])
    reason = row["reason"].partition(":")[0]
    state = "complete" if row["complete"] else f"incomplete: {reason}"
    state = f"damaged: {row['problem']}" if row["problem"] else state
    texts = [state.partition(":")[0] if brief else state]
    texts += [mark for mark in ("pinned", "final", "best") if row[mark]]
    if row["copied_bytes"]:
        texts.append(f"{size_text(row['copied_bytes'])} of copies")
    return marks(*texts)


async def _runs(
    screen: Screen, place: Place, limit: int | None, brief: bool
) -> list[dict[str, Any]]:
    """Describe the roots directly below a folder, the newest first."""
    if place.file is not None:
        return []
    store, below = place.store, (await place.store.children("")).prefixes
    if len(below) > _MOST_RUNS:
        screen.note(f"there are {len(below)} folders here; only the first {_MOST_RUNS} are listed")

    async def find(prefix: str) -> list[CheckpointInfo]:
        try:
            return (await list_root(store, prefix)).infos()
        except StoreError as error:
            screen.note(f"{prefix} is left out: {error}")
            return []

    async def add(prefix: str, infos: Sequence[CheckpointInfo]) -> dict[str, Any]:
        complete = [each for each in infos if each.complete]
        newest = (complete or infos)[0]
        read = [partial(read_summary, store, each.key, below=prefix) for each in complete]
        sizes = [e and e.bytes for e in await all_of([] if brief else read, _AT_ONCE)]
        meter.advance(1)
        return {
            "name": prefix.rstrip("/"),
            "step": newest.step,
            "id": newest.id,
            "saved_at": newest.saved_at,
            "complete": len(complete),
            "incomplete": sum(not e.complete and e.reason != DELETING for e in infos),
            "bytes": None if brief or None in sizes else sum(filter(None, sizes)),
        }

    names = [each for each in below if not each.startswith(".")][:_MOST_RUNS]
    listed = await all_of([partial(find, each) for each in names], _AT_ONCE)
    found = [(name, infos) for name, infos in zip(names, listed, strict=True) if infos]
    found.sort(key=lambda each: each[1][0].key, reverse=True)
    with screen.meter("reading runs", len(found), of_things) as meter:
        return [await add(*each) for each in found[:limit]]


_MOST_RUNS = 1000


def _runs_table(screen: Screen, runs: Sequence[dict[str, Any]]) -> Table:
    now = datetime.now(UTC)
    when = (lambda at: _age(at, now)) if screen.terminal else _time
    rows = [
        (each["name"], each["step"], each["complete"], each["incomplete"] or "",
         sized(each["bytes"]), when(each["saved_at"]))
        for each in runs
    ]  # fmt: skip
    headings = ("run", "newest", "complete", "incomplete", "size", "age")
    if not screen.terminal:
        headings = (*headings[:-1], "saved at")
    return table(headings, rows, *headings[1:], flexible=[("run", 12)])


async def _foreign(place: Place) -> dict[str, Any] | None:
    """Describe the checkpoint of another program; None if there is none."""
    listing = await place.listing()
    try:
        source = await place.source(listing)
    except CheckpointNotFound:
        return None
    document = await source.describe(place.store, listing, place.name)
    return {
        "format": source.name,
        "files": len(document.parts[0].files),
        "bytes": data_bytes(document),
        "tensors": len(document.structures[0].tensors),
    }


def _foreign_text(found: Mapping[str, Any]) -> str:
    return (
        f"a checkpoint of another program ({found['format']}): {found['files']} files, "
        f"{found['tensors']} tensors, {size_text(found['bytes'])}"
    )


def _checkpoint_data(
    info: CheckpointInfo, summary: Summary | None = None, problem: str = ""
) -> dict[str, Any]:
    """Join what the list of the root says with the summary of a checkpoint, if known."""
    data = asdict(info) | {"metrics": {}, "final": False, "copied_bytes": 0, "problem": problem}
    data["best"] = False
    if summary is not None:
        data |= summary.members | {"metrics": dict(summary.metrics), "line": summary.line}
        data["copied_bytes"] = summary.copied_bytes if summary.is_wasteful else 0
    del data["metadata"]
    return data


async def _inspected(
    backend: Backend,
    info: CheckpointInfo,
    stored: Mapping[CheckpointId, Sequence[ObjectInfo]],
) -> dict[str, Any]:
    """Read a complete checkpoint's summary, or else its index; report damage without raising.

    A checkpoint that was deleted meanwhile is incomplete.
    """
    summary = await read_summary(backend, info.key, stored)
    if summary is not None:
        return _checkpoint_data(info, summary)
    try:
        return _checkpoint_data(info, summary_of(await read_index(backend, info.key)))
    except (CorruptCheckpoint, UnsupportedVersion) as error:
        now = await recheck(backend, info)
        if now.reason == DELETING:
            return _checkpoint_data(now)
        return _checkpoint_data(info, problem=str(error))


def info(
    ctx: typer.Context,
    url: Url,
    step: MaybeStep = None,
    match: Annotated[
        list[str] | None,
        typer.Option(help="Only names that this glob matches, such as 'model.*'; repeatable."),
    ] = None,
    depth: Annotated[
        int | None, typer.Option(min=1, help="The number of levels of names to show.")
    ] = None,
) -> None:
    """Show the contents of a checkpoint: names, shapes, dtypes, sizes, sharing, ranks, values."""

    async def work(screen: Screen) -> int:
        async with open_place(url, screen.settings) as place:
            found = await place.chosen(wanted(step))
            async with place.opened(found, lease=False) as opened:
                about = describe(opened.document, label_filter(match))
        if match and not (about.tensors or about.values or about.wrappers):
            raise no_match(match, key_paths(opened.document))
        pinned, saved_at = (found.pinned, found.saved_at) if found else (False, None)
        data = {**asdict(about), "pinned": pinned, "saved_at": saved_at}
        facts = _facts_table(_facts(about, pinned, saved_at, screen.terminal), screen.terminal)
        screen.result(data, facts, *_shown_tree(about, key_paths(opened.document), depth))
        return OK

    serve(ctx, work)


_DEEPEST = 100
"""The most levels of names that are drawn; a hostile checkpoint may have any number."""


@dataclass(slots=True)
class _Component:
    """A component of a name and all below it: tensors, bytes, and its own description."""

    below: dict[str, _Component] = field(default_factory=dict)
    about: str = ""
    tensors: int = 0
    bytes: int = 0


def _shown_tree(
    about: CheckpointDescription,
    paths: Mapping[str, tuple[str, ...]],
    depth: int | None,
) -> Iterator[RenderableType]:
    def path(label: str) -> Sequence[str]:
        return paths.get(label) or label.split(".")

    root = _Component()
    for each in about.tensors:
        _add(root, path(each.label), _tensor_text(each), each)
        for other in each.also:
            _add(root, path(other), f"→ {each.label}", None)
    for label, text in about.wrappers.items():
        _add(root, path(label), text, None)
    for value in about.values:
        text = f"= {value.value}{_ranks_text(value.ranks, value.differs)}"
        _add(root, path(value.label), text, None)
    if root.below:
        tree = Tree(Text("state"))
        _draw(tree, root, min(depth or _DEEPEST, _DEEPEST))
        yield tree


def _facts_table(facts: Iterable[tuple[str, object]], terminal: bool) -> Table:
    made = Table.grid(padding=(0, 1, 0, 0))
    made.add_column(min_width=13, no_wrap=True)
    made.add_column(no_wrap=not terminal, overflow="fold" if terminal else "ignore")
    for name, value in facts:
        made.add_row(plain(f"{name}:"), value if isinstance(value, Text) else plain(value))
    return made


def _facts(
    about: CheckpointDescription, pinned: bool, saved_at: datetime | None, aged: bool
) -> Iterator[tuple[str, object]]:
    size = f"{size_text(about.bytes)} in {about.files} data file{'s' * (about.files != 1)}"
    if about.source:
        yield "place", about.source
        yield "size", size
        return
    yield "checkpoint", about.id
    yield "step", about.step
    yield "began", about.started
    age = f" ({_age(saved_at, datetime.now(UTC))} ago)" if aged else ""
    yield "saved", f"{_time(saved_at)}{age}"
    yield "size", size
    yield "ranks", about.world_size
    yield "line", about.line or NO_LINE
    if about.resumed_from:
        yield "resumed from", about.resumed_from
    words = [word for word, set_ in (("pinned", pinned), ("final", about.final)) if set_]
    if words:
        yield "marks", marks(*words)
    yield "written by", ", ".join(f"{name} {value}" for name, value in about.writer.items())
    for name, given in (("metrics", about.metrics), ("metadata", about.metadata)):
        if given:
            yield name, ", ".join(f"{key}={value}" for key, value in given.items())


def _add(
    root: _Component, path: Sequence[str], text: str, tensor: TensorDescription | None
) -> None:
    branch = root
    for part in path:
        branch = branch.below.setdefault(part, _Component())
        if tensor is not None:
            branch.tensors += 1
            branch.bytes += tensor.bytes
    branch.about = text


def _tensor_text(each: TensorDescription) -> str:
    kind = "" if each.kind == "tensor" else f" {each.kind}"
    device = "" if each.device == "cpu" else f" on {each.device}"
    text = f"{each.dtype}{list(each.shape)}{kind}{device}, {size_text(each.bytes)}"
    if each.shares_with:
        text += f", shares memory with {', '.join(each.shares_with)}"
    if each.boxes > 1:
        text += f", {each.boxes} boxes"
    return text + _ranks_text(each.ranks, each.differs)


def _ranks_text(ranks: tuple[int, ...], differs: bool) -> str:
    if differs:
        return f", another on each of {len(ranks)} ranks"
    return "" if ranks == (0,) else f", {len(ranks)} rank{'s' * (len(ranks) != 1)}"


def _draw(tree: Tree, branch: _Component, depth: int) -> None:
    for name, below in branch.below.items():
        line = f"{name} {below.about}" if below.about else name
        if below.below and below.tensors:
            many = "s" * (below.tensors != 1)
            line += f" ({below.tensors} tensor{many}, {size_text(below.bytes)})"
        node = tree.add(Text(one_line(line)))
        if depth > 1:
            _draw(node, below, depth - 1)
