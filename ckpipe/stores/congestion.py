"""How many requests a store is sent at a time: fewer when it throttles, and slowly more again.

Theory. Additive increase and multiplicative decrease: of the simple rules it is the one by which
senders that know nothing of each other come to fair shares of what there is (D.-M. Chiu and R.
Jain, "Analysis of the increase and decrease algorithms for congestion avoidance in computer
networks", 1989). Refusals of requests that were under way together are one piece of news, not
several, so that the bound is halved once for them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request under way.

    Args:
        era: How often the bound had been halved when it began.
    """

    era: int


class Congestion:
    """The bound on the requests under way at a time; there is none until the store throttles.

    After a refusal it is half of what was under way. Each round of successes raises it by one,
    until it is what was under way when the store first refused; then there is none again. Times
    are seconds on any one clock.
    """

    def __init__(self) -> None:
        self.bound = math.inf
        self.under_way = 0
        self.not_before = -math.inf
        self._ceiling = 0.0
        self._era = 0

    def may_begin(self, now: float) -> bool:
        """Whether one more request may begin."""
        return self.under_way + 1 <= self.bound and now >= self.not_before

    def begin(self) -> Ticket:
        """Counts a request as under way; it ends with one of the three methods below."""
        self.under_way += 1
        return Ticket(self._era)

    def succeeded(self, ticket: Ticket) -> None:
        """Ends a request that the store served."""
        self.under_way -= 1
        if ticket.era == self._era:
            self.bound += 1 / self.bound
        if self.bound >= self._ceiling:
            self.bound = math.inf

    def failed(self) -> None:
        """Ends a request that says nothing of the store's load."""
        self.under_way -= 1

    def throttled(self, ticket: Ticket, now: float, retry_after: float | None = None) -> None:
        """Ends a request that the store refused since there were too many.

        Args:
            ticket: The request.
            now: The time.
            retry_after: Seconds in which the store wants no more requests, if it said so.
        """
        if ticket.era == self._era:
            if self.bound == math.inf:
                self._ceiling = float(self.under_way)
            self.bound = max(1.0, min(self.bound, self.under_way) / 2)
            self._era += 1
        self.under_way -= 1
        self.not_before = max(self.not_before, now + (retry_after or 0.0))


__all__ = ["Congestion", "Ticket"]
