"""The facts that the page of a run shows, as plain data; pure.

A *launch* is one start of the training, and a :class:`Lane`. An *attempt* is a launch, or its part
after a rollback. Retention removes checkpoints, so a fact about steps between two kept ones is an
estimate by the pace of the run, and the page says *about*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median
from typing import Literal

from ckpipe.format.names import launch_id
from ckpipe.state.training_form import head_of
from ckpipe.types import CheckpointId, attempt_parts, size_text

PARTS = {
    "model": ("model", "models", "module", "net", "network", "ema", "policy", "actor", "critic"),
    "optimizer": ("optimizer", "optimizers", "optim", "optimizer_states"),
    "data": ("data", "loader", "dataloader", "dataloaders", "dataset", "sampler", "batches"),
}
"""The words of a label, among its first two, that tell a part of the state."""

State = Literal["complete", "incomplete", "damaged"]


@dataclass(slots=True)
class Checkpoint:
    """One checkpoint of the run.

    Args:
        id: Its exact name.
        step: Its step.
        state: Whether it can be loaded.
        why: The damage, or what it lacks.
        time: When its index was written, else its newest object; None if it has neither.
        pinned: Whether it is pinned.
        final: Whether it was saved with ``final=True``.
        bytes: Size of its data files.
        copied_bytes: Bytes among them that several ranks wrote alike.
        nan: The number of NaN in its tensors.
        world_size: The number of its ranks.
        metrics: Its metrics.
        resumed_from: The id of the checkpoint that its attempt had loaded.
        writer: Versions, and the class of the planner.
        devices: The types of devices that its tensors were on.
        blocked: Seconds that its save held up training, on rank 0; None without a report.
        durable: Seconds from the call of ``save`` until its manifest was made, on rank 0.
        slowest: The phase that took most of this time.
        kept: Why retention keeps it; empty if it goes, or if there are no rules.
        goes: Why retention removes it; empty if it stays.
        best: Whether its metric is the best one.
    """

    id: str
    step: int
    state: State
    why: str = ""
    time: datetime | None = None
    pinned: bool = False
    final: bool = False
    bytes: int | None = None
    copied_bytes: int = 0
    nan: int = 0
    world_size: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    resumed_from: str | None = None
    writer: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    blocked: float | None = None
    durable: float | None = None
    slowest: str = ""
    kept: str = ""
    goes: str = ""
    best: bool = False

    @property
    def key(self) -> CheckpointId:
        """The parsed id."""
        found = CheckpointId.parse(self.id)
        assert found is not None
        return found

    @property
    def origin(self) -> CheckpointId | None:
        """The parsed id of the checkpoint that its attempt had loaded."""
        return CheckpointId.parse(self.resumed_from or "")

    @property
    def complete(self) -> bool:
        """True if it can be loaded, as far as is known."""
        return self.state == "complete"


@dataclass(frozen=True, slots=True)
class Lost:
    """Work that was done and is not in the checkpoint from which the run went on.

    Args:
        lane: The number of the launch that did it.
        began: The time of the checkpoint that the run went on from.
        ended: The last known time of the work.
        first: The step of that checkpoint.
        last: The last step of the work that a save shows.
    """

    lane: int
    began: datetime
    ended: datetime
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Lane:
    """One launch of the run.

    Args:
        id: Its id.
        began: The start in its name, or else its first checkpoint's time.
        ended: The time of its last known write.
        checkpoints: Its checkpoints, the oldest first.
        resumed_from: The checkpoint that it went on from, if it names one.
        lane_resumed: The number of the launch that wrote that one, if it is known.
    """

    id: str
    began: datetime
    ended: datetime
    checkpoints: tuple[Checkpoint, ...]
    resumed_from: CheckpointId | None
    lane_resumed: int | None

    @property
    def traits(self) -> dict[str, str]:
        """The facts that may differ between launches, of its newest checkpoint with an index."""
        for each in reversed(self.checkpoints):
            if each.bytes is not None:
                size, devices = size_text(each.bytes), ", ".join(each.devices)
                own = {"ranks": str(each.world_size), "devices": devices, "size": size}
                return own | dict(each.writer)
        return {}


@dataclass(frozen=True, slots=True)
class RetentionOutcome:
    """The outcome of the retention rules.

    Args:
        rules: The rules, as Python writes them; empty if none are given.
        next_step: The step that the next save is likely to have.
        next_goes: The ids that the next save removes, besides those that go now.
        problem: The reason why there is no decision.
    """

    rules: str
    next_step: int | None = None
    next_goes: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Norms of weights by layer over steps.

    Args:
        steps: The steps.
        norms: The norms by layer.
        changes: ``|Δ|/|w|`` since the step before, by layer; None for the first step and where
            shapes have changed.
        note: What the map leaves out.
    """

    steps: tuple[int, ...]
    norms: Mapping[str, tuple[float | None, ...]]
    changes: Mapping[str, tuple[float | None, ...]]
    note: str = ""


