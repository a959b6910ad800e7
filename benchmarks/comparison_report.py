"""Make tables, verdicts and plots from the results of ``compare.py``.

python benchmarks/comparison_report.py OLD.json NEW.json     print the changes beyond the spread
python benchmarks/comparison_report.py --publish NEW.json    put tables and plots into the pages
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plots
from comparison_parts import BESIDE, LIMIT

OURS = "ckpipe"
OTHER_WAYS = ("ckpipe, captured", "ckpipe, process", "ckpipe, process, captured")


@dataclass(frozen=True)
class Measure:
    """One measure in tables and plots.

    Args:
        name: The column of a table.
        title: The line above a plot.
        unit: The unit: ``s``, ``MB``, ``MiB`` or ``of undisturbed``.
        bare: The measure of the bare machine, for comparison.
    """

    name: str
    title: str
    unit: str = "s"
    bare: str = ""


MEASURES = {
    "blocked": Measure("blocked", "Blocked", bare="plain copy"),
    "durable": Measure("durable", "Durable", bare="raw write"),
    "cold": Measure("cold load", "Cold load", bare="raw read"),
    "warm": Measure("warm load", "Warm load", bare="raw read, cached"),
    "bytes": Measure("on disk", "Size on disk", "MB"),
    "peak memory": Measure("memory", "Memory of a save", "MiB"),
    "lost s": Measure("lost", "Lost to a save"),
    "held up s": Measure("held up", "Held up"),
    "longest step s": Measure("longest step", "Longest step"),
    "durable beside it s": Measure("durable", "Durable"),
    "step rate": Measure("step rate", "Step rate", "of undisturbed"),
}
FACTORS = {"MB": 1e6, "MiB": 2.0**20}
BARE = "bare machine"
HIGHER_IS_BETTER = ("step rate",)
LEAST_CHANGE, LEAST_CHANGE_OF_ONE = 1.02, 1.15
"""The least reported change, for several rounds and for a single one, as a ratio."""

LEAST_RATE, SHARE_OF_A_SAVE = 0.85, 0.15
"""The goals for the step rate, and for the cost of a save as a share of its duration."""

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = (
    ROOT / "README.md",
    DOCS / "index.md",
    DOCS / "benchmarks.md",
    ROOT / "benchmarks" / "runs.md",
)
MARKS = re.compile(r"(<!-- bench:(\w+) -->\n).*?(<!-- bench:end -->)", re.DOTALL)

Row = Mapping[str, list[float]]
Tables = dict[str, dict[str, Row]]
"""Title of a table, then measure, then contender, then a value for each round."""


def tables(results: Mapping[str, Any]) -> Tables:
    """Collect all measurements in tables of one form."""
    found: Tables = {**results["states"], **results["loops"]}
    for state, peaks in results["peak memory"].items():
        row = {name: [float(peak)] for name, peak in peaks.items()}
        found[state] = {**found.get(state, {}), "peak memory": row}
    return found


def text(results: Mapping[str, Any]) -> str:
    """Write tables of medians with spread, ratios to the limit, and the measures we do not win."""
    lines: list[str] = []
    for title, measures in tables(results).items():
        lines += ["", f"{title}: median (least to most)"]
        lines += _table(measures)
    lines += ["", *missing(results), *verdict(results), ""]
    for name, value, sense, goal in figures(results):
        lines.append(f"{name:78s} {value:8.3f}   to reach {sense} {goal:.3f}   "
                     f"{'ok' if met(value, sense, goal) else 'MISSED'}")  # fmt: skip
    return "\n".join(lines)


def verdict(results: Mapping[str, Any]) -> list[str]:
    """List the measures in which ckpipe is not first, as sentences."""
    if not any(OURS in row for table in tables(results).values() for row in table.values()):
        return ["nothing of ours was measured"]
    worse = [f"ours is not first: {each}" for each in not_first(results)]
    return worse or ["ours is first everywhere"]


def missing(results: Mapping[str, Any]) -> list[str]:
    """List notes on the run, and the contenders left out or given up, with the reasons."""
    lines = list(results.get("notes", ()))
    lines += [f"left out: {name}: {why}" for name, why in results["left out"].items()]
    return lines + [
        f"given up: {each['contender']}, {each['during']}: {each['why']}"
        for each in results.get("failed", ())
    ]


def figures(results: Mapping[str, Any]) -> Iterator[tuple[str, float, str, float]]:
    """Yield the goals for the cost of a save beside a loop: name, figure, sense and goal."""
    for title, measures in results["loops"].items():
        lost = {name: statistics.median(row) for name, row in measures.get("lost s", {}).items()}
        ways = (OURS, *OTHER_WAYS)
        peers = [seconds for name, seconds in lost.items() if name not in ways]
        copy = results["states"].get(title.rpartition(",")[0], {}).get("blocked", {}).get(LIMIT)
        for ours in ways:
            if ours not in lost:
                continue
            what = title + ours.removeprefix(OURS)
            if ours in measures.get("step rate", {}) and "process" not in ours:
                rate = statistics.median(measures["step rate"][ours])
                yield f"{what}: step rate", rate, ">=", LEAST_RATE
            if peers:
                yield f"{what}: lost s, against the best peer's", lost[ours], "<=", min(peers) / 2
            if copy and ours in measures.get(BESIDE, {}):
                share = statistics.median(measures[BESIDE][ours]) * SHARE_OF_A_SAVE
                goal = statistics.median(copy) + share
                yield f"{what}: lost s, against copy and duration", lost[ours], "<=", goal


def met(value: float, sense: str, goal: float) -> bool:
    """Tell whether a goal was reached."""
    return value >= goal if sense == ">=" else value <= goal


def _table(measures: Mapping[str, Row]) -> list[str]:
    lines = []
    most = max((len(values) for row in measures.values() for values in row.values()), default=0)
    for key, row in measures.items():
        measure = MEASURES[key]
        limit = statistics.median(row[LIMIT]) if LIMIT in row else None
        for name, values in row.items():
            median = statistics.median(values)
            spread = f"({shown(measure, min(values))} to {shown(measure, max(values))})"
            ratio = f"  {median / limit:6.2f} x {measure.bare}" if limit and name != LIMIT else ""
            fewer = f"  of {len(values)}" if len(values) < most else ""
            lines.append(
                f"  {measure.name:14s}{_bare_name(measure, name):26s}"
                f"{shown(measure, median):>12s}  {spread:28s}{ratio}{fewer}".rstrip()
            )
    return lines


def shown(measure: Measure, value: float) -> str:
    """Format a value for readers: milliseconds below a second, no exponents."""
    if measure.unit == "s":
        return f"{readable(value)} s" if abs(value) >= 1 else f"{readable(value * 1e3)} ms"
    if measure.unit == "of undisturbed":
        return f"{value:.2f}"
    return f"{readable(value / FACTORS[measure.unit])} {measure.unit}"


def readable(value: float) -> str:
    """Format a number with three digits and without an exponent."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.01 else f"{value:.2f}"


