"""Check that the state of optimizers follows its parameters through transforms.

Theory. An optimizer is told by its form: labels ``state.…`` beside ``param_groups…``, nested or
flat, as torch and DCP have them, or beside ``groups…``, as a ``training_state`` has them. Its state
stands under the names of parameters, or under their numbers. A *head* is the label of an optimizer
with a dot behind it, and empty at the root. Its parameters are looked for around it: in the
innermost container with as many tensors as it has state for, so that the optimizer of one training
state does not ask for the model of another; and, if no ``model`` is in it, among the tensors that
are near to no optimizer. Without groups it is told by the names of usual moments.

State by name follows if it is made of the state of the parameters of which its parameter is made,
by the same steps. State by number follows if no parameter is cut, joined or rearranged, and all
keep their order.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch

from ckpipe.errors import StructureMismatch
from ckpipe.format.box_steps import Step
from ckpipe.format.edit import Draft, ManifestEdit
from ckpipe.format.labels import encode_key
from ckpipe.format.tree import MAPPINGS, Node, children_of, walk
from ckpipe.loading.stateful import unwrapped
from ckpipe.state.values import encode_value

_GROUPS = re.compile(
    r"(?:^|(?<=\.))(?:param_groups(?:\.|$)|groups\.(?=(?:.*\.)?(?:options|params)\.))"
)
_BARE = re.compile(
    r"(?:^|(?<=\.))state\.(?!(?:.*\.)?state\.)(?=.*\.(?:exp_avg\w*|exp_inf|momentum_buffer|"
    r"square_avg|acc_delta)$)|(?<=\boptimizer\.)state\."
)
_INSIDE = re.compile(r"(?:^|(?<=\.))(?:state|joint|param_groups|groups|plain|empty)\.")


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """An optimizer of a checkpoint.

    Args:
        head: Its head.
        around: The container around its parameters.
        parameters: The labels of tensors that may be its parameters. Each has the name by which it
            has state for it; None if it numbers them.
        states: The labels of the tensors of its state, each with such a name; None if no parameter
            is called so.
        numbered: Whether it numbers them.
        shapes: The shapes of the parameters with state; None if their state does not tell them.
    """

    head: str
    around: str
    parameters: Mapping[str, str | None]
    states: Mapping[str, str | None]
    numbered: bool
    shapes: set[tuple[int, ...]] | None


@dataclass(frozen=True, slots=True)
class _Container:
    """The tensors in a container that are of no optimizer: their labels, ends of them, shapes."""

    labels: dict[str, str | None] = field(default_factory=dict)
    ends: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    shapes: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def add(self, label: str, shape: tuple[int, ...]) -> None:
        self.labels[label] = None
        self.shapes[shape] += 1
        for end in _ends(unwrapped(label)):
            self.ends[end].append(label)


def _heads(edit: ManifestEdit, before: ManifestEdit) -> set[str]:
    """Return the heads of optimizers, also of those that transforms left without their groups."""
    heads = _heads_in(before.origins)
    moved = set()
    for label, olds in edit.origins.items():
        old = _head(olds[0], heads)
        if old is not None and label.endswith(end := olds[0][len(old) :]):
            moved.add(label[: -len(end)])
    return heads | moved | _heads_in(edit.origins)


def _heads_in(labels: Collection[str]) -> set[str]:
    heads = {label[: each.start()] for label in labels for each in _GROUPS.finditer(label)}
    rest = (label for label in labels if _head(label, heads) is None)
    return heads | {label[: each.start()] for label in rest for each in _BARE.finditer(label)}


def _head(label: str, heads: Collection[str]) -> str | None:
    """Return the head of the optimizer in which a label lies, if it lies in one."""
    found = (label[: each.start()] for each in _INSIDE.finditer(label))
    return next((each for each in found if each in heads), None)


def _optimizers(tensors: Mapping[str, _Tensor], heads: Collection[str]) -> list[_Optimizer]:
    """Return the optimizers at some heads that have tensors of state."""
    homes: defaultdict[str, list[str]] = defaultdict(list)
    others = _Container()
    for label, tensor in tensors.items():
        if (head := _head(label, heads)) is None:
            others.add(label, tensor.shape)
        elif label.startswith((f"{head}state.", f"{head}joint.")):
            homes[head].append(label)
    inside = {each: _Container() for head in homes for each in _containers(head)}
    for label in others.labels:
        for each in _containers(label) if inside else ():
            if each in inside:
                inside[each].add(label, tensors[label].shape)
    found = [_found(head, states, tensors, others, inside) for head, states in homes.items()]
    near = {label for each in found for label in inside[each.around].labels}
    for around in {each.around for each in found}:
        own = inside[around].labels
        if not any(label.startswith(f"{around}model.") for label in own):
            own |= {label: None for label in others.labels if label not in near}
    return [replace(each, parameters=_parameters(each, others, inside)) for each in found]


def _found(
    head: str,
    labels: Sequence[str],
    tensors: Mapping[str, _Tensor],
    others: _Container,
    inside: Mapping[str, _Container],
) -> _Optimizer:
    """Return the optimizer at a head, without its parameters."""
    states = {label: unwrapped(label[len(head) + len("state.") :]) for label in labels}
    names = {
        label: next((each for each in _starts(rest) if each in others.ends), None)
        for label, rest in states.items()
    }
    found = {name for name in names.values() if name is not None}
    joint = any(label.startswith(f"{head}joint.") for label in labels)
    digits = all(rest[:1].isdigit() for rest in states.values())
    numbered = joint or not found or (digits and not any("." in name for name in found))
    shapes, count = _shapes_of({states[each]: tensors[each].shape for each in labels})
    certain = shapes if shapes and shapes <= others.shapes.keys() else None

    def enough(near: _Container) -> bool:
        if not numbered:
            return len(found & near.ends.keys()) >= len(found)
        alike = near.labels if certain is None else near.shapes.elements()
        return sum(certain is None or each in certain for each in alike) >= count

    around = next((each for each in _containers(head) if enough(inside[each])), "")
    return _Optimizer(head, around, {}, names, numbered, certain)


def _parameters(
    optimizer: _Optimizer, others: _Container, inside: Mapping[str, _Container]
) -> Mapping[str, str | None]:
    near, owned = inside[optimizer.around].labels, dict[str, str | None]()
    if optimizer.numbered:
        return near
    for name in sorted({each for each in optimizer.states.values() if each}, key=len, reverse=True):
        for label in others.ends[name]:
            if label in near:
                owned.setdefault(label, name)
    return owned


def _shapes_of(state: Mapping[str, tuple[int, ...]]) -> tuple[set[tuple[int, ...]] | None, int]:
    """Return the shapes of parameters with state, if it tells them, and how many have some."""
    shapes: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
    for label, shape in state.items():
        number, _, key = label.partition(".")
        if re.search(r"(?:^|_)(?:row|col)(?:_|$)", key):  # a factor of a moment
            return None, len({each.partition(".")[0] for each in state})
        shapes[number].update({shape} if key != "step" and prod(shape) != 1 else ())
    if any(len(each) > 1 for each in shapes.values()):
        return None, len(shapes)
    return {shape for each in shapes.values() for shape in each}, sum(map(bool, shapes.values()))


def _containers(label: str) -> Iterator[str]:
    """Yield the containers around a label, with a dot behind them, the innermost first."""
    label = label.rstrip(".")
    while "." in label:
        label = label.rpartition(".")[0]
        yield f"{label}."
    yield ""


def _ends(label: str) -> Iterator[str]:
    """Yield a label and all of its ends that begin after a dot, the longest first."""
    yield label
    while "." in label:
        label = label.partition(".")[2]
        yield label


def _starts(label: str) -> Iterator[str]:
    while "." in label:
        label = label.rpartition(".")[0]
        yield label


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of the transformed checkpoint.

    Args:
        shape: Its shape.
        sources: The tensors of which it is made: their labels as saved, and their steps.
    """

    shape: tuple[int, ...]
    sources: dict[tuple[tuple[str, ...], tuple[Step, ...]], None]


