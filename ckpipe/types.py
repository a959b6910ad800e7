"""The plain data that callers of ckpipe see: checkpoints, reports of saves and loads, planners.

Reports tell how saves and loads spent their time, and name the bottleneck. Times are seconds after
the call unless a name says otherwise. A stage is *busy* while at least one of its workers works;
for the rest of its time the stage *waited*: for blocks, for memory, or for the next stage.

The protocols of planners are here, apart from ckpipe's own planners, so that settings need no
torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from ckpipe.errors import InvalidManifest
from ckpipe.notebook import html_table, names_text, shown

if TYPE_CHECKING:
    from ckpipe.plan.plan import RankPlan
    from ckpipe.state.flatten import Captured

SaveStatus = Literal[
    "queued", "capturing", "staged", "uploading", "committed", "skipped", "failed", "cancelled"
]
"""The state of a save, in this order; the last four are final."""

Until = Literal["captured", "staged", "committed"]
"""The state of a save at which a call of ``save`` returns."""

Form = Literal["torch", "hf", "dcp"]
"""The form of an export."""

DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
"""Short names of dtypes, which a user may write in place of torch's names."""

PerRank = Literal["raise", "drop", "rank0", "derive"]
"""The treatment of per-rank values by a load of another number of ranks."""

PicklePolicy = Literal["refuse", "allow"]
"""The treatment of objects of unknown types."""

OnError = Literal["raise", "warn"]
"""The behaviour after a failed save that no call waited for."""

_DAY = r"[0-9]{4}(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01])"
_TIME = r"(?:[01][0-9]|2[0-3])[0-5][0-9][0-5][0-9][0-9]{3}"
_ATTEMPT = rf"{_DAY}T{_TIME}Z-[0-9A-Za-z_-]{{1,64}}"
_NAME = re.compile(rf"step-([0-9]{{12,18}})\.({_ATTEMPT})\.([0-9]{{1,18}})")
_ATTEMPT_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """The name of one checkpoint. Ids compare by age: the newest is the greatest.

    An attempt is one launch of a training run. Its name begins with its start time at a fixed
    width. So after a run resumes from step 500, the abandoned step 1000 of the earlier launch is an
    older checkpoint than the new ones.

    Args:
        attempt: Start time and id of the attempt, ``20261121T034205123Z-9f3a2c01``.
        step: The training step, zero or more.
        count: Number of earlier saves of this step in this attempt.
    """

    attempt: str
    step: int
    count: int

    def __str__(self) -> str:
        return f"step-{self.step:012d}.{self.attempt}.{self.count}"

    @classmethod
    def parse(cls, name: str) -> CheckpointId | None:
        """Parse a name; return None if it is not exactly as ckpipe writes it."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        parsed = cls(match[2], int(match[1]), int(match[3]))
        return parsed if str(parsed) == name else None


def attempt_name(started: datetime, attempt_id: str) -> str:
    """Make the name of an attempt: its start in UTC to the millisecond, and its id.

    Raises:
        ValueError: If the id is not 1 to 64 letters, digits, ``_`` or ``-``.
    """
    if not _ATTEMPT_ID.fullmatch(attempt_id):
        raise ValueError(f"an attempt id is 1 to 64 letters, digits, '_' or '-': {attempt_id!r}")
    return f"{started:%Y%m%dT%H%M%S}{started.microsecond // 1000:03d}Z-{attempt_id}"


def attempt_parts(attempt: str) -> tuple[datetime, str]:
    """Return the start of an attempt in UTC, and its id: the arguments of :func:`attempt_name`.

    Raises:
        ValueError: If the name begins with no date.
    """
    started, _, attempt_id = attempt.partition("Z-")
    # %f takes six digits, and names have three.
    return datetime.strptime(f"{started}000", "%Y%m%dT%H%M%S%f").replace(tzinfo=UTC), attempt_id


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """Known facts of one checkpoint on the store. Two infos of the same checkpoint are equal.

    A fact of the content is None if it is unknown: the checkpoint is not complete, its index cannot
    be read, or :meth:`ckpipe.Pipeline.steps` does not read it.

    Args:
        id: Its exact name; accepted wherever a step is.
        step: The training step.
        attempt: The launch that wrote it.
        count: Number of earlier saves of this step in that attempt.
        complete: True if it is whole and can be loaded.
        reason: The reason why it is not complete, or why its content is unknown; else empty.
        pinned: True if it is protected from retention.
        saved_at: Time at which its index was written, by the store's clock, in UTC; None without
            an index.
        metrics: The metrics that ``save`` was given.
        metadata: The metadata that ``save`` was given.
        bytes: The size of its data files, of all ranks together.
        world_size: Number of ranks that saved it.
        line: The launch that began its line, which retention counts by; empty if it was saved by a
            version that knew no lines.
        nan: The number of NaN in its tensors, as far as they were counted.
        differences: The number of chunks, as far as they were compared, of which ranks hold
            different copies that are declared equal.
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
    line: str | None = field(default=None, compare=False)
    nan: int | None = field(default=None, compare=False)
    differences: int | None = field(default=None, compare=False)

    @property
    def key(self) -> CheckpointId:
        """The parsed id."""
        return CheckpointId(self.attempt, self.step, self.count)

    def _repr_html_(self) -> str:
        rows = [*zip(_INFO, self._cells(), strict=True)]
        rows += [("metadata", names_text(self.metadata))] if self.metadata else []
        rows += [("launch", self.attempt), *([("line", self.line)] if self.line else [])]
        return html_table(type(self).__name__, rows)

    def _cells(self) -> tuple[object, ...]:
        state = "complete" if self.complete else "incomplete"
        parts = [state, *(["pinned"] if self.pinned else []), *([self.reason] * bool(self.reason))]
        parts += [f"{self.nan} NaN"] if self.nan else []
        parts += [f"{self.differences} differing copies"] if self.differences else []
        return (
            self.step,
            "" if self.saved_at is None else f"{self.saved_at:%Y-%m-%d %H:%M:%S}Z",
            "" if self.bytes is None else size_text(self.bytes),
            self.world_size or "",
            ", ".join(parts),
            metrics_text(self.metrics or {}),
            self.id,
        )


