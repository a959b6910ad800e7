"""Bundles survive being written; nothing that was changed or made up passes."""

from __future__ import annotations

import json
import pickle
import random
import zlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from bundles import ID, LIMIT, Foreign, as_shard, document_of, manifest_of, sealed
from hypothesis import given
from hypothesis import strategies as st

from ckpipe.errors import (
    ChecksumMismatch,
    CorruptCheckpoint,
    InvalidExtent,
    InvalidManifest,
    OversizedMetadata,
    TruncatedObject,
    UnsupportedState,
)
from ckpipe.format.checksummed_json import decode_json, encode_json, json_text
from ckpipe.format.codec import decode_bundle, encode_bundle
from ckpipe.format.manifest import ManifestDocument, Structure, TensorRow
from ckpipe.format.merge import merge

KEY = "some/key.json"


def state() -> dict[Any, Any]:
    base = torch.arange(6, dtype=torch.int32)
    return {
        "w": torch.ones(2, 3),
        "t": torch.arange(6.0).reshape(2, 3).T,
        "views": [base[:4], base[2:]],
        "one": 1,
        "true": True,
        ("k", 1): {"again": None},
    }


def manifest() -> ManifestDocument:
    return manifest_of(state(), metadata={"a": [1, {"b": None}]}, metrics={"loss": "nan"})[0]


def read(data: bytes, kind: Any = "manifest", **options: Any) -> ManifestDocument:
    return decode_bundle(data, key=KEY, id=ID, kind=kind, **options)


def large_manifest() -> ManifestDocument:
    return manifest_of({f"tensor-{n}": torch.full((1,), n) for n in range(1500)})[0]


def test_round_trip_of_a_plain_manifest() -> None:
    bundle = manifest()
    data = encode_bundle(bundle)
    assert data.startswith(b"{")
    assert data.isascii()
    assert read(data) == bundle
    assert encode_bundle(read(data)) == data


def test_round_trip_of_a_compressed_manifest() -> None:
    bundle = large_manifest()
    data = encode_bundle(bundle)
    assert not data.startswith(b"{")
    assert zlib.decompress(data) == json_text(data, LIMIT)
    assert read(data) == bundle


def test_rows_that_were_read_pickle_and_replace_like_others() -> None:
    bundle = read(encode_bundle(manifest()))
    assert pickle.loads(pickle.dumps(bundle)) == bundle
    row = bundle.structures[0].tensors[0]
    assert replace(row, label="x") == TensorRow("x", row.dtype, row.shape)


def test_values_of_other_types_stay_apart() -> None:
    parts = [manifest_of({"v": value}, rank, 4)[0] for rank, value in enumerate((1, True, 1.0, 0))]
    found = read(encode_bundle(merge(parts, "index")), "index")
    assert [repr(part.values) for part in found.parts] == ["(1,)", "(True,)", "(1.0,)", "(0,)"]


def test_every_flipped_bit_of_the_plain_form_is_found() -> None:
    _check_all_flips(encode_bundle(manifest_of({"w": torch.ones(2), "n": 1})[0]))


def test_every_flipped_bit_of_the_compressed_form_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ckpipe.format.checksummed_json.PLAIN_BYTES", 100)
    data = encode_bundle(manifest_of({"w": torch.ones(2), "n": 1})[0])
    assert data[0] == 0x78
    _check_all_flips(data)


def _check_all_flips(data: bytes) -> None:
    read(data)
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptCheckpoint):
            read(bytes(flipped))


def test_every_truncation_is_found() -> None:
    for data in (encode_bundle(manifest()), encode_bundle(large_manifest())):
        for size in {0, 1, 3, 4, 5, 100, len(data) // 2, *range(len(data) - 40, len(data))}:
            with pytest.raises(CorruptCheckpoint) as caught:
                read(data[:size])
            assert caught.value.key == KEY
            assert caught.value.step == ID.step
    with pytest.raises(TruncatedObject):
        read(b"")


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptCheckpoint):
        read(data)


def test_trees_as_deep_as_a_walk_can_go_are_written_and_read() -> None:
    deep: Any = torch.ones(1)
    for _ in range(100):
        deep = [deep]
    bundle = manifest_of({"deep": deep})[0]
    assert read(encode_bundle(bundle)) == bundle


def test_tree_that_json_cannot_write_is_refused() -> None:
    tree: list[Any] = ["absent"]
    for _ in range(100_000):
        tree = ["list", [tree]]
    bundle = replace(manifest(), structures=(Structure(tree, (), 0),))
    with pytest.raises(UnsupportedState):
        encode_bundle(bundle)


