"""Tensors that wrap others are saved without pickle, and loaded fresh and in place."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.distributed import training_state
from tests.support.one_checkpoint import index_of, save_one
from tests.support.stored_files import document_of, sealed
from tests.support.wrapper_tensors import (
    CONTEXT,
    Granularity,
    Halves,
    Rounding,
    Scaled,
    equal,
    halves,
    nested,
    scaled,
)


class Layer(torch.nn.Module):
    """A parameter, a buffer and a tied parameter that are wrappers, beside a plain one."""

    weight: Any
    table: Any

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(scaled(start=start), requires_grad=False)
        self.tied = self.weight
        self.plain = torch.nn.Parameter(torch.full((3,), float(start)))
        self.register_buffer("table", nested(start=start))


@pytest.mark.parametrize("make", [scaled, halves, nested])
def test_a_fresh_load_makes_the_wrapper(tmp_path: Path, make: Callable[..., Any]) -> None:
    save_one(tmp_path, {"w": make(), "n": 1}, step=1)
    loaded = ckpipe.load(tmp_path).state["w"]
    assert equal(loaded, make())
    assert not isinstance(loaded, torch.nn.Parameter)


def test_inner_tensors_alias_again(tmp_path: Path) -> None:
    save_one(tmp_path, {"w": nested()}, step=1)
    inner = ckpipe.load(tmp_path).state["w"].codes
    inner.whole[5] = 100
    assert inner.second[2] == 100


def test_parameters_and_buffers_stay_what_they_were(tmp_path: Path) -> None:
    state = {
        "parameter": torch.nn.Parameter(scaled()),
        "frozen": torch.nn.Parameter(scaled(), requires_grad=False),
        "buffer": torch.nn.Buffer(scaled(), persistent=False),
    }
    save_one(tmp_path, state, step=1)
    loaded = ckpipe.load(tmp_path).state
    assert isinstance(loaded["parameter"], torch.nn.Parameter)
    assert loaded["parameter"].requires_grad
    assert isinstance(loaded["frozen"], torch.nn.Parameter)
    assert not loaded["frozen"].requires_grad
    assert isinstance(loaded["buffer"], torch.nn.Buffer)
    assert loaded["buffer"].persistent is False


def test_a_wrapper_in_two_places_is_one_again(tmp_path: Path) -> None:
    one = scaled()
    save_one(tmp_path, {"a": one, "b": [one]}, step=1)
    loaded = ckpipe.load(tmp_path).state
    assert loaded["a"] is loaded["b"][0]
    assert equal(loaded["a"], one)


def test_wrappers_over_one_inner_tensor_share_it_again(tmp_path: Path) -> None:
    one = scaled()
    other = Scaled(one.codes, torch.zeros(4), CONTEXT, one.shape)
    save_one(tmp_path, {"a": one, "b": other}, step=1)
    loaded = ckpipe.load(tmp_path).state
    loaded["a"].codes[0, 0] = 99
    assert loaded["b"].codes[0, 0] == 99


@pytest.mark.parametrize("make", [scaled, halves, nested])
def test_a_load_in_place_fills_inner_tensors(tmp_path: Path, make: Callable[..., Any]) -> None:
    save_one(tmp_path, {"w": make(), "n": 1}, step=1)
    target = {"w": make(start=20), "n": 0}
    live = target["w"]
    ckpipe.load(tmp_path, target)
    assert target["w"] is live
    assert equal(live, make())


@pytest.mark.parametrize("form", [lambda layer: layer, training_state])
def test_modules_are_filled_in_place(tmp_path: Path, form: Callable[[Layer], Any]) -> None:
    save_one(tmp_path, {"model": form(Layer())}, step=1)
    layer = Layer(start=30)
    parts = layer.weight, layer.weight.codes, layer.table.codes.whole
    ckpipe.load(tmp_path, {"model": form(layer)})
    assert layer.weight is layer.tied is parts[0]
    assert layer.weight.codes is parts[1]
    assert layer.table.codes.whole is parts[2]
    assert equal(layer.weight.detach(), scaled())
    assert equal(layer.table, nested())
    assert torch.equal(layer.plain, torch.zeros(3))


def stepped(start: int, **context: Any) -> tuple[Layer, torch.optim.Optimizer]:
    """A model, and an optimizer that keeps a wrapper for its plain parameter."""
    model = Layer(start=start)
    optimizer = torch.optim.SGD([model.plain], momentum=0.9)
    optimizer.state[model.plain] = {"momentum_buffer": scaled(start=start, **context)}
    return model, optimizer


@pytest.mark.parametrize("fresh", [False, True])
def test_training_state_takes_them_from_memory(fresh: bool) -> None:
    layer, optimizer = stepped(30)
    codes = layer.weight.codes
    if fresh:
        optimizer.state.clear()
    saved = stepped(0)
    training_state(layer, optimizer).load_state_dict(training_state(*saved).state_dict())
    assert layer.weight.codes is codes
    assert equal(layer.weight.detach(), scaled())
    assert equal(layer.table, nested())
    momentum = optimizer.state[layer.plain]["momentum_buffer"]
    assert equal(momentum, scaled())
    assert momentum is not saved[1].state[saved[0].plain]["momentum_buffer"]


def test_training_state_from_memory_names_what_does_not_fit() -> None:
    layer, optimizer = stepped(30, context=[2])
    saved = training_state(*stepped(0)).state_dict()
    with pytest.raises(errors.StructureMismatch, match="context") as caught:
        training_state(layer, optimizer).load_state_dict(saved)
    assert str(caught.value.key).startswith("optimizer.state.plain")
    saved["model"]["weight"] = torch.zeros(4, 3)
    with pytest.raises(errors.StructureMismatch) as caught:
        training_state(layer).load_state_dict(saved)
    assert caught.value.key == "model.weight"
    assert equal(layer.weight.detach(), scaled(start=30))
    assert torch.equal(layer.plain, torch.full((3,), 30.0))


def test_saves_of_unchanged_structure_take_new_values(tmp_path: Path) -> None:
    layer = Layer()
    with ckpipe.SyncPipeline(str(tmp_path)) as pipeline:
        for step in range(3):
            layer.weight.codes.fill_(step)
            layer.weight.context = {**CONTEXT, "granularity": Granularity(step)}
            pipeline.save({"model": layer}, step=step).wait()
            loaded = ckpipe.load(tmp_path, step=step).state["model"]["weight"]
            assert equal(loaded, layer.weight.detach())


def test_optimizers_that_keep_them(tmp_path: Path) -> None:
    def stepped(start: int) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
        model = torch.nn.Linear(3, 4, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        optimizer.state[model.weight] = {"momentum_buffer": scaled(start=start)}
        return model, optimizer

    for wrap in (lambda m, o: {"o": o}, lambda m, o: {"t": training_state(m, o)}):
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        save_one(root, wrap(*stepped(0)), step=1)
        model, optimizer = stepped(20)
        live = optimizer.state[model.weight]["momentum_buffer"]
        ckpipe.load(root, wrap(model, optimizer))
        assert optimizer.state[model.weight]["momentum_buffer"] is live
        assert equal(live, scaled())
        optimizer.state.clear()
        ckpipe.load(root, wrap(model, optimizer))
        assert equal(optimizer.state[model.weight]["momentum_buffer"], scaled())


# What does not fit


@pytest.mark.parametrize(
    ("target", "match"),
    [
        (scaled(context={**CONTEXT, "granularity": Granularity(2)}), "context"),
        (scaled(context={**CONTEXT, "granularity": Granularity(1, Rounding.DOWN)}), "context"),
        (scaled(context={**CONTEXT, "more": 1}), "context"),
        (scaled(rows=5), "size"),
        (Scaled(scaled().codes, torch.zeros(4, 1), CONTEXT, (4, 3)), "shape"),
        (Scaled(scaled().codes, torch.zeros(4).double(), CONTEXT, (4, 3)), "dtype"),
        (halves(), "class"),
        (torch.zeros(4, 3), "wrapper tensor"),
        (Scaled(torch.zeros(4, 3).to_sparse(), torch.zeros(4), CONTEXT, (4, 3)), "written"),
    ],
)
def test_another_wrapper_is_refused_by_key(tmp_path: Path, target: Any, match: str) -> None:
    save_one(tmp_path, {"a": {"w": scaled()}, "n": torch.ones(1)}, step=1)
    state: dict[str, Any] = {"a": {"w": target}, "n": torch.zeros(1)}
    with pytest.raises(errors.TargetMismatch, match=match) as caught:
        ckpipe.load(tmp_path, state, cast=True)
    assert str(caught.value.key).startswith("a.w")
    assert torch.equal(state["n"], torch.zeros(1))


def test_a_plain_tensor_never_goes_into_a_wrapper(tmp_path: Path) -> None:
    save_one(tmp_path, {"w": torch.ones(4, 3)}, step=1)
    target = {"w": scaled()}
    with pytest.raises(errors.StructureMismatch, match="plain tensor") as caught:
        ckpipe.load(tmp_path, target, cast=True)
    assert caught.value.key == "w"
    assert equal(target["w"], scaled())


@dataclasses.dataclass
class Cached:
    """A dataclass with an attribute that is no field."""

    rows: int

    def __post_init__(self) -> None:
        self.cache = [self.rows]


class Registered:
    """An object of a registered type."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Registered) and self.rows == other.rows

    __hash__ = None  # type: ignore[assignment]