_INFO = ("step", "saved at", "size", "ranks", "state", "metrics", "id")
_MOST_ROWS = 50


class CheckpointList(list[CheckpointInfo]):
    """A list of checkpoints that a notebook shows as a table."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return CheckpointList(found) if isinstance(index, slice) else found

    def _repr_html_(self) -> str:
        more = len(self) - _MOST_ROWS
        title = f"{len(self):,} checkpoint{'s' * (len(self) != 1)}"
        if more > 0:
            title += f": the last {_MOST_ROWS}, without the {more} before them"
        return html_table(title, (each._cells() for each in self[-_MOST_ROWS:]), _INFO)


@dataclass(frozen=True, slots=True, repr=False)
class LoadResult:
    """A loaded checkpoint.

    Args:
        id: Exact name of the checkpoint; None if a source was loaded.
        step: Its step; 0 for a source.
        state: The state: the target itself as far as it could be changed in place.
        metadata: The metadata that ``save`` was given.
        metrics: The metrics that ``save`` was given.
        missing: Labels of the target that the checkpoint lacks, or that it has in another shape, if
            ``strict="shapes"`` skips these.
        unexpected: Labels of the checkpoint that the target lacks.
        report: Seconds and bytes.
        transformed: For each saved label that a transform has renamed, cut, joined, converted or
            left out, the labels that it is loaded under.
        source: The path or URL that was loaded, if another program wrote it; else None.
    """

    id: str | None
    step: int
    state: Any = field(repr=False)
    metadata: Mapping[str, Any]
    metrics: Mapping[str, float]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    report: LoadReport | None = field(default=None, compare=False)
    transformed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    source: str | None = None

    def __repr__(self) -> str:
        rows = self._rows()
        facts = [f"{name} {value}" for name, value in rows[1:] if name != "took"]
        facts += [] if self.report is None else [repr(self.report)]
        return f"<LoadResult {rows[0][1]}: {', '.join(facts)}>"

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        """Return the facts in which it has something, with few names of many."""
        rows = [("loaded", shown(self.id or self.source)), ("step", str(self.step))]
        if self.metrics:
            rows.append(("metrics", metrics_text(self.metrics)))
        report = self.report
        named: dict[str, Collection[str]] = {
            "metadata": self.metadata,
            "missing": self.missing,
            "unexpected": self.unexpected,
            "transformed": self.transformed,
            "damaged": {} if report is None else report.damaged,
        }
        rows += [(name, names_text(names)) for name, names in named.items() if names]
        if report is not None:
            took = f"{size_text(report.bytes)} in {report.seconds:.3g} s. {report.bottleneck}"
            rows.append(("took", took))
        return rows


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The outcome of ``verify`` for a checkpoint that is whole.

    Args:
        id: Exact name of the checkpoint; None if another program wrote it.
        files: Data files read.
        bytes: Their size in bytes.
        source: The path or URL, if another program wrote it: its headers, the sizes of its files
            and the places of its tensors are checked, and its bytes can be read, but have no
            checksums. Else None, and every byte is checked.
    """

    id: str | None
    files: int
    bytes: int
    source: str | None = None


