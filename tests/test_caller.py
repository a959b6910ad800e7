"""What the thread that calls ``save`` does itself, and what becomes of it if it does not."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import anyio
import pytest
import torch
from lock_actors import PATIENCE, DaemonThreads
from pipelines import Stores, stores

import ckpipe
from ckpipe.errors import UsageError
from ckpipe.loop_thread import Caller, Job


@pytest.fixture
def store() -> Iterator[Stores]:
    with stores() as made:
        yield made


class Noting:
    """An object that notes the threads on which its state is asked for."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.interruptions = 0

    def state_dict(self) -> dict[str, Any]:
        self.threads.append(threading.get_ident())
        if self.interruptions:
            self.interruptions -= 1
            raise KeyboardInterrupt
        return {"number": len(self.threads), "tensor": torch.ones(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def test_a_blocking_save_looks_at_the_state_on_the_callers_thread(store: Stores) -> None:
    noting = Noting()
    with ckpipe.SyncPipeline(store.url) as pipeline:
        pipeline.save({"noting": noting}, step=1)
        pipeline.save({"noting": noting}, step=2).wait()
    assert set(noting.threads) == {threading.get_ident()}


def test_a_save_whose_caller_is_interrupted_is_given_up(store: Stores) -> None:
    noting = Noting()
    with ckpipe.SyncPipeline(store.url) as pipeline:
        noting.interruptions = 1
        with pytest.raises(KeyboardInterrupt):
            pipeline.save({"noting": noting}, step=1)
        pipeline.save({"noting": noting}, step=2).wait()
        assert [info.step for info in pipeline.steps()] == [2]


async def test_what_a_caller_does_not_come_to_do_is_never_done() -> None:
    ended: list[int] = []

    async def ask(caller: Caller) -> None:
        with pytest.raises(UsageError, match="ended before"):
            await caller.run(threading.get_ident)
        ended.append(1)

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            with Caller() as leaving:
                tasks.start_soon(ask, leaving)
                await anyio.lowlevel.checkpoint()  # it is asked, and never looks
            tasks.start_soon(ask, leaving)
    assert len(ended) == 2


class Interrupted(Noting):
    """An object whose state is asked for as a signal arrives, whose handler saves."""

    def __init__(self, pipeline: ckpipe.SyncPipeline) -> None:
        super().__init__()
        self.pipeline = pipeline

    def state_dict(self) -> dict[str, Any]:
        with pytest.raises(UsageError, match="inside another"):
            self.pipeline.save({"tensor": torch.ones(3)}, step=1)
        return super().state_dict()


def test_a_save_within_a_save_does_not_wait_for_its_memory(store: Stores) -> None:
    with ckpipe.SyncPipeline(store.url) as pipeline:
        pipeline.save({"object": Noting()}, step=2).wait()
        pipeline.save({"object": Interrupted(pipeline)}, step=3).wait()
        pipeline.save({"tensor": torch.ones(3)}, step=4).wait()
        assert [info.step for info in pipeline.steps() if info.complete] == [2, 3, 4]


class Interrupting(SimpleQueue[Any]):
    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        super().get(block, timeout)
        raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["before the job", "after it"])
async def test_a_job_is_over_if_an_interrupt_comes_right(
    when: str, threads: DaemonThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = Caller()
    if when == "before the job":
        caller._jobs = Interrupting()
    else:

        def interrupted(job: Job[Any]) -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(Job, "end", interrupted)

    def serve() -> None:
        with pytest.raises(KeyboardInterrupt), caller:
            caller.serve_until(Future())

    serving, ran = threads.submit(serve), list[int]()
    with contextlib.suppress(UsageError):
        await caller.run(ran.append, 7)
    assert len(ran) == (when == "after it")
    serving.result(PATIENCE)


async def test_errors_reach_who_asked_and_the_caller_goes_on(threads: DaemonThreads) -> None:
    end: Future[None] = Future()
    served = threading.Event()
    caller = Caller()

    def serve() -> None:
        with caller:
            caller.serve_until(end)
        served.set()

    threads.submit(serve)
    with pytest.raises(ZeroDivisionError):
        await caller.run(lambda: 1 // 0)
    assert await caller.run(lambda: 7) == 7
    end.set_result(None)
    assert await anyio.to_thread.run_sync(served.wait, PATIENCE)


@pytest.fixture
def threads() -> DaemonThreads:
    return DaemonThreads()
