"""When a remembered frame counts as gone from a stack."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

from ckpipe.lock.waiters import FrameMark, thread_of


def mark_of_a_frame_that_ended() -> FrameMark:
    return FrameMark.of(sys._getframe())


def test_a_frame_is_seen_from_the_calls_below_it_until_it_ends() -> None:
    mark = FrameMark.of(sys._getframe())

    def below() -> bool:
        return mark.is_gone(sys._getframe())

    assert not below()
    assert mark_of_a_frame_that_ended().is_gone(sys._getframe())
    assert mark.is_gone(None)


def test_another_function_at_the_same_address_is_not_the_frame() -> None:
    reused = FrameMark(id(sys._getframe()), mark_of_a_frame_that_ended.__code__)
    assert reused.is_gone(sys._getframe())


def test_a_stack_that_ends_in_a_generator_proves_nothing() -> None:
    def numbers() -> Iterator[int]:
        yield 1

    generator = numbers()
    next(generator)
    # This is what is seen of a stack whose top yields while it is being looked at.
    suspended = generator.gi_frame  # type: ignore[attr-defined]
    assert suspended.f_back is None
    assert not FrameMark.of(sys._getframe()).is_gone(suspended)


def test_threads_are_found_by_their_identifier() -> None:
    assert thread_of(threading.get_ident()) is threading.current_thread()
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    assert thread_of(-1) is None
    assert ended not in (thread_of(ended.ident or 0), None)
