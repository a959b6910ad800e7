"""Walk the saved tree and the target in parallel: check that they fit, and plan the objects.

Theory. Each node becomes a factory, a function that makes its object once the bytes are read. The
plan looks up every class, decodes every value and allocates every tensor, so that each error shows
before a byte is read; it changes nothing and runs no constructor.

A node may have a live counterpart. Containers of the target are used *in place*: they must be of
the saved kind, and their factory refills and returns the container itself. The containers in an
object's ``state_dict`` are only read: ``load_state_dict`` gets new ones, with the object's own
tensors in them, filled.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import is_
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ckpipe.errors import InvalidManifest, ShapeMismatch, StructureMismatch, TargetMismatch
from ckpipe.format.labels import decode_key, encode_key, join, label_order
from ckpipe.format.tree import MAPPINGS, Node, children_of, leaf_labels, walk
from ckpipe.interpreter import user_code
from ckpipe.loading.by_label import flattened, flattened_at, regrouped
from ckpipe.loading.factories import (
    Builder,
    Factory,
    MutableFactory,
    dataclass_class,
    empty_mapping,
    named_tuple_class,
    never,
    refill,
    remake_frozen,
    same,
    stays,
    tensor_object,
)
from ckpipe.loading.match_record import NOTHING, MatchRecord, Use
from ckpipe.loading.objects import OpenedObject, open_object
from ckpipe.loading.stateful import is_extra_state, mismatch, writable
from ckpipe.loading.wrappers import fitting_parts, planned_wrapper, put_together
from ckpipe.reading.live_tensors import FILLABLE, misfit, writable_view
from ckpipe.reading.saved_state import is_generators, refuse_unread
from ckpipe.reading.select import PerRankItems
from ckpipe.state.kinds import is_stateful, registered_as, registered_for
from ckpipe.state.tensors import is_wrapper
from ckpipe.state.training_form import WEIGHTS
from ckpipe.transforms.published_names import table_hint


class Matching:
    """Match a saved state with a target, or plan a fresh one.

    Args:
        record: The arguments of the match; gets its findings.
    """

    def __init__(self, record: MatchRecord) -> None:
        self.record, self._targets = record, record.targets
        record.plan = _planned
        self._tensors: dict[int, Factory] = {}
        self._builder = Builder()
        # Objects that are known by their id must not die before the walk ends.
        self._alive: list[Any] = []
        self._objects: dict[int, OpenedObject] = {}
        self._outer: list[Any] = []
        """The objects inside of whose state the walk is, from the outermost on."""
        self._tree = Node("absent")
        self._homes: dict[int, str] | None = None

    def plan_target(self, target: Any, tree: Node) -> Factory:
        """Check a target against a tree.

        Returns:
            A factory that puts the loaded values in place, and returns the state.

        Raises:
            TargetMismatch: If they do not fit; the target is untouched.
            As :meth:`plan` does.
        """
        self._tree = tree
        record = self.record
        try:
            make = self.plan(tree, "", target, Use.IN_PLACE)
            self._check_labels(target)
        except TargetMismatch as error:
            rows = () if record.by_label else record.saved.rows
            error.hint = table_hint(target, rows, record.above) or error.hint
            raise
        return make

    def _check_labels(self, target: Any) -> None:
        record = self.record
        if record.request.strict and (record.missing or record.unexpected):
            raise mismatch(
                record.missing,
                record.unexpected,
                hint="Choose with include and exclude",
                allow="pass strict=False to load the labels that both have, or name those that may "
                "differ in allow_missing and allow_unexpected",
                names=leaf_labels(self._tree, ""),
                above=record.above,
                shapes=({row.label: row.shape for row in record.saved.rows}, _shapes(target, "")),
            )

    def plan(self, node: Node, label: str, live: Any = NOTHING, use: Use | None = None) -> Factory:
        """Make all checks of a node that are possible before the bytes are read.

        Args:
            node: The node.
            label: Its label in the state.
            live: Its live counterpart.
            use: The use of the counterpart.

        Returns:
            A factory that makes its object, once the bytes of all tensors are read.

        Raises:
            StructureMismatch: If the counterpart is of another kind, or a class is needed that
                this program does not have.
            ShapeMismatch: If a tensor of the counterpart must fit and does not.
            DtypeMismatch: Likewise.
            UnsupportedState: If it is pickled and that is refused.
            InvalidManifest: If the node contradicts the format.
        """
        tag = node.kind
        if live is None and use is Use.IN_PLACE and tag != "absent":
            # None is a placeholder for any object, such as a state made at the first step.
            live = NOTHING
        if live is NOTHING:
            use = None
        if self._outer and any(live is each for each in self._outer):
            return partial(same, live)  # an object inside itself
        if (use is Use.IN_PLACE or self._outer) and (
            tag == "stateful" or (tag in MAPPINGS and _is_object(live))
        ):
            return self._object(node, label, live, use)
        return _PLANS[tag](self, node, label, live, use)

    def _absent(self, node: Node, label: str, live: Any, use: Use | None) -> Factory:
        if use is Use.IN_PLACE:
            self.record.note_missing(live, label)
        return partial(same, None if live is NOTHING else live)

    # Tensors

    def _tensor(self, node: Node, label: str, live: Any, use: Use | None) -> Factory:
        number, fillable = node.head, isinstance(live, FILLABLE)
        wrapped = is_wrapper(live)
        if (use is Use.IN_PLACE and not fillable) or (wrapped and use is not Use.OFFERED):
            raise _wrong_kind("a plain tensor" if wrapped else "a tensor", live, label)
        if number in self.record.saved.per_rank.tensors:
            return self._combined(number, live, label)
        # A parameter of a lazy module gets its shape from the loaded tensor.
        if fillable and not wrapped and not is_lazy(live):
            stored, must = self._targets.stored[number], use is not Use.OFFERED
            error = misfit(stored, live, cast=must and self._targets.cast)
            if must and self.record.skips_shapes and isinstance(error, ShapeMismatch):
                self.record.kept.append(label)
                return partial(same, live)
            if error is not None and must:
                error.key = label or error.key
                raise error
            if error is None and self._targets.fill(stored, live, label):
                row = stored.row
                if use is Use.IN_PLACE and row.attributes and isinstance(live, torch.Tensor):
                    attributes = self.plan(row.attributes, join(label, "__dict__"))
                    update = partial(self._builder.update, attributes)
                    return MutableFactory(partial(same, live), update)
                return partial(same, live)
        return self._fresh_tensor(number)

    def _fresh_tensor(self, number: int) -> Factory:
        if number in self._tensors:
            return self._tensors[number]
        stored = self._targets.stored[number]
        row = stored.row
        if self.record.distributed and not self._targets.stored.is_whole(stored):
            raise StructureMismatch(
                "Its shards were on several ranks, and the target has no tensor that tells which "
                "of them this rank is to hold",
                key=row.label,
                hint="Load into a state with distributed tensors in it, such as that of "
                "ckpipe.distributed.training_state, or from a single process",
            )
        obj = tensor_object(row, self._targets.fresh(stored))
        self._tensors[number] = partial(same, obj)
        if row.attributes:
            # Their containers may refer to the tensor itself.
            attributes = self.plan(row.attributes, join(row.label, "__dict__"))
            pending = [attributes]

            def make() -> Any:
                if pending:
                    self._builder.update(pending.pop(), obj)
                return obj

            self._tensors[number] = make
        return self._tensors[number]

    def _combined(self, number: int, live: Any, label: str) -> Factory:
        """Combine the copies of a tensor that belongs to a rank by the caller's function."""
        per_rank, stored = self.record.saved.per_rank, self._targets.stored
        combine, parts = per_rank.combine, per_rank.tensors[number]
        if combine is None or not parts:
            raise per_rank.refused(label, parts)
        row = stored[number].row
        fresh = self._targets.fresh
        copies = [tensor_object(row, fresh(stored.of_part(*place))) for place in parts]
        view = writable_view(live) if isinstance(live, FILLABLE) else None

        def make() -> Any:
            made = combine(label, copies)
            if view is None or not isinstance(made, torch.Tensor) or made.shape != view.shape:
                return made
            # Tensors that were made in inference mode can be written only in it.
            with torch.inference_mode(view.is_inference()):
                view.copy_(made.detach())
            return live

        return make

    def _wrapper_tensor(self, node: Node, label: str, live: Any, use: Use | None) -> Factory:
        facts, inner, record = node.head, node.inner, self.record
        if use in (None, Use.OFFERED):
            cls, context = planned_wrapper(record, facts, label)
            make, unwrap = self.plan(inner, label), record.request.unwrap

            def wrap() -> Any:
                return put_together(cls, facts, context(), make(), label)

            return wrap if unwrap is None else partial(unwrap, label, facts, wrap)
        if not is_wrapper(live):
            raise _wrong_kind(f"a wrapper tensor of {facts['class']}", live, label)
        tensors = [each.head for each, _ in walk(inner) if each.kind == "tensor"]
        try:
            ranks = set(map(self._targets.stored.rank_of, tensors))
            held = fitting_parts(facts, inner.keys, live, label, ranks)
        except ShapeMismatch:
            if not record.skips_shapes:
                raise
            record.kept.append(label)
            return partial(same, live)
        before = self._targets.cast, record.skips_shapes
        self._targets.cast = record.skips_shapes = False
        try:
            make = self.plan(inner, label, held, Use.IN_PLACE)
        finally:
            self._targets.cast, record.skips_shapes = before
        return partial(same, live) if stays(make, held) else lambda: make() and live

    # Values

    def _value(self, node: Node, label: str, live: Any, use: Use | None) -> Factory:
        combined = node.head in self.record.saved.per_rank.values
        if not combined:
            refuse_unread(self.record.saved.values[node.head], label)
        if use is Use.IN_PLACE and not combined and not _is_value(live):
            raise _wrong_kind("a plain value", live, label)
        return partial(same, self.record.value_of(node, label))

    def _set(self, node: Node, label: str, live: Any, use: Use | None) -> Factory:
        if use is Use.IN_PLACE and not isinstance(live, set | frozenset):
            raise _wrong_kind(f"a {node.kind}", live, label)
        kind = set if node.kind == "set" else frozenset
        make = partial(kind, [decode_key(key) for key in node.keys])
        if use is not Use.IN_PLACE or isinstance(live, frozenset):
            return make
        return partial(refill, live, make)

    # Containers

    def _mapping(self, node: Node, label: str, live: Any, use: Use | None) -> Factory:
        in_place, sizable = use is Use.IN_PLACE, use in (Use.NAMED, Use.FITTING)
        if in_place and not isinstance(live, dict):
            raise _wrong_kind(f"a {node.kind}", live, label)
        record, derive = self.record, self.record.saved.per_rank.derive
        if record.by_label and in_place:
            node = regrouped(node, live, _is_value)
        if derive is not None and is_generators(node):
            return self._derived(derive, node, label)
        children, held = children_of(node, label), live if isinstance(live, dict) else {}
        saved: list[Any] = []
        if in_place:
            children = _in_label_order(children)
        elif self._may_hold_objects(children):
            saved, children = [key for key, _, _ in children], _in_label_order(children)
        left = {_exact(key): key for key in held}
        items: list[tuple[Any, Factory]] = []
        for key, child, where in children:
            exact = _exact(key)
            value = NOTHING
            if exact in left:
                value = held[left.pop(exact)]
            elif record.is_elsewhere(child, label, where, live, use):
                continue
            elif in_place:
                record.unexpected += leaf_labels(child, where)
                continue
            resizes = sizable and is_extra_state(key)
            make = self.plan(child, where, value, Use.OFFERED if resizes else use)
            if not in_place or not stays(make, value):
                items.append((key, make))
        items += self._only_in_target({key: held[key] for key in left.values()}, label, use)
        attributes = None
        takes_them = not in_place or isinstance(live, OrderedDict)
        if node.attributes is not None and takes_them:
            attributes = self.plan(node.attributes, join(label, "__dict__"))

        def fill(made: Any) -> None:
            if saved:  # the order of its keys stays that of the save
                there = dict(items)
                made.update(dict.fromkeys(key for key in saved if key in there))
            for key, make in items:
                self._builder.put_key(made, key, make)
            if attributes is not None:
                self._builder.update(attributes, made)

        shell = partial(same, live) if in_place else empty_mapping(node)
        if in_place and not items and attributes is None:
            return shell
        return MutableFactory(shell, fill)

    def _only_in_target(
        self, own: Mapping[Any, Any], label: str, use: Use | None
    ) -> list[tuple[Any, Factory]]:
        """Note the items that the saved mapping lacks; return those that an object keeps."""
        record = self.record
        if use is Use.IN_PLACE:
            keys = list(own)
            for key in map(keys.__getitem__, label_order(keys)):
                record.note_missing(own[key], join(label, key))
            return []
        record.objects_have_more |= bool(own)
        if record.select.selects_all:
            return []
        return [
            (key, partial(same, each))
            for key, each in own.items()
            if not record.is_selected(each, join(label, key))
        ]

    def _may_hold_objects(self, children: Sequence[tuple[Any, Node, str]]) -> bool:
        """Tell whether objects inside another one may be among children; tensors are none."""
        return bool(self._outer) and any(child.kind != "tensor" for _, child, _ in children)

    def _derived(self, derive: Callable[[Any], Any], node: Node, label: str) -> Factory:
        """Plan random generators that are derived for this rank."""
        record, saved = self.record, self.record.saved
        record.saved = replace(saved, per_rank=PerRankItems())
        try:
            make = self._mapping(node, label, NOTHING, None)
        finally:
            record.saved = saved
        return lambda: derive(make())

    def _sequence(self, node: Node, label: str, live: Any, use: Use | None) -> Factory:
        if use is Use.IN_PLACE and not isinstance(live, list | deque):
            raise _wrong_kind(f"a {node.kind}", live, label)
        makers = self._elements(node, label, live, use)
        shell: Factory = list
        if use is Use.IN_PLACE:
            shell = partial(same, live)
        elif node.kind == "deque":
            if node.head is not None and node.head < len(makers):
                raise InvalidManifest("A deque has more elements than it may have", key=label)
            shell = partial(deque, maxlen=node.head)

        def fill(made: Any) -> None:
            if len(made) != len(makers):
                made.clear()
                made.extend([None] * len(makers))
            # A live deque may be too short for all elements, and keeps the last ones.
            for index, make in enumerate(makers[len(makers) - len(made) :]):
                self._builder.put_index(made, index, make)

        return MutableFactory(shell, fill)

    def _elements(self, node: Node, label: str, live: Any, use: Use | None) -> list[Factory]:
        children = children_of(node, label)
        held: Sequence[Any] = live if isinstance(live, list | tuple | deque) else ()
        if use is not Use.IN_PLACE:
            self.record.objects_have_more |= len(held) > len(children)
        elif len(children) != len(held) and _is_plain(held, children):
            held = ()  # Such as a history of losses, whose length is itself a value.
            use = None
        makers = [
            self.plan(child, where, own, use)
            for own, (_, child, where) in zip(held, children, strict=False)
        ]
        for _, child, where in children[len(held) :]:
            if use is not Use.IN_PLACE:
                makers.append(self.plan(child, where))
            elif child.kind != "absent":
                self.record.unexpected += leaf_labels(child, where)
        if use is Use.IN_PLACE:
            for number in range(len(children), len(held)):
                self.record.note_missing(held[number], join(label, number))
                makers.append(partial(same, held[number]))
        return makers

    def _tuple(self, node: Node, label: str, live: Any, use: Use | None) -> Factory:
        named = node.kind == "named_tuple"
        fields = list(getattr(live, "_fields", ()))
        alike = isinstance(live, tuple) and (
            fields == node.keys if named else not hasattr(live, "_fields")
        )
        if use is Use.IN_PLACE and not alike:
            what = f"a named tuple with the fields {node.keys}" if named else "a tuple"
            raise _wrong_kind(what, live, label)
        cls: Any = type(live) if use is Use.IN_PLACE else tuple
        if named and use is not Use.IN_PLACE:
            cls = named_tuple_class(node, label)
        makers = self._elements(node, label, live if alike else NOTHING, use)

        def make() -> Any:
            made = [make() for make in makers]
            if use is Use.IN_PLACE and len(made) == len(live) and all(map(is_, made, live)):
                return live
            return tuple.__new__(cls, made)

        return make

    def _dataclass(self, node: Node, label: str, live: Any, use: Use | None) -> Factory:
        children = children_of(node, label)
        if use is Use.IN_PLACE or self._may_hold_objects(children):
            children = _in_label_order(children)
        if use is not Use.IN_PLACE:
            cls = dataclass_class(node, label)
            made = [
                (name, self.plan(child, where, getattr(live, name, NOTHING), use))
                for name, child, where in children
            ]
            # No constructor runs: the saved attributes hold its effects and all later ones.
            fill = partial(self._builder.set_attributes, made, object.__setattr__)
            return MutableFactory(partial(object.__new__, cls), fill)
        if not dataclasses.is_dataclass(live) or isinstance(live, type):
            raise _wrong_kind(f"a dataclass, {node.head},", live, label)
        found: list[tuple[str, Factory]] = []
        for name, child, where in children:
            if hasattr(live, name):
                found.append((name, self.plan(child, where, getattr(live, name), use)))
            else:
                self.record.unexpected += leaf_labels(child, where)
        for field in dataclasses.fields(live):
            if field.name not in node.keys and hasattr(live, field.name):
                self.record.note_missing(getattr(live, field.name), join(label, field.name))
        if type(live).__dataclass_params__.frozen:  # type: ignore[attr-defined]
            return partial(remake_frozen, live, found)
        fill = partial(self._builder.set_attributes, found, setattr)
        return MutableFactory(partial(same, live), fill)

    def _stateful(self, node: Node, label: str, live: Any, use: Use | None) -> Factory:
        return self.plan(node.inner, label, live, use)

    def _registered(self, node: Node, label: str, live: Any, use: Use | None) -> Factory:
        known = registered_as(node.head)
        if use is Use.IN_PLACE and known is not None and type(live) is not known.cls:
            raise _wrong_kind(f"a {known.name}", live, label)
        if known is None:
            raise StructureMismatch(
                f"The checkpoint holds an object of the registered type {node.head!r:.200}",
                key=label or None,
                hint="Call ckpipe.register_type as the program that saved it did",
            )
        outer, self._outer = self._outer, []  # it is made anew, with all that is in it
        inner = self.plan(node.inner, label)
        self._outer = outer

        def make() -> Any:
            return known.from_state(inner())

        in_place = use is Use.IN_PLACE and type(live) is Counter
        return partial(refill, live, make) if in_place else make

    # Objects with load_state_dict

    def _object(self, node: Node, label: str, target: Any, use: Use | None) -> Factory:
        inner = node.inner if node.kind == "stateful" else node
        if self.record.by_label and isinstance(target, torch.nn.Module):
            inner = flattened(inner)
        elif self.record.by_label:
            inner = flattened_at(inner, getattr(type(target), WEIGHTS, None))
        if not _is_object(target):
            if self._outer and not (isinstance(target, dict) and target):
                raise _without_counterpart(self._outer[-1], target, label)
            # It was saved as an object and is loaded into a plain dict, such as its state_dict.
            return self.plan(inner, label, target, use)
        if id(target) not in self._objects:
            self._alive.append(target)
            self._objects[id(target)] = open_object(self.record, target, inner, label)
        state, use, load = self._objects[id(target)]
        record = self.record
        noted = len(record.missing), len(record.unexpected)
        self._outer.append(target)
        # If one object was saved as several, all are planned: their tensors must agree.
        make = self.plan(inner, label, state, use)
        self._outer.pop()
        del record.missing[noted[0] :], record.unexpected[noted[1] :]  # it reports them itself
        key = None, id(target)
        planned = self._builder.planned
        if key not in planned:
            self._builder.plan(key, partial(self._load_object, target, load, make, label))
        return planned[key]

    def _load_object(
        self, target: Any, load: Callable[[Any], object], make: Factory, label: str
    ) -> Any:
        state = make()
        with torch.no_grad(), writable(target), user_code("load_state_dict", label):
            load(state)
        self.record.loaded.append(label)
        return target

    # Shared containers

    def _shared(self, node: Node, label: str, live: Any, use: Use | None) -> Factory:
        number = node.head
        key = number, id(live) if use is Use.IN_PLACE or _is_object(live) else None
        planned = self._builder.planned
        if key not in planned:
            if node.kind == "ref":  # In the order of labels, it may come before the container.
                label = self._home_of(number, label)
            planned[key] = never
            self._alive.append(live)
            self._builder.plan(key, self.plan(self.record.definitions[number], label, live, use))
        return lambda: planned[key]()

    def _home_of(self, number: int, label: str) -> str:
        """Return the label under which a shared container was saved, for a reference to it."""
        if self._homes is None:
            places = walk(self._tree)
            self._homes = {node.head: where for node, where in places if node.kind == "shared"}
        return self._homes.get(number, label)

    def forget(self) -> None:
        """Drop all plans once they are carried out: they hold this object, and so the target."""
        self._objects.clear()
        self._builder.forget()


