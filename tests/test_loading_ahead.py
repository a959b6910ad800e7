"""A load matches while its lease is being written, and nothing is looked at twice."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest
import torch
from pipelines import stores
from stored_files import tombstone_key

import ckpipe
from ckpipe import errors
from ckpipe.backend import PutMode


def test_a_target_stays_as_it_is_if_its_checkpoint_is_deleted_meanwhile() -> None:
    target = {"a": torch.zeros(1000)}
    with stores() as store, ckpipe.SyncPipeline(store.url) as pipeline:
        id = pipeline.save({"a": torch.ones(1000)}, step=1).wait().id
        store.slow.hold("put")
        with ThreadPoolExecutor(1) as threads:
            loading = threads.submit(pipeline.load, target, step=1)
            store.slow.gate.wait_until_held()  # Before the lease is there, it is chosen to go.
            anyio.run(store.memory.put, tombstone_key(id), b"{}", PutMode.CREATE)
            store.slow.release()
            with pytest.raises(errors.CheckpointIncomplete):
                loading.result(30)
    assert not target["a"].any()


class Looked:
    """An object that tells when a load looks at what it holds."""

    def __init__(self) -> None:
        self.value, self.looked = 1, threading.Event()

    def state_dict(self) -> dict[str, int]:
        self.looked.set()
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def test_a_target_is_matched_while_the_lease_is_being_written() -> None:
    target = Looked()
    with stores() as store, ckpipe.SyncPipeline(store.url) as pipeline:
        pipeline.save({"a": Looked()}, step=1, until="committed")
        store.slow.hold("put")
        target.value = 0
        with ThreadPoolExecutor(1) as threads:
            loading = threads.submit(pipeline.load, {"a": target})
            try:
                store.slow.gate.wait_until_held()
                assert target.looked.wait(30)
                assert target.value == 0
            finally:
                store.slow.release()
            loading.result(30)
    assert target.value == 1


@pytest.mark.parametrize("keys", [(1, True), (1, 1.0), (0, False), (1, "1")])
def test_keys_that_python_takes_for_one_stay_apart(keys: tuple[object, object]) -> None:
    saved, other = keys
    with stores() as store, ckpipe.SyncPipeline(store.url) as pipeline:
        pipeline.save({"a": {saved: torch.ones(3)}}, step=1, until="committed")
        target = {"a": {other: torch.zeros(3)}}
        with pytest.raises(errors.StructureMismatch):
            pipeline.load(target)
        assert not target["a"][other].any()