ckpipe.register_type(Registered, to_state=lambda obj: obj.rows, from_state=Registered)


@pytest.mark.parametrize(
    "context",
    [
        None,
        [
            (1, True),
            torch.Size((3,)),
            torch.device("cpu"),
            torch.float8_e4m3fn,
            b"x",
            2**70,
            "text",
        ],
        {"a": {1: (), None: []}, "b": [[]]},
        {"set": {1, 2}, "frozen": frozenset("a"), "none": set()},
        [collections.OrderedDict(b=1, a=2), collections.deque([1], 3), collections.Counter("aab")],
        [Cached(3), Registered(4), Granularity(2, Rounding.DOWN)],
    ],
    ids=["none", "values", "dicts", "sets", "collections", "objects"],
)
def test_contexts_come_back_as_they_were(tmp_path: Path, context: Any) -> None:
    save_one(tmp_path, {"w": scaled(context=context)}, step=1)
    made = ckpipe.load(tmp_path).state["w"].context
    assert made == context
    assert type(made) is type(context)
    if isinstance(context, list):
        assert list(map(type, made)) == list(map(type, context))
        assert [vars(each) for each in made if isinstance(each, Cached)] in (
            [],
            [{"rows": 3, "cache": [3]}],
        )
    target = {"w": scaled(start=9, context=context)}
    ckpipe.load(tmp_path, target)
    assert equal(target["w"], scaled(context=context))


