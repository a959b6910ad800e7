"""Turns of requests to a store that may throttle."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from ckpipe.errors import Throttled
from ckpipe.stores.congestion import Congestion, Ticket

logger = logging.getLogger("ckpipe")


class Pace:
    """Has requests wait for each other once the store says that there are too many.

    All requests that share a pace slow down together, also those that were not refused. It is
    used on one event loop.
    """

    def __init__(self) -> None:
        self._congestion = Congestion()
        self._ended = anyio.Event()

    @property
    def bound(self) -> float:
        """How many requests may be under way at a time; infinite where nothing was refused."""
        return self._congestion.bound

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits until a request may be sent, and learns from how it ends.

        The request must not ask for a turn of the same pace.
        """
        congestion = self._congestion
        while not congestion.may_begin(time.monotonic()):
            await self._change()
        ticket = congestion.begin()
        try:
            yield
        except Throttled as error:
            self._slow_down(ticket, error)
            raise
        except BaseException:
            congestion.failed()
            raise
        else:
            congestion.succeeded(ticket)
        finally:
            self._ended.set()

    def _slow_down(self, ticket: Ticket, error: Throttled) -> None:
        congestion = self._congestion
        before = congestion.bound
        congestion.throttled(ticket, time.monotonic(), error.retry_after)
        if congestion.bound < before:
            logger.info("The store throttles: %d requests at a time", int(congestion.bound))

    async def _change(self) -> None:
        """Waits until a request ends, or the time is over in which the store wants none."""
        if self._ended.is_set():
            self._ended = anyio.Event()
        seconds = self._congestion.not_before - time.monotonic()
        with anyio.move_on_after(seconds if seconds > 0 else math.inf):
            await self._ended.wait()


__all__ = ["Pace"]
