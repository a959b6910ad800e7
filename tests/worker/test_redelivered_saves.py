"""What a worker process had in hand when it died is delivered again, and commits."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.events import BlockUploaded, Event, FileLinked
from tests.support.actors import PATIENCE
from tests.support.gcs_servers import GcsServer
from tests.support.pipelines import loaded_state, same
from tests.support.s3_servers import S3Server
from tests.support.sampling import EVERY
from tests.support.settling import SettlingPipeline, settle
from tests.support.worker_runs import SETTINGS, state_of, worker_of
from tests.worker.test_environment import customize

BLOCK = 65536
PROCESS: dict[str, Any] = {"worker": "process"} | SETTINGS
BUCKET = "delivered-again"
BUCKETS = "from ckpipe_http.buckets import BucketBackend as store\n"

DIES = """
import os, signal
def die():
    for number in range({deaths}):
        try:
            os.mkdir({flag!r} + str(number))
        except FileExistsError:
            continue
        os.kill(os.getpid(), signal.{blow})
"""

AT_A_WRITE = """
from ckpipe_local.backend import LocalUpload as upload
write_all = upload.write_all
async def write_some_and_die(self, blocks):
    await write_all(self, blocks[:1])
    if "step-000000000002" in self._key:
        die()
    await write_all(self, blocks)
upload.write_all = write_some_and_die
"""

AT_THE_COMMIT = """
put = store.put
async def put_and_die(self, key, data, mode):
    commits = key.startswith("step-000000000002")
    if commits and {before}:
        die()
    await put(self, key, data, mode)
    if commits:
        die()
store.put = put_and_die
"""


@dataclass
class Deaths:
    """Has workers kill themselves at step 2.

    Args:
        folder: Where their interpreters find how.
        patch: What is undone at the end of the test.
    """

    folder: Path
    patch: pytest.MonkeyPatch
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def at(self, code: str, deaths: int = 1, blow: str = "SIGKILL") -> None:
        """Has so many workers that start from now on die somewhere."""
        flag = str(self.folder / f"died-{next(self._numbers)}-")
        customize(self.folder, self.patch, DIES.format(deaths=deaths, flag=flag, blow=blow) + code)

    def count(self) -> int:
        """How many have died."""
        return len(list(self.folder.glob("died-*")))


@pytest.fixture
def deaths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deaths:
    return Deaths(tmp_path, monkeypatch)


LOCAL = "from ckpipe_local import LocalBackend as store\n"
MOMENTS = {
    "in a write": AT_A_WRITE,
    "when the data file is there": LOCAL + AT_THE_COMMIT.format(before=True),
    "when it has committed": LOCAL + AT_THE_COMMIT.format(before=False),
}


AT_A_LINK = """
link = store.link
async def link_and_die(self, source, target):
    if {before}:
        die()
    await link(self, source, target)
    die()
