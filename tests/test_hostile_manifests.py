"""A reader believes nothing: what somebody made up, with a right checksum, has its own error."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from bundles import ID, Foreign, document_of, manifest_of, sealed
from hypothesis import given
from hypothesis import strategies as st
from test_manifest_codec import KEY, manifest, read

from ckpipe.errors import (
    CkpipeError,
    CorruptCheckpoint,
    DuplicateName,
    InvalidExtent,
    InvalidManifest,
    OversizedMetadata,
    TruncatedObject,
    UnsafePath,
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


# Of the state above: entries t, w, views.0~window; tensors w, t, views.0, views.1.
HOSTILE: list[tuple[str, str, Any, type[CkpipeError]]] = [
    ("newer version", "version", 2, UnsupportedVersion),
    ("no version", "version", "1", InvalidManifest),
    ("boolean version", "version", True, InvalidManifest),
    ("other format", "format", "zip", InvalidManifest),
    ("other kind", "kind", "index", InvalidManifest),
    ("other step", "step", 501, InvalidManifest),
    ("other attempt", "attempt", "20261121T034205123Z-other", InvalidManifest),
    ("other count", "count", 1, InvalidManifest),
    ("boolean count", "count", False, InvalidManifest),
    ("no ranks in the world", "world_size", 0, WrongWorldSize),
    ("negative world", "world_size", -1, InvalidManifest),
    ("rank outside of the world", "parts/rank", [1], WrongWorldSize),
    ("huge rank", "parts/rank", [1 << 70], InvalidManifest),
    ("negative rank", "parts/rank", [-1], InvalidManifest),
    ("boolean rank", "parts/rank", [False], InvalidManifest),
    ("no rank", "parts/rank", [], InvalidManifest),
    ("structure of none", "parts/structure", [1], InvalidManifest),
    ("layout of none", "parts/layout", [7], InvalidManifest),
    ("values of none", "parts/values", [1], InvalidManifest),
    ("too few values", "values/0", [1], InvalidManifest),
    ("values that are no list", "values/0", "abc", InvalidManifest),
    ("metadata that is no object", "metadata/0", [], InvalidManifest),
    ("path upwards", "parts/files/0/name", ["../rank-00000.safetensors"], UnsafePath),
    ("absolute path", "parts/files/0/name", ["/etc/passwd"], UnsafePath),
    ("file of another rank", "parts/files/0/name", ["rank-00001.safetensors"], UnsafePath),
    ("file with a null byte", "parts/files/0/name", ["rank-00000.safetensors\0"], UnsafePath),
    ("file too short", "parts/files/0/size", [4096 + 71], InvalidExtent),
    ("file too long", "parts/files/0/size", [4096 + 73], InvalidExtent),
    ("giant header", "parts/files/0/header_bytes", [1 << 40], OversizedMetadata),
    ("header off the page", "parts/files/0/header_bytes", [4095], InvalidManifest),
    ("no header", "parts/files/0/header_bytes", [0], InvalidManifest),
    ("header sum too large", "parts/files/0/header_crc32c", [1 << 32], InvalidManifest),
    ("files missing", "parts/files", [{"name": [], "size": [], "header_bytes": [],
                                       "header_crc32c": []}], InvalidManifest),
    ("checksum missing", "parts/checksums", [[1, 2]], InvalidManifest),
    ("checksum too large", "parts/checksums", [[1, 2, 1 << 32]], InvalidManifest),
    ("checksum is text", "parts/checksums", [["1", 2, 3]], InvalidManifest),
    ("checksums of no part", "parts/checksums", [], InvalidManifest),
    ("overlap", "layouts/0/entries/offset", [0, 23, 48], InvalidExtent),
    ("hole", "layouts/0/entries/offset", [0, 25, 48], InvalidExtent),
    ("does not begin at zero", "layouts/0/entries/offset", [4, 24, 48], InvalidExtent),
    ("negative offset", "layouts/0/entries/offset", [0, -24, 48], InvalidManifest),
    ("file of no row", "layouts/0/entries/file", [0, 0, 2], InvalidManifest),
    ("files out of order", "layouts/0/entries/file", [1, 0, 0], InvalidManifest),
    ("unknown stored dtype", "layouts/0/entries/dtype", ["F32", "F33", "U8"], InvalidManifest),
    ("name twice", "layouts/0/entries/name", [0, 0, "x"], DuplicateName),
    ("reserved name", "layouts/0/entries/name", [0, "__metadata__", "x"], DuplicateName),
    ("name of no tensor", "layouts/0/entries/name", [0, 9, "x"], InvalidManifest),
    ("name of a negative tensor", "layouts/0/entries/name", [0, -1, "x"], InvalidManifest),
    ("name is a float", "layouts/0/entries/name", [0, 1.0, "x"], InvalidManifest),
    ("name is a boolean", "layouts/0/entries/name", [0, True, "x"], InvalidManifest),
    ("name is an odd pair", "layouts/0/entries/name", [0, 1, [1, 2]], InvalidManifest),
    ("negative shape", "layouts/0/entries/shape/0", [-2, -3], InvalidManifest),
    ("boolean shape", "layouts/0/entries/shape/0", [True, 6], InvalidManifest),
    ("huge shape", "layouts/0/entries/shape/0", [1 << 40, 1 << 40], InvalidManifest),
    ("endless shape", "layouts/0/entries/shape/0", [1] * 257, InvalidManifest),
    ("layout of no structure", "layouts/0/structure", 5, InvalidManifest),
    ("chunk of no tensor", "layouts/0/chunks/tensor", [0, 1, 2, 4], InvalidManifest),
    ("chunk in no entry", "layouts/0/chunks/entry", [0, 1, 2, 3], InvalidManifest),
    ("chunk of its own in an unknown entry", "layouts/0/chunks/entry", [None, 1, 2, 2],
     InvalidManifest),
    ("chunk behind its entry", "layouts/0/chunks/offset", [4, 0, 0, 8], InvalidExtent),
    ("chunk off its items", "layouts/0/chunks/offset", [0, 0, 2, 8], InvalidExtent),
    ("strides that leave", "layouts/0/chunks/stride", [None, None, [9], None], InvalidExtent),
    ("too many strides", "layouts/0/chunks/stride", [None, None, [1, 1], None], InvalidExtent),
    ("negative stride", "layouts/0/chunks/stride", [None, None, [-1], None], InvalidManifest),
    ("odd original strides", "layouts/0/chunks/original_stride", [[1], None, None, None],
     InvalidExtent),
    ("box outside", "layouts/0/chunks/box", [[[0, 0], [3, 3]], None, None, None], InvalidExtent),
    ("box inside out", "layouts/0/chunks/box", [[[2, 0], [1, 3]], None, None, None],
     InvalidExtent),
    ("box too flat", "layouts/0/chunks/box", [[[0], [2]], None, None, None], InvalidExtent),
    ("box of one corner", "layouts/0/chunks/box", [[[0, 0]], None, None, None], InvalidManifest),
    ("owner outside", "layouts/0/chunks/owner", [1, None, None, None], WrongWorldSize),
    ("label twice", "structures/0/tensors/label", ["w", "w", "a", "b"], DuplicateName),
    ("unknown dtype", "structures/0/tensors/dtype/0", "float33", InvalidManifest),
    ("shape too large for its entry", "structures/0/tensors/shape/0", [3, 3], InvalidExtent),
    ("more elements than memory", "structures/0/tensors/shape/0", [1 << 60, 9], InvalidExtent),
    ("unknown kind", "structures/0/tensors/kind", ["a", "b", "c", "d"], InvalidManifest),
    ("unknown lazy bit", "structures/0/tensors/lazy", ["x", "", "", ""], InvalidManifest),
    ("short column", "structures/0/tensors/device", ["cpu"], InvalidManifest),
    ("column of another type", "structures/0/tensors/label", [1, 2, 3, 4], InvalidManifest),
    ("table that is a list", "structures/0/tensors", [], InvalidManifest),
    ("missing table", "structures/0/tensors", None, InvalidManifest),
    ("tree of no list", "structures/0/tree", "x", InvalidManifest),
    ("unknown node", "structures/0/tree", ["pickle", "x"], InvalidManifest),
    ("empty node", "structures/0/tree", [], InvalidManifest),
    ("tensor out of range", "structures/0/tree", ["tensor", 4], InvalidManifest),
    ("negative tensor", "structures/0/tree", ["tensor", -1], InvalidManifest),
    ("boolean value", "structures/0/tree", ["value", True], InvalidManifest),
    ("value out of range", "structures/0/tree", ["value", 3], InvalidManifest),
    ("leaf without number", "structures/0/tree", ["tensor"], InvalidManifest),
    ("list without nodes", "structures/0/tree", ["list"], InvalidManifest),
    ("deque without nodes", "structures/0/tree", ["deque"], InvalidManifest),
    ("named tuple of nothing", "structures/0/tree", ["named_tuple"], InvalidManifest),
    ("fields that are no names", "structures/0/tree", ["dataclass", "m:C", [1], [["absent"]]],
     InvalidManifest),
    ("keys without nodes", "structures/0/tree", ["dict", ["a"], []], InvalidManifest),
    ("key twice", "structures/0/tree", ["dict", ["a", "a"], [["absent"], ["absent"]]],
     DuplicateName),
    ("key that is none", "structures/0/tree", ["dict", [[1]], [["absent"]]], InvalidManifest),
    ("reference to nothing", "structures/0/tree", ["ref", 0], InvalidManifest),
    ("shared twice", "structures/0/tree",
     ["list", [["shared", 0, ["list", []]], ["shared", 0, ["list", []]]]], DuplicateName),
    ("attributes that are no node", "structures/0/tensors/attributes", [["x"], None, None, None],
     InvalidManifest),
    ("attributes that are no dict", "structures/0/tensors/attributes",
     [["absent"], None, None, None], InvalidManifest),
    ("attributes of a dict that are no dict", "structures/0/tree",
     ["ordered_dict", [], [], ["list", []]], InvalidManifest),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value", "error"), [pytest.param(*case[1:], id=case[0]) for case in HOSTILE]
)
def test_hostile_manifest_has_its_own_error(
    path: str, value: Any, error: type[CkpipeError]
) -> None:
    document = document_of(encode_bundle(manifest()))
    _change(document, path, value)
    with pytest.raises(error) as caught:
        read(sealed(document))
    assert type(caught.value) is error
    assert caught.value.key == KEY
    assert caught.value.step == ID.step


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


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b'{"a":' + b"[" * 200_000, InvalidManifest),
        (b'{"a":' + b"[" * 200_000 + b"]" * 200_000, InvalidManifest),
        (b'{"a":1,"a":1', DuplicateName),
        (b'{"a":NaN', InvalidManifest),
        (b'{"a":-Infinity', InvalidManifest),
        (b'{"a":1e999', InvalidManifest),
        (b'{"a":' + b"9" * 5000, InvalidManifest),
        (b'{"a":"\xff"', InvalidManifest),
        (b'{"crc32c":"x"', DuplicateName),
        (b"[1", TruncatedObject),
    ],
)
def test_hostile_json(body: bytes, error: type[CorruptCheckpoint]) -> None:
    data = _raw(body)
    if not data.startswith(b"{"):
        stream = zlib.compress(data[:-2])
        data = stream + crc32c(stream).to_bytes(4, "big")
    with pytest.raises(error):
        read(data)


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
