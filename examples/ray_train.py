"""Train on two workers of Ray Train, kill one with SIGKILL, and compare with an undisturbed run.

    python examples/ray_train.py --folder /tmp/ray-runs

Ray restarts the workers, `load` takes the newest complete checkpoint, and both runs end with the
same weights, optimizer and losses, bit for bit. On a cluster, `--folder` is a folder that all nodes
share.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ckpipe
from ckpipe.distributed import training_state
from ckpipe.integrations.ray import load, report

EPOCHS, SAVE_EVERY = 3, 4


def train(config: dict[str, Any]) -> None:
    """Train this worker's share to the end, from the newest complete checkpoint if there is one."""
    torch.manual_seed(1)
    inputs = torch.randn(64, 8)
    samples = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    sampler: DistributedSampler[Any] = DistributedSampler(samples)
    data = ckpipe.Batches(DataLoader(samples, 4, sampler=sampler))
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.Linear(32, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(2 + dist.get_rank())
    losses = ckpipe.Progress(losses=[])
    state = {"training": training_state(model, optimizer), "losses": losses, "data": data}

    with ckpipe.SyncPipeline(config["checkpoints"], keep_last=3) as pipeline:
        restored = load(pipeline, state)
        step = restored.step if restored else 0
        for epoch in range(data.epoch, EPOCHS):
            data.set_epoch(epoch)
            for batch, targets in data:
                loss = (model(batch) - targets).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                losses.losses = [*losses.losses, loss.item()]
                if step % SAVE_EVERY == 0:
                    handle = pipeline.save(state, step=step)  # returns when copied
                    report(handle, {"loss": loss.item(), "resumed": restored is not None})
                last = dist.get_rank() == dist.get_world_size() - 1
                if last and step == config["die_at"] and restored is None:
                    os.kill(os.getpid(), signal.SIGKILL)


def run(folder: Path, die_at: int | None) -> Any:
    """Run the workers to the end, and return the state of the last checkpoint."""
    checkpoints = str(folder / "checkpoints")
    result = TorchTrainer(
        train,
        train_loop_config={"checkpoints": checkpoints, "die_at": die_at},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="ray", storage_path=str(folder), failure_config=FailureConfig(max_failures=3)
        ),
    ).fit()
    print(f"{folder.name}: {result.metrics}, registered as {result.checkpoint.path}")
    # Each worker has losses of its own: those of the first are compared.
    return ckpipe.load(checkpoints, include=["training*", "losses*"], per_rank="rank0").state


def same(one: Any, other: Any) -> bool:
    """Compare two states, bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--die-at", type=int, default=14, help="the step of the kill")
    arguments = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False)
    whole = run(arguments.folder.resolve() / "undisturbed", None)
    killed = run(arguments.folder.resolve() / "killed", arguments.die_at)
    if not same(whole, killed):
        raise SystemExit("The runs differ.")
    print(f"IDENTICAL to the last bit: {len(whole['losses']['losses'])} losses, and all weights.")
