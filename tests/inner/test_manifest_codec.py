"""Documents survive being written, changed ones fail, and those of version 1 stay readable.

The files of version 1 are of one rank with all that is odd about states, of three ranks, and of two
hundred, whose index is compressed. They are never written again: a change that makes it necessary
breaks the checkpoints of all users.
"""

from __future__ import annotations

import gc
import json
import pickle
import re
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpipe.errors import (
    CorruptCheckpoint,
    InvalidExtent,
    InvalidManifest,
    OversizedMetadata,
    UnsupportedState,
    UnsupportedVersion,
    WrongWorldSize,
)
from ckpipe.format.checksummed_json import decode_json, encode_json, json_text
from ckpipe.format.codec import decode_document, encode_document
from ckpipe.format.manifest import (
    DocumentKind,
    ManifestDocument,
    OptimizerRow,
    Structure,
    TensorRow,
)
from ckpipe.format.merge import merge
from ckpipe.format.names import index_key, summary_id, summary_key
from ckpipe.format.summary import Summary, decode_summary, encode_summary, summary_of
from ckpipe.format.tree import FORMS, Node
from ckpipe.interpreter import gc_paused
from ckpipe.types import CheckpointId
from tests.damage.test_hostile_checkpoints import state
from tests.inner.made_up_ranks import ID, LIMIT, Borrowed, manifest_of
from tests.support.stored_files import (
    SUMMARIES,
    document_of,
    sealed,
    sealed_text,
    summary_data,
)

DOCS = Path(__file__).parents[2] / "docs"

KEY = "some/key.json"


def manifest() -> ManifestDocument:
    return manifest_of(state(), metadata={"a": [1, {"b": None}]}, metrics={"loss": "nan"})[0]


def read(data: bytes, kind: Any = "manifest", **options: Any) -> ManifestDocument:
    return decode_document(data, key=KEY, id=ID, kind=kind, **options)


def large_manifest() -> ManifestDocument:
    return manifest_of({f"tensor-{n}": torch.full((1,), n) for n in range(1500)})[0]


def test_round_trip_of_a_compressed_manifest() -> None:
    document = large_manifest()
    data = encode_document(document)
    assert not data.startswith(b"{")
    assert zlib.decompress(data) == json_text(data, LIMIT)
    assert 4 * len(data) < len(json_text(data, LIMIT))
    assert read(data) == document


def test_rows_that_were_read_pickle_and_replace_like_others() -> None:
    document = read(encode_document(manifest()))
    assert pickle.loads(pickle.dumps(document)) == document
    row = document.structures[0].tensors[0]
    assert replace(row, label="x") == TensorRow("x", row.dtype, row.shape)


def test_a_read_manifest_that_is_dropped_leaves_no_garbage() -> None:
    data = encode_document(manifest())
    gc.collect()
    with gc_paused():
        read(data)
        assert gc.collect() == 0


def optimizer_manifest() -> ManifestDocument:
    parameters = [torch.zeros(2, 3), torch.nn.UninitializedParameter()]
    return manifest_of({"o": torch.optim.SGD(parameters), "x": 1})[0]


def test_facts_of_optimizers_are_written_and_merged() -> None:
    row = OptimizerRow("o", "torch.optim.sgd:SGD", ((2, 3), None))
    index = merge([read(encode_document(optimizer_manifest()))], "index")
    decoded = read(encode_document(index), "index")
    assert decoded.structures[0].optimizers == (row,)
    schema = json.loads((DOCS / "schema" / "document.json").read_text())
    members = {**document_of(encode_document(index)), "crc32c": "00000000"}
    jsonschema.validate(members, schema)


@pytest.mark.parametrize("column", ["label", "kind", "shapes"])
@pytest.mark.parametrize("cells", [None, [1], [[1]], [["x"]], ["x", "x", "x"], [[[-1]]], 7])
def test_malformed_facts_of_optimizers_are_refused(column: str, cells: Any) -> None:
    members = document_of(encode_document(optimizer_manifest()))
    members["structures"][0]["optimizers"][column] = cells
    with pytest.raises(InvalidManifest):
        read(sealed(members))


