"""Putting an object together from others on the store: what is composed of what, as pure functions.

A request composes up to 32 objects into one, so more are composed in a tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpipe.format.checksum import combine

MAX_SOURCES = 32
"""The most objects that one request composes; a limit of the store."""

MAX_LEVELS = 3
"""How high the tree of an upload may be."""

MAX_PARTS = MAX_SOURCES**MAX_LEVELS


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of an object's bytes as an object of its own.

    Args:
        name: The whole name of that object.
        generation: Its generation.
        size: Bytes.
        checksum: Their CRC-32C.
    """

    name: str
    generation: str
    size: int
    checksum: int


def runs(pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
    """Cuts pieces into runs, each of which one request composes."""
    for start in range(0, len(pieces), MAX_SOURCES):
        yield pieces[start : start + MAX_SOURCES]


def joined(pieces: Sequence[Piece]) -> tuple[int, int]:
    """The size and CRC-32C of pieces one after the other."""
    size = checksum = 0
    for piece in pieces:
        checksum = combine(checksum, piece.checksum, piece.size)
        size += piece.size
    return size, checksum


def request(pieces: Sequence[Piece], resource: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body of a request that composes pieces.

    Args:
        pieces: The pieces.
        resource: What the store is told of the object that they become.
    """
    sources = [{"name": piece.name, "generation": piece.generation} for piece in pieces]
    return {"sourceObjects": sources, "destination": resource}
