"""Measure the cost of saves for the loop that trains: 1,000 tensors, saved every 20 steps.

    python benchmarks/stall.py [--saves 200] [--every 20] [--root DIR] [--json FILE]

One thread trains. Modes are interleaved, a few saves in each *turn*, so that a drift of the
machine's speed affects all of them. Each turn begins with undisturbed steps, and steps until its
last save is durable. A step's time includes the call of the save before it. *Lost* is the training
time that one save costs: the time of a turn, minus the undisturbed time of its steps. The call with
``captured`` is also measured with sharded tensors, 750 of the thousand. 200 saves of every mode
take about ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import contenders
import raw
import torch
import torch.distributed as dist
from contenders import Contender, Wait
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpipe

LAYERS, WIDTH, BATCH = 125, 128, 16
TURN_SAVES = 5
WARM_UP_SAVES = 3
NONE = "none"
CAPTURED: Literal["captured"] = "captured"
STAGED: Literal["staged"] = "staged"
_OWN = (NONE, CAPTURED, STAGED)
PEERS = (contenders.DcpThread, contenders.DcpProcess, contenders.TorchCheckpointing)


class Training:
    """Make a network of square matrices and AdamW.

    Args:
        layers: The number of matrices; by default 250 parameters, a thousand tensors, 25 MB.
        width: Their rows and columns.
        batch: The rows of a batch.
        device: The device of all of it.
        sharded: Whether the parameters are DTensors, on a mesh of one rank.
    """

    def __init__(
        self,
        layers: int = LAYERS,
        width: int = WIDTH,
        batch: int = BATCH,
        *,
        device: str = "cpu",
        sharded: bool = False,
    ) -> None:
        self.model = nn.Sequential(*(nn.Linear(width, width, device=device) for _ in range(layers)))
        if sharded:
            fully_shard(self.model, mesh=init_device_mesh(device, (1,)))
        fused = device == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=fused)
        self.batch = torch.randn(batch, width, device=device)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self._device = device
        self.step()

    def step(self) -> None:
        """Take one step; return when the device has finished it."""
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        if self._device == "cuda":
            torch.cuda.synchronize()

    def steps(self, count: int) -> None:
        """Take some steps."""
        for _ in range(count):
            self.step()


class Ours(contenders.Ours):
    """ckpipe with a guarded optimizer."""

    def __init__(
        self, root: Path, training: Training, until: Literal["captured", "staged"]
    ) -> None:
        Contender.__init__(self, root)
        self._until = until
        self._pipeline = ckpipe.SyncPipeline(root, guard=training.optimizer, keep_last=1)
        self._pipeline.__enter__()

    def save(self, state: dict[str, Any]) -> Wait:
        self.number += 1
        self.handle = self._pipeline.save(state, step=self.number, until=self._until)
        return self.handle.wait


@dataclass(slots=True)
class Measured:
    """The cost of one mode, in seconds."""

    steps: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    sharded_calls: list[float] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        """The figures of the table."""
        ordered = sorted(self.steps)
        return {
            "steps per second": len(ordered) / sum(ordered),
            "p99 step, ms": ordered[int(len(ordered) * 0.99)] * 1e3,
            "longest step, ms": ordered[-1] * 1e3,
            "call, ms": statistics.median(self.calls) * 1e3 if self.calls else 0.0,
            "longest call, ms": max(self.calls, default=0.0) * 1e3,
            "lost per save, ms": statistics.median(self.lost) * 1e3 if self.lost else 0.0,
        }


def timed(action: Callable[[], object]) -> float:
    """Measure the seconds of a call."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def turn(training: Training, contender: Contender | None, every: int) -> Measured:
    """Take a few saves and the steps between them, until the last save is durable.

    Args:
        training: The network and its optimizer.
        contender: The contender that saves; None for no saves.
        every: Steps from one save to the next.
    """
    measured = Measured()
    undisturbed = statistics.median(timed(training.step) for _ in range(every))
    began, steps = time.perf_counter(), 0
    pending: Ending | None = None
    for number in range(TURN_SAVES * every):
        step_began = time.perf_counter()
        if contender is not None and number % every == 0:
            if pending is not None:
                pending.wait()
            called = time.perf_counter()
            pending = Ending(contender.save(training.state))
            measured.calls.append(time.perf_counter() - called)
        training.step()
        steps += 1
        measured.steps.append(time.perf_counter() - step_began)
    while pending is not None and not pending.over:
        measured.steps.append(timed(training.step))
        steps += 1
    if contender is not None:
        measured.lost.append((time.perf_counter() - began - steps * undisturbed) / TURN_SAVES)
    return measured


class Ending:
    """Wait for the end of a save in a separate thread, which costs the trainer nothing."""

    def __init__(self, wait: Wait) -> None:
        self._future = _waiters.submit(wait)

    @property
    def over(self) -> bool:
        """Tell whether the save is durable."""
        return self._future.done()

    def wait(self) -> None:
        """Block until the save is durable; raise its error if it failed."""
        self._future.result()


