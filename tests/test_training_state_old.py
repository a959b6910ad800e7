"""Checkpoints that an older ``training_state`` wrote load into every wrapper."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gang import Gang, told
from old_training_states import CONTENTS, DATA, RANKS, made
from sampling import sample

from ckpipe import SyncPipeline
from ckpipe.distributed import training_state
from ckpipe.errors import StructureMismatch

TARGETS = [
    ("plain", 1),
    *sample([("ddp", 1), ("ddp", 2), ("ddp", 4)], 1),
    *sample([("fsdp2", 1), ("fsdp2", 2), ("fsdp2", 4)], 1),
]
Failures = dict[str, dict[int, list[Any]]]


@pytest.fixture(scope="module")
def failures(
    world: Gang, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int], Failures]:
    """Load everything into a wrapper; a world takes long to start, so each does so once."""

    @cache
    def failures_of(wrapper: str, ranks: int) -> Failures:
        root = tmp_path_factory.mktemp("old")
        for saved in RANKS:
            with tarfile.open(DATA / f"{saved}.tar.xz") as archive:
                archive.extractall(root / saved, filter="data")
        codes = world.run("old_training_states:load", root, ranks, wrapper=wrapper)
        assert codes == [0] * ranks
        names = [f"{saved} {content}" for saved in RANKS for content in CONTENTS]
        return {name: told(root, name) for name in names}

    return failures_of


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("saved", RANKS)
@pytest.mark.parametrize(("wrapper", "ranks"), TARGETS)
def test_old_checkpoint_loads_to_the_bit(
    failures: Callable[[str, int], Failures], saved: str, content: str, wrapper: str, ranks: int
) -> None:
    found = failures(wrapper, ranks)[f"{saved} {content}"]
    assert found == {rank: [None] for rank in range(ranks)}


def test_state_is_not_taken_without_what_says_whether_it_was_made_up(tmp_path: Path) -> None:
    with tarfile.open(DATA / "plain.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    content = CONTENTS["unstepped"]
    model, _, optimizers = made("plain", content)
    state = {"training": training_state(model, *optimizers)}
    with (
        SyncPipeline(tmp_path) as pipeline,
        pytest.raises(StructureMismatch, match=r"Include 'training.begun' as well"),
    ):
        pipeline.load(state, step=content.step, include=["training.optimizer"])
    assert not any(optimizer.state for optimizer in optimizers)
