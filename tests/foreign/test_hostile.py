"""Files that lie: each is refused by name, in bounded memory, after a bounded number of bytes."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import tracemalloc
import warnings
import zipfile
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
    UnsafePath,
    UnsupportedState,
)
from tests.foreign.places import counted

MOST_MEMORY = MOST_READ = 64 << 20


def header(text: str | bytes, data: bytes = b"") -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return len(raw).to_bytes(8, "little") + raw + data


def rows(*rows: tuple[str, str, list[Any], list[Any]]) -> str:
    """Write a header as JSON; unlike a dict it may have a name twice."""
    written = (
        f'{json.dumps(name)}:{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'
        for name, dtype, shape, offsets in rows
    )
    return "{" + ",".join(written) + "}"


F32 = "F32"
SAFETENSORS: dict[str, tuple[bytes, type[CkpipeError]]] = {
    "empty": (b"", InvalidExtent),
    "shorter than its length field": (b"\1\0\0", InvalidExtent),
    "header beyond the end": (header("{}")[:-1], InvalidExtent),
    "header of 2^63 bytes": ((1 << 63).to_bytes(8, "little") + b"{}", InvalidExtent),
    "no JSON": (header("{'w': 1}"), InvalidManifest),
    "no text": (header(b"{\xff\xfe}"), InvalidManifest),
    "no object": (header("[1, 2]"), InvalidManifest),
    "deep": (header("[" * 9_000), InvalidManifest),
    "arrays of 3 MB": (header("[" * 3_000_000), InvalidManifest),
    "objects of 3 MB": (header("[" + "{}," * 1_000_000 + "0]"), InvalidManifest),
    "a number of many digits": (header('{"w":' + "9" * 10_000 + "}"), InvalidManifest),
    "not a number": (header('{"w":NaN}'), InvalidManifest),
    "a row that is none": (header('{"w": 7}'), InvalidManifest),
    "no dtype": (header('{"w":{"shape":[1],"data_offsets":[0,4]}}', bytes(4)), InvalidManifest),
    "an unknown dtype": (header(rows(("w", "F7", [1], [0, 4])), bytes(4)), InvalidManifest),
    "metadata of numbers": (header('{"__metadata__":{"a":1}}'), InvalidManifest),
    "a shape of texts": (header(rows(("w", F32, ["1"], [0, 4])), bytes(4)), InvalidManifest),
    "a shape below zero": (header(rows(("w", F32, [-1, -1], [0, 4])), bytes(4)), InvalidManifest),
    "a shape of floats": (header(rows(("w", F32, [1.0], [0, 4])), bytes(4)), InvalidManifest),
    "a shape of 2^60": (header(rows(("w", F32, [1 << 60], [0, 4])), bytes(4)), InvalidExtent),
    "a product of 2^120": (
        header(rows(("w", F32, [1 << 60, 1 << 60], [0, 4])), bytes(4)), InvalidExtent),
    "many dimensions": (header(rows(("w", F32, [1] * 300, [0, 4])), bytes(4)), InvalidManifest),
    "offsets beyond 2^62": (
        header(rows(("w", F32, [1], [1 << 63, (1 << 63) + 4])), bytes(4)), InvalidManifest),
    "offsets backwards": (header(rows(("w", F32, [1], [4, 0])), bytes(4)), InvalidManifest),
    "overlapping entries": (
        header(rows(("a", F32, [2], [0, 8]), ("b", F32, [2], [4, 12])), bytes(12)), InvalidExtent),
    "one place twice": (
        header(rows(("a", F32, [1], [0, 4]), ("b", F32, [1], [0, 4])), bytes(4)), InvalidExtent),
    "a hole": (
        header(rows(("a", F32, [1], [0, 4]), ("b", F32, [1], [8, 12])), bytes(12)), InvalidExtent),
    "data that is missing": (header(rows(("w", F32, [2], [0, 8])), bytes(7)), InvalidExtent),
    "data that is left over": (header(rows(("w", F32, [1], [0, 4])), bytes(5)), InvalidExtent),
    "a name twice": (
        header(rows(("w", F32, [1], [0, 4]), ("w", F32, [1], [4, 8])), bytes(8)), DuplicateName),
}  # fmt: skip

GOOD = header(rows(("w", F32, [1], [0, 4])), bytes(4))
INDEXES: dict[str, tuple[bytes, type[CkpipeError]]] = {
    "no JSON": (b"{", InvalidManifest),
    "no map": (b'{"metadata": {}}', InvalidManifest),
    "a map of numbers": (b'{"weight_map": {"w": 1}}', InvalidManifest),
    "a file above": (b'{"weight_map": {"w": "../good.safetensors"}}', UnsafePath),
    "an absolute file": (b'{"weight_map": {"w": "/etc/passwd"}}', UnsafePath),
    "a file below": (b'{"weight_map": {"w": "a/b.safetensors"}}', UnsafePath),
    "itself": (b'{"weight_map": {"w": ""}}', UnsafePath),
    "a name twice": (b'{"weight_map": {"w": "good.safetensors", "w": "x"}}', DuplicateName),
}


def refused(folder: Path, expected: type[CkpipeError], place: str = "") -> CkpipeError:
    """Load what a folder has, and return the error; check what it took to find it."""
    target = {"w": torch.full((1,), 7.0), "a": torch.full((2,), 7.0)}
    with counted(folder) as (url, opened), ckpipe.SyncPipeline(folder.parent / "run") as pipeline:
        tracemalloc.start()
        try:
            with pytest.raises(expected) as raised:
                pipeline.load(target, source=url + place, strict=False)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < MOST_MEMORY
        assert sum(each.bytes for each in opened) < MOST_READ
    assert all((each == 7).all() for each in target.values())
    return raised.value


@pytest.mark.parametrize("lie", SAFETENSORS)
def test_safetensors_files_that_lie(lie: str, theirs: Path) -> None:
    data, expected = SAFETENSORS[lie]
    (theirs / "model.safetensors").write_bytes(data)
    error = refused(theirs, expected)
    assert isinstance(error, CorruptCheckpoint)
    assert error.key == "model.safetensors"


@pytest.mark.parametrize("lie", INDEXES)
def test_indexes_that_lie(lie: str, tmp_path: Path, theirs: Path) -> None:
    data, expected = INDEXES[lie]
    for name in ("theirs/good.safetensors", "good.safetensors"):
        (tmp_path / name).write_bytes(GOOD)
    (theirs / "model.safetensors.index.json").write_bytes(data)
    assert refused(theirs, expected).key == "model.safetensors.index.json"


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_header_or_index_over_100_mb_is_refused_unread(name: str, theirs: Path) -> None:
    (theirs / "good.safetensors").write_bytes(GOOD)
    (theirs / name).write_bytes((100_000_001).to_bytes(8, "little"))
    os.truncate(theirs / name, 100_000_009)
    error = refused(theirs, OversizedMetadata)
    assert error.key == name
    assert "save it with ckpipe or in more files" in str(error.hint)


MARK = "hostile.mark"


class Mark:
    """An object that makes a file if it is unpickled as its writer wants."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (eval, (f"__import__('os').mkdir({str(self.path)!r})",))


