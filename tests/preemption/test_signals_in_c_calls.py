"""Signals that come while the main thread cannot run handlers: in a collective or in a C call."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trio

import ckpipe
from tests.support.actors import PATIENCE, DaemonThreads
from tests.support.command_line import forked
from tests.support.killed_runs import note, notes
from tests.support.pipelines import newest_of
from tests.support.rank_processes import SETTINGS, Gang, private, told

USR2: dict[str, Any] = {"preemption": {"enabled": True, "signals": ["SIGUSR2"]}}
Heard = Callable[[], bool]


@pytest.fixture
def calls() -> Iterator[list[int]]:
    """The calls of a handler that the program has installed before any pipeline."""
    seen: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: seen.append(number))
        for number in (signal.SIGUSR2, signal.SIGWINCH)
    }
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


class LongCall:
    """A call into C that goes on for as long as a test needs, and in which no handler runs.

    ``system`` waits for its command again after every signal. The command itself sends the signal.

    Args:
        folder: An empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self._gate, self._threads = folder / "gate", DaemonThreads()
        os.mkfifo(self._gate)

    def until(self, heard: Heard, sent: str = "USR2") -> None:
        """Stay in the call until a condition is met on another thread.

        Args:
            heard: The condition.
            sent: The signal that comes first.
        """

        def release() -> bool:
            with open(self._gate, "w") as gate:  # opens once the command waits
                met = comes(heard)
                gate.write("\n")
                return met

        met = self._threads.submit(release)
        os.system(f"kill -{sent} $PPID; read line < {shlex.quote(str(self._gate))}")
        assert met.result(), "it was not met during the call"


@pytest.fixture
def long_call(tmp_path: Path) -> LongCall:
    return LongCall(tmp_path)


def comes(condition: Heard) -> bool:
    """Wait for a condition that nothing announces; False if it does not come true."""
    pause = threading.Event()
    for _ in range(int(PATIENCE / 0.005)):
        if condition():
            return True
        pause.wait(0.005)
    return False


@contextmanager
def owner() -> Iterator[socket.socket]:
    """Own the descriptor of signals, as an event loop does; yields the end to read."""
    reader, writer = socket.socketpair()
    # A loader of another test has left a handler, and each command that ends sends this signal.
    of_children = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with reader, writer:
        reader.settimeout(PATIENCE)
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield reader
        finally:
            assert signal.set_wakeup_fd(before) in (writer.fileno(), -1)
            signal.signal(signal.SIGCHLD, of_children)


def installed() -> int:
    """Return the installed descriptor."""
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    return descriptor


def test_a_signal_is_noticed_during_a_c_call(
    tmp_path: Path, calls: list[int], long_call: LongCall
) -> None:
    with (
        ckpipe.SyncPipeline(tmp_path / "a", **USR2) as first,
        ckpipe.SyncPipeline(tmp_path / "b", **USR2) as second,
        ckpipe.SyncPipeline(tmp_path / "c", preemption=True) as other,
    ):
        began: list[float | None] = []

        def heard() -> bool:
            began.append(first._preemption.seconds_left(1000))
            return first.preempted and second.preempted and not calls

        long_call.until(heard)
        assert calls == [signal.SIGUSR2], "the program's own handler is called once"
        left = first._preemption.seconds_left(1000)
        assert left is not None
        assert began[-1] is None or left <= began[-1], "the grace began during the call"
        assert first.should_save(1)
        first.save({"a": 1}, step=1)
        assert not first.should_save(2), "a signal asks for one save"
        assert not other.preempted
    assert installed() == -1


async def test_the_awaiting_pipeline_notices_it_too(
    tmp_path: Path, calls: list[int], long_call: LongCall
) -> None:
    async with ckpipe.Pipeline(tmp_path / "a", **USR2) as pipeline:
        long_call.until(lambda: pipeline.preempted and not calls)


def test_a_pipeline_is_not_told_of_a_signal_before_it(tmp_path: Path, calls: list[int]) -> None:
    for number in range(50):
        with ckpipe.SyncPipeline(tmp_path, **USR2) as pipeline:
            assert not pipeline.preempted, number
            os.kill(os.getpid(), signal.SIGUSR2)
            assert pipeline.preempted


