"""Loads into tensors on a GPU, and runs that go on from them to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpipe
import ckpipe.distributed
from tests.support.pipelines import Stores, load_existing, loaded_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LONG = 1_000_000_000
"""Cycles of a kernel that runs for about half a second."""


def busy() -> None:
    """Queue a long kernel on the current stream; nothing waits for it here."""
    torch.cuda._sleep(LONG)  # type: ignore[no-untyped-call]


def other_stream() -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return stream


@pytest.mark.parametrize("blocks", [True, False], ids=["blocking stream", "other stream"])
def test_a_load_comes_after_what_was_queued_and_before_what_follows(
    store: Stores, blocks: bool
) -> None:
    saved, target = torch.full((1 << 20,), 3.0), torch.zeros(1 << 20, device="cuda")
    stream = torch.cuda.default_stream() if blocks else other_stream()
    with ckpipe.SyncPipeline(store.url) as pipeline:
        pipeline.save({"tensor": saved}, step=0, until="committed")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            busy()
            before = target.fill_(7).clone()
            pipeline.load({"tensor": target})
            after = target.clone()
        torch.cuda.synchronize()
    for low_or_high in (torch.min, torch.max):
        assert [float(low_or_high(each)) for each in (before, after, target)] == [7.0, 3.0, 3.0]


@pytest.mark.parametrize("to", ["cpu", "cuda"])
@pytest.mark.parametrize("of", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_tensors_go_from_any_device_to_any(
    store: Stores, of: str, to: str, dtype: torch.dtype
) -> None:
    values = torch.randn(300, 70)
    state = {"plain": values.to(of, dtype), "turned": values.to(of, dtype).t()}
    with ckpipe.SyncPipeline(store.url) as pipeline:
        pipeline.save(state, step=0, until="committed")
        target = {
            name: torch.zeros(each.shape, device=to).to(dtype) for name, each in state.items()
        }
        pipeline.load(target)
        fresh = loaded_state(pipeline, 0)
    for name, each in state.items():
        assert target[name].device.type == to
        assert torch.equal(target[name].cpu().float(), each.cpu().float())
        assert fresh[name].is_cpu
        assert torch.equal(fresh[name].float(), each.cpu().float())


class Fresh:
    """An object whose state is made by each call, on the device."""

    def __init__(self) -> None:
        self.base = torch.arange(1 << 22, device="cuda")

    def state_dict(self) -> dict[str, Any]:
        return {"doubled": self.base * 2}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base = state["doubled"] // 2


@pytest.mark.parametrize("until", ["staged", "captured"])
def test_memory_that_only_the_save_holds_is_not_used_again_too_early(
    store: Stores, until: Any
) -> None:
    fresh, parameter = Fresh(), nn.Parameter(torch.zeros(10, device="cuda"))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with ckpipe.SyncPipeline(store.url, guard=optimizer) as pipeline:
        for number in range(3):
            busy()
            handle = pipeline.save({"fresh": fresh, "p": parameter}, step=number, until=until)
            rubbish = [torch.full((1 << 22,), -1, device="cuda") for _ in range(4)]
            handle.wait()
            del rubbish
            found = loaded_state(pipeline, number)["fresh"]["doubled"]
            assert torch.equal(found, 2 * torch.arange(1 << 22))


class Run:
    """A run whose next step depends on every part of its state.

    Args:
        seed: The seed of its weights and of its generators.
        options: Options of AdamW.
    """

    def __init__(self, seed: int, **options: Any) -> None:
        torch.manual_seed(seed)
        layers = [nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.2), nn.Linear(256, 64)]
        self.model = nn.Sequential(*layers).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, **options)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.scaler = torch.amp.GradScaler("cuda", growth_interval=2)
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "scaler": self.scaler,
            "random": ckpipe.RngState(),
        }

    def steps(self, count: int) -> list[float]:
        """Take steps; return their losses."""
        losses = []
        for _ in range(count):
            inputs = torch.randn(32, 64, device="cuda")
            with torch.autocast("cuda", torch.float16):
                loss = (self.model(inputs) - inputs).square().mean()
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.schedule.step()
            losses.append(loss.item())
        return losses


OPTIONS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
    "amsgrad": {"amsgrad": True, "foreach": False},
}


@pytest.mark.parametrize("worker", ["thread", "process"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_run_goes_on_to_the_bit(tmp_path: Path, options: str, worker: Any) -> None:
    run = Run(1, **OPTIONS[options])
    with ckpipe.SyncPipeline(tmp_path, guard=run.optimizer, worker=worker) as pipeline:
        run.steps(3)
        handle = pipeline.save(run.state, step=3, until="captured")
        expected = run.steps(4)
        handle.wait()
    again = Run(2, **OPTIONS[options])
    again.steps(1)
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        assert load_existing(pipeline, again.state).step == 3
    assert again.steps(4) == expected
    for one, other in zip(run.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_sharded_parameters_go_on_to_the_bit(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "ranks"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        runs = [Run(seed, fused=True) for seed in (1, 2)]
        for each in runs:
            fully_shard(each.model, mesh=mesh)
            each.optimizer = torch.optim.AdamW(each.model.parameters(), lr=1e-2, fused=True)
            each.schedule = torch.optim.lr_scheduler.ExponentialLR(each.optimizer, 0.9)
        run, again = runs
        states = [
            {
                "train": ckpipe.distributed.training_state(each.model, each.optimizer),
                "scaler": each.scaler,
            }
            | {"schedule": each.schedule, "random": ckpipe.RngState()}
            for each in runs
        ]
        torch.manual_seed(5)
        run.steps(3)
        with ckpipe.SyncPipeline(tmp_path / "run", guard=run.optimizer) as pipeline:
            handle = pipeline.save(states[0], step=3, until="captured")
            expected = run.steps(4)
            handle.wait()
            again.steps(1)
            pipeline.load(states[1], step=3)
        assert again.steps(4) == expected
    finally:
        dist.destroy_process_group()
