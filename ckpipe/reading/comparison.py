"""Compare two tensors, and compute their norms, slice by slice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """The difference between the values of one tensor.

    Norms are those of the differences of elements, computed in double precision. Two NaN count
    as equal; a NaN against a number makes the norms NaN.

    Args:
        label: The tensor's label.
        elements: The number of its elements.
        different: The number of elements that differ in value.
        norm: The Euclidean norm of the differences, ``|b - a|``.
        relative: That norm divided by the norm of the first, ``|b - a| / |a|``; infinite if ``a``
            is 0.
        largest: The largest absolute difference.
    """

    label: str
    elements: int
    different: int
    norm: float
    relative: float
    largest: float


class Comparison:
    """Compare two tensors of one shape and dtype, slice by slice.

    Args:
        first: The one.
        second: The other.

    Attributes:
        squares: The sum of the squared differences of the slices so far.
        base: The sum of the squares of the first tensor's, without NaN.
    """

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self._one, self._two = flat(first), flat(second)
        self._different, self.squares, self.base, self._largest = 0, 0.0, 0.0, 0.0
        self._same_bits = True

    def pieces(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield both tensors in slices of some MiB, so that converting them takes little memory."""
        yield from zip(slices(self._one), slices(self._two), strict=True)

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Compare a slice of the one with that of the other."""
        self._same_bits = self._same_bits and torch.equal(_bits(a), _bits(b))
        wide = torch.complex128 if a.is_complex() else torch.float64
        left, right = a.to(wide), b.to(wide)
        if a.is_floating_point() or a.is_complex():
            alike = (left == right) | (left.isnan() & right.isnan())
        else:  # without conversion, since doubles do not hold all whole numbers
            alike = a == b
        gap = torch.where(alike, 0.0, (right - left).abs()).double()
        self._different += int((~alike).sum())
        self.squares += float(gap.square().sum())
        self.base += float(left.abs().double().square().nansum())
        self._largest = float(np.maximum(self._largest, float(gap.max())))  # NaN wins

    def result(self, label: str) -> TensorDifference | None:
        """Return the difference over all slices; None if they are equal bit for bit."""
        if self._same_bits:
            return None
        norm = math.sqrt(self.squares)
        relative = norm / math.sqrt(self.base) if self.base else (math.inf if norm else 0.0)
        return TensorDifference(
            label, self._one.numel(), self._different, norm, relative, self._largest
        )


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor in one dimension."""
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1)


def slices(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a flat tensor in slices of some MiB."""
    for at in range(0, tensor.numel(), _AT_ONCE):
        yield tensor[at : at + _AT_ONCE]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
