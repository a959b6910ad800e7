"""Make objects of a saved tree: the inverse of :func:`ckpipe.state.flatten.capture`.

Theory. A tree is first *planned*: every class is looked up, every value decoded, every tensor
allocated, and each node becomes a function that makes its object, without running constructors.
Whatever is wrong shows here, before a byte is read. The functions run once the bytes are there,
since objects of registered types are made from values.

Cycles. A container that can be changed is put in the register empty, then filled, so references
inside it find it. An immutable one exists only once its elements do; a reference to it from inside
raises :class:`_Unfinished`, which the nearest changeable container around the reference answers by
leaving the place open and filling it when the missing one is there. Every cycle goes through a
changeable container, as Python cannot make another.

Random generators. Two ranks with the same generator draw the same dropout masks and the same
samples, and nothing fails. So a saved :class:`~ckpipe.RngState` belongs to the rank that saved it,
even where all ranks saved the same: another rank is refused, or gets a state that is derived from
the saved one and from its rank.
"""

from __future__ import annotations

import base64
import dataclasses
import pickle
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import setitem
from typing import Any

import torch

from ckpipe.errors import InvalidManifest, StructureMismatch, UnsupportedState
from ckpipe.format.keys import Json, decode_key, join
from ckpipe.format.manifest import ManifestDocument, TensorRow
from ckpipe.format.tree import MAPPINGS, Node, children_of, walk
from ckpipe.loading.chunks import StoredTensor
from ckpipe.loading.fill import normal_tensors
from ckpipe.loading.live_tensors import FILLABLE, has_shape, misfit, writable_view
from ckpipe.loading.saved_state import SavedState
from ckpipe.loading.select import PerRankItems, PerRankPolicy, any_selected
from ckpipe.loading.stateful import LiveCounterpart
from ckpipe.loading.targets import Targets
from ckpipe.state.kinds import FACTORIES, registered_as
from ckpipe.state.tensors import BUFFER, NUMPY, PARAMETER, SUBCLASS, as_array
from ckpipe.state.values import decode_value, plain_numpy_dtype, resolve_class
from ckpipe.state_helpers import derived_generators

Factory = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class MutableFactory:
    """Make a container in two steps, between which it can be referred to.

    Args:
        shell: Makes the empty container.
        fill: Fills it.
    """

    shell: Factory
    fill: Callable[[Any], None]

    def __call__(self) -> Any:
        made = self.shell()
        self.fill(made)
        return made


def same(obj: Any) -> Any:
    """The object itself: what a node makes whose counterpart stays in its place."""
    return obj


def stays(make: Factory, obj: Any) -> bool:
    """Tell whether an object is known to make itself."""
    return type(make) is partial and make.func is same and make.args[0] is obj


def tensor_object(row: TensorRow, plain: torch.Tensor) -> Any:
    """Make what stands in a state for a tensor: a parameter, say, or a numpy array over its
    memory.

    Args:
        row: What the structure says of it.
        plain: The tensor that holds its elements.

    Raises:
        StructureMismatch: If it is of a class that this program does not have.
        InvalidManifest: If such a tensor cannot be of that kind.
    """
    try:
        if row.kind == NUMPY:
            return as_array(plain, plain_numpy_dtype(row.detail or "", row.label))
        if row.kind == PARAMETER:
            return torch.nn.Parameter(plain, requires_grad=row.requires_grad)
        if row.kind == BUFFER:
            plain = torch.nn.Buffer(plain, persistent=row.detail == "persistent")
        elif row.kind == SUBCLASS:
            plain = plain.as_subclass(resolve_class(row.detail or "", torch.Tensor))
        with torch._C.DisableTorchFunctionSubclass():
            return plain.requires_grad_() if row.requires_grad else plain
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, StructureMismatch):
            raise
        raise InvalidManifest(
            f"No {row.kind} can be made of a tensor of {row.dtype}: {error}", key=row.label
        ) from error


