"""The save that a loop did not make after a stop was announced, made on leaving.

Its data loader failed, as it does when its workers were stopped too, or the signal came after
``should_save`` and before the loop looked at ``preempted``. Several ranks make it if the loaders of
all of them failed after the same step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ckpipe.lock.guard import StepGuard
from ckpipe.preemption.signals import (
    StopRequest,
    batches_received,
    errors_of_handlers_deferred,
    is_loader_error,
)
from ckpipe.ranks.schedule import SaveSchedule
from ckpipe.save.request import SaveOptions
from ckpipe.state.kinds import is_stateful

logger = logging.getLogger("ckpipe")


@dataclass(frozen=True, slots=True)
class LastSave:
    """A save to make on leaving: the arguments of ``save``, and the newest checkpoint's step."""

    state: Any
    step: int
    selection: SaveOptions
    newest: int | None

    def begins(self, agreed: bool) -> bool:
        """Log whether the save is made, and return it.

        Args:
            agreed: Whether all ranks leave after this step.
        """
        if agreed:
            logger.info("Step %d is saved on leaving: a stop was announced after it", self.step)
        else:
            _warn_of_lost(self.step, self.newest, "not all ranks have left after the same step")
        return agreed

    @contextmanager
    def beside(self, error: BaseException | None) -> Iterator[None]:
        """Raise an error of the save only if the program does not leave on another one.

        Workers of data loaders may die one after the other, and no error of that ends the vote.
        """
        try:
            with errors_of_handlers_deferred():
                yield
        except Exception as failure:
            if error is None:
                raise
            text = f"The save of step {self.step} on leaving raised {failure!r}"
            logger.error("%s", text)
            error.add_note(text)


class LastState:
    """The state of the last step, and whether it still is that state.

    It is if since ``should_save`` no guarded optimizer has stepped and no loop over ``Batches`` has
    received a batch. A state is used again only if it cannot be a copy of former values: it was
    loaded into or saved before, or it is made of objects that have a ``state_dict``.

    Args:
        preemption: The request to stop.
    """

    def __init__(self, preemption: StopRequest) -> None:
        self._preemption = preemption
        self._state: Any = None
        self._is_live = False
        self._selection: SaveOptions = {}
        self._told: int | None = None
        self._marks = (0, 0)

    def tell(self, step: int, guards: Sequence[StepGuard]) -> None:
        """Record the step that ``should_save`` is told."""
        self._told, self._marks = step, _marks(guards)

    def loads(self, into: Any, guards: Sequence[StepGuard]) -> None:
        """Record that a load fills a state, unless another state is trained."""
        if into is not None and self._is_other(into, guards):
            return
        self._state, self._is_live, self._selection = into, into is not None, {}

    def saves(self, state: Any, options: SaveOptions, guards: Sequence[StepGuard]) -> None:
        """Record that a state is saved, unless another state is trained."""
        if self._is_other(state, guards):
            return
        self._is_live = state is self._state or _is_made_of_objects(state)
        self._state = state
        self._selection = {"include": options.get("include"), "exclude": options.get("exclude")}

    def _is_other(self, state: Any, guards: Sequence[StepGuard]) -> bool:
        """Tell whether a state has no guarded optimizer, and the recorded one has.

        Weights that are loaded or saved for a test are such a state.
        """
        owners = {id(optimizer) for guard in guards for optimizer in guard.optimizers}
        known = self._state
        return state is not known and _has_one(known, owners) and not _has_one(state, owners)

    def take(
        self,
        error: BaseException | None,
        guards: Sequence[StepGuard],
        schedule: SaveSchedule,
    ) -> LastSave | None:
        """Return the save to make before leaving; warn of steps that are lost.

        Args:
            error: The exception on which the pipeline is left, if any.
            guards: The guarded optimizers.
            schedule: Knows the newest saved or loaded step.
        """
        state, self._state = self._state, None
        step, newest = self._told, schedule.newest
        if not self._preemption.signalled or self._preemption.answered or step is None:
            return None
        if newest is not None and newest >= step:
            return None
        if error is not None and not is_loader_error(error):
            reason = f"the loop was left on a {type(error).__name__}"
        elif not guards:
            reason = "no optimizer is guarded, so the state may be that of another step"
        elif self._marks != _marks(guards):
            reason = "the state has changed since should_save"
        elif not self._is_live:
            reason = "the state that was saved last may hold copies of former values"
        else:
            return LastSave(state, step, self._selection, newest)
        _warn_of_lost(step, newest, reason)
        return None


def _warn_of_lost(step: int, newest: int | None, reason: str) -> None:
    logger.warning(
        "A stop was announced, and step %d is not saved: %s. %s",
        step,
        reason,
        "There is no checkpoint to resume from"
        if newest is None
        else f"A resume goes on from the checkpoint of step {newest}",
    )


def _marks(guards: Sequence[StepGuard]) -> tuple[int, int]:
    return batches_received(), sum(guard.steps for guard in guards)


def _is_made_of_objects(state: Any) -> bool:
    return all(map(is_stateful, _leaves(state)))


def _has_one(state: Any, owners: Set[int]) -> bool:
    return any(id(each) in owners for each in _leaves(state))


def _leaves(state: Any) -> Iterator[Any]:
    """Return the objects in the containers of a state, which may contain themselves."""
    seen: set[int] = set()
    found = [state]
    while found:
        each = found.pop()
        if is_stateful(each) or not isinstance(each, Mapping | list | tuple):
            yield each
        elif id(each) not in seen:
            seen.add(id(each))
            found += each.values() if isinstance(each, Mapping) else each
