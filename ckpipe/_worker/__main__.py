"""The entry point of a worker process."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import signal
import socket
import sys

import anyio

from ckpipe._worker import IGNORED, TELL_STACKS
from ckpipe._worker.channel import Channel
from ckpipe._worker.server import serve

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


async def _serve(descriptor: int) -> int:
    channel = Channel(socket.socket(fileno=descriptor))
    return await serve(channel)


def go_on_when_the_trainer_dies() -> None:
    """Has a worker that somebody has stopped continue once its trainer is dead: prctl(2).

    Nobody else would let it go on, and what is staged would neither be stored nor given up. The
    kernel does the same for process groups that lose their parent within a session.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)


def main() -> int:
    """Serves on the socket whose descriptor is the only argument; returns the exit code."""
    for each in IGNORED:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)  # which kept them away until now
    go_on_when_the_trainer_dies()
    faulthandler.enable()
    faulthandler.register(TELL_STACKS)
    log = logging.StreamHandler(sys.stderr)
    log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(log)
    logging.getLogger("ckpipe").setLevel(logging.INFO)
    code = anyio.run(_serve, int(sys.argv[1]))
    logging.getLogger("ckpipe").info("The worker ends with %d", code)
    return code


if __name__ == "__main__":
    sys.exit(main())
