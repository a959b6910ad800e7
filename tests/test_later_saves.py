"""Later saves of a steady run: interrupted, refused, planned again, and waiting for locks."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from lock_actors import PATIENCE, DaemonThreads
from pipelines import Stores

import ckpipe
from ckpipe.errors import PipelineBusy, UnsupportedState


class Changing:
    """An object whose state changes, and which interrupts its caller when it is told to."""

    def __init__(self) -> None:
        self.more: Any = 1
        self.interrupted = False

    def state_dict(self) -> dict[str, Any]:
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt
        return {"more": self.more, "tensor": torch.ones(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def test_a_save_whose_caller_is_interrupted_is_given_up(store: Stores) -> None:
    with ckpipe.SyncPipeline(store.url) as pipeline:
        changing = Changing()
        pipeline.save({"changing": changing}, step=0).wait()
        changing.interrupted, changing.more = True, 2
        with pytest.raises(KeyboardInterrupt):
            pipeline.save({"changing": changing}, step=1)
        changing.more = 3
        pipeline.save({"changing": changing}, step=2).wait()
        assert [info.step for info in pipeline.steps()] == [0, 2]
        assert pipeline.statistics().budget_used == 0


def test_what_cannot_be_saved_is_told_and_nothing_stays_held(store: Stores) -> None:
    with ckpipe.SyncPipeline(store.url) as pipeline:
        changing = Changing()
        pipeline.save({"changing": changing}, step=0).wait()
        changing.more = object()
        with pytest.raises(UnsupportedState, match=r"changing\.more"):
            pipeline.save({"changing": changing}, step=1)
        with pipeline.lock.mutating(timeout=PATIENCE):
            changing.more = 3
        pipeline.save({"changing": changing}, step=2).wait()
        assert pipeline.statistics().budget_used == 0


def test_a_structure_that_has_changed_is_planned_again(store: Stores) -> None:
    with ckpipe.SyncPipeline(store.url) as pipeline:
        changing = Changing()
        pipeline.save({"changing": changing}, step=0).wait()
        changing.more = torch.arange(4)
        pipeline.save({"changing": changing}, step=1).wait()
        result = pipeline.load(step=1)
        assert result is not None
        assert torch.equal(result.state["changing"]["more"], torch.arange(4))


def test_a_trainer_that_holds_the_lock_is_waited_for(store: Stores, threads: DaemonThreads) -> None:
    with ckpipe.SyncPipeline(store.url) as pipeline:
        state = {"one": torch.zeros(8), "two": torch.zeros(8)}
        pipeline.save(state, step=0).wait()
        inside, go_on = threading.Event(), threading.Event()

        def train() -> None:
            with pipeline.lock.mutating():
                state["one"] += 1
                inside.set()
                assert go_on.wait(PATIENCE)
                state["two"] += 1

        def save() -> None:
            pipeline.save(state, step=1).wait()

        trainer = threads.submit(train)
        assert inside.wait(PATIENCE)
        saver = threads.submit(save)
        while not pipeline.lock.statistics().waiters:
            pass
        go_on.set()
        for each in (trainer, saver):
            each.result(PATIENCE)
        result = pipeline.load(step=1)
        assert result is not None
        assert result.state["one"][0] == result.state["two"][0] == 1


def test_memory_that_is_in_use_is_not_taken(store: Stores) -> None:
    state = {"tensor": torch.ones(1 << 18)}
    settings: dict[str, Any] = {"on_busy": "fail", "staging": {"bytes": 16 << 20}}
    with ckpipe.SyncPipeline(store.url, **settings) as pipeline:
        pipeline.save(state, step=0).wait()
        handle = pipeline.save(state, step=1)
        with handle.staged_state() as held:
            with pytest.raises(PipelineBusy):
                pipeline.save(state, step=2)
            assert torch.equal(held["tensor"], state["tensor"])
        handle.wait()
        pipeline.save(state, step=3).wait()
