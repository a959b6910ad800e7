"""Loading in place: what fits is filled, what does not is refused before anything is touched."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import anyio.to_thread
import numpy as np
import pytest
import torch
from torch import nn

import ckpipe
from ckpipe.errors import (
    DtypeMismatch,
    ShapeMismatch,
    SharingConflict,
    StructureMismatch,
)
from tests.support.stored_states import round_trip


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Options:
    rate: Any
    weights: Any


@dataclass(frozen=True)
class FrozenOptions:
    rate: Any
    weights: Any


def model() -> Any:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()


async def test_live_optimizer_state_is_filled_where_it_is() -> None:
    nets = model(), model()
    saved, target = (torch.optim.AdamW(net.parameters()) for net in nets)
    train(nets[0], saved, 2)
    train(nets[1], target, 1)
    parameter = next(nets[1].parameters())
    before = dict(target.state[parameter])
    await round_trip({"optimizer": saved}, {"optimizer": target})
    after = target.state[parameter]
    assert after["exp_avg"].data_ptr() == before["exp_avg"].data_ptr()
    assert after["step"].item() == 2
    assert after["step"].dtype is torch.float32


async def test_plain_containers_are_filled_in_place() -> None:
    def state(n: int) -> dict[Any, Any]:
        return {
            "t": torch.full((3, 2), n),
            "strided": torch.full((4, 6), float(n)).t()[1:5],
            "n": np.full(3, n, dtype=np.float32),
            "list": [n, torch.full((2,), n), [n]],
            "deque": deque([n], maxlen=2),
            "set": {n},
            "plain": Options(n, torch.full((2,), n)),
            "ordered": OrderedDict(a=n),
            "counts": Counter({f"only {n}": 1, n: n}),
            1: n,
            "1": -n,
            "placeholder": None if n == 0 else {"x": torch.full((1,), n)},
            "history": list(range(n)),
        }

    target = state(0)
    kept = dict(target)
    rows = target["strided"]
    result = await round_trip(state(5), target)
    assert result.state is target
    assert repr(target) == repr(state(5))
    for key in (
        "t",
        "strided",
        "n",
        "list",
        "deque",
        "set",
        "plain",
        "ordered",
        "counts",
        "history",
    ):
        assert target[key] is kept[key]
    assert target["strided"].data_ptr() == rows.data_ptr()
    assert (result.missing, result.unexpected) == ((), ())


async def test_a_field_of_records_is_an_array_like_any_other() -> None:
    records = np.zeros(3, [("tag", "i1"), ("value", "<f4")])
    records["value"] = [1, 2, 3]
    whole = np.zeros(3, np.float32)
    await round_trip({"n": records["value"]}, {"n": whole})
    assert whole.tolist() == [1, 2, 3]


async def test_immutable_containers_are_made_again_where_values_changed() -> None:
    same = (1, torch.zeros(2))
    target: dict[str, Any] = {
        "same": same,
        "pair": Pair(0, [0]),
        "frozen": FrozenOptions(0, torch.zeros(1)),
        "set": frozenset({0}),
    }
    weights, inner = target["frozen"].weights, target["pair"].right
    saved: dict[str, Any] = {
        "same": (1, torch.ones(2)),
        "pair": Pair(5, [6]),
        "frozen": FrozenOptions(7, torch.ones(1)),
        "set": frozenset({8}),
    }
    result = await round_trip(saved, target)
    assert repr(result.state) == repr(saved)
    assert target["frozen"].weights is weights
    assert target["pair"].right is inner
    assert torch.equal(same[1], torch.ones(2))
    root = await round_trip((1, 2), (0, torch.Size([3])))
    assert root.state == (1, 2)


@pytest.mark.parametrize("with_lazy_bit", [torch.conj, torch._neg_view])
async def test_tensors_with_lazy_bits_get_values_and_not_bytes(
    with_lazy_bit: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    saved = torch.randn(5, dtype=torch.complex64)
    target = with_lazy_bit(torch.zeros(5, dtype=torch.complex64))
    await round_trip({"x": saved}, {"x": target})
    assert torch.equal(target, saved)


async def test_tensors_in_place_get_their_attributes() -> None:
    saved, target = torch.ones(3), torch.zeros(3)
    saved.note = "kept"  # type: ignore[attr-defined]
    await round_trip({"x": saved}, {"x": target})
    assert vars(target) == {"note": "kept"}
    assert torch.equal(target, saved)


async def test_a_cycle_in_the_target_stays() -> None:
    saved: dict[str, Any] = {"x": 1, "t": torch.ones(2)}
    saved["self"] = [saved]
    target: dict[str, Any] = {"x": 0, "t": torch.zeros(2)}
    target["self"] = [target]
    await round_trip(saved, target)
    assert target["self"][0] is target
    assert target["x"] == 1
    assert torch.equal(target["t"], torch.ones(2))


async def test_a_cycle_through_a_tuple_of_the_target_leads_to_the_new_tuple() -> None:
    def state(n: int) -> dict[str, Any]:
        inside: list[Any] = []
        around = (inside, torch.full((2,), float(n)), n)
        inside.append(around)
        return {"around": around, "inside": inside}

    target = state(0)
    inside, tensor = target["inside"], target["around"][1]
    await round_trip(state(5), target)
    assert target["inside"] is target["around"][0] is inside
    assert target["around"][1] is tensor
    assert target["around"][2] == 5
    assert inside[0] is target["around"]


async def test_strict_names_what_only_one_side_has_and_touches_nothing() -> None:
    saved: dict[str, Any] = {
        "a": torch.ones(2),
        "b": {"c": 1, "d": torch.ones(1)},
        "l": [torch.ones(1)] * 2,
    }
    target: dict[str, Any] = {"a": torch.zeros(2), "e": 2, "b": {"c": 0}, "l": [torch.zeros(1)]}
    with pytest.raises(StructureMismatch) as caught:
        await round_trip(saved, target)
    for label in ("'e'", "'b.d'", "'l.1'"):
        assert label in str(caught.value)
    assert "strict" in str(caught.value)
    assert caught.value.step == 7
    assert torch.equal(target["a"], torch.zeros(2))
    assert target["b"] == {"c": 0}

    result = await round_trip(saved, target, strict=False)
    assert result.missing == ("e",)
    assert result.unexpected == ("b.d", "l.1")
    assert torch.equal(target["a"], torch.ones(2))
    assert target["b"] == {"c": 1}
    assert target["e"] == 2


@pytest.mark.parametrize("dtype", [">f4", "longdouble", "datetime64[s]"])
@pytest.mark.parametrize("saved", [np.ones(4), torch.ones(4)])
async def test_nothing_is_converted_to_what_torch_has_no_dtype_for(saved: Any, dtype: str) -> None:
    target = {"a": np.zeros(4, dtype)}
    with pytest.raises(DtypeMismatch):
        await round_trip({"a": saved}, target, cast=True)
    assert target["a"].tobytes() == np.zeros(4, dtype).tobytes()


async def test_tensors_that_were_made_in_inference_mode_are_filled_wherever_they_lie() -> None:
    saved = {name: torch.arange(12.0).reshape(3, 4) for name in ("strided", "cast", "plain")}
    saved["same"] = torch.ones(3, 4)
    with torch.inference_mode():
        target = {
            "strided": torch.zeros(4, 3).t(),
            "cast": torch.zeros(3, 4, dtype=torch.float64),
            "plain": torch.zeros(3, 4),
            "same": torch.zeros(1, 4).expand(3, 4),
        }
    normal = torch.zeros(4, 3)
    await round_trip(
        {**saved, "normal": saved["plain"]}, {**target, "normal": normal.t()}, cast=True
    )
    for name, each in target.items():
        assert each.is_inference()
        assert torch.equal(each, saved[name].to(each.dtype))
    assert torch.equal(normal.t(), saved["plain"])
    normal.add_(1)
    assert not normal.is_inference()


@pytest.mark.parametrize(
    ("saved", "target", "error"),
    [
        (torch.ones(2), torch.zeros(3), ShapeMismatch),
        (torch.ones(2), torch.zeros(2, dtype=torch.float64), DtypeMismatch),
        (np.ones(2), np.zeros(2, dtype=np.float32), DtypeMismatch),
        (np.ones(2, dtype=">f4"), np.zeros(2, dtype="<f4"), DtypeMismatch),
        (torch.ones(2), torch.zeros(2, device="meta"), StructureMismatch),
        (torch.ones(2), 5, StructureMismatch),
        (5, torch.zeros(2), StructureMismatch),
        (5, [5], StructureMismatch),
        ([5], {"a": 5}, StructureMismatch),
        ({"a": 5}, [5], StructureMismatch),
        ((1, torch.ones(1)), [1, torch.ones(1)], StructureMismatch),
        (Pair(1, 2), (1, 2), StructureMismatch),
        (Options(1, 2), {"rate": 1, "weights": 2}, StructureMismatch),
        ({1}, [1], StructureMismatch),
    ],
)
async def test_what_does_not_fit_is_refused_before_anything_is_touched(
    saved: Any, target: Any, error: type[Exception]
) -> None:
    whole = {"first": torch.zeros(2), "n": 0, "odd": target}
    with pytest.raises(error) as caught:
        await round_trip({"first": torch.ones(2), "n": 1, "odd": saved}, whole)
    assert getattr(caught.value, "key", None) == "odd"
    assert torch.equal(whole["first"], torch.zeros(2))
    assert whole["n"] == 0


async def test_cast_converts() -> None:
    saved: dict[str, Any] = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.ones(2),
        "n": np.arange(3),
        "w": model(),
    }
    target: dict[str, Any] = {
        "a": torch.zeros(3, 2, dtype=torch.bfloat16).t(),
        "b": torch.zeros(2, dtype=torch.int64),
        "n": np.zeros(3, dtype=np.float32),
        "w": model().double(),
    }
    with pytest.raises(DtypeMismatch, match="cast"):
        await round_trip(saved, target)
    await round_trip(saved, target, cast=True)
    with pytest.raises(DtypeMismatch):
        await round_trip({"n": np.array(["1"])}, {"n": np.zeros(1)}, cast=True)
    assert torch.equal(target["a"], saved["a"].to(torch.bfloat16))
    assert torch.equal(target["b"], torch.ones(2, dtype=torch.int64))
    assert target["n"].tolist() == [0, 1, 2]
    for one, other in zip(saved["w"].parameters(), target["w"].parameters(), strict=True):
        assert other.dtype is torch.float64
        assert torch.equal(one.double(), other)


class Wrapped(nn.Module):
    """Loads with a rule of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(2, width)

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state, strict=False, assign=assign)


