"""Several ranks in one process: pipelines that are told their place by the environment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from ckpipe import SyncPipeline
from tests.support.settling import SettlingPipeline


def open_rank(url: str, rank: int, world_size: int, **fields: Any) -> SyncPipeline:
    """Enter a pipeline as one of several ranks of the attempt that is named, or of ``"run"``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(rank))
        patch.setenv("WORLD_SIZE", str(world_size))
        return SettlingPipeline(url, **{"attempt_id": "run"} | fields).__enter__()


@contextlib.contextmanager
def one_rank(url: str, rank: int, world_size: int, **fields: Any) -> Iterator[SyncPipeline]:
    """One of several ranks, for as long as it is needed."""
    with contextlib.ExitStack() as stack:
        pipeline = open_rank(url, rank, world_size, **fields)
        stack.push(pipeline)
        yield pipeline


@contextlib.contextmanager
def ranks(url: str, world_size: int, **fields: Any) -> Iterator[list[SyncPipeline]]:
    """All ranks of a small world, one pipeline each; a field may be what makes it for each."""
    with contextlib.ExitStack() as stack:
        opened = []
        for rank in range(world_size):
            given = {name: value() if callable(value) else value for name, value in fields.items()}
            pipeline = open_rank(url, rank, world_size, **given)
            stack.push(pipeline)
            opened.append(pipeline)
        yield opened
