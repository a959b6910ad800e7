"""Where bytes begin in memory."""

from __future__ import annotations


def address_of(data: memoryview) -> int:
    """The address of the first of some flat bytes, read-only ones too; there must be one."""
    # Imported here, since who moves no bulk data has no other use for it, and it takes a while.
    import numpy as np

    address: int = np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0]
    return address


__all__ = ["address_of"]