def _tensors(edit: ManifestEdit, before: ManifestEdit) -> dict[str, _Tensor]:
    """Return the tensors of an edit by their labels; they may lie in parts on several ranks."""
    found: dict[str, _Tensor] = {}
    for draft, old in zip(edit.drafts, before.drafts, strict=True):
        names: defaultdict[int, list[str]] = defaultdict(list)
        for label, number in old.tensors().items():
            names[number].append(label)
        for label, number in draft.tensors().items():
            known = found.setdefault(label, _Tensor(draft.rows[number].shape, {}))
            for source, steps in draft.sources[number]:
                known.sources[tuple(names[source]), steps] = None
    return found


_PLACE = re.compile(
    r"(?P<head>(?:.*\.)?)optimizer\.(?P<home>state|plain|groups\..*\.params)\.(?P<name>.+)"
)


def give_to_parts(edit: ManifestEdit) -> None:
    """Give parts of a parameter the place that it had in the optimizer of a ``training_state``.

    Each part gets its group, and its count of steps. A parameter of another shape gets this shape
    in its group. State of its shape is left to transforms of its own.

    Args:
        edit: The edit, with all transforms applied.
    """
    found = {label: each for label in edit.origins if (each := _PLACE.fullmatch(label))}
    heads = {each["head"] for each in found.values() if each["home"].startswith("groups.")}
    tensors = _tensors(edit, ManifestEdit(edit.document)) if heads else {}
    parts: defaultdict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for label, tensor in tensors.items():
        olds, steps = next(iter(tensor.sources))
        for old in olds if steps and len(tensor.sources) == 1 else ():
            parts[old][label] = tensor.shape
    made: dict[str, list[str]] = {}
    for draft in edit.drafts if parts else ():
        moves: dict[str, list[tuple[str, Node]]] = {}
        for label in draft.leaves():
            if label in found and found[label]["head"] in heads:
                moves[label] = list(_places(edit, draft, label, found[label], parts))
        moves = {label: news for label, news in moves.items() if news}
        made |= {new: [label] for label, news in moves.items() for new, _ in news}
        draft.move(moves)
        for node, label in list(walk(draft.tree)):
            if node.kind in MAPPINGS and any(label == f"{head}optimizer.state" for head in heads):
                model = f"{label.removesuffix('optimizer.state')}model."
                names = {k.removeprefix(model) for each in parts.values() for k in each}
                node.become(_nested(node, names))
        draft.tree = draft.tree.with_nodes(draft.tree.nodes)
    edit.note(made)


