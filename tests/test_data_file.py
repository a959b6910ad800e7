"""Headers of data files: safetensors reads them, and none that lies is believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from bundles import images_of
from hypothesis import given
from hypothesis import strategies as st

from ckpipe.errors import (
    CorruptCheckpoint,
    DuplicateName,
    InvalidExtent,
    InvalidManifest,
    OversizedMetadata,
    TruncatedObject,
)
from ckpipe.format import data_file
from ckpipe.format.data_file import (
    ALIGNMENT,
    MAX_HEADER_BYTES,
    STORED_ITEM_BYTES,
    decode_header,
    encode_header,
    entry_size_bound,
    header_size_bound,
)
from ckpipe.format.dtypes import stored_as
from ckpipe.plan.plan import LocalPlanner
from ckpipe.state.flatten import capture

Row = tuple[str, str, tuple[int, ...], int, int]

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40).filter(
    lambda name: name != "__metadata__"
)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def tables(draw: st.DrawFn) -> list[Row]:
    rows: list[Row] = []
    offset = 0
    for name in draw(st.lists(names, unique=True, max_size=8)):
        dtype, shape = draw(st.sampled_from(sorted(STORED_ITEM_BYTES))), draw(shapes)
        nbytes = torch.Size(shape).numel() * STORED_ITEM_BYTES[dtype]
        rows.append((name, dtype, shape, offset, nbytes))
        offset += nbytes
    return rows


@given(tables())
def test_round_trip(rows: list[Row]) -> None:
    header = encode_header(rows)
    assert len(header) % ALIGNMENT == 0
    assert len(header) <= header_size_bound((row[0], row[2]) for row in rows)
    found = decode_header(header, size=len(header) + sum(row[4] for row in rows))
    assert found.nbytes == len(header)
    assert found.metadata == {"format": "pt", "ckpipe": "1"}
    assert sorted(found.entries) == sorted(rows)


@given(tables())
def test_safetensors_reads_what_is_written(rows: list[Row]) -> None:
    total = sum(row[4] for row in rows)
    found = safetensors.torch.load(encode_header(rows) + b"\0" * total)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()} == {
        name: (stored_as(dtype), shape) for name, dtype, shape, _, _ in rows
    }


def test_file_of_a_real_state_opens_with_safetensors(tmp_path: Path) -> None:
    weight = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    state = {"w": weight, "t": weight.clone().T, "h": torch.ones(3, dtype=torch.bfloat16)}
    captured = capture(state)
    plan = LocalPlanner().plan(captured, rank=0, world_size=1)
    ((name, image),) = images_of(captured, plan).items()
    (tmp_path / name).write_bytes(image)
    with safetensors.safe_open(tmp_path / name, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "ckpipe": "1"}
        assert set(file.keys()) == {"w", "t", "h"}
        assert torch.equal(file.get_tensor("t"), weight.T)
        assert torch.equal(file.get_tensor("h"), state["h"])


def test_no_entries_make_one_page() -> None:
    header = encode_header([])
    assert len(header) == ALIGNMENT
    assert decode_header(header, size=ALIGNMENT).entries == ()
    assert safetensors.torch.load(header) == {}


def test_planner_can_keep_below_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    name, shape = "x" * 100, (1, 2, 3)
    monkeypatch.setattr(data_file, "MAX_HEADER_BYTES", 5 * ALIGNMENT)
    empty, each = header_size_bound(()), entry_size_bound(name, shape)
    fitting = (5 * ALIGNMENT - empty) // each
    rows = [(f"{n:0100}", "F32", shape, n * 24, 24) for n in range(200)]
    assert len(encode_header(rows[:fitting])) <= 5 * ALIGNMENT
    with pytest.raises(OversizedMetadata):
        encode_header(rows)


def raw(table: Any, data: int = 0) -> tuple[bytes, int]:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    header = len(text).to_bytes(8, "little") + text
    return header, len(header) + data


def entry(lo: Any, hi: Any, dtype: Any = "U8", shape: Any = None) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [hi - lo] if shape is None else shape,
        "data_offsets": [lo, hi],
    }


HOSTILE: list[tuple[str, Any, int, type[CorruptCheckpoint]]] = [
    ("overlap", {"a": entry(0, 4), "b": entry(2, 6)}, 6, InvalidExtent),
    ("same bytes twice", {"a": entry(0, 4), "b": entry(0, 4)}, 4, InvalidExtent),
    ("hole", {"a": entry(0, 4), "b": entry(5, 6)}, 6, InvalidExtent),
    ("hole at the start", {"a": entry(1, 4)}, 4, InvalidExtent),
    ("beyond the file", {"a": entry(0, 8)}, 7, InvalidExtent),
    ("far beyond the file", {"a": entry(0, 1 << 50)}, 7, InvalidExtent),
    ("bytes of no entry", {"a": entry(0, 4)}, 5, InvalidExtent),
    ("end before begin", {"a": entry(4, 0, shape=[4])}, 4, InvalidExtent),
    ("shape too large", {"a": entry(0, 4, shape=[5])}, 4, InvalidExtent),
    ("shape that overflows", {"a": entry(0, 0, shape=[1 << 62] * 256)}, 0, InvalidExtent),
    ("negative shape", {"a": entry(0, 4, shape=[-2, -2])}, 4, InvalidExtent),
    ("boolean shape", {"a": entry(0, 1, shape=[True])}, 1, InvalidExtent),
    ("too many dimensions", {"a": entry(0, 1, shape=[1] * 257)}, 1, InvalidExtent),
    ("negative offsets", {"a": entry(-4, 0)}, 0, InvalidExtent),
    ("fractional offset", {"a": entry(0, 4.0, shape=[4])}, 4, InvalidExtent),
    ("one offset", {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0]}}, 4, InvalidExtent),
    ("unknown dtype", {"a": entry(0, 4, dtype="F33")}, 4, InvalidManifest),
    ("dtype that is a list", {"a": entry(0, 4, dtype=[])}, 4, InvalidManifest),
    ("no entry", {"a": 1}, 0, InvalidManifest),
    ("more than an entry", {"a": entry(0, 4) | {"url": "x"}}, 4, InvalidManifest),
    ("list", [], 0, InvalidManifest),
    ("metadata that is no text", {"__metadata__": {"a": 1}}, 0, InvalidManifest),
    ("metadata that is a list", {"__metadata__": []}, 0, InvalidManifest),
    ("no json", b"{]", 0, InvalidManifest),
    ("nothing", b"", 0, InvalidManifest),
    ("not utf-8", b'{"\xff":1}', 0, InvalidManifest),
    ("deep", b'{"a":' + b"[" * 100_000, 0, InvalidManifest),
    ("name twice", b'{"a":1,"b":2,"a":3}', 0, DuplicateName),
    ("member twice", b'{"a":{"dtype":"U8","dtype":"U8"}}', 0, DuplicateName),
]


@pytest.mark.parametrize(
    ("table", "data", "error"), [pytest.param(*case[1:], id=case[0]) for case in HOSTILE]
)
def test_hostile_header_has_its_own_error(
    table: Any, data: int, error: type[CorruptCheckpoint]
) -> None:
    header, size = raw(table, data)
    with pytest.raises(error) as caught:
        decode_header(header, size=size, key="a/file")
    assert type(caught.value) is error
    assert caught.value.key == "a/file"


@pytest.mark.parametrize(("second", "what"), [(2, "overlaps"), (5, "hole")])
def test_error_says_what_is_wrong_with_an_extent(second: int, what: str) -> None:
    header, size = raw({"a": entry(0, 4), "b": entry(second, second + 4)}, second + 4)
    with pytest.raises(InvalidExtent, match=what):
        decode_header(header, size=size)


def test_header_that_is_cut_off() -> None:
    header = encode_header([("a", "U8", (4,), 0, 4)])
    for size in (0, 7, 8, 100, len(header) - 1):
        with pytest.raises(TruncatedObject):
            decode_header(header[:size], size=len(header) + 4)
        with pytest.raises(TruncatedObject):
            decode_header(header[:size], size=size)


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES, 1 << 40, (1 << 64) - 1])
def test_giant_header_is_not_read(length: int) -> None:
    with pytest.raises(OversizedMetadata):
        decode_header(length.to_bytes(8, "little"), size=1 << 50)


@given(st.binary(max_size=100))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptCheckpoint):
        decode_header(data, size=len(data))
