"""What a pipeline has done so far, in numbers, from its events."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpipe.events import Event, Retrying, SaveEnded, SaveStarted
from ckpipe.reports import size_text
from ckpipe.types import SaveStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What a pipeline has done, and what it is at.

    Args:
        saves: How many saves stand where, those that have ended and those under way.
        bytes: Size of the data files of saves that have ended and are committed.
        seconds: For each stage, how long it was at work, of all saves that have ended.
        waits: For each stage, how long it waited between its first work and its last.
        staged_seconds: How long saves took until their state was copied, together.
        active_seconds: How long at least one save was under way.
        retries: Requests of saves that were tried again.
        lanes: Blocks of one save that may be under way to the store at the same time.
        budget_used: Staging memory that saves hold now, in bytes.
        budget_capacity: Staging memory that they may hold.
        budget_waiting: How many saves wait for staging memory.
    """

    saves: Mapping[SaveStatus, int] = field(default_factory=dict)
    bytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    waits: Mapping[str, float] = field(default_factory=dict)
    staged_seconds: float = 0.0
    active_seconds: float = 0.0
    retries: int = 0
    lanes: int = 0
    budget_used: int = 0
    budget_capacity: int = 0
    budget_waiting: int = 0

    @property
    def throughput(self) -> float:
        """Bytes committed for each second during which a save was under way; 0 before any."""
        return self.bytes / self.active_seconds if self.active_seconds else 0.0


class Ledger:
    """Keeps count of the saves of one pipeline.

    It is told of events on one thread, and asked on any.
    """

    def __init__(self) -> None:
        self._ended: Counter[SaveStatus] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._waits: defaultdict[str, float] = defaultdict(float)
        self._bytes = self._retries = self._under_way = 0
        self._staged_seconds = self._active_seconds = self._since = 0.0

    def __call__(self, event: Event) -> None:
        """Takes note of an event."""
        if isinstance(event, SaveStarted):
            if not self._under_way:
                self._since = time.perf_counter()
            self._under_way += 1
        elif isinstance(event, SaveEnded):
            self._end(event)
        elif isinstance(event, Retrying):
            self._retries += 1

    def _end(self, event: SaveEnded) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._active_seconds += time.perf_counter() - self._since
        self._ended[event.status] += 1
        report = event.report
        for name, stage in report.stages.items():
            self._seconds[name] += stage.busy
            self._waits[name] += stage.waited
        self._staged_seconds += report.staged_seconds or 0.0
        if event.status == "committed":
            self._bytes += report.bytes

    def statistics(
        self, under_way: Mapping[SaveStatus, int], *, lanes: int, budget: tuple[int, int, int]
    ) -> Statistics:
        """The numbers until now.

        Args:
            under_way: How many saves that have not ended stand where.
            lanes: How many lanes a save has.
            budget: Staging memory used, its capacity, and how many wait for it.
        """
        used, capacity, waiting = budget
        now = time.perf_counter() - self._since if self._under_way else 0.0
        return Statistics(
            saves=dict(self._ended + Counter(under_way)),
            bytes=self._bytes,
            seconds=dict(self._seconds),
            waits=dict(self._waits),
            staged_seconds=self._staged_seconds,
            active_seconds=self._active_seconds + now,
            retries=self._retries,
            lanes=lanes,
            budget_used=used,
            budget_capacity=capacity,
            budget_waiting=waiting,
        )

    def __str__(self) -> str:
        counts = [f"{count} {status}" for status, count in sorted(self._ended.items())]
        if self._retries:
            counts.append(f"{self._retries} tried again")
        if self._bytes:
            counts.append(size_text(self._bytes))
        return ", ".join(counts)


__all__ = ["Ledger", "Statistics"]
