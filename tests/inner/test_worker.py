"""Messages between a trainer and its worker, and how the death of a worker is told."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import queue
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpipe
from ckpipe import errors
from ckpipe.errors import DrainTimeout
from ckpipe.events import SaveFailed, Staged
from ckpipe.format.manifest import RankManifest
from ckpipe.save.record import StageTimings
from ckpipe.types import CheckpointId
from ckpipe.worker import uploader
from ckpipe.worker.channel import Channel, close_socket, socket_pair
from ckpipe.worker.process import is_held
from ckpipe.worker.protocol import (
    BlockReleased,
    Ended,
    GiveUp,
    Message,
    NewSegment,
    Sealed,
    decode,
    encode,
)
from tests.support.actors import PATIENCE, DaemonThreads
from tests.support.command_line import script
from tests.support.settling import SettlingPipeline, settle
from tests.support.worker_runs import SETTINGS, state_of, worker_of
from tests.worker.test_environment import PROCESS, customize, traced

ID = CheckpointId("20261121T034205123Z-9f3a2c01", 7, 0)
CLOCK = StageTimings(12.5)


def sealed(values: tuple[Any, ...], metadata: Any = None) -> Sealed:
    """A message about a save that is copied."""
    part = RankManifest(0, 0, 0, values, (), (), "token", "now", {"torch": "2"}, metadata or {})
    return Sealed(1, None, part, CLOCK, False, None, 0.5)


def crossed(message: Message) -> Message:
    """A message as the other end has it, with this end's clock."""
    again = decode(encode(message)[8:])
    return replace(again, clock=CLOCK) if isinstance(again, Sealed | Ended) else again


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(metadata=st.dictionaries(st.text(), PLAIN), values=st.tuples(PLAIN))
def test_plain_values_come_back_whole(metadata: dict[str, object], values: tuple[object]) -> None:
    message = sealed(values, metadata)
    assert crossed(message) == message


def test_what_is_of_a_subclass_of_a_plain_type_crosses_as_that_type() -> None:
    class Text(str):
        __slots__ = ()

    class Texts(tuple[str, ...]):
        __slots__ = ()

    again = crossed(sealed((Text("dict"), {Text("k"): Texts((Text("v"),))})))
    assert again == sealed(("dict", {"k": ("v",)}))
    assert isinstance(again, Sealed)
    text, inner = again.part.values
    assert type(text) is str
    assert isinstance(inner, dict)
    assert type(inner["k"]) is tuple


def test_objects_of_a_program_do_not_cross() -> None:
    class Thing:
        pass

    with pytest.raises(ValueError, match="A Thing cannot cross"):
        encode(sealed((Thing(),)))


def raised_of(error: Exception) -> Exception:
    """What the trainer raises of an error in the worker."""
    again = crossed(Ended(1, error, True, CLOCK))
    assert isinstance(again, Ended)
    assert isinstance(again.error, Exception)
    return again.error


def test_an_error_of_a_plugin_is_of_the_kind_that_it_extends() -> None:
    class Quota(errors.StoreFull):
        pass

    again = raised_of(Quota("No more", key="k"))
    assert type(again) is errors.StoreFull
    assert any("Quota" in note for note in again.__notes__)
    assert raised_of(UnicodeDecodeError("u", b"", 0, 1, "x"))


class Count(complex):
    def __new__(cls, _: str) -> Count:
        return super().__new__(cls, 1j)


class Seen(set[int]):
    pass


class Place(NamedTuple):
    host: str
    key: object


def test_attributes_of_an_error_that_cannot_cross_are_left_out() -> None:
    error, refused = errors.StoreUnavailable("No answer"), ConnectionRefusedError("refused")
    # As aiohttp and botocore keep them: a named tuple of objects, an error, a mapping of both.
    vars(refused).update(
        place=Place("store", object()), os_error=OSError(111, "refused"),
        kwargs={"error": OSError(111, "refused")}, host="store",
    )  # fmt: skip
    error.__cause__ = refused
    again = raised_of(error)
    assert type(again) is errors.StoreUnavailable
    assert again.__cause__ is not None
    assert vars(again.__cause__) == {"host": "store"}


def test_an_error_crosses_whatever_a_program_has_put_on_it() -> None:
    @dataclass
    class Refusal(Exception):
        answer: object

    error = errors.StoreUnavailable("No answer")
    loop: list[object] = []
    loop.append(loop)
    vars(error).update(loop=loop, count=Count("a"), seen=Seen([1]))
    error.__cause__ = Refusal(object())
    again = raised_of(error)
    assert vars(again) == {**vars(errors.StoreUnavailable("No answer")), "count": 1j, "seen": {1}}
    assert {type(each) for each in (vars(again)["count"], vars(again)["seen"])} == {complex, set}
    assert type(again.__cause__) is Exception
    assert any("Refusal" in note for note in again.__cause__.__notes__)


