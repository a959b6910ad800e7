"""Checksums are those of the standard, and come out the same however the bytes are cut."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpipe.format.checksum import (
    ChunkSums,
    SumTable,
    combine,
    crc32c,
    crc32c_of_each,
)


def slow_crc32c(data: bytes) -> int:
    """Bit by bit, as RFC 3720 defines it."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"\0" * 32, 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
        (b"123456789", 0xE3069283),
    ],
)
def test_values_of_the_standard(data: bytes, expected: int) -> None:
    assert crc32c(data) == expected


@given(st.binary(max_size=300), st.integers(0, 300))
def test_pieces_make_the_whole(data: bytes, cut: int) -> None:
    first, second = data[:cut], data[cut:]
    assert crc32c(data) == slow_crc32c(data)
    assert crc32c(memoryview(second), crc32c(first)) == crc32c(data)
    assert combine(crc32c(first), crc32c(second), len(second)) == crc32c(data)


EDGES = st.sampled_from([0, 1, 7, 8, 9, 255, 256, 257, 50_003, 400_007])


PARTS = st.lists(st.tuples(EDGES, st.integers(0, 9)), max_size=9)


@given(st.lists(PARTS, max_size=4), st.integers(0, 99))
def test_many_parts_in_one_call_have_the_sums_that_each_has(
    drawn: list[list[tuple[int, int]]], seed: int
) -> None:
    blocks, expected = [], []
    for parts in drawn:
        begins, ends, at = [], [], 0
        for nbytes, gap in parts:
            begins.append(at + gap)
            ends.append(at := at + gap + nbytes)
        image = memoryview(random.Random(seed).randbytes(at))  # not a byte behind the last part
        blocks.append((image, begins, ends))
        expected.append([crc32c(image[lo:hi]) for lo, hi in zip(begins, ends, strict=True)])
    assert crc32c_of_each(blocks) == expected
    backwards = [(image, begins[::-1], ends[::-1]) for image, begins, ends in blocks[::-1]]
    assert crc32c_of_each(backwards) == [sums[::-1] for sums in expected[::-1]]


@pytest.mark.parametrize(
    ("begins", "ends"), [([0], [101]), ([-1], [4]), ([9], [8]), ([0, 1], [1]), ([101], [101])]
)
def test_ranges_outside_the_data_are_refused(begins: list[int], ends: list[int]) -> None:
    with pytest.raises(ValueError, match="ranges"):
        crc32c_of_each([(memoryview(bytes(100)), begins, ends)])


def test_missing_piece_is_noticed() -> None:
    table = SumTable([(1 << 20) + 8])
    sums = ChunkSums(table)
    sums.add_block(table.cuts([(0, 0, (1 << 20) + 4, 0)]), [1, 2])
    with pytest.raises(AssertionError, match="never checksummed"):
        sums.finished()


def test_sums_of_another_block_are_noticed() -> None:
    table = SumTable([2 << 20])
    with pytest.raises(AssertionError, match="other ranges"):
        ChunkSums(table).add_block(table.cuts([(0, 0, 2 << 20, 0)]), [1])
