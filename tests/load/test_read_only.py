"""A pipeline that only looks and loads, which leaves no trace on the store."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe.errors import (
    AttemptReused,
    CheckpointNotFound,
    PermissionDenied,
    UnsupportedTopology,
)
from tests.support.command_line import damage
from tests.support.pipelines import load_existing, loaded_state, newest_of
from tests.support.rank_processes import Gang, told
from tests.support.stored_files import LEASES

REFUSED = "opened to read only"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with ckpipe.SyncPipeline(tmp_path / "run") as pipeline:
        for step in (1, 2):
            pipeline.save({"weights": torch.full((5,), float(step))}, step=step)
    return tmp_path / "run"


def everything(root: Path) -> dict[str, tuple[int, int]]:
    """All that lies below a root, with what changes when somebody writes."""
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in (root, *root.rglob("*"))
    }


def test_looking_and_loading_change_nothing(root: Path) -> None:
    before = everything(root)
    with ckpipe.SyncPipeline(root, read_only=True) as pipeline:
        assert [info.step for info in pipeline.steps()] == [1, 2]
        assert newest_of(pipeline).step == 2
        assert pipeline.verify(1).files == 1
        assert loaded_state(pipeline)["weights"].tolist() == [2.0] * 5
        target = {"weights": torch.zeros(5)}
        pipeline.load(target, step=1, fallback=True)
        assert target["weights"].tolist() == [1.0] * 5
        with pytest.raises(CheckpointNotFound):
            pipeline.load(step=7)
    assert everything(root) == before


def test_a_run_that_goes_on_is_loaded_from(root: Path) -> None:
    """Its leases cannot be told from old ones, since the store's time takes writing."""
    with ckpipe.SyncPipeline(root) as writer:
        writer.load()
        lease = root / LEASES / "step-000000000009.20260101T000000000Z-abcd.0" / "x-0000"
        lease.parent.mkdir(parents=True)
        lease.write_bytes(b"{}")
        before = everything(root)
        with ckpipe.SyncPipeline(root, read_only=True) as pipeline:
            assert load_existing(pipeline).step == 2
        assert everything(root) == before


