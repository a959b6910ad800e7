"""Worlds of real processes: they meet, save, die, heal and resume, and never call a collective."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpipe
from ckpipe.errors import CheckpointIncomplete
from tests.support.joint_plans import LAYOUTS
from tests.support.pipelines import load_existing, newest_of
from tests.support.rank_processes import Gang, newest_whole, private, same_everywhere, told
from tests.support.sampling import EVERY, SEED
from tests.support.worker_runs import await_end


def check(root: Path) -> None:
    """Whatever is complete is right in every bit; whatever is not does not load."""
    with ckpipe.SyncPipeline(root) as pipeline:
        for info in pipeline.steps():
            if info.complete:
                pipeline.verify(info)
                continue
            with pytest.raises(CheckpointIncomplete):
                pipeline.load(step=info.id)


def test_every_launch_and_every_pipeline_has_one_name(world: Gang, root: Path) -> None:
    for _ in range(2):
        world.succeed("meet", root, 3)
    names = same_everywhere(root, "attempt")
    assert len(names) == 4
    assert names == sorted(set(names))


def test_collectives_are_noticed(world: Gang, tmp_path: Path) -> None:
    world.succeed("barrier", tmp_path / "run", 2)


def test_rank_commits_when_all_others_are_dead(world: Gang, root: Path) -> None:
    world.succeed("alone", root, 3)
    check(root)


def test_ranks_save_and_resume_without_a_collective(world: Gang, root: Path) -> None:
    for _ in range(2):
        world.succeed("run", root, 3, saves=2, together=True)
    assert same_everywhere(root, "loaded") == [None, 101 - 1]
    check(root)


def test_sharded_states_are_captured_at_one_instant_each(world: Gang, tmp_path: Path) -> None:
    world.succeed("instants", tmp_path / "run", 2, saves=3)


STORES = ["default", "file", "tcp"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("store", STORES)
def test_ranks_plan_together_without_a_collective(world: Gang, root: Path, store: str) -> None:
    saves = ["same", "same", "more", "more", "alone1", "alone1", "unlike", "same", "same"]
    codes = world.run("plan_together", root, 3, store=store, seconds=60, saves=saves)
    assert codes == [0, 0, 0]
    # Rank 2 alone is unlike, and whoever comes first to that save decides what becomes of it.
    committed = told(root, "committed")
    failed = told(root, "failed")
    for rank in range(3):
        assert [step for step in committed[rank] if step != 6] == [0, 1, 2, 3, 4, 5, 7, 8]
    for step, kind, text in (each for values in failed.values() for each in values):
        assert step == 6
        assert kind in ("UnsupportedState", "SaveError")
        assert "'w'" in text
    check(root)


def test_every_layout_loads_into_every_other(world: Gang, tmp_path: Path) -> None:
    pairs = list(itertools.product(range(len(LAYOUTS)), repeat=2))
    chance = random.Random(SEED)
    for plan in ("local", "global"):
        chosen = pairs if EVERY else chance.sample(pairs, 5)
        root = tmp_path / plan
        world.succeed("place", root, 4, pairs=chosen, plan=plan)


def test_late_and_dead_ranks_cost_saves_and_nothing_else(world: Gang, root: Path) -> None:
    saves = ["same", "more-late", "same", "more-killed", "same"]
    case = {"store": "default", "seconds": 60, "saves": saves, "dead": 1}
    assert world.run("plan_together", root, 3, **case) == [0, None, 0]
    failed = told(root, "failed")
    for rank in (0, 2):
        assert [(step, kind) for step, kind, _ in failed[rank]] == [
            (1, "PlanTimeout"),
            (3, "PlanTimeout"),
        ]
        assert all("Rank 1 did not take part in planning" in text for _, _, text in failed[rank])
        # Saves of what is as it was need nobody.
        assert told(root, "committed")[rank] == [0, 2, 4]
    assert [(step, kind) for step, kind, _ in failed[1]] == [(1, "PlanTimeout")]
    with ckpipe.SyncPipeline(root) as pipeline:
        assert [info.step for info in pipeline.steps() if info.complete] == [0, 2]


KILLS: dict[str, dict[str, Any]] = {
    "before staging": {"dies_before": 1},
    "between data and manifest": {"verb": "put", "key": "/m/0/", "landing": "before", "nth": 2},
    "after its manifest": {"verb": "put", "key": "/m/0/", "landing": "after", "nth": 2},
    "before looking around": {"verb": "list", "key": "/m/0/", "landing": "before", "nth": 2},
    "after a group object": {"verb": "put", "key": "/m/1/", "landing": "after"},
    "before the index": {"verb": "put", "key": ".0.json", "landing": "before"},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("when", KILLS)
def test_killed_rank_is_healed_or_left_out(world: Gang, root: Path, when: str) -> None:
    case = {"victim": 1, "verb": "never", "key": "", "landing": "before"} | KILLS[when]
    # Groups of two, so that three ranks have two levels.
    codes = world.run("run", root, 3, saves=3, group_size=2, **case)
    assert codes[0] == codes[2] == 0
    # A rank is not always the last of its group, and then has no group object to write.
    assert codes[1] is None or when in ("after a group object", "before the index")
    whole = newest_whole(root, 3)
    world.succeed("run", root, 3, saves=1, group_size=2)
    # What all ranks had committed is there, whatever the last of them left undone.
    assert same_everywhere(root, "loaded", slice(-1, None)) == [whole]
    check(root)


HOW = {"SIGTERM": 2, "SIGUSR1": 1, "event": 0}
"""How one rank of several learns of its end, and how many signals it gets."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", HOW)
def test_a_rank_that_is_told_to_end_takes_all_others_along(
    world: Gang, root: Path, how: str
) -> None:
    world.succeed("preempted", root, 4, victim=1, how=how, times=HOW[how])
    (step,) = same_everywhere(root, "saved")
    assert told(root, "handled") == {0: [0], 1: [HOW[how]], 2: [0], 3: [0]}
    with ckpipe.SyncPipeline(root) as pipeline:
        assert [info.step for info in pipeline.steps() if info.complete] == [step]


