"""Host memory for staging: a pool of blocks in which saves build their files; it is reused.

Touching fresh memory costs many times a copy into touched memory. So the pool keeps blocks between
saves and hands out the most recently used first (LIFO): while an upload keeps up with the copy,
even the first save touches few of them. A block belongs to one save from :meth:`Arena.take` to
:meth:`Arena.give`; the pool does not remember its content. Blocks are registered with CUDA, so that
copies from a device run at full speed.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import mmap
import os
import warnings
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ckpipe.memory import cuda
from ckpipe.memory.mapping import HUGE_PAGE_BYTES, close_private, keep_private, map_to_write

logger = logging.getLogger("ckpipe")


@functools.cache
def _mention() -> None:
    """Log once in a process, however many pipelines are opened."""
    logger.debug(
        "This program does not use CUDA yet, so saves are copied into ordinary host memory"
    )


# <asm-generic/mman-common.h>, since Linux 5.14 and 6.1. Nothing but speed depends on them.
_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(eq=False, slots=True, weakref_slot=True)
class Block:
    """A page-aligned block of host memory.

    Args:
        view: Its bytes.
        tensor: The same bytes as a tensor of uint8.
        address: The address of its first byte.
        segment: The segment to which it belongs.
        touched: Whether its pages are backed with memory.
        joined: Whether small pages were collapsed to huge ones, where that is of use.
        uses: The number of times it was handed out; content from before the last time is gone.
    """

    view: memoryview
    tensor: torch.Tensor
    address: int
    segment: Segment
    touched: bool = False
    uses: int = 0
    joined: bool = False

    @property
    def at(self) -> int:
        """Its offset in its segment, in bytes."""
        return self.address - self.segment.tensor.data_ptr()

    def collapse_huge_pages(self) -> None:
        """Collapse small pages to huge ones; blocking, for a worker thread.

        The kernel gives huge pages to private memory by itself, to shared memory only on request. A
        disk takes bytes from small pages at half the speed. The block may be in use.
        """
        begin, end = self.segment.bounds
        low = max(begin, self.address - HUGE_PAGE_BYTES)  # a huge page may reach over the edges
        high = min(end, self.address + len(self.view) + HUGE_PAGE_BYTES)
        _madvise(low, high - low, _MADV_COLLAPSE)
        self.joined = True

    def touch(self) -> None:
        """Back every page with memory; blocking, for a worker thread.

        The content of the block does not change, so it may be in use meanwhile.
        """
        _madvise(self.address, len(self.view), _MADV_POPULATE_WRITE)
        self.touched = True


@dataclass(eq=False, slots=True)
class Segment:
    """The unit by which the pool grows and shrinks.

    Args:
        memory: The mapping.
        tensor: Its bytes.
        blocks: The number of its blocks.
        number: Its number, unique among all segments that the arena ever had.
        descriptor: The file descriptor by which another process can map it; None if it is private.
        offset: The offset of the mapping in the descriptor's file, in bytes.
        pinned: Whether it is registered with CUDA.
    """

    memory: mmap.mmap
    tensor: torch.Tensor
    blocks: int
    number: int
    descriptor: int | None = None
    offset: int = 0
    pinned: bool = False

    @property
    def bounds(self) -> tuple[int, int]:
        """The address of its first byte, and the address behind its last byte."""
        return self.tensor.data_ptr(), self.tensor.data_ptr() + len(self.memory)


class Arena:
    """A pool of equal blocks, not safe for use by two threads at once.

    Args:
        block_bytes: The size of a block; a multiple of the page size.
        pin: Whether to register memory with CUDA, whole segments at a time, once the program has
            initialised it.
        shared: Whether another process can map the memory.
    """

    def __init__(self, block_bytes: int, *, pin: bool = False, shared: bool = False) -> None:
        self.block_bytes = block_bytes
        self._pin, self._shared, self._warned = pin, shared, False
        self._segments: list[Segment] = []
        self._numbers = itertools.count()
        self.on_drop: Callable[[Segment], None] = lambda segment: None
        """Called with each segment that is returned to the system."""
        self._free: list[Block] = []
        """The untouched blocks, then the touched ones; the last is taken first."""

    @property
    def blocks(self) -> int:
        """The number of blocks, free or not."""
        return sum(segment.blocks for segment in self._segments)

    @property
    def free_blocks(self) -> int:
        """The number of free blocks."""
        return len(self._free)

    @property
    def touched_blocks(self) -> int:
        """The number of free blocks that are touched: a write to them causes no page fault."""
        return len(self._free) - self._untouched_blocks

    @property
    def _untouched_blocks(self) -> int:
        return bisect_left(self._free, True, key=lambda block: block.touched)

    @property
    def next_untouched(self) -> Block | None:
        """The next free block to touch ahead of time; None if all are touched."""
        untouched = self._untouched_blocks
        return self._free[untouched - 1] if untouched else None

    @property
    def next_small_paged(self) -> Block | None:
        """A free block of shared memory whose small pages are not collapsed; None without one."""
        if not self._shared or self.block_bytes < HUGE_PAGE_BYTES:
            return None
        return next((block for block in self._free if block.touched and not block.joined), None)

    def reserve(self, blocks: int) -> None:
        """Grow until at least ``blocks`` blocks are free; their pages are not touched yet.

        Raises:
            MemoryError: If the system has no address space left.
        """
        missing = blocks - self.free_blocks
        if missing > 0:
            self._grow(missing)

    def take(self) -> Block:
        """Hand out a free block, touched blocks first; grow if there is none."""
        if not self._free:
            self._grow(1)
        block = self._free.pop()
        block.uses += 1
        return block

    def take_back(self, block: Block) -> bool:
        """Hand out a certain free block with its old content; return False if it is not free."""
        if block not in self._free:
            return False
        self._free.remove(block)
        return True

    def give(self, block: Block) -> None:
        """Take a block back; the caller must not touch it any more."""
        block.touched = True
        if block.segment in self._segments:  # else the arena was closed in the meantime
            self._free.append(block)

    def trim(self, keep: int) -> None:
        """Return memory to the system until about ``keep`` blocks are left.

        Only segments without a block in use can go, the newest first.
        """
        for segment in reversed(self._segments):
            if self.blocks - segment.blocks < keep:
                continue
            members = [each for each in self._free if each.segment is segment]
            if len(members) == segment.blocks:
                self._drop(segment)

    def close(self) -> None:
        """Unpin and forget all memory. It is unmapped once no view of it is referenced."""
        for segment in list(self._segments):
            self._drop(segment)

    def _grow(self, blocks: int) -> None:
        size = blocks * self.block_bytes
        try:
            memory, descriptor, offset = _map_shared(size) if self._shared else _map_private(size)
        except OSError as error:
            raise MemoryError(f"No memory for {size} bytes: {error}") from error
        if size >= HUGE_PAGE_BYTES:
            _advise(memory, "MADV_HUGEPAGE")
        # A forked DataLoader worker would otherwise share, and on writes copy, the arena.
        _advise(memory, "MADV_DONTFORK")
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        segment = Segment(memory, tensor, blocks, next(self._numbers), descriptor, offset)
        if self._pin:
            self._register(segment)
        view = memoryview(memory)
        new = []
        for at in range(0, size, self.block_bytes):
            tensor = segment.tensor[at : at + self.block_bytes]
            piece = view[at : at + self.block_bytes]
            new.append(Block(piece, tensor, tensor.data_ptr(), segment))
        self._segments.append(segment)
        self._free[:0] = reversed(new)

    def _register(self, segment: Segment) -> None:
        """Register a segment with CUDA; if that fails, the memory stays pageable."""
        if not cuda.in_use():
            _mention()
            return
        refusal = cuda.register(segment.tensor)
        segment.pinned = not refusal
        if refusal and not self._warned:
            self._warned = True
            warnings.warn(
                "ckpipe stages through pageable memory, which is slower: CUDA would not register "
                f"the memory ({refusal}). Raise the limit of locked memory (ulimit -l)",
                RuntimeWarning,
                stacklevel=3,
            )

    def _drop(self, segment: Segment) -> None:
        if segment.pinned:
            cuda.unregister(segment.tensor)
        self._segments.remove(segment)
        self._free = [block for block in self._free if block.segment is not segment]
        self.on_drop(segment)
        if segment.descriptor is not None:
            close_private(segment.descriptor)


def _map_private(size: int) -> tuple[mmap.mmap, None, int]:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), None, 0


def _map_shared(size: int) -> tuple[mmap.mmap, int, int]:
    """Map a new in-memory file, aligned so that its huge pages are huge in the mapping too."""
    descriptor = keep_private(os.memfd_create("ckpipe", os.MFD_CLOEXEC))
    try:
        os.ftruncate(descriptor, size + HUGE_PAGE_BYTES)  # holes cost nothing
        memory, offset = map_to_write(descriptor, size)
        return memory, descriptor, offset
    except BaseException:
        close_private(descriptor)
        raise


def _advise(memory: mmap.mmap, name: str) -> None:
    advice = getattr(mmap, name, None)
    if advice is not None:
        try:
            memory.madvise(advice)
        except OSError:  # the kernel was built without it; the memory works all the same
            return
