"""Whether tensors look as they did, asked of torch in one call for many of them.

To read one attribute of a tensor takes some 60 ns, and a leaf says ten. torch itself has to answer
the same question before it runs compiled code, for all inputs at once and in C++; that is what is
asked here, of a thousand tensors at a time. The way to ask it is not public, and asked in another
way than it expects it may crash the process. So only releases of torch that the tests have run with
are asked, and once in every process it is tried whether torch tells every difference that matters.
Where it does not, or is another release, there is no answer: whoever asks then compares attribute
by attribute, which is always right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch

RELEASES = ("2.13.",)
"""How the versions of torch begin that are asked."""


class Looks:
    """How some tensors looked at one time; holds none of them.

    Args:
        tensors: The tensors.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        questions = list(map(_question, _groups(tensors))) if _is_reliable() else []
        self._same = [each for each in questions if each is not None]
        if len(self._same) < len(questions) or not self.are_those_of(tensors):
            self._same = []  # not for these, such as one that stands twice in one call

    def are_those_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether class, dtype, device, layout, shape, strides and lazy bits are the same.

        And whether each needs a gradient. Addresses and bytes are not looked at.

        Args:
            tensors: As many as before.

        Returns:
            False also if that cannot be told.
        """
        if not self._same:
            return False
        # Without gradients torch says of none that it needs one.
        with torch.enable_grad():
            return all(same(*some) for same, some in zip(self._same, _groups(tensors), strict=True))


_GROUP = 1024
"""Of how many tensors torch is asked in one call: it notes each, which takes longer the more."""


def _groups(tensors: Sequence[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
    return (tensors[at : at + _GROUP] for at in range(0, len(tensors), _GROUP))


def _question(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    try:
        from torch._C._dynamo.guards import TensorGuards

        with torch.enable_grad():
            # Both arguments must be named, as torch itself does: what may differ is nothing.
            guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        same: Callable[..., bool] = guards.check
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return None
    return same


@cache
def _is_reliable() -> bool:
    """Whether torch tells tensors apart that differ in one respect, and takes equal ones for so."""
    tried = torch.__version__.startswith(RELEASES)
    return tried and all(_tells(one, others) for one, others in _samples())


def _tells(one: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    same = _question([one])
    if same is None:
        return False
    with torch.enable_grad():
        return same(one.clone()) is True and all(same(other) is False for other in others)


def _samples() -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Tensors, each with some that differ from it in one respect."""
    yield (
        torch.zeros(4, 2),
        [
            torch.zeros(4, 2, dtype=torch.float64),
            torch.zeros(4, 2, dtype=torch.int32),
            torch.zeros(4, 2, device="meta"),
            torch.zeros(2, 4),
            torch.zeros(4, 2, 1),
            torch.zeros(2, 4).t(),
            torch.zeros(8, 2)[::2],
            torch.zeros(4, 2).to_sparse(),
            torch.zeros(4, 2, requires_grad=True),
            torch.nn.Parameter(torch.zeros(4, 2), requires_grad=False),
            torch._neg_view(torch.zeros(4, 2)),
        ],
    )
    numbers = torch.zeros(3, dtype=torch.complex64)
    yield numbers, [numbers.conj(), torch._neg_view(numbers)]
    # A dimension of size one or none may have any stride.
    yield torch.zeros(1, 3), [torch.zeros(3).as_strided((1, 3), (1, 1))]
    yield torch.zeros(0, 3), [torch.zeros(3).as_strided((0, 3), (1, 1))]


__all__ = ["Looks"]
