"""Copy and checksum many ranges of host memory in one call, which releases the GIL once.

With a call for each range, a gibibyte acquires the GIL a thousand times. Beside a Python loop, each
acquisition waits for the switch interval. So C does the work (``_native.c``, compiled when ckpipe
is installed). Where the library is missing, or with ``CKPIPE_NATIVE=0``, ``memmove`` and the
CRC-32C of the AWS common runtime do the same, range by range. The library also has a handler of
signals, for the workers of data loaders, which has no such substitute.

Ranges are given by addresses and sizes, in arrays of one length. The caller keeps their memory
alive. Targets overlap neither sources nor each other.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import sys
from array import array
from collections import deque
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger("ckpipe")

_PATH = Path(__file__).with_name("_native.so")
_PARAMETERS = {
    "copy_each": 3, "crc32c_each": 3, "copy_crc32c_each": 4, "verify_copy_each": 4,
    "count_nan_each": 4,
}  # fmt: skip
_TESTED, _CRC_OF_TESTED = bytes(range(256)) * 5, 0x23B62C98


def open_library(path: Path = _PATH) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Open the compiled library twice: calls of the first release the GIL, of the second keep it.

    Raises:
        OSError: If it is missing, is for another machine, was compiled from another source than
            the one beside it, or computes a wrong result.
    """
    if os.environ.get("CKPIPE_NATIVE") == "0":
        raise OSError("CKPIPE_NATIVE is 0")
    free, held = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
    source = path.with_suffix(".c")
    if source.exists():
        compiled = (ctypes.c_char * 64).in_dll(free, "source_hash").raw.decode()
        if compiled != hashlib.sha256(source.read_bytes()).hexdigest():
            raise OSError(
                f"{path} was not compiled from {source}; python hatch_build.py compiles it again"
            )
    for name, count in _PARAMETERS.items():
        for library in (free, held):
            function = getattr(library, name)
            function.argtypes = [ctypes.c_void_p] * count + [ctypes.c_size_t]
            function.restype = ctypes.c_size_t if name == "verify_copy_each" else None
    free.survive_signals.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    found, tested = ctypes.c_uint32(), ctypes.c_char_p(_TESTED)
    size = ctypes.c_size_t(len(_TESTED))
    free.crc32c_each(ctypes.byref(tested), ctypes.byref(size), ctypes.byref(found), 1)
    if found.value != _CRC_OF_TESTED:
        raise OSError(f"{path} computes a wrong CRC-32C")
    return free, held


_free: ctypes.CDLL | None
_held: ctypes.CDLL | None
try:
    _free, _held = open_library()
except (OSError, ValueError, AttributeError) as error:  # the last two: it lacks a symbol
    logger.debug(
        "Python copies and computes checksums range by range, without the compiled library: %s",
        error,
    )
    _free = _held = None

_move_held, _move_free = ctypes.PyDLL(None).memmove, ctypes.CDLL(None).memmove
for _move in (_move_held, _move_free):
    _move.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    _move.restype = None

_LEAST_FREE = 64 << 10
"""Bytes below which a copy keeps the GIL: it takes less time than to acquire the GIL again."""

_MEMORY = memoryview((ctypes.c_char * sys.maxsize).from_address(0))
"""All of memory, so that addresses are indices."""


def address_of(data: memoryview) -> int:
    """Return the address of a flat buffer of at least one byte."""
    # Imported late, since it takes a while and most commands need none.
    import numpy as np

    address: int = np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0]
    return address


def copy_bytes(target: int, source: int, nbytes: int) -> None:
    """Copy bytes from address to address; only a large copy releases the GIL."""
    (_move_held if nbytes < _LEAST_FREE else _move_free)(target, source, nbytes)


def copy_each(
    targets: array[int], sources: array[int], sizes: array[int], *, release_gil: bool
) -> None:
    """Copy ranges with non-temporal stores, past the processor's cache.

    Args:
        targets: The address to which each range is copied.
        sources: The address of each range.
        sizes: The bytes of each range.
        release_gil: Whether other threads may run meanwhile. To copy a few bytes takes less time
            than to acquire the GIL again.

    Raises:
        ValueError: If the arrays differ in length.
    """
    _check_lengths(targets, sources, sizes)
    library = _free if release_gil else _held
    if library is not None:
        library.copy_each(*map(_items, (targets, sources, sizes)), len(sizes))
    else:
        copy = copy_bytes if release_gil else _move_held
        deque(map(copy, targets, sources, sizes), maxlen=0)