def test_the_former_owner_gets_every_signal(
    tmp_path: Path, calls: list[int], long_call: LongCall
) -> None:
    with owner() as reader:
        before = installed()
        with ckpipe.SyncPipeline(tmp_path / "a", **USR2) as pipeline:
            assert installed() != before
            long_call.until(lambda: bool(reader.recv(1) == bytes([signal.SIGWINCH])), "WINCH")
            assert not pipeline.preempted
            with ckpipe.SyncPipeline(tmp_path / "b", **USR2):
                long_call.until(lambda: bool(reader.recv(1) == bytes([signal.SIGUSR2])))
            os.kill(os.getpid(), signal.SIGWINCH)
            os.kill(os.getpid(), signal.SIGUSR2)
        assert installed() == before
        os.kill(os.getpid(), signal.SIGWINCH)
        sent = bytes([signal.SIGWINCH, signal.SIGUSR2, signal.SIGWINCH])
        assert b"".join(reader.recv(1) for _ in sent) == sent
        reader.setblocking(False)
        with pytest.raises(BlockingIOError):
            reader.recv(1)


def test_a_former_owner_that_does_not_read_is_no_trouble(
    tmp_path: Path, calls: list[int], long_call: LongCall, capfd: pytest.CaptureFixture[str]
) -> None:
    with owner():
        former = installed()
        with ckpipe.SyncPipeline(tmp_path, **USR2) as pipeline:
            with suppress(BlockingIOError), socket.socket(fileno=os.dup(former)) as writer:
                writer.setblocking(False)
                while True:
                    writer.send(bytes(4096))
            long_call.until(lambda: pipeline.preempted and not calls)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("reused", [False, True])
def test_a_former_owner_that_is_gone_gets_nothing(
    tmp_path: Path, calls: list[int], long_call: LongCall, reused: bool
) -> None:
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno())
    number = writer.fileno()
    reading, writing = os.pipe2(os.O_NONBLOCK)
    with ckpipe.SyncPipeline(tmp_path / "a", **USR2) as pipeline:
        if reused:
            os.dup2(writing, number)  # closes that of the former owner
        else:
            writer.close()
        long_call.until(lambda: pipeline.preempted and not calls)
    assert installed() == -1
    with pytest.raises(BlockingIOError):
        os.read(reading, 1)
    for each in (reader, writer):
        each.close()
    os.close(reading)
    os.close(writing)


def test_a_later_owner_keeps_the_descriptor(tmp_path: Path, calls: list[int]) -> None:
    with ckpipe.SyncPipeline(tmp_path, **USR2) as pipeline:
        ours = installed()
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        assert signal.set_wakeup_fd(writer.fileno()) == ours
        os.kill(os.getpid(), signal.SIGUSR2)
        assert pipeline.preempted, "the handler notices it"
    assert installed() == writer.fileno()
    # As trio does, it puts the descriptor back that it found.
    signal.set_wakeup_fd(ours)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert reader.recv(100) == bytes([signal.SIGUSR2])
    signal.set_wakeup_fd(-1)
    for each in (reader, writer):
        each.close()
    assert calls == [signal.SIGUSR2] * 2


def test_a_pipeline_that_watches_none_leaves_the_descriptor_alone(tmp_path: Path) -> None:
    with owner():
        before = installed()
        for preemption in (False, {"enabled": True, "signals": []}):
            with ckpipe.SyncPipeline(tmp_path, preemption=preemption):
                assert installed() == before


def test_what_another_thread_closes_still_passes_signals_on(
    tmp_path: Path, calls: list[int], long_call: LongCall, threads: DaemonThreads
) -> None:
    with owner() as reader:
        before = installed()
        pipeline = ckpipe.SyncPipeline(tmp_path / "a", **USR2)
        pipeline.open()
        threads.submit(pipeline.close).result(PATIENCE)
        long_call.until(lambda: bool(reader.recv(1) == bytes([signal.SIGUSR2])))
        with ckpipe.SyncPipeline(tmp_path / "a", **USR2) as pipeline:
            assert not pipeline.preempted
        assert installed() == before
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("awaits", [False, True])
def test_handlers_of_an_event_loop_are_called(
    tmp_path: Path, calls: list[int], long_call: LongCall, later: bool, awaits: bool
) -> None:
    async def main() -> None:
        loop, heard = asyncio.get_running_loop(), asyncio.Queue[int]()

        def listen() -> None:
            for number in (signal.SIGUSR2, signal.SIGWINCH):
                loop.add_signal_handler(number, heard.put_nowait, number)

        async def hears(pipeline: Any) -> None:
            for number in (signal.SIGWINCH, signal.SIGUSR2):
                os.kill(os.getpid(), number)
                assert await asyncio.wait_for(heard.get(), PATIENCE) == number
            assert pipeline.should_save(1) is not later
            os.kill(os.getpid(), signal.SIGUSR2)
            assert await asyncio.wait_for(heard.get(), PATIENCE) == signal.SIGUSR2
            assert pipeline.preempted

        if not later:
            listen()
        if awaits:
            async with ckpipe.Pipeline(tmp_path / "a", **USR2) as pipeline:
                if later:
                    listen()
                await hears(pipeline)
        else:
            with ckpipe.SyncPipeline(tmp_path / "a", **USR2) as blocking:
                if later:
                    listen()
                await hears(blocking)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert await asyncio.wait_for(heard.get(), PATIENCE) == signal.SIGUSR2

    with ckpipe.SyncPipeline(tmp_path / "b", preemption=True):
        asyncio.run(main())
    assert installed() == -1, "as asyncio leaves it"
    with ckpipe.SyncPipeline(tmp_path / "a", **USR2) as pipeline:
        signal.signal(signal.SIGUSR2, lambda number, frame: calls.append(number))
        pipeline.should_save(1)
        long_call.until(lambda: pipeline.preempted and not calls)


