"""A checkpoint whose index is damaged or newer is not passed over in silence by any verb."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.retention import KeepBest, KeepLast, Rule
from tests.support.command_line import Commands
from tests.support.pipelines import stores
from tests.support.stored_files import SUMMARIES, flip, index_key, sealed

LOSSES = {10: 3.0, 20: 1.0, 30: 2.0, 40: 4.0}


def _newer(path: Path) -> None:
    document = json.loads(path.read_bytes())
    del document["crc32c"]
    path.write_bytes(sealed({**document, "version": 99}))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped": lambda path: flip(path, path.stat().st_size // 2),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-30]),
    "empty": lambda path: path.write_bytes(b""),
    "newer": _newer,
}
ERRORS = (errors.CorruptCheckpoint, errors.UnsupportedVersion)

damages = pytest.mark.parametrize("damage", DAMAGE)
summaries = pytest.mark.parametrize("summed", [True, False], ids=["summaries", "no summaries"])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with a checkpoint for each loss; the two last steps have one name."""
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        for step, loss in LOSSES.items():
            about = {"name": f"epoch-{min(step, 30)}"}
            state = {"w": torch.ones(3) * step}
            pipeline.save(state, step=step, metrics={"loss": loss}, metadata=about).wait()
    return tmp_path


def damage_index(root: Path, step: int, damage: str, *, summed: bool = True) -> str:
    """Damage the index of a step, and perhaps remove all summaries; return the id."""
    (path,) = root.glob(f"step-{step:012}.*.json")
    DAMAGE[damage](path)
    if not summed:
        shutil.rmtree(root / SUMMARIES)
    return path.stem


def names_step(error: BaseException, step: int) -> bool:
    return f"step {step}" in str(error) and f"step-{step:012}" in str(error)


@pytest.mark.sample(2)
@damages
@summaries
def test_the_second_best_is_not_given_for_a_damaged_best(
    root: Path, call: Commands, damage: str, summed: bool
) -> None:
    id = damage_index(root, 20, damage, summed=summed)
    with ckpipe.SyncPipeline(root, read_only=True) as pipeline:
        with pytest.raises(ERRORS) as caught:
            pipeline.best("loss")
        assert names_step(caught.value, 20)
    assert call("rm", root, id).code == 0  # as the hint says
    with ckpipe.SyncPipeline(root, read_only=True) as pipeline:
        best = pipeline.best("loss")
        assert best is not None
        assert best.step == 30


@pytest.mark.sample(2)
@damages
def test_a_summary_tells_that_a_damaged_index_is_not_of_the_best(root: Path, damage: str) -> None:
    damage_index(root, 40, damage)
    with ckpipe.SyncPipeline(root) as pipeline:
        best, worst = pipeline.best("loss"), pipeline.best("loss", mode="min")
        assert best is not None
        assert (best.step, worst) == (20, best)
        with pytest.raises(ERRORS) as caught:
            pipeline.best("loss", mode="max")
        assert names_step(caught.value, 40)


@pytest.mark.sample(2)
@damages
@summaries
def test_a_name_does_not_lead_to_the_older_checkpoint_of_that_name(
    root: Path, damage: str, summed: bool
) -> None:
    damage_index(root, 40, damage, summed=summed)
    for name, step in (("epoch-30", None), ("epoch-20", 20)):
        with ckpipe.SyncPipeline(root) as pipeline:
            if step and summed:  # the summary tells that the newer one has another name
                chosen = pipeline.choose(name=name)
                assert chosen is not None
                assert chosen.step == step
                continue
            with pytest.raises(ERRORS) as caught:
                pipeline.choose(name=name)
            assert names_step(caught.value, 40)


@pytest.mark.sample(2)
@damages
def test_a_name_is_found_though_an_older_index_is_damaged(root: Path, damage: str) -> None:
    damage_index(root, 30, damage, summed=False)
    with ckpipe.SyncPipeline(root) as pipeline:
        chosen = pipeline.choose(name="epoch-30")
        assert chosen is not None
        assert chosen.step == 40
        with pytest.raises(ERRORS):
            pipeline.choose(name="no checkpoint has it")


@pytest.mark.sample(2)
@damages
def test_what_is_found_by_place_says_that_its_content_is_unknown(
    root: Path, call: Commands, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    id = damage_index(root, 40, damage, summed=False)
    verbs: dict[str, Callable[[ckpipe.SyncPipeline], ckpipe.CheckpointInfo | None]] = {
        "latest": lambda pipeline: pipeline.latest(),
        "steps": lambda pipeline: pipeline.steps(metadata=True)[-1],
        "choose": lambda pipeline: pipeline.choose(),
        "choose a step": lambda pipeline: pipeline.choose(40),
    }
    for verb, find in verbs.items():
        caplog.clear()
        with ckpipe.SyncPipeline(root, read_only=True) as pipeline:
            found = find(pipeline)
        assert found is not None, verb
        assert (found.id, found.complete, found.metadata) == (id, True, None)
        assert found.reason.startswith("its index cannot be read")
        warned = [each.message for each in caplog.records if each.levelno == logging.WARNING]
        assert any(id in each and "are unknown" in each for each in warned), verb
    with ckpipe.SyncPipeline(root, read_only=True) as pipeline:
        for which in (None, 40, id):
            with pytest.raises(ERRORS):
                pipeline.load(step=which)
    with ckpipe.SyncPipeline(root) as pipeline:
        pipeline.pin(40)
        assert [each.id for each in pipeline.steps() if each.pinned] == [id]
    for options in ([], ["--read"]):
        assert "damaged: " in call("ls", root, *options).out.splitlines()[1]


@pytest.mark.sample(2)
@damages
@pytest.mark.parametrize(
    ("step", "rule", "stay"),
    [
        (40, KeepLast(2), [40, 30, 20]),
        (30, KeepLast(2), [40, 30, 20]),
        (20, KeepBest("loss"), [40, 30, 20]),
        (20, KeepBest("loss") | KeepLast(2), [40, 30, 20]),
        (40, KeepLast(1), [40, 30]),
    ],
    ids=["newest", "second", "best", "best of two rules", "only one"],
)
def test_a_damaged_index_takes_no_place_among_those_kept(
    root: Path, damage: str, step: int, rule: Rule, stay: list[int]
) -> None:
    id = damage_index(root, step, damage)
    with ckpipe.SyncPipeline(root, retention=rule) as pipeline:
        for dry_run in (True, False):
            decision = pipeline.prune(dry_run=dry_run)
            assert [int(name[5:17]) for name in decision.keep] == stay
            assert "takes no place" in decision.reasons[id]
        assert [each.step for each in pipeline.steps()] == stay[::-1]


@pytest.mark.parametrize("verb", ["best", "choose"])
def test_a_checkpoint_that_is_deleted_meanwhile_is_not_called_damaged(verb: str) -> None:
    with stores() as made:
        with ckpipe.SyncPipeline(made.url) as pipeline:
            for step in (1, 2):
                about = {"name": "same"}
                saved = pipeline.save({}, step=step, metrics={"loss": -step}, metadata=about).wait()

        def delete(_: object) -> None:
            made.memory._store.create(f".ckpipe/deleted/{saved.id}", b"{}")
            made.memory._store.objects.pop(index_key(saved.id))

        made.faulty.call(delete, lambda operation: operation.key == index_key(saved.id))
        with ckpipe.SyncPipeline(made.url, read_only=True) as pipeline:
            found = pipeline.best("loss") if verb == "best" else pipeline.choose(name="same")
        assert found is not None
        assert found.step == 1