def crc32c_each(sources: array[int], sizes: array[int]) -> array[int]:
    """Compute the CRC-32C of each range.

    Raises:
        ValueError: If the arrays differ in length.
    """
    _check_lengths(sources, sizes)
    sums = array("I", bytes(4 * len(sizes)))
    if _free is not None:
        _free.crc32c_each(*map(_items, (sources, sizes, sums)), len(sizes))
        return sums
    return array("I", map(_crc32c, sources, sizes))


def copy_crc32c_each(targets: array[int], sources: array[int], sizes: array[int]) -> array[int]:
    """Copy ranges past the processor's cache, and compute the CRC-32C of the written bytes.

    Raises:
        ValueError: If the arrays differ in length.
    """
    _check_lengths(targets, sources, sizes)
    if _free is not None:
        sums = array("I", bytes(4 * len(sizes)))
        _free.copy_crc32c_each(*map(_items, (targets, sources, sizes, sums)), len(sizes))
        return sums
    copy_each(targets, sources, sizes, release_gil=True)
    return crc32c_each(targets, sizes)


def verify_copy_each(
    targets: array[int], sources: array[int], sizes: array[int], sums: array[int]
) -> int:
    """Verify ranges and copy each, up to the first damaged one.

    Args:
        targets: The address to which each range is copied; 0 for one that is only verified.
        sources: The address of each range.
        sizes: The bytes of each range.
        sums: The expected CRC-32C of each range, as unsigned ints of 32 bits.

    Returns:
        The number of the first damaged range; the number of ranges if none is.

    Raises:
        ValueError: If the arrays differ in length.
    """
    _check_lengths(targets, sources, sizes, sums)
    if _free is not None:
        done: int = _free.verify_copy_each(
            *map(_items, (targets, sources, sizes, sums)), len(sizes)
        )
        return done
    for number, piece in enumerate(zip(targets, sources, sizes, sums, strict=True)):
        target, source, nbytes, expected = piece
        if _crc32c(source, nbytes) != expected:
            return number
        if target:
            copy_bytes(target, source, nbytes)
    return len(sizes)


NAN_BITS = {
    "F64": (8, 0x7FF0000000000000), "F32": (4, 0x7F800000), "BF16": (2, 0x7F80),
    "F16": (2, 0x7C00), "F8_E4M3": (1, 0x7E), "F8_E5M2": (1, 0x7C),
}  # fmt: skip
"""The dtypes with NaN, by safetensors name, in the order of ``_native.c``: the bytes of an element,
and the bits of the greatest that is no NaN, without its sign."""


def count_nan_each(sources: array[int], sizes: array[int], dtypes: array[int]) -> array[int]:
    """Count the NaN in each range; infinities do not count.

    Args:
        sources: The address of each range.
        sizes: The bytes of each range; those behind the last whole element do not count.
        dtypes: The dtype of each range, by its place in ``NAN_BITS``.

    Raises:
        ValueError: If the arrays differ in length.
    """
    _check_lengths(sources, sizes, dtypes)
    found = array("q", bytes(8 * len(sizes)))
    if _free is not None:
        _free.count_nan_each(*map(_items, (sources, sizes, dtypes, found)), len(sizes))
        return found
    import numpy as np

    bits = list(NAN_BITS.values())
    for number, (source, nbytes, dtype) in enumerate(zip(sources, sizes, dtypes, strict=True)):
        width, most = bits[dtype]
        elements = np.frombuffer(_MEMORY[source : source + nbytes // width * width], f"u{width}")
        found[number] = int(np.count_nonzero(elements & ((1 << 8 * width - 1) - 1) > most))
    return found


def survive_signals(numbers: Iterable[int], sender: int) -> bool:
    """Ignore signals in this process, except SIGTERM from one sender, which ends it at once.

    Programs that this process starts get the default actions.

    Args:
        numbers: The signals.
        sender: The id of the process that may end this one.

    Returns:
        False if the compiled library is missing; nothing is changed then. Python's own handlers
        are not told who sent a signal.
    """
    if _free is None:
        return False
    signals = array("i", numbers)
    done: int = _free.survive_signals(_items(signals), len(signals), sender)
    return done == 0


def _check_lengths(*columns: array[int]) -> None:
    if len(set(map(len, columns))) > 1:
        raise ValueError("arrays of ranges differ in length")


def _items(column: array[int]) -> int:
    return column.buffer_info()[0]


def _crc32c(address: int, nbytes: int) -> int:
    # Imported late, since it takes as long as importing the rest of ckpipe.
    from awscrt.checksums import crc32c

    value: int = crc32c(_MEMORY[address : address + nbytes])
    return value
