"""The kinds of containers of a state: the test for each kind, and the contents of a container.

Every save opens all containers of its state by these rules, whether its tree is new or cached.

Modules. ``torch.nn.Module.state_dict`` detaches each parameter and buffer, and changes nothing
else. For a DTensor that costs more than the rest of its walk, and an attached tensor has all facts
that the walk needs of a detached one. So the walk gets the attached tensors (``keep_vars``), and
handles them as if they were detached. That is exact only as long as torch's own code makes the
state. For a module with hooks after its ``state_dict``, with its own way to save, or with extra
state, the plain ``state_dict`` is called.

Registered types are converted to plain data and back by functions of the program.
``collections.Counter``, which is in the state of torch's ``MultiStepLR``, is registered here. A
registration changes no format, and is enough for most types. ``docs/design.md`` tells how to add a
kind.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from operator import index
from typing import Any, TypeVar

import torch
from torch import nn

from ckpipe.errors import InvalidManifest, UnsupportedState, UsageError
from ckpipe.format.labels import Json, encode_key, label_part
from ckpipe.format.tree import SETS, Node, container_node, encoded
from ckpipe.interpreter import user_code
from ckpipe.state.data_parallel import equal_places, place_of
from ckpipe.state.tensors import is_wrapper
from ckpipe.state.values import NotInline, class_path, encode_value, lasting_path, optimizer_kind
from ckpipe.state.wrappers import Wrapper, take_apart


@dataclass(frozen=True, eq=False, slots=True)
class Kind:
    """A kind of containers; :data:`ckpipe.format.tree.FORMS` has the form of its nodes.

    Args:
        name: Its name in trees.
        open: Sets the children, keys and head of a container.
        saved_twice: True if a container in two places is saved twice.
        wraps: True if opening calls user code, which returns the only child; the child has the
            label of the container.
    """

    name: str
    open: Callable[[Container], None]
    saved_twice: bool = False
    wraps: bool = False


@dataclass(eq=False, slots=True)
class Container:
    """A container of a state.

    Args:
        kind: Its kind.
        obj: The container itself, kept alive so that its id is unique.
        where: Returns its path, with each key as a function writes it; called for few containers.
        attached: True if the tensors directly in it are saved as if they were detached.

    Attributes:
        children: The objects in it.
        keys: The key of each child; None if they are numbered, or there is only one. An ordered
            dict with attributes has them as one more child, without a key.
        head: Its other facts, as JSON.
        live: True if the tensors in its only child are saved as if they were detached.
        is_replicated: The test for replicated tensors below it; None if it has none.
        first: The index of its first child among all visited objects of a state.
        inner: Its children that are containers, by index.
    """

    kind: Kind
    obj: Any
    where: Callable[[Callable[[object], str]], str] = lambda part: ""
    attached: bool = False
    children: list[Any] = field(default_factory=list)
    keys: list[Any] | None = None
    head: Json = None
    live: bool = False
    is_replicated: ReplicatedTest | None = None
    first: int = 0
    inner: dict[int, Container] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Its label in the state."""
        return self.where(label_part)

    def open(self) -> None:
        """Set its children; call user code for objects that have some.

        Raises:
            UnsupportedState: If it cannot be saved in its present form.
        """
        self.kind.open(self)


ReplicaGroup = tuple[int, ...] | None
"""The ranks that hold a tensor alike, in order; None for all ranks."""

ReplicatedTest = Callable[[str, Any], bool | Collection[int]]
"""Tells by the label of a tensor, relative to its object, and the tensor which ranks hold it alike:
True for all ranks, False for none, or the ranks."""


def is_stateful(obj: Any) -> bool:
    """True if an object is saved by ``state_dict`` and loaded by ``load_state_dict``."""
    return callable(getattr(obj, "state_dict", None)) and callable(
        getattr(obj, "load_state_dict", None)
    )


def _mapping(opened: Container) -> None:
    opened.children, opened.keys = list(opened.obj.values()), list(opened.obj)


def _sequence(opened: Container) -> None:
    opened.children = list(opened.obj)


def _ordered_dict(opened: Container) -> None:
    _mapping(opened)
    # A module's state_dict has the versions of its modules in an attribute. It comes last.
    attributes = vars(opened.obj)
    opened.head = bool(attributes)
    if attributes:
        opened.children.append(dict(attributes))


def _default_dict(opened: Container) -> None:
    _mapping(opened)
    factory = opened.obj.default_factory
    opened.head = next((name for name, each in FACTORIES.items() if each is factory), None)
    if factory is not None and opened.head is None:
        raise UnsupportedState(
            f"A defaultdict has the factory {factory!r:.100}",
            key=opened.label or None,
            hint="Factories that can be saved are " + ", ".join(FACTORIES),
        )


FACTORIES: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (list, dict, set, int, float, str, tuple, bool, bytes)
}
"""The factories that a defaultdict may have."""


def _deque(opened: Container) -> None:
    _sequence(opened)
    opened.head = opened.obj.maxlen


