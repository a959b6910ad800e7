"""A night in fast motion: everything fails or is killed again and again, and nothing is lost.

A training run is started over and over on a store that fails now and then. Its trainer and its
workers are killed or stopped at drawn moments, and its disk is full at times. Whatever ckpipe has
reported complete is there after each of its lives, or something newer is, to the last bit.
"""

from __future__ import annotations

import os
import random
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import ckpipe
from ckpipe.types import CheckpointId, CheckpointInfo
from tests.failure import chaos_runs
from tests.failure.chaos_runs import Ledger, digest, install
from tests.support.fork_server import Forks, forks
from tests.support.pipelines import load_existing
from tests.support.sampling import EVERY

SAVES = 200 if EVERY else 12
DAYS = 2 * 86_400

KILLS = ("kill at an operation", "kill at a moment", "kill when staged")
OF_WORKERS = ("kill the worker", "stop the worker", "kill the worker at an operation")
PASSING = ("none", "full disk", "kill the worker", "stop the worker")
"""What is over before the last save of a life, which must come through."""
TROUBLES = (*PASSING, *KILLS, "kill the worker at an operation", "errors")


@pytest.fixture
def night(tmp_path: Path) -> Iterator[Forks]:
    install(tmp_path / "path")
    with forks(chaos_runs.__file__, tmp_path / "path") as made:
        yield made


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A directory on a small disk of its own, where there are the rights to make one."""
    made = tmp_path / "root"
    made.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", str(made)]
    mounted = (
        os.geteuid() == 0
        and shutil.which("mount") is not None
        and not subprocess.run(command, capture_output=True, check=False).returncode
    )
    yield made
    if mounted:
        subprocess.run(["umount", str(made)], check=True)


class Night:
    """What is known of a run, and of what must be on its store.

    Args:
        folder: Where its ledger and logs lie.
        root: Its store.
        chance: What troubles are drawn from.
    """

    def __init__(self, folder: Path, root: Path, chance: random.Random) -> None:
        self.root, self.logs, self._chance = root, folder / "logs", chance
        self.ledger = Ledger(folder / "ledger")
        self.lives = 0
        self.newest = "nothing"
        self.digests: dict[str, str] = {}
        self._troubles: list[str] = []

    def draw(self) -> dict[str, Any]:
        """The next life, each trouble as often as any other."""
        if not self._troubles:
            self._troubles = self._chance.sample(TROUBLES, len(TROUBLES))
        return self.life(self._troubles.pop())

    def life(self, trouble: str) -> dict[str, Any]:
        """A life with one trouble."""
        chance, self.lives = self._chance, self.lives + 1
        saves = chance.randint(2, 4)
        process = trouble in OF_WORKERS or chance.random() < 0.25
        most = 12 * saves if trouble in OF_WORKERS else 12 + 20 * saves
        dying = chance.randint(1, most) if trouble.endswith("operation") else 0
        begin = chance.randint(0, 30)
        return {
            "life": self.lives,
            "seed": chance.randrange(2**32),
            "root": str(self.root),
            "ledger": str(self.ledger.path),
            "logs": str(self.logs),
            "saves": saves,
            "rollback": chance.randrange(1, saves) if chance.random() < 0.25 else -1,
            "trouble": trouble,
            "at": chance.randrange(saves - 1),
            "seconds": chance.uniform(0, 0.03),
            # A full disk, or one that takes no more of a file: on one that cannot be filled always.
            "limit": 200_000 if chance.random() < 0.5 or not self.root.is_mount() else None,
            "leave": chance.choice([0, 20_000, 100_000, 300_000]),
            "worker": {
                "mode": "process" if process else "thread",
                "stop_seconds": 3,
            },
            "store": {
                "seed": chance.randrange(2**32),
                "failing": [begin, begin + 100] if trouble == "errors" else [0, 0],
                "often": 0.2,
                "lasting": 0.05,
                "dying": dying,
                "worker": trouble in OF_WORKERS,
            },
        }

    # The morning after

    def look(self, case: dict[str, Any], code: int | None) -> None:
        """Compare the store with the ledger, once all of a life is over."""
        assert code == 0 or (code is None and case["trouble"] in KILLS), case
        await_end(self.logs)
        self._check_resumed()
        complete = self._check_complete()
        reported = [CheckpointId.parse(words[0]) for words in self.ledger.lines("complete")]
        newest = max((id for id in reported if id is not None), default=None)
        marks = {each.name for each in self.root.glob(".ckpipe/deleted/*")}
        here = marks | {info.id for info in complete}
        assert {str(id) for id in reported} <= here, "what was complete is gone, and nobody pruned"
        if newest is not None:
            assert complete, "what was complete is gone"
            assert complete[-1].key >= newest, "the newest that was reported is gone"
        self.newest = complete[-1].id if complete else "nothing"
        if case["trouble"] in PASSING:
            self._check_last_save(case, complete)

    def _check_complete(self) -> list[CheckpointInfo]:
        saved = {words[2] for words in self.ledger.lines("saving")}
        told = {words[0]: words[1] for words in self.ledger.lines("complete") if words[1:]}
        with ckpipe.SyncPipeline(self.root, read_only=True) as pipeline:
            complete = [info for info in pipeline.steps() if info.complete]
            for info in complete:
                if info.id in self.digests and info is not complete[-1]:
                    continue
                result = load_existing(pipeline, step=info)
                found = digest(result.state)
                assert found == result.metadata["digest"]
                assert found in saved
                assert told.get(info.id, found) == found
                self.digests[info.id] = found
            newest = pipeline.load()
            assert (newest.id if newest else None) == (complete[-1].id if complete else None)
        return complete

    def _check_resumed(self) -> None:
        """A life begins with the newest that was there before, or has seen nothing."""
        lines = [words for words in self.ledger.lines("resumed") if words[0] == str(self.lives)]
        for number, (_, id, found) in enumerate(lines):
            assert number or id == self.newest
            assert id == "nothing" or self.digests.get(id, found) == found

    def _check_last_save(self, case: dict[str, Any], complete: list[CheckpointInfo]) -> None:
        life = str(case["life"])
        assert [life] in self.ledger.lines("through"), "it could not go on"
        failed = [words for words in self.ledger.lines("failed") if words[0] == life]
        assert case["trouble"] != "none" or not failed
        last = [words[2] for words in self.ledger.lines("saving") if words[0] == life][-1]
        assert self.digests[complete[-1].id] == last, "also after going back to an older one"


def workers_of(logs: Path) -> list[int]:
    """The worker processes that write their logs to a folder."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(each / "fd" / "1").startswith(f"{logs}/"):
                found.append(int(each.name))
    return found