CHANGES: dict[str, Callable[[ckpipe.SyncPipeline], object]] = {
    "save": lambda pipeline: pipeline.save({}, step=9),
    "delete": lambda pipeline: pipeline.delete(1),
    "pin": lambda pipeline: pipeline.pin(1),
    "prune": lambda pipeline: pipeline.prune(),
    "sweep": lambda pipeline: pipeline.sweep(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_would_change_the_store_is_refused(root: Path, change: str) -> None:
    before = everything(root)
    with ckpipe.SyncPipeline(root, read_only=True, keep_last=1) as pipeline:
        with pytest.raises(PermissionDenied, match=REFUSED):
            CHANGES[change](pipeline)
        assert [info.step for info in pipeline.steps()] == [1, 2]
    assert everything(root) == before


def test_one_of_many_ranks_names_what_it_loads(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process group, no other rank and no attempt id are needed to look."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = everything(root)
    with ckpipe.SyncPipeline(root, read_only=True) as pipeline:
        with pytest.raises(UnsupportedTopology, match=r"agree.*init_process_group"):
            pipeline.load()
        with pytest.raises(UnsupportedTopology, match="without fallback"):
            pipeline.load(step=1, fallback=True)
        loaded = load_existing(pipeline, step=1, per_rank="rank0")
        assert loaded.state["weights"].tolist() == [1.0] * 5
    assert everything(root) == before


def test_a_pipeline_that_saves_nothing_leaves_nothing(root: Path, tmp_path: Path) -> None:
    before = names(root)
    for _ in range(2):  # the name of a launch that saved nothing may be used again
        with ckpipe.SyncPipeline(root, attempt_id="look") as pipeline:
            assert pipeline.load() is not None
            assert pipeline.load({"weights": torch.zeros(5)}, 1, fallback=True) is not None
            assert len(pipeline.steps()) == 2
        assert names(root) == before
    with ckpipe.SyncPipeline(tmp_path / "none") as pipeline:
        assert pipeline.load() is None
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match="mine"), ckpipe.SyncPipeline(root):
        raise ValueError("mine")
    assert names(root) == before
    with ckpipe.SyncPipeline(root, attempt_id="look") as pipeline:
        pipeline.save({"weights": torch.zeros(5)}, 3)
    with ckpipe.SyncPipeline(root, attempt_id="look") as pipeline:
        with pytest.raises(AttemptReused):
            pipeline.save({"weights": torch.zeros(5)}, 4)
        assert pipeline.load() is not None


def names(root: Path) -> list[str]:
    return sorted(str(path) for path in root.rglob("*"))


def test_one_line_loads_and_changes_nothing(root: Path) -> None:
    before = everything(root)
    assert ckpipe.load(root).state["weights"].tolist() == [2.0] * 5
    target = {"weights": torch.zeros(5)}
    result = ckpipe.load(root, target, 1, load={"lanes": 2}, read_only=False)
    assert (result.step, result.state is target) == (1, True)
    assert target["weights"].tolist() == [1.0] * 5
    settings = ckpipe.Settings(url=root, per_rank="drop")
    assert ckpipe.load(settings=settings, include=["weights"]).step == 2
    with pytest.raises(CheckpointNotFound, match="no checkpoint 7"):
        ckpipe.load(root, step=7)
    assert everything(root) == before


def test_a_missing_checkpoint_is_a_missing_file(root: Path) -> None:
    for step in (7, "step-000000000007.20261121T034205123Z-9f3a2c01.0"):
        with pytest.raises(CheckpointNotFound) as caught:
            ckpipe.load(root, step=step)
        copied = pickle.loads(pickle.dumps(caught.value))
        for error in (caught.value, copied):
            assert error.hint == caught.value.hint
            assert str(error) == str(caught.value) != ""
            assert isinstance(error, FileNotFoundError)
            assert isinstance(error, LookupError)
    with pytest.raises(FileNotFoundError):
        ckpipe.load(root.parent / "absent")


def test_one_line_raises_where_there_is_nothing_to_load(root: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound):
        ckpipe.load(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    for index in root.glob("*.json"):
        index.unlink()
    with pytest.raises(CheckpointNotFound, match="run, and 2 that are not complete") as caught:
        ckpipe.load(root)
    assert str(root) in str(caught.value)


LAUNCHES: dict[str, tuple[bool, dict[str, Any]]] = {
    "process group": (True, {}),
    "process group and id": (True, {"attempt_id": "look"}),
    "process group, read only": (True, {"read_only": True}),
    "id alone": (False, {"attempt_id": "look"}),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("launch", LAUNCHES)
def test_ranks_that_save_nothing_leave_nothing(
    root: Path, world: Gang, launch: str, size: int
) -> None:
    """They load the same, the newest that is whole."""
    with ckpipe.SyncPipeline(root) as pipeline:
        damaged = pipeline.save({"weights": torch.zeros(5)}, step=3).wait().id
    damage(root, damaged)
    before = names(root)
    group, fields = LAUNCHES[launch]
    for number in range(1, 3):  # the name of a launch that saved nothing may be used again
        case = {"group": group, "fields": fields}
        assert world.run("tests.support.reading_ranks:look", root, size, **case) == [0] * size
        assert names(root) == before
        assert told(root, "loaded") == {rank: [[2, 1, 2]] * number for rank in range(size)}


@pytest.mark.parametrize("fields", [{"read_only": True}, {}, {"attempt_id": "look"}])
def test_ranks_load_the_same_while_a_newer_one_is_saved(
    tmp_path: Path, world: Gang, fields: dict[str, Any]
) -> None:
    root = tmp_path / "run"
    root.mkdir()
    assert world.run("tests.support.reading_ranks:newest", root, 3, fields=fields) == [0] * 3
    found = told(root, "loaded")
    assert len(found[0]) == 4
    assert set(map(tuple, found.values())) == {tuple(found[0])}


def test_a_rank_that_does_not_load_is_named(root: Path, world: Gang) -> None:
    assert world.run("tests.support.reading_ranks:alone", root, 3) == [0] * 3
    refused = told(root, "refused")
    assert "Ranks 2 did not load the newest checkpoint here within 0.5 s" in refused[0][0]


def test_ranks_that_died_behind_their_claims_are_no_hindrance(tmp_path: Path, world: Gang) -> None:
    root = tmp_path / "run"
    for dies, codes in ((True, [None] * 2), (False, [0] * 2), (True, [None] * 2), (False, [0] * 2)):
        assert world.run("tests.support.reading_ranks:claimed_in_vain", root, 2, dies=dies) == codes
    assert told(root, "saved") == {0: [0, 1], 1: [0, 1]}
