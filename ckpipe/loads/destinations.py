"""Where verified bytes of an entry go: memory as it lies, elements of a tensor, or a box of them.

A destination takes a range of an entry's bytes, in any order of ranges. An unshared tensor lies in
its entry row by row, so a range of bytes is a flat range of its elements.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch

from ckpipe.format.boxes import Box, box_volume, flat_range_boxes, intersection, moved
from ckpipe.memory.native import copy_bytes


class Destination(Protocol):
    """Takes bytes of one entry."""

    def put(self, source: int, lo: int, hi: int) -> None:
        """Takes the bytes ``[lo, hi)`` of the entry, as far as they concern it.

        Args:
            source: The address of byte ``lo``.
            lo: The first byte, from the entry's start.
            hi: Behind the last byte.
        """
        ...


class RawBytes(NamedTuple):
    """Host memory that the bytes ``[start, stop)`` of an entry are copied to as they are."""

    start: int
    stop: int
    address: int

    def put(self, source: int, lo: int, hi: int) -> None:
        start, stop, address = self
        if start <= lo and hi <= stop:  # nearly always, and min and max take as long as a copy
            first, nbytes = lo, hi - lo
        else:
            first = max(lo, start)
            nbytes = min(hi, stop) - first
        if nbytes > 0:
            copy_bytes(address + first - start, source + first - lo, nbytes)


# Tens of thousands are made for a load, for which the class's own constructor is slow.
new_raw_bytes = partial(tuple.__new__, RawBytes)


@dataclass(frozen=True, slots=True)
class Elements:
    """A tensor whose elements are in ``[start, stop)`` of an entry, row by row, in a dtype."""

    start: int
    stop: int
    dtype: torch.dtype
    tensor: torch.Tensor

    def put(self, source: int, lo: int, hi: int) -> None:
        begin, values = _elements(self, source, lo, hi)
        end, at = begin + values.numel(), 0
        for starts, sizes in flat_range_boxes(self.tensor.shape, begin, end):
            part = narrowed(self.tensor, starts, sizes)
            part.copy_(values[at : at + part.numel()].view(sizes))
            at += part.numel()


@dataclass(frozen=True, slots=True)
class BoxElements:
    """A tensor whose elements are a box of the chunk at ``[start, stop)``, row by row, of a shape.

    What else is in the chunk is left out.
    """

    start: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    inside: Box
    tensor: torch.Tensor

    def put(self, source: int, lo: int, hi: int) -> None:
        begin, values = _elements(self, source, lo, hi)
        end, at = begin + values.numel(), 0
        for starts, sizes in flat_range_boxes(self.shape, begin, end):
            box = (starts, tuple([n + size for n, size in zip(starts, sizes, strict=True)]))
            count = box_volume(box)
            common = intersection(box, self.inside)
            if common is not None:
                given = boxed(values[at : at + count].view(sizes), moved(common, starts))
                boxed(self.tensor, moved(common, self.inside[0])).copy_(given)
            at += count


def _elements(
    of: Elements | BoxElements, source: int, lo: int, hi: int
) -> tuple[int, torch.Tensor]:
    """Those elements that lie in the bytes ``[lo, hi)``, and how many lie before them."""
    first, last = max(lo, of.start), min(hi, of.stop)
    if first >= last:
        return 0, torch.empty(0, dtype=of.dtype)
    values = _bytes_at(source + first - lo, last - first).view(of.dtype)
    return (first - of.start) // of.dtype.itemsize, values


_MAX_ITEM = 16


def _bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """View memory as a tensor of uint8 that is only read; a copy of it if it is not aligned."""
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    return tensor.clone() if address % _MAX_ITEM else tensor


def narrowed(tensor: torch.Tensor, starts: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    """The part of a tensor that begins at ``starts`` and has the shape ``sizes``."""
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, size)
    return tensor


def boxed(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The part of a tensor that a box cuts out."""
    lower, upper = box
    sizes = tuple(high - low for low, high in zip(lower, upper, strict=True))
    return narrowed(tensor, lower, sizes)