def _places(
    edit: ManifestEdit,
    draft: Draft,
    label: str,
    now: re.Match[str],
    parts: Mapping[str, Mapping[str, tuple[int, ...]]],
) -> Iterator[tuple[str, Node]]:
    """Yield the leaves that parts of a parameter have in place of one that it had."""
    leaf, old = draft.leaves()[label], _PLACE.fullmatch(edit.origins[label][0])
    key = f".{now['name'].rpartition('.')[2]}" if now["home"] == "state" else ""
    row = draft.rows[leaf.head] if leaf.kind == "tensor" else None
    if old is None or (row is not None and row.shape and key != ".step"):
        return
    name, model = now["name"].removesuffix(key), f"{now['head']}model."
    own = parts.get(f"{old['head']}model.{old['name'].removesuffix(key)}", {})
    news = {k[len(model) :]: shape for k, shape in own.items() if k.startswith(model)}
    for each, shape in news.items() if not key or news.keys() != {name} else ():
        node, where = leaf, f"{now['head']}optimizer.{now['home']}.{each}{key}"
        if row is not None and each != name:
            node = draft.add(replace(row, label=where), draft.sources[leaf.head])
        elif now["home"].startswith("groups."):
            node = draft.add_value(encode_value(torch.Size(shape)))
        yield where, node


def _nested(state: Node, names: Collection[str]) -> Node:
    """Return a state with a dict for each parameter that begins the keys of leaves."""
    items: dict[Any, Node] = {}
    for key, node, _ in children_of(state, ""):
        name = next((each for each in _starts(str(key)) if each in names), None)
        if name is None or node.kind not in ("tensor", "value"):
            items[key] = node
            continue
        inner = items.get(name, Node("dict"))
        items[name] = inner.with_items([*inner.items(), (str(key)[len(name) + 1 :], node)])
    return state.with_items((encode_key(key), each) for key, each in items.items())


