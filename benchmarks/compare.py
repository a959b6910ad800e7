"""ckpipe beside its peers, interleaved in one run; what ``make bench`` does.

    python benchmarks/compare.py [--quick | --trial] [--root DIR] [--json FILE] [--plots DIR]

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
import sys
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from peaks import measure_peaks

Measures = dict[str, dict[str, list[float]]]
"""Measure, then contender, then a value for each round."""

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
    found: list[Contender], state: dict[str, Any], loops: Sequence[str], rounds: int
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


def timeline(each: Contender, state: dict[str, Any]) -> dict[str, Any]:
    """The report of one save of ours, when all is warm."""
    assert isinstance(each, contenders.Ours)
    for _ in range(2):
        each.save(state)()
    return each.handle.report.to_data()


@dataclass(frozen=True)
class Extent:
    """How much is measured.

    Args:
        states: Names of the states.
        loops: Names of the loops that train beside a save.
        rounds: How often each thing is measured, after one round to warm up.
        peaks: Whether the peak memory is measured.
    """

    states: tuple[str, ...]
    loops: tuple[str, ...]
    rounds: int
    peaks: bool


FULL = Extent((states.GPT2, states.TINY, states.LARGE), tuple(LOOPS), 7, peaks=True)
QUICK = Extent((states.SMALL_GPT2,), ("python",), 1, peaks=False)
TRIAL = Extent((states.TRIAL,), tuple(LOOPS), 1, peaks=True)
"""To see whether the benchmark itself works."""


def run(root: Path, extent: Extent) -> dict[str, Any]:
    """Measures everything and returns it as data."""
    contenders.start_process_group(root)
    found, refused = start(root)
    try:
        return _run(root, found, refused, extent)
    finally:
        for each in found:
            each.close()
        dist.destroy_process_group()


def _run(
    root: Path, found: list[Contender], refused: dict[str, str], extent: Extent
) -> dict[str, Any]:
    results: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "versions": _versions(),
        "rounds": extent.rounds,
        "left out": refused,
        "states": {},
        "loops": {},
        "peak memory": {},
    }
    ours = next(each for each in found if isinstance(each, contenders.Ours))
    for name in extent.states:
        progress(name)
        state = states.STATES[name]()
        results["states"][name] = measure_times(found, state, root / "raw.bin", extent.rounds)
        for loop, measures in measure_interference(
            found, state, extent.loops, extent.rounds
        ).items():
            results["loops"][f"{name}, {loop} loop"] = measures
        if "timeline" not in results:
            results["timeline"] = timeline(ours, state)
        del state
        if extent.peaks:
            progress("peak memory")
            results["peak memory"][name] = measure_peaks(found, name, root)
    return results


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model n")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "processor": model,
        "memory": memory,
        "platform": platform.platform(),
    }


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
    parser.add_argument("--quick", action="store_true", help="a third of a state, one loop, once")
    parser.add_argument("--trial", action="store_true", help="a tiny state: does it work at all?")
    parser.add_argument("--root", type=Path, default=None, help="a folder on the disk to measure")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--plots", type=Path, default=None, help="a folder for pictures")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # of the contenders
    folder = tempfile.mkdtemp(prefix="ckpipe-bench-", dir=arguments.root or Path.cwd())
    try:
        extent = QUICK if arguments.quick else TRIAL if arguments.trial else FULL
        results = run(Path(folder), extent)
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
