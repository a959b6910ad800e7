"""The walk over a state: every node it makes, what it refuses, and who shares bytes with whom."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from bundles import capture
from hypothesis import given
from hypothesis import strategies as st

from ckpipe.errors import UnsupportedState
from ckpipe.format.keys import LabelFilter, decode_key
from ckpipe.format.manifest import Structure, TensorRow
from ckpipe.format.tree import check_tree
from ckpipe.state.flatten import ABSENT, Captured
from ckpipe.state.tensors import alias_groups, overlaps_itself, tensor_leaf
from ckpipe.state.values import decode_value


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any = None


class Counter:
    def __init__(self) -> None:
        self.count = torch.tensor(3)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def labels(captured: Captured) -> list[str]:
    return [leaf.label for leaf in captured.tensors]


def check(captured: Captured) -> Captured:
    """Whatever the walk makes must pass the checks of what is read."""
    rows = tuple(
        TensorRow(leaf.label, leaf.dtype, leaf.shape, attributes=leaf.attributes)
        for leaf in captured.tensors
    )
    check_tree(Structure(captured.tree, rows, len(captured.values)))
    return captured


def plain(node: list[Any], values: list[Any]) -> Any:
    """What a tree of the simple containers stands for."""
    kind = node[0]
    if kind == "value":
        return decode_value(values[node[1]])
    if kind == "dict":
        return {
            decode_key(key): plain(item, values) for key, item in zip(node[1], node[2], strict=True)
        }
    items = [plain(item, values) for item in node[1]]
    return tuple(items) if kind == "tuple" else items


keys = st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.none(), st.floats())
states = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
    ),
    max_leaves=12,
)


@given(states)
def test_trees_stand_for_their_states(state: Any) -> None:
    captured = check(capture(state))
    assert repr(plain(captured.tree, captured.values)) == repr(state)


@given(st.lists(st.sampled_from(["a", "b", "a.b", "1", 1, 1.5, None, "__metadata__", "~", "@"])))
def test_labels_are_unique_whatever_the_keys(path: list[Any]) -> None:
    state: dict[Any, Any] = {}
    inner = state
    for key in path:
        inner["t"] = torch.zeros(1)
        inner["leaf"] = {"t": torch.zeros(1)}
        inner = inner.setdefault(key, {})
    inner["x"], inner["leaf.t"] = torch.zeros(1), torch.zeros(1)
    captured = check(capture(state))
    assert len(set(labels(captured))) == len(captured.tensors)


@pytest.mark.parametrize(
    "key", ["/", "..", "../../x", "@", "~", "__metadata__", "ü😀", "k" * 4096, "", "a\0b", "\ud800"]
)
def test_odd_keys_stand_exactly_in_the_tree(key: str) -> None:
    captured = check(capture({key: torch.zeros(1)}))
    assert captured.tree == ["dict", [key], [["tensor", 0]]]
    captured.tensors[0].label.encode()


def test_keys_that_make_the_same_label_stay_apart() -> None:
    a, b, c, d = (torch.full((1,), n) for n in range(4))
    captured = check(capture({1: a, "1": b, "x.y": c, "x": {"y": d}}))
    assert labels(captured) == ["1", "1~2", "x.y", "x.y~2"]
    assert captured.tree[1] == [1, "1", "x.y", "x"]


def test_every_container_has_its_node() -> None:
    module_state = torch.nn.Linear(1, 1).state_dict()
    state = {
        "ordered": OrderedDict(b=1, a=2),
        "module": module_state,
        "default": defaultdict(list, {"k": [1]}),
        "deque": deque([1, 2], maxlen=3),
        "sets": ({3, 1}, frozenset({"x"})),
        "point": Point(1, torch.ones(1)),
        "frozen": Frozen([1]),
        "object": Counter(),
        "empty": [{}, [], (), set()],
    }
    captured = check(capture(state))
    found = dict(zip(captured.tree[1], captured.tree[2], strict=True))
    assert found["ordered"][:2] == ["ordered_dict", ["b", "a"]]
    assert found["module"][3][0] == "dict"
    assert found["default"][3] == "list"
    assert found["deque"][0::2] == ["deque", 3]
    assert found["sets"] == ["tuple", [["set", [1, 3]], ["frozenset", ["x"]]]]
    assert found["point"][:3] == ["named_tuple", f"{__name__}:Point", ["x", "y"]]
    assert found["frozen"][:3] == ["dataclass", f"{__name__}:Frozen", ["a", "b"]]
    assert found["object"][0] == "stateful"
    assert found["empty"] == ["list", [["dict", [], []], ["list", []], ["tuple", []], ["set", []]]]
    assert "object.count" in labels(captured)


def test_containers_in_two_places_and_in_themselves_are_shared() -> None:
    both: list[Any] = [1]
    ring: dict[str, Any] = {"both": both}
    ring["self"] = ring
    pair = (both, ring)
    captured = check(capture([both, ring, pair, pair]))
    text = repr(captured.tree)
    assert text.count("'shared'") == 2
    # Both again in the ring, the ring in itself, and each of them in both copies of the pair.
    assert text.count("'ref'") == 6
    assert len(captured.values) == 1


def test_one_tensor_in_two_places_is_one_row() -> None:
    tensor = torch.ones(2)
    captured = check(capture({"a": tensor, "b": [tensor]}))
    assert labels(captured) == ["a"]
    assert captured.tree[2] == [["tensor", 0], ["list", [["tensor", 0]]]]


def test_attributes_of_tensors_are_walked() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    weight.extra = {"mask": torch.zeros(1), "n": 5}  # type: ignore[attr-defined]
    captured = check(capture({"w": weight}))
    assert labels(captured) == ["w", "w.__dict__.extra.mask"]
    assert captured.tensors[0].attributes is not None
    assert captured.values == [5]


def test_selection_leaves_out_what_does_not_match() -> None:
    state = {"a": torch.ones(1), "b": [torch.ones(1), 5], "c": {"d": torch.ones(1)}, "e": []}
    captured = check(capture(state, select=LabelFilter(None, ["b.0", "c"])))
    assert captured.tree == [
        "dict", ["a", "b", "e"], [["tensor", 0], ["list", [ABSENT, ["value", 0]]], ["list", []]],
    ]  # fmt: skip
    assert check(capture(state, select=LabelFilter(["nothing"]))).tree[0] in ("absent", "dict")


@pytest.mark.parametrize(
    ("bad", "where"),
    [
        ({"a": [1, object()]}, "a.1"),
        ({"a": {b"x": 1}}, "a"),
        ({"s": torch.ones(2).to_sparse()}, "s"),
        ({"m": torch.empty(1, device="meta")}, "m"),
        ({"n": np.array([object()])}, "n"),
        ({"d": defaultdict(lambda: 0)}, "d"),
        ({"f": test_selection_leaves_out_what_does_not_match}, "f"),
        ({"x": {1, (2, frozenset())}}, "x"),
    ],
)
def test_what_cannot_be_saved_is_named(bad: Any, where: str) -> None:
    with pytest.raises(UnsupportedState) as caught:
        capture(bad)
    assert caught.value.key == where


@pytest.mark.parametrize(
    ("array", "what"),
    [(np.array([object()]), "dtype object"), (np.ma.array([1]), "the class MaskedArray")],
)
def test_an_array_that_cannot_be_saved_is_told_why(array: Any, what: str) -> None:
    with pytest.raises(UnsupportedState, match=f"A numpy array of {what} cannot be saved"):
        capture({"n": array})


def test_endless_nesting_is_refused() -> None:
    state: Any = []
    for _ in range(100_000):
        state = [state]
    with pytest.raises(UnsupportedState, match="nested too deeply"):
        capture(state)


def groups(*tensors: torch.Tensor) -> list[list[int]]:
    return alias_groups([tensor_leaf(each, str(n))[0] for n, each in enumerate(tensors)])


def test_overlapping_views_are_one_group_and_neighbours_are_none() -> None:
    base = torch.arange(10)
    assert groups(base[:5], base[5:]) == []
    assert groups(base[:6], base[5:]) == [[0, 1]]
    assert groups(base[5:], base[:2], base[1:6]) == [[0, 1, 2]]
    assert groups(base, torch.arange(3), base[2:3]) == [[0, 2]]
    assert groups(base[:0], base) == []
    assert groups(base.view(torch.int32), base[3]) == [[0, 1]]


def test_numpy_arrays_over_tensors_belong_to_them() -> None:
    base = torch.zeros(4)
    captured = capture({"t": base, "n": base.numpy()[2:]})
    assert alias_groups(captured.tensors) == [[0, 1]]


def test_expanded_tensor_is_a_group_by_itself() -> None:
    assert groups(torch.zeros(1).expand(5), torch.zeros(4)) == [[0]]
    assert groups(torch.arange(8).as_strided((3, 4), (1, 1))) == [[0]]
    assert groups(torch.arange(6).reshape(2, 3).T) == []


@st.composite
def windows(draw: st.DrawFn) -> list[tuple[int, int]]:
    bounds = st.tuples(st.integers(0, 30), st.integers(0, 30))
    return [(min(pair), max(pair)) for pair in draw(st.lists(bounds, max_size=8))]


@given(windows())
def test_groups_are_the_connected_components(spans: list[tuple[int, int]]) -> None:
    base = torch.zeros(30, dtype=torch.uint8)
    found = groups(*(base[lo:hi] for lo, hi in spans))
    bytes_of = {n: set(range(lo, hi)) for n, (lo, hi) in enumerate(spans)}
    component = {n: {n} for n in bytes_of}
    for n in bytes_of:
        for m in bytes_of:
            if bytes_of[n] & bytes_of[m] and component[n] is not component[m]:
                component[n] |= component[m]
                for each in component[n]:
                    component[each] = component[n]
    expected = {tuple(sorted(each)) for each in component.values() if len(each) > 1}
    assert {tuple(group) for group in found} == expected


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=3))
def test_self_overlap_is_never_missed(dims: list[tuple[int, int]]) -> None:
    shape, stride = tuple(n for n, _ in dims), tuple(step for _, step in dims)
    places = [0]
    for n, step in dims:
        places = [place + k * step for place in places for k in range(n)]
    if len(set(places)) < len(places):
        assert overlaps_itself(shape, stride)


def test_values_differ_while_the_tree_stays() -> None:
    first, second = (capture({"lr": lr, "t": torch.ones(1)}) for lr in (0.1, math.nan))
    assert first.tree == second.tree
    assert first.values == [0.1]
    assert second.values == [["float", "nan"]]