def test_devices_of_contexts_do_not_count(tmp_path: Path) -> None:
    save_one(tmp_path, {"w": scaled(context=[torch.device("cuda", 1)])}, step=1)
    assert ckpipe.load(tmp_path).state["w"].context == [torch.device("cpu")]
    target = {"w": scaled(start=9, context=[torch.device("meta")])}
    ckpipe.load(tmp_path, target)
    assert torch.equal(target["w"].codes, scaled().codes)


@pytest.mark.parametrize("context", [object(), [torch.ones(1)], {"f": print}, {object(): 1}])
@pytest.mark.parametrize("pickle", ["refuse", "allow"])
def test_other_contexts_are_refused_by_key(tmp_path: Path, context: Any, pickle: Any) -> None:
    with (
        ckpipe.SyncPipeline(str(tmp_path), pickle=pickle) as pipeline,
        pytest.raises(errors.UnsupportedState, match="context") as caught,
    ):
        pipeline.save({"a": [scaled(context=context)]}, step=1)
    assert caught.value.key == "a.0"


def test_a_class_that_is_not_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = halves()
    save_one(tmp_path, {"w": saved, "n": 1}, step=1)
    monkeypatch.delattr("tests.support.wrapper_tensors.Halves")
    with pytest.raises(errors.StructureMismatch, match="is not defined here") as caught:
        ckpipe.load(tmp_path)
    assert caught.value.key == "w"
    assert ckpipe.load(tmp_path, exclude=["w"]).state == {"n": 1}
    ckpipe.register_wrapper(Halves)
    assert equal(ckpipe.load(tmp_path).state["w"], saved)


