"""Where verified bytes go: from chunks of entries into tensors, live ones and fresh ones.

Theory. A destination takes a range of an entry's bytes, in any order of ranges. An unshared
tensor lies in its entry row by row, so a range of bytes is a flat range of its elements: one copy
of bytes where the target is contiguous host memory of the same dtype, else a copy of elements
box by box. An entry that several tensors share is an image of their memory: fresh tensors are
views of one buffer that takes the whole image, so they share bytes again, and a live tensor that
lies otherwise is copied from such a fresh one once everything is verified.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from ckpipe.boxes import Box, flat_range_boxes
from ckpipe.errors import InvalidExtent, InvalidManifest
from ckpipe.load_planning import Need
from ckpipe.raw_memory import bytes_at, copy_bytes
from ckpipe.stored_tensors import StoredChunk, StoredTensor, StoredTensors
from ckpipe.tensors import overlaps_itself


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


@dataclass(eq=False, slots=True)
class RawBytes:
    """Host memory that the bytes ``[start, stop)`` of an entry are copied to as they are."""

    start: int
    stop: int
    address: int

    def put(self, source: int, lo: int, hi: int) -> None:
        first = max(lo, self.start)
        nbytes = min(hi, self.stop) - first
        if nbytes > 0:
            copy_bytes(self.address + first - self.start, source + first - lo, nbytes)


@dataclass(frozen=True, slots=True)
class Elements:
    """A tensor whose elements are in ``[start, stop)`` of an entry, row by row, in a dtype."""

    start: int
    stop: int
    dtype: torch.dtype
    tensor: torch.Tensor

    def put(self, source: int, lo: int, hi: int) -> None:
        first, last = max(lo, self.start), min(hi, self.stop)
        if first >= last:
            return
        values = bytes_at(source + first - lo, last - first).view(self.dtype)
        begin = (first - self.start) // self.dtype.itemsize
        end, at = begin + values.numel(), 0
        for starts, sizes in flat_range_boxes(self.tensor.shape, begin, end):
            part = narrowed(self.tensor, starts, sizes)
            part.copy_(values[at : at + part.numel()].view(sizes))
            at += part.numel()


class Filling:
    """Collects what is to be filled, and finishes it once the bytes are there.

    Args:
        stored: The tensors of the checkpoint.
    """

    def __init__(self, stored: StoredTensors) -> None:
        self._stored = stored
        self.destinations: defaultdict[int, list[Destination]] = defaultdict(list)
        self.needs: list[Need] = []
        self._fresh: dict[int, torch.Tensor] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        self._finishers: list[Callable[[], object]] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Destinations know addresses only; this keeps alive what lies there.
        self._alive: list[torch.Tensor] = []

    def fresh(self, stored: StoredTensor) -> torch.Tensor:
        """A new tensor on the CPU for a stored one; always the same one.

        Its elements are valid once the bytes are there and :meth:`finish` has run.

        Raises:
            InvalidManifest: If the checkpoint contradicts itself about it.
        """
        tensor = self._fresh.get(stored.number)
        if tensor is None:
            tensor = self._in_window(stored) if stored.window else self._alone(stored)
            self._fresh[stored.number] = tensor
        return tensor

    def live(self, stored: StoredTensor, target: torch.Tensor) -> None:
        """Fills a tensor that exists, with a conversion if its dtype is another.

        Args:
            stored: The stored tensor.
            target: A plain tensor of its shape, detached.
        """
        lies_otherwise = stored.window and (stored.row.lazy or not _lies_flat(stored))
        if lies_otherwise or memory_overlaps(target):
            self.copy_later(stored, target)
        else:
            for chunk in stored.chunks:
                self._add(stored, chunk, target)

    def copy_later(self, stored: StoredTensor, target: torch.Tensor) -> None:
        """Fills a tensor from a fresh one, by :meth:`finish`."""
        self._copies.append((target, self.fresh(stored)))

    def resolve_fresh(self) -> None:
        """Gives fresh tensors their final values, once their bytes are there."""
        finishers, self._finishers = self._finishers, []
        for finish in finishers:
            finish()

    def finish(self) -> None:
        """Completes everything that bytes alone could not, once all of them are there."""
        self.resolve_fresh()
        copies, self._copies = self._copies, []
        for target, value in copies:
            write(target, value)

    def _add(self, stored: StoredTensor, chunk: StoredChunk, target: torch.Tensor) -> None:
        if chunk.start == chunk.stop:
            return
        part = target if chunk.box is None else boxed(target, chunk.box)
        destination: Destination
        if takes_bytes(part, stored.dtype):
            destination = RawBytes(chunk.start, chunk.stop, part.data_ptr())
            self._alive.append(part)
        else:
            flat = part.view(-1) if part.is_contiguous() else part
            destination = Elements(chunk.start, chunk.stop, stored.dtype, flat)
        self.destinations[chunk.entry].append(destination)
        self.needs.append(chunk.need)

    def _alone(self, stored: StoredTensor) -> torch.Tensor:
        tensor = _allocate(stored)
        for chunk in stored.chunks:
            self._add(stored, chunk, tensor)
        if "c" in stored.row.lazy:
            self._finishers.append(tensor.conj_physical_)
        if "n" in stored.row.lazy:
            self._finishers.append(tensor.neg_)
        return with_lazy_bits(tensor, stored.row.lazy)

    def _in_window(self, stored: StoredTensor) -> torch.Tensor:
        if len(stored.chunks) != 1:
            raise InvalidExtent("It shares bytes and is cut into boxes", key=stored.label)
        (chunk,) = stored.chunks
        offset, rest = divmod(chunk.start, stored.dtype.itemsize)
        if rest:
            raise InvalidExtent(
                f"It begins at byte {chunk.start} of its entry, which its dtype is not aligned to",
                key=stored.label,
            )
        tensor = torch.empty(0, dtype=stored.dtype, device="cpu")
        storage = self._buffer(chunk.entry).untyped_storage()
        stride = chunk.stride or contiguous_stride(stored.shape)
        tensor.set_(storage, offset, stored.shape, stride)
        if chunk.start < chunk.stop:
            self.needs.append(chunk.need)
        return with_lazy_bits(tensor, stored.row.lazy)

    def _buffer(self, entry: int) -> torch.Tensor:
        buffer = self._buffers.get(entry)
        if buffer is None:
            nbytes = self._stored.data.entries[entry].nbytes
            buffer = self._buffers[entry] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            self.destinations[entry].append(RawBytes(0, nbytes, buffer.data_ptr()))
        return buffer


def takes_bytes(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the row-major bytes of a dtype can be copied to where a tensor lies."""
    return (
        target.dtype == dtype
        and target.is_cpu
        and target.is_contiguous()
        and not target.is_conj()
        and not target.is_neg()
    )


