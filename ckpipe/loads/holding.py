"""What keeps everybody else from the target of a load while it is looked at and filled."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Hold(Protocol):
    """A hold on the target of one load, to be used on one event loop."""

    @property
    def is_pending(self) -> bool:
        """Whether it is still to be taken."""
        ...

    async def take(self) -> None:
        """Waits until nobody else uses the target; returns at once if that was done before."""
        ...

    def here(self) -> AbstractContextManager[None]:
        """Marks the calling thread as one that works for the load, whose hold is taken."""
        ...

    def end(self) -> None:
        """Lets everybody use the target again; does nothing if the hold is not taken."""
        ...


class NoHold:
    """For a load whose target nobody else knows."""

    is_pending = False
    """See :class:`Hold`."""

    async def take(self) -> None:
        """Does nothing."""

    def here(self) -> AbstractContextManager[None]:
        """Does nothing."""
        return nullcontext()

    def end(self) -> None:
        """Does nothing."""


__all__ = ["Hold", "NoHold"]
