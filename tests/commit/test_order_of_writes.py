"""The order in which a save writes its objects, with one rank and with several."""

from __future__ import annotations

import pytest

from tests.support.ledger import Ledger, opened, save_each


@pytest.mark.parametrize("world_size", [1, 3])
def test_data_comes_before_its_manifest_and_that_before_the_index(world_size: int) -> None:
    ledger = Ledger()
    ledger.begin("saves")
    with opened(ledger, world_size) as pipelines:
        for step in (1, 2, 3):
            save_each(ledger, pipelines, step, first=step == 1)
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
