"""Wrapper tensors of torchao: each class that can be made on a CPU, and its low-bit optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe.distributed import training_state
from tests.support.wrapper_tensors import equal, inner_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    import torchao.optim as low_bit
    import torchao.quantization as quantization
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """The optimizers compile their steps, which takes minutes."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def quantised(config: str, seed: int) -> Any:
    torch.manual_seed(seed)
    if config == "nf4":
        model = torch.nn.Linear(256, 256, bias=False)
        weight = to_nf4(model.weight.detach(), block_size=64, scaler_block_size=256)
        model.weight = torch.nn.Parameter(weight, requires_grad=False)
        return model
    model = torch.nn.Linear(128, 128, bias=False).bfloat16()
    quantization.quantize_(model, getattr(quantization, config)())
    return model


@pytest.mark.parametrize(
    "config",
    [
        "Int8WeightOnlyConfig",
        "Float8WeightOnlyConfig",
        "IntxWeightOnlyConfig",
        "Int8DynamicActivationInt8WeightConfig",
        "Int8DynamicActivationIntxWeightConfig",
        "nf4",
    ],
)
@pytest.mark.parametrize("wrap", [lambda model: model, training_state])
def test_quantised_weights(tmp_path: Path, config: str, wrap: Callable[[Any], Any]) -> None:
    model = quantised(config, 0)
    with ckpipe.SyncPipeline(str(tmp_path)) as pipeline:
        pipeline.save({"model": wrap(model)}, step=1).wait()
        fresh = pipeline.load()
        other = quantised(config, 1)
        weight, inner = other.weight, inner_of(other.weight)
        pipeline.load({"model": wrap(other)})
    assert fresh is not None
    found = fresh.state["model"]
    assert equal(found.get("model", found)["weight"], model.weight)
    assert other.weight is weight
    assert all(mine is inner[name] for name, mine in inner_of(other.weight).items())
    assert equal(other.weight, model.weight)


def trained(kind: str, steps: range) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = getattr(low_bit, kind)(model.parameters(), lr=1e-2)
    train(model, optimizer, steps)
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("steps", [range(0), range(7, 8)])
def test_low_bit_optimizers_go_on_to_the_bit(
    tmp_path: Path, kind: str, named: bool, steps: range
) -> None:
    def state(model: Any, optimizer: Any) -> dict[str, Any]:
        if named:
            return {"train": training_state(model, optimizer)}
        return {"model": model, "optimizer": optimizer}

    model, optimizer = trained(kind, range(3))
    with ckpipe.SyncPipeline(str(tmp_path), guard=optimizer) as pipeline:
        pipeline.save(state(model, optimizer), step=3, until="captured")
        train(model, optimizer, range(3, 5))
    other, resumed = trained(kind, steps)
    result = ckpipe.load(tmp_path, state(other, resumed))
    assert (result.missing, result.unexpected) == ((), ())
    train(other, resumed, range(3, 5))
    assert torch.equal(other.weight, model.weight)
    for name, value in optimizer.state[model.weight].items():
        mine = resumed.state[other.weight][name]
        assert equal(mine, value) if name != "step" else torch.equal(mine, value)
