"""The plain data that callers of ckpipe see: checkpoints, reports of saves and loads, planners.

Reports tell how saves and loads spent their time, and what held them up. Times are seconds after
the call unless a name says otherwise. A stage's *busy* time is that during which at least one of
its workers was at work; for the rest of it the stage *waited*: for blocks, for memory, or for the
stage that takes what it has made.

A planner is described here, apart from those that ckpipe has, so that settings need no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from ckpipe.errors import InvalidManifest

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
    """Facts known of one checkpoint on the store. Two of the same checkpoint are equal.

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
    """The outcome of ``verify`` for a checkpoint that is whole.

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
        """Plan a save; pure, and called in a worker thread.

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
        """Get ready when a pipeline is opened; blocking, called in a worker thread.

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
        """Plan a save together with the other ranks; blocking, called in a worker thread.

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


MAX_BLOCKS = 2000
"""Blocks that the plain form of a report has at the most; of more it has every n-th."""

Span = tuple[float, float]
"""When something began and ended."""

_SPANS = ("copied", "summed", "uploaded")
_NUMBERS = ("file", "offset", "bytes", "copier", "lane")


@dataclass(frozen=True, slots=True)
class StageReport:
    """The times of one stage of a save or load.

    Args:
        seconds: From when the stage began to when it ended; stages overlap.
        bytes: Bytes that went through it.
        began: When it began, in seconds after the call.
        waited: How much of its seconds it had nothing to do.
    """

    seconds: float
    bytes: int = 0
    began: float = 0.0
    waited: float = 0.0

    @property
    def busy(self) -> float:
        """Seconds during which it was at work."""
        return max(0.0, self.seconds - self.waited)


@dataclass(frozen=True, slots=True)
class BlockReport:
    """The way of one block of a data file; what has not happened to it is None.

    Args:
        file: Number of the rank's data file.
        offset: Where the block begins in the file, in bytes.
        bytes: Its size.
        copied: When it was filled in host memory.
        summed: When its checksums were computed, or the last of them; None if all were computed
            while it was copied, as they are of what lies in host memory as the file wants it.
        uploaded: When it was written to the store, new tries included.
        copier: Number of the thread that filled it, from 0.
        lane: Number of the lane that wrote it, from 0.
    """

    file: int
    offset: int
    bytes: int
    copied: Span | None = None
    summed: Span | None = None
    uploaded: Span | None = None
    copier: int = 0
    lane: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class SaveReport:
    """The times of one save, until now.

    Args:
        stages: A report for each stage that ran, by name.
        staged_seconds: From the call of ``save`` until the whole state was copied.
        durable_seconds: From the call of ``save`` until the commit; None until then.
        bytes: Size of the data files.
        tensors: How many tensors were saved.
        planned: Whether the plan had to be made; False if the last one still fitted.
        captured_seconds: With ``until="captured"``, from the call of ``save`` until forward and
            backward could go on; else None.
        blocks: The way of each block, in the order in which they were filled.
        copied_bytes: How many bytes of the whole checkpoint would not be there if what all ranks
            hold alike were written once. Known to the rank that completed it; 0 elsewhere.
    """

    stages: Mapping[str, StageReport]
    staged_seconds: float | None
    durable_seconds: float | None
    bytes: int
    tensors: int
    planned: bool
    captured_seconds: float | None = None
    blocks: Sequence[BlockReport] = field(default=(), compare=False)
    copied_bytes: int = 0

    @property
    def seconds(self) -> float:
        """From the call until the end of what the report tells of."""
        ends = (stage.began + stage.seconds for stage in self.stages.values())
        return max([self.durable_seconds or 0.0, self.staged_seconds or 0.0, *ends])

    @property
    def bottleneck(self) -> str:
        """The part that took most of the time, as a sentence; empty if nothing has run yet."""
        until = self.durable_seconds or self.seconds
        return _sentence(self.stages, _SAVE_PARTS, until)

    def to_data(self) -> dict[str, Any]:
        """The report as plain JSON; :func:`save_report_from_data` reads it."""
        return {
            "staged_seconds": _rounded(self.staged_seconds),
            "durable_seconds": _rounded(self.durable_seconds),
            "captured_seconds": _rounded(self.captured_seconds),
            "bytes": self.bytes,
            "tensors": self.tensors,
            "planned": self.planned,
            "bottleneck": self.bottleneck,
            "stages": _stages_data(self.stages),
            "blocks": _blocks_data(self.blocks),
            **({"copied_bytes": self.copied_bytes} if self.copied_bytes else {}),
        }

    def __repr__(self) -> str:
        parts = [f"{size_text(self.bytes)} in {self.tensors} tensors"]
        if self.copied_bytes:
            parts.append(f"{size_text(self.copied_bytes)} of the checkpoint are copies")
        for name, seconds in (("staged", self.staged_seconds), ("durable", self.durable_seconds)):
            parts.append(f"not {name}" if seconds is None else f"{name} in {seconds:.3g} s")
        return f"<SaveReport {', '.join(parts)}: {self.bottleneck or 'nothing has run yet'}>"


