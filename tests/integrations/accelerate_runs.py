"""A plain loop with accelerate, which a case may kill."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # the first optimizer imports it
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckpipe.integrations.accelerate import attach
from tests.support.fork_server import Case
from tests.support.killed_runs import die

EPOCHS, SAVE_STEPS = 3, 4


class Average:
    """A registered object: the mean of the losses."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sum, self.count = state["sum"], state["count"]


class Run:
    """A model with dropout, its optimizer, a schedule and a shuffled loader under accelerate.

    The end of a block is the end of its training.
    """

    def __init__(self, case: Case, *, attached: bool = True) -> None:
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        self.case, self.out = case, case["out"]
        naming = case.get("naming", True)
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=case.get("accumulated", 2),
            dataloader_config=DataLoaderConfiguration(
                use_seedable_sampler=case.get("seedable", True),
                use_stateful_dataloader=case.get("stateful", True),
            ),
            project_config=ProjectConfiguration(
                project_dir=self.out, automatic_checkpoint_naming=naming, **case.get("project", {})
            ),
        )
        if case.get("scaler"):  # as with mixed precision on a GPU
            self.accelerator.scaler = torch.amp.GradScaler("cpu", growth_interval=3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        samples = TensorDataset(torch.arange(40.0).view(40, 1) * torch.ones(4))
        order = {"shuffle": True, **case.get("loader", {})}
        loader = DataLoader(samples, batch_size=case.get("batch", 2), **order)
        prepared = self.accelerator.prepare(model, optimizer, schedule, loader)
        self.model, self.optimizer, self.schedule, self.loader = prepared
        others = DataLoader(samples, batch_size=4, **{"shuffle": True, **case.get("others", {})})
        self.others = self.accelerator.prepare(others)
        self.average = Average()
        self.seen: list[list[float]] = []
        self.losses: list[float] = []
        self.accelerator.register_for_checkpointing(self.average)
        self.batches = len(self.loader)
        self.pipeline = None
        if attached:
            url = case.get("url") or case["root"]
            self.pipeline = attach(self.accelerator, url, **case.get("settings", {}))

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.accelerator.end_training()

    def train(self, first: int = 0, last: int | None = None) -> None:
        """Take the steps from one to another, and save now and then."""
        last = EPOCHS * self.batches if last is None else last
        step = first
        while step < last:
            epoch, done = divmod(step, self.batches)
            self.loader.set_epoch(epoch)
            loader = self.loader
            if done and not self.case.get("stateful", True):
                loader = self.accelerator.skip_first_batches(loader, done)
            for (inputs,) in loader:
                self.step(inputs)
                step += 1
                if step % SAVE_STEPS == 0:
                    self.accelerator.save_state(**self.case.get("save", {}), step=step)
                    self.end_here(step, just_saved=True)
                self.end_here(step)
                if step == last:
                    return

    def evaluate(self) -> None:
        """Draw numbers, as an evaluation does."""
        self.model.eval()
        with torch.no_grad():
            for (inputs,) in self.others:
                self.model(inputs + torch.rand(1))
        self.model.train()

    def step(self, inputs: torch.Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            loss = (self.model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        self.average.sum += loss.item()
        self.average.count += 1
        self.seen.append(inputs[:, 0].tolist())
        self.losses.append(loss.item())

    def end_here(self, step: int, *, just_saved: bool = False) -> None:
        """Kill the process where the case says so; between steps, once the last save has ended."""
        if self.case.get("dies") != step or self.case.get("just_saved", False) != just_saved:
            return
        name = f"checkpoint_{step // SAVE_STEPS - 1}"
        while not just_saved and not Path(self.out, "checkpoints", name).is_dir():
            os.sched_yield()
        if dist.is_initialized():
            dist.barrier()
        die()

    def outcome(self) -> dict[str, Any]:
        return {
            "weights": self.accelerator.unwrap_model(self.model).state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "average": self.average.state_dict(),
            "iteration": self.accelerator.save_iteration,
            "random": (torch.rand(1).item(), float(np.random.rand()), random.random()),
            "losses": self.losses,
            "seen": self.seen,
        }
