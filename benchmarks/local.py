"""ckpipe on local disk against the limits of the machine, interleaved in one run.

    python benchmarks/local.py [--root DIR] [--rounds 7] [--json FILE]

Every round takes each measure once, so that a drift of the machine's speed affects all of them. The
table shows medians of the rounds, and the medians of each round's ratios. Preallocation does not
count for the raw writes; unlink counts for neither.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import raw
import states
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

import ckpipe

Times = dict[str, list[float]]


def data_file(root: Path) -> Path:
    """Find the newest data file below a root."""
    return max(root.glob("step-*/*.safetensors"), key=lambda path: path.stat().st_mtime_ns)


def best_lanes(measure: Callable[[int, int], float]) -> tuple[int, int]:
    """Find the fastest lanes and block size of the machine, by the median of three tries each.

    Args:
        measure: Returns the seconds for a number of lanes and a block size in bytes.
    """
    tried = {}
    for lanes, mib in itertools.product((1, 2, 4, 8), (4, 16, 64)):
        tries = [measure(lanes, mib * raw.MIB) for _ in range(3)]
        tried[lanes, mib * raw.MIB] = statistics.median(tries)
    return min(tried, key=lambda key: tried[key])


def save_round(pipeline: Any, state: Any, step: int, times: Times, name: str) -> None:
    """Save once with ckpipe; delete old checkpoints outside of the measured time."""
    began = time.perf_counter()
    handle = pipeline.save(state, step=step)
    times[f"{name} staged"].append(time.perf_counter() - began)
    handle.wait()
    times[f"{name} durable"].append(time.perf_counter() - began)
    for old in pipeline.steps()[:-1]:
        pipeline.delete(old)


def measure_saves(root: Path, state: Any, nbytes: int, rounds: int) -> tuple[Times, Path]:
    """Measure copy, raw write and ckpipe, with and without overlap."""
    times: Times = defaultdict(list)
    memory = raw.touched(nbytes)
    source = torch.randn(nbytes // 4)
    target = torch.frombuffer(memory, dtype=torch.float32)[: source.numel()]
    scratch = root / "raw.bin"
    lanes, block = best_lanes(partial(raw.write, scratch, memory, nbytes))
    print(f"raw writes: {lanes} lanes of {block >> 20} MiB are the fastest")
    overlapped = ckpipe.SyncPipeline(root / "ours")
    separate = ckpipe.SyncPipeline(root / "separate", staging={"overlap": False})
    with overlapped, separate:
        for step in range(-2, rounds):
            into: Times = times if step >= 0 else defaultdict(list)
            into["memcpy"].append(raw.seconds(lambda: target.copy_(source)))
            into["raw write"].append(raw.write(scratch, memory, nbytes, lanes, block))
            scratch.unlink()
            save_round(overlapped, state, step + 2, into, "ours")
            save_round(separate, state, step + 2, into, "separate")
            if step >= 0:
                shutil.rmtree(root / "dcp", ignore_errors=True)
                plain = {name: each.state_dict() for name, each in state.items()}
                write = partial(state_dict_saver.save, plain, checkpoint_id=root / "dcp")
                into["dcp save"].append(raw.seconds(write))
    return times, data_file(root / "ours")


def prepared_read(
    prepare: Callable[[Path], None], path: Path, memory: Any, direct: bool, lanes: int, block: int
) -> float:
    """Measure a raw read after the page cache was prepared, in seconds."""
    prepare(path)
    return raw.read(path, memory, lanes, block, direct=direct)


def measure_loads(root: Path, state: Any, path: Path, rounds: int) -> Times:
    """Measure raw reads and loads, past the page cache and then from it."""
    times: Times = defaultdict(list)
    memory = raw.touched(path.stat().st_size)
    with ckpipe.SyncPipeline(root / "ours") as pipeline:
        for name, prepare in (("cold", raw.drop_from_cache), ("warm", raw.bring_into_cache)):
            bare = partial(prepared_read, prepare, path, memory, name == "cold")
            lanes, block = best_lanes(bare)
            print(f"raw {name} reads: {lanes} lanes of {block >> 20} MiB are the fastest")
            for step in range(-1, rounds):
                into: Times = times if step >= 0 else defaultdict(list)
                into[f"raw {name}"].append(bare(lanes, block))
                prepare(path)
                into[f"ours {name}"].append(raw.seconds(lambda: pipeline.load(state)))
    return times


def measure_tiny(root: Path, rounds: int) -> tuple[Times, int]:
    """Measure saves and loads of 20,000 tensors of 32 bytes, by ckpipe and DCP."""
    times: Times = defaultdict(list)
    state = states.tiny_tensors()
    with ckpipe.SyncPipeline(root / "tiny") as pipeline:
        for step in range(rounds):
            times["tiny save"].append(
                raw.seconds(partial(pipeline.save, state, step=step, until="committed"))
            )
            times["tiny load"].append(raw.seconds(lambda: pipeline.load(state)))
        newest = pipeline.latest()
        assert newest is not None
        files = [*(root / "tiny").glob(f"{newest.id}*"), *(root / "tiny" / newest.id).rglob("*")]
        size = sum(path.stat().st_size for path in files if path.is_file())
    for _ in range(min(rounds, 3)):
        shutil.rmtree(root / "dcp", ignore_errors=True)
        times["tiny dcp save"].append(
            raw.seconds(lambda: state_dict_saver.save(state, checkpoint_id=root / "dcp"))
        )
        times["tiny dcp load"].append(
            raw.seconds(lambda: state_dict_loader.load(state, checkpoint_id=root / "dcp"))
        )
    return times, size


MEMORY = """
import resource, sys
sys.path.insert(0, {here!r})
import states, ckpipe, torch
state = states.gpt2_with_adamw()
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
with ckpipe.SyncPipeline({root!r}, keep_last=1{options}) as pipeline:
    pipeline.save({{"warm": torch.zeros(1)}}, step=0, until="committed")
    open("/proc/self/clear_refs", "w").write("5")
    before = rss()
    for step in range(1, 12):
        pipeline.save(state, step=step, until="committed")
    lines = open("/proc/self/status").read().splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
