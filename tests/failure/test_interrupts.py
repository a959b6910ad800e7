"""Ctrl-C while a pipeline waits, forks beside it, and user code that tries to leave the program."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors, events
from tests.support.command_line import forked
from tests.support.pipelines import Stateful, Stores
from tests.support.rank_pipelines import open_rank
from tests.support.signals import signals_heard


def interrupt() -> None:
    """Do to this process what Ctrl-C does."""
    os.kill(os.getpid(), signal.SIGINT)


def loops() -> list[str]:
    """The pipelines' threads that are alive."""
    return [thread.name for thread in threading.enumerate() if thread.name == "ckpipe"]


def test_ctrl_c_while_a_pipeline_opens(store: Stores) -> None:
    store.slow.hold()
    pipeline = ckpipe.SyncPipeline(store.url)

    def when_it_opens() -> None:
        store.slow.gate.wait_until_held()
        interrupt()

    threading.Thread(target=when_it_opens).start()
    with signals_heard(), pytest.raises(KeyboardInterrupt):
        pipeline.__enter__()
    assert not loops()


def test_a_second_ctrl_c_while_staged_saves_finish(store: Stores) -> None:
    store.slow.hold("write")
    waiting = threading.Event()

    def interrupt_when_closing(event: events.Event) -> None:
        if isinstance(event, events.SaveStarted) and event.step == 1:
            waiting.set()
        if isinstance(event, events.SaveFailed) and event.step == 1:
            interrupt()

    settings: dict[str, Any] = {"staging_bytes": "64KiB", "staging": {"block_bytes": 65536}}
    state = {"w": torch.zeros(100)}
    pipeline = ckpipe.SyncPipeline(store.url, **settings)

    def save_in_vain() -> None:
        with pytest.raises(errors.SaveCancelled):
            pipeline.save(state, step=1)

    saving = threading.Thread(target=save_in_vain)

    def train() -> None:
        with pipeline:
            pipeline.events.add(interrupt_when_closing)
            pipeline.save(state, step=0)
            # A save that waits for memory is given up at closing, and its event tells us so.
            saving.start()
            assert waiting.wait(30)
            raise KeyboardInterrupt

    with signals_heard(), pytest.raises(KeyboardInterrupt):
        train()
    saving.join(30)
    assert not loops()
    store.slow.release()
    with ckpipe.SyncPipeline(store.url) as fresh:
        assert fresh.latest() is None


def test_a_forked_process_neither_saves_nor_hangs(tmp_path: Path) -> None:
    # In processes of their own: the test's has threads that a fork should not copy.
    code = """
import os, sys
import torch
import ckpipe
parameter = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([parameter], lr=0.1)
with ckpipe.SyncPipeline(sys.argv[1], guard=optimizer) as pipeline:
    pipeline.save({"w": parameter}, step=0).wait()
    with pipeline.lock.capturing():
        child = os.fork()
        if not child:
            optimizer.step()
            try:
                pipeline.save({"w": parameter}, step=1)
            except ckpipe.CkpipeError as error:
                print(type(error).__name__, error, flush=True)
            raise SystemExit(7)  # leaves the with block of its parent's pipeline
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7, status
    pipeline.save({"w": parameter}, step=2).wait()
    print([info.step for info in pipeline.steps()])
"""
    run = forked(code, tmp_path)
    assert run.code == 0, run.err
    assert run.out.startswith("PipelineClosed The pipeline belongs to the process")
    assert run.out.endswith("[0, 2]\n")


def test_a_forked_process_does_not_wait_for_a_save_of_its_parent(tmp_path: Path) -> None:
    code = """
import os, sys
import ckpipe, psutil
with ckpipe.SyncPipeline(sys.argv[1], worker="process") as pipeline:
    pipeline.save({"w": 1}).wait()
    (worker,) = psutil.Process().children()
    worker.suspend()
    handle = pipeline.save({"w": 2})
    child = os.fork()
    if not child:
        try:
            handle.wait()
        except ckpipe.CkpipeError as error:
            print(type(error).__name__, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    worker.resume()
    handle.wait()
"""
    run = forked(code, tmp_path)
    assert run.code == 0, run.err
    assert run.out == "PipelineClosed\n"


def test_a_pipeline_whose_loop_has_failed_can_be_left(store: Stores) -> None:
    pipeline = open_rank(store.url, 0, 2, drain_timeout_seconds=0.1)
    pipeline.save({"w": 1}, step=1).wait()
    # A save looks what became of the one before, which raises no such error.
    store.faulty.fail(RuntimeError("what nobody foresaw"), "stat")
    told_of = ""
    while "what nobody foresaw" not in told_of:
        try:
            pipeline.save({"w": 1})
        except (errors.SaveCancelled, errors.PipelineClosed) as error:
            told_of = str(error)
    calls: list[Callable[[], object]] = [lambda: pipeline.save({"w": 1}), pipeline.load]
    for call in calls:
        with pytest.raises(errors.PipelineClosed, match=r"what nobody foresaw.*Leave its") as told:
            call()
        assert isinstance(told.value.__cause__, ExceptionGroup)
    with pytest.raises(ExceptionGroup) as caught:
        pipeline.__exit__(None, None, None)
    assert "what nobody foresaw" in str(caught.value.exceptions)


def value() -> dict[str, Any]:
    return {"value": torch.ones(3)}


@pytest.mark.parametrize("main", [True, False])
def test_user_code_that_leaves_the_program_does_so(store: Stores, main: bool) -> None:
    ended: list[str] = []
    good = {"good": Stateful(value, load=lambda _: sys.exit(4))}
    bad = {"bad": Stateful(lambda: sys.exit(3))}

    def train() -> None:
        store.slow.hold("write")
        with ckpipe.SyncPipeline(store.url, staging_bytes="64MiB") as pipeline:
            pipeline.events.add(
                lambda event: (
                    ended.append(event.status) if isinstance(event, events.SaveEnded) else None
                )
            )
            first = pipeline.save(good, step=0)
            for step in (1, 2):
                with pytest.raises(SystemExit, match="3"):
                    pipeline.save(bad, step=step)
            store.slow.release()
            first.wait()
            with pytest.raises(SystemExit, match="4"):
                pipeline.load(good)
            assert pipeline.save({"w": 1}, step=3).wait().step == 3
        assert sorted(ended) == ["cancelled", "cancelled", "committed", "committed"]

    if main:
        train()
    else:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(train).result()


def test_a_signal_handler_that_leaves_the_program_during_the_walk_does_so(store: Stores) -> None:
    def leave(*_: object) -> None:
        sys.exit(5)

    def interrupted(*_: object) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGUSR2)
        return value()

    state = {"w": Stateful(interrupted, load=interrupted)}

    async def train() -> None:
        async with ckpipe.Pipeline(store.url) as pipeline:
            await pipeline.save({"w": Stateful(value)}, step=0, until="committed")
            with pytest.raises(SystemExit, match="5"):
                await pipeline.load(state)
            await pipeline.save(state, step=1)

    before = signal.signal(signal.SIGUSR2, leave)
    try:
        pipeline = ckpipe.SyncPipeline(store.url)
        with signals_heard(), pytest.raises(SystemExit, match="5"), pipeline:
            pipeline.save(state, step=0)
        with pytest.raises(SystemExit, match="5"):
            asyncio.run(train())
    finally:
        signal.signal(signal.SIGUSR2, before)
