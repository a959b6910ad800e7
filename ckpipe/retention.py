"""Decide which checkpoints stay: rules that compose, and one pure decision.

A rule looks at the complete checkpoints of a root and chooses those to keep. Rules are values:
``KeepLast(3) | KeepBest("loss")`` keeps the checkpoints that either keeps, ``&`` those that both
keep. All rules but :class:`KeepIf` have a plain form for settings files and the environment.

**Property of every rule** (property tests check it). Let ``C(S)`` be the subset that a rule keeps
of a set ``S``. A checkpoint in ``C(S)`` is also in ``C(T)`` for every ``T`` between it and ``S``: a
winner among many is a winner among fewer. Therefore a second decision on the kept checkpoints
removes nothing more. An interrupted prune can be decided afresh on the rest, and loses no
checkpoint that the first decision kept. For leaf rules and ``|`` the second decision is the same as
the first; with ``&`` it may keep more, because a checkpoint can move up among the newest once
others are gone. The order of the input never matters.

Time and clocks: ``created`` and ``now`` are aware datetimes; rules with periods compare the two.
"""

from __future__ import annotations

import abc
import difflib
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from ckpipe.errors import SettingsError
from ckpipe.interpreter import user_code


@dataclass(frozen=True, slots=True)
class Candidate:
    """The facts of one complete checkpoint that retention decides by.

    Args:
        id: Its name on the store.
        step: The training step.
        attempt: The attempt that wrote it; attempts begin with a start time of fixed width, so
            that they sort by time.
        count: Number of earlier saves of this step in this attempt.
        created: Time of the write, as an aware datetime.
        metrics: The metrics that ``save`` was given.
        final: True if it was saved with ``final=True``.
        line: Its line of launches; empty if it was saved by a version that knew none.
        nan: The number of NaN in its tensors, as far as they were counted.
    """

    id: str
    step: int
    attempt: str
    count: int
    created: datetime
    metrics: Mapping[str, float] = field(default_factory=dict)
    final: bool = False
    line: str = ""
    nan: int = 0

    @property
    def order(self) -> tuple[str, int, int]:
        """Sort key by age: the attempt comes first, so that a rollback makes a step newer."""
        return (self.attempt, self.step, self.count)


class Verdict(NamedTuple):
    """The verdict of a rule on one checkpoint, with its reason."""

    keep: bool
    reason: str


class Rule(abc.ABC):
    """A retention rule: a value that judges which checkpoints to keep.

    Rules are compared by value and combined with ``|`` (either keeps) and ``&`` (both keep).
    """

    __slots__ = ()

    @abc.abstractmethod
    def judge(self, newest_first: Sequence[Candidate], now: datetime) -> dict[str, Verdict]:
        """Judge every checkpoint.

        Args:
            newest_first: All complete checkpoints, the newest first.
            now: The time at which periods end.

        Returns:
            A verdict for each id.
        """

    def rivals(
        self, newest_first: Sequence[Candidate], losers: Collection[str], now: datetime
    ) -> set[str]:
        """Return the checkpoints because of which the losers are not kept.

        A caller whose facts may be outdated looks up these and the losers before it deletes the
        losers. Among any set that holds these, with their true facts, the losers are not kept
        either: facts of other checkpoints cannot change that.

        Args:
            newest_first: All complete checkpoints, the newest first.
            losers: Ids of the checkpoints that are not kept.
            now: The time at which periods end.

        Returns:
            Their ids; by default all that the rule keeps.
        """
        return {name for name, verdict in self.judge(newest_first, now).items() if verdict.keep}

    def missing_metrics(self, newest_first: Sequence[Candidate]) -> set[str]:
        """Return metrics of the rule that no checkpoint has; it removes nothing then.

        Args:
            newest_first: All complete checkpoints, the newest first.
        """
        return set()

    @abc.abstractmethod
    def to_data(self) -> dict[str, Any]:
        """Return the rule as dicts, lists, strings and numbers; :func:`from_data` reads it back.

        Raises:
            SettingsError: If the rule holds a Python function, which has no such form.
        """

    def __or__(self, other: Rule) -> Rule:
        return AnyOf(_parts(AnyOf, self, other)) if isinstance(other, Rule) else NotImplemented

    def __and__(self, other: Rule) -> Rule:
        return AllOf(_parts(AllOf, self, other)) if isinstance(other, Rule) else NotImplemented


