"""Save one checkpoint on a local store, load, verify and find its files; check a message."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ckpipe
from tests.support.pipelines import load_existing


def save_one(
    root: Path | str, state: Any, step: int = 5, **arguments: Any
) -> ckpipe.CheckpointInfo:
    with ckpipe.SyncPipeline(root) as pipeline:
        return pipeline.save(state, step=step, **arguments).wait()


def load_one(root: Path, into: Any = None, **arguments: Any) -> Any:
    with ckpipe.SyncPipeline(root) as pipeline:
        return load_existing(pipeline, into, **arguments)


def verify_one(root: Path, step: int = 5) -> None:
    with ckpipe.SyncPipeline(root) as pipeline:
        pipeline.verify(step)


def index_of(root: Path, step: int = 5) -> Path:
    (path,) = root.glob(f"step-{step:012}.*.json")
    return path


def data_of(root: Path) -> Path:
    (path,) = root.glob("step-*/rank-00000.safetensors")
    return path


def says(error: BaseException, *patterns: str) -> None:
    """Check that a message has all that its reader needs, and ends as a sentence."""
    for pattern in patterns:
        assert re.search(pattern, str(error)), f"{pattern!r} is not in {error}"