def await_end(logs: Path, seconds: float = 300) -> None:
    """Wait until all workers have ended, as each does soon after its trainer."""
    until = time.monotonic() + seconds
    for worker in workers_of(logs):
        with suppress(ProcessLookupError):
            watched = os.pidfd_open(worker)
            try:
                poll = select.poll()
                poll.register(watched, select.POLLIN)
                assert poll.poll(max(0, until - time.monotonic()) * 1000), "a worker is left"
            finally:
                os.close(watched)


def age(root: Path) -> None:
    """Make all files older than any lease and any threshold."""
    then = time.time() - DAYS
    for each in root.rglob("*"):
        if each.is_file():
            os.utime(each, (then, then))


def left_over(root: Path, kept: list[str]) -> list[str]:
    """Files that belong neither to a kept checkpoint nor to the claims of launches."""
    files = [str(each.relative_to(root)) for each in root.rglob("*") if each.is_file()]
    forms = ("{}/", "{}.json", ".ckpipe/digests/{}.")
    ours = (".ckpipe/attempts/", *(form.format(id) for form in forms for id in kept))
    return [name for name in files if not name.startswith(ours)]


@pytest.mark.timeout(900)
def test_a_night_in_fast_motion(
    night: Forks, chance: random.Random, root: Path, tmp_path: Path
) -> None:
    (root / "notes.txt").write_text("not ckpipe's")
    run = Night(tmp_path, root, chance)
    while len(run.ledger.lines("saving")) < SAVES:
        case = run.draw()
        run.look(case, night.run(case))
    case = run.life("none")
    run.look(case, night.run(case))
    assert workers_of(run.logs) == []
    for _ in range(2):  # marks of the deletions of the first time go the next time
        age(root)
        # Each by a launch of its own, whose claim is younger than all that is left.
        with ckpipe.SyncPipeline(root, retention={"sweep_after_seconds": 3600}) as pipeline:
            pipeline.sweep()
    with ckpipe.SyncPipeline(root) as pipeline:
        kept = [info.id for info in pipeline.steps()]
        for id in kept:
            pipeline.verify(id)
        result = load_existing(pipeline)
        assert result.id == run.newest
        assert digest(result.state) == run.digests[run.newest]
    assert left_over(root, kept) == ["notes.txt"]
