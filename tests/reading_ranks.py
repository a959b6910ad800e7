"""Ranks that only read: cases for :mod:`gang`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from gang import tell

import ckpipe
from ckpipe.errors import UnsupportedTopology


def newest(case: dict[str, Any]) -> None:
    """Loads the newest checkpoint by two pipelines, twice each, while a newer one is saved."""
    for number in range(2):
        with ckpipe.SyncPipeline(case["root"], read_only=True, per_rank="rank0") as pipeline:
            for again in range(2):
                if dist.get_rank() == 1 and case["saves"]:
                    with ckpipe.SyncPipeline(case["root"], solo=True) as writer:
                        writer.save({"w": 1}, step=10 * number + again).wait()
                loaded = pipeline.load()
                tell(case, loaded=None if loaded is None else loaded.id)


def alone(case: dict[str, Any]) -> None:
    """Loads the newest on all ranks but the last, which is waited for and named."""
    if dist.get_rank() == dist.get_world_size() - 1:
        return
    opened = ckpipe.SyncPipeline(case["root"], read_only=True, meeting_timeout_seconds=0.5)
    with opened as pipeline:
        try:
            pipeline.load()
        except UnsupportedTopology as error:
            tell(case, refused=str(error))
