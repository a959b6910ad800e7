"""Save once more when a signal announces the end of this process."""

from __future__ import annotations

from ckpipe.preemption.signals import worker_init as worker_init
