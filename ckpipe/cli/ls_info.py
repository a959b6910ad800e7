"""The commands ``ls`` and ``info``. They read no data of tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Literal

import typer
from rich.console import RenderableType
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
from ckpipe.cli.running import (
    NO_LINE,
    OK,
    Ids,
    MaybeStep,
    Url,
    files_text,
    no_match,
    serve,
    stored_sizes,
    wanted,
)
from ckpipe.cli.screen import Few, Screen, marks, one_line, sized, table
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
            there = await place.checkpoints()
            deleting = [each for each in there if each.reason == DELETING]
            infos = [each for each in there if each.reason != DELETING]
            if sort == "step":
                infos.sort(key=lambda each: each.step, reverse=True)
            first = infos if rule or sort == "size" else infos[:limit]
            rows = await _described(screen, place.store, first, read=read, brief=brief)
            foreign = None if there else await _foreign(place)
            runs = [] if there or foreign else await _runs(screen, place, limit, brief)
        if sort == "size":
            rows.sort(key=lambda each: -1 if each["bytes"] is None else each["bytes"], reverse=True)
        best_first = rows if rule is None else _best_first(rows, rule)
        rows = (best_first if sort == "metric" else rows)[:limit]
        data = {"url": url, "foreign": foreign, "runs": runs}
        data["checkpoints"] = rows + [_checkpoint_data(each) for each in deleting]
        if foreign or runs or not rows:
            screen.result(data, _instead(screen, foreign, runs))
        else:
            names = screen.names([each.id for each in there], ids)
            screen.result(data, *_shown(screen, infos, rows, metric, names))
        if deleting:
            screen.note(f"{len(deleting)} being deleted, the newest is step {deleting[0].step}")
        if any(each["copied_bytes"] for each in rows):
            screen.note(f"copies are equal bytes that several ranks wrote. {REMEDY}")
        return OK

    serve(ctx, work)


async def _described(
    screen: Screen, store: Backend, infos: Sequence[CheckpointInfo], *, read: bool, brief: bool
) -> list[dict[str, Any]]:
    """Read the summaries of complete checkpoints, or their indexes, which also show damage."""
    if not infos or (brief and not read):
        return [_checkpoint_data(each) for each in infos]
    stored = {} if read else await list_summaries(store)
    with screen.meter("reading checkpoints", len(infos), "things") as meter:

        async def look(info: CheckpointInfo) -> dict[str, Any]:
            made = _checkpoint_data(info)
            if info.complete:
                made = await _inspected(store, info, stored)
            meter.advance(1)
            return made

        return await all_of([partial(look, each) for each in infos], _AT_ONCE)


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


def _shown(
    screen: Screen,
    infos: Sequence[CheckpointInfo],
    rows: Sequence[dict[str, Any]],
    metric: str | None,
    names: Mapping[str, str],
) -> Iterator[RenderableType]:
    columns = _columns(screen, rows, metric, names)
    cells = [[cell(each) for _, cell in columns] for each in rows]
    right = ("step", "age", "size", "ranks")
    yield table([name for name, _ in columns], cells, *right, flexible=_FLEXIBLE)
    if not screen.terminal:
        return
    yield Text()
    reasons = defaultdict(list)
    for each in rows:
        state = "damaged" if each["problem"] else "incomplete"
        reasons[state, each["problem"] or each["reason"]].append(each["step"])
    for (state, reason), steps in reasons.items():
        if reason:
            yield marks(f"{state}: {reason} (step {first_of(steps)})")
    whole, total = sum(each.complete for each in infos), len(infos)
    texts = [f"{whole} complete"] + [f"{total - whole} incomplete"] * (total > whole)
    texts += [f"{len(rows)} shown"] * (len(rows) < total)
    if known := [each["bytes"] for each in rows if each["bytes"] is not None]:
        texts.append(size_text(sum(known)))
    yield Text(", ".join(texts))


def _columns(
    screen: Screen, rows: Sequence[dict[str, Any]], metric: str | None, names: Mapping[str, str]
) -> list[tuple[str, Callable[[dict[str, Any]], object]]]:
    """Choose the columns; a terminal shows none that tells nothing, and a narrow one few."""

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
    tiny = terminal and screen.out.width < _TINY
    columns: list[tuple[str, object, Callable[[dict[str, Any]], object]]] = [
        ("step", True, lambda row: row["step"]),
        ("saved at", roomy, lambda row: _time(row["saved_at"])),
        ("age", terminal and not tiny, lambda row: _age(row["saved_at"], now)),
        ("size", True, lambda row: sized(row["bytes"])),
        ("ranks", not terminal or differ("world_size"), lambda row: row["world_size"] or ""),
        ("state", True, partial(_state, brief=terminal)),
        (metric or "", metric, chosen),
        ("metrics", roomy or not (metric or tiny), metrics),
        ("line", roomy and differ("line"), line),
        ("id", True, lambda row: names[row["id"]]),
    ]
    return [
        (one_line(name), cell)
        for name, wanted, cell in columns
        if wanted and (not terminal or any(str(cell(each)) for each in rows))
    ]


_FLEXIBLE = (("metrics", 16), ("state", 11), ("metrics", 7))

_WIDE = 85
"""The width, besides ids and a chosen metric, that has room for times, lines and more metrics."""

_TINY = 50
"""The width below which even ages and metrics have no room."""


def _time(moment: datetime | None) -> str:
    return "" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}Z"


def _age(moment: datetime | None, now: datetime) -> str:
    return "" if moment is None else age_text((now - moment).total_seconds())


def _state(row: dict[str, Any], brief: bool) -> Text:
    reason = row["reason"].partition(":")[0]
    state = "complete" if row["complete"] else f"incomplete: {reason}"
    state = f"damaged: {row['problem']}" if row["problem"] else state
    texts = [state.partition(":")[0] if brief else state]
    texts += [mark for mark in ("pinned", "final", "best") if row[mark]]
    if row["copied_bytes"]:
        texts.append(f"{size_text(row['copied_bytes'])} of copies")
    if row["nan"]:
        texts.append(f"{row['nan']} NaN")
    if row["differences"]:
        texts.append(f"{row['differences']} differing copies")
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

    names = [each for each in below if not each.startswith(".")][:_MOST_RUNS]
    listed = await all_of([partial(find, each) for each in names], _AT_ONCE)
    found = [(name, infos) for name, infos in zip(names, listed, strict=True) if infos]
    found.sort(key=lambda each: each[1][0].key, reverse=True)
    runs = []
    with screen.meter("reading runs", len(found[:limit]), "things") as meter:
        for prefix, infos in found[:limit]:
            complete = [each for each in infos if each.complete]
            newest = (complete or infos)[0]
            sizes = [] if brief else await stored_sizes(store, complete, prefix)
            unfinished = [e for e in infos if not e.complete and e.reason != DELETING]
            runs.append({
                "name": prefix.rstrip("/"), "step": newest.step, "id": newest.id,
                "saved_at": newest.saved_at, "complete": len(complete),
                "incomplete": len(unfinished),
                "bytes": None if brief or None in sizes else sum(filter(None, sizes)),
            })  # fmt: skip
            meter.advance(1)
    return runs


_MOST_RUNS = 1000


def _instead(
    screen: Screen, foreign: Mapping[str, Any] | None, runs: Sequence[dict[str, Any]]
) -> RenderableType:
    """Show a place without checkpoints of ckpipe: what another program wrote, or runs below it."""
    if foreign is not None:
        many = f"{files_text(foreign['files'])}, {foreign['tensors']} tensors"
        size = size_text(foreign["bytes"])
        return Text(f"a checkpoint of another program ({foreign['format']}): {many}, {size}")
    if not runs:
        return Text("no checkpoints here")
    now, aged = datetime.now(UTC), screen.terminal
    rows = [
        (each["name"], each["step"], each["complete"], each["incomplete"] or "",
         sized(each["bytes"]), _age(each["saved_at"], now) if aged else _time(each["saved_at"]))
        for each in runs
    ]  # fmt: skip
    headings = ("run", "newest", "complete", "incomplete", "size", "age" if aged else "saved at")
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


def _checkpoint_data(
    info: CheckpointInfo, summary: Summary | None = None, problem: str = ""
) -> dict[str, Any]:
    """Join what the list of the root says with the summary of a checkpoint, if known."""
    data = asdict(info) | {"metrics": {}, "final": False, "copied_bytes": 0, "problem": problem}
    data["best"] = False
    if summary is not None:
        data |= summary.members | {"metrics": dict(summary.metrics), "line": summary.line}
        data["nan"], data["differences"] = summary.nan, summary.differences
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
        facts = [
            (f"{name}:".ljust(12), value) for name, value in _facts(about, pinned, saved_at, screen)
        ]
        shown = table(("", ""), facts, flexible=[("", 20)])
        shown.show_header = False
        screen.result(data, shown, *_shown_tree(about, key_paths(opened.document), depth))
        return OK

    serve(ctx, work)


_DEEPEST = 100
"""The most levels of names that are drawn; a hostile checkpoint may have any number."""


_Entry = tuple[Sequence[str], str, TensorDescription | None]
"""The path of a name, its description, and the tensor, if it is the label of one."""


def _shown_tree(
    about: CheckpointDescription,
    paths: Mapping[str, tuple[str, ...]],
    depth: int | None,
) -> Iterator[RenderableType]:
    def path(label: str) -> Sequence[str]:
        return paths.get(label) or label.split(".")

    entries: list[_Entry] = []
    for each in about.tensors:
        entries.append((path(each.label), _tensor_text(each), each))
        entries += [(path(other), f"→ {each.label}", None) for other in each.also]
    entries += [(path(label), text, None) for label, text in about.wrappers.items()]
    for value in about.values:
        text = f"= {value.value}{_ranks_text(value.ranks, value.differs)}"
        entries.append((path(value.label), text, None))
    if entries:
        tree = Tree(Text("state"))
        _draw(tree, entries, 0, min(depth or _DEEPEST, _DEEPEST))
        yield tree


def _facts(
    about: CheckpointDescription, pinned: bool, saved_at: datetime | None, screen: Screen
) -> Iterator[tuple[str, object]]:
    size = f"{size_text(about.bytes)} in {about.files} data file{'s' * (about.files != 1)}"
    if about.linked_bytes:
        size += f", {size_text(about.linked_bytes)} linked"
    if about.source:
        yield "place", about.source
        yield "size", size
        return
    yield "checkpoint", about.id
    yield "step", about.step
    yield "began", about.started
    age = f" ({_age(saved_at, datetime.now(UTC))} ago)" if screen.terminal else ""
    yield "saved", f"{_time(saved_at)}{age}"
    yield "size", size
    yield "ranks", about.world_size
    yield "line", about.line or NO_LINE
    if about.resumed_from:
        yield "resumed from", about.resumed_from
    words = [word for word, set_ in (("pinned", pinned), ("final", about.final)) if set_]
    words += [f"{about.nan} NaN"] if about.nan else []
    words += [f"{about.differences} differing copies"] if about.differences else []
    if words:
        yield "marks", marks(*words)
    for differing in about.differing:
        yield "differs", str(differing)
    yield "written by", ", ".join(f"{name} {value}" for name, value in about.writer.items())
    for name, given in (("metrics", about.metrics), ("metadata", about.metadata)):
        if given:
            yield name, ", ".join(f"{key}={value}" for key, value in given.items())


def _tensor_text(each: TensorDescription) -> str:
    kind = "" if each.kind == "tensor" else f" {each.kind}"
    device = "" if each.device == "cpu" else f" on {each.device}"
    text = f"{each.dtype}{list(each.shape)}{kind}{device}, {size_text(each.bytes)}"
    if each.shares_with:
        text += f", shares memory with {', '.join(each.shares_with)}"
    if each.boxes > 1:
        text += f", {each.boxes} boxes"
    if each.nan:
        text += f", {each.nan} NaN"
    return text + _ranks_text(each.ranks, each.differs)


def _ranks_text(ranks: tuple[int, ...], differs: bool) -> str:
    if differs:
        return f", another on each of {len(ranks)} ranks"
    return "" if ranks == (0,) else f", {len(ranks)} rank{'s' * (len(ranks) != 1)}"


def _draw(tree: Tree, entries: Iterable[_Entry], level: int, depth: int) -> None:
    groups: defaultdict[str, list[_Entry]] = defaultdict(list)
    for each in entries:
        groups[each[0][level]].append(each)
    for name, group in groups.items():
        below = [each for each in group if len(each[0]) > level + 1]
        line = " ".join([name, *[text for path, text, _ in group if len(path) == level + 1][-1:]])
        tensors = [tensor.bytes for _, _, tensor in group if tensor is not None]
        if below and tensors:
            many = "s" * (len(tensors) != 1)
            line += f" ({len(tensors)} tensor{many}, {size_text(sum(tensors))})"
        node = tree.add(Text(one_line(line)))
        if level + 1 < depth:
            _draw(node, below, level + 1, depth)
