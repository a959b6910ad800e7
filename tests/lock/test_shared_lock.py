"""Several pipelines over one state: one lock keeps all of them and the trainer apart."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors


def test_who_changes_the_state_saves_to_neither(tmp_path: Path) -> None:
    state = {"weight": torch.ones(3)}
    with (
        ckpipe.SyncPipeline(tmp_path / "first") as first,
        ckpipe.SyncPipeline(tmp_path / "second", state_lock=first.lock) as second,
    ):
        assert second.lock is first.lock
        for holder, saver in ((first, second), (second, first)):
            with holder.lock.mutating(), pytest.raises(errors.LockMisuse):
                saver.save(state)
            saver.save(state).wait()


def test_closing_one_takes_only_its_own_hooks_off(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with ckpipe.SyncPipeline(tmp_path / "a", guard=optimizer) as first:
        with (
            pytest.raises(KeyError),
            ckpipe.SyncPipeline(tmp_path / "b", guard=optimizer, state_lock=first.lock),
        ):
            raise KeyError
        assert holding_in_step(optimizer, first.lock)
    assert not holding_in_step(optimizer, first.lock)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def holding_in_step(optimizer: torch.optim.Optimizer, lock: ckpipe.StateLock) -> bool:
    """Whether a step of an optimizer is one under a lock: then it may not be captured there."""
    refused = False

    def closure() -> float:
        nonlocal refused
        try:
            with lock.capturing(timeout=0.0):
                pass
        except errors.LockMisuse:
            refused = True
        return 0.0

    optimizer.step(closure)
    return refused


@pytest.mark.parametrize("lock", [threading.Lock(), {"timeout_seconds": 1.0}])
def test_what_is_no_lock_of_a_state_is_refused(tmp_path: Path, lock: Any) -> None:
    with pytest.raises(errors.UsageError, match="state_lock"):
        ckpipe.SyncPipeline(tmp_path, state_lock=lock)


def test_a_lock_given_in_place_of_its_settings_is_explained(tmp_path: Path) -> None:
    with pytest.raises(errors.SettingsError, match="state_lock"):
        ckpipe.SyncPipeline(tmp_path, lock=ckpipe.StateLock())  # type: ignore[arg-type]
