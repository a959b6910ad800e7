"""Which tensors of a state only the steps of guarded optimizers change.

Those may be copied later, while forward and backward run. The rule errs to one side: what is
copied at once is always right, what is copied later is right only if every byte of it belongs to
an optimizer. A buffer that overlaps a parameter without lying inside of it is therefore not
owned, nor is a hyperparameter that is a tensor, since schedulers write to it between steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.optim import Optimizer

from ckpipe.dtensors import is_dtensor_type, local_part
from ckpipe.tensors import PLAIN_TYPES, TensorLeaf, is_dense


def owned_tensors(optimizers: Iterable[Optimizer]) -> Iterator[torch.Tensor]:
    """The parameters of optimizers and the tensors of their state."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
        for state in optimizer.state.values():
            for each in state.values() if type(state) is dict else (state,):
                if type(each) is torch.Tensor:
                    yield each
                else:
                    yield from _tensors_in(each)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)


class OwnedMemory:
    """The bytes that lie in the owned tensors.

    Args:
        tensors: The tensors; those that are not strided memory are passed over.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._exact: set[tuple[str, int, int]] = set()
        self._views: set[tuple[Any, ...]] = set()
        ranges: list[tuple[str, int, int]] = []
        for tensor in tensors:
            local = _local(tensor)
            if local is None or local.layout is not torch.strided or local.is_meta:
                continue
            device = "cpu" if local.is_cpu else str(local.device)
            address = local.data_ptr()
            if local.is_contiguous() or is_dense(tuple(local.shape), local.stride()):
                nbytes = local.nbytes
                self._exact.add((device, address, nbytes))
                ranges.append((device, address, address + nbytes))
            else:
                shape = tuple(local.shape)
                self._views.add((device, address, shape, local.stride(), local.itemsize))
        self._apart = ranges
        self._joined: list[tuple[str, int, int]] | None = None

    def covers(self, leaf: TensorLeaf) -> bool:
        """Whether all bytes of a leaf, and all between them, are owned."""
        if (leaf.device, leaf.address, leaf.window) in self._exact:
            return True
        item = leaf.itemsize
        if (leaf.device, leaf.address, leaf.shape, leaf.stride, item) in self._views:
            return True
        ranges = self._ranges
        place = bisect_right(ranges, (leaf.device, leaf.address, _END)) - 1
        if place < 0 or not leaf.window:
            return False
        device, low, high = ranges[place]
        inside = low <= leaf.address and leaf.address + leaf.window <= high
        return device == leaf.device and inside

    @property
    def _ranges(self) -> list[tuple[str, int, int]]:
        if self._joined is None:  # most leaves are found without them
            self._joined = _joined(self._apart)
        return self._joined


_END = 1 << 64


def _local(tensor: torch.Tensor) -> torch.Tensor | None:
    """The memory of a tensor: of one that is sharded, this rank's part; None for other wrappers."""
    if type(tensor) in PLAIN_TYPES:
        return tensor
    if is_dtensor_type(type(tensor)):
        return local_part(tensor)
    return None if hasattr(tensor, "__tensor_flatten__") else tensor


def _joined(ranges: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    joined: list[tuple[str, int, int]] = []
    for device, low, high in sorted(ranges):
        if joined and joined[-1][0] == device and joined[-1][2] >= low:
            joined[-1] = (device, joined[-1][1], max(high, joined[-1][2]))
        else:
            joined.append((device, low, high))
    return joined


def memory_facts(tensors: Iterable[torch.Tensor]) -> list[list[Any]] | None:
    """All that :class:`OwnedMemory` reads of tensors, column by column; None if it cannot be told.

    As long as it is the same, the same leaves are owned.
    """
    local = list(tensors)
    if odd := set(map(type, local)).difference(PLAIN_TYPES):
        parts = (_local(each) if type(each) in odd else each for each in local)
        local = [part for part in parts if part is not None]
    try:
        return [list(map(fact, local)) for fact in _MEMORY_FACTS]
    except RuntimeError:  # such as that there are no strides
        return None


_MEMORY_FACTS: tuple[Callable[[Any], Any], ...] = (
    torch.Tensor.data_ptr,
    torch.Tensor.stride,
    attrgetter("shape"),
    attrgetter("dtype"),
    attrgetter("device"),
)


def owned_leaves(leaves: Sequence[TensorLeaf], optimizers: Iterable[Optimizer]) -> set[int]:
    """The numbers of the leaves that only steps of these optimizers change.

    Args:
        leaves: The tensors of a captured state, alive.
        optimizers: The guarded optimizers.
    """
    memory = OwnedMemory(owned_tensors(optimizers))
    return {number for number, leaf in enumerate(leaves) if memory.covers(leaf)}


__all__ = ["OwnedMemory", "memory_facts", "owned_leaves", "owned_tensors"]
