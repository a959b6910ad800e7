"""The worker process: it brings saves to the store, beside the trainer and, if need be, after it.

``python -m ckpipe._worker`` is started by :mod:`ckpipe.worker.uploader` and is of no use by itself.
What it has to do comes over a socket, what is to be stored lies in memory that both processes map.
"""

from __future__ import annotations

import signal

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""What the trainer may be sent with all its processes; what then becomes of saves, it decides."""

MARK = "_CKPIPE_WORKER"
"""The variable of the environment by which a process knows that it was started as a worker."""

TELL_STACKS = signal.SIGQUIT
"""Has the worker write to its log where each of its threads is."""
