"""Reports of saves and loads: their arithmetic, their plain form, and what a real save tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpipe
from ckpipe.types import (
    BlockReport,
    LoadReport,
    SaveReport,
    StageReport,
    age_text,
    first_of,
    rate_text,
    save_report_from_data,
    size_text,
)
from tests.support.pipelines import Stores

times = st.integers(0, 10**9).map(lambda micros: micros / 1e6)
spans = st.none() | st.tuples(times, times)
counts = st.integers(0, (1 << 62) - 1)
small = st.integers(0, 1000)
stage_reports = st.builds(StageReport, times, counts, times, times)
block_reports = st.builds(BlockReport, counts, counts, counts, spans, spans, spans, small, small)
save_reports = st.builds(
    SaveReport,
    st.dictionaries(st.text(), stage_reports),
    st.none() | times,
    st.none() | times,
    counts,
    counts,
    st.booleans(),
    st.none() | times,
    st.lists(block_reports).map(tuple),
)


def made(**stages: StageReport) -> SaveReport:
    return SaveReport(stages, 0.5, 2.0, 10**9, 3, planned=False)


@given(save_reports)
def test_the_plain_form_is_json_and_reads_back(report: SaveReport) -> None:
    again = save_report_from_data(json.loads(json.dumps(report.to_data(), allow_nan=False)))
    assert again == report
    assert again.blocks == report.blocks


def test_the_bottleneck_is_what_was_at_work_longest() -> None:
    copy, upload = StageReport(1.9, 10**9, 0.0, 1.5), StageReport(1.5, 10**9, 0.1, 0.0)
    report = made(stage=copy, upload=upload)
    assert report.bottleneck == "The upload took longest: 1.5 of 2 s (667 MB/s)"
    assert repr(report) == (
        "<SaveReport 1 GB in 3 tensors, staged in 0.5 s, durable in 2 s: "
        "The upload took longest: 1.5 of 2 s (667 MB/s)>"
    )
    held_up = made(stage=copy, lock=StageReport(1.2))
    assert held_up.bottleneck.startswith("Waiting for trainers to release the state lock")
    assert made().bottleneck == ""
    load = LoadReport({"read": StageReport(0.5, 10**6), "match": StageReport(0.6)}, 1.1, 10**6, 4)
    assert load.bottleneck == "Matching the checkpoint with the target took longest: 0.6 of 1.1 s"
    assert load.to_data()["stages"]["read"]["bytes"] == 10**6


def test_sizes_for_people() -> None:
    shown = [size_text(n) for n in (0, 999, 1000, 999_600, 3 << 39, 2 * 10**15, 10**22)]
    assert shown == ["0 B", "999 B", "1 kB", "1 MB", "1.65 TB", "2 PB", "10000 EB"]
    rates = [rate_text(nbytes, 2.0) for nbytes in (0, 7, 2000, 2_980_000, 10**12)]
    assert rates == ["0 B/s", "4 B/s", "1 kB/s", "1.49 MB/s", "500 GB/s"]


def test_ages_for_people() -> None:
    shown = [age_text(s) for s in (-3, 0.9, 59.9, 60, 3599, 3600, 172_799, 172_800, 10**8)]
    assert shown == ["0 s", "0 s", "59 s", "1 min", "59 min", "1 h", "47 h", "2 d", "1157 d"]


def test_the_first_of_many_are_named_and_the_others_counted() -> None:
    shown = [first_of(()), first_of((3, 4)), first_of(range(21)), first_of(["a", "b", "c"], 2)]
    twenty = ", ".join(map(str, range(20)))
    assert shown == ["", "3, 4", f"{twenty} and 1 more", "a, b and 1 more"]


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_a_save_tells_of_every_block(tmp_path: Path, worker: Literal["thread", "process"]) -> None:
    small_blocks = {"block_bytes": 65536}
    state = {"a": torch.ones(200_000), "b": torch.zeros(7), "by torch": torch.ones(60_000)[::2]}
    with ckpipe.SyncPipeline(
        tmp_path, staging=small_blocks, upload={"lanes": 3}, worker=worker
    ) as pipeline:
        handle = pipeline.save(state, step=0)
        handle.wait()
        report = handle.report
        result = pipeline.load(state)
    assert sum(block.bytes for block in report.blocks) == report.bytes
    at = sorted(block.offset for block in report.blocks)
    assert at == [65536 * number for number in range(len(at))]
    for block in report.blocks:
        assert block.copied is not None
        assert block.uploaded is not None
        assert 0 <= block.copied[0] <= block.copied[1] <= block.uploaded[0] <= block.uploaded[1]
        if block.summed is not None:
            assert block.copied[1] <= block.summed[0] <= block.summed[1]
        assert block.uploaded[1] <= report.durable_seconds  # type: ignore[operator]
        assert 0 <= block.lane < 3
    afterwards = sum(block.summed is not None for block in report.blocks)
    assert 0 < afterwards < len(report.blocks) / 2
    for stage in report.stages.values():
        assert 0 <= stage.waited <= stage.seconds
    assert report.bottleneck
    assert result is not None
    assert result.report is not None
    assert result.report.bottleneck
    reads = result.report.stages
    assert reads["find"].seconds > 0
    for stage in reads.values():
        assert 0 <= stage.waited <= stage.seconds
        assert stage.began + stage.seconds <= result.report.seconds + 1e-6
    match, read = reads["match"], reads["read"]
    assert match.began + match.seconds <= read.began
    assert reads["find"].seconds <= min(match.began, read.began)
    assert max(match.began, read.began) <= reads["apply"].began


def test_a_stage_that_has_nothing_to_do_waits(store: Stores) -> None:
    staging = {"block_bytes": 65536, "bytes": 65536}
    with ckpipe.SyncPipeline(store.url, staging=staging) as pipeline:
        store.slow.latency = 0.1  # each block takes far longer to upload than all take to copy
        handle = pipeline.save({"a": torch.ones(100_000)}, step=0)
        handle.wait()
        store.slow.latency = 0.0
    stage, upload = (handle.report.stages[name] for name in ("stage", "upload"))
    assert stage.waited > 0
    assert upload.waited < upload.seconds
    assert upload.busy > stage.busy
    assert handle.report.bottleneck.startswith("The upload")