async def test_modules_and_optimizers_that_do_not_fit_are_not_touched() -> None:
    net = model()
    before = copy.deepcopy(net.state_dict())
    wider = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(ShapeMismatch, match=r"weight|\[3"):
        await round_trip({"m": wider}, {"m": net})
    plain, longer = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(StructureMismatch, match=r"'m\.1\.weight'"):
        await round_trip({"m": longer}, {"m": plain})
    with pytest.raises(StructureMismatch, match=r"missing"):
        await round_trip({"m": plain}, {"m": longer}, strict=False)
    one = torch.optim.SGD(net.parameters(), lr=1.0)
    two = torch.optim.SGD([{"params": [p]} for p in net.parameters()], lr=2.0)
    with pytest.raises(StructureMismatch, match="groups"):
        await round_trip({"o": two}, {"m": net, "o": one}, strict=False)
    assert one.param_groups[0]["lr"] == 1.0
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key])


async def test_an_objects_own_strictness_applies() -> None:
    saved = Wrapped(3)
    state = {"m": OrderedDict({**saved.state_dict(), "more": torch.ones(1)})}
    target = Wrapped(3)
    await round_trip(state, {"m": target})
    assert torch.equal(target.inner.weight, saved.inner.weight)


class Recorder:
    """Any object with the two methods."""

    def __init__(self, **state: Any) -> None:
        self.state = state
        self.loads: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.loads.append(state)
        self.state = state


