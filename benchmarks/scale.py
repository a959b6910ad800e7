"""Measure the cost of planning, committing and loading in worlds of 8 to 16,384 ranks.

    python benchmarks/scale.py [--quick] [--json FILE] [--plots DIR]

Worlds are simulated without the bytes of tensors. Everything else is real: every manifest is
planned, encoded and committed to a store in memory, and the index is merged from all of them. If
all ranks do the same work, a few of them are sampled. Each measure runs in its own process, so its
memory peak is its own. DCP's plan of all ranks runs too, if it ends in time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import plots
import scale_measures
import torch

import ckpipe

SIZES = (8, 64, 1024, 16_384)
RUNS = {
    "plan": SIZES,
    "requests": SIZES,
    "index": SIZES,
    "dcp": (8, 64, 256, 1024),
    "load": (10, 100),
}
QUICK = {name: sizes[:2] for name, sizes in RUNS.items()}
LIMIT_SECONDS = 600
Results = dict[str, dict[str, float]]

GOALS = {
    "plan ms, sharded": 30,
    "plan ms, two replicas": 30,
    "plan ms, replicated": 30,
    "cached ms": 1,
    "index s": 60,
    "peak MiB": 1024,
    "bytes per shard": 64,
    "load plan s": 1,
}
"""The goals at the largest size."""


def measured(name: str, ranks: int) -> dict[str, float]:
    """Run one measure in its own process; return nothing if it exceeds its time or memory."""
    command = [sys.executable, __file__, "--measure", name, str(ranks)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"{name:10s} {ranks:6d}  did not end in {LIMIT_SECONDS} s")
        return {}
    if done.returncode:
        print(f"{name:10s} {ranks:6d}  failed: {done.stderr.strip()[-200:]}")
        return {}
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    shown = ", ".join(f"{what} {value:.3g}" for what, value in found.items())
    print(f"{name:10s} {ranks:6d}  {shown}", flush=True)
    return found


def run(runs: Mapping[str, tuple[int, ...]]) -> Results:
    """Run all measures at all sizes: for each figure, its value by the number of ranks."""
    results: Results = defaultdict(dict)
    for name, sizes in runs.items():
        for ranks in sizes:
            for figure, value in measured(name, ranks).items():
                results[figure][str(ranks)] = value
    return dict(results)


def report(results: Results) -> None:
    """Print the goals."""
    print()
    for figure, goal in GOALS.items():
        if results.get(figure):
            ranks, value = list(results[figure].items())[-1]
            verdict = "ok" if value <= goal else "MISSED"
            print(f"{figure:24s} {ranks:>6s} ranks {value:10.2f}   to reach {goal:6g}   {verdict}")


PANELS: dict[str, tuple[str, dict[str, str]]] = {
    "Plan of 1,000 tensors": (
        "milliseconds of CPU",
        {
            "plan ms, sharded": "sharded",
            "plan ms, replicated": "held by all ranks",
            "cached ms": "sharded, from the cache",
            "dcp local ms": "DCP, local plan",
        },
    ),
    "The index of all shards": (
        "seconds of CPU",
        {
            "index s": "all merges together",
            "last commit s": "after the last commit",
            "dcp global s": "DCP, global plan",
        },
    ),
    "Requests, each rank": (
        "requests",
        {"requests": "a save", "load: metadata requests": "a load, for metadata"},
    ),
    "Metadata, each rank": (
        "kilobytes",
        {"load: metadata KB": "read by a load", "manifest KB": "written by a save"},
    ),
}


SHARDS = {
    "index s": scale_measures.SHARDS,
    "last commit s": scale_measures.SHARDS,
    "dcp global s": scale_measures.TENSORS,
}
"""The number of shards of each rank, for figures drawn against all shards."""


def draw(results: Results, path: Path) -> None:
    """Draw cost against ranks, both on logarithmic scales."""
    from matplotlib.ticker import LogLocator, NullFormatter

    size = (plots.WIDTH, 7.2)
    figure, axes = plots.pyplot().subplots(2, 2, figsize=size, layout="constrained")
    shades = [plots.LIGHT[each] for each in ("ours", "peers", "good", "bare")]
    for axis, (title, (cost, figures)) in zip(axes.flat, PANELS.items(), strict=True):
        for color, (name, label) in zip(shades, figures.items(), strict=False):
            points = results.get(name, {})
            if points:
                sizes = [int(n) * SHARDS.get(name, 1) for n in points]
                axis.plot(sizes, list(points.values()), marker="o", ms=4, color=color, label=label)
        unit = "shards" if next(iter(figures)) in SHARDS else "ranks"
        axis.set(xscale="log", yscale="log", title=title, xlabel=f"{unit}; up: {cost}")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.tick_params(labelcolor=plots.LIGHT["muted"])
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0e}".replace("e+0", "0^"))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        for each in (axis.xaxis, axis.yaxis):
            each.set_minor_formatter(NullFormatter())
        axis.legend(loc="upper left", bbox_to_anchor=(-0.1, -0.2), handlelength=1)
        axis.grid(alpha=0.5)
    plots.save(figure, path, "Cost against ranks and shards")


def document(results: Results) -> dict[str, Any]:
    """Collect the results for JSON."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
        "versions": {"ckpipe": ckpipe.__version__, "torch": torch.__version__},
        "tensors": scale_measures.TENSORS,
        "shards of the index per rank": scale_measures.SHARDS,
        "figures": results,
    }


def main() -> None:
    """Measure, print, and write JSON and a plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the two smallest worlds")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--plots", type=Path, default=None, help="a folder for the picture")
    parser.add_argument("--measure", nargs=2, metavar=("NAME", "RANKS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        name, ranks = arguments.measure
        print(json.dumps(scale_measures.MEASURES[name](int(ranks))))
        return
    results = run(QUICK if arguments.quick else RUNS)
    report(results)
    if arguments.json:
        arguments.json.write_text(json.dumps(document(results), indent=1) + "\n")
    if arguments.plots:
        arguments.plots.mkdir(parents=True, exist_ok=True)
        draw(results, arguments.plots / "scale.svg")


if __name__ == "__main__":
    main()
