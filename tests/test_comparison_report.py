"""The report of the benchmark beside the peers: its arithmetic, on made-up results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comparison_report
import pytest

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


def test_says_where_a_peer_is_better() -> None:
    assert list(comparison_report.not_first(results(2.0, 5.0))) == []
    worse = list(comparison_report.not_first(results(4.0, 2.0)))
    assert worse == [
        "big, blocked: DCP 2.1 s, ours 4.2 s",
        "big, durable: DCP 6.3 s, ours 12.6 s",
    ]
    found = results(2.0, 5.0)
    found["peak memory"]["big"]["DCP"] = 2**19
    assert len(list(comparison_report.not_first(found))) == 1


def test_a_higher_step_rate_is_the_better_one() -> None:
    found = results(2.0, 5.0)
    found["loops"]["big, python loop"]["step rate"]["DCP"] = [0.95]
    assert len(list(comparison_report.not_first(found))) == 1


def test_the_text_has_ratios_and_what_was_left_out() -> None:
    shown = comparison_report.text(results(2.0, 5.0))
    assert "2.00 x plain copy" in shown
    assert "left out: torchsnapshot" in shown
    assert "ours is first everywhere" in shown
    assert "1 MiB" in shown
    assert "limit" not in shown


def test_only_changes_beyond_the_spread_are_told() -> None:
    old = results(2.0, 5.0)
    assert list(comparison_report.changes(old, results(2.05, 5.0))) == []
    found = set(comparison_report.changes(old, results(4.0, 5.0)))
    assert found == {
        "big, blocked, ckpipe: 2.00 times what it was",
        "big, durable, ckpipe: 2.00 times what it was",
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
    assert names == ["bench-big.png", "bench-big-python-loop.png", "bench-timeline.png"]
    for name in names:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


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
    assert "Medians of 2." in text
    assert "| big, python loop: step rate | 0.9 | >= 0.85 |" in text
    assert "* given up: DCP, times: big: it crashed" in text
    assert "* Big, blocked: DCP 2.1 s, ours 4.2 s." in text
    assert "](plots/bench-timeline.png)" in text
    assert "](docs/plots/bench-timeline.png)" in other.read_text()
    assert text.count("### big\n") == 1
    assert text.endswith("<!-- bench:end -->\n")


def test_what_was_measured_less_often_says_so() -> None:
    found = results(2.0, 5.0)
    found["states"]["big"]["blocked"]["DCP"] = [5.0]
    found["peak memory"] = {}
    lines = comparison_report.text(found).splitlines()
    assert ["DCP" in line for line in lines if line.endswith(" of 1")] == [True]
    assert "Medians of 1 to 2." in comparison_report.markdown(found)


def test_a_save_has_goals_beside_a_loop() -> None:
    found = results(2.0, 5.0)
    found["loops"]["big, python loop"]["durable beside it s"] = {"ckpipe": [2.0]}
    goals = {name: each for name, *each in comparison_report.figures(found)}
    assert goals["big, python loop: step rate"] == [0.9, ">=", 0.85]
    assert goals["big, python loop: lost s, against the best peer's"] == [0.2, "<=", 0.25]
    value, _, goal = goals["big, python loop: lost s, against copy and duration"]
    assert (value, goal) == (0.2, pytest.approx(1.05 + 0.3))


def test_a_save_that_is_only_captured_has_goals_too_and_is_no_peer() -> None:
    found = results(2.0, 5.0)
    found["loops"]["big, python loop"]["lost s"]["ckpipe, captured"] = [0.1]
    goals = {name: each for name, *each in comparison_report.figures(found)}
    assert goals["big, python loop: lost s, against the best peer's"] == [0.2, "<=", 0.25]
    assert goals["big, python loop, captured: lost s, against the best peer's"] == [0.1, "<=", 0.25]
    assert list(comparison_report.not_first(found)) == []


def test_a_save_by_a_process_is_no_peer_and_has_no_goal_of_the_thread() -> None:
    found = results(2.0, 5.0)
    for name in ("ckpipe, process", "ckpipe, process, captured"):
        found["loops"]["big, python loop"]["lost s"][name] = [0.1]
        found["loops"]["big, python loop"]["step rate"][name] = [0.1]
    goals = {name: each for name, *each in comparison_report.figures(found)}
    assert goals["big, python loop: lost s, against the best peer's"] == [0.2, "<=", 0.25]
    assert goals["big, python loop, process: lost s, against the best peer's"] == [0.1, "<=", 0.25]
    assert [name for name in goals if "rate" in name] == ["big, python loop: step rate"]
    assert list(comparison_report.not_first(found)) == []


def test_a_run_that_was_cut_short_is_drawn_as_far_as_it_came(tmp_path: Path) -> None:
    found = results(2.0, 5.0) | {"loops": {}, "peak memory": {}}
    del found["timeline"]
    assert [name for name, _ in comparison_report.draw(found, tmp_path)] == ["bench-big.png"]


def test_the_pages_have_the_marks() -> None:
    marks = {
        page.name: {match[1] for match in comparison_report.MARKS.findall(page.read_text())}
        for page in comparison_report.PAGES
    }
    assert marks["README.md"] == marks["index.md"] == {"first"}
    assert marks["benchmarks.md"] == {"summary", "plots", "tables"}
    assert marks["benchmark_runs.md"] == {"goals"}


def test_the_page_begins_with_five_lines_for_users() -> None:
    head = comparison_report.summary(results(4.0, 2.0)).splitlines()
    assert [line.split(":**")[0].split("**")[1].rstrip(":") for line in head] == [
        "Measured", "On", "Result", "ckpipe is not first in", "Rerun",
    ]  # fmt: skip
    assert "blocked 4.00 times the plain copy (best peer 2.00)" in head[2]
    assert "durable (big)" in head[3]
    page = (comparison_report.DOCS / "benchmarks.md").read_text().splitlines()
    assert page[0] == "# Benchmarks"
    assert [line[:4] for line in page[3:8]] == ["* **"] * 5


def test_pages_for_users_name_no_goal_and_no_run() -> None:
    for page in ("benchmarks.md", "index.md", "../README.md"):
        text = (comparison_report.DOCS / page).read_text()
        assert "missed" not in text
        assert ".json`" not in text
        assert "the limit |" not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1493.2, "1,493"), (1.5e6, "1,500,000"), (0.905, "0.905"), (117.4, "117"), (0.0039, "0.00")],
)
def test_numbers_are_readable(value: float, text: str) -> None:
    assert comparison_report.readable(value) == text
