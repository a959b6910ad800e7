"""Check that the numbers of a document from a store are consistent.

Types are checked when the document is read. Code that uses a document may rely on both checks.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from ckpipe.errors import (
    DuplicateName,
    InvalidExtent,
    InvalidManifest,
    OversizedMetadata,
    UnsafePath,
    WrongWorldSize,
)
from ckpipe.format.boxes import Box
from ckpipe.format.checksum import chunk_count
from ckpipe.format.data_file import ALIGNMENT, MAX_HEADER_BYTES, item_bytes
from ckpipe.format.labels import Json, decode_key
from ckpipe.format.manifest import (
    MAX_DIMENSIONS,
    MAX_NUMBER,
    Borrowed,
    Chunks,
    Entries,
    Layout,
    LayoutFacts,
    ManifestDocument,
    RankManifest,
    Structure,
    TensorRow,
    trees_of,
)
from ckpipe.format.names import data_file_name, group_ranks
from ckpipe.format.tree import Node, containers, decoded, is_count

_KINDS = frozenset(("tensor", "parameter", "buffer", "subclass", "numpy"))
_LAZY = frozenset(("", "c", "n", "cn"))
_MAX_CRC = 0xFFFFFFFF


def check_document(document: ManifestDocument) -> None:
    """Check that a document agrees with itself and with the format.

    Raises:
        UnsafePath: If a file's name is not the one that the format gives it.
        InvalidExtent: If extents overlap, leave holes or exceed their entry, file or shape.
        DuplicateName: If labels, names or keys stand twice.
        WrongWorldSize: If its ranks are not those of its kind and world size.
        InvalidManifest: If there is another contradiction.
    """
    check_ranks(document)
    for structure in document.structures:
        _check_tensors(structure)
        _check_tree(structure)
    for part in document.parts:
        _check_part(document, part)
    _check_borrowed(document)
    check_owners(document)
    _check_per_rank(document)


def check_virtual(document: ManifestDocument) -> None:
    """Check the description of a checkpoint that another program wrote.

    Its files are not laid out as ckpipe's are: they may have holes, and have no checksums.

    Raises:
        CorruptCheckpoint: As :func:`check_document` does.
    """
    for structure, layout in zip(document.structures, document.layouts, strict=True):
        _check_tensors(structure)
        _check_tree(structure)
        _check_chunks(layout.chunks, layout.entries.nbytes, structure.tensors)


def _facts_of(document: ManifestDocument, structure: int, layout: int) -> LayoutFacts:
    return facts_of(document.layouts[layout], document.structures[structure].tensors)


def check_ranks(document: ManifestDocument) -> None:
    """Check that a document holds exactly the ranks of its kind, in order.

    Raises:
        WrongWorldSize: If it does not.
    """
    ranks = [part.rank for part in document.parts]
    if document.kind == "manifest":
        expected = range(ranks[0], ranks[0] + 1) if ranks else range(0)
    elif document.kind == "index":
        expected = range(document.world_size)
    else:
        expected = group_ranks(*(document.group or (0, 0)), document.world_size)
    # Lengths first: a made-up world size must not become a list.
    fits = len(ranks) == len(expected) > 0 and ranks == list(expected)
    if not fits or expected.stop > document.world_size:
        raise WrongWorldSize(
            f"The ranks of the {document.kind} are not those of a world of {document.world_size}"
        )


def _check_tensors(structure: Structure) -> None:
    rows = structure.tensors
    if len({row.label for row in rows}) < len(rows):
        raise DuplicateName("A label stands twice in the tensor table")
    item_sizes = check_dtypes(rows)
    for name, known, found in (
        ("kind", _KINDS, {row.kind for row in rows}),
        ("set of lazy bits", _LAZY, {row.lazy for row in rows}),
    ):
        if not found <= known:
            raise InvalidManifest(f"A tensor has the unknown {name} {min(found - known)!r:.100}")
    for row in rows:
        if math.prod(row.shape) * item_sizes[row.dtype] > MAX_NUMBER:
            raise InvalidExtent(f"{row.label!r:.200} has more elements than any memory holds")


def check_dtypes(rows: Sequence[TensorRow]) -> dict[str, int]:
    """Check that the dtypes of tensors are known; return the bytes of an element of each dtype.

    Raises:
        InvalidManifest: If a dtype is unknown.
    """
    sizes = {dtype: item_bytes(dtype) for dtype in {row.dtype for row in rows}}
    unknown = [dtype for dtype, size in sizes.items() if not size]
    if unknown:
        raise InvalidManifest(f"A tensor has the unknown dtype {min(unknown)!r:.100}")
    return {dtype: size for dtype, size in sizes.items() if size}


def _check_part(document: ManifestDocument, part: RankManifest) -> None:
    if part.structure >= len(document.structures) or part.layout >= len(document.layouts):
        raise InvalidManifest(
            "A part points to a structure or layout that is not there", rank=part.rank
        )
    if len(part.values) != document.structures[part.structure].values:
        raise InvalidManifest("A part has another number of values than its tree", rank=part.rank)
    facts = _facts_of(document, part.structure, part.layout)
    if len(part.files) != len(facts.data_bytes):
        raise InvalidManifest("A part has another number of files than its entries", rank=part.rank)
    for number, (file, nbytes) in enumerate(zip(part.files, facts.data_bytes, strict=True)):
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
    if len(part.checksums) != facts.checksums or max(part.checksums, default=0) > _MAX_CRC:
        raise InvalidManifest(
            f"A part has {len(part.checksums)} checksums instead of {facts.checksums}",
            rank=part.rank,
        )
    counted = [entry for entry, count in part.nan if count]
    ascending = sorted({entry for entry, _ in part.nan})
    if counted != ascending or max(counted, default=-1) >= len(facts.sizes):
        raise InvalidManifest("The NaN of a part are not those of its entries", rank=part.rank)

    ends = facts.borrowed.end
    for row in part.witnesses:
        number, sums = row[0] if len(row) > 2 else len(ends), row[2:]
        fits = number < len(ends) and row[1] + len(sums) <= chunk_count(ends[number])
        if not fits or max(sums) > _MAX_CRC:
            raise InvalidManifest("A part witnesses what is not there", rank=part.rank)


def _check_borrowed(document: ManifestDocument) -> None:
    """Check the chunks of each rank against the entries of their owners in this document."""
    place_of = {part.rank: (part.structure, part.layout) for part in document.parts}
    for structure, layout in dict.fromkeys(place_of.values()):
        borrowed = _facts_of(document, structure, layout).borrowed
        if borrowed.owner and max(borrowed.owner) >= document.world_size:
            raise WrongWorldSize("A chunk is owned by a rank outside the world")
        for owner, entry, end, tensor, _ in zip(*borrowed, strict=True):
            # Entries of a rank of another group are checked when that group is read.
            place = place_of.get(owner)
            if entry >= 0 and place is not None:
                label = document.structures[structure].tensors[tensor].label
                _check_in_entry(entry, end, _facts_of(document, *place).sizes, label)


def check_owners(document: ManifestDocument) -> None:
    """Check that owners have written the chunks that other ranks leave to them without a place.

    Owners outside the document are not checked.

    Args:
        document: The document, with all other checks done.

    Raises:
        InvalidManifest: If an owner has not written such a chunk. Ranks that hold the same shard
            have then disagreed about its name, dtype, shape or replication.
    """
    place_of = {part.rank: (part.structure, part.layout) for part in document.parts}
    left: dict[int, list[tuple[array[int], array[int], int]]] = {}
    for structure, layout in dict.fromkeys(place_of.values()):
        unknown: dict[int, tuple[array[int], array[int], int]] = {}
        borrowed = _facts_of(document, structure, layout).borrowed
        for owner, entry, _, tensor, identity in zip(*borrowed, strict=True):
            if entry < 0 and owner in place_of:
                if owner not in unknown:
                    unknown[owner] = (array("q"), array("q"), structure)
                unknown[owner][0].append(identity)
                unknown[owner][1].append(tensor)
        for owner, wanted in unknown.items():
            left.setdefault(owner, []).append(wanted)
    for owner, wanted_of_others in left.items():
        structure, layout = place_of[owner]
        own = _facts_of(document, structure, layout).own
        if own is None:
            rows = document.structures[structure].tensors
            own = own_identities(document.layouts[layout].chunks, rows)
        written = set(own)
        for identities, tensors, structure in wanted_of_others:
            if not written.issuperset(identities):
                tensor = next(
                    tensor
                    for identity, tensor in zip(identities, tensors, strict=True)
                    if identity not in written
                )
                label = document.structures[structure].tensors[tensor].label
                raise InvalidManifest(
                    "Others leave this tensor or a part of it to a rank that has not written it",
                    step=document.id.step,
                    rank=owner,
                    key=label[:200],
                    hint="Ranks must agree on names, shapes, dtypes and replicated tensors; a "
                    'tensor that only some ranks hold alike needs plan="global"',
                )


def _check_per_rank(document: ManifestDocument) -> None:
    if document.kind != "index":
        return
    if len(document.per_rank) != len(document.structures):
        raise InvalidManifest("The member per_rank has not one element for each structure")
    for each, structure in zip(document.per_rank, document.structures, strict=True):
        too_large = max(each.tensors, default=-1) >= len(structure.tensors)
        if too_large or max(each.values, default=-1) >= structure.values:
            raise InvalidManifest("The member per_rank names a tensor or value that is not there")


def facts_of(layout: Layout, tensors: Sequence[TensorRow]) -> LayoutFacts:
    """Check that a layout agrees with itself and with the tensors of a structure, once.

    Chunks in the entries of another rank are not checked against those entries. The layouts of a
    large index have a million chunks, so they are checked as columns, without making rows.

    Raises:
        InvalidExtent: If extents overlap, leave holes or exceed their entry, file or shape.
        DuplicateName: If a name stands twice in a data file.
        InvalidManifest: If there is another contradiction.
    """
    if layout.checked is not None:
        known, facts = layout.checked
        if known is tensors or known == tensors:
            layout.checked = (tensors, facts)
            return facts
    entries, chunks = layout.entries, layout.chunks
    data_bytes = _check_entries(entries)
    borrowed = _check_chunks(chunks, entries.nbytes, tensors)
    own = own_identities(chunks, tensors) if borrowed.owner else None
    checksums = sum(map(chunk_count, entries.nbytes))
    facts = LayoutFacts(array("q", entries.nbytes), data_bytes, checksums, borrowed, own)
    layout.checked = (tensors, facts)
    return facts


def identity_of(tensor: TensorRow, box: Box | None) -> int:
    """Return the identity of a chunk: equal for the same chunk of two ranks.

    It is a hash of label, dtype, shape and box, valid in this process. A collision lets a
    contradiction pass, which a load then refuses.
    """
    return hash((tensor.label, tensor.dtype, tensor.shape, box))


def own_identities(chunks: Chunks, tensors: Sequence[TensorRow]) -> array[int]:
    """Return the identities of the chunks that the rank wrote itself."""
    rows = zip(chunks.tensor, chunks.box, chunks.owner, strict=True)
    return array(
        "q",
        [identity_of(tensors[tensor], box) for tensor, box, owner in rows if owner is None],
    )


def _check_entries(entries: Entries) -> tuple[int, ...]:
    """Check that the entries fill their files without holes; return the files' data bytes."""
    ends: list[int] = []
    names: set[str] = set()
    last, end = -1, 0
    rows = zip(entries.name, entries.file, entries.offset, entries.nbytes, strict=True)
    for name, file, offset, nbytes in rows:
        if file != last:
            if file != last + 1:
                raise InvalidManifest(f"The entry {name!r:.200} is not in the order of files")
            if last >= 0:
                ends.append(end)
            last, end, names = file, 0, set()
        if offset != end:
            what = "overlaps" if offset < end else "leaves a hole behind"
            raise InvalidExtent(f"The entry {name!r:.200} {what} the one before it")
        if name in names or name == "__metadata__":
            raise DuplicateName(f"The name {name!r:.200} stands twice in a data file")
        names.add(name)
        end += nbytes
    return (*ends, end) if last >= 0 else ()


