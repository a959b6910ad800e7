"""Guarded optimizers: every step inside the lock, nothing held after it, however it ends."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW

import ckpipe
from ckpipe import StateLock
from tests.support.actors import PATIENCE, DaemonThreads, Held, is_free, noted


class Guards:
    """Guards optimizers under a lock, each time by another pipeline, which :meth:`close` ends."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack

    def __call__(self, lock: StateLock, *optimizers: torch.optim.Optimizer) -> ckpipe.SyncPipeline:
        made = ckpipe.SyncPipeline(self._folder, guard=optimizers, state_lock=lock)
        return self._stack.enter_context(made)


@pytest.fixture
def guard(tmp_path: Path) -> Iterator[Guards]:
    with ExitStack() as stack:
        yield Guards(tmp_path, stack)


class Watched(SGD):
    """SGD that lets a test look, or raise, in the middle of its step."""

    def __init__(self, *, inside: Callable[[], object]) -> None:
        parameter = torch.nn.Parameter(torch.ones(3))
        parameter.grad = torch.ones(3)
        super().__init__([parameter], lr=0.1)
        self.inside = inside

    def step(self, closure: Any = None) -> Any:
        self.inside()
        return super().step(closure)


def parameters(count: int = 2) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.ones(4)) for _ in range(count)]
    for parameter in made:
        parameter.grad = torch.ones(4)
    return made


def failing() -> None:
    raise FloatingPointError("loss is not finite")


def looking(lock: StateLock, seen: list[str]) -> Callable[[], None]:
    """What notes the purposes of all holds at the moment it is called."""
    return lambda: seen.extend(use.purpose for use in lock.statistics().holders)


def test_a_step_within_a_step_keeps_the_outer_hold(guard: Guards, lock: StateLock) -> None:
    seen: list[str] = []
    inner = Watched(inside=lambda: None)
    look = looking(lock, seen)

    def nested() -> None:
        inner.step()
        look()

    outer = Watched(inside=nested)
    guard(lock, outer, inner)
    outer.step()
    assert seen == ["Watched.step()"]
    assert is_free(lock)


def test_an_inner_step_that_raises_does_not_end_the_outer_hold(
    guard: Guards, lock: StateLock
) -> None:
    seen: list[str] = []
    depth: list[int] = []
    look = looking(lock, seen)

    def again() -> None:
        depth.append(len(depth))
        if len(depth) > 1:
            failing()
        with pytest.raises(FloatingPointError):
            optimizer.step()
        look()

    optimizer = Watched(inside=again)
    guard(lock, optimizer)
    optimizer.step()
    assert "Watched.step()" in seen
    assert is_free(lock)


def test_all_other_hooks_of_a_step_run_inside(guard: Guards, lock: StateLock) -> None:
    """An average that a hook takes of the parameters belongs to the step."""
    seen: list[str] = []
    look = looking(lock, seen)
    optimizer = SGD(parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: look())
    guarded, other = guard(lock, optimizer), guard(StateLock(), optimizer)
    optimizer.register_step_post_hook(lambda *_: look())
    for _ in range(2):
        optimizer.step()
        optimizer.register_step_post_hook(lambda *_: look())
    assert seen == ["SGD.step()"] * 5
    assert is_free(lock)
    guarded.close()
    other.close()
    optimizer.step()
    assert len(seen) == 5


# ---- a step that raises ----


def test_a_step_that_raised_is_free_while_its_error_is_being_handled(
    guard: Guards, lock: StateLock
) -> None:
    optimizer = Watched(inside=failing)
    guard(lock, optimizer)
    try:
        optimizer.step()
    except FloatingPointError:
        # The traceback keeps the frame of the step, but it runs no more.
        lock.check_capture_allowed()
        with lock.capturing(timeout=0):
            pass
    else:
        pytest.fail("the step did not raise")
    assert is_free(lock)


def test_a_capture_that_waits_for_a_step_is_let_in_when_it_raises(
    guard: Guards, lock: StateLock, threads: DaemonThreads
) -> None:
    inside, go_on, end = threading.Event(), threading.Event(), threading.Event()

    def wait_and_fail() -> None:
        inside.set()
        assert go_on.wait(PATIENCE)
        failing()

    optimizer = Watched(inside=wait_and_fail)
    guard(lock, optimizer)

    def train() -> None:
        with pytest.raises(FloatingPointError):
            optimizer.step()
        # The thread lives on without another step, so nothing but the capture can notice.
        assert end.wait(PATIENCE)

    trainer = threads.submit(train)
    assert inside.wait(PATIENCE)
    capture = threads.waiting(lock, noted, lock.capturing(), [], "")
    assert not capture.done()
    go_on.set()
    capture.result(PATIENCE)
    assert not trainer.done()
    end.set()
    trainer.result(PATIENCE)


def test_a_long_step_keeps_its_hold_however_often_it_is_looked_at(
    guard: Guards, lock: StateLock, threads: DaemonThreads
) -> None:
    """The stack of a step that works through generators is looked at while it changes."""
    inside, go_on = threading.Event(), threading.Event()

    def numbers(depth: int) -> Iterator[int]:
        if depth:
            yield from numbers(depth - 1)
        else:
            yield from range(50)

    def work() -> None:
        inside.set()
        while not go_on.is_set():
            sum(numbers(5))

    optimizer = Watched(inside=work)
    guard(lock, optimizer)
    step = threads.submit(optimizer.step)
    assert inside.wait(PATIENCE)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(3000):
            lock.check_capture_allowed()
            assert lock.statistics().holders
    finally:
        sys.setswitchinterval(interval)
        go_on.set()
    step.result(PATIENCE)
    assert is_free(lock)


