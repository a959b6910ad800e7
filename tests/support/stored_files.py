"""Finds, reads and changes the stored files of a checkpoint, by ``docs/format.md`` alone.

Nothing here imports what ckpipe names and reads its files with, so tests that use it also check
that ckpipe does as the page says.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from awscrt import checksums
from safetensors import safe_open

ATTEMPTS, DELETED = ".ckpipe/attempts/", ".ckpipe/deleted/"
LEASES, PINS = ".ckpipe/leases/", ".ckpipe/pins/"
SUMMARIES = ".ckpipe/digests/"

Document = dict[str, Any]


def index_key(id: object) -> str:
    """The key of a checkpoint's index."""
    return f"{id}.json"


def data_file_key(id: object, rank: int = 0, number: int = 0) -> str:
    """The key of one of the data files of a rank."""
    return f"{id}/rank-{rank:05d}{f'.{number}' * (number > 0)}.safetensors"


def data_bytes(root: Path | str) -> list[int]:
    """The bytes behind the header of each data file below a folder."""
    files = (path.read_bytes() for path in sorted(Path(root).rglob("rank-*.safetensors")))
    return [len(each) - 8 - int.from_bytes(each[:8], "little") for each in files]


def entry_names(root: Path) -> list[str]:
    """The names of the tensors in all data files below a folder."""
    names = []
    for path in root.rglob("rank-*.safetensors"):
        with safe_open(path, "pt") as file:
            names += list(file.keys())
    return names


def manifest_key(id: object, rank: int) -> str:
    """The key of the manifest of a rank."""
    return f"{id}/m/0/{rank // 100:03d}/rank-{rank:05d}.json"


def tombstone_key(id: object) -> str:
    """The key of the mark of a deletion."""
    return f"{DELETED}{id}"


def pin_key(id: object) -> str:
    """The key of what protects a checkpoint."""
    return f"{PINS}{id}"


def crc32c(data: bytes, previous: int = 0) -> int:
    """The CRC-32C of bytes, by a library."""
    return int(checksums.crc32c(data, previous))


def text_of(data: bytes) -> str:
    """The text of a document without its checksum, after both sums have been checked."""
    if data[:1] != b"{":
        stream, total = data[:-4], int.from_bytes(data[-4:], "big")
        assert crc32c(stream) == total
        data = zlib.decompress(stream)
        assert len(data) > 65536
    assert data[-21:] == b',"crc32c":"%08x"}' % crc32c(data[:-21])
    return data[:-21].decode("ascii")


def document_of(data: bytes) -> Document:
    """The JSON of a document without its checksum, after both sums have been checked."""
    document: Document = json.loads(text_of(data) + "}")
    return document


def sealed(document: Document) -> bytes:
    """A document of JSON with right checksums, as an attacker would write it."""
    text = sealed_text(json.dumps(document, separators=(",", ":")).encode()[:-1])
    return text if len(text) <= 65536 else packed(text)


def sealed_text(body: bytes) -> bytes:
    """The text of a document but its last brace, with a right checksum behind it."""
    return body + b',"crc32c":"%08x"}' % crc32c(body)


def packed(text: bytes) -> bytes:
    """A text as a compressed document, with a right checksum."""
    stream = zlib.compress(text)
    return stream + crc32c(stream).to_bytes(4, "big")


def entries_of(data: bytes) -> tuple[int, dict[str, int]]:
    """The size of a data file's header, and where each entry begins in the file."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    return end, {
        name: end + row["data_offsets"][0] for name, row in header.items() if name != "__metadata__"
    }


def summary_key(id: object) -> str:
    """The key of the summary of a checkpoint."""
    return f"{SUMMARIES}{id}.json"


def summary_data(id: object, nbytes: int, metrics: Document, **other: Any) -> bytes:
    """The summary of a checkpoint of one rank."""
    head = {"format": "ckpipe", "version": 1, "kind": "summary", "id": str(id)}
    members = {"bytes": nbytes, "world_size": 1, "final": False, "metrics": metrics}
    return sealed({**head, **members, "copied_bytes": 0, **other})


def forge(path: Path, change: Callable[[Document], object]) -> None:
    """Change what a document says, and give it checksums that are right."""
    document = document_of(path.read_bytes())
    change(document)
    path.write_bytes(sealed(document))


def flip(path: Path, at: int) -> None:
    """Flip a bit of the byte of a file at a place."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
