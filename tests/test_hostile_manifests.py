"""A reader believes nothing: what somebody made up, with a right checksum, has its own error."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from bundles import Foreign, document_of, manifest_of, sealed
from hypothesis import given
from hypothesis import strategies as st
from test_manifest_codec import manifest, read

from ckpipe.errors import (
    CorruptCheckpoint,
    InvalidExtent,
    InvalidManifest,
    OversizedMetadata,
    TruncatedObject,
    UnsupportedVersion,
    WrongWorldSize,
)
from ckpipe.format.checksum import crc32c
from ckpipe.format.codec import encode_bundle
from ckpipe.format.merge import merge


def _change(document: dict[str, Any], path: str, value: Any) -> None:
    *way, last = [int(each) if each.isdigit() else each for each in path.split("/")]
    target: Any = document
    for each in way:
        target = target[each]
    target[last] = value


@given(st.data())
def test_no_change_of_a_manifest_raises_anything_but_our_errors(data: st.DataObject) -> None:
    document = document_of(encode_bundle(manifest()))
    scalars = st.one_of(
        st.none(), st.booleans(), st.integers(-2, 10), st.integers(), st.floats(allow_nan=False,
        allow_infinity=False), st.text(max_size=3), st.sampled_from(["tensor", "dict", "ref"]),
    )  # fmt: skip
    anything = st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=5,
    )
    places = list(_places(document))
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(places))
        container[key] = data.draw(anything)
    try:
        bundle = read(sealed(document))
    except (CorruptCheckpoint, UnsupportedVersion):
        return
    assert encode_bundle(read(encode_bundle(bundle))) == encode_bundle(bundle)


def _places(data: Any) -> Any:
    pairs = data.items() if isinstance(data, dict) else enumerate(data)
    for key, item in list(pairs):
        yield data, key
        if isinstance(item, dict | list):
            yield from _places(item)


@pytest.mark.parametrize("size", [1 << 20, 1 << 26])
def test_compression_bomb_is_stopped(size: int) -> None:
    stream = zlib.compress(b"[" * size)
    with pytest.raises(OversizedMetadata):
        read(stream + crc32c(stream).to_bytes(4, "big"), max_bytes=(1 << 20) - 1)


def test_plain_object_over_the_limit_is_refused() -> None:
    data = encode_bundle(manifest())
    assert read(data, max_bytes=len(data)) == manifest()
    with pytest.raises(OversizedMetadata):
        read(data, max_bytes=len(data) - 1)


def _raw(body: bytes) -> bytes:
    return body + b',"crc32c":"%08x"}' % crc32c(body)


def test_stream_with_a_tail_is_refused() -> None:
    stream = zlib.compress(_raw(b'{"a":1')) + b"more"
    with pytest.raises(TruncatedObject):
        read(stream + crc32c(stream).to_bytes(4, "big"))


def test_group_and_index_have_exactly_their_ranks() -> None:
    every = [manifest_of({"v": rank}, rank, 250)[0] for rank in range(250)]
    group = merge(every[100:200], "group", (1, 1))
    data = encode_bundle(group)
    assert read(data, "group").group == (1, 1)
    for change in ([1, 0], [1, 3], [2, 0], [0, 1], [1, -1], [1, 10**30], [1]):
        document = document_of(data)
        document["group"] = change
        with pytest.raises(InvalidManifest):
            read(sealed(document), "group")
    index = document_of(encode_bundle(merge(every, "index")))
    for world_size in (249, 251, 1 << 60):
        index["world_size"] = world_size
        with pytest.raises(WrongWorldSize):
            read(sealed(index), "index")


def test_chunk_in_what_another_rank_wrote_must_lie_there() -> None:
    state = {"a": torch.ones(4), "b": torch.ones(2)}
    every = [
        manifest_of(state, 0, 2)[0],
        manifest_of(state, 1, 2, foreign={"a": Foreign(0, 0)})[0],
    ]
    document = document_of(encode_bundle(merge(every, "index")))
    read(sealed(document), "index")
    chunks = document["layouts"][1]["chunks"]
    place = chunks["owner"].index(0)
    # Entry 1 of rank 0 has 8 bytes, too few for a.
    for entry, error in ((1, InvalidExtent), (2, InvalidManifest)):
        chunks["entry"][place] = entry
        with pytest.raises(error):
            read(sealed(document), "index")


def test_chunk_of_another_rank_that_no_entry_can_hold_is_refused() -> None:
    state = {"a": torch.ones(3, 2)}
    every = [
        manifest_of(state, 0, 2)[0],
        manifest_of(state, 1, 2, foreign={"a": Foreign(0, 0)})[0],
    ]
    for path, value in (
        ("layouts/1/chunks/stride", [[1 << 62, 1]]),
        ("structures/0/tensors/shape", [[1 << 62, 1 << 62]]),
    ):
        document = document_of(encode_bundle(merge(every, "index")))
        _change(document, path, value)
        with pytest.raises(InvalidExtent):
            read(sealed(document), "index")


def test_chunk_in_an_unknown_entry_must_be_what_its_owner_wrote() -> None:
    state = {"b": torch.ones(2), "a": torch.ones(4)}
    every = [
        manifest_of({"z": torch.zeros(3), **state}, 0, 2)[0],
        manifest_of(state, 1, 2, foreign={"a": Foreign(0)})[0],
    ]
    index = merge(every, "index")
    assert read(encode_bundle(index), "index") == index
    assert read(encode_bundle(every[1])) == every[1]
    changes: list[tuple[str, list[Any]]] = [
        ("structures/0/tensors/label", ["z", "b", "c"]),
        ("structures/0/tensors/dtype", ["float32", "float32", "int32"]),
        ("layouts/0/chunks/box", [None, None, [[0], [2]]]),
        ("layouts/0/chunks/owner", [None, None, 1]),
        ("layouts/1/chunks/offset", [0, 4]),
        ("layouts/1/chunks/stride", [None, [1]]),
    ]
    for path, value in changes:
        document = document_of(encode_bundle(index))
        _change(document, path, value)
        with pytest.raises(InvalidManifest):
            read(sealed(document), "index")


def test_what_differs_between_ranks_must_be_there() -> None:
    index = document_of(encode_bundle(merge([manifest()], "index")))
    assert read(sealed(index), "index").per_rank
    wrongs: list[Any] = [
        [{"tensors": [4], "values": []}], [{"tensors": [], "values": [3]}], [{}], [1]
    ]  # fmt: skip
    for wrong in wrongs:
        index["per_rank"] = wrong
        with pytest.raises(InvalidManifest):
            read(sealed(index), "index")
