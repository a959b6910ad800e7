"""The report of the benchmark beside the peers: its arithmetic, on made-up results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comparison_report


def results(ours: float, peer: float) -> dict[str, Any]:
    def row(factor: float) -> dict[str, list[float]]:
        return {
            "the limit": [1.0 * factor, 1.1 * factor],
            "ckpipe": [ours * factor, 1.1 * ours * factor],
            "DCP": [peer * factor, 1.1 * peer * factor],
        }

    loop = {"ckpipe": [0.9], "DCP": [0.8]}
    return {
        "states": {"big": {"blocked": row(1), "durable": row(3)}},
        "loops": {"python": {"step rate": loop, "lost s": {"ckpipe": [0.2], "DCP": [0.5]}}},
        "peak memory": {"ckpipe": 2.0**20, "DCP": 2.0**21},
        "left out": {"torchsnapshot": "ModuleNotFoundError: no module"},
        "timeline": {"stage": {"began": 0.0, "seconds": 0.1, "bytes": 5.0}},
    }


def test_says_where_a_peer_is_better() -> None:
    assert list(comparison_report.not_first(results(2.0, 5.0))) == []
    worse = list(comparison_report.not_first(results(4.0, 2.0)))
    assert worse == ["big, blocked: DCP 2.1, ours 4.2", "big, durable: DCP 6.3, ours 12.6"]


def test_a_higher_step_rate_is_the_better_one() -> None:
    found = results(2.0, 5.0)
    found["loops"]["python"]["step rate"]["DCP"] = [0.95]
    assert len(list(comparison_report.not_first(found))) == 1


def test_the_text_has_ratios_and_what_was_left_out() -> None:
    shown = comparison_report.text(results(2.0, 5.0))
    assert "2.00 x limit" in shown
    assert "left out: torchsnapshot" in shown
    assert "ours is first everywhere" in shown


def test_only_changes_beyond_the_spread_are_told() -> None:
    old = results(2.0, 5.0)
    assert list(comparison_report.changes(old, results(2.05, 5.0))) == []
    (first, second) = comparison_report.changes(old, results(4.0, 5.0))
    assert {first, second} == {
        "big, blocked, ckpipe: 2.00 times what it was",
        "big, durable, ckpipe: 2.00 times what it was",
    }


def test_draws_its_pictures(tmp_path: Path) -> None:
    comparison_report.draw(results(2.0, 5.0), tmp_path)
    for name in ("compare.png", "timeline.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
