"""Checks of what a bundle says, which anybody may have written.

Types have been checked when the bundle was read; here is checked that its numbers fit together,
so that whoever works with a bundle may rely on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ckpipe.boxes import Box
from ckpipe.checksum import chunk_count
from ckpipe.columns import MAX_NUMBER
from ckpipe.data_file import ALIGNMENT, MAX_HEADER_BYTES
from ckpipe.errors import (
    DuplicateName,
    InvalidExtent,
    InvalidManifest,
    OversizedMetadata,
    UnsafePath,
    WrongWorldSize,
)
from ckpipe.group_tree import group_ranks
from ckpipe.item_sizes import item_bytes
from ckpipe.manifest import Bundle, ChunkRow, EntryRow, Layout, Part, Structure, TensorRow
from ckpipe.object_names import data_file_name
from ckpipe.tree_checks import check_tree

_KINDS = frozenset(("tensor", "parameter", "buffer", "subclass", "numpy"))
_LAZY = frozenset(("", "c", "n", "cn"))
_MAX_CRC = 0xFFFFFFFF


def check_bundle(bundle: Bundle) -> None:
    """Checks that a bundle agrees with itself and with the format.

    Raises:
        UnsafePath: If a file's name is not the one that the format gives it.
        InvalidExtent: If extents overlap, leave holes or lie outside of what holds them.
        DuplicateName: If labels, names or keys stand twice.
        WrongWorldSize: If its ranks are not those of its kind and world size.
        InvalidManifest: If anything else contradicts itself.
    """
    check_ranks(bundle)
    for structure in bundle.structures:
        _check_tensors(structure)
        check_tree(structure)
    data_bytes = [_check_entries(layout) for layout in bundle.layouts]
    checksums = [
        sum(chunk_count(row.nbytes) for row in layout.entries) for layout in bundle.layouts
    ]
    for part in bundle.parts:
        _check_part(bundle, part)
        _check_files(part, data_bytes[part.layout])
        _check_checksums(part, checksums[part.layout])
    _check_all_chunks(bundle)
    _check_per_rank(bundle)


def check_ranks(bundle: Bundle) -> None:
    """Checks that a bundle holds all ranks that its kind asks for, in order, and no other.

    Raises:
        WrongWorldSize: If it does not.
    """
    ranks = [part.rank for part in bundle.parts]
    if bundle.kind == "manifest":
        expected = range(ranks[0], ranks[0] + 1) if ranks else range(0)
    elif bundle.kind == "index":
        expected = range(bundle.world_size)
    else:
        expected = group_ranks(*(bundle.group or (0, 0)), bundle.world_size)
    # Lengths first: a world size that somebody made up must not become a list.
    fits = len(ranks) == len(expected) > 0 and ranks == list(expected)
    if not fits or expected.stop > bundle.world_size:
        raise WrongWorldSize(
            f"The ranks of the {bundle.kind} are not those of a world of {bundle.world_size}"
        )


def _check_tensors(structure: Structure) -> None:
    rows = structure.tensors
    if len({row.label for row in rows}) < len(rows):
        raise DuplicateName("A label stands twice in the tensor table")
    item_sizes = {dtype: item_bytes(dtype) for dtype in {row.dtype for row in rows}}
    for name, known, found in (
        ("dtype", {dtype for dtype, size in item_sizes.items() if size}, item_sizes.keys()),
        ("kind", _KINDS, {row.kind for row in rows}),
        ("set of lazy bits", _LAZY, {row.lazy for row in rows}),
    ):
        if not found <= known:
            raise InvalidManifest(f"A tensor has the unknown {name} {min(found - known)!r:.100}")
    for row in rows:
        if math.prod(row.shape) * (item_sizes[row.dtype] or 1) > MAX_NUMBER:
            raise InvalidExtent(f"{row.label!r:.200} has more elements than any memory holds")


def _check_entries(layout: Layout) -> list[int]:
    """Checks that the entries fill their files one after another; returns the files' data bytes."""
    ends: list[int] = []
    names: set[str] = set()
    for row in layout.entries:
        if row.file == len(ends):
            ends.append(0)
            names = set()
        if row.file != len(ends) - 1:
            raise InvalidManifest(f"The entry {row.name!r:.200} is not in the order of files")
        if row.offset != ends[-1]:
            what = "overlaps" if row.offset < ends[-1] else "leaves a hole behind"
            raise InvalidExtent(f"The entry {row.name!r:.200} {what} the one before it")
        if row.name in names or row.name == "__metadata__":
            raise DuplicateName(f"The name {row.name!r:.200} stands twice in a data file")
        names.add(row.name)
        ends[-1] += row.nbytes
    return ends


