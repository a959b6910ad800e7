"""``resume``: a run never begins at zero in silence, and ``choose`` takes what a load takes."""

from __future__ import annotations

import itertools
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe.errors import CheckpointNotFound, UsageError
from ckpipe.testing import FaultyBackend
from ckpipe_local import LocalBackend
from tests.support.dead_runs import crash
from tests.support.one_checkpoint import save_one
from tests.support.pipelines import load_existing
from tests.support.rank_pipelines import ranks

REMAINS = {
    "nothing": "",
    "incomplete": "is incomplete: it has no index",
    "removed": "left no checkpoint",
    "deleted": "a checkpoint was deleted there, the newest is step-",
    "torchelastic": "TORCHELASTIC_RESTART_COUNT=2 says that this is a restart",
    "slurm": "SLURM_RESTART_COUNT=2 says that this is a restart",
}


def leave(root: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave on a root what a run may find there that has no checkpoint to resume from."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2" if what == "torchelastic" else "0")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2" if what == "slurm" else "0")
    if what in ("incomplete", "removed"):
        crash(root, 5, 0.0)
    if what == "removed":
        for path in root.glob("step-*"):
            shutil.rmtree(path)
    if what == "deleted":
        with ckpipe.SyncPipeline(root) as pipeline:
            pipeline.save({"w": 1}, step=5).wait()
            pipeline.delete(5, force=True)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("what", "world"), list(itertools.product(REMAINS, [1, 2])))
def test_a_start_without_a_checkpoint_says_why_or_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: str,
    world: int,
) -> None:
    root, weights = tmp_path / "run", tmp_path / "weights.pt"
    torch.save({"w": torch.ones(3)}, weights)
    leave(root, what, monkeypatch)
    caplog.set_level(logging.INFO, "ckpipe")
    for resume, initial, call in itertools.product(
        ("auto", "must", "never"), (None, weights), ("load", "choose")
    ):
        caplog.clear()
        settings: dict[str, Any] = {"resume": resume, "initial": initial}
        name = f"{resume}-{initial is None}-{call}"
        with (
            ranks(str(root), world, attempt_id=name, **settings) as pipelines,
            ThreadPoolExecutor(world) as threads,
        ):
            states = [{"w": torch.zeros(3)} for _ in pipelines]

            def ask(pipeline: ckpipe.SyncPipeline, state: Any, call: str = call) -> Any:
                return pipeline.load(state) if call == "load" else pipeline.choose()

            asked = [threads.submit(ask, *each) for each in zip(pipelines, states, strict=True)]
            if resume == "must":
                for each in asked:
                    with pytest.raises(CheckpointNotFound, match="no complete checkpoint") as found:
                        each.result()
                    assert REMAINS[what] in str(found.value)
                    assert 'resume="auto"' in str(found.value)
            else:
                loaded = [each.result() is not None for each in asked]
                assert loaded == [initial is not None and call == "load"] * world
            filled = [bool(state["w"].all()) for state in states]
        assert filled == [initial is not None and call == "load" and resume != "must"] * world
        said = [each for each in caplog.records if "training" in each.getMessage()]
        assert len(said) == (resume != "must")
        for record in said:
            silent = resume == "never" or what == "nothing"
            text = record.getMessage()
            assert record.levelname == ("INFO" if silent else "WARNING"), text
            assert REMAINS[what] in text or resume == "never"
            assert ("weights.pt" in text) == (initial is not None)


def test_never_begins_anew_beside_checkpoints_and_its_saves_are_newer(tmp_path: Path) -> None:
    save_one(tmp_path, {"w": 1}, step=500)
    with ckpipe.SyncPipeline(tmp_path, resume="never") as pipeline:
        assert pipeline.load() is None
        assert pipeline.choose() is None
        assert pipeline.load(step=500) is not None
        pipeline.save({"w": 2}, step=1)
    policies: list[Any] = ["auto", "must"]
    for resume in policies:
        with ckpipe.SyncPipeline(tmp_path, resume=resume) as pipeline:
            loaded, chosen = load_existing(pipeline), pipeline.choose()
        assert chosen is not None
        assert (loaded.state, loaded.step, loaded.id) == ({"w": 2}, 1, chosen.id)


def test_ranks_choose_alike_and_get_the_metadata_of_the_first(tmp_path: Path) -> None:
    with ranks(str(tmp_path), 2) as pipelines, ThreadPoolExecutor(2) as threads:
        for step in (1, 2):
            for rank, pipeline in enumerate(pipelines):
                pipeline.save({"w": rank}, step=step, metadata={"rank": rank, "name": f"s{step}"})
        calls: list[tuple[dict[str, Any], int]] = [({}, 2), ({"step": 1}, 1), ({"name": "s1"}, 1)]
        for arguments, expected in calls:
            asked = [threads.submit(each.choose, **arguments) for each in pipelines]
            for each in asked:
                found = each.result()
                assert found is not None
                assert found.step == expected
                assert found.metadata == {"rank": 0, "name": f"s{expected}"}
        with pytest.raises(UsageError, match="only one"):
            pipelines[0].choose(1, name="s1")
        with pytest.raises(CheckpointNotFound, match="no checkpoint 7"):
            pipelines[0].choose(7)


@pytest.mark.parametrize("hints", ["whole", "absent"])
def test_a_name_finds_its_newest_checkpoint(tmp_path: Path, hints: str) -> None:
    store = FaultyBackend(LocalBackend(str(tmp_path)))
    ckpipe.register_backend(f"naming-{hints}", lambda url: store)
    with ckpipe.SyncPipeline(f"naming-{hints}://run") as pipeline:
        for step in range(40):
            metadata = {"name": ("last", "odd")[step % 2]} if step < 30 else {"name": step}
            pipeline.save({"w": step}, step=step, metadata=metadata).wait()
    if hints == "absent":
        shutil.rmtree(tmp_path / ".ckpipe" / "digests")
    with ckpipe.SyncPipeline(f"naming-{hints}://run") as pipeline:
        before = len(store.operations)
        chosen = pipeline.choose(name="last")
        read = {each.key for each in store.operations[before:] if each.verb.startswith("get")}
        assert chosen is not None
        assert chosen.step == 28
        assert pipeline.choose(name="first") is None
    indexes = [key for key in read if key.startswith("step-")]
    assert len(indexes) == (1 if hints == "whole" else 40), sorted(read)
