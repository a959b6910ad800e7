"""Draw the plots of the documentation from committed results.

python benchmarks/plots.py [FOLDER]    draw all into docs/plots, or into another folder

Each picture is one SVG with text in the fonts of the reader. Its colours are CSS variables, so the
same file is readable in light and in dark mode, on the site and where the repository is shown.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PLOTS = ROOT / "docs" / "plots"

COLORS = {
    "ground": ("#ffffff", "#1f222b"),
    "text": ("#1f2328", "#dfe3ea"),
    "muted": ("#59636f", "#9aa4b2"),
    "rule": ("#d1d9e0", "#3d4350"),
    "panel": ("#f4f6f9", "#292d38"),
    "ours": ("#3f51b5", "#8c9eff"),
    "ways": ("#9fa8da", "#5260b8"),
    "peers": ("#e08a2c", "#d98a3a"),
    "bare": ("#8a939e", "#7a8494"),
    "good": ("#2f9e57", "#3fb46b"),
    "bad": ("#cf3030", "#f0605a"),
}
"""Each colour in light and in dark mode. The light ones are unique: they become variables."""

LIGHT = {name: light for name, (light, _) in COLORS.items()}
FONT = "-apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
_LIGHT, _DARK = (
    ":root{" + "".join(f"--{name}:{both[at]};" for name, both in COLORS.items()) + "}"
    for at in (0, 1)
)
STYLE = f"text{{font-family:{FONT}}}{_LIGHT}@media (prefers-color-scheme:dark){{{_DARK}}}"
"""The colours as variables. Browsers take the scheme of the page that shows the picture."""

WIDTH, SHOWN_WIDTH = 5.2, 624
"""The width of a figure in inches of 10-point text, and the pixels it takes where there is room."""


def pyplot() -> Any:
    """Import matplotlib with the colours and sizes of all plots."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({
        "svg.fonttype": "none", "svg.hashsalt": "ckpipe", "font.size": 10,
        "figure.facecolor": LIGHT["ground"], "axes.facecolor": "none", "legend.frameon": False,
        "text.color": LIGHT["text"], "axes.edgecolor": LIGHT["rule"], "grid.color": LIGHT["rule"],
        "axes.labelcolor": LIGHT["muted"], "xtick.color": LIGHT["muted"],
        "ytick.color": LIGHT["rule"], "ytick.labelcolor": LIGHT["text"],
        "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left",
        "axes.spines.top": False, "axes.spines.right": False, "lines.solid_capstyle": "butt",
    })  # fmt: skip
    from matplotlib import pyplot as drawing

    return drawing


def save(figure: Any, path: Path, title: str) -> None:
    """Write a figure as an SVG for light and dark mode."""
    figure.savefig(path, format="svg", metadata={"Title": title, "Date": None, "Creator": None})
    pyplot().close(figure)
    text = path.read_text(encoding="utf-8")
    # The program writes the size in points, and the fonts it measured the text with.
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    assert box is not None
    height = SHOWN_WIDTH * float(box[2]) / float(box[1])
    text = re.sub(
        r'width="[\d.]+pt" height="[\d.]+pt"',
        f'width="{SHOWN_WIDTH}" height="{height:.0f}" role="img"',
        text,
        count=1,
    )
    text = re.sub(r"font-family: [^;\"]+; ", "", text)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for name, light in LIGHT.items():
        text = text.replace(light, f"var(--{name})")
    path.write_text(text.replace("<defs>", f"<style>{STYLE}</style><defs>", 1), encoding="utf-8")


def bars(
    axis: Any,
    rows: Mapping[str, Sequence[float]],
    colors: Mapping[str, str],
    told: Mapping[str, str],
) -> None:
    """Draw the medians of rows as bars that say their value, with lines from least to most.

    A row without values stays empty.
    """
    most = max(max(values) for values in rows.values() if values)
    least = min(0.0, *(statistics.median(values) for values in rows.values() if values))
    for at, (name, values) in enumerate(reversed(list(rows.items()))):
        if not values:
            continue
        median = statistics.median(values)
        axis.barh(at, median, color=colors[name], height=0.72)
        if max(values) > min(values):
            axis.plot((min(values), max(values)), (at, at), color=LIGHT["text"], lw=0.8)
        end = max(max(values), 0.0)
        axis.text(end + 0.025 * most, at, told[name], va="center", color=LIGHT["text"])
    axis.set_yticks(range(len(rows)), list(rows)[::-1])
    axis.set_xlim(least, 1.55 * most)
    axis.set_ylim(-0.5, len(rows) - 0.5)
    axis.xaxis.set_visible(False)
    axis.spines["bottom"].set_visible(False)
    axis.tick_params(axis="y", length=0)


def newest(pattern: str) -> Any:
    """Read the newest of the committed results of one kind."""
    return json.loads(max(RESULTS.glob(pattern)).read_text(encoding="utf-8"))


