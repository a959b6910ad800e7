"""The image of a data file: the same bytes whatever the blocks, and the tensors can be read off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load as load_safetensors
from tensor_states import SPECS, Spec, build

from ckpipe.format.checksum import SumTable, crc32c
from ckpipe.format.dtypes import stored_dtype
from ckpipe.format.keys import LabelFilter
from ckpipe.memory import native
from ckpipe.memory.arena import Arena
from ckpipe.plan.plan import LocalPlanner, RankPlan
from ckpipe.save.program import fill_blocks, plan_blocks
from ckpipe.state.capture_cache import capture_cache_of
from ckpipe.state.flatten import Captured, OpenedState, capture, flatten

BLOCK_BYTES = (64, 112, 4096, 12_288, 1 << 20)
ARENA = Arena(max(BLOCK_BYTES))
ALL = LabelFilter()


def planned(state: Any) -> tuple[Captured, RankPlan]:
    captured = capture(state)
    return captured, LocalPlanner().plan(captured, rank=0, world_size=1)


def images(captured: Captured, plan: RankPlan, block_bytes: int) -> list[bytes]:
    """The data files, each filled block by block, over what the block held before."""
    made = [bytearray(file.size) for file in plan.files]
    written = [0 for _ in plan.files]
    block = ARENA.take()
    for step in plan_blocks(plan, captured.tensors, block_bytes):
        block.tensor[:block_bytes].fill_(0xA5)
        fill_blocks([(step, block)], captured)
        assert step.offset == written[step.file]
        made[step.file][step.offset : step.offset + step.nbytes] = block.view[: step.nbytes]
        rest = block.view[step.nbytes : block_bytes]
        assert bytes(rest) == b"\xa5" * len(rest)
        written[step.file] += step.nbytes
    ARENA.give(block)
    assert written == [file.size for file in plan.files]
    return [bytes(each) for each in made]


def bits(tensor: torch.Tensor) -> list[int]:
    """The bytes of a tensor's elements in order, lazy bits resolved."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    values: list[int] = plain.view(-1).view(torch.uint8).tolist()
    return values


