"""Measure the cost of saves for a training loop on a GPU: the copy, and the lost time of steps.

    python benchmarks/gpu.py [--rounds 7] [--turns 1] [--root DIR] [--json FILE]

Four figures, each from interleaved rounds:

* *Copy.* GPT-2 124M with AdamW, 1.5 GB, from the device into the staging memory, compared with a
  bare copy of the same tensors, one after the other, into memory that torch pinned. Both end with
  the last byte in host memory.
* *Inflation.* A network of matrices trains while a save with ``until="captured"`` runs from the
  call to the commit. The figure is the time of its steps, including the call, minus the time of as
  many undisturbed steps just before, divided by the latter.
* *Lost.* The same network is saved every 20 steps by ckpipe and its peers. The figures are those of
  ``stall.py``.
* *Load.* The same state goes back in place, with its files in the page cache.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import tempfile
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import contenders
import raw
import stall
import torch
from states import gpt2_with_adamw, state_bytes
from torch.distributed.checkpoint import state_dict_saver

import ckpipe

WIDTH, LAYERS, BATCH = 4096, 8, 4096
WARM_UP, UNDISTURBED = 3, 50
EVERY = 20
DEVICE = "cuda"


@dataclass(slots=True)
class Measured:
    """Seconds of each round."""

    bare: list[float] = field(default_factory=list)
    staged: list[float] = field(default_factory=list)
    undisturbed: list[float] = field(default_factory=list)
    disturbed: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    modes: dict[str, stall.Measured] = field(default_factory=dict)
    loads: dict[str, list[float]] = field(default_factory=dict)


class PinnedCopy:
    """Make the bare copy: one call a tensor, into memory that torch pinned."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._pairs = [
            (torch.empty(each.shape, dtype=each.dtype, pin_memory=True), each)
            for each in tensors
            if each.is_cuda
        ]

    def seconds(self) -> float:
        """Measure the time until the last byte has arrived."""
        torch.cuda.synchronize()
        return raw.seconds(self._copy)

    def _copy(self) -> None:
        for target, source in self._pairs:
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()


def measure_copy(root: Path, rounds: int, into: Measured) -> int:
    """Measure the copy; return the bytes of the state."""
    with torch.device(DEVICE):
        state = gpt2_with_adamw()
    tensors = [tensor for _, tensor in contenders.flat(contenders.plain(state))]
    bare = PinnedCopy(tensors)
    with ckpipe.SyncPipeline(root, keep_last=1, staging={"overlap": False}) as pipeline:
        for number in range(WARM_UP):
            pipeline.save(state, step=number, until="committed")
            bare.seconds()
        for number in range(WARM_UP, WARM_UP + rounds):
            into.bare.append(bare.seconds())
            handle = pipeline.save(state, step=number)
            into.staged.append(handle.report.stages["stage"].seconds)
            handle.wait()
    return state_bytes(state)


def new_training() -> stall.Training:
    """Make a network whose steps keep the device busy: 134 million parameters, 1.6 GB to save."""
    return stall.Training(LAYERS, WIDTH, BATCH, device=DEVICE)


class DcpAsync(contenders.DcpSync):
    """``async_save`` with the stager that it makes by default."""

    name, blocks, loads_like = "DCP async", False, "DCP"

    def _save(self, state: dict[str, Any]) -> contenders.Wait:
        response: Any = state_dict_saver.async_save(state, checkpoint_id=self.folder)
        return getattr(response, "upload_completion", response).result  # type: ignore[no-any-return]


def measure_peers(root: Path, turns: int, into: Measured) -> None:
    """Measure the time that each way to save costs a loop, and loads of what they saved."""
    training = new_training()
    own: list[contenders.Contender] = [
        stall.Ours(root / until, training, until) for until in (stall.CAPTURED, stall.STAGED)
    ]
    kinds: list[type[contenders.Contender]] = [contenders.TorchSave, contenders.DcpSync, DcpAsync]
    peers = [kind(root / str(number)) for number, kind in enumerate(kinds)]
    names = [stall.CAPTURED, stall.STAGED, *(each.name for each in peers)]
    everybody = dict(zip(names, [*own, *peers], strict=True))
    for contender in everybody.values():
        for _ in range(WARM_UP - 1):
            contender.save(training.state)()
    for _ in range(turns):
        for name in (stall.NONE, *everybody):
            found = stall.turn(training, everybody.get(name), EVERY)
            measured = into.modes.setdefault(name, stall.Measured())
            measured.steps += found.steps
            measured.calls += found.calls
            measured.lost += found.lost
            print(f"{name}: {found.row()}", flush=True)
            if everybody.get(name) in peers:
                *old, _ = sorted(everybody[name].root.iterdir(), key=lambda each: int(each.name))
                for each in old:
                    shutil.rmtree(each)
    for _ in range(1 + 2 * turns):
        for name, contender in everybody.items():
            if contender.loads_like is None:
                seconds = raw.seconds(partial(_load, contender, training))
                into.loads.setdefault(name, []).append(seconds)
    for contender in everybody.values():
        contender.close()


