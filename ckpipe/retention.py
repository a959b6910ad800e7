"""Which checkpoints stay and which go: rules that compose, and one pure decision.

A rule looks at the complete checkpoints of a root and says which of them it wants. Rules are
values: ``KeepLast(3) | KeepBest("loss")`` keeps what either keeps, ``&`` what both keep, and
all of them but :class:`KeepIf` have a plain form for settings files and the environment.

**What holds for every rule** (property tests check it). Let ``C(S)`` be what a rule keeps of a
set ``S``. A checkpoint in ``C(S)`` is also in ``C(T)`` for every ``T`` between it and ``S``: who
wins among many wins among fewer. Therefore deciding again on what was kept removes nothing
more, and a prune that was interrupted halfway can be decided afresh on what is left without
losing anything that the first decision kept. For leaf rules and ``|`` the second decision is
the same as the first; with ``&`` it may keep more, because a checkpoint can move up among the
newest once others are gone. The order of the input never matters.

Time and clocks: ``created`` and ``now`` are aware datetimes; rules with periods compare the two.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from ckpipe._rule_forms import AllOf, AnyOf, Candidate, Rule, Verdict
from ckpipe._rules import KeepBest, KeepEvery, KeepIf, KeepLast, KeepWithin, check_seconds
from ckpipe.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Decision:
    """What to keep and what to remove.

    Args:
        keep: Ids to keep, the newest first.
        remove: Ids to remove, the oldest first, which is the order to remove them in.
        reasons: For every id, why it stays or goes.
        missing_metrics: Metrics that a rule judges by and that no checkpoint has, which is why
            that rule keeps all.
    """

    keep: tuple[str, ...]
    remove: tuple[str, ...]
    reasons: Mapping[str, str]
    missing_metrics: tuple[str, ...] = ()


def decide(
    checkpoints: Iterable[Candidate],
    rule: Rule | None,
    *,
    now: datetime,
    protected: Mapping[str, str] | None = None,
) -> Decision:
    """Decides which complete checkpoints stay.

    The newest is always kept, whatever the rule says, and so is everything protected.

    Args:
        checkpoints: All complete checkpoints of a root, in any order, each id once.
        rule: What to keep; None keeps all.
        now: The time at which periods end, as an aware datetime.
        protected: Ids that must stay, each with its reason (pinned, being loaded, …). Ids that
            are not among the checkpoints are ignored.

    Returns:
        The decision. Deciding again on what it keeps removes nothing.

    Raises:
        ValueError: If an id stands twice.
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
    names = [each.id for each in newest_first]
    return Decision(
        keep=tuple(name for name in names if verdicts[name].keep),
        remove=tuple(name for name in reversed(names) if not verdicts[name].keep),
        reasons={name: verdicts[name].reason for name in names},
        missing_metrics=tuple(sorted(rule.missing_metrics(newest_first) if rule else ())),
    )


def from_data(data: Any) -> Rule:
    """Builds a rule from its plain form.

    A dict has a ``keep`` (``last``, ``every``, ``best``, ``within``, ``any_of``, ``all_of``) and
    that rule's arguments, as in ``{"keep": "every", "steps": 1000}``; ``within`` takes
    ``seconds``. A list keeps what any of its rules keeps. A rule is returned as it is.

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


def _any_of(rules: list[Any]) -> Rule:
    return AnyOf(_each(rules))


def _all_of(rules: list[Any]) -> Rule:
    return AllOf(_each(rules))


def _each(rules: object) -> tuple[Rule, ...]:
    if not isinstance(rules, list | tuple):
        raise SettingsError(f"The rules of a combination are a list, not {rules!r}")
    return tuple(from_data(rule) for rule in rules)


_BUILDERS: dict[str, Callable[..., Rule]] = {
    "last": KeepLast,
    "every": KeepEvery,
    "best": KeepBest,
    "within": _keep_within,
    "any_of": _any_of,
    "all_of": _all_of,
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
    "decide",
    "from_data",
]
