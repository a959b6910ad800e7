"""Merging manifests into group objects, and those into the index.

The result depends on the manifests alone: not on the order in which they came, and not on how
they were grouped on the way. So whoever merges the same manifests writes the same object, and it
does not matter who of several is first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ckpipe.canonical_json import Numbering, canonical
from ckpipe.checksum import chunk_count
from ckpipe.errors import InvalidManifest, WrongWorldSize
from ckpipe.keys import Json
from ckpipe.manifest import Bundle, BundleKind, Layout, Part, PerRank
from ckpipe.manifest_checks import check_ranks
from ckpipe.manifest_tables import layout_form, structure_form


def merge(
    bundles: Iterable[Bundle], kind: BundleKind, group: tuple[int, int] | None = None
) -> Bundle:
    """The group object or index of manifests, or of group objects, of one checkpoint.

    Args:
        bundles: At least one, in any order; together they hold each rank once.
        kind: What to make; ``index`` of one manifest is what a world of one rank writes.
        group: Level and number of a group object.

    Raises:
        WrongWorldSize: If they do not agree on the world size, or are not the ranks that the
            result must have.
        InvalidManifest: If they are not of one checkpoint.
    """
    found = list(bundles)
    first = found[0]
    if any(each.id != first.id for each in found):
        raise InvalidManifest("Manifests of different checkpoints cannot be merged")
    if any(each.world_size != first.world_size for each in found):
        raise WrongWorldSize("Manifests do not agree on the world size", step=first.id.step)
    structures, layouts, values = Numbering(), Numbering(), Numbering()
    parts = []
    pairs = [(part, source) for source in found for part in source.parts]
    for part, source in sorted(pairs, key=lambda pair: pair[0].rank):
        structure = structures.number(source.structures[part.structure], structure_form)
        layout = layouts.number(source.layouts[part.layout], layout_form)
        shared = values.items[values.number(part.values)]
        parts.append(replace(part, structure=structure, layout=layout, values=shared))
    merged = Bundle(
        kind, first.id, first.world_size, tuple(structures.items), tuple(layouts.items),
        tuple(parts), group,
    )  # fmt: skip
    check_ranks(merged)
    return replace(merged, per_rank=_per_rank(merged)) if kind == "index" else merged


def _per_rank(bundle: Bundle) -> tuple[PerRank, ...]:
    members: list[list[Part]] = [[] for _ in bundle.structures]
    for part in bundle.parts:
        members[part.structure].append(part)
    private = [_private(layout) for layout in bundle.layouts]
    return tuple(
        PerRank(_differing_tensors(each, private), _differing_values(each)) for each in members
    )


def _differing_values(parts: Sequence[Part]) -> tuple[int, ...]:
    distinct: dict[int, tuple[Json, ...]] = {id(part.values): part.values for part in parts}
    if len(distinct) < 2:
        return ()
    return tuple(
        number
        for number, forms in enumerate(zip(*distinct.values(), strict=True))
        if len({canonical(form) for form in forms}) > 1
    )


_Place = tuple[tuple[Any, ...], slice]
"""How a tensor lies in its entry, and which of its part's checksums are those of the entry."""


def _private(layout: Layout) -> dict[int, _Place]:
    """The tensors that a rank holds whole and wrote itself."""
    sums: list[slice] = []
    end = 0
    for entry in layout.entries:
        sums.append(slice(end, end + chunk_count(entry.nbytes)))
        end = sums[-1].stop
    found: dict[int, _Place] = {}
    for chunk in layout.chunks:
        if chunk.box is None and chunk.owner is None and chunk.entry is not None:
            row = layout.entries[chunk.entry]
            place = (row.dtype, row.shape, chunk.offset, chunk.stride)
            found[chunk.tensor] = (place, sums[chunk.entry])
    return found


def _differing_tensors(
    parts: Sequence[Part], private: Sequence[dict[int, _Place]]
) -> tuple[int, ...]:
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
    return tuple(sorted(differing))


def differ_privately(bundle: Bundle, holders: Sequence[tuple[int, int]]) -> bool:
    """Whether parts hold a tensor of one label each for itself, and not alike.

    Args:
        bundle: An index.
        holders: Parts, of structures of their own, with the number of the tensor in each.
    """
    if len(holders) < 2:
        return False
    found: list[tuple[Any, ...]] = []
    shapes = set()
    for number, tensor in holders:
        part = bundle.parts[number]
        row = bundle.structures[part.structure].tensors[tensor]
        shapes.add((row.shape, row.dtype))
        place = _private(bundle.layouts[part.layout]).get(tensor)
        if place is not None:
            found.append((place[0], part.checksums[place[1]]))
    return len(shapes) > 1 or (len(found) == len(holders) and len(set(found)) > 1)
