"""Runs over a data loader with workers that are preempted, each in a process group of its own.

The weight of its model is the number of steps, and so is the position in the data. So a checkpoint
shows by itself whether all of it is of one step.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import ckpipe
from tests.support.fork_server import Case, serve
from tests.support.killed_runs import note, notes

BATCHES = 6
STEP_SECONDS = 0.02


class Numbers(Dataset[Any]):
    """Numbers that take a while to make.

    Args:
        seconds: Seconds for each.
        root: The place of the run.
        dies: The batch at which the worker stops the trainer, and dies as for want of memory.
        starts: The number of workers that can be started before the trainer is stopped, and the
            next cannot; None for any number.
    """

    def __init__(
        self, seconds: float, root: str, dies: int | None, starts: int | None = None
    ) -> None:
        self.seconds, self.root, self.dies, self.starts = seconds, root, dies, starts

    def __getstate__(self) -> dict[str, Any]:
        if self.starts is not None:  # as for a fork server that the signal ended
            if not self.starts:
                os.kill(os.getpid(), signal.SIGTERM)
                raise ConnectionRefusedError
            self.starts -= 1
        return vars(self)

    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> float:
        time.sleep(self.seconds)
        if self.dies is not None and index == 2 * self.dies:
            while f"looked {self.dies}" not in notes(Path(self.root)):
                time.sleep(0.001)
            os.kill(os.getppid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGKILL)
        return float(index)


class Run:
    """The state of the run, and one step of it."""

    def __init__(self, case: Case) -> None:
        data_bound = case["bound"] == "data"
        self.seconds = 0.0 if data_bound else STEP_SECONDS
        loader: DataLoader[Any] = DataLoader(
            Numbers(
                STEP_SECONDS if data_bound else 0.0,
                place_of_notes(case),
                case.get("dies"),
                case.get("starts"),
            ),
            batch_size=2,
            num_workers=2 if case["method"] == "fork" else 1,  # others import torch
            persistent_workers=case["persistent"],
            multiprocessing_context=case["method"],
            worker_init_fn=tell_init if case.get("init") else None,
        )
        self.data = ckpipe.Batches(loader)
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        model = torch.nn.ParameterDict({"weight": self.weight})
        self.state = {"model": model, "optimizer": self.optimizer, "data": self.data}

    def train(self) -> None:
        self.weight.grad = torch.tensor(-1.0)
        self.optimizer.step()
        time.sleep(self.seconds)

    @property
    def position(self) -> int:
        return self.data.epoch * BATCHES + self.data.batch


def place_of_notes(case: Case) -> str:
    """The place of a rank's notes; that of the run if there is one rank."""
    return case["root"] if case.get("ranks", 1) == 1 else f"{case['root']}-{case['rank']}"


def tell_init(worker_id: int) -> None:
    """Note that the program's own function was called in the worker."""
    note(os.environ["NOTES"], f"worker {worker_id}")


class Notes(logging.Handler):
    """Notes the warnings of ckpipe.

    Args:
        root: The place of the run.
    """

    def __init__(self, root: str) -> None:
        super().__init__(logging.WARNING)
        self.root = root

    def emit(self, record: logging.LogRecord) -> None:
        note(self.root, f"{record.levelname} {record.getMessage()}")


HELD: list[Run] = []
"""Runs whose workers are alive when their program ends."""


def main(case: Case) -> None:
    """Train until the process is to be stopped; note each step before ``should_save`` is told."""
    run, root = Run(case), place_of_notes(case)
    HELD.extend([run] if case.get("held") else [])
    logging.getLogger("ckpipe").addHandler(Notes(root))
    with ckpipe.SyncPipeline(
        case["root"],
        guard=None if case.get("unguarded") else run.optimizer,
        save_every_steps=case.get("every", 1000),
        preemption={"enabled": True, "grace_seconds": case.get("grace")},
    ) as pipeline:
        restored = pipeline.load(run.state)
        step = restored.step if restored else 0
        while True:
            for _ in run.data:
                run.train()
                step += 1
                note(root, f"step {step}")
                if pipeline.should_save(step):
                    pipeline.save(run.state, step=step)
                if pipeline.preempted:
                    return
                note(root, f"looked {step}")  # from here on the loop asks for a batch


def live(case: Case, rank: int, number: int) -> None:
    """Run a case in a session of its own, as a program that ends in the ordinary way."""
    dies = case.get("dies")
    case = {**case, "rank": rank, "dies": dies[rank] if isinstance(dies, list) else dies}
    process = multiprocessing.get_context("fork").Process(target=begin, args=(case,))
    process.start()
    process.join()
    os._exit(abs(process.exitcode or 0))


def begin(case: Case) -> None:
    os.setsid()
    os.environ["NOTES"] = case["root"]
    if case["ranks"] > 1:
        store = dist.FileStore(f"{case['root']}.ranks", case["ranks"])  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=case["rank"], world_size=case["ranks"])
    note(place_of_notes(case), f"group {os.getpid()}")
    main(case)


if __name__ == "__main__":
    serve(live)
