"""A block's checksums: of its pieces, and of all of it."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpipe
from ckpipe.backend import Upload
from ckpipe.format.checksum import CHUNK_BYTES, crc32c
from ckpipe.format.data_file import BlockRange, DataFile, DataFiles, EntryRange
from ckpipe.format.manifest import Entry, Layout
from ckpipe.save.record import BlockSums, FilledBlock, block_checksum
from ckpipe.save.serialize import compute
from ckpipe.testing import MemoryBackend


class Filled(FilledBlock):
    """A block in memory of its own."""

    def release(self) -> None:
        return


def block(parts: list[tuple[int, int, int]]) -> Filled:
    """A block of pieces of entries, each behind so many bytes that are of none.

    Args:
        parts: For each piece, the bytes before it, where it begins in its entry, and its size.
    """
    spans, at = [], 0
    for entry, (gap, lo, size) in enumerate(parts):
        spans.append(EntryRange(entry, lo, lo + size, at + gap))
        at += gap + size
    at += 3
    data = bytes((7 * number + number // 251) % 256 for number in range(at))
    return Filled(BlockRange(0, 0, at, tuple(spans)), memoryview(data))


def cargo_of(*blocks: Filled) -> DataFiles:
    """What blocks are of whose pieces end their entries."""
    sizes = {span.entry: span.hi for filled in blocks for span in filled.plan.spans}
    entries = [Entry(f"{n}", "U8", (size,), 0, 0, size) for n, size in sorted(sizes.items())]
    size = sum(filled.plan.nbytes for filled in blocks)
    file = DataFile("rank-00000.safetensors", b"", range(len(entries)), size)
    return DataFiles((file,), Layout(tuple(entries), ()), tuple(filled.plan for filled in blocks))


near_a_chunk = st.integers(CHUNK_BYTES - 40, CHUNK_BYTES + 5)


@given(st.lists(st.tuples(st.integers(0, 9), near_a_chunk, st.integers(1, 90)), max_size=9))
async def test_the_checksum_of_a_block_follows_from_those_of_its_pieces(
    parts: list[tuple[int, int, int]],
) -> None:
    filled = block(parts)
    cargo = cargo_of(filled)
    compute(cargo, [filled])
    assert await block_checksum(cargo, filled) == crc32c(filled.data)


@given(
    st.lists(st.tuples(st.integers(0, 9), near_a_chunk, st.integers(1, 90)), max_size=9),
    st.data(),
)
async def test_only_what_is_not_known_is_computed(
    parts: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    filled = block(parts)
    cargo = cargo_of(filled)
    cuts = cargo.cuts(filled.plan)
    right = [
        crc32c(filled.data[begin:end]) for begin, end in zip(cuts.begins, cuts.ends, strict=True)
    ]
    known = [number for number in range(len(right)) if data.draw(st.booleans())]
    wrong = [each ^ 0xFFFFFFFF for each in right]
    for number in known:  # what is known is taken as it is
        values = np.array([wrong[number]], np.uint32)
        filled.sums.learn(len(right), np.array([number]), values)
    told, elsewhere = filled.sums.to_bytes(), BlockSums()
    elsewhere.take_bytes(told)
    assert bool(told) == bool(right and len(known) == len(right))
    assert elsewhere.to_bytes() == told
    if not filled.sums.all_known:
        compute(cargo, [filled])
    assert filled.sums.values == [wrong[n] if n in known else right[n] for n in range(len(right))]


async def test_pieces_in_another_order_do_as_well() -> None:
    filled = block([(1, 0, 20), (2, 0, 30)])
    plan = filled.plan
    turned = Filled(BlockRange(0, 0, plan.nbytes, plan.spans[::-1]), filled.data)
    cargo = cargo_of(turned)
    compute(cargo, [turned])
    assert await block_checksum(cargo, turned) == crc32c(filled.data)


async def test_large_gaps_are_summed_beside_the_loop() -> None:
    filled = block([(1 << 19, 0, 10)])
    compute(cargo_of(filled), [filled])
    assert await block_checksum(cargo_of(filled), filled) == crc32c(filled.data)


class _Told(Upload):
    """An upload that wants to be told checksums, and looks whether they are right."""

    takes_checksums = True

    def __init__(self, inner: Upload, right: list[bool]) -> None:
        self._inner, self._right = inner, right

    async def write(self, offset: int, data: memoryview) -> None:
        raise AssertionError("the checksum is known")

    async def write_summed(self, offset: int, data: memoryview, checksum: int) -> None:
        self._right.append(checksum == crc32c(data))
        await self._inner.write(offset, data)

    async def complete(self) -> None:
        await self._inner.complete()

    async def abort(self) -> None:
        await self._inner.abort()


class _Telling(MemoryBackend):
    """A store in memory that wants to be told the checksums of blocks."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.right: list[bool] = []

    async def open_upload(self, key: str, *, size: int, block_bytes: int) -> Upload:
        upload = await super().open_upload(key, size=size, block_bytes=block_bytes)
        return _Told(upload, self.right)


async def test_a_save_tells_the_store_the_checksum_of_each_block() -> None:
    telling: list[_Telling] = []

    def make(url: str) -> _Telling:
        telling.append(_Telling(url))
        return telling[-1]

    ckpipe.register_backend("telling", make)
    state = {f"{number}": torch.rand(200_000) for number in range(7)} | {"few": torch.ones(3)}
    staging = {"block_bytes": 1 << 20}
    url = "telling://sums"
    async with ckpipe.Pipeline(url, worker="thread", staging=staging) as pipeline:
        await pipeline.save(state, step=1, until="committed")
        await pipeline.verify(1)
    assert len(telling[-1].right) >= 6
    assert all(telling[-1].right)
