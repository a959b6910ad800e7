"""How a pipeline ends: closed by a call or a block, or still open when the program ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pipelines import Stores, stores

import ckpipe
from ckpipe import errors

STATE = {"w": torch.ones(10)}


@pytest.fixture
def store() -> Iterator[Stores]:
    with stores() as made:
        yield made


def test_open_and_close_do_what_the_block_does(store: Stores) -> None:
    pipeline = ckpipe.SyncPipeline(store.url)
    pipeline.close()  # there is nothing to close
    assert pipeline.open() is pipeline
    with pipeline.open():
        handle = pipeline.save(STATE, step=0)
    assert handle.status == "committed"
    pipeline.close()
    with pytest.raises(errors.PipelineClosed, match="opened once"):
        pipeline.open()


async def test_open_and_aclose_do_what_the_block_does(store: Stores) -> None:
    pipeline = ckpipe.Pipeline(store.url)
    await pipeline.aclose()
    assert await pipeline.open() is pipeline
    async with await pipeline.open():
        handle = await pipeline.save(STATE, step=0)
    assert handle.status == "committed"
    await pipeline.aclose()
    with pytest.raises(errors.PipelineClosed, match="opened once"):
        await pipeline.open()


def test_closing_raises_a_failure_of_which_nothing_was_told_once(store: Stores) -> None:
    pipeline = ckpipe.SyncPipeline(store.url).open()
    store.slow.hold("write")
    pipeline.save(STATE, step=3)
    store.faulty.fail(errors.StoreFull("no room", key="x"), "complete")
    store.slow.release()
    with pytest.raises(errors.StoreFull, match="step 3"):
        pipeline.close()
    pipeline.close()


def test_threads_that_close_together_all_wait_for_the_end(store: Stores) -> None:
    pipeline = ckpipe.SyncPipeline(store.url).open()
    store.slow.hold("write")
    handle = pipeline.save(STATE, step=0)
    seen: list[str] = []

    def close() -> None:
        pipeline.close()
        seen.append(handle.status)

    threads = [threading.Thread(target=close) for _ in range(3)]
    for thread in threads:
        thread.start()
    store.slow.gate.wait_until_held()
    assert seen == []
    store.slow.release()
    for thread in threads:
        thread.join()
    assert seen == ["committed"] * 3


def test_a_hook_cannot_close_its_own_pipeline(tmp_path: Path) -> None:
    pipeline = ckpipe.SyncPipeline(tmp_path / "one").open()
    other = ckpipe.SyncPipeline(tmp_path / "other").open()

    @pipeline.on_committed
    def close(_: object) -> None:
        other.close()
        pipeline.close()

    pipeline.save(STATE, step=0)
    with pytest.raises(errors.UsageError, match="A hook cannot close its pipeline"):
        pipeline.close()
    with pytest.raises(errors.PipelineClosed):
        other.save(STATE, step=0)
