"""Ways to have a main thread hear every signal, at whatever moment it comes.

A signal that comes after Python has last looked for one, and before a long wait begins, does not
end that wait. The next signal does, and then both are heard.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PAUSE_SECONDS = 0.01

HEARING = f"""
import signal, threading, time

def wake(waiting=threading.get_ident()):
    while True:
        time.sleep({PAUSE_SECONDS})
        signal.pthread_kill(waiting, signal.SIGURG)

signal.signal(signal.SIGURG, lambda *_: None)
threading.Thread(target=wake, daemon=True).start()
"""
"""What a program does at its beginning to hear all signals."""


@contextmanager
def signals_heard() -> Iterator[None]:
    """Wake this thread, which is the main one, again and again from whatever it waits for."""
    waiting, over = threading.get_ident(), threading.Event()
    before = signal.signal(signal.SIGURG, lambda *_: None)  # without a handler nothing happens

    def wake() -> None:
        while not over.wait(PAUSE_SECONDS):
            signal.pthread_kill(waiting, signal.SIGURG)

    waking = threading.Thread(target=wake)
    waking.start()
    try:
        yield
    finally:
        over.set()
        waking.join()
        signal.signal(signal.SIGURG, before)