def _check_chunks(chunks: Chunks, sizes: Sequence[int], tensors: Sequence[TensorRow]) -> Borrowed:
    """Check all chunks; return those that other ranks wrote."""
    if chunks.tensor and max(chunks.tensor) >= len(tensors):
        raise InvalidManifest("A chunk is of a tensor that is not there")
    items = {dtype: item_bytes(dtype) or 1 for dtype in {row.dtype for row in tensors}}
    wholes = [math.prod(row.shape) * items[row.dtype] for row in tensors]
    entries = len(sizes)
    borrowed = Borrowed(*(array("q") for _ in Borrowed._fields))
    for tensor, entry, offset, stride, original, box, owner, _ in zip(*chunks.columns, strict=True):
        if box is None and original is None and stride is None and not offset:
            end = wholes[tensor]
            if owner is None and entry is not None and entry < entries and end <= sizes[entry]:
                continue  # a whole tensor in an entry of its own, as nearly all are
        else:
            row = tensors[tensor]
            shape = row.shape if box is None else _box_shape(box, row)
            end = _end(offset, stride, original, shape, row)
        if owner is not None:
            if end > MAX_NUMBER:
                label = tensors[tensor].label
                raise InvalidExtent(f"A chunk of {label!r:.200} ends behind any entry")
            known = -1 if entry is None else entry
            identity = identity_of(tensors[tensor], box)
            for column, cell in zip(borrowed, (owner, known, end, tensor, identity), strict=True):
                column.append(cell)
        elif entry is None:
            raise InvalidManifest(
                f"A chunk of {tensors[tensor].label!r:.200} does not tell which entry it is in"
            )
        else:
            _check_in_entry(entry, end, sizes, tensors[tensor].label)
        if entry is None and (offset or stride is not None):
            label = tensors[tensor].label
            raise InvalidManifest(f"A chunk of {label!r:.200} lies in an unknown entry")
    return borrowed


