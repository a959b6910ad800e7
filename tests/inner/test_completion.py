"""Completion of checkpoints, and the choice of the manifests that a rank reads."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

import ckpipe
from ckpipe.backend import Backend, PutMode
from ckpipe.catalog import delete, manifest_selection
from ckpipe.catalog.complete import Member, complete_from_top, publish_up, repaired
from ckpipe.catalog.find import discover
from ckpipe.catalog.manifest_selection import REQUEST_BYTES, nearest
from ckpipe.distributed import training_state
from ckpipe.errors import (
    ChecksumMismatch,
    InvalidManifest,
    MissingObject,
    StructureMismatch,
    WrongWorldSize,
)
from ckpipe.format import names
from ckpipe.format.codec import encode_document
from ckpipe.format.manifest import ManifestDocument
from ckpipe.format.merge import merge
from ckpipe.format.names import (
    group_key,
    group_ranks,
    index_key,
    level_sizes,
    manifest_key,
    members,
    merged_into,
    tombstone_key,
)
from ckpipe.store import registry
from ckpipe.testing import FaultyBackend, MemoryBackend
from ckpipe.testing.wrappers import Operation, Result, WrappedBackend
from ckpipe.types import CheckpointId
from tests.inner.made_up_ranks import ID, Borrowed, manifest_of, store
from tests.support.placed_tensors import placed, rank_of
from tests.support.rank_pipelines import one_rank


def manifests(size: int) -> list[ManifestDocument]:
    """Those of ranks that differ in tensors, values, structures and metadata."""

    def state(rank: int) -> dict[str, Any]:
        kind = (1, True, 1.0)[rank % 3]
        return {"t": torch.tensor([rank]), "kind": kind, f"stage{rank % 2}": torch.ones(2)}

    return [
        manifest_of(state(rank), rank, size, metadata={"rank": rank // 2})[0]
        for rank in range(size)
    ]


async def commit(backend: Backend, manifest: ManifestDocument) -> None:
    key = manifest_key(ID, manifest.parts[0].rank)
    await backend.put(key, encode_document(manifest), PutMode.CREATE)


async def all_committed() -> tuple[MemoryBackend, FaultyBackend]:
    """A store to which three ranks have committed, and a way to it that tests can make fail."""
    memory = MemoryBackend()
    for manifest in manifests(3):
        await commit(memory, manifest)
    return memory, FaultyBackend(memory)


async def stored(backend: Backend, key: str) -> bytes | None:
    if key not in {each.key async for each in backend.list()}:
        return None
    return await backend.get(key, max_bytes=1 << 30)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of three, so that a small world has several levels."""
    monkeypatch.setattr(names, "GROUP_SIZE", 3)
    monkeypatch.setattr("ckpipe.catalog.complete.GROUP_SIZE", 3)


