"""Tables, verdicts and pictures of what ``compare.py`` measured."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

OURS, LIMIT = "ckpipe", "the limit"
UNITS = {"bytes": 1e6}
Row = Mapping[str, list[float]]


def text(results: Mapping[str, Any]) -> str:
    """Tables of medians with their spread, ratios to the limit, and where ours is not first."""
    lines: list[str] = []
    for state, measures in results["states"].items():
        lines += ["", f"{state}, seconds (bytes: MB), median (least to most)"]
        lines += _table(measures)
    for loop, measures in results["loops"].items():
        lines += ["", f"a {loop} loop in one thread while the first state is saved"]
        lines += _table(measures)
    if results["peak memory"]:
        lines += ["", "peak host memory above the first state, MiB"]
        lines += [f"  {n:22s}{v / 2**20:10.0f}" for n, v in results["peak memory"].items()]
    lines += ["", *(f"left out: {name}: {why}" for name, why in results["left out"].items())]
    worse = list(not_first(results))
    lines += [f"ours is not first: {each}" for each in worse] or ["ours is first everywhere"]
    return "\n".join(lines)


def _table(measures: Mapping[str, Row]) -> list[str]:
    lines = []
    for measure, row in measures.items():
        unit = UNITS.get(measure, 1.0)
        limit = statistics.median(row[LIMIT]) if LIMIT in row else None
        for name, values in row.items():
            median = statistics.median(values)
            shown = f"{median / unit:9.3f}  ({min(values) / unit:.3f} to {max(values) / unit:.3f})"
            ratio = f"  {median / limit:6.2f} x limit" if limit and name != LIMIT else ""
            lines.append(f"  {measure:15s}{name:22s}{shown:32s}{ratio}")
    return lines


def not_first(results: Mapping[str, Any]) -> Iterator[str]:
    """Where a peer's median is better than ours."""
    tables = {**results["states"], **{f"{k} loop": v for k, v in results["loops"].items()}}
    tables["memory"] = {"peak": {name: [v] for name, v in results["peak memory"].items()}}
    for table, measures in tables.items():
        for measure, row in measures.items():
            better = max if measure == "step rate" else min
            medians = {n: statistics.median(v) for n, v in row.items() if n != LIMIT}
            if OURS not in medians:
                continue
            best = better(medians, key=lambda name: medians[name])
            if best != OURS:
                yield f"{table}, {measure}: {best} {medians[best]:.3g}, ours {medians[OURS]:.3g}"


def draw(results: Mapping[str, Any], folder: Path) -> None:
    """Bars for each measure of the first state, and the stages of one save of ours."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measures = next(iter(results["states"].values()))
    names = [name for name in measures if name != "bytes"]
    figure, axes = pyplot.subplots(1, len(names), figsize=(4 * len(names), 4), layout="constrained")
    for axis, measure in zip(axes, names, strict=True):
        _bars(axis, measure, measures[measure])
    figure.savefig(folder / "compare.png", dpi=110)
    pyplot.close(figure)
    figure, axis = pyplot.subplots(figsize=(8, 3), layout="constrained")
    _gantt(axis, results["timeline"])
    figure.savefig(folder / "timeline.png", dpi=110)
    pyplot.close(figure)


def _bars(axis: Any, measure: str, row: Row) -> None:
    order = list(row)[::-1]
    medians = [statistics.median(row[name]) for name in order]
    colors = [{"ckpipe": "tab:blue", LIMIT: "tab:gray"}.get(name, "tab:orange") for name in order]
    bars = axis.barh(order, medians, color=colors)
    axis.bar_label(bars, [f" {median:.2f}" for median in medians])
    axis.set_title(f"{measure}, s")
    axis.margins(x=0.2)


def _gantt(axis: Any, stages: Mapping[str, Mapping[str, float]]) -> None:
    order = sorted(stages, key=lambda name: -stages[name]["began"])
    for row, name in enumerate(order):
        axis.barh(row, stages[name]["seconds"] * 1e3, left=stages[name]["began"] * 1e3)
    axis.set_yticks(range(len(order)), order)
    axis.set_xlabel("milliseconds from the call of save()")
    axis.set_title("One save")


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """What differs between two runs by more than both spreads."""
    for table in old["states"].keys() & new["states"].keys():
        before, after = old["states"][table], new["states"][table]
        for measure in before.keys() & after.keys():
            for name in before[measure].keys() & after[measure].keys():
                was, now = before[measure][name], after[measure][name]
                if max(was) < min(now) or max(now) < min(was):
                    ratio = statistics.median(now) / statistics.median(was)
                    yield f"{table}, {measure}, {name}: {ratio:.2f} times what it was"


def main() -> None:
    """Compares two files of results."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    arguments = parser.parse_args()
    old, new = (json.loads(path.read_text()) for path in (arguments.old, arguments.new))
    found = sorted(changes(old, new))
    print("\n".join(found) if found else "nothing changed beyond the spread")


if __name__ == "__main__":
    main()
