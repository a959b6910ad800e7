"""Load a checkpoint into a state: match, plan reads, read, verify, apply."""

from __future__ import annotations