def _check_part(bundle: Bundle, part: Part) -> None:
    if part.structure >= len(bundle.structures) or part.layout >= len(bundle.layouts):
        raise InvalidManifest(
            "A part points to a structure or layout that is not there", rank=part.rank
        )
    if len(part.values) != bundle.structures[part.structure].values:
        raise InvalidManifest("A part has another number of values than its tree", rank=part.rank)


def _check_files(part: Part, data_bytes: list[int]) -> None:
    if len(part.files) != len(data_bytes):
        raise InvalidManifest("A part has another number of files than its entries", rank=part.rank)
    for number, (file, nbytes) in enumerate(zip(part.files, data_bytes, strict=True)):
        expected = data_file_name(part.rank, number)
        if file.name != expected:
            raise UnsafePath(
                f"A data file has the name {file.name!r:.200} instead of {expected!r}",
                rank=part.rank,
            )
        head = file.header_bytes
        if head > MAX_HEADER_BYTES:
            raise OversizedMetadata(f"The header of {expected} is too large", rank=part.rank)
        if head <= 0 or head % ALIGNMENT or file.header_crc32c > _MAX_CRC:
            raise InvalidManifest(f"The header of {expected} has a wrong size", rank=part.rank)
        if file.size != head + nbytes:
            raise InvalidExtent(
                f"The entries of {expected} end at byte {head + nbytes}, the file at {file.size}",
                rank=part.rank,
            )


def _check_checksums(part: Part, expected: int) -> None:
    if len(part.checksums) != expected or max(part.checksums, default=0) > _MAX_CRC:
        raise InvalidManifest(
            f"A part has {len(part.checksums)} checksums instead of {expected}", rank=part.rank
        )


def _check_all_chunks(bundle: Bundle) -> None:
    owners = {part.rank: part for part in bundle.parts}
    for structure_number, layout_number in {(part.structure, part.layout) for part in bundle.parts}:
        tensors = bundle.structures[structure_number].tensors
        own = bundle.layouts[layout_number].entries
        for chunk in bundle.layouts[layout_number].chunks:
            if chunk.tensor >= len(tensors):
                raise InvalidManifest("A chunk is of a tensor that is not there")
            if chunk.owner is None:
                _check_chunk(chunk, tensors[chunk.tensor], own)
                continue
            if chunk.owner >= bundle.world_size:
                raise WrongWorldSize("A chunk is owned by a rank outside the world")
            # What a rank of another group wrote is checked when that group is read.
            owner = owners.get(chunk.owner)
            entries = None if owner is None else bundle.layouts[owner.layout].entries
            _check_chunk(chunk, tensors[chunk.tensor], entries)
    check_owners(bundle)


def check_owners(bundle: Bundle) -> None:
    """Checks that ranks have written what others, which do not know where, leave to them.

    Of ranks that are not in the bundle nothing is asked. The numbers of tensors must be right.

    Raises:
        InvalidManifest: If a rank has not. Ranks that hold the same shard have then disagreed
            about its name, dtype or shape, or about what is replicated.
    """
    owners = {part.rank: part for part in bundle.parts}
    written: dict[int, set[_Identity]] = {}
    for structure_number, layout_number in {(part.structure, part.layout) for part in bundle.parts}:
        tensors = bundle.structures[structure_number].tensors
        for chunk in bundle.layouts[layout_number].chunks:
            if chunk.entry is not None or chunk.owner not in owners:
                continue
            if chunk.owner not in written:
                written[chunk.owner] = _written(bundle, owners[chunk.owner])
            row = tensors[chunk.tensor]
            if _identity(chunk, row) not in written[chunk.owner]:
                raise InvalidManifest(
                    f"Others leave a part of {row.label!r:.200} to a rank that has not written it",
                    rank=chunk.owner,
                    hint="Ranks must agree on names, shapes and what is replicated",
                )


