"""Metrics sidecars (*digests*): facts of a checkpoint for retention and lists, in object names.

Theory. One list of a root names its checkpoints but not their sizes and metrics; those would need
every index. A digest holds them in the *name* of a small object, so that one more list returns them
for all checkpoints. It is advisory. A checkpoint may have no digest, and code that acts on a digest
first reads the index (:mod:`ckpipe.catalog.metadata_cache`).

The text of a digest is JSON without white space, ``[1,bytes,ranks,final,{metric:value,…}]``, and is
the same for every writer. If ranks have written the same bytes several times, the number of copied
bytes follows as a sixth element. The text is cut into at most eight pieces that fit names of 255
bytes, the shortest limit of common file systems. Each piece carries the CRC-32C of the checkpoint's
id, its place and itself. So a name that was cut off, changed or given to another checkpoint does
not count.

This module also counts the bytes that several ranks have written alike (:func:`copied_bytes`).
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpipe.errors import InvalidManifest
from ckpipe.format.checksum import crc32c
from ckpipe.format.data_file import STORED_ITEM_BYTES
from ckpipe.format.keys import canonical, decode_float, encode_float
from ckpipe.format.manifest import ManifestDocument
from ckpipe.format.names import DIGESTS, LONGEST_NAME
from ckpipe.types import CheckpointId

MOST_PIECES = 8
"""Most pieces of a digest; a longer digest is not written, and the index is read instead."""

_VERSION = 1
_LARGEST = 1 << 62
_SUM_BYTES = 4
_NAME = re.compile(r"(.{1,200})\.([1-8])([1-8])\.([0-9A-Za-z_-]{6,255})")


@dataclass(frozen=True, slots=True)
class MetricsSidecar:
    """The facts in the sidecar of a checkpoint.

    Args:
        bytes: Size of its data files.
        world_size: The number of ranks that wrote it.
        final: Whether it was saved with ``final=True``.
        metrics: The metrics that were passed to ``save``.
        copied_bytes: Bytes that several ranks have written alike, without the first copy; see
            :func:`ckpipe.format.metrics_sidecar.copied_bytes`.
    """

    bytes: int
    world_size: int
    final: bool
    metrics: Mapping[str, float]
    copied_bytes: int = 0

    @property
    def is_wasteful(self) -> bool:
        """Tell whether a quarter of the checkpoint or more is copies of the rest."""
        return 0 < self.bytes <= 4 * self.copied_bytes

    @property
    def text(self) -> str:
        """Its JSON; equal for two digests only if their values are; NaN and -0.0 are told apart."""
        metrics = {name: encode_float(value) for name, value in self.metrics.items()}
        copied = [self.copied_bytes] if self.copied_bytes else []
        return canonical([_VERSION, self.bytes, self.world_size, self.final, metrics, *copied])


def sidecar_of(bundle: ManifestDocument) -> MetricsSidecar:
    """Return the digest of an index.

    Raises:
        InvalidManifest: If its metrics are not numbers.
    """
    return MetricsSidecar(
        sum(file.size for part in bundle.parts for file in part.files),
        bundle.world_size,
        any(part.final for part in bundle.parts),
        {name: decode_float(value) for name, value in bundle.parts[0].metrics.items()},
        copied_bytes(bundle),
    )


def sidecar_keys(id: CheckpointId, digest: MetricsSidecar) -> tuple[str, ...]:
    """Return the keys that hold a digest; none if it is too long for that."""
    text = digest.text.encode("ascii")
    room = (LONGEST_NAME - len(f"{id}.11.")) * 3 // 4 - _SUM_BYTES
    pieces = [text[at : at + room] for at in range(0, len(text), room)]
    if len(pieces) > MOST_PIECES:
        return ()
    places = [f"{id}.{number}{len(pieces)}." for number in range(1, len(pieces) + 1)]
    return tuple(
        f"{DIGESTS}{place}{_spelled(_sum(place, piece) + piece)}"
        for place, piece in zip(places, pieces, strict=True)
    )


def sidecar_owner(key: str) -> CheckpointId | None:
    """Return the checkpoint of a digest's key, damaged or not; None for other keys."""
    match = _match(key)
    return None if match is None else CheckpointId.parse(match[1])