def unpickled(data: list[Any], label: str, *, allowed: bool) -> Any:
    """The object of a pickled value.

    Raises:
        UnsupportedState: If that is not allowed.
        InvalidManifest: If it cannot be made.
    """
    if not allowed:
        raise UnsupportedState(
            "The checkpoint holds a pickled object, which could run any code when it is loaded",
            key=label or None,
            hint='Pass pickle="allow" if you trust who wrote it, or leave it out with exclude',
        )
    try:
        return pickle.loads(base64.b64decode(data[1], validate=True))
    except Exception as error:
        raise InvalidManifest(
            f"The pickled object cannot be made: {error}", key=label or None
        ) from error


def empty_mapping(node: Node) -> Callable[[], Any]:
    """The function that makes the empty mapping of a node."""
    if node[0] == "dict":
        return dict
    if node[0] == "ordered_dict":
        return OrderedDict
    name = node[3]
    if name is not None and name not in FACTORIES:
        raise InvalidManifest(f"A defaultdict has the unknown factory {name!r:.100}")
    return partial(defaultdict, None if name is None else FACTORIES[name])


def check_attributes(cls: Any, names: list[str], label: str) -> None:
    """Make sure that a class is a dataclass whose objects can have these attributes."""
    is_dataclass: bool = dataclasses.is_dataclass(cls)
    if not is_dataclass:
        raise StructureMismatch(f"{cls!r} was a dataclass when it was saved", key=label or None)
    for name in names:
        if name.startswith("__") or not (cls.__dictoffset__ or hasattr(cls, name)):
            raise StructureMismatch(
                f"Objects of the dataclass {cls.__qualname__} have no attribute {name!r:.100}",
                key=label or None,
            )


def keep_generators_apart(
    saved: SavedState, bundle: ManifestDocument, rank: int, world_size: int, policy: PerRankPolicy
) -> SavedState:
    """Mark the random generators of a saved state that another rank may get as well.

    Args:
        saved: The state that the rank loads.
        bundle: The checkpoint that it is from.
        rank: The rank that loads.
        world_size: How many ranks load.
        policy: What becomes of values that belong to one rank each. A function is not asked
            about generators: they are derived, as with ``"derive"``.
    """
    same_world = world_size == bundle.world_size
    if (same_world and saved.common is None) or (world_size == 1 and policy == "rank0"):
        return saved
    tensors: set[int] = set()
    values: set[int] = set()
    labels: set[str] = set()
    for label, node in _generators(saved):
        leaves = [each[:2] for each, _ in walk(node) if each[0] in ("tensor", "value")]
        numbers = {number for tag, number in leaves if tag == "tensor"}
        if not same_world or any(saved.homes[number][0] != rank for number in numbers):
            labels.add(label)
            tensors |= numbers
            values.update(number for tag, number in leaves if tag == "value")
    if not tensors:
        return saved
    items = replace(
        saved.per_rank,
        tensors={**saved.per_rank.tensors, **dict.fromkeys(tensors, ())},
        values={**saved.per_rank.values, **dict.fromkeys(values, ())},
        derive=partial(_derived, rank) if policy == "derive" or callable(policy) else None,
        generators=frozenset(labels),
    )
    return replace(saved, per_rank=items)


def is_generators(node: Node) -> bool:
    """Tell whether a node is what ``state_dict`` of an ``RngState`` returned."""
    if node[0] not in MAPPINGS or "python" not in node[1]:
        return False
    python = node[2][node[1].index("python")]
    return (
        "torch" in node[1]
        and "numpy" in node[1]
        and python[0] in MAPPINGS
        and all(key in python[1] for key in ("version", "internal", "gauss"))
    )


def _derived(rank: int, state: Any) -> Any:
    try:
        return derived_generators(state, rank)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise StructureMismatch(
            f"The saved random generators are not as RngState saves them: {error!r:.200}",
            hint="Leave them out with exclude",
        ) from error


