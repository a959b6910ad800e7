"""What somebody made up, with right checksums, has its own error, and touches nothing."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
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
from tests.support.stored_files import crc32c, document_of, packed, sealed_text

Forge = Callable[[bytes], CkpipeError]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The index of a checkpoint, which tests replace."""
    root = tmp_path_factory.mktemp("hostile")
    with ckpipe.SyncPipeline(root, keep_reports=False) as pipeline:
        options: Any = {"metadata": {"a": [1, {"b": None}]}, "metrics": {"loss": float("nan")}}
        handle = pipeline.save(state(), step=500, **options)
    return root / f"{handle.id}.json"


@pytest.fixture(scope="module")
def whole(index: Path) -> bytes:
    """The index as it was written."""
    return index.read_bytes()


@pytest.fixture
def forge(index: Path, whole: bytes) -> Forge:
    """Put something in the place of the index; return what a load raises then."""

    def load(data: bytes) -> CkpipeError:
        index.write_bytes(data)
        target = {"w": torch.full((2, 3), 7.0)}
        with pytest.raises(CkpipeError) as caught:
            ckpipe.load(index.parent, target, step=500, include=["w"])
        assert torch.equal(target["w"], torch.full((2, 3), 7.0))
        assert (caught.value.key, caught.value.step) == (index.name, 500)
        with (
            ckpipe.SyncPipeline(index.parent, read_only=True) as pipeline,
            pytest.raises(type(caught.value)),
        ):
            pipeline.verify(500)
        return caught.value

    return load


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


# Of the state above: entries t, w, views.0~window; tensors w, t, views.0, views.1.
HOSTILE: list[tuple[str, str, Any, type[CkpipeError]]] = [
    ("newer version", "version", 3, UnsupportedVersion),
    ("no version", "version", "1", InvalidManifest),
    ("boolean version", "version", True, InvalidManifest),
    ("other format", "format", "zip", InvalidManifest),
    ("other kind", "kind", "manifest", InvalidManifest),
    ("other step", "step", 501, InvalidManifest),
    ("other attempt", "attempt", "20261121T034205123Z-other", InvalidManifest),
    ("other count", "count", 1, InvalidManifest),
    ("boolean count", "count", False, InvalidManifest),
    ("no ranks in the world", "world_size", 0, WrongWorldSize),
    ("negative world", "world_size", -1, InvalidManifest),
    ("world of more ranks than wrote", "world_size", 2, WrongWorldSize),
    ("giant world", "world_size", 1 << 50, WrongWorldSize),
    ("no structure", "structures", [], InvalidManifest),
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
    ("no checksums", "parts/checksums", [[]], InvalidManifest),
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


@pytest.mark.sample(50)
@pytest.mark.parametrize(
    ("path", "value", "error"), [pytest.param(*case[1:], id=case[0]) for case in HOSTILE]
)
def test_hostile_index_has_its_own_error(
    forge: Forge, whole: bytes, path: str, value: Any, error: type[CkpipeError]
) -> None:
    document = document_of(whole)
    *way, last = [int(each) if each.isdigit() else each for each in path.split("/")]
    inside: Any = document
    for each in way:
        inside = inside[each]
    inside[last] = value
    text = json.dumps(document, separators=(",", ":")).encode()
    assert type(forge(sealed_text(text[:-1]))) is error


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
    ],
)
def test_hostile_json(forge: Forge, body: bytes, error: type[CorruptCheckpoint]) -> None:
    assert type(forge(sealed_text(body))) is error


def test_hostile_streams(forge: Forge) -> None:
    assert type(forge(packed(b"[1"))) is TruncatedObject
    assert type(forge(packed(sealed_text(b'{"a":1') + b"more"))) is TruncatedObject
    tailed = zlib.compress(sealed_text(b'{"a":1')) + b"more"
    assert type(forge(tailed + crc32c(tailed).to_bytes(4, "big"))) is TruncatedObject
    assert type(forge(packed(b"[" * (1 << 24)))) is OversizedMetadata


NEWER = b'{"format":"ckpipe","version":%d,"kind":"index"'
OF_NEWER_FORMATS = {
    "another checksum": NEWER % 3 + b',"sha256":"00"}',
    "another sum of the same name": NEWER % 12 + b',"crc32c":"00000000"}',
    "members that are no JSON here": NEWER % 3 + b",~,",
    "a stream with another checksum": zlib.compress(NEWER % 3 + b"," * 99_000) + b"hash of it",
    "a stream without a checksum": zlib.compress(NEWER % 3),
}  # fmt: skip


@pytest.mark.parametrize("kind", OF_NEWER_FORMATS)
def test_a_newer_format_says_so_before_its_checksum(forge: Forge, kind: str) -> None:
    error = forge(OF_NEWER_FORMATS[kind])
    assert type(error) is UnsupportedVersion
    assert "Upgrade ckpipe" in str(error)


def test_a_damaged_version_is_damage(forge: Forge, whole: bytes) -> None:
    at = whole.index(b'"version":1') + len(b'"version":')
    for bit in range(8):
        data = bytearray(whole)
        data[at] ^= 1 << bit
        assert isinstance(forge(bytes(data)), CorruptCheckpoint), bytes(data[at : at + 1])
    stream = bytearray(packed(whole.replace(b'"version":1', b'"version":4')))
    stream[len(stream) // 2] ^= 1
    assert isinstance(forge(bytes(stream)), CorruptCheckpoint)
