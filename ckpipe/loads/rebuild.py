"""A saved tree made into objects again: the inverse of :func:`ckpipe.state.flatten.capture`.

Theory. A tree is first *planned*: every class is looked up, every value decoded, every tensor
allocated, and each node becomes a function that makes its object. Whatever is wrong shows here,
before a byte is read. The functions run once the bytes are there, since objects of registered
types are made from values.

Cycles. A container that can be changed is put in the register empty, then filled, so references
inside it find it. An immutable one exists only once its elements do; a reference to it from
inside raises :class:`_Unfinished`, which the nearest changeable container around the reference
answers by leaving the place open and filling it when the missing one is there. Every cycle goes
through a changeable container, as Python cannot make another.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import setitem
from typing import Any

import torch

from ckpipe.errors import InvalidManifest, StructureMismatch
from ckpipe.format.keys import Json, decode_key, join
from ckpipe.format.manifest import TensorRow
from ckpipe.format.tree import Node, children_of
from ckpipe.loads.filling import normal_tensors
from ckpipe.loads.fresh_objects import check_attributes, empty_mapping, tensor_object, unpickled
from ckpipe.loads.hints import Hint
from ckpipe.loads.live_tensors import FILLABLE, has_shape, misfit, writable_view
from ckpipe.loads.making import Changeable, Make, same
from ckpipe.loads.per_rank import PerRankItems
from ckpipe.loads.random_state import is_generators
from ckpipe.loads.selecting import any_selected
from ckpipe.loads.stored_tensors import StoredTensor
from ckpipe.loads.targets import Targets
from ckpipe.state.kinds import registered_as
from ckpipe.state.values import decode_value, resolve_class


class _Unfinished(Exception):  # a signal between functions of this file
    def __init__(self, number: int) -> None:
        self.number = number


class Rebuild:
    """Makes objects of a saved tree.

    Args:
        values: The inline values, encoded.
        targets: Where tensors come from, and are noted to be filled.
        definitions: The containers that references in the tree point to, by number.
        per_rank: What of the tree belongs to one rank each, and none of them is this one.
        pickling: Whether pickled objects may be made.
        distributed: Whether other processes load other parts of the same tensors.
    """

    def __init__(
        self,
        values: Sequence[Json],
        targets: Targets,
        definitions: Mapping[int, Node],
        per_rank: PerRankItems,
        *,
        pickling: bool,
        distributed: bool,
    ) -> None:
        self._values, self._targets, self.definitions = values, targets, definitions
        self.per_rank, self._combine = per_rank, per_rank.combine
        self._pickling, self._distributed = pickling, distributed
        self._objects: dict[int, Make] = {}
        self._planned: dict[int, Make] = {}
        self._built: dict[int, Any] = {}
        self._building: set[int] = set()
        self._late: defaultdict[int, list[Make]] = defaultdict(list)

    def plan(self, node: Node, label: str, hint: Hint | None = None) -> Make:
        """Checks everything about a node that can be checked now.

        Args:
            node: The node.
            label: Where it stands in the state.
            hint: Its live counterpart.

        Returns:
            What makes its object, once the bytes of all tensors are there.

        Raises:
            StructureMismatch: If it needs a class that this program does not have.
            UnsupportedState: If it is pickled and that is refused.
            ShapeMismatch: If the hint must fit and does not.
            DtypeMismatch: Likewise.
            InvalidManifest: If the node contradicts the format.
        """
        return _PLANS[node[0]](self, node, label, hint)

    def value(self, node: Node, label: str) -> Any:
        """The inline value that a node names.

        Raises:
            UnsupportedState: If it is pickled and that is refused.
            InvalidManifest: If there is no such value.
        """
        number = node[1]
        if not 0 <= number < len(self._values):
            raise InvalidManifest(f"The tree names value {number}, which does not exist", key=label)
        copies = self.per_rank.values.get(number)
        if copies is None:
            return self._decoded(self._values[number], label)
        if self._combine is None or not copies:
            raise self.per_rank.refused(label, copies)
        return self._combine(label, [self._decoded(each, label) for each in copies])

    def _decoded(self, data: Json, label: str) -> Any:
        if isinstance(data, list) and data[:1] == ["pickle"]:
            return unpickled(data, label, allowed=self._pickling)
        return decode_value(data)

    # Tensors

    def plan_tensor(self, node: Node, label: str, hint: Hint | None) -> Make:
        number = node[1]
        live = None if hint is None else hint.live
        if number in self.per_rank.tensors:
            return self.combined(number, live, label)
        if hint is not None and isinstance(live, FILLABLE) and has_shape(live):
            stored = self._targets.stored[number]
            error = misfit(stored, live, cast=hint.must_fit and self._targets.cast)
            if error is None and self._targets.fill(stored, live, label):
                return partial(same, live)
            if error is not None and hint.must_fit:
                raise error
        return self._fresh_tensor(number)

    def _fresh_tensor(self, number: int) -> Make:
        if number in self._objects:
            return self._objects[number]
        stored = self._targets.stored[number]
        row = stored.row
        if self._distributed and not self._targets.stored.is_whole(stored):
            raise StructureMismatch(
                "Its parts were on several ranks, and the target has no tensor that says which "
                "of them this rank is to hold",
                key=row.label,
                hint="Load into a state with distributed tensors in it, such as that of "
                "ckpipe.distributed.training_state, or from a single process",
            )
        obj = self._tensor_object(row, stored)
        make: Make = partial(same, obj)
        self._objects[number] = make
        if row.attributes:
            attributes = self.plan(row.attributes, join(row.label, "__dict__"))
            make = self._objects[number] = self._with_attributes(obj, attributes)
        return make

    def combined(self, number: int, live: Any, label: str) -> Make:
        """The same for a tensor of which each rank had its own.

        Args:
            number: The number of the tensor.
            live: What it is to be loaded into, if that fits.
            label: Where it stands in the state.

        Raises:
            PerRankValue: If nothing says how to combine them.
        """
        combine, stored = self._combine, self._targets.stored
        parts = self.per_rank.tensors[number]
        if combine is None or not parts:
            raise self.per_rank.refused(label, parts)
        row = stored[number].row
        copies = [self._tensor_object(row, stored.of_part(part, inner)) for part, inner in parts]
        view = writable_view(live) if isinstance(live, FILLABLE) else None

        def make() -> Any:
            made = combine(label, copies)
            if view is None or not isinstance(made, torch.Tensor) or made.shape != view.shape:
                return made
            view.copy_(made.detach())
            return live

        return make

    def _tensor_object(self, row: TensorRow, stored: StoredTensor) -> Any:
        with normal_tensors():
            return tensor_object(row, self._targets.filling.fresh(stored))

    def _with_attributes(self, obj: Any, attributes: Make) -> Make:
        pending = [attributes]

        def make() -> Any:
            if pending:  # emptied first, as an attribute may refer to the tensor itself
                self._put(vars(obj).update, pending.pop(), {})
            return obj

        return make

    # Leaves

    def plan_value(self, node: Node, label: str, hint: Hint | None) -> Make:
        return partial(same, self.value(node, label))

    def plan_set(self, node: Node, label: str, hint: Hint | None) -> Make:
        kind = set if node[0] == "set" else frozenset
        return partial(kind, [decode_key(key) for key in node[1]])

    def plan_absent(self, node: Node, label: str, hint: Hint | None) -> Make:
        return partial(same, None if hint is None else hint.live)

    # Containers that can be changed

    def plan_mapping(self, node: Node, label: str, hint: Hint | None) -> Make:
        if self.derives(node):
            return self._plan_derived(node, label, hint)
        items = self._items(node, label, hint)
        attributes = None
        if node[0] == "ordered_dict" and len(node) > 3:
            attributes = self.plan(node[3], join(label, "__dict__"))

        def fill(made: Any) -> None:
            for key, each in items:
                self._put(partial(setitem, made, key), each)
            if attributes is not None:
                self._put(vars(made).update, attributes, {})

        return Changeable(empty_mapping(node), fill)

    def derives(self, node: Node) -> bool:
        """Whether a node is random generators, of which this rank gets derived ones."""
        return self.per_rank.derive is not None and is_generators(node)

    def _plan_derived(self, node: Node, label: str, hint: Hint | None) -> Make:
        per_rank, self.per_rank = self.per_rank, PerRankItems()
        try:
            make = self.plan_mapping(node, label, hint)
        finally:
            self.per_rank = per_rank
        assert per_rank.derive is not None
        derive = per_rank.derive
        return lambda: derive(make())

    def _items(self, node: Node, label: str, hint: Hint | None) -> list[tuple[Any, Make]]:
        children = children_of(node, label)
        if hint is None:
            return [(key, self.plan(child, where)) for key, child, where in children]
        items = [(key, self.plan(child, where, hint.at(key))) for key, child, where in children]
        if not hint.select.selects_all and isinstance(hint.live, dict):
            saved = {key for key, _, _ in children}
            items += [
                (key, partial(same, live))
                for key, live in hint.live.items()
                if key not in saved and not any_selected(live, join(label, key), hint.select)
            ]
        return items

    def plan_sequence(self, node: Node, label: str, hint: Hint | None) -> Make:
        makers = self._elements(node, label, hint)
        shell: Make = list
        if node[0] == "deque":
            if node[2] is not None and node[2] < len(makers):
                raise InvalidManifest("A deque has more elements than it may have", key=label)
            shell = partial(deque, maxlen=node[2])

        def fill(made: Any) -> None:
            made.extend([None] * len(makers))
            for index, each in enumerate(makers):
                self._put(partial(setitem, made, index), each)

        return Changeable(shell, fill)

    def _elements(self, node: Node, label: str, hint: Hint | None) -> list[Make]:
        return [
            self.plan(child, where, None if hint is None else hint.at(key))
            for key, child, where in children_of(node, label)
        ]

    def plan_dataclass(self, node: Node, label: str, hint: Hint | None) -> Make:
        cls, names = resolve_class(node[1], object), node[2]
        check_attributes(cls, names, label)
        makers = self._elements(node, label, hint)

        def fill(made: Any) -> None:
            for name, each in zip(names, makers, strict=True):
                self._put(partial(object.__setattr__, made, name), each)

        # No constructor runs: the attributes are what it, and all that came after it, left.
        return Changeable(partial(object.__new__, cls), fill)

    # Containers that cannot

    def plan_tuple(self, node: Node, label: str, hint: Hint | None) -> Make:
        makers = self._elements(node, label, hint)
        return lambda: tuple([make() for make in makers])

    def plan_named_tuple(self, node: Node, label: str, hint: Hint | None) -> Make:
        cls = resolve_class(node[1], tuple)
        if list(getattr(cls, "_fields", ())) != node[2]:
            raise StructureMismatch(
                f"The named tuple {node[1]} has the fields {getattr(cls, '_fields', ())} here "
                f"and {node[2]} in the checkpoint",
                key=label or None,
            )
        makers = self._elements(node, label, hint)
        return lambda: tuple.__new__(cls, [make() for make in makers])

    def plan_stateful(self, node: Node, label: str, hint: Hint | None) -> Make:
        return self.plan(node[1], label, hint)

    def plan_registered(self, node: Node, label: str, hint: Hint | None) -> Make:
        known = registered_as(node[1])
        if known is None:
            raise StructureMismatch(
                f"The checkpoint holds an object of the registered type {node[1]!r:.200}",
                key=label or None,
                hint="Call ckpipe.register_type as the program did that saved it",
            )
        inner = self.plan(node[2], label)
        return lambda: known.from_state(inner())

    # Containers that stand in several places

    def plan_shared(self, node: Node, label: str, hint: Hint | None) -> Make:
        return self._plan_once(node[1], node[2], label, hint)

    def plan_ref(self, node: Node, label: str, hint: Hint | None) -> Make:
        number = node[1]
        if number not in self._planned:
            # The place of the container itself is in a live target, and was not planned here.
            self._plan_once(number, self.definitions[number], label, hint)
        return lambda: self._planned[number]()

    def _plan_once(self, number: int, node: Node, label: str, hint: Hint | None) -> Make:
        self._planned[number] = _never
        make = self.plan(node, label, hint)
        planned = self._planned[number] = partial(self._make_once, number, make)
        return planned

    def _make_once(self, number: int, make: Make) -> Any:
        if number in self._built:
            return self._built[number]
        if number in self._building:
            raise _Unfinished(number)
        if isinstance(make, Changeable):
            made = self._built[number] = make.shell()
            make.fill(made)
            return made
        self._building.add(number)
        try:
            made = self._built[number] = make()
        finally:
            self._building.discard(number)
        for late in self._late.pop(number, ()):
            late()
        return made

    def _put(self, assign: Callable[[Any], object], make: Make, meanwhile: Any = None) -> None:
        try:
            value = make()
        except _Unfinished as unfinished:
            assign(meanwhile)
            self._late[unfinished.number].append(partial(self._put, assign, make, meanwhile))
        else:
            assign(value)


_Plan = Callable[[Rebuild, Node, str, Hint | None], Make]

_PLANS: dict[str, _Plan] = {
    "tensor": Rebuild.plan_tensor,
    "value": Rebuild.plan_value,
    "dict": Rebuild.plan_mapping,
    "ordered_dict": Rebuild.plan_mapping,
    "default_dict": Rebuild.plan_mapping,
    "list": Rebuild.plan_sequence,
    "deque": Rebuild.plan_sequence,
    "tuple": Rebuild.plan_tuple,
    "set": Rebuild.plan_set,
    "frozenset": Rebuild.plan_set,
    "named_tuple": Rebuild.plan_named_tuple,
    "dataclass": Rebuild.plan_dataclass,
    "stateful": Rebuild.plan_stateful,
    "registered": Rebuild.plan_registered,
    "shared": Rebuild.plan_shared,
    "ref": Rebuild.plan_ref,
    "absent": Rebuild.plan_absent,
}


def _never() -> Any:
    raise InvalidManifest("The tree has a container that is nothing but itself")