print(peak - before)
"""


def measure_memory(root: Path, options: str) -> int:
    """Measure the peak host memory above the state over eleven saves, in bytes."""
    code = MEMORY.format(
        here=str(Path(__file__).parent), root=str(root / "memory"), options=options
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    shutil.rmtree(root / "memory", ignore_errors=True)
    return int(printed.stdout)


IMPORT = """
import time, torch
began = time.perf_counter()
import ckpipe
took = time.perf_counter() - began
import sys
assert not {"pydantic", "aiobotocore", "awscrt"} & sys.modules.keys()
print(took)
"""


def measure_import(rounds: int) -> float:
    """Measure the seconds of ``import ckpipe`` after ``import torch``."""
    runs = [
        subprocess.run([sys.executable, "-c", IMPORT], check=True, capture_output=True)
        for _ in range(rounds)
    ]
    return statistics.median(float(run.stdout) for run in runs)


def ratio(times: Times, name: str, base: str) -> float:
    """Compute the median of the ratios of two measures of the same rounds."""
    return statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=None, help="a folder on the disk to measure")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="ckpipe-bench-", dir=arguments.root or Path.cwd())
    try:
        results = run(Path(folder), arguments.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


def run(root: Path, rounds: int) -> dict[str, Any]:
    """Measure all and return the results."""
    memory_whole = measure_memory(root, "")
    memory_small = measure_memory(root, ", staging_bytes='256MiB'")
    state = states.gpt2_with_adamw()
    nbytes = states.state_bytes(state)
    times, path = measure_saves(root, state, nbytes, rounds)
    times.update(measure_loads(root, state, path, rounds))
    del state
    gc.collect()
    tiny, tiny_bytes = measure_tiny(root, rounds)
    times.update(tiny)
    imported = measure_import(rounds)
    rows = [
        ("staged / memcpy", ratio(times, "ours staged", "memcpy"), 1.30),
        ("staged / memcpy, overlap off", ratio(times, "separate staged", "memcpy"), 1.15),
        ("durable / raw write + fsync", ratio(times, "ours durable", "raw write"), 1.20),
        ("cold load / raw O_DIRECT read", ratio(times, "ours cold", "raw cold"), 1.25),
        ("warm load / raw warm read", ratio(times, "ours warm", "raw warm"), 1.60),
        ("tiny: MB on disk", tiny_bytes / 1e6, 6.0),
        ("tiny: save s", statistics.median(times["tiny save"]), 0.3),
        ("tiny: load s", statistics.median(times["tiny load"]), 0.6),
        ("memory above state - 1.0 x state, MiB", (memory_whole - nbytes) / raw.MIB, 64.0),
        ("memory above state, staging 256 MiB, MiB", memory_small / raw.MIB, 320.0),
        ("import ckpipe after torch, ms", imported * 1e3, 60.0),
    ]
    for name, values in times.items():
        spread = f"{min(values):.3f} to {max(values):.3f}"
        print(f"{name:24s} median {statistics.median(values):7.3f} s   ({spread})")
    print()
    for name, value, goal in rows:
        print(
            f"{name:42s} {value:9.2f}   to reach {goal:6.2f}   "
            f"{'ok' if value <= goal else 'MISSED'}"
        )
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
        "versions": {"ckpipe": ckpipe.__version__, "torch": torch.__version__},
        "seconds": dict(times),
        "figures": {name: {"value": value, "to reach": goal} for name, value, goal in rows},
    }


if __name__ == "__main__":
    main()
