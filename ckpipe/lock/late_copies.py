"""Decide which tensors may be copied late, and detect in-place changes of tensors.

Tensors that only steps of guarded optimizers change may be copied later, while forward and backward
run. The rule is conservative: an early copy is always right, a late copy only if every byte of the
tensor belongs to an optimizer. So a buffer that overlaps a parameter without lying inside it is not
owned. A hyperparameter that is a tensor is not owned either, since schedulers write to it between
steps.

torch counts every change that is made through a tensor or its views. It does not count writes
through ``.data``, NumPy or DLPack, nor those of a fused step that is not guarded. So some bytes of
host memory are compared as well, before the copy of a block, in the block, and after it: a swap of
weights, a mask or a norm changes most of a tensor, and thereby its sample. Notes 51 and 53 of
``docs/design.md`` tell what was tried.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from ckpipe.memory.native import copy_each
from ckpipe.state.flatten import Captured
from ckpipe.state.tensors import (
    PLAIN_TYPES,
    TensorLeaf,
    alias_groups,
    dtensor_type,
    is_dense,
    local_part,
    plain_parts,
    tensors_in,
)


def owned_tensors(optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """Return the parameters of optimizers and the tensors of their state."""
    found: list[Any] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found += group["params"]
        for state in optimizer.state.values():
            found += state.values() if type(state) is dict else (state,)
    if set(PLAIN_TYPES).issuperset(map(type, found)):
        return found
    tensors = [tensor for each in found for tensor in tensors_in(each)]
    return [part for tensor in tensors for _, part in plain_parts(tensor)]


def _memory_of(tensor: torch.Tensor) -> _Memory | None:
    """Return the memory of a tensor, of a DTensor its local shard's; None if it has none."""
    if type(tensor) is dtensor_type():
        tensor = local_part(tensor)
    elif type(tensor) not in PLAIN_TYPES and (
        torch.nn.parameter.is_lazy(tensor) or hasattr(tensor, "__tensor_flatten__")
    ):
        return None
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        return None
    device = "cpu" if tensor.is_cpu else str(tensor.device)
    return device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.itemsize


_Memory = tuple[str, int, tuple[int, ...], tuple[int, ...], int]
"""Device, address, shape, strides and bytes of an item."""


def owned_facts(tensors: Iterable[torch.Tensor], objects: Sequence[Any]) -> list[Any]:
    """Return a fingerprint of owned tensors: with equal leaves, it decides which leaves are owned.

    Args:
        tensors: The owned tensors.
        objects: The tensors of the leaves. An owned tensor among them is noted by its number
            alone, as its leaf has been compared.
    """
    numbers = dict(zip(map(id, objects), range(len(objects)), strict=True))
    known = map(numbers.get, map(id, tensors))
    return [_memory_of(each) if n is None else n for each, n in zip(tensors, known, strict=True)]


def ownership_test(tensors: Iterable[torch.Tensor]) -> Callable[[TensorLeaf], bool]:
    """Return a predicate: whether all bytes of a leaf are owned.

    A leaf may span several owned tensors; these must also cover the bytes between its elements.

    Args:
        tensors: The owned tensors; those that are not strided memory are skipped.
    """
    windows: set[tuple[str, int, int]] = set()
    views: set[_Memory] = set()
    for memory in filter(None, map(_memory_of, tensors)):
        device, address, shape, stride, item = memory
        if is_dense(shape, stride):
            windows.add((device, address, math.prod(shape) * item))
        else:
            views.add(memory)
    ranges = _joined(windows)

    def is_owned(leaf: TensorLeaf) -> bool:
        if (leaf.device, leaf.address, leaf.shape, leaf.stride, leaf.itemsize) in views:
            return True
        place = bisect_right(ranges, (leaf.device, leaf.address, _END)) - 1
        if place < 0 or not leaf.window:
            return False
        device, low, high = ranges[place]
        inside = low <= leaf.address and leaf.address + leaf.window <= high
        return device == leaf.device and inside

    return is_owned


_END = 1 << 64


