"""Stores on file systems that are not like ours: without hard links, or behind a network.

A library that is preloaded plays them, since tests may not mount: below one directory calls fail as
they do there, before or after they take effect.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.stores import other_file_system_runs
from tests.stores.racing_creators import check_race
from tests.support.sampling import EVERY, sample

HERE = Path(__file__).parent
ALL = 10**6
ENOTSUPP = 524

NO_LINKS = f"link 1 {ALL} {errno.EPERM} before"
NO_NOREPLACE = f"noreplace 1 {ALL} {errno.EINVAL} before"
SAVES = [1, 2, 3]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library to preload."""
    found = tmp_path_factory.mktemp("library") / "other_file_system.so"
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", "-o", str(found)]
    try:
        done = subprocess.run(
            [*compiler, *flags, str(HERE / "other_file_system.c"), "-ldl"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        pytest.skip(f"there is no C compiler: {error}")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return found


def preloading(library: Path, below: Path, rules: str = "") -> dict[str, str]:
    """The environment of a process for which rules hold below a directory."""
    # A sanitizer or another tool may have to come first.
    preload = " ".join(filter(None, (os.environ.get("LD_PRELOAD"), str(library))))
    return {
        **os.environ,
        "LD_PRELOAD": preload,
        "OTHER_FS_BELOW": str(below),
        "OTHER_FS_RULES": rules,
    }


@dataclass
class OtherFileSystem:
    """A process that uses stores below a directory where calls fail.

    Args:
        process: The process, which runs :mod:`other_file_system_runs`.
        below: The directory.
    """

    process: subprocess.Popen[str]
    below: Path
    number: int = 0

    def use(self, rules: str, *, there: bool = True) -> Outcome:
        """Save, prune, load and delete in a new store while rules hold.

        Args:
            rules: The rules.
            there: Whether the root of the store is there before.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.number += 1
        root = self.below / str(self.number)
        if there:
            root.mkdir()
        self.process.stdin.write(json.dumps({"root": str(root), "rules": rules}) + "\n")
        self.process.stdin.flush()
        return Outcome(rules, **json.loads(self.process.stdout.readline()))


@dataclass
class Outcome:
    """What became of the use of a store, whose checkpoints are whole and which goes on.

    Args:
        rules: The rules that held.
        struck: How many calls the first of them let fail.
        committed: The steps whose saves succeeded.
        errors: The errors that reached the program.
        warnings: What was logged as a warning.
        left: Temporary files that are left.
        opened: Files and directories that are left open.
        incomplete: Checkpoints that are listed as incomplete, and why.
    """

    rules: str
    struck: int
    committed: list[int]
    errors: list[str]
    warnings: list[str]
    left: list[str]
    opened: list[str]
    incomplete: list[str]

    def check_unnoticed(self) -> None:
        """Check that no call's failure has come to more than another try."""
        warnings = [each for each in self.warnings if "rying again in " not in each]
        assert [*self.errors, *warnings, *self.left, *self.opened, *self.incomplete] == []
        assert self.committed == SAVES, self.rules


@pytest.fixture(scope="module")
def other(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OtherFileSystem]:
    below = tmp_path_factory.mktemp("other")
    program = [sys.executable, other_file_system_runs.__file__]
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=preloading(library, below),
    ) as process:  # fmt: skip
        assert process.stdin is not None
        yield OtherFileSystem(process, below)
        process.stdin.close()
        assert process.wait() == 0


def each_call(
    other: OtherFileSystem, call: str, code: int, effect: str, *, besides: str = ""
) -> Iterator[Outcome]:
    """Let one call of a kind fail, each in turn, or some of them.

    Args:
        other: Where.
        call: The kind of call.
        code: Its error.
        effect: Whether the call takes effect before it fails.
        besides: Other rules that hold.
    """
    numbers = range(1, 10_000) if EVERY else [1, *sample(range(2, 20), 1)]
    for number in numbers:
        found = other.use(f"{call} {number} 1 {code} {effect}; {besides}")
        if number == 1:
            assert found.struck
        if EVERY and not found.struck:
            break
        yield found


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("call", "code", "besides"),
    [
        ("link", errno.EEXIST, ""),
        ("link", errno.EIO, ""),
        ("link", errno.ESTALE, ""),
        ("noreplace", errno.EEXIST, NO_LINKS),
        ("noreplace", errno.ENOENT, NO_LINKS),
        ("unlink", errno.ENOENT, ""),
        ("rmdir", errno.ENOENT, ""),
        ("mkdir", errno.EEXIST, ""),
    ],
)
def test_a_call_that_took_effect_and_says_otherwise_does_no_harm(
    other: OtherFileSystem, call: str, code: int, besides: str
) -> None:
    for found in each_call(other, call, code, "after", besides=besides):
        found.check_unnoticed()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "call",
    ["link", "unlink", "rmdir", "mkdir", "open", "write", "syncdir", "preallocate"],
)
def test_a_call_that_fails_for_a_moment_is_made_again(other: OtherFileSystem, call: str) -> None:
    for found in each_call(other, call, errno.ESTALE, "before"):
        if found.errors and "cannot be used: Stale file handle. Try again" in found.errors[0]:
            continue  # opening is not tried again
        found.check_unnoticed()