def _check_in_entry(entry: int, end: int, sizes: Sequence[int], label: str) -> None:
    """Check that a chunk which ends at byte ``end`` lies in its entry.

    Raises:
        InvalidManifest: If there is no such entry.
        InvalidExtent: If the entry ends before.
    """
    if entry >= len(sizes):
        raise InvalidManifest(f"A chunk of {label!r:.200} is in an entry that is not there")
    if end > sizes[entry]:
        raise InvalidExtent(f"A chunk of {label!r:.200} ends behind its entry")


def _end(
    offset: int,
    stride: tuple[int, ...] | None,
    original: tuple[int, ...] | None,
    shape: tuple[int, ...],
    tensor: TensorRow,
) -> int:
    """Return the end of a chunk in its entry, in bytes; exclusive."""
    item = item_bytes(tensor.dtype) or 1
    if offset % item or (original is not None and len(original) != len(shape)):
        raise InvalidExtent(f"The offset or strides of a chunk of {tensor.label!r:.200} do not fit")
    if stride is None:
        return offset + math.prod(shape) * item
    if len(stride) != len(shape):
        raise InvalidExtent(f"A chunk of {tensor.label!r:.200} has a wrong number of strides")
    if 0 in shape:
        return offset
    last = sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    return offset + (last + 1) * item


