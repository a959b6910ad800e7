"""Where a worker process begins."""

from __future__ import annotations

import logging
import signal
import socket
import sys

import anyio

from ckpipe._worker.channel import Channel
from ckpipe._worker.service import serve

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What the trainer may be sent with all its processes; what then becomes of saves, it decides."""


async def _serve(descriptor: int) -> int:
    channel = Channel(socket.socket(fileno=descriptor))
    return await serve(channel)


def main() -> int:
    """Serves on the socket whose descriptor is the only argument; returns the exit code."""
    for each in IGNORED:
        signal.signal(each, signal.SIG_IGN)
    log = logging.StreamHandler(sys.stderr)
    log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(log)
    logging.getLogger("ckpipe").setLevel(logging.INFO)
    code = anyio.run(_serve, int(sys.argv[1]))
    logging.getLogger("ckpipe").info("The worker ends with %d", code)
    return code


if __name__ == "__main__":
    sys.exit(main())
