"""Let several ranks agree without a collective."""

from __future__ import annotations