@given(data=st.data())
def test_any_order_any_deaths_and_any_races_end_in_the_same_index(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("format.names", "catalog.complete"):
            patch.setattr(f"ckpipe.{name}.GROUP_SIZE", 3)
        size = data.draw(st.integers(2, 14))
        every = manifests(size)
        dead = data.draw(st.sets(st.integers(0, size - 1)))
        waves = data.draw(st.permutations(range(size)))
        width = data.draw(st.integers(1, size))
        asyncio.run(_race(every, dead, [waves[n : n + width] for n in range(0, size, width)]))


async def _race(every: list[ManifestDocument], dead: set[int], waves: list[list[int]]) -> None:
    backend, size = MemoryBackend(), len(every)

    async def save(rank: int) -> bool:
        await commit(backend, every[rank])
        # A rank that dies has committed, and goes no further.
        return rank not in dead and (await publish_up(backend, ID, rank, size)).index is not None

    created = 0
    for wave in waves:
        created += sum(await asyncio.gather(*map(save, wave)))
    if not dead:
        assert created == 1
    healers = await asyncio.gather(*(complete_from_top(backend, ID, size) for _ in range(3)))
    assert all(outcome.complete for outcome in healers)
    assert created + sum(outcome.index is not None for outcome in healers) == 1
    assert await stored(backend, index_key(ID)) == encode_document(merge(every, "index"))


async def test_absent_ranks_are_named_and_nothing_is_completed(narrow: None) -> None:
    backend, every = MemoryBackend(), manifests(11)
    for manifest in every:
        if manifest.parts[0].rank not in (4, 9):
            await commit(backend, manifest)
    outcome = await complete_from_top(backend, ID, 11, most_holes=9)
    assert not outcome.complete
    assert outcome.absent == (4, 9)
    assert (await complete_from_top(backend, ID, 11)).absent == (4,)
    assert await stored(backend, index_key(ID)) is None
    # Full groups were merged on the way, so that nobody need look there again.
    assert await stored(backend, group_key(ID, 1, 0)) is not None
    for rank in (4, 9):
        await commit(backend, every[rank])
        last = await publish_up(backend, ID, rank, 11)
    assert last.complete


async def test_damaged_manifest_is_never_merged_and_listing_goes_on() -> None:
    backend, every = MemoryBackend(), manifests(3)
    for manifest in every[:2]:
        await commit(backend, manifest)
    damaged = bytearray(encode_document(every[2]))
    damaged[40] ^= 1
    await backend.put(manifest_key(ID, 2), bytes(damaged), PutMode.CREATE)
    with pytest.raises(ChecksumMismatch, match=r"rank-00002\.json"):
        await publish_up(backend, ID, 1, 3)
    (info,) = await repaired(backend, await discover(backend))
    assert not info.complete


async def test_ranks_that_disagree_about_who_writes_what_complete_nothing() -> None:
    backend = MemoryBackend()
    state = {"t": torch.ones(2), "w": torch.ones(3)}
    good = [manifest_of(state, 0, 2)[0], manifest_of(state, 1, 2, borrowed={"w": Borrowed(0)})[0]]
    await commit(backend, manifest_of({"t": torch.ones(2)}, 0, 2)[0])
    await commit(backend, good[1])
    with pytest.raises(InvalidManifest, match="to a rank that has not written it") as caught:
        await publish_up(backend, ID, 1, 2)
    assert (caught.value.step, caught.value.rank, caught.value.key) == (ID.step, 0, "w")
    (info,) = await repaired(backend, await discover(backend))
    assert not info.complete
    await backend.delete([manifest_key(ID, 0)])
    await commit(backend, good[0])
    assert (await publish_up(backend, ID, 0, 2)).complete


async def test_manifest_under_the_name_of_another_is_refused() -> None:
    backend, every = MemoryBackend(), manifests(3)
    await commit(backend, every[0])
    await commit(backend, every[1])
    await backend.put(manifest_key(ID, 2), encode_document(every[1]), PutMode.CREATE)
    with pytest.raises(InvalidManifest, match="not the one of its key"):
        await publish_up(backend, ID, 2, 3)
    await backend.delete([manifest_key(ID, 2)])
    other = manifest_of({"t": torch.tensor([2])}, 2, 4)[0]
    await commit(backend, other)
    with pytest.raises(InvalidManifest, match=r"one of 4 ranks, .* there are 3"):
        await publish_up(backend, ID, 2, 3)


def is_index(operation: Operation) -> bool:
    return (operation.verb, operation.key) == ("put", index_key(ID))


@pytest.mark.parametrize(
    "meanwhile", [is_index, "get"], ids=["the index is put", "members are read"]
)
async def test_deletion_in_the_middle_of_completion_wins(meanwhile: Any) -> None:
    memory, backend = await all_committed()
    gate = backend.pause(meanwhile)
    completing = asyncio.create_task(publish_up(backend, ID, 2, 3))
    await asyncio.to_thread(gate.wait_until_held)
    await delete.delete(memory, ID)
    gate.release()
    assert (await completing).deleted
    assert await stored(memory, index_key(ID)) is None


async def test_member_that_vanishes_without_a_tombstone_is_missing() -> None:
    memory, backend = await all_committed()
    gate = backend.pause("get")
    completing = asyncio.create_task(publish_up(backend, ID, 2, 3))
    await asyncio.to_thread(gate.wait_until_held)
    await memory.delete([manifest_key(ID, rank) for rank in range(3)])
    gate.release()
    with pytest.raises(MissingObject):
        await completing


async def test_straggler_s_leftovers_go_with_the_tombstone() -> None:
    backend, every = MemoryBackend(), manifests(3)
    await commit(backend, every[0])
    await delete.delete(backend, ID)
    await commit(backend, every[1])
    finished = {ID}
    (stone,) = [each async for each in backend.list(tombstone_key(ID))]
    await delete.finish_deletions(backend, finished, forget_before=stone.modified)
    assert await stored(backend, manifest_key(ID, 1)) is not None
    later = stone.modified.replace(year=stone.modified.year + 1)
    await delete.finish_deletions(backend, finished, forget_before=later)
    assert [each async for each in backend.list()] == []


# Merging


def world(size: int) -> list[ManifestDocument]:
    def state(rank: int) -> dict[str, Any]:
        return {
            "equal": torch.tensor([1.0, 2.0]),
            "own": torch.tensor([rank]),
            "odd": torch.tensor([rank % 2]),
            "same": 7,
            "kind": (1, True, 1.0)[rank % 3],
            "nested": [rank // 4, "x"],
        }

    return [manifest_of(state(rank), rank, size)[0] for rank in range(size)]


def names_of(index: ManifestDocument) -> list[str]:
    ((structure,), (per_rank,)) = index.structures, index.per_rank
    return [structure.tensors[number].label for number in per_rank.tensors]


@given(st.permutations(range(7)))
def test_order_does_not_matter(order: list[int]) -> None:
    every = world(7)
    expected = encode_document(merge(every, "index"))
    assert encode_document(merge([every[rank] for rank in order], "index")) == expected


def test_what_differs_between_ranks_is_marked() -> None:
    index = merge(world(6), "index")
    assert names_of(index) == ["own", "odd"]
    # kind (1, True and 1.0 are equal to Python, and are not the same) and the first of nested.
    assert index.per_rank[0].values == (1, 2)


def test_difference_in_the_last_mebibyte_is_seen() -> None:
    tensor = torch.zeros(2 << 20, dtype=torch.uint8)
    other = tensor.clone()
    other[-1] = 1
    first, second = (
        manifest_of({"a": torch.ones(3), "t": each}, rank, 2)[0]
        for rank, each in enumerate((tensor, other))
    )
    assert names_of(merge([first, second], "index")) == ["t"]


def test_strided_and_shared_tensors_are_compared_by_what_holds_them() -> None:
    every = []
    for rank in range(2):
        base = torch.arange(8) + rank
        wide = torch.arange(6.0).reshape(2, 3)
        every.append(manifest_of({"a": base[:5], "b": base[3:], "t": wide.T}, rank, 2)[0])
    assert names_of(merge(every, "index")) == ["a", "b"]


def test_tables_are_shared_by_their_exact_content() -> None:
    keys: list[Any] = [True, 1, 1.0, "1", "a", "A"]
    every = [manifest_of({key: torch.ones(1)}, rank, 6)[0] for rank, key in enumerate(keys)]
    index = merge(every, "index")
    assert len(index.structures) == 6
    alike = [manifest_of({"a": torch.ones(1)}, rank, 4)[0] for rank in range(4)]
    index = merge(alike, "index")
    assert (len(index.structures), len(index.layouts)) == (1, 1)


def test_wrong_sets_of_manifests_are_refused() -> None:
    every = world(3)
    for wrong in (every[:2], [*every, every[0]], [every[0], every[0], every[1]]):
        with pytest.raises(WrongWorldSize):
            merge(wrong, "index")
    with pytest.raises(WrongWorldSize):
        merge([*every[:2], replace(every[2], world_size=4)], "index")
    with pytest.raises(WrongWorldSize):
        merge(every, "group", (1, 0))
    other = replace(every[2], id=CheckpointId(ID.attempt, ID.step + 1, 0))
    with pytest.raises(InvalidManifest):
        merge([*every[:2], other], "index")


@given(st.integers(1, 30_000))
def test_every_rank_reaches_the_index_once(world_size: int) -> None:
    sizes = level_sizes(world_size)
    for level, size in enumerate(sizes):
        directories = math.ceil(size / 100)
        found = [n for d in range(directories) for n in members(level, d, world_size)]
        assert found == list(range(size))
        targets = [merged_into(level, d, world_size) for d in range(directories)]
        if level == len(sizes) - 1:
            assert targets == [None]
            continue
        assert targets == [(level + 1, n) for n in range(sizes[level + 1])]
        ranks = [rank for target in targets if target for rank in group_ranks(*target, world_size)]
        assert ranks == list(range(world_size))


@given(st.integers(0, 10**14), st.integers(0, 1000))
def test_names_are_read_back(step: int, count: int) -> None:
    id = CheckpointId(ID.attempt, step, count)
    assert names.index_id(names.index_key(id)) == id
    assert names.tombstone_id(names.tombstone_key(id)) == id
    assert names.pin_id(names.pin_key(id)) == id


@pytest.mark.parametrize(
    "key",
    [
        "", "a", "a.json", "step-5.json", f"{ID}", f"x/{ID}.json", f"{ID}.json.tmp", f"{ID}.json/",
        f"step-0{ID}.json", f"step-{'1' * 5000}.{ID.attempt}.0.json", f"{ID}٣.json",
    ],
)  # fmt: skip
def test_other_names_are_no_index(key: str) -> None:
    assert names.index_id(key) is None


async def test_straggler_does_not_revive_what_was_deleted() -> None:
    backend, every = MemoryBackend(), manifests(3)
    for manifest in every[:2]:
        await commit(backend, manifest)
    await delete.delete(backend, ID)
    for manifest in every:
        await commit(backend, manifest)
    outcome = await publish_up(backend, ID, 2, 3)
    assert (outcome.complete, outcome.deleted) == (False, True)
    assert (await complete_from_top(backend, ID, 3)).deleted
    assert [info.complete for info in await repaired(backend, await discover(backend))] == [False]


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


def test_a_rank_without_references_needs_only_its_own_part() -> None:
    assert nearest(16_384, (), 11_000) == ()
    assert nearest(16_384, (0,), 11_000) == ((0, 0),)


def test_all_ranks_are_read_from_the_index() -> None:
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
            document = await store(make(rank), backend, rank=rank, world_size=RANKS)
        await backend.put(manifest_key(ID, rank), encode_document(document), PutMode.CREATE)
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