def with_lazy_bits(tensor: torch.Tensor, lazy: str) -> torch.Tensor:
    """The tensor seen with lazy bits over the bytes that it has."""
    if "c" in lazy:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if "n" in lazy else tensor


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


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a row-major layout without holes."""
    return tuple(_contiguous_stride(shape))[::-1]


def _contiguous_stride(shape: tuple[int, ...]) -> Iterator[int]:
    step = 1
    for n in reversed(shape):
        yield step
        step *= max(n, 1)


def memory_overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements of one tensor lie on the same bytes."""
    if tensor.is_contiguous():
        return False
    return overlaps_itself(tuple(tensor.shape), tensor.stride())


def write(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copies values into a tensor, also into one whose own elements overlap.

    torch refuses the latter; where the values agree, which was checked before, any order of
    copying the rows gives the same bytes.
    """
    if not memory_overlaps(target):
        target.copy_(value)
    elif target.stride(0) == 0:
        write(target[0], value[0])
    else:
        for row, values in zip(target, value, strict=True):
            write(row, values)


def _lies_flat(stored: StoredTensor) -> bool:
    return all(
        chunk.stride is None and chunk.start % stored.dtype.itemsize == 0 for chunk in stored.chunks
    )


def _allocate(stored: StoredTensor) -> torch.Tensor:
    stride = stored.fresh_stride or contiguous_stride(stored.shape)
    try:
        return torch.empty_strided(stored.shape, stride, dtype=stored.dtype, device="cpu")
    except RuntimeError as error:
        raise InvalidManifest(
            f"No memory for a tensor of shape {list(stored.shape)} and strides {list(stride)}",
            key=stored.label,
        ) from error
