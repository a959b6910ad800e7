"""Match the target with the saved tree, side by side, to load in place.

The walk checks everything and notes which live tensors to fill; it changes nothing. What it
returns for each node is a function that, once the bytes are there, puts the new values into
containers that can be changed, makes new ones of those that cannot, calls ``load_state_dict``, and
returns what now stands in the node's place. An object that stays the very same is not assigned, so
that a program that looks at assignments sees those alone that change something.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch

from ckpipe.errors import StructureMismatch
from ckpipe.format.keys import LabelFilter, decode_key, encode_key, join
from ckpipe.format.tree import MAPPINGS, Node, children_of, leaf_labels
from ckpipe.loading.build import Factory, Rebuild, same, stays
from ckpipe.loading.live_tensors import FILLABLE, misfit
from ckpipe.loading.select import any_selected
from ckpipe.loading.stateful import (
    LoadTargets,
    SavedObject,
    SavedTensor,
    check_stateful,
    hint_for,
    mismatch,
)
from ckpipe.loading.targets import Targets
from ckpipe.state.kinds import is_stateful, registered_as, registered_for
from ckpipe.user_code import user_code


class Matching:
    """Match a target with a saved tree.

    Args:
        rebuild: Makes what has no counterpart in the target.
        targets: Where live tensors are noted.
        select: What of the target is to be loaded.
        strict: Whether plain containers must have the keys that were saved, and no others.
        common: The labels that all ranks had, if not all had the same ones.

    Attributes:
        missing: Labels that the target has and the checkpoint has not.
        unexpected: Labels that the checkpoint has and the target has not.
        kept: Labels of what objects have and the checkpoint has not; their own strictness applies.
        left: Labels that the checkpoint has and objects do without, which is no error.
    """

    def __init__(
        self,
        rebuild: Rebuild,
        targets: Targets,
        select: LabelFilter,
        *,
        strict: bool,
        common: frozenset[str] | None = None,
    ) -> None:
        self._rebuild, self._targets, self._common = rebuild, targets, common
        self._own_of_ranks = rebuild.per_rank.tensors
        self._select, self._strict = select, strict
        self._known: dict[tuple[int, int], Factory] = {}
        self._loaded: dict[int, Factory] = {}
        # Objects that the walk compares by identity must not die before it ends.
        self._alive: list[Any] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.kept: list[str] = []
        self.left: list[str] = []
        self._offered: dict[int, Any] = {}

    def plan(self, target: Any, tree: Node) -> Factory:
        """Check a target against a tree.

        Returns:
            What puts the loaded values in place, and returns the state.

        Raises:
            TargetMismatch: If they do not fit; the target is untouched.
        """
        make = self.match(target, tree, "")
        if self._strict and (self.missing or self.unexpected):
            raise mismatch(
                self.missing,
                self.unexpected,
                hint="Pass strict=False to load what both have, or choose with include and exclude",
            )
        return make

    def match(self, target: Any, node: Node, label: str) -> Factory:
        """Match one object with one node."""
        tag = node[0]
        if tag == "tensor" and target is not None:
            return self.match_tensor(target, node, label)
        if tag == "absent":
            return self._left_out(target, label)
        if tag in ("shared", "ref"):
            return self._match_shared(target, node, label)
        if target is None:
            # None holds a place for anything, such as a state that is made at the first step.
            return self._rebuild.plan(node, label)
        if tag == "stateful" or (tag in _STATES and is_stateful(target) and _is_object(target)):
            return self._match_stateful(target, node, label)
        return _MATCHES[tag](self, target, node, label)

    def _left_out(self, target: Any, label: str) -> Factory:
        self._note_missing(target, label)
        return partial(same, target)

    def _note_missing(self, target: Any, label: str) -> None:
        if any_selected(target, label, self._select):
            self.missing.append(label)

    # Leaves

    def match_tensor(self, target: Any, node: Node, label: str) -> Factory:
        if not isinstance(target, FILLABLE):
            raise _wrong_kind("a tensor", target, label)
        number, targets = node[1], self._targets
        if number in self._own_of_ranks:
            return self._rebuild.combined(number, target, label)
        stored = targets.stored[number]
        error = misfit(stored, target, cast=targets.cast)
        if error is not None:
            error.key = label or error.key
            raise error
        if not targets.fill(stored, target, label):
            return self._rebuild.plan(node, label)
        if not stored.row.attributes:
            return partial(same, target)
        attributes = self._rebuild.plan(stored.row.attributes, join(label, "__dict__"))
        return partial(_with_attributes, target, attributes)

    def match_value(self, target: Any, node: Node, label: str) -> Factory:
        combined = node[1] in self._rebuild.per_rank.values
        if not combined and (_is_container(target) or isinstance(target, FILLABLE)):
            raise _wrong_kind("a plain value", target, label)
        return self._rebuild.plan(node, label)

    def match_set(self, target: Any, node: Node, label: str) -> Factory:
        if not isinstance(target, set | frozenset):
            raise _wrong_kind(f"a {node[0]}", target, label)
        make = self._rebuild.plan(node, label)
        return make if isinstance(target, frozenset) else partial(refill_set, target, make)

    def match_registered(self, target: Any, node: Node, label: str) -> Factory:
        known = registered_as(node[1])
        if known is not None and type(target) is not known.cls:
            raise _wrong_kind(f"a {known.name}", target, label)
        make = self._rebuild.plan(node, label)
        return partial(refill_counter, target, make) if type(target) is Counter else make

    # Containers

    def match_mapping(self, target: Any, node: Node, label: str) -> Factory:
        if not isinstance(target, dict):
            raise _wrong_kind(f"a {node[0]}", target, label)
        if self._rebuild.derives(node):
            return self._rebuild.plan(node, label)
        children = children_of(node, label)
        saved, own_keys = _exact([key for key, _, _ in children], list(target))
        live = dict(zip(own_keys, target, strict=True))
        found: list[tuple[Any, Factory]] = []
        for key, (_, child, where) in zip(saved, children, strict=True):
            if key not in live:
                self.unexpected += leaf_labels(child, where)
                continue
            own = live.pop(key)
            value = target[own]
            make = self.match(value, child, where)
            if not stays(make, value):
                found.append((own, make))
        for key in live.values():
            self._note_missing(target[key], join(label, key))
        attributes = None
        if node[0] == "ordered_dict" and len(node) > 3 and isinstance(target, OrderedDict):
            attributes = self._rebuild.plan(node[3], join(label, "__dict__"))
        if not found and attributes is None:
            return partial(same, target)
        return partial(refill_dict, target, found, attributes)

    def match_sequence(self, target: Any, node: Node, label: str) -> Factory:
        kinds: tuple[type[Any], ...] = (tuple,) if node[0] == "tuple" else (list, deque)
        if not isinstance(target, kinds) or hasattr(target, "_fields"):
            raise _wrong_kind(f"a {node[0]}", target, label)
        children = children_of(node, label)
        if len(children) != len(target) and _is_plain(target, children):
            # A history of losses, say, whose length is itself a value.
            makers = [self._rebuild.plan(child, where) for _, child, where in children]
        else:
            makers = self._elements(target, children, label)
        refill = remake_tuple if isinstance(target, tuple) else refill_sequence
        return partial(refill, target, makers)

    def _elements(
        self, target: Sequence[Any], children: list[tuple[Any, Node, str]], label: str
    ) -> list[Factory]:
        makers = [
            self.match(live, child, where)
            for live, (_, child, where) in zip(target, children, strict=False)
        ]
        for _, child, where in children[len(target) :]:
            if child[0] != "absent":
                self.unexpected += leaf_labels(child, where)
        surplus = range(len(children), len(target))
        return makers + [self._left_out(target[n], join(label, n)) for n in surplus]

    def match_named_tuple(self, target: Any, node: Node, label: str) -> Factory:
        if not isinstance(target, tuple) or list(getattr(target, "_fields", ())) != node[2]:
            raise _wrong_kind(f"a named tuple with the fields {node[2]}", target, label)
        children = children_of(node, label)
        makers = [
            self.match(live, child, where)
            for live, (_, child, where) in zip(target, children, strict=True)
        ]
        return partial(remake_tuple, target, makers)

    def match_dataclass(self, target: Any, node: Node, label: str) -> Factory:
        if not dataclasses.is_dataclass(target) or isinstance(target, type):
            raise _wrong_kind(f"a dataclass, {node[1]},", target, label)
        found: list[tuple[str, Factory]] = []
        for name, child, where in children_of(node, label):
            if hasattr(target, name):
                found.append((name, self.match(getattr(target, name), child, where)))
            else:
                self.unexpected += leaf_labels(child, where)
        saved = set(node[2])
        for field in dataclasses.fields(target):
            if field.name not in saved and hasattr(target, field.name):
                self._note_missing(getattr(target, field.name), join(label, field.name))
        frozen = type(target).__dataclass_params__.frozen  # type: ignore[attr-defined]
        return partial(remake_dataclass if frozen else refill_dataclass, target, found)

    # Objects, and what stands in several places

    def _match_stateful(self, target: Any, node: Node, label: str) -> Factory:
        inner = node[1] if node[0] == "stateful" else node
        if not is_stateful(target):
            # Saved as an object, loaded into the plain dict that its state_dict had returned.
            return self.match(target, inner, label)
        if id(target) in self._loaded:
            self._fill_again(target, inner, label)
            return self._loaded[id(target)]
        if hasattr(type(target), "__ckpipe_targets__"):
            return self._match_itself(target, inner, label)
        hint = hint_for(target, self._select)
        self._alive.append(hint.live)
        check_stateful(target, hint, inner, label)
        if isinstance(hint.live, dict) and inner[0] in MAPPINGS:
            saved = {key if type(key) is str else decode_key(key) for key in inner[1]}
            own = ((join(label, key), hint.live[key]) for key in hint.live if key not in saved)
            self.kept += [where for where, live in own if any_selected(live, where, self._select)]
        make = self._rebuild.plan(inner, label, hint)
        once = self._loaded[id(target)] = _once(partial(_load_object, target, make, label))
        return once

    def _match_itself(self, target: Any, node: Node, label: str) -> Factory:
        """An object that says what of it is to be filled."""
        state = self._described(node, label)
        saved = SavedObject(state, label, self._select, self._common, self._targets.cast)
        with user_code("__ckpipe_targets__", label):
            found: LoadTargets = target.__ckpipe_targets__(saved)
        self.kept += found.missing
        self.left += found.unexpected
        self._offered[id(target)] = found.tree
        self._alive.append(found.tree)
        make = self._match_offered(found.tree, node, label)
        once = self._loaded[id(target)] = _once(partial(_attach, target, make, found, label))
        return once

    def _match_offered(self, tree: Any, node: Node, label: str) -> Factory:
        names = len(self.missing), len(self.unexpected)
        make = self.match(tree, node, label)
        del self.missing[names[0] :], self.unexpected[names[1] :]
        return make

    def _described(self, node: Node, label: str) -> Any:
        """A saved tree as objects, with a description in the place of each tensor."""
        tag = node[0]
        if tag == "tensor":
            stored = self._targets.stored[node[1]]
            return SavedTensor(stored.dtype, tuple(stored.shape))
        if tag == "value":
            return self._rebuild.value(node, label)
        if tag in ("shared", "ref"):
            return self._described(self._rebuild.definitions[node[1]], label)
        if tag in ("stateful", "registered"):
            return self._described(node[-1], label)
        children = [
            (key, self._described(child, where))
            for key, child, where in children_of(node, label)
            if child[0] != "absent" or tag not in _STATES
        ]
        if tag in _STATES:
            return dict(children)
        values = [value for _, value in children]
        return tuple(values) if tag == "tuple" else values

    def _fill_again(self, target: Any, node: Node, label: str) -> None:
        """One object of the target that was saved as several: their tensors must agree."""
        if id(target) in self._offered:
            self._match_offered(self._offered[id(target)], node, label)
            return
        self._rebuild.plan(node, label, hint_for(target, self._select))

    def _match_shared(self, target: Any, node: Node, label: str) -> Factory:
        number = node[1]
        if target is None:
            return self._rebuild.plan(node, label)
        key = (number, id(target))
        if key not in self._known:
            self._alive.append(target)
            # What a cycle leads back to is changed in place, so it stays what it is.
            self._known[key] = partial(same, target)
            made = _once(self.match(target, self._rebuild.definitions[number], label))
            self._known[key] = made
        return self._known[key]


_Match = Callable[[Matching, Any, Node, str], Factory]

_MATCHES: dict[str, _Match] = {
    "value": Matching.match_value,
    "dict": Matching.match_mapping,
    "ordered_dict": Matching.match_mapping,
    "default_dict": Matching.match_mapping,
    "list": Matching.match_sequence,
    "deque": Matching.match_sequence,
    "tuple": Matching.match_sequence,
    "set": Matching.match_set,
    "frozenset": Matching.match_set,
    "named_tuple": Matching.match_named_tuple,
    "dataclass": Matching.match_dataclass,
    "registered": Matching.match_registered,
}


def _once(make: Factory) -> Factory:
    made: list[Any] = []

    def make_once() -> Any:
        if not made:
            made.append(make())
        return made[0]

    return make_once


def _exact(*key_lists: list[Any]) -> tuple[list[Any], ...]:
    """Forms of keys in which 1, 1.0 and True stay apart, and nan is equal to itself."""
    kinds = set(map(type, chain.from_iterable(key_lists)))
    if kinds <= {str} or kinds <= {int}:
        return key_lists
    return tuple([_exact_key(key) for key in keys] for keys in key_lists)


def _exact_key(key: Any) -> Any:
    return key if type(key) is str else (repr(encode_key(key)),)


_STATES = ("dict", "ordered_dict", "default_dict")


def _is_object(target: Any) -> bool:
    return not isinstance(target, torch.Tensor | type)


def _is_container(target: Any) -> bool:
    if isinstance(target, torch.Size | type):
        return False
    return (
        isinstance(target, dict | list | tuple | set | frozenset | deque)
        or dataclasses.is_dataclass(target)
        or is_stateful(target)
        or registered_for(type(target)) is not None
    )


def _is_plain(target: Sequence[Any], children: list[tuple[Any, Node, str]]) -> bool:
    return all(child[0] == "value" for _, child, _ in children) and not any(
        _is_container(each) or isinstance(each, FILLABLE) for each in target
    )


def _wrong_kind(saved: str, target: Any, label: str) -> StructureMismatch:
    return StructureMismatch(
        f"The checkpoint has {saved} where the target has a {type(target).__qualname__}",
        key=label or None,
        hint="Load into a target of the same kinds, or leave it out with exclude",
    )


def _with_attributes(target: Any, attributes: Factory) -> Any:
    if isinstance(target, torch.Tensor):
        vars(target).update(attributes())
    return target


def _attach(target: Any, make: Factory, found: LoadTargets, label: str) -> Any:
    make()
    with torch.no_grad(), user_code("load_state_dict", label):
        found.attach()
    return target


def _load_object(target: Any, make: Factory, label: str) -> Any:
    state = make()
    with torch.no_grad(), user_code("load_state_dict", label):
        target.load_state_dict(state)
    return target


def refill_set(target: set[Any], make: Factory) -> Any:
    """Give a set the members that are made."""
    members = make()
    target.clear()
    target.update(members)
    return target


def refill_dict(
    target: dict[Any, Any], found: list[tuple[Any, Factory]], attributes: Factory | None
) -> Any:
    """Put what is made under the keys of a dict, and attributes on the dict itself."""
    for key, make in found:
        new = make()
        if new is not target[key]:
            target[key] = new
    if attributes is not None:
        vars(target).update(attributes())
    return target


def refill_counter(target: Counter[Any], make: Factory) -> Any:
    """Give a Counter the counts and attributes that are made, in their order."""
    made = make()
    target.clear()
    target.update(made)
    vars(target).update(vars(made))
    return target


def refill_sequence(target: Any, makers: list[Factory]) -> Any:
    """Give a list or deque the elements that are made."""
    made = [make() for make in makers]
    if len(made) != len(target):
        target.clear()
        target.extend(made)
        return target
    for index, new in enumerate(made):
        if new is not target[index]:
            target[index] = new
    return target


def remake_tuple(target: tuple[Any, ...], makers: list[Factory]) -> Any:
    """A tuple of what is made, of the target's class; the target itself if it has the very same."""
    made = [make() for make in makers]
    if len(made) == len(target) and all(new is old for new, old in zip(made, target, strict=True)):
        return target
    return tuple.__new__(type(target), made)


def refill_dataclass(target: Any, found: list[tuple[str, Factory]]) -> Any:
    """Set what is made as attributes."""
    for name, make in found:
        new = make()
        if new is not getattr(target, name):
            setattr(target, name, new)
    return target


def remake_dataclass(target: Any, found: list[tuple[str, Factory]]) -> Any:
    """A copy of a frozen dataclass with what is made; the target itself if it has the very same."""
    changed = {name: make() for name, make in found}
    if all(new is getattr(target, name) for name, new in changed.items()):
        return target
    remade = copy.copy(target)
    for name, new in changed.items():
        object.__setattr__(remade, name, new)
    return remade