def check_moments(
    edit: ManifestEdit, select: Callable[[str], bool], models: Mapping[str, Sequence[str]]
) -> None:
    """Check that the state of optimizers follows its parameters, once all transforms are applied.

    Args:
        edit: The edit.
        select: Selects the labels that are of use.
        models: For the label of each model of the target those of its parameters, in their order.

    Raises:
        StructureMismatch: If a parameter has other names, shapes or another order of elements than
            its state.
    """
    before = ManifestEdit(edit.document)
    heads = _heads(edit, before)
    tensors = _tensors(edit, before) if heads else {}
    if all([*each.sources] == [((label,), ())] for label, each in tensors.items()):
        return
    saved = _tensors(before, before)
    names: defaultdict[str, set[str]] = defaultdict(set)
    for each in _optimizers(saved, heads):
        for label, name in [*each.parameters.items(), *each.states.items()]:
            if name is not None and not each.numbered:
                names[label].add(f"{each.head}\0{name}")
    made: defaultdict[str, list[str]] = defaultdict(list)
    for label, tensor in tensors.items():
        for name in {name for olds, _ in tensor.sources for old in olds for name in names[old]}:
            made[name].append(label)
    first: dict[str, str | None] = {}
    for each in _optimizers(tensors, heads):
        loaded = {label: name for label, name in each.states.items() if select(label)}
        if loaded and each.numbered:
            if each.around not in first:
                first[each.around] = _first_disordered(each.parameters, tensors, saved, models)
            _check_numbered(each, loaded, tensors, saved, first[each.around])
        elif loaded:
            _check_named(each, loaded, tensors, names, made)
            _check_groups(each.head, loaded, tensors, filter(select, edit.origins), edit.origins)


def _check_named(
    optimizer: _Optimizer,
    loaded: Mapping[str, str | None],
    tensors: Mapping[str, _Tensor],
    names: Mapping[str, set[str]],
    made: Mapping[str, Sequence[str]],
) -> None:
    parameters: defaultdict[str | None, list[str]] = defaultdict(list)
    for label, name in optimizer.parameters.items():
        parameters[name].append(label)

    def called(olds: Sequence[str]) -> set[str]:
        return {name for old in olds for name in names.get(old, ())}

    def follows(state: str, label: str) -> bool:
        mine, theirs = tensors[state], tensors[label].sources
        whole = not mine.shape or state.endswith(".step")
        pairs = [
            (called(olds), called(others), whole or steps == turned)
            for olds, steps in mine.sources
            for others, turned in theirs
        ]
        same = sum(alike and (not a or not b or not a.isdisjoint(b)) for a, b, alike in pairs)
        return same > 0 if whole else same >= len(mine.sources) == len(theirs)

    for state, name in loaded.items():
        if name is not None and (held := parameters[name]):
            stale = [label for label in held if not follows(state, label)]
        else:
            mine = {each for olds, _ in tensors[state].sources for each in called(olds)}
            stale = [
                label
                for each in mine
                for label in made.get(each, ())
                if label not in optimizer.states
            ]
        if stale:
            ways = ". State under names may be changed alike by Rename and Rearrange"
            if optimizer.head.endswith("optimizer."):
                ways += ", and by Split and Unstack in a training_state"
            raise _left_behind(optimizer.head, stale[0], state, ways)


def _check_groups(
    head: str,
    states: Iterable[str],
    tensors: Mapping[str, _Tensor],
    labels: Iterable[str],
    origins: Mapping[str, Sequence[str]],
) -> None:
    """Check that groups follow the names of state; those that are values keep the saved ones."""
    news: dict[str, str] = {}
    for state in states:
        old, end = next(iter(tensors[state].sources))[0][0], unwrapped(state[len(head) :])
        if not unwrapped(old).endswith(end):
            news[unwrapped(old).partition("state.")[2].rpartition(".")[0]] = state
    for label in labels if news else ():
        if not label.startswith(f"{head}param_groups."):
            continue
        if not unwrapped(origins[label][0]).endswith(unwrapped(label[len(head) :])):
            continue
        value = re.search(r"param_groups\.\d+\.params\.\d+$", label)
        for name, state in news.items():
            if value or f".{name}." in f".{label}.":
                raise _left_behind(head, label, state)


