"""Merge manifests into group objects, and group objects into the index.

The result depends on the manifests alone: neither on their order, nor on the groups in between. So
all ranks that merge the same manifests write the same object, and it does not matter which is
first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from ckpipe.errors import InvalidManifest, WrongWorldSize
from ckpipe.format.check import check_ranks, facts_of
from ckpipe.format.codec import layout_text
from ckpipe.format.copies import differing_copies
from ckpipe.format.keys import Json, Numbering, canonical
from ckpipe.format.manifest import (
    BundleKind,
    Layout,
    ManifestDocument,
    PerRank,
    Place,
    RankManifest,
    Structure,
    structure_form,
)


def merge(
    bundles: Iterable[ManifestDocument], kind: BundleKind, group: tuple[int, int] | None = None
) -> ManifestDocument:
    """Merge manifests, or group objects, of one checkpoint into a group object or the index.

    Args:
        bundles: At least one, in any order; together they hold each rank once.
        kind: The kind of the result; a world of one rank writes the ``index`` of one manifest.
        group: Level and number of a group object.

    Raises:
        WrongWorldSize: If they do not agree on the world size, or their ranks are not those of the
            result.
        InvalidManifest: If they are not of one checkpoint.
    """
    merged = _joined(list(bundles), kind, group)
    check_ranks(merged)
    return replace(merged, per_rank=_per_rank(merged)) if kind == "index" else merged


def gathered(bundles: Iterable[ManifestDocument]) -> ManifestDocument:
    """Collect the parts of some ranks of one checkpoint in a bundle outside the merge tree.

    The bundle has each rank once.

    Args:
        bundles: At least one; a rank may be in several.

    Raises:
        WrongWorldSize: If they do not agree on the world size.
        InvalidManifest: If they are not of one checkpoint.
    """
    return _joined(list(bundles), "group", None)


def _joined(
    found: list[ManifestDocument], kind: BundleKind, group: tuple[int, int] | None
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
        structure = structures.number(own, lambda each: canonical(structure_form(each)))
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


def _per_rank(bundle: ManifestDocument) -> tuple[PerRank, ...]:
    members: list[list[RankManifest]] = [[] for _ in bundle.structures]
    for part in bundle.parts:
        members[part.structure].append(part)
        facts_of(bundle.layouts[part.layout], bundle.structures[part.structure].tensors)
    private = [layout.private for layout in bundle.layouts]
    shared = differing_copies(bundle)
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


def differ_privately(bundle: ManifestDocument, holders: Sequence[tuple[int, int]]) -> bool:
    """Tell whether parts hold different private tensors under one label.

    Args:
        bundle: An index.
        holders: Numbers of parts with different structures, each with the number of the tensor.
    """
    if len(holders) < 2:
        return False
    found: list[tuple[Any, ...]] = []
    shapes = set()
    for number, tensor in holders:
        part = bundle.parts[number]
        row = bundle.structures[part.structure].tensors[tensor]
        shapes.add((row.shape, row.dtype))
        place = bundle.layouts[part.layout].private.get(tensor)
        if place is not None:
            found.append((place[0], part.checksums[place[1]]))
    return len(shapes) > 1 or (len(found) == len(holders) and len(set(found)) > 1)
