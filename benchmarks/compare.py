"""ckpipe beside its peers, interleaved in one run; what ``make bench`` does.

    python benchmarks/compare.py [--quick] [--root DIR] [--json FILE] [--plots DIR]

Every round saves and loads once with each contender, so that a machine whose speed drifts drifts
for all of them. *Blocked* is the time until the trainer may change the state again, *durable* until
every file is fsynced, *cold* and *warm* a load in place past the page cache and from it. *Lost* is
the training time that one save costs: how long it took until durable, less what the steps made
meanwhile would have taken without it. What a contender cannot do is left out and said.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import contenders
import raw
import states
import torch
import torch.distributed as dist
from contenders import Contender

Measures = dict[str, dict[str, list[float]]]
"""Measure, then contender, then a value for each round."""

STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "GPT-2 124M + AdamW": states.gpt2_with_adamw,
    "20,000 tiny tensors": states.tiny_tensors,
    "four of 256 MiB": states.large_tensors,
}
PACKAGES = ("ckpipe", "torch", "safetensors", "torch_checkpointing", "torchsnapshot")
LIMIT = "the limit"


def progress(text: str) -> None:
    """Says on the terminal what is under way."""
    print(text, file=sys.stderr, flush=True)


def python_step() -> None:
    """About two milliseconds of interpreted work."""
    total = 0
    for number in range(30_000):
        total += number * number


_FACTORS = torch.randn(2, 320, 320)


def matmul_step() -> None:
    """About as much in one thread of matrix products."""
    for _ in range(4):
        torch.mm(_FACTORS[0], _FACTORS[1])


LOOPS: dict[str, Callable[[], None]] = {"python": python_step, "matmul": matmul_step}


def start(root: Path) -> tuple[list[Contender], dict[str, str]]:
    """All contenders that work here, and why the others do not."""
    found: list[Contender] = []
    refused: dict[str, str] = {}
    probe = {"probe": {"weight": torch.zeros(1000)}}
    for cls in contenders.EVERYBODY:
        try:
            each = cls(root / cls.__name__)
            each.save(probe)()
            each.load(probe)
            each.forget()
        except Exception as error:
            refused[cls.name] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            found.append(each)
    return found, refused


def measure_times(
    found: list[Contender], state: dict[str, Any], scratch: Path, rounds: int
) -> Measures:
    """Blocked, durable, cold and warm seconds, and bytes on disk."""
    measures: Measures = defaultdict(lambda: defaultdict(list))
    nbytes = states.state_bytes(state)
    memory = raw.touched(nbytes)
    source, target = (
        torch.zeros(nbytes, dtype=torch.uint8),
        torch.frombuffer(memory, dtype=torch.uint8),
    )
    for number in range(-1, rounds):
        progress(f"round {number + 1} of {rounds}")
        into: Measures = measures if number >= 0 else defaultdict(lambda: defaultdict(list))
        into["blocked"][LIMIT].append(raw.seconds(lambda: target[:nbytes].copy_(source)))
        into["durable"][LIMIT].append(raw.write(scratch, memory, nbytes, 8, 16 * raw.MIB))
        into["cold"][LIMIT].append(_raw_read(scratch, memory, direct=True))
        into["warm"][LIMIT].append(_raw_read(scratch, memory, direct=False))
        scratch.unlink()
        for each in found:
            _one_round(each, state, into)
    return {name: dict(values) for name, values in measures.items()}


def _raw_read(path: Path, memory: Any, *, direct: bool) -> float:
    raw.drop_from_cache(path)
    if not direct:
        raw.bring_into_cache(path)
    return raw.read(path, memory, 4, 16 * raw.MIB, direct=direct)


def _one_round(each: Contender, state: dict[str, Any], into: Measures) -> None:
    gc.collect()
    began = time.perf_counter()
    wait = each.save(state)
    into["blocked"][each.name].append(time.perf_counter() - began)
    wait()
    into["durable"][each.name].append(time.perf_counter() - began)
    files = each.files()
    into["bytes"][each.name].append(sum(path.stat().st_size for path in files))
    for path in files:
        raw.drop_from_cache(path)
    into["cold"][each.name].append(raw.seconds(lambda: each.load(state)))
    for path in files:
        raw.bring_into_cache(path)
    into["warm"][each.name].append(raw.seconds(lambda: each.load(state)))
    each.forget()


def measure_interference(
    found: list[Contender], state: dict[str, Any], loops: list[str], rounds: int
) -> dict[str, Measures]:
    """For each kind of loop: the step rate, the longest step and the time lost by a save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {name: _one_loop(found, state, LOOPS[name], rounds) for name in loops}
    finally:
        torch.set_num_threads(threads)


