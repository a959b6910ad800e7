"""JSON objects that carry their own checksum, and are compressed if they are large.

Every bit of a sealed object is covered. The plain form ends with a member that holds the CRC-32C
of all bytes before it and whose own spelling is fixed. A zlib stream has padding bits that its own
checksum does not see, so the compressed form ends with the CRC-32C of the stream.
"""

from __future__ import annotations

import json
import math
import zlib
from typing import Any

from ckpipe.checksum import crc32c
from ckpipe.errors import (
    ChecksumMismatch,
    DuplicateName,
    InvalidManifest,
    OversizedMetadata,
    TruncatedObject,
)
from ckpipe.keys import Json

PLAIN_BYTES = 64 << 10
"""An object whose JSON is longer than this is compressed."""

_MARK = b',"crc32c":"'
_END = b'"}'
_TAIL_BYTES = len(_MARK) + 8 + len(_END)
_SUM_BYTES = 4
_LEVEL = 2
_ZLIB_FIRST_BYTE = 0x78


def seal(document: dict[str, Json]) -> bytes:
    """The stored form of a JSON object that is not empty.

    Raises:
        ValueError: If it holds a float that is not finite.
        RecursionError: If it is nested too deeply.
    """
    text = json.dumps(document, separators=(",", ":"), allow_nan=False, check_circular=False)
    body = text[:-1].encode("ascii")
    plain = b"%s%s%08x%s" % (body, _MARK, crc32c(body), _END)
    if len(plain) <= PLAIN_BYTES:
        return plain
    stream = zlib.compress(plain, _LEVEL)
    return stream + crc32c(stream).to_bytes(_SUM_BYTES, "big")


def unseal(data: bytes, max_bytes: int) -> dict[str, Json]:
    """The JSON object that was sealed, without its checksum.

    Args:
        data: What the store gave.
        max_bytes: The most bytes of JSON to accept, decompressed.

    Raises:
        TruncatedObject: If it is empty or ends before its checksum.
        ChecksumMismatch: If a bit differs from what was sealed.
        OversizedMetadata: If it is larger than ``max_bytes``.
        DuplicateName: If a JSON object in it has a name twice.
        InvalidManifest: If it is not a sealed JSON object.
    """
    plain = opened(data, max_bytes)
    if not plain.endswith(_END) or plain[-_TAIL_BYTES : len(_MARK) - _TAIL_BYTES] != _MARK:
        raise TruncatedObject("The object ends without its checksum")
    body = memoryview(plain)[:-_TAIL_BYTES]
    if plain[-_TAIL_BYTES:] != b"%s%08x%s" % (_MARK, crc32c(body), _END):
        raise ChecksumMismatch("The object is not what was written: its checksum differs")
    try:
        document = json.loads(
            plain, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite
        )
    except RecursionError:
        raise InvalidManifest("The object is nested too deeply") from None
    except ValueError as error:
        raise InvalidManifest(f"The object is not valid JSON: {error}") from None
    del document["crc32c"]
    return document  # type: ignore[no-any-return]


def opened(data: bytes, max_bytes: int) -> bytes:
    """The JSON text of a sealed object, decompressed; its own checksum is not looked at.

    Raises:
        TruncatedObject: If it is empty, or the stream ends early.
        ChecksumMismatch: If the compressed bytes differ from what was sealed.
        OversizedMetadata: If the text is longer than ``max_bytes``.
        InvalidManifest: If it is neither JSON nor a zlib stream.
    """
    if not data:
        raise TruncatedObject("The object is empty")
    if data[0] == _ZLIB_FIRST_BYTE:
        return _decompressed(memoryview(data), max_bytes)
    if data[:1] != b"{":
        raise InvalidManifest("The object is neither JSON nor compressed JSON")
    if len(data) > max_bytes:
        raise OversizedMetadata(f"The object has {len(data)} bytes of at most {max_bytes}")
    return bytes(data)


def _decompressed(data: memoryview, max_bytes: int) -> bytes:
    stream, total = data[:-_SUM_BYTES], bytes(data[-_SUM_BYTES:])
    if crc32c(stream) != int.from_bytes(total, "big"):
        raise ChecksumMismatch("The compressed object is not what was written, or is cut off")
    inflate = zlib.decompressobj()
    try:
        plain = inflate.decompress(stream, max_bytes + 1)
    except zlib.error as error:
        raise InvalidManifest(f"The object is no zlib stream: {error}") from None
    if len(plain) > max_bytes:
        raise OversizedMetadata(f"The object has more than {max_bytes} bytes once decompressed")
    if not inflate.eof or inflate.unused_data:
        raise TruncatedObject("The zlib stream does not end where the object does")
    return plain


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise DuplicateName("An object in the JSON has a name twice")
    return found


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value
