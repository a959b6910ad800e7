"""The commands ``ls`` and ``info``. They read no data of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text
from rich.tree import Tree

from ckpipe.backend import Backend, ObjectInfo
from ckpipe.catalog.find import (
    DELETING,
    list_summaries,
    read_index,
    read_summary,
    recheck,
)
from ckpipe.catalog.inspect import data_bytes, describe, key_paths
from ckpipe.cli.running import NO_LINE, OK, MaybeStep, Url, no_match, serve, wanted
from ckpipe.cli.screen import Screen, of_things, one_line, table
from ckpipe.errors import CheckpointNotFound, CorruptCheckpoint, UnsupportedVersion
from ckpipe.foreign.source import Place, open_place
from ckpipe.format.labels import label_filter
from ckpipe.format.summary import REMEDY, Summary, summary_of
from ckpipe.threads import run_lanes
from ckpipe.types import (
    CheckpointDescription,
    CheckpointId,
    CheckpointInfo,
    TensorDescription,
    size_text,
)

_AT_ONCE = 16


def list_(
    ctx: typer.Context,
    url: Url,
    brief: Annotated[bool, typer.Option("--brief", help="Names and times only.")] = False,
    read: Annotated[
        bool, typer.Option("--read", help="Read every index, which finds damaged ones.")
    ] = False,
) -> None:
    """List checkpoints, the newest first: step, time, size, ranks, metrics, and whether complete.

    It reads the summary of each checkpoint, which says what was saved. If there is none, it reads
    the index.
    """

    async def work(screen: Screen) -> int:
        async with open_place(url, screen.settings) as place:
            backend, infos = place.store, await place.checkpoints()
            foreign = None if infos else await _foreign(place)
            found = {each.id: _checkpoint_data(each) for each in infos}
            if infos and (read or not brief):
                # Summaries describe the saved state; an index also shows damage.
                stored = {} if read else await list_summaries(backend)
                pending = iter(infos)
                with screen.meter("reading checkpoints", len(infos), of_things) as meter:

                    async def lane() -> None:
                        for each in pending:
                            if each.complete:
                                found[each.id] = await _inspected(backend, each, stored)
                            meter.advance(1)

                    await run_lanes(min(_AT_ONCE, len(infos)), lane)
        nothing = "no checkpoints here"
        if foreign is not None:
            nothing = (
                f"a checkpoint of another program ({foreign['format']}): {foreign['files']} files, "
                f"{foreign['tensors']} tensors, {size_text(foreign['bytes'])}"
            )
        many = len({each["line"] for each in found.values()} - {None}) > 1
        line = ("line",) if many else ()  # one line needs no column
        headings = ("step", "saved at", "size", "ranks", "state", "metrics", *line, "id")
        rows = [_row(each, lines=many) for each in found.values() if each["reason"] != DELETING]
        if deleting := [each for each in found.values() if each["reason"] == DELETING]:
            state = f"{len(deleting)} being deleted, the newest is this"
            rows.append(
                (deleting[0]["step"], "", "", "", state, "", *("" for _ in line), deleting[0]["id"])
            )
        screen.result(
            {"url": url, "checkpoints": [*found.values()], "foreign": foreign},
            table(headings, rows, "step", "size", "ranks") if rows else Text(nothing),
        )
        if any(each["copied_bytes"] for each in found.values()):
            screen.note(f"copies are equal bytes that several ranks wrote. {REMEDY}")
        return OK

    serve(ctx, work)


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


def _row(each: dict[str, Any], *, lines: bool) -> tuple[object, ...]:
    state = "complete" if each["complete"] else "incomplete: " + each["reason"].partition(":")[0]
    notes = [f"damaged: {each['problem']}" if each["problem"] else state]
    notes += [mark for mark in ("pinned", "final") if each[mark]]
    if each["copied_bytes"]:
        notes.append(f"{size_text(each['copied_bytes'])} of copies")
    metrics = " ".join(f"{name}={value:.6g}" for name, value in each["metrics"].items())
    saved = "" if each["saved_at"] is None else f"{each['saved_at']:%Y-%m-%d %H:%M:%S}Z"
    size = "" if each["bytes"] is None else size_text(each["bytes"])
    ranks = each["world_size"] or ""
    line = (("" if each["line"] is None else each["line"] or NO_LINE),) if lines else ()
    return (each["step"], saved, size, ranks, ", ".join(notes), metrics, *line, each["id"])


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
        screen.result(data, *_shown_tree(about, pinned, key_paths(opened.document), depth))
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
    pinned: bool,
    paths: Mapping[str, tuple[str, ...]],
    depth: int | None,
) -> Iterator[RenderableType]:
    for name, value in _facts(about, pinned):
        yield Text(one_line(f"{name + ':':<13} {value}"))

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


def _facts(about: CheckpointDescription, pinned: bool) -> Iterator[tuple[str, object]]:
    size = f"{size_text(about.bytes)} in {about.files} data file{'s' * (about.files != 1)}"
    if about.source:
        yield "place", about.source
        yield "size", size
        return
    yield "checkpoint", about.id
    yield "step", about.step
    yield "began", about.started
    yield "size", size
    yield "ranks", about.world_size
    yield "line", about.line or NO_LINE
    if about.resumed_from:
        yield "resumed from", about.resumed_from
    marks = [word for word, set_ in (("pinned", pinned), ("final", about.final)) if set_]
    if marks:
        yield "marks", ", ".join(marks)
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
