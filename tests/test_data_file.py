"""Headers of data files say what is in them, and safetensors reads them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from bundles import images_of
from hypothesis import given
from hypothesis import strategies as st

from ckpipe.errors import (
    OversizedMetadata,
)
from ckpipe.format import data_file
from ckpipe.format.data_file import (
    ALIGNMENT,
    STORED_ITEM_BYTES,
    encode_header,
    entry_size_bound,
    header_size_bound,
    item_bytes,
    stored_dtype,
)
from ckpipe.format.dtypes import DTYPES, NAMES
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
def test_header_says_what_the_entries_are(rows: list[Row]) -> None:
    header = encode_header(rows)
    assert len(header) % ALIGNMENT == 0
    assert len(header) <= header_size_bound((row[0], row[2]) for row in rows)
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    found = json.loads(header[8:])
    assert found.pop("__metadata__") == {"format": "pt", "ckpipe": "1"}
    assert found == {
        name: {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        for name, dtype, shape, offset, nbytes in rows
    }


@given(tables())
def test_safetensors_reads_what_is_written(rows: list[Row]) -> None:
    total = sum(row[4] for row in rows)
    found = safetensors.torch.load(encode_header(rows) + b"\0" * total)
    assert {
        name: (stored_dtype(NAMES[tensor.dtype]), tuple(tensor.shape))
        for name, tensor in found.items()
    } == {name: (dtype, shape) for name, dtype, shape, _, _ in rows}


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


def test_sizes_are_those_of_torch() -> None:
    assert {name: item_bytes(name) for name in DTYPES} == {
        name: dtype.itemsize for name, dtype in DTYPES.items()
    }
    assert item_bytes("float3") is None


def test_common_dtypes_need_no_torch() -> None:
    code = (
        "import sys; from ckpipe.format.data_file import item_bytes; "
        "assert item_bytes('bfloat16') == 2; assert 'torch' not in sys.modules; "
        "assert item_bytes('float4_e2m1fn_x2') == 1; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