@pytest.mark.parametrize(
    ("call", "code"),
    [
        *(("link", code) for code in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, ENOTSUPP)),
        *(("preallocate", code) for code in (errno.EOPNOTSUPP, ENOTSUPP)),
        *(("syncdir", code) for code in (errno.EINVAL, ENOTSUPP)),
        *(("direct", code) for code in (errno.EINVAL, ENOTSUPP)),
    ],
)
def test_a_call_that_the_file_system_lacks_is_made_up_for(
    other: OtherFileSystem, call: str, code: int
) -> None:
    found = other.use(f"{call} 1 {ALL} {code} before")
    assert found.struck
    found.check_unnoticed()


@pytest.mark.sample(2)
@pytest.mark.parametrize("call", ["link", "sync", "write", "preallocate", "mkdir", "create"])
def test_a_quota_that_ends_anywhere_fails_one_save(other: OtherFileSystem, call: str) -> None:
    for found in each_call(other, call, errno.EDQUOT, "before"):
        assert len(found.errors) <= 1
        assert all(each.startswith("StoreFull: ") for each in found.errors)
        assert found.left == []


def test_a_sync_that_fails_for_a_moment_fails_no_more_than_one_save(
    other: OtherFileSystem,
) -> None:
    for found in each_call(other, "sync", errno.ESTALE, "before"):
        if found.errors:  # of a large file: it cannot be written again
            assert len(found.errors) == 1
            assert ".safetensors durable: Stale file handle" in found.errors[0]
            assert "Written data may be lost: check the file system" in found.errors[0]
            assert found.left == []
        else:
            found.check_unnoticed()


@pytest.mark.sample(2)
@pytest.mark.parametrize("code", [errno.EIO, errno.EDQUOT, errno.EINTR])
@pytest.mark.parametrize("call", ["close", "closedir"])
def test_a_close_that_fails_leaves_nothing_open(
    other: OtherFileSystem, call: str, code: int
) -> None:
    for found in each_call(other, call, code, "after"):
        assert found.opened == [], found.rules
        assert len(found.errors) <= 1
        if call == "closedir":
            found.check_unnoticed()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, ENOTSUPP])
def test_a_file_system_that_makes_nothing_durable_is_refused(
    other: OtherFileSystem, code: int
) -> None:
    found = other.use(f"sync 1 {ALL} {code} before")
    assert found.errors
    for error in found.errors:
        assert error.startswith("StoreError: ")
        assert "makes no file durable (fsync: " in error
        assert "Name a directory of another file system" in error
    assert found.left == []


def test_names_of_files_that_are_deleted_while_open_are_passed_over(
    other: OtherFileSystem,
) -> None:
    found = other.use(f"unlink 1 {ALL} 0 hidden")
    assert found.struck
    found.check_unnoticed()


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, ENOTSUPP])
def test_a_store_that_can_only_replace_is_refused_at_opening(
    other: OtherFileSystem, code: int, there: bool
) -> None:
    found = other.use(f"link 1 {ALL} {code} before; {NO_NOREPLACE}", there=there)
    [error] = found.errors
    assert "cannot be used: the file system has neither hard links" in error
    assert "RENAME_NOREPLACE (renameat2: Invalid argument)" in error
    assert "Name a directory of another file system" in error
    assert found.left == []


def test_a_store_without_hard_links_keeps_the_contract(library: Path, tmp_path: Path) -> None:
    environment = preloading(library, tmp_path, NO_LINKS)
    (tmp_path / "file").touch()
    link = [sys.executable, "-c", "import os, sys; os.link(*sys.argv[1:])"]
    linked = ended([*link, str(tmp_path / "file"), str(tmp_path / "other")], environment)
    assert "Operation not permitted" in linked.stderr
    tests = [
        f"{HERE / 'test_conformance.py'}::TestLocalDirect",
        f"{HERE / 'test_local.py'}::test_keys_that_clash_with_directories",
    ]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={tmp_path}/base"]
    done = ended([sys.executable, "-m", "pytest", *options, *tests], environment)
    assert done.returncode == 0, done.stdout


def ended(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "rules",
    [
        NO_LINKS,
        f"link 1 {ALL} {errno.EEXIST} after",
        f"{NO_LINKS}; noreplace 1 {ALL} {errno.EEXIST} after",
    ],
)
def test_one_of_racing_processes_wins(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rules: str
) -> None:
    for name, value in preloading(library, tmp_path, rules).items():
        monkeypatch.setenv(name, value)
    check_race(multiprocessing.get_context("spawn"), tmp_path)
