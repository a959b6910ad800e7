"""Checkpoints that an older ckpipe wrote, one for each feature of the format, load to the bit.

What is written now is what was written then, byte for byte, but for random tokens, times and the
versions of the writer.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import tarfile
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

import ckpipe
from ckpipe.format.checksum import crc32c
from ckpipe.testing import MemoryBackend
from tests.format import earlier_states
from tests.format.earlier_states import DATA, FEATURES, STEP, seeded
from tests.support.placed_tensors import rank_of
from tests.support.stored_files import text_of

each_feature = pytest.mark.parametrize("name", FEATURES)
TOKEN, STARTED = (
    re.compile(r"[0-9a-f]{32}"),
    re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00"),
)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Unpack the checkpoint of a feature once."""

    @cache
    def unpacked(name: str) -> Path:
        root = tmp_path_factory.mktemp("old")
        with tarfile.open(DATA / f"{name}.tar.xz") as archive:
            archive.extractall(root, filter="data")
        return root

    return unpacked


# To the bit


def described(state: Any) -> Any:
    """A state as text and numbers: types, values to the bit, order, and what shares what."""
    return _Description().of(state)


class _Description:
    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []
        self._memory: list[tuple[int, int]] = []

    def of(self, value: Any) -> Any:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, DTensor):
            return kind, self.of(value.to_local()), str(value.placements), value.shape
        if hasattr(value, "__tensor_flatten__"):
            names, context = value.__tensor_flatten__()
            kept = value.requires_grad, isinstance(value, torch.nn.Parameter)
            return kind, context, kept, [(name, self.of(getattr(value, name))) for name in names]
        if isinstance(value, torch.Tensor):
            return kind, self._tensor(value)
        if isinstance(value, np.ndarray):
            return kind, value.dtype.str, value.shape, value.tobytes()
        if hasattr(value, "state_dict"):
            return self.of(value.state_dict())
        if isinstance(value, dict | list | set) or dataclasses.is_dataclass(value):
            if id(value) in self._seen:
                return "again", self._seen[id(value)]
            self._seen[id(value)] = len(self._seen)
            self._kept.append(value)
        return kind, self._inside(value)

    def _inside(self, value: Any) -> Any:
        attributes = sorted(getattr(value, "__dict__", {}))
        if isinstance(value, dict):
            items = [(self.of(key), self.of(each)) for key, each in value.items()]
            factory = getattr(value, "default_factory", None)
            return items, factory, [(name, self.of(vars(value)[name])) for name in attributes]
        if isinstance(value, set | frozenset):
            return sorted(repr(self.of(each)) for each in value)
        if isinstance(value, list | tuple | deque):
            return [self.of(each) for each in value], getattr(value, "maxlen", None)
        if dataclasses.is_dataclass(value):
            return [(name, self.of(vars(value)[name])) for name in attributes]
        return repr(value)

    def _tensor(self, value: torch.Tensor) -> Any:
        self._kept.append(value)
        strides = [s for n, s in zip(value.shape, value.stride(), strict=True) if n > 1]
        plain = value.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
        flat = plain.clone(memory_format=torch.contiguous_format).view(-1)
        raw = flat.view(torch.uint8).numpy().tobytes()
        begin = value.data_ptr()
        end = begin + value.itemsize * (
            1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
        )
        sharing = [
            (number, begin - lower)
            for number, (lower, upper) in enumerate(self._memory)
            if value.numel() and begin < upper and lower < end
        ]
        self._memory.append((begin, end) if value.numel() else (0, 0))
        return (
            value.dtype, value.shape, strides if value.numel() else [], value.requires_grad,
            value.is_conj(), value.is_neg(), raw, sharing, getattr(value, "persistent", None),
            [(name, self.of(each)) for name, each in sorted(vars(value).items())],
        )  # fmt: skip