@dataclass(frozen=True, slots=True)
class CopyResult:
    """A copied checkpoint.

    Args:
        id: Exact name of the checkpoint, the same on both stores.
        files: The number of its data files.
        bytes: Their size in bytes.
        copied_files: The number of copied files; the others were there.
        copied_bytes: Their size in bytes.
    """

    id: str
    files: int
    bytes: int
    copied_files: int
    copied_bytes: int


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """One tensor of a checkpoint.

    Args:
        label: Its label.
        dtype: Name of its torch dtype.
        shape: Its global shape.
        bytes: Bytes of all its elements, written or shared.
        kind: ``tensor``, ``parameter``, ``buffer``, ``subclass`` or ``numpy``.
        device: Type of the device it was on.
        requires_grad: Whether it collects gradients.
        also: Other labels of the very same tensor in the state.
        shares_with: Labels of other tensors that share bytes of memory with it.
        ranks: The ranks that hold all or part of it.
        boxes: The number of boxes into which its ranks have cut it; 1 for a whole tensor.
        differs: Whether ranks hold it whole and with different bytes.
        nan: The number of NaN in its entries, of all ranks; tensors that share memory, and scalars
            that are stored together, have an entry in common.
    """

    label: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    kind: str
    device: str
    requires_grad: bool
    also: tuple[str, ...]
    shares_with: tuple[str, ...]
    ranks: tuple[int, ...]
    boxes: int
    differs: bool
    nan: int = 0


@dataclass(frozen=True, slots=True)
class ValueDescription:
    """One inline value of a checkpoint.

    Args:
        label: Its label.
        value: The value as JSON text, cut off if it is long.
        ranks: The ranks that have it.
        differs: Whether ranks have different values; ``value`` is then that of the lowest rank.
    """

    label: str
    value: str
    ranks: tuple[int, ...]
    differs: bool


@dataclass(frozen=True, slots=True)
class DifferingCopy:
    """A box of a tensor of which ranks hold different copies that are declared equal.

    Args:
        tensor: The label of the tensor.
        box: The lower and the upper corner; None for all of the tensor.
        owner: The rank that wrote it.
        witnesses: The ranks that hold other bytes.
        mebibytes: The numbers of the mebibytes of the box that differ.
    """

    tensor: str
    box: tuple[tuple[int, ...], tuple[int, ...]] | None
    owner: int
    witnesses: tuple[int, ...]
    mebibytes: tuple[int, ...]

    def __str__(self) -> str:
        place = "" if self.box is None else f" {list(self.box[0])} to {list(self.box[1])}"
        ranks = f"rank{'s' * (len(self.witnesses) > 1)} {first_of(self.witnesses)}"
        return f"{self.tensor}{place}: written by rank {self.owner}, other bytes on {ranks}"


