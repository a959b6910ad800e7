"""Hold the mutating side of a state lock during optimizer steps, by hooks, and swaps of weights."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ckpipe.errors import UsageError
from ckpipe.lock.gradients import GradientWatch
from ckpipe.lock.holds import FrameMark, callers
from ckpipe.lock.state_lock import StateLock
from ckpipe.memory import cuda

# torch wraps this function around the step of every optimizer class; it calls the hooks.
_WRAPPER = "Optimizer.profile_hook_step.<locals>.wrapper"

Guarded = Optimizer | Iterable[Optimizer] | None
"""One optimizer to guard, or several, or none."""

_ends_of_holds: weakref.WeakSet[Any] = weakref.WeakSet()
"""The post-step hooks of all guards."""

_at_hooks: set[tuple[int, int]] = set()
"""Threads inside a hook of some guard, each with the id of the optimizer that it steps."""


class StepGuard:
    """Optimizers whose steps hold the mutating side of a lock, until :meth:`remove` is called.

    Attributes:
        gradients: Their gradients at steps and saves.
    """

    def __init__(self, lock: StateLock, optimizers: tuple[Optimizer, ...]) -> None:
        self._removing = threading.Lock()
        self._hooks: list[_StepHooks] = []
        self.gradients = GradientWatch()
        try:
            for optimizer in dict.fromkeys(optimizers):
                self._hooks.append(_StepHooks(lock, optimizer, self.gradients))
        except BaseException:
            self.remove()
            raise

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The guarded optimizers; none once the guard is removed."""
        return tuple(hooks.optimizer for hooks in self._hooks)

    @property
    def steps(self) -> int:
        """The number of steps that have begun."""
        return sum(hooks.steps for hooks in self._hooks)

    def remove(self) -> None:
        """Remove the hooks: steps that begin from now on do not lock. Never waits.

        A step in progress, or one that waits to begin, finishes as it would have. May be called
        from any thread, and again.
        """
        with self._removing:
            hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()

    def __repr__(self) -> str:
        names = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
        return f"<StepGuard [{names or 'removed'}]>"


def guard(lock: StateLock, *optimizers: Optimizer) -> StepGuard:
    """Hold the mutating side of a lock during every ``step()`` of these optimizers.

    It is enough to guard the optimizer: gradient scalers and schedulers call its ``step``, and
    compiled functions run the hooks outside of the compiled code. The hold covers the closure of a
    step, a step within a step and the optimizer's other step hooks, which may change the state as
    well. A step that raises leaves nothing held. On a thread that is capturing the state the hooks
    do nothing. Nor do they when a step is recorded in a CUDA graph, whose replays call no hooks:
    the recording warns unless its thread holds the mutating side.

    Args:
        lock: The lock that captures of the same state take.
        optimizers: The optimizers to guard.

    Returns:
        The guard, which can remove the hooks again.

    Raises:
        UsageError: If no optimizer is given, or an object that takes no step hooks. Nothing is
            guarded then.
    """
    if not optimizers:
        raise UsageError("No optimizer was given to guard")
    _check(optimizers)
    return StepGuard(lock, optimizers)


@contextmanager
def swapped(
    lock: StateLock, tensors: Iterable[torch.Tensor], values: Iterable[torch.Tensor]
) -> Iterator[None]:
    """Give tensors other values, and hold the mutating side of a lock until they have their own.

    Args:
        lock: The lock that captures of the same state take.
        tensors: The tensors.
        values: A value for each of them.

    Raises:
        UsageError: If they do not fit. Nothing is changed then.
        LockMisuse: If this thread is capturing the state.
    """
    targets, others = list(tensors), list(values)
    if len(targets) != len(others):
        raise UsageError(
            f"{len(targets)} tensors cannot be swapped for {len(others)} values",
            hint="Pass one value for each tensor, in the same order",
        )
    for number, (target, other) in enumerate(zip(targets, others, strict=True)):
        for each in (target, other):
            if not isinstance(each, torch.Tensor):
                raise UsageError(
                    f"Number {number} is a {type(each).__name__}, and only tensors can be swapped",
                    hint="Pass model.parameters(), or the values of a dict",
                )
        if target.shape != other.shape:
            raise UsageError(
                f"Tensor {number} has the shape {list(target.shape)} and its value "
                f"{list(other.shape)}",
                hint="Pass one value for each tensor, in the same order",
            )
    with lock.mutating():
        own = [target.detach().clone() for target in targets]
        try:
            _copy_each(targets, others)
            yield
        finally:
            try:
                _copy_each(targets, own)
            except BaseException:  # an interrupt must not leave some of them swapped
                _copy_each(targets, own)
                raise


