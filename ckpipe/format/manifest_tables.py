"""The tables of a bundle: which columns they have, and what stands in them.

``docs/format.md`` explains every column.
"""

from __future__ import annotations

from ckpipe.format.columns import (
    Column,
    Table,
    boxes,
    flags,
    nodes,
    number_lists,
    numbers,
    optional,
    sizes,
    texts,
)
from ckpipe.format.keys import Json
from ckpipe.format.manifest import ChunkRow, EntryRow, FileRow, Part, Structure, TensorRow

TENSORS = Table(
    "tensors",
    (
        Column("label", texts),
        Column("dtype", texts),
        Column("shape", sizes),
        Column("device", texts, "cpu"),
        Column("kind", texts, "tensor"),
        Column("detail", optional(texts), None),
        Column("requires_grad", flags, False),
        Column("lazy", texts, ""),
        Column("attributes", optional(nodes), None),
    ),
    TensorRow,
)

ENTRIES = Table(
    "entries",
    (
        Column("name", list),
        Column("dtype", texts),
        Column("shape", sizes),
        Column("file", numbers, 0),
        Column("offset", numbers),
    ),
    EntryRow,
)

CHUNKS = Table(
    "chunks",
    (
        Column("tensor", numbers),
        Column("entry", optional(numbers)),
        Column("offset", numbers, 0),
        Column("stride", optional(sizes), None),
        Column("original_stride", optional(sizes), None),
        Column("box", optional(boxes), None),
        Column("owner", optional(numbers), None),
    ),
    ChunkRow,
)

FILES = Table(
    "files",
    (
        Column("name", texts),
        Column("size", numbers),
        Column("header_bytes", numbers),
        Column("header_crc32c", numbers),
    ),
    FileRow,
)

PARTS = Table(
    "parts",
    (
        Column("rank", numbers),
        Column("structure", numbers, 0),
        Column("layout", numbers, 0),
        Column("values", numbers, 0),
        Column("files", lambda cells: [FILES.decode(cell) for cell in cells]),
        Column("checksums", number_lists),
        Column("token", texts),
        Column("started", texts),
        Column("writer", numbers, 0),
        Column("metadata", numbers, 0),
        Column("metrics", numbers, 0),
        Column("resumed_from", optional(texts), None),
        Column("final", flags, False),
    ),
    Part,
)

SHARED = ("values", "writer", "metadata", "metrics")
"""The members of a part that are written once for all parts that have the same."""


def structure_form(structure: Structure) -> dict[str, Json]:
    """The JSON form of a structure."""
    return {
        "tree": structure.tree,
        "values": structure.values,
        "tensors": TENSORS.encode(structure.tensors),
    }