def torch_zip(pickled: bytes, *records: tuple[str, bytes], **options: Any) -> bytes:
    """Write a zip as ``torch.save`` does, around any pickle."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", **options) as opened, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a name twice
        for name, data in (("data.pkl", pickled), ("byteorder", b"little"), *records):
            opened.writestr(f"a/{name}", data)
    return made.getvalue()


def tensor(
    *,
    numel: int = 2,
    offset: int = 0,
    shape: Any = (2,),
    stride: Any = (1,),
    rebuild: bytes = b"_rebuild_tensor_v2",
    more: bytes = b"",
) -> bytes:
    """Write the pickle of ``{"w": tensor}`` with facts of one's own."""

    def number(n: int) -> bytes:
        return pickle.LONG1 + bytes([len(raw := pickle.encode_long(n))]) + raw

    def numbers(each: Any) -> bytes:
        return pickle.MARK + b"".join(map(number, each)) + pickle.TUPLE

    def text(each: str) -> bytes:
        return pickle.BINUNICODE + struct.pack("<I", len(each)) + each.encode()

    storage = (
        pickle.MARK + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu")
        + number(numel) + pickle.TUPLE + pickle.BINPERSID
    )  # fmt: skip
    made = (
        b"ctorch._utils\n" + rebuild + b"\n" + pickle.MARK + storage + number(offset)
        + numbers(shape) + numbers(stride) + pickle.NEWFALSE + pickle.NONE + more + pickle.TUPLE
        + pickle.REDUCE
    )  # fmt: skip
    return b"\x80\x02}" + text("w") + made + b"s."


