"""Boxes of tensors, and the plan of the reads that fill them."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ckpipe.format.box_cover import BoxIndex
from ckpipe.format.boxes import (
    Box,
    box_shape,
    flat_index,
    flat_ranges,
    flat_start,
)
from ckpipe.format.checksum import CHUNK_BYTES, chunk_count
from ckpipe.format.entry_table import EntryTable
from ckpipe.format.manifest import Entry, FileRow, Layout, ManifestDocument, RankManifest
from ckpipe.reading.read_plan import (
    ALLOWANCE_BYTES,
    LEAST_BYTES,
    Need,
    Read,
    least_read_bytes,
    plan_reads,
)
from ckpipe.state.placements import Mesh, Placement, Sharding, sharding
from ckpipe.types import CheckpointId

SHAPE = (6, 5, 4)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...] = SHAPE) -> Box:
    sides = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return tuple(low for low, _ in sides), tuple(high for _, high in sides)


many_boxes = st.lists(boxes_in(), max_size=30)


def mask(box: Box) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    found = np.zeros(SHAPE, dtype=np.int64)
    found[slices(box)] = 1
    return found


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in zip(*box, strict=True))


@given(boxes_in(), many_boxes)
def test_a_region_is_covered_as_far_as_boxes_reach_and_nowhere_twice(
    region: Box, boxes: list[Box]
) -> None:
    parts, missing = BoxIndex(boxes).cover(region)
    given_once = sum((mask(part) for _, part in parts), np.zeros(SHAPE, dtype=np.int64))
    left_out = sum((mask(part) for part in missing), np.zeros(SHAPE, dtype=np.int64))
    held = np.minimum(sum((mask(box) for box in boxes), np.zeros(SHAPE, dtype=np.int64)), 1)
    assert (given_once == held * mask(region)).all()
    assert (left_out == (1 - held) * mask(region)).all()
    for number, part in parts:
        assert (mask(part) <= mask(boxes[number])).all()


def test_boxes_without_dimensions_are_given_once() -> None:
    assert BoxIndex([((), ()), ((), ())]).cover(((), ())) == ([(0, ((), ()))], [])


def test_a_pinwheel_that_no_axis_divides_covers_a_square() -> None:
    wheel = [
        ((0, 0), (2, 1)), ((2, 0), (3, 2)), ((1, 2), (3, 3)), ((0, 1), (1, 3)), ((1, 1), (2, 2)),
    ]  # fmt: skip
    assert BoxIndex(wheel).cover(((0, 0), (3, 3))) == (list(enumerate(wheel)), [])


def test_columns_with_row_cuts_of_their_own_cover_a_tensor() -> None:
    # Ranks that replicate a column write unequal shares of it, by what else each of them has. All
    # columns are open together, so that comparing each part with what is left would take minutes.
    columns, rows = 2048, 8192
    cuts = [[0, *(1 + n % 7 + 2000 * k for k in range(1, 4)), rows] for n in range(columns)]
    boxes = [
        ((low, n), (high, n + 1))
        for n, each in enumerate(cuts)
        for low, high in itertools.pairwise(each)
    ]
    parts, missing = BoxIndex(boxes).cover(((0, 0), (rows, columns)))
    assert parts == list(enumerate(boxes))
    assert missing == []


def test_a_gap_among_many_boxes_is_found() -> None:
    grid = [((row, column), (row + 1, column + 1)) for row in range(64) for column in range(64)]
    gap = grid.pop(1000)
    assert BoxIndex(grid).cover(((0, 0), (64, 64))) == (list(enumerate(grid)), [gap])


def test_one_box_that_has_everything_is_preferred_to_pieces() -> None:
    boxes = [((0,), (2,)), ((2,), (4,)), ((0,), (9,))]
    assert BoxIndex(boxes).cover(((0,), (4,))) == ([(2, ((0,), (4,)))], [])


@given(st.data(), st.integers(0, 50))
def test_ranges_of_a_box_hold_it_and_are_as_few_as_asked_for(
    data: st.DataObject, most: int
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=4)))
    box = data.draw(boxes_in(shape).filter(lambda box: 0 not in box_shape(box)))
    numbers = np.arange(math.prod(shape)).reshape(shape)
    wanted = set(numbers[slices(box)].ravel().tolist())
    ranges = list(flat_ranges(shape, box, most))
    covered = [n for lo, hi in ranges for n in range(lo, hi)]
    assert wanted <= set(covered)
    assert covered == sorted(set(covered))
    assert {lo for lo, _ in ranges} | {hi - 1 for _, hi in ranges} <= wanted
    if most == 0:
        assert set(covered) == wanted
    start = flat_start(shape, box)
    runs = sorted(wanted) == list(range(min(wanted), max(wanted) + 1))
    assert (start == min(wanted)) if runs else (start is None)
    assert flat_index(shape, box[0]) == min(wanted)


# ---- shards, by mesh and placements, are what torch makes of them ----


@st.composite
def shardings(draw: st.DrawFn) -> Sharding:
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.none() | st.integers(0, len(shape) - 1)
    placements = tuple(Placement(draw(dims), draw(st.integers(1, 4))) for _ in mesh_shape)
    ranks = draw(st.permutations(range(3, 3 + math.prod(mesh_shape))))
    return sharding(Mesh(mesh_shape, tuple(ranks)), placements, shape)


def torch_placement(placement: Placement) -> Any:
    if placement.dim is None:
        return Replicate()
    if placement.split_factor == 1:
        return Shard(placement.dim)
    return _StridedShard(placement.dim, split_factor=placement.split_factor)


def torch_local(full: torch.Tensor, spread: Sharding, coordinate: tuple[int, ...]) -> torch.Tensor:
    """The local tensor as torch cuts it, one placement after another."""
    for n, index, placement in zip(spread.mesh.shape, coordinate, spread.placements, strict=True):
        if placement.dim is not None:
            made = torch_placement(placement)
            pieces, _ = made._split_tensor(full, n, with_padding=False, contiguous=False)
            full = pieces[index]
    return full


@given(shardings())
def test_boxes_are_what_torch_gives_the_rank(spread: Sharding) -> None:
    full = torch.arange(math.prod(spread.shape)).view(spread.shape)
    for rank in spread.mesh.ranks:
        coordinate = spread.coordinate(rank)
        assert coordinate is not None
        expected = torch_local(full, spread, coordinate)
        made = [torch_placement(each) for each in spread.placements]
        shape, _ = _compute_local_shape_and_global_offset(
            spread.shape, spread.mesh.shape, list(coordinate), made
        )
        assert spread.local_shape(rank) == tuple(expected.shape) == tuple(shape)
        if full.numel():
            found = torch.full(shape, -1)
            for held in spread.held(rank):
                found[slices(held.local)] = full[slices(held.box)]
            assert torch.equal(found, expected)


def test_rank_that_is_not_on_the_mesh_holds_nothing() -> None:
    spread = sharding(Mesh((2,), (4, 6)), (Placement(0),), (8,))
    assert (spread.held(5), spread.replicas(5), spread.local_shape(5)) == ((), (), None)


@pytest.mark.parametrize(
    ("mesh", "placements", "shape"),
    [
        (Mesh((2,), (0, 1, 2)), (Placement(),), (4,)),
        (Mesh((2,), (0, 1)), (), (4,)),
        (Mesh((2,), (0, 1)), (Placement(1),), (4,)),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    mesh: Mesh, placements: tuple[Placement, ...], shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"place|cut"):
        sharding(mesh, placements, shape)


HEADER_BYTES = 4096


def table_of(sizes: list[list[int]]) -> EntryTable:
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
    layout = Layout(tuple(entries), ())
    id = CheckpointId("20261121T034205123Z-9f3a2c01", 1, 0)
    table = EntryTable(ManifestDocument("manifest", id, 1, (), (layout,), (part,)))
    table.join(0)
    return table


def all_needs(data: EntryTable) -> list[Need]:
    """Every byte of every entry."""
    return [Need(number, 0, size) for number, size in enumerate(data.sizes)]


entry_sizes = st.one_of(
    st.integers(0, 40),
    st.integers(1, 5 * CHUNK_BYTES),
    st.integers(1, 4).map(lambda n: n * CHUNK_BYTES),
    st.integers(20 * CHUNK_BYTES, 30 * CHUNK_BYTES),
)
limits = st.tuples(
    st.sampled_from([64 << 10, CHUNK_BYTES + 8192, 4 << 20, 16 << 20]),
    st.sampled_from([1, 512, 4096]),
)


@dataclass(frozen=True)
class Case:
    data: EntryTable
    needs: list[Need]
    limits: tuple[int, int]
    lanes: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    data = table_of(draw(st.lists(st.lists(entry_sizes, max_size=6), min_size=1, max_size=2)))
    needs = []
    for number, size in enumerate(data.sizes):
        for _ in range(draw(st.integers(0, 2))):
            if draw(st.booleans()):
                needs.append(Need(number, 0, size))
            else:
                lo = draw(st.integers(0, size))
                needs.append(Need(number, lo, draw(st.integers(lo, size))))
    return Case(data, draw(st.permutations(needs)), draw(limits), draw(st.integers(1, 9)))


def absolute(data: EntryTable, need: Need) -> tuple[int, int, int]:
    begin = data.begins[need.entry]
    return data.entry_files[need.entry], begin + need.lo, begin + need.hi


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
def test_reads_bring_every_byte_of_the_chunks_that_are_needed_once(case: Case) -> None:
    data = case.data
    seen: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    chunks, reads = plan_reads(data, case.needs, *case.limits, case.lanes)
    for read in reads:
        whole = range(read.first, read.stop)
        for number in (*whole, *read.cut):
            entry, lo, at, end, checksum = (int(column[number]) for column in chunks)
            size = min(CHUNK_BYTES, data.sizes[entry] - lo)
            assert lo % CHUNK_BYTES == 0
            assert end - at == size
            assert checksum == data.first_sums[entry] + lo // CHUNK_BYTES
            assert at == data.begins[entry] + lo
            begin, stop = max(0, read.offset - at), min(size, read.offset + read.size - at)
            assert begin < stop
            assert (number in whole) == (stop - begin == size)
            seen[entry, lo].append((lo + begin, lo + stop))
    for (entry, lo), parts in seen.items():
        assert contiguous([(0, *part) for part in parts]) == [
            (0, lo, min(lo + CHUNK_BYTES, data.sizes[entry]))
        ]
        assert sum(end - begin for begin, end in parts) <= CHUNK_BYTES
    for need in case.needs:
        if need.lo < need.hi:
            first, last = need.lo // CHUNK_BYTES, (need.hi - 1) // CHUNK_BYTES
            assert all((need.entry, n * CHUNK_BYTES) in seen for n in range(first, last + 1))


@given(cases())
def test_reads_stay_in_their_file_and_their_buffer(case: Case) -> None:
    for read in plan_reads(case.data, case.needs, *case.limits, case.lanes)[1]:
        assert read.offset >= 0
        assert read.offset + read.size <= case.data.files[read.file].size
        assert read.size <= max(case.limits[0], least_read_bytes(case.limits[1]))


@given(cases())
def test_few_bytes_are_read_that_are_not_needed(case: Case) -> None:
    needs = contiguous([absolute(case.data, need) for need in case.needs])
    allowed = sum(hi - lo + max(ALLOWANCE_BYTES, (hi - lo) // 10) for _, lo, hi in needs)
    assert (
        sum(read.size for read in plan_reads(case.data, case.needs, *case.limits, case.lanes)[1])
        <= allowed
    )


@given(cases())
def test_reads_are_in_order_and_overlap_only_within_an_aligned_page(case: Case) -> None:
    _, reads = plan_reads(case.data, case.needs, *case.limits, case.lanes)
    for one, other in pairwise(reads):
        assert (one.file, one.offset) <= (other.file, other.offset)
        if one.file == other.file:
            assert other.offset > one.offset + one.size - 2 * case.limits[1]


def test_large_reads_are_aligned() -> None:
    data = table_of([[700, 64 << 20]])
    _, reads = plan_reads(data, all_needs(data), 16 << 20, 4096)
    assert all(read.offset % 4096 == 0 for read in reads)
    assert all(read.size % 4096 == 0 for read in reads[:-1])
    assert len(reads) == 5


def test_a_small_gap_is_read_over_and_a_large_one_is_not() -> None:
    near, far = table_of([[100, 1000, 100]]), table_of([[100, 64 << 20, 100]])
    needs = [Need(0, 0, 100), Need(2, 0, 100)]
    assert len(plan_reads(near, needs, 16 << 20, 4096)[1]) == 1
    assert len(plan_reads(far, needs, 16 << 20, 4096)[1]) == 2


def test_gaps_never_overdraw_the_allowance() -> None:
    # Both needs cross a chunk's end by one byte on either side, which costs nearly all of it.
    size = 2 * CHUNK_BYTES
    data = table_of([[size, 200 << 10, size]])
    needs = [Need(n, CHUNK_BYTES - 1, CHUNK_BYTES + 1) for n in (0, 2)]
    _, reads = plan_reads(data, needs, 16 << 20, 4096)
    assert sum(read.size for read in reads) <= 4 + 2 * ALLOWANCE_BYTES


def test_alignment_never_overdraws_the_allowance() -> None:
    data = table_of([[1, 2 * CHUNK_BYTES, 5000]])
    _, (read,) = plan_reads(data, [Need(1, CHUNK_BYTES - 1, CHUNK_BYTES + 1)], 4 << 20, 4096)
    assert read.size <= 2 + ALLOWANCE_BYTES


MIB = 1 << 20
PART = 16 * MIB


def reads_of_a_run(mebibytes: int, shift: int, lanes: int, part_bytes: int = PART) -> list[Read]:
    """The reads, cut where parts end, of so much that lies together from a place in a file on."""
    data = table_of([[shift, mebibytes * MIB]])
    data.begins[:] = [0, shift]
    return plan_reads(data, [Need(1, 0, mebibytes * MIB)], part_bytes, 1, lanes)[1]


@example(15, 3 * MIB, 3)  # fits a part, lies across an edge, and is cut for its lanes
@given(st.integers(2, 600), st.sampled_from([0, 4096, 3 * MIB]), st.integers(1, 9))
def test_no_read_of_what_lies_together_crosses_an_edge(
    mebibytes: int, shift: int, lanes: int
) -> None:
    reads = reads_of_a_run(mebibytes, shift, lanes)
    end = shift + mebibytes * MIB
    for read in reads:
        last = read.offset + read.size - 1
        across = read.offset // PART != last // PART
        assert not across or len(reads) == 1 or end - last // PART * PART <= CHUNK_BYTES


@given(st.integers(1, 600), st.integers(1, 9))
def test_a_read_is_no_more_than_twice_a_lanes_share_of_what_is_left(
    mebibytes: int, lanes: int
) -> None:
    reads = reads_of_a_run(mebibytes, 4096, lanes)
    left = sum(read.size for read in reads)
    for read in reads:
        # What is cut is cut evenly, by the share that a lane has where the cut part begins, and
        # at whole mebibytes.
        assert read.size <= max(LEAST_BYTES, 2 * (left + PART) // lanes) + MIB
        left -= read.size
    assert all(read.size >= LEAST_BYTES // 2 - MIB for read in reads[:-1])


def test_few_requests_are_added_by_edges() -> None:
    assert len(reads_of_a_run(4096, 4096, 6)) <= 256 + 6
    assert len(reads_of_a_run(256, 4096, 6)) <= 16 + 3
    assert len(reads_of_a_run(4, 4096, 6)) == 1
    assert [read.size // MIB for read in reads_of_a_run(20, 0, 6)] == [8, 8, 4]


@given(st.integers(2, 40), st.sampled_from([0, 5, 4096, MIB, 3 * MIB]), st.integers(2, 5))
def test_small_parts_have_edges_too(mebibytes: int, shift: int, step: int) -> None:
    reads = reads_of_a_run(mebibytes, shift, 4, step * MIB)
    assert all(read.size <= step * MIB for read in reads)
    assert len(reads) <= -(-mebibytes // step) + 2


def test_parts_that_hold_hardly_a_chunk_are_no_parts() -> None:
    assert not any(read.cut for read in reads_of_a_run(64, 4096, 6, 2 * MIB - 1))
