"""What can be seen of other threads: their names, and whether a frame is still on their stack.

The theory of :class:`FrameMark`. A frame cannot be referred to weakly, and a strong reference
would keep its locals, and those of all its callers, alive. So a frame is remembered by its
address and its code. An address is given out again once its frame is gone, and walking a stack
allocates frame objects itself, so the address alone would sooner or later be found again in a
frame that has nothing to do with the old one. Together with the code it can only be confused
with another run of the same function at the same address, which passes as soon as that run ends.

The walk looks at a thread that goes on running. What it starts from is the top of the stack at
one instant; a function that returns in the meantime keeps its link to the caller, so the walk
still meets everything below. Only a generator drops that link when it yields. A walk that ends
in the frame of a generator has therefore proved nothing.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


@dataclass(frozen=True, slots=True)
class FrameMark:
    """Recognizes one frame without keeping it alive."""

    address: int
    code: CodeType

    @classmethod
    def of(cls, frame: FrameType) -> FrameMark:
        """The mark of a frame that is running now."""
        return cls(id(frame), frame.f_code)

    def is_gone(self, top: FrameType | None) -> bool:
        """Whether the frame is proved to be off a stack.

        Args:
            top: The innermost frame of the stack; None for a thread that runs no Python.
        """
        last = None
        for last in callers(top):
            if id(last) == self.address and last.f_code is self.code:
                return False
        return last is None or not last.f_code.co_flags & _SUSPENDABLE


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and the frames that called it, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def thread_of(ident: int) -> threading.Thread | None:
    """The living thread with this identifier, if there is one that Python knows of."""
    return next((thread for thread in threading.enumerate() if thread.ident == ident), None)


__all__ = ["FrameMark", "callers", "thread_of"]