def read_back(captured: Captured, plan: RankPlan, files: list[bytes], number: int) -> torch.Tensor:
    """A tensor, read from the files by nothing but what the layout says."""
    chunk, leaf = plan.layout.chunks[number], captured.tensors[number]
    assert chunk.entry is not None
    entry = plan.layout.entries[chunk.entry]
    start = len(plan.files[entry.file].header) + entry.offset
    raw = bytearray(files[entry.file][start + chunk.offset : start + entry.nbytes])
    shape, dtype = leaf.shape, captured.memory[number].dtype
    if not leaf.nbytes:
        return torch.empty(shape, dtype=dtype)
    whole = len(raw) // dtype.itemsize * dtype.itemsize
    flat = torch.frombuffer(raw[:whole], dtype=torch.uint8).view(dtype)
    if chunk.stride is not None:
        flat = flat.as_strided(shape, chunk.stride)
    else:
        flat = flat[: leaf.nbytes // leaf.itemsize].view(shape)
    in_group = any(source.skip is not None for source in plan.sources[chunk.entry]) or (
        plan.sources[chunk.entry] and plan.sources[chunk.entry][0].tensor != number
    )
    if in_group and "c" in leaf.lazy:
        flat = flat.conj()
    return torch._neg_view(flat) if in_group and "n" in leaf.lazy else flat


@given(SPECS)
def test_block_size_does_not_change_a_byte(spec: Spec) -> None:
    captured, plan = planned(build(spec))
    first, *others = [images(captured, plan, size) for size in BLOCK_BYTES]
    assert all(other == first for other in others)


@given(SPECS, st.sampled_from(BLOCK_BYTES))
def test_every_tensor_can_be_read_off(spec: Spec, block_bytes: int) -> None:
    state = build(spec)
    captured, plan = planned(state)
    files = images(captured, plan, block_bytes)
    for number, leaf in enumerate(captured.tensors):
        again = read_back(captured, plan, files, number)
        assert bits(again) == bits(state[leaf.label]), leaf.label


@given(SPECS, st.sampled_from(BLOCK_BYTES))
def test_safetensors_reads_the_same(spec: Spec, block_bytes: int) -> None:
    state = build(spec)
    captured, plan = planned(state)
    for file in images(captured, plan, block_bytes):
        for name, tensor in load_safetensors(file).items():
            if name in state and tensor.dtype == state[name].dtype:
                assert tensor.shape == state[name].shape
                assert bits(tensor) == bits(state[name])
            else:  # a window, or a dtype that the format lacks
                assert tensor.dtype == torch.uint8
                assert name.endswith("~window") or stored_dtype(state[name].dtype) is None


@given(SPECS, st.sampled_from(BLOCK_BYTES))
def test_spans_are_the_entries_cut_at_the_blocks(spec: Spec, block_bytes: int) -> None:
    captured, plan = planned(build(spec))
    ends = [0 for _ in plan.layout.entries]
    for block in plan_blocks(plan, captured.tensors, block_bytes):
        for span in block.spans:
            entry = plan.layout.entries[span.entry]
            start = len(plan.files[entry.file].header) + entry.offset
            assert ends[span.entry] == span.lo < span.hi
            assert start + span.lo == block.offset + span.at
            assert span.at + span.hi - span.lo <= block.nbytes
            ends[span.entry] = span.hi
    assert ends == [entry.nbytes for entry in plan.layout.entries]


def test_all_that_lies_in_host_memory_is_one_gather() -> None:
    dtypes = (torch.float32, torch.int8, torch.float64)
    state = {f"{n:04}": torch.full((n % 5, 3), n, dtype=dtypes[n % 3]) for n in range(100)}
    state["large"] = torch.randn(300, 300)
    captured, plan = planned(state)
    (block,) = plan_blocks(plan, captured.tensors, 1 << 20)
    assert len(block.fills) == 1
    assert not block.copies
    (image,) = images(captured, plan, 1 << 20)
    read = load_safetensors(image)
    assert all(torch.equal(read[name], each) for name, each in state.items())


@given(SPECS, st.sampled_from(BLOCK_BYTES), st.data())
def test_halves_of_a_block_fill_what_all_of_it_does(
    spec: Spec, block_bytes: int, data: st.DataObject
) -> None:
    captured, plan = planned(build(spec))
    numbers = range(len(captured.tensors))
    later = {number for number in numbers if data.draw(st.booleans())}
    whole, halved = ARENA.take(), ARENA.take()
    for block in plan_blocks(plan, captured.tensors, block_bytes):
        whole.tensor.fill_(0xA5)
        halved.tensor.fill_(0xA5)
        fill_blocks([(block, whole)], captured)
        soon, late = block.split(later)
        assert later.isdisjoint(soon.tensors)
        assert later.issuperset(late.tensors)
        fill_blocks([(late, halved)], captured)
        fill_blocks([(soon, halved)], captured)
        assert bytes(halved.view) == bytes(whole.view)
    ARENA.give(whole)
    ARENA.give(halved)


@given(SPECS, st.sampled_from(BLOCK_BYTES), st.data())
def test_what_is_summed_while_it_is_copied_is_right(
    spec: Spec, block_bytes: int, data: st.DataObject
) -> None:
    captured, plan = planned(build(spec))
    table = SumTable([entry.nbytes for entry in plan.layout.entries])
    later = {number for number in range(len(captured.tensors)) if data.draw(st.booleans())}
    memory = ARENA.take()
    for block in plan_blocks(plan, captured.tensors, block_bytes):
        cuts = table.cuts((span.entry, span.lo, span.hi, span.at) for span in block.spans)
        assert block.sum_count == len(cuts.begins)
        found: dict[int, int] = {}
        for half in block.split(later):
            (sums,) = fill_blocks([(half, memory)], captured)
            values = dict(zip(*(each.tolist() for each in sums), strict=True))
            assert found.keys().isdisjoint(values)
            found |= values
        for number, value in found.items():
            assert crc32c(memory.view[cuts.begins[number] : cuts.ends[number]]) == value
    ARENA.give(memory)


@pytest.mark.parametrize("block_bytes", [1 << 20, 3 << 19, 1 << 22])
def test_all_that_lies_in_host_memory_is_summed_while_it_is_copied(block_bytes: int) -> None:
    arena = Arena(block_bytes)
    state = {f"{number}": torch.randn(number * 40_001) for number in range(1, 19)}
    captured, plan = planned(state)
    for block in plan_blocks(plan, captured.tensors, block_bytes):
        (sums,) = fill_blocks([(block, arena.take())], captured)
        assert sums[0].tolist() == list(range(block.sum_count))


def test_a_gather_finds_tensors_that_have_moved() -> None:
    state = {f"{number}": torch.full((3,), number, dtype=torch.float32) for number in range(5)}
    walked = flatten(OpenedState(state), ALL, pickling=False)
    captured, cache = walked.captured, capture_cache_of(walked)
    assert cache is not None
    plan = LocalPlanner().plan(captured, rank=0, world_size=1)
    for _ in range(2):  # what was worked out for a place is not taken for another
        (image,) = images(captured, plan, 4096)
        read = load_safetensors(image)
        assert {name: read[name].tolist() for name in state} == {
            name: each.tolist() for name, each in state.items()
        }
        state["2"] = state["2"] + 10
        followed = cache.capture(OpenedState(state), ALL)
        assert followed is not None
        captured = followed


def test_addresses_may_be_of_any_device() -> None:
    captured = capture({"w": torch.ones(3)})
    (leaf,) = captured.tensors
    far = replace(leaf, device="xpu:0", address=0xFF00 << 48)
    assert captured.moved([far], [], [], []).addresses.tolist() == [0xFF00 << 48]


def test_pieces_are_moved_one_by_one_without_the_compiled_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = {f"{number}": torch.randn(number % 7) for number in range(50)}
    captured, plan = planned(state)
    gathered = images(captured, plan, 4096)
    monkeypatch.setattr(native, "_free", None)
    assert images(captured, plan, 4096) == gathered


def test_shared_memory_is_copied_as_it_lies() -> None:
    memory = torch.arange(100.0)
    captured, plan = planned({"even": memory[::2], "odd": memory[1::2], "some": memory[10:20]})
    blocks = plan_blocks(plan, captured.tensors, 4096)
    assert not any(block.copies for block in blocks)
    (image,) = images(captured, plan, 4096)
    assert image.endswith(memory.numpy().tobytes())


def test_group_under_a_conjugate_view_is_copied_as_it_lies() -> None:
    memory = torch.complex(torch.arange(6.0), torch.arange(6.0) + 1)
    state = {"all": memory.conj(), "part": memory[1:3]}
    captured, plan = planned(state)
    files = images(captured, plan, 4096)
    for number, label in enumerate(state):
        assert bits(read_back(captured, plan, files, number)) == bits(state[label])


def test_bytes_that_no_tensor_has_are_zeros() -> None:
    memory = torch.full((8,), 255, dtype=torch.uint8)
    captured, plan = planned({"bytes": memory[1:7], "float": memory.view(torch.float32)[1:]})
    (image,) = images(captured, plan, 4096)
    assert image.endswith(b"\0" + b"\xff" * 7)


def test_later_values_of_the_same_tensors_need_no_new_plan() -> None:
    state = {"a": torch.zeros(5), "b": torch.zeros(3, 3).t()}
    captured, plan = planned(state)
    state["a"].fill_(7)
    state["b"].copy_(torch.arange(9.0).view(3, 3))
    loaded = load_safetensors(images(captured, plan, 4096)[0])
    assert torch.equal(loaded["a"], state["a"])
    assert torch.equal(loaded["b"], state["b"])
