"""A data file is checked from its blocks, however they are cut and whatever their order."""

from __future__ import annotations

import random

import torch
from bundles import manifest_of
from hypothesis import given
from hypothesis import strategies as st

from ckpipe.backend import UploadLimits
from ckpipe.catalog.copy import FileCheck, block_bytes_for
from ckpipe.format.checksum import CHUNK_BYTES
from ckpipe.format.entry_table import EntryTable

BUNDLE, IMAGES = manifest_of(
    {
        "large": torch.arange(2 * CHUNK_BYTES + 77, dtype=torch.uint8),
        "exact": torch.zeros(CHUNK_BYTES, dtype=torch.uint8),
        "small": torch.arange(5.0),
        "empty": torch.empty(0),
    }
)
DATA = EntryTable(BUNDLE)
DATA.join(0)
ENTRIES = [DATA.entry(number) for number in range(len(DATA.sizes))]
(IMAGE,) = IMAGES.values()


def fault_of(image: bytes, block_bytes: int, seed: int = 0) -> str | None:
    check = FileCheck(DATA, 0)
    assert check.size == len(image)
    offsets = list(range(0, len(image), block_bytes))
    random.Random(seed).shuffle(offsets)
    for offset in offsets:
        check.add(*check.sums_of(offset, memoryview(image)[offset : offset + block_bytes]))
    return check.fault()


@given(st.integers(1000, len(IMAGE) + 1), st.integers(0, 99))
def test_a_whole_file_has_no_fault(block_bytes: int, seed: int) -> None:
    assert fault_of(IMAGE, block_bytes, seed) is None


@given(st.integers(0, len(IMAGE) - 1), st.integers(0, 7), st.integers(100_000, 2_000_000))
def test_every_flipped_bit_is_a_fault_of_what_it_lies_in(
    at: int, bit: int, block_bytes: int
) -> None:
    image = bytearray(IMAGE)
    image[at] ^= 1 << bit
    fault = fault_of(bytes(image), block_bytes)
    begins = dict(zip((entry.name for entry in ENTRIES), DATA.begins, strict=True))
    within = [
        repr(entry.name)
        for entry in ENTRIES
        if begins[entry.name] <= at < begins[entry.name] + entry.nbytes
    ]
    assert fault == (within[0] if within else "its header")


@given(
    st.integers(1, 1 << 45),
    st.sampled_from([4096, 16 << 20]),
    st.integers(1, 5 << 20),
    st.sampled_from([None, 1, 10_000]),
)
def test_blocks_are_what_the_store_asks_for(
    size: int, wanted: int, least: int, most: int | None
) -> None:
    found = block_bytes_for(size, wanted, UploadLimits(least, most))
    assert found >= max(wanted, least)
    assert most is None or -(-size // found) <= most
