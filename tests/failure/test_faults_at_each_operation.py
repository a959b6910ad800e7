"""Fails each store operation of a run in turn, before it lands and after, and looks what is left.

The run opens a pipeline, saves twice with ``keep_last=1``, and loads. Whatever fails, a checkpoint
is absent or complete and right, what was committed stays until a newer one replaces it, the
pipeline goes on, and neither memory nor an upload is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import warnings
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.testing import Landing
from ckpipe.testing.wrappers import Operation
from tests.support.pipelines import Stores, checked_whole, load_existing, loaded_state, same, stores
from tests.support.sampling import EVERY, SEED
from tests.support.settling import SettlingPipeline, UnderWay, settle

SETTINGS: dict[str, Any] = {
    "keep_last": 1,
    "upload": {"backoff_seconds": 0, "retries": 2, "lanes": 2},
    "staging": {"bytes": 2 * 65536, "block_bytes": 65536},
    "load": {"lanes": 1},
}
Cases = list[tuple[int, Landing]]

SAMPLE = 8

UNRETRIED = ("enter", "exit", "abort")
"""What is done once: opening and closing the store, and giving up what has failed already."""


def content(step: int) -> dict[str, Any]:
    """A state that needs three blocks, so that saves share and reuse the memory for two."""
    return {"weight": torch.full((40_000,), float(step)), "step": step}


@dataclass
class Run:
    """What became of a run."""

    error: BaseException | None = None
    committed: list[int] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)


def save(pipeline: ckpipe.SyncPipeline, run: Run, step: int) -> None:
    handle = pipeline.save(content(step), step=step)
    try:
        handle.wait()
    except errors.SaveCancelled:
        run.cancelled.append(step)
        return
    run.committed.append(step)


def go(store: Stores, run: Run) -> None:
    with SettlingPipeline(store.url, **SETTINGS) as pipeline:
        try:
            for step in (1, 2):
                save(pipeline, run, step)
            result = load_existing(pipeline)
            assert same(result.state, content(result.step))
        finally:
            check_memory(pipeline)


def attempt(store: Stores) -> Run:
    """Run until the end or the first error that reaches the caller."""
    run = Run()
    try:
        go(store, run)
    except errors.CkpipeError as error:
        run.error = error
    return run


def check_memory(pipeline: ckpipe.SyncPipeline) -> None:
    """Wait until nothing is under way, and check that all memory was given back."""
    settle(pipeline)
    check_given_back(pipeline.statistics())


def check_given_back(found: ckpipe.Statistics) -> None:
    """Check that no save holds memory any more."""
    assert (found.budget_used, found.pool_used) == (0, 0)


def check_store(store: Stores, run: Run, *, orphans: int = 0) -> None:
    """Check that every checkpoint is absent or complete, and that one can go on from there."""
    store.faulty.heal()
    assert stale_uploads(store) <= orphans
    with ckpipe.SyncPipeline(store.url, **SETTINGS) as pipeline:
        checked_whole(pipeline, content)
        if run.committed:
            newest = pipeline.latest()
            assert newest is not None
            assert newest.step >= run.committed[-1]
        pipeline.save(content(3), step=3, until="committed")
    with ckpipe.SyncPipeline(store.url) as pipeline:
        newest = pipeline.latest()
        assert newest is not None
        assert newest.step == 3
        pipeline.verify(newest)


def stale_uploads(store: Stores) -> int:
    later = datetime.now(UTC) + timedelta(days=1)
    return asyncio.run(store.memory.remove_stale_uploads("", before=later))


def operations() -> tuple[Operation, ...]:
    """The operations of a run in which nothing fails."""
    with stores() as store:
        run = attempt(store)
        assert run.error is None
        assert run.committed == [1, 2]
        return store.faulty.operations


@pytest.fixture(params=[SEED], ids=["all" if EVERY else f"seed={SEED}"])
def cases(request: pytest.FixtureRequest) -> Cases:
    """Which operations to fail, and whether they land: a random sample, or all of them."""
    numbers = range(1, len(operations()) + 1)
    everything = [(number, landing) for number in numbers for landing in Landing]
    return everything if EVERY else random.Random(request.param).sample(everything, SAMPLE)


def struck_in(store: Stores, number: int) -> Operation:
    """The operation of a number, or the last: a prune that sees no lease of a load makes fewer."""
    return store.faulty.operations[min(number, len(store.faulty.operations)) - 1]


def lost_opening(operation: Operation, landing: Landing) -> int:
    """How many uploads nobody can know of: the answer to opening one was lost."""
    return int(operation.verb == "open_upload" and landing is Landing.AFTER)


def test_an_error_that_may_pass_is_tried_again_wherever_it_strikes(cases: Cases) -> None:
    for number, landing in cases:
        with stores() as store:
            store.faulty.fail(errors.StoreUnavailable("try later"), number, landing)
            run = attempt(store)
            struck = struck_in(store, number)
            if struck.verb not in UNRETRIED:
                assert run.error is None, (number, landing, struck)
                assert run.committed == [1, 2]
            check_store(store, run, orphans=lost_opening(struck, landing))


def test_an_error_that_stays_loses_at_most_what_was_under_way(cases: Cases) -> None:
    for number, landing in cases:
        with stores() as store:
            store.faulty.fail(errors.StoreError("broken", key="k"), number, landing)
            run = attempt(store)
            struck = struck_in(store, number)
            if run.error is not None:
                assert isinstance(run.error, errors.StoreError), (number, landing, struck)
            check_store(store, run, orphans=lost_opening(struck, landing))


def test_a_pipeline_goes_on_after_any_failed_save(cases: Cases) -> None:
    for number, landing in cases:
        with stores() as store, contextlib.suppress(errors.StoreError):
            store.faulty.fail(errors.StoreError("broken", key="k"), number, landing)
            with SettlingPipeline(store.url, on_error="warn", **SETTINGS) as pipeline:
                with contextlib.suppress(errors.StoreError):
                    pipeline.save(content(1), step=1, until="committed")
                check_memory(pipeline)
                store.faulty.heal()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", RuntimeWarning)  # of the failure
                    pipeline.save(content(2), step=2, until="committed")
                assert same(loaded_state(pipeline), content(2))


async def cancelled_at(store: Stores, number: int, landing: Landing) -> Run:
    """Save twice, and cancel the saves under way while an operation is held."""
    run, home, struck = Run(), asyncio.get_running_loop(), asyncio.Event()
    store.faulty.call(lambda _: home.call_soon_threadsafe(struck.set), number, landing)
    held = store.faulty.pause(number, landing)
    pipeline = ckpipe.Pipeline(store.url, **SETTINGS)
    under_way, calls, handles = UnderWay(pipeline), [], []

    async def save_twice() -> None:
        for step in (1, 2):
            calls.append(asyncio.create_task(pipeline.save(content(step), step=step)))
            try:
                handles.append(await calls[-1])
                await handles[-1]
            except (errors.SaveCancelled, asyncio.CancelledError):
                run.cancelled.append(step)
            else:
                run.committed.append(step)

    async def cancel() -> None:
        await struck.wait()
        ends = [asyncio.create_task(each.cancel()) for each in handles]
        for call in calls:
            call.cancel()
        if calls:
            await pipeline.steps()  # the pipeline gets its orders in turn, so it has got the others
        held.release()
        await asyncio.gather(*ends)

    cancelling = asyncio.create_task(cancel())
    async with pipeline:
        await save_twice()
        await anyio.to_thread.run_sync(under_way.wait)
        check_given_back(pipeline.statistics())
    if not struck.is_set():  # a run that prunes less has fewer operations
        cancelling.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await cancelling
    return run


async def test_a_cancellation_at_any_operation_leaves_nothing_half_done(cases: Cases) -> None:
    for number, landing in cases:
        with stores() as store:
            run = await cancelled_at(store, number, landing)
            struck = struck_in(store, number)
            assert len(run.committed) >= 1, (number, landing, struck)
            orphans = lost_opening(struck, landing)
            await anyio.to_thread.run_sync(partial(check_store, store, run, orphans=orphans))
