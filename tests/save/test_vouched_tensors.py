"""Objects that vouch for tensors which ranks hold alike, as a planner sees it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.planning import Captured, LocalPlanner, RankPlan
from tests.support.pipelines import Stores, loaded_state
from tests.support.rank_pipelines import ranks


class Recording(LocalPlanner):
    """A planner that keeps what it gets."""

    def plan(self, captured: Captured, *, rank: int, world_size: int) -> RankPlan:
        self.captured = captured
        return super().plan(captured, rank=rank, world_size=world_size)


def captured_by(store: Stores, state: Any) -> Captured:
    """What a save finds in a state."""
    planner = Recording()
    with ckpipe.SyncPipeline(store.url, plan=planner) as pipeline:
        pipeline.save(state, step=0).wait()
    return planner.captured


class Vouching:
    """An object that says which of its tensors all ranks hold alike."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state

    def __ckpipe_replicated__(self, label: str) -> bool:
        return label.startswith("model.")


def test_object_vouches_for_its_tensors(store: Stores) -> None:
    shared = torch.ones(3)
    state = {
        "train": Vouching({"model": {"w": torch.ones(2), "tied": shared}, "rng": torch.ones(1)}),
        "model": {"w": torch.ones(4)},
        "again": shared,
    }
    captured = captured_by(store, state)
    labels = [captured.tensors[number].label for number in sorted(captured.replicated)]
    assert labels == ["train.model.w", "train.model.tied"]
    (top,) = captured_by(store, Vouching({"model": {"w": torch.ones(2)}})).replicated
    assert top == 0
    nested = captured_by(store, {"a": {"b": Vouching({"own": 1, "model": {"w": torch.ones(2)}})}})
    assert nested.replicated == {0: None}


def test_one_save_names_what_all_ranks_hold_alike(store: Stores) -> None:
    state = {"ema": {"w": torch.ones(300), "b": torch.ones(5)}, "own": torch.ones(3)}
    planner = Recording()
    with ckpipe.SyncPipeline(store.url, plan=planner) as pipeline:
        for globs, marked in (
            (["ema"], {0, 1}),
            (["ema"], {0, 1}),
            (None, set()),
            (["*.b", "o*"], {1, 2}),
            ([], set()),
        ):
            pipeline.save(state, replicated=globs).wait()
            assert planner.captured.replicated == dict.fromkeys(marked)
        with pytest.raises(errors.UsageError, match=r"Write replicated=\['ema'\]"):
            pipeline.save(state, replicated="ema")
    none: Any = {"plan": {"replicated": "none"}}
    with (
        ckpipe.SyncPipeline(store.url, **none) as pipeline,
        pytest.raises(errors.UsageError, match=r"plan\.replicated is 'none'"),
    ):
        pipeline.save(state, replicated=["ema"])


def test_what_a_save_names_is_written_once(store: Stores) -> None:
    written = []
    with ranks(store.url, 2) as world:
        for globs in (None, ["ema"]):
            for rank in world:
                handle = rank.save({"ema": torch.ones(30_000)}, replicated=globs)
            info = handle.wait_complete()
            assert info.bytes is not None
            written.append(info.bytes)
        assert written[0] > 1.9 * written[1]
        assert torch.equal(loaded_state(world[0])["ema"], torch.ones(30_000))


def test_tensor_that_stands_elsewhere_first_is_vouched_for_too(store: Stores) -> None:
    shared = torch.ones(3)
    state = {"first": shared, "train": Vouching({"model": {"w": shared}})}
    assert captured_by(store, state).replicated == {0: None}


@pytest.mark.parametrize(
    ("told", "group"),
    [
        (True, None),
        (np.True_, None),
        (1, None),
        ((1, 0), (0, 1)),
        ([0, 0, 1], (0, 1)),
        ({np.int64(1), 0}, (0, 1)),
    ],
)
def test_ranks_that_hold_a_tensor_alike(
    store: Stores, told: Any, group: tuple[int, ...] | None
) -> None:
    state = Vouching({"model": torch.ones(2)})
    state.__ckpipe_replicated__ = lambda label: told  # type: ignore[method-assign]
    assert captured_by(store, state).replicated == {0: group}
