"""Fresh loads: what comes back is what torch.save and torch.load bring back, and more."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st

import ckpipe
from ckpipe.backend import PutMode
from ckpipe.errors import InvalidManifest, StructureMismatch, UnsupportedState
from ckpipe.testing import MemoryBackend
from tests.format.test_earlier_checkpoints import described
from tests.inner.made_up_ranks import capture
from tests.support.pipelines import Stateful, loaded_state
from tests.support.stored_files import document_of, sealed
from tests.support.stored_states import load, round_trip, run_round_trip, store


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Plain:
    x: Any
    y: Any = 0

    def __post_init__(self) -> None:
        assert self.x != "made by a constructor", "no constructor runs on a load"


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    inner: Any = None


@dataclass
class Tree:
    children: list[Tree] = field(default_factory=list)
    parent: Tree | None = None


class Celsius:
    def __init__(self, degrees: torch.Tensor) -> None:
        self.degrees = degrees


ckpipe.register_type(
    Celsius,
    to_state=lambda each: {"degrees": each.degrees},
    from_state=lambda state: Celsius(state["degrees"] + 0),  # a value, not a promise of one
)


values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(),
    st.text(max_size=5), st.binary(max_size=5),
    st.sampled_from([torch.float16, torch.device("cpu"), torch.Size([2, 3])]),
)  # fmt: skip
keys = st.one_of(
    st.text(max_size=3), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False)
)
dtypes = st.sampled_from(
    [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int64, torch.bool,
     torch.complex64, torch.float8_e4m3fn]
)  # fmt: skip


@st.composite
def buffers(draw: st.DrawFn) -> torch.Tensor:
    data = np.frombuffer(draw(st.binary(min_size=256, max_size=256)), dtype=np.uint8).copy()
    return torch.from_numpy(data & 1)  # which is a valid bool too


@st.composite
def views(draw: st.DrawFn, bases: list[torch.Tensor]) -> torch.Tensor:
    """A view of one of a few buffers: it may share bytes with others, or be strided."""
    base = draw(st.sampled_from(bases)).view(draw(dtypes))
    shape = draw(st.lists(st.integers(0, 3), max_size=3).map(tuple))
    offset = draw(st.integers(0, 3))
    stride = draw(st.tuples(*(st.integers(1 if n else 0, 4) for n in shape)))
    reach = offset + sum(max(n - 1, 0) * step for n, step in zip(shape, stride, strict=True))
    if reach >= base.numel():
        shape, stride, offset = (2,), (1,), 0
    view = base.as_strided(shape, stride, offset)
    if view.is_complex() and draw(st.booleans()):
        view = view.conj()
    return view


@st.composite
def states(draw: st.DrawFn) -> Any:
    bases = [draw(buffers()) for _ in range(draw(st.integers(1, 3)))]
    leaves = st.one_of(values, views(bases), views(bases))
    return draw(
        st.recursive(
            leaves,
            lambda inner: st.one_of(
                st.lists(inner, max_size=3),
                st.lists(inner, max_size=3).map(tuple),
                st.dictionaries(keys, inner, max_size=3),
                st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
                st.lists(inner, max_size=3).map(deque),
            ),
            max_leaves=8,
        )
    )


@given(states())
def test_a_fresh_load_is_what_was_saved(state: Any) -> None:
    loaded = run_round_trip({"s": state}).state["s"]
    assert described(loaded) == described(state)


@given(states())
def test_a_fresh_load_is_what_torch_loads(state: Any) -> None:
    file = io.BytesIO()
    try:
        torch.save(state, file)
    except RuntimeError:  # it cannot save one buffer that is seen as two dtypes
        reject()
    file.seek(0)
    theirs = torch.load(file, weights_only=False)
    assert described(run_round_trip({"s": state}).state["s"]) == described(theirs)


async def test_no_constructor_runs() -> None:
    plain = Plain(0)
    plain.x = "made by a constructor"
    plain.extra = torch.ones(1)  # type: ignore[attr-defined]
    loaded = (await round_trip({"p": plain})).state["p"]
    assert loaded.x == "made by a constructor"
    assert loaded.extra.item() == 1


async def test_cycles_close_again() -> None:
    root = Tree()
    root.children.append(Tree(parent=root))
    inner: list[Any] = []
    through_tuple = (inner,)
    inner.append((through_tuple, 5))
    table: dict[str, Any] = {}
    table["self"] = table
    state = {"tree": root, "tuple": through_tuple, "table": table, "after": through_tuple[0]}
    loaded = (await round_trip(state)).state
    assert loaded["tree"].children[0].parent is loaded["tree"]
    assert loaded["tuple"][0][0][0] is loaded["tuple"]
    assert loaded["tuple"][0][0][1] == 5
    assert loaded["table"]["self"] is loaded["table"]
    assert loaded["after"] is loaded["tuple"][0]


async def test_an_attribute_may_lead_back_to_its_tensor() -> None:
    marked = torch.randn(2, requires_grad=True)
    marked.note = {"self": marked, "x": torch.ones(2)}  # type: ignore[attr-defined]
    loaded = (await round_trip({"marked": marked})).state["marked"]
    assert loaded.note["self"] is loaded
    assert torch.equal(loaded.note["x"], torch.ones(2))


def test_tensors_in_attributes_have_labels_below_their_tensor() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    weight.extra = {"mask": torch.zeros(1), "n": 5}  # type: ignore[attr-defined]
    captured = capture({"w": weight})
    assert [leaf.label for leaf in captured.tensors] == ["w", "w.__dict__.extra.mask"]
    assert captured.values == [5]


def test_containers_in_two_places_are_shared_but_tuples_are_written_twice() -> None:
    both: list[Any] = [1]
    ring: dict[str, Any] = {"both": both}
    ring["self"] = ring
    pair = (both, ring)
    text = repr(capture([both, ring, pair, pair]).tree)
    assert text.count("'shared'") == 2
    # Both again in the ring, the ring in itself, and each of them in both copies of the pair.
    assert text.count("'ref'") == 6


async def test_registered_types_are_made_of_loaded_values() -> None:
    loaded = (await round_trip({"t": (Celsius(torch.tensor([21.5])),)})).state
    assert loaded["t"][0].degrees.item() == 21.5


async def test_a_counter_keeps_its_class_its_keys_and_their_order() -> None:
    counter: Counter[Any] = Counter({3: 1, "3": 5, True: torch.ones(2), (2, None): -1})
    counter.since = [7]  # type: ignore[attr-defined]
    loaded = (await round_trip({"c": counter, "again": counter})).state
    assert described(loaded["c"]) == described(counter)
    assert loaded["c"].since == [7]
    assert loaded["again"] is loaded["c"]


class Anything:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Anything)

    __hash__ = None  # type: ignore[assignment]


async def test_pickled_objects_are_refused_unless_allowed() -> None:
    state = {"odd": {"one": Anything()}, "x": torch.ones(1)}
    with pytest.raises(UnsupportedState) as caught:
        await round_trip(state, save_pickle="allow")
    assert caught.value.key == "odd.one"
    assert 'pickle="allow"' in str(caught.value)
    assert (await round_trip(state, save_pickle="allow", pickle="allow")).state["odd"][
        "one"
    ] == Anything()
    left_out = await round_trip(state, save_pickle="allow", exclude=["odd"])
    assert list(left_out.state) == ["x"]


async def test_a_selection_leaves_out_the_rest() -> None:
    state = {"a": {"x": torch.ones(2), "y": 1}, "b": [torch.zeros(1), 2], "c": Plain(3)}
    loaded = (await round_trip(state, include=["a.x", "b.1"])).state
    assert list(loaded) == ["a", "b"]
    assert list(loaded["a"]) == ["x"]
    assert loaded["b"] == [None, 2]
    nothing = ["nothing"]
    assert (await round_trip(state, include=nothing, strict=False)).state is None
    with pytest.raises(StructureMismatch, match="include names what is not in the checkpoint"):
        await round_trip(state, include=nothing)


async def test_what_is_shared_stays_whole_when_its_first_place_is_left_out() -> None:
    both: dict[str, Any] = {"x": torch.ones(2), "y": 1}
    state = {"first": both, "second": both, "third": [both]}
    loaded = (await round_trip(state, exclude=["first"])).state
    assert list(loaded) == ["second", "third"]
    assert loaded["second"] is loaded["third"][0]
    assert torch.equal(loaded["second"]["x"], both["x"])
    loaded = (await round_trip(state, exclude=["first", "*.y"])).state
    assert list(loaded["second"]) == ["x"]
    target = {"second": {"x": torch.zeros(2), "y": 0}, "third": [{"x": torch.zeros(2), "y": 0}]}
    await round_trip(state, target, exclude=["first", "*.y"])
    assert repr(target["second"]) == repr({"x": both["x"], "y": 0})
    assert repr(target["third"]) == repr([{"x": both["x"], "y": 0}])


async def test_a_class_that_is_gone_is_named() -> None:
    backend = MemoryBackend()
    await store({"a": [Frozen(torch.ones(1))]}, backend)
    table = globals()
    kept = table.pop("Frozen")
    try:
        with pytest.raises(StructureMismatch, match=r"tests.load.test_fresh_loads:Frozen"):
            await load(backend)
    finally:
        table["Frozen"] = kept


NO_NODES: list[Any] = [
    [], {}, None, "tensor", ["?"], [["dict"]], ["tensor"], ["tensor", "0"], ["tensor", -1],
    ["tensor", True], ["value", 0, 0], ["dict", ["a"], []], ["dict", ["a"], [["?"]]],
    ["list", {}], ["ref", 0], ["shared", 0, ["shared", 0, ["absent"]]], ["deque", [], -1],
    ["named_tuple", "a:b", [1], [["absent"]]], ["stateful"], ["registered", "x"],
    ["ordered_dict", [], [], ["?"]], ["default_dict", [], [], 3], ["dataclass", 1, [], []],
    ["absent", 1],
]  # fmt: skip
"""What is in a tree and is no node of any form."""


@pytest.mark.parametrize(
    ("node", "error"),
    [
        *((["list", [node]], InvalidManifest) for node in NO_NODES),
        (["tensor", 5], InvalidManifest),
        (["value", 5], InvalidManifest),
        (["deque", [["absent"], ["absent"]], 1], InvalidManifest),
        (["default_dict", [], [], "eval"], InvalidManifest),
        (["dict", [{"odd": 1}], [["absent"]]], InvalidManifest),
        (["dataclass", "builtins:dict", ["x"], [["absent"]]], StructureMismatch),
        (
            ["dataclass", "tests.load.test_fresh_loads:Plain", ["__class__"], [["absent"]]],
            StructureMismatch,
        ),
        (
            ["dataclass", "tests.load.test_fresh_loads:Frozen", ["other"], [["absent"]]],
            StructureMismatch,
        ),
        (["dataclass", "os:system", [], []], StructureMismatch),
        (
            ["named_tuple", "tests.load.test_fresh_loads:Pair", ["left"], [["absent"]]],
            StructureMismatch,
        ),
        (["registered", "nobody", ["absent"]], StructureMismatch),
        (["registered", "collections:Counter", ["list", []]], InvalidManifest),
    ],
)
async def test_a_tree_that_lies_is_refused_before_anything_is_made(
    node: list[Any], error: type[Exception]
) -> None:
    backend = MemoryBackend()
    name = f"{await store({'x': torch.ones(1)}, backend)}.json"
    document = document_of(await backend.get(name, max_bytes=1 << 20))
    document["structures"][0]["tree"] = node
    await backend.put(name, sealed(document), PutMode.OVERWRITE)
    with pytest.raises(error):
        await load(backend)


@pytest.mark.parametrize("empty", [{}, [], ()])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("first", ["part", "beside"])
def test_a_container_shared_with_an_excluded_part_is_saved(
    tmp_path: Path, empty: Any, nested: bool, first: str
) -> None:
    part = {"empty": [empty] if nested else empty, "tensor": torch.ones(2)}
    state = {"part": Stateful(lambda: part), "beside": empty, "tensor": torch.ones(3)}
    if first == "beside":
        state = {"beside": empty, **state}
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.save(state, step=1, exclude=["part.*"]).wait()
        pipeline.verify(1)
        loaded = loaded_state(pipeline)
    assert loaded["beside"] == empty
    assert loaded["tensor"].tolist() == [1, 1, 1]
