"""Tables, verdicts and pictures of what ``compare.py`` measured.

python benchmarks/comparison_report.py OLD.json NEW.json     what has changed beyond the spread
python benchmarks/comparison_report.py --publish NEW.json    puts tables and plots into the pages
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from comparison_parts import BESIDE, LIMIT

OURS = "ckpipe"
OTHER_WAYS = ("ckpipe, captured", "ckpipe, process", "ckpipe, process, captured")
UNITS = {
    "bytes": (1e6, "MB"),
    "peak memory": (2.0**20, "MiB"),
    "step rate": (1.0, "of undisturbed"),
}
HIGHER_IS_BETTER = ("step rate",)
LEAST_CHANGE, LEAST_CHANGE_OF_ONE = 1.02, 1.15
"""How much has to change to be told, of several rounds and of a single one, as a ratio."""

LEAST_RATE, SHARE_OF_A_SAVE = 0.85, 0.15
"""Steps beside a save, of undisturbed ones; and the share of its duration that a save may cost."""

_ACROSS = 3

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "docs" / "benchmarks.md")
MARKS = re.compile(r"(<!-- bench:(\w+) -->\n).*?(<!-- bench:end -->)", re.DOTALL)

Row = Mapping[str, list[float]]
Tables = dict[str, dict[str, Row]]
"""Title of a table, then measure, then contender, then a value for each round."""


def tables(results: Mapping[str, Any]) -> Tables:
    """All that was measured, in tables of one form."""
    found: Tables = {**results["states"], **results["loops"]}
    for state, peaks in results["peak memory"].items():
        row = {name: [float(peak)] for name, peak in peaks.items()}
        found[state] = {**found.get(state, {}), "peak memory": row}
    return found


def text(results: Mapping[str, Any]) -> str:
    """Tables of medians with their spread, ratios to the limit, and where ours is not first."""
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
    """Where ours is not first, in sentences."""
    if not any(OURS in row for table in tables(results).values() for row in table.values()):
        return ["nothing of ours was measured"]
    worse = [f"ours is not first: {each}" for each in not_first(results)]
    return worse or ["ours is first everywhere"]


def missing(results: Mapping[str, Any]) -> list[str]:
    """What to know of the run, who was left out, and who was given up on the way, with reasons."""
    lines = list(results.get("notes", ()))
    lines += [f"left out: {name}: {why}" for name, why in results["left out"].items()]
    return lines + [
        f"given up: {each['contender']}, {each['during']}: {each['why']}"
        for each in results.get("failed", ())
    ]


def figures(results: Mapping[str, Any]) -> Iterator[tuple[str, float, str, float]]:
    """What a save may cost a loop beside it: name, figure, sense and goal."""
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
    """Whether a figure was reached."""
    return value >= goal if sense == ">=" else value <= goal


def _table(measures: Mapping[str, Row]) -> list[str]:
    lines = []
    most = max((len(values) for row in measures.values() for values in row.values()), default=0)
    for measure, row in measures.items():
        unit, name_of_unit = UNITS.get(measure, (1.0, "s"))
        limit = statistics.median(row[LIMIT]) if LIMIT in row else None
        for name, values in row.items():
            median = statistics.median(values)
            shown = f"{median / unit:9.3f}  ({min(values) / unit:.3f} to {max(values) / unit:.3f})"
            ratio = f"  {median / limit:6.2f} x limit" if limit and name != LIMIT else ""
            head = f"{measure.removesuffix(' s')}, {name_of_unit}"
            fewer = f"  of {len(values)}" if len(values) < most else ""
            lines.append(f"  {head:28s}{name:22s}{shown:32s}{ratio}{fewer}".rstrip())
    return lines


def not_first(results: Mapping[str, Any]) -> Iterator[str]:
    """Where a peer's median is better than ours."""
    for title, measures in tables(results).items():
        for measure, row in measures.items():
            better = max if measure in HIGHER_IS_BETTER else min
            others = (LIMIT, *OTHER_WAYS)
            medians = {n: statistics.median(v) for n, v in row.items() if n not in others}
            if OURS not in medians:
                continue
            best = better(medians, key=lambda name: medians[name])
            unit = UNITS.get(measure, (1.0, "s"))[0]
            theirs, ours = (f"{medians[name] / unit:.4g}" for name in (best, OURS))
            if theirs != ours:
                yield f"{title}, {measure.removesuffix(' s')}: {best} {theirs}, ours {ours}"


