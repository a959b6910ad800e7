"""Memory with a page whose first reader waits, so that a test can stop a copy in its middle."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import select
import struct
from types import TracebackType
from typing import Self

import numpy as np
import pytest
import torch

from tests.support.actors import PATIENCE

# Source: userfaultfd(2), ioctl_userfaultfd(2), linux/userfaultfd.h.
_CALL = {"x86_64": 323, "aarch64": 282}
_USER_MODE_ONLY, _API, _MISSING = 1, 0xAA, 1
_UFFDIO_API, _UFFDIO_REGISTER, _UFFDIO_COPY = 0xC018AA3F, 0xC020AA00, 0xC028AA03
_PAGES = 20
"""Pages of the tensor: large enough for a copy in Python to release the GIL."""


class HeldTensor:
    """A float tensor with a page inside that has no memory until the test gives it some.

    The first thread that reads or writes there waits in a page fault. Inside a ``with`` block of a
    pipeline, its own block ends the wait after a failure. A system that lets no unprivileged
    process handle page faults skips the test.

    Args:
        value: The value of all its elements.
    """

    def __init__(self, value: float) -> None:
        size = _PAGES * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        self.tensor = torch.from_numpy(np.frombuffer(self._memory, np.float32))
        self.tensor.fill_(value)
        self._content = torch.full((mmap.PAGESIZE // 4,), value)
        self._begin = _PAGES // 4 * mmap.PAGESIZE  # no sample lies there
        self._memory.madvise(mmap.MADV_DONTNEED, self._begin, mmap.PAGESIZE)
        self._page = self.tensor.data_ptr() + self._begin
        self._faults = _fault_descriptor()
        fcntl.ioctl(self._faults, _UFFDIO_API, struct.pack("=3Q", _API, 0, 0))
        held = struct.pack("=4Q", self._page, mmap.PAGESIZE, _MISSING, 0)
        fcntl.ioctl(self._faults, _UFFDIO_REGISTER, held)

    def wait(self) -> None:
        """Return once a thread waits for the page."""
        polled = select.poll()
        polled.register(self._faults, select.POLLIN)
        assert polled.poll(PATIENCE * 1e3), "nothing has read the page"
        os.read(self._faults, 32)

    def release(self) -> None:
        """Give the page its content, and let the thread go on."""
        given = (self._page, self._content.data_ptr(), mmap.PAGESIZE, 0, 0)
        fcntl.ioctl(self._faults, _UFFDIO_COPY, struct.pack("=5Q", *given))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let threads that wait for the page go on; they find it empty."""
        os.close(self._faults)


def _fault_descriptor() -> int:
    number = _CALL.get(platform.machine())
    flags = os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY
    libc = ctypes.CDLL(None, use_errno=True)
    found = -1 if number is None else libc.syscall(number, flags)
    if found < 0:
        pytest.skip(f"userfaultfd is not allowed here: {os.strerror(ctypes.get_errno())}")
    return int(found)