def _one_loop(
    found: list[Contender], state: dict[str, Any], step: Callable[[], None], rounds: int
) -> Measures:
    measures: Measures = defaultdict(lambda: defaultdict(list))
    for number in range(0 if rounds == 1 else -1, rounds):
        into: Measures = measures if number >= 0 else defaultdict(lambda: defaultdict(list))
        for each in found:
            progress(f"steps beside {each.name}")
            alone = statistics.median(_steps(step, lambda: False, least=150))
            during, blocked, took = _steps_beside(each, state, step)
            lost = took - len(during) * alone
            into["lost s"][each.name].append(lost)
            into["longest step s"][each.name].append(max([blocked, *during]))
            if not each.blocks and took > blocked:
                into["step rate"][each.name].append(len(during) * alone / (took - blocked))
            each.forget()
    return {name: dict(values) for name, values in measures.items()}


def _steps(step: Callable[[], None], more: Callable[[], bool], *, least: int = 0) -> list[float]:
    times: list[float] = []
    while len(times) < least or more():
        times.append(raw.seconds(step))
    return times


def _steps_beside(
    each: Contender, state: dict[str, Any], step: Callable[[], None]
) -> tuple[list[float], float, float]:
    """Steps made while a save runs, how long it blocked, and how long it ran."""
    began = time.perf_counter()
    wait = each.save(state)
    blocked = time.perf_counter() - began
    ended: list[float] = []

    def watch() -> None:
        wait()
        ended.append(time.perf_counter())

    watcher = threading.Thread(target=watch)
    watcher.start()
    during = _steps(step, lambda: not ended)
    watcher.join()
    return during, blocked, ended[0] - began


PEAK = """
import sys
sys.path.insert(0, {here!r})
import compare
if __name__ == "__main__":
    print("PEAK", compare.peak_memory({name!r}, {root!r}))
"""


def peak_memory(name: str, root: str) -> int:
    """Peak host memory of a process above its state over three saves, in bytes."""
    _process_group(Path(root))
    cls = next(each for each in contenders.EVERYBODY if each.name == name)
    state = states.gpt2_with_adamw()
    each = cls(Path(root) / "peak")
    each.save({"probe": {"weight": torch.zeros(1000)}})()
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    for _ in range(3):
        each.save(state)()
        each.forget()
    peak = _memory("VmHWM") - before
    each.close()
    return peak


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def measure_peaks(found: list[Contender], root: Path) -> dict[str, float]:
    """Peak memory of each contender, each in a process of its own."""
    peaks: dict[str, float] = {}
    for each in found:
        folder = root / "memory"
        folder.mkdir()
        script = folder / "peak.py"
        script.write_text(
            PEAK.format(here=str(Path(__file__).parent), name=each.name, root=str(folder))
        )
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
        printed = [line for line in done.stdout.splitlines() if line.startswith("PEAK")]
        if printed:
            peaks[each.name] = float(printed[-1].split()[1])
        shutil.rmtree(folder)
    return peaks


def _process_group(root: Path) -> None:
    """The asynchronous process of DCP wants one, if only of one rank."""
    if not dist.is_initialized():
        store = torch._C._distributed_c10d.FileStore(str(root / "store"), 1)
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "0")
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def timeline(each: Contender, state: dict[str, Any]) -> dict[str, Any]:
    """When the stages of one save of ours began and ended."""
    assert isinstance(each, contenders.Ours)
    each.save(state)()
    stages = each.handle.report.stages
    return {
        name: {"began": stage.began, "seconds": stage.seconds, "bytes": stage.bytes}
        for name, stage in stages.items()
    }


def run(root: Path, *, quick: bool) -> dict[str, Any]:
    """Measures everything and returns it as data."""
    _process_group(root)
    found, refused = start(root)
    try:
        return _run(root, found, refused, quick=quick)
    finally:
        for each in found:
            each.close()
        dist.destroy_process_group()


def _run(
    root: Path, found: list[Contender], refused: dict[str, str], *, quick: bool
) -> dict[str, Any]:
    rounds = 1 if quick else 7
    results: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
        "versions": _versions(),
        "rounds": rounds,
        "left out": refused,
        "states": {},
    }
    kinds = dict(list(STATES.items())[:1]) if quick else STATES
    for name, make in kinds.items():
        progress(name)
        state = make()
        results["states"][name] = measure_times(found, state, root / "raw.bin", rounds)
        del state
    state = states.gpt2_with_adamw()
    results["loops"] = measure_interference(
        found, state, list(LOOPS)[:1] if quick else list(LOOPS), rounds
    )
    ours = next(each for each in found if isinstance(each, contenders.Ours))
    results["timeline"] = timeline(ours, state)
    del state
    results["peak memory"] = {} if quick else measure_peaks(found, root)
    return results


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Measures, prints the tables, and writes JSON and plots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one state, one loop, one round")
    parser.add_argument("--root", type=Path, default=None, help="a folder on the disk to measure")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--plots", type=Path, default=None, help="a folder for pictures")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # of the contenders
    folder = tempfile.mkdtemp(prefix="ckpipe-bench-", dir=arguments.root or Path.cwd())
    try:
        results = run(Path(folder), quick=arguments.quick)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report = partial(print, flush=True)
    import comparison_report

    report(comparison_report.text(results))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.plots:
        arguments.plots.mkdir(parents=True, exist_ok=True)
        comparison_report.draw(results, arguments.plots)


if __name__ == "__main__":
    main()
