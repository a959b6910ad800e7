"""Layouts that are kept as text say and are checked for the same as those that are rows."""

from __future__ import annotations

import pytest
import torch
from bundles import ID, Foreign, document_of, manifest_of, sealed

from ckpipe.errors import CorruptCheckpoint, InvalidExtent, InvalidManifest, OversizedMetadata
from ckpipe.format.checksummed_json import seal
from ckpipe.format.codec import decode_bundle, encode_bundle
from ckpipe.format.manifest import ManifestDocument
from ckpipe.format.merge import merge


def index() -> ManifestDocument:
    """Ranks of two structures, one of which leaves a tensor to another rank."""
    small, large = {"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(40)}
    return merge(
        [
            manifest_of(small, 0, 3)[0],
            manifest_of(large, 1, 3)[0],
            manifest_of(large, 2, 3, foreign={"b": Foreign(1)})[0],
        ],
        "index",
    )


def read(data: bytes, most_rows: int) -> ManifestDocument:
    return decode_bundle(data, key="key", id=ID, kind="index", most_rows=most_rows)


def test_text_and_rows_are_the_same_bundle() -> None:
    data = encode_bundle(index())
    lean, full = read(data, 0), read(data, 1 << 20)
    assert lean == full == index()
    assert encode_bundle(lean) == encode_bundle(full) == data
    # The number of a layout's structure is no part of what is kept.
    assert len({id(layout) for layout in lean.layouts}) == len(lean.layouts) == 3


@pytest.mark.parametrize("most_rows", [0, 1 << 20])
def test_layouts_may_stand_before_their_structures(most_rows: int) -> None:
    document = document_of(encode_bundle(index()))
    turned = {name: document[name] for name in reversed(document)}
    assert read(sealed(turned), most_rows) == index()


@pytest.mark.parametrize("most_rows", [0, 1 << 20])
def test_a_layout_is_checked_with_every_structure_that_parts_pair_it_with(most_rows: int) -> None:
    document = document_of(encode_bundle(index()))
    # The second layout has two tensors; the first structure has one.
    document["parts"]["structure"][1] = 0
    with pytest.raises(InvalidManifest, match="not there"):
        read(sealed(document), most_rows)


@pytest.mark.parametrize("most_rows", [0, 1 << 20])
def test_hostile_layouts_are_refused(most_rows: int) -> None:
    def damaged(path: tuple[str, str], value: list[object]) -> bytes:
        document = document_of(encode_bundle(index()))
        document["layouts"][1][path[0]][path[1]] = value
        return sealed(document)

    cases: list[tuple[tuple[str, str], list[object], type[CorruptCheckpoint]]] = [
        (("entries", "offset"), [0, 9], InvalidExtent),
        (("chunks", "offset"), [4, 0], InvalidExtent),
        (("chunks", "entry"), [0, 7], InvalidManifest),
        (("chunks", "tensor"), [0, 2], InvalidManifest),
        # What another rank leaves to this one is another box now.
        (("chunks", "box"), [None, [[0], [39]]], InvalidManifest),
    ]
    for path, value, error in cases:
        with pytest.raises(error):
            read(damaged(path, value), most_rows)


def test_what_a_reader_would_refuse_for_its_size_is_not_written() -> None:
    document = {"a": "x" * 1000}
    size = len(seal(document))
    assert seal(document, size + 1)
    with pytest.raises(OversizedMetadata):
        seal(document, size - 1)