@dataclass(frozen=True, slots=True, repr=False)
class _Combination(Rule):
    """A rule made of others; its verdict gives the reasons of the rules that decided."""

    rules: tuple[Rule, ...]
    _keep: ClassVar[str]
    _sign: ClassVar[str]
    _combined: ClassVar[Callable[[Iterable[bool]], bool]]

    def __post_init__(self) -> None:
        if not self.rules or not all(isinstance(rule, Rule) for rule in self.rules):
            raise SettingsError("A combination of retention rules needs at least one rule")

    def judge(self, newest_first: Sequence[Candidate], now: datetime) -> dict[str, Verdict]:
        judged = [rule.judge(newest_first, now) for rule in self.rules]
        result = {}
        for each in newest_first:
            verdicts = [one[each.id] for one in judged]
            keep = type(self)._combined(verdict.keep for verdict in verdicts)
            reasons = dict.fromkeys(verdict.reason for verdict in verdicts if verdict.keep is keep)
            result[each.id] = Verdict(keep, " and ".join(reasons))
        return result

    def rivals(
        self, newest_first: Sequence[Candidate], losers: Collection[str], now: datetime
    ) -> set[str]:
        """Return the union of the rivals of its rules."""
        return set().union(*(rule.rivals(newest_first, losers, now) for rule in self.rules))

    def missing_metrics(self, newest_first: Sequence[Candidate]) -> set[str]:
        """Return the union of the missing metrics of its rules."""
        return set().union(*(rule.missing_metrics(newest_first) for rule in self.rules))

    def to_data(self) -> dict[str, Any]:
        return {"keep": self._keep, "rules": [rule.to_data() for rule in self.rules]}

    def __repr__(self) -> str:
        return self._sign.join(f"({r!r})" if isinstance(r, AnyOf) else repr(r) for r in self.rules)


@dataclass(frozen=True, slots=True, repr=False)
class AnyOf(_Combination):
    """Keeps the checkpoints that at least one of its rules keeps; written ``a | b``."""

    _keep, _sign, _combined = "any_of", " | ", any


@dataclass(frozen=True, slots=True, repr=False)
class AllOf(_Combination):
    """Keeps the checkpoints that every one of its rules keeps; written ``a & b``."""

    _keep, _sign, _combined = "all_of", " & ", all


def _parts(kind: type[AnyOf] | type[AllOf], *rules: Rule) -> tuple[Rule, ...]:
    """Flatten combinations of the same kind."""
    return tuple(
        part for rule in rules for part in (rule.rules if isinstance(rule, kind) else (rule,))
    )


class _Leaf(Rule):
    """A rule not made of others: the ids that it keeps, and a phrase that names them."""

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
        """Return the fields that differ from their defaults."""
        pairs = ((each, getattr(self, each.name)) for each in fields(self))  # type: ignore[arg-type]
        return {each.name: value for each, value in pairs if value != each.default}

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={value!r}" for name, value in self._arguments().items())
        return f"{type(self).__name__}({inside})"


class _Independent(_Leaf):
    """A rule that judges each checkpoint by itself, so that none has rivals."""

    def rivals(
        self, newest_first: Sequence[Candidate], losers: Collection[str], now: datetime
    ) -> set[str]:
        """Return none: each checkpoint is judged by itself."""
        return set()


@dataclass(frozen=True, slots=True, repr=False)
class KeepLast(_Leaf):
    """Keeps the newest checkpoints.

    Args:
        n: The number to keep. 0 keeps no intermediate checkpoints, only final ones.
        including: The name of a metric: the newest checkpoint that has a number for it counts among
            the ``n``, however old it is. So a run that gives this metric only to checkpoints that
            are better than all before keeps the best and the ``n - 1`` newest others.

    Raises:
        SettingsError: If ``n`` is not a whole number of at least 0, or of at least 1 with
            ``including``, or that is no text.
    """

    n: int
    including: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.including, str | None) or self.including == "":
            raise SettingsError(f"including is the name of a metric, not {self.including!r}")
        _check_whole("KeepLast", "n", self.n, least=0 if self.including is None else 1)

    def _kept(self, newest_first: Sequence[Candidate], now: datetime) -> set[str]:
        if self.n == 0:
            return {candidate.id for candidate in newest_first if candidate.final}
        values = ((each, each.metrics.get(self.including or "")) for each in newest_first)
        # Only NaN differs from itself.
        marked = [each for each, value in values if value is not None and value == value][:1]
        others = [each for each in newest_first if each not in marked]
        return {each.id for each in (*marked, *others[: self.n - len(marked)])}

    def rivals(
        self, newest_first: Sequence[Candidate], losers: Collection[str], now: datetime
    ) -> set[str]:
        """Return the newest; none for 0, which judges each by itself."""
        return self._kept(newest_first, now) if self.n else set()

    def _phrase(self) -> str:
        marked = f", or the newest with {self.including}" if self.including else ""
        return f"among the newest {self.n}{marked}" if self.n else "a final checkpoint"

    def to_data(self) -> dict[str, Any]:
        return {"keep": "last", **self._arguments()}


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class KeepEvery(_Leaf):
    """Keeps one checkpoint of every stretch of training: the first at or after each mark.

    With ``steps=1000`` the marks are the steps 0, 1000, 2000 and so on. A checkpoint on a mark is
    kept; without one, the next after the mark is. If the first step of a stretch was saved several
    times, the newest of these saves is kept. With ``seconds`` the marks are multiples of that time
    since 1970, and the earliest checkpoint by creation is kept.

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
            # The newest comes first, and only a strictly earlier place displaces it.
            if stretch not in first or place < self._place(first[stretch])[1]:
                first[stretch] = candidate
        return {candidate.id for candidate in first.values()}

    def rivals(
        self, newest_first: Sequence[Candidate], losers: Collection[str], now: datetime
    ) -> set[str]:
        """Return the checkpoints that are kept of the stretches of the losers."""
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


BestMode = Literal["min", "max"]
"""The end of a metric's values that is best."""


