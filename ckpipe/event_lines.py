"""Events as lines of JSON, for collectors: one object a line, in a documented schema.

``docs/reference/events.md`` has the members, ``docs/schema/event-v1.json`` the JSON schema.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, Self, TextIO

from ckpipe.events import BlockUploaded, Event, LoadProgress, SaveEnded
from ckpipe.types import plain_data

logger = logging.getLogger("ckpipe")


def event_data(event: Event) -> dict[str, Any]:
    """Return an event as plain JSON: its class as ``event``, and its fields.

    The report of a save comes without its blocks: there may be thousands.
    """
    fields = {each.name: getattr(event, each.name) for each in dataclasses.fields(event)}
    if isinstance(event, SaveEnded):
        fields["report"] = event.report.to_data()
        del fields["report"]["blocks"]
    return {"event": type(event).__name__, **plain_data(fields)}


class JsonLines:
    """Writes every event as a line of JSON, in a thread of its own.

    A listener for ``pipeline.events.add`` and a context manager; one may serve several pipelines.
    Lines come in the order of the events, each without delay. The end of the context waits until
    all are written. The first failure of the target is logged, and all later events are lost: no
    save depends on them.

    Args:
        target: A file to append to, or a text stream, which is not closed.
        skip: Classes of events that are not written; by default those of progress.

    Raises:
        OSError: If the file cannot be opened.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | TextIO,
        *,
        skip: Collection[type[Event]] = (BlockUploaded, LoadProgress),
    ) -> None:
        self._skip = tuple(skip)
        self._closing = contextlib.ExitStack()
        self._file: TextIO | None
        if isinstance(target, str | os.PathLike):
            file = open(target, "a", encoding="utf-8")  # noqa: SIM115  the stack closes it
            self._file = self._closing.enter_context(file)
        else:
            self._file = target
        self._thread = ThreadPoolExecutor(1, "ckpipe event lines")
        self._thread.submit(int)  # starts it, so that no listener waits for that

    def __call__(self, event: Event) -> None:
        """Queue an event for writing; return at once."""
        if not isinstance(event, self._skip):
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            data = {"time": now} | event_data(event)
            try:
                self._thread.submit(self._write, data)
            except RuntimeError:
                # The program ends, and executors end first; or the lines were closed.
                self._write(data)

    def _write(self, data: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(data) + "\n")
            self._file.flush()
        except (OSError, ValueError):
            logger.exception("Events can no longer be written")
            self._file = None

    def close(self) -> None:
        """Wait until all events are written, and close the file if it was opened here."""
        self._thread.shutdown()
        self._file = None
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


__all__ = ["JsonLines", "event_data"]
