"""Runs that die by SIGKILL at a chosen store operation or moment, in processes of their own.

As a script this is a process that has imported all there is to import and has one thread. For
every line of JSON on its standard input it forks a child that does what the line says, waits for
the child's end and answers with its wait status. So hundreds of real processes cost little.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch._dynamo  # the first optimizer imports it

import ckpipe
from ckpipe.errors import ObjectNotFound
from ckpipe.testing import FaultyBackend, Landing
from ckpipe.testing.wrappers import Operation
from ckpipe_local import LocalBackend
from tests.support.fork_server import serve

T = TypeVar("T")
URL = "mortal://store"
SAVES = 3
STAGING: dict[str, Any] = {"block_bytes": 65536}


def state_of(step: int) -> dict[str, Any]:
    """What a checkpoint of a step holds."""
    return {"step": step, "weight": torch.full((30_000,), float(step)), "tiny": torch.tensor(step)}


def note(root: str, line: str) -> None:
    """Append a line to the run's log, in one system call, so that a kill cannot tear it."""
    log = os.open(f"{root}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.write(log, f"{line}\n".encode())
    os.close(log)


def notes(root: Path) -> list[str]:
    """The lines of a run's log."""
    log = Path(f"{root}.log")
    return log.read_text().splitlines() if log.exists() else []


def die(*_: object) -> None:
    """End this process as a power switch would end its program."""
    os.kill(os.getpid(), signal.SIGKILL)


class Mortal(FaultyBackend):
    """Ends its process at an operation; after it also where that found nothing.

    Args:
        case: ``at`` or ``verb`` with ``nth`` name the operation, ``landing`` says before or after.
    """

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__(LocalBackend(case["root"]))
        self._last = case.get("at") if case.get("landing") == "after" else None
        if "at" in case:
            self.call(die, case["at"], Landing(case["landing"]))
        if "verb" in case:
            self.call(die, case["verb"], Landing(case["landing"]), nth=case["nth"])

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        try:
            return await super().around(operation, call)
        except ObjectNotFound:
            log = enumerate(self.operations, 1)
            if self._last == next(number for number, each in log if each is operation):
                die()
            raise


def mortal_backend(case: dict[str, Any]) -> Mortal:
    """Put the store of a case behind ``URL``; it kills the process at an operation."""
    faulty = Mortal(case)
    ckpipe.register_backend("mortal", lambda url: faulty)
    return faulty


def save_some(case: dict[str, Any]) -> None:
    """Go on from the newest checkpoint for some saves, and note each that is committed."""
    backend = mortal_backend(case)
    with ckpipe.SyncPipeline(URL, keep_last=2, staging=STAGING) as pipeline:
        loaded = pipeline.load()
        first = loaded.step + 1 if loaded else 0
        if "seconds" in case:
            note(case["root"], "begun")
            threading.Timer(case["seconds"], die).start()
        for step in range(first, first + case.get("saves", SAVES)):
            pipeline.save(state_of(step), step=step).wait()
            note(case["root"], f"committed {step}")
    note(case["root"], f"operations {len(backend.operations)}")


def train(case: dict[str, Any]) -> None:
    """Train a small model with dropout, and note every loss to the last bit."""
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(16),
        torch.nn.GELU(), torch.nn.Linear(16, 1),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=case["steps"])
    state = {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "rng": ckpipe.RngState(),
    }
    mortal_backend(case)
    with ckpipe.SyncPipeline(URL, guard=optimizer, staging=STAGING) as pipeline:
        loaded = pipeline.load(state)
        first = loaded.step + 1 if loaded else 0
        note(case["root"], f"from {first}")
        handle = None
        for step in range(first, case["steps"]):
            x = torch.randn(4, 8) + random.random() + np.random.rand()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            note(case["root"], f"loss {step} {loss.item().hex()}")
            if step % 3 == 2:
                if handle is not None:
                    handle.wait()  # so that the death in one save finds the save before it whole
                handle = pipeline.save(state, step=step)


def _live(case: dict[str, Any], rank: int, number: int) -> None:
    {"save_some": save_some, "train": train}[case["do"]](case)


if __name__ == "__main__":
    serve(_live)