def test_floats_that_are_not_finite_never_reach_the_json() -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        encode_bundle(manifest_of({}, metadata={"loss": float("nan")})[0])


def test_members_that_a_later_writer_adds_are_ignored() -> None:
    document = document_of(encode_bundle(manifest()))
    document["hint"] = {"x": 1}
    document["parts"]["colour"] = ["red"]
    assert read(sealed(document)) == manifest()


def test_sixty_four_bytes_for_each_shard() -> None:
    shards, ranks, rng = 64, 100, random.Random(3)
    states = [{f"layers.{n}.weight": torch.zeros(1, 4) for n in range(shards)}] * ranks
    every = []
    for rank, each in enumerate(states):
        bundle, _ = manifest_of(each, rank, ranks)
        for label in each:
            bundle = as_shard(bundle, label, ranks, rank)
        sums = tuple(rng.randrange(1 << 32) for _ in range(shards))
        part = replace(bundle.parts[0], checksums=sums, token=f"{rng.randrange(1 << 128):032x}")
        every.append(replace(bundle, parts=(part,)))
    data = encode_bundle(merge(every, "index"))
    assert len(data) <= 64 * shards * ranks
    assert read(data, "index").parts[7] == replace(every[7].parts[0], layout=7)


def test_encoded_json_is_ordinary_json() -> None:
    assert json.loads(encode_json({"a": "ü"}))["a"] == "ü"
    assert decode_json(encode_json({"a": [1.5, None]}), LIMIT) == {"a": [1.5, None]}


def test_wrong_checksum_is_told_from_a_wrong_manifest() -> None:
    data = encode_bundle(manifest())
    with pytest.raises(ChecksumMismatch):
        read(data.replace(b'"step":500', b'"step":501'))


def index() -> ManifestDocument:
    """Ranks of two structures, one of which leaves a tensor to another rank."""
    small, large = {"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(40)}
    return merge(
        [
            manifest_of(small, 0, 3)[0],
            manifest_of(large, 1, 3)[0],
            manifest_of(large, 2, 3, foreign={"b": Foreign(1)})[0],
        ],
        "index",
    )


def test_text_and_columns_are_the_same_bundle() -> None:
    data = encode_bundle(index())
    lean, full = read(data, "index", most_rows=0), read(data, "index", most_rows=1 << 20)
    assert lean == full == index()
    assert encode_bundle(lean) == encode_bundle(full) == data
    # The number of a layout's structure is no part of what is kept.
    assert len({id(layout) for layout in lean.layouts}) == len(lean.layouts) == 3


@pytest.mark.parametrize("most_rows", [0, 1 << 20])
def test_layouts_may_stand_before_their_structures(most_rows: int) -> None:
    document = document_of(encode_bundle(index()))
    turned = {name: document[name] for name in reversed(document)}
    assert read(sealed(turned), "index", most_rows=most_rows) == index()


@pytest.mark.parametrize("most_rows", [0, 1 << 20])
def test_a_layout_is_checked_with_every_structure_that_parts_pair_it_with(most_rows: int) -> None:
    document = document_of(encode_bundle(index()))
    # The second layout has two tensors; the first structure has one.
    document["parts"]["structure"][1] = 0
    with pytest.raises(InvalidManifest, match="not there"):
        read(sealed(document), "index", most_rows=most_rows)


@pytest.mark.parametrize("most_rows", [0, 1 << 20])
def test_hostile_layouts_are_refused(most_rows: int) -> None:
    def damaged(path: tuple[str, str], value: list[object]) -> bytes:
        document = document_of(encode_bundle(index()))
        document["layouts"][1][path[0]][path[1]] = value
        return sealed(document)

    cases: list[tuple[tuple[str, str], list[object], type[CorruptCheckpoint]]] = [
        (("entries", "offset"), [0, 9], InvalidExtent),
        (("chunks", "offset"), [4, 0], InvalidExtent),
        (("chunks", "entry"), [0, 7], InvalidManifest),
        (("chunks", "tensor"), [0, 2], InvalidManifest),
        # What another rank leaves to this one is another box now.
        (("chunks", "box"), [None, [[0], [39]]], InvalidManifest),
    ]
    for path, value, error in cases:
        with pytest.raises(error):
            read(damaged(path, value), "index", most_rows=most_rows)


def test_what_a_reader_would_refuse_for_its_size_is_not_written() -> None:
    document = {"a": "x" * 1000}
    size = len(encode_json(document))
    assert encode_json(document, size + 1)
    with pytest.raises(OversizedMetadata):
        encode_json(document, size - 1)