def test_filters_take_a_wrapper_as_a_whole(tmp_path: Path) -> None:
    save_one(tmp_path, {"w": scaled(), "v": nested(), "n": 1}, step=1)
    assert ckpipe.load(tmp_path, include=["w"]).state.keys() == {"w"}
    assert ckpipe.load(tmp_path, exclude=["v", "w.*"]).state == {"n": 1}
    target = {"w": scaled(start=9), "v": nested(start=9)}
    ckpipe.load(tmp_path, target, exclude=["v", "n"])
    assert equal(target["w"], scaled())
    assert equal(target["v"], nested(start=9))
    with pytest.raises(errors.UsageError, match="as a whole"):
        ckpipe.load(tmp_path, exclude=["v.codes.second"])


def test_only_wrappers_of_the_same_parts_are_filled_with_strict_shapes(tmp_path: Path) -> None:
    save_one(tmp_path, {"w": scaled(), "v": scaled(), "n": torch.ones(1)}, step=1)
    target = {"w": scaled(rows=5), "v": scaled(start=9), "n": torch.zeros(2)}
    result = ckpipe.load(tmp_path, target, strict="shapes")
    assert set(result.missing) == {"w", "n"}
    assert equal(target["w"], scaled(rows=5))
    assert equal(target["v"], scaled())
    half = {"w": Scaled(scaled(start=9).codes, torch.zeros(2), CONTEXT, (4, 3))}
    with pytest.raises(errors.ShapeMismatch) as caught:
        ckpipe.load(tmp_path, half, include=["w"], strict="shapes")
    assert caught.value.key == "w.scale"
    assert torch.equal(half["w"].codes, scaled(start=9).codes)


@pytest.mark.parametrize(
    ("transform", "label", "expected"),
    [
        (ckpipe.Rename({"m.w": "m.x"}), "x", torch.int8),
        (ckpipe.Cast({"*": torch.float16}), "w", torch.int8),
        (ckpipe.Only("m.w"), "w", torch.int8),
        (ckpipe.Rename({"m.w.codes": "m.x"}), "m.w", errors.StructureMismatch),
        (ckpipe.Rename({"m.w.codes": "m.w.other"}), "m.w", errors.StructureMismatch),
        (ckpipe.Drop("m.w.codes"), "m.w", errors.UsageError),
        (ckpipe.Cast({"m.w.scale": torch.float16}), None, errors.StructureMismatch),
        (ckpipe.Split("m.w.codes", ["m.a", "m.b"]), None, errors.StructureMismatch),
        (ckpipe.Fuse(["m.w.codes", "m.v.codes"], "m.a"), None, errors.StructureMismatch),
    ],
    ids=lambda value: getattr(value, "__name__", None) or type(value).__name__,
)
def test_transforms_take_a_wrapper_as_a_whole(
    tmp_path: Path, transform: Any, label: str | None, expected: Any
) -> None:
    save_one(tmp_path, {"m": {"w": scaled(), "v": scaled(start=3), "b": torch.ones(2)}}, step=1)
    if isinstance(expected, torch.dtype):
        found = ckpipe.load(tmp_path, transform=[transform]).state["m"]
        assert equal(found[label], scaled())
        return
    with pytest.raises(expected) as caught:
        ckpipe.load(tmp_path, transform=[transform])
    assert caught.value.key == label
    if "matches nothing" in str(caught.value):
        assert "codes" not in (caught.value.hint or "")
        assert "m.w" in (caught.value.hint or "")