def _set(opened: Container) -> None:
    label = opened.label
    # Sorted by their form, so that equal sets make equal trees.
    opened.head = sorted((encode_key(member, label) for member in opened.obj), key=repr)


def _named_tuple(opened: Container) -> None:
    _sequence(opened)
    opened.keys, opened.head = list(opened.obj._fields), lasting_path(type(opened.obj))


def _dataclass(opened: Container) -> None:
    obj = opened.obj
    names = [each.name for each in dataclasses.fields(obj) if hasattr(obj, each.name)]
    attributes = {name: getattr(obj, name) for name in names}
    for name, value in getattr(obj, "__dict__", {}).items():
        attributes.setdefault(name, value)
    opened.children, opened.keys = list(attributes.values()), list(attributes)
    opened.head = lasting_path(type(obj))


def _stateful(opened: Container) -> None:
    if isinstance(opened.obj, torch.optim.Optimizer):
        opened.head = optimizer_kind(opened.obj)
    with user_code("state_dict", opened.label):
        state = live_state_dict(opened.obj)
        opened.live = state is not None
        opened.children = [opened.obj.state_dict() if state is None else state]


def _registered(opened: Container) -> None:
    known = registered_for(type(opened.obj))
    assert known is not None
    with user_code("to_state", opened.label):
        opened.children, opened.head = [known.to_state(opened.obj)], known.name


def _wrapper_tensor(opened: Container) -> None:
    apart = open_wrapper(opened.obj, opened.label, detached=opened.attached)
    opened.children, opened.head, opened.live = [apart.inner], apart.facts, opened.attached
    if apart.replicas:
        opened.is_replicated = lambda _label, _tensor: apart.replicas


def open_wrapper(obj: Any, label: str, *, detached: bool = False) -> Wrapper:
    """Take a wrapper tensor apart as :func:`take_apart` does, and encode its context.

    Raises:
        UnsupportedState: If its context or an inner item cannot be saved.
    """
    apart, values = take_apart(obj, label, detached=detached), list[Json]()
    try:
        apart.facts["context"] = [encoded(_context_node(apart.context, values)), values]
        return apart
    except (NotInline, UnsupportedState) as error:
        raise UnsupportedState(
            f"The context of this {apart.facts['class']} holds what cannot be saved: {error}",
            key=label or None,
            hint="A context may hold plain values, dtypes, sizes, enums, and containers of them. "
            "Call ckpipe.register_type for the class, or leave it out",
        ) from error


def _context_node(value: Any, values: list[Json]) -> Node:
    """Return the node of an item of a context, and append its values to those of the context."""
    kind = kind_of(value)
    if kind is None or kind in (STATEFUL, WRAPPER_TENSOR):
        if isinstance(value, torch.device):
            value = torch.device("cpu")  # that of a new wrapper; devices differ between ranks
        try:
            values.append(encode_value(value))
        except NotInline:
            raise NotInline(f"a {class_path(type(value))}") from None
        return Node("value", len(values) - 1)
    opened = Container(kind, value)
    opened.open()
    if kind.name in SETS:
        return Node(kind.name, keys=opened.head)
    if opened.keys is not None and len(opened.keys) < len(opened.children):
        raise NotInline("an OrderedDict with attributes")
    nodes = [_context_node(each, values) for each in opened.children]
    keys = [encode_key(key) for key in opened.keys or ()]
    return container_node(kind.name, opened.head, keys, nodes)


DICT = Kind("dict", _mapping)
NAMED_TUPLE = Kind("named_tuple", _named_tuple)
DATACLASS = Kind("dataclass", _dataclass)
STATEFUL = Kind("stateful", _stateful, wraps=True)
REGISTERED = Kind("registered", _registered, wraps=True)
WRAPPER_TENSOR = Kind("wrapper_tensor", _wrapper_tensor, wraps=True)
ROOT = Kind("root", _sequence, wraps=True)

_EXACT: dict[type[Any], Kind] = {
    dict: DICT,
    list: Kind("list", _sequence),
    tuple: Kind("tuple", _sequence, saved_twice=True),
    OrderedDict: Kind("ordered_dict", _ordered_dict),
    defaultdict: Kind("default_dict", _default_dict),
    deque: Kind("deque", _deque),
    set: Kind("set", _set, saved_twice=True),
    frozenset: Kind("frozenset", _set, saved_twice=True),
}


def kind_of(obj: Any) -> Kind | None:
    """Return the kind of a container; None for other objects."""
    return _EXACT.get(type(obj)) or _inexact(obj)


def _inexact(obj: Any) -> Kind | None:
    if registered_for(type(obj)) is not None:
        return REGISTERED
    if isinstance(obj, type):
        return None
    if is_wrapper(obj):
        return WRAPPER_TENSOR
    if not isinstance(obj, torch.Tensor) and is_stateful(obj):
        return STATEFUL
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):
        return NAMED_TUPLE
    return DATACLASS if dataclasses.is_dataclass(obj) else None


