"""A loop in the order of torchtitan's Trainer, with its own parts, which a case may kill.

The trainer itself needs an accelerator.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from ckpipe.integrations.torchtitan import CkpipeCheckpointManager
from tests.integrations.trainer_ranks import whole
from tests.support.fork_server import Case
from tests.support.killed_runs import die

STEPS, INTERVAL = 20, 3


class Samples(IterableDataset[Any]):
    """Endless samples of a rank, which go on where a state says."""

    def __init__(self, rank: int) -> None:
        self.rank, self.count = rank, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.count += 1
            yield torch.full((4,), float(self.count % 7 + 10 * self.rank))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Adapter(BaseStateDictAdapter):
    """Gives each weight another name."""

    def __init__(self) -> None:
        self.fqn_to_index_mapping, self.hf_assets_path = None, None

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {f"hf.{name}": value for name, value in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("hf."): value for name, value in hf_state_dict.items()}

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        self.from_quantized = from_quantized
        return HuggingFaceStorageReader(path)


class Run:
    """The parts of a trainer that its checkpoint manager sees, and its loop."""

    def __init__(self, case: Case, kind: Any = CkpipeCheckpointManager) -> None:
        self.case, self.rank = case, dist.get_rank()
        self.step, self.ntokens_seen, self.adapter = 0, 0, Adapter()
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        config: Any = default_adamw(lr=0.05)
        config.implementation = "for-loop"
        self.optimizers = config.build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=5).build(
            optimizers=self.optimizers, training_steps=STEPS
        )
        samples = Samples(self.rank)
        self.loader = ParallelAwareDataloader(
            samples, self.rank, dist.get_world_size(), batch_size=2
        )
        torch.manual_seed(8 + self.rank)
        fields = {"interval": INTERVAL, "folder": "root", **case.get("fields", {})}
        if kind is CkpipeCheckpointManager:
            fields["settings"] = {"staging": {"block_bytes": 65536}, **case.get("settings", {})}
        self.checkpointer = kind.Config(enable=True, **fields).build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=self.adapter if case.get("adapter", True) else None,
            base_folder=os.path.dirname(case["root"]),
        )
        self.losses: list[float] = []
        self.seen: list[list[float]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    def train(self, steps: int, step: int = -1) -> bool:
        loaded: bool = self.checkpointer.load(step=step)
        batches = iter(self.loader)
        while self.step < steps:
            self.step += 1
            inputs = next(batches)
            self.ntokens_seen += inputs.numel()
            self.optimizers.zero_grad()
            loss = (self.model(inputs) - inputs.sum(1, keepdim=True) / 40).square().mean()
            loss.backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.seen.append(inputs[:, 0].tolist())
            self.losses.append(loss.item())
            self.checkpointer.save(self.step, last_step=self.step == steps)
            self.end_here()
        self.checkpointer.close()
        return loaded

    def end_here(self) -> None:
        if self.step == self.case.get("dies"):
            self.checkpointer.maybe_wait_for_saving()
            dist.barrier()
            die()

    def outcome(self) -> dict[str, Any]:
        return {
            "weights": whole(self.model.state_dict()),
            "optimizer": whole(self.optimizers.state_dict()),
            "schedule": self.schedulers.state_dict(),
            "counters": self.state_dict(),
            "random": torch.rand(1).item(),
            "losses": self.losses,
            "seen": self.seen,
        }
