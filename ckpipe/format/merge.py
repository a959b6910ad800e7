"""Merge manifests into group objects, and group objects into the index.

The result depends on the manifests alone: neither on their order, nor on the groups in between. So
all ranks that merge the same manifests write the same object, and it does not matter which is
first.

It also lists the chunks of which a rank has witnessed other bytes than the owner wrote.

The index lists the tensors of which ranks, or groups of ranks, have written different copies.
Ranks that hold a tensor alike write it once: each of them lists the chunks that it leaves
to others, with their owners. If all ranks hold it alike, the distinct pairs of chunk and owner make
up one copy of the tensor. If groups of ranks hold it alike, such as the process groups of several
DDP objects, each group has owners of its own, and the pairs make up more than one copy. Then the
groups are told apart, and the checksums of their copies are compared. Copies that were cut
otherwise cannot be compared and count as different. All ranks' lists are compared in bulk, since a
large index has millions of chunks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ckpipe.errors import InvalidManifest, WrongWorldSize
from ckpipe.format.check import check_ranks, facts_of, identity_of, own_identities
from ckpipe.format.checksum import chunk_count
from ckpipe.format.codec import layout_text
from ckpipe.format.data_file import item_bytes
from ckpipe.format.labels import Json, Numbering, canonical
from ckpipe.format.manifest import (
    MOST_DIFFERENCES,
    Differences,
    DocumentKind,
    Layout,
    ManifestDocument,
    PerRank,
    Place,
    RankManifest,
    Structure,
    TensorRow,
    structure_text,
)
from ckpipe.types import DifferingCopy

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_Told = tuple[int, int, int, list[int]]
"""A rank, and what it has witnessed of a chunk: its size, the first mebibyte, and checksums."""

_MOST_PENDING = 1 << 20
_MIX = 0x9E3779B97F4A7C15


def merge(
    documents: Iterable[ManifestDocument], kind: DocumentKind, group: tuple[int, int] | None = None
) -> ManifestDocument:
    """Merge manifests, or group objects, of one checkpoint into a group object or the index.

    Args:
        documents: At least one, in any order; together they hold each rank once.
        kind: The kind of the result; a world of one rank writes the ``index`` of one manifest.
        group: Level and number of a group object.

    Raises:
        WrongWorldSize: If they do not agree on the world size, or their ranks are not those of the
            result.
        InvalidManifest: If they are not of one checkpoint.
    """
    merged = _joined(list(documents), kind, group)
    check_ranks(merged)
    if kind != "index":
        return merged
    parts = merged.parts
    if any(part.witnesses for part in parts):
        parts = tuple(replace(part, witnesses=()) for part in parts)
    return replace(
        merged, parts=parts, per_rank=_per_rank(merged), differences=_differences(merged)
    )


def gathered(documents: Iterable[ManifestDocument]) -> ManifestDocument:
    """Collect the parts of some ranks of one checkpoint in a document outside the merge tree.

    The document has each rank once.

    Args:
        documents: At least one; a rank may be in several.

    Raises:
        WrongWorldSize: If they do not agree on the world size.
        InvalidManifest: If they are not of one checkpoint.
    """
    found = _joined(list(documents), "group", None)
    return replace(found, parts=tuple(replace(part, witnesses=()) for part in found.parts))


def _joined(
    found: list[ManifestDocument], kind: DocumentKind, group: tuple[int, int] | None
) -> ManifestDocument:
    first = found[0]
    if any(each.id != first.id for each in found):
        raise InvalidManifest("Manifests of different checkpoints cannot be merged")
    if any(each.world_size != first.world_size for each in found):
        raise WrongWorldSize("Manifests do not agree on the world size", step=first.id.step)
    structures, layouts, values = Numbering(), Numbering(), Numbering()
    keys: dict[int, Callable[[Layout], bytes]] = {}
    parts = []
    pairs = [(part, source) for source in found for part in source.parts]
    if group is None and kind == "group":
        pairs = list({part.rank: (part, source) for part, source in pairs}.values())
    for part, source in sorted(pairs, key=lambda pair: pair[0].rank):
        own = source.structures[part.structure]
        if id(own) not in keys:
            keys[id(own)] = _layout_key(own)
        structure = structures.number(own, structure_text)
        # Layouts with the same names, offsets and boxes are the same layout.
        layout = layouts.number(source.layouts[part.layout], keys[id(own)])
        shared = values.items[values.number(part.values)]
        parts.append(replace(part, structure=structure, layout=layout, values=shared))
    return ManifestDocument(
        kind, first.id, first.world_size, tuple(structures.items), tuple(layouts.items),
        tuple(parts), group,
    )  # fmt: skip


def _layout_key(structure: Structure) -> Callable[[Layout], bytes]:
    """Return a function that maps a layout to a key, by which layouts of all structures compare."""
    labels = tuple(row.label for row in structure.tensors)
    numbers = {label: number for number, label in enumerate(labels)}
    digest = _digest(*labels)
    return lambda layout: digest + _digest(layout_text(layout, numbers, labels))


def _digest(*texts: str) -> bytes:
    """Hash texts; distinct texts get distinct hashes for all practical purposes."""
    state = blake2b(digest_size=16)
    for text in texts:
        state.update(len(text).to_bytes(8, "big"))
        state.update(text.encode())
    return state.digest()


def _per_rank(document: ManifestDocument) -> tuple[PerRank, ...]:
    members: list[list[RankManifest]] = [[] for _ in document.structures]
    for part in document.parts:
        members[part.structure].append(part)
        facts_of(document.layouts[part.layout], document.structures[part.structure].tensors)
    private = [layout.private for layout in document.layouts]
    shared = _differing_copies(document)
    return tuple(
        PerRank(
            tuple(sorted({*_differing_tensors(each, private), *copies})), _differing_values(each)
        )
        for each, copies in zip(members, shared, strict=True)
    )


def _differing_values(parts: Sequence[RankManifest]) -> tuple[int, ...]:
    distinct: dict[int, tuple[Json, ...]] = {id(part.values): part.values for part in parts}
    if len(distinct) < 2:
        return ()
    return tuple(
        number
        for number, forms in enumerate(zip(*distinct.values(), strict=True))
        if len({canonical(form) for form in forms}) > 1
    )


def _differing_tensors(
    parts: Sequence[RankManifest], private: Sequence[Mapping[int, Place]]
) -> Collection[int]:
    first, *others = parts
    if not others:
        return ()
    wanted = private[first.layout]
    common = set(wanted).intersection(*(private[part.layout] for part in others))
    differing: set[int] = set()
    for part in others:
        places = private[part.layout]
        for tensor in common - differing:
            (here, mine), (there, theirs) = wanted[tensor], places[tensor]
            if here != there or first.checksums[mine] != part.checksums[theirs]:
                differing.add(tensor)
    return differing


def _differences(document: ManifestDocument) -> Differences | None:
    """Compare the witnessed checksums with those of the owners, by the identities of chunks."""
    wanted: defaultdict[int, defaultdict[int, list[_Told]]]
    wanted = defaultdict(lambda: defaultdict(list))
    for part in document.parts:
        tensors = document.structures[part.structure].tensors
        borrowed = facts_of(document.layouts[part.layout], tensors).borrowed
        for number, first, *sums in part.witnesses:
            told = part.rank, borrowed.end[number], first, sums
            wanted[borrowed.owner[number]][borrowed.identity[number]].append(told)
    found: list[DifferingCopy] = []
    for owner, told_of in wanted.items():
        part = document.parts[owner]
        layout, tensors = document.layouts[part.layout], document.structures[part.structure].tensors
        own, entries, chunks = facts_of(layout, tensors).own, layout.entries, layout.chunks
        if own is None:
            own = own_identities(chunks, tensors)
        ends = [0, *accumulate(map(chunk_count, entries.nbytes))]
        rows = (row for row, other in enumerate(chunks.owner) if other is None)
        for row, identity in zip(rows, own, strict=True):
            if identity not in told_of:
                continue
            entry = chunks.entry[row]
            assert entry is not None
            size = entries.nbytes[entry]
            ranks, mebibytes = set[int](), set[int]()
            for rank, nbytes, first, sums in told_of[identity]:
                # Otherwise the owner's entry has more than the elements of the chunk.
                if chunks.stride[row] is None and nbytes == size:
                    for number, value in enumerate(sums, first):
                        if part.checksums[ends[entry] + number] != value:
                            ranks.add(rank)
                            mebibytes.add(number)
            if ranks:
                label, box = tensors[chunks.tensor[row]].label, chunks.box[row]
                cells = tuple(sorted(ranks)), tuple(sorted(mebibytes))
                found.append(DifferingCopy(label, box, owner, *cells))
    found.sort(key=lambda each: (each.tensor, each.box or (), each.owner))
    return Differences(len(found), tuple(found[:MOST_DIFFERENCES])) if found else None


def differ_privately(document: ManifestDocument, holders: Sequence[tuple[int, int]]) -> bool:
    """Tell whether parts hold different private tensors under one label.

    Args:
        document: An index.
        holders: Numbers of parts with different structures, each with the number of the tensor.
    """
    if len(holders) < 2:
        return False
    found: list[tuple[Any, ...]] = []
    shapes = set()
    for number, tensor in holders:
        part = document.parts[number]
        row = document.structures[part.structure].tensors[tensor]
        shapes.add((row.shape, row.dtype))
        place = document.layouts[part.layout].private.get(tensor)
        if place is not None:
            found.append((place[0], part.checksums[place[1]]))
    return len(shapes) > 1 or (len(found) == len(holders) and len(set(found)) > 1)


# Copies of several groups of ranks


def _differing_copies(document: ManifestDocument) -> list[set[int]]:
    """Return for each structure the tensors of which groups of ranks have written different copies.

    Args:
        document: A document of all ranks.
    """
    found: list[set[int]] = [set() for _ in document.structures]
    copies = _Copies(document)
    if copies.any:
        for tensor in copies.differing():
            for structure, numbers in enumerate(copies.numbers):
                if tensor in numbers:
                    found[structure].add(numbers[tensor])
    return found


class _Copies:
    """The chunks that ranks leave to others, and the tensors of all structures, numbered together.

    Attributes:
        any: True if a rank leaves chunks to others.
        numbers: For each structure, the numbers of its tensors there, by their common numbers.
    """

    def __init__(self, document: ManifestDocument) -> None:
        self._document = document
        self._pairs = list(dict.fromkeys((part.structure, part.layout) for part in document.parts))
        self.any = any(self._borrowed(*pair).owner for pair in self._pairs)
        self._rows: list[TensorRow] = []
        self._common: list[list[int]] = []
        known: dict[tuple[Any, ...], int] = {}
        for structure in document.structures if self.any else ():
            numbers = []
            for row in structure.tensors:
                number = known.setdefault((row.label, row.dtype, row.shape), len(self._rows))
                if number == len(self._rows):
                    self._rows.append(row)
                numbers.append(number)
            self._common.append(numbers)
        self.numbers = [
            {number: tensor for tensor, number in enumerate(numbers)} for numbers in self._common
        ]
        self._own: dict[int, dict[int, tuple[Any, ...]]] = {}

    def differing(self) -> Iterator[int]:
        """Yield the common numbers of tensors of which there are different copies."""
        import numpy as np

        keys, tensors, identities, ranks, sizes = self._left_to_others
        written = np.bincount(tensors, weights=sizes, minlength=len(self._rows))
        suspects = {
            number for number in np.unique(tensors).tolist() if written[number] > self._size(number)
        }
        owners: defaultdict[int, defaultdict[int, dict[int, int]]]
        owners = defaultdict(lambda: defaultdict(dict))
        for number, identity, rank in self._whole_copies(keys, set(np.unique(tensors).tolist())):
            suspects.add(number)
            owners[number][rank][identity] = self._size(number)
        chosen = np.isin(tensors, list(suspects))
        columns = [column[chosen].tolist() for column in (tensors, identities, ranks, sizes)]
        for number, identity, rank, size in zip(*columns, strict=True):
            owners[number][rank][identity] = size
        groups = self._groups(suspects)
        for number in sorted(suspects):
            copies: defaultdict[int, dict[int, int]] = defaultdict(dict)
            writers: defaultdict[int, dict[int, int]] = defaultdict(dict)
            for rank, chunks in owners[number].items():
                group = groups.find(number, rank)
                copies[group] |= chunks
                writers[group] |= dict.fromkeys(chunks, rank)
            whole = [
                {(each, self._written(rank, each)) for each, rank in writers[group].items()}
                for group, chunks in copies.items()
                if sum(chunks.values()) == self._size(number)
            ]
            if any(each != whole[0] for each in whole):
                yield number

    def _groups(self, suspects: set[int]) -> _Groups:
        """Join the ranks that leave chunks of a tensor to each other."""
        found = _Groups()
        layouts: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for part in self._document.parts:
            layouts[part.structure, part.layout].append(part.rank)
        for (structure, layout), ranks in layouts.items():
            borrowed, numbers = self._borrowed(structure, layout), self._common[structure]
            for owner, tensor in zip(borrowed.owner, borrowed.tensor, strict=True):
                if numbers[tensor] in suspects:
                    for rank in ranks:
                        found.join(numbers[tensor], owner, rank)
        return found

    def _borrowed(self, structure: int, layout: int) -> Any:
        tensors = self._document.structures[structure].tensors
        return facts_of(self._document.layouts[layout], tensors).borrowed

    def _size(self, number: int) -> int:
        row = self._rows[number]
        return math.prod(row.shape) * (item_bytes(row.dtype) or 1)

    @cached_property
    def _left_to_others(self) -> tuple[npt.NDArray[np.int64], ...]:
        """The distinct pairs of chunk and owner, as columns.

        These are a key of each pair, sorted; the common number of the tensor; the identity of the
        chunk; the owner; and the size in bytes.
        """
        import numpy as np

        common = [np.array(numbers, np.int64) for numbers in self._common]
        known: tuple[npt.NDArray[np.int64], ...] = tuple(np.empty(0, np.int64) for _ in range(5))
        pending: list[tuple[npt.NDArray[np.int64], ...]] = []
        rows = 0
        for structure, layout in self._pairs:
            borrowed = self._borrowed(structure, layout)
            columns = np.stack([np.frombuffer(each, np.int64) for each in borrowed])
            # A chunk without an entry number has no offset, so its end is its size.
            owner, _, size, tensor, identity = columns[:, columns[1] < 0]
            keys = _keys(identity, owner)
            pending.append((keys, common[structure][tensor], identity, owner, size))
            rows += len(owner)
            if rows > _MOST_PENDING:
                known, pending, rows = _distinct([known, *pending]), [], 0
        return _distinct([known, *pending])

    def _whole_copies(
        self, keys: npt.NDArray[np.int64], left: set[int]
    ) -> Iterator[tuple[int, int, int]]:
        """Yield the tensors that others leave to each other and a rank writes whole for itself.

        Yields:
            The common number of the tensor, the identity of the chunk, and the rank.
        """
        import numpy as np

        for part in self._document.parts:
            private = self._document.layouts[part.layout].private
            numbers = self._common[part.structure]
            for tensor in private:
                number = numbers[tensor]
                if number not in left:
                    continue
                identity = identity_of(self._rows[number], None)
                key = _keys(np.array([identity]), np.array([part.rank]))
                at = int(np.searchsorted(keys, key)[0])
                if at == len(keys) or keys[at] != key[0]:
                    yield number, identity, part.rank

    def _written(self, rank: int, identity: int) -> tuple[Any, ...]:
        """Return the facts and checksums of the bytes that a rank has written of a chunk."""
        if rank not in self._own:
            part = self._document.parts[rank]
            layout = self._document.layouts[part.layout]
            tensors = self._document.structures[part.structure].tensors
            entries, own = layout.entries, dict[int, tuple[Any, ...]]()
            ends = [0, *accumulate(map(chunk_count, entries.nbytes))]
            for chunk in layout.chunks:
                if chunk.owner is None and chunk.entry is not None:
                    entry = chunk.entry
                    sums = tuple(part.checksums[ends[entry] : ends[entry + 1]])
                    facts = (entries.dtype[entry], entries.shape[entry], chunk.offset, chunk.stride)
                    own[identity_of(tensors[chunk.tensor], chunk.box)] = (*facts, sums)
            self._own[rank] = own
        return self._own[rank].get(identity, (rank,))  # unlike any other if it is not there


class _Groups:
    """Disjoint sets of ranks, for each tensor."""

    def __init__(self) -> None:
        self._above: dict[tuple[int, int], int] = {}

    def find(self, tensor: int, rank: int) -> int:
        """Return the rank that stands for the group of a rank."""
        while (above := self._above.get((tensor, rank), rank)) != rank:
            rank = above
        return rank

    def join(self, tensor: int, one: int, other: int) -> None:
        """Make the groups of two ranks one."""
        one, other = self.find(tensor, one), self.find(tensor, other)
        if one != other:
            self._above[tensor, max(one, other)] = min(one, other)


def _keys(identity: npt.NDArray[np.int64], owner: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    import numpy as np

    mixed = owner.astype(np.uint64) * np.uint64(_MIX)
    return identity ^ mixed.view(np.int64)


def _distinct(
    tables: list[tuple[npt.NDArray[np.int64], ...]],
) -> tuple[npt.NDArray[np.int64], ...]:
    """Join tables of pairs, and keep each pair once, in the order of keys."""
    import numpy as np

    columns = [np.concatenate(each) for each in zip(*tables, strict=True)]
    _, first = np.unique(columns[0], return_index=True)
    return tuple(column[first] for column in columns)
