"""Stage 1: take the state lock, and walk the state under it on the calling thread."""

from __future__ import annotations

import logging
import warnings

import torch
from anyio.streams.memory import MemoryObjectSendStream

from ckpipe.errors import PipelineBusy, SaveError, StateChanged, StateLockTimeout, UsageError
from ckpipe.interpreter import gc_paused
from ckpipe.lock.state_lock import LockHold
from ckpipe.loop_thread import on_caller
from ckpipe.memory.cuda import events_behind
from ckpipe.reading.select import unmatched
from ckpipe.save.context import SaveContext
from ckpipe.save.memory import reserve
from ckpipe.save.program import devices_of
from ckpipe.save.save import CapturedState, Save
from ckpipe.state.capture_cache import capture_cache_of
from ckpipe.state.flatten import Flattened, OpenedState, flatten
from ckpipe.state.parameters import check_taken_back, parameters_not_held

logger = logging.getLogger("ckpipe")

HOLDS = 3
"""Most holds of the lock: one to plan, one to copy, one more if the structure changes between."""

WAITS = 3
"""Number of waits for the lock if the caller's event loop is then too late for the walk."""


async def run(save: Save, context: SaveContext, out: MemoryObjectSendStream[CapturedState]) -> None:
    """Capture the state until it has been copied; again if the lock had to be released.

    Raises:
        UnsupportedState: If an object cannot be saved; names the first one.
        StateLockTimeout: If trainers held the lock for too long.
        StateChanged: If the structure changed in every hold.
    """
    async with out:
        if context.program is not None and save.reservation is None:
            # In a steady run, memory is reserved before trainers are blocked. It is as much as the
            # last state needed; this state is still unknown, and may need less.
            try:
                await reserve(save, context, context.program)
            except PipelineBusy:
                raise
            except (SaveError, UsageError) as error:
                logger.debug("%s: the memory of the last state is not free: %s", save.name, error)
        for _ in range(HOLDS):
            caller, hold = save.request.caller, LockHold(context.lock, save.request.thread)
            with save.clock.timing("lock"):
                # The event loop of a coroutine may be busy, or wait for a trainer. So the walk on
                # that loop takes the lock itself.
                if caller is None or caller.blocks:
                    timeout = context.settings.lock.timeout_seconds
                    await hold.take(timeout, awaited=caller is not None)
            try:
                await out.send(await _captured(save, context, hold))
                await hold.ended.wait()
            finally:
                hold.end()
            if hold.copied:
                return
    raise StateChanged(
        "The structure of the state changed while it was being planned",
        hint="Add, drop or resize tensors inside lock.mutating(), or between saves",
    )


async def _captured(save: Save, context: SaveContext, hold: LockHold) -> CapturedState:
    """Let the calling thread walk the state under the lock, once it is free to do so."""
    save.status = "capturing"
    caller, limits = save.request.caller, context.settings.lock
    with hold.in_use():
        for waits_left in reversed(range(WAITS + 1)):
            with save.clock.timing("walk"):
                state = await on_caller(caller, _walk, save, context, hold)
            if state is not None:
                return state
            if caller is not None and waits_left:
                with save.clock.timing("lock"):
                    await hold.take(limits.timeout_seconds, awaited=False, serve=caller.do_pending)
                hold.defer(limits.max_step_wait_seconds)
    raise StateLockTimeout(
        f"The event loop that called save() did not run within {limits.max_step_wait_seconds:g} s "
        "while the state lock was free for it, and trainers went on",
        hint="Let the loop run while save() is awaited: move blocking calls to a thread",
    )


def _walk(save: Save, context: SaveContext, hold: LockHold) -> CapturedState | None:
    """Walk the state; return None if it must wait for the lock first."""
    if not hold.begin():
        return None
    state, select = save.request.state, save.request.select
    with hold.here(), torch.no_grad(), gc_paused():
        opened = OpenedState(state, save.request.replicated)
        cache = context.capture_cache
        captured = None if cache is None else cache.capture(opened, select)
        if captured is None:
            flattened = flatten(opened, select, pickling=context.settings.pickle == "allow")
            _check_selection(save, context, flattened)
            check_taken_back(opened, flattened.captured.tensors)
            if context.rank == 0:  # others may leave to it what all have, such as whole weights
                _tell_of_parameters(save, context, opened)
            context.capture_cache = capture_cache_of(flattened)
            captured = flattened.captured
    for watch in save.request.gradients:
        watch.note_save(save.id.step)
    if not save.request.owners:
        captured.objects = []  # only copies beside training need them
    return CapturedState(hold, captured, events_behind(captured.derived(devices_of)))


def _check_selection(save: Save, context: SaveContext, flattened: Flattened) -> None:
    """Warn of globs of ``include`` without a match, on a single rank only: others may match them.

    Raises:
        UsageError: If ``include`` or ``exclude`` leave nothing to save.
    """
    captured, select, step = flattened.captured, save.request.select, save.id.step
    if context.world_size > 1 or select.selects_all:
        return
    absent = unmatched(select, [captured.tree])
    said = f"include names labels that are not in the state: {', '.join(absent)}"
    if absent and not captured.tensors and not captured.values:
        hint = "Globs match whole labels, such as 'model.*' or 'optimizer'"
        raise UsageError(said, hint=hint)
    if flattened.is_emptied:
        raise UsageError(
            "include and exclude leave nothing of the state to save",
            hint="Include more labels, or call save only with a state that has some",
        )
    if absent:
        warnings.warn(f"{said} [step {step}]", RuntimeWarning, stacklevel=2)


def _tell_of_parameters(save: Save, context: SaveContext, opened: OpenedState) -> None:
    """Warn of optimizers whose parameters are not in the state, at their first save."""
    for label, optimizer, found in parameters_not_held(
        opened, lambda label: context.store.is_first(f"parameters of {label!r}")
    ):
        kind, first = type(optimizer).__name__, found[0]
        logger.warning(
            "step %s: the %s at %r steps %d tensors that nothing in the state holds in their shape "
            "and dtype, the first of them %s of shape %s: a load restores none of them, and the "
            "next step throws the training away. Put them into the state too, or make the "
            "optimizer of model.parameters() once the model has its dtype and device",
            save.id.step, kind, label, len(found), first.dtype, list(first.shape),
        )  # fmt: skip
