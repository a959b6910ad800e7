"""Ranges of a local file that one thread writes: side by side in one call, and whole."""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import random
import tempfile
from collections.abc import Callable, Sequence

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpipe.testing.conformance import pattern
from ckpipe_local import LocalBackend

ALIGNMENT = LocalBackend.limits.alignment

Ranges = list[tuple[int, memoryview]]
Write = Callable[[int, Sequence[memoryview], int], int]


SIZES = st.sampled_from([1, 100, ALIGNMENT - 1, ALIGNMENT, 3 * ALIGNMENT, 5 * ALIGNMENT + 7])


def cut(image: memoryview, sizes: list[int], apart: list[bool]) -> Ranges:
    """Ranges of a file, each in memory where it could go past the page cache, or beside that."""
    memory, found, at = (
        memoryview(mmap.mmap(-1, len(image) + (len(sizes) + 1) * 3 * ALIGNMENT)),
        [],
        0,
    )
    place = 0
    for size, beside in zip(sizes, apart, strict=True):
        place += -place % ALIGNMENT + (16 if beside else at % ALIGNMENT)
        memory[place : place + size] = image[at : at + size]
        found.append((at, memory[place : place + size]))
        place, at = place + size, at + size
    return found


def short(pwritev: Write) -> Write:
    """A kernel that writes one page at a time."""

    def write(descriptor: int, pieces: Sequence[memoryview], offset: int) -> int:
        return pwritev(descriptor, [pieces[0][:ALIGNMENT]], offset)

    return write


def refusing(pwritev: Write) -> Write:
    """A file system that takes one page past its cache, and then none that way."""
    calls = itertools.count()

    def write(descriptor: int, pieces: Sequence[memoryview], offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT and next(calls):
            raise OSError(errno.EINVAL, "refused")
        return pwritev(descriptor, [pieces[0][:ALIGNMENT]], offset)

    return write


async def written(root: str, size: int, ranges: Ranges) -> bytes:
    """What is in an object once the ranges are, of which it gets one half at a time."""
    async with LocalBackend(root) as backend:
        upload = await backend.open_upload("f", size=size, block_bytes=size)
        for half in (ranges[::2], ranges[1::2]):
            await upload.write_all(half)
        await upload.complete()
        return await backend.get("f", max_bytes=size)


@pytest.mark.parametrize("kernel", [lambda pwritev: pwritev, short, refusing])
@given(st.lists(st.tuples(SIZES, st.booleans()), min_size=1, max_size=8), st.randoms())
def test_every_byte_is_written(
    kernel: Callable[[Write], Write], drawn: list[tuple[int, bool]], order: random.Random
) -> None:
    sizes = [size for size, _ in drawn]
    image = pattern(sum(sizes))
    ranges = cut(memoryview(image), sizes, [beside for _, beside in drawn])
    order.shuffle(ranges)
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", kernel(os.pwritev))
        assert anyio.run(written, root, len(image), ranges) == image
