"""Targets in memory that is mapped read-only: a write there ends the process with SIGSEGV."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

import ckpipe
from ckpipe.errors import StructureMismatch
from tests.support.pipelines import Stores

NUMBERS = np.arange(4000, dtype=np.float32)


def mapped(path: Path, mode: Literal["r", "r+", "c"]) -> torch.Tensor:
    return from_array(np.memmap(path, np.float32, mode))


def from_array(array: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given (NumPy array|buffer) is not writable")
        if isinstance(array, np.ndarray):
            return torch.from_numpy(array)
        return torch.frombuffer(array, dtype=torch.float32)


def read_only_buffer(path: Path) -> torch.Tensor:
    with open(path, "rb") as file:
        return from_array(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def read_only_pages(path: Path) -> torch.Tensor:
    return from_array(mmap.mmap(-1, NUMBERS.nbytes, prot=mmap.PROT_READ))


READ_ONLY: dict[str, Callable[[Path], torch.Tensor]] = {
    "array": lambda path: mapped(path, "r"),
    "buffer": read_only_buffer,
    "no file": read_only_pages,
    "part": lambda path: mapped(path, "r")[1500:2500],
    "turned": lambda path: mapped(path, "r").view(40, 100).t(),
    "tied": lambda path: mapped(path, "r").expand(2, 4000),
}

WRITABLE: dict[str, Callable[[Path], torch.Tensor]] = {
    "copy on write": lambda path: mapped(path, "c"),
    "shared": lambda path: mapped(path, "r+"),
    "torch, private": lambda path: torch.from_file(str(path), size=4000),
    "torch, shared": lambda path: torch.from_file(str(path), shared=True, size=4000),
    "other processes'": lambda path: torch.from_numpy(NUMBERS.copy()).share_memory_(),  # type: ignore[no-untyped-call]
    "an array's": lambda path: torch.from_numpy(NUMBERS.copy()),
    "empty": lambda path: mapped(path, "r")[:0],
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    NUMBERS.tofile(tmp_path / "numbers")
    return tmp_path / "numbers"


def contained(tensor: torch.Tensor, form: str) -> Any:
    if form == "parameter":
        return nn.ParameterDict({"inner": nn.Parameter(tensor)})
    return [{"inner": tensor}] if form == "nested" else tensor


@pytest.mark.parametrize(
    ("form", "cast"), [("plain", False), ("nested", True), ("parameter", False)]
)
@pytest.mark.parametrize("how", READ_ONLY)
def test_a_target_that_is_mapped_read_only_is_refused_untouched(
    store: Stores, path: Path, how: str, form: str, cast: bool
) -> None:
    target = READ_ONLY[how](path)
    saved = torch.ones_like(target, dtype=torch.float16 if cast else torch.float32)
    with ckpipe.SyncPipeline(store.url) as pipeline:
        before, after = torch.ones(3), torch.ones(5)
        state = {"before": before, "mapped": contained(saved, form), "after": after}
        pipeline.save(state, step=0).wait()
        into = {
            "before": torch.zeros(3),
            "mapped": contained(target, form),
            "after": torch.zeros(5),
        }
        with pytest.raises(StructureMismatch, match="read-only") as caught:
            pipeline.load(into, cast=cast)
        assert (caught.value.key or "").startswith("mapped")
        assert (caught.value.step, caught.value.rank) == (0, 0)
        assert ("numbers" in str(caught.value)) == (how != "no file")
        assert not into["before"].any()
        assert not into["after"].any()
        pipeline.load(into, exclude=["mapped*"])
        assert into["after"].all()
    assert np.array_equal(np.fromfile(path, np.float32), NUMBERS)


@pytest.mark.parametrize("how", WRITABLE)
def test_a_target_in_other_memory_than_torchs_is_filled(
    store: Stores, path: Path, how: str
) -> None:
    target = WRITABLE[how](path)
    with ckpipe.SyncPipeline(store.url) as pipeline:
        pipeline.save({"mapped": torch.full_like(target, 7.0)}, step=0).wait()
        pipeline.load({"mapped": target})
        assert torch.equal(target, torch.full_like(target, 7.0))


async def test_a_coroutine_is_told_too(store: Stores, path: Path) -> None:
    async with ckpipe.Pipeline(store.url) as pipeline:
        await (await pipeline.save({"mapped": torch.ones(4000)}, step=0))
        with pytest.raises(StructureMismatch, match="read-only"):
            await pipeline.load({"mapped": mapped(path, "r")})
