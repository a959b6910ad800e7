"""Large modules that only some tests need."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class LateModule:
    """Stand for a module that is imported once a test uses it.

    Every process collects all tests, and would import it for that: two seconds for transformers.

    Args:
        name: The module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks so whether this is a test
            raise AttributeError(name)
        return getattr(import_module(self._name), name)
