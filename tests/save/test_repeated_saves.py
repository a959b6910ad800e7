"""What saves keep from one to the next changes none of their bytes, and is never stale."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import ckpipe
from tests.support.pipelines import load_existing
from tests.support.sampling import EVERY, SEED
from tests.support.stored_files import document_of, sealed

SAVES = 60 if EVERY else 14


_CHANGES = 6


class _Training:
    """A state that changes in every way that matters, and mostly only in its values."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._next = rng.sample(range(_CHANGES), _CHANGES)
        self.state: dict[Any, Any] = {
            "w": torch.zeros(300), "moves": torch.zeros(5), "count": 0, "rates": [0.1, 0.2],
        }  # fmt: skip

    def step(self) -> None:
        """Change something."""
        state, rng = self.state, self._rng
        state["w"] += 1
        state["count"] += 1
        match self._next.pop() if self._next else rng.randrange(_CHANGES + 2):
            case 0:
                state["rates"] = [rng.random(), rng.random()]
            case 1:
                state["moves"] = state["moves"] + 1
            case 2:
                state["rates"] = [rng.random() for _ in range(rng.randrange(4))]
            case 3:
                keys = [key for key in (1, True) if key in state]
                state.pop(keys[0] if keys else None, None)
                state[rng.choice([1, True])] = "key"
            case 4:
                state["w"] = torch.full((rng.choice([300, 700]),), rng.random())
            case 5:
                state["w"].requires_grad_(requires_grad=False)
                state["moves"] = state["moves"].detach().requires_grad_()
            case _:
                pass


def _copy(state: dict[Any, Any]) -> dict[Any, Any]:
    return {
        key: each.clone() if isinstance(each, torch.Tensor) else each for key, each in state.items()
    }


def _check_same(found: dict[Any, Any], expected: dict[Any, Any]) -> None:
    assert [(type(key), key) for key in found] == [(type(key), key) for key in expected]
    for key, each in expected.items():
        if isinstance(each, torch.Tensor):
            assert torch.equal(found[key], each)
            assert found[key].requires_grad == each.requires_grad
        else:
            assert found[key] == each


@pytest.mark.parametrize(("worker", "saves"), [("thread", SAVES), ("process", SAVES // 2 + 1)])
def test_saves_of_a_changing_state_are_each_its_own(
    worker: Literal["thread", "process"], saves: int, tmp_path: Path
) -> None:
    training, saved = _Training(random.Random(SEED)), {}
    with ckpipe.SyncPipeline(tmp_path, worker=worker) as pipeline:
        for step in range(saves):
            with torch.no_grad():
                training.step()
            saved[step] = _copy(training.state)
            pipeline.save(training.state, step=step, metrics={"loss": float(step)}).wait()
        for step, expected in saved.items():
            result = load_existing(pipeline, step=step)
            assert result.metrics == {"loss": float(step)}
            _check_same(result.state, expected)
    indexes = sorted(tmp_path.glob("*.json"))
    assert len(indexes) == saves
    for path in indexes:
        data = path.read_bytes()
        assert sealed(document_of(data)) == data
