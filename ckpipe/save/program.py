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

import numpy as np
import numpy.typing as npt
import torch
from torch.optim import Optimizer

from ckpipe.format.boxes import Box, box_shape, flat_range_boxes, flat_start
from ckpipe.format.checksum import CHUNK_BYTES, chunk_spans
from ckpipe.format.data_file import BlockRange, DataFiles, EntryRange
from ckpipe.lock.late_copies import (
    ByteSample,
    OwnedFacts,
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
    """

    tensor: int
    lo: int
    hi: int
    at: int
    part: Box | None = None


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

    def of(self, chosen: set[int]) -> Gather:
        """The pieces of some tensors.

        Args:
            chosen: Their numbers.
        """
        marks = bytes(number in chosen for number in self.tensors)
        columns = (self.tensors, self.skips, self.sizes, self.at, self.slots)
        return Gather(*(array("q", compress(column, marks)) for column in columns))


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
class BlockPlan(BlockRange):
    """One block of a data file, and how it comes about.

    Args:
        steps: What fills it.
        sum_count: How many checksums it has.
    """

    steps: tuple[Step, ...]
    sum_count: int


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
                cutter.source(source, start)
                end = source.offset + source.nbytes
        columns = zip(cutter.steps, cutter.spans, cutter.sum_counts, strict=True)
        for index, (steps, spans, count) in enumerate(columns):
            offset = index * block_bytes
            nbytes = min(block_bytes, file.size - offset)
            blocks.append(BlockPlan(number, offset, nbytes, tuple(spans), tuple(steps), count))
    return tuple(blocks)


class _Cutter:
    def __init__(self, leaves: Sequence[TensorLeaf], block_bytes: int, blocks: int) -> None:
        self._leaves, self._block_bytes = leaves, block_bytes
        self.steps: list[list[Step]] = [[] for _ in range(blocks)]
        self.spans: list[list[EntryRange]] = [[] for _ in range(blocks)]
        self.sum_counts = [0] * blocks
        self._gathers: dict[int, Gather] = {}
        self._spans: dict[int, tuple[EntryRange, int]] = {}

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
        """Takes an entry, whose sources follow."""
        self._spans.clear()
        for block, at, lo, hi in self._cut(start, nbytes):
            span = EntryRange(entry, lo, hi, at)
            self.spans[block].append(span)
            self._spans[block] = span, self.sum_counts[block]
            self.sum_counts[block] += sum(1 for _ in chunk_spans(lo, hi))

    def source(self, source: Source, start: int) -> None:
        """Takes a source of an entry that begins somewhere in the file."""
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
            if skip is None:
                step = Copy(source.tensor, first + lo // item, first + hi // item, at, part)
                self.steps[block].append(step)
            elif host:
                self._pieces(block, source, skip, lo, hi)
            else:
                self.steps[block].append(CopyWindow(source.tensor, skip + lo, skip + hi, at))

    def _pieces(self, block: int, source: Source, skip: int, lo: int, hi: int) -> None:
        """Adds bytes of host memory to the one step that moves all those of a block.

        They are cut where checksums end.
        """
        gather = self._gathers.get(block)
        if gather is None:
            gather = Gather(*(array("q") for _ in range(5)))
            self._gathers[block] = gather
            self.steps[block].append(gather)
        span, before = self._spans[block]
        for chunk, begin, end in chunk_spans(source.offset + lo, source.offset + hi):
            whole = (
                begin == max(span.lo, chunk * CHUNK_BYTES),
                end == min(span.hi, (chunk + 1) * CHUNK_BYTES),
            )
            gather.tensors.append(source.tensor)
            gather.skips.append(skip + begin - source.offset)
            gather.sizes.append(end - begin)
            gather.at.append(span.at + begin - span.lo)
            gather.slots.append(before + chunk - span.lo // CHUNK_BYTES if all(whole) else -1)


def tensors_of(plan: BlockPlan) -> array[int]:
    """The numbers of the tensors that fill a block, perhaps several times each."""
    numbers = array("q")
    for step in plan.steps:
        match step:
            case Gather():
                numbers.extend(step.tensors)
            case Copy() | CopyWindow():
                numbers.append(step.tensor)
            case Fill():
                pass
    return numbers


def devices_of(state: Captured) -> set[str]:
    """The devices that tensors of a state are on."""
    return {leaf.device for leaf in state.tensors}


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
                owned = later.intersection(step.tensors)
                for half, numbers in ((late, owned), (soon, {*step.tensors} - owned)):
                    if numbers:
                        half.append(step.of(numbers))
            case Copy() | CopyWindow():
                (late if step.tensor in later else soon).append(step)
    return replace(plan, steps=tuple(soon)), replace(plan, steps=tuple(late))


FoundSums = tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]
"""Checksums of a block that are known once it is copied: which of the block's, and their values."""


def fill_blocks(work: Sequence[tuple[BlockPlan, Block]], state: Captured) -> list[FoundSums | None]:
    """Fills blocks; copies from a device may still be on their way when it returns.

    What lies in host memory is moved into all of them by one call.

    Returns:
        For each block, the checksums that were computed on the way, if there are any.
    """
    moves = _Moves(state.addresses)
    for number, (plan, block) in enumerate(work):
        for step in plan.steps:
            match step:
                case Gather():
                    moves.add(number, step, block)
                case Copy():
                    _copy(step, state.memory[step.tensor], block.tensor)
                case CopyWindow():
                    target = block.tensor[step.at : step.at + step.hi - step.lo]
                    window = _bytes_from(state.memory[step.tensor])[step.lo : step.hi]
                    target.copy_(window, non_blocking=window.device.type in FENCED)
                case Fill():
                    block.view[step.at : step.at + len(step.data)] = step.data
    found = moves.run()
    return [found.get(number) for number in range(len(work))]


class _Moves:
    """Pieces of host memory, and where they go, in one or several blocks.

    Args:
        addresses: Where each tensor of the state begins.
    """

    def __init__(self, addresses: npt.NDArray[np.uint64]) -> None:
        self._addresses = addresses
        self._targets, self._sources, self._sizes = array("q"), array("q"), array("q")
        self._slots: dict[int, array[int]] = {}

    def add(self, number: int, step: Gather, block: Block) -> None:
        """Takes the one step of a block that moves pieces.

        Args:
            number: What the block is called in the result.
            step: The step.
            block: Where the pieces go.
        """
        numbers, skips, sizes, at = (
            np.frombuffer(column, np.int64)
            for column in (step.tensors, step.skips, step.sizes, step.at)
        )
        assert at.min() >= 0
        assert (at + sizes).max() <= len(block.view)
        self._targets.frombytes((at + block.address).tobytes())
        self._sources.frombytes((self._addresses[numbers] + skips.view(np.uint64)).tobytes())
        self._sizes.extend(step.sizes)
        self._slots[number] = step.slots

    def run(self) -> dict[int, FoundSums]:
        """Moves them all; returns the checksums of each block of which some were computed."""
        if not self._sizes:
            return {}
        found_sums = copy_crc32c_each(self._targets, self._sources, self._sizes)
        sums, done = np.frombuffer(found_sums, np.uint32), 0
        found: dict[int, FoundSums] = {}
        for number, column in self._slots.items():
            slots = np.frombuffer(column, np.int64)
            whole = slots >= 0
            found[number] = (slots[whole], sums[done : done + len(slots)][whole])
            done += len(slots)
        return found


def _copy(step: Copy, tensor: torch.Tensor, block: torch.Tensor) -> None:
    queued = tensor.device.type in FENCED
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
        facts: What was known of the tensors that optimizers own; None if not enough.
        owned: The numbers of the leaves that are copied later, in order.
        halves: For each block, its work before and after.
        samples: For each block, of what is copied after; it tells if that was changed before.
        worth: False if all is copied before, whatever optimizers own.
    """

    leaves: list[TensorLeaf]
    program: CopyProgram
    facts: OwnedFacts | None = None
    owned: list[int] = field(default_factory=list)
    halves: list[tuple[BlockPlan, BlockPlan]] = field(default_factory=list)
    samples: list[ByteSample] = field(default_factory=list)
    worth: bool = True

    @property
    def all_later(self) -> bool:
        """Tell whether nothing has to be copied before training goes on."""
        return bool(self.owned) and not any(at_once.steps for at_once, _ in self.halves)

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
        facts = self.facts
        return facts is not None and facts.hold(owned_tensors(owners), captured.objects)


def divide(captured: Captured, program: CopyProgram, owners: Sequence[Optimizer]) -> EarlyLateSplit:
    """Divides a save's work: what optimizers own is copied later, if that is worth it.

    Args:
        captured: The state, with the objects that the walk has met.
        program: Its program.
        owners: The optimizers.
    """
    tensors = owned_tensors(owners)
    owned = owned_leaves(captured.tensors, tensors)
    if not worth_watching([captured.tensors[number] for number in owned]):
        return EarlyLateSplit(captured.tensors, program, worth=False)
    halves = [split_block(plan, owned) for plan in program.blocks]
    try:
        facts = OwnedFacts(tensors, captured.objects)
    except RuntimeError:  # such as that there are no strides
        facts = None
    samples = [ByteSample(captured.tensors, tensors_of(later)) for _, later in halves]
    return EarlyLateSplit(captured.tensors, program, facts, sorted(owned), halves, samples)
