"""Copy verified bytes from chunks of entries into tensors, live ones and fresh ones.

Theory. A destination takes ranges of an entry's bytes, in any order. An unshared tensor lies in its
entry row by row, so a range of bytes is a flat range of its elements. It is one copy of bytes if
the target is contiguous host memory of the same dtype, else a copy of elements box by box. An entry
that several tensors share is an image of their memory. Fresh tensors are views of one buffer that
takes the whole image, so they share bytes again. A live tensor with another layout is copied from
such a fresh one once all bytes are verified.

A tensor that was cut into boxes is assembled from parts of them, directly in the target. A part
that is contiguous in its entry and in the target is still one copy of bytes.
"""

from __future__ import annotations

import ctypes
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from operator import add, attrgetter
from typing import NamedTuple

import torch

from ckpipe.errors import InvalidManifest
from ckpipe.format.boxes import (
    Box,
    box_volume,
    contiguous_stride,
    flat_range_boxes,
    flat_start,
    intersection,
    moved,
    whole,
)
from ckpipe.memory.native import copy_bytes
from ckpipe.reading.chunks import ChunkCopy, StoredTensor
from ckpipe.state.tensors import MAX_ITEM, overlaps_itself


class RawBytes(NamedTuple):
    """Host memory that takes the bytes ``[start, stop)`` of an entry as they are."""

    start: int
    stop: int
    address: int

    def put(self, source: int, lo: int, hi: int) -> None:
        """Copy its share of the entry's bytes ``[lo, hi)`` from the address ``source``."""
        first, last = max(lo, self.start), min(hi, self.stop)
        if first < last:
            copy_bytes(self.address + first - self.start, source + first - lo, last - first)


@dataclass(frozen=True, slots=True)
class Elements:
    """A tensor that takes a box of the chunk at ``[start, stop)`` of an entry, in its own dtype.

    Args:
        start: The start of the chunk in the entry, in bytes.
        stop: Its end in the entry, in bytes; exclusive.
        dtype: The dtype of its elements.
        shape: Its shape; it is stored row by row.
        inside: The box of it that is taken.
        tensor: The tensor, of the shape of the box.
    """

    start: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    inside: Box
    tensor: torch.Tensor

    def put(self, source: int, lo: int, hi: int) -> None:
        """Copy its share of the entry's bytes ``[lo, hi)`` from the address ``source``."""
        first, last = max(lo, self.start), min(hi, self.stop)
        if first >= last:
            return
        values = _bytes_at(source + first - lo, last - first).view(self.dtype)
        begin, at = (first - self.start) // self.dtype.itemsize, 0
        for starts, sizes in flat_range_boxes(self.shape, begin, begin + values.numel()):
            box = (starts, tuple(map(add, starts, sizes)))
            count = box_volume(box)
            common = intersection(box, self.inside)
            if common is not None:
                given = boxed(values[at : at + count].view(sizes), moved(common, starts))
                boxed(self.tensor, moved(common, self.inside[0])).copy_(given)
            at += count


class Pieces:
    """Many destinations in one entry, of which a range of bytes concerns few.

    Args:
        destinations: The destinations.
    """

    def __init__(self, destinations: Iterable[RawBytes | Elements]) -> None:
        self._sorted = sorted(destinations, key=attrgetter("start"))
        self._starts = [each.start for each in self._sorted]
        self._reach = list(accumulate((each.stop for each in self._sorted), max))

    def put(self, source: int, lo: int, hi: int) -> None:
        """Copy their share of the entry's bytes ``[lo, hi)`` from the address ``source``."""
        concerned = slice(bisect_right(self._reach, lo), bisect_left(self._starts, hi))
        for each in self._sorted[concerned]:
            each.put(source, lo, hi)


Destination = RawBytes | Elements | Pieces
"""An object that takes bytes of one entry."""


def _bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """View memory as a tensor of uint8 that is only read; copy it if it is not aligned."""
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    return tensor.clone() if address % MAX_ITEM else tensor


def boxed(tensor: torch.Tensor, box: Box | None) -> torch.Tensor:
    """Return the part of a tensor in a box; all of it for None."""
    for dim, (low, high) in enumerate(zip(*(box or ()), strict=True)):
        if high - low != tensor.shape[dim]:
            tensor = tensor.narrow(dim, low, high - low)
    return tensor


