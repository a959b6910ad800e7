"""What a newcomer tries: each of it works, or fails with an error that says what to do."""

from __future__ import annotations

import copy
import pickle
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe.errors import CheckpointNotFound, PipelineClosed, UsageError
from ckpipe.events import Completed


def refusals() -> dict[str, tuple[str, Callable[[ckpipe.SyncPipeline], object]]]:
    state = {"w": torch.ones(3)}
    return {
        "include": ("list of globs", lambda it: it.save(state, include="w*")),
        "exclude": ("list of globs", lambda it: it.load(state, exclude="w*")),
        "number for a glob": ("list of globs", lambda it: it.save(state, include=[3])),
        "one number": ("list of globs", lambda it: it.load(state, exclude=3)),
        "no hook": ("called with an event", lambda it: it.on_complete(None)),
        "deaf hook": ("called with an event", lambda it: it.on_staged(lambda: None)),
        "guard": ("cannot be guarded", lambda it: it.guard(torch.nn.Linear(1, 1))),
        "no guard": ("No optimizer was given", lambda it: it.guard()),
    }


@pytest.mark.parametrize("case", refusals())
def test_a_slip_is_refused_at_once(case: str, tmp_path: Path) -> None:
    says, call = refusals()[case]
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        with pytest.raises(UsageError, match=says):
            call(pipeline)
        assert pipeline.steps() == []


@pytest.mark.parametrize("url", [5, ["run"]])
def test_a_root_is_text_or_a_path(url: Any) -> None:
    for kind in (ckpipe.Pipeline, ckpipe.SyncPipeline):
        with pytest.raises(UsageError, match="a URL or a path, not "):
            kind(url)


@pytest.mark.parametrize("guard", [3, torch.nn.Linear(1, 1), [torch.nn.Linear(1, 1)]])
def test_what_is_no_optimizer_is_refused_before_anything_is_opened(guard: Any) -> None:
    with pytest.raises(UsageError, match="cannot be guarded"):
        ckpipe.SyncPipeline("nowhere", guard=guard)


class Wrapping(torch.optim.Optimizer):
    """An optimizer that wraps another and does not call the base class, as accelerate's does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner


def test_a_pipeline_that_cannot_guard_leaves_nothing_open(tmp_path: Path) -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    handler, before = signal.getsignal(signal.SIGTERM), set(threading.enumerate())
    pipeline = ckpipe.SyncPipeline(tmp_path, guard=[inner, Wrapping(inner)], preemption=True)
    with pytest.raises(UsageError, match="Pass the optimizer that it wraps"):
        pipeline.__enter__()
    assert "ckpipe" not in {thread.name for thread in set(threading.enumerate()) - before}
    assert signal.getsignal(signal.SIGTERM) is handler
    assert not inner._optimizer_step_pre_hooks


def test_a_pipeline_that_could_not_be_opened_is_opened_later(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    pipeline = ckpipe.SyncPipeline(tmp_path / "run", read_only=True, guard=optimizer)
    with pytest.raises(CheckpointNotFound):
        pipeline.open()
    with pytest.raises(PipelineClosed, match="not open yet"):
        pipeline.latest()
    with ckpipe.SyncPipeline(tmp_path / "run") as writer:
        writer.save({"w": 1}, step=3)
    with pipeline:
        assert [info.step for info in pipeline.steps()] == [3]
        assert len(optimizer._optimizer_step_pre_hooks) == 1
    with pytest.raises(PipelineClosed, match="opened once"):
        pipeline.open()


@pytest.mark.parametrize("failing", [False, True])
def test_leaving_a_pipeline_takes_its_hooks_off(failing: bool, tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    with suppress(KeyError), ckpipe.SyncPipeline(tmp_path, guard=optimizer) as pipeline:
        pipeline.guard(optimizer)
        assert len(optimizer._optimizer_step_pre_hooks) == 2
        if failing:
            raise KeyError
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("url", ["s3:/bucket/run", "file:/run", "GS:/bucket"])
def test_a_slash_too_few_does_not_make_a_folder(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for read_only in (False, True):
        with (
            pytest.raises(UsageError, match="neither a path nor a URL"),
            ckpipe.SyncPipeline(url, read_only=read_only),
        ):
            pass
    assert list(tmp_path.iterdir()) == []
    with ckpipe.SyncPipeline("./s3:/bucket") as pipeline:
        assert pipeline.latest() is None


def test_a_pipeline_is_not_copied(tmp_path: Path) -> None:
    pipeline = ckpipe.SyncPipeline(tmp_path)
    with pipeline:
        handle = pipeline.save({"w": 1})
        for what in (pipeline, handle, ckpipe.Pipeline(tmp_path)):
            with pytest.raises(TypeError, match="neither copied nor pickled"):
                pickle.dumps(what)
            with pytest.raises(TypeError, match="neither copied nor pickled"):
                copy.deepcopy(what)


def test_a_named_save_under_way_is_waited_for(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        uses: list[Callable[[int], object]] = [pipeline.verify, pipeline.pin]
        uses.append(lambda step: pipeline.load(step=step))
        for step, use in enumerate(uses):
            handle = pipeline.save({"w": torch.full((1 << 20,), float(step))}, step=step)
            found = use(step)
            assert handle.status == "committed"
        assert isinstance(found, ckpipe.LoadResult)
        assert torch.equal(found.state["w"], torch.full((1 << 20,), 2.0))


async def test_a_coroutine_hook_awaits_the_pipeline(tmp_path: Path) -> None:
    seen: list[Any] = []
    async with ckpipe.Pipeline(tmp_path) as pipeline:

        @pipeline.on_complete
        async def look(event: Completed) -> None:
            seen.append((await pipeline.verify(event.step)).bytes)
            if event.step == 1:
                handle = await pipeline.save({"bytes": seen[0]}, step=2)
                seen.append((await handle).step)

        await (await pipeline.save({"w": torch.ones(3)}, step=1))
    async with ckpipe.Pipeline(tmp_path) as pipeline:
        assert [info.step for info in await pipeline.steps() if info.complete] == [1, 2]
    assert seen[0] > 0
    assert 2 in seen


def test_a_coroutine_hook_that_would_block_the_loop_is_told_so(tmp_path: Path) -> None:
    async def look(event: Completed) -> None:
        pipeline.latest()

    pipeline = ckpipe.SyncPipeline(tmp_path)
    pipeline.on_complete(look)
    pipeline.__enter__()
    pipeline.save({"w": torch.ones(3)}, step=1)
    with pytest.raises(UsageError, match="must not block it") as caught:
        pipeline.__exit__(None, None, None)
    assert "plain function" in str(caught.value)
