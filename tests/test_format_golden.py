"""Checkpoints of format version 1 that must be readable for ever.

Run as a script, this file writes them: ``python tests/test_format_golden.py --write``. That is
done once for a version of the format; a change that makes it necessary again breaks the
checkpoints of everybody.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import safetensors.torch
import torch

sys.path.insert(0, str(Path(__file__).parent))  # pytest does that, a script must do it itself

from bundles import ID, LIMIT, Foreign, as_shard, document_of, manifest_of

from ckpipe.format.checksummed_json import json_text
from ckpipe.format.codec import decode_bundle, encode_bundle
from ckpipe.format.manifest import BundleKind, ManifestDocument
from ckpipe.format.merge import merge
from ckpipe.format.names import (
    data_file_key,
    group_key,
    group_ranks,
    index_key,
    level_sizes,
    manifest_key,
)

DATA = Path(__file__).parent / "data" / "format-v1"
FORMAT = Path(__file__).parent.parent / "docs" / "format.md"
SCHEMA = Path(__file__).parent.parent / "docs" / "schema" / "bundle-v1.json"
WORLDS = (1, 3, 200)


def rich_state() -> dict[Any, Any]:
    """Small, but with all that is odd about states."""
    weight = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    base = torch.arange(10, dtype=torch.int16)
    ring: list[Any] = [1]
    ring.append(ring)
    return {
        "model": OrderedDict(weight=weight, tied=weight, view=weight[1], bias=weight[:, 1].clone()),
        1: torch.tensor(1.5, dtype=torch.float64),
        "1": torch.tensor(True),
        "a.b": torch.zeros(0, 3),
        "a": {"b": torch.tensor([1 + 2j, 3 - 4j])},
        "__metadata__": torch.tensor([7], dtype=torch.uint8),
        "../@~/ü😀": {"t": weight.T.clone().T, "half": torch.ones(3, dtype=torch.bfloat16)},
        "overlap": [base[:6], base[4:]],
        (1, None, 2.5, ("x",)): torch.nn.Parameter(torch.ones(2), requires_grad=True),
        "times": np.array(["2026-11-21", "NaT"], dtype="<M8[s]"),
        "floats": [math.nan, math.inf, -math.inf, -0.0, 0.1],
        "others": (None, True, 2**80, b"\x00\xff", 1j, {3, 1, 2}, torch.float16, torch.Size([2])),
        "ring": ring,
        "empty": {},
    }


def rank_state(rank: int) -> dict[Any, Any]:
    """What one of several ranks holds."""
    return {
        "shard": torch.arange(8, dtype=torch.float32).reshape(2, 4) + 8 * rank,
        "embedding": torch.arange(6, dtype=torch.float16),
        "rng": torch.tensor([rank, 255 - rank], dtype=torch.uint8),
        "common": torch.tensor(5, dtype=torch.int64),
        "rank": rank,
        "epoch": 3,
    }


def manifests(world_size: int) -> list[ManifestDocument]:
    """The manifests of all ranks."""
    if world_size == 1:
        return [rich()[0]]
    found = []
    for rank in range(world_size):
        # Rank 0 has written the embedding for all; it is the third of its entries by item size.
        foreign = {"embedding": Foreign(0, 2)} if rank else None
        bundle, _ = manifest_of(
            rank_state(rank), rank, world_size, foreign=foreign, metadata={"run": "golden"}
        )
        found.append(as_shard(bundle, "shard", 2 * world_size, 2 * rank))
    return found


def rich() -> tuple[ManifestDocument, dict[str, bytes]]:
    """The manifest and the data file of the world of one rank."""
    return manifest_of(
        rich_state(),
        metadata={"note": "für alle", "nested": [1, 2.5, None, {"x": True}]},
        metrics={"loss": 0.25, "best": "inf"},
        resumed_from="step-000000000499.20261120T000000000Z-before.0",
        final=True,
    )


def objects(world_size: int) -> dict[str, bytes]:
    """The objects of a golden checkpoint that are kept, by key."""
    every = manifests(world_size)
    found = {manifest_key(ID, rank): encode_bundle(every[rank]) for rank in range(world_size)[-3:]}
    below = every
    for level, size in enumerate(level_sizes(world_size)[1:], start=1):
        below = [
            merge([every[rank] for rank in group_ranks(level, n, world_size)], "group", (level, n))
            for n in range(size)
        ]
        found |= {group_key(ID, level, n): encode_bundle(each) for n, each in enumerate(below)}
    found[index_key(ID)] = encode_bundle(merge(below, "index"))
    if world_size == 1:
        found |= {data_file_key(ID, name): image for name, image in rich()[1].items()}
    return found


def kept(world_size: int) -> Iterator[tuple[str, bytes]]:
    root = DATA / f"world-{world_size}"
    for path in sorted(root.rglob("*")):
        if path.is_file():
            yield path.relative_to(root).as_posix(), path.read_bytes()


def kind_of(key: str) -> BundleKind:
    return "index" if "/" not in key else "group" if "group-" in key else "manifest"


def text_of(data: bytes) -> bytes:
    # What zlib makes of a text differs between versions of zlib; the text may not.
    return json_text(data, LIMIT)


@pytest.mark.parametrize("world_size", WORLDS)
def test_what_is_written_now_is_what_was_written_then(world_size: int) -> None:
    then, now = dict(kept(world_size)), objects(world_size)
    assert then.keys() == now.keys()
    for key, data in then.items():
        if key.endswith(".json"):
            assert text_of(now[key]) == text_of(data), key
        else:
            assert now[key] == data, key


@pytest.mark.parametrize("world_size", WORLDS)
def test_bundles_of_then_are_read(world_size: int) -> None:
    for key, data in kept(world_size):
        if not key.endswith(".json"):
            continue
        bundle = decode_bundle(data, key=key, id=ID, kind=kind_of(key))
        assert bundle.world_size == world_size
        assert text_of(encode_bundle(bundle)) == text_of(data)


@pytest.mark.parametrize("world_size", WORLDS)
def test_index_of_then_holds_every_rank_as_it_was(world_size: int) -> None:
    data = dict(kept(world_size))[index_key(ID)]
    bundle = decode_bundle(data, key=index_key(ID), id=ID, kind="index")
    for manifest, part in zip(manifests(world_size), bundle.parts, strict=True):
        assert bundle.structures[part.structure] == manifest.structures[0]
        assert bundle.layouts[part.layout] == manifest.layouts[0]
        assert repr(part.values) == repr(manifest.parts[0].values)
        assert (part.files, part.checksums) == (
            manifest.parts[0].files,
            manifest.parts[0].checksums,
        )


def test_index_tells_what_differs_between_ranks() -> None:
    data = dict(kept(3))[index_key(ID)]
    bundle = decode_bundle(data, key=index_key(ID), id=ID, kind="index")
    (structure,), (per_rank,) = bundle.structures, bundle.per_rank
    assert [structure.tensors[n].label for n in per_rank.tensors] == ["rng"]
    assert {part.values[n] for part in bundle.parts for n in per_rank.values} == {0, 1, 2}
    assert len(per_rank.values) == 1


def test_large_bundle_of_then_is_compressed() -> None:
    assert not dict(kept(200))[index_key(ID)].startswith(b"{")
    assert dict(kept(3))[index_key(ID)].startswith(b"{")


@pytest.mark.parametrize("world_size", WORLDS)
def test_bundles_fit_the_published_schema(world_size: int) -> None:
    schema = json.loads(SCHEMA.read_text())
    validator = jsonschema.Draft202012Validator(schema)
    for key, data in kept(world_size):
        if key.endswith(".json"):
            validator.validate(json.loads(text_of(data)))


@pytest.mark.parametrize(
    ("name", "value"),
    [("kind", "other"), ("step", -1), ("structures", {}), ("world_size", 0), ("version", 2)],
)
def test_schema_refuses_what_the_format_refuses(name: str, value: Any) -> None:
    schema = json.loads(SCHEMA.read_text())
    document = document_of(dict(kept(1))[index_key(ID)])
    validator = jsonschema.Draft202012Validator(schema)
    document["crc32c"] = "00000000"
    assert validator.is_valid(document)
    document[name] = value
    assert not validator.is_valid(document)


def test_data_file_of_then_opens_with_safetensors() -> None:
    image = dict(kept(1))[data_file_key(ID, "rank-00000.safetensors")]
    found = safetensors.torch.load(image)
    state = rich_state()
    assert torch.equal(found["model.weight"], state["model"]["weight"])
    assert torch.equal(found["~__metadata__"], state["__metadata__"])
    assert torch.equal(found["../~1~0/ü😀.half"], state["../@~/ü😀"]["half"])
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


def write() -> None:
    """Write the golden files anew."""
    for world_size in WORLDS:
        for key, data in objects(world_size).items():
            path = DATA / f"world-{world_size}" / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit("usage: python tests/test_format_golden.py --write")
    write()
