"""The entry point of a worker process."""

from __future__ import annotations

import sys

from ckpipe.worker.server import main

if __name__ == "__main__":
    sys.exit(main())
