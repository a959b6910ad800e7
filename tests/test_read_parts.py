"""Reads cut where parts meet, and smaller at the end: the same chunks, each of them once."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from ckpipe.format.checksum import CHUNK_BYTES
from ckpipe.loading.read_plan import LEAST_BYTES, Piece, Read, in_parts

MIB = 1 << 20
PART = 16 * MIB


@st.composite
def planned(draw: st.DrawFn) -> list[Read]:
    """Reads of chunks of any size, some with gaps between chunks, and some between reads."""
    reads: list[Read] = []
    for file in range(draw(st.integers(1, 3))):
        at, number = 4096 + draw(st.sampled_from([0, 5, PART - 4096])), 0
        for _ in range(draw(st.integers(1, 5))):
            at += draw(st.sampled_from([0, 0, 0, 7 * MIB]))
            begin = at
            pieces: list[Piece] = []
            for _ in range(draw(st.integers(1, 15))):
                at += draw(st.sampled_from([0, 0, 5])) if pieces else 0
                size = draw(st.one_of(st.integers(1, 100), st.just(CHUNK_BYTES)))
                pieces.append(Piece(number, 0, size, at - begin, number))
                number += 1
                at += size
            reads.append(Read(file, begin, at - begin, tuple(pieces)))
    return reads


def brought(reads: list[Read]) -> dict[tuple[int, int], list[tuple[int, int, int]]]:
    """Of every chunk by file and checksum: which bytes of it come, and from where in the file."""
    found: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for read in reads:
        for piece in read.pieces:
            span = (0, piece.hi - piece.lo, read.offset + piece.at)
            found[read.file, piece.checksum].append(span)
        for part in read.fragments:
            span = (part.begin, part.begin + part.size, read.offset + part.at)
            found[read.file, part.piece.checksum].append(span)
    return found


@given(planned(), st.integers(1, 9))
def test_every_byte_of_every_chunk_comes_once_and_from_its_place(
    reads: list[Read], lanes: int
) -> None:
    cut = list(in_parts(reads, PART, lanes))
    before, after = brought(reads), brought(cut)
    assert before.keys() == after.keys()
    for chunk, [(_, size, at)] in before.items():
        spans = sorted(after[chunk])
        assert spans[0][0] == 0
        assert spans[-1][1] == size
        assert all(one[1] == other[0] for one, other in pairwise(spans))
        assert all(place == at + begin for begin, _, place in spans)
    assert sum(read.size for read in cut) <= sum(read.size for read in reads)


@given(planned(), st.integers(1, 9), st.sampled_from([PART, PART - 4 * MIB]))
def test_a_read_fits_a_part_and_what_it_brings_lies_in_it(
    reads: list[Read], lanes: int, part_bytes: int
) -> None:
    cut = list(in_parts(reads, part_bytes, lanes))
    for read in cut:
        assert 0 < read.size <= PART
        for piece in read.pieces:
            assert piece.at >= 0
            assert piece.at + piece.hi - piece.lo <= read.size
        for part in read.fragments:
            assert part.size > 0
            assert part.at >= 0
            assert part.at + part.size <= read.size
    for one, other in pairwise(cut):
        assert one.file != other.file or one.offset + one.size <= other.offset


@example(15, 3 * MIB, 3)  # fits a part, lies across an edge, and is cut for its lanes
@given(st.integers(2, 600), st.sampled_from([0, 4096, 3 * MIB]), st.integers(1, 9))
def test_no_read_of_what_lies_together_crosses_an_edge(
    mebibytes: int, shift: int, lanes: int
) -> None:
    cut = list(in_parts(whole_chunks(mebibytes, shift), PART, lanes))
    end = shift + mebibytes * MIB
    for read in cut:
        last = read.offset + read.size - 1
        across = read.offset // PART != last // PART
        assert not across or len(cut) == 1 or end - last // PART * PART <= CHUNK_BYTES


@given(st.integers(1, 600), st.integers(1, 9))
def test_a_read_is_no_more_than_twice_a_lanes_share_of_what_is_left(
    mebibytes: int, lanes: int
) -> None:
    cut = list(in_parts(whole_chunks(mebibytes, 4096), PART, lanes))
    left = sum(read.size for read in cut)
    for read in cut:
        # What is cut is cut evenly, by the share that a lane has where the cut part begins, and
        # at whole mebibytes.
        assert read.size <= max(LEAST_BYTES, 2 * (left + PART) // lanes) + MIB
        left -= read.size
    assert all(read.size >= LEAST_BYTES // 2 - MIB for read in cut[:-1])


def test_few_requests_are_added() -> None:
    assert len(list(in_parts(whole_chunks(4096, 4096), PART, 6))) <= 256 + 6
    assert len(list(in_parts(whole_chunks(256, 4096), PART, 6))) <= 16 + 3
    assert len(list(in_parts(whole_chunks(4, 4096), PART, 6))) == 1
    sizes = [read.size // MIB for read in in_parts(whole_chunks(20, 0), PART, 6)]
    assert sizes == [8, 8, 4]


@given(st.integers(2, 40), st.sampled_from([0, 5, 4096, MIB, 3 * MIB]), st.integers(2, 5))
def test_small_parts_have_edges_too(mebibytes: int, shift: int, step: int) -> None:
    reads = whole_chunks(mebibytes, shift, step)
    cut = list(in_parts(reads, step * MIB, 4))
    assert all(read.size <= step * MIB for read in cut)
    assert len(cut) <= len(reads) + 2


def test_parts_that_hold_hardly_a_chunk_are_no_parts() -> None:
    reads = whole_chunks(64, 4096, 1)
    assert list(in_parts(reads, 2 * MIB - 1, 6)) == reads


def whole_chunks(mebibytes: int, shift: int, step: int = 16) -> list[Read]:
    """Reads of so many MiB from a place in the file on, and a last one of what is left."""
    return [
        Read(
            0,
            shift + at * MIB,
            (min(at + step, mebibytes) - at) * MIB,
            tuple(
                Piece(0, n * MIB, (n + 1) * MIB, (n - at) * MIB, n)
                for n in range(at, min(at + step, mebibytes))
            ),
        )
        for at in range(0, mebibytes, step)
    ]
