"""The worker process beside a trainer that lives: the same results, and every way it can die."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.events import Event
from ckpipe_local import LocalBackend
from tests.support.actors import PATIENCE, DaemonThreads
from tests.support.command_line import forked, script
from tests.support.pipelines import loaded_state, same, small_state, stores
from tests.support.sampling import EVERY
from tests.support.settling import SettlingPipeline, settle
from tests.support.worker_runs import SETTINGS, find_worker, state_of, worker_of
from tests.worker.test_environment import customize, kill_worker

PROCESS: dict[str, Any] = {"worker": "process"} | SETTINGS


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ckpipe.SyncPipeline]:
    """A pipeline with a worker process, whose worker the tests may kill."""
    root = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERY_SECRET", "hush-1")
        options = {"file": {"direct": True}}
        worker = {"mode": "process", "log_dir": str(tmp_path_factory.mktemp("logs"))}
        with SettlingPipeline(root, backends=options, worker=worker, **SETTINGS) as opened:
            yield opened


def recorded(root: Path, worker: str) -> tuple[list[Event], ckpipe.SaveReport]:
    """What some saves tell, and the report of the last."""
    heard: list[Event] = []
    fields: dict[str, Any] = {"attempt_id": "run", "keep_last": 1, "worker": worker} | SETTINGS
    with SettlingPipeline(root, **fields) as opened:
        opened.events.add(heard.append)
        for step in (1, 2):
            handle = opened.save(
                small_state(step), step=step, metrics={"loss": float("nan")}, metadata={"a": [step]}
            )
            handle.wait()
            settle(opened)  # else what a save prunes depends on how far the next one is
        settled = opened.save(small_state(), step=3)
    result = settled.report
    assert settled.status == "committed"
    with SettlingPipeline(root) as opened:
        assert same(loaded_state(opened), small_state())
    return heard, result


def shape_of(event: Event) -> tuple[Any, ...]:
    """An event without what differs from run to run."""
    kept = ("step", "rank", "bytes_done", "bytes_total", "reason", "error")
    return type(event).__name__, *(getattr(event, name) for name in kept if hasattr(event, name))


def test_events_reports_and_bits_are_those_of_a_thread(tmp_path: Path) -> None:
    here, report = recorded(tmp_path / "thread", "thread")
    there, other = recorded(tmp_path / "process", "process")
    assert sorted(map(shape_of, there)) == sorted(map(shape_of, here))
    assert other.stages.keys() == report.stages.keys()
    assert {name: stage.bytes for name, stage in other.stages.items()} == {
        name: stage.bytes for name, stage in report.stages.items()
    }
    assert (other.bytes, other.tensors) == (report.bytes, report.tensors)
    assert other.durable_seconds is not None
    assert other.staged_seconds is not None
    assert other.durable_seconds > 0
    files = [
        sorted(path.read_bytes() for path in (tmp_path / each).glob("step-*/*.safetensors"))
        for each in ("thread", "process")
    ]
    assert files[0] == files[1] != []


def conflict(opened: ckpipe.SyncPipeline) -> errors.CkpipeError:
    """What a save fails with whose place somebody else has taken."""
    root = Path(opened.settings.url or "")
    before = opened.save(small_state(), step=6).wait().id
    index = root / f"{before.replace(f'{6:012d}', f'{7:012d}')}.json"
    index.write_text("somebody else's")
    handle = opened.save(small_state(), step=7)
    with pytest.raises(errors.CommitUnknown, match="The commit may have landed or not") as caught:
        handle.wait()
    assert caught.value.key == index.name
    assert handle.status == "failed"
    index.unlink()
    return caught.value


def test_errors_are_those_of_a_thread(pipeline: ckpipe.SyncPipeline, tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path, worker="thread", **SETTINGS) as opened:
        here = conflict(opened)
    there = conflict(pipeline)
    assert (there.step, there.rank, there.hint) == (here.step, here.rank, here.hint) != (None,) * 3
    assert type(there.__cause__) is type(here.__cause__) is errors.ObjectExists


UNSPEAKABLE = """
from ckpipe.errors import StoreError
from ckpipe_local import LocalBackend
class Mute(str):
    def __str__(self):
        raise RuntimeError("no words")
put = LocalBackend.put
async def put_or_fail(self, key, data, mode):
    if key.startswith("step-000000000002"):
        error = StoreError("The disk burns")
        error.note = Mute("smoke")
        raise error
    await put(self, key, data, mode)
