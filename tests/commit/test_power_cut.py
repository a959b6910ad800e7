"""The power fails during a save, on a real file system: what was committed is there afterwards.

An ext4 image is mounted through a loop device and shut down without writing its journal out, so
that all that was not made durable is lost. Mounting it again is what happens after a power cut.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import random
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.backend import PutMode
from ckpipe.testing import FaultyBackend, Landing
from ckpipe.testing.wrappers import Operation
from ckpipe_local import LocalBackend
from tests.support.pipelines import checked_whole
from tests.support.sampling import EVERY, SEED

SAMPLE = 6

SHUT_DOWN = 0x8004587D
"""The request FS_IOC_SHUTDOWN, ``_IOR('X', 125, __u32)`` in the kernel's headers."""

WITHOUT_FLUSH = struct.pack("I", 2)
"""Its flag NOLOGFLUSH: neither data nor the journal is written out before."""

SETTINGS: dict[str, Any] = {"staging": {"block_bytes": 65536}, "upload": {"retries": 0}}


_numbers = itertools.count()


class Disk:
    """A small disk whose power can be cut.

    Args:
        where: A directory for the image and the mount point.
    """

    def __init__(self, where: Path) -> None:
        self._image, self._mount = where / "image", where / "mount"
        self.root = self._mount / "run"
        self._mount.mkdir()

    def format(self) -> None:
        """Make an empty file system and mount it."""
        with self._image.open("wb") as image:
            image.truncate(64 << 20)
        _run("mkfs.ext4", "-q", "-F", str(self._image))
        self.switch_on()

    def switch_on(self) -> None:
        """Mount the disk, which recovers it."""
        _run("mount", "-o", "loop", str(self._image), str(self._mount))

    def cut(self, *_: object) -> None:
        """Cut the power, also from an event loop: whatever was not made durable is lost."""
        with ThreadPoolExecutor() as threads:
            threads.submit(self._cut).result()

    def _cut(self) -> None:
        directory = os.open(self._mount, os.O_RDONLY)
        try:
            fcntl.ioctl(directory, SHUT_DOWN, WITHOUT_FLUSH)
        finally:
            os.close(directory)

    def unmount(self) -> None:
        """Take the disk away, switched off or not."""
        _run("umount", str(self._mount))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A formatted disk; skips the test where no disk can be made or switched off."""
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4") or not shutil.which("mount"):
        pytest.skip("cutting the power needs root, mkfs.ext4 and mount")
    made = Disk(tmp_path)
    try:
        made.format()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"a disk image cannot be mounted here: {error.stderr.strip()}")
    try:
        made.cut()
    except OSError as error:
        made.unmount()
        if error.errno not in (errno.ENOTTY, errno.EOPNOTSUPP, errno.EPERM):
            raise
        pytest.skip(f"this file system cannot be shut down: {error}")
    made.unmount()
    made.format()
    yield made
    made.unmount()


def content(step: int) -> dict[str, Any]:
    return {"weight": torch.full((50_000,), float(step)), "step": step}


def save_until_dark(
    disk: Disk, steps: int, prepare: Callable[[FaultyBackend], object]
) -> list[int]:
    """Save until the power fails or all is saved; return the steps reported committed."""
    faulty = FaultyBackend(LocalBackend(str(disk.root)))
    prepare(faulty)
    scheme = f"dark{next(_numbers)}"
    ckpipe.register_backend(scheme, lambda url: faulty)
    committed = []
    with (
        contextlib.suppress(errors.StoreError),
        ckpipe.SyncPipeline(f"{scheme}://", **SETTINGS) as run,
    ):
        for step in range(steps):
            run.save(content(step), step=step).wait()
            committed.append(step)
    return committed


def check_after_power_returns(disk: Disk, committed: list[int]) -> list[int]:
    """Check all that is left; return the steps that are complete."""
    disk.unmount()
    disk.switch_on()
    with ckpipe.SyncPipeline(disk.root, **SETTINGS) as pipeline:
        complete = checked_whole(pipeline, content)
        steps = [info.step for info in complete]
        assert set(committed) <= set(steps)
        pipeline.save(content(99), step=99).wait()
        pipeline.verify(99)
    return steps


def test_power_cut_right_after_a_commit(disk: Disk) -> None:
    committed = []
    with contextlib.suppress(errors.StoreError), ckpipe.SyncPipeline(disk.root) as pipeline:
        for step in range(3):
            pipeline.save(content(step), step=step).wait()
            committed.append(step)
        disk.cut()
    assert check_after_power_returns(disk, committed) == [0, 1, 2]


def is_index_of_step_1(operation: Operation) -> bool:
    return operation.verb == "put" and operation.key.startswith("step-000000000001")


def test_power_cut_between_data_and_index(disk: Disk) -> None:
    committed = save_until_dark(disk, 3, lambda store: store.call(disk.cut, is_index_of_step_1))
    assert committed == [0]
    assert check_after_power_returns(disk, committed) == [0]


def test_power_cut_once_the_index_is_written(disk: Disk) -> None:
    committed = save_until_dark(
        disk, 3, lambda store: store.call(disk.cut, is_index_of_step_1, Landing.AFTER)
    )
    assert check_after_power_returns(disk, committed) == [0, 1]


@pytest.mark.parametrize("seed", [SEED], ids=lambda seed: f"seed={seed}")
def test_power_cut_at_any_operation(disk: Disk, seed: int) -> None:
    counted: list[FaultyBackend] = []
    save_until_dark(disk, 2, counted.append)
    numbers = range(1, len(counted[0].operations) + 1)
    for number in numbers if EVERY else random.Random(seed).sample(numbers, SAMPLE):
        for landing in Landing:
            disk.unmount()
            disk.format()

            def prepare(store: FaultyBackend, at: int = number, landing: Landing = landing) -> None:
                store.call(disk.cut, at, landing)

            committed = save_until_dark(disk, 2, prepare)
            check_after_power_returns(disk, committed)


async def test_power_cut_beside_volatile_objects(disk: Disk) -> None:
    with contextlib.suppress(errors.StoreError):
        async with LocalBackend(str(disk.root)) as other, LocalBackend(str(disk.root)) as backend:
            await other.put("a/known", b"{}", PutMode.CREATE)
            await backend.delete(["a/known"])
            await backend.put_volatile("a/b/c/volatile", b"{}")
            await other.put("a/b/c/lasts", b"{}", PutMode.CREATE)
            await other.put("a/lasts", b"{}", PutMode.CREATE)
            disk.cut()
    disk.unmount()
    disk.switch_on()
    async with LocalBackend(str(disk.root)) as backend:
        found = {info.key for info in [info async for info in backend.list()]}
        assert {"a/b/c/lasts", "a/lasts"} <= found <= {"a/b/c/lasts", "a/lasts", "a/b/c/volatile"}


def test_the_cut_loses_what_was_not_made_durable(disk: Disk) -> None:
    (disk.root).mkdir()
    (disk.root / "lost").write_bytes(b"x" * 100_000)
    disk.cut()
    disk.unmount()
    disk.switch_on()
    found = disk.root / "lost"
    assert not found.exists() or found.read_bytes() != b"x" * 100_000
