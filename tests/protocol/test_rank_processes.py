"""Real ranks that die, lag and prune at once: nothing that counts is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckpipe
from tests.support.rank_processes import Gang, newest_whole, same_everywhere
from tests.support.sampling import EVERY

SAVES = 20 if EVERY else 6


DEATHS = [
    {"verb": verb, "key": key, "landing": landing}
    for verb, key in (("put", "/m/0/"), ("complete", "rank-"), ("list", "/m/0/"))
    for landing in ("before", "after")
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("death", DEATHS)
def test_ranks_that_die_lag_and_prune_at_once_lose_nothing(
    world: Gang, tmp_path: Path, death: dict[str, str]
) -> None:
    root = tmp_path / "run"
    case: dict[str, Any] = {"slow": 2, "pruners": [0, 1], "until": SAVES}
    codes = world.run("retain", root, 4, victim=3, nth=SAVES // 2, **death, **case)
    assert codes == [0, 0, 0, None], "nothing is raised on those that live"
    whole = newest_whole(root, 4)
    assert world.run("retain", root, 4, **case) == [0] * 4
    assert same_everywhere(root, "loaded", slice(-1, None)) == [whole]
    with ckpipe.SyncPipeline(root, keep_last=2) as pipeline:
        stay = {SAVES - 1, SAVES - 2, whole}  # the last, and what they were resumed from
        assert {info.step for info in pipeline.steps() if info.complete} >= stay
        pipeline.prune()
        kept = [info for info in pipeline.steps() if info.complete]
        assert {info.step for info in kept} == stay
        for info in kept:
            pipeline.verify(info)
    deleted = {each.name for each in (root / ".ckpipe" / "deleted").iterdir()}
    assert len(deleted) >= SAVES - 4
    left = {each.name.removesuffix(".json") for each in root.iterdir()}
    assert not left & deleted, "no file of a deleted one is left"
