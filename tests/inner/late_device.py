"""A device whose work is done late: what is queued on it waits until somebody waits for it.

Importing this registers the device ``late`` for the whole process, by an interface of torch that is
experimental. Its memory is host memory; kernels are Python functions. A copy that is not
``non_blocking`` does all that is queued on its stream before. All else is as late as it may be:
work on a stream is done when somebody waits for an event behind it, and a copy that nobody waits
for never lands.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.dlpack import from_dlpack

_lock, _here = threading.RLock(), threading.local()
_CPU, _LATE = 1, 12  # of DLDeviceType


class Event:
    """A place in the work of a stream."""

    def __init__(self, stream: Queue) -> None:
        self._stream, self._place = stream, len(stream.work)

    def query(self) -> bool:
        """Whether the work before it is done."""
        return self._stream.done >= self._place

    def synchronize(self) -> None:
        """Do the work before it."""
        self._stream.run(self._place)


class Queue:
    """A stream: work that is done in its order."""

    def __init__(self, device: object = None) -> None:
        self.work: list[Callable[[], object]] = []
        self.done = 0
        _queues.append(self)

    def run(self, to: int) -> None:
        """Do the work up to a place."""
        with _lock:
            while self.done < to:
                work, self.done = self.work[self.done], self.done + 1
                work()

    def record_event(self) -> Event:
        """A place behind all that is queued now."""
        return Event(self)

    def wait_event(self, event: Event) -> None:
        """Has what is queued from now on wait for an event."""
        self.work.append(event.synchronize)


_queues: list[Queue] = []
_default = Queue()


class Late:
    """What torch has as ``torch.late``."""

    Stream = Queue

    @staticmethod
    def current_stream(device: object = None) -> Queue:
        found: Queue = getattr(_here, "stream", _default)
        return found

    @staticmethod
    @contextmanager
    def stream(stream: Queue) -> Iterator[None]:
        before, _here.stream = Late.current_stream(), stream
        try:
            yield
        finally:
            _here.stream = before

    @staticmethod
    def synchronize() -> None:
        for each in _queues:
            each.run(len(each.work))

    is_available = is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)


def kernel(work: Callable[[], object]) -> None:
    """Queue work on the current stream."""
    Late.current_stream().work.append(work)


def late(host: torch.Tensor) -> torch.Tensor:
    """The memory of a host tensor as a tensor of the device."""
    return _seen(host, _LATE)


def _seen(tensor: torch.Tensor, kind: int) -> torch.Tensor:
    capsule = tensor.detach().__dlpack__()
    # The second member of a DLTensor is the device, whose first is the kind of device.
    pointer = _pointer(ctypes.py_object(capsule), b"dltensor")
    ctypes.c_int32.from_address(pointer + ctypes.sizeof(ctypes.c_void_p)).value = kind
    return from_dlpack(capsule)


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _copy_from(
    source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    stream = Late.current_stream()
    hosts = [each if each.is_cpu else _seen(each, _CPU) for each in (target, source)]
    stream.work.append(lambda: hosts[0].copy_(hosts[1]))
    if not non_blocking:
        stream.run(len(stream.work))
    return target


def _as_strided(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> torch.Tensor:
    return late(_seen(tensor, _CPU).as_strided(size, stride, offset))


_setup_privateuseone_for_python_backend("late", Late)
_library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
_library.impl("_copy_from", _copy_from, "PrivateUse1")
_library.impl("as_strided", _as_strided, "PrivateUse1")
_library.impl("view", lambda t, size: late(_seen(t, _CPU).view(size)), "PrivateUse1")
