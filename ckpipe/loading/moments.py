"""Check that the state of optimizers follows its parameters through transforms.

Theory. An optimizer is told by its form: labels ``state.…`` beside ``param_groups…``, nested or
flat, as torch and DCP have them, or beside ``groups…``, as a ``training_state`` has them. Its state
stands under the names of parameters, or under their numbers. A *head* is the label of an optimizer
with a dot behind it, and empty at the root. Its parameters are looked for around it: in the
innermost container with as many tensors as it has state for, so that the optimizer of one training
state does not ask for the model of another.

State by name follows if it is made of the state of the parameters of which its parameter is made,
by the same steps. State by number follows if no parameter is cut, joined or rearranged, and all
keep their order.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ckpipe.errors import StructureMismatch
from ckpipe.format.box_steps import Step
from ckpipe.format.edit import Draft, ManifestEdit
from ckpipe.format.labels import encode_key
from ckpipe.format.tree import MAPPINGS, Node, children_of, walk
from ckpipe.loading.stateful import unwrapped
from ckpipe.state.values import encode_value

_STATE = re.compile(r"(?:^|(?<=\.))(?:state|joint)\.")
_GROUPS = re.compile(
    r"(?:^|(?<=\.))(?:param_groups(?:\.|$)|groups\.(?=(?:.*\.)?(?:options|params)\.))"
)
_KINDS = ("state.", "joint.", "param_groups.", "groups.", "plain.", "empty.")


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """An optimizer of a checkpoint.

    Args:
        head: Its head.
        parameters: The labels of tensors that may be its parameters. Each has the name by which it
            has state for it; None if it numbers them.
        states: The labels of the tensors of its state, each with such a name; None if no parameter
            is called so.
    """

    head: str
    parameters: Mapping[str, str | None]
    states: Mapping[str, str | None]
    numbered: bool


def _heads(pattern: re.Pattern[str], labels: Collection[str]) -> set[str]:
    return {label[: each.start()] for label in labels for each in pattern.finditer(label)}


def _optimizers(tensors: Collection[str], heads: Collection[str]) -> Iterator[_Optimizer]:
    """Yield the optimizers at some heads that have tensors of state."""
    heads = sorted(_heads(_STATE, tensors).intersection(heads))
    inside = tuple(head + kind for head in heads for kind in _KINDS)
    others = {label: unwrapped(label) for label in tensors if not label.startswith(inside)}
    known = {end for bare in others.values() for end in _ends(bare)}
    for head in heads:
        start = len(head) + len("state.")
        states = {
            label: unwrapped(label[start:])
            for label in tensors
            if label.startswith((f"{head}state.", f"{head}joint."))
        }
        names = {
            label: next((each for each in _starts(rest) if each in known), None)
            for label, rest in states.items()
        }
        found = {name for name in names.values() if name is not None}
        joint = any(label.startswith(f"{head}joint.") for label in states)
        digits = all(rest[:1].isdigit() for rest in states.values())
        dotted = any("." in name for name in found)
        numbered = joint or not found or (digits and not dotted)
        least = len({rest.partition(".")[0] for rest in states.values()} if numbered else found)
        parts = head.split(".")[:-1]
        for depth in range(len(parts) - 1, -1, -1):
            around = ".".join([*parts[:depth], ""])
            near = {label: bare for label, bare in others.items() if label.startswith(around)}
            ends = {end for bare in near.values() for end in _ends(bare)}
            if (len(near) if numbered else len(found & ends)) >= least:
                break
        else:
            near = others
        owned = {
            label: None if numbered else next((end for end in _ends(bare) if end in found), None)
            for label, bare in near.items()
        }
        owned = {label: name for label, name in owned.items() if numbered or name is not None}
        yield _Optimizer(head, owned, names, numbered)


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
            if node[0] in MAPPINGS and any(label == f"{head}optimizer.state" for head in heads):
                model = f"{label.removesuffix('optimizer.state')}model."
                _nest(node, {k.removeprefix(model) for each in parts.values() for k in each})
        draft.tree = [*draft.tree]
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
    row = draft.rows[leaf[1]] if leaf[0] == "tensor" else None
    if old is None or (row is not None and row.shape and key != ".step"):
        return
    name, model = now["name"].removesuffix(key), f"{now['head']}model."
    own = parts.get(f"{old['head']}model.{old['name'].removesuffix(key)}", {})
    news = {k[len(model) :]: shape for k, shape in own.items() if k.startswith(model)}
    for each, shape in news.items() if not key or news.keys() != {name} else ():
        node, where = leaf, f"{now['head']}optimizer.{now['home']}.{each}{key}"
        if row is not None and each != name:
            node = draft.add(replace(row, label=where), draft.sources[leaf[1]])
        elif now["home"].startswith("groups."):
            node = draft.add_value(encode_value(torch.Size(shape)))
        yield where, node


def _nest(state: Node, names: Collection[str]) -> None:
    """Put leaves with the name of a parameter in their key into a dict of this name."""
    items: dict[Any, Node] = {}
    for key, node, _ in children_of(state, ""):
        name = next((each for each in _starts(str(key)) if each in names), None)
        if name is None or node[0] not in ("tensor", "value"):
            items[key] = node
            continue
        inner = items.setdefault(name, ["dict", [], []])
        inner[1].append(str(key)[len(name) + 1 :])
        inner[2].append(node)
    state[1:3] = list(map(encode_key, items)), list(items.values())


def check_moments(edit: ManifestEdit, select: Callable[[str], bool], order: Sequence[str]) -> None:
    """Check that the state of optimizers follows its parameters, once all transforms are applied.

    Args:
        edit: The edit.
        select: Selects the labels that are of use.
        order: The labels of the parameters of the target, in their order, if they are known.

    Raises:
        StructureMismatch: If a parameter has other names, shapes or another order of elements than
            its state.
    """
    before = ManifestEdit(edit.document)
    heads = _heads(_GROUPS, {**before.origins, **edit.origins})
    tensors = _tensors(edit, before) if heads else {}
    if all([*each.sources] == [((label,), ())] for label, each in tensors.items()):
        return
    saved = _tensors(before, before)
    names: defaultdict[str, set[str]] = defaultdict(set)
    for each in _optimizers(saved, heads):
        for label, name in [*each.parameters.items(), *each.states.items()]:
            if name is not None and not each.numbered:
                names[label].add(f"{each.head}\0{name}")
    for each in _optimizers(tensors, heads):
        loaded = {label: name for label, name in each.states.items() if select(label)}
        if loaded and each.numbered:
            _check_numbered(each, loaded, tensors, saved, order)
        elif loaded:
            _check_named(each, loaded, tensors, names)


def _check_named(
    optimizer: _Optimizer,
    loaded: Mapping[str, str | None],
    tensors: Mapping[str, _Tensor],
    names: Mapping[str, set[str]],
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
                for label, each in tensors.items()
                if label not in optimizer.states
                and any(not mine.isdisjoint(called(olds)) for olds, _ in each.sources)
            ]
        if stale:
            raise _left_behind(optimizer.head, stale[0], state)


def _check_numbered(
    optimizer: _Optimizer,
    loaded: Collection[str],
    tensors: Mapping[str, _Tensor],
    saved: Mapping[str, _Tensor],
    order: Sequence[str],
) -> None:
    sources = {label: list(tensors[label].sources) for label in optimizer.parameters}
    shapes = _shapes_of(
        optimizer, tensors, {saved[olds[0]].shape for made in sources.values() for olds, _ in made}
    )
    for label, made in sources.items() if any(tensors[each].shape for each in loaded) else ():
        has_state = shapes is None or any(saved[olds[0]].shape in shapes for olds, _ in made)
        if has_state and any(steps for _, steps in made):
            raise _left_behind(optimizer.head, label, min(loaded))
    places = {label: place for place, label in enumerate(saved)}
    moved = sorted((places[made[0][0][0]], label) for label, made in sources.items())
    renamed = [(label, sources[label][0][0][0]) for _, label in moved]
    renamed = [(new, old) for new, old in renamed if new not in saved or new != old]
    if disordered := _first_disordered(renamed, order):
        raise _left_behind(optimizer.head, disordered, min(loaded))


def _shapes_of(
    optimizer: _Optimizer, tensors: Mapping[str, _Tensor], known: Collection[tuple[int, ...]]
) -> set[tuple[int, ...]] | None:
    """Return the shapes of the parameters with state, if some of their state has these shapes."""
    shapes: defaultdict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    numbers = set()
    for label in optimizer.states:
        number, _, key = label[len(optimizer.head) + len("state.") :].partition(".")
        numbers.add(number)
        shapes[key][number] = tensors[label].shape
    fits = [set(each.values()) for each in shapes.values() if each.keys() == numbers]
    return next((each for each in fits if () not in each and each <= set(known)), None)


def _first_disordered(renamed: Sequence[tuple[str, str]], order: Sequence[str]) -> str | None:
    """Return the first new name that stands before one that came before it, if there is one.

    Args:
        renamed: New labels and old ones, in the order in which they were saved.
        order: The labels of the target's parameters in their order, if they are known. Else the
            names that were saved tell the order: a new label stands where the old one with the
            longest common end stood.
    """
    if len({_prefixes(new, old) for new, old in renamed}) < 2:  # which keeps the order
        return None
    places = _live_places([new for new, _ in renamed], order) or _saved_places(renamed)
    last = -1
    for new, place in places.items():
        if place < last:
            return new
        last = place
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


def _left_behind(head: str, label: str, state: str) -> StructureMismatch:
    whole = re.sub(r"(\.\d+)+$", "", head.rstrip("."))
    kinds = repr(whole) if whole else ", ".join(repr(each.rstrip(".")) for each in _KINDS[:3:2])
    return StructureMismatch(
        "The transforms give this parameter another name, shape or order, and leave the state of "
        f"its optimizer, such as {state!r}, as it was",
        key=label,
        hint=f"Leave it out with ckpipe.Drop({kinds}) behind them. State under names may be "
        "changed alike by Rename and Rearrange, and by Split and Unstack in a training_state",
    )
