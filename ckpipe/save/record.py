"""One save as its stages see it: what to save, how far it is, and the calls that wait for it.

A plan becomes a program for the copy, kept from one save to the next of the same structure. With
guarded optimizers it is divided: what has to be copied at once, and what beside training.
"""

from __future__ import annotations

import contextlib
import platform
import secrets
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import anyio
import torch
from torch.optim import Optimizer

from ckpipe.format.data_file import DataFiles
from ckpipe.format.keys import Json, LabelFilter
from ckpipe.format.manifest import Structure, TensorRow
from ckpipe.lock.holds import LockHold
from ckpipe.lock.late_copies import (
    ByteSample,
    MutationDetector,
    OwnedFacts,
    owned_leaves,
    owned_tensors,
    worth_watching,
)
from ckpipe.loop_thread import Caller
from ckpipe.memory.arena import Block
from ckpipe.memory.budget import Ration
from ckpipe.plan.plan import RankPlan
from ckpipe.save.delivery import BlockSums, Delivery, ManifestFields
from ckpipe.save.program import BlockPlan, split_block, tensors_of
from ckpipe.state.flatten import Captured
from ckpipe.state.tensors import TensorLeaf
from ckpipe.types import CheckpointId, CheckpointInfo, SaveStatus
from ckpipe.version import __version__


class SkipSave(Exception):  # a decision, not an error
    """The save is to be skipped; the text says why."""


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """The request of a caller of ``save``.

    Args:
        state: The state.
        select: Which labels to save.
        metrics: Metrics, non-finite floats encoded.
        metadata: Metadata, plain JSON.
        final: Whether it is the run's final checkpoint.
        thread: The thread that called.
        owners: Guarded optimizers whose tensors are copied while training goes on; none if the
            caller waits for all copies.
        urgent: Whether there may be no later one, so that it waits where others are skipped.
        caller: Runs user code on the thread that called; None if that is the pipeline's own.
    """

    state: Any
    select: LabelFilter
    metrics: Mapping[str, Json]
    metadata: Mapping[str, Json]
    final: bool
    thread: int
    owners: tuple[Optimizer, ...] = ()
    urgent: bool = False
    caller: Caller | None = None


@dataclass(frozen=True, slots=True)
class DeferredCopy:
    """A save that has let its caller go before anything was copied.

    Args:
        program: The program that it will be copied by.
        division: What is copied when; all of it later.
        watch: What notices if it changes meanwhile.
    """

    program: CopyProgram
    division: EarlyLateSplit
    watch: MutationDetector


@dataclass(frozen=True, slots=True)
class CapturedState:
    """The result of the walk, and the hold of the lock under which it is true.

    Args:
        turn: The hold.
        captured: What was found.
        after: Events on devices, behind the work that the walk and its thread have queued.
        deferral: There if the caller is gone already.
    """

    turn: LockHold
    captured: Captured
    after: Sequence[Any]
    deferral: DeferredCopy | None = None


@dataclass(frozen=True, slots=True)
class PlannedState:
    """A captured state whose plan and memory are there, so that copying can begin."""

    turn: LockHold
    captured: Captured
    after: Sequence[Any]
    program: CopyProgram
    deferral: DeferredCopy | None = None


@dataclass(eq=False, slots=True)
class FilledBlock:
    """A block of a data file, in host memory, which two stages need at the same time.

    Args:
        plan: What it holds.
        block: The memory.
        users: How many stages still need it.
        began: When the first of it was copied, by ``time.perf_counter``.
        ended: When all of it was.
        copier: The thread that copied the last of it.
        sums: Its checksums.
    """

    plan: BlockPlan
    block: Block
    users: int = 2
    began: float = 0.0
    ended: float = 0.0
    copier: int = 0
    sums: BlockSums = field(default_factory=BlockSums)

    @property
    def data(self) -> memoryview:
        """Its bytes."""
        return self.block.view[: self.plan.nbytes]


