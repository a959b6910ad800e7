"""Checkpoints that an older ``training_state`` wrote load into every wrapper."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from gang import gang, told
from old_training_states import CONTENTS, DATA, RANKS

TARGETS = [("plain", 1), *((wrapper, n) for wrapper in ("ddp", "fsdp2") for n in (1, 2, 4))]
UNLOADABLE = pytest.mark.xfail(
    strict=True, reason="A parameter without optimizer state cannot be loaded."
)

Failures = dict[str, dict[int, list[Any]]]


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int], Failures]]:
    """Load everything into a wrapper; a world takes long to start, so each does so once."""
    with gang() as world:

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

        yield failures_of


@pytest.mark.parametrize(
    "content",
    [pytest.param(each, marks=UNLOADABLE if each == "unused" else ()) for each in CONTENTS],
)
@pytest.mark.parametrize("saved", RANKS)
@pytest.mark.parametrize(("wrapper", "ranks"), TARGETS)
def test_old_checkpoint_loads_to_the_bit(
    failures: Callable[[str, int], Failures], saved: str, content: str, wrapper: str, ranks: int
) -> None:
    found = failures(wrapper, ranks)[f"{saved} {content}"]
    assert found == {rank: [None] for rank in range(ranks)}
