"""Write and read documents as ``docs/format.md`` defines them.

Values that several ranks share are written once: structures and layouts, which a document numbers
anyway, and lists of inline values, writers, metadata and metrics, which are numbered here. Two
such values are the same if their JSON is the same text; Python's ``==`` would take True for 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from ckpipe.errors import (
    CorruptCheckpoint,
    InvalidManifest,
    OversizedMetadata,
    UnsupportedState,
    UnsupportedVersion,
)
from ckpipe.format.check import check_document, check_dtypes, facts_of
from ckpipe.format.checksummed_json import Element, decode_json, encode_json, says_newer
from ckpipe.format.data_file import STORED_ITEM_BYTES
from ckpipe.format.labels import Json, Numbering, canonical, decode_float
from ckpipe.format.manifest import (
    CHUNKS,
    DIFFERENCES,
    ENTRIES,
    FILES,
    FORMAT_VERSION,
    MAX_NUMBER,
    OPTIMIZERS,
    PARTS,
    SHARED,
    TENSORS,
    Chunks,
    Differences,
    DocumentKind,
    Entries,
    Layout,
    ManifestDocument,
    PerRank,
    RankManifest,
    Structure,
    number_lists,
    structure_text,
)
from ckpipe.format.tree import decoded
from ckpipe.types import CheckpointId

MAX_STORED_BYTES = 1 << 30
"""Bytes of the longest stored form, and of the longest JSON, that a reader needs to accept."""

FORMAT_NAME = "ckpipe"
_WINDOW = "~window"

MOST_ROWS = 1 << 18
"""Number of chunks of a document that are kept as columns; further layouts are kept as text."""


def encode_document(document: ManifestDocument) -> bytes:
    """Encode a document in its stored form; equal documents give equal bytes.

    Args:
        document: The document.

    Raises:
        OversizedMetadata: If it is larger than a reader accepts.
        UnsupportedState: If the tree is nested too deeply to be written.
        ValueError: If metadata holds a float that is not finite.
    """
    members: dict[str, Any] = {
        "format": FORMAT_NAME,
        "version": max((each.version for each in document.structures), default=1),
        "kind": document.kind,
        "step": document.id.step,
        "attempt": document.id.attempt,
        "count": document.id.count,
        "world_size": document.world_size,
    }
    if document.group is not None:
        members["group"] = document.group
    # As iterators, so that their texts are never in memory together.
    members["structures"] = (structure_text(each) for each in document.structures)
    members["layouts"] = _layout_texts(document)
    try:
        members.update(_encode_parts(document.parts))
        if document.kind == "index":
            members["per_rank"] = [
                {"tensors": each.tensors, "values": each.values} for each in document.per_rank
            ]
        if document.differences is not None:
            rows = DIFFERENCES.encode(document.differences.found)
            members["differences"] = {"count": document.differences.count, **rows}
        if document.report is not None:
            members["report"] = document.report
        return encode_json(members, MAX_STORED_BYTES)
    except OversizedMetadata as error:
        raise error.located(step=document.id.step) from None
    except RecursionError:
        raise UnsupportedState(
            "The state is nested too deeply", step=document.id.step, hint="Flatten it"
        ) from None


def _layout_texts(document: ManifestDocument) -> Iterator[str]:
    """Yield the JSON of the layouts, in order, each with the number of its structure."""
    structure_of: dict[int, int] = {}
    for part in document.parts:
        structure_of.setdefault(part.layout, part.structure)
    labels_of = [tuple(row.label for row in each.tensors) for each in document.structures]
    numbers_of = [{label: n for n, label in enumerate(labels)} for labels in labels_of]
    for number, layout in enumerate(document.layouts):
        structure = structure_of.get(number, 0)
        labels = labels_of[structure] if labels_of else ()
        numbers = numbers_of[structure] if numbers_of else {}
        yield _structure_head(structure) + layout_text(layout, numbers, labels)


def _structure_head(structure: int) -> str:
    return f'{{"structure":{structure}'


def layout_text(layout: Layout, numbers: Mapping[str, int], labels: tuple[str, ...]) -> str:
    """Return the JSON of a layout behind the number of its structure.

    Args:
        layout: The layout.
        numbers: The number of each label of the structure.
        labels: The labels of the structure, in order.
    """
    if isinstance(layout, _TextLayout) and layout.labels == labels:
        return layout.text
    entries = ENTRIES.encode(layout.entries)
    entries["name"] = [_encode_name(name, numbers) for name in entries["name"]]
    return "," + canonical({"entries": entries, "chunks": CHUNKS.encode(layout.chunks)})[1:]


def _encode_name(name: str, labels: Mapping[str, int]) -> Json:
    number = labels.get(name)
    if number is not None:
        return number
    head, at, tail = name.partition("@")
    if not at and name.endswith(_WINDOW):
        head, tail = name.removesuffix(_WINDOW), _WINDOW
    number = labels.get(head)
    return name if number is None else [number, at + tail]


def _encode_parts(parts: tuple[RankManifest, ...]) -> dict[str, Json]:
    table = PARTS.encode(parts)
    data: dict[str, Json] = {}
    for name in SHARED:
        table.pop(name, None)
        if len(parts) == 1:  # no other part to share with
            data[name] = [getattr(parts[0], name)]
            continue
        numbering = Numbering()
        cells = [numbering.number(getattr(part, name)) for part in parts]
        data[name] = numbering.items
        if any(cells):
            table[name] = cells
    table["files"] = [FILES.encode(files) for files in table["files"]]
    data["parts"] = table
    return data


def decode_document(
    data: bytes,
    *,
    key: str,
    id: CheckpointId,
    kind: DocumentKind,
    max_bytes: int = MAX_STORED_BYTES,
    most_rows: int = MOST_ROWS,
) -> ManifestDocument:
    """Read and validate a document, which may be hostile.

    Args:
        data: The content of ``key``.
        key: The key, which errors name.
        id: The expected checkpoint.
        kind: The expected kind.
        max_bytes: The most bytes of JSON to accept, decompressed.
        most_rows: Number of chunks to keep as columns; further layouts are kept as text.

    Raises:
        UnsupportedVersion: If it was written in a newer format.
        TruncatedObject: If it is cut off.
        ChecksumMismatch: If a bit of it was changed.
        UnsafePath: If a file's name is not the one that the format gives it.
        InvalidExtent: If extents overlap, leave holes or exceed their entry, file or shape.
        DuplicateName: If a name stands twice.
        OversizedMetadata: If it is larger than ``max_bytes``.
        WrongWorldSize: If its ranks are not those of its kind and world size.
        InvalidManifest: If it is malformed in another way.
    """
    reading = _Reading(most_rows)
    try:
        members = decode_json(data, max_bytes, reading.elements())
        _check_version(members)
        _check_identity(members, id, kind)
        structures = _list(members, "structures")
        if members["version"] > 1:
            structures = [replace(each, version=members["version"]) for each in structures if each]
        report = members.get("report")
        document = ManifestDocument(
            kind,
            id,
            _number(members, "world_size"),
            tuple(structures),
            reading.layouts(_list(members, "layouts")),
            _decode_parts(members),
            _decode_group(members) if kind == "group" else None,
            _decode_per_rank(members, len(structures)) if kind == "index" else (),
            # Not validated: a report of the past must not keep a checkpoint from loading.
            report if isinstance(report, dict) else None,
            differences=_decode_differences(members) if kind == "index" else None,
        )
        check_document(document)
    except (CorruptCheckpoint, UnsupportedVersion) as error:
        if isinstance(error, CorruptCheckpoint) and says_newer(data, FORMAT_VERSION):
            error = _newer()
        error.key = error.key or key
        raise error.located(step=id.step) from None
    return document


class _TextLayout(Layout):
    """A checked layout of a large document, kept as its JSON text; each access parses its columns.

    Merging needs no more than the text, which is a tenth of the columns' size.

    Args:
        layout: The layout, checked.
        text: Its JSON behind the number of its structure, which differs between documents.
        labels: The labels of the structure, to which the names of its entries refer.
    """

    def __init__(self, layout: Layout, text: str, labels: tuple[str, ...]) -> None:
        super().__init__((), ())
        self.checked, self.private = layout.checked, layout.private
        self.text, self.labels = text, labels

    @property
    def entries(self) -> Entries:
        return _with_names(_read_entries(self._parsed("entries")), self.labels)

    @property
    def chunks(self) -> Chunks:
        return Chunks(*CHUNKS.columns_of(self._parsed("chunks")))

    def _parsed(self, name: str) -> Json:
        return json.loads("{" + self.text[1:])[name]


def _read_entries(data: Json) -> list[list[Any]]:
    """Read the columns of a table of entries, with their sizes; names stay as they were written.

    Raises:
        InvalidManifest: If it is no such table.
    """
    names, dtypes, shapes, files, offsets = ENTRIES.columns_of(data)
    if not set(dtypes) <= STORED_ITEM_BYTES.keys():
        unknown = next(dtype for dtype in dtypes if dtype not in STORED_ITEM_BYTES)
        raise InvalidManifest(f"An entry has the unknown dtype {unknown!r:.100}")
    nbytes = [
        math.prod(shape) * STORED_ITEM_BYTES[dtype]
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    if nbytes and max(nbytes) > MAX_NUMBER:
        raise InvalidManifest("The shape of an entry has more elements than any store can hold")
    return [names, dtypes, shapes, files, offsets, nbytes]


def _with_names(columns: list[list[Any]], labels: Sequence[str]) -> Entries:
    """Return entries of these columns with their full names.

    Raises:
        InvalidManifest: If a name refers to a tensor that is not there.
    """
    names, *others = columns
    found = []
    for name in names:
        number, suffix = name, ""
        if type(name) is list and list(map(type, name)) == [int, str]:
            number, suffix = name
        if type(name) is str:
            found.append(name)
        elif type(number) is int and 0 <= number < len(labels):
            found.append(labels[number] + suffix)
        else:
            raise InvalidManifest(f"An entry has the name {name!r:.100}, which names no tensor")
    return Entries(found, *others)


class _Reading:
    """The structures and layouts of a document, decoded one by one while the document is read.

    Errors in them are raised later, after the check of the version: in a newer format they may have
    any form.
    """

    def __init__(self, most_rows: int) -> None:
        self._most_rows, self._rows = most_rows, 0
        self._structures: list[Structure] = []
        self._labels: list[tuple[str, ...]] = []
        self._error: CorruptCheckpoint | None = None

    def elements(self) -> dict[str, Element]:
        """Return the functions that read them; if kept here, they would be a cycle."""
        return {
            "structures": self._guarded(self._structure),
            "layouts": self._guarded(self._layout),
        }

    def _guarded(self, element: Element) -> Element:
        def guarded(data: Json, text: str) -> Any:
            if self._error is None:
                try:
                    return element(data, text)
                except CorruptCheckpoint as error:
                    self._error = error
            return None

        return guarded

    def _structure(self, data: Json, text: str) -> Structure:
        tree = decoded(_member(data, "tree", list))
        tensors = TENSORS.decode(data.get("tensors"))
        optimizers = OPTIMIZERS.decode(data["optimizers"]) if "optimizers" in data else ()
        structure = Structure(tree, tensors, _number(data, "values"), optimizers)
        self._structures.append(structure)
        self._labels.append(tuple(row.label for row in tensors))
        return structure

    def _layout(self, data: Json, text: str) -> Layout | tuple[Json, str]:
        number = _number(data, "structure")
        if number >= len(self._structures):
            return data, text  # the structure may follow, since members have no order
        entries = _read_entries(data.get("entries"))
        chunks = Chunks(*CHUNKS.columns_of(data.get("chunks")))
        tensors, labels = self._structures[number].tensors, self._labels[number]
        check_dtypes(tensors)
        layout = Layout(_with_names(entries, labels), chunks)
        facts_of(layout, tensors)
        self._rows += len(chunks)
        head = _structure_head(number)
        if self._rows > self._most_rows and text.startswith(f"{head},"):
            return _TextLayout(layout, text[len(head) :], labels)
        return layout

    def layouts(self, found: list[Any]) -> tuple[Layout, ...]:
        """Return the layouts, once all structures are known.

        Raises:
            CorruptCheckpoint: If a structure or a layout was malformed.
        """
        if self._error is not None:
            raise self._error
        layouts = []
        for each in found:
            known = self._layout(*each) if isinstance(each, tuple) else each
            if isinstance(known, tuple):
                raise InvalidManifest("A layout points to a structure that is not there")
            layouts.append(known)
        return tuple(layouts)


def _check_version(members: Mapping[str, Json]) -> None:
    version = members.get("version")
    if members.get("format") != FORMAT_NAME or type(version) is not int or version < 1:
        raise InvalidManifest("The object was not written by ckpipe")
    if version > FORMAT_VERSION:
        raise _newer()


def _newer() -> UnsupportedVersion:
    return UnsupportedVersion(
        f"The checkpoint has a newer format than version {FORMAT_VERSION}, the newest that this "
        "ckpipe reads",
        hint="Upgrade ckpipe",
    )


def _check_identity(members: Mapping[str, Json], id: CheckpointId, kind: DocumentKind) -> None:
    expected = {"kind": kind, "step": id.step, "attempt": id.attempt, "count": id.count}
    for name, value in expected.items():
        found = members.get(name)
        if type(found) is not type(value) or found != value:
            raise InvalidManifest(f"The object's {name} is {found!r:.100} instead of {value!r}")


def _decode_parts(members: Mapping[str, Json]) -> tuple[RankManifest, ...]:
    columns = PARTS.columns_of(members.get("parts"))
    names = [each.name for each in PARTS.columns]
    for name in SHARED:
        items, cells = _list(members, name), columns[names.index(name)]
        if name == "values":
            if not all(isinstance(item, list) for item in items):
                raise InvalidManifest("The inline values of a part are not a list")
            items = list(map(tuple, items))
        elif not all(isinstance(item, dict) for item in items):
            raise InvalidManifest("A writer, metadata or metrics are not a JSON object")
        elif name == "metrics":
            for value in chain.from_iterable(item.values() for item in items):
                decode_float(value)
        if cells and max(cells) >= len(items):
            raise InvalidManifest(f"A part points to {name} that are not there")
        columns[names.index(name)] = [items[number] for number in cells]
    return tuple(map(RankManifest, *columns))


def _decode_group(members: Mapping[str, Json]) -> tuple[int, int]:
    found = members.get("group")
    if not isinstance(found, list) or list(map(type, found)) != [int, int]:
        raise InvalidManifest("The group object does not name its group")
    return found[0], found[1]


def _decode_per_rank(members: Mapping[str, Json], structures: int) -> tuple[PerRank, ...]:
    found = members.get("per_rank")
    if not found:
        return (PerRank(),) * structures
    try:
        return tuple(
            PerRank(*number_lists([_member(each, "tensors", list), _member(each, "values", list)]))
            for each in _list(members, "per_rank")
        )
    except ValueError as error:
        raise InvalidManifest(f"The member per_rank is malformed: {error}") from None


def _decode_differences(members: Mapping[str, Json]) -> Differences | None:
    found = members.get("differences")
    if found is None:
        return None
    return Differences(_number(found, "count"), DIFFERENCES.decode(found))


def _list(members: Mapping[str, Json], name: str) -> list[Any]:
    found: list[Any] = _member(members, name, list)
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
