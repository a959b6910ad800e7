"""How the blocks of a data file are filled from tensors: a program made once for each plan.

Making the program is pure. Running it is one call for each block, in one of several worker
threads. Bytes that lie in host memory as the file wants them are moved by ``memmove``: torch's
own parallel copy waits for its slowest thread at every tensor, and loses more than a core's share
when a checksum or a trainer takes that core for a moment. Runs of small tensors are one call each,
since a call for each of twenty thousand scalars would cost more than their bytes; where there is no
code for it, torch concatenates them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ckpipe.format.boxes import Box, box_shape, flat_range_boxes, flat_start
from ckpipe.format.cargo import BlockPlace, Span
from ckpipe.format.dtypes import DTYPES
from ckpipe.memory.arena import Block
from ckpipe.memory.raw_memory import copy_bytes
from ckpipe.memory.streaming import streaming_gather
from ckpipe.plans.drafting import Source
from ckpipe.plans.planning import RankPlan
from ckpipe.state.captured import Captured
from ckpipe.state.tensors import TensorLeaf

SMALL_ELEMENTS = 32 << 10
"""Tensors of up to so many elements are gathered into runs: torch copies those with one thread."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Copies a part of one tensor's elements, in row-major order.

    Args:
        tensor: The number of the tensor.
        lo: The first element.
        hi: Behind the last element.
        at: Where they go in the block, in bytes.
        flat: Whether they lie in host memory just so, one behind the other.
        part: The box of the tensor whose elements are counted; None for all of it.
    """

    tensor: int
    lo: int
    hi: int
    at: int
    flat: bool
    part: Box | None = None


@dataclass(frozen=True, slots=True)
class Gather:
    """Copies the elements of many small tensors of one dtype, one behind the other.

    Args:
        tensors: The numbers of the tensors.
        sizes: How many bytes each has.
        at: Where they go in the block, in bytes.
    """

    tensors: array[int]
    sizes: array[int]
    at: int

    @property
    def nbytes(self) -> int:
        """How many bytes they are."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class CopyWindow:
    """Copies a part of the memory that a tensor's elements lie in.

    Args:
        tensor: The number of the tensor.
        lo: The first byte, from the tensor's first element on.
        hi: Behind the last byte.
        at: Where they go in the block, in bytes.
    """

    tensor: int
    lo: int
    hi: int
    at: int


@dataclass(frozen=True, slots=True)
class Fill:
    """Writes fixed bytes: a piece of the header, or zeros where nothing else is.

    Args:
        data: The bytes.
        at: Where they go in the block, in bytes.
    """

    data: bytes
    at: int


Step = Copy | Gather | CopyWindow | Fill


@dataclass(frozen=True, slots=True)
class BlockPlan(BlockPlace):
    """One block of a data file, and how it comes about.

    Args:
        steps: What fills it.
    """

    steps: tuple[Step, ...]


