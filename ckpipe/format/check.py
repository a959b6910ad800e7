"""Check that the numbers of a bundle from a store fit together.

Types have been checked when the bundle was read. Code that works with a bundle may rely on both.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence

from ckpipe.errors import (
    DuplicateName,
    InvalidExtent,
    InvalidManifest,
    OversizedMetadata,
    UnsafePath,
    WrongWorldSize,
)
from ckpipe.format.data_file import ALIGNMENT, MAX_HEADER_BYTES, item_bytes
from ckpipe.format.layouts import (
    LayoutFacts,
    check_in_entry,
    chunk_columns,
    facts_of,
    own_identities,
)
from ckpipe.format.manifest import MAX_NUMBER, ManifestDocument, RankManifest, Structure, TensorRow
from ckpipe.format.names import data_file_name, group_ranks
from ckpipe.format.tree import check_tree

_KINDS = frozenset(("tensor", "parameter", "buffer", "subclass", "numpy"))
_LAZY = frozenset(("", "c", "n", "cn"))
_MAX_CRC = 0xFFFFFFFF


Facts = Mapping[tuple[int, int], LayoutFacts]
"""What is known of layouts, by the numbers of a structure and a layout."""


def check_bundle(bundle: ManifestDocument, known: Facts | None = None) -> None:
    """Checks that a bundle agrees with itself and with the format.

    Args:
        bundle: The bundle.
        known: What is known of layouts that were checked when they were read.

    Raises:
        UnsafePath: If a file's name is not the one that the format gives it.
        InvalidExtent: If extents overlap, leave holes or lie outside of what holds them.
        DuplicateName: If labels, names or keys stand twice.
        WrongWorldSize: If its ranks are not those of its kind and world size.
        InvalidManifest: If anything else contradicts itself.
    """
    check_ranks(bundle)
    for structure in bundle.structures:
        check_structure(structure)
    for part in bundle.parts:
        _check_part(bundle, part)
    facts = known_facts(bundle, known or {})
    for part in bundle.parts:
        layout = facts[part.structure, part.layout]
        _check_files(part, layout.data_bytes)
        _check_checksums(part, layout.checksums)
    _check_foreign(bundle, facts)
    check_owners(bundle, facts)
    _check_per_rank(bundle)


def known_facts(bundle: ManifestDocument, known: Facts) -> Facts:
    """Collect the facts of a bundle's layouts; each is checked, unless it was when it was read.

    Args:
        bundle: The bundle.
        known: What is known already.

    Raises:
        As :func:`ckpipe.format.layouts.check_layout` does.
    """
    return {
        place: known.get(place)
        or facts_of(bundle.layouts[layout], bundle.structures[number].tensors)
        for place in dict.fromkeys((p.structure, p.layout) for p in bundle.parts)
        for number, layout in (place,)
    }


def check_structure(structure: Structure) -> None:
    """Checks that a structure agrees with itself.

    Raises:
        InvalidExtent: If a tensor has more elements than any memory holds.
        DuplicateName: If labels or keys stand twice.
        InvalidManifest: If anything else contradicts itself.
    """
    _check_tensors(structure)
    check_tree(structure)


def check_ranks(bundle: ManifestDocument) -> None:
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
    """Checks that tensors have dtypes that are known; returns the bytes of an element of each.

    Raises:
        InvalidManifest: If one has not.
    """
    sizes = {dtype: item_bytes(dtype) for dtype in {row.dtype for row in rows}}
    unknown = [dtype for dtype, size in sizes.items() if not size]
    if unknown:
        raise InvalidManifest(f"A tensor has the unknown dtype {min(unknown)!r:.100}")
    return {dtype: size for dtype, size in sizes.items() if size}


def _check_part(bundle: ManifestDocument, part: RankManifest) -> None:
    if part.structure >= len(bundle.structures) or part.layout >= len(bundle.layouts):
        raise InvalidManifest(
            "A part points to a structure or layout that is not there", rank=part.rank
        )
    if len(part.values) != bundle.structures[part.structure].values:
        raise InvalidManifest("A part has another number of values than its tree", rank=part.rank)


def _check_files(part: RankManifest, data_bytes: Sequence[int]) -> None:
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


def _check_checksums(part: RankManifest, expected: int) -> None:
    if len(part.checksums) != expected or max(part.checksums, default=0) > _MAX_CRC:
        raise InvalidManifest(
            f"A part has {len(part.checksums)} checksums instead of {expected}", rank=part.rank
        )


def _check_foreign(bundle: ManifestDocument, facts: Facts) -> None:
    """Checks that what ranks say of the entries of others is so, as far as those are here."""
    layout_of = {part.rank: (part.structure, part.layout) for part in bundle.parts}
    for (structure, number), known in facts.items():
        foreign = known.foreign
        if foreign.owner and max(foreign.owner) >= bundle.world_size:
            raise WrongWorldSize("A chunk is owned by a rank outside the world")
        for owner, entry, end, chunk in zip(*foreign[:4], strict=True):
            # What a rank of another group wrote is checked when that group is read.
            place = layout_of.get(owner)
            if entry >= 0 and place is not None:
                tensor = bundle.layouts[number].chunks[chunk].tensor
                label = bundle.structures[structure].tensors[tensor].label
                check_in_entry(entry, end, facts[place].sizes, label)


def check_owners(bundle: ManifestDocument, facts: Facts) -> None:
    """Checks that ranks have written what others, which do not know where, leave to them.

    Of ranks that are not in the bundle nothing is asked.

    Args:
        bundle: The bundle, checked but for this.
        facts: What is known of its layouts.

    Raises:
        InvalidManifest: If a rank has not. Ranks that hold the same shard have then disagreed
            about its name, dtype or shape, or about what is replicated.
    """
    places = {part.rank: (part.structure, part.layout) for part in bundle.parts}
    left: dict[int, list[tuple[array[int], tuple[int, int]]]] = {}
    for place, known in facts.items():
        unknown: dict[int, array[int]] = {}
        for owner, entry, identity in zip(
            known.foreign.owner, known.foreign.entry, known.foreign.identity, strict=True
        ):
            if entry < 0 and owner in places:
                unknown.setdefault(owner, array("q")).append(identity)
        for owner, identities in unknown.items():
            left.setdefault(owner, []).append((identities, place))
    for owner, wanted in left.items():
        written = _written(bundle, facts, places[owner])
        for identities, place in wanted:
            if not written.issuperset(identities):
                raise _not_written(bundle, facts[place], place, owner, written)


def _written(bundle: ManifestDocument, facts: Facts, place: tuple[int, int]) -> set[int]:
    own = facts[place].own
    if own is None:
        tensors = bundle.structures[place[0]].tensors
        return set(own_identities(chunk_columns(bundle.layouts[place[1]]), tensors))
    return set(own)


def _not_written(
    bundle: ManifestDocument,
    facts: LayoutFacts,
    place: tuple[int, int],
    owner: int,
    written: set[int],
) -> InvalidManifest:
    foreign = facts.foreign
    chunk = next(
        number
        for who, entry, number, identity in zip(
            foreign.owner, foreign.entry, foreign.number, foreign.identity, strict=True
        )
        if who == owner and entry < 0 and identity not in written
    )
    tensor = bundle.layouts[place[1]].chunks[chunk].tensor
    label = bundle.structures[place[0]].tensors[tensor].label
    return InvalidManifest(
        "Others leave this tensor or a part of it to a rank that has not written it",
        step=bundle.id.step,
        rank=owner,
        key=label[:200],
        hint="Ranks must agree on names, shapes, dtypes and what is replicated; what only some of "
        'them have alike needs plan="global"',
    )


def _check_per_rank(bundle: ManifestDocument) -> None:
    if bundle.kind != "index":
        return
    if len(bundle.per_rank) != len(bundle.structures):
        raise InvalidManifest("What differs between ranks is not told for each structure")
    for each, structure in zip(bundle.per_rank, bundle.structures, strict=True):
        too_large = max(each.tensors, default=-1) >= len(structure.tensors)
        if too_large or max(each.values, default=-1) >= structure.values:
            raise InvalidManifest("What differs between ranks names what is not there")
