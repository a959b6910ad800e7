"""Runs of a plain loop with accelerate in processes of their own, which a case may kill.

As a script this is a process that has imported accelerate and forks the ranks of each case.
"""

from __future__ import annotations

import logging
import os
import pkgutil
import random
import shutil
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # the first optimizer imports it
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckpipe
from ckpipe.errors import CheckpointNotFound, UsageError
from ckpipe.integrations.accelerate import attach
from ckpipe.integrations.pointers import read_pointer
from tests.support.fork_server import Case, serve
from tests.support.killed_runs import die, mortal_backend

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
    """A model with dropout, its optimizer, a schedule and a shuffled loader under accelerate."""

    def __init__(self, case: Case, *, attached: bool = True) -> None:
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        self.case, self.out = case, case["out"]
        naming = case.get("naming", True)
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            dataloader_config=DataLoaderConfiguration(
                use_seedable_sampler=True, use_stateful_dataloader=case.get("stateful", True)
            ),
            project_config=ProjectConfiguration(
                project_dir=self.out, automatic_checkpoint_naming=naming, **case.get("project", {})
            ),
        )
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        samples = TensorDataset(torch.arange(40.0).view(40, 1) * torch.ones(4))
        loader = DataLoader(samples, batch_size=2, shuffle=True)
        prepared = self.accelerator.prepare(model, optimizer, schedule, loader)
        self.model, self.optimizer, self.schedule, self.loader = prepared
        self.average = Average()
        self.seen: list[list[float]] = []
        self.losses: list[float] = []
        self.accelerator.register_for_checkpointing(self.average)
        self.batches = len(self.loader)
        self.pipeline = None
        if attached:
            url = case.get("url") or case["root"]
            self.pipeline = attach(self.accelerator, url, **case.get("settings", {}))

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


def train(case: Case) -> None:
    """Go on from the newest checkpoint to the end, and note all that it has come to."""
    if "url" in case:
        mortal_backend(case if case.get("at") else {"root": case["root"]})
    run = Run(case)
    chosen = run.accelerator.load_state()
    run.train(0 if chosen is None else chosen.step)
    rank = run.accelerator.process_index
    torch.save(run.outcome(), f"{case['out']}.result-{rank}")
    run.accelerator.end_training()


def of(case: Case, name: str, **more: Any) -> Case:
    folder = Path(case["out"]) / name
    folder.mkdir(parents=True)
    return {**case, "out": str(folder), "root": str(folder / "root"), **more}


def names(case: Case) -> list[str]:
    return sorted(path.name for path in Path(case["out"], "checkpoints").glob("*"))


def names_are_those_of_accelerate(case: Case) -> None:
    for limit in (None, 1, 2):
        found = []
        for attached in (False, True):
            one = of(case, f"{limit}-{attached}", project={"total_limit": limit})
            run = Run(one, attached=attached)
            for _ in range(4):
                run.accelerator.save_state()
            run.accelerator.end_training()
            found.append(names(one))
        assert found[0] == found[1], (limit, found)
        with ckpipe.SyncPipeline(one["root"], read_only=True) as pipeline:
            complete = {info.id for info in pipeline.steps() if info.complete}
        pointers = [read_pointer(Path(one["out"], "checkpoints", name)) for name in found[1]]
        assert complete == {each.id for each in pointers if each is not None}
        again = Run(one)  # accelerate alone would meet a name that is there
        assert again.accelerator.load_state() is not None
        again.accelerator.save_state()
        assert again.accelerator.save_iteration == 5
        again.accelerator.end_training()


def names_are_loaded(case: Case) -> None:
    one = of(case, "one", naming=False)
    run = Run(one)
    weights = []
    for name in ("a", "b", "a"):
        run.train(0, 2)
        run.accelerator.save_state(str(Path(one["out"], name)))
        weights.append([each.clone() for each in run.model.parameters()])
    run.accelerator.save_state()  # without a name
    run.accelerator.end_training()
    again = Run(one)
    for name, expected in (("b", weights[1]), ("a", weights[2])):
        for where in (Path(one["out"]), Path("/of/another/machine")):
            assert again.accelerator.load_state(str(where / name)) is not None
            assert all(map(torch.equal, again.model.parameters(), expected))
    with pytest.raises(CheckpointNotFound, match="'c'"):
        again.accelerator.load_state("c")
    again.accelerator.end_training()
    # A folder that accelerate wrote by itself is loaded as ever.
    plain = Run(one, attached=False)
    plain.train(0, 2)
    plain.accelerator.save_state(str(Path(one["out"], "plain")))
    mixed = Run(one)
    mixed.accelerator.load_state(str(Path(one["out"], "plain")))
    assert all(map(torch.equal, mixed.model.parameters(), plain.model.parameters()))
    mixed.accelerator.end_training()


