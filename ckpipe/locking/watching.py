"""Noticing that tensors were changed in place.

torch counts the changes that are made through a tensor and its views; who asks for the count knows
of every one of them. It does not count what is written through ``.data``, NumPy or DLPack, or by a
fused step that nobody guards. So some bytes of each tensor in host memory are compared as well:
a swap of weights, a mask or a norm changes most of a tensor, and thereby its sample.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from operator import attrgetter

import numpy as np
import torch

from ckpipe.memory.raw_memory import copy_each
from ckpipe.state.flatten import Captured
from ckpipe.state.tensors import TensorLeaf, is_dense

SAMPLE_BYTES = 64
"""How much of a tensor is compared, from its middle: one line of the processor's cache."""

MANY_TENSORS = 2_000
"""How many tensors are watched whatever their size: it takes a few milliseconds."""

LEAST_MEAN_BYTES = 8 << 10
"""What more of them must have on average. To watch one and copy it late costs a trainer more than a
microsecond, in which a processor copies 16 KiB."""


def worth_watching(leaves: Sequence[TensorLeaf]) -> bool:
    """Whether a trainer would wait longer for a copy of tensors than it takes to watch them.

    Args:
        leaves: The tensors that could be copied late.
    """
    if len(leaves) <= MANY_TENSORS or any(leaf.device != "cpu" for leaf in leaves):
        return True
    return sum(leaf.window for leaf in leaves) >= LEAST_MEAN_BYTES * len(leaves)


class Sample:
    """Some bytes of each of several tensors, which can be read again and again.

    Args:
        leaves: The tensors of a state.
        numbers: Which of them; those are passed over that are on a device or have holes, in which
            anybody may write.
    """

    def __init__(self, leaves: Sequence[TensorLeaf], numbers: Iterable[int]) -> None:
        own = [n for n in dict.fromkeys(numbers) if _can_be_sampled(leaves[n])]
        sizes = [min(leaves[n].window, SAMPLE_BYTES) for n in own]
        starts = [(leaves[n].window - size) // 2 for n, size in zip(own, sizes, strict=True)]
        self._numbers, self._sizes = own, array("q", sizes)
        self._addresses = array(
            "q", [leaves[n].address + start for n, start in zip(own, starts, strict=True)]
        )
        self._nbytes, self._ends = sum(sizes), np.cumsum(sizes, dtype=np.int64)
        self._places = self._ends - np.frombuffer(self._sizes, np.int64)

    def read(self) -> bytes:
        """What they are now; the tensors' memory must be alive."""
        found = np.empty(self._nbytes, np.uint8)
        targets = array("q", (self._places + found.ctypes.data).tobytes())
        copy_each(targets, self._addresses, self._sizes, lets_go=False)
        return found.tobytes()

    def first_difference(self, before: bytes, now: bytes) -> int | None:
        """The number of the first tensor that has another sample; None if none has."""
        if before == now:
            return None
        at = next(n for n, (one, other) in enumerate(zip(before, now, strict=True)) if one != other)
        return self._numbers[int(np.searchsorted(self._ends, at, side="right"))]


def _can_be_sampled(leaf: TensorLeaf) -> bool:
    dense = leaf.contiguous or is_dense(leaf.shape, leaf.stride)
    return leaf.device == "cpu" and leaf.window > 0 and dense


class Watch:
    """Tensors of a captured state that nobody is to change for a while.

    Args:
        state: The state, its memory alive.
        numbers: Which of its tensors.
        samples: Of which some bytes are compared, too.
    """

    def __init__(
        self, state: Captured, numbers: Sequence[int], samples: Sequence[Sample] = ()
    ) -> None:
        self._state, self._numbers = state, numbers
        self._versions = self._versions_now()
        self._seen = {id(sample): sample.read() for sample in samples}

    def changed(self) -> TensorLeaf | None:
        """The first of which torch has counted a change since; None if there is none."""
        now = self._versions_now()
        if now == self._versions:
            return None
        pairs = zip(self._numbers, self._versions, now, strict=True)
        return next(self._state.tensors[n] for n, before, after in pairs if before != after)

    def changed_in(self, sample: Sample) -> TensorLeaf | None:
        """The first of which a sample is another now; the memory of all must be alive."""
        number = sample.first_difference(self._seen[id(sample)], sample.read())
        return None if number is None else self._state.tensors[number]

    def _versions_now(self) -> list[int]:
        watched: list[torch.Tensor] = [self._state.memory[number] for number in self._numbers]
        try:
            return list(map(attrgetter("_version"), watched))
        except RuntimeError:  # it is not counted for inference tensors
            return [-1 if each.is_inference() else each._version for each in watched]


__all__ = [
    "LEAST_MEAN_BYTES",
    "MANY_TENSORS",
    "SAMPLE_BYTES",
    "Sample",
    "Watch",
    "worth_watching",
]