def test_steps_that_raise_one_after_another_leave_at_most_the_last(
    guard: Guards, lock: StateLock
) -> None:
    optimizer = Watched(inside=failing)
    guard(lock, optimizer)
    for _ in range(20):
        with pytest.raises(FloatingPointError):
            optimizer.step()
        assert len(lock.statistics().holders) <= 1
    optimizer.inside = lambda: None
    optimizer.step()
    assert is_free(lock)


def test_a_step_that_raised_keeps_nothing_of_its_callers_alive(
    guard: Guards, lock: StateLock
) -> None:
    class Batch:
        pass

    optimizer = Watched(inside=failing)
    guard(lock, optimizer)

    def train() -> weakref.ref[Batch]:
        batch = Batch()
        with suppress(FloatingPointError):
            optimizer.step()
        return weakref.ref(batch)

    gc.disable()
    try:
        alive = train()
        assert lock.statistics().holders
        assert alive() is None
    finally:
        gc.enable()


# ---- what wraps a step ----


def test_a_gradient_scaler_steps_inside(guard: Guards, lock: StateLock) -> None:
    seen: list[str] = []
    optimizer = Watched(inside=looking(lock, seen))
    (parameter,) = optimizer.param_groups[0]["params"]
    guard(lock, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for value in (1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale((parameter * value).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    # The step with infinite gradients is left out by the scaler.
    assert seen == ["Watched.step()"]
    assert is_free(lock)


def test_a_scheduler_that_wraps_the_step_changes_nothing(guard: Guards, lock: StateLock) -> None:
    seen: list[str] = []
    optimizer = Watched(inside=looking(lock, seen))
    before = guard(lock, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    assert len(seen) == 2
    before.close()
    guard(lock, optimizer)
    optimizer.step()
    assert len(seen) == 3
    assert is_free(lock)


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("what", ["training step", "optimizer step"])
@pytest.mark.parametrize("first", ["guarded", "compiled"])
def test_compiled_steps_run_inside(
    what: str, first: str, guard: Guards, lock: StateLock, threads: DaemonThreads
) -> None:
    (parameter,) = parameters(1)
    optimizer = AdamW([parameter], lr=0.1)
    if first == "guarded":
        guard(lock, optimizer)

    def train() -> None:
        (parameter**2).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    run = torch.compile(train if what == "training step" else optimizer.step, backend="eager")
    run()
    if first == "compiled":
        guard(lock, optimizer)
        run()
    assert is_free(lock)
    before = parameter.detach().clone()
    capture = Held(threads, lock.capturing)
    step = threads.waiting(lock, run)
    assert torch.equal(parameter, before)
    capture.end()
    step.result(PATIENCE)
    assert not torch.equal(parameter, before)
    assert is_free(lock)


def test_hooks_are_silent_on_a_thread_that_captures(guard: Guards, lock: StateLock) -> None:
    optimizer = Watched(inside=lambda: None)
    guard(lock, optimizer)
    with lock.capturing():
        optimizer.step()
        assert [use.side for use in lock.statistics().holders] == ["capturing"]
    assert is_free(lock)


# ---- removal ----


def test_removal_does_not_disturb_a_step_that_waits(
    guard: Guards, lock: StateLock, threads: DaemonThreads
) -> None:
    seen: list[str] = []
    optimizer = Watched(inside=looking(lock, seen))
    others: list[str] = []
    guarded = guard(lock, optimizer)
    optimizer.register_step_pre_hook(lambda *_: others.append("before"))
    optimizer.register_step_post_hook(lambda *_: others.append("after"))
    capture = Held(threads, lock.capturing)
    step = threads.waiting(lock, optimizer.step)
    guarded.close()
    capture.end()
    step.result(PATIENCE)
    assert seen == ["Watched.step()"]
    assert (others[0], others[-1]) == ("before", "after")
    assert is_free(lock)
    capture = Held(threads, lock.capturing)
    optimizer.step()
    capture.end()


def test_removal_does_not_disturb_a_step_that_waits_for_another_guard(
    guard: Guards, lock: StateLock, threads: DaemonThreads
) -> None:
    optimizer, other = SGD(parameters(), lr=0.1), StateLock()
    others = [guard(other, optimizer)]
    guard(lock, optimizer)
    others.append(guard(other, optimizer))
    capture = Held(threads, lock.capturing)
    step = threads.waiting(lock, optimizer.step)
    for each in others:
        each.close()
    capture.end()
    step.result(PATIENCE)
    capture = Held(threads, other.capturing)
    optimizer.step()
    capture.end()


def test_a_guard_removed_within_a_step_is_forgotten_with_it(tmp_path: Path) -> None:
    lock = StateLock()
    optimizer = Watched(inside=lambda: None)
    guarded = ckpipe.SyncPipeline(tmp_path, guard=optimizer, state_lock=lock).__enter__()
    optimizer.inside = guarded.close
    optimizer.step()
    assert is_free(lock)
    alive = weakref.ref(lock)
    optimizer.inside = lambda: None
    del guarded, lock
    gc.collect()
    assert alive() is None
    optimizer.step()