def read_sidecars(keys: Iterable[str]) -> dict[CheckpointId, MetricsSidecar]:
    """Decode listed keys, in any order; skip digests that are damaged or ambiguous.

    Work and memory are bounded by the length of the keys.
    """
    found: dict[str, dict[int, tuple[int, bytes]]] = {}
    doubtful: set[str] = set()
    for key in keys:
        match = _match(key)
        piece = match and _piece(match)
        if match is None or piece is None:
            continue
        known = found.setdefault(match[1], {}).setdefault(int(match[2]), (int(match[3]), piece))
        if known != (int(match[3]), piece):
            doubtful.add(match[1])
    digests = {}
    for name, pieces in found.items():
        id, digest = CheckpointId.parse(name), _joined(pieces)
        if id is not None and digest is not None and name not in doubtful:
            digests[id] = digest
    return digests


def _match(key: str) -> re.Match[str] | None:
    name = key.removeprefix(DIGESTS)
    return None if name == key or len(name) > LONGEST_NAME else _NAME.fullmatch(name)


def _piece(match: re.Match[str]) -> bytes | None:
    """Decode one name; return None if it is damaged."""
    sealed = _unspelled(match[4])
    place = f"{match[1]}.{match[2]}{match[3]}."
    if sealed is None or not place.isascii():
        return None
    piece = sealed[_SUM_BYTES:]
    return piece if sealed[:_SUM_BYTES] == _sum(place, piece) else None


def _joined(pieces: Mapping[int, tuple[int, bytes]]) -> MetricsSidecar | None:
    """Join the pieces of a digest; return None if they are incomplete or do not fit together."""
    count = len(pieces)
    if sorted(pieces) != list(range(1, count + 1)) or {of for of, _ in pieces.values()} != {count}:
        return None
    text = b"".join(pieces[number][1] for number in range(1, count + 1))
    try:
        data = json.loads(text)
        digest = _decoded(data)
        # Only the canonical spelling counts, so that no name hides or repeats data.
        return digest if digest.text.encode() == text else None
    except (InvalidManifest, RecursionError, ValueError):
        return None


def _decoded(data: Any) -> MetricsSidecar:
    if type(data) is not list or len(data) not in (5, 6) or type(data[4]) is not dict:
        raise ValueError("This is no digest")
    version, size, world_size, final, metrics = data[:5]
    copied = data[5] if len(data) == 6 else 0
    if version != _VERSION or type(final) is not bool:
        raise ValueError("This digest is of another version")
    if not all(type(each) is int and 0 <= each <= _LARGEST for each in (size, world_size, copied)):
        raise ValueError("A number of this digest is out of range")
    told = {name: decode_float(metrics[name]) for name in metrics}
    return MetricsSidecar(size, world_size, final, told, copied)


def _sum(place: str, piece: bytes) -> bytes:
    return crc32c(piece, crc32c(place.encode())).to_bytes(_SUM_BYTES, "big")


def _spelled(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _unspelled(text: str) -> bytes | None:
    try:
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        return None
    return data if _spelled(data) == text else None


REMEDY = (
    "If your program keeps them equal on all ranks, save ckpipe.distributed.training_state(model, "
    'optimizer, replicated=True), or name them, such as plan={"replicated": ["model.*"]}, so that '
    "each byte is written once"
)
"""A hint on how to write the bytes once: a sentence without its full stop."""


def copied_bytes(index: ManifestDocument) -> int:
    """Count the bytes of equal tensors that all ranks have written, without one copy of each.

    A tensor counts if every rank of a structure holds it whole and has written it itself, and its
    checksums are equal on all of them.

    Args:
        index: The index of a checkpoint.
    """
    if index.world_size == 1:
        return 0
    ranks: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for part in index.parts:
        ranks[part.structure][part.layout] += 1
    total = 0
    for structure, layouts in ranks.items():
        count = layouts.total()
        if count > 1:
            first, *others = (index.layouts[layout].private for layout in layouts)
            alike = set(first).intersection(*others) - set(index.per_rank[structure].tensors)
            # Tensors that share memory lie in one entry.
            places = [first[tensor] for tensor in alike]
            entries = {(sums.start, sums.stop): place for place, sums in places}
            total += (count - 1) * sum(
                STORED_ITEM_BYTES[dtype] * math.prod(shape) for dtype, shape, *_ in entries.values()
            )
    return total