_Plan = Callable[[Matching, Node, str, Any, Use | None], Factory]

_PLANS: dict[str, _Plan] = {
    "tensor": Matching._tensor,
    "value": Matching._value,
    "dict": Matching._mapping,
    "ordered_dict": Matching._mapping,
    "default_dict": Matching._mapping,
    "list": Matching._sequence,
    "deque": Matching._sequence,
    "tuple": Matching._tuple,
    "set": Matching._set,
    "frozenset": Matching._set,
    "named_tuple": Matching._tuple,
    "dataclass": Matching._dataclass,
    "stateful": Matching._stateful,
    "registered": Matching._registered,
    "wrapper_tensor": Matching._wrapper_tensor,
    "shared": Matching._shared,
    "ref": Matching._shared,
    "absent": Matching._absent,
}


# Keys and kinds of the target


def _in_label_order(children: list[tuple[Any, Node, str]]) -> list[tuple[Any, Node, str]]:
    """Order the children of a mapping or record by their labels, as for a save.

    Objects among them may call collectives, and each rank may have the keys in another order.
    """
    return [children[number] for number in label_order([key for key, _, _ in children])]


def _exact(key: Any) -> Any:
    """Return a form of a key that distinguishes 1, 1.0 and True, and in which nan equals nan."""
    return key if type(key) in (str, int) else (repr(encode_key(key)),)


