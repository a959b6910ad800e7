"""What a retention rule is, and the rules that are made of others."""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from ckpipe.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Candidate:
    """One complete checkpoint, as far as retention looks at it.

    Args:
        id: Its name on the store.
        step: The training step.
        attempt: The attempt that wrote it; attempts begin with a start time of fixed width, so
            that they sort by time.
        count: How often this step had been saved before in this attempt.
        created: When it was written, as an aware datetime.
        metrics: What the caller measured at that step.
        final: Whether it was saved with ``final=True``.
    """

    id: str
    step: int
    attempt: str
    count: int
    created: datetime
    metrics: Mapping[str, float] = field(default_factory=dict)
    final: bool = False

    @property
    def order(self) -> tuple[str, int, int]:
        """What "newer" compares: the attempt first, so that a rollback makes a step newer."""
        return (self.attempt, self.step, self.count)


class Verdict(NamedTuple):
    """What a rule says about one checkpoint, and why."""

    keep: bool
    reason: str


class Rule(abc.ABC):
    """A retention rule: a value that says of each checkpoint whether it wants it kept.

    Rules are compared by value and combined with ``|`` (either keeps) and ``&`` (both keep).
    """

    __slots__ = ()

    @abc.abstractmethod
    def judge(self, newest_first: Sequence[Candidate], now: datetime) -> dict[str, Verdict]:
        """Judges every checkpoint.

        Args:
            newest_first: All complete checkpoints, the newest first.
            now: The time at which periods end.

        Returns:
            A verdict for each id.
        """

    def rivals(
        self, newest_first: Sequence[Candidate], losers: Collection[str], now: datetime
    ) -> set[str]:
        """Those because of which others are not kept: it would lose nothing to know no more.

        Whoever is not sure of what it knows of checkpoints looks these and the losers up before it
        deletes the losers. Among any set that holds these, with what is true of them, the losers
        are not kept either.

        Args:
            newest_first: All complete checkpoints, the newest first.
            losers: Ids of those that are not kept.
            now: The time at which periods end.

        Returns:
            Their ids; all that the rule keeps unless it knows better.
        """
        return {name for name, verdict in self.judge(newest_first, now).items() if verdict.keep}

    def missing_metrics(self, newest_first: Sequence[Candidate]) -> set[str]:
        """Metrics that the rule judges by and that no checkpoint has; it removes nothing then.

        Args:
            newest_first: All complete checkpoints, the newest first.
        """
        return set()

    @abc.abstractmethod
    def to_data(self) -> dict[str, Any]:
        """The rule as plain dicts, lists, strings and numbers; :func:`from_data` reads it back.

        Raises:
            SettingsError: If the rule holds a Python function, which has no such form.
        """

    def __or__(self, other: Rule) -> Rule:
        return AnyOf(_parts(AnyOf, self, other)) if isinstance(other, Rule) else NotImplemented

    def __and__(self, other: Rule) -> Rule:
        return AllOf(_parts(AllOf, self, other)) if isinstance(other, Rule) else NotImplemented


@dataclass(frozen=True, slots=True, repr=False)
class _Combination(Rule):
    """A rule made of others; its verdict gives the reasons of those that decided."""

    rules: tuple[Rule, ...]

    def __post_init__(self) -> None:
        if not self.rules or not all(isinstance(rule, Rule) for rule in self.rules):
            raise SettingsError("A combination of retention rules needs at least one rule")

    @abc.abstractmethod
    def _combined(self, wanted: Iterable[bool]) -> bool: ...

    def judge(self, newest_first: Sequence[Candidate], now: datetime) -> dict[str, Verdict]:
        judged = [rule.judge(newest_first, now) for rule in self.rules]
        return {each.id: self._joined([one[each.id] for one in judged]) for each in newest_first}

    def rivals(
        self, newest_first: Sequence[Candidate], losers: Collection[str], now: datetime
    ) -> set[str]:
        """Those of each of its rules."""
        return set().union(*(rule.rivals(newest_first, losers, now) for rule in self.rules))

    def missing_metrics(self, newest_first: Sequence[Candidate]) -> set[str]:
        """Those of each of its rules."""
        return set().union(*(rule.missing_metrics(newest_first) for rule in self.rules))

    def _joined(self, verdicts: Sequence[Verdict]) -> Verdict:
        keep = self._combined(verdict.keep for verdict in verdicts)
        reasons = dict.fromkeys(verdict.reason for verdict in verdicts if verdict.keep is keep)
        return Verdict(keep, " and ".join(reasons))


@dataclass(frozen=True, slots=True, repr=False)
class AnyOf(_Combination):
    """Keeps what at least one of its rules keeps; written ``a | b``."""

    def _combined(self, wanted: Iterable[bool]) -> bool:
        return any(wanted)

    def to_data(self) -> dict[str, Any]:
        return {"keep": "any_of", "rules": [rule.to_data() for rule in self.rules]}

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.rules))


@dataclass(frozen=True, slots=True, repr=False)
class AllOf(_Combination):
    """Keeps what every one of its rules keeps; written ``a & b``."""

    def _combined(self, wanted: Iterable[bool]) -> bool:
        return all(wanted)

    def to_data(self) -> dict[str, Any]:
        return {"keep": "all_of", "rules": [rule.to_data() for rule in self.rules]}

    def __repr__(self) -> str:
        return " & ".join(f"({r!r})" if isinstance(r, AnyOf) else repr(r) for r in self.rules)


def _parts(kind: type[AnyOf] | type[AllOf], *rules: Rule) -> tuple[Rule, ...]:
    """The rules, with those of the same kind replaced by what they are made of."""
    return tuple(
        part for rule in rules for part in (rule.rules if isinstance(rule, kind) else (rule,))
    )
