"""The answer to a commit is lost or is that of another writer: the save reads the index back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.testing import Landing
from ckpipe.testing.wrappers import Operation
from tests.support.pipelines import Stores
from tests.support.stored_files import document_of, sealed

SETTINGS: dict[str, Any] = {
    "upload": {"backoff_seconds": 0, "retries": 2},
    "staging": {"block_bytes": 65536},
}


def content(step: int) -> dict[str, Any]:
    return {"weight": torch.full((40_000,), float(step)), "step": step}


def is_index(operation: Operation) -> bool:
    return operation.verb == "put" and operation.key.startswith("step-")


def is_index_read(operation: Operation) -> bool:
    return operation.verb == "get" and operation.key.startswith("step-")


def forged(stored: Any, old_step: int, new_step: int) -> Any:
    """An index with another step and everything else, its own token included, as it was."""
    document = document_of(bytes(stored.data))
    assert document["step"] == old_step
    return replace(stored, data=sealed(document | {"step": new_step}))


def test_a_lost_answer_is_read_back(store: Stores) -> None:
    store.faulty.fail(errors.StoreError("lost"), is_index, Landing.AFTER)
    with ckpipe.SyncPipeline(store.url, **SETTINGS) as pipeline:
        info = pipeline.save(content(1), step=1).wait()
        assert info.complete
        pipeline.verify(info)


def test_a_store_that_recovers_between_put_and_read_back_is_waited_for(store: Stores) -> None:
    store.faulty.fail(errors.StoreUnavailable("down"), is_index, Landing.AFTER)
    store.faulty.fail(errors.StoreUnavailable("still down"), is_index_read, times=2)
    with ckpipe.SyncPipeline(store.url, **SETTINGS) as pipeline:
        pipeline.verify(pipeline.save(content(1), step=1).wait())


def test_an_index_of_another_writer_is_a_conflict(store: Stores) -> None:
    with ckpipe.SyncPipeline(store.url, **SETTINGS) as pipeline:
        theirs = pipeline.save(content(1), step=1).wait()
        index = store.memory._store.objects[f"{theirs.id}.json"]

        def take(operation: Operation) -> None:
            # Another writer's index, except that it must say the step of this save.
            store.memory._store.objects[operation.key] = forged(index, 1, 2)

        store.faulty.call(take, is_index)
        handle = pipeline.save(content(2), step=2)
        with pytest.raises(errors.CommitConflict, match=r"step 2.*rank 0.*key 'step-") as said:
            handle.wait()
        assert "its own root" in str(said.value)
        assert f"{handle.id}.json" in store.memory._store.objects


def test_an_unreadable_index_is_unknown_and_nothing_is_deleted(store: Stores) -> None:
    store.faulty.fail(errors.StoreError("lost"), is_index, Landing.AFTER)
    store.faulty.fail(errors.StoreUnavailable("down"), is_index_read, times=None)
    with ckpipe.SyncPipeline(store.url, **SETTINGS) as pipeline:
        handle = pipeline.save(content(1), step=1)
        with pytest.raises(errors.CommitUnknown, match=r"(?s)lost.*down.*step 1.*verify"):
            handle.wait()
        store.faulty.heal()
        pipeline.verify(1)
        deletions = [each for each in store.faulty.operations if each.verb == "delete"]
        assert not [each for each in deletions if each.key.startswith("step-")]
