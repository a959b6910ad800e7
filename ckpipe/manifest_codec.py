"""Bundles as they are stored: what ``docs/format.md`` says, written and read.

What several ranks have in common is written once: structures and layouts, which a bundle numbers
anyway, and lists of inline values, writers, metadata and metrics, which are numbered here. Two
such things are the same if their JSON is the same text; Python's ``==`` would take True for 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ckpipe.canonical_json import Numbering
from ckpipe.columns import MAX_NUMBER, make_rows, number_lists
from ckpipe.errors import CorruptCheckpoint, InvalidManifest, UnsupportedState, UnsupportedVersion
from ckpipe.item_sizes import STORED_ITEM_BYTES
from ckpipe.keys import Json
from ckpipe.manifest import (
    FORMAT_VERSION,
    Bundle,
    BundleKind,
    EntryRow,
    Layout,
    Part,
    PerRank,
    Structure,
)
from ckpipe.manifest_checks import check_bundle
from ckpipe.manifest_tables import (
    CHUNKS,
    ENTRIES,
    FILES,
    PARTS,
    SHARED,
    TENSORS,
    structure_form,
)
from ckpipe.sealed_json import seal, unseal
from ckpipe.types import CheckpointId

MAX_STORED_BYTES = 1 << 30
"""The longest stored form of a bundle that a reader needs to accept, and the longest JSON."""

FORMAT_NAME = "ckpipe"

_WINDOW = "~window"
_ENTRY_ATTRIBUTES = (*(column.name for column in ENTRIES.columns), "nbytes")


def encode_bundle(bundle: Bundle) -> bytes:
    """The stored form of a bundle: equal bundles make equal bytes.

    Raises:
        UnsupportedState: If the tree is nested too deeply to be written.
        ValueError: If metadata holds a float that is not finite.
    """
    document: dict[str, Json] = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "kind": bundle.kind,
        "step": bundle.id.step,
        "attempt": bundle.id.attempt,
        "count": bundle.id.count,
        "world_size": bundle.world_size,
    }
    if bundle.group is not None:
        document["group"] = bundle.group
    document["structures"] = [structure_form(each) for each in bundle.structures]
    document["layouts"] = _encode_layouts(bundle)
    try:
        document.update(_encode_parts(bundle.parts))
        if bundle.kind == "index":
            document["per_rank"] = [
                {"tensors": each.tensors, "values": each.values} for each in bundle.per_rank
            ]
        if bundle.report is not None:
            document["report"] = bundle.report
        return seal(document)
    except RecursionError:
        raise UnsupportedState(
            "The state is nested too deeply", step=bundle.id.step, hint="Flatten it"
        ) from None


def _encode_layouts(bundle: Bundle) -> list[Json]:
    structure_of: dict[int, int] = {}
    for part in bundle.parts:
        structure_of.setdefault(part.layout, part.structure)
    numbers_of = [
        {row.label: number for number, row in enumerate(structure.tensors)}
        for structure in bundle.structures
    ]
    data = []
    for number, layout in enumerate(bundle.layouts):
        structure = structure_of.get(number, 0)
        entries = ENTRIES.encode(layout.entries)
        labels = numbers_of[structure] if numbers_of else {}
        entries["name"] = [_encode_name(name, labels) for name in entries["name"]]
        chunks = CHUNKS.encode(layout.chunks)
        data.append({"structure": structure, "entries": entries, "chunks": chunks})
    return data


def _encode_name(name: str, labels: Mapping[str, int]) -> Json:
    number = labels.get(name)
    if number is not None:
        return number
    head, at, tail = name.partition("@")
    if not at and name.endswith(_WINDOW):
        head, tail = name.removesuffix(_WINDOW), _WINDOW
    number = labels.get(head)
    return name if number is None else [number, at + tail]


def _encode_parts(parts: tuple[Part, ...]) -> dict[str, Json]:
    table = PARTS.encode(parts)
    data: dict[str, Json] = {}
    for name in SHARED:
        numbering = Numbering()
        cells = [numbering.number(getattr(part, name)) for part in parts]
        data[name] = numbering.items
        table.pop(name, None)
        if any(cells):
            table[name] = cells
    table["files"] = [FILES.encode(files) for files in table["files"]]
    data["parts"] = table
    return data


def decode_bundle(
    data: bytes,
    *,
    key: str,
    id: CheckpointId,
    kind: BundleKind,
    max_bytes: int = MAX_STORED_BYTES,
) -> Bundle:
    """Reads and validates a bundle that anybody may have written.

    Args:
        data: What the store gave for ``key``.
        key: The key, which errors name.
        id: The checkpoint it must be of.
        kind: What it must be.
        max_bytes: The most bytes of JSON to accept, decompressed.

    Raises:
        UnsupportedVersion: If it was written in a newer format.
        TruncatedObject: If it is cut off.
        ChecksumMismatch: If a bit of it was changed.
        UnsafePath: If a file's name is not the one that the format gives it.
        InvalidExtent: If extents overlap or lie outside of what holds them.
        DuplicateName: If a name stands twice.
        OversizedMetadata: If it is larger than ``max_bytes``.
        WrongWorldSize: If its ranks are not those of its kind and world size.
        InvalidManifest: If anything else about it is wrong.
    """
    try:
        document = unseal(data, max_bytes)
        _check_version(document)
        _check_identity(document, id, kind)
        bundle = _decode(document, id, kind)
        check_bundle(bundle)
    except (CorruptCheckpoint, UnsupportedVersion) as error:
        error.key = error.key or key
        raise error.located(step=id.step) from None
    return bundle


def _check_version(document: Mapping[str, Json]) -> None:
    version = document.get("version")
    if document.get("format") != FORMAT_NAME or type(version) is not int or version < 1:
        raise InvalidManifest("The object was not written by ckpipe")
    if version > FORMAT_VERSION:
        raise UnsupportedVersion(
            f"The checkpoint has a newer format than version {FORMAT_VERSION}, the newest that "
            "this ckpipe reads",
            hint="Upgrade ckpipe",
        )


def _check_identity(document: Mapping[str, Json], id: CheckpointId, kind: BundleKind) -> None:
    expected = {"kind": kind, "step": id.step, "attempt": id.attempt, "count": id.count}
    for name, value in expected.items():
        found = document.get(name)
        if type(found) is not type(value) or found != value:
            raise InvalidManifest(f"The object's {name} is {found!r:.100} instead of {value!r}")


def _decode(document: Mapping[str, Json], id: CheckpointId, kind: BundleKind) -> Bundle:
    structures = tuple(_decode_structure(each) for each in _list(document, "structures"))
    layouts = tuple(_decode_layout(each, structures) for each in _list(document, "layouts"))
    return Bundle(
        kind,
        id,
        _number(document, "world_size"),
        structures,
        layouts,
        _decode_parts(document),
        _decode_group(document) if kind == "group" else None,
        _decode_per_rank(document, len(structures)) if kind == "index" else (),
        _decode_report(document),
    )


def _decode_structure(data: Json) -> Structure:
    tree = _member(data, "tree", list)
    tensors = TENSORS.decode(data.get("tensors"))
    return Structure(tree, tensors, _number(data, "values"))


def _decode_layout(data: Json, structures: tuple[Structure, ...]) -> Layout:
    number = _number(data, "structure")
    tensors = structures[number].tensors if number < len(structures) else ()
    names, dtypes, shapes, files, offsets = ENTRIES.columns_of(data.get("entries"))
    if not set(dtypes) <= STORED_ITEM_BYTES.keys():
        unknown = next(dtype for dtype in dtypes if dtype not in STORED_ITEM_BYTES)
        raise InvalidManifest(f"An entry has the unknown dtype {unknown!r:.100}")
    nbytes = [
        math.prod(shape) * STORED_ITEM_BYTES[dtype]
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    if nbytes and max(nbytes) > MAX_NUMBER:
        raise InvalidManifest("The shape of an entry has more elements than any store can hold")
    labels = [row.label for row in tensors]
    columns = [list(_decode_names(names, labels)), dtypes, shapes, files, offsets, nbytes]
    entries = make_rows(EntryRow, _ENTRY_ATTRIBUTES, columns)
    return Layout(entries, CHUNKS.decode(data.get("chunks")))


def _decode_names(names: Iterable[Json], labels: list[str]) -> Iterable[str]:
    for name in names:
        if type(name) is str:
            yield name
            continue
        number, suffix = (
            name if type(name) is list and list(map(type, name)) == [int, str] else (name, "")
        )
        if type(number) is not int or not 0 <= number < len(labels):
            raise InvalidManifest(f"An entry has the name {name!r:.100}, which names no tensor")
        yield labels[number] + suffix if suffix else labels[number]


def _decode_parts(document: Mapping[str, Json]) -> tuple[Part, ...]:
    columns = PARTS.columns_of(document.get("parts"))
    for place, column in enumerate(PARTS.columns):
        if column.name in SHARED:
            items = [_SHARED_FORMS[column.name](item) for item in _list(document, column.name)]
            columns[place] = _pick(items, columns[place], column.name)
    return make_rows(Part, [each.name for each in PARTS.columns], columns)


def _pick(items: list[Any], cells: Iterable[int], name: str) -> list[Any]:
    chosen = list(cells)
    if chosen and max(chosen) >= len(items):
        raise InvalidManifest(f"A part points to {name} that are not there")
    return [items[number] for number in chosen]


def _mapping(data: Json) -> Mapping[str, Json]:
    if not isinstance(data, dict):
        raise InvalidManifest("A writer, metadata or metrics are not a JSON object")
    return data


def _value_list(data: Json) -> tuple[Json, ...]:
    if not isinstance(data, list):
        raise InvalidManifest("The inline values of a part are not a list")
    return tuple(data)


_SHARED_FORMS: dict[str, Callable[[Json], Any]] = {
    "values": _value_list,
    "writer": _mapping,
    "metadata": _mapping,
    "metrics": _mapping,
}


def _decode_group(document: Mapping[str, Json]) -> tuple[int, int]:
    found = document.get("group")
    if not isinstance(found, list) or list(map(type, found)) != [int, int]:
        raise InvalidManifest("The group object does not say which group it is of")
    return found[0], found[1]


def _decode_per_rank(document: Mapping[str, Json], structures: int) -> tuple[PerRank, ...]:
    found = document.get("per_rank")
    if not found:
        return (PerRank(),) * structures
    try:
        return tuple(
            PerRank(*number_lists([_member(each, "tensors", list), _member(each, "values", list)]))
            for each in _list(document, "per_rank")
        )
    except ValueError as error:
        raise InvalidManifest(f"What differs between ranks is malformed: {error}") from None


def _decode_report(document: Mapping[str, Json]) -> Mapping[str, Any] | None:
    """The report as it is: what only tells of the past must not keep a checkpoint from loading."""
    found = document.get("report")
    return found if isinstance(found, dict) else None


def _list(document: Mapping[str, Json], name: str) -> list[Any]:
    found: list[Any] = _member(document, name, list)
    return found


def _number(data: Json, name: str) -> int:
    found: int = _member(data, name, int)
    if not 0 <= found <= MAX_NUMBER:
        raise InvalidManifest(f"The member {name} is out of range")
    return found


def _member(data: Json, name: str, kind: type) -> Any:
    found = data.get(name) if isinstance(data, dict) else None
    if type(found) is not kind:
        raise InvalidManifest(f"The member {name} is missing or not of type {kind.__name__}")
    return found