store.link = link_and_die
"""


LINK_MOMENTS = {
    "before a link": AT_A_LINK.format(before=True),
    "after a link": AT_A_LINK.format(before=False),
    "when a full save has its files": AT_THE_COMMIT.format(before=True),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("moment", LINK_MOMENTS)
def test_an_incremental_save_whose_worker_died_is_complete(
    tmp_path: Path, deaths: Deaths, moment: str, resumed: bool
) -> None:
    def state(step: int) -> dict[str, Any]:
        return {"still": torch.arange(100_000.0), **state_of(step)}

    deaths.at(LOCAL + LINK_MOMENTS[moment])
    incremental = {"enabled": True, "full_every": 3 if "full" in moment else None}
    linked: dict[int, int] = {}
    with SettlingPipeline(tmp_path / "run", incremental=incremental, **PROCESS) as pipeline:

        def see(event: Event) -> None:
            if isinstance(event, FileLinked):
                linked[event.step] = int(event.source[5:17])

        def save(*steps: int) -> None:
            for step in steps:
                pipeline.save(state(step), step=step).wait(PATIENCE)
                settle(pipeline)

        pipeline.events.add(see)
        save(0, 1)
        if resumed:
            assert pipeline.load() is not None
        save(2)
        assert deaths.count() == 1
        # Only a worker that knows a checkpoint links; a file that is there is taken as it is.
        source = 2 if "full" in moment else 1
        assert linked == ({2: source} if resumed else {})
        save(3, 4, 5, 6)
        assert linked[6] == 5
        for info in pipeline.steps():
            pipeline.verify(info)
            assert same(loaded_state(pipeline, info), state(info.step))


def save_while_worker_is_stopped(
    pipeline: ckpipe.SyncPipeline, state: dict[str, Any], step: int
) -> None:
    """Save without using memory again that comes back while the save copies.

    Later saves of this size then have all their memory at once, and can be delivered again whole.
    """
    os.kill(worker_of(pipeline), signal.SIGSTOP)
    handle = pipeline.save(state, step=step)
    os.kill(worker_of(pipeline), signal.SIGCONT)
    handle.wait(PATIENCE)
    settle(pipeline)


def check(root: str | Path, state: dict[str, Any], **fields: Any) -> None:
    """Check that the newest checkpoints are complete, and the last holds a state."""
    with ckpipe.SyncPipeline(root, worker="thread", **fields) as pipeline:
        assert [info.step for info in pipeline.steps() if info.complete][-2:] == [1, 2]
        pipeline.verify(2)
        assert same(loaded_state(pipeline), state)


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_next_worker_commits_what_a_dead_one_had_in_hand(
    tmp_path: Path, deaths: Deaths, caplog: pytest.LogCaptureFixture, moment: str
) -> None:
    deaths.at(MOMENTS[moment])
    with SettlingPipeline(tmp_path / "run", **PROCESS) as pipeline:
        pipeline.save(state_of(1), step=1).wait(PATIENCE)
        worker = worker_of(pipeline)
        handle = pipeline.save(state_of(2), step=2)
        handle.wait(PATIENCE)
        assert deaths.count() == 1
        assert worker_of(pipeline) != worker
        settle(pipeline)
        assert handle.status == "committed"
        assert pipeline.statistics().budget_used == 0
    assert f"{handle.id} is delivered again" in caplog.text
    assert "exit code -9" in caplog.text
    check(tmp_path / "run", state_of(2))


def test_a_thread_commits_what_every_worker_dies_with(
    tmp_path: Path, deaths: Deaths, caplog: pytest.LogCaptureFixture
) -> None:
    deaths.at(AT_A_WRITE, deaths=9)
    with ckpipe.SyncPipeline(tmp_path / "run", **PROCESS) as pipeline:
        pipeline.save(state_of(1), step=1).wait(PATIENCE)
        pipeline.save(state_of(2), step=2).wait(PATIENCE)
    assert deaths.count() == 2
    assert "by a thread of this process" in caplog.text
    check(tmp_path / "run", state_of(2))


def test_what_crashes_every_worker_does_not_crash_the_trainer(
    tmp_path: Path, deaths: Deaths
) -> None:
    deaths.at(AT_A_WRITE, deaths=9, blow="SIGSEGV")
    with ckpipe.SyncPipeline(tmp_path / "run", **PROCESS) as pipeline:
        pipeline.save(state_of(1), step=1).wait(PATIENCE)
        handle = pipeline.save(state_of(2), step=2)
        with pytest.raises(errors.WorkerDied, match=f"exit code -{int(signal.SIGSEGV)}"):
            handle.wait(PATIENCE)
    assert deaths.count() == 2


@pytest.mark.sample(1)
@pytest.mark.parametrize(("scheme", "before"), list(itertools.product(["s3", "gs"], [True, False])))
def test_a_bucket_takes_what_a_dead_worker_has_stored_there(
    deaths: Deaths, request: pytest.FixtureRequest, tmp_path: Path, scheme: str, before: bool
) -> None:
    fixture = "moto_server" if scheme == "s3" else "gcs_server"
    server: S3Server | GcsServer = request.getfixturevalue(fixture)
    server.make_bucket(BUCKET)
    deaths.at(BUCKETS + AT_THE_COMMIT.format(before=before))
    options = {"endpoint_url": server.url} | ({} if scheme == "s3" else {"anonymous": True})
    fields: dict[str, Any] = {"backends": {scheme: options}, "staging": {"block_bytes": 5 << 20}}
    url = f"{scheme}://{BUCKET}/{tmp_path.name}"
    state = {"weight": torch.arange(11 << 18, dtype=torch.int32)}
    with SettlingPipeline(url, worker="process", **fields) as pipeline:
        pipeline.save(state_of(0), step=0).wait(PATIENCE)
        save_while_worker_is_stopped(pipeline, state, step=1)
        pipeline.save(state, step=2).wait(PATIENCE)
    assert deaths.count() == 1
    assert server.open_uploads(BUCKET) == []
    check(url, state, **fields)


def kill_worker(pipeline: ckpipe.SyncPipeline, step: int, after: int) -> None:
    """Kill the worker once, when so many bytes of a save are uploaded."""
    workers = [worker_of(pipeline)]

    def kill(event: Event) -> None:
        if isinstance(event, BlockUploaded) and event.step == step and event.bytes_done > after:
            while workers:
                os.kill(workers.pop(), signal.SIGKILL)

    pipeline.events.add(kill)


@pytest.mark.slow
@pytest.mark.skipif(not EVERY, reason="kills fifty workers; make test-all does")
def test_saves_commit_whenever_their_workers_are_killed(tmp_path: Path) -> None:
    state = {"weight": torch.rand(200 * BLOCK // 4)}
    with SettlingPipeline(tmp_path, keep_last=2, **PROCESS) as pipeline:
        pipeline.save(state_of(0), step=0).wait(PATIENCE)
        save_while_worker_is_stopped(pipeline, state, step=0)
        for step in range(1, 51):
            pipeline.save(state_of(0), step=step).wait(PATIENCE)  # by a worker, which is there then
            settle(pipeline)
            kill_worker(pipeline, step, after=(step - 1) * 4 * BLOCK)
            state["weight"] += 1
            pipeline.save(state, step=step).wait(PATIENCE)
            settle(pipeline)
            pipeline.verify(step)
            assert same(loaded_state(pipeline, step), state)


def test_a_save_whose_blocks_were_used_again_dies_with_its_worker(tmp_path: Path) -> None:
    staging = {"block_bytes": BLOCK, "bytes": 2 * BLOCK}
    large = {"weight": torch.rand(400 * BLOCK // 4)}
    with SettlingPipeline(tmp_path, worker="process", staging=staging) as pipeline:
        pipeline.save(state_of(1), step=1).wait(PATIENCE)
        settle(pipeline)
        worker = worker_of(pipeline)
        kill_worker(pipeline, 2, after=4 * BLOCK)
        with pytest.raises(errors.WorkerDied, match=r"exit code -9.*log ends with") as caught:
            pipeline.save(large, step=2).wait(PATIENCE)
        assert (caught.value.step, caught.value.rank) == (2, 0)
        pipeline.save(state_of(3), step=3).wait(PATIENCE)
        settle(pipeline)
        assert worker_of(pipeline) != worker
        assert [info.step for info in pipeline.steps()] == [1, 3]
        assert pipeline.statistics().budget_used == 0
