"""A training goes on to the bit after any load, or the load raises and changes nothing."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.rank_processes import Gang, told
from tests.support.sampling import EVERY, SEED
from tests.training.matrix_cells import RANKS, Cell, every_cell
from tests.training.matrix_optimizers import OPTIMIZERS

CELLS = list(dict.fromkeys(every_cell()))
PLAIN = [each for each in CELLS if each.saved_in == each.wrapper == "plain"]
SAMPLE = 12


def sampled() -> list[Cell]:
    """Every scenario and every kind of optimizer in a plain model, and some of all cells."""
    usual = ("adamw", "hooked")
    scenarios = {each.scenario: each for each in PLAIN[::-1] if each.optimizer in usual}
    kinds = [each for each in PLAIN if each.scenario == "same"]
    drawn = random.Random(SEED).sample(CELLS, SAMPLE)
    return list(dict.fromkeys([*scenarios.values(), *kinds, *drawn]))


@pytest.mark.timeout(3600)  # the long form, beside others
@pytest.mark.parametrize("kind", OPTIMIZERS if EVERY else ["a sample"])
def test_training_goes_on_to_the_bit_or_nothing_is_touched(
    world: Gang, tmp_path: Path, kind: str, record_property: Callable[[str, object], None]
) -> None:
    cells = [each for each in CELLS if each.optimizer == kind]
    if not EVERY:
        cells = sampled()
    found = run(world, tmp_path, cells)
    judged = {cell: judge(cell, told) for cell, told in found.items()}
    counts = Counter(verdict for verdict, _ in judged.values())
    reasons = Counter(
        (verdict, why[:100]) for verdict, why in judged.values() if why and verdict != "failed"
    )
    record_property("matrix", f"{kind}: {dict(counts)}")
    for (verdict, why), count in reasons.items():
        record_property("matrix", f"{kind}: {count} {verdict}: {why}")
    assert counts["loads"]
    assert counts["raises"]
    failed = [f"{cell}: {why}" for cell, (verdict, why) in judged.items() if verdict == "failed"]
    assert not failed, "\n".join(failed)


def run(world: Gang, root: Path, cells: list[Cell]) -> dict[Cell, dict[int, str]]:
    """Save and load cells; return what each rank found of each."""
    saves = {each: number for number, each in enumerate(dict.fromkeys(c.saved for c in cells))}
    found: dict[Cell, dict[int, str]] = defaultdict(dict)
    for ranks in RANKS:
        numbered = [(n, each) for each, n in saves.items() if each.ranks == ranks]
        where = root / f"by-{ranks}"
        where.mkdir()
        torch.save(numbered, root / "cells")
        case = {"cells": str(root / "cells")}
        world.succeed("tests.training.matrix_ranks:save", where, ranks, **case)
    for ranks in RANKS:
        loads = [each for each in cells if each.ranks == ranks]
        torch.save([(saves[each.saved], each) for each in loads], root / "cells")
        case = {"cells": str(root / "cells"), "saves": str(root)}
        where = root / f"into-{ranks}"
        where.mkdir()
        world.succeed("tests.training.matrix_ranks:load", where, ranks, **case)
        for rank, every in told(where, "found").items():
            for cell, each in zip(loads, every, strict=True):
                found[cell][rank] = each
    return found


def judge(cell: Cell, found: dict[int, str]) -> tuple[str, str]:
    """Tell whether all ranks did what they must, or which did not."""
    every = list(found.values())
    if wrong := [each for each in every if each.startswith("failed")]:
        return "failed", wrong[0]
    if reasons := [each for each in every if each.startswith("not applicable")]:
        return "not applicable", reasons[0].partition(": ")[2]
    # A stage that fits is loaded, whatever other ranks are told.
    some = any if cell.wrapper == "stages" and cell.outcome == "raises" else all
    if not some(each.startswith(cell.outcome) for each in every):
        return "failed", f"it {cell.outcome} by its promises: {every}"
    verdict, _, why = every[0].partition(":")
    return verdict, why if verdict.startswith("loads, and") else ""
