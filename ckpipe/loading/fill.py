"""Bring verified bytes from chunks of entries into tensors, live ones and fresh ones.

Theory. A destination takes a range of an entry's bytes, in any order of ranges. An unshared tensor
lies in its entry row by row, so a range of bytes is a flat range of its elements: one copy of
bytes where the target is contiguous host memory of the same dtype, else a copy of elements box by
box. An entry that several tensors share is an image of their memory: fresh tensors are views of
one buffer that takes the whole image, so they share bytes again, and a live tensor that lies
otherwise is copied from such a fresh one once everything is verified.

A tensor that was cut into boxes is put together from pieces of them, straight in the target. A
piece that is a run of its entry and of the target is still one copy of bytes.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch

from ckpipe.errors import InvalidExtent, InvalidManifest
from ckpipe.format.boxes import Box, box_volume, flat_range_boxes, flat_start, intersection, moved
from ckpipe.loading.chunks import ChunkCopy, Region, StoredTensor, StoredTensors
from ckpipe.loading.read_plan import Need
from ckpipe.memory.native import copy_bytes
from ckpipe.state.tensors import overlaps_itself


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


class Filling:
    """Collects what is to be filled, and finishes it once the bytes are there.

    Args:
        stored: The tensors of the checkpoint.
    """

    def __init__(self, stored: StoredTensors) -> None:
        self._stored = stored
        self.destinations: defaultdict[int, list[Destination]] = defaultdict(list)
        self.needs: list[Need] = []
        self._fresh: dict[StoredTensor, torch.Tensor] = {}
        self._fresh_parts: dict[tuple[StoredTensor, tuple[Region, ...]], torch.Tensor] = {}
        self._sharing: dict[Hashable, torch.Tensor] = {}
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
        tensor = self._fresh.get(stored)
        if tensor is None:
            tensor = self._make(stored, self._stored.pieces(stored), stored.shape)
            self._fresh[stored] = tensor
        return tensor

    def fresh_part(
        self, stored: StoredTensor, regions: tuple[Region, ...] | None, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """The same for regions of it, put together in a tensor of a shape."""
        if regions is None:
            return self.fresh(stored)
        tensor = self._fresh_parts.get((stored, regions))
        if tensor is None:
            tensor = self._make(stored, self._stored.pieces(stored, regions), shape)
            self._fresh_parts[stored, regions] = tensor
        return tensor

    def live(
        self,
        stored: StoredTensor,
        pieces: tuple[ChunkCopy, ...],
        regions: tuple[Region, ...] | None,
        target: torch.Tensor,
    ) -> None:
        """Fills a tensor that exists, with a conversion if its dtype is another.

        Args:
            stored: The stored tensor.
            pieces: What the target is put together from.
            regions: Which parts of it the target holds; None if it holds the whole.
            target: A plain tensor, detached.
        """
        for piece in pieces:
            if piece.shared and _is_image(piece, stored):
                return self.copy_later(stored, regions, target)
        if memory_overlaps(target):
            return self.copy_later(stored, regions, target)
        return self._add(stored, pieces, target)

    def copy_later(
        self, stored: StoredTensor, regions: tuple[Region, ...] | None, target: torch.Tensor
    ) -> None:
        """Fills a tensor from a fresh one, by :meth:`finish`."""
        self._copies.append((target, self.fresh_part(stored, regions, tuple(target.shape))))

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

    def _add(self, stored: StoredTensor, pieces: Sequence[ChunkCopy], target: torch.Tensor) -> None:
        """Has a tensor filled with pieces, none of which is an image."""
        base = target.data_ptr() if takes_bytes(target, stored.dtype) else None
        shape, item = tuple(target.shape), stored.dtype.itemsize
        self._alive.append(target)
        for piece in pieces:
            if piece.start == piece.stop:
                continue
            destination: Destination | None = None
            if base is not None and piece.target is None and piece.inside is None:
                destination = RawBytes(piece.start, piece.stop, base)
            elif base is not None:
                destination = _moved_bytes(piece, shape, item, base)
            if destination is None:
                destination = _copied(piece, stored.dtype, target)
            self.destinations[piece.entry].append(destination)
            if piece.inside is None:
                self.needs.append(Need(piece.entry, piece.start, piece.stop))
            else:
                self.needs += piece.needs(item)

    def _make(
        self, stored: StoredTensor, pieces: tuple[ChunkCopy, ...], shape: tuple[int, ...]
    ) -> torch.Tensor:
        with normal_tensors():
            if len(pieces) == 1 and pieces[0].target is None:
                (piece,) = pieces
                alone = not piece.shared
                return self._alone(stored, pieces, shape) if alone else self._window(stored, piece)
            if not any(piece.shared for piece in pieces):
                return self._alone(stored, pieces, shape)
            # Tensors cut alike from the same shared bytes share them again.
            key = (pieces, shape, stored.dtype, stored.row.lazy)
            if key not in self._sharing:
                self._sharing[key] = self._alone(stored, pieces, shape)
            return self._sharing[key].detach()

    def _alone(
        self, stored: StoredTensor, pieces: tuple[ChunkCopy, ...], shape: tuple[int, ...]
    ) -> torch.Tensor:
        tensor = _allocate(stored, shape)
        plain = []
        for piece in pieces:
            if piece.shared and _is_image(piece, stored):
                image = self._window(stored, piece)
                self._finishers.append(partial(_from_image, tensor, image, piece))
            else:
                plain.append(piece)
        self._add(stored, plain, tensor)
        if not stored.row.lazy:
            return tensor
        if "c" in stored.row.lazy:
            self._finishers.append(tensor.conj_physical_)
        if "n" in stored.row.lazy:
            self._finishers.append(tensor.neg_)
        return with_lazy_bits(tensor, stored.row.lazy)

    def _window(self, stored: StoredTensor, piece: ChunkCopy) -> torch.Tensor:
        """A chunk as a view of its entry's memory."""
        offset, rest = divmod(piece.start, stored.dtype.itemsize)
        if rest:
            raise InvalidExtent(
                f"It begins at byte {piece.start} of its entry, which its dtype is not aligned to",
                key=stored.label,
            )
        tensor = torch.empty(0, dtype=stored.dtype, device="cpu")
        storage = self._buffer(piece.entry).untyped_storage()
        stride = piece.stride or contiguous_stride(piece.shape)
        tensor.set_(storage, offset, piece.shape, stride)
        if piece.start < piece.stop:
            self.needs.append(Need(piece.entry, piece.start, piece.stop))
        return with_lazy_bits(tensor, stored.row.lazy)

    def _buffer(self, entry: int) -> torch.Tensor:
        buffer = self._buffers.get(entry)
        if buffer is None:
            nbytes = self._stored.data.sizes[entry]
            buffer = self._buffers[entry] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            self.destinations[entry].append(RawBytes(0, nbytes, buffer.data_ptr()))
        return buffer


