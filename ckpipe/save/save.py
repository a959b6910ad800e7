"""One save in the trainer: what to save, how far it is, and the calls that wait for it."""

from __future__ import annotations

import platform
import secrets
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import anyio
import numpy as np
import torch
from torch.optim import Optimizer

from ckpipe.format.keys import Json, LabelFilter
from ckpipe.format.manifest import RankManifest, Structure, TensorRow
from ckpipe.lock.state_lock import LockHold
from ckpipe.loop_thread import Caller
from ckpipe.memory.arena import Block
from ckpipe.memory.budget import Ration
from ckpipe.save.program import BlockPlan, CopyProgram
from ckpipe.save.record import UNKNOWN, FilledBlock, SaveRecord, fail, resolve
from ckpipe.state.flatten import Captured
from ckpipe.types import CheckpointId
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
        step: The step that was named; None for the one after the last.
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
    step: int | None = None


@dataclass(frozen=True, slots=True)
class CapturedState:
    """The result of a walk over the state.

    Args:
        hold: The hold of the lock under which it is true.
        captured: What was found.
        after: Events on devices, behind the work that the walk and its thread have queued.
    """

    hold: LockHold
    captured: Captured
    after: Sequence[Any]


class StagedBlock(FilledBlock):
    """A block in the trainer's staging memory.

    Args:
        save: The save.
        plan: What it holds.
        block: The memory.
    """

    plan: BlockPlan

    def __init__(self, save: Save, plan: BlockPlan, block: Block) -> None:
        sums = np.full(plan.sum_count, UNKNOWN, np.int64)
        super().__init__(save, plan, block.view[: plan.nbytes], sums)
        self.block = block
        self.users = 1
        """The upload, and each view of the staged state."""
        self.began = self.ended = 0.0
        """When the first of it was copied, and when all of it was."""
        self.copier = 0
        """The thread that copied the last of it."""

    def release(self) -> None:
        """Take it back from one user; its memory is free once all are through with it."""
        self.users -= 1
        if not self.users:
            super().release()


class Save(SaveRecord):
    """One save on its way, from the lock on.

    Attributes are set by the stages, on the pipeline's thread; the futures may be waited for on
    any thread.

    Args:
        id: The checkpoint.
        rank: The rank.
        request: The request of the caller.
    """

    def __init__(self, id: CheckpointId, rank: int, request: SaveRequest) -> None:
        super().__init__(id, rank, time.perf_counter(), secrets.token_hex(16))
        self.request = request
        self.ready = anyio.Event()
        """Set when it is known what is stored: blocks may go to the store."""
        self.handed_over = anyio.Event()
        """Set when a worker process, if there is one, can finish the save without this one."""
        self.filled: list[tuple[BlockPlan, weakref.ref[Block], int]] = []
        """The blocks that were filled, and how often the memory of each had been handed out."""
        self._in_use: dict[Block, StagedBlock] = {}
        self.views = 0
        """How many look at the staged state."""
        self.started_at = time.time()
        self.safe: Future[None] = Future()
        self.staged: Future[None] = Future()
        self.staged.add_done_callback(self._staged_is_safe)
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

    def contents(self) -> tuple[Structure, RankManifest]:
        """See :class:`~ckpipe.save.record.SaveRecord`."""
        captured, program, request = self.captured, self.program, self.request
        assert captured is not None
        assert program is not None
        started = datetime.fromtimestamp(self.started_at, UTC)
        part = RankManifest(
            rank=self.rank,
            structure=0,
            layout=0,
            values=tuple(captured.values),
            files=(),
            checksums=(),
            token=self.token,
            started=started.isoformat(timespec="milliseconds"),
            writer={
                "ckpipe": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "planner": program.planner,
            },
            metadata=request.metadata,
            metrics=request.metrics,
            final=request.final,
        )
        return captured.described(_structure), part

    def note(self, filled: StagedBlock) -> None:
        """Note a block that is filled, and is in use by the stages after the copy."""
        self._in_use[filled.block] = filled
        self.clock.copied(filled.plan, filled.began, filled.ended, filled.copier)
        self.filled.append((filled.plan, weakref.ref(filled.block), filled.block.uses))

    def free(self, filled: StagedBlock) -> None:
        """Give back the memory of a block that is in use no more."""
        self._in_use.pop(filled.block, None)
        if self.ration is not None:
            self.ration.give(filled.block)

    def use_again(
        self, filled: StagedBlock, uses: int, *, first: bool = False
    ) -> StagedBlock | None:
        """Take a block for one more user; None if it holds other bytes by now.

        Args:
            filled: The block.
            uses: How often its memory had been handed out when it was filled.
            first: Whether the save goes before those that wait for memory, as it came before them.
        """
        block = filled.block
        if block.uses != uses:
            return None
        if block not in self._in_use:
            if self.ration is None or not self.ration.take_back(block, first=first):
                return None
            filled.users = 0
            self._in_use[block] = filled
        again = self._in_use[block]
        again.users += 1
        return again

    def close_ration(self) -> None:
        """Give all memory back but what is looked at; the stages are through with it."""
        keep = self._in_use if self.views else {}
        if self.ration is not None:
            self.ration.close(keep=keep)
        for filled in keep.values():
            filled.users = self.views
        self._in_use = dict(keep)
        self.blocks.clear()

    def call_off(self) -> None:
        """Has the stages give up, now or once they have begun."""
        self.cancel_requested = True
        if self.scope is not None:
            self.scope.cancel()

    def forget_state(self) -> None:
        """Drop what refers to the caller's objects; nothing needs them once all is copied."""
        self.request = replace(self.request, state=None, owners=(), caller=None)


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