def _load(contender: contenders.Contender, training: stall.Training) -> None:
    contender.load(training.state)
    torch.cuda.synchronize()


def measure_inflation(root: Path, rounds: int, into: Measured) -> None:
    """Measure the time that the steps beside a save lose."""
    training = new_training()
    with ckpipe.SyncPipeline(root, keep_last=1, guard=training.optimizer) as pipeline:
        for number in range(WARM_UP):
            pipeline.save(training.state, step=number, until="captured").wait()
            training.steps(UNDISTURBED)
        for number in range(WARM_UP, WARM_UP + rounds):
            undisturbed = raw.seconds(lambda: training.steps(UNDISTURBED)) / UNDISTURBED
            done = _beside(training, pipeline, number, into)
            into.undisturbed.append(undisturbed * done)
            into.steps.append(done)


def _beside(
    training: stall.Training, pipeline: ckpipe.SyncPipeline, number: int, into: Measured
) -> int:
    """Train from the call of a save to its commit; return the number of steps."""
    done = 0

    def train() -> None:
        nonlocal done
        handles: list[ckpipe.SyncSaveHandle] = []

        def call() -> None:
            handles.append(pipeline.save(training.state, step=number, until="captured"))

        into.calls.append(raw.seconds(call))
        while handles[0].status in ("queued", "capturing", "staged", "uploading"):
            training.step()
            done += 1
        handles[0].wait()

    into.disturbed.append(raw.seconds(train))
    return done


def report(measured: Measured, nbytes: int) -> dict[str, Any]:
    """Print the table and return it."""
    shares = [bare / ours for bare, ours in zip(measured.bare, measured.staged, strict=True)]
    inflated = [
        (beside - alone) / alone
        for beside, alone in zip(measured.disturbed, measured.undisturbed, strict=True)
    ]
    share, inflation = statistics.median(shares), statistics.median(inflated)
    rows = [
        ("bare pinned copy, GB/s", nbytes / statistics.median(measured.bare) / 1e9, None),
        ("staging, GB/s", nbytes / statistics.median(measured.staged) / 1e9, None),
        ("captured call, ms", statistics.median(measured.calls) * 1e3, None),
        ("steps beside a save", statistics.median(measured.steps), None),
        ("staging / bare copy, %", share * 100, share >= 0.90),
        ("inflation over a save, %", inflation * 100, inflation <= 0.01),
    ]
    for name, value, reached in rows:
        verdict = "" if reached is None else "ok" if reached else "MISSED"
        print(f"{name:28s} {value:10.2f}   {verdict}")
    modes = {name: each.row() for name, each in measured.modes.items()}
    for name, row in modes.items():
        if name in measured.loads:
            row["load, ms"] = statistics.median(measured.loads[name][1:]) * 1e3
        print(f"\n{name}\n" + ", ".join(f"{key} {value:.2f}" for key, value in row.items()))
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"gpu": torch.cuda.get_device_name(), "platform": platform.platform()},
        "versions": {
            "ckpipe": ckpipe.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        },
        "bytes": nbytes,
        "to reach": {"staging / bare copy, %": 90.0, "inflation over a save, %": 1.0},
        "figures": {name: value for name, value, _ in rows},
        "modes": modes,
        "seconds": {
            "bare": measured.bare,
            "staged": measured.staged,
            "undisturbed": measured.undisturbed,
            "disturbed": measured.disturbed,
        },
    }


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", type=int, default=1, help="turns of five saves beside a loop")
    parser.add_argument("--root", type=Path, default=None, help="a folder to save to")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This needs a CUDA device")
    folder = Path(tempfile.mkdtemp(prefix="ckpipe-gpu-", dir=arguments.root or Path.cwd()))
    try:
        measured = Measured()
        nbytes = measure_copy(folder / "copy", arguments.rounds, measured)
        torch.cuda.empty_cache()
        measure_inflation(folder / "inflation", arguments.rounds, measured)
        torch.cuda.empty_cache()
        measure_peers(folder / "peers", arguments.turns, measured)
        results = report(measured, nbytes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
