"""Fill the blocks of a data file from tensors, by a program that is made once for each plan.

With guarded optimizers the work is divided: an early half is copied at once, a late half beside
training.

The function that makes the program is pure. Worker threads run it, one call for one block or a few.
Bytes that lie in host memory in the layout of the file are gathered by the native copy: torch's own
parallel copy waits for its slowest thread at every tensor, and loses more than a core's share when
a checksum or a trainer takes that core for a moment. All of them are one call without the GIL:
beside a trainer in Python each further call would take the GIL from it, and a call for each of
twenty thousand scalars would cost more than their bytes. That call also computes the checksums of
the bytes, so no byte is fetched twice.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.optim import Optimizer

from ckpipe.format.boxes import Box, box_shape, flat_range_boxes, flat_start
from ckpipe.format.checksum import CHUNK_BYTES, BlockCuts, SumTable, chunk_spans
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
from ckpipe.plan.plan import RankPlan, SourceRange
from ckpipe.plan.witness import Witnessed, Witnesses
from ckpipe.state.flatten import Captured
from ckpipe.state.tensors import TensorLeaf


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy by torch of a range of one tensor's elements, in row-major order.

    Args:
        tensor: The number of the tensor.
        lo: The first element.
        hi: The index behind the last element.
        at: Their offset in the block, in bytes.
        part: The box of the tensor whose elements are counted; None for all of it.
        raw: True if ``lo`` and ``hi`` count the bytes of the tensor's memory, from its first
            element on.
    """

    tensor: int
    lo: int
    hi: int
    at: int
    part: Box | None = None
    raw: bool = False


@dataclass(frozen=True, slots=True)
class Gather:
    """A native copy of ranges of host memory; one row of the columns for each range.

    Args:
        tensors: The number of the tensor whose memory it is.
        skips: Offset of the range from the tensor's first element, in bytes.
        sizes: Size of the range, in bytes.
        at: Offset in the block, in bytes.
        slots: The number of the range to checksum in the block that it is; -1 for a part of one.
    """

    tensors: array[int]
    skips: array[int]
    sizes: array[int]
    at: array[int]
    slots: array[int]

    def where(self, marks: Sequence[bool]) -> Gather:
        """Return the marked ranges."""
        columns = (self.tensors, self.skips, self.sizes, self.at, self.slots)
        return Gather(*(array("q", compress(column, marks)) for column in columns))


