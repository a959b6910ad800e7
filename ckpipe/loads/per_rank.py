"""Values that were different on each rank, loaded by another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ckpipe.errors import PerRankValue
from ckpipe.format.keys import Json

Combine = Callable[[str, Sequence[Any]], Any]
"""Makes one value of those of all ranks: gets the label and the values in the order of ranks."""

PerRankPolicy = Literal["raise", "drop", "rank0", "derive"] | Combine


@dataclass(frozen=True, slots=True)
class PerRankItems:
    """The tensors and values of a saved state that belong to a rank, where no rank fits.

    Args:
        combine: Makes one of them; None refuses.
        tensors: For the number of a tensor, the parts that have one, and its number there; none
            of a random generator.
        values: For the number of an inline value, those of all parts, encoded; none of a random
            generator.
        derive: Makes the state of generators of the rank's own from a saved one; None refuses.
        generators: The labels of these generators.
    """

    combine: Combine | None = None
    tensors: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)
    values: Mapping[int, Sequence[Json]] = field(default_factory=dict)
    derive: Callable[[Any], Any] | None = None
    generators: frozenset[str] = frozenset()

    def refused(self, label: str, copies: Sequence[Any]) -> PerRankValue:
        """The error for what the caller did not say how to combine."""
        if not copies:
            return PerRankValue(
                "These random generators were saved by another rank, or by another number of "
                "ranks, and two ranks must not draw the same numbers",
                key=label or None,
                hint='Pass per_rank="derive" for generators of this rank\'s own, or "drop" to keep '
                "those of the target, or leave them out with exclude",
            )
        return PerRankValue(
            "Each rank saved a value of its own here, and the number of ranks is another now",
            key=label or None,
            hint='Pass per_rank="rank0", "drop" or a function that combines them, leave it out '
            "with exclude, or load with as many ranks as saved",
        )
