"""Give the batches of a data loader, and go on with them where a checkpoint was saved."""

from __future__ import annotations
