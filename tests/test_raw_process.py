"""What the bare write of a process is, and how others are set beside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import raw
from interference import Measured, Turn, beside_raw
from raw_process import RawWrite, fewest_lanes
from undisturbed import Undisturbed


def test_fewest_lanes_are_taken_of_those_that_are_as_fast() -> None:
    assert fewest_lanes({1: 1.04, 2: 1.0, 4: 1.01}) == 1
    assert fewest_lanes({1: 1.5, 2: 1.04, 4: 1.0}) == 2


def test_contender_is_set_beside_the_raw_write_of_the_same_round() -> None:
    step = Undisturbed(0.1, 0.1)

    def turn(durable: float, call: float, steps: int) -> Turn:
        return Turn(step, call, durable, [0.1] * steps, 0.0, 0.0)

    bare = Measured([turn(1.0, 0.0, 8), turn(2.0, 0.0, 10), turn(1.0, 0.0, 9)])
    ours = Measured([turn(1.2, 0.2, 8), turn(2.2, 0.2, 10), turn(1.2, 0.2, 6)])
    found = beside_raw(ours, bare)
    assert found["rate / raw"] == pytest.approx(1.0)
    assert found["lost - raw, ms"] == pytest.approx(200)
    assert beside_raw(bare, bare) == {"rate / raw": 1.0, "lost - raw, ms": 0.0}


def test_raw_write_fills_its_file_each_time_it_is_told_to(tmp_path: Path) -> None:
    try:
        os.close(raw.preallocated(tmp_path / "tried", raw.MIB))
    except OSError:
        pytest.skip("The file system of the temporary directory has no direct I/O")
    bare = RawWrite(tmp_path, raw.MIB)
    try:
        for _ in range(2):
            assert not any(bare.path.read_bytes())
            bare.save({})()
            written = bare.path.read_bytes()
            assert len(written) == raw.MIB
            assert any(written[-4096:])
            bare.forget()
    finally:
        bare.close()


def test_raw_write_that_ends_is_told(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="exit code 1"):
        RawWrite(tmp_path, 0)
