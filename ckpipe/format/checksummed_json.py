"""JSON objects that carry their own checksum, and are compressed if they are large.

The checksum covers every bit of an encoded object. The plain form ends with a member that holds the
CRC-32C of all bytes before it; the member's own spelling is fixed. A zlib stream has padding bits
that its own checksum does not cover, so the compressed form ends with the CRC-32C of the stream.

Deflate packs up to a thousand to one, and a JSON value of two characters takes 64 bytes once
parsed. So a reader counts text and values while it unpacks them, before it keeps any, and bounds
both by the stored size. If an object packs better, its writer pads the stream with empty deflate
blocks.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from json import JSONDecodeError
from typing import Any

from ckpipe.errors import (
    ChecksumMismatch,
    DuplicateName,
    InvalidManifest,
    OversizedMetadata,
    TruncatedObject,
)
from ckpipe.format.checksum import crc32c
from ckpipe.format.labels import Json, canonical

PLAIN_BYTES = 64 << 10
"""Bytes of JSON above which an object is compressed."""

_MARK = b',"crc32c":"'
_END = b'"}'
_TAIL_BYTES = len(_MARK) + 8 + len(_END)
_SUM_BYTES = 4
_LEVEL = 2
_ZLIB_METHOD = 0x78
"""The first byte of a zlib stream: deflate with a window of 32 KiB, by RFC 1950."""

TEXT_BYTES_PER_BYTE = 64
"""Bytes of text that one stored byte may unpack to; indexes of models unpack to 6 to 10."""

SIGNS_PER_BYTE = 16
"""Signs that one stored byte may unpack to; indexes of models unpack to 0.8 to 2.5."""

ALWAYS_TEXT_BYTES = 8 << 20
ALWAYS_SIGNS = 1 << 19
"""Bytes of text, and signs, that an object of any stored size may unpack to."""

_SIGNS = b",:[{"
"""Signs of which one precedes every value but the first; they count the values."""

_EMPTY_BLOCK = b"\x00\x00\x00\xff\xff"
"""A deflate block of no bytes, in the form that follows a full flush."""

_BETWEEN = re.compile(r"[ \t\n\r]*([]{}[,:])[ \t\n\r]*")
"""A sign between the values of an object or array, in white space."""

_SLICE_BYTES = 4 << 10
"""Stored bytes that are unpacked at once, to at most 4 MiB."""


def _signs(text: bytes) -> int:
    return len(text) - len(text.translate(None, _SIGNS))


def encode_json(document: dict[str, Any], max_bytes: int | None = None) -> bytes:
    """Encode a JSON object that is not empty in its stored form.

    Args:
        document: The object. A member may be an iterator over the JSON texts of an array's
            elements, which are then never in memory together.
        max_bytes: Bytes of the longest JSON that may be made; None for any.

    Raises:
        OversizedMetadata: If it is longer.
        ValueError: If it holds a float that is not finite.
        RecursionError: If it is nested too deeply.
    """
    size, signs, stored, stream = 0, 0, list[bytes](), None
    for piece in _pieces(document):
        size += len(piece)
        signs += _signs(piece)
        if max_bytes is not None and size > max_bytes:
            raise OversizedMetadata(
                f"The metadata of the checkpoint has more than {max_bytes} bytes",
                hint="Save fewer tensors, or from fewer ranks",
            )
        if stream is None and size > PLAIN_BYTES:
            stream = zlib.compressobj(_LEVEL)
        stored.append(piece if stream is None else stream.compress(piece))
    if stream is None:
        return b"".join(stored)
    stored.append(stream.flush(zlib.Z_FULL_FLUSH))
    lacking = _least_stored(size, signs) - sum(map(len, stored))
    padding = _EMPTY_BLOCK * -(-lacking // len(_EMPTY_BLOCK))
    packed = b"".join([*stored, padding, stream.flush()])
    return packed + crc32c(packed).to_bytes(_SUM_BYTES, "big")


def _pieces(document: dict[str, Any]) -> Iterator[bytes]:
    """Yield an object with its checksum, in pieces of more than ``PLAIN_BYTES`` but the last."""
    crc, text = 0, ""
    for each in _texts(document):
        text += each
        if len(text) > PLAIN_BYTES:
            piece, text = text.encode("ascii"), ""
            crc = crc32c(piece, crc)
            yield piece
    piece = text.encode("ascii")
    yield piece + b"%s%08x%s" % (_MARK, crc32c(piece, crc), _END)


def _texts(document: dict[str, Any]) -> Iterator[str]:
    before = "{"
    for name, value in document.items():
        yield f"{before}{canonical(name)}:"
        before = ","
        if not isinstance(value, Iterator):
            yield canonical(value)
            continue
        yield "["
        for number, element in enumerate(value):
            yield "," if number else ""
            yield element
        yield "]"


def _least_stored(size: int, signs: int) -> int:
    """Return the least size of a stream that may hold a text of this size with so many signs."""
    for_text = -(-size // TEXT_BYTES_PER_BYTE) if size > ALWAYS_TEXT_BYTES else 0
    for_signs = -(-signs // SIGNS_PER_BYTE) if signs > ALWAYS_SIGNS else 0
    return max(for_text, for_signs)


Element = Callable[[Json, str], Any]
"""A function that converts an element of an array, by its value and its text, once it is read."""


def decode_json(
    data: bytes, max_bytes: int, elements: Mapping[str, Element] | None = None
) -> dict[str, Any]:
    """Decode and check a JSON object; the result lacks its checksum.

    Args:
        data: The stored form.
        max_bytes: The most bytes of JSON to accept, decompressed.
        elements: For members that are arrays, functions that convert their elements. They are
            called in the order of the text, one by one, so that the elements are never in memory
            as JSON together.

    Raises:
        TruncatedObject: If it is empty or ends before its checksum.
        ChecksumMismatch: If a bit differs from the encoded object.
        OversizedMetadata: If it is larger than ``max_bytes`` or than its stored size allows.
        DuplicateName: If a JSON object in it has a name twice.
        InvalidManifest: If it is not an encoded JSON object.
    """
    plain = json_text(data, max_bytes)
    if not plain.endswith(_END) or plain[-_TAIL_BYTES : len(_MARK) - _TAIL_BYTES] != _MARK:
        raise TruncatedObject("The object is cut off: it ends without its checksum")
    if not _has_right_sum(plain):
        raise ChecksumMismatch("The object is not what was written: its checksum differs")
    try:
        text = plain.decode("ascii")
        del plain
        document = _parsed(text, elements or {})
    except RecursionError:
        raise InvalidManifest(
            "The object is nested too deeply",
            hint="If the state was saved under a higher sys.setrecursionlimit, load it under that",
        ) from None
    except ValueError as error:
        raise InvalidManifest(f"The object is not valid JSON: {error}") from None
    del document["crc32c"]
    return document


def _has_right_sum(plain: bytes) -> bool:
    body = memoryview(plain)[:-_TAIL_BYTES]
    return plain[-_TAIL_BYTES:] == b"%s%08x%s" % (_MARK, crc32c(body), _END)


_VERSION = re.compile(rb'\{"format":"ckpipe","version":(\d{1,9})\b')


def says_newer(data: bytes, newest: int) -> bool:
    """Tell whether a damaged object was written in a newer format, with checksums of its own.

    It is damage if a bit of the version has flipped: with an older one its checksum is right. The
    text of a stream counts if it passes zlib's own check.

    Args:
        data: The stored form.
        newest: The newest version that is known.
    """
    if data[:1] != b"{":
        inflate = zlib.decompressobj()
        try:
            data = inflate.decompress(data, max(ALWAYS_TEXT_BYTES, len(data) * TEXT_BYTES_PER_BYTE))
        except zlib.error:
            return False
        if not inflate.eof:
            return False
    found = _VERSION.match(data)
    if found is None or int(found[1]) <= newest:
        return False
    begin, end = found.span(1)
    olds = (b"%s%d%s" % (data[:begin], n, data[end:]) for n in range(1, newest + 1))
    return not any(map(_has_right_sum, olds))


def _parsed(text: str, elements: Mapping[str, Element]) -> dict[str, Any]:
    """Parse an object member by member; the text is known to end with its checksum."""
    found: dict[str, Any] = {}
    _, at = _expect(text, 0, "{")
    sign = ","
    while sign == ",":
        name, at = _DECODER.raw_decode(text, at)
        if type(name) is not str:
            raise JSONDecodeError("Expecting a name", text, at)
        if name in found:
            raise DuplicateName("An object in the JSON has a name twice")
        _, at = _expect(text, at, ":")
        if name in elements and text.startswith("[", at):
            found[name], at = _array(text, at, elements[name])
        else:
            found[name], at = _DECODER.raw_decode(text, at)
        sign, at = _expect(text, at, ",}")
    if at != len(text):
        raise JSONDecodeError("Extra data", text, at)
    return found


def _array(text: str, at: int, element: Element) -> tuple[list[Any], int]:
    found: list[Any] = []
    sign, at = _expect(text, at, "[")
    if text.startswith("]", at):
        sign, at = _expect(text, at, "]")
    while sign != "]":
        begin = at
        value, at = _DECODER.raw_decode(text, begin)
        found.append(element(value, text[begin:at]))
        sign, at = _expect(text, at, ",]")
    return found, at


def _expect(text: str, at: int, signs: str) -> tuple[str, int]:
    """Return the sign that comes next, one of ``signs``, and the position of what follows it."""
    match = _BETWEEN.match(text, at)
    if match is None or match[1] not in signs:
        raise JSONDecodeError(f"Expecting {' or '.join(map(repr, signs))}", text, at)
    return match[1], match.end()


def json_text(data: bytes, max_bytes: int) -> bytes:
    """Decompress the JSON text of an encoded object, without a check of the text's own checksum.

    Raises:
        TruncatedObject: If it is empty, or the stream ends early.
        ChecksumMismatch: If the compressed bytes differ from the encoded ones.
        OversizedMetadata: If the text is longer than ``max_bytes``, or longer than the stored size
            allows.
        InvalidManifest: If it is neither JSON nor a zlib stream.
    """
    if not data:
        raise TruncatedObject("The object is empty")
    if data[0] == _ZLIB_METHOD:
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
    inflate, size, signs = zlib.decompressobj(), 0, 0
    try:
        for at in range(0, len(stream), _SLICE_BYTES):
            text = inflate.decompress(stream[at : at + _SLICE_BYTES])
            size += len(text)
            signs += _signs(text)
            _check_amount(size, signs, len(stream), max_bytes)
            if inflate.unused_data:
                break
        if not inflate.eof or inflate.unused_data:
            raise TruncatedObject("The zlib stream does not end where the object does")
        return zlib.decompress(stream, bufsize=size)
    except zlib.error as error:
        raise InvalidManifest(f"The object is no zlib stream: {error}") from None


def _check_amount(size: int, signs: int, stored: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise OversizedMetadata(f"The object has more than {max_bytes} bytes once decompressed")
    if _least_stored(size, signs) > stored:
        raise OversizedMetadata(
            f"The object has {stored} bytes and unpacks to more text or values than ckpipe writes "
            "in an object of this size"
        )


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


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
