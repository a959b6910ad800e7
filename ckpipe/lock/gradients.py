"""Notice that a save lost gradients: accumulated before it, and taken by the step after it.

Theory. A gradient at a save proves nothing: it may be the one that the last step has taken, or one
that the program throws away. It proves a loss if it has come since the last step, and if the next
step finds the same tensor. ``zero_grad`` may keep the tensor and fill it with zeros, which counts
as one change in place. So a tensor that the last step has seen already proves it by two changes
before the save, and by one at most after it. One parameter of a group is looked at, and no
value, so no device is waited for. Tensors are referenced weakly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

logger = logging.getLogger("ckpipe")


_MOST_GROUPS = 16
"""Groups of an optimizer that are looked at, spread over all of them: each costs 3 microseconds."""


class _Gradient(NamedTuple):
    """The gradient of a parameter at one moment; its version counts the changes in place."""

    parameter: Callable[[], torch.Tensor | None]
    tensor: Callable[[], torch.Tensor | None]
    version: int

    def holds_values(self) -> bool:
        """Tell whether it is not zero; False for one on a device, which is not waited for."""
        tensor = self.tensor()
        return tensor is not None and tensor.is_cpu and bool(tensor.detach().any())

    def now(self) -> tuple[_Gradient | None, int | None]:
        """Return the present gradient; and if it is the same tensor, the changes of it since."""
        parameter, before = self.parameter(), self.tensor()
        if parameter is None or parameter.grad is None:
            return None, None
        now = _gradient_of(parameter)
        return now, now.version - self.version if before is parameter.grad else None


def _gradient_of(parameter: torch.Tensor) -> _Gradient:
    tensor = parameter.grad
    if tensor is None:
        return _Gradient(TensorWeakRef(parameter), lambda: None, 0)
    version = 0 if tensor.is_inference() else tensor._version
    return _Gradient(TensorWeakRef(parameter), TensorWeakRef(tensor), version)


class GradientWatch:
    """The gradients of some optimizers at their last steps, and at the last save after these."""

    def __init__(self) -> None:
        self._told = False
        self._step: int | None = None
        self._stepped: dict[Optimizer, list[_Gradient]] = {}
        self._saved: dict[Optimizer, list[tuple[_Gradient, bool]]] = {}

    def end_step(self, optimizer: Optimizer) -> None:
        """Note the gradients that a step has taken."""
        groups = [] if self._told else [group["params"] for group in optimizer.param_groups]
        groups = groups[:: len(groups) // _MOST_GROUPS + 1]
        self._stepped[optimizer] = [
            _gradient_of(next((each for each in params if each.grad is not None), params[0]))
            for params in groups
            if params
        ]

    def note_save(self, step: int) -> None:
        """Note the gradients that have come since the last steps."""
        self._step = step
        for optimizer, stepped in list(self._stepped.items()):
            found = [each.now() for each in stepped]
            self._saved[optimizer] = [
                (now, changes is not None)
                for now, changes in found
                if now is not None and (changes is None or (changes > 1 and now.holds_values()))
            ]

    def begin_step(self, optimizer: Optimizer) -> None:
        """Warn, once, if a step takes gradients that came before the last save."""
        for saved, is_kept in self._saved.pop(optimizer, ()):
            _, changes = saved.now()
            if self._told or changes is None or (is_kept and changes > 1):
                continue
            self._told = True
            logger.warning(
                "step %s was saved between accumulated gradients: the %s took them in its next "
                "step, and the checkpoint has none of them. A run that resumes from it loses them, "
                "unless it takes their batches again. Save after optimizer.step(), before the next "
                "backward()",
                self._step,
                type(optimizer).__name__,
            )
