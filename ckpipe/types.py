"""The plain data that callers of ckpipe see: names of checkpoints, what is known of one.

What a planner is: apart from those that ckpipe has, so that settings need no torch for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from ckpipe.reports import LoadReport

if TYPE_CHECKING:
    from ckpipe.plan.plan import RankPlan
    from ckpipe.state.flatten import Captured

SaveStatus = Literal[
    "queued", "capturing", "staged", "uploading", "committed", "skipped", "failed", "cancelled"
]
"""Where a save stands, in this order; the last four are final."""

_DAY = r"[0-9]{4}(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01])"
_TIME = r"(?:[01][0-9]|2[0-3])[0-5][0-9][0-5][0-9][0-9]{3}"
_ATTEMPT = rf"{_DAY}T{_TIME}Z-[0-9A-Za-z_-]{{1,64}}"
_NAME = re.compile(rf"step-([0-9]{{12,18}})\.({_ATTEMPT})\.([0-9]{{1,18}})")
_ATTEMPT_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """The name of one checkpoint. Ids compare by age: the newest is the greatest.

    An attempt is one launch of a training run and begins with its start time at a fixed width,
    so that a run resumed from step 500 makes the abandoned step 1000 of the launch before it
    an older checkpoint, not a newer one.

    Args:
        attempt: Start time and id of the attempt, ``20261121T034205123Z-9f3a2c01``.
        step: The training step, zero or more.
        count: How often this step was saved before in this attempt.
    """

    attempt: str
    step: int
    count: int

    def __str__(self) -> str:
        return f"step-{self.step:012d}.{self.attempt}.{self.count}"

    @classmethod
    def parse(cls, name: str) -> CheckpointId | None:
        """The id that a name spells, or None if ckpipe did not write such a name."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        parsed = cls(match[2], int(match[1]), int(match[3]))
        return parsed if str(parsed) == name else None


def attempt_name(started: datetime, attempt_id: str) -> str:
    """The name of an attempt: its start in UTC to the millisecond, and its id.

    Raises:
        ValueError: If the id is not 1 to 64 letters, digits, ``_`` or ``-``.
    """
    if not _ATTEMPT_ID.fullmatch(attempt_id):
        raise ValueError(f"an attempt id is 1 to 64 letters, digits, '_' or '-': {attempt_id!r}")
    return f"{started:%Y%m%dT%H%M%S}{started.microsecond // 1000:03d}Z-{attempt_id}"


def attempt_parts(attempt: str) -> tuple[datetime, str]:
    """The start of an attempt in UTC, and its id: what :func:`attempt_name` was given.

    Raises:
        ValueError: If the name begins with no date.
    """
    started, _, attempt_id = attempt.partition("Z-")
    # The format's %f takes six digits, and names have three.
    return datetime.strptime(f"{started}000", "%Y%m%dT%H%M%S%f").replace(tzinfo=UTC), attempt_id


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What is known of one checkpoint on the store. Two of the same checkpoint are equal.

    What was saved in it is None as long as it is not known: of one that is not complete, or whose
    index cannot be read, and of what :meth:`ckpipe.Pipeline.steps` does not ask for.

    Args:
        id: Its exact name; accepted wherever a step is.
        step: The training step.
        attempt: The launch that wrote it.
        count: How often this step was saved before in that attempt.
        complete: Whether it is whole, and can be loaded.
        reason: Why it is not complete; empty if it is.
        pinned: Whether it is protected from retention.
        saved_at: When its index was written, by the store's clock, in UTC; None if there is none.
        metrics: What ``save`` was given as metrics.
        metadata: What ``save`` was given as metadata.
        bytes: The size of its data files, of all ranks together.
        world_size: How many ranks saved it.
    """

    id: str
    step: int
    attempt: str
    count: int
    complete: bool = field(compare=False)
    reason: str = field(default="", compare=False)
    pinned: bool = field(default=False, compare=False)
    saved_at: datetime | None = field(default=None, compare=False)
    metrics: Mapping[str, float] | None = field(default=None, compare=False)
    metadata: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    bytes: int | None = field(default=None, compare=False)
    world_size: int | None = field(default=None, compare=False)

    @property
    def key(self) -> CheckpointId:
        """Its id in parts."""
        return CheckpointId(self.attempt, self.step, self.count)


@dataclass(frozen=True, slots=True)
class Committed:
    """The facts of a save that a rank has just made durable.

    Args:
        info: The checkpoint.
        rank: The rank that committed.
        size: Bytes that the rank wrote: data files and metadata.
    """

    info: CheckpointInfo
    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A loaded checkpoint.

    Args:
        id: Exact name of the checkpoint.
        step: Its step.
        state: The state: the target itself where it could be changed in place.
        metadata: What ``save`` was given as metadata.
        metrics: What ``save`` was given as metrics.
        missing: Labels that the target has and the checkpoint has not.
        unexpected: Labels that the checkpoint has and the target has not.
        report: Seconds and bytes.
    """

    id: str
    step: int
    state: Any = field(repr=False)
    metadata: Mapping[str, Any]
    metrics: Mapping[str, float]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    report: LoadReport | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What ``verify`` read of a checkpoint that is whole.

    Args:
        id: Exact name of the checkpoint.
        files: Data files read.
        bytes: Bytes read and checked.
    """

    id: str
    files: int
    bytes: int


class Planner(Protocol):
    """Makes the plan of a rank from the structure of its state."""

    def plan(self, captured: Captured, *, rank: int, world_size: int) -> RankPlan:
        """Plans a save; pure, and called in a worker thread.

        Args:
            captured: The structure; the bytes of its tensors may change meanwhile.
            rank: The rank to plan for, from 0.
            world_size: How many ranks save together.

        Raises:
            UnsupportedState: If a tensor cannot be saved.
            UnsupportedTopology: If the planner cannot serve this world size.
        """
        ...


@runtime_checkable
class JointPlanner(Planner, Protocol):
    """A planner whose plan of a save depends on what other ranks have.

    It is asked in every save, by this method alone, and never while the state lock is held.
    """

    def prepare(self, *, rank: int, world_size: int, max_file_bytes: int | None) -> None:
        """Gets ready when a pipeline is opened; blocking, called in a worker thread.

        Args:
            rank: This rank.
            world_size: How many ranks save together.
            max_file_bytes: The largest data file that the store takes, in bytes; None for no
                limit.

        Raises:
            UnsupportedTopology: If ranks cannot plan together here.
        """
        ...

    def plan_save(self, captured: Captured, *, save: str, rank: int, world_size: int) -> RankPlan:
        """Plans a save together with the other ranks; blocking, called in a worker thread.

        A plan that fits again should be the same object again, since work is remembered with it.

        Args:
            captured: The structure.
            save: What names the save: ``<run>/<number>``, the same on all ranks, where the run
                is this launch on this root. It may be asked again for one save, if the state has
                changed since.
            rank: The rank to plan for, from 0.
            world_size: How many ranks save together.

        Raises:
            PlanTimeout: If ranks do not take part in time; names them.
            UnsupportedState: If a tensor cannot be saved, or ranks contradict each other.
            SaveError: If there is no plan for this save for another reason.
        """
        ...
