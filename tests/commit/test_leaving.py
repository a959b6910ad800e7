"""How a pipeline ends: closed by a call or a block, or still open when the program ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import itertools
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.backend import Upload
from ckpipe.testing import MemoryBackend, SlowBackend
from tests.support.command_line import forked, script
from tests.support.pipelines import Stores, loaded_state
from tests.support.signals import signals_heard

STATE = {"w": torch.ones(10)}
NO_STATE: Any = None
"""What every save refuses."""


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


def leave_while_a_save_is_held(
    store: Stores, pipeline: ckpipe.SyncPipeline, then: Callable[[], object]
) -> ckpipe.SyncSaveHandle:
    """Close on this thread; once that has begun, another does something and releases the store."""

    def once_it_closes() -> None:
        with contextlib.suppress(errors.PipelineClosed):
            while True:
                pipeline.save(STATE)
        then()
        store.slow.release()

    store.slow.hold("write")
    handle = pipeline.save(STATE, step=0)
    thread = threading.Thread(target=once_it_closes)
    thread.start()
    try:
        pipeline.close()
    finally:
        store.slow.release()
        thread.join()
    return handle


def test_an_error_of_a_handler_gives_no_save_up(store: Stores) -> None:
    pipeline = ckpipe.SyncPipeline(store.url).open()
    called = threading.Event()

    def handle(number: int, frame: object) -> None:
        called.set()
        raise RuntimeError("a worker died")

    def kill_worker() -> None:
        os.kill(os.getpid(), signal.SIGUSR2)
        called.wait()
        store.slow.release()

    before = signal.signal(signal.SIGUSR2, handle)
    store.slow.hold("write")
    saved = pipeline.save(STATE, step=0)
    killing = threading.Thread(target=once_it_closes, args=(pipeline, kill_worker))
    try:
        with signals_heard(), pytest.raises(RuntimeError) as caught, pipeline:  # noqa: PT012
            killing.start()
            raise ValueError("the loader failed")
    finally:
        called.set()
        store.slow.release()
        killing.join()
        signal.signal(signal.SIGUSR2, before)
    assert saved.status == "committed"
    assert isinstance(caught.value.__context__, ValueError)


def once_it_closes(pipeline: ckpipe.SyncPipeline, then: Callable[[], object]) -> None:
    """Ask for saves that are refused, until they are because the pipeline closes; do something."""
    refused: Exception | None = None
    while not isinstance(refused, errors.PipelineClosed):
        with pytest.raises(errors.CkpipeError) as caught:
            pipeline.save(NO_STATE)
        refused = caught.value
    then()


def test_a_normal_leave_has_no_limit(store: Stores) -> None:
    staging = {"bytes": "8MiB", "block_bytes": 65536}
    pipeline = ckpipe.SyncPipeline(store.url, drain_timeout_seconds=0, staging=staging).open()
    assert leave_while_a_save_is_held(store, pipeline, lambda: None).status == "committed"


def test_a_first_ctrl_c_lets_saves_end_within_the_limit(store: Stores) -> None:
    staging = {"bytes": "8MiB", "block_bytes": 65536}
    pipeline = ckpipe.SyncPipeline(store.url, staging=staging).open()
    with signals_heard(), pytest.raises(KeyboardInterrupt):
        leave_while_a_save_is_held(store, pipeline, lambda: os.kill(os.getpid(), signal.SIGINT))
    with ckpipe.SyncPipeline(store.url) as fresh:
        assert fresh.load(step=0) is not None


def test_a_save_that_an_exception_gives_up_is_logged_and_noted(
    store: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    store.slow.hold("write")
    pipeline = ckpipe.SyncPipeline(store.url, drain_timeout_seconds=0)
    with pytest.raises(ZeroDivisionError) as caught, pipeline:  # noqa: PT012
        handle = pipeline.save(STATE, step=7)
        raise ZeroDivisionError
    (note,) = caught.value.__notes__
    assert "given up" in note
    assert "step 7" in note
    assert handle.status == "failed"
    assert any(
        each.levelname == "ERROR" and "given up" in each.message and "step" in each.message
        for each in caplog.records
    )


async def test_a_leave_that_is_cancelled_gives_up_after_the_limit(store: Stores) -> None:
    store.slow.hold("write")
    pipeline = await ckpipe.Pipeline(store.url, drain_timeout_seconds=0).open()
    handle = await pipeline.save(STATE, step=7)
    leaving = asyncio.create_task(pipeline.aclose())
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await leaving
    assert handle.status == "failed"
    assert "step 7" in "".join(caught.value.__notes__)


async def first_save_held(store: Stores, pipeline: ckpipe.Pipeline) -> asyncio.Task[Any]:
    """Call a first save, which cannot claim the launch and so has no name yet."""
    store.slow.hold("put")
    saving = asyncio.create_task(pipeline.save(STATE, step=7))
    await anyio.to_thread.run_sync(store.slow.gate.wait_until_held)
    return saving


async def being_closed(pipeline: ckpipe.Pipeline) -> None:
    """Return once a call to close the pipeline waits for its saves."""
    refused: Exception | None = None
    while not isinstance(refused, errors.PipelineClosed):
        await asyncio.sleep(0)
        with pytest.raises(errors.CkpipeError) as caught:
            await pipeline.save(NO_STATE)
        refused = caught.value


async def test_leaving_waits_for_a_save_that_has_not_begun(store: Stores) -> None:
    pipeline = await ckpipe.Pipeline(store.url, drain_timeout_seconds=0).open()
    saving = await first_save_held(store, pipeline)
    leaving = asyncio.create_task(pipeline.aclose())
    await being_closed(pipeline)
    store.slow.release()
    await leaving
    assert (await saving).status == "committed"


@pytest.mark.parametrize("how", ["on an exception", "cancelled"])
async def test_leaving_gives_up_a_save_that_has_not_begun(store: Stores, how: str) -> None:
    pipeline = await ckpipe.Pipeline(store.url, drain_timeout_seconds=0).open()
    saving = await first_save_held(store, pipeline)
    failed = ValueError()
    if how == "cancelled":
        leaving = asyncio.create_task(pipeline.aclose())
        await asyncio.sleep(0)
        leaving.cancel()
    else:
        leaving = asyncio.create_task(pipeline.__aexit__(ValueError, failed, None))
    with pytest.raises(errors.SaveCancelled, match="before it began") as caught:
        await saving
    assert caught.value.step == 7
    store.slow.release()
    if how == "cancelled":
        with pytest.raises(asyncio.CancelledError) as left:
            await leaving
    else:
        await leaving
    noted = left.value if how == "cancelled" else failed
    assert "step 7" in "".join(noted.__notes__)


def being_closed_in_the_background() -> list[threading.Thread]:
    """The threads that close pipelines which were dropped."""
    return [each for each in threading.enumerate() if each.name == "ckpipe closing"]


class Holder:
    """Holds a pipeline, and itself: only the garbage collector finds it."""

    def __init__(self, pipeline: Any) -> None:
        self.pipeline, self.itself = pipeline, self


class WatchedUpload(Upload):
    """Passes an upload on, and remembers the memory of each block without keeping it.

    Args:
        inner: The upload.
        memory: Gets the memory.
    """

    def __init__(self, inner: Upload, memory: list[weakref.ref[Any]]) -> None:
        self._inner, self._memory = inner, memory

    async def write(self, offset: int, data: memoryview) -> None:
        self._memory.append(weakref.ref(data.obj))
        await self._inner.write(offset, data)

    async def complete(self) -> None:
        await self._inner.complete()

    async def abort(self) -> None:
        await self._inner.abort()


class WatchedBackend(MemoryBackend):
    """A store that remembers the memory that is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: list[weakref.ref[Any]] = []

    async def open_upload(self, key: str, *, size: int, block_bytes: int) -> Upload:
        made = await super().open_upload(key, size=size, block_bytes=block_bytes)
        return WatchedUpload(made, self.memory)


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", ["another takes its name", "the collector finds it"])
@pytest.mark.parametrize("awaits", [False, True])
async def test_a_pipeline_that_is_dropped_says_so_and_gives_its_memory_back(
    store: Stores, awaits: bool, how: str
) -> None:
    watched = WatchedBackend()
    store.slow = SlowBackend(watched)

    async def opened() -> Any:
        if awaits:
            return await ckpipe.Pipeline(store.url).open()
        return ckpipe.SyncPipeline(store.url).open()

    async def save(step: int) -> None:
        saved = pipeline.save(STATE, step=step)
        if awaits:
            await saved

    others = threading.enumerate()
    pipeline = await opened()
    await save(1)
    store.slow.hold("write")
    await save(2)
    (loop,) = [
        each for each in threading.enumerate() if each.name == "ckpipe" and each not in others
    ]
    with pytest.warns(ResourceWarning, match="dropped and not closed") as warned:  # noqa: PT031
        if how == "the collector finds it":
            holder = Holder(pipeline)
            del holder
        pipeline = await opened()
        gc.collect()
    line = inspect.getsourcelines(opened)[1] + (2 if awaits else 3)
    assert f"{__file__}:{line}, " in str(warned[0].message)
    (closing,) = being_closed_in_the_background()
    assert loop.is_alive()  # the save is not through
    store.slow.release()
    closing.join()
    assert not loop.is_alive()
    gc.collect()
    assert watched.memory
    assert all(each() is None for each in watched.memory)
    found = pipeline.steps()
    assert [info.step for info in (await found if awaits else found) if info.complete] == [1, 2]
    closed = pipeline.aclose() if awaits else pipeline.close()
    if awaits:
        await closed


