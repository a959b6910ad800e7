"""Noticing that tensors were changed in place, as far as torch counts it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

from ckpipe.state.captured import Captured
from ckpipe.state.tensors import TensorLeaf


class Watch:
    """Tensors of a captured state that nobody is to change for a while.

    Args:
        state: The state, its memory alive.
        numbers: Which of its tensors.
    """

    def __init__(self, state: Captured, numbers: Sequence[int]) -> None:
        self._state, self._numbers = state, numbers
        self._versions = self._versions_now()

    def changed(self) -> TensorLeaf | None:
        """The first that was changed since; None if none was."""
        now = self._versions_now()
        if now == self._versions:
            return None
        pairs = zip(self._numbers, self._versions, now, strict=True)
        return next(self._state.tensors[n] for n, before, after in pairs if before != after)

    def _versions_now(self) -> list[int]:
        watched: list[torch.Tensor] = [self._state.memory[number] for number in self._numbers]
        try:
            return list(map(attrgetter("_version"), watched))
        except RuntimeError:  # it is not counted for inference tensors
            return [-1 if each.is_inference() else each._version for each in watched]


__all__ = ["Watch"]
