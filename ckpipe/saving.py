"""One save as its stages see it: what to save, how far it is, and who waits for it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio

from ckpipe.arena import Block
from ckpipe.budget import Ration
from ckpipe.copying import BlockPlan
from ckpipe.keys import Json, LabelFilter
from ckpipe.lock import CaptureToken, StateLock
from ckpipe.planning import RankPlan
from ckpipe.structure import Captured
from ckpipe.types import CheckpointId, CheckpointInfo, SaveReport, SaveStatus, StageReport


class SkipSave(Exception):  # a decision, not an error
    """The save is to be skipped; the text says why."""


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What the caller of ``save`` asked for.

    Args:
        state: The state.
        select: Which labels to save.
        metrics: Metrics, non-finite floats encoded.
        metadata: Metadata, plain JSON.
        final: Whether it is the run's final checkpoint.
        thread: The thread that called.
        fences: Events on the devices' streams, behind the work that the caller had queued.
    """

    state: Any
    select: LabelFilter
    metrics: Mapping[str, Json]
    metadata: Mapping[str, Json]
    final: bool
    thread: int
    fences: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """A plan with the blocks that carry it out; serves every save of the same structure."""

    plan: RankPlan
    blocks: tuple[BlockPlan, ...]
    sizes: list[int]


class Turn:
    """One hold of the state lock, from the walk to the last copy or to a change of mind.

    Args:
        lock: The lock.
        token: What ends the hold.
    """

    def __init__(self, lock: StateLock, token: CaptureToken) -> None:
        self._lock, self.token = lock, token
        self.ended = anyio.Event()
        self.copied = False

    def end(self, *, copied: bool = False) -> None:
        """Lets trainers go on; may be called twice."""
        if not self.ended.is_set():
            self.copied = copied
            self._lock.release_capture(self.token)
            self.ended.set()

    @contextmanager
    def here(self) -> Iterator[None]:
        """Marks the calling thread as capturing, so that guards on it keep quiet."""
        with self._lock.capturing_here(self.token):
            yield


@dataclass(frozen=True, slots=True)
class CapturedState:
    """What the walk found, and the hold of the lock under which it is true."""

    turn: Turn
    captured: Captured


@dataclass(frozen=True, slots=True)
class PlannedState:
    """A captured state whose plan and memory are there, so that copying can begin."""

    turn: Turn
    captured: Captured
    program: Program


@dataclass(eq=False, slots=True)
class FilledBlock:
    """A block of a data file, in host memory, which two stages need at the same time."""

    plan: BlockPlan
    block: Block
    users: int = 2

    @property
    def data(self) -> memoryview:
        """Its bytes."""
        return self.block.view[: self.plan.nbytes]


@dataclass(frozen=True, slots=True)
class StoredFiles:
    """All data files are durable.

    Args:
        header_sums: CRC-32C of each file's header.
    """

    header_sums: list[int]


@dataclass(slots=True)
class StageClock:
    """When the stages of a save began and ended, and how much went through them."""

    began: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def touch(self, stage: str, nbytes: int = 0) -> None:
        """Notes that a stage is at work now, and has moved so many bytes more."""
        now = time.perf_counter()
        self.began.setdefault(stage, now)
        self.ended[stage] = now
        self.bytes[stage] = self.bytes.get(stage, 0) + nbytes

    @contextmanager
    def timing(self, stage: str, nbytes: int = 0) -> Iterator[None]:
        """Notes when a stage's work begins and ends."""
        self.touch(stage)
        try:
            yield
        finally:
            self.touch(stage, nbytes)

    def reports(self) -> dict[str, StageReport]:
        """The report of each stage that has begun."""
        return {
            stage: StageReport(self.ended[stage] - began, self.bytes[stage])
            for stage, began in self.began.items()
        }


class Save:
    """One save on its way.

    Attributes are set by the stages, on the pipeline's thread; the futures may be waited for on
    any thread.
    """

    def __init__(self, id: CheckpointId, rank: int, request: SaveRequest) -> None:
        self.id, self.rank, self.request = id, rank, request
        self.began = time.perf_counter()
        self.started_at = time.time()
        self.status: SaveStatus = "queued"
        self.staged: Future[None] = Future()
        self.committed: Future[CheckpointInfo] = Future()
        self.clock = StageClock()
        self.scope: anyio.CancelScope | None = None
        self.cancel_requested = False
        self.ration: Ration | None = None
        self.captured: Captured | None = None
        self.program: Program | None = None
        self.replanned = False
        self.staged_seconds: float | None = None
        self.durable_seconds: float | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since ``save`` was called."""
        return time.perf_counter() - self.began

    @property
    def name(self) -> str:
        """The exact name of the checkpoint."""
        return str(self.id)

    def report(self) -> SaveReport:
        """Seconds and bytes until now."""
        plan = self.program.plan if self.program else None
        return SaveReport(
            stages=self.clock.reports(),
            staged_seconds=self.staged_seconds,
            durable_seconds=self.durable_seconds,
            bytes=plan.size if plan else 0,
            tensors=len(plan.layout.chunks) if plan else 0,
            planned=self.replanned,
        )

    def release(self, filled: FilledBlock) -> None:
        """Takes a block back from one stage; its memory is free once both are through with it."""
        filled.users -= 1
        if not filled.users and self.ration is not None:
            self.ration.give(filled.block)

    def forget_state(self) -> None:
        """Drops what refers to the caller's objects; nothing needs them once all is copied."""
        self.request = SaveRequest(
            None, self.request.select, self.request.metrics, self.request.metadata,
            self.request.final, self.request.thread,
        )  # fmt: skip


def resolve(future: Future[Any], value: Any) -> None:
    """Gives a future its value, unless it has one."""
    if not future.done():
        future.set_result(value)


def fail(future: Future[Any], error: BaseException) -> None:
    """Gives a future its error, unless it is done."""
    if not future.done():
        future.set_exception(error)
