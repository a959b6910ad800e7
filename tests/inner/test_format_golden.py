"""Checkpoints of format versions 1 and 2 that must be readable for ever.

They are never written again: a change that makes it necessary breaks the checkpoints of everybody.
They are of one rank with all that is odd about states, of three, and of two hundred, whose index
is compressed.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import safetensors.torch
import torch

from ckpipe import errors
from ckpipe.format.checksummed_json import encode_json, json_text
from ckpipe.format.codec import decode_bundle, encode_bundle
from ckpipe.format.manifest import BundleKind
from ckpipe.format.merge import merge
from ckpipe.format.names import index_key, summary_key
from ckpipe.format.summary import decode_summary, encode_summary, summary_of
from ckpipe.types import CheckpointId
from tests.inner.manifests import ID, LIMIT, manifest_of
from tests.support.stored_files import data_file_key, document_of

DATA = Path(__file__).parents[1] / "data" / "format-v1"
FORMAT = Path(__file__).parents[2] / "docs" / "format.md"
SCHEMAS = Path(__file__).parents[2] / "docs" / "schema"
SCHEMA = SCHEMAS / "bundle.json"
WORLDS = (1, 3, 200)


def kept(world_size: int) -> Iterator[tuple[str, bytes]]:
    root = DATA / f"world-{world_size}"
    for path in sorted(root.rglob("*")):
        if path.is_file() and ".ckpipe" not in path.parts:
            yield path.relative_to(root).as_posix(), path.read_bytes()


def kind_of(key: str) -> BundleKind:
    return "index" if "/" not in key else "group" if "group-" in key else "manifest"


def text_of(data: bytes) -> bytes:
    # What zlib makes of a text differs between versions of zlib; the text may not.
    return json_text(data, LIMIT)


@pytest.mark.parametrize("world_size", WORLDS)
def test_bundles_of_then_are_read(world_size: int) -> None:
    for key, data in kept(world_size):
        if not key.endswith(".json"):
            continue
        bundle = decode_bundle(data, key=key, id=ID, kind=kind_of(key))
        assert bundle.world_size == world_size
        assert text_of(encode_bundle(bundle)) == text_of(data)


@pytest.mark.parametrize("world_size", WORLDS)
def test_bundles_fit_the_published_schema(world_size: int) -> None:
    schema = json.loads(SCHEMA.read_text())
    validator = jsonschema.Draft202012Validator(schema)
    for key, data in kept(world_size):
        if key.endswith(".json"):
            validator.validate(json.loads(text_of(data)))


@pytest.mark.parametrize("world_size", WORLDS)
def test_summaries_of_then_say_what_the_index_says(world_size: int) -> None:
    index = decode_bundle(dict(kept(world_size))[index_key(ID)], key="", id=ID, kind="index")
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
    document = document_of(dict(kept(1))[index_key(ID)])
    validator = jsonschema.Draft202012Validator(schema)
    document["crc32c"] = "00000000"
    assert validator.is_valid(document)
    document[name] = value
    assert not validator.is_valid(document)


def test_a_wrapper_tensor_is_in_version_2_only() -> None:
    with tarfile.open(DATA.parent / "features" / "wrappers.tar.xz") as archive:
        (name,) = [each for each in archive.getnames() if re.fullmatch(r"step-[^/]*\.json", each)]
        data = archive.extractfile(name).read()  # type: ignore[union-attr]
    document = document_of(data)
    assert document["version"] == 2
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator(schema).validate(document | {"crc32c": "00000000"})
    id = CheckpointId.parse(name.removesuffix(".json"))
    assert id is not None
    decode_bundle(data, key=name, id=id, kind="index")
    document["version"] = 1
    with pytest.raises(errors.InvalidManifest, match="wrapper_tensor"):
        decode_bundle(encode_json(document), key=name, id=id, kind="index")


def test_data_file_of_then_opens_with_safetensors() -> None:
    image = dict(kept(1))[data_file_key(ID)]
    found = safetensors.torch.load(image)
    assert torch.equal(found["model.weight"], torch.arange(12.0).reshape(3, 4))
    assert found["~__metadata__"].tolist() == [7]
    assert torch.equal(found["../~1~0/ü😀.half"], torch.ones(3, dtype=torch.bfloat16))
    header = json.loads(image[8 : 8 + int.from_bytes(image[:8], "little")])
    assert header.keys() - {"__metadata__"} == set(found)


def test_example_in_the_documentation_is_what_is_written() -> None:
    example = re.search(r"## A small example.*?```json\n(.*?)```", FORMAT.read_text(), re.DOTALL)
    assert example is not None
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    state = {"model": {"w": weight, "n": torch.tensor(7)}, "lr": 0.5, 1: None}
    manifest, _ = manifest_of(state, metrics={"loss": 0.25})
    written = encode_bundle(merge([manifest], "index"))
    # Compared as text, since 1 and true are equal to Python.
    assert json.dumps(json.loads(example[1])) == json.dumps(json.loads(written))