async def test_an_object_gets_its_whole_saved_state_once_in_its_own_tensors() -> None:
    own = torch.zeros(2)
    target = Recorder(fits=own, other=torch.zeros(5), n=0)
    saved = Recorder(fits=torch.ones(2), other=torch.ones(3), n=5, new={"x": torch.ones(1)})
    await round_trip({"r": saved, "again": saved}, {"r": target, "again": target})
    (loaded,) = target.loads
    assert loaded["fits"] is own
    assert torch.equal(own, torch.ones(2))
    assert loaded["other"].shape == (3,)
    assert loaded["n"] == 5
    assert loaded["new"]["x"].item() == 1


async def test_one_object_that_was_saved_as_two_loads_once_if_these_agree() -> None:
    own = torch.zeros(2)
    target = Recorder(x=own)
    twice = {"r": target, "s": [target]}
    with pytest.raises(SharingConflict):
        await round_trip({"r": Recorder(x=torch.ones(2)), "s": [Recorder(x=own)]}, twice)
    assert (own.tolist(), target.loads) == ([0, 0], [])
    await round_trip({"r": Recorder(x=torch.ones(2)), "s": [Recorder(x=torch.ones(2))]}, twice)
    assert own.tolist() == [1, 1]
    assert len(target.loads) == 1


