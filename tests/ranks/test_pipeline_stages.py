"""Loading what ranks saved that hold different names, as those of a pipeline or of experts do."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpipe.errors import PerRankValue, StructureMismatch
from ckpipe.testing import MemoryBackend
from tests.inner.made_up_ranks import load_as, request, store_ranks
from tests.support.rank_pipelines import ranks


def layer(n: int) -> torch.Tensor:
    return torch.full((2, 3), float(n))


def stage(*layers: int, **more: Any) -> dict[str, Any]:
    """What a rank has that holds some of the layers."""
    return {
        "model": OrderedDict((f"layer{n}", {"w": layer(n)}) for n in layers),
        "norm": torch.ones(2),
        "lr": 0.5,
        **more,
    }


def blank(*layers: int, **more: Any) -> dict[str, Any]:
    state = stage(*layers, **more)
    for each in state["model"].values():
        each["w"].zero_()
    return {**state, "norm": torch.zeros(2), "lr": 0.0}


async def stored(*states: Any) -> tuple[MemoryBackend, Any]:
    backend = MemoryBackend()
    return backend, await store_ranks(backend, states)


@pytest.mark.parametrize("world_size", [2, 3, 4])
async def test_stages_may_be_cut_anew_in_any_number(world_size: int) -> None:
    backend, document = await stored(stage(0, 1), stage(2), stage(3, 4))
    for rank, layers in enumerate([(0,), (1, 2, 3), (4, 0)]):
        if rank < world_size:
            target = blank(*layers)
            result = await load_as(backend, document, rank, world_size, request(target))
            assert repr(target) == repr(stage(*layers))
            assert (result.missing, result.unexpected) == ((), ())


async def test_with_as_many_ranks_a_fresh_state_is_the_ranks_own() -> None:
    backend, document = await stored(stage(0, seed=1), stage(2, seed=2))
    for rank, own in enumerate([stage(0, seed=1), stage(2, seed=2)]):
        assert repr((await load_as(backend, document, rank, 2, request())).state) == repr(own)
        target = blank(2 - 2 * rank, seed=0)
        await load_as(backend, document, rank, 2, request(target))
        assert repr(target) == repr(stage(2 - 2 * rank, seed=rank + 1))


async def test_what_no_rank_had_is_missing_and_what_all_had_is_unexpected() -> None:
    backend, document = await stored(stage(0), stage(1))
    with pytest.raises(StructureMismatch, match=r"missing.*layer7"):
        await load_as(backend, document, 0, 3, request(blank(0, 7)))
    without_norm = {key: item for key, item in blank(1).items() if key != "norm"}
    with pytest.raises(StructureMismatch, match=r"unexpected.*norm"):
        await load_as(backend, document, 0, 3, request(without_norm))


async def test_values_that_differ_between_structures_belong_to_a_rank() -> None:
    backend, document = await stored(
        stage(0, seed=1, noise=torch.zeros(2), log=[1]),
        stage(1, seed=2, noise=torch.ones(3), log=[1, 2]),
    )
    for key in ("seed", "noise", "log"):
        target = {key: stage(0, seed=0, noise=torch.zeros(2), log=[0])[key]}
        with pytest.raises(PerRankValue) as caught:
            await load_as(backend, document, 0, 1, request(target, strict=False))
        assert caught.value.key == key
    target = blank(1, seed=9, noise=torch.ones(2), log=[9])
    await load_as(backend, document, 0, 1, request(target, per_rank="drop"))
    assert repr(target) == repr(stage(1, seed=9, noise=torch.ones(2), log=[9]))
    await load_as(backend, document, 0, 1, request(target, per_rank="rank0"))
    assert repr(target) == repr(stage(1, seed=1, noise=torch.zeros(2), log=[1]))

    def longest(label: str, values: Any) -> Any:
        assert len(values) == 2
        return max(values, key=lambda each: each.numel()) if label == "noise" else max(values)

    target = {"seed": 0, "noise": torch.zeros(3)}
    await load_as(backend, document, 0, 1, request(target, per_rank=longest, strict=False))
    assert repr(target) == repr({"seed": 2, "noise": torch.ones(3)})


# Objects of which ranks have more and less


class Shards:
    """A reader of data that tells how far it is in each shard that it has begun."""

    def __init__(self, begun: dict[int, int] | None = None, *, always: bool = False) -> None:
        self.begun, self.always = begun or {}, always

    def state_dict(self) -> dict[str, Any]:
        return {"begun": dict(self.begun)} if self.begun or self.always else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begun = state.get("begun", {})


def adamw(parameters: int, *, steps: int) -> torch.optim.AdamW:
    """An optimizer over some parameters, each of another length."""
    optimizer = torch.optim.AdamW([torch.zeros(n + 1) for n in range(parameters)])
    for at in range(steps):
        for each in optimizer.param_groups[0]["params"]:
            each.grad = torch.full_like(each, at + 1.0)
        optimizer.step()
    return optimizer


def test_each_rank_gets_all_of_the_optimizer_that_it_saved(tmp_path: Path) -> None:
    sizes = (3, 5)
    saved = [adamw(size, steps=2) for size in sizes]
    with ranks(str(tmp_path), 2) as world:
        for pipeline, optimizer in zip(world, saved, strict=True):
            pipeline.save({"opt": optimizer}, step=1).wait()
        world[0].latest()
    with ranks(str(tmp_path), 2, attempt_id="again") as world:
        for pipeline, size, optimizer in zip(world, sizes, saved, strict=True):
            state = {"opt": adamw(size, steps=0)}
            assert pipeline.load(state, step=1) is not None
            assert repr(state["opt"].state_dict()) == repr(optimizer.state_dict())


@pytest.mark.parametrize("always", [False, True])
async def test_a_fresh_object_gets_what_its_own_rank_had_of_it_and_no_more(always: bool) -> None:
    begun = {1: 10, 2: 20}, {2: 21, 3: 30}, {4: 40}
    backend, document = await stored(*({"data": Shards(each)} for each in begun))
    for rank, own in enumerate(begun):
        data = Shards(always=always)
        result = await load_as(backend, document, rank, 3, request({"data": data}))
        assert data.begun == own
        assert result.unexpected == ()


async def test_an_object_that_only_one_rank_had_comes_back_to_it() -> None:
    backend, document = await stored({"a": 1, "data": Shards({1: 10})}, {"a": 1})
    data = Shards()
    await load_as(backend, document, 0, 2, request({"a": 0, "data": data}))
    assert data.begun == {1: 10}


@pytest.mark.parametrize("world_size", [1, 2])
async def test_an_object_moves_to_another_rank_with_all_its_state(world_size: int) -> None:
    saved = adamw(3, steps=2)
    backend, document = await stored({"first": adamw(2, steps=1)}, {"last": saved})
    target = {"last": adamw(3, steps=0)}
    await load_as(backend, document, 0, world_size, request(target))
    assert repr(target["last"].state_dict()) == repr(saved.state_dict())


async def test_what_an_object_goes_without_in_another_world_is_named() -> None:
    backend, document = await stored(*({"data": Shards({0: 5, n: n})} for n in (1, 2)))
    target = {"data": Shards(always=True)}
    result = await load_as(backend, document, 0, 1, request(target))
    assert target["data"].begun == {0: 5}
    assert result.unexpected == ("data.begun.1", "data.begun.2")


keys = st.sampled_from(["a", "b", "c", 1, "1"])
trees = st.recursive(
    st.integers(0, 2) | st.builds(lambda: None),
    lambda inner: st.dictionaries(keys, inner, max_size=4) | st.lists(inner, max_size=3),
    max_leaves=12,
)


async def merged(*states: Any) -> Any:
    """The state that one process gets of ranks that saved these."""
    backend, document = await stored(*states)
    return (await load_as(backend, document, 0, 1, request())).state


@given(st.dictionaries(keys, trees, max_size=4), st.dictionaries(keys, trees, max_size=4))
def test_a_merged_state_has_the_keys_of_both(one: dict[Any, Any], other: dict[Any, Any]) -> None:
    disjoint = {("x", key): item for key, item in other.items()}
    both = anyio.run(merged, one, disjoint)
    assert repr(both) == repr({**one, **disjoint})
    again = anyio.run(merged, one, {**one, "more": 1})
    assert repr(again) == repr({**one, "more": 1})


async def test_containers_in_several_places_stay_one() -> None:
    def state(name: str) -> dict[str, Any]:
        inner = {name: 1}
        return {"x": inner, "y": inner, name: [inner]}

    found = await merged(state("a"), state("b"))
    assert found["x"] == {"a": 1, "b": 1}
    assert found["y"] is found["a"][0] is found["b"][0] is found["x"]
