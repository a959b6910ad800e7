"""A small training with Lightning's Trainer, which a case may kill."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import lightning as pl
import numpy as np
import torch
import torch._dynamo  # the first optimizer imports it
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import ckpipe
from ckpipe.integrations.lightning import (
    CkpipeCallback,
    CkpipeCheckpointIO,
    CkpipeModelParallelStrategy,
    load_from_checkpoint,
)
from ckpipe.integrations.pointers import read_pointer
from ckpipe.testing import Operation, SlowBackend
from ckpipe_local import LocalBackend
from tests.support.fork_server import Case
from tests.support.killed_runs import die

T = TypeVar("T")
BATCHES, EPOCHS = 10, 3


class Module(pl.LightningModule):
    """A model with dropout that notes its samples and losses; its metric goes up and down."""

    def __init__(self, case: Case, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters("width")
        self.case = case
        self.net = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.3), nn.Linear(width, 1))
        self.register_buffer("step", torch.tensor(0))
        self.seen: list[list[float]] = []
        self.losses: list[float] = []

    def train_dataloader(self) -> Any:
        samples = TensorDataset(torch.arange(20.0 * self.case["ranks"]).view(-1, 1) * torch.ones(4))
        kind = torch.utils.data.DataLoader if self.case.get("plain") else StatefulDataLoader
        if self.case["ranks"] == 1:
            size = self.case.get("batch", getattr(self, "batch_size", 2))
            return kind(samples, batch_size=size, shuffle=True)
        # The order of the sampler that Lightning would put in place is lost at a resume.
        shards: Any = {"num_replicas": 1, "rank": 0} if self.case.get("tensor") else {}
        sampler: Any = DistributedSampler(samples, **shards)
        sampler.set_epoch(self.trainer.current_epoch)
        return kind(samples, batch_size=2, sampler=sampler)

    def configure_model(self) -> None:
        if self.case.get("tensor"):
            cuts = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], cuts)
        elif self.case.get("sharded"):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        (inputs,) = batch
        self.step.fill_(self.global_step + 1)
        loss: torch.Tensor = (self.net(inputs) - inputs.sum(1, keepdim=True) / 40).square().mean()
        self.seen.append(inputs[:, 0].tolist())
        self.losses.append(loss.item())
        self.log("score", torch.tensor(float(self.global_step * 7 % 5)))
        return loss

    def test_step(self, batch: list[torch.Tensor], number: int) -> None:
        self.net(batch[0])

    predict_step = test_step

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        self.net(batch[0])

    def val_dataloader(self) -> Any:
        return []

    def test_dataloader(self) -> Any:
        return self.train_dataloader()

    predict_dataloader = test_dataloader


class Dies(pl.Callback):
    """Ends the process before a step, or right after its save; SIGTERM only asks it to end."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
        step = trainer.global_step
        if step == self.case.get("dies"):
            last = Path(self.case["out"], "last.ckpt")
            while (
                (found := read_pointer(last)) is None
                or found.before is not None
                or found.step < self.case["saved"]
            ):
                os.sched_yield()
            trainer.strategy.barrier()
            die()
        if step == self.case.get("ends"):
            os.kill(os.getpid(), signal.SIGTERM)


def new_io(case: Case) -> CkpipeCheckpointIO:
    settings = {"staging": {"block_bytes": 65536}, **case.get("settings", {})}
    return CkpipeCheckpointIO(case.get("url") or case["root"], **settings)


def new_trainer(case: Case, **more: Any) -> pl.Trainer:
    """The trainer of a case."""
    names = {"every_n_train_steps": 3, "save_last": True, "monitor": "score", "save_top_k": 2}
    saves = [ModelCheckpoint(case["out"], "{step}", **{**names, **case.get("names", {})})]
    several = case["ranks"] > 1
    strategy: Any = "auto"
    if case.get("sharded"):
        strategy = CkpipeModelParallelStrategy(
            new_io(case), process_group_backend="gloo",
            data_parallel_size=1 if case.get("tensor") else 2,
            tensor_parallel_size=2 if case.get("tensor") else 1,
        )  # fmt: skip
    elif several:
        strategy = DDPStrategy(process_group_backend="gloo")
    plugins = [new_io(case)] if case.get("ckpipe", True) and not case.get("sharded") else []
    if several:
        plugins.append(TorchElasticEnvironment())
    return pl.Trainer(
        accelerator="cpu", devices=more.get("devices", case["ranks"]), plugins=plugins,
        strategy=more.get("strategy", strategy), max_steps=more.get("max_steps", -1),
        accumulate_grad_batches=more.get("together", 1),
        max_epochs=case.get("epochs", EPOCHS), default_root_dir=case["out"], logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[
            *more.get("callbacks", [CkpipeCallback()]), *more.get("saves", saves), Dies(case)
        ],
    )  # fmt: skip


def new_module(case: Case) -> Module:
    torch.manual_seed(7)
    module = Module(case)
    rank = int(os.environ.get("RANK", 0))
    torch.manual_seed(8 + rank)
    random.seed(8 + rank)
    np.random.seed(8 + rank)
    return module


def fit(case: Case) -> pl.Trainer:
    """Train from wherever the run is."""
    trainer, module = new_trainer(case), new_module(case)
    io: Any = trainer.strategy.checkpoint_io
    trainer.fit(module, ckpt_path=case.get("path") or io.newest())
    return trainer


def fit_anew(case: Case, **more: Any) -> pl.Trainer:
    trainer = new_trainer(case, **more)
    trainer.fit(new_module(case))
    return trainer


def commits(operation: Operation) -> bool:
    return operation.verb == "put" and operation.key.startswith("step-")


class Slow(SlowBackend):
    """A store that holds what commits a save, while it is told to."""

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        if commits(operation):
            return await super().around(operation, call)
        return await call()


def slow_store(case: Case) -> Slow:
    """Hold the commits of all pipelines by one store; each has a backend, whose uploads it ends."""
    store = Slow(LocalBackend(case["root"]))

    class Held(SlowBackend):
        async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
            return await store.around(operation, call)

    scheme = case["url"].partition(":")[0]
    ckpipe.register_backend(scheme, lambda url: Held(LocalBackend(case["root"])))
    return store


class HoldsSaves(pl.Callback):
    """Lets no save end before training does."""

    def __init__(self, case: Case) -> None:
        self.store = slow_store(case)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.store.hold()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.store.release()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.store.release()


def step_of(case: Case, path: str) -> int:
    return int(load_from_checkpoint(Module, path, case=case).step)