@dataclass(frozen=True, slots=True)
class BlockPlan(BlockRange):
    """One block of a data file, and the copies that fill it.

    Args:
        fills: Fixed bytes with their offset in the block, such as the header or zeros between
            tensors.
        copies: The copies by torch.
        gather: The native copy of host memory.
        sum_count: Number of its checksums.
    """

    fills: tuple[tuple[int, bytes], ...]
    copies: tuple[Copy, ...]
    gather: Gather
    sum_count: int

    @property
    def is_empty(self) -> bool:
        """True if the block has no work."""
        return not (self.fills or self.copies or self.gather.sizes)

    @property
    def tensors(self) -> array[int]:
        """Numbers of the tensors that fill the block, perhaps several times each."""
        return self.gather.tensors + array("q", [copy.tensor for copy in self.copies])

    def split(self, later: set[int]) -> tuple[BlockPlan, BlockPlan]:
        """Split its work into the early half and the late half.

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
    """Cut the files of a plan into blocks with their copies.

    Args:
        plan: The plan.
        leaves: Tensors that the plan fits; only their layouts are used.
        block_bytes: The size of a block, in bytes.
    """
    blocks: list[BlockPlan] = []
    sum_table = SumTable(plan.layout.entries.nbytes)
    for number, file in enumerate(plan.files):
        cutter = _Cutter(leaves, block_bytes, -(-file.row.size // block_bytes))
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
        blocks += cutter.blocks(number, file.row.size, sum_table)
    return tuple(blocks)


WITNESS = -1
"""The number of the file of blocks whose bytes are only checksummed."""


@dataclass(frozen=True, slots=True)
class WitnessProgram:
    """The copies that one save witnesses.

    Args:
        chosen: The bytes, each an entry with one checksum.
        blocks: The blocks that take them, of file ``WITNESS``.
        table: The places of their checksums.
    """

    chosen: Sequence[Witnessed]
    blocks: tuple[BlockPlan, ...]
    table: SumTable


class WitnessPrograms:
    """The copies that the saves of one plan witness, one after the other.

    Args:
        witnesses: Chooses them.
        leaves: Tensors that the plan fits; only their layouts are used.
        block_bytes: The size of a block, in bytes.
    """

    def __init__(
        self, witnesses: Witnesses, leaves: Sequence[TensorLeaf], block_bytes: int
    ) -> None:
        self._witnesses, self._leaves, self._block_bytes = witnesses, leaves, block_bytes
        self._next: WitnessProgram | None = None

    def prepare(self) -> None:
        """Plan those of the next save now, while no trainer waits."""
        self._next = self._next or _plan_witness(
            self._witnesses.next(), self._leaves, self._block_bytes
        )

    def take(self) -> WitnessProgram:
        """Return those of the next save."""
        self.prepare()
        taken, self._next = self._next, None
        assert taken is not None
        return taken

    def put_back(self, program: WitnessProgram) -> None:
        """Leave those of a save that has no memory for them to the next one."""
        self._next = program


def _plan_witness(
    chosen: Sequence[Witnessed], leaves: Sequence[TensorLeaf], block_bytes: int
) -> WitnessProgram:
    size = chosen[-1].at + chosen[-1].nbytes if chosen else 0
    cutter = _Cutter(leaves, block_bytes, -(-size // block_bytes))
    for number, each in enumerate(chosen):
        cutter.span(number, each.at, each.nbytes)
        source = SourceRange(each.tensor, 0, None, each.nbytes, each.part)
        cutter.source(source, each.at, each.mebibyte * CHUNK_BYTES)
    table = SumTable([each.nbytes for each in chosen])
    return WitnessProgram(chosen, tuple(cutter.blocks(WITNESS, size, table)), table)


@dataclass(slots=True)
class _BlockDraft:
    spans: list[EntryRange] = field(default_factory=list)
    fills: list[tuple[int, bytes]] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    gather: Gather = field(default_factory=lambda: Gather(*(array("q") for _ in range(5))))

    def number_ranges(self, cuts: BlockCuts) -> None:
        """Find the copied ranges that are checksummed as they are."""
        numbers = {bounds: n for n, bounds in enumerate(zip(cuts.begins, cuts.ends, strict=True))}
        copied = zip(self.gather.at, self.gather.sizes, strict=True)
        self.gather.slots.extend(numbers.get((at, at + size), -1) for at, size in copied)


class _Cutter:
    """Cuts one file into blocks; entry by entry, each followed by its sources."""

    def __init__(self, leaves: Sequence[TensorLeaf], block_bytes: int, blocks: int) -> None:
        self._leaves, self._block_bytes = leaves, block_bytes
        self.drafts = [_BlockDraft() for _ in range(blocks)]

    def _cut(self, start: int, nbytes: int) -> Iterator[tuple[int, int, int, int]]:
        """Cut a range of the file: yield block, offset in it, and bounds within the range."""
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
            self.drafts[block].spans.append(EntryRange(entry, lo, hi, at))

    def source(self, source: SourceRange, start: int, behind: int = 0) -> None:
        """Add a source of an entry that begins at ``start`` in the file.

        ``behind`` is the number of bytes to leave out at the start of its elements.
        """
        leaf = self._leaves[source.tensor]
        item = leaf.itemsize
        part, first = source.part, behind // item
        if part is not None and leaf.contiguous:
            begin = flat_start(leaf.shape, part)
            # Whole rows of a contiguous tensor are contiguous like the tensor itself.
            part, first = (part, first) if begin is None else (None, begin + first)
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

    def blocks(self, file: int, size: int, sums: SumTable) -> Iterator[BlockPlan]:
        """Yield the blocks of a file of some bytes, once all is added."""
        for index, draft in enumerate(self.drafts):
            offset = index * self._block_bytes
            cuts = sums.cuts(draft.spans)
            draft.number_ranges(cuts)
            yield BlockPlan(
                file,
                offset,
                min(self._block_bytes, size - offset),
                tuple(draft.spans),
                tuple(draft.fills),
                tuple(draft.copies),
                draft.gather,
                len(cuts.slots),
            )

    def _gather(self, block: int, source: SourceRange, skip: int, lo: int, hi: int) -> None:
        """Add bytes of host memory, cut at the ends of checksums."""
        draft = self.drafts[block]
        gather, span = draft.gather, draft.spans[-1]
        for _, begin, end in chunk_spans(source.offset + lo, source.offset + hi):
            gather.tensors.append(source.tensor)
            gather.skips.append(skip + begin - source.offset)
            gather.sizes.append(end - begin)
            gather.at.append(span.at + begin - span.lo)


def devices_of(state: Captured) -> set[str]:
    """Return the devices of a state's tensors."""
    return {leaf.device for leaf in state.tensors}


