"""Public fakes and the conformance suite, for tests of backends and of programs on ckpipe.

:class:`MemoryBackend` is the reference semantics of a store. :class:`FaultyBackend` and
:class:`SlowBackend` wrap any backend and make it fail, stop or slow down on demand.
:class:`BackendConformance` is a pytest class that tests a backend against the contract. It is
imported only on access, because it needs pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpipe.testing.memory import MemoryBackend
from ckpipe.testing.wrappers import FaultyBackend, Gate, Landing, Operation, SlowBackend

if TYPE_CHECKING:
    from ckpipe.testing.conformance import BackendConformance


def __getattr__(name: str) -> Any:
    if name != "BackendConformance":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pytest

    # Failing assertions of the suite then show their values, as those of a test file do.
    pytest.register_assert_rewrite("ckpipe.testing.conformance")
    from ckpipe.testing.conformance import BackendConformance

    return BackendConformance


__all__ = [
    "BackendConformance",
    "FaultyBackend",
    "Gate",
    "Landing",
    "MemoryBackend",
    "Operation",
    "SlowBackend",
]