def hooks_are_called(case: Case) -> None:
    def write(models: list[Any], weights: list[Any], folder: str) -> None:
        Path(folder, "mine.txt").write_text(f"{len(models)} {len(weights)}")
        weights.pop()

    def read(models: list[Any], folder: str) -> None:
        assert Path(folder, "mine.txt").read_text() == "1 1"
        models.pop()

    one = of(case, "one")
    run = Run(one)
    run.accelerator.register_save_state_pre_hook(write)
    run.accelerator.register_load_state_pre_hook(read)
    run.train(0, 4)
    folder = str(Path(one["out"], "checkpoints", "checkpoint_0"))
    before = [each.clone() for each in run.model.parameters()]
    run.train(4, 6)
    after = [each.clone() for each in run.model.parameters()]
    run.accelerator.load_state(folder)
    assert all(map(torch.equal, run.model.parameters(), after))
    assert not all(map(torch.equal, after, before))
    assert run.average.count == 4
    run.accelerator.end_training()
    assert "model" not in ckpipe.load(one["root"]).state["training"]
    unnamed = Run(of(case, "unnamed", naming=False))
    unnamed.accelerator.register_save_state_pre_hook(write)
    with pytest.raises(UsageError, match="write into a folder"):
        unnamed.accelerator.save_state()
    unnamed.accelerator.end_training()


def lost_gradients_are_told(case: Case) -> None:
    one, said = of(case, "one"), []
    run = Run(one)
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpipe").addHandler(handler)
    run.train(0, 2)
    run.accelerator.save_state()
    assert said == []
    run.train(2, 3)
    run.accelerator.save_state()
    assert "gradients" in said[0]
    run.accelerator.end_training()


def several_models_go_on(case: Case) -> None:
    def new() -> tuple[Any, list[Any]]:
        torch.manual_seed(3)
        accelerator = Accelerator(cpu=True)
        nets = [nn.Linear(3, 3), nn.Linear(3, 3)]
        optimizers = [torch.optim.Adam(net.parameters()) for net in nets]
        prepared = list(accelerator.prepare(*nets, *optimizers))
        attach(accelerator, case["root"])
        return accelerator, prepared

    def step(parts: list[Any]) -> list[torch.Tensor]:
        for net, optimizer in zip(parts[:2], parts[2:], strict=True):
            optimizer.zero_grad()
            net(torch.ones(3)).square().sum().backward()
            optimizer.step()
        return [each.detach().clone() for net in parts[:2] for each in net.parameters()]

    accelerator, parts = new()
    step(parts)
    accelerator.save_state()
    accelerator.end_training()
    expected = step(parts)
    again, others = new()
    assert again.load_state() is not None
    assert all(map(torch.equal, step(others), expected))
    again.end_training()


def resume_obeys_its_setting(case: Case) -> None:
    one = of(case, "one", settings={"resume": "must"})
    run = Run(one)
    with pytest.raises(CheckpointNotFound, match="no complete checkpoint"):
        run.accelerator.load_state()
    run.accelerator.end_training()
    one["settings"] = {}
    run = Run(one)
    assert run.accelerator.load_state() is None
    run.train(0, 4)
    run.accelerator.end_training()
    assert run.pipeline is not None
    assert "closed" in repr(run.pipeline)
    shutil.rmtree(Path(one["out"], "checkpoints"))
    again = Run({**one, "settings": {"resume": "must"}})
    chosen = again.accelerator.load_state()
    assert chosen is not None
    assert chosen.step == 4
    again.accelerator.end_training()
    with pytest.raises(UsageError, match="no initial"):
        Run({**one, "settings": {"initial": "/weights"}})


def _live(case: Case, rank: int, number: int) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # by torchdata
    torch.set_num_threads(1)
    size = case["ranks"]
    if size > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
        os.environ.update(LOCAL_WORLD_SIZE=str(size), OMP_NUM_THREADS="1")
        store = dist.FileStore(f"{case['out']}.store-{number}", size)  # type: ignore[attr-defined]
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300)
        )
        dist.barrier()  # a rank that leaves earlier breaks the connecting of the others
    found = vars(sys.modules[__name__]).get(case["do"])
    (found or pkgutil.resolve_name(case["do"]))(case)


if __name__ == "__main__":
    serve(_live)