def normal_tensors() -> AbstractContextManager[object]:
    """Make normal tensors where the caller is in inference mode: other threads write to them."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def takes_bytes(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Tell whether the row-major bytes of a dtype can be copied to where a tensor lies."""
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


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a row-major layout without holes."""
    return tuple(_contiguous_stride(shape))[::-1]


def _contiguous_stride(shape: tuple[int, ...]) -> Iterator[int]:
    step = 1
    for n in reversed(shape):
        yield step
        step *= max(n, 1)


def memory_overlaps(tensor: torch.Tensor) -> bool:
    """Tell whether elements of one tensor lie on the same bytes."""
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


def _is_image(piece: ChunkCopy, stored: StoredTensor) -> bool:
    """Tell whether a piece of shared memory is something else than elements row by row."""
    lies_otherwise = piece.stride is not None or piece.start % stored.dtype.itemsize != 0
    return lies_otherwise or bool(stored.row.lazy)


def _from_image(target: torch.Tensor, image: torch.Tensor, piece: ChunkCopy) -> None:
    part = target if piece.target is None else boxed(target, piece.target)
    part.copy_(image if piece.inside is None else boxed(image, piece.inside))


def _moved_bytes(piece: ChunkCopy, shape: tuple[int, ...], item: int, base: int) -> RawBytes | None:
    """A plain copy of bytes for a piece, if it is a run of its chunk and of the target.

    Args:
        piece: The piece.
        shape: The shape of the target.
        item: The size of its elements in bytes.
        base: Its address.
    """
    start, stop = piece.start, piece.stop
    if piece.inside is not None:
        first = flat_start(piece.shape, piece.inside)
        if first is None:
            return None
        start += first * item
        stop = start + box_volume(piece.inside) * item
    if piece.target is not None:
        at = flat_start(shape, piece.target)
        if at is None:
            return None
        base += at * item
    return RawBytes(start, stop, base)


def _copied(piece: ChunkCopy, dtype: torch.dtype, target: torch.Tensor) -> Elements | BoxElements:
    """A copy of elements for a piece."""
    part = target if piece.target is None else boxed(target, piece.target)
    if piece.inside is not None:
        inside = piece.inside
        return BoxElements(piece.start, piece.stop, dtype, piece.shape, inside, part)
    flat = part.view(-1) if part.is_contiguous() else part
    return Elements(piece.start, piece.stop, dtype, flat)


def _allocate(stored: StoredTensor, shape: tuple[int, ...]) -> torch.Tensor:
    stride = stored.fresh_stride if shape == stored.shape else None
    stride = stride or contiguous_stride(shape)
    try:
        return torch.empty_strided(shape, stride, dtype=stored.dtype, device="cpu")
    except RuntimeError as error:
        raise InvalidManifest(
            f"No memory for a tensor of shape {list(shape)} and strides {list(stride)}",
            key=stored.label,
        ) from error