def _bare_name(measure: Measure, name: str) -> str:
    return measure.bare if name == LIMIT else name


def not_first(results: Mapping[str, Any]) -> Iterator[str]:
    """List the measures in which a peer's median is better than ours."""
    for title, key, best, theirs, ours in _beaten(results):
        measure = MEASURES[key]
        yield f"{title}, {measure.name}: {best} {shown(measure, theirs)}, ours " + (
            shown(measure, ours)
        )


def _beaten(results: Mapping[str, Any]) -> Iterator[tuple[str, str, str, float, float]]:
    """Yield table, measure, best peer, its median and ours, if ours is worse."""
    for title, measures in tables(results).items():
        for key, row in measures.items():
            medians = _medians(row)
            if OURS not in medians:
                continue
            best = (max if key in HIGHER_IS_BETTER else min)(medians, key=lambda n: medians[n])
            if shown(MEASURES[key], medians[best]) != shown(MEASURES[key], medians[OURS]):
                yield title, key, best, medians[best], medians[OURS]


def _medians(row: Row) -> dict[str, float]:
    """Return the medians of ckpipe and of the peers."""
    others = (LIMIT, *OTHER_WAYS)
    return {name: statistics.median(row[name]) for name in row if name not in others}


def summary(results: Mapping[str, Any]) -> str:
    """Write the table and the lines at the head of the page."""
    title, measures = next(iter(results["states"].items()))
    about = results["machine"]
    lines = [f"| {title} | ckpipe | best peer | bare machine |", "|---|---:|---:|---:|"]
    for key in ("blocked", "durable", "cold"):
        row, measure = measures.get(key, {}), MEASURES[key]
        medians = _medians(row)
        ours = medians.pop(OURS, None)
        if ours is not None and medians and LIMIT in row:
            best = min(medians, key=lambda name: medians[name])
            bare = shown(measure, statistics.median(row[LIMIT]))
            lines.append(
                f"| {measure.name} | **{shown(measure, ours)}** | "
                f"{shown(measure, medians[best])} ({best}) | {bare} ({measure.bare}) |"
            )
    lines += [
        "",
        f"Medians of {results['rounds']} interleaved rounds on {about['cpus']} cores of "
        f"{about['processor'] or 'a processor'} with a local disk, {results['date']}, "
        f"torch {results['versions']['torch']}. `make bench` measures it again in an hour, "
        "`make bench-quick` in two minutes, `make bench-local` this disk alone.",
        "",
    ]
    return "\n".join(lines)


