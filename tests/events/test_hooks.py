"""Hooks are called in order, whatever they do, and no save suffers from them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.events import CheckpointDamaged, Completed, Event, RankCommitted, SaveFailed, Staged
from ckpipe.testing.wrappers import Operation
from tests.support.pipelines import Stores
from tests.support.rank_pipelines import ranks
from tests.support.settling import settle

STATE: dict[str, Any] = {"a": torch.ones(100)}


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


def test_a_failed_save_is_a_sentence_and_is_not_logged_where_it_is_raised(
    store: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    failed: list[SaveFailed] = []
    with ckpipe.SyncPipeline(store.url, on_error="warn") as pipeline:
        pipeline.on_failed(failed.append)
        store.faulty.fail(errors.StoreFull("no room"), "write")
        handle = pipeline.save(STATE, step=5)
        with pytest.raises(errors.StoreFull):
            handle.wait()
    assert [each.getMessage() for each in caplog.records if each.levelname == "ERROR"] == []
    assert str(failed[0]).startswith("The save of step-000000000005")
    assert " failed on rank 0: StoreFull: no room" in str(failed[0])
    damaged = CheckpointDamaged("step-1", 1, 0, "The index is gone")
    assert str(damaged) == "The checkpoint step-1 is damaged: The index is gone"


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
    assert "bad" in caught.value.__notes__[0]
    assert [each for each in caplog.records if each.levelname == "ERROR"] == []
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        assert [each.step for each in pipeline.steps() if each.complete] == [3]


def test_each_failure_of_a_hook_is_brought_up_also_after_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def bad(event: Staged) -> None:
        raise ZeroDivisionError(event.step)

    caplog.set_level(logging.DEBUG, "ckpipe")
    pipeline = ckpipe.SyncPipeline(tmp_path).open()
    pipeline.on_staged(bad)
    pipeline.save(STATE, step=1)
    while not re.search(r"The hook .*bad failed", caplog.text):
        pipeline.trim()  # which the pipeline's loop does, as it does what follows the hook
    pipeline.trim()
    with pytest.raises(ZeroDivisionError, match="1"):
        pipeline.save(STATE, step=2)
    pipeline.save(STATE, step=3)
    with pytest.raises(ZeroDivisionError, match="3"):
        pipeline.close()


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


async def _leave(event: Staged) -> None:
    raise SystemExit(3)


async def _interrupted(event: Staged) -> None:
    raise KeyboardInterrupt


async def _waits_for_what_is_cancelled(event: Staged) -> None:
    raise asyncio.CancelledError


def _leave_in_a_thread(event: Staged) -> None:
    raise SystemExit(3)


@pytest.mark.parametrize(
    "hook", [_leave, _interrupted, _waits_for_what_is_cancelled, _leave_in_a_thread]
)
def test_a_hook_that_would_end_the_program_does_not_end_the_pipelines_loop(
    tmp_path: Path, hook: Any
) -> None:
    with (  # noqa: PT012
        pytest.raises(errors.UsageError, match="cannot end the program") as caught,
        ckpipe.SyncPipeline(tmp_path) as pipeline,
    ):
        pipeline.on_staged(hook)
        assert pipeline.save(STATE, step=3).wait(30).complete
    assert hook.__name__ in str(caught.value)
    with ckpipe.SyncPipeline(tmp_path, read_only=True) as pipeline:
        assert [each.step for each in pipeline.steps() if each.complete] == [3]


class _OfItsOwnKind(BaseException):
    pass


class _AwaitsAnd:
    def __init__(self, error: BaseException) -> None:
        self._error = error

    async def __call__(self, event: Event) -> None:
        await anyio.lowlevel.checkpoint()
        raise self._error


def _raising(form: str, error: BaseException) -> Any:
    def plain(event: Event) -> None:
        raise error

    async def awaits(event: Event) -> None:
        raise error

    return {"plain": plain, "awaits": awaits, "awaits later": _AwaitsAnd(error)}[form]


ENDS = [_OfItsOwnKind(), GeneratorExit(), BaseExceptionGroup("both", [_OfItsOwnKind()])]


@pytest.mark.sample(4)
@pytest.mark.parametrize("form", ["plain", "awaits", "awaits later"])
@pytest.mark.parametrize("error", [*ENDS, pytest.fail.Exception("of a test")], ids=repr)
def test_a_hook_that_raises_what_is_no_exception_ends_no_save(
    tmp_path: Path, error: BaseException, form: str
) -> None:
    raised = pytest.raises(errors.UsageError, match=r"The hook .* raised .*Raise an Exception")
    with raised as caught, ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.on_staged(_raising(form, error))
        assert pipeline.save(STATE, step=1).wait(30).complete
        assert pipeline.load({"a": torch.zeros(100)}) is not None
    assert caught.value.__cause__ is error
    told = pytest.warns(RuntimeWarning, match=r"The hook .* raised ")
    with told, ckpipe.SyncPipeline(tmp_path, on_error="warn") as pipeline:
        pipeline.on_staged(_raising(form, error))
        handles = [pipeline.save(STATE, step=step) for step in (2, 3, 4)]
        assert all(handle.wait(30).complete for handle in handles)
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        assert [each.step for each in pipeline.steps() if each.complete] == [1, 2, 3, 4]


@pytest.mark.parametrize("error", [SystemExit(3), *ENDS], ids=repr)
def test_listeners_and_predicates_do_not_end_the_loop_either(
    tmp_path: Path, error: BaseException
) -> None:
    def leave(_: Any) -> Any:
        raise error

    rule = ckpipe.retention.KeepIf(leave)
    with (  # noqa: PT031
        pytest.warns(RuntimeWarning, match="predicate"),
        ckpipe.SyncPipeline(tmp_path, retention=rule, on_error="warn") as pipeline,
    ):
        pipeline.events.add(leave)
        assert pipeline.save(STATE, step=3).wait(30).complete
        with pytest.raises(errors.UsageError, match="predicate"):
            pipeline.prune()
        assert [info.step for info in pipeline.steps()] == [3]


class _Awaits:
    def __init__(self) -> None:
        self.steps: list[int] = []

    async def __call__(self, event: Completed) -> None:
        await anyio.lowlevel.checkpoint()
        self.steps.append(event.step)


def test_a_hook_that_returns_an_awaitable_is_awaited(tmp_path: Path) -> None:
    hook = _Awaits()
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.on_complete(hook)
        pipeline.on_complete(lambda event: hook(event))
        pipeline.save(STATE, step=3)
    assert hook.steps == [3, 3]


def test_what_a_hook_saves_while_the_pipeline_is_left_is_waited_for(tmp_path: Path) -> None:
    trainer = threading.get_ident()
    with ckpipe.SyncPipeline(tmp_path) as pipeline:

        @pipeline.on_complete
        def once_more(event: Completed) -> None:
            if event.step == 1:
                while not is_leaving(trainer):
                    os.sched_yield()
                pipeline.save(STATE, step=2)

        pipeline.save(STATE, step=1).wait()
    with ckpipe.SyncPipeline(tmp_path, read_only=True) as pipeline:
        assert [each.step for each in pipeline.steps() if each.complete] == [1, 2]


def is_leaving(thread: int) -> bool:
    """Whether a thread is at the end of a ``with`` block of ckpipe."""
    frames = traceback.walk_stack(sys._current_frames()[thread])
    return any(frame.f_code.co_name == "__exit__" for frame, _ in frames)


KINDS: dict[str, type[Event]] = {
    "on_staged": Staged,
    "on_committed": RankCommitted,
    "on_complete": Completed,
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("form", "until", "awaits", "kind"),
    list(
        itertools.product(
            ["blocks", "awaits"], ["captured", "staged", "committed"], [False, True], KINDS
        )
    ),
)
async def test_a_hook_is_called_after_the_call_in_the_order_of_events(
    tmp_path: Path, form: str, until: Any, awaits: bool, kind: str
) -> None:
    weight = torch.nn.Parameter(torch.ones(3000))
    optimizer = torch.optim.SGD([weight])
    handles: dict[int, Any] = {}
    called: list[int] = []
    early: list[int] = []

    def hear(event: Event) -> None:
        called.append(event.step)
        if event.step not in handles:
            early.append(event.step)

    async def hear_too(event: Event) -> None:
        await anyio.lowlevel.checkpoint()
        hear(event)

    emitted: list[int] = []
    pipeline: Any = (ckpipe.SyncPipeline if form == "blocks" else ckpipe.Pipeline)(
        tmp_path, guard=optimizer
    )
    pipeline.events.add(
        lambda event: emitted.append(event.step) if type(event) is KINDS[kind] else None
    )
    getattr(pipeline, kind)(hear_too if awaits else hear)
    # The step of a save goes down now and then, so that its order is none of the steps.
    steps = [step ^ 3 for step in range(60)]
    if form == "blocks":
        with pipeline:
            for step in steps:
                handles[step] = pipeline.save({"w": weight}, step=step, until=until)
    else:
        async with pipeline:
            for step in steps:
                handles[step] = await pipeline.save({"w": weight}, step=step, until=until)
    if (until, kind) != ("committed", "on_staged"):
        assert early == []
    assert called == emitted
    assert sorted(called) == sorted(steps)


def test_a_hook_is_called_after_a_call_that_raises(store: Stores) -> None:
    raised: list[int] = []
    early: list[int] = []

    def hear(event: SaveFailed) -> None:
        if event.step not in raised:
            early.append(event.step)

    with ckpipe.SyncPipeline(store.url, on_error="warn") as pipeline:
        pipeline.on_failed(hear)
        pipeline.save(STATE, step=0, until="committed")
        for step in range(1, 21):
            store.faulty.fail(errors.StoreFull("no room"), "write")
            try:
                pipeline.save(STATE, step=step, until="committed")
            except errors.StoreFull:
                raised.append(step)
    assert early == []
    assert len(raised) == 20


def test_a_signal_handler_that_closes_in_the_middle_of_a_call_waits_for_its_hooks(
    store: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    """The call cannot end before the handler does, which waits for the hooks of the call."""
    called: list[int] = []
    pipeline = ckpipe.SyncPipeline(store.url, drain_timeout_seconds=20).open()
    pipeline.on_complete(lambda event: called.append(event.step))

    def close(*_: object) -> None:
        store.slow.release()
        pipeline.close()

    def interrupt() -> None:
        store.slow.gate.wait_until_held()
        os.kill(os.getpid(), signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, close)
    thread = threading.Thread(target=interrupt)
    try:
        store.slow.hold("write")
        thread.start()
        handle = pipeline.save(STATE, step=0, until="committed")
    finally:
        signal.signal(signal.SIGUSR2, before)
        thread.join()
    assert handle.status == "committed"
    assert called == [0]
    assert "did not return" not in caplog.text


@pytest.mark.parametrize("worker", ["thread", "process"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_hook_of_completion_gets_what_the_save_was_given(
    tmp_path: Path, worker: Any, world_size: int
) -> None:
    given: dict[str, Any] = {"metrics": {"loss": 0.5}, "metadata": {"tokens": [1, 2]}}
    found: list[ckpipe.CheckpointInfo] = []
    with contextlib.ExitStack() as stack:
        if world_size == 1:
            worlds = [stack.enter_context(ckpipe.SyncPipeline(tmp_path, worker=worker))]
        else:
            worlds = stack.enter_context(ranks(str(tmp_path), world_size, worker=worker))
        for pipeline in worlds:
            pipeline.on_complete(lambda event: found.append(event.info))
            pipeline.save(STATE, step=1, **given).wait()
    (info,) = found
    assert (info.metrics, info.metadata, info.world_size) == (*given.values(), world_size)


def test_a_completion_that_is_found_later_has_the_metadata_too(store: Stores) -> None:
    found: list[ckpipe.CheckpointInfo] = []
    fields = {"incomplete_after_seconds": 0.001, "on_error": "warn"}
    with ranks(store.url, 2, **fields) as pipelines:
        pipelines[0].on_complete(lambda event: found.append(event.info))
        # The rank that commits last dies, as it were, before it looks for the others.
        store.faulty.fail(errors.StoreFull("no room"), _lists_ranks, times=None)
        for number, pipeline in enumerate(pipelines):
            pipeline.save(STATE, step=1, metadata={"rank": number}).wait()
            settle(pipeline)
        store.faulty.heal()
        for pipeline in pipelines:
            with pytest.warns(RuntimeWarning, match="no room"):
                handle = pipeline.save(STATE, step=2)
            handle.wait()
            settle(pipeline)
    assert [(info.step, info.metadata) for info in found] == [(1, {"rank": 0})]


def _lists_ranks(operation: Operation) -> bool:
    return operation.verb == "list" and "step-000000000001" in operation.key