def normal_tensors() -> AbstractContextManager[object]:
    """Leave inference mode, so that new tensors are normal: other threads write to them."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _AS_IT_IS


_AS_IT_IS = nullcontext()


def _takes_bytes(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Tell whether row-major bytes of a dtype can be copied to a tensor's memory."""
    return (
        target.dtype == dtype
        and target.is_cpu
        and target.is_contiguous()
        and not target.is_conj()
        and not target.is_neg()
    )


def with_lazy_bits(tensor: torch.Tensor, lazy: str) -> torch.Tensor:
    """Return a view of the tensor with lazy bits set; its bytes do not change."""
    if "c" in lazy:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if "n" in lazy else tensor


def memory_overlaps(tensor: torch.Tensor) -> bool:
    """Tell whether elements of one tensor share bytes."""
    if tensor.is_contiguous():
        return False
    return overlaps_itself(tuple(tensor.shape), tensor.stride())


def write(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy values into a tensor, also into one whose own elements overlap.

    torch refuses the latter. The values agree, which was checked before, so the rows can be copied
    in any order.
    """
    if not memory_overlaps(target):
        target.copy_(value)
    elif target.stride(0) == 0:
        write(target[0], value[0])
    else:
        for row, values in zip(target, value, strict=True):
            write(row, values)


def is_image(copied: ChunkCopy, stored: StoredTensor) -> bool:
    """Tell whether a chunk of shared memory is not simply its elements row by row."""
    lies_otherwise = copied.stride is not None or copied.start % stored.dtype.itemsize != 0
    return lies_otherwise or bool(stored.row.lazy)


def copy_from_image(target: torch.Tensor, image: torch.Tensor, copied: ChunkCopy) -> None:
    boxed(target, copied.target).copy_(boxed(image, copied.inside))


def destination_of(
    copied: ChunkCopy, dtype: torch.dtype, target: torch.Tensor
) -> RawBytes | Elements:
    """Return the destination of a chunk in a plain tensor: raw bytes if both are contiguous.

    Args:
        copied: The part of the chunk, and the part of the target.
        dtype: The saved dtype.
        target: The tensor.
    """
    if _takes_bytes(target, dtype):
        raw = _raw_bytes(copied, tuple(target.shape), dtype.itemsize, target.data_ptr())
        if raw is not None:
            return raw
    part = boxed(target, copied.target)
    if copied.order is not None:
        part = part.squeeze().permute(copied.order).unsqueeze(-1)
    shape, inside = copied.shape, copied.inside
    if inside is None:
        if part.is_contiguous():
            part, shape = part.view(-1), (part.numel(),)
        inside = whole(shape)
    return Elements(copied.start, copied.stop, dtype, shape, inside, part)


def _raw_bytes(
    copied: ChunkCopy, shape: tuple[int, ...], itemsize: int, address: int
) -> RawBytes | None:
    start, stop = copied.start, copied.stop
    if copied.order is not None and list(copied.order) != sorted(copied.order):
        return None
    if copied.inside is not None:
        first = flat_start(copied.shape, copied.inside)
        if first is None:
            return None
        start += first * itemsize
        stop = start + box_volume(copied.inside) * itemsize
    if copied.target is not None:
        at = flat_start(shape, copied.target)
        if at is None:
            return None
        address += at * itemsize
    return RawBytes(start, stop, address)


def allocate(stored: StoredTensor, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    stride = stored.fresh_stride if shape == stored.shape else None
    try:
        if stride is None:
            return torch.empty(shape, dtype=stored.loaded_dtype, device=device)
        return torch.empty_strided(shape, stride, dtype=stored.loaded_dtype, device=device)
    except RuntimeError as error:
        stride = stride or contiguous_stride(shape)
        reach = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if device.type != "cpu" or reach < math.prod(shape):
            raise  # torch tells which device has no memory, and how much it would need
        raise InvalidManifest(
            f"No memory for a tensor of shape {list(shape)} and strides {list(stride)}",
            key=stored.label,
        ) from error
