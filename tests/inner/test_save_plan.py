"""Plans of saves: fingerprints, files and headers that keep to limits, and who shares bytes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpipe.errors import OversizedMetadata
from ckpipe.format import data_file
from ckpipe.format.data_file import (
    ALIGNMENT,
    encode_header,
    entry_size_bound,
    header_size_bound,
    item_bytes,
)
from ckpipe.format.dtypes import DTYPES
from ckpipe.planning import LocalPlanner, RankPlan, fingerprint
from ckpipe.state.tensors import alias_groups, overlaps_itself, tensor_leaf
from tests.inner.manifests import capture
from tests.support.tensor_states import SPECS, Spec, build


def planned(state: Any) -> RankPlan:
    return LocalPlanner().plan(capture(state), rank=0, world_size=1)


@given(SPECS)
def test_plans_of_states_of_other_values_in_other_memory_are_equal(spec: Spec) -> None:
    changed = tuple(dataclasses.replace(buffer, seed=buffer.seed + 100) for buffer in spec)
    one, other = planned(build(spec)), planned(build(changed))
    assert one == other
    assert one.fingerprint == fingerprint(capture(build(changed)))


def test_sharing_in_another_place_has_another_fingerprint() -> None:
    memory = torch.zeros(64)
    near = {"a": memory[:32], "b": memory[8:40]}
    far = {"a": memory[:32], "b": memory[16:48]}
    assert fingerprint(capture(near)) != fingerprint(capture(far))


def test_long_headers_open_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_file, "MAX_HEADER_BYTES", 16 << 10)
    plan = planned({f"{number}" * 50: torch.zeros(number % 3) for number in range(100, 300)})
    assert len(plan.files) > 1
    assert [number for file in plan.files for number in file.entries] == list(range(200))
    assert all(len(file.header) <= 16 << 10 for file in plan.files)
    assert len({file.row.name for file in plan.files}) == len(plan.files)


@given(SPECS, st.integers(12 << 10, 40 << 10))
def test_no_file_is_larger_than_the_store_takes(spec: Spec, most: int) -> None:
    captured = capture(build(spec))
    whole = LocalPlanner().plan(captured, rank=0, world_size=1)
    if any(entry.nbytes > most - (8 << 10) for entry in whole.layout.entries):
        return
    plan = LocalPlanner(max_file_bytes=most).plan(captured, rank=0, world_size=1)
    assert all(file.row.size <= most for file in plan.files)
    assert len({file.row.name for file in plan.files}) == len(plan.files)
    assert [number for file in plan.files for number in file.entries] == list(
        range(len(whole.layout.entries))
    )
    # A file is closed only for what did not fit it.
    for file, following in pairwise(plan.files):
        first = plan.layout.entries[following.entries[0]]
        assert file.row.size + first.nbytes + (8 << 10) > most


# ---- headers ----


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


# ---- tensors that share bytes ----


def groups(*tensors: torch.Tensor) -> list[list[int]]:
    return alias_groups([tensor_leaf(each, str(n))[0] for n, each in enumerate(tensors)])


def test_overlapping_views_are_one_group_and_neighbours_are_none() -> None:
    base = torch.arange(10)
    assert groups(base[:5], base[5:]) == []
    assert groups(base[:6], base[5:]) == [[0, 1]]
    assert groups(base[5:], base[:2], base[1:6]) == [[0, 1, 2]]
    assert groups(base, torch.arange(3), base[2:3]) == [[0, 2]]
    assert groups(base[:0], base) == []
    assert groups(base.view(torch.int32), base[3]) == [[0, 1]]


def test_expanded_tensor_is_a_group_by_itself() -> None:
    assert groups(torch.zeros(1).expand(5), torch.zeros(4)) == [[0]]
    assert groups(torch.arange(8).as_strided((3, 4), (1, 1))) == [[0]]
    assert groups(torch.arange(6).reshape(2, 3).T) == []


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=3))
def test_self_overlap_is_never_missed(dims: list[tuple[int, int]]) -> None:
    shape, stride = tuple(n for n, _ in dims), tuple(step for _, step in dims)
    places = [0]
    for n, step in dims:
        places = [place + k * step for place in places for k in range(n)]
    if len(set(places)) < len(places):
        assert overlaps_itself(shape, stride)
