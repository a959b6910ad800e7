"""The CUDA calls of ckpipe, made only once the program itself has initialised CUDA.

Copies from a device are asynchronous only where fences order them: after the kernels that the
trainer has queued, and before those that change their source. Copies from devices other than CUDA
block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch


def in_use() -> bool:
    """Tell whether the program has begun to use CUDA; asking does not initialise it."""
    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def recording() -> bool:
    """Tell whether this thread's kernels go into a CUDA graph instead of running."""
    begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return begun and torch.cuda.is_current_stream_capturing()


FENCED = {"cuda"}
"""The types of devices from which copies are asynchronous. Copies from other devices block, until
the streams and events of ``torch.accelerator`` serve them all."""


def events_behind(devices: Iterable[str]) -> list[Any]:
    """Record events behind this thread's queued work; synchronize devices that have no fences.

    Call it on the thread that has walked the state, after the walk: ``state_dict`` itself may have
    queued kernels.

    Args:
        devices: The devices of the state's tensors.
    """
    found = []
    for device in sorted(devices):
        kind = torch.device(device).type
        if kind in FENCED:
            found.append(torch.get_device_module(device).current_stream(device).record_event())
        elif kind != "cpu":
            module = torch.get_device_module(device)
            module.synchronize(*[device] * (module.device_count() > 1))
    return found


class StreamFence:
    """The end of copies that were queued on one device's side stream."""

    def __init__(self, device: str, event: Any) -> None:
        self._device, self._event = device, event

    def passed(self) -> bool:
        """Tell whether the copies are done."""
        return bool(self._event.query())

    def hold_back(self) -> None:
        """Let the calling thread's current stream wait for them on the device."""
        torch.get_device_module(self._device).current_stream(self._device).wait_event(self._event)

    def wait(self) -> None:
        """Block until they are done."""
        self._event.synchronize()


class SideStreams:
    """Side streams for copies that run beside the program's own kernels, after given events.

    Args:
        after: Events behind the work that must be done before the copies.
    """

    def __init__(self, after: Sequence[Any]) -> None:
        self._after = after
        self._streams: dict[str, Any] = {}

    def serves(self, device: str) -> bool:
        """Tell whether it copies tensors of a device."""
        return device.partition(":")[0] in FENCED

    def launch(self, devices: Iterable[str], copy: Callable[[], object]) -> list[StreamFence]:
        """Queue copies; return their ends, one for each device.

        Args:
            devices: The devices that the copies read from.
            copy: Queues them, on the current streams of the devices.
        """
        ordered = sorted(devices)
        with contextlib.ExitStack() as entered:
            for device in ordered:
                entered.enter_context(torch.get_device_module(device).stream(self._stream(device)))
            copy()
        return [StreamFence(each, self._stream(each).record_event()) for each in ordered]

    def _stream(self, device: str) -> Any:
        if device not in self._streams:
            stream = torch.get_device_module(device).Stream(device)
            for event in self._after:
                stream.wait_event(event)
            self._streams[device] = stream
        return self._streams[device]


def register(memory: torch.Tensor) -> str:
    """Register (pin) the memory of a host tensor; return CUDA's error, or an empty text.

    Source: CUDA Runtime API, "Memory Management", ``cudaHostRegister``.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    result = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    return "" if int(result) == 0 else str(result)


def unregister(memory: torch.Tensor) -> None:
    """Undo :func:`register`."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
