"""Let the state of optimizers follow its parameters through transforms, or refuse them.

A :class:`~ckpipe.Rename` of parameters renames their state too (:func:`followers_of`). Parts of a
cut parameter get state of their own (:func:`give_to_parts`). At the end all state is proved to have
followed (:func:`check_moments`).

Theory. :mod:`ckpipe.state.training_form` tells optimizers by their labels. The state of one stands
under the names of parameters, or under their numbers. Its parameters are looked for around it: in
the innermost container with as many tensors as it has state for, so that the optimizer of one
training state does not ask for the model of another; and, if no ``model`` is in it, among the
tensors that are near to no optimizer.

State by name follows if it is made of the state of the parameters of which its parameter is made,
by the same steps. State by number follows if no parameter is cut, joined or rearranged, and all
keep their order.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch

from ckpipe.errors import StructureMismatch
from ckpipe.format.labels import encode_key, join, label_part, unwrapped
from ckpipe.format.tree import MAPPINGS, WRAPPERS, Node, children_of, walk
from ckpipe.state import training_form as form
from ckpipe.state.values import encode_value
from ckpipe.transforms.box_steps import Step
from ckpipe.transforms.edit import Draft, ManifestEdit


@dataclass(slots=True)
class _Optimizer:
    """An optimizer of a checkpoint.

    Args:
        head: Its head.
        around: The container around its parameters.
        states: The labels of the tensors of its state, each with the name of a parameter; None if
            no parameter is called so.
        numbered: Whether it numbers its parameters.
        shapes: The shapes of the parameters with state; None if their state does not tell them.
        parameters: The labels of tensors that may be its parameters, each with the name by which
            it has state for it; None if it numbers them.
    """

    head: str
    around: str
    states: Mapping[str, str | None]
    numbered: bool
    shapes: set[tuple[int, ...]] | None
    parameters: Mapping[str, str | None] = field(default_factory=dict)


def _heads(edit: ManifestEdit, before: ManifestEdit) -> set[str]:
    """Return the heads of optimizers, also of those that transforms left without their groups."""
    heads = form.heads_in(before.origins)
    moved = set()
    for label, olds in edit.origins.items():
        old = form.head_of(olds[0], heads)
        if old is not None and label.endswith(end := olds[0][len(old) :]):
            moved.add(label[: -len(end)])
    return heads | moved | form.heads_in(edit.origins)


def _optimizers(tensors: Mapping[str, _Tensor], heads: Collection[str]) -> list[_Optimizer]:
    """Return the optimizers at some heads that have tensors of state."""
    homes: defaultdict[str, list[str]] = defaultdict(list)
    others: list[str] = []
    for label in tensors:
        if (head := form.head_of(label, heads)) is None:
            others.append(label)
        elif form.is_of_state(label, head):
            homes[head].append(label)
    ends: defaultdict[str, list[str]] = defaultdict(list)
    inside: dict[str, dict[str, None]] = {at: {} for head in homes for at in _containers(head)}
    for label in others if inside else ():
        for end in _ends(unwrapped(label)):
            ends[end].append(label)
        for around in _containers(label):
            if around in inside:
                inside[around][label] = None
    found = [_optimizer(head, labels, tensors, ends, inside) for head, labels in homes.items()]
    near = {label for each in found for label in inside[each.around]}
    for around in {each.around for each in found}:
        if not any(label.startswith(f"{around}{form.MODEL}.") for label in inside[around]):
            inside[around] |= {label: None for label in others if label not in near}
    for each in found:
        each.parameters = own = inside[each.around]
        if not each.numbered:  # of two names that fit, the longer one
            names = sorted({name for name in each.states.values() if name}, key=len)
            each.parameters = {at: name for name in names for at in ends[name] if at in own}
    return found


def _optimizer(
    head: str,
    labels: Sequence[str],
    tensors: Mapping[str, _Tensor],
    ends: Mapping[str, Collection[str]],
    inside: Mapping[str, Collection[str]],
) -> _Optimizer:
    """Return the optimizer at a head, without its parameters.

    Args:
        head: The head.
        labels: The labels of its state.
        tensors: All tensors.
        ends: The labels of tensors of no optimizer, by each end of them without wrappers.
        inside: The labels of these tensors by the containers around heads.
    """
    states = {label: unwrapped(label[len(head) + len(f"{form.STATE}.") :]) for label in labels}
    names = {
        label: next((each for each in _starts(rest) if each in ends), None)
        for label, rest in states.items()
    }
    found = {name for name in names.values() if name is not None}
    joint = any(label.startswith(f"{head}{form.JOINT}.") for label in labels)
    digits = all(rest[:1].isdigit() for rest in states.values())
    numbered = joint or not found or (digits and not any("." in name for name in found))
    shapes, count = _shapes_of({states[each]: tensors[each].shape for each in labels})
    known = {tensors[each].shape for each in inside[""]}
    certain = shapes if shapes and shapes <= known else None

    def enough(near: Collection[str]) -> bool:
        if not numbered:
            return all(any(label in near for label in ends[name]) for name in found)
        return sum(certain is None or tensors[each].shape in certain for each in near) >= count

    around = next((each for each in _containers(head) if enough(inside[each])), "")
    return _Optimizer(head, around, names, numbered, certain)


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
    yield from (f"{each}." for each in _starts(label.rstrip(".")))
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


def followers_of(edit: ManifestEdit, name: Callable[[str], str]) -> dict[str, str]:
    """Return the new labels of all that a ``training_state`` keeps under names of its model.

    That is the state of optimizers, in the form of :mod:`ckpipe.state.training_form`, and the
    versions of modules.

    Args:
        edit: The edit.
        name: Returns the new name of a label.
    """
    found: dict[str, str] = {}
    for node, at in (each for draft in edit.drafts for each in walk(draft.tree)):
        if node.kind not in MAPPINGS or form.MODEL not in node.keys:
            continue
        model, optimizer, versions = (
            join(at, key) for key in (form.MODEL, form.OPTIMIZER, form.VERSIONS)
        )
        members = _members(node)
        held, known = _members(members.get(form.OPTIMIZER)), _members(members.get(form.VERSIONS))
        names: dict[str, str] = {}
        for key in _members(members[form.MODEL]) if held or known else ():
            new = name(join(model, key))
            if isinstance(key, str) and new.startswith(f"{name(model)}."):
                names[key] = new[len(name(model)) + 1 :]
        changed = {key: new for key, new in names.items() if new != label_part(key)}
        for kind, group in held.items() if changed and form.GROUPS in held else ():
            for first, inner in _members(group).items():
                old = join(f"{optimizer}.{kind}", first)
                new = f"{name(optimizer)}.{kind}.{changed.get(first) or label_part(first)}"
                if first in changed:
                    found |= {label: new + label[len(old) :] for _, label in walk(inner, old)}
                for key in _members(_members(inner).get("params") if kind == form.GROUPS else None):
                    if key in changed:
                        found[join(f"{old}.params", key)] = f"{new}.params.{changed[key]}"
        for module in known if changed else ():
            inside = [key for key in names if key.startswith(f"{module}.")]
            ends = [(names[key], key[len(module) :]) for key in inside]
            heads = {new.removesuffix(end) if new.endswith(end) else None for new, end in ends}
            if len(heads) == 1 and (head := heads.pop()):
                found[join(versions, module)] = f"{name(versions)}.{head}"
    return found


def _members(node: Node | None) -> dict[Any, Node]:
    """Return the items of a mapping, also of one in wrappers; none for any other node."""
    while node and node.kind in WRAPPERS:
        node = node.inner
    if not node or node.kind not in MAPPINGS:
        return {}
    return {key: child for key, child, _ in children_of(node, "")}


def give_to_parts(edit: ManifestEdit) -> None:
    """Give parts of a parameter the place that it had in the optimizer of a ``training_state``.

    Each part gets its group, and its count of steps. A parameter of another shape gets this shape
    in its group. State of its shape is left to transforms of its own.

    Args:
        edit: The edit, with all transforms applied.
    """
    found = {label: each for label in edit.origins if (each := form.place_of(label))}
    above = {each.above for each in found.values() if each.home.startswith(f"{form.GROUPS}.")}
    tensors = _tensors(edit, ManifestEdit(edit.document)) if above else {}
    parts: defaultdict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for label, tensor in tensors.items():
        olds, steps = next(iter(tensor.sources))
        for old in olds if steps and len(tensor.sources) == 1 else ():
            parts[old][label] = tensor.shape
    made: dict[str, list[str]] = {}
    for draft in edit.drafts if parts else ():
        moves: dict[str, list[tuple[str, Node]]] = {}
        for label in draft.leaves():
            if label in found and found[label].above in above:
                moves[label] = list(_places(edit, draft, label, found[label], parts))
        moves = {label: news for label, news in moves.items() if news}
        made |= {new: [label] for label, news in moves.items() for new, _ in news}
        draft.move(moves)
        models = {f"{each}{form.OPTIMIZER}.{form.STATE}": f"{each}{form.MODEL}." for each in above}
        for node, label in list(walk(draft.tree)):
            if node.kind in MAPPINGS and label in models:
                news = {k.removeprefix(models[label]) for each in parts.values() for k in each}
                node.become(_nested(node, news))
        draft.tree = draft.tree.with_nodes(draft.tree.nodes)
    edit.note(made)


def _places(
    edit: ManifestEdit,
    draft: Draft,
    label: str,
    now: form.ParameterPlace,
    parts: Mapping[str, Mapping[str, tuple[int, ...]]],
) -> Iterator[tuple[str, Node]]:
    """Yield the leaves that parts of a parameter have in place of one that it had."""
    leaf, old = draft.leaves()[label], form.place_of(edit.origins[label][0])
    row = draft.rows[leaf.head] if leaf.kind == "tensor" else None
    if old is None or (row is not None and row.shape and now.key != "step"):
        return
    own = parts.get(f"{old.model}{old.name}", {})
    news = {k.removeprefix(now.model): shape for k, shape in own.items() if k.startswith(now.model)}
    for name, shape in news.items() if not now.key or news.keys() != {now.name} else ():
        node, where = leaf, now.of(name)
        if row is not None and name != now.name:
            node = draft.add(replace(row, label=where), draft.sources[leaf.head])
        elif now.home.startswith(f"{form.GROUPS}."):
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
            if optimizer.head.endswith(f"{form.OPTIMIZER}."):
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
            news[unwrapped(old).partition(f"{form.STATE}.")[2].rpartition(".")[0]] = state
    for label in labels if news else ():
        if not label.startswith(f"{head}{form.PARAM_GROUPS}."):
            continue
        if not unwrapped(origins[label][0]).endswith(unwrapped(label[len(head) :])):
            continue
        for name, state in news.items():
            if form.is_listed(label) or f".{name}." in f".{label}.":
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
