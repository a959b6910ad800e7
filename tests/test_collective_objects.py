"""Objects that call collectives when they are saved or loaded: all ranks call in one order."""

from __future__ import annotations

from pathlib import Path

import pytest
from collective_objects import STATES
from gang import Gang

pytestmark = pytest.mark.timeout(600)


def test_objects_are_asked_in_one_order_on_all_ranks(world: Gang, tmp_path: Path) -> None:
    case = {"states": list(STATES)}
    assert world.run("collective_objects:another_order", tmp_path / "run", 2, **case) == [0, 0]
