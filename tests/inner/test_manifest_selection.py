"""A rank of many reads its own part and those it leans on; the index where that serves better."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

import ckpipe
from ckpipe.backend import Backend, PutMode
from ckpipe.catalog import manifest_selection
from ckpipe.catalog.complete import Member, publish_up
from ckpipe.catalog.manifest_selection import REQUEST_BYTES, nearest
from ckpipe.distributed import training_state
from ckpipe.errors import StructureMismatch
from ckpipe.format import names
from ckpipe.format.codec import encode_bundle
from ckpipe.format.names import group_ranks, index_key, level_sizes, manifest_key
from ckpipe.store import registry
from ckpipe.testing import MemoryBackend
from ckpipe.testing.wrappers import Operation, Result, WrappedBackend
from tests.inner.manifests import ID
from tests.inner.rank_states import store
from tests.support.placed_tensors import placed, rank_of
from tests.support.rank_pipelines import one_rank

URL = "counted://store"


# The choice


def ranks_of(member: Member, world_size: int) -> range:
    level, number = member
    return group_ranks(level, number, world_size) if level else range(number, number + 1)


@given(st.integers(2, 30_000), st.data(), st.integers(100, 1 << 22))
def test_every_part_is_in_one_object_and_nothing_costs_less(
    world_size: int, data: st.DataObject, size: int
) -> None:
    some = st.integers(0, world_size - 1)
    close = st.integers(0, min(world_size, 300) - 1)
    ranks = data.draw(st.sets(data.draw(st.sampled_from([some, close])), max_size=200))

    def cost(members: tuple[Member, ...]) -> int:
        return sum(
            REQUEST_BYTES + size + (level > 0) * len(ranks_of((level, n), world_size)) * size // 8
            for level, n in members
        )

    index = REQUEST_BYTES + size + world_size * size // 8
    chosen = nearest(world_size, ranks, size)
    if chosen is None:
        assert ranks
        assert index <= cost(tuple((0, rank) for rank in ranks))
        return
    held = [rank for member in chosen for rank in ranks_of(member, world_size)]
    assert len(held) == len(set(held))
    assert ranks <= set(held)
    assert cost(chosen) < index or not ranks
    for level in range(len(level_sizes(world_size))):
        span = 100**level
        assert cost(chosen) <= cost(tuple({(level, rank // span) for rank in ranks}))


def test_nothing_but_the_own_part_is_needed_of_a_rank_that_leans_on_nobody() -> None:
    assert nearest(16_384, (), 11_000) == ()
    assert nearest(16_384, (0,), 11_000) == ((0, 0),)


def test_all_ranks_are_had_from_the_index() -> None:
    assert nearest(64, range(64), 11_000) is None
    assert nearest(16_384, range(16_384), 11_000) is None
    assert nearest(16_384, range(100, 200), 11_000) == ((1, 1),)


# What is read


class Counted(WrappedBackend):
    """Counts what is read of a checkpoint's metadata, and how many bytes that is."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.gets: Counter[str] = Counter()
        self.bytes = 0

    async def around(self, operation: Operation, call: Callable[[], Awaitable[Result]]) -> Result:
        result = await call()
        if operation.verb == "get" and operation.key.startswith("step-"):
            self.gets["index" if "/" not in operation.key else operation.key.split("/")[2]] += 1
            self.bytes += len(result) if isinstance(result, bytes) else 0
        return result


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """A store whose groups have five members and whose requests cost little."""
    monkeypatch.setattr(manifest_selection, "REQUEST_BYTES", 256)
    for module in (names, manifest_selection):
        monkeypatch.setattr(module, "GROUP_SIZE", 5)
    monkeypatch.setattr("ckpipe.catalog.complete.GROUP_SIZE", 5)
    backend = Counted(MemoryBackend())
    monkeypatch.setitem(registry._registered, "counted", lambda url: backend)
    return backend


RANKS = 18
MESH, SPREAD = (2, 9), (Replicate(), Shard(0))


def state(rank: int, factor: float) -> dict[str, Any]:
    """Shards that two ranks hold alike, and what each rank has for itself."""
    full = torch.arange(1.0, 18 * 8 + 1).reshape(18, 8)
    tensors = {f"w{n}": placed(full * (n + 1) * factor, MESH, SPREAD) for n in range(6)}
    return {**tensors, "seed": rank if factor else -1, "own": torch.full((3,), rank * factor)}


def values(state: dict[str, Any]) -> list[Any]:
    return [
        each if isinstance(each, int) else getattr(each, "_local_tensor", each).tolist()
        for each in state.values()
    ]


async def saved(backend: Backend, make: Callable[[int], Any]) -> None:
    """Save as each rank would, up to the index."""
    for rank in range(RANKS):
        with rank_of(rank, RANKS):
            bundle = await store(make(rank), backend, rank=rank, world_size=RANKS)
        await backend.put(manifest_key(ID, rank), encode_bundle(bundle), PutMode.CREATE)
        await publish_up(backend, ID, rank, RANKS)