def draw_gpu(results: Mapping[str, Any], path: Path) -> None:
    """Draw the copy from a GPU beside a bare copy, and the steps beside a save."""
    seconds = results["seconds"]
    figure, axes = pyplot().subplots(2, 1, figsize=(WIDTH, 2.5), layout="constrained")
    copies = {
        name: [results["bytes"] / each / 1e9 for each in seconds[key]]
        for name, key in (("bare copy", "bare"), ("staged by save()", "staged"))
    }
    told = {name: f"{statistics.median(values):.1f} GB/s" for name, values in copies.items()}
    bars(axes[0], copies, dict(zip(copies, (LIGHT["bare"], LIGHT["ours"]), strict=True)), told)
    axes[0].set_title("Copy of 1.49 GB to pinned memory")
    loss = results["figures"]["inflation over a save, %"]
    steps = {"without a save": [100.0], "beside a save": [100.0 + loss]}
    colors = dict(zip(steps, (LIGHT["bare"], LIGHT["ours"]), strict=True))
    told = {name: f"{value:.1f} %" for name, (value,) in steps.items()}
    bars(axes[1], steps, colors, told)
    axes[1].set_title("Time of the same training steps")
    save(figure, path, f"Saves on one {results['machine']['gpu']}")


def draw_stores(stores: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw the speed of saves and loads of each store beside bare requests."""
    figure, axes = pyplot().subplots(2, 2, figsize=(WIDTH, 2.3), layout="constrained", sharey=True)
    for line, (store, results) in zip(axes, stores.items(), strict=True):
        size = results["plan"]["mib"]
        for axis, (ours, bare) in zip(
            line, (("save", "bare write"), ("load", "bare read")), strict=True
        ):
            speeds = {
                name: [size / each["seconds"] for each in results["costs"][key]]
                for name, key in (("bare requests", bare), ("ckpipe", ours))
            }
            colors = dict(zip(speeds, (LIGHT["bare"], LIGHT["ours"]), strict=True))
            told = {n: f"{statistics.median(values):,.0f}" for n, values in speeds.items()}
            bars(axis, speeds, colors, told)
            axis.set_title(f"{store}, {ours}: MiB/s")
    save(figure, path, "Speed of saves and loads beside bare requests (higher is better)")


OUTCOMES = (
    ("same weights", "good"),
    ("other weights, or work lost", "peers"),
    ("no resume", "bad"),
)


def outcomes(page: str) -> dict[str, tuple[int, ...]]:
    """Read the matrix of *Reliability*: how many tried moments of a run ended in which way."""
    found: dict[str, tuple[int, ...]] = {}
    for line in page.splitlines():
        cells = [each.strip() for each in line.strip("|").split("|")]
        if re.fullmatch(r"\w+-(own|ckpipe)", cells[0]):
            tried, other, lost, failed, missed = (
                int(cells[at].split()[0]) for at in (1, 5, 6, 7, 8)
            )
            reached = tried - missed
            found[cells[0]] = (reached - other - lost - failed, other + lost, failed)
    return found


def draw_reliability(runs: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Draw the share of kills that each run survived, with the trainer's files and with ckpipe."""
    figure, axis = pyplot().subplots(figsize=(WIDTH, 3.3), layout="constrained")
    heights = [-(at + 0.5 * (at // 2)) for at in range(len(runs))]
    for height, counts in zip(heights, runs.values(), strict=True):
        began = 0.0
        for (_, color), count in zip(OUTCOMES, counts, strict=True):
            share = 100 * count / sum(counts)
            axis.barh(height, share, left=began, color=LIGHT[color], height=0.82)
            began += share
        axis.text(102, height, f"{counts[0]} of {sum(counts)}", va="center")
    names = [name.replace("-own", ", its own").replace("-", ", ") for name in runs]
    axis.set_yticks(heights, [f"{each[0].upper()}{each[1:]}" for each in names])
    axis.set_xlim(0, 122)
    axis.set_ylim(heights[-1] - 0.6, 0.6)
    axis.set_xticks(range(0, 101, 25), [f"{each} %" for each in range(0, 101, 25)])
    axis.spines["bottom"].set_bounds(0, 100)
    axis.tick_params(axis="y", length=0)
    legend(figure, [(LIGHT[color], label) for label, color in OUTCOMES])
    save(figure, path, "Kills that a run survived with the same weights")


def legend(figure: Any, kinds: Iterable[tuple[str, str]], columns: int = 3) -> None:
    """Put the meaning of colours below a figure."""
    from matplotlib.patches import Patch

    patches = [Patch(color=color, label=label) for color, label in kinds]
    figure.legend(
        handles=patches,
        loc="outside lower center",
        ncols=min(columns, len(patches)),
        handlelength=1,
        handleheight=1,
        columnspacing=1.2,
    )


def main() -> None:
    """Draw all plots from committed results."""
    import comparison_report
    import scale

    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else PLOTS
    folder.mkdir(parents=True, exist_ok=True)
    comparison_report.draw(comparison_report.headline(newest("compare-*.json")), folder)
    draw_gpu(newest("gpu-*.json"), folder / "gpu.svg")
    stores = {"S3": newest("stores-20??-??-??.json"), "GCS": newest("stores-gcs-*.json")}
    draw_stores(stores, folder / "stores.svg")
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    draw_reliability(outcomes(page), folder / "reliability.svg")
    scale.draw(newest("scale-*.json")["figures"], folder / "scale.svg")


if __name__ == "__main__":
    main()
