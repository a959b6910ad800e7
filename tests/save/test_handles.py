"""Handles of saves: they tell after the pipeline was closed what they told before."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors
from tests.support.pipelines import Stores
from tests.support.rank_pipelines import one_rank, open_rank

STATE = {"w": torch.ones(50_000)}
ENDS = ("committed", "failed", "cancelled", "skipped")
METHODS: dict[str, Callable[[Any], Any]] = {
    "captured": lambda handle: getattr(handle, "wait_captured", None) or handle.captured,
    "staged": lambda handle: getattr(handle, "wait_staged", None) or handle.staged,
    "committed": lambda handle: getattr(handle, "wait", None) or handle.committed,
    "complete": lambda handle: getattr(handle, "wait_complete", None) or handle.complete,
    "cancel": lambda handle: handle.cancel,
    "facts": lambda handle: lambda: (handle.id, handle.step, handle.status),
    "report": lambda handle: lambda: handle.report.to_data(),
    "repr": lambda handle: lambda: repr(handle),
}


async def answer(handle: Any, method: str) -> tuple[Any, ...]:
    """What a method of a handle returns or raises."""
    try:
        found = METHODS[method](handle)()
        return "returned", await found if inspect.isawaitable(found) else found
    except errors.CkpipeError as error:
        return "raised", type(error), str(error)


async def opened_and_closed(
    store: Stores, awaits: bool
) -> tuple[Callable[..., Awaitable[Any]], Callable[[], Awaitable[Any]]]:
    """Open a pipeline of a form; return what saves and what closes it, both to be awaited."""
    settings: dict[str, Any] = {"on_error": "warn", "on_busy": "skip", "worker": "thread"}
    settings["staging"] = {"block_bytes": 65536, "bytes": 1 << 18}
    if awaits:
        pipeline = await ckpipe.Pipeline(store.url, **settings).open()
        return pipeline.save, pipeline.aclose
    blocking = ckpipe.SyncPipeline(store.url, **settings).open()

    async def save(*args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(blocking.save, *args, **kwargs)

    async def close() -> None:
        await asyncio.to_thread(blocking.close)

    return save, close


@pytest.mark.filterwarnings("ignore:A checkpoint failed:RuntimeWarning")
@pytest.mark.parametrize("awaits", [False, True])
@pytest.mark.parametrize("end", ENDS)
async def test_a_handle_tells_after_closing_what_it_told_before(
    store: Stores, end: str, awaits: bool
) -> None:
    save, close = await opened_and_closed(store, awaits)
    await save(STATE, step=0, until="committed")
    if end == "failed":
        store.faulty.fail(errors.StoreFull("no room"), "complete")
    elif end != "committed":
        store.slow.hold("write")
    handle = await save(STATE, step=1)
    if end == "skipped":  # for want of the memory that the held one has
        handle, held = await save(STATE, step=2), handle
        assert held.status != "committed"
    if end == "cancelled":
        await answer(handle, "cancel")
    store.slow.release()
    before = {each: await answer(handle, each) for each in METHODS}
    await close()
    after = {each: await answer(handle, each) for each in METHODS}
    assert handle.status == end
    del before["report"], before["repr"]  # retention was perhaps under way
    assert {each: after[each] for each in before} == before
    assert after["report"][0] == after["repr"][0] == "returned"
    lending = handle.staged_state()
    with pytest.raises(errors.PipelineClosed):
        await lending.__aenter__() if awaits else lending.__enter__()


def test_a_rank_that_has_left_waits_for_the_others(store: Stores) -> None:
    first = open_rank(store.url, 0, 2)
    handle = first.save(STATE, step=1)
    first.close()
    with pytest.raises(TimeoutError, match="without a commit: 1"):
        handle.wait_complete(timeout=0)
    with one_rank(store.url, 1, 2) as second:
        second.save(STATE, step=1, metadata={"not": "seen"})
    info = handle.wait_complete(timeout=60)
    assert info.complete
    assert info.world_size == 2
    with ckpipe.SyncPipeline(store.url, solo=True) as pipeline:
        pipeline.delete(1, force=True)
    with pytest.raises(errors.CheckpointNotFound):
        handle.wait_complete(timeout=60)
    with ckpipe.SyncPipeline(store.url, read_only=True, solo=True) as pipeline:
        assert pipeline.steps() == []


async def test_a_coroutine_waits_for_the_others_after_closing(store: Stores) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "2")
        async with ckpipe.Pipeline(store.url, attempt_id="run") as first:
            handle = await first.save(STATE, step=1)
    waiting = asyncio.create_task(handle.complete())
    second = await asyncio.to_thread(open_rank, store.url, 1, 2)
    await asyncio.to_thread(second.save, STATE, step=1)
    await asyncio.to_thread(second.close)
    assert (await waiting).complete
