"""Summaries: what retention and lists of checkpoints know of an index, in a small object beside it.

Theory. A list of a root names its checkpoints but not their sizes and metrics; those would need
every index, which may have megabytes. A summary is one small JSON object with a checksum
(:mod:`ckpipe.format.checksummed_json`). It is a hint: a checkpoint may have none, nothing waits for
it, and code that acts on one first reads the index (:mod:`ckpipe.catalog.summaries`). It names its
checkpoint, so that a copy under another name does not count. A reader that does not understand all
of it takes it for none.

This module also counts the bytes that several ranks have written alike (:func:`copied_bytes`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpipe.errors import InvalidManifest
from ckpipe.format.checksummed_json import PLAIN_BYTES, decode_json, encode_json
from ckpipe.format.data_file import STORED_ITEM_BYTES
from ckpipe.format.labels import Json, decode_float, encode_float
from ckpipe.format.manifest import ManifestDocument
from ckpipe.types import CheckpointId

MOST_BYTES = PLAIN_BYTES
"""Most bytes of a summary; a longer one is not written, and the index is read instead."""

_LARGEST = 1 << 62
_NUMBERS = ("bytes", "world_size", "copied_bytes")


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of an index.

    Args:
        bytes: Size of its data files.
        world_size: The number of ranks that wrote it.
        final: Whether it was saved with ``final=True``.
        metrics: The metrics that were passed to ``save``.
        copied_bytes: Bytes that several ranks have written alike, without the first copy; see
            :func:`ckpipe.format.summary.copied_bytes`.
        resumed_from: Id of the checkpoint that its run had loaded; only the index has it.
        metadata: The metadata that was passed to ``save``; only the index has it.
        name: The text under ``name`` in the metadata; None without one.
        line: Its line of launches; empty for that of checkpoints without one.
        nan: The number of NaN in its tensors, as far as they were counted.
        differences: The number of chunks of which ranks hold different copies.
    """

    bytes: int
    world_size: int
    final: bool
    metrics: Mapping[str, float]
    copied_bytes: int = 0
    resumed_from: str | None = None
    metadata: Mapping[str, Json] | None = None
    name: str | None = None
    line: str = ""
    nan: int = 0
    differences: int = 0

    @property
    def is_wasteful(self) -> bool:
        """Tell whether a quarter of the checkpoint or more is copies of the rest."""
        return 0 < self.bytes <= 4 * self.copied_bytes

    @property
    def members(self) -> dict[str, Any]:
        """The members that its object has; equal for two summaries only if their values are."""
        return {
            "bytes": self.bytes,
            "world_size": self.world_size,
            "final": self.final,
            "metrics": {name: encode_float(value) for name, value in self.metrics.items()},
            "copied_bytes": self.copied_bytes,
            **({} if self.name is None else {"name": self.name}),
            **({"line": self.line} if self.line else {}),
            **({"nan": self.nan} if self.nan else {}),
            **({"differences": self.differences} if self.differences else {}),
        }


def summary_of(index: ManifestDocument) -> Summary:
    """Summarise an index.

    Raises:
        InvalidManifest: If its metrics are not numbers.
    """
    first = index.parts[0]
    name = first.metadata.get("name")
    return Summary(
        sum(file.size for part in index.parts for file in part.files),
        index.world_size,
        any(part.final for part in index.parts),
        {name: decode_float(value) for name, value in first.metrics.items()},
        copied_bytes(index),
        first.resumed_from,
        first.metadata,
        name if isinstance(name, str) else None,
        index.line,
        index.nan,
        index.differences.count if index.differences else 0,
    )


def encode_summary(id: CheckpointId, summary: Summary) -> bytes:
    """Encode the object of a summary.

    Raises:
        OversizedMetadata: If it has more than ``MOST_BYTES``.
    """
    return encode_json({**_head(id), **summary.members}, MOST_BYTES)


def decode_summary(id: CheckpointId, data: bytes) -> Summary:
    """Decode the object of a summary.

    Raises:
        CorruptCheckpoint: If it is damaged, of another version or of another checkpoint.
    """
    document, head = decode_json(data, MOST_BYTES), _head(id)
    nan, differences = document.pop("nan", 0), document.pop("differences", 0)
    numbers: list[Any] = [nan, differences, *(document.get(name) for name in _NUMBERS)]
    final, metrics = document.get("final"), document.get("metrics")
    name, line = document.pop("name", None), document.pop("line", "")
    if (
        document.keys() != {*head, *_NUMBERS, "final", "metrics"}
        or any(document[name] != value for name, value in head.items())
        or not all(type(each) is int and 0 <= each <= _LARGEST for each in numbers)
        or type(final) is not bool
        or type(metrics) is not dict
        or not isinstance(name, str | None)
        or not isinstance(line, str)
    ):
        raise InvalidManifest("This is no summary of this checkpoint, or one of another version")
    told = {name: decode_float(value) for name, value in metrics.items()}
    size, world_size, copied = numbers[2:]
    return Summary(
        size, world_size, final, told, copied, name=name, line=line, nan=nan,
        differences=differences,
    )  # fmt: skip


def _head(id: CheckpointId) -> dict[str, Json]:
    return {"format": "ckpipe", "version": 1, "kind": "summary", "id": str(id)}


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