_Identity = tuple[str, str, tuple[int, ...], Box | None]
"""Label, dtype, shape and box: by these a rank finds among another's chunks what it holds too."""


def _written(bundle: Bundle, owner: Part) -> set[_Identity]:
    tensors = bundle.structures[owner.structure].tensors
    chunks = bundle.layouts[owner.layout].chunks
    return {
        _identity(chunk, tensors[chunk.tensor])
        for chunk in chunks
        if chunk.owner is None and chunk.tensor < len(tensors)
    }


def _identity(chunk: ChunkRow, tensor: TensorRow) -> _Identity:
    return tensor.label, tensor.dtype, tensor.shape, chunk.box


def _check_chunk(chunk: ChunkRow, tensor: TensorRow, entries: Sequence[EntryRow] | None) -> None:
    end = _end(chunk, tensor)
    if chunk.entry is None:
        if chunk.owner is None:
            raise InvalidManifest(
                f"A chunk of {tensor.label!r:.200} does not tell which entry it is in"
            )
        if chunk.offset or chunk.stride is not None:
            raise InvalidManifest(f"A chunk of {tensor.label!r:.200} lies in an unknown entry")
        return
    if entries is None:
        return
    if chunk.entry >= len(entries):
        raise InvalidManifest(f"A chunk of {tensor.label!r:.200} is in an entry that is not there")
    if end > entries[chunk.entry].nbytes:
        raise InvalidExtent(f"A chunk of {tensor.label!r:.200} ends behind its entry")


def _end(chunk: ChunkRow, tensor: TensorRow) -> int:
    """Behind the last byte of its entry that a chunk touches."""
    shape = tensor.shape
    if chunk.box is not None:
        shape = _box_shape(chunk.box, tensor)
    item = item_bytes(tensor.dtype) or 1
    original = chunk.original_stride
    if chunk.offset % item or (original is not None and len(original) != len(shape)):
        raise InvalidExtent(f"The offset or strides of a chunk of {tensor.label!r:.200} do not fit")
    if chunk.stride is None:
        return chunk.offset + math.prod(shape) * item
    if len(chunk.stride) != len(shape):
        raise InvalidExtent(f"A chunk of {tensor.label!r:.200} has a wrong number of strides")
    if 0 in shape:
        return chunk.offset
    last = sum((n - 1) * step for n, step in zip(shape, chunk.stride, strict=True))
    return chunk.offset + (last + 1) * item


def _box_shape(box: Box, tensor: TensorRow) -> tuple[int, ...]:
    lower, upper = box
    if len(lower) != len(tensor.shape) or len(upper) != len(tensor.shape):
        raise InvalidExtent(f"A box of {tensor.label!r:.200} has a wrong number of dimensions")
    if not all(0 <= lo <= hi <= n for lo, hi, n in zip(lower, upper, tensor.shape, strict=True)):
        raise InvalidExtent(f"A box of {tensor.label!r:.200} leaves its shape")
    return tuple(hi - lo for lo, hi in zip(lower, upper, strict=True))


def _check_per_rank(bundle: Bundle) -> None:
    if bundle.kind != "index":
        return
    if len(bundle.per_rank) != len(bundle.structures):
        raise InvalidManifest("What differs between ranks is not told for each structure")
    for each, structure in zip(bundle.per_rank, bundle.structures, strict=True):
        too_large = max(each.tensors, default=-1) >= len(structure.tensors)
        if too_large or max(each.values, default=-1) >= structure.values:
            raise InvalidManifest("What differs between ranks names what is not there")
