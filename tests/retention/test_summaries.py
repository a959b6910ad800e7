"""Summaries of checkpoints are hints: no result depends on them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ckpipe
from ckpipe.retention import KeepBest
from tests.support.stored_files import sealed

RULE = KeepBest("loss", n=1)


def _newer(data: bytes) -> bytes:
    document = json.loads(data)
    del document["crc32c"]
    return sealed({**document, "version": 2})


@pytest.mark.parametrize("change", ["cut", "flipped", "of another", "newer", "gone"])
def test_summaries_that_cannot_be_used_change_no_result(tmp_path: Path, change: str) -> None:
    with ckpipe.SyncPipeline(tmp_path, retention=RULE) as pipeline:
        for step, loss in enumerate([3.0, 1.0, 2.0, 4.0]):
            pipeline.save({"x": step}, step=step, metrics={"loss": loss}).wait()
            pipeline.pin(step)
    files = sorted((tmp_path / ".ckpipe" / "digests").iterdir())
    assert len(files) == 4
    summaries = [path.read_bytes() for path in files]
    for path, data in zip(files, summaries, strict=True):
        if change == "gone":
            path.unlink()
            continue
        path.write_bytes({
            "cut": data[:-9],
            "flipped": data.replace(b"4.0", b"0.0").replace(b"1.0", b"9.0"),
            "of another": summaries[0],
            "newer": _newer(data),
        }[change])  # fmt: skip
    with ckpipe.SyncPipeline(tmp_path, retention=RULE) as pipeline:
        best = pipeline.best("loss")  # before any index is read
        assert best is not None
        assert best.step == 1
        assert [each.metrics for each in pipeline.steps(metadata=True)] == [
            {"loss": 3.0}, {"loss": 1.0}, {"loss": 2.0}, {"loss": 4.0},
        ]  # fmt: skip
        for step in range(4):
            pipeline.unpin(step)
        assert [int(name[5:17]) for name in pipeline.prune().keep] == [3, 1]
