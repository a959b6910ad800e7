"""Copies between addresses of host memory, and tensors over memory that torch does not own.

Most bytes of a load go from a buffer to a contiguous tensor of the same dtype: plain copies. A
call of ``memmove`` for each costs a tenth of slicing two tensors and copying one to the other,
starts none of torch's threads beside the lanes that already run, and reads from read-only memory
without a warning. Whoever calls keeps the memory alive.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import deque

import torch

from ckpipe.memory.streaming import streaming_copy, streaming_moves

_SMALL_BYTES = 64 << 10

_move_small = ctypes.PyDLL(None).memmove
_move_any = ctypes.CDLL(None).memmove
for _move in (_move_small, _move_any):
    _move.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    _move.restype = None
_move_large = streaming_copy() or _move_any


def copy_bytes(target: int, source: int, nbytes: int) -> None:
    """Copies bytes from address to address; the ranges must not overlap.

    The interpreter's lock is let go only for copies that outlast getting it back, and these go
    past the processor's cache.
    """
    if nbytes < _SMALL_BYTES:
        _move_small(target, source, nbytes)
    else:
        _move_large(target, source, nbytes)


def copy_each(
    targets: array[int], sources: array[int], sizes: array[int], *, lets_go: bool
) -> None:
    """The same for many pieces, of any sizes, in one call where that can be.

    Args:
        targets: Where each piece goes.
        sources: Where it is.
        sizes: How many bytes it has.
        lets_go: Whether the interpreter's lock is let go, once; where it is not one call, whether
            for each large piece.

    Raises:
        ValueError: If they are not as many of each.
    """
    if not len(targets) == len(sources) == len(sizes):
        raise ValueError("There is not a target, a source and a size for each piece")
    move_each = streaming_moves(lets_go=lets_go)
    if move_each is not None:
        move_each(targets, sources, sizes)
    else:
        copy = copy_bytes if lets_go else _move_small
        deque(map(copy, targets, sources, sizes), maxlen=0)


_MADV_POPULATE_WRITE = 23  # <asm-generic/mman-common.h>, since Linux 5.14

_advise = ctypes.CDLL(None).madvise
_advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def populate(address: int, nbytes: int) -> None:
    """Backs pages with memory without changing what they hold, where the kernel can do that.

    Older kernels back them at the first write; nothing but speed depends on it.
    """
    _advise(address, nbytes, _MADV_POPULATE_WRITE)


_MADV_COLLAPSE = 25  # <asm-generic/mman-common.h>, since Linux 6.1


def join_pages(address: int, nbytes: int) -> None:
    """Has huge pages take the place of small ones, where the kernel can do that.

    What the memory holds does not change, and it may be in use meanwhile: pages that a device
    just reads stay what they are. The mapping must be advised for huge pages.
    """
    _advise(address, nbytes, _MADV_COLLAPSE)


def bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """A tensor of uint8 over memory, to be read only, that is a copy if it is not aligned."""
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    return tensor.clone() if address % _MAX_ITEM else tensor


_MAX_ITEM = 16