async def test_a_rank_reads_few_objects_and_bytes_and_the_index_where_these_do_not_serve(
    counted: Counted,
) -> None:
    await saved(counted.inner, lambda rank: state(rank, 1.0))
    index = len(await counted.inner.get(index_key(ID), max_bytes=1 << 30))
    for rank in (0, 17):
        counted.gets.clear()
        counted.bytes = 0
        with rank_of(rank, RANKS):
            target = state(rank, 0.0)
            with one_rank(URL, rank, RANKS, attempt_id=f"load-{rank}") as pipeline:
                result = pipeline.load(target, step=ID.step)
            assert result is not None
            assert values(target) == values(state(rank, 1.0))
        # Its own, that of the rank with the same shard, and that of rank 0.
        assert counted.gets == {"0": 2 if rank == 0 else 3}
        assert counted.bytes < index
    # The index replaces manifests that cannot be used.
    for lost in (16, 7):
        await counted.inner.delete([manifest_key(ID, lost)])
        counted.gets.clear()
        with rank_of(7, RANKS):
            target = state(7, 0.0)
            with one_rank(URL, 7, RANKS, attempt_id=f"load-without-{lost}") as pipeline:
                pipeline.load(target, step=ID.step)
            assert values(target) == values(state(7, 1.0))
        assert counted.gets["index"] == 1
    # As it serves another number of ranks.
    counted.gets.clear()
    with rank_of(20, 27):
        target = {"w0": placed(torch.zeros(18, 8), (3, 9), (Replicate(), Shard(0)))}
        with one_rank(URL, 20, 27, attempt_id="load") as pipeline:
            pipeline.load(target, step=ID.step, include=["w0"])
        assert target["w0"].to_local().ravel()[0].item() == 4 * 8 + 1
    assert counted.gets["index"] == 1


async def test_what_another_rank_had_is_found_through_the_index(counted: Counted) -> None:
    await saved(counted.inner, lambda rank: {f"stage{rank % 3}": torch.full((2,), rank % 3 + 1.0)})
    target = {"stage2": torch.zeros(2)}
    with one_rank(URL, 3, RANKS, attempt_id="load") as pipeline:
        pipeline.load(target, step=ID.step)
        assert target["stage2"].tolist() == [3.0, 3.0]
        assert counted.gets["index"] == 1
        with pytest.raises(StructureMismatch, match="stage9"):
            pipeline.load({"stage9": torch.zeros(2)}, step=ID.step)


async def test_a_load_that_turns_to_the_index_looks_at_each_object_once(counted: Counted) -> None:
    looks: Counter[str] = Counter()

    class Told(ckpipe.Progress):
        def state_dict(self) -> dict[str, Any]:
            looks["counter"] += 1
            return super().state_dict()

    def part(rank: int) -> dict[str, Any]:
        model = torch.nn.Linear(2, 2)
        more = {f"stage{rank % 3}": torch.ones(2)}
        return {"training": training_state(model), "counter": ckpipe.Progress(n=1), **more}

    await saved(counted.inner, part)
    model: Any = torch.nn.Linear(2, 2)
    model.register_state_dict_pre_hook(lambda *_: looks.update(["model"]))
    target = {
        "training": training_state(model), "counter": Told(n=0), "stage2": torch.zeros(2),
    }  # fmt: skip
    with one_rank(URL, 3, RANKS, attempt_id="load") as pipeline:
        # How often it is looked at must not depend on the parts, as a look may be a collective.
        pipeline.load(target, step=ID.step, include=["training", "counter"])
        near = dict(looks)
        looks.clear()
        counted.gets.clear()
        pipeline.load(target, step=ID.step)
    assert counted.gets["index"] == 1
    assert looks == near
    assert near["model"] == near["counter"] == 1


async def test_an_object_that_lacks_something_gets_it_from_the_index(counted: Counted) -> None:
    class Lenient(torch.nn.Linear):
        def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            return super().load_state_dict(state_dict, strict=False)

    def part(rank: int) -> dict[str, Any]:
        full = torch.nn.Linear(2, 2)
        torch.nn.init.ones_(full.weight)
        torch.nn.init.ones_(full.bias)
        names = ("weight",) if rank % 2 else ("bias",)
        return {"model": {name: full.state_dict()[name] for name in names}}

    await saved(counted.inner, part)
    model = Lenient(2, 2)
    with one_rank(URL, 5, RANKS, attempt_id="load") as pipeline:
        pipeline.load({"model": model}, step=ID.step)
    assert model.bias.tolist() == [1.0, 1.0]
    assert model.weight.tolist() == [[1.0, 1.0], [1.0, 1.0]]
