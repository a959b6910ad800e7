"""The options of a save, and the request of one call: its options checked, in the form of use."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypedDict, Unpack, get_args

from torch.optim import Optimizer

from ckpipe.errors import UsageError
from ckpipe.format.labels import LabelFilter, encode_float, globs_filter, label_filter
from ckpipe.lock.gradients import GradientWatch
from ckpipe.lock.guard import StepGuard
from ckpipe.loop_thread import Caller
from ckpipe.options import completed, one_of
from ckpipe.settings import Settings
from ckpipe.types import Form, Until

_DEEPEST = 200


class SaveOptions(TypedDict, total=False):
    """The options of a save: of each its type, its default and what it does."""

    metrics: Annotated[Mapping[str, float] | None, None]
    """Numbers by name, kept in the checkpoint; NaN is allowed."""

    metadata: Annotated[Mapping[str, Any] | None, None]
    """Plain JSON, at most 200 levels deep, kept in the checkpoint."""

    until: Annotated[Until, "staged"]
    """``"staged"``, the default, returns when the state is copied, ``"committed"`` when the
    checkpoint is durable. ``"captured"`` returns when all of the state is copied except the
    parameters and state tensors of guarded optimizers. These are copied while forward and backward
    run; a guarded ``step()``, :meth:`swapped` or ``lock.mutating()`` waits for the rest of the
    copy. No other code may change them, also not for a moment, as libraries for averaged weights
    do: swap those with :meth:`swapped`. If torch counts a change, the save fails. torch does not
    count writes through ``.data``, numpy or DLPack, nor fused steps of an optimizer that is not
    guarded. On a device these are not noticed, and the checkpoint may hold a mixture. In host
    memory 64 bytes at both ends of every mebibyte are compared: before the copy, in the copy, and
    after it. A write that leaves all these bytes as they are is not noticed, and neither is one to
    a tensor whose elements do not fill its memory, such as ``x[:, ::2]``. A step's hyperparameters
    are copied before the call returns. So are thousands of small tensors, since a copy takes less
    time than to watch them."""

    final: Annotated[bool, False]
    """True for the run's final checkpoint."""

    export: Annotated[Form | None, None]
    """The form of an export of this checkpoint, with the content of the settings ``export``; None
    for that of ``final_format``, if it is final. All of several ranks pass the same one."""

    include: Annotated[Sequence[str] | None, None]
    """Globs of labels to save, such as ``"model.*"``; None saves all. With one rank there is a
    warning of globs that match no label."""

    exclude: Annotated[Sequence[str] | None, None]
    """Globs of labels to leave out."""

    replicated: Annotated[Sequence[str] | None, None]
    """Globs of labels of plain tensors that all ranks hold alike in this save, beside those that
    the settings and the state declare: each byte is written once. All ranks pass the same ones."""


class SaveCall:
    """A call of ``save``, for the hooks of its save, which wait for the end of the call.

    Attributes:
        until: The event for which the call waits.
        is_over: True once the call returns or raises. Set by a plain assignment, as the last act of
            the call: it does not release the GIL, so the caller gets the handle before another
            thread sees the value.
    """

    __slots__ = ("is_over", "until")

    def __init__(self) -> None:
        self.until, self.is_over = "staged", False


