"""The live counterpart of a saved tree: what an object's own ``state_dict`` holds now.

Its tensors are filled and used instead of new ones, so that ``load_state_dict`` finds its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckpipe.format.keys import LabelFilter


@dataclass(eq=False, slots=True)
class Hint:
    """The live counterpart of a node.

    Args:
        live: The live object.
        must_fit: Whether a tensor that does not fit is an error; else a new one is made.
        select: What of the live object is to be loaded; the rest is taken over as it is.
    """

    live: Any
    must_fit: bool
    select: LabelFilter

    def at(self, key: Any) -> Hint | None:
        """The counterpart of an element."""
        live = self.live
        if isinstance(live, dict):
            found = live.get(key, _NOTHING)
        elif isinstance(live, _SEQUENCES) and type(key) is int:
            found = live[key] if key < len(live) else _NOTHING
        else:
            found = getattr(live, key, _NOTHING) if isinstance(key, str) else _NOTHING
        return None if found is _NOTHING else Hint(found, self.must_fit, self.select)


_NOTHING = object()
_SEQUENCES = (list, tuple)  # named, since a union would be made anew for every element