@dataclass(frozen=True, slots=True, repr=False)
class KeepBest(_Leaf):
    """Keeps the checkpoints with the best values of a metric.

    A checkpoint without the metric, or with NaN, never wins. Of equal values the newer wins. If no
    checkpoint has the metric, as when its name is misspelt, or all have NaN, all are kept.

    Args:
        metric: The name of the metric.
        mode: ``"min"`` if the smallest value is best, ``"max"`` if the largest is.
        n: The number to keep, at least 1.

    Raises:
        SettingsError: If an argument is out of range.
    """

    metric: str
    mode: BestMode = "min"
    n: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise SettingsError(f"KeepBest needs the name of a metric, not {self.metric!r}")
        if self.mode not in get_args(BestMode):
            raise SettingsError(f"The mode of KeepBest is 'min' or 'max', not {self.mode!r}")
        _check_whole("KeepBest", "n", self.n, least=1)

    def winners(self, newest_first: Sequence[Candidate]) -> list[str]:
        """Return the ids of the best, the best first; none if no checkpoint has the metric."""
        scored = [
            (score, each.id) for each in newest_first if (score := self._score(each)) is not None
        ]
        # The sort is stable, and the newer comes first in the input.
        scored.sort(key=lambda pair: pair[0], reverse=self.mode == "max")
        return [name for _, name in scored[: self.n]]

    def _kept(self, newest_first: Sequence[Candidate], now: datetime) -> set[str]:
        return set(self.winners(newest_first))

    def judge(self, newest_first: Sequence[Candidate], now: datetime) -> dict[str, Verdict]:
        """Judge every checkpoint; all are kept if none has the metric."""
        if not self.missing_metrics(newest_first):
            return _Leaf.judge(self, newest_first, now)
        verdict = Verdict(True, f"no checkpoint has a number for {self.metric}")
        return {each.id: verdict for each in newest_first}

    def missing_metrics(self, newest_first: Sequence[Candidate]) -> set[str]:
        """Return its metric if no checkpoint has a number for it."""
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
class KeepWithin(_Independent):
    """Keeps the checkpoints that were written within a period before now.

    Args:
        period: The period, more than zero.

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
class KeepIf(_Independent):
    """Keeps the checkpoints for which a Python function returns true.

    The function is called once for each checkpoint and decision, and again if a fact of the
    checkpoint turns out to be outdated. The decision raises its errors. The rule cannot be written
    in a settings file, and runs in the process that made it.

    Args:
        predicate: Called with a :class:`Candidate`; must depend on nothing else.
        name: Its name in the output of ``dry_run``; the function's own name by default.
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
    """Refuse a value that is no finite number of at least ``least`` seconds."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= value < math.inf:  # type: ignore[operator]
        raise SettingsError(f"seconds of {rule} is a number of at least {least}, not {value!r}")


@dataclass(frozen=True, slots=True)
class Decision:
    """The checkpoints to keep and those to remove.

    Args:
        keep: Ids to keep, the newest first.
        remove: Ids to remove, the oldest first, which is the order to remove them in.
        reasons: For every id, the reason to keep or remove it.
        missing_metrics: Metrics of a rule that no checkpoint has; that rule keeps all.
    """

    keep: tuple[str, ...]
    remove: tuple[str, ...]
    reasons: Mapping[str, str]
    missing_metrics: tuple[str, ...] = ()


WITHOUT_NAN = "the newest without NaN"
"""The reason to keep a checkpoint that only newer ones with NaN would displace."""


def newest_without_nan(newest_first: Iterable[Candidate]) -> str | None:
    """Return the id of the newest checkpoint without NaN; None if all have some."""
    return next((each.id for each in newest_first if not each.nan), None)


def decide(
    checkpoints: Iterable[Candidate],
    rule: Rule | None,
    *,
    now: datetime,
    protected: Mapping[str, str] | None = None,
) -> Decision:
    """Decide which complete checkpoints stay.

    The newest, the newest without NaN and all protected checkpoints are kept under every rule.

    Args:
        checkpoints: All complete checkpoints of a root, in any order, each id once.
        rule: The rule; None keeps all.
        now: The time at which periods end, as an aware datetime.
        protected: Ids that must stay, each with its reason (pinned, being loaded, …). Ids that
            are not among the checkpoints are ignored.

    Returns:
        The decision. A second decision on the kept checkpoints removes none.

    Raises:
        ValueError: If an id appears twice.
    """
    newest_first = sorted(checkpoints, key=lambda each: (each.order, each.id), reverse=True)
    if len({each.id for each in newest_first}) < len(newest_first):
        raise ValueError("An id stands twice among the checkpoints")
    everything = Verdict(True, "no rule is set")
    verdicts = (
        rule.judge(newest_first, now)
        if rule is not None
        else {c.id: everything for c in newest_first}
    )
    for name, reason in (protected or {}).items():
        if name in verdicts:
            verdicts[name] = Verdict(True, reason)
    if newest_first:
        verdicts[newest_first[0].id] = Verdict(True, "the newest")
    sound = newest_without_nan(newest_first)
    if sound is not None and not verdicts[sound].keep:
        verdicts[sound] = Verdict(True, WITHOUT_NAN)
    names = [each.id for each in newest_first]
    return Decision(
        keep=tuple(name for name in names if verdicts[name].keep),
        remove=tuple(name for name in reversed(names) if not verdicts[name].keep),
        reasons={name: verdicts[name].reason for name in names},
        missing_metrics=tuple(sorted(rule.missing_metrics(newest_first) if rule else ())),
    )


def from_data(data: Any) -> Rule:
    """Build a rule from its plain form.

    A dict has a ``keep`` (``last``, ``every``, ``best``, ``within``, ``any_of``, ``all_of``) and
    that rule's arguments, as in ``{"keep": "every", "steps": 1000}``; ``within`` takes
    ``seconds``. A list keeps the union of its rules. A rule is returned as it is.

    Raises:
        SettingsError: If the data describes no rule.
    """
    if isinstance(data, Rule):
        return data
    if isinstance(data, list | tuple):
        rules = _each(data)
        return rules[0] if len(rules) == 1 else AnyOf(rules)
    if not isinstance(data, Mapping):
        raise SettingsError(f"A retention rule is a dict with a 'keep', not {data!r}")
    arguments = dict(data)
    kind = arguments.pop("keep", None)
    if not isinstance(kind, str) or kind not in _BUILDERS:
        raise SettingsError(
            f"A retention rule's keep is one of {', '.join(_BUILDERS)}, not {kind!r}"
        )
    return _build(kind, arguments)


def _build(kind: str, arguments: dict[str, Any]) -> Rule:
    parameters = inspect.signature(_BUILDERS[kind]).parameters
    for name in arguments:
        if name not in parameters:
            near = difflib.get_close_matches(str(name), parameters, n=1, cutoff=0) or ["keep"]
            hint = f"The nearest valid name is {near[0]}"
            raise SettingsError(f"The retention rule {kind!r} has no {name!r}", hint=hint)
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in arguments:
            raise SettingsError(f"The retention rule {kind!r} needs {name!r}")
    return _BUILDERS[kind](**arguments)


def _keep_within(seconds: float) -> KeepWithin:
    check_seconds("KeepWithin", seconds, least=0)
    try:
        return KeepWithin(timedelta(seconds=seconds))
    except OverflowError:
        raise SettingsError(f"KeepWithin cannot reach back {seconds!r} seconds") from None


def _each(rules: object) -> tuple[Rule, ...]:
    if not isinstance(rules, list | tuple):
        raise SettingsError(f"The rules of a combination are a list, not {rules!r}")
    return tuple(from_data(rule) for rule in rules)


_BUILDERS: dict[str, Callable[..., Rule]] = {
    "last": KeepLast,
    "every": KeepEvery,
    "best": KeepBest,
    "within": _keep_within,
    "any_of": lambda rules: AnyOf(_each(rules)),
    "all_of": lambda rules: AllOf(_each(rules)),
}


__all__ = [
    "AllOf",
    "AnyOf",
    "Candidate",
    "Decision",
    "KeepBest",
    "KeepEvery",
    "KeepIf",
    "KeepLast",
    "KeepWithin",
    "Rule",
    "Verdict",
    "check_seconds",
    "decide",
    "from_data",
]