def test_pipelines_that_are_open_together_are_no_mistake(store: Stores) -> None:
    with ckpipe.SyncPipeline(store.url) as first, ckpipe.SyncPipeline(store.url) as second:
        for step, pipeline in enumerate((first, second, first)):
            pipeline.save(STATE, step=step, until="committed")
        del pipeline
        gc.collect()
        assert sorted(info.step for info in first.steps()) == [0, 1, 2]
    assert being_closed_in_the_background() == []


def test_a_dropped_pipeline_logs_what_failed(
    store: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = ckpipe.SyncPipeline(store.url).open()
    pipeline.save(STATE, step=0, until="committed")
    store.faulty.fail(errors.StoreFull("no room"), "complete")
    store.slow.hold("complete")
    pipeline.save(STATE, step=4)
    with pytest.warns(ResourceWarning):
        del pipeline
    (closing,) = being_closed_in_the_background()
    store.slow.release()
    closing.join()
    assert "A checkpoint failed: no room [step 4" in caplog.text


NOTEBOOK = """
import code, threading, sys, warnings
warnings.simplefilter("always", ResourceWarning)
shell = code.InteractiveInterpreter()
CELL = '''
import ckpipe, torch
model = torch.nn.Linear(300, 300)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pipeline = ckpipe.SyncPipeline(ROOT, guard=optimizer, preemption=True).open()
for step in range(FIRST, FIRST + 3):
    optimizer.step()
    pipeline.save({"model": model, "optimizer": optimizer}, step=step, until="captured")
'''
shell.locals["ROOT"] = sys.argv[1]
for number in range(3):
    shell.locals["FIRST"] = 3 * number
    shell.runcode(compile(CELL, f"<cell {number}>", "exec"))
for each in threading.enumerate():
    if each.name == "ckpipe closing":
        each.join()
print(sum(each.name == "ckpipe" for each in threading.enumerate()))
"""


def test_a_cell_that_opens_a_pipeline_again_and_again_leaves_one_open(tmp_path: Path) -> None:
    run = forked(NOTEBOOK, tmp_path)
    assert (run.code, run.out.strip()) == (0, "1"), run.err
    assert [f"<cell {number}>:5, was dropped" in run.err for number in range(3)] == [1, 1, 0]
    assert "Traceback" not in run.err
    with ckpipe.SyncPipeline(tmp_path, read_only=True) as pipeline:
        assert [info.step for info in pipeline.steps() if info.complete] == list(range(9))


DROPPED_AT_EXIT = """
import atexit, sys
import ckpipe, torch
class Trainer:
    def __init__(self):
        self.pipeline = ckpipe.SyncPipeline(sys.argv[1]).open()
        atexit.register(self.tear_down)
    def tear_down(self):
        self.pipeline = None
trainer = Trainer()
trainer.pipeline.save({"w": torch.ones(4 << 20)}, step=1)
"""


def test_a_pipeline_that_is_dropped_while_the_program_ends_is_closed(tmp_path: Path) -> None:
    run = script(DROPPED_AT_EXIT, tmp_path)
    assert run.code == 0, run.err
    with ckpipe.SyncPipeline(tmp_path, read_only=True) as pipeline:
        assert [info.step for info in pipeline.steps() if info.complete] == [1]


LEFT_OPEN = """
import atexit, multiprocessing, os, sys, threading
import torch
import ckpipe
from ckpipe import event_lines


class Trainer:
    def __init__(self, root, worker):
        # The last saves wait for the memory of the first, so that some are only begun at the end.
        staging = {"block_bytes": 65536, "bytes": "8MiB", "pinned": "never"}
        self.pipeline = ckpipe.SyncPipeline(root, worker=worker, staging=staging).open()
        self.pipeline.events.add(event_lines.JsonLines(root + ".events"))
        self.pipeline.on_committed(lambda event: open(f"{root}.{event.step}", "x").close())

    def train(self):
        for step in range(3):
            self.pipeline.save({"w": torch.full((1_000_000,), float(step))}, step=step)


def refuse(*_):
    raise RuntimeError("can't create new thread at interpreter shutdown")


def refuse_threads():
    for each in ("_start_new_thread", "_start_joinable_thread"):
        if hasattr(threading, each):
            setattr(threading, each, refuse)


root, worker, ending = sys.argv[1:4]
if ending == "a forked process of multiprocessing ends":
    def run():
        trainer = Trainer(root, worker)
        trainer.train()
    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join()
    sys.exit(child.exitcode)
trainer = Trainer(root, worker)
if ending == "no thread can be started":
    atexit.register(refuse_threads)
if ending == "a thread goes on":
    threading.Thread(target=trainer.train).start()
else:
    trainer.train()
if ending == "the object is dropped":
    del trainer
if ending == "sys.exit":
    sys.exit(3)
if ending == "an exception":
    raise RuntimeError("training failed")
"""
ENDINGS = {
    "the last line": 0,
    "sys.exit": 3,
    "an exception": 1,
    "a thread goes on": 0,
    "the object is dropped": 0,
    "no thread can be started": 0,
    "a forked process of multiprocessing ends": 0,
}
PYTHONS = [sys.executable, *filter(None, os.environ.get("CKPIPE_TEST_PYTHONS", "").split(":"))]
"""Interpreters to try; others than this one have to be named."""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("worker", "ending"), list(itertools.product(["thread", "process"], ENDINGS))
)
@pytest.mark.parametrize("python", PYTHONS)
def test_no_save_is_lost_when_a_program_ends_with_its_pipeline_open(
    tmp_path: Path, python: str, worker: str, ending: str
) -> None:
    root = tmp_path / "run"
    run = subprocess.run(
        [python, "-W", "ignore", "-c", LEFT_OPEN, str(root), worker, ending],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == ENDINGS[ending], run.stderr
    assert run.stderr.partition("Traceback")[0] == ""
    assert [each for each in range(3) if Path(f"{root}.{each}").exists()] == [0, 1, 2]
    told = Path(f"{root}.events").read_text()
    assert told.count('"RankCommitted"') == 3
    with ckpipe.SyncPipeline(root) as pipeline:
        assert [info.step for info in pipeline.steps() if info.complete] == [0, 1, 2]
        assert torch.equal(loaded_state(pipeline)["w"], torch.full((1_000_000,), 2.0))


FORKED = """
import os, sys, warnings
import torch
import ckpipe
from ckpipe import testing
warnings.simplefilter("ignore")
store = testing.SlowBackend(testing.MemoryBackend())
ckpipe.register_backend("slow", lambda url: store)
pipeline = ckpipe.SyncPipeline("slow://store", staging={"pinned": "never"}).open()
store.hold("write")
handle = pipeline.save({"w": torch.ones(3)}, step=1)
child = os.fork()
if not child:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert handle.status != "committed"
store.release()
pipeline.close()
assert handle.status == "committed"
"""


def test_a_forked_child_closes_nothing() -> None:
    run = forked(FORKED)
    assert (run.code, run.err) == (0, "")


FAILING = """
import sys, torch, ckpipe
from ckpipe import errors, testing
store = testing.FaultyBackend(testing.MemoryBackend())
ckpipe.register_backend("faulty", lambda url: store)
pipeline = ckpipe.SyncPipeline("faulty://store").open()
store.fail(errors.StoreFull("no room", key="x"), "complete")
pipeline.save({"w": torch.ones(3)}, step=4)
"""


def test_a_save_that_fails_while_the_program_ends_is_logged() -> None:
    run = script(FAILING, flags=["-W", "ignore"])
    assert run.code == 0
    assert "A checkpoint failed: no room [step 4" in run.err


def release_once_held(store: Stores) -> None:
    store.slow.gate.wait_until_held()
    store.slow.release()


def test_leaving_on_an_exception_lets_staged_saves_finish(store: Stores) -> None:
    store.slow.hold("write")
    with pytest.raises(ZeroDivisionError), ckpipe.SyncPipeline(store.url) as pipeline:  # noqa: PT012
        pipeline.save({"a": torch.ones(10)}, step=0)
        threading.Thread(target=release_once_held, args=(store,)).start()
        raise ZeroDivisionError
    with ckpipe.SyncPipeline(store.url) as pipeline:
        assert [each.step for each in pipeline.steps() if each.complete] == [0]