def _is_object(live: Any) -> bool:
    return is_stateful(live) and not isinstance(live, torch.Tensor | type)


def _is_value(live: Any) -> bool:
    """Tell whether an object is neither a container nor a tensor."""
    if isinstance(live, torch.Size | type):
        return True
    return not (
        isinstance(live, (*FILLABLE, dict, list, tuple, set, frozenset, deque))
        or dataclasses.is_dataclass(live)
        or is_stateful(live)
        or registered_for(type(live)) is not None
    )


def _is_plain(live: Sequence[Any], children: list[tuple[Any, Node, str]]) -> bool:
    return all(child.kind == "value" for _, child, _ in children) and all(map(_is_value, live))


def _wrong_kind(saved: str, live: Any, label: str) -> StructureMismatch:
    return StructureMismatch(
        f"The checkpoint has {saved} where the target has a {type(live).__qualname__}",
        key=label or None,
        hint="Load into a target of the same kinds, or leave it out with exclude",
    )


def _without_counterpart(outer: Any, live: Any, label: str) -> StructureMismatch:
    there = "nothing" if live is NOTHING else f"a {type(live).__qualname__}"
    kind = type(outer).__qualname__
    return StructureMismatch(
        f"The state of this {kind} held an object with load_state_dict here, and the {kind} of "
        f"the target has {there}",
        key=label or None,
        hint="Make the target with the inner object as it was saved, or leave it out with exclude",
    )


def _planned(record: MatchRecord, node: Node, label: str) -> Factory:
    """Plan the object of a node by a match of its own: a record that held one would live on."""
    return Matching(record).plan(node, label)


def _shapes(target: Any, label: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors in the mappings of a target by label; objects have none."""
    if isinstance(target, torch.Tensor) or hasattr(target, "state_dict"):
        return {label: tuple(getattr(target, "shape", ()))}
    found: dict[str, tuple[int, ...]] = {}
    for key, each in target.items() if isinstance(target, dict) else ():
        found |= _shapes(each, join(label, key))
    return found