def _box_shape(box: Box, tensor: TensorRow) -> tuple[int, ...]:
    (lower, upper), shape = box, tensor.shape
    if len(lower) != len(shape) or len(upper) != len(shape):
        raise InvalidExtent(f"A box of {tensor.label!r:.200} has a wrong number of dimensions")
    sizes = []
    for lo, hi, n in zip(lower, upper, shape, strict=True):
        # No bound is below zero; that was checked when the column was read.
        if not lo <= hi <= n:
            raise InvalidExtent(f"A box of {tensor.label!r:.200} leaves its shape")
        sizes.append(hi - lo)
    return tuple(sizes)


def _check_tree(structure: Structure) -> None:
    """Check the root node and the nodes of attributes.

    Raises:
        DuplicateName: If a container has a key twice.
        InvalidManifest: If a node points to a row, value or container that does not exist, or
            attributes or a wrapper tensor are malformed.
    """
    tree, *attributes = trees_of(structure.tree, structure.tensors)
    limits = {"tensor": len(structure.tensors), "value": structure.values}
    shared: set[int] = set()
    references: set[int] = set()
    for outer in containers([tree, *attributes]):
        for node in (outer, *outer.nodes):
            kind = node.kind
            if kind == "ref":
                references.add(node.head)
            elif kind in limits and not 0 <= node.head < limits[kind]:
                raise InvalidManifest(f"A node of the tree points to a {kind} that is not there")
        if outer.kind == "wrapper_tensor":
            _check_wrapper(outer, structure.version)
        elif outer.kind == "shared":
            if outer.head in shared:
                raise DuplicateName(f"Two containers of the tree have the number {outer.head}")
            shared.add(outer.head)
        _check_keys(outer.keys)
        if outer.attributes is not None:
            attributes.append(outer.attributes)
    if any(each.kind != "dict" for each in attributes):
        raise InvalidManifest("Attributes are no dict in the tree")
    missing = references - shared
    if missing:
        raise InvalidManifest(
            f"A node refers to the shared container {min(missing)}, which is not there"
        )