def laughs() -> bytes:
    """Lists of lists, each twice in the next one: a thousand bytes that mean 2^60 values."""
    made = b"\x80\x02]q\x00"
    for n in range(60):
        made += b"]q" + bytes([n + 1]) + b"(h" + bytes([n]) + b"h" + bytes([n]) + b"e"
    return made + b"."


def nested(times: int = 60) -> bytes:
    """Tuples of tuples, each twice in the next one: the hash of the last one is of 2^60."""
    return b")q\0" + b"h\0h\0\x86q\0" * times + b"h\0"


def moved(data: bytes) -> bytes:
    """Let the directory of a zip name another place for its last record."""
    at = data.rindex(b"PK\1\2") + 42
    return data[:at] + struct.pack("<I", 5) + data[at + 4 :]


def behind(data: bytes) -> bytes:
    """Let the directory of a zip name the place of its last record too near the directory."""
    at = data.rindex(b"PK\1\2") + 42
    return data[:at] + struct.pack("<I", data.index(b"PK\1\2")) + data[at + 4 :]


def overlapping(data: bytes) -> bytes:
    """Let the directory give a record the bytes of the next one too; local headers are right."""
    at = data.index(b"PK\1\2", data.index(b"PK\1\2") + 1)
    size = struct.pack("<II", 40, 40)
    return data[: at + 20] + size + data[at + 28 :]


def encrypted(data: bytes) -> bytes:
    """Let the directory of a zip say that its last record is encrypted."""
    at = data.rindex(b"PK\1\2") + 8
    return data[:at] + bytes([data[at] | 1]) + data[at + 1 :]