def _generators(saved: SavedState) -> Iterator[tuple[str, Node]]:
    """Find generators by the label of torch's; only the way to them is walked."""
    tops = {
        row.label.rpartition(".")[0]
        for row in saved.rows
        if row.dtype == "uint8" and row.label.rpartition(".")[2].partition("~")[0] == "torch"
    }
    pending = [(saved.tree, "")] if tops else []
    while pending:
        node, label = pending.pop()
        if node[0] in ("shared", "stateful", "registered"):
            pending.append((node[-1], label))
        elif is_generators(node):
            yield label, node
        else:
            pending += [
                (child, where)
                for _, child, where in children_of(node, label)
                if any(top == where or top.startswith(f"{where}.") for top in tops)
            ]


class _Unfinished(Exception):  # a signal between functions of this file
    def __init__(self, number: int) -> None:
        self.number = number


class Rebuild:
    """Make objects of a saved tree.

    Args:
        values: The inline values, encoded.
        targets: Where tensors come from, and are noted to be filled.
        definitions: The containers that references in the tree point to, by number.
        per_rank: What of the tree belongs to one rank each, and none of them is this one.
        pickling: Whether pickled objects may be made.
        distributed: Whether other processes load other parts of the same tensors.

    Attributes:
        objects_have_more: Whether an object of the target holds what was not saved of it.
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
        self.objects_have_more = False
        self._objects: dict[int, Factory] = {}
        self._planned: dict[int, Factory] = {}
        self._built: dict[int, Any] = {}
        self._building: set[int] = set()
        self._late: defaultdict[int, list[Factory]] = defaultdict(list)

    def plan(self, node: Node, label: str, hint: LiveCounterpart | None = None) -> Factory:
        """Check everything about a node that can be checked now.

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

    def plan_tensor(self, node: Node, label: str, hint: LiveCounterpart | None) -> Factory:
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

    def _fresh_tensor(self, number: int) -> Factory:
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
        make: Factory = partial(same, obj)
        self._objects[number] = make
        if row.attributes:
            attributes = self.plan(row.attributes, join(row.label, "__dict__"))
            make = self._objects[number] = self._with_attributes(obj, attributes)
        return make

    def combined(self, number: int, live: Any, label: str) -> Factory:
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
            return tensor_object(row, self._targets.fresh(stored))

    def _with_attributes(self, obj: Any, attributes: Factory) -> Factory:
        pending = [attributes]

        def make() -> Any:
            if pending:  # emptied first, as an attribute may refer to the tensor itself
                self._put(vars(obj).update, pending.pop(), {})
            return obj

        return make

    # Leaves

    def plan_value(self, node: Node, label: str, hint: LiveCounterpart | None) -> Factory:
        return partial(same, self.value(node, label))

    def plan_set(self, node: Node, label: str, hint: LiveCounterpart | None) -> Factory:
        kind = set if node[0] == "set" else frozenset
        return partial(kind, [decode_key(key) for key in node[1]])

    def plan_absent(self, node: Node, label: str, hint: LiveCounterpart | None) -> Factory:
        return partial(same, None if hint is None else hint.live)

    # Containers that can be changed

    def plan_mapping(self, node: Node, label: str, hint: LiveCounterpart | None) -> Factory:
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

        return MutableFactory(empty_mapping(node), fill)

    def derives(self, node: Node) -> bool:
        """Tell whether a node is random generators, of which this rank gets derived ones."""
        return self.per_rank.derive is not None and is_generators(node)

    def _plan_derived(self, node: Node, label: str, hint: LiveCounterpart | None) -> Factory:
        per_rank, self.per_rank = self.per_rank, PerRankItems()
        try:
            make = self.plan_mapping(node, label, hint)
        finally:
            self.per_rank = per_rank
        assert per_rank.derive is not None
        derive = per_rank.derive
        return lambda: derive(make())

    def _items(
        self, node: Node, label: str, hint: LiveCounterpart | None
    ) -> list[tuple[Any, Factory]]:
        children = children_of(node, label)
        if hint is None:
            return [(key, self.plan(child, where)) for key, child, where in children]
        items = [(key, self.plan(child, where, hint.at(key))) for key, child, where in children]
        if isinstance(hint.live, dict):
            saved = {key for key, _, _ in children}
            more = {key: live for key, live in hint.live.items() if key not in saved}
            self.objects_have_more |= bool(more)
            if not hint.select.selects_all:
                items += [
                    (key, partial(same, live))
                    for key, live in more.items()
                    if not any_selected(live, join(label, key), hint.select)
                ]
        return items

    def plan_sequence(self, node: Node, label: str, hint: LiveCounterpart | None) -> Factory:
        makers = self._elements(node, label, hint)
        shell: Factory = list
        if node[0] == "deque":
            if node[2] is not None and node[2] < len(makers):
                raise InvalidManifest("A deque has more elements than it may have", key=label)
            shell = partial(deque, maxlen=node[2])

        def fill(made: Any) -> None:
            made.extend([None] * len(makers))
            for index, each in enumerate(makers):
                self._put(partial(setitem, made, index), each)

        return MutableFactory(shell, fill)

    def _elements(self, node: Node, label: str, hint: LiveCounterpart | None) -> list[Factory]:
        children = children_of(node, label)
        if hint is not None and isinstance(hint.live, list | tuple):
            self.objects_have_more |= len(hint.live) > len(children)
        return [
            self.plan(child, where, None if hint is None else hint.at(key))
            for key, child, where in children
        ]

    def plan_dataclass(self, node: Node, label: str, hint: LiveCounterpart | None) -> Factory:
        cls, names = resolve_class(node[1], object), node[2]
        check_attributes(cls, names, label)
        makers = self._elements(node, label, hint)

        def fill(made: Any) -> None:
            for name, each in zip(names, makers, strict=True):
                self._put(partial(object.__setattr__, made, name), each)

        # No constructor runs: the attributes are what it, and all that came after it, left.
        return MutableFactory(partial(object.__new__, cls), fill)

    # Containers that cannot

    def plan_tuple(self, node: Node, label: str, hint: LiveCounterpart | None) -> Factory:
        makers = self._elements(node, label, hint)
        return lambda: tuple([make() for make in makers])

    def plan_named_tuple(self, node: Node, label: str, hint: LiveCounterpart | None) -> Factory:
        cls = resolve_class(node[1], tuple)
        if list(getattr(cls, "_fields", ())) != node[2]:
            raise StructureMismatch(
                f"The named tuple {node[1]} has the fields {getattr(cls, '_fields', ())} here "
                f"and {node[2]} in the checkpoint",
                key=label or None,
            )
        makers = self._elements(node, label, hint)
        return lambda: tuple.__new__(cls, [make() for make in makers])

    def plan_stateful(self, node: Node, label: str, hint: LiveCounterpart | None) -> Factory:
        return self.plan(node[1], label, hint)

    def plan_registered(self, node: Node, label: str, hint: LiveCounterpart | None) -> Factory:
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

    def plan_shared(self, node: Node, label: str, hint: LiveCounterpart | None) -> Factory:
        return self._plan_once(node[1], node[2], label, hint)

    def plan_ref(self, node: Node, label: str, hint: LiveCounterpart | None) -> Factory:
        number = node[1]
        if number not in self._planned:
            # The place of the container itself is in a live target, and was not planned here.
            self._plan_once(number, self.definitions[number], label, hint)
        return lambda: self._planned[number]()

    def _plan_once(
        self, number: int, node: Node, label: str, hint: LiveCounterpart | None
    ) -> Factory:
        self._planned[number] = _never
        make = self.plan(node, label, hint)
        planned = self._planned[number] = partial(self._make_once, number, make)
        return planned

    def _make_once(self, number: int, make: Factory) -> Any:
        if number in self._built:
            return self._built[number]
        if number in self._building:
            raise _Unfinished(number)
        if isinstance(make, MutableFactory):
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

    def _put(self, assign: Callable[[Any], object], make: Factory, meanwhile: Any = None) -> None:
        try:
            value = make()
        except _Unfinished as unfinished:
            assign(meanwhile)
            self._late[unfinished.number].append(partial(self._put, assign, make, meanwhile))
        else:
            assign(value)


_Plan = Callable[[Rebuild, Node, str, LiveCounterpart | None], Factory]

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
