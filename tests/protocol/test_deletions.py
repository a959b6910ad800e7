"""Deletions beside pins, repairs, other deletions and saves that have just begun."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.testing import Landing
from tests.protocol.processes import Stopped, another, keys_of, with_steps
from tests.support.pipelines import Stores, stores
from tests.support.rank_pipelines import ranks
from tests.support.stored_files import index_key

STATE: dict[str, Any] = {"a": torch.ones(100)}


def remove(pipeline: ckpipe.SyncPipeline, how: str) -> None:
    """Remove step 1 by name, or as what the rules do not keep."""
    if how == "delete":
        pipeline.delete(1)
    else:
        pipeline.prune()


def raised_by(call: Callable[[], object]) -> errors.CkpipeError | None:
    try:
        call()
    except errors.CkpipeError as error:
        return error
    return None


@pytest.mark.sample(3)
@pytest.mark.parametrize("landing", list(Landing))
@pytest.mark.parametrize("how", ["delete", "prune"])
@pytest.mark.parametrize("stopped", ["the pin", "the removal"])
def test_a_pin_that_succeeds_wins_at_any_moment(stopped: str, how: str, landing: Landing) -> None:
    """One is stopped at each of its requests, and the other comes then and ends first."""
    for number in itertools.count(1):
        with stores() as store:
            place = with_steps(store, 1, 2)
            with (
                ckpipe.SyncPipeline(store.url) as pinner,
                ckpipe.SyncPipeline(place.url, retention={"keep_last": 1, "lines": "all"}) as other,
            ):
                pin, removal = lambda: pinner.pin(1), lambda: remove(other, how)
                call, its_store, late = (
                    (pin, store, removal) if stopped == "the pin" else (removal, place, pin)
                )
                with Stopped[Any](its_store, call, number, landing) as first:
                    if first.is_over:
                        break
                    ended = raised_by(late)
                    begun = first.go_on()
                pinned, removed = (begun, ended) if stopped == "the pin" else (ended, begun)
                check_pinned_or_gone(other, pinned, removed)
    assert number > 5


def check_pinned_or_gone(
    pipeline: ckpipe.SyncPipeline, pinned: BaseException | None, removed: BaseException | None
) -> None:
    """Check step 1 by what those who pinned and removed it were told; retention goes on twice."""
    assert isinstance(removed, errors.UsageError | errors.CheckpointNotFound | None)
    for _ in range(2):
        pipeline.prune()
    found = {info.step: info for info in pipeline.steps()}
    if pinned is None:
        assert found[1].pinned
        pipeline.verify(1)
    else:
        assert isinstance(pinned, errors.CheckpointIncomplete | errors.CheckpointNotFound)
        assert list(found) == [2]


def without_index(store: Stores) -> str:
    """Save a step by two ranks, and one after it; the first lacks nothing but its index."""
    with ranks(store.url, 2) as world:
        for step in (7, 8):
            ids = [each.save(STATE, step=step).wait().id for each in world]
            if step == 7:
                (id,) = set(ids)
    anyio.run(store.memory.delete, [index_key(id)])
    return id


@pytest.mark.sample(1)
@pytest.mark.parametrize("landing", list(Landing))
@pytest.mark.parametrize("stopped", ["the repair", "the deletion"])
def test_a_repair_at_any_moment_revives_nothing(stopped: str, landing: Landing) -> None:
    for number in itertools.count(1):
        with stores() as store:
            id, place = without_index(store), another(store)
            with (
                ckpipe.SyncPipeline(store.url) as healer,
                ckpipe.SyncPipeline(place.url) as remover,
            ):
                repair, deletion = healer.steps, lambda: remover.delete(id)  # noqa: B023
                call, its_store, late = (
                    (repair, store, deletion)
                    if stopped == "the repair"
                    else (deletion, place, repair)
                )
                with Stopped[Any](its_store, call, number, landing) as first:
                    if first.is_over:
                        break
                    late()
                    assert first.go_on() is None
                    assert index_key(id) not in keys_of(store)
                for pipeline in (healer, remover):
                    assert [info.step for info in pipeline.steps() if info.complete] == [8]
                remover.prune()
                assert not [key for key in keys_of(store) if key.startswith(id)]
    assert number > 5


def test_processes_that_prune_at_once_remove_the_same(store: Stores) -> None:
    with_steps(store, 1, 2, 3, 4, 5)
    rules = {"keep_last": 2, "lines": "all"}
    with ThreadPoolExecutor(3) as threads, ranks(store.url, 3, retention=rules) as world:
        list(threads.map(ckpipe.SyncPipeline.prune, world))
        assert [info.step for info in world[0].steps()] == [4, 5]
        world[0].verify(4)


def test_uploads_of_a_launch_are_left_alone_before_it_has_taken_a_lease(store: Stores) -> None:
    """Its claim is all that tells of it, be leftovers of any age swept."""
    settings = {"sweep_after_seconds": 0}
    with ckpipe.SyncPipeline(store.url) as pipeline:
        store.slow.hold("write")
        handle = pipeline.save({"a": torch.zeros(1000)}, step=1)
        store.slow.gate.wait_until_held()
        with ckpipe.SyncPipeline(store.url, retention=settings) as other:
            assert other.sweep().uploads == 0
        store.slow.release()
        assert handle.wait().complete
        pipeline.verify(1)
