"""Read the tensors of a checkpoint: its chunks, the plan of reads, and the memory they fill."""

from __future__ import annotations
