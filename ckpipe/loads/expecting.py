"""What a load most likely needs, which is read while it is still being found out.

Theory. Lanes need not know where bytes go; only deliverers do. So reading may begin on a guess, and
the guess is that a rank which loads what as many ranks saved needs all that it has written itself,
whole and nothing else. That holds wherever a run goes on as it was. Where parts of its tensors are
with other ranks, or only some of the state is asked for, there is no telling, and nothing is read
before it is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpipe.format.manifest import Bundle
from ckpipe.format.stored_layouts import chunk_columns
from ckpipe.loads.entry_tables import EntryTable, Need, entry_table, new_need


@dataclass(frozen=True, slots=True)
class Expected:
    """What a load is expected to need.

    Args:
        data: Where entries are.
        needs: Each entry that is expected, whole; nothing if there is no telling.
    """

    data: EntryTable
    needs: list[Need]

    def met_by(self, needs: Sequence[Need]) -> bool:
        """Whether every byte that was expected is needed, and no other.

        Args:
            needs: What is needed, in any order; needs may overlap.
        """
        ordered = sorted(needs)
        if ordered == self.needs:
            return True
        reached = {need.entry: 0 for need in self.needs}
        for entry, lo, hi in ordered:
            known = reached.get(entry)
            if known is None or lo > known:
                return False
            if hi > known:
                reached[entry] = hi
        return all(reached[need.entry] == need.hi for need in self.needs)


def expect(bundle: Bundle, rank: int, world_size: int, *, everything: bool) -> Expected:
    """What a rank most likely needs of a checkpoint.

    Args:
        bundle: The checkpoint's index, validated; or some of its parts.
        rank: The rank that loads.
        world_size: How many ranks load.
        everything: Whether it asks for all that was saved.
    """
    data, part = entry_table(bundle), bundle.number_of(rank)
    if not everything or part is None or bundle.world_size != world_size:
        return Expected(data, [])
    layout = bundle.layouts[bundle.parts[part].layout]
    owners = chunk_columns(layout).owner
    if not layout.entries or owners.count(None) < len(owners):
        return Expected(data, [])
    first = data.number(part, 0)
    sizes = enumerate(data.sizes[first : first + len(layout.entries)], first)
    return Expected(data, [new_need((entry, 0, nbytes)) for entry, nbytes in sizes if nbytes])


__all__ = ["Expected", "expect"]
