"""Load a checkpoint into a state: match both, read, and apply."""

from __future__ import annotations
