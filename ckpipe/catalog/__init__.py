"""The checkpoints of a root: find, complete, hold, copy and remove them."""

from __future__ import annotations
