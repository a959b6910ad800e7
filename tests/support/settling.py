"""A pipeline that tests can wait for until all that follows its commits is through."""

from __future__ import annotations

import threading
from typing import Any

import ckpipe
from ckpipe import events

HUNG = 300


class SettlingPipeline(ckpipe.SyncPipeline):
    """A pipeline that counts its saves under way by their events; see :func:`settle`.

    Args:
        args: Those of :class:`ckpipe.SyncPipeline`.
        fields: Those of :class:`ckpipe.SyncPipeline`.
    """

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.unsettled: set[str] = set()
        self.changed = threading.Condition()
        self.events.add(self._count)

    def _count(self, event: events.Event) -> None:
        with self.changed:
            if isinstance(event, events.SaveStarted):
                self.unsettled.add(event.id)
            elif isinstance(event, events.SaveEnded):
                self.unsettled.discard(event.id)
                self.changed.notify_all()


def settle(pipeline: ckpipe.SyncPipeline) -> None:
    """Wait until all saves of a :class:`SettlingPipeline` have ended, with their retention."""
    assert isinstance(pipeline, SettlingPipeline)
    with pipeline.changed:
        assert pipeline.changed.wait_for(lambda: not pipeline.unsettled, HUNG)