@dataclass(frozen=True, slots=True)
class CheckpointDescription:
    """The contents of a checkpoint, without the values of its tensors.

    Args:
        id: Exact name of the checkpoint; None if another program wrote it.
        step: Its step; None if another program wrote it.
        world_size: The number of ranks that wrote it.
        files: The number of its data files.
        bytes: Size of its data files.
        linked_bytes: Bytes of these that its saves linked to files of earlier checkpoints.
        started: The start time of its save on the lowest rank, ISO 8601 in UTC; empty if unknown.
        final: Whether it was saved with ``final=True``.
        resumed_from: The checkpoint that its run had loaded, if any.
        line: The launch that began its line; empty if it was saved by a version that knew no lines.
        writer: Versions of ckpipe, torch and Python.
        metadata: The metadata that was passed to ``save``.
        metrics: The metrics that were passed to ``save``; non-finite numbers as text.
        tensors: Its tensors, in the order of the state.
        values: Its inline values, in the order of the state.
        wrappers: Its wrapper tensors: class, dtype and size by label.
        source: The path or URL, if another program wrote it; else None.
        nan: The number of NaN in its tensors, as far as they were counted.
        differences: The number of chunks of which ranks hold different copies.
        differing: The first hundred of them: label, box, the rank that wrote it, the ranks that
            hold other bytes, and the mebibytes of the box that differ.
    """

    id: str | None
    step: int | None
    world_size: int
    files: int
    bytes: int
    linked_bytes: int
    started: str
    final: bool
    resumed_from: str | None
    line: str
    writer: Mapping[str, str]
    metadata: Mapping[str, Any]
    metrics: Mapping[str, Any]
    tensors: tuple[TensorDescription, ...]
    values: tuple[ValueDescription, ...]
    wrappers: Mapping[str, str]
    source: str | None = None
    nan: int = 0
    differences: int = 0
    differing: tuple[DifferingCopy, ...] = ()


@dataclass(frozen=True, slots=True)
class ExportResult:
    """A checkpoint in another form.

    Args:
        id: Exact name of the checkpoint; None if another program wrote it.
        step: Its step; None if another program wrote it.
        url: The folder with the files, without secrets.
        files: Names of the files.
        bytes: Their size together.
    """

    id: str | None
    step: int | None
    url: str
    files: tuple[str, ...]
    bytes: int


class Planner(Protocol):
    """Makes the plan of a rank from the structure of its state."""

    def plan(self, captured: Captured, *, rank: int, world_size: int) -> RankPlan:
        """Plan a save; pure, and called in a worker thread.

        Args:
            captured: The structure; the bytes of its tensors may change meanwhile.
            rank: The rank to plan for, from 0.
            world_size: Number of ranks that save together.

        Raises:
            UnsupportedState: If a tensor cannot be saved.
            UnsupportedTopology: If the planner cannot serve this world size.
        """
        ...


@runtime_checkable
class JointPlanner(Planner, Protocol):
    """A planner whose plan of a save depends on the states of other ranks.

    Every save calls :meth:`plan_save`, never :meth:`plan`, and never while it holds the state lock.
    """

    def prepare(self, *, rank: int, world_size: int, max_file_bytes: int | None) -> None:
        """Get ready when a pipeline is opened; blocking, called in a worker thread.

        Args:
            rank: This rank.
            world_size: Number of ranks that save together.
            max_file_bytes: The largest data file that the store takes, in bytes; None for no
                limit.

        Raises:
            UnsupportedTopology: If ranks cannot plan together here.
        """
        ...

    def plan_save(self, captured: Captured, *, save: str, rank: int, world_size: int) -> RankPlan:
        """Plan a save together with the other ranks; blocking, called in a worker thread.

        If an earlier plan still fits, return the same object, since ckpipe caches work with it.

        Args:
            captured: The structure.
            save: The name of the save: ``<run>/<number>``, the same on all ranks, where the run
                is this launch on this root. It may be called again for one save, if the state has
                changed since.
            rank: The rank to plan for, from 0.
            world_size: Number of ranks that save together.

        Raises:
            PlanTimeout: If some ranks do not join in time; names them.
            UnsupportedState: If a tensor cannot be saved, or ranks contradict each other.
            SaveError: If there is no plan for this save for another reason.
        """
        ...


