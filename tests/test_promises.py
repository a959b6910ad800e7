"""The list of promises names tests that are there; and promises that no other test shows."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from pipelines import loaded_state

import ckpipe
from ckpipe.errors import CkpipeError, StateChanged, UnsupportedState
from ckpipe.testing import MemoryBackend

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "promises.md"

ckpipe.register_backend("promised", MemoryBackend)


@cache
def found_in(file: str) -> frozenset[str]:
    """The tests of a file, those of a class behind its name."""
    found = []
    for node in ast.parse((TESTS / file).read_text()).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        functions = [n for n in inside if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        found += [prefix + each.name for each in functions if each.name.startswith("test_")]
    return frozenset(found)


def test_every_promise_names_a_test_that_is_there() -> None:
    rows = [row for row in PAGE.read_text().splitlines() if row.startswith("| ")]
    rows = [row for row in rows if row != "| promise | shown by |"]
    assert len(rows) > 100
    lost = []
    for row in rows:
        shown = re.fullmatch(r"\| .+ \| `(\w+\.py)::([\w:]+)`( †)? \|", row)
        if shown is None or shown[2] not in found_in(shown[1]):
            lost.append(row)
    assert not lost, "Name the test that shows it now:\n" + "\n".join(lost)


def test_a_state_larger_than_the_memory_for_it_is_saved(tmp_path: Path) -> None:
    state = {str(n): torch.full((100_000,), float(n)) for n in range(20)}
    staging = {"bytes": 262_144, "block_bytes": 65_536}
    with ckpipe.SyncPipeline(tmp_path, staging=staging) as pipeline:
        used = []
        pipeline.events.add(lambda event: used.append(pipeline.statistics().budget_used))
        pipeline.save(state, step=1).wait()
        loaded = loaded_state(pipeline)
    assert 0 < max(used) <= 262_144
    assert all(torch.equal(loaded[key], tensor) for key, tensor in state.items())


def test_a_captured_save_holds_its_own_step() -> None:
    weight = torch.nn.Parameter(torch.zeros(500_000))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones_like(weight)
    with ckpipe.SyncPipeline("promised://store", guard=optimizer) as pipeline:
        for step in range(3):
            handle = pipeline.save({"weight": weight}, step=step, until="captured")
            optimizer.step()
        handle.wait()
        for step in range(3):
            assert torch.equal(
                loaded_state(pipeline, step)["weight"], torch.full_like(weight, -float(step))
            )


def test_a_change_beside_a_captured_save_is_never_saved() -> None:
    weight = torch.nn.Parameter(torch.zeros(4_000_000))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with ckpipe.SyncPipeline("promised://changed", guard=optimizer) as pipeline:
        for step in range(3):
            handle = pipeline.save({"weight": weight}, step=step, until="captured")
            with torch.no_grad():
                weight.fill_(step + 1.0)
            try:
                handle.wait()
            except StateChanged:
                continue  # as long as the copy had not ended
            assert torch.equal(
                loaded_state(pipeline, step)["weight"], torch.full_like(weight, float(step))
            )


class Strange:
    """An object that only pickle can save."""


def test_pickle_is_needed_at_both_ends(tmp_path: Path) -> None:
    state = {"strange": Strange()}
    with (
        ckpipe.SyncPipeline(tmp_path) as pipeline,
        pytest.raises(UnsupportedState, match="strange"),
    ):
        pipeline.save(state, step=1)
    with ckpipe.SyncPipeline(tmp_path, pickle="allow") as pipeline:
        pipeline.save(state, step=1).wait()
    with pytest.raises(CkpipeError, match='pickle="allow"'):
        ckpipe.load(tmp_path)
    assert isinstance(ckpipe.load(tmp_path, pickle="allow").state["strange"], Strange)