def _check_wrapper(node: Node, version: int) -> None:
    facts = node.head
    fits = _has(facts, _WRAPPER) and (facts["shard"] is None or _has(facts["shard"], _SHARD))
    if not fits or version < 2 or node.inner.kind != "dict":
        raise InvalidManifest("A wrapper_tensor is malformed, or in version 1")
    context, values = decoded(facts["context"][0]), facts["context"][1]
    _check_tree(Structure(context, (), len(values)))
    if any(each.kind in ("shared", "stateful") for each in containers([context])):
        raise InvalidManifest("The context of a wrapper tensor is no plain data")


def _has(data: Json, members: dict[str, Callable[[Any], bool]]) -> bool:
    """Tell whether an object has exactly some members, each of its form."""
    if type(data) is not dict or data.keys() != members.keys():
        return False
    return all(fits(data[name]) for name, fits in members.items())


def _is_size(data: Json) -> bool:
    return type(data) is list and len(data) <= MAX_DIMENSIONS and all(map(is_count, data))


_WRAPPER: dict[str, Callable[[Any], bool]] = {
    "class": lambda data: type(data) is str,
    "context": lambda data: type(data) is list and len(data) == 2 and type(data[1]) is list,
    "dtype": lambda data: type(data) is str,
    "size": _is_size,
    "stride": _is_size,
    "kind": lambda data: data in ("tensor", "parameter", "buffer"),
    "detail": lambda data: data in (None, "persistent", "transient"),
    "requires_grad": lambda data: type(data) is bool,
    "shard": lambda data: True,
}
_SHARD = {"layout": _WRAPPER["class"], "size": _is_size}
"""The facts of a wrapper tensor and of its shard, and the check of each."""


def _check_keys(keys: Sequence[Json]) -> None:
    try:
        if not set(map(type, keys)) <= {str}:
            keys = [decode_key(key) for key in keys]
        distinct = len(set(keys))
    except RecursionError:
        raise InvalidManifest("A key is nested too deeply") from None
    if distinct < len(keys):
        raise DuplicateName("A container of the tree has a key twice")
