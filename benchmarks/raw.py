"""The limits of the machine, for comparison with ckpipe."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

MIB = 1 << 20


def seconds(function: Callable[[], object]) -> float:
    """Measure the seconds of a call."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def touched(nbytes: int) -> mmap.mmap:
    """Make host memory with huge pages advised, and write to it."""
    size = -(-nbytes // (2 * MIB)) * 2 * MIB
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    torch.frombuffer(memory, dtype=torch.uint8).random_(0, 255)
    return memory


def _in_lanes(lanes: int, pieces: range, work: Callable[[int], object]) -> None:
    with ThreadPoolExecutor(lanes) as pool:
        list(pool.map(work, pieces))


def write(path: Path, memory: mmap.mmap, nbytes: int, lanes: int, block: int) -> float:
    """Measure an O_DIRECT write and fsync into a preallocated file, which stays, in seconds."""
    file = preallocated(path, nbytes)
    try:
        return seconds(lambda: write_into(file, memory, nbytes, lanes, block))
    finally:
        os.close(file)


def preallocated(path: Path, nbytes: int) -> int:
    """Open an empty preallocated file for writes past the page cache."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o644)
    os.posix_fallocate(file, 0, _whole_pages(nbytes))
    return file


def write_into(file: int, memory: mmap.mmap, nbytes: int, lanes: int, block: int) -> None:
    """Write and sync a preallocated file."""
    view, whole = memoryview(memory), _whole_pages(nbytes)

    def lane(at: int) -> None:
        os.pwrite(file, view[at : min(at + block, whole)], at)

    _in_lanes(lanes, range(0, whole, block), lane)
    os.fsync(file)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


def read(path: Path, memory: mmap.mmap, lanes: int, block: int, *, direct: bool) -> float:
    """Measure a read in parallel lanes, past the page cache or from it, in seconds."""
    view, size = memoryview(memory), path.stat().st_size
    file = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    end = size // 4096 * 4096 if direct else size

    def lane(at: int) -> None:
        os.preadv(file, [view[at : min(at + block, end)]], at)

    try:
        return seconds(lambda: _in_lanes(lanes, range(0, end, block), lane))
    finally:
        os.close(file)


def drop_from_cache(path: Path) -> None:
    """Drop a file's pages from the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def bring_into_cache(path: Path) -> None:
    """Read a file into the page cache."""
    buffer = bytearray(16 * MIB)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