async def test_large_messages_descriptors_and_the_end_cross_in_order() -> None:
    left, right = (Channel(each) for each in socket_pair())
    read, write = os.pipe()
    large = SaveFailed(str(ID), 7, 0, "x" * 3_000_000)
    left.post(large)
    left.post(NewSegment(1, 5), read)
    left.post(NewSegment(2, 6))
    assert not left.idle
    assert await right.receive() == large
    assert await right.receive() == NewSegment(1, 5)
    mine = right.take_descriptor()
    assert not os.get_inheritable(mine)
    assert await right.receive() == NewSegment(2, 6)
    await left.flush()
    os.write(write, b"hello")
    assert os.read(mine, 5) == b"hello"
    for descriptor in (mine, read, write):
        os.close(descriptor)
    left.close()
    with pytest.raises(anyio.EndOfStream):
        await right.receive()
    right.post(NewSegment(3, 7))  # nobody gets it, and nothing happens
    await right.flush()
    right.close()
    gc.collect()


async def test_small_messages_go_together_in_order_and_in_time() -> None:
    left, right = (Channel(each) for each in socket_pair())
    try:
        for number in range(3):
            left.post_soon(BlockReleased(1, (0, number)), 600)
        assert right.receive_nowait() is None
        left.post(GiveUp(1))
        told = [right.receive_nowait() for _ in range(5)]
        assert told == [
            BlockReleased(1, (0, 0)),
            BlockReleased(1, (0, 1)),
            BlockReleased(1, (0, 2)),
            GiveUp(1),
            None,
        ]
        began = time.monotonic()
        left.post_soon(BlockReleased(1, (0, 3)), 0.05)
        left.post_soon(BlockReleased(1, (0, 4)), 600)  # waits no longer than the first
        assert [await right.receive(), await right.receive()] == [
            BlockReleased(1, (0, 3)),
            BlockReleased(1, (0, 4)),
        ]
        assert 0.05 <= time.monotonic() - began < 60
        left.post_soon(BlockReleased(1, (0, 5)), 600)
        await left.flush()
        assert right.receive_nowait() == BlockReleased(1, (0, 5))
        left.post_soon(BlockReleased(1, (0, 6)), 600)
    finally:
        left.close()
        with pytest.raises(anyio.EndOfStream):  # what was not sent yet is not wanted any more
            await right.receive()
        right.close()


def test_a_loop_without_memory_ends_the_process_and_other_faults_do_not() -> None:
    code = (
        "import asyncio, sys; from ckpipe.worker.server import _end_without_memory as end\n"
        "def fail(error): raise error\n"
        "async def main():\n"
        "    loop = asyncio.get_running_loop()\n"
        "    loop.set_exception_handler(end)\n"
        "    loop.call_soon(fail, ValueError('harmless'))\n"
        "    loop.call_soon(fail, MemoryError('none left'))\n"
        "    await loop.create_future()\n"
        "asyncio.run(main())"
    )
    done = script(code)
    assert done.code == 1
    assert "harmless" in done.err
    assert "none left" in done.err


def test_sockets_are_closed_once() -> None:
    for each in socket_pair():
        close_socket(each)
        close_socket(each)


NAMED_ODDLY = """
open("/proc/self/comm", "w").write("(a) S 3) T 1")
print("begun", flush=True)
input()
"""

BUSY_THREAD = """
import hashlib, threading
data = bytes(1 << 28)
threading.Thread(target=lambda: [hashlib.sha256(data) for _ in range(10**6)], daemon=True).start()
print("begun", flush=True)
input()
"""


