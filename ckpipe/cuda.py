"""CUDA as far as ckpipe uses it, and only once the program itself has initialised it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def in_use() -> bool:
    """Whether the program has begun to use CUDA; asking does not initialise it."""
    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def fences() -> tuple[Any, ...]:
    """Marks behind the work queued by this thread on the current stream of each device."""
    if not in_use():
        return ()
    return tuple(
        torch.cuda.current_stream(device).record_event()
        for device in range(torch.cuda.device_count())
    )


def side_stream(device: str, after: Sequence[Any]) -> Any:
    """A stream on which copies run beside the program's own work, and after the marks given."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    for fence in after:
        stream.wait_event(fence)
    return stream


def register(memory: torch.Tensor) -> str:
    """Registers the memory of a host tensor; returns what CUDA says if it will not, else nothing.

    Source: CUDA Runtime API, "Memory Management", ``cudaHostRegister``.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    result = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    return "" if int(result) == 0 else str(result)


def unregister(memory: torch.Tensor) -> None:
    """Gives the registration of a host tensor's memory back."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
