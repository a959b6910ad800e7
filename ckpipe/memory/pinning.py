"""Registration of host memory with CUDA, so that copies from a device run at full speed."""

from __future__ import annotations

import functools
import logging
import warnings
from typing import Literal

import torch

from ckpipe.memory import cuda

logger = logging.getLogger("ckpipe")


class Pinning:
    """Registers memory once, whole segments at a time, and gives all of it back.

    Args:
        mode: ``"auto"`` registers where CUDA has been initialised; ``"never"`` does not.
    """

    def __init__(self, mode: Literal["auto", "never"] = "auto") -> None:
        self._mode = mode
        self._pinned: set[int] = set()
        self._warned = False

    def pin(self, memory: torch.Tensor) -> bool:
        """Registers the memory of a uint8 tensor; pageable memory serves where that fails.

        Returns:
            Whether it is registered now.
        """
        if self._mode == "never":
            return False
        if not cuda.in_use():
            _mention()
            return False
        refusal = cuda.register(memory)
        if refusal:
            self._warn(f"CUDA would not register the memory ({refusal})")
            return False
        self._pinned.add(memory.data_ptr())
        return True

    def unpin(self, memory: torch.Tensor) -> None:
        """Gives the registration of a tensor's memory back, if it has one."""
        if memory.data_ptr() in self._pinned:
            self._pinned.remove(memory.data_ptr())
            cuda.unregister(memory)

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"ckpipe stages through pageable memory, which is slower: {why}. "
                "Raise the limit of locked memory (ulimit -l)",
                RuntimeWarning,
                stacklevel=3,
            )


@functools.cache
def _mention() -> None:
    """Logs it once in a process, however many pipelines are opened."""
    logger.debug(
        "This program does not use CUDA yet, so saves are copied into ordinary host memory"
    )
