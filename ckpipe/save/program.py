"""Fill the blocks of a data file from tensors, by a program that is made once for each plan.

With guarded optimizers the work is divided: what has to be copied at once, and what beside
training.

Making the program is pure. Running it is one call for one block or a few, in one of several worker
threads. Bytes that lie in host memory as the file wants them are moved as they are: torch's own
parallel copy waits for its slowest thread at every tensor, and loses more than a core's share when
a checksum or a trainer takes that core for a moment. All of them are one call, in which the
interpreter is free: beside a trainer in Python each further call would take it from that, and a
call for each of twenty thousand scalars would cost more than their bytes. That call also computes
the checksums of what it moves, so that no byte is fetched for them again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.optim import Optimizer

from ckpipe.format.boxes import Box, box_shape, flat_range_boxes, flat_start
from ckpipe.format.checksum import CHUNK_BYTES, chunk_spans
from ckpipe.format.data_file import BlockRange, DataFiles, EntryRange
from ckpipe.lock.late_copies import (
    ByteSample,
    owned_facts,
    owned_leaves,
    owned_tensors,
    worth_watching,
)
from ckpipe.memory.arena import Block
from ckpipe.memory.cuda import FENCED
from ckpipe.memory.native import copy_crc32c_each
from ckpipe.plan.plan import RankPlan, Source
from ckpipe.state.flatten import Captured
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
        raw: Whether what is counted are the bytes of the memory that the tensor's elements lie in,
            from its first element on.
    """

    tensor: int
    lo: int
    hi: int
    at: int
    part: Box | None = None
    raw: bool = False


@dataclass(frozen=True, slots=True)
class Gather:
    """Moves pieces of host memory.

    Args:
        tensors: For each piece, the number of the tensor whose memory it is.
        skips: Where it begins, in bytes from the tensor's first element on.
        sizes: How many bytes it has.
        at: Where it goes in the block, in bytes.
        slots: The number of the checksum among the block's that is its own; -1 if it has none.
    """

    tensors: array[int]
    skips: array[int]
    sizes: array[int]
    at: array[int]
    slots: array[int]

    def where(self, marks: Sequence[bool]) -> Gather:
        """The pieces that are marked."""
        columns = (self.tensors, self.skips, self.sizes, self.at, self.slots)
        return Gather(*(array("q", compress(column, marks)) for column in columns))


@dataclass(frozen=True, slots=True)
class BlockPlan(BlockRange):
    """One block of a data file, and how it comes about.

    Args:
        fills: Fixed bytes, such as a piece of the header or zeros between tensors, and where they
            go in the block.
        copies: What torch copies.
        gather: What is moved as it lies in host memory.
        sum_count: How many checksums it has.
    """

    fills: tuple[tuple[int, bytes], ...]
    copies: tuple[Copy, ...]
    gather: Gather
    sum_count: int

    @property
    def is_empty(self) -> bool:
        """Tell whether there is nothing to do."""
        return not (self.fills or self.copies or self.gather.sizes)

    @property
    def tensors(self) -> array[int]:
        """The numbers of the tensors that fill the block, perhaps several times each."""
        return self.gather.tensors + array("q", [copy.tensor for copy in self.copies])

    def split(self, later: set[int]) -> tuple[BlockPlan, BlockPlan]:
        """The two halves of its work: what must be copied at once, and what may be later.

        Args:
            later: The numbers of the tensors that may be copied later.
        """
        late = [number in later for number in self.gather.tensors]
        soon_copies = tuple(copy for copy in self.copies if copy.tensor not in later)
        late_copies = tuple(copy for copy in self.copies if copy.tensor in later)
        soon_gather = self.gather.where([not each for each in late])
        return (
            replace(self, fills=(), copies=soon_copies, gather=soon_gather),
            replace(self, copies=late_copies, gather=self.gather.where(late)),
        )


