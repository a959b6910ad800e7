"""A pipeline that tests can wait for until all that follows its commits is through."""

from __future__ import annotations

import threading
from typing import Any

import ckpipe
from ckpipe import events

HUNG = 300


class UnderWay:
    """Counts the saves of a pipeline that are under way, by their events.

    Args:
        pipeline: The pipeline.
    """

    def __init__(self, pipeline: ckpipe.Pipeline | ckpipe.SyncPipeline) -> None:
        self._ids: set[str] = set()
        self._changed = threading.Condition()
        pipeline.events.add(self._count)

    def __len__(self) -> int:
        return len(self._ids)

    def _count(self, event: events.Event) -> None:
        with self._changed:
            if isinstance(event, events.SaveStarted):
                self._ids.add(event.id)
            elif isinstance(event, events.SaveEnded):
                self._ids.discard(event.id)
                self._changed.notify_all()

    def wait(self) -> None:
        """Wait until all have ended, with their retention."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self._ids, HUNG)


class SettlingPipeline(ckpipe.SyncPipeline):
    """A pipeline that counts its saves under way; see :func:`settle`.

    Args:
        args: Those of :class:`ckpipe.SyncPipeline`.
        fields: Those of :class:`ckpipe.SyncPipeline`.
    """

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.under_way = UnderWay(self)


def settle(pipeline: ckpipe.SyncPipeline) -> None:
    """Wait until all saves of a :class:`SettlingPipeline` have ended, with their retention."""
    assert isinstance(pipeline, SettlingPipeline)
    pipeline.under_way.wait()
