"""Which tensors of a state only the steps of guarded optimizers change.

Those may be copied later, while forward and backward run. The rule errs to one side: what is
copied at once is always right, what is copied later is right only if every byte of it belongs to
an optimizer. A buffer that overlaps a parameter without lying inside of it is therefore not
owned, nor is a hyperparameter that is a tensor, since schedulers write to it between steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch.optim import Optimizer

from ckpipe.state.tensors import (
    PLAIN_TYPES,
    TensorLeaf,
    alias_groups,
    is_dense,
    is_dtensor_type,
    local_part,
)


def owned_tensors(optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """The parameters of optimizers and the tensors of their state."""
    found: list[Any] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found += group["params"]
        for state in optimizer.state.values():
            found += state.values() if type(state) is dict else (state,)
    if all(issubclass(kind, torch.Tensor) for kind in set(map(type, found))):
        return found
    return [tensor for each in found for tensor in _tensors_in(each)]


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
        """Whether all bytes of a leaf are owned, and if they are of several tensors all between."""
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
    """The memory of a tensor: of one that is sharded, this rank's part; None if it has none."""
    if type(tensor) in PLAIN_TYPES:
        return tensor
    if is_dtensor_type(type(tensor)):
        return local_part(tensor)
    if torch.nn.parameter.is_lazy(tensor):
        return None
    return None if hasattr(tensor, "__tensor_flatten__") else tensor


def _joined(ranges: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    joined: list[tuple[str, int, int]] = []
    for device, low, high in sorted(ranges):
        if joined and joined[-1][0] == device and joined[-1][2] >= low:
            joined[-1] = (device, joined[-1][1], max(high, joined[-1][2]))
        else:
            joined.append((device, low, high))
    return joined


class OwnedFacts:
    """All that :class:`OwnedMemory` reads of tensors, so that it need not be read again.

    Most of what optimizers own stands in the state itself, and then the walk has read it already.

    Args:
        tensors: The owned tensors.
        objects: The tensors and arrays of the state, as the walk has met them.

    Raises:
        RuntimeError: If there are no such facts, such as strides, of one of them.
    """

    def __init__(self, tensors: list[torch.Tensor], objects: list[Any]) -> None:
        numbers = {id(each): number for number, each in enumerate(objects)}
        found = [numbers.get(id(each)) for each in tensors]
        self._count = len(tensors)
        self._walked = [n for n, number in enumerate(found) if number is not None]
        self._numbers = [number for number in found if number is not None]
        self._others = [n for n, number in enumerate(found) if number is None]
        others = _locals([tensors[n] for n in self._others])
        self._parts = len(others)
        self._addresses = list(map(torch.Tensor.data_ptr, others))
        self._facts = _columns(others)

    def hold(self, tensors: list[torch.Tensor], objects: list[Any]) -> bool:
        """Whether the same leaves are owned as before.

        Args:
            tensors: What is owned now.
            objects: What the walk has met now, and of which it has found the same as before.
        """
        if len(tensors) != self._count:
            return False
        walked = [tensors[n] for n in self._walked]
        if not all(map(is_, walked, [objects[n] for n in self._numbers])):
            return False
        others = _locals([tensors[n] for n in self._others])
        try:
            if len(others) != self._parts:
                return False
            if list(map(torch.Tensor.data_ptr, others)) != self._addresses:
                return False
            return _columns(others) == self._facts
        except RuntimeError:
            return False


def _locals(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    odd = set(map(type, tensors)).difference(PLAIN_TYPES)
    if not odd:
        return tensors
    if all(map(is_dtensor_type, odd)):
        parts = [each._local_tensor if type(each) in odd else each for each in tensors]  # type: ignore[attr-defined]
        if set(map(type, parts)).issubset(PLAIN_TYPES):
            return parts
    found = [_local(each) if type(each) in odd else each for each in tensors]
    return [part for part in found if part is not None]


def _columns(tensors: list[torch.Tensor]) -> list[list[Any]]:
    return [list(map(fact, tensors)) for fact in _MEMORY_FACTS]


_MEMORY_FACTS: tuple[Callable[[Any], Any], ...] = (
    torch.Tensor.stride,
    attrgetter("shape"),
    attrgetter("dtype"),
    attrgetter("device"),
)


def owned_leaves(leaves: Sequence[TensorLeaf], tensors: Iterable[torch.Tensor]) -> set[int]:
    """The numbers of the leaves that only steps of guarded optimizers change.

    Args:
        leaves: The tensors of a captured state, alive.
        tensors: What the optimizers own; see :func:`owned_tensors`.
    """
    memory = OwnedMemory(tensors)
    owned = {number for number, leaf in enumerate(leaves) if memory.covers(leaf)}
    holed = {n for n in owned if not is_dense(leaves[n].shape, leaves[n].stride)}
    if holed:
        # What overlaps others is copied with all that lies between its elements.
        owned -= holed.intersection(chain.from_iterable(alias_groups(list(leaves))))
    return owned


__all__ = ["OwnedFacts", "OwnedMemory", "owned_leaves", "owned_tensors"]