_waiters = ThreadPoolExecutor(1)


def modes(root: Path, training: Training) -> dict[str, Contender | None]:
    """Make the contenders that are available here, by name."""
    found: dict[str, Contender | None] = {
        NONE: None,
        CAPTURED: Ours(root / CAPTURED, training, CAPTURED),
        STAGED: Ours(root / STAGED, training, STAGED),
    }
    for kind in PEERS:
        try:
            found[kind.name] = kind(root / kind.name.replace(" ", "-"))
        except ImportError:
            print(f"{kind.name}: not installed")
    return found


def sharded_calls(root: Path, saves: int) -> list[float]:
    """Measure the seconds of calls with ``captured``, for a state of DTensors."""
    training = Training(sharded=True)
    ours, calls = Ours(root / "sharded", training, CAPTURED), []
    for number in range(WARM_UP_SAVES + saves):
        training.step()
        called = time.perf_counter()
        wait = ours.save(training.state)
        if number >= WARM_UP_SAVES:
            calls.append(time.perf_counter() - called)
        wait()
    ours.close()
    return calls


def measure(root: Path, saves: int, every: int) -> tuple[dict[str, Measured], float]:
    """Measure all modes, interleaved, and the seconds of a warm copy of the state."""
    contenders.start_process_group(root)
    training = Training()
    results: dict[str, Measured] = {}
    everybody = modes(root, training)
    for contender in everybody.values():
        for _ in range(WARM_UP_SAVES if contender is not None else 0):
            assert contender is not None
            contender.save(training.state)()
    for _ in range(max(1, saves // TURN_SAVES)):
        for name, contender in everybody.items():
            found = turn(training, contender, every)
            into = results.setdefault(name, Measured())
            into.steps += found.steps
            into.calls += found.calls
            into.lost += found.lost
            if contender is not None and name not in (CAPTURED, STAGED):
                for old in contender.root.iterdir():
                    shutil.rmtree(old, ignore_errors=True)
    for contender in everybody.values():
        if contender is not None:
            contender.close()
    results[CAPTURED].sharded_calls = sharded_calls(root, min(saves, 40))
    dist.destroy_process_group()
    return results, warm_copy(training)


def warm_copy(training: Training) -> float:
    """Measure a copy of the state into touched memory, in seconds."""
    plain = contenders.plain(training.state)
    nbytes = sum(tensor.nbytes for _, tensor in contenders.flat(plain))
    source = torch.randn(nbytes // 4)
    target = torch.frombuffer(raw.touched(nbytes), dtype=torch.float32)[: source.numel()]
    return min(timed(lambda: target.copy_(source)) for _ in range(5))


def goals(
    results: dict[str, Measured], rows: dict[str, dict[str, float]], copy: float
) -> list[tuple[str, float, float]]:
    """List the goals: name, figure, goal."""
    sharded = statistics.median(results[CAPTURED].sharded_calls) * 1e3
    peers = [row["lost per save, ms"] for name, row in rows.items() if name not in _OWN]
    highest = rows[NONE]["p99 step, ms"] + copy * 1e3 + 20
    found = [
        ("captured call, ms", rows[CAPTURED]["call, ms"], 10.0),
        ("captured call, DTensors, ms", sharded, 10.0),
    ]
    for name in (CAPTURED, STAGED):
        if peers:
            found.append((f"{name}: lost, ms", rows[name]["lost per save, ms"], min(peers) / 2))
        found.append((f"{name}: p99 step, ms", rows[name]["p99 step, ms"], highest))
    return found


def report(results: dict[str, Measured], copy: float) -> dict[str, Any]:
    """Print the table and return it."""
    rows = {name: measured.row() for name, measured in results.items()}
    names = list(rows[NONE])
    print(f"{'':20s}" + "".join(f"{name:>20s}" for name in names))
    for mode, row in rows.items():
        print(f"{mode:20s}" + "".join(f"{row[name]:20.2f}" for name in names))
    print(f"\nwarm copy of the state: {copy * 1e3:.1f} ms")
    reached = goals(results, rows, copy)
    for name, value, goal in reached:
        print(f"{name:28s} {value:9.2f}   to reach {goal:7.2f}   {_verdict(value, goal)}")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
        "versions": {"ckpipe": ckpipe.__version__, "torch": torch.__version__},
        "modes": rows,
        "figures": {name: {"value": value, "to reach": goal} for name, value, goal in reached},
    }


def _verdict(value: float, goal: float) -> str:
    return "ok" if value <= goal else "MISSED"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saves", type=int, default=60, help="saves of each mode")
    parser.add_argument("--every", type=int, default=20, help="steps from one save to the next")
    parser.add_argument("--root", type=Path, default=None, help="a folder on the disk to measure")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp(prefix="ckpipe-stall-", dir=arguments.root or Path.cwd())
    try:
        results = report(*measure(Path(folder), arguments.saves, arguments.every))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
