"""``strict="shapes"``: tensors that have another shape in the checkpoint stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from ckpipe.distributed import training_state
from ckpipe.errors import DtypeMismatch, ShapeMismatch, StructureMismatch, UsageError
from ckpipe.testing import MemoryBackend
from tests.inner.made_up_ranks import load_as, request, store_ranks
from tests.support.placed_tensors import placed, rank_of
from tests.support.stored_states import load, store


class Net(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, classes)


def trained(classes: int) -> tuple[Net, torch.optim.Optimizer]:
    net = Net(classes)
    optimizer = torch.optim.AdamW(net.parameters())
    net.head(net.body(torch.randn(3, 4))).sum().backward()
    optimizer.step()
    return net, optimizer


@pytest.mark.parametrize("form", [lambda net: net, training_state, lambda net: net.state_dict()])
async def test_a_new_head_stays_and_is_named(form: Any) -> None:
    backend, saved, target = MemoryBackend(), Net(10), Net(3)
    await store({"net": form(saved), "step": 2}, backend)
    head = [target.head.weight.clone(), target.head.bias.clone()]
    into = {"net": form(target), "step": 0}
    with pytest.raises(ShapeMismatch):
        await load(backend, into)
    result = await load(backend, into, strict="shapes")
    assert torch.equal(target.body.weight, saved.body.weight)
    assert torch.equal(target.head.weight, head[0])
    assert torch.equal(target.head.bias, head[1])
    assert result.state["step"] == 2
    names = sorted(label.rpartition("head.")[2] for label in result.missing)
    assert names == ["bias", "weight"]
    assert all("head." in label for label in result.missing)


async def test_names_and_dtypes_must_fit_all_the_same() -> None:
    backend = MemoryBackend()
    await store({"a": torch.ones(2), "b": torch.ones(3)}, backend)
    with pytest.raises(StructureMismatch):
        await load(backend, {"a": torch.zeros(3)}, strict="shapes")
    with pytest.raises(DtypeMismatch):
        await load(backend, {"a": torch.zeros(2).half(), "b": torch.zeros(2)}, strict="shapes")
    with pytest.raises(UsageError, match="strict"):
        await load(backend, {"a": torch.zeros(3)}, strict="shape")


async def test_an_optimizer_refuses_moments_of_another_shape() -> None:
    backend = MemoryBackend()
    await store(training_state(*trained(10)), backend)
    net, optimizer = trained(3)
    before = net.body.weight.clone()
    with pytest.raises(ShapeMismatch, match="optimizer"):
        await load(backend, training_state(net, optimizer), strict="shapes")
    assert torch.equal(net.body.weight, before)


async def test_a_sharded_target_is_compared_by_its_global_shape() -> None:
    backend = MemoryBackend()
    document = await store_ranks(backend, [{"w": torch.ones(4, 2), "v": torch.ones(4)}])
    with rank_of(1, 2):
        target: dict[str, Any] = {
            "w": placed(torch.zeros(6, 2), (2,), (Shard(0),)),
            "v": placed(torch.zeros(4), (2,), (Shard(0),)),
        }
        result = await load_as(backend, document, 1, 2, request(target, strict="shapes"))
        assert result.missing == ("w",)
        assert not target["w"].to_local().any()
        assert target["v"].to_local().tolist() == [1, 1]