def markdown(results: Mapping[str, Any], elsewhere: Set[str] = frozenset()) -> str:
    """Write the medians as tables for a page, contenders down and measures across."""
    lines: list[str] = []
    for title, measures in tables(results).items():
        if title in elsewhere:
            continue
        lines += [f"### {title}", "", _rounds(measures), ""]
        heads = [MEASURES[key].name for key in measures]
        lines += [f"| | {' | '.join(heads)} |", "|---" + "|---:" * len(heads) + "|"]
        for name in _in_order(name for row in measures.values() for name in row):
            cells = [
                shown(MEASURES[key], statistics.median(row[name])) if row.get(name) else ""
                for key, row in measures.items()
            ]
            lines.append(f"| {BARE if name == LIMIT else name} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _in_order(names: Iterable[str]) -> list[str]:
    """Order contenders: the bare machine, ckpipe in all its ways, the peers."""
    first = (LIMIT, OURS, *OTHER_WAYS)
    found = dict.fromkeys(names)
    return [n for n in first if n in found] + [n for n in found if n not in first]


def _rounds(measures: Mapping[str, Row]) -> str:
    """Write the number of rounds behind the medians of a table; memory is measured once."""
    counts = {
        len(values)
        for measure, row in measures.items()
        for values in row.values()
        if measure != "peak memory"
    }
    if not counts:
        return ""
    least, most = min(counts), max(counts)
    return f"Medians of {least}." if least == most else f"Medians of {least} to {most}."


def headline(results: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the first state and its loops: their plots are published, all else is in tables."""
    first = next(iter(results["states"]))
    loops = {title: each for title, each in results["loops"].items() if title.startswith(first)}
    peaks = {first: results["peak memory"].get(first, {})}
    return {**results, "states": {first: results["states"][first]}, "loops": loops,
            "peak memory": peaks}  # fmt: skip


def draw(results: Mapping[str, Any], folder: Path) -> list[tuple[str, str]]:
    """Draw bars for each measure of each table, and the stages and blocks of one save.

    Returns:
        Names and captions of the pictures, in order.
    """
    drawn = []
    for title, measures in tables(results).items():
        several = {key: row for key, row in measures.items() if len(row) > 1}
        beside = title in results["loops"]
        what = "What one save costs a training loop" if beside else "Saving and loading"
        better = "lower is better, but of the step rate" if beside else "lower is better"
        drawn.append(
            (
                f"bench-{_slug(title)}.svg",
                f"{what}: {title}. Medians; {better}. Thin lines: least to most of all rounds.",
            )
        )
        _draw_table(several, folder / drawn[-1][0], f"{what}: {title}")
    if "timeline" in results:
        drawn.append(
            (
                "bench-timeline.svg",
                "One save from the call on: its stages, and below them its blocks as they are "
                "copied and written.",
            )
        )
        figure, axis = plots.pyplot().subplots(figsize=(plots.WIDTH, 4.2), layout="constrained")
        plots.legend(figure, _gantt(axis, results["timeline"]), columns=2)
        plots.save(figure, folder / drawn[-1][0], "One save of GPT-2 124M with AdamW")
    return drawn


def _draw_table(measures: Mapping[str, Row], path: Path, title: str) -> None:
    """Draw the measures of a table, two beside each other, with the contenders down."""
    pairs = [list(measures.items())[at : at + 2] for at in range(0, len(measures), 2)]
    names = [_in_order(name for _, row in pair for name in row) for pair in pairs]
    figure, axes = plots.pyplot().subplots(
        len(pairs), 2, figsize=(plots.WIDTH, sum(0.4 + 0.19 * len(each) for each in names) + 0.5),
        layout="constrained", squeeze=False, sharey="row",
        gridspec_kw={"height_ratios": [len(each) for each in names]},
    )  # fmt: skip
    for line, pair, order in zip(axes, pairs, names, strict=True):
        for axis in line[len(pair) :]:
            axis.set_visible(False)
        for axis, (key, row) in zip(line, pair, strict=False):
            told = {n: shown(MEASURES[key], statistics.median(row[n])) for n in row}
            rows = {name: row.get(name, []) for name in order}
            plots.bars(axis, rows, {name: _color(name) for name in order}, told)
            axis.set_title(MEASURES[key].title)
        labels = [_short(name) for name in order[::-1]]
        line[0].set_yticks(range(len(order)), labels)
    kinds = {_color(name): _kind(name) for order in names for name in order}
    plots.legend(figure, kinds.items(), columns=2)
    plots.save(figure, path, title)


def _short(name: str) -> str:
    return BARE if name == LIMIT else name.replace("torch_checkpointing", "torch_checkp.")


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _kind(name: str) -> str:
    if name == LIMIT:
        return "the machine without any library"
    if name in OTHER_WAYS:
        return "ckpipe with other settings"
    return "ckpipe" if name == OURS else "other libraries"


def _color(name: str) -> str:
    own = {OURS: "ours", LIMIT: "bare"} | dict.fromkeys(OTHER_WAYS, "ways")
    return plots.LIGHT[own.get(name, "peers")]


_BLOCKS = (
    ("copier", "copied", "ours", "a block is copied", "copy thread"),
    ("", "summed", "peers", "a block is checksummed", "checksums"),
    ("lane", "uploaded", "good", "a block is written", "upload lane"),
)


def _gantt(axis: Any, report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Draw stages as bars, and below them the blocks of copy threads and upload lanes.

    Returns:
        The colours that were drawn and what they mean.
    """
    rows: list[str] = []
    for name, stage in sorted(report["stages"].items(), key=lambda item: item[1]["began"]):
        began, took = stage["began"] * 1e3, stage["seconds"] * 1e3
        axis.barh(len(rows), took, left=began, color=plots.LIGHT["bare"])
        axis.text(began + took, len(rows), f" {readable(took)} ms", va="center")
        rows.append(name)
    blocks, kinds = report["blocks"], [(plots.LIGHT["bare"], "a stage")]
    for place, kind, color, meaning, label in _BLOCKS:
        numbers = blocks[place] if place else [0] * len(blocks[kind])
        # A block that the copy checksums has no separate time for the checksum.
        found = [each for each in zip(numbers, blocks[kind], strict=True) if each[1] is not None]
        kinds += [(plots.LIGHT[color], meaning)] if found else []
        for number in sorted({at for at, _ in found}):
            spans = [
                (began / 1e3, (ended - began) / 1e3) for at, (began, ended) in found if at == number
            ]
            axis.broken_barh(
                spans, (len(rows) - 0.4, 0.8), color=plots.LIGHT[color],
                edgecolor=plots.LIGHT["ground"], lw=0.4,
            )  # fmt: skip
            rows.append(f"{label} {number + 1}" if place else label)
    axis.set_yticks(range(len(rows)), rows)
    axis.tick_params(axis="y", length=0)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.15 * axis.get_xlim()[1])
    axis.set_xlabel("milliseconds after the call of save()")
    return kinds


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences of two runs that exceed both spreads."""
    before, after = tables(old), tables(new)
    for title in before.keys() & after.keys():
        for measure in before[title].keys() & after[title].keys():
            was, now = before[title][measure], after[title][measure]
            for name in was.keys() & now.keys():
                if _differ(was[name], now[name]):
                    ratio = statistics.median(now[name]) / (statistics.median(was[name]) or 1e-12)
                    yield f"{title}, {measure}, {name}: {ratio:.2f} times what it was"


def _differ(was: list[float], now: list[float]) -> bool:
    low, high = sorted((was, now), key=max)
    alone = min(len(was), len(now)) == 1
    least = LEAST_CHANGE_OF_ONE if alone else LEAST_CHANGE
    return max(low) < min(high) and min(high) > least * max(low)


def publish(results: Mapping[str, Any], pages: tuple[Path, ...], folder: Path) -> None:
    """Draw the plots into the documentation, and write text between the marks of pages.

    Args:
        results: The results.
        pages: Pages that have marks, ``<!-- bench:… -->`` for ``summary``, ``first`` (the first
            and the last plot), ``plots``, ``tables``, ``more`` (tables of the other states'
            loops) or ``goals``, each with ``<!-- bench:end -->`` after it.
        folder: The folder of the pictures.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = draw(headline(results), folder)
    for page in pages:
        path = os.path.relpath(folder, page.parent)
        images = [
            f"![{name[6:-4].replace('-', ' ')}]({path}/{name})\n\n*{caption}*\n"
            for name, caption in drawn
        ]
        parts = {
            "summary": summary(results),
            "first": "\n".join((images[0], images[-1])),
            "plots": "\n".join(images),
            "tables": _page_tables(results),
            "more": _page_more(results),
            "goals": _page_goals(results),
        }
        page.write_text(_filled(page.read_text(), parts))


def _filled(page: str, parts: Mapping[str, str]) -> str:
    return MARKS.sub(lambda mark: mark[1] + parts[mark[2]] + mark[3], page)


def _page_tables(results: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    platform = results["machine"]["platform"]
    others = results["loops"].keys() - headline(results)["loops"].keys()
    tables_of_page = markdown(results, others)
    return "\n".join([f"{platform}; {versions}.\n", tables_of_page, *_behind(results, others)])


def _page_more(results: Mapping[str, Any]) -> str:
    """Write what the page leaves out: the loops of all but the first state."""
    shown_before = {*results["states"], *headline(results)["loops"]}
    return "\n".join([markdown(results, shown_before), *_behind(results, shown_before)])


def _behind(results: Mapping[str, Any], elsewhere: Set[str]) -> list[str]:
    worse = [
        f"* {told[0].upper()}{told[1:]}."
        for (title, *_), told in zip(_beaten(results), not_first(results), strict=True)
        if title not in elsewhere
    ]
    return ["### Where a peer is better", "", *worse, ""] if worse else []


def _page_goals(results: Mapping[str, Any]) -> str:
    told = [f"* {each}" for each in missing(results)]
    goals = ["| beside a loop | measured | to reach |", "|---|---|---|"]
    for name, value, sense, goal in figures(results):
        miss = "" if met(value, sense, goal) else " (missed)"
        goals.append(f"| {name} | {value:.3g}{miss} | {sense} {goal:.3g} |")
    return "\n".join([*told, "", *(goals if len(goals) > 2 else ()), ""])


def main() -> None:
    """Compare two files of results, or publish one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--publish", action="store_true")
    parser.add_argument("files", type=Path, nargs="+")
    arguments = parser.parse_args()
    results = [json.loads(path.read_text()) for path in arguments.files]
    if arguments.publish:
        publish(results[-1], PAGES, plots.PLOTS)
        kept = arguments.files[-1].resolve()
        if kept.parent != ROOT / "benchmarks" / "results":
            kept = ROOT / "benchmarks" / "results" / f"compare-{results[-1]['date']}.json"
            kept.write_text(json.dumps(results[-1], indent=1) + "\n")
        print(f"published; the results are kept as {kept.relative_to(ROOT)}")
        return
    if len(results) != 2:
        parser.error("give two files of results: make bench-compare OLD=old.json")
    found = sorted(changes(*results))
    print("\n".join(found) if found else "nothing changed beyond the spread")


if __name__ == "__main__":
    main()