MAX_BLOCKS = 2000
"""Most blocks in the plain form of a report; if there are more, it has every n-th."""

Span = tuple[float, float]
"""The times of a start and an end."""

_SPANS = ("copied", "summed", "uploaded")
_NUMBERS = ("file", "offset", "bytes", "copier", "lane")


@dataclass(frozen=True, slots=True)
class StageReport:
    """The times of one stage of a save or load.

    Args:
        seconds: Seconds from its start to its end; stages overlap.
        bytes: Bytes that went through it.
        began: Its start, in seconds after the call.
        waited: Seconds of them in which it waited.
    """

    seconds: float
    bytes: int = 0
    began: float = 0.0
    waited: float = 0.0

    @property
    def busy(self) -> float:
        """Seconds in which it worked."""
        return max(0.0, self.seconds - self.waited)


@dataclass(frozen=True, slots=True)
class BlockReport:
    """The times of one block of a data file; a time is None if its step has not happened.

    Args:
        file: Number of the rank's data file.
        offset: Offset of the block in the file, in bytes.
        bytes: Its size.
        copied: Time in which it was filled in host memory.
        summed: Time in which its checksums were computed, or the last of them. None if all were
            computed while it was copied, as they are of data that lies in host memory in the
            layout of the file.
        uploaded: Time in which it was written to the store, retries included.
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
        staged_seconds: Seconds from the call of ``save`` until the whole state was copied.
        durable_seconds: Seconds from the call of ``save`` until the commit; None until then.
        bytes: Size of the data files.
        tensors: Number of saved tensors.
        planned: True if the plan had to be made; False if the last one still fitted.
        captured_seconds: With ``until="captured"``, seconds from the call of ``save`` until forward
            and backward could go on; else None.
        blocks: The times of each block, in the order in which they were filled.
        copied_bytes: Bytes of the whole checkpoint that are redundant copies of tensors which all
            ranks hold alike. Known to the rank that completed it; 0 on others.
        linked_bytes: Bytes of the data files that were linked to those of an earlier checkpoint,
            and not written.
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
    linked_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Seconds from the call until the last end in the report."""
        ends = (stage.began + stage.seconds for stage in self.stages.values())
        return max([self.durable_seconds or 0.0, self.staged_seconds or 0.0, *ends])

    @property
    def bottleneck(self) -> str:
        """The phase that took most of the time, as a sentence; empty if no stage has run yet."""
        until = self.durable_seconds or self.seconds
        return _sentence(self.stages, _SAVE_PARTS, until)

    def to_data(self) -> dict[str, Any]:
        """Return the report as plain JSON; :func:`save_report_from_data` reads it."""
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
            **({"linked_bytes": self.linked_bytes} if self.linked_bytes else {}),
        }

    def __repr__(self) -> str:
        parts = [f"{size_text(self.bytes)} in {self.tensors} tensors"]
        if self.copied_bytes:
            parts.append(f"{size_text(self.copied_bytes)} of the checkpoint are copies")
        if self.linked_bytes:
            parts.append(f"{size_text(self.linked_bytes)} linked")
        for name, seconds in (("staged", self.staged_seconds), ("durable", self.durable_seconds)):
            parts.append(f"not {name}" if seconds is None else f"{name} in {seconds:.3g} s")
        return f"<SaveReport {', '.join(parts)}: {self.bottleneck or 'nothing has run yet'}>"