class SaveRequest:
    """The request of one call of ``save``; its options are checked here, and only here.

    Args:
        state: The state.
        step: The step of the call; None for the one after the last.
        settings: The settings of the pipeline.
        guards: The guarded optimizers.
        caller: Runs user code on the calling thread; None if that is the pipeline's own.
        call: The call.
        options: As for :meth:`ckpipe.Pipeline.save`.

    Attributes:
        thread: The calling thread.
        owners: Guarded optimizers whose tensors are copied while training goes on; empty if the
            caller waits for all copies.
        gradients: Those of guarded optimizers at their last steps.
        urgent: True if there may be no later save: it waits for memory instead of being skipped.

    Raises:
        TypeError: If an option is unknown.
        UsageError: If one has a wrong value.
    """

    owners: tuple[Optimizer, ...] = ()
    gradients: tuple[GradientWatch, ...] = ()
    urgent = False

    def __init__(
        self,
        state: Any,
        step: int | None = None,
        settings: Settings | None = None,
        guards: Sequence[StepGuard] = (),
        caller: Caller | None = None,
        call: SaveCall | None = None,
        **options: Unpack[SaveOptions],
    ) -> None:
        given = completed("save", SaveOptions, options)
        self.state, self.step, self.caller = state, step, caller
        self.thread, self.call = threading.get_ident(), call or SaveCall()
        self.select = label_filter(given["include"], given["exclude"])
        self.replicated = _replicated(given["replicated"], settings)
        self.export = given["export"]
        if self.export is not None:
            one_of("export", self.export, *get_args(Form))
        self.metrics = _plain_metrics(given["metrics"] or {}, step)
        self.metadata = _plain_metadata(given["metadata"] or {}, step)
        self.final = given["final"]
        self.call.until = one_of("until", given["until"], *get_args(Until), step=step)
        self.owners = _late_owners(self.call.until, guards, step)
        self.gradients = tuple(each.gradients for each in guards)

    def forget_state(self) -> None:
        """Drop references to the caller's objects; no stage needs them once all is copied."""
        self.state, self.caller, self.owners, self.gradients = None, None, (), ()


def _replicated(globs: Sequence[str] | None, settings: Settings | None) -> LabelFilter | None:
    """Return the filter of tensors that all ranks hold alike; None for those declared elsewhere.

    Raises:
        UsageError: If there are globs, and the settings forbid them.
    """
    if globs and settings is not None and settings.plan.replicated == "none":
        raise UsageError(
            "A save names replicated tensors, and plan.replicated is 'none'",
            hint="Leave out one of them",
        )
    return None if globs is None else globs_filter("replicated", globs)


def _late_owners(
    until: str, guards: Iterable[StepGuard], step: int | None
) -> tuple[Optimizer, ...]:
    """Return the optimizers whose tensors a save copies late, by ``until`` of ``save``.

    Raises:
        UsageError: If no optimizer is guarded, and ``until`` needs one.
    """
    if until != "captured":
        return ()
    owners = tuple(optimizer for each in guards for optimizer in each.optimizers)
    if not owners:
        raise UsageError(
            "until='captured' needs a guarded optimizer: without one, a step may change "
            "tensors that are not copied yet",
            step=step,
            hint="Open the pipeline with guard=optimizer, or save with until='staged'",
        )
    return owners


def _plain_metrics(metrics: Mapping[str, float], step: int | None) -> dict[str, Any]:
    """Return metrics in the form of the manifest.

    Raises:
        UsageError: If one is no number, or two have one name.
    """
    name: Any = None
    pairs = []
    try:
        for name, number in metrics.items():
            pairs.append((str(name), encode_float(float(number))))
        name = None
        return _by_name(pairs)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UsageError(
            f"Metrics are numbers by name: {error}",
            step=step,
            key=None if name is None else str(name),
            hint="Pass one number for each, such as loss.mean().item()",
        ) from error


def _plain_metadata(metadata: Mapping[str, Any], step: int | None) -> dict[str, Any]:
    """Return a copy of metadata as plain JSON.

    Raises:
        UsageError: If it is not plain JSON, or two keys of a dict become one in JSON.
    """
    name: Any = None
    pairs: list[tuple[str, Any]] = []
    try:
        for name, value in dict(metadata).items():
            text = json.dumps({name: value}, allow_nan=False)
            pairs += json.loads(text, object_pairs_hook=_by_name).items()
        name, found = None, _by_name(pairs)
        _check_depth(found)
        return found
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"Metadata must be plain JSON: {error}",
            step=step,
            key=None if name is None else str(name),
            hint="Put other objects in the state",
        ) from error


def _check_depth(metadata: dict[str, Any]) -> None:
    """Refuse a depth that another program's recursion limit might not let it read.

    Raises:
        ValueError: If containers are nested too deeply.
    """
    level: list[Any] = [metadata]
    for _ in range(_DEEPEST):
        inside = [each.values() if isinstance(each, dict) else each for each in level]
        level = [item for each in inside for item in each if isinstance(item, dict | list)]
    if level:
        raise ValueError(f"it is nested more than {_DEEPEST} deep")


def _by_name(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of pairs; two keys such as ``1`` and ``"1"`` may have become one name.

    Raises:
        ValueError: If two pairs have one name.
    """
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"two of them are called {name!r:.100}")
        found[name] = value
    return found
