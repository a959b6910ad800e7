"""Plans of saves: every byte once, without holes, in a fixed order, under a fitting fingerprint.

And the headers of their files, which say what is in them to safetensors, too.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import safetensors.torch
import torch
from bundles import capture
from hypothesis import given
from hypothesis import strategies as st
from tensor_states import SPECS, Spec, build

from ckpipe.errors import OversizedMetadata, UnsupportedState
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
from ckpipe.planning import Captured, LocalPlanner, RankPlan, fingerprint
from ckpipe.state.tensors import TensorLeaf, alias_groups


def planned(state: Any) -> tuple[Captured, RankPlan]:
    captured = capture(state)
    return captured, LocalPlanner().plan(captured, rank=0, world_size=1)


def touched(leaf: TensorLeaf) -> set[int]:
    """The addresses of all bytes of a tensor's elements."""
    places = torch.zeros(leaf.shape, dtype=torch.int64)
    for dim, (n, step) in enumerate(zip(leaf.shape, leaf.stride, strict=True)):
        shape = [1] * len(leaf.shape)
        shape[dim] = n
        places = places + (torch.arange(n) * step).view(shape)
    item = leaf.itemsize
    starts = {leaf.address + place * item for place in places.flatten().tolist()}
    return {start + byte for start in starts for byte in range(item)}


@given(SPECS)
def test_sources_fill_every_entry_once(spec: Spec) -> None:
    captured, plan = planned(build(spec))
    for entry, sources in zip(plan.layout.entries, plan.sources, strict=True):
        end = sources[0].offset if sources else 0
        assert end < 16  # the alignment of a window; all else begins with its first byte
        for source in sources:
            assert source.offset == end
            leaf = captured.tensors[source.tensor]
            if source.skip is None:
                assert (source.offset, source.nbytes) == (0, leaf.nbytes)
            else:
                assert 0 <= source.skip <= source.skip + source.nbytes <= leaf.window
            end += source.nbytes
        assert end == entry.nbytes


@given(SPECS)
def test_every_byte_of_every_tensor_is_written_once(spec: Spec) -> None:
    captured, plan = planned(build(spec))
    written: list[int] = []
    for sources in plan.sources:
        for source in sources:
            leaf = captured.tensors[source.tensor]
            if source.skip is not None:
                first = leaf.address + source.skip
                written += range(first, first + source.nbytes)
            elif leaf.contiguous:
                written += range(leaf.address, leaf.address + leaf.nbytes)
            else:
                written += touched(leaf)
    assert len(set(written)) == len(written)
    needed = set().union(*(touched(leaf) for leaf in captured.tensors if leaf.window))
    assert needed <= set(written)


@given(SPECS)
def test_every_tensor_finds_its_elements_in_its_entry(spec: Spec) -> None:
    captured, plan = planned(build(spec))
    assert [chunk.tensor for chunk in plan.layout.chunks] == list(range(len(captured.tensors)))
    for chunk, leaf in zip(plan.layout.chunks, captured.tensors, strict=True):
        assert chunk.entry is not None
        entry = plan.layout.entries[chunk.entry]
        assert chunk.offset % leaf.itemsize == 0
        extent = leaf.nbytes if chunk.stride is None else leaf.window
        assert 0 <= chunk.offset <= chunk.offset + extent <= entry.nbytes


@given(SPECS)
def test_entries_leave_no_holes_and_the_largest_items_come_first(spec: Spec) -> None:
    captured, plan = planned(build(spec))
    items = []
    for file in plan.files:
        end = 0
        for number in file.entries:
            entry, sources = plan.layout.entries[number], plan.sources[number]
            assert entry.offset == end
            end += entry.nbytes
            whole = [source for source in sources if source.skip is None]
            item = captured.tensors[whole[0].tensor].itemsize if whole else 1
            assert entry.offset % item == 0
            items.append(item)
        assert file.size == len(file.header) + end
        header = json.loads(file.header[8:])
        del header["__metadata__"]
        rows = [plan.layout.entries[number] for number in file.entries]
        assert len(file.header) % ALIGNMENT == 0
        assert header == {
            row.name: {
                "dtype": row.dtype,
                "shape": list(row.shape),
                "data_offsets": [row.offset, row.offset + row.nbytes],
            }
            for row in rows
        }
    assert items == sorted(items, reverse=True)
    names = [entry.name for entry in plan.layout.entries]
    assert len(set(names)) == len(names)


@given(SPECS)
def test_equal_states_in_other_memory_have_equal_plans(spec: Spec) -> None:
    (one, first), (other, second) = planned(build(spec)), planned(build(spec))
    assert first == second
    assert fingerprint(one) == fingerprint(other) == first.fingerprint


@given(SPECS)
def test_values_do_not_matter(spec: Spec) -> None:
    changed = tuple(dataclasses.replace(buffer, seed=buffer.seed + 100) for buffer in spec)
    assert fingerprint(capture(build(spec))) == fingerprint(capture(build(changed)))


