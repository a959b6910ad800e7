"""How the blocks of a data file are filled from tensors: a program made once for each plan.

Making the program is pure. Running it is one call for each block, in one of several worker
threads. Bytes that lie in host memory as the file wants them are moved as they are: torch's own
parallel copy waits for its slowest thread at every tensor, and loses more than a core's share when
a checksum or a trainer takes that core for a moment. All that stand one behind the other in a block
are one call, in which the interpreter is free: beside a trainer in Python each further call would
take it from that, and a call for each of twenty thousand scalars would cost more than their bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import numpy as np
import torch

from ckpipe.format.boxes import Box, box_shape, flat_range_boxes, flat_start
from ckpipe.format.cargo import BlockPlace, Span
from ckpipe.memory.arena import Block
from ckpipe.memory.raw_memory import copy_each
from ckpipe.memory.streaming import streaming_gather
from ckpipe.plans.drafting import Source
from ckpipe.plans.planning import RankPlan
from ckpipe.state.captured import Captured
from ckpipe.state.tensors import TensorLeaf


@dataclass(frozen=True, slots=True)
class Copy:
    """Has torch copy a part of one tensor's elements, in row-major order.

    Args:
        tensor: The number of the tensor.
        lo: The first element.
        hi: Behind the last element.
        at: Where they go in the block, in bytes.
        part: The box of the tensor whose elements are counted; None for all of it.
    """

    tensor: int
    lo: int
    hi: int
    at: int
    part: Box | None = None


@dataclass(frozen=True, slots=True)
class Gather:
    """Copies pieces of host memory, one behind the other.

    Args:
        tensors: For each piece, the number of the tensor whose memory it is.
        skips: Where it begins, in bytes from the tensor's first element on.
        sizes: How many bytes it has.
        at: Where the first one goes in the block, in bytes.
    """

    tensors: array[int]
    skips: array[int]
    sizes: array[int]
    at: int

    @property
    def nbytes(self) -> int:
        """How many bytes they are."""
        return sum(self.sizes)

    def parts(self, chosen: set[int]) -> Iterator[tuple[bool, Gather]]:
        """Cuts it where pieces of some tensors are followed by others, or others by those.

        Args:
            chosen: The numbers of the tensors.

        Yields:
            Whether the pieces of a part are of those tensors, and the part.
        """
        ends = list(accumulate(self.sizes, initial=self.at))
        for of_those, numbers in groupby(
            range(len(self.tensors)), lambda n: self.tensors[n] in chosen
        ):
            first, *others = numbers
            cut = slice(first, first + 1 + len(others))
            yield of_those, Gather(self.tensors[cut], self.skips[cut], self.sizes[cut], ends[first])


@dataclass(frozen=True, slots=True)
class CopyWindow:
    """Has torch copy a part of the memory on a device that a tensor's elements lie in.

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
            blocks.append(BlockPlan(number, offset, nbytes, tuple(spans), tuple(steps)))
    return tuple(blocks)


class _Cutter:
    def __init__(self, leaves: Sequence[TensorLeaf], block_bytes: int, blocks: int) -> None:
        self._leaves, self._block_bytes = leaves, block_bytes
        self.steps: list[list[Step]] = [[] for _ in range(blocks)]
        self.spans: list[list[Span]] = [[] for _ in range(blocks)]
        self._ends = [0] * blocks

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
        item = leaf.itemsize
        part, first = source.part, 0
        if part is not None and leaf.contiguous:
            begin = flat_start(leaf.shape, part)
            # Whole rows of a contiguous tensor lie one behind the other like the tensor itself.
            part, first = (part, 0) if begin is None else (None, begin)
        host, skip = leaf.device == "cpu", source.skip
        if host and skip is None and part is None and leaf.contiguous and not leaf.lazy:
            skip = first * item
        for block, at, lo, hi in self._cut(start, source.nbytes):
            if skip is None:
                step = Copy(source.tensor, first + lo // item, first + hi // item, at, part)
                self.steps[block].append(step)
            elif host:
                self._piece(block, source.tensor, skip + lo, hi - lo, at)
            else:
                self.steps[block].append(CopyWindow(source.tensor, skip + lo, skip + hi, at))

    def _piece(self, block: int, tensor: int, skip: int, nbytes: int, at: int) -> None:
        """Adds a piece of host memory, to the gather before it if it stands right behind that."""
        steps = self.steps[block]
        last = steps[-1] if steps else None
        if not isinstance(last, Gather) or self._ends[block] != at:
            last = Gather(array("q"), array("q"), array("q"), at)
            steps.append(last)
        last.tensors.append(tensor)
        last.skips.append(skip)
        last.sizes.append(nbytes)
        self._ends[block] = at + nbytes


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
                for may_be_later, part in step.parts(later):
                    (late if may_be_later else soon).append(part)
            case Copy() | CopyWindow():
                (late if step.tensor in later else soon).append(step)
    return replace(plan, steps=tuple(soon)), replace(plan, steps=tuple(late))


def fill_block(plan: BlockPlan, state: Captured, block: Block) -> None:
    """Fills a block; copies from a device may still be on their way when it returns."""
    for step in plan.steps:
        match step:
            case Gather():
                _gather(step, state, block)
            case Copy():
                _copy(step, state.memory[step.tensor], block.tensor)
            case CopyWindow():
                target = block.tensor[step.at : step.at + step.hi - step.lo]
                window = _bytes_from(state.memory[step.tensor])[step.lo : step.hi]
                target.copy_(window, non_blocking=True)
            case Fill():
                block.view[step.at : step.at + len(step.data)] = step.data


def _gather(step: Gather, state: Captured, block: Block) -> None:
    assert step.nbytes <= len(block.view) - step.at
    target, numbers = block.address + step.at, np.frombuffer(step.tensors, np.int64)
    starts = state.addresses[numbers] + np.frombuffer(step.skips, np.int64).view(np.uint64)
    sources = array("q", starts.tobytes())
    gather = streaming_gather()
    if gather is not None:
        gather(target, sources, step.sizes)
    else:
        copy_each(list(accumulate(step.sizes, initial=target))[:-1], sources, step.sizes)


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
