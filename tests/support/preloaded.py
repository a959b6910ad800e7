"""Names the modules that servers of multiprocessing import once for all that they fork."""

from __future__ import annotations

import gc

gc.disable()  # there is no garbage yet, and to look for it takes a fifth of the time

import torch._dynamo
import torch.distributed.fsdp  # noqa: F401

import tests.support.fork_server  # noqa: F401

gc.freeze()  # or each process would look for garbage among all this, and copy its pages
gc.enable()
