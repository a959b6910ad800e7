"""Saves that fail: their error is raised to the caller, or is a warning, and is never lost."""

from __future__ import annotations

import pytest
import torch

import ckpipe
from ckpipe import errors
from tests.support.pipelines import Stores


def save_and_lose(store: Stores, pipeline: ckpipe.SyncPipeline) -> ckpipe.SyncSaveHandle:
    """Save step 0, which is staged and then fail."""
    store.faulty.fail(errors.StoreFull("no room", key="x"), "write")
    store.slow.hold("write")
    handle = pipeline.save({"a": torch.ones(10)}, step=0)
    store.slow.release()
    return handle


def test_a_failure_without_a_waiter_is_raised_by_the_next_save(store: Stores) -> None:
    with ckpipe.SyncPipeline(store.url) as pipeline:
        handle = save_and_lose(store, pipeline)
        with pytest.raises(errors.StoreFull):
            handle._save.committed.result()
        with pytest.raises(errors.StoreFull, match="step 0"):
            pipeline.save({"a": torch.ones(10)}, step=1)
        pipeline.save({"a": torch.ones(10)}, step=2, until="committed")


def test_a_failure_without_a_waiter_is_raised_on_leaving(store: Stores) -> None:
    with pytest.raises(errors.StoreFull), ckpipe.SyncPipeline(store.url) as pipeline:
        save_and_lose(store, pipeline)


def test_failure_only_warns_if_asked_to(store: Stores) -> None:
    with pytest.warns(RuntimeWarning, match="no room"):  # noqa: SIM117
        with ckpipe.SyncPipeline(store.url, on_error="warn") as pipeline:
            save_and_lose(store, pipeline)


def test_failure_before_all_is_staged_only_warns_if_asked_to(store: Stores) -> None:
    store.faulty.fail(errors.StoreFull("no room", key="x"), "write")
    state = {"a": torch.ones(100_000)}
    # Six blocks share the memory of one, so none but the first is copied before the fault.
    staging = {"bytes": 65536, "block_bytes": 65536}
    with pytest.warns(RuntimeWarning, match="no room"):  # noqa: PT031, SIM117
        with ckpipe.SyncPipeline(store.url, on_error="warn", staging=staging) as pipeline:
            handle = pipeline.save(state, step=0)
            assert handle.status == "failed"
    with pytest.raises(errors.StoreFull):
        handle.wait()