def test_shards_of_all_ranks_are_exported_as_whole_tensors(world: Gang, root: Path) -> None:
    settings = {"final_format": "hf", "export": {"max_shard_bytes": 300}}
    case = {"kind": "fsdp", "first": 2, "step": 2, "save": True, "final": True}
    world.succeed("train", root, 3, settings=settings, **case)
    (folder,) = root.glob("*.hf")
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert sorted(places) == told(root, "names")[0][0]
    assert len(set(places.values())) > 1
    with ckpipe.SyncPipeline(root) as pipeline:
        result = load_existing(pipeline, include=["training.model.*"])
    for name, tensor in result.state["training"]["model"].items():
        assert torch.equal(load_file(folder / places[name])[name], tensor.detach())


def test_four_ranks_are_killed_and_their_checkpoint_completes(world: Gang, root: Path) -> None:
    assert world.run("stage_and_die", root, 4) == [None] * 4
    for workers in told(root, "worker").values():
        await_end(workers[0])
    with ckpipe.SyncPipeline(root) as pipeline:
        assert newest_of(pipeline).step == 2
        pipeline.verify(2)
        result = load_existing(pipeline, per_rank="rank0")
        assert torch.equal(result.state["mine"], private(0, 2)["mine"])


@pytest.mark.skipif(not EVERY, reason="slow: make test-all runs it")
def test_real_ranks_load_what_they_have_just_saved(world: Gang, root: Path) -> None:
    world.succeed("tests.support.reading_ranks:load_what_was_just_saved", root, 3, slow=1)
    assert told(root, "loaded") == {rank: [1, 2, 3] for rank in range(3)}
