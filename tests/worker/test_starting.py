"""A worker process starts in the background, and gets blocks as they are filled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import ckpipe
from tests.support.actors import PATIENCE, DaemonThreads
from tests.support.worker_runs import state_of
from tests.worker.test_environment import PROCESS, customize

BLOCK = 65536


def test_a_save_is_staged_before_its_worker_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    customize(tmp_path, monkeypatch, f"open({str(gate)!r}).read()\n")
    with ckpipe.SyncPipeline(tmp_path / "run", **PROCESS) as pipeline:
        handle = DaemonThreads().submit(pipeline.save, state_of(1)).result(PATIENCE)
        with open(gate, "w"):
            pass  # the worker, which waits for somebody to open this, goes on
        handle.wait(PATIENCE)
        pipeline.verify(handle.id)


def test_blocks_are_stored_while_others_are_still_to_be_copied(tmp_path: Path) -> None:
    staging = {"block_bytes": BLOCK, "bytes": 4 * BLOCK}
    with ckpipe.SyncPipeline(tmp_path, worker="process", staging=staging) as pipeline:
        handle = (
            DaemonThreads().submit(pipeline.save, {"w": torch.rand(10 * BLOCK)}).result(PATIENCE)
        )
        handle.wait(PATIENCE)
        blocks = handle.report.blocks
        copied = max(each.copied[1] for each in blocks if each.copied)
        uploaded = min(each.uploaded[0] for each in blocks if each.uploaded)
        assert uploaded < copied
        pipeline.verify(handle.id)
