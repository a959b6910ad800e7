"""Deferred copies that wait, so that a test can act before them."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ckpipe.save.stage import BlockCopiers
from tests.support.actors import PATIENCE


class SlowCopies:
    """Stops deferred copies in front of a piece, as a machine out of breath would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        begin = BlockCopiers.defer
        held = self

        def deferring(copiers: BlockCopiers, *args: Any) -> None:
            begin(copiers, *args)
            work = copiers._run

            def slow() -> None:
                held.reached.set()
                assert held.go_on.wait(PATIENCE)
                work()

            copiers._run = slow  # type: ignore[method-assign]

        monkeypatch.setattr(BlockCopiers, "defer", deferring)
