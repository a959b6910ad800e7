"""A cache finds what a walk would find, and refuses where it would find something else.

Whatever changes from one save to the next, the cache of the first state has to find in the
second exactly what a walk over the second gives, or nothing.
"""

from __future__ import annotations

import copy
import enum
import pathlib
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import ckpipe
from ckpipe.errors import UnsupportedState
from ckpipe.format.labels import LabelFilter
from ckpipe.format.tree import Node, mapping
from ckpipe.planning import Captured, fingerprint
from ckpipe.state.capture_cache import CaptureCache, capture_cache_of
from ckpipe.state.flatten import OpenedState, flatten
from ckpipe.state.tensors import TensorLeaf
from tests.inner.made_up_ranks import capture
from tests.support.pipelines import Stateful

ALL = LabelFilter()


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Pair(NamedTuple):
    one: Any
    two: Any


@dataclass
class Box:
    inside: Any


class Holder:
    """An object with a state_dict."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside

    def state_dict(self) -> Any:
        return {"inside": self.inside}

    def load_state_dict(self, state: Any) -> None:
        self.inside = state["inside"]


class Vouching(Holder):
    """One that says which of its tensors are replicated."""

    endings: tuple[str, ...] = ("1",)

    def __ckpipe_replicated__(self, label: str) -> bool:
        return label.endswith(self.endings)


class Tagged(torch.Tensor):
    """A subclass of tensors."""


def cache_of(state: Any, select: LabelFilter = ALL) -> CaptureCache:
    with torch.no_grad():
        cache = capture_cache_of(flatten(OpenedState(state), select, pickling=False))
    assert cache is not None
    return cache


def followed(cache: CaptureCache, state: Any, select: LabelFilter = ALL) -> Captured | None:
    with torch.no_grad():
        return cache.capture(OpenedState(state), select)


def told(captured: Captured) -> Any:
    """All that a save makes use of."""
    leaves = [
        [getattr(leaf, each.name) for each in fields(TensorLeaf)] for leaf in captured.tensors
    ]
    places = [
        (each.data_ptr(), each.shape, each.stride(), each.dtype, each.requires_grad, type(each))
        for each in captured.memory
    ]
    return repr((captured.tree, captured.values, captured.replicated, leaves, places))


def assert_alike(found: Captured, state: Any, select: LabelFilter = ALL) -> None:
    with torch.no_grad():
        expected = capture(state, select=select)
    # Arrays that torch cannot see are copied, to memory that is another each time.
    assert told(found) == told(expected)
    assert fingerprint(found) == fingerprint(expected)


SHARED = [1]

# ---- what is followed ----


def training() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "average": nn.Parameter(torch.zeros(3))}


def train(state: dict[str, Any]) -> None:
    state["model"](torch.ones(3, 4)).square().sum().backward()
    state["optimizer"].step()
    state["optimizer"].param_groups[0]["lr"] *= 0.5


def test_a_state_that_goes_on_training_is_followed() -> None:
    state = training()
    cache = cache_of(state)
    for _ in range(3):
        train(state)
        found = followed(cache, state)
        assert found is not None
        assert_alike(found, state)


def test_no_tensor_is_kept_alive() -> None:
    state: dict[str, Any] = {"a": torch.zeros(3), "b": np.ones(2), "c": nn.Parameter(torch.ones(2))}
    alive = [weakref.ref(each) for each in state.values()]
    cache = cache_of(state)
    assert followed(cache, state) is not None
    state.clear()
    assert [each() for each in alive] == [None, None, None]


# ---- what is refused, or found all the same ----


def tensors() -> dict[str, Any]:
    return {
        "a": torch.zeros(2, 3, dtype=torch.complex64),
        "b": torch.ones(3, 3),
        "p": nn.Parameter(torch.ones(4)),
        "t": torch.ones(2).as_subclass(Tagged),
        "n": np.ones(3),
    }


def changed(state: dict[str, Any], key: str, how: Callable[[Any], Any]) -> dict[str, Any]:
    return state | {key: how(state[key])}


def having(obj: Any, **attributes: Any) -> Any:
    for name, each in attributes.items():
        setattr(obj, name, each)
    return obj


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "resized": lambda s: changed(s, "b", lambda t: t.resize_(3, 2)),
    "replaced": lambda s: changed(s, "b", torch.zeros_like),
    "another array": lambda s: changed(s, "n", np.copy),
    "another shape": lambda s: changed(s, "b", lambda t: torch.zeros(4)),
    "transposed in place": lambda s: changed(s, "b", lambda t: t.t_()),
    "added": lambda s: s | {"z": torch.zeros(1)},
    "dropped": lambda s: {key: each for key, each in s.items() if key != "b"},
    "renamed": lambda s: {("c" if key == "b" else key): each for key, each in s.items()},
    "in another order": lambda s: dict(reversed(s.items())),
    "tied": lambda s: changed(s, "b", lambda t: t) | {"p": s["b"]},
    "met twice": lambda s: s | {"t": s["b"]},
    "retyped": lambda s: changed(s, "b", lambda t: t.double()),
    "retyped in place": lambda s: changed(s, "b", lambda t: having(t, data=t.half())),
    "conjugated": lambda s: changed(s, "a", torch.conj),
    "negated": lambda s: changed(s, "b", torch._neg_view),
    "a gradient": lambda s: changed(s, "b", lambda t: t.requires_grad_()),
    "no gradient": lambda s: changed(s, "p", lambda t: t.requires_grad_(False)),
    "no parameter": lambda s: changed(s, "p", lambda t: t.data),
    "a subclass": lambda s: changed(s, "b", lambda t: t.as_subclass(Tagged)),
    "no subclass": lambda s: changed(s, "t", lambda t: t.as_subclass(torch.Tensor)),
    "an attribute": lambda s: changed(s, "b", lambda t: having(t, note=1)),
    "another attribute": lambda s: changed(s, "t", lambda t: having(t, more=1)),
    "a number": lambda s: changed(s, "b", lambda t: 3),
    "a container": lambda s: changed(s, "b", lambda t: [t]),
    "an array": lambda s: changed(s, "b", lambda t: t.numpy()),
    "a view of it": lambda s: changed(s, "b", lambda t: t[1:]),
    "another class": OrderedDict,
    "set to other memory": lambda s: changed(s, "b", lambda t: t.set_(torch.zeros(9)[:4])),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_of_a_tensor_is_seen(name: str) -> None:
    state = tensors()
    cache = cache_of(state)
    state = CHANGES[name](state)
    found = followed(cache, state)
    if found is not None:
        assert_alike(found, state)


@pytest.mark.parametrize("name", ["replaced", "set to other memory"])
def test_a_change_of_nothing_but_memory_is_followed(name: str) -> None:
    state = {"b": torch.ones(4), "c": torch.ones(1)}
    cache = cache_of(state)
    assert followed(cache, CHANGES[name](state)) is not None


@pytest.mark.parametrize(
    "odd", [torch.zeros(3, 3).to_sparse(), torch.zeros(3, 3, device="meta")], ids=["sparse", "meta"]
)
def test_what_cannot_be_saved_is_refused(odd: torch.Tensor) -> None:
    cache = cache_of({"b": torch.zeros(3, 3)})
    assert followed(cache, {"b": odd}) is None
    with pytest.raises(UnsupportedState):
        capture({"b": odd})


ODD: dict[str, Any] = {
    "a container in two places": [SHARED, SHARED],
    "a pickled object": [object],
    "a tensor with attributes": [nn.Buffer(torch.zeros(2))],
    "a zero as a key": {0.0: 2},
    "a tuple as a key": {(1, 2): 2},
}


@pytest.mark.parametrize("what", ODD)
def test_odd_states_are_walked_each_time(what: str) -> None:
    assert capture_cache_of(flatten(OpenedState(ODD[what]), ALL, pickling=True)) is None


def test_a_container_that_comes_to_stand_in_two_places_is_seen() -> None:
    shared = [torch.zeros(2)]
    cache = cache_of([shared, [torch.zeros(2)]])
    assert followed(cache, [shared, shared]) is None


def test_the_selection_belongs_to_the_cache() -> None:
    state: dict[str, Any] = {"a": torch.zeros(2), "b": {"c": torch.zeros(3)}, "n": 1}
    only = LabelFilter(["a", "n"])
    cache = cache_of(state, only)
    assert followed(cache, state) is None
    state["n"] = 2
    found = followed(cache, state, LabelFilter(["a", "n"]))
    assert found is not None
    assert_alike(found, state, only)
    state["b"]["c"] = state["a"]  # now it is met where it was selected before
    found = followed(cache, state, only)
    assert found is None


def test_what_is_said_of_replicas_is_asked_again() -> None:
    holder = Vouching([torch.zeros(1), torch.ones(2)])
    cache = cache_of(holder)
    found = followed(cache, holder)
    assert found is not None
    assert found.replicated == {1: None}
    holder.endings = ("0",)
    assert followed(cache, holder) is None


# ---- containers ----

TENSOR, OTHER = torch.zeros(2), torch.ones(2)
PAIRS: dict[str, tuple[Any, Any]] = {
    "a list in two places": ([[1], [1]], [SHARED, SHARED]),
    "a tensor in two places": ([TENSOR, OTHER], [TENSOR, TENSOR]),
    "a tensor in one place": ([TENSOR, TENSOR], [TENSOR, OTHER]),
    "a key of an ordered dict": (OrderedDict(a=1), OrderedDict(b=1)),
    "an attribute of a dataclass": (Box(1), having(Box(1), more=2)),
    "an attribute of an ordered dict": (OrderedDict(a=1), having(OrderedDict(a=1), more=2)),
    "members of a set": ({1, 2}, {1, 3}),
    "a member's class": ({1}, {True}),
    "a frozenset": ({1}, frozenset({1})),
    "the length of a deque": (deque([1], maxlen=2), deque([1], maxlen=3)),
    "the factory of a default dict": (defaultdict(list, a=1), defaultdict(int, a=1)),
    "a key's class": ({1: 2}, {True: 2}),
    "the order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "a key in the next dict": ([{"a": 1, "b": 2}, {"c": 3}], [{"a": 1}, {"b": 2, "c": 3}]),
    "one more": ([1, 2], [1, 2, 3]),
    "one less": ((1, 2), (1,)),
    "an array's dtype": ([np.zeros(3)], [np.zeros(3, dtype=np.float32)]),
    "an array's shape": ([np.zeros(3)], [np.zeros(4)]),
    "a subclass's shape": ([torch.ones(3).as_subclass(Tagged)], [OTHER.as_subclass(Tagged)]),
    "what is vouched for": (Holder([TENSOR]), having(Holder([TENSOR]), __ckpipe_replicated__=bool)),
}


@pytest.mark.parametrize("what", PAIRS)
def test_every_change_of_a_container_is_seen(what: str) -> None:
    before, after = PAIRS[what]
    cache = cache_of(before)
    assert followed(cache, before) is not None
    assert followed(cache, after) is None
    assert told(capture(before)) != told(capture(after))


@pytest.mark.filterwarnings("ignore:The class .* is not found")
def test_a_type_that_is_registered_meanwhile_is_seen() -> None:
    @dataclass
    class Late:
        inside: Any

    class Where(pathlib.PurePosixPath):
        pass

    for state in (Late(1), Where("/x")):
        cache = cache_of([state])
        assert followed(cache, [state]) is not None
        ckpipe.register_type(type(state), to_state=str, from_state=type(state))
        assert followed(cache, [state]) is None


# ---- modules, which are saved as their state_dict() says, though the walk does not ask it ----


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.buffer = nn.Buffer(torch.ones(2))
        self.register_buffer("passing", torch.ones(1), persistent=False)


class Saying(Layers):
    def get_extra_state(self) -> Any:
        return {"tensor": self.one.bias}

    def set_extra_state(self, state: Any) -> None:
        raise NotImplementedError


FIXED = torch.zeros(5), torch.ones(1, 3)


def swap(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    state[prefix + "weight"] = FIXED[0]


def look(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not keep_vars:
        module.get_parameter("weight").data = FIXED[1]


def overridden(model: Any) -> Any:
    state = {"all": torch.ones(2), "weight": model.one.weight}
    return having(model, state_dict=lambda *args, **kwargs: state)


MODULE_CHANGES: dict[str, Callable[[Any], Any]] = {
    "unchanged": lambda m: m,
    "tied": lambda m: having(m.two, weight=m.one.weight),
    "overlapping": lambda m: having(m.two, bias=nn.Parameter(m.one.weight.data[0])),
    "frozen": lambda m: m.one.requires_grad_(False),
    "marked": lambda m: having(m.one.weight, mark=torch.ones(1)),
    "tagged": lambda m: having(m, buffer=torch.ones(2).as_subclass(Tagged)),
    "replaced": lambda m: having(m.one.weight, data=torch.ones(3, 3).t()),
    "hooked": lambda m: m.one._register_state_dict_hook(swap),
    "asked before": lambda m: m.one.register_state_dict_pre_hook(look),
    "overridden": overridden,
    "without a part": lambda m: having(m, norm=None),
}


@pytest.mark.parametrize("kind", [Layers, Saying])
@pytest.mark.parametrize("change", MODULE_CHANGES)
def test_a_module_is_what_its_state_dict_says(kind: type[Layers], change: str) -> None:
    model = kind()
    MODULE_CHANGES[change](model)
    assert_alike(capture({"model": model}), {"model": Stateful(model.state_dict)})


@pytest.mark.parametrize("before", MODULE_CHANGES)
@pytest.mark.parametrize("after", MODULE_CHANGES)
def test_the_cache_of_a_module_finds_what_a_walk_would(before: str, after: str) -> None:
    model = Layers()
    MODULE_CHANGES[before](model)
    state = {"model": model, "one": model.one.weight}
    if before == "marked":  # a tensor in the state itself has an attribute
        assert capture_cache_of(flatten(OpenedState(state), ALL, pickling=False)) is None
        return
    selections = [ALL, LabelFilter(exclude=["*.two.*"])]
    caches = [cache_of(state, select) for select in selections]
    MODULE_CHANGES[after](model)
    for cache, select in zip(caches, selections, strict=True):
        found = followed(cache, state, select)
        assert found is not None or after != "unchanged"
        if found is not None:
            assert_alike(found, state, select)


# ---- anything that may become anything ----

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 2), st.sampled_from([0.0, -0.0, 1.0, float("nan")]),
    st.sampled_from(["", "1", "a", b"", b"1", torch.float32, Color.RED, Color.BLUE]),
    st.sampled_from([np.float32(1), np.int64(1)]),
)  # fmt: skip
KEYS = st.one_of(
    st.sampled_from(["a", "b", "1", "a.b"]), st.integers(0, 1), st.booleans(), st.none(),
    st.sampled_from([0.0, -0.0, 1.0, (1, "a"), (True, "a"), (1.0, "a")]),
)  # fmt: skip
POOL = torch.arange(64, dtype=torch.float32)
OBJECTS = (torch.zeros(3), torch.ones(3), nn.Parameter(torch.zeros(3)), np.zeros(3))


@st.composite
def leaves(draw: st.DrawFn) -> Any:
    what = draw(st.integers(0, 5))
    if what == 0:
        return OBJECTS[draw(st.integers(0, len(OBJECTS) - 1))]
    if what == 1:
        shape = draw(st.sampled_from([(2,), (2, 2), (), (0,)]))
        stride = draw(st.sampled_from([(1, 2), (2, 1), (1, 1)]))[: len(shape)]
        return POOL.as_strided(shape, stride, draw(st.integers(0, 3)))
    if what == 2:
        return torch.zeros(2, dtype=draw(st.sampled_from([torch.float32, torch.int32])))
    return draw(VALUES)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=3)
    mappings = st.dictionaries(KEYS, inner, max_size=3)
    return st.one_of(
        lists, mappings, lists.map(tuple), lists.map(deque),
        mappings.map(OrderedDict), mappings.map(lambda each: defaultdict(list, each)),
        st.sets(KEYS, max_size=2), inner.map(Box), inner.map(Holder), inner.map(Vouching),
        st.tuples(inner, inner).map(lambda each: Pair(*each)),
    )  # fmt: skip


STATES = st.recursive(leaves(), nested, max_leaves=8)


@st.composite
def two_states(draw: st.DrawFn) -> tuple[Any, Any]:
    """A state and another that has much in common with it, or little."""
    first = draw(STATES)
    second = copy.copy(first) if draw(st.booleans()) else draw(STATES)
    return [first, draw(leaves())], [second, draw(leaves())]


@given(two_states(), st.sampled_from([ALL, LabelFilter(exclude=["*a*"]), LabelFilter(["*1"])]))
def test_a_cache_finds_what_a_walk_would(states: tuple[Any, Any], select: LabelFilter) -> None:
    one, other = states
    with torch.no_grad():
        cache = capture_cache_of(flatten(OpenedState(one), select, pickling=False))
    if cache is None:
        return
    # One tensor in a place that is selected and in one that is not leads nowhere.
    assert select is not ALL or followed(cache, one) is not None
    for state in (one, other):
        found = followed(cache, state, select)
        if found is not None:
            assert_alike(found, state, select)


# ---- DTensors ----


@pytest.fixture(scope="module")
def _rank_1_of_4() -> Iterator[None]:
    """The others do not exist, so that a collective could bring nothing."""
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def mesh(_rank_1_of_4: None) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2))


def test_parameters_and_buffers_stay_what_they_are(mesh: DeviceMesh) -> None:
    made = DTensor.from_local(torch.ones(2), mesh, [Shard(0), Shard(0)], run_check=False)
    state = {
        "parameter": torch.nn.Parameter(made),
        "frozen": torch.nn.Parameter(made.detach().clone(), requires_grad=False),
        "buffer": torch.nn.Buffer(made.detach().clone(), persistent=False),
    }
    setattr(state["parameter"], "colour", "red")  # noqa: B010 - mypy knows no such attribute
    captured = capture(state)
    kinds = [(leaf.kind, leaf.detail, leaf.requires_grad) for leaf in captured.tensors]
    assert kinds == [
        ("parameter", None, True), ("parameter", None, False), ("buffer", "transient", False)
    ]  # fmt: skip
    attributes = [leaf.attributes for leaf in captured.tensors]
    assert attributes == [mapping({"colour": Node("value", 0)}), None, None]


def placed(mesh: DeviceMesh, *placements: Any, shape: tuple[int, ...] = (4, 3)) -> DTensor:
    return DTensor.from_local(torch.ones(shape), mesh, list(placements), run_check=False)


def follow(before: Any, after: Any) -> bool:
    """Whether the cache of a state serves another, and finds in it what a walk does."""
    cache = cache_of(before)
    assert followed(cache, before) is not None
    found = followed(cache, after)
    if found is not None:
        assert_alike(found, after)
    return found is not None


def test_sharded_tensors_that_are_alike_are_found_in_the_cache(mesh: DeviceMesh) -> None:
    one = placed(mesh, Shard(0), Replicate())
    assert follow({"w": one}, {"w": one.detach()})
    assert follow({"w": one}, {"w": placed(mesh, Shard(0), Replicate())})
    assert follow({"w": one}, {"w": placed(init_device_mesh("cpu", (2, 2)), Shard(0), Replicate())})


def test_sharded_tensors_that_say_something_else_than_before_are_a_miss(
    mesh: DeviceMesh,
) -> None:
    one = placed(mesh, Shard(0), Replicate())
    cache = cache_of({"w": one})
    assert followed(cache, {"w": one}) is not None
    one._spec.placements = (Shard(1), Replicate())
    assert followed(cache, {"w": one}) is None


def test_sharded_tensors_that_are_not_alike_are_a_miss(mesh: DeviceMesh) -> None:
    one = placed(mesh, Shard(0), Replicate())
    strided = _StridedShard(0, split_factor=2)
    others: dict[str, Any] = {
        "placements": placed(mesh, Shard(1), Replicate()),
        "a strided shard": placed(mesh, strided, Replicate()),
        "mesh": placed(init_device_mesh("cpu", (4, 1)), Shard(0), Replicate()),
        "global shape": DTensor.from_local(
            torch.ones(4, 3), mesh, [Shard(0), Replicate()], run_check=False,
            shape=torch.Size((7, 3)), stride=(3, 1),
        ),
        "local shape": placed(mesh, Shard(0), Replicate(), shape=(4, 4)),
        "dtype": DTensor.from_local(
            torch.ones(4, 3).half(), mesh, [Shard(0), Replicate()], run_check=False
        ),
        "gradient": placed(mesh, Shard(0), Replicate()).requires_grad_(),
        "parameter": torch.nn.Parameter(placed(mesh, Shard(0), Replicate())),
        "plain": torch.ones(4, 3),
    }  # fmt: skip
    others["local class"] = placed(mesh, Shard(0), Replicate())
    others["local class"]._local_tensor = torch.ones(4, 3).as_subclass(Tagged)
    for what, other in others.items():
        assert not follow({"w": one}, {"w": other}), what


def test_sharded_parameters_are_followed(mesh: DeviceMesh) -> None:
    parameter = torch.nn.Parameter(placed(mesh, Shard(0), Replicate()))
    assert follow({"w": parameter}, {"w": parameter})
    assert not follow({"w": parameter}, {"w": placed(mesh, Shard(0), Replicate())})
    parameter.note = 1  # type: ignore[attr-defined]
    assert not follow(
        {"w": torch.nn.Parameter(placed(mesh, Shard(0), Replicate()))}, {"w": parameter}
    )
