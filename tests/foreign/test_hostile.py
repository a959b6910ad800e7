"""Files that lie: each is refused by name, in bounded memory, after a bounded number of bytes."""

from __future__ import annotations

import json
import tracemalloc
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
    "header of 20 MB": (header("{" + " " * (20 << 20) + "}"), OversizedMetadata),
    "no JSON": (header("{'w': 1}"), InvalidManifest),
    "no text": (header(b"{\xff\xfe}"), InvalidManifest),
    "no object": (header("[1, 2]"), InvalidManifest),
    "deep": (header("[" * 100_000), InvalidManifest),
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
    "20 MB": (b'{"weight_map": {}' + b" " * (20 << 20) + b"}", OversizedMetadata),
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
def test_safetensors_files_that_lie(lie: str, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    data, expected = SAFETENSORS[lie]
    (folder / "model.safetensors").write_bytes(data)
    error = refused(folder, expected)
    assert isinstance(error, CorruptCheckpoint)
    assert error.key == "model.safetensors"


@pytest.mark.parametrize("lie", INDEXES)
def test_indexes_that_lie(lie: str, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    data, expected = INDEXES[lie]
    for name in ("theirs/good.safetensors", "good.safetensors"):
        (tmp_path / name).write_bytes(GOOD)
    (folder / "model.safetensors.index.json").write_bytes(data)
    assert refused(folder, expected).key == "model.safetensors.index.json"


def test_a_good_file_passes_the_same_test(tmp_path: Path) -> None:
    """The refusals above are not those of the test."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(GOOD)
    check: Callable[..., Any] = ckpipe.load
    assert check(folder).state["w"].tolist() == [0.0]
