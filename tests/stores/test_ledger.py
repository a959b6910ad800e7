"""What saves, loads and prunes ask of a store: compared call by call with what is kept."""

from __future__ import annotations

import pytest

import ckpipe
from tests.support.ledger import Ledger, opened, prepare, save_each, state

each_world = pytest.mark.parametrize("world_size", [1, 3])


@each_world
def test_saves(world_size: int) -> None:
    ledger = Ledger()
    ledger.begin("open")
    with opened(ledger, world_size) as pipelines:
        ledger.begin("first save")
        save_each(ledger, pipelines, 1, first=True)
        ledger.begin("second save")
        save_each(ledger, pipelines, 2, first=False)
        ledger.begin("new structure")
        save_each(ledger, pipelines, 3, first=False)
        ledger.begin("close")
    parts = ["open", "first save", "second save", "new structure", "close"]
    ledger.check(f"saves-of-{world_size}", *parts)


@each_world
def test_loads(world_size: int) -> None:
    ledger = Ledger()
    prepare(ledger, world_size, 2)
    ledger.begin("open")
    with opened(ledger, world_size) as pipelines:
        ledger.begin("load the newest")
        for rank, pipeline in enumerate(pipelines):
            pipeline.load(state(rank, 0))
        ledger.begin("load a step")
        for rank, pipeline in enumerate(pipelines):
            pipeline.load(state(rank, 0), step=1)
        ledger.begin("close")
    ledger.begin("load a part, read only")
    ckpipe.load(ledger.url(), include=["model"], solo=True)
    ledger.begin("load alone")
    ckpipe.load(ledger.url(), step=1, solo=True, per_rank="rank0")
    parts = ["open", "load the newest", "load a step", "close", "load a part, read only"]
    ledger.check(f"loads-of-{world_size}", *parts, "load alone")
    for rank in range(world_size):
        lease, tombstone = rf"^{rank} .ckpipe/leases/step-.*", rf"^{rank} .ckpipe/deleted/step-"
        ledger.check_order(
            f"{lease}: put_volatile", tombstone, f"{lease}: delete", part="load a step"
        )


@each_world
def test_prunes(world_size: int) -> None:
    ledger = Ledger()
    prepare(ledger, world_size, 4)
    with opened(ledger, world_size, keep_last=3) as pipelines:
        ledger.begin("prune")
        pipelines[0].prune()
        ledger.begin("load")  # so that this launch prunes the checkpoints of the one before
        for rank, pipeline in enumerate(pipelines):
            pipeline.load(state(rank, 0))
        ledger.begin("first save")
        save_each(ledger, pipelines, 5, first=True)
        ledger.begin("save and prune")
        save_each(ledger, pipelines, 6, first=False)
        ledger.begin("close")
    ledger.check(f"prunes-of-{world_size}", "prune", "save and prune")