def live_state_dict(obj: Any) -> dict[str, torch.Tensor] | None:
    """Return an object's ``state_dict()`` with attached tensors.

    Returns:
        The state; None if the plain ``state_dict()`` must be called.
    """
    if not isinstance(obj, nn.Module) or not _saves_as_torch_does(obj):
        return None
    state: dict[str, torch.Tensor] = obj.state_dict(keep_vars=True)
    return state


_WAYS_TO_SAVE = ("state_dict", "_save_to_state_dict", "get_extra_state")


def _saves_as_torch_does(module: nn.Module) -> bool:
    pending, seen, kinds = [module], {id(module)}, set()
    hooks: dict[int, Any] = {}  # usually all modules share one
    while pending:
        each = pending.pop()
        if each._state_dict_hooks or not each.__dict__.keys().isdisjoint(_WAYS_TO_SAVE):
            return False
        for hook in each._state_dict_pre_hooks.values():
            hooks[id(hook)] = hook
        kinds.add(type(each))
        for child in each._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                pending.append(child)
    return all(map(_is_plain_kind, kinds)) and _are_torchs(hooks.values())


def _is_plain_kind(kind: type[nn.Module]) -> bool:
    own = any(getattr(kind, name) is not getattr(nn.Module, name) for name in _WAYS_TO_SAVE)
    return not own and not issubclass(kind, torch.jit.ScriptModule)


def _are_torchs(hooks: Iterable[Any]) -> bool:
    """True if all hooks are torch's (``fully_shard`` adds some): they ignore ``keep_vars``."""
    return all(str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RegisteredType:
    """The functions by which objects of one class are saved.

    Args:
        name: The name of the class in manifests.
        cls: The class itself; subclasses are not covered.
        to_state: Makes a state of an object: any nesting of objects that ckpipe saves.
        from_state: Makes an object of such a state.
    """

    name: str
    cls: type[Any]
    to_state: Callable[[Any], Any]
    from_state: Callable[[Any], Any]


_by_class: dict[type[Any], RegisteredType] = {}
_by_name: dict[str, RegisteredType] = {}


def register_type(
    cls: type[T],
    *,
    to_state: Callable[[T], Any],
    from_state: Callable[[Any], T],
    name: str | None = None,
) -> None:
    """Teach ckpipe to save and load the objects of a class.

    A program that loads such objects must make the same call. A load makes a new object and
    replaces the old one; it fills none of the old one's tensors. An object is saved and loaded as a
    whole: ``include`` and ``exclude`` that select only a part of one raise ``UsageError``.

    Args:
        cls: The class; its subclasses need calls of their own.
        to_state: Makes a state of an object: any nesting of objects that ckpipe saves, tensors
            included.
        from_state: Makes an object of such a state.
        name: The name of the class in checkpoints; by default its module and qualified name. It
            must stay the same as long as checkpoints with it may be loaded.

    Raises:
        ValueError: If another class has this name.
    """
    name = name or f"{cls.__module__}:{cls.__qualname__}"
    known = _by_name.get(name)
    if known is not None and known.cls is not cls:
        raise ValueError(f"the name {name!r} already stands for {known.cls!r}")
    _by_class[cls] = _by_name[name] = RegisteredType(name, cls, to_state, from_state)


def part_of_registered(label: str) -> UsageError:
    """Make the error for a filter that selects only a part of a registered object."""
    return UsageError(
        "include and exclude leave a part of an object that is saved and loaded as a whole",
        key=label or None,
        hint=f"Select all of it or nothing: {label!r} matches all of it",
    )


def registered_for(cls: type[Any]) -> RegisteredType | None:
    """Return the registration of a class, if it has one."""
    return _by_class.get(cls)


def registered_as(name: str) -> RegisteredType | None:
    """Return the registration that a manifest names, if this program has it."""
    return _by_name.get(name)


def _counts(counter: Counter[Any]) -> OrderedDict[Any, Any]:
    counts: OrderedDict[Any, Any] = OrderedDict(counter)
    vars(counts).update(vars(counter))
    return counts


def _counter(counts: Any) -> Counter[Any]:
    if not isinstance(counts, dict):
        raise InvalidManifest(f"A Counter was saved as a {type(counts).__qualname__}")
    made: Counter[Any] = Counter(counts)
    vars(made).update(getattr(counts, "__dict__", {}))
    return made


register_type(Counter, to_state=_counts, from_state=_counter)


def replicated_test(obj: Any) -> ReplicatedTest | None:
    """Return an object's test for tensors that several ranks hold alike; None if it has none.

    The test is the method ``__ckpipe_replicated__``; see ``docs/reference/state.md``. A module
    without one holds alike what lies in the memory of a parameter that DDP keeps equal.
    """
    own = getattr(obj, "__ckpipe_replicated__", None)
    if own is not None:
        return lambda label, _: own(label)
    places = equal_places([obj]) if isinstance(obj, nn.Module) else {}
    return (lambda _, tensor: places.get(place_of(tensor), False)) if places else None


def replica_group(told: bool | Collection[int]) -> ReplicaGroup:
    """Return the group of a tensor for which a test told that several ranks hold it alike."""
    return tuple(sorted(set(map(index, told)))) if isinstance(told, Collection) else None