KnownChecksums = tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]
"""Checksums of a block that its copy has computed: their indices in the block, and their values."""


def fill_blocks(work: Sequence[tuple[BlockPlan, Block]], state: Captured) -> list[KnownChecksums]:
    """Fill blocks; copies from a device may still be under way when it returns.

    One native call copies all ranges of host memory into all blocks.

    Returns:
        For each block, the checksums that the copy has computed.
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
    """Return the bytes from a tensor's first element to the end of its storage."""
    storage = tensor.untyped_storage()
    start = tensor.storage_offset() * tensor.itemsize
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(storage, start, (storage.nbytes() - start,), (1,))


@dataclass(frozen=True, slots=True)
class CopyProgram:
    """A plan with the blocks that carry it out; serves every save of the same structure.

    Args:
        plan: The plan.
        blocks: The blocks with their copies.
        files: The data files of the rank.
        planner: The class of the planner, for the manifest.
        drafted: The plan as the planner made it.
        witnesses: The copies that its saves witness; None for none.
    """

    plan: RankPlan
    blocks: tuple[BlockPlan, ...]
    files: DataFiles
    planner: str
    drafted: RankPlan
    witnesses: WitnessPrograms | None = None


@dataclass(frozen=True, slots=True)
class EarlyLateSplit:
    """The division of a save's copies: early before it returns, late while training goes on.

    Args:
        leaves: The leaves of the state that was divided.
        program: The program whose blocks were divided.
        facts: The facts of the tensors that optimizers own, at that time.
        owned: The numbers of the leaves that are copied late, in order.
        halves: For each block, its early and its late work.
        samples: For each block, a sample of the late bytes, which detects changes.
        worth: False if all is copied early, no matter what optimizers own.
    """

    leaves: list[TensorLeaf]
    program: CopyProgram
    facts: list[Any] = field(default_factory=list)
    owned: list[int] = field(default_factory=list)
    halves: list[tuple[BlockPlan, BlockPlan]] = field(default_factory=list)
    samples: list[ByteSample] = field(default_factory=list)
    worth: bool = True

    def serves(self, captured: Captured, program: CopyProgram, owners: Sequence[Optimizer]) -> bool:
        """True if another save would be divided in the same way.

        Args:
            captured: Its state.
            program: Its program.
            owners: The optimizers that own some of its tensors now.
        """
        if self.leaves is not captured.tensors or self.program is not program:
            return False
        if not self.worth:
            return True
        return owned_facts(owned_tensors(owners), captured.objects) == self.facts


def split_early_late(
    captured: Captured, program: CopyProgram, owners: Sequence[Optimizer]
) -> EarlyLateSplit:
    """Divide a save's work: tensors of optimizers are copied late, if that is worth it.

    Args:
        captured: The state, with the objects that the walk has visited.
        program: Its program.
        owners: The optimizers.
    """
    tensors = owned_tensors(owners)
    owned = owned_leaves(captured.tensors, tensors)
    if not worth_watching([captured.tensors[number] for number in owned]):
        return EarlyLateSplit(captured.tensors, program, worth=False)
    halves, samples = split_blocks(program.blocks, owned, captured)
    facts = owned_facts(tensors, captured.objects)
    return EarlyLateSplit(captured.tensors, program, facts, sorted(owned), halves, samples)


def split_blocks(
    blocks: Iterable[BlockPlan], owned: Iterable[int], captured: Captured
) -> tuple[list[tuple[BlockPlan, BlockPlan]], list[ByteSample]]:
    """Split blocks into their early and late work; return it with samples of the late bytes."""
    later = set(owned)
    halves = [plan.split(later) for plan in blocks]
    return halves, [_sample_of(late, captured.tensors) for _, late in halves]


def _sample_of(later: BlockPlan, leaves: Sequence[TensorLeaf]) -> ByteSample:
    """Return a sample of the bytes that fill a block; of tensors that torch copies, of them all."""
    gather, copied = later.gather, dict.fromkeys(copy.tensor for copy in later.copies)
    ranges = zip(gather.tensors, gather.skips, gather.sizes, gather.at, strict=True)
    return ByteSample(leaves, chain(ranges, ((n, 0, leaves[n].window, -1) for n in copied)))
