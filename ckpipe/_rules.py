"""The retention rules themselves; :mod:`ckpipe.retention` says what holds for all of them."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any, Literal

from ckpipe._rule_forms import Candidate, Rule, Verdict
from ckpipe.errors import SettingsError
from ckpipe.tasks.user_code import user_code


class _Leaf(Rule):
    """A rule that is not made of others: the ids it keeps, and one phrase that says which."""

    __slots__ = ()

    @abc.abstractmethod
    def _kept(self, newest_first: Sequence[Candidate], now: datetime) -> set[str]: ...

    @abc.abstractmethod
    def _phrase(self) -> str: ...

    def judge(self, newest_first: Sequence[Candidate], now: datetime) -> dict[str, Verdict]:
        kept, phrase = self._kept(newest_first, now), self._phrase()
        verdicts = (Verdict(False, f"not {phrase}"), Verdict(True, phrase))
        return {candidate.id: verdicts[candidate.id in kept] for candidate in newest_first}

    def _arguments(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        pairs = ((each, getattr(self, each.name)) for each in fields(self))  # type: ignore[arg-type]
        return {each.name: value for each, value in pairs if value != each.default}

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={value!r}" for name, value in self._arguments().items())
        return f"{type(self).__name__}({inside})"


class _Alone(_Leaf):
    """A rule that judges each checkpoint by itself, so that none has rivals."""

    def rivals(
        self, newest_first: Sequence[Candidate], losers: Collection[str], now: datetime
    ) -> set[str]:
        """None: each is judged by itself."""
        return set()


@dataclass(frozen=True, slots=True, repr=False)
class KeepLast(_Leaf):
    """Keeps the newest checkpoints.

    Args:
        n: How many. 0 means no intermediate checkpoints at all: only final ones are kept.

    Raises:
        SettingsError: If ``n`` is not a whole number of at least 0.
    """

    n: int

    def __post_init__(self) -> None:
        _check_whole("KeepLast", "n", self.n, least=0)

    def _kept(self, newest_first: Sequence[Candidate], now: datetime) -> set[str]:
        if self.n == 0:
            return {candidate.id for candidate in newest_first if candidate.final}
        return {candidate.id for candidate in newest_first[: self.n]}

    def rivals(
        self, newest_first: Sequence[Candidate], losers: Collection[str], now: datetime
    ) -> set[str]:
        """The newest; none for 0, which judges each by itself."""
        return self._kept(newest_first, now) if self.n else set()

    def _phrase(self) -> str:
        return f"among the newest {self.n}" if self.n else "a final checkpoint"

    def to_data(self) -> dict[str, Any]:
        return {"keep": "last", "n": self.n}


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class KeepEvery(_Leaf):
    """Keeps one checkpoint of every stretch of training: the first at or after each mark.

    With ``steps=1000`` the marks are the steps 0, 1000, 2000 and so on. Where checkpoints lie on
    the marks, exactly those are kept; where they lie beside them, the next one is. If the first
    step of a stretch was saved several times, the newest of these is kept. With ``seconds`` the
    marks are multiples of that time since 1970 and the earliest checkpoint by creation is kept.

    Args:
        steps: The length of a stretch in steps, at least 1.
        seconds: The length of a stretch in seconds, at least 1. Exactly one of both is given.

    Raises:
        SettingsError: If none or both are given, or one is out of range.
    """

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise SettingsError("KeepEvery needs either steps or seconds")
        if self.steps is not None:
            _check_whole("KeepEvery", "steps", self.steps, least=1)
        else:
            check_seconds("KeepEvery", self.seconds, least=1)

    def _kept(self, newest_first: Sequence[Candidate], now: datetime) -> set[str]:
        first: dict[float, Candidate] = {}
        for candidate in newest_first:
            stretch, place = self._place(candidate)
            # The newest comes first and only a strictly earlier place displaces it.
            if stretch not in first or place < self._place(first[stretch])[1]:
                first[stretch] = candidate
        return {candidate.id for candidate in first.values()}

    def rivals(
        self, newest_first: Sequence[Candidate], losers: Collection[str], now: datetime
    ) -> set[str]:
        """Those that are kept of the stretches of the losers."""
        stretches = {self._place(each)[0] for each in newest_first if each.id in losers}
        same = [each for each in newest_first if self._place(each)[0] in stretches]
        return self._kept(same, now)

    def _place(self, candidate: Candidate) -> tuple[float, float]:
        if self.steps is not None:
            return candidate.step // self.steps, candidate.step
        assert self.seconds is not None
        created = candidate.created.timestamp()
        return created // self.seconds, created

    def _phrase(self) -> str:
        unit = f"{self.steps} steps" if self.steps is not None else f"{self.seconds:g} seconds"
        return f"the first of its {unit}"

    def to_data(self) -> dict[str, Any]:
        return {"keep": "every", **self._arguments()}


@dataclass(frozen=True, slots=True, repr=False)
class KeepBest(_Leaf):
    """Keeps the checkpoints with the best values of a metric.

    A checkpoint without the metric, or with NaN, never wins. Of equal values the newer wins. Where
    no checkpoint has the metric, as when its name is misspelt, or all have NaN, there is nothing to
    judge by: all are kept.

    Args:
        metric: The name of the metric.
        mode: Whether the smallest (``"min"``) or the largest (``"max"``) value is best.
        n: How many to keep, at least 1.

    Raises:
        SettingsError: If an argument is out of range.
    """

    metric: str
    mode: Literal["min", "max"] = "min"
    n: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise SettingsError(f"KeepBest needs the name of a metric, not {self.metric!r}")
        if self.mode not in ("min", "max"):
            raise SettingsError(f"The mode of KeepBest is 'min' or 'max', not {self.mode!r}")
        _check_whole("KeepBest", "n", self.n, least=1)

    def winners(self, newest_first: Sequence[Candidate]) -> list[str]:
        """The ids of the best, the best first; none if no checkpoint has the metric."""
        scored = [
            (score, each.id) for each in newest_first if (score := self._score(each)) is not None
        ]
        # The sort is stable, and the input has the newer first.
        scored.sort(key=lambda pair: pair[0], reverse=self.mode == "max")
        return [name for _, name in scored[: self.n]]

    def _kept(self, newest_first: Sequence[Candidate], now: datetime) -> set[str]:
        return set(self.winners(newest_first))

    def judge(self, newest_first: Sequence[Candidate], now: datetime) -> dict[str, Verdict]:
        """Judges every checkpoint; all are kept if none has the metric."""
        if not self.missing_metrics(newest_first):
            return _Leaf.judge(self, newest_first, now)
        verdict = Verdict(True, f"no checkpoint has a number for {self.metric}")
        return {each.id: verdict for each in newest_first}

    def missing_metrics(self, newest_first: Sequence[Candidate]) -> set[str]:
        """Its metric, if no checkpoint has a number for it."""
        judged = any(self._score(each) is not None for each in newest_first)
        return set() if judged or not newest_first else {self.metric}

    def _score(self, candidate: Candidate) -> float | None:
        score = candidate.metrics.get(self.metric)
        # Only NaN differs from itself; math.isnan fails on whole numbers too large for a float.
        return None if score is None or score != score else score

    def _phrase(self) -> str:
        extreme = "lowest" if self.mode == "min" else "highest"
        return f"among the {self.n} with the {extreme} {self.metric}"

    def to_data(self) -> dict[str, Any]:
        return {"keep": "best", **self._arguments()}


@dataclass(frozen=True, slots=True, repr=False)
class KeepWithin(_Alone):
    """Keeps what was written within a period before now.

    Args:
        period: How far back, more than nothing.

    Raises:
        SettingsError: If ``period`` is not a positive timedelta.
    """

    period: timedelta

    def __post_init__(self) -> None:
        if not isinstance(self.period, timedelta) or self.period <= timedelta():
            raise SettingsError(f"KeepWithin needs a positive timedelta, not {self.period!r}")

    def _kept(self, newest_first: Sequence[Candidate], now: datetime) -> set[str]:
        return {each.id for each in newest_first if now - each.created <= self.period}

    def _phrase(self) -> str:
        return f"written within the last {self.period}"

    def to_data(self) -> dict[str, Any]:
        return {"keep": "within", "seconds": self.period.total_seconds()}


@dataclass(frozen=True, slots=True, repr=False)
class KeepIf(_Alone):
    """Keeps the checkpoints for which a Python function returns true.

    The function is called once for each checkpoint and decision, and again if what was told of
    one turns out to be different; what it raises, the decision raises. It cannot stand in a
    settings file, and runs in the process that made it.

    Args:
        predicate: Called with a :class:`Candidate`; looks at nothing else.
        name: What ``dry_run`` calls it; the function's own name by default.
    """

    predicate: Callable[[Candidate], bool]
    name: str = ""

    def _kept(self, newest_first: Sequence[Candidate], now: datetime) -> set[str]:
        with user_code(f"The predicate of {self!r}", ""):
            return {candidate.id for candidate in newest_first if self.predicate(candidate)}

    def _phrase(self) -> str:
        return f"chosen by {self.name or getattr(self.predicate, '__name__', 'a function')}"

    def to_data(self) -> dict[str, Any]:
        raise SettingsError("KeepIf holds a Python function, which has no plain form")


def _check_whole(rule: str, name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SettingsError(
            f"{name} of {rule} is a whole number of at least {least}, not {value!r}"
        )


def check_seconds(rule: str, value: object, *, least: float) -> None:
    """Refuses what is no finite number of at least ``least`` seconds."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= value < math.inf:  # type: ignore[operator]
        raise SettingsError(f"seconds of {rule} is a number of at least {least}, not {value!r}")
