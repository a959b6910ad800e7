"""Bundles as they are stored, from the format's description alone."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from typing import Any


def crc32c(data: bytes) -> int:
    """The checksum as its definition says, from the polynomial of Castagnoli."""
    state = 0xFFFFFFFF
    for byte in data:
        state = _TABLE[(state ^ byte) & 0xFF] ^ (state >> 8)
    return state ^ 0xFFFFFFFF


def _table() -> Iterator[int]:
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        yield value


_TABLE = list(_table())


def text_of(data: bytes) -> str:
    """The text of a bundle without its checksum, after both sums have been checked."""
    if data[:1] != b"{":
        stream, total = data[:-4], int.from_bytes(data[-4:], "big")
        assert crc32c(stream) == total
        data = zlib.decompress(stream)
        assert len(data) > 65536
    assert data[-21:] == b',"crc32c":"%08x"}' % crc32c(data[:-21])
    return data[:-21].decode("ascii")


def document_of(data: bytes) -> dict[str, Any]:
    """A bundle without its checksum."""
    document: dict[str, Any] = json.loads(text_of(data) + "}")
    return document


def sealed(body: bytes) -> bytes:
    """The text of a bundle but its last brace, with a right checksum behind it."""
    return body + b',"crc32c":"%08x"}' % crc32c(body)


def packed(text: bytes) -> bytes:
    """A text as a compressed bundle, with a right checksum."""
    stream = zlib.compress(text)
    return stream + crc32c(stream).to_bytes(4, "big")