def blank(value: Any) -> Any:
    """A state with its tensors zeroed in place, and its values replaced where that can be."""
    if hasattr(value, "__tensor_flatten__") and not isinstance(value, DTensor):
        for name in value.__tensor_flatten__()[0]:
            blank(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        value.detach().zero_()
    elif hasattr(value, "state_dict"):
        blank(value.state_dict())
    elif isinstance(value, dict):
        for key, each in value.items():
            value[key] = -1 if isinstance(each, int) else blank(each)
    elif isinstance(value, list | tuple):
        for each in value:
            blank(each)
    return value


@each_feature
def test_an_earlier_checkpoint_loads_on_one_rank(old: Callable[[str], Path], name: str) -> None:
    feature = FEATURES[name]
    result = ckpipe.load(old(name), **feature.load)
    expected = feature.alone() if feature.alone else feature.state(0)
    assert described(result.state) == described(expected)
    assert result.metadata == feature.save.get("metadata", {})
    assert repr(result.metrics) == repr(feature.save.get("metrics", {}))


@pytest.mark.parametrize("name", [name for name, each in FEATURES.items() if each.ranks > 1])
def test_an_earlier_checkpoint_loads_into_each_rank(old: Callable[[str], Path], name: str) -> None:
    feature = FEATURES[name]
    for rank in range(feature.ranks)[:: max(1, feature.ranks // 4)]:
        with rank_of(rank, feature.ranks):
            target = blank(feature.state(rank))
            result = ckpipe.load(old(name), target, step=STEP)
            assert described(result.state) == described(feature.state(rank)), rank


@pytest.mark.parametrize("name", ["training", "captured"])
def test_an_earlier_checkpoint_loads_into_objects(old: Callable[[str], Path], name: str) -> None:
    target = FEATURES[name].state(0)
    blank([target["model"], target["optimizer"]])
    ckpipe.load(old(name), target)
    assert described(target) == described(FEATURES[name].state(0))


def test_generators_of_an_earlier_checkpoint_draw_the_same_numbers(
    old: Callable[[str], Path],
) -> None:
    def draws() -> earlier_states.State:
        return {"python": random.random(), "numpy": np.random.rand(), "torch": torch.rand(1).item()}

    def restored() -> earlier_states.State:
        draws()
        ckpipe.load(old("generators"), {"rng": ckpipe.RngState()}, include=["rng"])
        return draws()

    assert seeded(restored) == seeded(draws)


# Byte for byte


def normalised(data: bytes) -> str:
    """The text of a document without what is different in each save; that is well formed."""
    text = text_of(data)
    document = json.loads(text + "}")
    assert json.dumps(document, separators=(",", ":")) == text + "}"
    parts = document["parts"]
    assert all(TOKEN.fullmatch(each) for each in parts["token"])
    assert len({*parts["token"]}) == len(parts["token"])
    assert all(STARTED.fullmatch(each) for each in parts["started"])
    parts["token"], parts["started"] = len(parts["token"]), len(parts["started"])
    assert {*parts.pop("line", ["old"])} == {"old"}, "the launch, where old checkpoints have none"
    for structure in document["structures"]:
        structure.pop("optimizers", None)  # which no old checkpoint has
    for writer in document["writer"]:
        writer |= dict.fromkeys(("ckpipe", "torch", "python"), "")
    return without_start(json.dumps(document))


def without_start(text: str) -> str:
    return re.sub(r"\d{8}T\d{9}Z-old", "START-old", text)


def objects(root: Path) -> dict[str, bytes]:
    """All files below a directory."""
    files = [path for path in root.rglob("*") if path.is_file()]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


async def saved(name: str) -> dict[str, bytes]:
    """Save a feature now, into memory; return all objects of its checkpoint."""
    url = f"memory://feature {name}"
    await anyio.to_thread.run_sync(earlier_states.save, partial(MemoryBackend, url), FEATURES[name])
    store = MemoryBackend(url)
    found = [each async for each in store.list() if each.key.startswith("step-")]
    return {each.key: await store.get(each.key, max_bytes=each.size) for each in found}


def test_counts_of_nan_stay_in_the_index_of_an_earlier_checkpoint(
    old: Callable[[str], Path],
) -> None:
    (index,) = old("nan").glob("*.json")
    parts = json.loads(text_of(index.read_bytes()) + "}")["parts"]
    # By the widths of the dtypes, in their order.
    assert parts["nan"] == [[], [[0, 6], [1, 5], [3, 4], [4, 3], [5, 2], [6, 1]], []]
    with ckpipe.SyncPipeline(old("nan"), read_only=True) as pipeline:
        (info,) = pipeline.steps(metadata=True)
        assert info.nan == 21
        (known,) = pipeline.steps()
        assert known.nan == 21


def test_witnesses_stay_in_the_manifests_of_an_earlier_checkpoint(
    old: Callable[[str], Path],
) -> None:
    texts = [text_of(each.read_bytes()) for each in old("witnesses").rglob("*.json")]
    parts = [json.loads(text + "}").get("parts", {}) for text in texts]
    checksum = crc32c(torch.arange(300.0).numpy().tobytes())
    assert [part["witnesses"] for part in parts if "witnesses" in part] == [[[[0, 0, checksum]]]]


@pytest.mark.sample(8)
@each_feature
def test_the_written_bytes_are_those_of_an_earlier_ckpipe(
    old: Callable[[str], Path], name: str
) -> None:
    then, now = objects(old(name)), anyio.run(saved, name)
    names = {without_start(key): key for key in now}
    assert names.keys() == {without_start(key) for key in then}
    for key, kept in then.items():
        written = now[names[without_start(key)]]
        if key.endswith(".json"):
            assert normalised(written) == normalised(kept), key
        else:
            assert written == kept, key
