"""The plan of a load's reads: complete, never twice, on chunk boundaries, and not much more."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product

from hypothesis import given
from hypothesis import strategies as st

from ckpipe.format.boxes import Box, box_shape, box_volume, flat_ranges, intersection, moved
from ckpipe.format.checksum import CHUNK_BYTES, chunk_count
from ckpipe.format.manifest import Entry, FileRow, Layout, RankManifest
from ckpipe.loading.chunks import Piece
from ckpipe.loading.entries import Need, PartData
from ckpipe.loading.read_plan import ALLOWANCE_BYTES, Read, ReadLimits, batched, plan_reads

HEADER_BYTES = 4096


def part_data(sizes: list[list[int]]) -> PartData:
    """Files that hold entries of these sizes; a chunk's checksum is its number."""
    entries: list[Entry] = []
    files: list[FileRow] = []
    for number, file in enumerate(sizes):
        offset = 0
        for size in file:
            entries.append(Entry(str(len(entries)), "U8", (size,), number, offset, size))
            offset += size
        files.append(FileRow(f"rank-00000.{number}", HEADER_BYTES + offset, HEADER_BYTES, 0))
    sums = tuple(range(sum(chunk_count(row.nbytes) for row in entries)))
    part = RankManifest(0, 0, 0, (), tuple(files), sums, "", "", {})
    return PartData(part, Layout(tuple(entries), ()))


entry_sizes = st.one_of(
    st.integers(0, 40),
    st.integers(1, 5 * CHUNK_BYTES),
    st.integers(1, 4).map(lambda n: n * CHUNK_BYTES),
    st.integers(20 * CHUNK_BYTES, 30 * CHUNK_BYTES),
)
limits = st.builds(
    ReadLimits,
    st.sampled_from([64 << 10, CHUNK_BYTES + 8192, 4 << 20, 16 << 20]),
    st.sampled_from([1, 512, 4096]),
)


@dataclass(frozen=True)
class Case:
    data: PartData
    needs: list[Need]
    limits: ReadLimits


@st.composite
def cases(draw: st.DrawFn) -> Case:
    data = part_data(draw(st.lists(st.lists(entry_sizes, max_size=6), min_size=1, max_size=2)))
    needs = []
    for number, row in enumerate(data.entries):
        for _ in range(draw(st.integers(0, 2))):
            if draw(st.booleans()):
                needs.append(Need(number, 0, row.nbytes))
            else:
                lo = draw(st.integers(0, row.nbytes))
                needs.append(Need(number, lo, draw(st.integers(lo, row.nbytes))))
    return Case(data, draw(st.permutations(needs)), draw(limits))


def absolute(data: PartData, need: Need) -> tuple[int, int, int]:
    begin = data.begins[need.entry]
    return data.entries[need.entry].file, begin + need.lo, begin + need.hi