@pytest.mark.filterwarnings("error")
def test_trio_gets_its_descriptor_back(
    tmp_path: Path, calls: list[int], long_call: LongCall
) -> None:
    async def main() -> None:
        before = installed()
        async with ckpipe.Pipeline(tmp_path / "a", **USR2) as pipeline:
            assert before not in (-1, installed())
            long_call.until(lambda: pipeline.preempted and not calls)
        assert installed() == before

    trio.run(main)
    assert installed() == -1


FORKED = """
import os, signal, sys

def raise_in_child():
    if sent:
        os.kill(os.getpid(), signal.SIGUSR2)

# The child runs it before that of ckpipe, as if it got a signal at once.
os.register_at_fork(after_in_child=raise_in_child)
import ckpipe

sent = []
signal.signal(signal.SIGUSR2, lambda *_: None)
settings = {"preemption": {"enabled": True, "signals": ["SIGUSR2"]}}
with ckpipe.SyncPipeline(sys.argv[1], **settings) as pipeline:
    sent.append(True)
    child = os.fork()
    if child == 0:
        sent.clear()
        assert signal.set_wakeup_fd(-1) == -1
        os.kill(os.getpid(), signal.SIGUSR2)
        gate = sys.argv[1] + ".gate"
        os.mkfifo(gate)
        with ckpipe.SyncPipeline(sys.argv[1] + ".child", **settings) as own:
            assert not own.preempted
            import threading
            def release():
                with open(gate, "w") as opened:
                    while not own.preempted:
                        threading.Event().wait(0.005)
                    opened.write("x")
            threading.Thread(target=release, daemon=True).start()
            os.system(f"kill -USR2 $PPID; read line < '{gate}'")
        os._exit(0)
    sent.clear()
    assert os.waitpid(child, 0)[1] == 0
    # The thread has read what came before this.
    os.kill(os.getpid(), signal.SIGWINCH)
    with ckpipe.SyncPipeline(sys.argv[1] + ".other", **settings):
        assert not pipeline.preempted
    os.kill(os.getpid(), signal.SIGUSR2)
    assert pipeline.preempted
print("done")
"""


def test_a_forked_process_tells_its_parent_nothing(tmp_path: Path) -> None:
    done = forked(FORKED, tmp_path / "run")
    assert (done.code, done.out) == (0, "done\n"), done.err


def train_until_told(case: dict[str, Any]) -> None:
    """Train in step with the other ranks; rank 0 gets a signal while it waits for rank 1."""
    rank, root = dist.get_rank(), Path(case["root"])
    signals = ["SIGUSR2"] if rank == 0 else []
    preemption = {"enabled": True, "signals": signals, "grace_seconds": 600}
    note(f"{root}.pid", str(os.getpid()) if rank == 0 else "")
    with ckpipe.SyncPipeline(
        root, preemption=preemption, look_every_seconds=0.02, **SETTINGS
    ) as pipeline:
        for step in range(1, 10**6):
            if (rank, step) == (0, 5):
                note(f"{root}.inside", "")
            if (rank, step) == (1, 5):
                assert comes(lambda: bool(notes(Path(f"{root}.inside"))))
                (process,) = (int(line) for line in notes(Path(f"{root}.pid")) if line)
                os.kill(process, signal.SIGUSR2)
                assert comes(lambda: any(root.rglob("end.call"))), "rank 0 calls from its wait"
            dist.all_reduce(torch.ones(1))
            if pipeline.should_save(step):
                pipeline.save(private(rank, step), step=step)
                note(str(root), f'{{"rank": {rank}, "saved": {step}}}')
            if pipeline.preempted:
                return


def test_a_rank_calls_the_others_from_a_collective(world: Gang, root: Path) -> None:
    world.succeed("tests.preemption.test_signals_in_c_calls:train_until_told", root, 2)
    saved = told(root, "saved")
    assert len(saved[0]) == 1
    assert saved[0] == saved[1]
    with ckpipe.SyncPipeline(root, solo=True) as pipeline:
        assert [newest_of(pipeline).step] == saved[0]