def _joined(windows: Iterable[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Merge windows of bytes (device, address, size) into sorted ranges (device, low, high)."""
    joined: list[tuple[str, int, int]] = []
    for device, low, nbytes in sorted(windows):
        high = low + nbytes
        if joined and joined[-1][0] == device and joined[-1][2] >= low:
            joined[-1] = (device, joined[-1][1], max(high, joined[-1][2]))
        else:
            joined.append((device, low, high))
    return joined


def owned_leaves(leaves: Sequence[TensorLeaf], tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the numbers of the leaves that only steps of guarded optimizers change.

    Args:
        leaves: The tensors of a captured state, alive.
        tensors: The tensors that the optimizers own; see :func:`owned_tensors`.
    """
    is_owned = ownership_test(tensors)
    owned = {number for number, leaf in enumerate(leaves) if is_owned(leaf)}
    holed = {n for n in owned if not is_dense(leaves[n].shape, leaves[n].stride)}
    if holed:
        # A leaf that overlaps others is copied with all bytes between its elements.
        owned -= holed.intersection(chain.from_iterable(alias_groups(leaves)))
    return owned


SAMPLE_BYTES = 64
"""Bytes that are compared at each end of a range: one cache line."""

MANY_TENSORS = 2_000
"""Number of tensors that are watched whatever their size: it takes a few milliseconds."""

LEAST_MEAN_BYTES = 8 << 10
"""Least mean size of more tensors than that, in bytes. To watch a tensor and copy it late costs a
trainer more than a microsecond; a processor copies 16 KiB in that time."""


def worth_watching(leaves: Sequence[TensorLeaf]) -> bool:
    """Tell whether copying the tensors would block a trainer for longer than watching them does.

    Args:
        leaves: The tensors that could be copied late.
    """
    if len(leaves) <= MANY_TENSORS or any(leaf.device != "cpu" for leaf in leaves):
        return True
    return sum(leaf.window for leaf in leaves) >= LEAST_MEAN_BYTES * len(leaves)


class ByteSample:
    """A sample of the bytes that one block takes: in the tensors, and in the block once it is full.

    It has both ends of each range. If a swap that writes a tensor from its first byte to its last
    meets a copy that does the same, one end is wrong in the tensor: the last byte before the copy
    begins, or the first one after it ends. A swap that comes and goes in between leaves its bytes
    in the block.

    Args:
        leaves: The tensors of a state.
        ranges: The copied ranges: the number of the tensor, the offset from its first element, the
            size, and the offset in the block, in bytes; -1 if the block has other bytes, as for a
            tensor that torch copies. Tensors on a device are skipped, and so are tensors with
            holes, since any code may write to a hole.
    """

    def __init__(
        self, leaves: Sequence[TensorLeaf], ranges: Iterable[tuple[int, int, int, int]]
    ) -> None:
        rows = list(ranges)
        sampled = {number: _can_be_sampled(leaves[number]) for number, *_ in rows}
        self._numbers: list[int] = []
        self._addresses, self._sizes, self._places = array("q"), array("q"), array("q")
        for number, skip, size, place in rows:
            if not sampled[number]:
                continue
            length = min(size, SAMPLE_BYTES)
            for at in {0, size - length}:
                self._numbers.append(number)
                self._addresses.append(leaves[number].address + skip + at)
                self._sizes.append(length)
                self._places.append(-1 if place < 0 else place + at)
        self._ends = np.cumsum(self._sizes, dtype=np.int64)
        self._nbytes = sum(self._sizes)

    def read(self) -> bytes:
        """Read the current bytes; the tensors' memory must be alive."""
        return self._read(self._addresses)

    def read_copies(self, block: int) -> bytes:
        """Read the bytes in the block, or the current ones of tensors that torch copies.

        Args:
            block: The address of the block.
        """
        places = np.asarray(self._places)
        found = np.where(places < 0, np.asarray(self._addresses), places + block)
        return self._read(array("q", found.tobytes()))

    def _read(self, addresses: array[int]) -> bytes:
        found = np.empty(self._nbytes, np.uint8)
        places = self._ends - np.asarray(self._sizes) + found.ctypes.data
        copy_each(array("q", places.tobytes()), addresses, self._sizes, release_gil=False)
        return found.tobytes()

    def first_difference(self, before: bytes, now: bytes) -> int | None:
        """Return the number of the first tensor whose sample differs; None if none does."""
        if before == now:
            return None
        at = next(n for n, (one, other) in enumerate(zip(before, now, strict=True)) if one != other)
        return self._numbers[int(np.searchsorted(self._ends, at, side="right"))]


def _can_be_sampled(leaf: TensorLeaf) -> bool:
    dense = leaf.contiguous or is_dense(leaf.shape, leaf.stride)
    return leaf.device == "cpu" and leaf.window > 0 and dense


class MutationDetector:
    """Detect changes of tensors of a captured state that must not change for a while.

    Args:
        state: The state, its memory alive.
        numbers: The numbers of the watched tensors.
        samples: Samples whose bytes are compared as well.
    """

    def __init__(
        self, state: Captured, numbers: Sequence[int], samples: Sequence[ByteSample] = ()
    ) -> None:
        self._state, self._numbers = state, numbers
        self._versions = self._versions_now()
        self._seen = {id(sample): sample.read() for sample in samples}

    def changed(self) -> TensorLeaf | None:
        """Return the first tensor for which torch has counted a change since; None without one."""
        now = self._versions_now()
        if now == self._versions:
            return None
        pairs = zip(self._numbers, self._versions, now, strict=True)
        return next(self._state.tensors[n] for n, before, after in pairs if before != after)

    def changed_in(self, sample: ByteSample, block: int | None = None) -> TensorLeaf | None:
        """Return the first tensor whose sample has changed; the memory of all must be alive.

        Args:
            sample: The sample.
            block: The address of the block that the tensors were copied to, to compare the bytes
                there; None to compare those of the tensors.
        """
        now = sample.read() if block is None else sample.read_copies(block)
        number = sample.first_difference(self._seen[id(sample)], now)
        return None if number is None else self._state.tensors[number]

    def _versions_now(self) -> list[int]:
        watched: list[torch.Tensor] = [self._state.memory[number] for number in self._numbers]
        try:
            return list(map(attrgetter("_version"), watched))
        except RuntimeError:  # torch counts no changes of inference tensors
            return [-1 if each.is_inference() else each._version for each in watched]