DATA = ("data/0", bytes(8))
ZIPS: dict[str, tuple[Callable[[Path], bytes], type[CkpipeError]]] = {
    "empty": (lambda path: b"", InvalidManifest),
    "no zip": (lambda path: b"PK\3\4" + bytes(100), InvalidManifest),
    "truncated": (lambda path: torch_zip(tensor(), DATA)[:-30], InvalidManifest),
    "no pickle": (lambda path: torch_zip(b"", DATA).replace(b"data.pkl", b"data.pkx"),
                  InvalidManifest),
    "an empty pickle": (lambda path: torch_zip(b"", DATA), InvalidManifest),
    "half a pickle": (lambda path: torch_zip(tensor()[:-20], DATA), InvalidManifest),
    "a reduce": (lambda path: torch_zip(pickle.dumps(Mark(path), 2)), UnsupportedState),
    "an attribute": (lambda path: torch_zip(b"\x80\x02cos\nsystem\n."), UnsupportedState),
    "a name below a known module": (
        lambda path: torch_zip(b"\x80\x04\x8c\x05torch\x8c\x0dserialization\x93."),
        UnsupportedState),
    "an instruction for classes": (lambda path: torch_zip(b"(ios\nsystem\n."), InvalidManifest),
    "state of a function": (
        lambda path: torch_zip(b"\x80\x02c_codecs\nencode\n}b."), InvalidManifest),
    "2^31 memos": (lambda path: torch_zip(b"\x80\x02Nr\xff\xff\xff\x7f"), InvalidManifest),
    "2^40 bytes": (
        lambda path: torch_zip(b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"."),
        InvalidManifest),
    "2^60 values": (lambda path: torch_zip(laughs()), InvalidManifest),
    "a long key in itself": (
        lambda path: torch_zip(
            b"\x80\2}X" + struct.pack("<I", 20_000) + b"k" * 20_000 + b"q\0" + b"}h\0" * 99
            + b"N" + b"s" * 100 + b"."), InvalidManifest),
    "a set in many places": (
        lambda path: torch_zip(
            b"\x80\4\x8f\x94(" + b"".join(b"M" + struct.pack("<H", n) for n in range(2000))
            + b"\x90](" + b"h\0" * 2000 + b"e."), InvalidManifest),
    "a key of 2^60": (lambda path: torch_zip(b"\x80\2}" + nested() + b"Ns."), InvalidManifest),
    "keys of 2^60": (
        lambda path: torch_zip(b"\x80\2}(" + nested() + b"Nu."), InvalidManifest),
    "a dict of 2^60": (lambda path: torch_zip(b"\x80\2(" + nested() + b"Nd."), InvalidManifest),
    "a set of 2^60": (
        lambda path: torch_zip(b"\x80\4\x8f(" + nested() + b"\x90."), InvalidManifest),
    "a frozen set of 2^60": (
        lambda path: torch_zip(b"\x80\4(" + nested() + b"\x91."), InvalidManifest),
    "a set by a call of 2^60": (
        lambda path: torch_zip(b"\x80\2cbuiltins\nset\n](" + nested() + b"e\x85R."),
        InvalidManifest),
    "attributes of 2^60": (
        lambda path: torch_zip(b"\x80\2ccollections\nOrderedDict\n)R" + nested() + b"b."),
        InvalidManifest),
    "a dtype of 2^60": (
        lambda path: torch_zip(tensor(rebuild=b"_rebuild_tensor_v3", more=nested()), DATA),
        InvalidManifest),
    "a dtype that is none": (
        lambda path: torch_zip(tensor(rebuild=b"_rebuild_tensor_v3", more=b"N"), DATA),
        InvalidManifest),
    "metadata of 2^60": (
        lambda path: torch_zip(tensor(more=b"](" + nested() + b"e"), DATA), InvalidManifest),
    "a key of 2^27 bits, often": (
        lambda path: torch_zip(b"\x80\2}\x8b" + struct.pack("<I", 2 << 20) + b"\1" * (2 << 20)
                               + b"q\0" + b"h\0Ns" * 100_000 + b"."), InvalidManifest),
    "a device that is none": (
        lambda path: torch_zip(b"\x80\2ctorch\ndevice\nX\3\0\0\0foo\x85R."), UnsupportedState),
    "400 KB of sets": (lambda path: torch_zip(b"\x80\4" + b"\x8f" * 400_000), InvalidManifest),
    "a pickle of 70 MB": (lambda path: torch_zip(bytes(70 << 20)), OversizedMetadata),
    "a bomb": (
        lambda path: torch_zip(bytes(1 << 28), compression=zipfile.ZIP_DEFLATED),
        UnsupportedState),
    "compressed data": (
        lambda path: torch_zip(tensor(), DATA, compression=zipfile.ZIP_DEFLATED),
        UnsupportedState),
    "encrypted data": (lambda path: encrypted(torch_zip(tensor(), DATA)), UnsupportedState),
    "a name twice": (lambda path: torch_zip(tensor(), DATA, DATA), DuplicateName),
    "a record elsewhere": (lambda path: moved(torch_zip(tensor(), DATA)), InvalidExtent),
    "a record in the directory": (
        lambda path: behind(torch_zip(tensor(), DATA)), InvalidExtent),
    "records that overlap": (
        lambda path: overlapping(torch_zip(tensor(), DATA)), InvalidExtent),
    "a storage that is missing": (lambda path: torch_zip(tensor()), InvalidExtent),
    "a storage that is too short": (
        lambda path: torch_zip(tensor(), ("data/0", bytes(7))), InvalidExtent),
    "a shape of 2^60": (
        lambda path: torch_zip(tensor(shape=(1 << 60,)), DATA), InvalidExtent),
    "a tensor beyond its storage": (
        lambda path: torch_zip(tensor(offset=1), DATA), InvalidExtent),
    "a stride beyond its storage": (
        lambda path: torch_zip(tensor(stride=(9,)), DATA), InvalidExtent),
    "a shape below zero": (
        lambda path: torch_zip(tensor(shape=(-2,)), DATA), InvalidManifest),
    "strides of another shape": (
        lambda path: torch_zip(tensor(stride=(1, 1)), DATA), InvalidManifest),
    "the other order of bytes": (
        lambda path: torch_zip(tensor(), DATA).replace(b"little", b"bigbig"), CkpipeError),
}  # fmt: skip


@pytest.mark.sample(24)
@pytest.mark.parametrize("lie", ZIPS)
def test_torch_files_that_lie(lie: str, tmp_path: Path, theirs: Path) -> None:
    make, expected = ZIPS[lie]
    (theirs / "state.pt").write_bytes(make(tmp_path / MARK))
    error = refused(theirs, expected, "/state.pt")
    assert not (tmp_path / MARK).exists()
    assert error.key is not None


def test_good_files_pass_the_same_test(theirs: Path) -> None:
    """The refusals above are not those of the test."""
    (theirs / "model.safetensors").write_bytes(GOOD)
    assert ckpipe.load(theirs).state["w"].tolist() == [0.0]
    (theirs / "state.pt").write_bytes(torch_zip(tensor(), DATA))
    assert ckpipe.load(theirs / "state.pt").state["w"].tolist() == [0.0, 0.0]