@dataclass(frozen=True, slots=True, repr=False)
class LoadReport:
    """The times of one load.

    Args:
        stages: A report for each stage, by name: ``find``, in which the checkpoint and its index
            were found, ``match``, ``read`` and ``apply``.
        seconds: Seconds from the call of ``load`` until the state was in place.
        bytes: Bytes read from data files, also those that turned out not to be needed.
        reads: Requests for ranges of data files.
        damaged: Ids of newer checkpoints that ``fallback`` skipped, each with its damage.
        unverified_bytes: Bytes among these that had no checksum: those of a source, which another
            program wrote.
    """

    stages: Mapping[str, StageReport]
    seconds: float
    bytes: int
    reads: int
    damaged: Mapping[str, str] = field(default_factory=dict)
    unverified_bytes: int = 0

    @property
    def bottleneck(self) -> str:
        """The phase that took most of the time, as a sentence."""
        return _sentence(self.stages, _LOAD_PARTS, self.seconds)

    def to_data(self) -> dict[str, Any]:
        """Return the report as plain JSON."""
        return {
            "seconds": _rounded(self.seconds),
            "bytes": self.bytes,
            "reads": self.reads,
            "unverified_bytes": self.unverified_bytes,
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
        started: Time of the call of its save, ISO 8601 in UTC, by its own machine's clock.
        report: The report of the save until its manifest was written; None if reports were not
            kept.
    """

    rank: int
    started: str
    report: SaveReport | None


# Possible bottlenecks of a save or load: a name for people, and the stages that it covers.
_SAVE_PARTS = {
    "Waiting for trainers to release the state lock": ("lock",),
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
    """Return the length of the union of the spans."""
    total, reached = 0.0, -math.inf
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, reached))
        reached = max(reached, ended)
    return total


def first_of(names: Sequence[object], most: int = 20) -> str:
    """Name the first of some ranks or labels, and say how many there are besides."""
    more = len(names) - most
    named = ", ".join(map(str, names[:most]))
    return f"{named} and {more} more" if more > 0 else named


def metrics_text(metrics: Mapping[str, Any], most: int = 3) -> str:
    """Write the first metrics, and how many there are besides."""
    numbers = ((name, f"{x:.6g}" if isinstance(x, float) else x) for name, x in metrics.items())
    first = [f"{shown(name, 60)}={number}" for name, number in islice(numbers, most)]
    return " ".join(first) + (f" and {len(metrics) - most} more" if len(metrics) > most else "")


def size_text(nbytes: float) -> str:
    """Describe a number of bytes for people, in powers of ten."""
    size = float(round(nbytes))
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if size < 999.5:  # three digits would round it to 1000
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.0f} EB"


def age_text(seconds: float) -> str:
    """Describe an age for people, in whole units: ``45 s``, ``3 h``, ``12 d``; at least ``0 s``."""
    left = max(0, int(seconds))
    for unit, size, most in (("s", 1, 60), ("min", 60, 60), ("h", 3600, 48)):
        if left < size * most:
            return f"{left // size} {unit}"
    return f"{left // 86400} d"


def rate_text(nbytes: int, seconds: float) -> str:
    """Describe a rate in bytes per second for people."""
    return f"{size_text(nbytes / seconds)}/s"


def plain_data(data: Any) -> Any:
    """Convert data for the json module: floats that are not finite to text, sets to lists."""
    if is_dataclass(data) and not isinstance(data, type):
        return {each.name: plain_data(getattr(data, each.name)) for each in fields(data)}
    if isinstance(data, dict):
        return {str(key): plain_data(value) for key, value in data.items()}
    if isinstance(data, list | tuple | set | frozenset):
        return [plain_data(each) for each in data]
    if isinstance(data, float) and not math.isfinite(data):
        return repr(data)
    if data is None or isinstance(data, str | int | float):
        return data
    return data.isoformat() if hasattr(data, "isoformat") else str(data)


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
    """Put blocks in columns, with times in whole microseconds: that takes a third of the text."""
    chosen = blocks[:: max(1, -(-len(blocks) // MAX_BLOCKS))]
    columns: dict[str, Any] = {"of": len(blocks)}
    for name in _NUMBERS:
        columns[name] = [getattr(block, name) for block in chosen]
    for name in _SPANS:
        spans = [getattr(block, name) for block in chosen]
        columns[name] = [span and [round(each * 1e6) for each in span] for span in spans]
    return columns


def save_report_from_data(data: Any) -> SaveReport:
    """Read the plain form of :meth:`SaveReport.to_data`; it may be hostile.

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
