"""Checksums of request bodies, as stores behind HTTP are told them: CRC-32C, in base 64."""

from __future__ import annotations

import base64

from ckpipe.format.checksum import crc32c
from ckpipe.tasks import to_thread

_ON_LOOP_BYTES = 1 << 18


async def checksum_of(data: bytes | memoryview) -> int:
    """The CRC-32C of a body, computed in a worker thread if that takes a while."""
    if len(data) > _ON_LOOP_BYTES:
        return await to_thread.run_sync(crc32c, data)
    return crc32c(data)


def checksum_text(value: int) -> str:
    """A CRC-32C as stores write it: big endian, in base 64."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def read_checksum(text: str) -> int:
    """A CRC-32C that a store wrote.

    Raises:
        ValueError: If it is none.
    """
    data = base64.b64decode(text, validate=True)
    if len(data) != 4:
        raise ValueError("a CRC-32C has four bytes")
    return int.from_bytes(data, "big")


__all__ = ["checksum_of", "checksum_text", "read_checksum"]
