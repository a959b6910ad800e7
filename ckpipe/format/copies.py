"""Bytes that several ranks have written alike: how much of a checkpoint is copies of the rest."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

from ckpipe.format.item_sizes import STORED_ITEM_BYTES
from ckpipe.format.manifest import Bundle
from ckpipe.format.stored_layouts import private_of

REMEDY = (
    "Save ckpipe.distributed.training_state(model, optimizer), or name what all ranks hold alike, "
    'such as plan={"replicated": ["model.*"]}, so that each byte is written once'
)
"""How to write the bytes once, as a sentence without its full stop."""


def copied_bytes(index: Bundle) -> int:
    """Count the bytes that would not be there if equal tensors of all ranks were written once.

    Counted are tensors that every rank of a structure holds whole and has written itself, and whose
    checksums are equal on all of them.

    Args:
        index: The index of a checkpoint.
    """
    if index.world_size == 1:
        return 0
    ranks: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for part in index.parts:
        ranks[part.structure][part.layout] += 1
    total = 0
    for structure, layouts in ranks.items():
        count = layouts.total()
        if count > 1:
            first, *others = (private_of(index.layouts[layout]) for layout in layouts)
            alike = set(first).intersection(*others) - set(index.per_rank[structure].tensors)
            # Tensors that share memory lie in one entry.
            places = [first[tensor] for tensor in alike]
            entries = {(sums.start, sums.stop): place for place, sums in places}
            total += (count - 1) * sum(
                STORED_ITEM_BYTES[dtype] * math.prod(shape) for dtype, shape, *_ in entries.values()
            )
    return total


__all__ = ["REMEDY", "copied_bytes"]
