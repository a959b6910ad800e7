"""Random generators in a checkpoint, loaded by a rank that did not save them.

Two ranks with the same generator draw the same dropout masks and the same samples, and nothing
fails. So a saved :class:`~ckpipe.RngState` belongs to the rank that saved it, even where all
ranks saved the same: another rank is refused, or gets a state that is derived from the saved one
and from its rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ckpipe.errors import StructureMismatch
from ckpipe.format.manifest import Bundle
from ckpipe.format.tree import MAPPINGS, Node, children_of
from ckpipe.loads.per_rank import PerRankPolicy
from ckpipe.loads.saved_state import SavedState
from ckpipe.state_helpers import derived_generators


def keep_generators_apart(
    saved: SavedState, bundle: Bundle, rank: int, world_size: int, policy: PerRankPolicy
) -> SavedState:
    """Mark the random generators of a saved state that another rank may get as well.

    Args:
        saved: The state that the rank loads.
        bundle: The checkpoint that it is from.
        rank: The rank that loads.
        world_size: How many ranks load.
        policy: What becomes of values that belong to one rank each. A function is not asked
            about generators: they are derived, as with ``"derive"``.
    """
    same_world = world_size == bundle.world_size
    if (same_world and saved.common is None) or (world_size == 1 and policy == "rank0"):
        return saved
    tensors: set[int] = set()
    values: set[int] = set()
    labels: set[str] = set()
    for label, node in _generators(saved):
        leaves = list(_leaves(node))
        numbers = {number for tag, number in leaves if tag == "tensor"}
        if not same_world or any(saved.homes[number][0] != rank for number in numbers):
            labels.add(label)
            tensors |= numbers
            values.update(number for tag, number in leaves if tag == "value")
    if not tensors:
        return saved
    items = replace(
        saved.per_rank,
        tensors={**saved.per_rank.tensors, **dict.fromkeys(tensors, ())},
        values={**saved.per_rank.values, **dict.fromkeys(values, ())},
        derive=partial(_derived, rank) if policy == "derive" or callable(policy) else None,
        generators=frozenset(labels),
    )
    return replace(saved, per_rank=items)


def is_generators(node: Node) -> bool:
    """Whether a node is what ``state_dict`` of an ``RngState`` returned."""
    if node[0] not in MAPPINGS or "python" not in node[1]:
        return False
    python = node[2][node[1].index("python")]
    return (
        "torch" in node[1]
        and "numpy" in node[1]
        and python[0] in MAPPINGS
        and all(key in python[1] for key in ("version", "internal", "gauss"))
    )


def _derived(rank: int, state: Any) -> Any:
    try:
        return derived_generators(state, rank)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise StructureMismatch(
            f"The saved random generators are not as RngState saves them: {error!r:.200}",
            hint="Leave them out with exclude",
        ) from error


def _generators(saved: SavedState) -> Iterator[tuple[str, Node]]:
    """Find generators by the label of torch's; only the way to them is walked."""
    tops = {
        row.label.rpartition(".")[0]
        for row in saved.rows
        if row.dtype == "uint8" and row.label.rpartition(".")[2].partition("~")[0] == "torch"
    }
    pending = [(saved.tree, "")] if tops else []
    while pending:
        node, label = pending.pop()
        if node[0] in ("shared", "stateful", "registered"):
            pending.append((node[-1], label))
        elif is_generators(node):
            yield label, node
        else:
            pending += [
                (child, where)
                for _, child, where in children_of(node, label)
                if any(top == where or top.startswith(f"{where}.") for top in tops)
            ]


def _leaves(node: Node) -> Iterator[tuple[str, int]]:
    if node[0] in ("tensor", "value"):
        yield node[0], node[1]
    for _, child, _ in children_of(node, ""):
        yield from _leaves(child)


__all__ = ["is_generators", "keep_generators_apart"]
