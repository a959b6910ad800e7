"""Load a checkpoint into a state: plan, read, verify, put together."""

from __future__ import annotations
