"""Data files, keys and values: how a state is written down."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import math
import pathlib
import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpipe.errors import InvalidManifest, OversizedMetadata, StructureMismatch
from ckpipe.format import data_file
from ckpipe.format.data_file import (
    ALIGNMENT,
    encode_header,
    entry_size_bound,
    header_size_bound,
    item_bytes,
)
from ckpipe.format.dtypes import DTYPES
from ckpipe.format.labels import (
    LabelFilter,
    decode_key,
    encode_key,
    join,
    joined,
    label_part,
    unique_label,
)
from ckpipe.planning import LocalPlanner, RankPlan, fingerprint
from ckpipe.state.tensors import alias_groups, overlaps_itself, tensor_leaf
from ckpipe.state.values import NotInline, class_path, decode_value, encode_value
from tests.inner.made_up_ranks import capture
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


class Color(enum.Enum):
    RED = 1
    BLUE = "b"


class Bits(enum.IntFlag):
    A = 1
    B = 2
    C = 4


class Mode(enum.Flag):
    READ = 1
    WRITE = 2
    BOTH = 3


floats = st.floats(allow_nan=True)
keys = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), floats, st.text()),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)
values = st.one_of(
    st.none(), st.booleans(), st.integers(), floats, st.text(), st.binary(),
    st.complex_numbers(allow_nan=True), st.binary().map(bytearray), st.datetimes(),
    st.datetimes(timezones=st.just(dt.UTC)), st.dates(), st.times(), st.timedeltas(),
    st.sampled_from([
        torch.float32, torch.bool, torch.float8_e4m3fn, torch.device("cpu"),
        torch.device("cuda", 1), torch.Size([1, 0, 3]), torch.Size([]), torch.strided,
        torch.channels_last, Ellipsis, Color.RED, Color.BLUE, Bits.A, Bits.A | Bits.C,
        Bits(0), Mode.READ | Mode.WRITE, Mode(0), range(1, 9, 2),
        pathlib.Path("/a/b"), pathlib.PureWindowsPath("c:\\x"), pathlib.PurePosixPath("."),
        np.float32(1.5), np.int64(-3), np.bool_(True), np.complex128(1j),
        np.datetime64("2026-11-21"), np.float16("nan"), 2**53, -(2**53) + 1, 10**4000,
    ]),
)  # fmt: skip


def exact(value: Any) -> Any:
    """A form that tells 1 from True and 0.0 from -0.0, and for which NaN is NaN."""
    return type(value), repr(value), getattr(value, "fold", None)


def through_json(data: Any) -> Any:
    return json.loads(json.dumps(data, allow_nan=False))


@given(st.lists(keys | st.just(("~", "@"))), st.sampled_from(["", "model"]))
def test_labels_are_the_same_made_one_by_one_or_all_together(each: list[Any], top: str) -> None:
    assert joined(top, each) == [join(top, key) for key in each]


@given(values)
def test_values_round_trip(value: Any) -> None:
    assert exact(decode_value(through_json(encode_value(value)))) == exact(value)


@pytest.mark.parametrize("raw", ["", "ü", "ü\0", "\0", "\ud800", b"", b"a", b"a\0", b"\0"])
def test_texts_of_numpy_keep_every_character(raw: str | bytes) -> None:
    value = np.str_(raw) if isinstance(raw, str) else np.bytes_(raw)
    found = decode_value(through_json(encode_value(value)))
    assert type(found) is type(value)
    assert list(found) == list(raw)  # numpy itself compares without NULs at the end


@pytest.mark.parametrize(
    "data",
    [
        1.5, [1], {}, {"int": 5}, {"int": "x"}, {"int": "1" * 5000}, {"float": "1"},
        {"float": None}, {"tuple": 1}, {"tuple": [[1]]}, {"other": 1}, {"int": "1", "float": 1.0},
    ],
)  # fmt: skip
def test_malformed_keys_are_refused(data: Any) -> None:
    with pytest.raises(InvalidManifest):
        decode_key(data)


@pytest.mark.parametrize(
    "data",
    [
        {}, [], [None], ["unknown"], ["int"], ["int", 5], ["int", "0x1"], ["float", "1.0"],
        ["complex", 1], ["bytes", "%"], ["bytes", 5], ["dtype", "Tensor"], ["dtype", "no_such"],
        ["device", "nowhere"], ["size", "abc"], ["datetime", "now", 0], ["date", 5],
        ["datetime", "2026-11-21", 2], ["timedelta", 10**30, 0, 0], ["range", 1, 2, 0],
        ["numpy", "|O8", "AAAAAAAAAAA="], ["numpy", "<f4", "AAAA"], ["numpy", "<f4", ""],
        ["numpy", "<V0", ""], ["enum", 5, "x"], ["path", 5], ["ellipsis", 1], [["int"], "1"],
    ],
)  # fmt: skip
def test_malformed_values_are_refused(data: Any) -> None:
    with pytest.raises(InvalidManifest):
        decode_value(data)


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), floats, st.text(max_size=5)),
        lambda inner: st.lists(inner, max_size=4),
    ),
    st.sampled_from(
        ["int", "float", "complex", "bytes", "dtype", "size", "layout", "datetime", "date", "time",
         "timedelta", "range", "numpy", "path", "device"]
    ),
)  # fmt: skip
def test_no_made_up_value_raises_anything_but_our_error(data: Any, kind: str) -> None:
    arguments = data if isinstance(data, list) else [data]
    try:
        decode_value([kind, *arguments])
    except InvalidManifest:
        return


def test_what_could_not_be_found_again_is_refused_at_once() -> None:
    class Local(enum.Enum):
        HERE = 1

    for value in (Local.HERE, Bits.A | Bits(64)):
        with pytest.raises(NotInline):
            encode_value(value)


def test_enum_of_a_class_or_member_that_is_gone() -> None:
    for data in (["enum", "no.such:Thing", "A"], ["enum", class_path(Color), "GREEN"]):
        with pytest.raises(StructureMismatch):
            decode_value(data)


@pytest.mark.parametrize("value", [object(), [1], {}, lambda: 0, type, np.zeros(1).dtype])
def test_other_objects_are_not_inline(value: Any) -> None:
    with pytest.raises(NotInline):
        encode_value(value)


@given(st.text(), st.text())
def test_different_names_have_different_label_parts(first: str, second: str) -> None:
    assert (label_part(first) == label_part(second)) == (first == second)
    label_part(first).encode()
    assert "@" not in label_part(first)


@given(st.lists(st.text(max_size=4), max_size=12))
def test_labels_are_unique_and_fit_a_header(parts: list[str]) -> None:
    taken: set[str] = set()
    labels = [unique_label(join("", part), taken) for part in parts]
    assert len(set(labels)) == len(labels)
    assert "" not in labels
    assert "__metadata__" not in labels


def test_labels_of_odd_keys() -> None:
    assert join("a", 1) == join("a", "1") == "a.1"
    assert join("", "~@x") == "~0~1x"
    assert label_part("\ud800") == "~ud800"
    assert math.isnan(decode_key(encode_key(math.nan)))


@pytest.mark.parametrize(
    ("include", "exclude", "selected"),
    [
        (None, None, ["a", "a.b", "ab", "c.d.e"]),
        (["a"], None, ["a", "a.b"]),
        (["*.d"], None, ["c.d.e"]),
        (None, ["a*"], ["c.d.e"]),
        (["a", "c"], ["a.b"], ["a", "c.d.e"]),
        ([], None, []),
    ],
)
def test_filters(include: Any, exclude: Any, selected: list[str]) -> None:
    select = LabelFilter(include, exclude)
    assert [label for label in ["a", "a.b", "ab", "c.d.e"] if select(label)] == selected
