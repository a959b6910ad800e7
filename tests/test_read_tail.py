"""Smaller reads at the end of a load: the same chunks, and no lane has much more left."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ckpipe.format.checksum import CHUNK_BYTES
from ckpipe.loads.load_planning import Piece, Read
from ckpipe.loads.read_tail import LEAST_BYTES, with_finer_tail

MIB = 1 << 20
READ_BYTES = 16 * MIB


@st.composite
def planned(draw: st.DrawFn) -> list[Read]:
    """Reads of chunks of any size, some with gaps between them."""
    reads = []
    offset = 4096
    for file in range(draw(st.integers(1, 12))):
        pieces: list[Piece] = []
        end = 0
        for number in range(draw(st.integers(1, 16))):
            at = end + draw(st.sampled_from([0, 0, 5]))
            end = at + draw(st.one_of(st.integers(1, 100), st.just(CHUNK_BYTES)))
            pieces.append(Piece(number, 0, end - at, at, number))
        reads.append(Read(file, offset + pieces[0].at, end, tuple(pieces)))
    return reads


def chunks(reads: list[Read]) -> list[tuple[int, int, int, int, int]]:
    """All chunks with their places in the files."""
    return [
        (read.file, piece.entry, piece.hi, read.offset + piece.at, piece.checksum)
        for read in reads
        for piece in read.pieces
    ]


@given(planned(), st.integers(1, 9))
def test_the_same_chunks_are_read_once_and_in_order(reads: list[Read], lanes: int) -> None:
    finer = list(with_finer_tail(reads, lanes))
    assert chunks(finer) == chunks(reads)
    assert sum(read.size for read in finer) <= sum(read.size for read in reads)
    for read in finer:
        assert all(piece.at >= 0 and piece.at + piece.hi <= read.size for piece in read.pieces)
    for one, other in pairwise(finer):
        assert one.file != other.file or one.offset + one.size <= other.offset


@given(st.integers(1, 600), st.integers(1, 9))
def test_a_read_is_no_more_than_twice_a_lanes_share_of_what_is_left(
    mebibytes: int, lanes: int
) -> None:
    finer = list(with_finer_tail(whole_chunks(mebibytes), lanes))
    left = sum(read.size for read in finer)
    for read in finer:
        # What is cut is cut evenly, by the share that a lane has where the cut read begins.
        assert read.size <= max(LEAST_BYTES, 2 * (left + READ_BYTES) // lanes + MIB)
        left -= read.size
    assert all(read.size >= LEAST_BYTES // 2 for read in finer[:-1])


def test_few_requests_are_added() -> None:
    assert len(list(with_finer_tail(whole_chunks(4096), 6))) <= 256 + 6
    assert len(list(with_finer_tail(whole_chunks(256), 6))) == 16 + 2
    assert len(list(with_finer_tail(whole_chunks(4), 6))) == 1
    assert [read.size // MIB for read in with_finer_tail(whole_chunks(20), 6)] == [8, 8, 4]


def whole_chunks(mebibytes: int) -> list[Read]:
    """Reads of 16 MiB, and a last one of what is left."""
    return [
        Read(
            0,
            at * MIB,
            (min(at + 16, mebibytes) - at) * MIB,
            tuple(
                Piece(0, n * MIB, (n + 1) * MIB, (n - at) * MIB, n)
                for n in range(at, min(at + 16, mebibytes))
            ),
        )
        for at in range(0, mebibytes, 16)
    ]