def test_a_worker_process_saves_them(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(str(tmp_path), worker="process") as pipeline:
        for step in range(2):
            pipeline.save({"w": scaled(start=step), "v": nested(start=step)}, step=step)
    loaded = ckpipe.load(tmp_path).state
    assert equal(loaded["w"], scaled(start=1))
    assert equal(loaded["v"], nested(start=1))


# The format


HOSTILE_CONTEXTS: list[Any] = [
    {"evil": [1]},
    [["value", 1], [1]],
    [["tensor", 0], []],
    [["evil", []], []],
    [["list", 1], []],
    [["shared", 0, ["list", [["ref", 0]]]], []],
    [["ordered_dict", [], [], ["dict", ["a"], [["shared", 0, ["list", []]]]]], []],
    [["wrapper_tensor", {}, ["dict", [], []]], []],
    [["named_tuple", "builtins:tuple", ["a"], [["value", 0]]], [1]],
    [["dataclass", "tests.support.wrapper_tensors:Scaled", ["a"], [["value", 0]]], [1]],
    [
        ["dataclass", "tests.support.wrapper_tensors:Granularity", ["__class__"], [["value", 0]]],
        [1],
    ],
    [["value", 0], [["pickle", "gASV"]]],
    [["value", 0], [["enum", "os:_Environ", "x"]]],
]


HOSTILE_NODES: list[tuple[int, Any]] = [
    (1, {"class": "os:system"}),
    (1, {"class": "torch:Tensor"}),
    (1, {"class": "torch.distributed.tensor:DTensor"}),
    (1, {"class": "tests.support.wrapper_tensors:Halves"}),
    (1, {"class": "wsgiref.validate:InputWrapper"}),
    *((1, {"context": context}) for context in HOSTILE_CONTEXTS),
    (1, {"dtype": "float64"}),
    (1, {"dtype": "evil"}),
    (1, {"size": [-1]}),
    (1, {"kind": "parameter", "requires_grad": 1}),
    (1, {"kind": "numpy"}),
    (1, {"shard": {"layout": 1}}),
    (1, {"shard": {"layout": "1", "size": [4]}}),
    (1, {"more": 1}),
    (2, 3),
    (2, ["list", [["tensor", 0]]]),
    (2, ["dict", ["codes"], [["tensor", 0]]]),
    (2, ["dict", ["codes", "scale"], [["value", 0], ["tensor", 1]]]),
]


def test_hostile_wrappers_are_refused(tmp_path: Path) -> None:
    save_one(tmp_path, {"w": scaled(), "n": 1}, step=1)
    path = index_of(tmp_path, step=1)
    right = path.read_bytes()
    for change, value in HOSTILE_NODES:
        document = document_of(right)
        node = document["structures"][0]["tree"][2][0]
        node[change] = node[1] | value if change == 1 else value
        path.write_bytes(sealed(document))
        for into in (None, {"w": scaled(start=9), "n": 0}):
            with contextlib.suppress(errors.CkpipeError):
                ckpipe.load(tmp_path, into)
                pytest.fail(f"{value} is loaded into {into}")
            assert into is None or equal(into["w"], scaled(start=9))
    assert "wsgiref.validate" not in sys.modules


def test_nothing_of_it_is_pickled(tmp_path: Path) -> None:
    save_one(tmp_path, {"w": nested(), "o": scaled()}, step=1)
    assert '"pickle"' not in json.dumps(document_of(index_of(tmp_path, step=1).read_bytes()))
