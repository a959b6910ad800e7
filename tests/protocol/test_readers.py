"""A load beside a deletion of the same checkpoint: it reads whole data, or is turned away."""

from __future__ import annotations

import itertools
import threading

import pytest

import ckpipe
from ckpipe import errors
from ckpipe.testing import Landing, Operation
from tests.protocol.processes import Stopped, another, keys_of, with_steps
from tests.support.pipelines import Stores, load_existing, same, small_state, stores
from tests.support.stored_files import LEASES


def test_what_another_pipeline_loads_is_not_pruned(store: Stores) -> None:
    place = with_steps(store, 0, 1, 2)
    with ckpipe.SyncPipeline(store.url, keep_last=1) as writer:
        with (
            ckpipe.SyncPipeline(place.url) as reader,
            Stopped(place, lambda: reader.load(step=0), "read_into") as load,
        ):
            planned = writer.prune(dry_run=True)
            assert writer.prune() == planned
            assert [each.step for each in writer.steps()] == [0, 2]
            (leased,) = [each.id for each in writer.steps() if each.step == 0]
            assert "lease" in planned.reasons[leased]
            with pytest.raises(errors.UsageError, match="lease"):
                writer.delete(leased)
            assert load.go_on() is None
        writer.prune()
        assert [each.step for each in writer.steps()] == [2]
    assert not [key for key in keys_of(store) if key.startswith(LEASES)]


@pytest.mark.parametrize("landing", list(Landing))
def test_a_lease_that_comes_at_the_last_moment_wins(landing: Landing) -> None:
    """At each request of a deletion a load comes, and reads only after the deletion has ended."""
    for number in itertools.count(1):
        with stores() as store:
            place = with_steps(store, 1, 2)
            with (
                ckpipe.SyncPipeline(store.url) as remover,
                Stopped(store, lambda: remover.delete(1), number, landing) as deletion,
                ckpipe.SyncPipeline(place.url) as reader,
                Stopped(place, lambda: reader.load(step=1), "read_into") as load,
            ):
                if deletion.is_over:
                    break
                refused = deletion.go_on()
                error = load.go_on()
                assert refused is None or "lease" in str(refused)
                if load.is_over:  # it has come too late to begin
                    assert isinstance(
                        error, errors.CheckpointIncomplete | errors.CheckpointNotFound
                    )
                    assert refused is None
                else:
                    result = load.result()
                    assert result is not None
                    assert same(result.state, small_state(1))
                remover.prune()  # which finishes a deletion that has waited for the load
                left = [1, 2] if refused else [2]
                assert [info.step for info in remover.steps()] == left
    assert number > 5


def is_lease(operation: Operation) -> bool:
    return operation.verb == "put" and operation.key.startswith(LEASES)


def test_the_newest_that_is_deleted_before_its_lease_gives_way_to_the_next(store: Stores) -> None:
    with (
        ckpipe.SyncPipeline(store.url) as reader,
        ckpipe.SyncPipeline(another(store).url) as remover,
    ):
        infos = [remover.save(small_state(step), step=step).wait() for step in range(3)]

        def remove(step: int) -> None:
            thread = threading.Thread(target=remover.delete, args=(step,), kwargs={"force": True})
            thread.start()
            thread.join()

        store.faulty.call(lambda _: remove(2), is_lease)
        result = load_existing(reader)
        assert result.id == infos[1].id
        store.faulty.call(lambda _: remove(1), is_lease, Landing.AFTER)
        with pytest.raises(errors.CheckpointIncomplete, match="deleted just now"):
            reader.load(step=1)
