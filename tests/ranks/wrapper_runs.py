"""Ranks that train with tensors of torchao: cases for :mod:`tests.support.rank_processes`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ckpipe
from ckpipe import errors
from ckpipe.distributed import training_state
from tests.support.fork_server import Case
from tests.support.pipelines import load_existing
from tests.support.rank_processes import SETTINGS, tell
from tests.support.wrapper_tensors import inner_of
from tests.support.wrapper_tensors import same_bytes as same

Trainer = tuple[nn.Module, torch.optim.Optimizer]


class Quantised(nn.Module):
    """A frozen NF4 weight with a trained layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        weight = to_nf4(torch.randn(64, 64), block_size=64, scaler_block_size=64)
        self.frozen = nn.Parameter(weight, requires_grad=False)
        self.trained = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frozen: Any = self.frozen
        trained: torch.Tensor = self.trained(x @ frozen.get_original_weight())
        return trained


def low_bit(kind: str, model: nn.Module) -> Trainer:
    import torchao.optim

    return model, getattr(torchao.optim, kind)(model.parameters(), lr=1e-2)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))


def shard(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def float8() -> nn.Module:
    """A model whose weights are gathered as float8; with their biases, as gloo has no float8."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    return convert_to_float8_training(net(), config=config)  # type: ignore[no-any-return]


def _adam(model: nn.Module) -> Trainer:
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


TRAINERS: dict[str, Callable[[], Trainer]] = {
    "float8": lambda: _adam(shard(float8())),
    "fsdp 8 bit": lambda: low_bit("AdamW8bit", shard(net())),
    "fsdp 4 bit": lambda: low_bit("AdamW4bit", shard(net())),
    "ddp 8 bit": lambda: low_bit("AdamW8bit", DistributedDataParallel(net())),
    "ddp frozen": lambda: _adam(DistributedDataParallel(Quantised())),
}


def made(kind: str, seed: int) -> Trainer:
    torch.manual_seed(seed)
    return TRAINERS[kind]()


def step(trainer: Trainer, number: int) -> float:
    model, optimizer = trainer
    torch.manual_seed(number)
    loss = model(torch.randn(8, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if hasattr(model, "unshard") and "Float8" in type(next(model.children())).__name__:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)
    return float(loss)


def moments(trainer: Trainer) -> list[Any]:
    """The state of the weights of a trainer, as local tensors."""
    model, optimizer = trainer
    weights = [each for each in model.parameters() if each.ndim == 2 and each.requires_grad]
    found = [optimizer.state[each][key] for each in weights for key in ("exp_avg", "exp_avg_sq")]
    return [getattr(each, "_local_tensor", each) for each in found]


def prepared() -> None:
    warnings.simplefilter("ignore")  # torchao has many
    torch.compiler.set_stance("force_eager")
    import torchao.optim

    def cut(name: str, dim: int) -> int | None:
        assert dim == 0
        return None if name == "qmap" else 0

    # Blocks are along the rows, and the context of the four-bit state has its shape.
    ckpipe.register_wrapper(
        torchao.optim.subclass_4bit.OptimState4bit,
        cut=cut,
        resize=lambda context, size: [context[0], size, context[2]],
    )


def go_on(case: Case) -> None:
    """Train, save, load into a trainer that has stepped, or is new, and train both on."""
    prepared()
    for kind in TRAINERS:
        trainer = made(kind, 0)
        for number in range(2):
            step(trainer, number)
        root = f"{case['root']}-{kind}"
        with ckpipe.SyncPipeline(root, **SETTINGS) as pipeline:
            handle = pipeline.save({"t": training_state(*trainer)}, step=1)
            handle.wait_complete(timeout=300)
            others = {"new": made(kind, 5), "stepped": made(kind, 6)}
            step(others["stepped"], 7)
            if kind == "float8":
                del others["new"]  # it has no scale yet
            for other in others.values():
                result = load_existing(pipeline, {"t": training_state(*other)})
                assert all("frozen" in each for each in result.missing), result.missing
        saved = [[each.clone() for each in inner_of(m).values()] for m in moments(trainer)]
        if kind == "fsdp 4 bit":
            local = [each.dequantize() for each in moments(others["new"])]
            whole = [[torch.empty_like(part) for _ in range(case["ranks"])] for part in local]
            for parts, part in zip(whole, local, strict=True):
                dist.all_gather(parts, part)
            if dist.get_rank() == 0:
                torch.save([torch.cat(parts) for parts in whole], case["moments"])
        losses = [step(trainer, 9), step(trainer, 10)]
        for name, other in others.items():
            for moment, inner in zip(moments(other), saved, strict=True):
                assert all(map(same, inner_of(moment).values(), inner)), (kind, name)
            assert [step(other, 9), step(other, 10)] == losses, (kind, name)
    tell(case, done=True)


def another_world(case: Case) -> None:
    """Load what two ranks have saved: resharded if the class is registered, else refused."""
    prepared()
    trainer = made("fsdp 4 bit", 3)
    with ckpipe.SyncPipeline(f"{case['saved']}-fsdp 4 bit", **SETTINGS) as pipeline:
        assert pipeline.load({"t": training_state(*trainer)}) is not None
    expected = torch.load(case["moments"])
    for moment, each in zip(moments(trainer), expected, strict=True):
        assert torch.equal(moment.dequantize(), each)
    other = made("fsdp 8 bit", 3)
    before = [each.clone() for each in moments_of_none(other)]
    with ckpipe.SyncPipeline(f"{case['saved']}-fsdp 8 bit", **SETTINGS) as pipeline:
        try:
            pipeline.load({"t": training_state(*other)})
        except errors.StructureMismatch as error:
            tell(case, refused=error.key)
    assert all(map(torch.equal, moments_of_none(other), before))


def moments_of_none(trainer: Trainer) -> list[torch.Tensor]:
    """The parameters of a trainer that has not stepped, as local tensors."""
    assert not trainer[1].state
    return [each.detach().to_local() for each in trainer[0].parameters()]  # type: ignore[attr-defined]