LocalBackend.put = put_or_fail
"""


def test_an_error_that_cannot_be_sent_is_told_by_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    customize(tmp_path, monkeypatch, UNSPEAKABLE)
    with ckpipe.SyncPipeline(tmp_path / "run", **PROCESS) as pipeline:
        pipeline.save(state_of(1), step=1).wait()
        worker = worker_of(pipeline)
        with pytest.raises(Exception, match="StoreError: The disk burns"):
            pipeline.save(state_of(2), step=2).wait()
        pipeline.save(state_of(3), step=3).wait()
        assert worker_of(pipeline) == worker


def test_a_worker_is_small_and_knows_no_secret(pipeline: ckpipe.SyncPipeline) -> None:
    pipeline.save({"weight": torch.randn(1 << 22)}).wait()
    process = psutil.Process(worker_of(pipeline))
    assert process.cmdline()[-3:-1] == ["-m", "ckpipe.worker"]
    assert "hush-1" not in Path(f"/proc/{process.pid}/environ").read_text()
    status = Path(f"/proc/{process.pid}/status").read_text()
    pages = dict(line.split()[:2] for line in status.splitlines() if line.startswith("Rss"))
    assert int(pages["RssAnon:"]) + int(pages["RssFile:"]) < 150 * 1024
    assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    assert os.getsid(process.pid) == process.pid


def test_a_worker_gives_way_to_training(pipeline: ckpipe.SyncPipeline) -> None:
    pipeline.save(state_of(1)).wait()
    worker = worker_of(pipeline)
    for thread in map(int, os.listdir(f"/proc/{worker}/task")):
        wanted = min(19, os.getpriority(os.PRIO_PROCESS, os.getpid()) + 10)
        assert os.getpriority(os.PRIO_PROCESS, thread) == wanted
        assert os.sched_getscheduler(thread) == os.SCHED_BATCH


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="sessions are not grouped")
def test_a_whole_session_gives_way() -> None:
    code = (
        "from ckpipe.worker.server import step_back_together as go\n"
        "assert go(7)\nprint(open('/proc/self/autogroup').read())"
    )
    done = script(code, start_new_session=True)
    assert done.out.split()[-2:] == ["nice", "7"]


def test_a_worker_that_dies_after_a_commit_costs_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with SettlingPipeline(tmp_path, keep_last=1, **PROCESS) as opened:
        for step in range(30):  # now and then the worker is through before it is killed
            opened.save(state_of(step), step=step).wait()
            settle(opened)
            worker = worker_of(opened)

            def kill(_: object, worker: int = worker) -> None:
                os.kill(worker, signal.SIGKILL)

            handle = opened.save(state_of(step), step=step)
            handle._save.committed.add_done_callback(kill)
            handle.wait()
            settle(opened)
            psutil.wait_procs([psutil.Process(worker)] if psutil.pid_exists(worker) else [], 30)
            if "was committed before its worker died" in caplog.text:
                break
        else:
            pytest.fail("the worker was never killed in time")
        opened.save(state_of(40), step=40).wait()
        settle(opened)
        assert [info.step for info in opened.steps()] == [40]
        assert opened.statistics().budget_used == 0


def test_a_cancelled_save_gives_its_memory_back(tmp_path: Path, threads: DaemonThreads) -> None:
    with SettlingPipeline(tmp_path, **PROCESS) as pipeline:
        pipeline.save(state_of(1)).wait()
        settle(pipeline)
        worker = worker_of(pipeline)
        os.kill(worker, signal.SIGSTOP)
        handle = pipeline.save(state_of(2))

        def go_on_once_it_is_cancelled() -> None:
            while not handle._save.cancel_requested:
                threading.Event().wait(0.001)
            os.kill(worker, signal.SIGCONT)

        going_on = threads.submit(go_on_once_it_is_cancelled)
        handle.cancel()
        going_on.result(PATIENCE)
        with pytest.raises(errors.SaveCancelled):
            handle.wait()
        settle(pipeline)
        assert pipeline.statistics().budget_used == 0
        pipeline.save(state_of(3)).wait()
        assert worker_of(pipeline) == worker


class Inherited(torch.utils.data.Dataset[tuple[bool, bool]]):
    """Whether a worker of a DataLoader has a trainer's sockets, and its staging memory."""

    def __init__(self, sockets: set[str]) -> None:
        self.sockets = sockets

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[bool, bool]:
        links = []
        for each in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # another thread may just have closed it
                links.append(os.readlink(each))
        maps = Path("/proc/self/maps").read_text()
        return not self.sockets.isdisjoint(links), "memfd:ckpipe" in f"{maps}{links}"


def sockets_of_this_process() -> set[str]:
    """The sockets that this process has open."""
    links = set()
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.add(os.readlink(each))
    return {each for each in links if each.startswith("socket:")}


