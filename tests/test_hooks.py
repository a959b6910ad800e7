"""Hooks are called in order, whatever they do, and no save suffers from them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from pipelines import Stores, stores

import ckpipe
from ckpipe import errors
from ckpipe.events import Completed, RankCommitted, SaveFailed, Staged

STATE: dict[str, Any] = {"a": torch.ones(100)}


@pytest.fixture
def store() -> Iterator[Stores]:
    with stores() as made:
        yield made


def test_each_kind_is_called_for_every_save_in_order(store: Stores) -> None:
    calls: dict[str, list[int]] = {"staged": [], "committed": [], "complete": [], "failed": []}
    with ckpipe.SyncPipeline(store.url, on_error="warn") as pipeline:

        @pipeline.on_staged
        def staged(event: Staged) -> None:
            calls["staged"].append(event.step)

        @pipeline.on_committed
        async def committed(event: RankCommitted) -> None:
            await anyio.lowlevel.checkpoint()
            calls["committed"].append(event.step)

        @pipeline.on_complete
        async def complete(event: Completed) -> None:
            calls["complete"].append(event.info.step)

        @pipeline.on_failed
        def failed(event: SaveFailed) -> None:
            assert "no room" in event.error
            calls["failed"].append(event.step)

        for step in range(5):
            pipeline.save(STATE, step=step, until="committed")
        store.faulty.fail(errors.StoreFull("no room"), "write")
        with pytest.raises(errors.StoreFull):
            pipeline.save(STATE, step=5).wait()
    assert calls["committed"] == calls["complete"] == [0, 1, 2, 3, 4]
    assert calls["staged"][:5] == [0, 1, 2, 3, 4]
    assert calls["failed"] == [5]


@pytest.mark.parametrize("awaits", [False, True])
def test_a_hook_that_raises_breaks_no_save_and_is_brought_up(
    tmp_path: Path, awaits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def bad(event: Staged) -> None:
        raise ZeroDivisionError(event.step)

    async def bad_too(event: Staged) -> None:
        raise ZeroDivisionError(event.step)

    with pytest.raises(ZeroDivisionError) as caught, ckpipe.SyncPipeline(tmp_path) as pipeline:  # noqa: PT012
        pipeline.on_staged(bad_too if awaits else bad)
        assert pipeline.save(STATE, step=3).wait().complete
    assert "Raised by the hook" in caught.value.__notes__[0]
    assert "bad" in caplog.text
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        assert [each.step for each in pipeline.steps() if each.complete] == [3]


def test_a_hook_that_waits_for_the_trainers_thread_holds_nothing_up(tmp_path: Path) -> None:
    go_on, went_on = threading.Event(), threading.Event()

    def wait(event: Staged) -> None:
        assert go_on.wait(30)
        went_on.set()

    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.on_staged(wait)
        for step in range(3):
            assert pipeline.save(STATE, step=step).wait(30).complete
        assert not went_on.is_set()
        go_on.set()
    assert went_on.is_set(), "leaving waits for hooks"


def test_leaving_waits_for_a_hook_no_longer_than_for_a_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop = threading.Event()

    def never(event: Staged) -> None:
        stop.wait(60)

    with ckpipe.SyncPipeline(tmp_path, drain_timeout_seconds=0.2) as pipeline:
        pipeline.on_staged(never)
        pipeline.save(STATE, step=0, until="committed")
    assert "did not return" in caplog.text
    assert "never" in caplog.text
    stop.set()
