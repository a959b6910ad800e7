"""Several ranks that leave on errors of their loaders after a stop was announced."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import ckpipe
from ckpipe.errors import PermissionDenied
from ckpipe.testing import Operation
from tests.support.actors import PATIENCE, DaemonThreads
from tests.support.pipelines import Stores, newest_of
from tests.support.rank_pipelines import open_rank
from tests.support.signals import signals_heard


class Broken(Dataset[int]):
    """A dataset of which nothing can be read."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise ValueError("no batch")


def is_vote(operation: Operation) -> bool:
    return operation.verb == "put" and "/agreed/leaving.votes/" in operation.key


def opened(store: Stores, rank: int, grace: float) -> tuple[ckpipe.SyncPipeline, Any]:
    """Open one of two ranks; return it and its state."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    preemption = {"enabled": True, "signals": [], "grace_seconds": grace}
    pipeline = open_rank(store.url, rank, 2, guard=optimizer, preemption=preemption)
    return pipeline, {"optimizer": optimizer}


def leave(
    pipeline: ckpipe.SyncPipeline, state: Any, before: Callable[[], object] = bool
) -> ValueError:
    """Be told to stop after step 2, and leave on the error of a loader, which is returned."""
    with pytest.raises(ValueError, match="no batch") as raised, pipeline:  # noqa: PT012
        pipeline.save(state, step=1)
        assert not pipeline.should_save(2)
        pipeline.preempt()
        before()
        next(iter(ckpipe.Batches(DataLoader(Broken()))))
    return raised.value


def newest_step(store: Stores) -> int:
    with ckpipe.SyncPipeline(store.url) as pipeline:
        return newest_of(pipeline).step


def test_an_error_of_a_handler_ends_no_vote(store: Stores) -> None:
    """Workers of a loader die one after the other, and torch's handler raises for each."""
    heard, main = threading.Event(), threading.get_ident()

    def handle(number: int, frame: object) -> None:
        heard.set()
        raise RuntimeError("another worker died")

    store.faulty.call(lambda _: signal.pthread_kill(main, signal.SIGCHLD), is_vote)
    before = signal.signal(signal.SIGCHLD, handle)
    try:
        with signals_heard():
            ranks = [opened(store, rank, 100) for rank in range(2)]
            other = DaemonThreads().submit(leave, *ranks[1], lambda: heard.wait(PATIENCE))
            error = leave(*ranks[0])
            other.result(PATIENCE)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert any("another worker died" in note for note in error.__notes__)
    assert newest_step(store) == 2


def test_votes_that_cannot_be_deleted_cost_no_step(store: Stores) -> None:
    def is_removal(operation: Operation) -> bool:
        return operation.verb == "delete" and "/agreed/leaving.votes/" in operation.key

    store.faulty.fail(PermissionDenied("no deletions"), is_removal, times=None)
    ranks = [opened(store, rank, 100) for rank in range(2)]
    other = DaemonThreads().submit(leave, *ranks[1])
    leave(*ranks[0])
    other.result(PATIENCE)
    assert newest_step(store) == 2


def test_a_store_that_does_not_answer_ends_the_vote(store: Stores) -> None:
    store.faulty.pause(is_vote)
    error = DaemonThreads().submit(leave, *opened(store, 0, 2)).result(PATIENCE)
    assert any("StoreUnavailable" in note for note in error.__notes__)


def test_a_pipeline_that_only_reads_has_no_last_save(store: Stores) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    with ckpipe.SyncPipeline(store.url) as pipeline:
        pipeline.save({"optimizer": optimizer}, step=1)
    preemption = {"enabled": True, "signals": []}
    with ckpipe.SyncPipeline(
        store.url, guard=optimizer, read_only=True, preemption=preemption
    ) as pipeline:
        pipeline.load({"optimizer": optimizer})
        assert not pipeline.should_save(2)
        pipeline.preempt()
