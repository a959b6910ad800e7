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


def filled(wrapper: Any) -> Any:
    """Give the bytes of a wrapper values that are not those of another one."""
    for tensor in inner_of(wrapper).values():
        if tensor.dtype in (torch.uint8, torch.int8):
            tensor.copy_(torch.randint(0, 100, tensor.shape))
        elif tensor.dtype is torch.float32:
            tensor.copy_(torch.rand(tensor.shape) + 1)
    return wrapper


def block_sparse() -> Any:
    from torchao.sparsity.blocksparse import BlockSparseTensor

    return BlockSparseTensor.from_dense(torch.randn(64, 64), 16)


def float8_gathered() -> Any:
    from torchao.float8.float8_training_tensor import (
        Float8TrainingTensor,
        GemmInputRole,
        LinearMMConfig,
    )

    data, scale = torch.randn(16, 16).to(torch.float8_e4m3fn), torch.rand(())
    return Float8TrainingTensor(data, scale, torch.bfloat16, LinearMMConfig(), GemmInputRole.WEIGHT)


def float8_weight() -> Any:
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    return WeightWithDynamicFloat8CastTensor(
        torch.randn(16, 16), LinearMMConfig(), torch.float8_e4m3fn, torch.rand(()) + 1
    )


def int4_weight() -> Any:
    data, scale = torch.zeros(16, 64, dtype=torch.int8), torch.zeros(4, 16)
    size = torch.Size((16, 128))
    return quantization.Int4Tensor(data, scale, scale.clone(), [1, 32], size, None, torch.bfloat16)


def mx(bits: int) -> Any:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    dtype = torch.float8_e4m3fn if bits == 8 else torch.float4_e2m1fn_x2
    return MXTensor.to_mx(torch.randn(64, 64).bfloat16(), dtype, 32)


def nvfp4() -> Any:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    return NVFP4Tensor.to_nvfp4(torch.randn(64, 64).bfloat16())


OTHERS: dict[str, Callable[[], Any]] = {
    "8 bit": lambda: low_bit.subclass_8bit.OptimState8bit.zeros((64, 64)),
    "8 bit unsigned": lambda: low_bit.subclass_8bit.OptimState8bit.zeros((64, 64), signed=False),
    "4 bit": lambda: low_bit.subclass_4bit.OptimState4bit.zeros((64, 64)),
    "fp8": lambda: low_bit.subclass_fp8.OptimStateFp8.zeros((64, 64)),
    "block sparse": block_sparse,
    "float8 gathered": float8_gathered,
    "float8 weight with its scale": float8_weight,
    "int4": int4_weight,
    "mx 8": lambda: mx(8),
    "mx 4": lambda: mx(4),
    "nvfp4": nvfp4,
}


def test_other_classes(tmp_path: Path) -> None:
    for name, make in OTHERS.items():
        torch.manual_seed(0)
        saved, live = filled(make()), filled(make())
        inner = inner_of(live)
        frozen = torch.nn.Parameter(saved, requires_grad=False)
        vars(frozen).update(vars(saved))  # a float8 weight loses its scale on the way
        with ckpipe.SyncPipeline(str(tmp_path / name)) as pipeline:
            pipeline.save({"w": saved, "frozen": frozen}, step=1).wait()
            fresh = pipeline.load()
            pipeline.load({"w": live}, include=["w"])
        assert fresh is not None
        assert equal(fresh.state["w"], saved), name
        assert isinstance(fresh.state["frozen"], torch.nn.Parameter)
        assert equal(fresh.state["frozen"], frozen), name
        assert equal(live, saved), name
        assert all(mine is inner[path] for path, mine in inner_of(live).items()), name


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


@pytest.mark.sample(6)
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
    if named:
        copied, taken = trained(kind, steps)
        training_state(copied, taken).load_state_dict(training_state(model, optimizer).state_dict())
        for name, value in optimizer.state[model.weight].items():
            assert name == "step" or equal(taken.state[copied.weight][name], value)
    other, resumed = trained(kind, steps)
    result = ckpipe.load(tmp_path, state(other, resumed))
    assert (result.missing, result.unexpected) == ((), ())
    train(other, resumed, range(3, 5))
    assert torch.equal(other.weight, model.weight)
    for name, value in optimizer.state[model.weight].items():
        mine = resumed.state[other.weight][name]
        assert equal(mine, value) if name != "step" else torch.equal(mine, value)
