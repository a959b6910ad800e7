"""What tests of foreign checkpoints share: a folder for what others wrote, and a run that loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpipe


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder for what another program writes."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    return folder


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[ckpipe.SyncPipeline]:
    """An open run, beside what the test writes."""
    with ckpipe.SyncPipeline(tmp_path / "run") as opened:
        yield opened
