"""Signals that announce the end: one more save, in time, and handlers as they were."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors
from tests.support.actors import PATIENCE, DaemonThreads
from tests.support.pipelines import Stateful, Stores, load_existing
from tests.support.rank_pipelines import open_rank

STATE: dict[str, Any] = {"a": torch.ones(100)}
USR2: dict[str, Any] = {"preemption": {"enabled": True, "signals": ["SIGUSR2"]}}


@pytest.fixture
def calls() -> Iterator[list[int]]:
    """What a handler of the program's own was called with; it is there before any pipeline."""
    seen: list[int] = []

    def handle(number: int, frame: object) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGUSR2, handle)
    yield seen
    assert signal.getsignal(signal.SIGUSR2) is handle, "pipelines put handlers back"
    signal.signal(signal.SIGUSR2, before)


def send() -> None:
    os.kill(os.getpid(), signal.SIGUSR2)


def test_a_signal_asks_for_one_more_save(tmp_path: Path, calls: list[int]) -> None:
    saved = []
    with ckpipe.SyncPipeline(tmp_path, save_every_steps=10, **USR2) as pipeline:
        for step in range(100):
            if step == 13:
                send()
                send()
            if pipeline.should_save(step):
                pipeline.save(STATE, step=step)
                saved.append(step)
            if pipeline.preempted and step > 25:
                break
    assert saved == [10, 13]
    assert calls == [signal.SIGUSR2] * 2


async def test_the_awaiting_pipeline_is_told_too(tmp_path: Path, calls: list[int]) -> None:
    async with ckpipe.Pipeline(tmp_path, **USR2) as pipeline:
        assert not pipeline.preempted
        assert not pipeline.should_save(1)
        send()
        assert pipeline.preempted
        assert pipeline.should_save(1)
        await pipeline.save(STATE, step=1)
        assert not pipeline.should_save(2)
    assert calls == [signal.SIGUSR2]


def test_handlers_are_put_back_when_opening_fails(calls: list[int]) -> None:
    with pytest.raises(errors.BackendNotFound):
        ckpipe.SyncPipeline("nosuch://x", **USR2).__enter__()
    send()
    assert calls == [signal.SIGUSR2]


def test_a_handler_that_came_later_stays_and_ours_does_as_before(
    tmp_path: Path, calls: list[int]
) -> None:
    original = signal.getsignal(signal.SIGUSR2)
    pipeline = ckpipe.SyncPipeline(tmp_path, **USR2)
    later: list[int] = []
    with pipeline:
        ours = signal.getsignal(signal.SIGUSR2)

        def handle(number: int, frame: Any) -> None:
            later.append(number)
            assert callable(ours)
            ours(number, frame)

        signal.signal(signal.SIGUSR2, handle)
    assert signal.getsignal(signal.SIGUSR2) is handle
    send()
    assert (len(later), len(calls), pipeline.preempted) == (1, 1, False)
    signal.signal(signal.SIGUSR2, original)