@contextmanager
def asking(code: str) -> Iterator[int]:
    """The id of a process whose main thread sleeps, as it has come to its prompt."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"
            main = psutil.Process(process.pid)
            while main.status() != psutil.STATUS_SLEEPING:
                os.sched_yield()
            yield process.pid
        finally:
            process.kill()


def test_a_process_is_held_while_it_is_stopped_and_not_while_it_sleeps() -> None:
    with asking(NAMED_ODDLY) as process:
        assert not is_held(process)
        os.kill(process, signal.SIGSTOP)
        while psutil.Process(process).status() != psutil.STATUS_STOPPED:
            os.sched_yield()
        assert is_held(process)
    assert not is_held(process)


def test_a_process_is_held_while_any_thread_of_it_runs() -> None:
    with asking(BUSY_THREAD) as process:
        assert all(is_held(process) for _ in range(5))


BRIEF: dict[str, Any] = {"worker": {"mode": "process", "hang_seconds": 1}} | SETTINGS
PATIENT: dict[str, Any] = {"worker": {"mode": "process", "hang_seconds": 6000}} | SETTINGS


def idle_worker(pipeline: ckpipe.SyncPipeline) -> int:
    """The process of a worker that has brought a save to the store."""
    pipeline.save(state_of(1)).wait()
    settle(pipeline)
    return worker_of(pipeline)


def held_save(pipeline: ckpipe.SyncPipeline) -> tuple[int, ckpipe.SyncSaveHandle]:
    """A save that its worker, which is stopped, cannot bring to the store."""
    worker = idle_worker(pipeline)
    os.kill(worker, signal.SIGSTOP)
    return worker, pipeline.save(state_of(2))


def is_reaped(worker: int) -> bool:
    """Wait until a process that has ended is reaped; whether it was."""
    until = time.monotonic() + PATIENCE
    while psutil.pid_exists(worker) and time.monotonic() < until:
        os.sched_yield()
    return not psutil.pid_exists(worker)


def test_closing_never_hangs_and_says_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploader, "GIVE_UP_SECONDS", 0.5)
    opened = SettlingPipeline(tmp_path, drain_timeout_seconds=0.05, **PROCESS)
    opened.__enter__()
    worker, _ = held_save(opened)
    opened.preempt()
    with pytest.raises(DrainTimeout):
        opened.__exit__(None, None, None)
    assert not psutil.pid_exists(worker)


def next_timer(loop: asyncio.AbstractEventLoop) -> float:
    """Seconds until a pipeline's event loop does something that nobody has asked it for."""

    async def look() -> float:
        timers = [each for each in loop._scheduled if not each.cancelled()]  # type: ignore[attr-defined]
        return float(min(each.when() for each in timers) - loop.time())

    return asyncio.run_coroutine_threadsafe(look(), loop).result()


def test_death_is_noticed_within_a_second_and_nobody_looks_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    took, loops = [math.inf], queue.SimpleQueue[asyncio.AbstractEventLoop]()

    async def hear(event: Staged) -> None:
        loops.put(asyncio.get_running_loop())

    with SettlingPipeline(tmp_path, **PATIENT) as pipeline:
        pipeline.on_staged(hear)
        while min(took) > 1 and len(took) < 20:  # the machine may have other things to do
            worker, handle = held_save(pipeline)
            loop, until = loops.get(timeout=PATIENCE), time.monotonic() + PATIENCE
            while next_timer(loop) <= 30:  # the hook's own call may not be over
                assert time.monotonic() < until
            killed = time.monotonic()
            os.kill(worker, signal.SIGKILL)
            while "is delivered again" not in caplog.text:
                os.sched_yield()
            took.append(time.monotonic() - killed)
            handle.wait(PATIENCE)
            caplog.clear()
    assert min(took) < 1


@pytest.fixture
def children_ignored() -> Iterator[None]:
    """Nobody is told how a child of this process has ended."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("children_ignored")
def test_an_exit_code_that_nobody_tells_is_not_made_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with SettlingPipeline(tmp_path, **PATIENT) as pipeline:
        worker, handle = held_save(pipeline)
        os.kill(worker, signal.SIGKILL)
        handle.wait(PATIENCE)
    assert re.search(r"exit code unknown.*SIGCHLD", caplog.text)


@pytest.fixture
def soon_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that does not end is left to the system soon; any process may trace it."""
    monkeypatch.setattr(uploader, "REAP_SECONDS", 0.1)
    anybody = "import ctypes\nctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1))\n"
    customize(tmp_path, monkeypatch, anybody)


@pytest.mark.usefixtures("soon_left")
def test_closing_leaves_a_worker_to_the_system_that_does_not_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened = SettlingPipeline(tmp_path / "run", **PROCESS)
    opened.__enter__()
    worker = idle_worker(opened)
    with traced(worker, "at its end"):
        DaemonThreads().submit(opened.__exit__, None, None, None).result(PATIENCE)
        assert psutil.pid_exists(worker)
        assert f"process {worker} was killed and does not end" in caplog.text
    assert is_reaped(worker), "nobody waits for it any more"


@pytest.mark.usefixtures("soon_left")
def test_a_save_does_not_wait_for_a_dead_worker_that_does_not_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with SettlingPipeline(tmp_path / "run", **BRIEF) as pipeline:
        worker = idle_worker(pipeline)
        with traced(worker, "at its end"):
            os.kill(worker, signal.SIGSTOP)
            handle = pipeline.save(state_of(2))
            os.kill(worker, signal.SIGKILL)
            handle.wait(PATIENCE)
            assert "not ended it yet" in caplog.text
            assert psutil.pid_exists(worker)
        assert is_reaped(worker), "nobody waits for it any more"
