"""Telling JSON values apart exactly: Python's ``==`` would take True for 1, and 0.0 for -0.0."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ckpipe.format.keys import Json


def canonical(data: Json) -> str:
    """A text that is the same for two JSON values only if they are the same in type and order."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False, check_circular=False)


class Numbering:
    """Gives numbers to things by their JSON; the same thing again has the same number."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._by_text: dict[str, int] = {}
        # The thing is kept with its number, since its id would be used again otherwise.
        self._by_id: dict[int, tuple[Any, int]] = {}

    def number(self, item: Any, form: Callable[[Any], Json] = lambda item: item) -> int:
        """The number of a thing whose JSON ``form`` makes."""
        known = self._by_id.get(id(item))
        if known is None:
            number = self._by_text.setdefault(canonical(form(item)), len(self.items))
            if number == len(self.items):
                self.items.append(item)
            known = self._by_id[id(item)] = (item, number)
        return known[1]
