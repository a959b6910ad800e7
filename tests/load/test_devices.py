"""``device=``: where the tensors of a fresh state are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpipe
from ckpipe.errors import UsageError
from ckpipe.testing import MemoryBackend
from tests.support.one_checkpoint import save_one
from tests.support.stored_states import load, store


async def test_on_meta_nothing_is_read() -> None:
    backend, module = MemoryBackend(), nn.Linear(2000, 300)
    z = torch.tensor([1 + 2j])
    state = {"m": module, "tied": module.weight, "z": z, "c": z.conj(), "a": np.ones(3), "n": 2}
    await store(state, backend)
    result = await load(backend, device="meta")
    made = result.state
    assert made["m"]["weight"].is_meta
    assert made["m"]["weight"].shape == (300, 2000)
    assert made["tied"].is_meta
    assert made["c"].is_meta
    assert made["n"] == 2
    assert np.array_equal(made["a"], np.ones(3))
    assert result.report is not None
    assert result.report.bytes < 1000


async def test_devices_that_are_not_here_or_not_needed_are_refused() -> None:
    backend = MemoryBackend()
    await store({"a": torch.ones(2)}, backend)
    wrong: list[Any] = ["nowhere", "cuda:77", 3.5]
    for device in wrong:
        with pytest.raises(UsageError, match="no device"):
            await load(backend, device=device)
    with pytest.raises(UsageError, match="fresh state"):
        await load(backend, {"a": torch.zeros(2)}, device="cpu")


def test_a_load_of_a_folder_takes_a_device(tmp_path: Path) -> None:
    save_one(tmp_path, {"a": torch.ones(2)}, step=1)
    for given in ("cpu", torch.device("cpu"), None):
        assert ckpipe.load(tmp_path, device=given).state["a"].tolist() == [1, 1]