class Watched(nn.Linear):
    """Notes whether it was given its own parameters, which costs no copy."""

    given_own: list[bool]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.given_own = [
            state_dict[prefix + name] is own for name, own in self._parameters.items()
        ]
        super()._load_from_state_dict(state_dict, prefix, *rest)


async def test_a_module_is_given_its_own_parameters() -> None:
    target = Watched(2, 3)
    await round_trip({"m": nn.Sequential(nn.Linear(2, 3))}, {"m": nn.Sequential(target)})
    assert target.given_own == [True, True]


async def test_an_object_loads_what_was_saved_as_a_dict_and_the_other_way_round() -> None:
    source, target = model(), model()
    await round_trip({"m": source.state_dict()}, {"m": target})
    assert torch.equal(source[0].weight, target[0].weight)
    table: dict[str, Any] = {"m": model().state_dict()}
    await round_trip({"m": source}, table)
    assert torch.equal(source[0].weight, table["m"]["0.weight"])


async def test_a_selection_leaves_the_rest_of_the_target_as_it_is() -> None:
    source, target = model(), model()
    bias = target[0].bias.clone()
    state: dict[str, Any] = {"m": target, "x": torch.zeros(2), "y": [0, 0], "z": 0}
    include = ["m.0.weight", "y.1"]
    result = await round_trip(
        {"m": source, "x": torch.ones(2), "y": [1, 1], "z": 1, "w": 1}, state, include=include
    )
    assert torch.equal(target[0].weight, source[0].weight)
    assert torch.equal(target[0].bias, bias)
    assert state["y"] == [0, 1]
    assert state["z"] == 0
    assert (result.missing, result.unexpected) == ((), ())

    optimizer = torch.optim.SGD(target.parameters(), lr=0.5, momentum=0.9)
    train(target, optimizer, 1)
    faster = torch.optim.SGD(source.parameters(), lr=5.0, momentum=0.9)
    train(source, faster, 2)
    await round_trip({"o": faster}, {"o": optimizer}, exclude=["o.param_groups"])
    assert optimizer.param_groups[0]["lr"] == 0.5
    ours, theirs = next(target.parameters()), next(source.parameters())
    momentum = optimizer.state[ours]["momentum_buffer"]
    assert torch.equal(momentum, faster.state[theirs]["momentum_buffer"])


async def test_autograd_learns_of_the_change() -> None:
    weight = torch.ones(2, requires_grad=True)
    product = (weight * weight).sum()
    await round_trip({"w": torch.zeros(2)}, {"w": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()  # type: ignore[no-untyped-call]


class Kept:
    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


@pytest.mark.parametrize("make", [Kept, lambda: torch.nn.Linear(2, 2)])
@pytest.mark.parametrize("kind", [ckpipe.Pipeline, ckpipe.SyncPipeline])
async def test_a_load_keeps_no_target_alive(tmp_path: Path, kind: Any, make: Any) -> None:
    def sync(state: dict[str, Any]) -> None:
        with ckpipe.SyncPipeline(tmp_path) as pipeline:
            pipeline.save(state, step=0, until="committed")
            pipeline.load(state)

    gc.disable()  # else it would find a cycle, at any time and on any thread
    try:
        state = {"object": make()}
        kept = weakref.ref(state["object"])
        if kind is ckpipe.SyncPipeline:
            await anyio.to_thread.run_sync(sync, state)
        else:
            async with ckpipe.Pipeline(tmp_path) as pipeline:
                await pipeline.save(state, step=0, until="committed")
                await pipeline.load(state)
        state.clear()
        assert kept() is None
    finally:
        gc.enable()