@dataclass(frozen=True)
class Run:
    """All facts of the page.

    Args:
        url: The root, without secrets.
        now: The time of the look.
        checkpoints: The checkpoints, the oldest first; those under deletion are left out.
        deleting: The number of checkpoints under deletion.
        retention: The outcome of the rules.
        best_by: The metric of the best checkpoint, with its direction; empty if none is known.
        parts: The bytes of the newest checkpoint by part of the state.
        foreign: The description of another program's checkpoint, if the place holds one.
        verified: The number of checkpoints of which every byte was read; None without ``verify``.
        heat: Norms of the weights; None without ``weights``.
        left_out: The number of older checkpoints that were not looked at.
    """

    url: str
    now: datetime
    checkpoints: tuple[Checkpoint, ...]
    deleting: int = 0
    retention: RetentionOutcome = field(default_factory=lambda: RetentionOutcome(""))
    best_by: str = ""
    parts: Mapping[str, int] = field(default_factory=dict)
    foreign: str = ""
    verified: int | None = None
    heat: HeatMap | None = None
    left_out: int = 0

    @property
    def complete(self) -> list[Checkpoint]:
        """The complete ones, the oldest first."""
        return [each for each in self.checkpoints if each.complete]

    @property
    def newest(self) -> Checkpoint | None:
        """The one that a resume takes."""
        return next(reversed(self.complete), None)

    @property
    def without_nan(self) -> Checkpoint | None:
        """The newest complete one in which no NaN was counted."""
        return next((each for each in reversed(self.complete) if not each.nan), None)

    @property
    def obstacle(self) -> Checkpoint | None:
        """The newest checkpoint, if it is damaged: a load without ``fallback`` raises there."""
        known = [each for each in self.checkpoints if each.state != "incomplete"]
        return known[-1] if known and not known[-1].complete else None

    @cached_property
    def launches(self) -> list[Lane]:
        """The launches, the oldest first."""
        lanes: dict[str, list[Checkpoint]] = {}
        for each in self.checkpoints:
            lanes.setdefault(launch_id(each.key.attempt), []).append(each)
        numbers = {id: number for number, id in enumerate(lanes)}
        found = []
        for id, mine in lanes.items():
            times = [each.time for each in mine if each.time is not None]
            began = min([_started(mine[0].key.attempt) or self.now, *times])
            origin = next((each.origin for each in mine if each.origin), None)
            lane = None if origin is None else numbers.get(launch_id(origin.attempt))
            found.append(Lane(id, began, max([began, *times]), tuple(mine), origin, lane))
        return found

    @cached_property
    def lost(self) -> list[Lost]:
        """The work that was lost, as far as saves show it."""
        numbers = {launch.id: number for number, launch in enumerate(self.launches)}
        found = []
        for origin in {each.origin: None for each in self.checkpoints if each.origin}:
            lane = numbers.get(launch_id(origin.attempt))
            if lane is None:
                continue
            launch = self.launches[lane]
            timed = [(each.step, each.time) for each in launch.checkpoints
                     if each.time is not None and each.key.attempt == origin.attempt]  # fmt: skip
            after = [time for step, time in timed if step > origin.step]
            if after:
                before = [time for step, time in timed if step <= origin.step]
                began = min([*before[-1:], max(after)]) if before else launch.began
                found.append(Lost(lane, began, max(after), origin.step, max(timed)[0]))
        return found

    @cached_property
    def _saves(self) -> list[tuple[int, float, float | None]]:
        """Step, time and blocked seconds of the newest saves of the newest launch."""
        launch = self.launches[-1]
        first = 0 if launch.resumed_from is None else launch.resumed_from.step
        found = [(each.step, each.time.timestamp(), each.blocked)
                 for each in launch.checkpoints if each.complete and each.time]  # fmt: skip
        start = (first, launch.began.timestamp(), None)
        return found[-20:] if len(found) > 1 else [start, *found]

    @property
    def waited_share(self) -> float | None:
        """The share of the time that saves held up training; None if it is unknown."""
        seconds = self._saves[-1][1] - self._saves[0][1]
        blocked = [each[2] for each in self._saves[1:]]
        known = [each for each in blocked if each is not None]
        return len(blocked) * fmean(known) / seconds if known and seconds > 0 else None

    @property
    def at_risk(self) -> tuple[float, int | None] | None:
        """The seconds and steps that a kill now would lose; None if the run seems to have ended."""
        newest = self.newest
        if newest is None or newest.final or newest.time is None:
            return None
        seconds = max(0.0, self.seconds_since(newest.time))
        gaps = [later[1] - earlier[1] for earlier, later in pairwise(self._saves)]
        if seconds > max(3600.0, 5 * median(gaps or [0.0])):
            return None
        steps, spent = self._saves[-1][0] - self._saves[0][0], sum(gaps)
        if steps <= 0 or seconds >= 5 * spent:  # the pace of a few moments tells nothing of so long
            return seconds, None
        return seconds, int(float(f"{seconds * steps / spent:.2g}"))

    @property
    def reasons(self) -> dict[tuple[str, str], list[int]]:
        """The steps, the newest first, by what becomes of them, ``stays`` or ``goes``, and why."""
        found: dict[tuple[str, str], list[int]] = {}
        for each in reversed(self.complete):
            if why := each.goes or each.kept:
                found.setdefault(("goes" if each.goes else "stays", why), []).append(each.step)
        return found

    def seconds_since(self, time: datetime) -> float:
        """Return the seconds from a time until the look."""
        return (self.now - time).total_seconds()

    def of_state(self, state: State) -> list[Checkpoint]:
        """Return the checkpoints of a state."""
        return [each for each in self.checkpoints if each.state == state]


def part_of(label: str, heads: set[str]) -> str:
    """Return the part of the state that a label belongs to: model, optimizer, data or other."""
    if head_of(label, heads) is not None:
        return "optimizer"
    first = [each.lower() for each in label.split(".")[:2]]
    known = (part for word in first for part, words in PARTS.items() if word in words)
    return next(known, "other")


def _started(attempt: str) -> datetime | None:
    try:
        return attempt_parts(attempt)[0]
    except ValueError:  # 31 February
        return None