def plan_blocks(
    plan: RankPlan, leaves: Sequence[TensorLeaf], block_bytes: int
) -> tuple[BlockPlan, ...]:
    """Cut the files of a plan into blocks and say what fills each.

    Args:
        plan: The plan.
        leaves: Tensors that the plan fits; only their layouts are looked at.
        block_bytes: The size of a block.
    """
    blocks: list[BlockPlan] = []
    for number, file in enumerate(plan.files):
        cutter = _Cutter(leaves, block_bytes, -(-file.size // block_bytes))
        cutter.fill(0, file.header)
        rows = plan.layout.entries[file.entries.start : file.entries.stop]
        for entry_number, entry in zip(file.entries, rows, strict=True):
            start = len(file.header) + entry.offset
            cutter.span(entry_number, start, entry.nbytes)
            end = 0
            for source in plan.sources[entry_number]:
                if source.offset > end:
                    cutter.fill(start + end, bytes(source.offset - end))
                cutter.source(source, start)
                end = source.offset + source.nbytes
        for index, draft in enumerate(cutter.drafts):
            offset = index * block_bytes
            blocks.append(
                BlockPlan(
                    number,
                    offset,
                    min(block_bytes, file.size - offset),
                    tuple(draft.spans),
                    tuple(draft.fills),
                    tuple(draft.copies),
                    draft.gather,
                    draft.sum_count,
                )
            )
    return tuple(blocks)


@dataclass(slots=True)
class _Draft:
    spans: list[EntryRange] = field(default_factory=list)
    fills: list[tuple[int, bytes]] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    gather: Gather = field(default_factory=lambda: Gather(*(array("q") for _ in range(5))))
    sum_count: int = 0
    first_sum: int = 0
    """The number of the first checksum of the last span."""


class _Cutter:
    """Cuts one file into blocks; entry by entry, each followed by its sources."""

    def __init__(self, leaves: Sequence[TensorLeaf], block_bytes: int, blocks: int) -> None:
        self._leaves, self._block_bytes = leaves, block_bytes
        self.drafts = [_Draft() for _ in range(blocks)]

    def _cut(self, start: int, nbytes: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield block, position in it, and bounds within the piece, for a piece of the file."""
        done = 0
        while done < nbytes:
            block, at = divmod(start + done, self._block_bytes)
            length = min(nbytes - done, self._block_bytes - at)
            yield block, at, done, done + length
            done += length

    def fill(self, start: int, data: bytes) -> None:
        for block, at, lo, hi in self._cut(start, len(data)):
            self.drafts[block].fills.append((at, data[lo:hi]))

    def span(self, entry: int, start: int, nbytes: int) -> None:
        for block, at, lo, hi in self._cut(start, nbytes):
            draft = self.drafts[block]
            draft.spans.append(EntryRange(entry, lo, hi, at))
            draft.first_sum = draft.sum_count
            draft.sum_count += sum(1 for _ in chunk_spans(lo, hi))

    def source(self, source: Source, start: int) -> None:
        """Take a source of an entry that begins somewhere in the file."""
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
        for block, at, lo, hi in self._cut(start + source.offset, source.nbytes):
            copies = self.drafts[block].copies
            if skip is None:
                step = Copy(source.tensor, first + lo // item, first + hi // item, at, part)
                copies.append(step)
            elif host:
                self._gather(block, source, skip, lo, hi)
            else:
                copies.append(Copy(source.tensor, skip + lo, skip + hi, at, raw=True))

    def _gather(self, block: int, source: Source, skip: int, lo: int, hi: int) -> None:
        """Add bytes of host memory, cut where checksums end."""
        draft = self.drafts[block]
        gather, span, first = draft.gather, draft.spans[-1], draft.first_sum
        for chunk, begin, end in chunk_spans(source.offset + lo, source.offset + hi):
            whole = (
                begin == max(span.lo, chunk * CHUNK_BYTES),
                end == min(span.hi, (chunk + 1) * CHUNK_BYTES),
            )
            gather.tensors.append(source.tensor)
            gather.skips.append(skip + begin - source.offset)
            gather.sizes.append(end - begin)
            gather.at.append(span.at + begin - span.lo)
            gather.slots.append(first + chunk - span.lo // CHUNK_BYTES if all(whole) else -1)


def devices_of(state: Captured) -> set[str]:
    """The devices that tensors of a state are on."""
    return {leaf.device for leaf in state.tensors}


FoundSums = tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]
"""Checksums of a block that are known once it is copied: which of the block's, and their values."""


def fill_blocks(work: Sequence[tuple[BlockPlan, Block]], state: Captured) -> list[FoundSums]:
    """Fill blocks; copies from a device may still be on their way when it returns.

    What lies in host memory is moved into all of them by one call.

    Returns:
        For each block, the checksums that were computed on the way.
    """
    targets, sources, sizes = array("q"), array("q"), array("q")
    for plan, block in work:
        for at, data in plan.fills:
            block.view[at : at + len(data)] = data
        for copy in plan.copies:
            _copy(copy, state.memory[copy.tensor], block.tensor)
        gather = plan.gather
        if gather.sizes:
            starts = np.asarray(gather.at)
            assert starts.min() >= 0
            assert (starts + gather.sizes).max() <= len(block.view)
            addresses = state.addresses[np.asarray(gather.tensors)]
            targets.frombytes((starts + block.address).tobytes())
            sources.frombytes((addresses + np.asarray(gather.skips).view(np.uint64)).tobytes())
            sizes.extend(gather.sizes)
    sums = np.asarray(copy_crc32c_each(targets, sources, sizes) if sizes else array("I"))
    found, done = [], 0
    for plan, _ in work:
        slots = np.asarray(plan.gather.slots)
        whole = slots >= 0
        found.append((slots[whole], sums[done : done + len(slots)][whole]))
        done += len(slots)
    return found


def _copy(step: Copy, tensor: torch.Tensor, block: torch.Tensor) -> None:
    queued = tensor.device.type in FENCED
    if step.raw:
        tensor = _bytes_from(tensor)
    end = step.at + (step.hi - step.lo) * tensor.itemsize
    target = block[step.at : end].view(tensor.dtype)
    if step.part is not None:
        tensor = _narrowed(tensor, step.part[0], box_shape(step.part))
    if step.hi - step.lo == tensor.numel():
        target.view(tensor.shape).copy_(tensor, non_blocking=queued)
    elif tensor.is_contiguous():
        target.copy_(tensor.view(-1)[step.lo : step.hi], non_blocking=queued)
    else:
        done = 0
        for starts, sizes in flat_range_boxes(tensor.shape, step.lo, step.hi):
            part = _narrowed(tensor, starts, sizes)
            target[done : done + part.numel()].view(part.shape).copy_(part, non_blocking=queued)
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


@dataclass(frozen=True, slots=True)
class CopyProgram:
    """A plan with the blocks that carry it out; serves every save of the same structure.

    Args:
        plan: The plan.
        blocks: What fills which block.
        files: What the rank brings to the store.
        planner: The class of the planner, for the manifest.
    """

    plan: RankPlan
    blocks: tuple[BlockPlan, ...]
    files: DataFiles
    planner: str


@dataclass(frozen=True, slots=True)
class EarlyLateSplit:
    """The parts of a save that are copied before it returns, and while training goes on.

    Args:
        leaves: The leaves of the state that was divided.
        program: The program whose blocks were divided.
        facts: What was known of the tensors that optimizers own.
        owned: The numbers of the leaves that are copied later, in order.
        halves: For each block, its work before and after.
        samples: For each block, of what is copied after; it tells if that was changed before.
        worth: False if all is copied before, whatever optimizers own.
    """

    leaves: list[TensorLeaf]
    program: CopyProgram
    facts: list[Any] = field(default_factory=list)
    owned: list[int] = field(default_factory=list)
    halves: list[tuple[BlockPlan, BlockPlan]] = field(default_factory=list)
    samples: list[ByteSample] = field(default_factory=list)
    worth: bool = True

    def serves(self, captured: Captured, program: CopyProgram, owners: Sequence[Optimizer]) -> bool:
        """Tell whether another save would be divided just so.

        Args:
            captured: Its state.
            program: Its program.
            owners: The optimizers that own some of it now.
        """
        if self.leaves is not captured.tensors or self.program is not program:
            return False
        if not self.worth:
            return True
        return owned_facts(owned_tensors(owners), captured.objects) == self.facts


def split_early_late(
    captured: Captured, program: CopyProgram, owners: Sequence[Optimizer]
) -> EarlyLateSplit:
    """Divide a save's work: what optimizers own is copied later, if that is worth it.

    Args:
        captured: The state, with the objects that the walk has met.
        program: Its program.
        owners: The optimizers.
    """
    tensors = owned_tensors(owners)
    owned = owned_leaves(captured.tensors, tensors)
    if not worth_watching([captured.tensors[number] for number in owned]):
        return EarlyLateSplit(captured.tensors, program, worth=False)
    halves = [plan.split(owned) for plan in program.blocks]
    samples = [ByteSample(captured.tensors, later.tensors) for _, later in halves]
    facts = owned_facts(tensors, captured.objects)
    return EarlyLateSplit(captured.tensors, program, facts, sorted(owned), halves, samples)
