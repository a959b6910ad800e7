"""What saves, loads and prunes ask of a store: compared call by call with what is kept."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import SyncPipeline
from ckpipe.events import Event, SaveEnded
from tests.stores.ledger import Ledger
from tests.support.rank_pipelines import open_rank

SETTINGS: dict[str, Any] = {
    "staging": {"block_bytes": 65536},
    "plan": {"replicated": ["model.*"]},
    "attempt_id": "run",
}
each_world = pytest.mark.parametrize("world_size", [1, 3])


def state(rank: int, seed: int) -> dict[str, Any]:
    """A state with replicas of several blocks, a tensor of the rank's own, and values."""
    weight = torch.arange(120_000.0).view(300, 400) + seed
    return {
        "model": {"weight": weight, "bias": torch.arange(7.0)},
        "mine": torch.full((1000,), rank + seed, dtype=torch.int16),
        "epoch": seed,
    }


@contextlib.contextmanager
def opened(ledger: Ledger, world_size: int, **fields: Any) -> Iterator[list[SyncPipeline]]:
    """Open a pipeline for each rank, one after the other."""
    with contextlib.ExitStack() as stack:
        pipelines = []
        for rank in range(world_size):
            made = open_rank(ledger.url(rank), rank, world_size, **SETTINGS | fields)
            stack.push(made)
            pipelines.append(made)
        yield pipelines


def save(pipeline: SyncPipeline, state: Any, step: int) -> None:
    """Save a state and wait until nothing more happens to the save."""
    ended = threading.Event()

    def listen(event: Event) -> None:
        if isinstance(event, SaveEnded) and event.step == step:
            ended.set()

    pipeline.events.add(listen)
    pipeline.save(state, step=step, metrics={"loss": step / 4}).wait()
    assert ended.wait(60)
    pipeline.events.remove(listen)


def save_each(ledger: Ledger, pipelines: list[SyncPipeline], step: int, *, first: bool) -> None:
    """Save a step by each rank, one after the other.

    Args:
        ledger: The store.
        pipelines: The ranks.
        step: The step; that of number 3 has more tensors than others.
        first: Whether this launch has saved nothing yet.
    """
    for rank, pipeline in enumerate(pipelines):
        more = {"more": torch.full((50_000,), float(rank))} if step == 3 else {}
        save(pipeline, state(rank, step) | more, step)
    if not first:
        # Ranks that did not see the previous checkpoint complete look for it beside the save.
        previous = rf"step-0*{step - 1}\.\w+\.0"
        ledger.wait_for(rf"\d {previous}\.json: stat$", len(pipelines) - 1)
        ledger.wait_for(rf"deleted/{previous}: stat -> ", len(pipelines) - 1)


def prepare(ledger: Ledger, world_size: int, steps: int) -> None:
    """Have an earlier launch save some steps."""
    ledger.begin("before")
    with opened(ledger, world_size, attempt_id="before") as pipelines:
        for step in range(1, steps + 1):
            save_each(ledger, pipelines, step, first=step == 1)


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
    for step in (1, 2, 3):
        checkpoint = rf"step-0*{step}\.RUN\.0"
        for rank in range(world_size):
            data = rf"^{rank} {checkpoint}/rank-0*{rank}.safetensors"
            manifest = rf"^{rank} {checkpoint}/m/0/000/rank-0*{rank}.json: put CREATE"
            index = rf"{checkpoint}.json: put CREATE"
            commits = [manifest, index] if world_size > 1 else [index]
            claim = rf"^{rank} .ckpipe/attempts/run/claim-0*{rank}: put CREATE"
            ledger.check_order(
                claim, f"{data}: open", f"{data}: write", f"{data}: complete", *commits
            )
        ledger.check_order(index, rf"digests/{checkpoint}")


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
    for step in (1, 2, 3):
        checkpoint = rf"step-0*{step}\.BEFORE\.0"
        index, data = rf"^\d+ {checkpoint}.json: delete", rf"{checkpoint}/rank-.*: delete"
        manifests = [rf"{checkpoint}/m/.*: delete"] if world_size > 1 else []
        ledger.check_order(
            rf"deleted/{checkpoint}: put CREATE",
            rf"leases/{checkpoint}/: list",
            index,
            *manifests,
            data,
            rf"digests/{checkpoint}.*: delete",
        )