@dataclass(frozen=True, slots=True, repr=False)
class LoadReport:
    """The times of one load.

    Args:
        stages: A report for each stage, by name: ``find``, in which the checkpoint and its index
            were found, ``match``, ``read`` and ``apply``.
        seconds: From the call of ``load`` until the state was in place.
        bytes: Bytes read from data files, also those that turned out not to be needed.
        reads: Requests for ranges of data files.
        damaged: Ids of newer checkpoints that ``fallback`` passed over, each with what is wrong.
    """

    stages: Mapping[str, StageReport]
    seconds: float
    bytes: int
    reads: int
    damaged: Mapping[str, str] = field(default_factory=dict)

    @property
    def bottleneck(self) -> str:
        """The part that took most of the time, as a sentence."""
        return _sentence(self.stages, _LOAD_PARTS, self.seconds)

    def to_data(self) -> dict[str, Any]:
        """The report as plain JSON."""
        return {
            "seconds": _rounded(self.seconds),
            "bytes": self.bytes,
            "reads": self.reads,
            "damaged": dict(self.damaged),
            "bottleneck": self.bottleneck,
            "stages": _stages_data(self.stages),
        }

    def __repr__(self) -> str:
        return (
            f"<LoadReport {size_text(self.bytes)} in {self.reads} reads, {self.seconds:.3g} s: "
            f"{self.bottleneck}>"
        )


@dataclass(frozen=True, slots=True)
class RankReport:
    """The report of its save in one rank's manifest.

    Args:
        rank: The rank.
        started: When its save was called, ISO 8601 in UTC, by its own machine's clock.
        report: How the save spent its time until the manifest was written; None if that was not
            kept.
    """

    rank: int
    started: str
    report: SaveReport | None


# What can hold a save or load up: a name for people, and the stages that it is made of.
_SAVE_PARTS = {
    "Waiting for trainers to let go of the state lock": ("lock",),
    "Waiting for staging memory that earlier saves held": ("wait",),
    "Walking the state and planning": ("walk", "plan"),
    "The copy into host memory": ("stage",),
    "Checksums": ("serialize",),
    "The upload": ("upload",),
    "The commit": ("commit",),
}
_LOAD_PARTS = {
    "Finding the checkpoint and reading its index": ("find",),
    "Matching the checkpoint with the target": ("match",),
    "Reading and verifying the data": ("read",),
    "Putting everything in place": ("apply",),
}


def _sentence(
    stages: Mapping[str, StageReport], parts: Mapping[str, Sequence[str]], until: float
) -> str:
    busy = {
        name: sum(stages[stage].busy for stage in members if stage in stages)
        for name, members in parts.items()
    }
    slowest = max(busy, key=lambda name: busy[name])
    if not busy[slowest]:
        return ""
    moved = max(stages[stage].bytes for stage in parts[slowest] if stage in stages)
    rate = f" ({rate_text(moved, busy[slowest])})" if moved else ""
    return f"{slowest} took longest: {busy[slowest]:.3g} of {max(until, busy[slowest]):.3g} s{rate}"


def busy_seconds(spans: Iterable[Span]) -> float:
    """The time in which at least one of some spans lasted."""
    total, reached = 0.0, -math.inf
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, reached))
        reached = max(reached, ended)
    return total


def size_text(nbytes: float) -> str:
    """Describe a number of bytes for people, in powers of ten."""
    size = float(round(nbytes))
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if size < 999.5:  # which three digits round to 1000
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.0f} EB"


def rate_text(nbytes: int, seconds: float) -> str:
    """Describe bytes in a time for people."""
    return f"{size_text(nbytes / seconds)}/s"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _stages_data(stages: Mapping[str, StageReport]) -> dict[str, Any]:
    return {
        name: {
            "began": _rounded(stage.began),
            "seconds": _rounded(stage.seconds),
            "waited": _rounded(stage.waited),
            "bytes": stage.bytes,
        }
        for name, stage in stages.items()
    }


def _blocks_data(blocks: Sequence[BlockReport]) -> dict[str, Any]:
    """Blocks in columns, with times in whole microseconds, which is a third of the text."""
    chosen = blocks[:: max(1, -(-len(blocks) // MAX_BLOCKS))]
    columns: dict[str, Any] = {"of": len(blocks)}
    for name in _NUMBERS:
        columns[name] = [getattr(block, name) for block in chosen]
    for name in _SPANS:
        spans = [getattr(block, name) for block in chosen]
        columns[name] = [span and [round(each * 1e6) for each in span] for span in spans]
    return columns


def save_report_from_data(data: Any) -> SaveReport:
    """Read what :meth:`SaveReport.to_data` made; it may be hostile.

    Raises:
        InvalidManifest: If it is not a report.
    """
    try:
        return SaveReport(
            {str(name): _stage(each) for name, each in data["stages"].items()},
            _seconds(data["staged_seconds"]),
            _seconds(data["durable_seconds"]),
            _count(data["bytes"]),
            _count(data["tensors"]),
            bool(data["planned"]),
            _seconds(data["captured_seconds"]),
            _blocks(data["blocks"]),
            _count(data.get("copied_bytes", 0)),
        )
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise InvalidManifest(f"The report of the save is malformed: {error!r:.100}") from None


def _stage(data: Any) -> StageReport:
    seconds, began, waited = (_time(data[name]) for name in ("seconds", "began", "waited"))
    return StageReport(seconds, _count(data["bytes"]), began, waited)


def _blocks(columns: Any) -> tuple[BlockReport, ...]:
    numbers = [[_count(cell) for cell in columns[name]] for name in _NUMBERS]
    spans = [[_span(cell) for cell in columns[name]] for name in _SPANS]
    files, offsets, sizes, copiers, lanes = numbers
    rows = zip(files, offsets, sizes, *spans, copiers, lanes, strict=True)
    return tuple(BlockReport(*row) for row in rows)


def _span(cell: Any) -> Span | None:
    if cell is None:
        return None
    began, ended = cell
    return _time(began) / 1e6, _time(ended) / 1e6


def _seconds(value: Any) -> float | None:
    return None if value is None else _time(value)


def _time(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e15:
        raise ValueError(f"{value!r:.50} is no time")
    return float(value)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r:.50} is no number")
    return value
