"""The report of the benchmark beside the peers: its arithmetic, on made-up results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import comparison_report

from ckpipe.types import BlockReport, SaveReport, StageReport


def results(ours: float, peer: float) -> dict[str, Any]:
    def row(factor: float) -> dict[str, list[float]]:
        return {
            "the limit": [1.0 * factor, 1.1 * factor],
            "ckpipe": [ours * factor, 1.1 * ours * factor],
            "DCP": [peer * factor, 1.1 * peer * factor],
        }

    blocks = [
        BlockReport(0, 0, 5, (0.0, 0.1), (0.1, 0.2), (0.1, 0.3)),
        BlockReport(0, 5, 5, (0.1, 0.2), None, (0.2, 0.3)),
    ]
    report = SaveReport({"stage": StageReport(0.1, 5)}, 0.1, 0.3, 5, 1, planned=True, blocks=blocks)
    loop = {"ckpipe": [0.9], "DCP": [0.8]}
    return {
        "date": "2026-11-21",
        "machine": {"cpus": 2, "processor": "", "platform": "Linux"},
        "versions": {"python": "3.11", "torch": "2.13"},
        "rounds": 2,
        "states": {"big": {"blocked": row(1), "durable": row(3)}},
        "loops": {
            "big, python loop": {"step rate": loop, "lost s": {"ckpipe": [0.2], "DCP": [0.5]}}
        },
        "peak memory": {"big": {"ckpipe": 2**20, "DCP": 2**21}},
        "left out": {"torchsnapshot": "ModuleNotFoundError: no module"},
        "failed": [
            {"table": "big", "contender": "DCP", "during": "times: big", "why": "it crashed"}
        ],
        "timeline": report.to_data(),
    }


def test_of_a_single_round_only_large_changes_are_told() -> None:
    old, new = results(2.0, 5.0), results(2.0, 5.0)
    new["loops"]["big, python loop"]["step rate"]["ckpipe"] = [0.85]
    new["peak memory"]["big"]["ckpipe"] = 2**22
    found = list(comparison_report.changes(old, new))
    assert found == ["big, peak memory, ckpipe: 4.00 times what it was"]


def test_draws_its_pictures(tmp_path: Path) -> None:
    drawn = comparison_report.draw(results(2.0, 5.0), tmp_path)
    names = [name for name, _ in drawn]
    assert all(caption.endswith(".") for _, caption in drawn)
    assert names == ["bench-big.svg", "bench-big-python-loop.svg", "bench-timeline.svg"]
    text = (tmp_path / names[0]).read_text()
    assert {"Blocked", "ckpipe", "2.1 s", "DCP", "5.25 s"} <= set(
        re.findall(r">([^<>]+)</text>", text)
    )


def test_publishing_replaces_what_is_between_the_marks(tmp_path: Path) -> None:
    page, other = tmp_path / "docs" / "page.md", tmp_path / "README.md"
    page.parent.mkdir()
    for path in (page, other):
        path.write_text("# A\n<!-- bench:tables -->\nold\n<!-- bench:end -->\nB\n"
                        "<!-- bench:plots -->\n<!-- bench:end -->\n"
                        "<!-- bench:first -->\n<!-- bench:end -->\n"
                        "<!-- bench:summary -->\n<!-- bench:end -->\n"
                        "<!-- bench:goals -->\n<!-- bench:end -->\n")  # fmt: skip
    for _ in range(2):
        comparison_report.publish(results(4.0, 2.0), (page, other), tmp_path / "docs" / "plots")
    text = page.read_text()
    assert "\nold\n" not in text
    assert "| ckpipe | 4.2 s | 12.6 s | 1 MiB |" in text
    assert "| bare machine | 1.05 s | 3.15 s |" in text
    assert "| blocked | **4.2 s** | 2.1 s (DCP) | 1.05 s (plain copy) |" in text
    assert "Medians of 2." in text
    assert "| big, python loop: step rate | 0.9 | >= 0.85 |" in text
    assert "* given up: DCP, times: big: it crashed" in text
    assert "* Big, blocked: DCP 2.1 s, ours 4.2 s." in text
    assert "](plots/bench-timeline.svg)" in text
    assert "](docs/plots/bench-timeline.svg)" in other.read_text()
    assert text.count("### big\n") == 1
    assert text.endswith("<!-- bench:end -->\n")


def test_the_pages_have_the_marks() -> None:
    marks = {
        page.name: {match[1] for match in comparison_report.MARKS.findall(page.read_text())}
        for page in comparison_report.PAGES
    }
    assert marks["README.md"] == marks["index.md"] == {"first"}
    assert marks["benchmarks.md"] == {"summary", "plots", "tables"}
    assert marks["runs.md"] == {"goals", "more"}
