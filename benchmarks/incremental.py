"""Measure incremental saves beside full ones, and beside Moonclip where it is installed.

    python benchmarks/incremental.py [--turns 7] [--only NAME ...] [--root DIR] [--json FILE]

Each round changes a part of a state, and all contenders save it in turn, with the same changes:
ckpipe in full and incrementally, by a thread and by a worker process. The first three saves of each
are left out: the third is the first that links. Figures are ratios to the full save of the same
kind in the same round, and of these the median. *Blocked* is the time of the call, *durable* the
time from the call until the checkpoint is durable, *bytes* the written share of the data files.
*Raw* is a plain write of the bytes that the incremental save wrote, with fsync. *Memory* is the
peak of resident memory above that before the first save, as a share of the state, of each contender
in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import psutil
import states
import torch

import ckpipe

WARM_UP = 3
State = dict[str, torch.Tensor]
Change = Callable[[State, random.Random], None]


def llama_with_adapters() -> State:
    """Make 1.5 GB of base weights, and adapters of one hundredth of it."""
    state = {f"base.{n}": torch.randn(2048, 2048) for n in range(88)}
    return state | {f"lora.{n}": torch.randn(16, 1024) for n in range(224)}


def gpt2() -> State:
    """Make the tensors of GPT-2 124M and its AdamW."""
    made = states.gpt2_with_adamw()
    flat = dict(made["model"].state_dict())
    for number, each in made["optimizer"].state_dict()["state"].items():
        flat |= {f"optimizer.{number}.{name}": value for name, value in each.items()}
    return flat


def adapters_move(state: State, _: random.Random) -> None:
    for name, tensor in state.items():
        if name.startswith("lora"):
            tensor.add_(1)


def some_move(state: State, draw: random.Random) -> None:
    for name in draw.sample(sorted(state), max(1, round(len(state) / 100))):
        state[name].add_(1)


def all_move(state: State, _: random.Random) -> None:
    for tensor in state.values():
        tensor.add_(1)


def nothing_moves(state: State, _: random.Random) -> None:
    pass


CASES: dict[str, tuple[Callable[[], State], Change]] = {
    "adapters, 1 % moves": (llama_with_adapters, adapters_move),
    "GPT-2 + AdamW, 1 % of its tensors": (gpt2, some_move),
    "GPT-2 + AdamW, all move": (gpt2, all_move),
    "GPT-2 + AdamW, nothing moves": (gpt2, nothing_moves),
}


class Saver:
    """Save a state by ckpipe.

    Args:
        root: A folder of its own.
        worker: Thread or process.
        incremental: True to link what rests.
    """

    def __init__(self, root: Path, worker: Literal["thread", "process"], incremental: bool) -> None:
        self._pipeline = ckpipe.SyncPipeline(
            root, worker=worker, incremental=incremental, keep_last=2
        )
        self._pipeline.__enter__()

    def save(self, state: State, step: int) -> tuple[float, float, float]:
        """Save; return the seconds blocked and until durable, and the written share."""
        began = time.perf_counter()
        handle = self._pipeline.save(state, step=step)
        blocked = time.perf_counter() - began
        handle.wait()
        report = handle.report
        written = report.bytes - report.linked_bytes
        return blocked, report.durable_seconds or 0.0, written / report.bytes

    def close(self) -> None:
        """End the pipeline."""
        self._pipeline.__exit__(None, None, None)


class Moonclip:
    """Save a state by Moonclip, with its defaults, and deltas of all saves but the first."""

    def __init__(self, root: Path) -> None:
        from moonclip import CheckpointManager

        self._root = root
        self._manager = CheckpointManager(
            str(root), full_every_steps=10**9, max_deltas_per_full=100
        )

    def save(self, state: State, step: int) -> tuple[float, float, float]:
        """Save; return the seconds blocked and until durable, and the written share."""
        before = _size(self._root)
        began = time.perf_counter()
        self._manager.save_raw(step, state)
        blocked = time.perf_counter() - began
        self._manager._mgr.flush()
        durable = time.perf_counter() - began
        return blocked, durable, (_size(self._root) - before) / states.state_bytes(state)

    def close(self) -> None:
        """End nothing: it has no end."""
        return


def _size(root: Path) -> int:
    return sum(each.stat().st_size for each in root.rglob("*") if each.is_file())


SAVERS: dict[str, Callable[[Path], Saver | Moonclip]] = {
    "full, thread": lambda root: Saver(root, "thread", incremental=False),
    "incremental, thread": lambda root: Saver(root, "thread", incremental=True),
    "full, process": lambda root: Saver(root, "process", incremental=False),
    "incremental, process": lambda root: Saver(root, "process", incremental=True),
}
if importlib.util.find_spec("moonclip"):
    SAVERS["Moonclip"] = Moonclip


def raw_write(root: Path, nbytes: int) -> float:
    """Write bytes to a file, durably; return the seconds."""
    data = memoryview(bytearray(max(1, nbytes)))
    began = time.perf_counter()
    with (root / "raw").open("wb", buffering=0) as file:
        while data:
            data = data[file.write(data[: 16 << 20]) :]
        os.fsync(file.fileno())
    took = time.perf_counter() - began
    (root / "raw").unlink()
    return took


def measure(case: str, turns: int, root: Path) -> dict[str, dict[str, Any]]:
    """Measure a case: the medians of ratios, and of seconds, by contender."""
    make, change = CASES[case]
    state, draw = make(), random.Random(54)
    savers = {name: open_at(root / str(n)) for n, (name, open_at) in enumerate(SAVERS.items())}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in savers}
    raw = []
    for step in range(WARM_UP + turns):
        change(state, draw)
        order = list(savers)
        draw.shuffle(order)
        for name in order:
            os.sync()
            found[name].append(savers[name].save(state, step))
        share = found["incremental, thread"][-1][2]
        os.sync()
        raw.append(raw_write(root, round(share * states.state_bytes(state))))
    for each in savers.values():
        each.close()
    rows: dict[str, dict[str, Any]] = {}
    for name, values in found.items():
        full = found["full, process" if "process" in name else "full, thread"]
        pairs = list(zip(values, full, strict=True))[WARM_UP:]
        rows[name] = {
            "blocked": statistics.median(own[0] / whole[0] for own, whole in pairs),
            "durable": statistics.median(own[1] / whole[1] for own, whole in pairs),
            "bytes": statistics.mean(own[2] for own, _ in pairs),
            "seconds blocked": statistics.median(own[0] for own, _ in pairs),
            "seconds durable": statistics.median(own[1] for own, _ in pairs),
        }
    writes = list(zip(raw, found["full, thread"], strict=True))[WARM_UP:]
    rows["raw"] = {"durable": statistics.median(own / whole[1] for own, whole in writes)}
    return rows


def peak(case: str, name: str, root: Path) -> float:
    """Measure the peak of memory of a contender in this process, as a share of the state."""
    make, change = CASES[case]
    state, draw = make(), random.Random(54)
    before = psutil.Process().memory_info().rss
    saver = SAVERS[name](root)
    for step in range(WARM_UP + 2):
        change(state, draw)
        saver.save(state, step)
    lines = Path("/proc/self/status").read_text().splitlines()
    most = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    saver.close()
    return (most - before) / states.state_bytes(state)


def main() -> None:
    """Measure the wanted cases, and print a table of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--root", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    results: dict[str, Any] = {}
    for case in [] if chosen.peak else chosen.only:
        root = Path(tempfile.mkdtemp(prefix="ckpipe-bench-", dir=chosen.root))
        try:
            rows = measure(case, chosen.turns, root)
            for name in SAVERS if case != "GPT-2 + AdamW, nothing moves" else ():
                if "process" not in name:  # a worker maps the memory of the trainer
                    command = [sys.executable, __file__, "--peak", case, name, "--root", str(root)]
                    said = subprocess.run(command, capture_output=True, text=True, check=True)
                    rows[name]["memory"] = float(said.stdout.split()[-1])
        finally:
            shutil.rmtree(root)
        results[case] = rows
        print(f"\n{case}\n{'':24}{'blocked':>9}{'durable':>9}{'bytes':>9}{'memory':>9}")
        for name, row in rows.items():
            cells = (row.get(key) for key in ("blocked", "durable", "bytes", "memory"))
            texts = ("" if each is None else f"{each:.4g}" for each in cells)
            print(f"{name:24}{''.join(f'{text:>9}' for text in texts)}", flush=True)
    if chosen.peak:
        with tempfile.TemporaryDirectory(dir=chosen.root) as folder:
            print(peak(chosen.peak[0], chosen.peak[1], Path(folder)))
    if chosen.json:
        machine: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="minutes"),
            "torch": torch.__version__,
        }
        machine |= {"cores": os.cpu_count(), "python": platform.python_version()}
        chosen.json.write_text(json.dumps({"machine": machine, "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