def plan_blocks(
    plan: RankPlan, leaves: Sequence[TensorLeaf], block_bytes: int
) -> tuple[BlockPlan, ...]:
    """Cuts the files of a plan into blocks and says what fills each.

    Args:
        plan: The plan.
        leaves: Tensors that the plan fits; only their layouts are looked at.
        block_bytes: The size of a block.
    """
    blocks: list[BlockPlan] = []
    for number, file in enumerate(plan.files):
        cutter = _Cutter(leaves, block_bytes, -(-file.size // block_bytes))
        cutter.fill(0, file.header)
        for entry_number in file.entries:
            entry = plan.layout.entries[entry_number]
            start = len(file.header) + entry.offset
            cutter.span(entry_number, start, entry.nbytes)
            end = 0
            for source in plan.sources[entry_number]:
                if source.offset > end:
                    cutter.fill(start + end, bytes(source.offset - end))
                cutter.source(source, start + source.offset)
                end = source.offset + source.nbytes
        for index, (steps, spans) in enumerate(zip(cutter.steps, cutter.spans, strict=True)):
            offset = index * block_bytes
            nbytes = min(block_bytes, file.size - offset)
            gathered = tuple(_gather(steps, leaves))
            blocks.append(BlockPlan(number, offset, nbytes, tuple(spans), gathered))
    return tuple(blocks)


class _Cutter:
    def __init__(self, leaves: Sequence[TensorLeaf], block_bytes: int, blocks: int) -> None:
        self._leaves, self._block_bytes = leaves, block_bytes
        self.steps: list[list[Step]] = [[] for _ in range(blocks)]
        self.spans: list[list[Span]] = [[] for _ in range(blocks)]

    def _cut(self, start: int, nbytes: int) -> Iterator[tuple[int, int, int, int]]:
        """Yields block, position in it, and bounds within the piece, for a piece of the file."""
        done = 0
        while done < nbytes:
            block, at = divmod(start + done, self._block_bytes)
            length = min(nbytes - done, self._block_bytes - at)
            yield block, at, done, done + length
            done += length

    def fill(self, start: int, data: bytes) -> None:
        for block, at, lo, hi in self._cut(start, len(data)):
            self.steps[block].append(Fill(data[lo:hi], at))

    def span(self, entry: int, start: int, nbytes: int) -> None:
        for block, at, lo, hi in self._cut(start, nbytes):
            self.spans[block].append(Span(entry, lo, hi, at))

    def source(self, source: Source, start: int) -> None:
        leaf = self._leaves[source.tensor]
        item = DTYPES[leaf.dtype].itemsize
        flat = leaf.device == "cpu" and not leaf.lazy and leaf.contiguous
        part, first = source.part, 0
        if part is not None and leaf.contiguous:
            begin = flat_start(leaf.shape, part)
            # Whole rows of a contiguous tensor lie one behind the other like the tensor itself.
            part, first = (part, 0) if begin is None else (None, begin)
        flat = flat and part is None
        for block, at, lo, hi in self._cut(start, source.nbytes):
            step: Step
            if source.skip is None:
                step = Copy(source.tensor, first + lo // item, first + hi // item, at, flat, part)
            else:
                step = CopyWindow(source.tensor, source.skip + lo, source.skip + hi, at)
            self.steps[block].append(step)


def _gather(steps: list[Step], leaves: Sequence[TensorLeaf]) -> Iterator[Step]:
    run: list[Copy] = []
    for step in steps:
        if run and not (isinstance(step, Copy) and _continues(step, run[-1], leaves)):
            yield from _close(run, leaves)
            run = []
        if isinstance(step, Copy) and _is_small(step, leaves[step.tensor]):
            run.append(step)
        else:
            yield step
    yield from _close(run, leaves)


def _is_small(step: Copy, leaf: TensorLeaf) -> bool:
    return (
        step.flat
        and step.hi - step.lo <= SMALL_ELEMENTS
        and (step.hi - step.lo) * leaf.itemsize == leaf.nbytes
    )


def _continues(step: Copy, last: Copy, leaves: Sequence[TensorLeaf]) -> bool:
    leaf = leaves[step.tensor]
    return leaf.dtype == leaves[last.tensor].dtype and _is_small(step, leaf)


def _close(run: list[Copy], leaves: Sequence[TensorLeaf]) -> Iterator[Step]:
    if len(run) < 3:
        yield from run
        return
    sizes = array("q", [leaves[step.tensor].nbytes for step in run])
    yield Gather(array("q", [step.tensor for step in run]), sizes, run[0].at)


def tensors_of(plan: BlockPlan) -> Iterator[int]:
    """The numbers of the tensors that fill a block, perhaps several times each."""
    for step in plan.steps:
        match step:
            case Gather():
                yield from step.tensors
            case Copy() | CopyWindow():
                yield step.tensor
            case Fill():
                pass


def split_block(plan: BlockPlan, later: set[int]) -> tuple[BlockPlan, BlockPlan]:
    """The two halves of a block's work: what must be copied at once, and what may be later.

    Args:
        plan: The block.
        later: The numbers of the tensors that may be copied later.
    """
    soon: list[Step] = []
    late: list[Step] = []
    for step in plan.steps:
        match step:
            case Fill():
                late.append(step)
            case Gather():
                (late if later.issuperset(step.tensors) else soon).append(step)
            case Copy() | CopyWindow():
                (late if step.tensor in later else soon).append(step)
    return replace(plan, steps=tuple(soon)), replace(plan, steps=tuple(late))


def fill_block(plan: BlockPlan, state: Captured, block: Block) -> None:
    """Fills a block; copies from a device may still be on their way when it returns."""
    leaves, memory = state.tensors, state.memory
    for step in plan.steps:
        match step:
            case Copy(flat=True):
                leaf = leaves[step.tensor]
                item = leaf.itemsize
                _move(block, step.at, leaf.address + step.lo * item, (step.hi - step.lo) * item)
            case Copy():
                _copy(step, memory[step.tensor], block.tensor)
            case Gather():
                _gather_into(block, step, state)
            case CopyWindow():
                leaf = leaves[step.tensor]
                if leaf.device == "cpu":
                    _move(block, step.at, leaf.address + step.lo, step.hi - step.lo)
                else:
                    target = block.tensor[step.at : step.at + step.hi - step.lo]
                    target.copy_(
                        _bytes_from(memory[step.tensor])[step.lo : step.hi], non_blocking=True
                    )
            case Fill():
                block.view[step.at : step.at + len(step.data)] = step.data


def _gather_into(block: Block, step: Gather, state: Captured) -> None:
    gather = streaming_gather()
    if gather is None:
        parts = [state.memory[number].view(-1) for number in step.tensors]
        target = block.tensor[step.at : step.at + step.nbytes].view(parts[0].dtype)
        torch.cat(parts, out=target)
        return
    assert step.nbytes <= len(block.view) - step.at
    sources = state.addresses[np.frombuffer(step.tensors, np.int64)]
    gather(block.address + step.at, array("q", sources.tobytes()), step.sizes)


def _move(block: Block, at: int, source: int, nbytes: int) -> None:
    assert at + nbytes <= len(block.view)
    copy_bytes(block.address + at, source, nbytes)


def _copy(step: Copy, tensor: torch.Tensor, block: torch.Tensor) -> None:
    end = step.at + (step.hi - step.lo) * tensor.itemsize
    target = block[step.at : end].view(tensor.dtype)
    if step.part is not None:
        tensor = _narrowed(tensor, step.part[0], box_shape(step.part))
    if step.hi - step.lo == tensor.numel():
        target.view(tensor.shape).copy_(tensor, non_blocking=True)
    elif tensor.is_contiguous():
        target.copy_(tensor.view(-1)[step.lo : step.hi], non_blocking=True)
    else:
        done = 0
        for starts, sizes in flat_range_boxes(tensor.shape, step.lo, step.hi):
            part = _narrowed(tensor, starts, sizes)
            target[done : done + part.numel()].view(part.shape).copy_(part, non_blocking=True)
            done += part.numel()


def _narrowed(tensor: torch.Tensor, starts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def _bytes_from(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes from a tensor's first element to the end of its storage."""
    storage = tensor.untyped_storage()
    start = tensor.storage_offset() * tensor.itemsize
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(storage, start, (storage.nbytes() - start,), (1,))