def markdown(results: Mapping[str, Any]) -> str:
    """The medians as tables for a page, contenders down and measures across."""
    lines: list[str] = []
    for title, measures in tables(results).items():
        names = list(dict.fromkeys(name for row in measures.values() for name in row))
        heads = [f"{m.removesuffix(' s')}, {UNITS.get(m, (1, 's'))[1]}" for m in measures]
        lines += [f"### {title}", "", _rounds(measures), ""]
        lines += [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
        for name in names:
            cells = [_cell(measure, row.get(name)) for measure, row in measures.items()]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _rounds(measures: Mapping[str, Row]) -> str:
    """How many rounds the medians of a table are of; memory is measured once."""
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


def _cell(measure: str, values: list[float] | None) -> str:
    if not values:
        return ""
    unit = UNITS.get(measure, (1.0, ""))[0]
    return f"{statistics.median(values) / unit:.3g}"


def draw(results: Mapping[str, Any], folder: Path) -> list[str]:
    """Bars for each measure of each table, and the stages and blocks of one save of ours.

    Returns:
        Names of the pictures, in order.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = []
    for title, measures in tables(results).items():
        shown = [measure for measure in measures if len(measures[measure]) > 1]
        lines = -(-len(shown) // _ACROSS)
        figure, axes = pyplot.subplots(
            lines, _ACROSS, figsize=(11, 3 * lines + 0.3), layout="constrained", squeeze=False
        )
        for axis, measure in zip_longest(axes.flat, shown):
            if measure is None:
                axis.set_visible(False)
            else:
                _bars(axis, measure, measures[measure])
        figure.suptitle(title)
        names.append(f"bench-{_slug(title)}.png")
        figure.savefig(folder / names[-1], dpi=100)
        pyplot.close(figure)
    if "timeline" in results:
        figure, axis = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
        _gantt(axis, results["timeline"])
        names.append("bench-timeline.png")
        figure.savefig(folder / names[-1], dpi=100)
        pyplot.close(figure)
    return names


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _bars(axis: Any, measure: str, row: Row) -> None:
    unit, name_of_unit = UNITS.get(measure, (1.0, "s"))
    order = list(row)[::-1]
    medians = [statistics.median(row[name]) / unit for name in order]
    spread = [
        [m - min(row[n]) / unit for n, m in zip(order, medians, strict=True)],
        [max(row[n]) / unit - m for n, m in zip(order, medians, strict=True)],
    ]
    own = {OURS: "tab:blue", LIMIT: "tab:gray"} | dict.fromkeys(OTHER_WAYS, "tab:cyan")
    colors = [own.get(name, "tab:orange") for name in order]
    bars = axis.barh(order, medians, xerr=spread, color=colors, ecolor="black", capsize=2)
    axis.bar_label(bars, [f" {median:.3g}" for median in medians])
    axis.set_title(f"{measure.removesuffix(' s')}, {name_of_unit}")
    axis.set_xlim(min(0.0, *medians), 1.4 * max(*(max(row[n]) / unit for n in order), 1e-9))


def _gantt(axis: Any, report: Mapping[str, Any]) -> None:
    """Stages as bars, and below them the blocks as copiers and lanes had them."""
    rows: list[str] = []
    for name, stage in sorted(report["stages"].items(), key=lambda item: item[1]["began"]):
        axis.barh(len(rows), stage["seconds"] * 1e3, left=stage["began"] * 1e3, color="tab:gray")
        rows.append(name)
    blocks = report["blocks"]
    kinds = (
        ("copier", "copied", "tab:blue"),
        ("", "summed", "goldenrod"),
        ("lane", "uploaded", "seagreen"),
    )
    for place, kind, color in kinds:
        numbers = blocks[place] if place else [0] * len(blocks[kind])
        # What was summed while it was copied has no time of its own for that.
        found = [each for each in zip(numbers, blocks[kind], strict=True) if each[1] is not None]
        for number in sorted({at for at, _ in found}):
            spans = [
                (began / 1e3, (ended - began) / 1e3) for at, (began, ended) in found if at == number
            ]
            axis.broken_barh(spans, (len(rows) - 0.4, 0.8), color=color, edgecolor="white", lw=0.4)
            rows.append(f"{place} {number}" if place else "checksums")
    axis.set_yticks(range(len(rows)), rows)
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.set_xlabel("milliseconds after the call of save()")
    axis.set_title("One save: stages, and its blocks copied and uploaded")


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """What differs between two runs by more than both spreads."""
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


def publish(results: Mapping[str, Any], pages: tuple[Path, ...], plots: Path) -> None:
    """Draws the plots into the documentation, and writes the tables between the marks of pages.

    Args:
        results: What was measured.
        pages: Pages that have marks, ``<!-- bench:… -->`` for ``first`` (the first and the last
            plot), ``plots`` or ``tables``, each with ``<!-- bench:end -->`` behind it.
        plots: The folder of the pictures.
    """
    plots.mkdir(parents=True, exist_ok=True)
    names = draw(results, plots)
    for page in pages:
        path = plots.relative_to(page.parent).as_posix()
        images = [f"![{name[6:-4].replace('-', ' ')}]({path}/{name})\n" for name in names]
        parts = {
            "first": images[0] + images[-1],
            "plots": "".join(images),
            "tables": _page_tables(results),
        }
        page.write_text(_filled(page.read_text(), parts))


def _filled(page: str, parts: Mapping[str, str]) -> str:
    """A page with new text between its marks."""
    return MARKS.sub(lambda match: match[1] + parts[match[2]] + match[3], page)


def _page_tables(results: Mapping[str, Any]) -> str:
    about = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    head = (
        f"{results['date']}, {about['cpus']} cores of {about['processor'] or 'a processor'}, "
        f"{about['platform']}; {versions}.\n"
    )
    told = [f"* {each}" for each in (*verdict(results), *missing(results))]
    goals = ["", "| beside a loop | measured | to reach |", "|---|---|---|"]
    for name, value, sense, goal in figures(results):
        miss = "" if met(value, sense, goal) else " (missed)"
        goals.append(f"| {name} | {value:.3g}{miss} | {sense} {goal:.3g} |")
    return "\n".join([head, markdown(results), *told, *(goals if len(goals) > 3 else ()), ""])


def main() -> None:
    """Compares two files of results, or publishes one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--publish", action="store_true")
    parser.add_argument("files", type=Path, nargs="+")
    arguments = parser.parse_args()
    results = [json.loads(path.read_text()) for path in arguments.files]
    if arguments.publish:
        publish(results[-1], PAGES, ROOT / "docs" / "plots")
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
