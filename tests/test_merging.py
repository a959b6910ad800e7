"""Merging depends on nothing but the manifests; the tree of groups reaches every rank once."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from bundles import ID, Foreign, as_shard, manifest_of
from hypothesis import given
from hypothesis import strategies as st

from ckpipe.errors import InvalidManifest, WrongWorldSize
from ckpipe.format import names
from ckpipe.format.codec import decode_bundle, encode_bundle
from ckpipe.format.manifest import ManifestDocument, PerRank
from ckpipe.format.merge import merge
from ckpipe.format.names import group_ranks, level_sizes, members, merged_into
from ckpipe.types import CheckpointId


def state(rank: int) -> dict[Any, Any]:
    return {
        "equal": torch.tensor([1.0, 2.0]),
        "own": torch.tensor([rank]),
        "odd": torch.tensor([rank % 2]),
        "same": 7,
        "kind": (1, True, 1.0)[rank % 3],
        "nested": [rank // 4, "x"],
    }


def world(size: int, pipeline_stages: int = 1) -> list[ManifestDocument]:
    return [
        manifest_of(
            state(rank) | {f"stage{rank % pipeline_stages}": torch.ones(2)}, rank, size,
            metadata={"rank": rank // 2},
        )[0]
        for rank in range(size)
    ]  # fmt: skip


def names_of(index: ManifestDocument, structure: int = 0) -> list[str]:
    rows = index.structures[structure].tensors
    return [rows[number].label for number in index.per_rank[structure].tensors]


@given(st.permutations(range(7)))
def test_order_does_not_matter(order: list[int]) -> None:
    every = world(7, pipeline_stages=2)
    expected = encode_bundle(merge(every, "index"))
    assert encode_bundle(merge([every[rank] for rank in order], "index")) == expected


@given(st.data())
def test_grouping_does_not_matter(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Groups of three, so that a small world has several levels.
        patch.setattr(names, "GROUP_SIZE", 3)
        size = data.draw(st.integers(1, 14))
        every = world(size, data.draw(st.integers(1, 3)))
        expected = encode_bundle(merge(every, "index"))
        below = every
        for level in range(len(level_sizes(size)) - 1):
            below = [
                _stored(
                    merge(
                        data.draw(st.permutations([below[n] for n in members(level, d, size)])),
                        "group",
                        merged_into(level, d, size),
                    )
                )
                for d in range(math.ceil(len(below) / 3))
            ]
        assert encode_bundle(merge(below, "index")) == expected


def _stored(bundle: ManifestDocument) -> ManifestDocument:
    return decode_bundle(encode_bundle(bundle), key="key", id=ID, kind=bundle.kind)


def test_what_differs_between_ranks_is_marked() -> None:
    index = merge(world(6), "index")
    assert names_of(index) == ["own", "odd"]
    # kind (1, True and 1.0 are equal to Python, and are not the same) and the first of nested.
    assert index.per_rank[0].values == (1, 2)


def test_one_rank_that_differs_suffices() -> None:
    every = [manifest_of({"t": torch.tensor([0]), "v": 0}, rank, 5)[0] for rank in range(4)]
    every.append(manifest_of({"t": torch.tensor([1]), "v": 1}, 4, 5)[0])
    assert merge(every, "index").per_rank == (PerRank((0,), (0,)),)


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


def test_shards_and_replicas_are_no_difference() -> None:
    every = []
    for rank in range(3):
        foreign = {"replica": Foreign(0, 0)} if rank else {}
        tensors = {"replica": torch.ones(4, dtype=torch.float64), "shard": torch.full((2,), rank)}
        bundle, _ = manifest_of(tensors, rank, 3, foreign=foreign)
        every.append(as_shard(bundle, "shard", 6, 2 * rank))
    index = merge(every, "index")
    assert index.per_rank == (PerRank(),)
    assert _stored(index) == index


def test_ranks_of_different_structure_are_not_compared() -> None:
    index = merge(world(4, pipeline_stages=2), "index")
    assert len(index.structures) == 2
    assert [part.structure for part in index.parts] == [0, 1, 0, 1]
    assert names_of(index, 1) == ["own"]


def test_tables_are_shared_by_their_exact_content() -> None:
    keys: list[Any] = [True, 1, 1.0, "1", "a", "A"]
    every = [manifest_of({key: torch.ones(1)}, rank, 6)[0] for rank, key in enumerate(keys)]
    index = _stored(merge(every, "index"))
    assert len(index.structures) == 6
    alike = [manifest_of({"a": torch.ones(1)}, rank, 4)[0] for rank in range(4)]
    index = _stored(merge(alike, "index"))
    assert (len(index.structures), len(index.layouts)) == (1, 1)


def test_index_of_one_rank_is_its_manifest() -> None:
    (manifest,) = world(1)
    index = merge([manifest], "index")
    assert index == replace(manifest, kind="index", per_rank=(PerRank(),))


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


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        (1, (1,)), (100, (100,)), (101, (101, 2)), (200, (200, 2)), (10_000, (10_000, 100)),
        (10_001, (10_001, 101, 2)), (16_384, (16_384, 164, 2)),
    ],
)  # fmt: skip
def test_levels(world_size: int, sizes: tuple[int, ...]) -> None:
    assert level_sizes(world_size) == sizes


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


@given(st.integers(0, 300_000), st.integers(1, 4))
def test_directory_of_an_object_is_the_one_that_is_listed(number: int, level: int) -> None:
    directory = number // 100
    listed = names.directory(ID, level, directory)
    assert names.group_key(ID, level, number).startswith(listed)
    listed = names.directory(ID, 0, directory)
    assert names.manifest_key(ID, number).startswith(listed)


def test_names() -> None:
    name = "step-000000000500.20261121T034205123Z-golden.0"
    assert names.index_key(ID) == f"{name}.json"
    assert names.prefix(ID) == f"{name}/"
    assert names.data_file_name(7, 0) == "rank-00007.safetensors"
    assert names.data_file_name(123_456, 2) == "rank-123456.2.safetensors"
    assert names.manifest_key(ID, 0) == f"{name}/m/0/000/rank-00000.json"
    assert names.manifest_key(ID, 16_383) == f"{name}/m/0/163/rank-16383.json"
    assert names.group_key(ID, 1, 163) == f"{name}/m/1/001/group-00163.json"
    assert names.tombstone_key(ID) == f".ckpipe/deleted/{name}"
    assert names.pin_key(ID) == f".ckpipe/pins/{name}"
    assert names.claim_key("abc", 3) == ".ckpipe/attempts/abc/claim-00003"
    assert names.attempt_start_key("abc") == ".ckpipe/attempts/abc/start"
    assert names.lease_key(ID, "h", 2) == f".ckpipe/leases/{name}/h.2"


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