def test_counts_of_nan_are_written_and_merged() -> None:
    ranks = [
        manifest_of({"v": torch.full((rank + 1,), 1.0)}, rank, 250, nan=((0, rank),) * (rank > 200))
        for rank in range(250)
    ]
    every = [document for document, _ in ranks]
    groups = [
        read(encode_document(merge(every[at : at + 100], "group", (1, at // 100))), "group")
        for at in (0, 100, 200)
    ]
    index = read(encode_document(merge(groups, "index")), "index")
    assert [each.nan for each in index.parts] == [each.parts[0].nan for each in every]
    assert summary_of(index).nan == sum(range(201, 250))
    schema = json.loads((DOCS / "schema" / "document.json").read_text())
    jsonschema.validate({**document_of(encode_document(index)), "crc32c": "00000000"}, schema)


@pytest.mark.parametrize(
    "cell", [None, 1, [1], [[]], [[0]], [[0, 1, 2]], [["a", 1]], [[1, 1]], [[0, 0]], [[0, -1]],
             [[0, 1], [0, 1]], [[True, 1]]]
)  # fmt: skip
def test_malformed_counts_of_nan_are_refused(cell: Any) -> None:
    members = document_of(encode_document(manifest_of({"v": torch.ones(2)}, nan=((0, 1),))[0]))
    assert members["parts"]["nan"] == [[[0, 1]]]
    members["parts"]["nan"] = [cell]
    with pytest.raises(InvalidManifest):
        read(sealed(members))


@pytest.mark.parametrize(("most_plain", "first"), [(100, b"\x78"), (100_000, b"{")])
def test_every_flipped_bit_and_every_truncation_is_found(
    most_plain: int, first: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpipe.format.checksummed_json.PLAIN_BYTES", most_plain)
    data = encode_document(manifest_of({"w": torch.ones(2), "n": 1})[0])
    assert data.startswith(first)
    read(data)
    damaged = [data[:size] for size in range(len(data))]
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(flipped))
    for each in damaged:
        with pytest.raises(CorruptCheckpoint):
            read(each)


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptCheckpoint):
        read(data)


def test_tree_that_json_cannot_write_is_refused() -> None:
    tree = Node("absent")
    for _ in range(100_000):
        tree = Node("list", nodes=[tree])
    document = replace(manifest(), structures=(Structure(tree, (), 0),))
    with pytest.raises(UnsupportedState):
        encode_document(document)


def test_floats_that_are_not_finite_never_reach_the_json() -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        encode_document(manifest_of({}, metadata={"loss": float("nan")})[0])


def test_members_that_a_later_writer_adds_are_ignored() -> None:
    members = document_of(encode_document(manifest()))
    members["hint"] = {"x": 1}
    members["parts"]["colour"] = ["red"]
    assert read(sealed(members)) == manifest()


def index() -> ManifestDocument:
    """Ranks of two structures, one of which leaves a tensor to another rank."""
    small, large = {"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(40)}
    return merge(
        [
            manifest_of(small, 0, 3)[0],
            manifest_of(large, 1, 3)[0],
            manifest_of(large, 2, 3, borrowed={"b": Borrowed(1)})[0],
        ],
        "index",
    )


def test_text_and_columns_are_the_same_document() -> None:
    data = encode_document(index())
    lean, full = read(data, "index", most_rows=0), read(data, "index", most_rows=1 << 20)
    assert lean == full == index()
    assert encode_document(lean) == encode_document(full) == data
    # The number of a layout's structure is no part of what is kept.
    assert len({id(layout) for layout in lean.layouts}) == len(lean.layouts) == 3


@pytest.mark.parametrize("most_rows", [0, 1 << 20])
def test_layouts_may_stand_before_their_structures(most_rows: int) -> None:
    members = document_of(encode_document(index()))
    turned = {name: members[name] for name in reversed(members)}
    assert read(sealed(turned), "index", most_rows=most_rows) == index()


@pytest.mark.parametrize("most_rows", [0, 1 << 20])
def test_a_layout_is_checked_with_every_structure_that_parts_pair_it_with(most_rows: int) -> None:
    members = document_of(encode_document(index()))
    # The second layout has two tensors; the first structure has one.
    members["parts"]["structure"][1] = 0
    with pytest.raises(InvalidManifest, match="not there"):
        read(sealed(members), "index", most_rows=most_rows)


@pytest.mark.parametrize("most_rows", [0, 1 << 20])
def test_hostile_layouts_are_refused(most_rows: int) -> None:
    def damaged(path: tuple[str, str], value: list[object]) -> bytes:
        members = document_of(encode_document(index()))
        members["layouts"][1][path[0]][path[1]] = value
        return sealed(members)

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
            read(damaged(path, value), "index", most_rows=most_rows)


def test_what_a_reader_would_refuse_for_its_size_is_not_written() -> None:
    members = {"a": "x" * 1000}
    size = len(encode_json(members))
    assert encode_json(members, size + 1)
    with pytest.raises(OversizedMetadata):
        encode_json(members, size - 1)


# What others may have made up, with right checksums


@pytest.mark.parametrize(
    "text",
    ['{"a" 1', '{"a",1', '{"a":1;"b":2', '{"a":1},{"b":2', '{"x":[1 2]', '{"x":[1}', '{"x":[,1]'],
)
def test_json_that_is_malformed_between_values_is_refused(text: str) -> None:
    with pytest.raises(InvalidManifest, match="not valid JSON"):
        decode_json(sealed_text(text.encode()), LIMIT, {"x": lambda value, _: value})


def test_white_space_and_empty_arrays_are_read() -> None:
    data = sealed_text(b'{ "a" : 1 , "x" : [ ] , "y" : [ 1 , 2 ] ')
    found = decode_json(data, LIMIT, dict.fromkeys("xy", lambda value, _: -value))
    assert found == {"a": 1, "x": [], "y": [-1, -2]}


def _change(members: dict[str, Any], path: str, value: Any) -> None:
    *way, last = [int(each) if each.isdigit() else each for each in path.split("/")]
    target: Any = members
    for each in way:
        target = target[each]
    target[last] = value


@given(st.data())
def test_no_change_of_a_manifest_raises_anything_but_our_errors(data: st.DataObject) -> None:
    members = document_of(encode_document(manifest()))
    scalars = st.one_of(
        st.none(), st.booleans(), st.integers(-2, 10), st.integers(), st.floats(allow_nan=False,
        allow_infinity=False), st.text(max_size=3), st.sampled_from(["tensor", "dict", "ref"]),
    )  # fmt: skip
    anything = st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=5,
    )
    places = list(_places(members))
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(places))
        container[key] = data.draw(anything)
    try:
        document = read(sealed(members))
    except (CorruptCheckpoint, UnsupportedVersion):
        return
    assert encode_document(read(encode_document(document))) == encode_document(document)


def _places(data: Any) -> Any:
    pairs = data.items() if isinstance(data, dict) else enumerate(data)
    for key, item in list(pairs):
        yield data, key
        if isinstance(item, dict | list):
            yield from _places(item)


def test_plain_object_over_the_limit_is_refused() -> None:
    data = encode_document(manifest())
    assert read(data, max_bytes=len(data)) == manifest()
    with pytest.raises(OversizedMetadata):
        read(data, max_bytes=len(data) - 1)


def test_group_and_index_have_exactly_their_ranks() -> None:
    every = [manifest_of({"v": rank}, rank, 250)[0] for rank in range(250)]
    group = merge(every[100:200], "group", (1, 1))
    data = encode_document(group)
    assert read(data, "group").group == (1, 1)
    for change in ([1, 0], [1, 3], [2, 0], [0, 1], [1, -1], [1, 10**30], [1]):
        members = document_of(data)
        members["group"] = change
        with pytest.raises(InvalidManifest):
            read(sealed(members), "group")
    index = document_of(encode_document(merge(every, "index")))
    for world_size in (249, 251, 1 << 60):
        index["world_size"] = world_size
        with pytest.raises(WrongWorldSize):
            read(sealed(index), "index")


@pytest.mark.parametrize(
    ("entry", "path", "value", "error"),
    [
        # What rank 0 wrote is z, b, which has too few bytes, and a.
        (2, "layouts/1/chunks/entry", [0, 1], InvalidExtent),
        (2, "layouts/1/chunks/entry", [0, 3], InvalidManifest),
        (2, "layouts/1/chunks/stride", [None, [1 << 62]], InvalidExtent),
        (2, "structures/1/tensors/shape", [[2], [1 << 62, 1 << 62]], InvalidExtent),
        (None, "structures/0/tensors/label", ["z", "b", "c"], InvalidManifest),
        (None, "structures/0/tensors/dtype", ["float32", "float32", "int32"], InvalidManifest),
        (None, "layouts/0/chunks/box", [None, None, [[0], [2]]], InvalidManifest),
        (None, "layouts/0/chunks/owner", [None, None, 1], InvalidManifest),
        (None, "layouts/1/chunks/offset", [0, 4], InvalidManifest),
        (None, "layouts/1/chunks/stride", [None, [1]], InvalidManifest),
    ],
)
def test_a_chunk_of_another_rank_must_be_what_that_one_wrote(
    entry: int | None, path: str, value: list[Any], error: type[CorruptCheckpoint]
) -> None:
    state = {"b": torch.ones(2), "a": torch.ones(4)}
    own = manifest_of(state, 1, 2, borrowed={"a": Borrowed(0, entry)})[0]
    index = merge([manifest_of({"z": torch.zeros(3), **state}, 0, 2)[0], own], "index")
    assert read(encode_document(index), "index") == index
    assert read(encode_document(own)) == own
    members = document_of(encode_document(index))
    _change(members, path, value)
    with pytest.raises(error):
        read(sealed(members), "index")


def test_what_differs_between_ranks_must_be_there() -> None:
    index = document_of(encode_document(merge([manifest()], "index")))
    assert read(sealed(index), "index").per_rank
    wrongs: list[Any] = [
        [{"tensors": [4], "values": []}], [{"tensors": [], "values": [3]}], [{}], [1]
    ]  # fmt: skip
    for wrong in wrongs:
        index["per_rank"] = wrong
        with pytest.raises(InvalidManifest):
            read(sealed(index), "index")


DATA = Path(__file__).parents[1] / "data" / "format-v1"
FORMAT = Path(__file__).parents[2] / "docs" / "format.md"
SCHEMAS = Path(__file__).parents[2] / "docs" / "schema"
SCHEMA = SCHEMAS / "document.json"
WORLDS = (1, 3, 200)


def kept(world_size: int) -> Iterator[tuple[str, bytes]]:
    root = DATA / f"world-{world_size}"
    for path in sorted(root.rglob("*")):
        if path.is_file() and ".ckpipe" not in path.parts:
            yield path.relative_to(root).as_posix(), path.read_bytes()


def kind_of(key: str) -> DocumentKind:
    return "index" if "/" not in key else "group" if "group-" in key else "manifest"


def text_of(data: bytes) -> bytes:
    # What zlib makes of a text differs between versions of zlib; the text may not.
    return json_text(data, LIMIT)


@pytest.mark.parametrize("world_size", WORLDS)
def test_earlier_documents_are_read(world_size: int) -> None:
    for key, data in kept(world_size):
        if not key.endswith(".json"):
            continue
        document = decode_document(data, key=key, id=ID, kind=kind_of(key))
        assert document.world_size == world_size
        assert text_of(encode_document(document)) == text_of(data)


@pytest.mark.parametrize("world_size", WORLDS)
def test_documents_fit_the_published_schema(world_size: int) -> None:
    schema = json.loads(SCHEMA.read_text())
    validator = jsonschema.Draft202012Validator(schema)
    for key, data in kept(world_size):
        if key.endswith(".json"):
            validator.validate(json.loads(text_of(data)))


@pytest.mark.parametrize("world_size", WORLDS)
def test_earlier_summaries_agree_with_the_index(world_size: int) -> None:
    index = decode_document(dict(kept(world_size))[index_key(ID)], key="", id=ID, kind="index")
    data = (DATA / f"world-{world_size}" / summary_key(ID)).read_bytes()
    assert decode_summary(ID, data).members == summary_of(index).members
    assert encode_summary(ID, summary_of(index)) == data
    schema = json.loads((SCHEMAS / "summary-v1.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(json.loads(data))


@pytest.mark.parametrize(
    ("name", "value"),
    [("kind", "other"), ("step", -1), ("structures", {}), ("world_size", 0), ("version", 3)],
)
def test_schema_refuses_what_the_format_refuses(name: str, value: Any) -> None:
    schema = json.loads(SCHEMA.read_text())
    members = document_of(dict(kept(1))[index_key(ID)])
    validator = jsonschema.Draft202012Validator(schema)
    members["crc32c"] = "00000000"
    assert validator.is_valid(members)
    members[name] = value
    assert not validator.is_valid(members)


def test_a_wrapper_tensor_is_in_version_2_only() -> None:
    with tarfile.open(DATA.parent / "features" / "wrappers.tar.xz") as archive:
        (name,) = [each for each in archive.getnames() if re.fullmatch(r"step-[^/]*\.json", each)]
        data = archive.extractfile(name).read()  # type: ignore[union-attr]
    members = document_of(data)
    assert members["version"] == 2
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator(schema).validate(members | {"crc32c": "00000000"})
    id = CheckpointId.parse(name.removesuffix(".json"))
    assert id is not None
    decode_document(data, key=name, id=id, kind="index")
    members["version"] = 1
    with pytest.raises(InvalidManifest, match="wrapper_tensor"):
        decode_document(encode_json(members), key=name, id=id, kind="index")


def test_example_in_the_documentation_is_what_is_written() -> None:
    example = re.search(r"## A small example.*?```json\n(.*?)```", FORMAT.read_text(), re.DOTALL)
    assert example is not None
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    state = {"model": {"w": weight, "n": torch.tensor(7)}, "lr": 0.5, 1: None}
    manifest, _ = manifest_of(state, metrics={"loss": 0.25})
    written = encode_document(merge([manifest], "index"))
    # Compared as text, since 1 and true are equal to Python.
    assert json.dumps(json.loads(example[1])) == json.dumps(json.loads(written))


# ---- summaries ----

metrics = st.dictionaries(st.text(max_size=30), st.floats(), max_size=12)
sizes = st.integers(0, 1 << 62)
told_names = st.none() | st.text(max_size=30)
summaries = st.builds(
    Summary, sizes, sizes, st.booleans(), metrics, sizes, name=told_names, nan=sizes
)


@given(summaries)
def test_a_summary_is_read_back(summary: Summary) -> None:
    found = decode_summary(ID, encode_summary(ID, summary))
    assert repr(found) == repr(summary)


@given(summaries, st.data())
def test_a_damaged_summary_is_none(summary: Summary, data: st.DataObject) -> None:
    whole = encode_summary(ID, summary)
    at = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytearray(whole)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    for damaged in (bytes(flipped), whole[:at], bytes(len(whole))):
        with pytest.raises(CorruptCheckpoint):
            decode_summary(ID, damaged)
    with pytest.raises(CorruptCheckpoint, match="no summary of this checkpoint"):
        decode_summary(replace(ID, step=8), whole)


@pytest.mark.parametrize(
    "other",
    [
        {"version": 2},
        {"kind": "index"},
        {"more": 1},
        {"final": 0},
        {"bytes": True},
        {"bytes": -5},
        {"bytes": 1 << 63},
        {"copied_bytes": None},
        {"metrics": []},
        {"metrics": {"a": None}},
        {"metrics": {"a": []}},
        {"metrics": {"a": "high"}},
        {"name": 1},
        {"nan": True},
        {"nan": -1},
        {"nan": None},
    ],
    ids=str,
)
def test_a_summary_of_another_form_is_none(other: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpoint):
        decode_summary(ID, summary_data(ID, 5, **{"metrics": {"a": 0.5}, **other}))


@pytest.mark.parametrize("text", [b"{", b"[" * 9000, b'{"a":1e999', b'{"a":NaN', b'{"a":1,"a":1'])
def test_a_summary_that_is_no_json_is_none(text: bytes) -> None:
    with pytest.raises(CorruptCheckpoint):
        decode_summary(ID, sealed_text(text))


def test_a_summary_of_too_many_metrics_is_not_written() -> None:
    with pytest.raises(OversizedMetadata):
        encode_summary(ID, Summary(1, 1, False, {f"m{n}": 0.1 for n in range(10_000)}))


def test_names_of_all_versions_belong_to_their_checkpoint() -> None:
    for rest in (".json", ".11.AAAAAAbx-_", ".2.zst"):
        assert summary_id(f"{SUMMARIES}{ID}{rest}") == ID
    for key in (f"{SUMMARIES}{ID}", f"{SUMMARIES}x.json", f"{ID}.json", f"{SUMMARIES}{ID}.a/b"):
        assert summary_id(key) is None


def test_the_schema_and_the_format_have_all_kinds_of_nodes() -> None:
    schema = json.loads(SCHEMA.read_text())
    (kinds,) = schema["$defs"]["node"]["prefixItems"]
    assert set(kinds["enum"]) == FORMS.keys()
    text = FORMAT.read_text()
    assert [kind for kind in FORMS if not re.search(f'["`]{kind}["`]', text)] == []