CALLS: list[Callable[[ckpipe.SyncPipeline], object]] = [
    lambda pipeline: pipeline.should_save(1),
    lambda pipeline: pipeline.preempted,
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("chains", [True, False])
def test_a_handler_that_comes_later_is_called_too(
    tmp_path: Path, calls: list[int], chains: bool, call: Callable[[ckpipe.SyncPipeline], object]
) -> None:
    original = signal.getsignal(signal.SIGUSR2)
    later: list[int] = []
    with (
        ckpipe.SyncPipeline(tmp_path / "a", **USR2) as first,
        ckpipe.SyncPipeline(tmp_path / "b", **USR2) as second,
    ):
        ours = signal.getsignal(signal.SIGUSR2)

        def handle(number: int, frame: Any) -> None:
            later.append(number)
            if chains:
                assert callable(ours)
                ours(number, frame)

        signal.signal(signal.SIGUSR2, handle)
        for pipeline in (first, second, first):
            assert not call(pipeline)
        send()
        assert first.preempted
        assert second.preempted
        assert (len(later), len(calls)) == (1, int(chains))
    assert signal.getsignal(signal.SIGUSR2) is handle
    send()
    assert (len(later), len(calls)) == (2, 2 * int(chains))
    signal.signal(signal.SIGUSR2, original)


def test_all_handlers_that_come_later_are_called(tmp_path: Path, calls: list[int]) -> None:
    original = signal.getsignal(signal.SIGUSR2)
    called: list[str] = []

    def install(name: str) -> Any:
        def handle(number: int, frame: Any) -> None:
            called.append(name)
            assert callable(before)
            before(number, frame)

        before = signal.signal(signal.SIGUSR2, handle)
        return handle

    with ckpipe.SyncPipeline(tmp_path, **USR2) as pipeline:
        for name in ("first", "second"):
            newest = install(name)
            assert not pipeline.preempted
        send()
        assert pipeline.preempted
        assert (called, len(calls)) == (["second", "first"], 1)
    assert signal.getsignal(signal.SIGUSR2) is newest
    send()
    assert (called, len(calls)) == (["second", "first"] * 2, 2)
    signal.signal(signal.SIGUSR2, original)


def test_signals_need_the_main_thread_and_the_programs_own_event_does_not(tmp_path: Path) -> None:
    seen: list[str] = []

    def other() -> None:
        try:
            ckpipe.SyncPipeline(tmp_path, **USR2).__enter__()
        except errors.UsageError as error:
            seen.append(str(error))
        none = {"enabled": True, "signals": []}
        with ckpipe.SyncPipeline(tmp_path, preemption=none) as pipeline:
            pipeline.preempt()
            seen.append(str(pipeline.should_save(3)))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(30)
    assert "main thread" in seen[0]
    assert seen[1:] == ["True"]


def test_leaving_waits_no_longer_than_the_grace(store: Stores) -> None:
    store.slow.hold("write")
    grace = {"enabled": True, "signals": [], "grace_seconds": 0.05}
    pipeline = ckpipe.SyncPipeline(store.url, preemption=grace, drain_timeout_seconds=600)
    with pytest.raises(errors.DrainTimeout), pipeline:  # noqa: PT012
        pipeline.preempt()
        pipeline.save(STATE, step=0)


def test_the_last_save_waits_where_others_are_skipped(
    store: Stores, threads: DaemonThreads
) -> None:
    staging = {"bytes": 65536, "block_bytes": 65536}
    with ckpipe.SyncPipeline(store.url, on_busy="skip", staging=staging) as pipeline:
        store.slow.hold("write")
        pipeline.save(STATE, step=0)
        assert pipeline.save(STATE, step=1).status == "skipped"
        pipeline.preempt()

        def release_once_it_waits() -> None:
            while not pipeline.statistics().budget_waiting:
                threading.Event().wait(0.001)
            store.slow.release()

        releasing = threads.submit(release_once_it_waits)
        assert pipeline.save(STATE, step=2).wait(PATIENCE).complete
        releasing.result(PATIENCE)


def test_what_keeps_only_final_ones_is_saved_before_it_is_stopped(tmp_path: Path) -> None:
    told = {"enabled": True, "signals": []}
    with ckpipe.SyncPipeline(tmp_path, keep_last=0, save_every_steps=1, preemption=told) as run:
        assert run.save(STATE, step=0).status == "skipped"
        run.preempt()
        assert run.should_save(1)
        assert run.save(STATE, step=1).wait(30).complete
    # It goes on from there, and what the last one saves as final takes the place.
    with ckpipe.SyncPipeline(tmp_path, keep_last=0) as run:
        assert load_existing(run).step == 1
        assert run.save(STATE, step=2).status == "skipped"
        run.save(STATE, step=3, final=True).wait(30)
    with ckpipe.SyncPipeline(tmp_path, keep_last=0) as run:
        run.load(step=3)
        run.save(STATE, step=4, final=True).wait(30)
        run.prune()
        assert [info.step for info in run.steps()] == [3, 4]


def test_of_several_ranks_none_is_told_alone(store: Stores) -> None:
    pipeline = open_rank(store.url, 0, 2, save_every_steps=5)
    with pytest.raises(errors.UnsupportedTopology, match="preemption=True"):
        pipeline.preempt()
    assert pipeline.should_save(5)
    pipeline.__exit__(None, None, None)


def test_settings_say_it_in_short_and_at_length(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ckpipe.Settings(preemption=True).preemption.enabled
    monkeypatch.setenv("CKPIPE_PREEMPTION__GRACE_SECONDS", "30")
    settings = ckpipe.Settings(preemption=True)
    assert settings.preemption.grace_seconds == 30
    assert settings.preemption.signals == ("SIGTERM", "SIGUSR1")
    for name in ("SIGKILL", "SIGNOTHING"):
        with pytest.raises(errors.SettingsError, match=f"the signal {name} cannot"):
            ckpipe.Settings(preemption={"signals": [name]})


def signals(number: int) -> Stateful:
    """An object that sends a signal to this process whenever its state is read."""

    def state() -> dict[str, Any]:
        os.kill(os.getpid(), number)
        return STATE

    return Stateful(state)


@contextmanager
def raises_at(number: int, error: BaseException) -> Iterator[None]:
    """Let a signal raise an exception on this thread, as SIGCHLD does once torch has workers."""

    def handle(number: int, frame: object) -> None:
        raise error

    before = signal.signal(number, handle)
    yield
    assert signal.getsignal(number) is handle
    signal.signal(number, before)


@pytest.mark.parametrize("until", ["captured", "staged", "committed"])
def test_an_error_of_a_handler_waits_until_the_state_is_copied(tmp_path: Path, until: Any) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    state = {"first": signals(signal.SIGCHLD), "second": torch.ones(3), "optimizer": optimizer}
    with (
        raises_at(signal.SIGCHLD, RuntimeError("a worker died")),
        ckpipe.SyncPipeline(tmp_path, guard=optimizer) as pipeline,
    ):
        with pytest.raises(RuntimeError, match="a worker died"):
            pipeline.save(state, step=1, until=until)
        assert pipeline.load(step=1) is not None
        with pytest.raises(RuntimeError, match="a worker died"):
            pipeline.save({"first": signals(signal.SIGCHLD), "second": object()}, step=2)
        with pytest.raises(errors.UnsupportedState):
            pipeline.save(state, step=3)


async def test_an_error_of_a_handler_waits_for_all_saves_of_a_loop(tmp_path: Path) -> None:
    state = {"first": signals(signal.SIGCHLD)}
    with raises_at(signal.SIGCHLD, RuntimeError("a worker died")):
        async with ckpipe.Pipeline(tmp_path) as pipeline:
            saves = [pipeline.save(state, step=step) for step in range(3)]
            raised = await asyncio.gather(*saves, return_exceptions=True)
            assert any(isinstance(each, RuntimeError) for each in raised)
    async with ckpipe.Pipeline(tmp_path) as pipeline:
        assert [info.step for info in await pipeline.steps()] == [0, 1, 2]


def test_a_timer_still_ends_a_save(tmp_path: Path) -> None:
    state = {"first": signals(signal.SIGALRM)}
    with (
        raises_at(signal.SIGALRM, TimeoutError("it takes too long")),
        ckpipe.SyncPipeline(tmp_path) as pipeline,
    ):
        with pytest.raises(TimeoutError):
            pipeline.save(state, step=1)
        assert pipeline.steps() == []


def end_of(child: int) -> int | None:
    """Wait for a process; return the signal that ended it, or None."""
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else None


def test_a_forked_process_can_still_be_ended(tmp_path: Path) -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    with ckpipe.SyncPipeline(tmp_path, **USR2) as pipeline:
        child = os.fork()
        if child == 0:  # pragma: no cover
            send()  # as terminate() of a data loader's process does
            os._exit(0)
        assert end_of(child) == signal.SIGUSR2
        assert not pipeline.preempted
        send()
        assert pipeline.preempted
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_two_pipelines_are_told_and_put_the_handler_back_in_any_order(
    tmp_path: Path, calls: list[int]
) -> None:
    first, second = (ckpipe.SyncPipeline(tmp_path / name, **USR2) for name in "ab")
    first.__enter__()
    second.__enter__()
    send()
    assert first.preempted
    assert second.preempted
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert calls == [signal.SIGUSR2]


def test_an_error_that_is_its_own_cause_ends_the_program(
    tmp_path: Path, threads: DaemonThreads
) -> None:
    error = ValueError("wrong")
    error.__cause__ = error

    def leave() -> None:
        told = {"enabled": True, "signals": []}
        with ckpipe.SyncPipeline(tmp_path, preemption=told) as pipeline:
            pipeline.should_save(1)
            pipeline.preempt()
            raise error

    with pytest.raises(ValueError, match="wrong"):
        threads.submit(leave).result(PATIENCE)