def _check_numbered(
    optimizer: _Optimizer,
    loaded: Collection[str],
    tensors: Mapping[str, _Tensor],
    saved: Mapping[str, _Tensor],
    disordered: str | None,
) -> None:
    shapes, shaped = optimizer.shapes, any(tensors[each].shape for each in loaded)
    for label in optimizer.parameters if shaped else ():
        made = tensors[label].sources
        has_state = shapes is None or any(saved[olds[0]].shape in shapes for olds, _ in made)
        if has_state and any(steps for _, steps in made):
            raise _left_behind(optimizer.head, label, min(loaded))
    if disordered:
        raise _left_behind(optimizer.head, disordered, min(loaded))


def _first_disordered(
    labels: Collection[str],
    tensors: Mapping[str, _Tensor],
    saved: Collection[str],
    models: Mapping[str, Sequence[str]],
) -> str | None:
    """Return the first label that stands before one that came before it, if there is one.

    Args:
        labels: The labels of parameters that an optimizer may number.
        tensors: The tensors of the transformed checkpoint.
        saved: The saved labels, in their order.
        models: For the label of each model of the target those of its parameters, in their order.
            Without them the names that were saved tell the order: a new label stands where the old
            one with the longest common end stood.
    """
    places = {label: place for place, label in enumerate(saved)}
    sources = {label: next(iter(tensors[label].sources))[0][0] for label in labels}
    pairs = sorted(sources.items(), key=lambda each: places[each[1]])
    if len({_prefixes(new, old) for new, old in pairs}) < 2:  # which keeps the order
        return None
    live = [_live_places([new for new, _ in pairs], model) for model in models.values()]
    homes = {label: number for number, model in enumerate(live) for label in model}
    crossed = {
        new: root
        for new, old in pairs
        for number, root in enumerate(models)
        if root and old.startswith(f"{root}.") and homes.get(new, number) != number
    }
    taken = {[*models][homes[new]] for new in crossed}
    for new, root in crossed.items():  # another model takes the place of this one
        if root in taken:
            return new
    for model in live if homes else [_saved_places(pairs)]:
        for one, other in pairwise(model):
            if model[other] < model[one]:
                return other
    return None


def _prefixes(new: str, old: str) -> tuple[str, str]:
    """Return what differs at the beginning of two labels."""
    while new and new.rpartition(".")[2] == old.rpartition(".")[2]:
        new, old = new.rpartition(".")[0], old.rpartition(".")[0]
    return new, old


def _live_places(labels: Sequence[str], order: Sequence[str]) -> dict[str, int]:
    whole = {unwrapped(name): place for place, name in enumerate(order)}
    ends = {end: place for name, place in reversed(whole.items()) for end in _ends(name)}
    found = {}
    for label in labels:  # one of the two may stand below the other's place
        bare = unwrapped(label)
        at = next((whole[end] for end in _ends(bare) if end in whole), ends.get(bare))
        if at is not None:
            found[label] = at
    return found


def _saved_places(renamed: Sequence[tuple[str, str]]) -> dict[str, int]:
    olds: defaultdict[str, list[int]] = defaultdict(list)
    for place, (_, old) in enumerate(renamed):
        for end in _ends(old):
            olds[end].append(place)
    found = {}
    for own, (new, _) in enumerate(renamed):
        alike = next((olds[end] for end in _ends(new) if end in olds), [own])
        found[new] = own if own in alike else alike[0]
    return found


def _left_behind(head: str, label: str, state: str, ways: str = "") -> StructureMismatch:
    whole = re.sub(r"(\.\d+)+$", "", head.rstrip("."))
    kinds = repr(whole) if whole else "'state', 'param_groups'"
    return StructureMismatch(
        "The transforms give this parameter another name, shape or order, and leave the state of "
        f"its optimizer, such as {state!r}, as it was",
        key=label,
        hint=f"Leave it out with ckpipe.Drop({kinds}) behind them{ways}",
    )
