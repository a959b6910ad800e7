"""Write checkpoints in the formats of other programs, and take over theirs."""

from __future__ import annotations