@pytest.mark.parametrize("how", ["fork", "spawn"] if EVERY else ["fork"])
@pytest.mark.filterwarnings("default:.*use of fork:DeprecationWarning")
def test_workers_of_a_loader_do_not_disturb_it(pipeline: ckpipe.SyncPipeline, how: str) -> None:
    pipeline.save(state_of(1)).wait()
    settle(pipeline)
    before = sockets_of_this_process()
    kill_worker(pipeline)
    for _ in range(2):  # if its death is noticed late, the first of them still meets it
        pipeline.save(state_of(1)).wait()
    worker = worker_of(pipeline)
    asked = Inherited(sockets_of_this_process() - before)
    assert len(asked.sockets) == 1
    assert asked[0] == (True, True)
    loader = torch.utils.data.DataLoader(asked, num_workers=1, multiprocessing_context=how)
    saves = []
    for socket, memory in loader:
        assert (socket.item(), memory.item()) == (False, False)
        saves.append(pipeline.save(state_of(2)))
    for each in saves:
        each.wait()
    assert worker_of(pipeline) == worker


def test_what_cannot_cross_is_said_at_open_or_stays_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = ckpipe.KeepIf(lambda each: True)
    with (
        pytest.raises(errors.SettingsError, match="Python function"),
        ckpipe.SyncPipeline(tmp_path, retention=rule, worker="process"),
    ):
        pass
    with (
        stores() as store,
        pytest.raises(errors.SettingsError, match="registered in this process"),
        ckpipe.SyncPipeline(store.url, worker="process"),
    ):
        pass
    monkeypatch.setattr(LocalBackend, "prefers_worker", True)
    with ckpipe.SyncPipeline(tmp_path, retention=rule) as opened:
        opened.save(state_of(1)).wait()
        assert find_worker(opened) is None
    with ckpipe.SyncPipeline(tmp_path) as opened:
        opened.save(state_of(1)).wait()
        assert find_worker(opened) is not None


def test_a_worker_that_cannot_start_says_why_and_a_thread_saves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    fields: dict[str, Any] = {"worker": {"mode": "process", "log_dir": str(tmp_path / "file")}}
    with ckpipe.SyncPipeline(tmp_path / "run", **fields) as opened:
        opened.save(state_of(1), until="committed")
    assert re.search(r"by a thread of this process.*could be started", caplog.text)


@pytest.mark.sample(1)
@pytest.mark.parametrize("spare", [None, 1 << 20])
def test_a_worker_without_memory_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spare: int | None
) -> None:
    with SettlingPipeline(tmp_path, **PROCESS) as opened:
        # Without tensors no block is there yet that the worker could bring before it dies, and
        # whose bytes would then be lost to the one that follows it.
        opened.save({"step": 1}, step=1).wait()
        settle(opened)
        worker = psutil.Process(worker_of(opened))
        # Either nothing more is to be had, or too little to map what the next save lies in.
        limit = 1 if spare is None else worker.memory_info().vms + spare
        resource.prlimit(worker.pid, resource.RLIMIT_AS, (limit, limit))
        opened.save({"large": torch.empty(20_000_000)}, step=2).wait(timeout=60)
        assert re.search(r"MemoryError|it failed.*allocate memory", caplog.text)
        opened.save(state_of(3), step=3).wait()
        assert [info.step for info in opened.steps()] == [1, 2, 3]


def test_a_worker_needs_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.syspath_prepend("")
    gone.rmdir()
    with ckpipe.SyncPipeline(tmp_path / "run", **PROCESS) as opened:
        opened.save(state_of(1), step=1).wait()


NO_THREADS = """
import os, resource, sys, ckpipe.running.pipeline
if os.getuid() == 0:
    os.setuid(65534)  # the limit does not count for root
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
try:
    with ckpipe.SyncPipeline(sys.argv[1]):
        pass
except ckpipe.CkpipeError as error:
    print(error)
"""


def test_a_limit_on_threads_is_named(tmp_path: Path) -> None:
    done = forked(NO_THREADS, tmp_path)
    assert "ulimit -u" in done.out, done.err


def test_a_limit_on_file_sizes_is_named_where_it_keeps_memory_from_being_shared(
    tmp_path: Path,
) -> None:
    code = """if True:
        import resource, sys, ckpipe, torch
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        with ckpipe.SyncPipeline(sys.argv[1], worker="process") as pipeline:
            try:
                pipeline.save({"w": torch.ones(1 << 20)}, step=0)
            except ckpipe.errors.SaveError as error:
                print(error)
    """
    run = forked(code, tmp_path)
    assert run.code == 0, run.err
    assert "no memory" in run.out
    assert "ulimit -f" in run.out


def test_hooks_run_in_the_trainer(pipeline: ckpipe.SyncPipeline) -> None:
    called: queue.SimpleQueue[int] = queue.SimpleQueue()
    pipeline.on_complete(lambda event: called.put(os.getpid()))
    pipeline.save(state_of(1)).wait()
    assert called.get(timeout=PATIENCE) == os.getpid()