@given(SPECS, st.data())
def test_another_layout_or_sharing_has_another_fingerprint(spec: Spec, data: st.DataObject) -> None:
    state = build(spec)
    before = fingerprint(capture(state))
    if not state:
        return
    label = data.draw(st.sampled_from(sorted(state)))
    tensor = state[label]
    changes = {
        "name": {**{k: v for k, v in state.items() if k != label}, "other": tensor},
        "gone": {k: v for k, v in state.items() if k != label},
        "shape": state | {label: tensor.unsqueeze(0)},
        "kind": state | {label: tensor.clone().requires_grad_()}
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex
        else state | {label: tensor.to(torch.float32)},
        "two": state | {"zz": torch.zeros(1)},
    }
    for what, changed in changes.items():
        assert fingerprint(capture(changed)) != before, what


@given(SPECS)
def test_giving_up_sharing_changes_the_fingerprint(spec: Spec) -> None:
    state = build(spec)
    captured = capture(state)
    groups = [group for group in alias_groups(captured.tensors) if len(group) > 1]
    for group in groups:
        label = captured.tensors[group[0]].label
        leaf = captured.tensors[group[0]]
        # Same strides, in memory of its own: nothing but the sharing is another.
        own = torch.empty(leaf.window, dtype=torch.uint8).view(captured.memory[group[0]].dtype)
        alone = own.as_strided(leaf.shape, leaf.stride)
        alone = alone.conj() if "c" in leaf.lazy else alone
        alone = torch._neg_view(alone) if "n" in leaf.lazy else alone
        changed = capture(state | {label: alone})
        assert [each.layout() for each in changed.tensors] == [
            each.layout() for each in captured.tensors
        ]
        assert fingerprint(changed) != fingerprint(captured)


def test_sharing_in_another_place_has_another_fingerprint() -> None:
    memory = torch.zeros(64)
    near = {"a": memory[:32], "b": memory[8:40]}
    far = {"a": memory[:32], "b": memory[16:48]}
    assert fingerprint(capture(near)) != fingerprint(capture(far))


def test_group_whose_largest_view_is_contiguous_is_stored_under_that_view() -> None:
    memory = torch.arange(24.0)
    _, plan = planned({"part": memory[3:9], "all": memory.view(4, 6), "turned": memory.view(6, 4)})
    (entry,) = plan.layout.entries
    assert (entry.name, entry.dtype, entry.shape) == ("all", "F32", (4, 6))
    assert [chunk.offset for chunk in plan.layout.chunks] == [12, 0, 0]


def test_group_that_no_view_covers_is_stored_as_bytes() -> None:
    memory = torch.arange(24.0)
    _, plan = planned({"low": memory[:16], "high": memory[8:]})
    (entry,) = plan.layout.entries
    assert (entry.name, entry.dtype, entry.shape) == ("low~window", "U8", (96,))


def test_disjoint_parts_of_one_buffer_share_nothing() -> None:
    memory = torch.arange(24.0)
    _, plan = planned({"low": memory[:12], "high": memory[12:]})
    assert [entry.name for entry in plan.layout.entries] == ["low", "high"]


def test_long_headers_open_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_file, "MAX_HEADER_BYTES", 16 << 10)
    _, plan = planned({f"{number}" * 50: torch.zeros(number % 3) for number in range(100, 300)})
    assert len(plan.files) > 1
    assert [number for file in plan.files for number in file.entries] == list(range(200))
    assert all(len(file.header) <= 16 << 10 for file in plan.files)
    assert len({file.name for file in plan.files}) == len(plan.files)


@given(SPECS, st.integers(12 << 10, 40 << 10))
def test_no_file_is_larger_than_the_store_takes(spec: Spec, most: int) -> None:
    captured = capture(build(spec))
    whole = LocalPlanner().plan(captured, rank=0, world_size=1)
    if any(entry.nbytes > most - (8 << 10) for entry in whole.layout.entries):
        return
    plan = LocalPlanner(max_file_bytes=most).plan(captured, rank=0, world_size=1)
    assert all(file.size <= most for file in plan.files)
    assert len({file.name for file in plan.files}) == len(plan.files)
    assert [number for file in plan.files for number in file.entries] == list(
        range(len(whole.layout.entries))
    )
    # A file is closed only for what did not fit it.
    for file, following in pairwise(plan.files):
        first = plan.layout.entries[following.entries[0]]
        assert file.size + first.nbytes + (8 << 10) > most


def test_many_tensors_fill_one_file_after_the_other() -> None:
    captured = capture({f"{number:02}": torch.zeros(4096) for number in range(20)})
    plan = LocalPlanner(max_file_bytes=80 << 10).plan(captured, rank=0, world_size=1)
    assert [len(file.entries) for file in plan.files] == [4, 4, 4, 4, 4]


def test_a_tensor_that_fits_no_file_is_refused() -> None:
    captured = capture({"small": torch.zeros(8), "large": torch.zeros(64 << 10)})
    with pytest.raises(UnsupportedState, match="at least 3-fold") as caught:
        LocalPlanner(max_file_bytes=100 << 10).plan(captured, rank=0, world_size=1)
    assert caught.value.key == "large"
    LocalPlanner(max_file_bytes=300 << 10).plan(captured, rank=0, world_size=1)


def test_state_without_tensors_has_no_file() -> None:
    _, plan = planned({"a": 1})
    assert (plan.files, plan.size, plan.checksums) == ((), 0, 0)


# ---- headers ----

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
