"""Ranks that only load, or load what they have just saved: cases for :mod:`rank_processes`."""

from __future__ import annotations

import json
import warnings
from typing import Any

import torch
import torch.distributed as dist

import ckpipe
from ckpipe.errors import UnsupportedTopology
from tests.support.killed_runs import die, note
from tests.support.pipelines import Stateful
from tests.support.rank_processes import SETTINGS, URL, mortal, private, tell


def newest(case: dict[str, Any]) -> None:
    """Load the newest checkpoint by two pipelines, twice each, while a newer one is saved."""
    for number in range(2):
        fields = {"per_rank": "rank0", **case["fields"]}
        with ckpipe.SyncPipeline(case["root"], **fields) as pipeline:
            for again in range(2):
                if dist.get_rank() == 1:
                    with ckpipe.SyncPipeline(case["root"], solo=True) as writer:
                        writer.save({"w": 1}, step=10 * number + again).wait()
                loaded = pipeline.load()
                tell(case, loaded=None if loaded is None else loaded.id)


def load_what_was_just_saved(case: dict[str, Any]) -> None:
    """Save and load in turns, with a store that is slow for one rank."""
    mortal(case)
    rank = dist.get_rank()
    with ckpipe.SyncPipeline(URL, **SETTINGS) as pipeline:
        for step in range(1, 4):
            pipeline.save(private(rank, step), step=step)
            loaded = pipeline.load()
            assert loaded is not None
            assert torch.equal(loaded.state["mine"], private(rank, loaded.step)["mine"])
            tell(case, loaded=loaded.step)


def alone(case: dict[str, Any]) -> None:
    """Load the newest on all ranks but the last, which is waited for and named."""
    if dist.get_rank() == dist.get_world_size() - 1:
        return
    opened = ckpipe.SyncPipeline(case["root"], read_only=True, meeting_timeout_seconds=0.5)
    with opened as pipeline:
        try:
            pipeline.load()
        except UnsupportedTopology as error:
            tell(case, refused=str(error))


def look(case: dict[str, Any]) -> None:
    """Open, look and load in every way; without a process group if the case says so."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if not case["group"]:
        dist.destroy_process_group()  # RANK and WORLD_SIZE stay
    with ckpipe.SyncPipeline(case["root"], per_rank="rank0", **case["fields"]) as pipeline:
        warnings.simplefilter("ignore")  # of checkpoints that are damaged
        loaded = [
            pipeline.load({"weights": torch.zeros(5)}, fallback=True),
            pipeline.load(step=1),
            pipeline.load(fallback=True),
        ]
        assert len(pipeline.steps()) == 3
        assert (pipeline._topology.rank, pipeline._topology.world_size) == (rank, size)
        steps = [None if each is None else each.step for each in loaded]
        note(case["root"], json.dumps({"rank": rank, "loaded": steps}))


def die_together() -> None:
    """Die once all ranks are here."""
    dist.barrier()
    die()


def claimed_in_vain(case: dict[str, Any]) -> None:
    """Each rank dies, or goes on, when its claim is on the store and its first save is not."""
    with ckpipe.SyncPipeline(case["root"]) as pipeline:
        loaded = pipeline.load()
        first = loaded.step + 1 if loaded else 0
        state: Any = {"rank": dist.get_rank()}
        if case["dies"]:
            state = Stateful(die_together)  # a save reads the state after its claim
        pipeline.save(state, step=first).wait_complete(timeout=300)
        tell(case, saved=first)
