"""Count the work of a pipeline from its events."""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckpipe.events import Event, RankCommitted, Retrying, SaveEnded, SaveStarted
from ckpipe.memory.budget import ByteBudget
from ckpipe.save.save import Save
from ckpipe.types import SaveReport, SaveStatus, size_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """The work of a pipeline, done and under way, in numbers.

    Args:
        saves: How many saves stand where, those that have ended and those under way.
        bytes: Size of the data files of the saves that are committed.
        seconds: For each stage, how long it was at work, of all saves that have ended or committed.
        waits: For each stage, how long it waited between its first work and its last.
        staged_seconds: How long saves took until their state was copied, together.
        active_seconds: How long at least one save was under way and not committed.
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
        """Bytes committed for each of the :attr:`active_seconds`; 0 before any."""
        return self.bytes / self.active_seconds if self.active_seconds else 0.0


class _Sums:
    """The numbers of some saves, which are added all together."""

    def __init__(self) -> None:
        self.saves: Counter[SaveStatus] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.waits: defaultdict[str, float] = defaultdict(float)
        self.bytes, self.staged_seconds = 0, 0.0

    def add(self, status: SaveStatus, report: SaveReport) -> None:
        self.saves[status] += 1
        for name, stage in report.stages.items():
            self.seconds[name] += stage.busy
            self.waits[name] += stage.waited
        self.staged_seconds += report.staged_seconds or 0.0
        if status == "committed":
            self.bytes += report.bytes


class Ledger:
    """Keeps count of the saves of one pipeline.

    It is told of events on one thread, and asked on any. A save that has committed counts at once,
    with all its numbers, though its retention is still under way.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a handler of a signal may ask who is just asking
        self._ended = _Sums()
        self._open: set[str] = set()
        self._uncommitted: set[str] = set()
        self._retries, self._active_seconds, self._since = 0, 0.0, 0.0

    def __call__(self, event: Event) -> None:
        """Takes note of an event."""
        if isinstance(event, SaveStarted):
            with self._lock:
                if not self._uncommitted:
                    self._since = time.perf_counter()
                self._open.add(event.id)
                self._uncommitted.add(event.id)
        elif isinstance(event, RankCommitted):
            with self._lock:
                self._committed(event.id)
        elif isinstance(event, SaveEnded):
            with self._lock:
                self._end(event)
        elif isinstance(event, Retrying):
            self._retries += 1

    def _end(self, event: SaveEnded) -> None:
        self._open.discard(event.id)
        self._committed(event.id)
        self._ended.add(event.status, event.report)

    def _committed(self, id: str) -> None:
        if id in self._uncommitted:
            self._uncommitted.remove(id)
            if not self._uncommitted:
                self._active_seconds += time.perf_counter() - self._since

    def _over(self, under_way: Iterable[Save]) -> tuple[_Sums, Counter[SaveStatus], float]:
        """The saves that have ended or committed, the others, and how long there were any."""
        with self._lock:
            sums = copy.deepcopy(self._ended)
            left = [save for save in under_way if save.name in self._open]
            now = time.perf_counter() - self._since if self._uncommitted else 0.0
            active_seconds = self._active_seconds + now
        others: Counter[SaveStatus] = Counter()
        for save in left:
            status = save.status
            if status == "committed":
                sums.add(status, save.report())
            else:
                others[status] += 1
        return sums, others, active_seconds

    def statistics(
        self, under_way: Iterable[Save], *, lanes: int, budget: ByteBudget | None
    ) -> Statistics:
        """The numbers until now.

        Args:
            under_way: The saves that have not ended.
            lanes: How many lanes a save has.
            budget: Staging memory; None of a pipeline that is not open.
        """
        sums, others, active_seconds = self._over(under_way)
        return Statistics(
            saves=dict(sums.saves + others),
            bytes=sums.bytes,
            seconds=dict(sums.seconds),
            waits=dict(sums.waits),
            staged_seconds=sums.staged_seconds,
            active_seconds=active_seconds,
            retries=self._retries,
            lanes=lanes,
            budget_used=budget.used if budget else 0,
            budget_capacity=budget.capacity if budget else 0,
            budget_waiting=budget.waiting if budget else 0,
        )

    def describe(self, under_way: Iterable[Save]) -> str:
        """Describe what is over, in a few words."""
        sums, _, _ = self._over(under_way)
        counts = [f"{count} {status}" for status, count in sorted(sums.saves.items())]
        if self._retries:
            counts.append(f"{self._retries} tried again")
        if sums.bytes:
            counts.append(size_text(sums.bytes))
        return ", ".join(counts)
