"""Values that were different on each rank, loaded by another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ckpipe.errors import PerRankValue
from ckpipe.format.keys import Json

Combine = Callable[[str, Sequence[Any]], Any]
"""Makes one value of those of all ranks: gets the label and the values in the order of ranks."""

PerRankPolicy = Literal["raise", "drop", "rank0"] | Combine


@dataclass(frozen=True, slots=True)
class PerRankItems:
    """The tensors and values of a saved state that belong to a rank, where no rank fits.

    Args:
        combine: Makes one of them; None refuses.
        tensors: For the number of a tensor, the parts that have one, and its number there.
        values: For the number of an inline value, those of all parts, encoded.
    """

    combine: Combine | None = None
    tensors: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)
    values: Mapping[int, Sequence[Json]] = field(default_factory=dict)

    def refused(self, label: str) -> PerRankValue:
        """The error for what nobody said how to combine."""
        return PerRankValue(
            "Each rank saved a value of its own here, and the number of ranks is another now",
            key=label or None,
            hint='Pass per_rank="rank0", "drop" or a function that combines them, leave it out '
            "with exclude, or load with as many ranks as saved",
        )
