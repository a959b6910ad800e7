"""Write a small run that was killed twice, as a root for pictures of reports and lists.

``python docs/demo_run.py FOLDER`` trains a small classifier in three launches, each a process of
its own. The first one dies in a save. The second one dies too, and the third goes back behind its
newest checkpoint. The clock of these processes runs faster: the run takes seconds, and looks like
one of an afternoon.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ckpipe
from ckpipe.ranks import launch as launches
from ckpipe_local import LocalBackend

SECONDS_A_STEP, PAUSE = 18.0, timedelta(minutes=14)
SAVE_EVERY, VALIDATE_EVERY = 20, 40
LAUNCHES = ((0, 240), (220, 433), (400, 640))
"""The first and the last step of each launch."""
ATTEMPTS = ("2c8f41d0", "9be0735a", "e41d6b97")
"""The names of the launches, which are the same in each picture of the run."""
RETENTION = ckpipe.KeepLast(4) | ckpipe.KeepEvery(steps=100) | ckpipe.KeepBest("val_loss")


def make(root: str | os.PathLike[str]) -> Path:
    """Write the run below a folder that does not exist yet, or is empty; return the folder."""
    folder = Path(root).absolute()
    trained = sum(last - first for first, last in LAUNCHES) * SECONDS_A_STEP
    start = datetime.now(UTC) - timedelta(seconds=trained + 260) - 2 * PAUSE
    for number, (first, last) in enumerate(LAUNCHES):
        program = [sys.executable, __file__, str(folder), str(number), start.isoformat()]
        done = subprocess.run(program, check=False)
        killed = number < len(LAUNCHES) - 1
        if done.returncode != (-signal.SIGKILL if killed else 0):
            raise RuntimeError(f"launch {number} of the run ended with {done.returncode}")
        start += timedelta(seconds=(last - first) * SECONDS_A_STEP)
        for each in folder.glob(f"step-{last:012d}*/*") if killed else ():
            os.utime(each, (start.timestamp(), start.timestamp()))
        start += PAUSE
        if number == 1:
            with ckpipe.SyncPipeline(folder) as pipeline:
                pipeline.pin(last // SAVE_EVERY * SAVE_EVERY)
    return folder


class Clock(datetime):
    """The time of the run."""

    at = datetime.now(UTC)

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        """Return the time of the run."""
        return cls.at.astimezone(tz)


def train(root: Path, number: int) -> None:
    """Run one launch, from the newest checkpoint until its last step or its death."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(
        nn.Embedding(512, 64), nn.Flatten(), nn.Linear(512, 128), nn.GELU(), nn.Dropout(0.2),
        nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    inputs = torch.randint(512, (1536, 8))
    labels = (torch.rand(512)[inputs].sum(1) * 8 + torch.randn(len(inputs))).long().clamp(0, 31)
    progress = ckpipe.Progress(tokens=0)
    state = {"model": model, "optimizer": optimizer, "progress": progress, "rng": ckpipe.RngState()}
    first, last = LAUNCHES[number]
    loss_of = nn.functional.cross_entropy
    ckpipe.register_backend("mortal", lambda url: Mortal(str(root)))
    place = str(root) if number else "mortal://"
    with ckpipe.SyncPipeline(place, retention=RETENTION, attempt_id=ATTEMPTS[number]) as pipeline:
        if number:
            pipeline.load(state, first)
        for step in range(first + 1, last + 1):
            Clock.at += timedelta(seconds=SECONDS_A_STEP)
            batch = torch.randint(1024, (64,))
            loss = loss_of(model(inputs[batch]), labels[batch])
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            progress.tokens += batch.numel()
            if step % SAVE_EVERY == 0:
                metrics = {"loss": loss.item(), "lr": optimizer.param_groups[0]["lr"]}
                if step % VALIDATE_EVERY == 0:
                    with torch.no_grad():
                        validated = loss_of(model.eval()(inputs[1024:]), labels[1024:])
                    metrics["val_loss"] = validated.item()
                    model.train()
                info = pipeline.save(state, step=step, metrics=metrics).wait()
                when = Clock.at.timestamp()
                os.utime(root / f"{info.id}.json", (when, when))
        if number < len(LAUNCHES) - 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Mortal(LocalBackend):
    """A store whose process dies in the last save of the first launch, before the commit."""

    async def put(self, key: str, data: bytes, mode: ckpipe.PutMode) -> None:
        """Write an object, or die."""
        if key.startswith(f"step-{LAUNCHES[0][1]:012d}"):
            os.kill(os.getpid(), signal.SIGKILL)
        await super().put(key, data, mode)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        make(sys.argv[1])
    else:
        Clock.at = datetime.fromisoformat(sys.argv[3])
        vars(launches).update(datetime=Clock)
        vars(time).update(time=lambda: Clock.at.timestamp())
        train(Path(sys.argv[1]), int(sys.argv[2]))
