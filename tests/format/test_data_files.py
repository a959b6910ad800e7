"""The image of a data file: the same bytes whatever the blocks, and the tensors can be read off."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load as load_safetensors

import ckpipe
from ckpipe.planning import LocalPlanner
from ckpipe.testing import MemoryBackend
from tests.support.pipelines import small_state
from tests.support.tensor_states import SPECS, Spec, build

BLOCK_BYTES = (1 << 16, (1 << 16) + 4096, 1 << 20)
DTYPES = (torch.float32, torch.int8, torch.float64)
_numbers = itertools.count()
_stores: dict[str, MemoryBackend] = {}


class Checked(LocalPlanner):
    """Makes the usual plans, which are checked as those of a user are."""


async def saved(
    state: dict[str, Any], block_bytes: int = 1 << 20, owned: list[torch.Tensor] | None = None
) -> tuple[bytes, ckpipe.SaveReport]:
    """The data file of a saved state, which is verified and loads as it was, and its report.

    Args:
        state: The state.
        block_bytes: The size of blocks.
        owned: What an optimizer owns, and is copied later.
    """
    guard = torch.optim.SGD([{"params": owned}]) if owned else None
    settings: dict[str, Any] = {"staging": {"block_bytes": block_bytes}, "plan": Checked()}
    url = f"copying://{next(_numbers)}"
    async with ckpipe.Pipeline(url, guard=guard, worker="thread", **settings) as pipeline:
        handle = await pipeline.save(state, step=0, until="captured" if owned else "committed")
        info = await handle
        await pipeline.verify(0)
        result = await pipeline.load()
        assert result is not None
        for name, tensor in state.items():
            assert bits(result.state[name]) == bits(tensor), name
        store = _stores.pop(url)
        (key,) = [each.key async for each in store.list(info.id) if each.key.endswith("tensors")]
        return await store.get(key, max_bytes=1 << 30), handle.report


def _opened(url: str) -> MemoryBackend:
    _stores[url] = MemoryBackend(url)
    return _stores[url]


ckpipe.register_backend("copying", _opened)


def bits(tensor: torch.Tensor) -> list[int]:
    """The bytes of a tensor's elements in order, lazy bits resolved."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    values: list[int] = plain.view(-1).view(torch.uint8).tolist()
    return values


@given(SPECS, st.data())
async def test_neither_blocks_nor_later_copies_change_a_byte(
    spec: Spec, data: st.DataObject
) -> None:
    before = torch.zeros(data.draw(st.integers(40_000, 130_000)), dtype=torch.uint8)
    state = {"before": before} | build(spec)
    owned = [tensor for tensor in state.values() if data.draw(st.booleans())]
    first, _ = await saved(state, BLOCK_BYTES[0])
    for block_bytes in BLOCK_BYTES[1:]:
        assert (await saved(state, block_bytes))[0] == first
    assert (await saved(state, BLOCK_BYTES[0], owned))[0] == first
    for name, tensor in load_safetensors(first).items():
        if name in state and tensor.dtype == state[name].dtype:
            assert tensor.shape == state[name].shape
            assert bits(tensor) == bits(state[name])
        else:  # a window, or a dtype that the format lacks
            assert tensor.dtype == torch.uint8


@pytest.mark.parametrize("block_bytes", [1 << 20, 3 << 19, 1 << 22])
async def test_all_that_lies_in_host_memory_is_summed_while_it_is_copied(block_bytes: int) -> None:
    state = {f"{n:04}": torch.full((n % 5, 3), n, dtype=DTYPES[n % 3]) for n in range(100)}
    state |= {f"{number}": torch.randn(number * 40_001) for number in range(1, 19)}
    _, report = await saved(state, block_bytes)
    assert [block for block in report.blocks if block.summed is not None] == []


async def test_tensors_that_have_moved_are_found() -> None:
    state = {f"{number}": torch.full((3,), number, dtype=torch.float32) for number in range(5)}
    async with ckpipe.Pipeline("copying://moved") as pipeline:
        for step in range(3):
            state["2"] = state["2"] + 10
            state["4"].fill_(step)
            await pipeline.save(state, step=step, until="committed")
            result = await pipeline.load(step=step)
            assert result is not None
            assert all(torch.equal(result.state[name], each) for name, each in state.items())


async def test_shared_memory_is_copied_as_it_lies() -> None:
    memory = torch.arange(100.0)
    image, _ = await saved({"even": memory[::2], "odd": memory[1::2], "some": memory[10:20]})
    assert image.endswith(memory.numpy().tobytes())


async def test_group_under_a_conjugate_view_is_copied_as_it_lies() -> None:
    memory = torch.complex(torch.arange(6.0), torch.arange(6.0) + 1)
    image, _ = await saved({"all": memory.conj(), "part": memory[1:3]})
    assert image.endswith(memory.numpy().tobytes())


async def test_bytes_that_no_tensor_has_are_zeros() -> None:
    memory = torch.full((8,), 255, dtype=torch.uint8)
    image, _ = await saved({"bytes": memory[1:7], "float": memory.view(torch.float32)[1:]})
    assert image.endswith(b"\0" + b"\xff" * 7)


def test_data_file_opens_with_safetensors(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path / "run") as pipeline:
        pipeline.save(small_state(), step=1, until="committed")
    (path,) = (tmp_path / "run").glob("step-*/rank-00000.safetensors")
    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "ckpipe": "1"}
        for key in ("turned", "half", "scalar", "empty"):
            assert torch.equal(file.get_tensor(key), small_state()[key])