def contiguous(ranges: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Ranges of files merged where they touch."""
    merged: list[tuple[int, int, int]] = []
    for file, lo, hi in sorted(each for each in ranges if each[1] < each[2]):
        if merged and merged[-1][0] == file and lo <= merged[-1][2]:
            merged[-1] = (file, merged[-1][1], max(hi, merged[-1][2]))
        else:
            merged.append((file, lo, hi))
    return merged


@given(cases())
def test_pieces_are_whole_chunks_that_cover_the_needs_once(case: Case) -> None:
    data = case.data
    seen: set[tuple[int, int]] = set()
    for read in plan_reads(data, case.needs, case.limits):
        for piece in read.pieces:
            row = data.entries[piece.entry]
            assert piece.lo % CHUNK_BYTES == 0
            assert piece.hi == min(piece.lo + CHUNK_BYTES, row.nbytes)
            assert piece.checksum == data.first_sums[piece.entry] + piece.lo // CHUNK_BYTES
            assert read.offset + piece.at == data.begins[piece.entry] + piece.lo
            assert piece.at >= 0
            assert piece.at + piece.hi - piece.lo <= read.size
            assert (piece.entry, piece.lo) not in seen
            seen.add((piece.entry, piece.lo))
    for need in case.needs:
        if need.lo < need.hi:
            first, last = need.lo // CHUNK_BYTES, (need.hi - 1) // CHUNK_BYTES
            assert all((need.entry, n * CHUNK_BYTES) in seen for n in range(first, last + 1))


@given(cases())
def test_reads_stay_in_their_file_and_their_buffer(case: Case) -> None:
    for read in plan_reads(case.data, case.needs, case.limits):
        assert read.offset >= 0
        assert read.offset + read.size <= case.data.files[read.file].size
        assert read.size <= case.limits.buffer_bytes


@given(cases())
def test_little_is_read_that_nobody_needs(case: Case) -> None:
    needs = contiguous([absolute(case.data, need) for need in case.needs])
    allowed = sum(hi - lo + max(ALLOWANCE_BYTES, (hi - lo) // 10) for _, lo, hi in needs)
    assert sum(read.size for read in plan_reads(case.data, case.needs, case.limits)) <= allowed


@given(cases())
def test_reads_are_in_order_and_overlap_only_within_an_aligned_page(case: Case) -> None:
    reads = plan_reads(case.data, case.needs, case.limits)
    for one, other in pairwise(reads):
        assert (one.file, one.offset) <= (other.file, other.offset)
        if one.file == other.file:
            assert other.offset > one.offset + one.size - 2 * case.limits.alignment


@st.composite
def resharded(draw: st.DrawFn) -> tuple[PartData, list[Piece], ReadLimits]:
    """A matrix that was saved in a grid of blocks, and those parts of them that a block needs."""
    rows, columns = draw(st.integers(1, 30)), draw(st.integers(1, 3 << 20))
    shape = (rows, columns)
    edges = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
    grid = [pairwise(each) for each in edges]
    boxes: list[Box] = [
        ((top, left), (bottom, right)) for (top, bottom), (left, right) in product(*grid)
    ]
    data = part_data([[box_volume(box) for box in boxes]])
    target = tuple(sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape)
    wanted: Box = (target[0][0], target[1][0]), (target[0][1], target[1][1])
    pieces = []
    for number, box in enumerate(boxes):
        common = intersection(box, wanted)
        if common is not None:
            inside = moved(common, box[0])
            size = box_volume(box)
            pieces.append(Piece(number, 0, size, None, box_shape(box), inside, None, False))
    return data, pieces, draw(limits)


@given(resharded())
def test_resharding_reads_little_more_than_it_needs_and_nothing_twice(
    case: tuple[PartData, list[Piece], ReadLimits],
) -> None:
    data, pieces, limit = case
    # What is needed byte for byte, without what lies between rows that are read together.
    exact = [
        Need(piece.entry, lo, hi)
        for piece in pieces
        if piece.inside is not None
        for lo, hi in flat_ranges(piece.shape, piece.inside, 0)
    ]
    runs = contiguous([absolute(data, need) for need in exact])
    allowed = sum(hi - lo + max(ALLOWANCE_BYTES, (hi - lo) // 10) for _, lo, hi in runs)
    reads = plan_reads(data, [need for piece in pieces for need in piece.needs(1)], limit)
    assert sum(read.size for read in reads) <= allowed
    chunks = [(piece.entry, piece.lo) for read in reads for piece in read.pieces]
    assert len(chunks) == len(set(chunks))
    known = set(chunks)
    for need in exact:
        first, last = need.lo // CHUNK_BYTES, (need.hi - 1) // CHUNK_BYTES
        assert all((need.entry, n * CHUNK_BYTES) in known for n in range(first, last + 1))


def test_large_reads_are_aligned() -> None:
    data = part_data([[700, 64 << 20]])
    reads = plan_reads(data, data.all_needs(), ReadLimits(16 << 20, 4096))
    assert all(read.offset % 4096 == 0 for read in reads)
    assert all(read.size % 4096 == 0 for read in reads[:-1])
    assert len(reads) == 5


def test_a_small_gap_is_read_over_and_a_large_one_is_not() -> None:
    near, far = part_data([[100, 1000, 100]]), part_data([[100, 64 << 20, 100]])
    needs = [Need(0, 0, 100), Need(2, 0, 100)]
    assert len(plan_reads(near, needs, ReadLimits(16 << 20, 4096))) == 1
    assert len(plan_reads(far, needs, ReadLimits(16 << 20, 4096))) == 2


def test_gaps_never_overdraw_the_allowance() -> None:
    # Both needs cross a chunk's end by one byte on either side, which costs nearly all of it.
    size = 2 * CHUNK_BYTES
    data = part_data([[size, 200 << 10, size]])
    needs = [Need(n, CHUNK_BYTES - 1, CHUNK_BYTES + 1) for n in (0, 2)]
    reads = plan_reads(data, needs, ReadLimits(16 << 20, 4096))
    assert sum(read.size for read in reads) <= 4 + 2 * ALLOWANCE_BYTES


def test_alignment_never_overdraws_the_allowance() -> None:
    data = part_data([[1, 2 * CHUNK_BYTES, 5000]])
    (read,) = plan_reads(
        data, [Need(1, CHUNK_BYTES - 1, CHUNK_BYTES + 1)], ReadLimits(4 << 20, 4096)
    )
    assert read.size <= 2 + ALLOWANCE_BYTES


def test_twenty_thousand_tiny_entries_are_one_read() -> None:
    data = part_data([[32] * 20_000])
    (read,) = plan_reads(data, data.all_needs(), ReadLimits(16 << 20, 4096))
    assert len(read.pieces) == 20_000


@given(cases(), st.integers(1, 20 << 20))
def test_batches_hold_all_reads_in_order_without_gaps(case: Case, nbytes: int) -> None:
    reads = plan_reads(case.data, case.needs, case.limits)
    batches = list(batched(reads, nbytes))
    assert [read for batch in batches for read in batch] == reads
    for batch in batches:
        assert len({read.file for read in batch}) == 1
        assert len(batch) == 1 or _end(batch) - batch[0].offset <= nbytes
        for one, other in pairwise(batch):
            assert other.offset <= one.offset + one.size


@given(cases())
def test_batches_without_a_bound_end_only_at_gaps(case: Case) -> None:
    reads = plan_reads(case.data, case.needs, case.limits)
    batches = list(batched(reads))
    assert [read for batch in batches for read in batch] == reads
    for one, other in pairwise(batches):
        assert other[0].file != one[-1].file or other[0].offset > _end(one[-1:])


def _end(batch: list[Read]) -> int:
    return batch[-1].offset + batch[-1].size
