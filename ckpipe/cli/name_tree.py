"""The names of a checkpoint drawn as a tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import RenderableType
from rich.text import Text
from rich.tree import Tree

from ckpipe.checkpoints.inspection import Description, TensorDescription, ValueDescription
from ckpipe.cli.screen import one_line, size
from ckpipe.types import CheckpointInfo

_DEEPEST = 100
"""How many levels of names are drawn at most; a hostile checkpoint may have any number."""


@dataclass(slots=True)
class _Branch:
    """What lies below a part of a name: how many tensors and bytes, and what it is itself."""

    below: dict[str, _Branch] = field(default_factory=dict)
    about: str = ""
    tensors: int = 0
    bytes: int = 0


def shown_tree(
    about: Description,
    info: CheckpointInfo,
    paths: Mapping[str, tuple[str, ...]],
    depth: int | None,
) -> Iterator[RenderableType]:
    """The lines that say what a checkpoint is, and the tree of what it holds.

    Args:
        about: What it is and holds.
        info: What the list of the root says of it.
        paths: The keys that labels are made of.
        depth: How many levels of names are drawn; None for all.
    """
    for name, value in _facts(about, info):
        yield Text(one_line(f"{name + ':':<13} {value}"))

    def path(label: str) -> Sequence[str]:
        return paths.get(label) or label.split(".")

    root = _Branch()
    for each in about.tensors:
        _add(root, path(each.label), _tensor_text(each), each)
        for other in each.also:
            _add(root, path(other), f"→ {each.label}", None)
    for value in about.values:
        _add(root, path(value.label), _value_text(value), None)
    if root.below:
        tree = Tree(Text("state"))
        _draw(tree, root, min(depth or _DEEPEST, _DEEPEST))
        yield tree


def _facts(about: Description, info: CheckpointInfo) -> Iterator[tuple[str, object]]:
    yield "checkpoint", about.id
    yield "step", about.step
    yield "began", about.started
    yield "size", f"{size(about.bytes)} in {about.files} data file{'s' * (about.files != 1)}"
    yield "ranks", about.world_size
    if about.resumed_from:
        yield "resumed from", about.resumed_from
    marks = [word for word, set_ in (("pinned", info.pinned), ("final", about.final)) if set_]
    if marks:
        yield "marks", ", ".join(marks)
    yield "written by", ", ".join(f"{name} {value}" for name, value in about.writer.items())
    for name, given in (("metrics", about.metrics), ("metadata", about.metadata)):
        if given:
            yield name, ", ".join(f"{key}={value}" for key, value in given.items())


def _add(root: _Branch, path: Sequence[str], text: str, tensor: TensorDescription | None) -> None:
    branch = root
    for part in [None, *path]:
        if part is not None:
            branch = branch.below.setdefault(part, _Branch())
        if tensor is not None:
            branch.tensors += 1
            branch.bytes += tensor.bytes
    branch.about = text


def _tensor_text(each: TensorDescription) -> str:
    kind = "" if each.kind == "tensor" else f" {each.kind}"
    device = "" if each.device == "cpu" else f" on {each.device}"
    text = f"{each.dtype}{list(each.shape)}{kind}{device}, {size(each.bytes)}"
    if each.shares_with:
        text += f", shares memory with {', '.join(each.shares_with)}"
    if each.boxes > 1:
        text += f", {each.boxes} boxes"
    return text + _ranks_text(each.ranks, each.differs)


def _value_text(value: ValueDescription) -> str:
    return f"= {value.value}" + _ranks_text(value.ranks, value.differs)


def _ranks_text(ranks: tuple[int, ...], differs: bool) -> str:
    if differs:
        return f", another on each of {len(ranks)} ranks"
    return "" if ranks == (0,) else f", {len(ranks)} rank{'s' * (len(ranks) != 1)}"


def _draw(tree: Tree, branch: _Branch, depth: int) -> None:
    for name, below in branch.below.items():
        line = f"{name} {below.about}" if below.about else name
        if below.below and below.tensors:
            many = "s" * (below.tensors != 1)
            line += f" ({below.tensors} tensor{many}, {size(below.bytes)})"
        node = tree.add(Text(one_line(line)))
        if depth > 1:
            _draw(node, below, depth - 1)
