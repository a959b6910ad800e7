"""Merging marks what differs between ranks; the tree of groups reaches every rank once."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from bundles import ID, manifest_of
from hypothesis import given
from hypothesis import strategies as st

from ckpipe.errors import InvalidManifest, WrongWorldSize
from ckpipe.format import names
from ckpipe.format.manifest import ManifestDocument
from ckpipe.format.merge import merge
from ckpipe.format.names import group_ranks, level_sizes, members, merged_into
from ckpipe.types import CheckpointId


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


@given(st.integers(0, 300_000), st.integers(1, 4))
def test_directory_of_an_object_is_the_one_that_is_listed(number: int, level: int) -> None:
    directory = number // 100
    listed = names.directory(ID, level, directory)
    assert names.group_key(ID, level, number).startswith(listed)
    listed = names.directory(ID, 0, directory)
    assert names.manifest_key(ID, number).startswith(listed)


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
