"""The order in which retention removes the objects of a checkpoint."""

from __future__ import annotations

import pytest

from tests.support.ledger import Ledger, opened, prepare


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_tombstone_comes_first_and_data_goes_last(world_size: int) -> None:
    ledger = Ledger()
    prepare(ledger, world_size, 3)
    with opened(ledger, world_size) as pipelines:
        ledger.begin("deletion")
        for step in (1, 2):
            pipelines[0].delete(step)
    for step in (1, 2):
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