class Save(Delivery[FilledBlock]):
    """One save on its way, from the lock on.

    Attributes are set by the stages, on the pipeline's thread; the futures may be waited for on
    any thread.
    """

    def __init__(self, id: CheckpointId, rank: int, request: SaveRequest) -> None:
        super().__init__(id, rank, time.perf_counter(), secrets.token_hex(16))
        self.request = request
        self._copied: list[tuple[BlockPlan, weakref.ref[Block], int]] = []
        self._in_use: dict[Block, FilledBlock] = {}
        self._views = 0
        self.started_at = time.time()
        self.status: SaveStatus = "queued"
        self.safe: Future[None] = Future()
        self.staged: Future[None] = Future()
        self.staged.add_done_callback(self._staged_is_safe)
        self.committed: Future[CheckpointInfo] = Future()
        self.scope: anyio.CancelScope | None = None
        self.cancel_requested = False
        self.ration: Ration | None = None
        self.blocks: list[Block] = []
        self.captured: Captured | None = None
        self.program: CopyProgram | None = None
        self.interrupts_another = False

    def _staged_is_safe(self, staged: Future[None]) -> None:
        error = staged.exception()
        if error is None:
            resolve(self.safe, None)
        else:
            fail(self.safe, error)

    def has_the_caller_of(self, other: Save) -> bool:
        """Tell whether it was called in the middle of another's call, which goes on after it
        only.
        """
        callers = self.request.caller, other.request.caller
        return (
            all(caller is not None and caller.blocks for caller in callers)
            and self.request.thread == other.request.thread
            and not other.safe.done()
        )

    def take_up(self, state: PlannedState) -> None:
        """Takes the state and the plan that the copy goes by."""
        self.captured, self.program = state.captured, state.program
        self.cargo = state.program.cargo

    def contents(self) -> ManifestFields:
        """See :class:`~ckpipe.save.delivery.Delivery`."""
        captured, program, request = self.captured, self.program, self.request
        assert captured is not None
        assert program is not None
        return ManifestFields(
            captured.described(_structure),
            tuple(captured.values),
            datetime.fromtimestamp(self.started_at, UTC).isoformat(timespec="milliseconds"),
            {
                "ckpipe": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "planner": program.planner,
            },
            request.metadata,
            request.metrics,
            request.final,
        )

    def settle(self, info: CheckpointInfo) -> None:
        """See :class:`~ckpipe.save.delivery.Delivery`."""
        self.status = "committed"
        resolve(self.committed, info)

    def note(self, filled: FilledBlock) -> None:
        """Notes a block that is filled, and is in use by the stages after the copy."""
        self._in_use[filled.block] = filled
        self.clock.copied(filled.plan, filled.began, filled.ended, filled.copier)
        self._copied.append((filled.plan, weakref.ref(filled.block), filled.block.uses))

    def release(self, filled: FilledBlock) -> None:
        """Takes a block back from one user; its memory is free once all are through with it."""
        filled.users -= 1
        if not filled.users:
            self._in_use.pop(filled.block, None)
            if self.ration is not None:
                self.ration.give(filled.block)

    def hold_blocks(self) -> list[FilledBlock]:
        """Keeps all blocks of the file image until :meth:`release_view` is called.

        Raises:
            LookupError: Says why not, if not all of it is there any more, or yet.
        """
        if not self.staged.done() or self.program is None:
            raise LookupError("it is not all copied yet")
        if len({reference for _, reference, _ in self._copied}) < len(self._copied):
            raise LookupError("it went through less memory than it has bytes")
        held: list[FilledBlock] = []
        try:
            for plan, reference, uses in self._copied:
                block = reference()
                if block is None or block.uses != uses:
                    raise LookupError(_USED_AGAIN)
                held.append(self._held_again(plan, block))
        except LookupError:
            for each in held:
                self.release(each)
            raise
        self._views += 1
        return held

    def _held_again(self, plan: BlockPlan, block: Block) -> FilledBlock:
        filled = self._in_use.get(block)
        if filled is None:
            if self.ration is None or not self.ration.take_back(block):
                raise LookupError(_USED_AGAIN)
            filled = self._in_use[block] = FilledBlock(plan, block, 0)
        filled.users += 1
        return filled

    def take_again(self, filled: FilledBlock, uses: int) -> FilledBlock | None:
        """Take a block for both stages that were through with it; None if it holds other bytes.

        Args:
            filled: The block.
            uses: How often its memory had been handed out when it was filled.
        """
        block = filled.block
        if block.uses != uses:
            return None
        if block not in self._in_use:
            if self.ration is None or not self.ration.take_back(block, first=True):
                return None
            self._in_use[block] = filled
        again = self._in_use[block]
        again.users += 2
        return again

    def release_view(self, held: list[FilledBlock]) -> int:
        """Gives back what :meth:`hold_blocks` returned; returns how many still look."""
        self._views -= 1
        for each in held:
            self.release(each)
        return self._views

    def close_ration(self) -> None:
        """Gives all memory back but what is looked at; the stages are through with it."""
        keep = self._in_use if self._views else {}
        if self.ration is not None:
            self.ration.close(keep=keep)
        for filled in keep.values():
            filled.users = self._views
        self._in_use = dict(keep)
        self.blocks.clear()

    def call_off(self) -> None:
        """Has the stages give up, now or once they have begun."""
        self.cancel_requested = True
        if self.scope is not None:
            self.scope.cancel()

    def forget_state(self) -> None:
        """Drops what refers to the caller's objects; nothing needs them once all is copied."""
        self.request = SaveRequest(
            None, self.request.select, self.request.metrics, self.request.metadata,
            self.request.final, self.request.thread,
        )  # fmt: skip


_USED_AGAIN = "its memory serves a later save or load, or was given back"


def _structure(captured: Captured) -> Structure:
    """The structure of a state as its manifest has it."""
    rows = tuple(
        TensorRow(
            leaf.label, leaf.dtype, leaf.full_shape, leaf.device.partition(":")[0], leaf.kind,
            leaf.detail, leaf.requires_grad, leaf.lazy, leaf.attributes,
        )
        for leaf in captured.tensors
    )  # fmt: skip
    return Structure(captured.tree, rows, len(captured.values))


def resolve(future: Future[Any], value: Any) -> None:
    """Gives a future its value, unless it is done; for any thread."""
    with contextlib.suppress(InvalidStateError):
        future.set_result(value)


def fail(future: Future[Any], error: BaseException) -> None:
    """Gives a future its error, unless it is done; for any thread."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)


@dataclass(frozen=True, slots=True)
class CopyProgram:
    """A plan with the blocks that carry it out; serves every save of the same structure.

    Args:
        plan: The plan.
        blocks: What fills which block.
        cargo: What the rank brings to the store.
        planner: The class of the planner, for the manifest.
    """

    plan: RankPlan
    blocks: tuple[BlockPlan, ...]
    cargo: DataFiles
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