@torch.no_grad()
def _copy_each(targets: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def optimizers_of(guarded: Guarded) -> tuple[Optimizer, ...]:
    """Return the optimizers to guard.

    Raises:
        UsageError: If one of them is no optimizer.
    """
    if guarded is None:
        return ()
    if isinstance(guarded, Mapping):
        _check([guarded])
    found = tuple(guarded) if isinstance(guarded, Iterable) else (guarded,)
    _check(found)
    return found


def _check(optimizers: Iterable[object]) -> None:
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise UsageError(
                f"A {type(optimizer).__name__} cannot be guarded, only a torch.optim.Optimizer",
                hint="Pass its values, as in guard=[*optimizers.values()]"
                if isinstance(optimizer, Mapping)
                else "Pass the optimizer that it steps, or use lock.mutating() around its steps",
            )


class _StepHooks:
    """The two hooks of one optimizer. The object is also the key of the optimizer's steps."""

    def __init__(self, lock: StateLock, optimizer: Optimizer, gradients: GradientWatch) -> None:
        self.optimizer, self._gradients = optimizer, gradients
        self.steps = 0
        self._lock = lock
        self._active = True
        self._process = os.getpid()
        self._purpose = f"{type(optimizer).__name__}.step()"
        self._handles: list[RemovableHandle] = []
        before = torch.compiler.disable(self._before)  # type: ignore[no-untyped-call]
        after = torch.compiler.disable(self._after)  # type: ignore[no-untyped-call]
        try:
            self._handles.append(optimizer.register_step_pre_hook(before))
            self._handles.append(optimizer.register_step_post_hook(after))
            others: Any = optimizer._optimizer_step_pre_hooks
            others.move_to_end(self._handles[0].id, last=False)
        except AttributeError as error:
            raise UsageError(
                f"A {type(optimizer).__name__} does not call step hooks",
                hint="Pass the optimizer that it wraps",
            ) from error
        _ends_of_holds.add(after)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if os.getpid() != self._process:
            # The fork copied the lock, perhaps held by threads that this process does not have.
            return
        if cuda.recording():
            self._tell_of_replays()
            return
        self.steps += 1
        with self._at_hook():
            if self._active and not self._lock.captures_here():
                mark = FrameMark.of(_step_frame(sys._getframe(1)))
                self._lock.enter_step(self, mark, self._purpose)
                self._end_last()
                self._gradients.begin_step(optimizer)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if os.getpid() != self._process or cuda.recording():
            return
        with self._at_hook():
            if not self._lock.captures_here():
                if self._active:
                    self._gradients.end_step(optimizer)
                self._lock.leave_step(self)
            if not self._active:
                self._blank()

    def _tell_of_replays(self) -> None:
        """Warn that replays of a CUDA graph call no hooks, unless this thread holds the lock."""
        if self._active and not self._lock.mutates_here():
            warnings.warn(
                f"A {self._purpose} is being recorded in a CUDA graph, and saves do not notice its "
                'replays: with until="captured" a checkpoint may mix two steps. Record the graph '
                "and replay it inside `with pipeline.lock.mutating():`",
                RuntimeWarning,
                stacklevel=2,
            )

    @contextmanager
    def _at_hook(self) -> Iterator[None]:
        """Note that torch is iterating over the optimizer's hooks."""
        here = (threading.get_ident(), id(self.optimizer))
        _at_hooks.add(here)
        try:
            yield
        finally:
            _at_hooks.discard(here)

    def _end_last(self) -> None:
        """Move the post-step hook behind all hooks that others have registered since."""
        mine: int = self._handles[1].id
        hooks: Any = self._handles[1].hooks_dict_ref() or {}
        behind = list(itertools.takewhile(lambda each: each != mine, reversed(hooks)))
        if mine in hooks and any(hooks[each] not in _ends_of_holds for each in behind):
            hooks.move_to_end(mine)

    def remove(self) -> None:
        self._active = False
        # While a step is in progress torch may be iterating over the hooks, and would fail if
        # one were removed. The hooks then stay, without effect, until that step is over.
        iterating = any(each == id(self.optimizer) for _, each in tuple(_at_hooks))
        if iterating or self._lock.step_in_progress(self):
            return
        for handle in self._handles:
            handle.remove()

    def _blank(self) -> None:
        """Replace the hooks by a no-op, which does not disturb an iteration over them."""
        for handle in self._handles:
            registered: MutableMapping[int, Any] | None = handle.hooks_dict_ref()
            if registered is not None and handle.id in registered:
                registered[handle.id] = _nothing


def _nothing(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Stand in for a hook that was removed during a step."""


def _step_frame(hook_caller: FrameType) -> FrameType:
    """Return the frame that runs for as long as the step does.

    torch calls the hooks from that frame. An optimizer that calls its hooks by itself does so from
    its ``step``. If neither is found, the caller of the hook is used.
    """
    outer = [frame for frame in callers(hook_caller) if not _belongs_to_compiler(frame)]
    for frame in outer:
        if frame.f_code.co_qualname == _WRAPPER or frame.f_code.co_name == "step":
            return frame
    return outer[0] if outer else hook_caller


def _belongs_to_compiler(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("torch._dynamo")
