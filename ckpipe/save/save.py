"""One save in the trainer: its request, its progress, and the calls that wait for it."""

from __future__ import annotations

import platform
import secrets
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import anyio
import numpy as np
import torch

from ckpipe.format.manifest import RankManifest, Structure
from ckpipe.lock.state_lock import LockHold
from ckpipe.memory.arena import Block
from ckpipe.memory.budget import BlockReservation
from ckpipe.save.program import BlockPlan, CopyProgram, WitnessProgram
from ckpipe.save.record import UNKNOWN, FilledBlock, SaveRecord, fail, resolve
from ckpipe.save.request import SaveRequest
from ckpipe.state.flatten import Captured, structure_of
from ckpipe.types import CheckpointId
from ckpipe.version import __version__


class SkipSave(Exception):  # a decision, not an error
    """The save must be skipped; the text is the reason."""


@dataclass(frozen=True, slots=True)
class CapturedState:
    """The result of a walk over the state.

    Args:
        hold: The hold of the lock under which it is valid.
        captured: The structure and the tensors.
        after: Events on devices, behind the work that the walk and its thread have queued.
    """

    hold: LockHold
    captured: Captured
    after: Sequence[Any]


class StagedBlock(FilledBlock):
    """A block in the trainer's staging memory.

    Args:
        save: The save.
        plan: Its range in the data file, and the copies that fill it.
        block: The memory.
    """

    plan: BlockPlan

    def __init__(self, save: Save, plan: BlockPlan, block: Block) -> None:
        sums = np.full(plan.sum_count, UNKNOWN, np.int64)
        super().__init__(save, plan, block.view[: plan.nbytes], sums)
        self.block = block
        self.began = self.ended = 0.0
        """Times of the first and the last copy into it."""
        self.copier = 0
        """The thread of the last copy into it."""


class Save(SaveRecord):
    """One save in the trainer, from the lock on.

    The stages set its attributes, on the pipeline's thread; any thread may wait for the futures.

    Args:
        id: The checkpoint.
        rank: The rank.
        request: The request of the caller.
    """

    def __init__(self, id: CheckpointId, rank: int, request: SaveRequest) -> None:
        super().__init__(id, rank, time.perf_counter(), secrets.token_hex(16))
        self.request = request
        self.ready = anyio.Event()
        """Set when the data files are planned: blocks may go to the store."""
        self.handed_over = anyio.Event()
        """Set when a worker process, if there is one, can finish the save without this one."""
        self.filled: list[tuple[BlockPlan, weakref.ref[Block], int]] = []
        """The filled blocks, with the use count of their memory at that time."""
        self._in_use: dict[Block, StagedBlock] = {}
        self.views = 0
        """Number of readers of the staged state."""
        self.started_at = time.time()
        self.safe: Future[None] = Future()
        self.staged: Future[None] = Future()
        self.staged.add_done_callback(self._staged_is_safe)
        self.scope: anyio.CancelScope | None = None
        self.cancel_requested = False
        self.reservation: BlockReservation | None = None
        self.blocks: list[Block] = []
        self.captured: Captured | None = None
        self.program: CopyProgram | None = None
        self.reserved_for: CopyProgram | None = None
        """The program that its reservation has memory for."""
        self.witness: WitnessProgram | None = None
        """The copies that it witnesses."""
        self.witnessed: tuple[tuple[int, ...], ...] = ()
        """Their checksums, as the manifest has them."""
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

    @property
    def waits(self) -> bool:
        """See :class:`~ckpipe.save.record.SaveRecord`."""
        return self.reservation is None or self.reservation.waits

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
            witnesses=self.witnessed,
        )
        return captured.described(structure_of), part

    def note(self, filled: StagedBlock) -> None:
        """Record a filled block, which the stages after the copy use from now on."""
        self._in_use[filled.block] = filled
        self.clock.copied(filled.plan, filled.began, filled.ended, filled.copier)
        self.filled.append((filled.plan, weakref.ref(filled.block), filled.block.uses))

    def free(self, filled: StagedBlock) -> None:
        """Give back the memory of a block that is no longer in use."""
        self._in_use.pop(filled.block, None)
        if self.reservation is not None:
            self.reservation.give(filled.block)

    def use_again(
        self, filled: StagedBlock, uses: int, *, first: bool = False
    ) -> StagedBlock | None:
        """Take a block for one more user; return None if its memory was reused.

        Args:
            filled: The block.
            uses: The use count of its memory when it was filled.
            first: True to take it before saves that wait for memory, which came later.
        """
        block = filled.block
        if block.uses != uses:
            return None
        if block not in self._in_use:
            if self.reservation is None or not self.reservation.take_back(block, first=first):
                return None
            filled.users = 0
            self._in_use[block] = filled
        again = self._in_use[block]
        again.users += 1
        return again

    def close_reservation(self) -> None:
        """Give all memory back except blocks that readers use; no stage needs it any more."""
        keep = self._in_use if self.views else {}
        if self.reservation is not None:
            self.reservation.close(keep=keep)
        for filled in keep.values():
            filled.users = self.views
        self._in_use = dict(keep)
        self.blocks.clear()

    def call_off(self) -> None:
        """Cancel the stages, now or once they have begun."""
        self.cancel_requested = True
        if self.scope is not None:
            self.scope.cancel()

    def forget_state(self) -> None:
        """Drop references to the caller's objects; no stage needs them once all is copied."""
        self.request.forget_state()
