"""Small objects that unpack to far too much: each fails in little memory, and honest ones load."""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors
from tests.support.command_line import program
from tests.support.pipelines import load_existing, loaded_state, same, small_state
from tests.support.stored_files import crc32c, text_of

MIB = 1 << 20
FAR = 64 * MIB

BOMBS: dict[str, tuple[bytes, bytes, bytes]] = {
    "empty lists": (b"[0", b",[]", b"]"),
    "empty dicts": (b"[0", b",{}", b"]"),
    "dicts with a member": (b"[0", b',{"a":0}', b"]"),
    "lists in lists": (b"[0", b",[[[[[]]]]]", b"]"),
    "nested lists": (b"", b"[", b""),
    "integers": (b"[0", b",0", b"]"),
    "floats": (b"[0", b",1e9", b"]"),
    "digits": (b"", b"9", b""),
    "nulls": (b"[0", b",null", b"]"),
    "empty texts": (b"[0", b',""', b"]"),
    "texts of one wide sign": (b"[0", b',"\\ud83d\\ude00"', b"]"),
    "a long text": (b'"', b"a", b'"'),
    "a text of wide signs": (b'"', b"\\ud83d\\ude00", b'"'),
    "blanks": (b"", b" ", b"0"),
}
"""How a value begins, what stands in it again and again, and how it ends."""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A root with two checkpoints, of steps 1 and 5."""
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        for step in (1, 5):
            pipeline.save(small_state(), step=step).wait()
    return tmp_path


def plant(root: Path, bomb: str, nbytes: int) -> None:
    """Give the index of step 5 a member that unpacks to so many bytes; its checksums are right."""
    (index,) = root.glob("step-000000000005.*.json")
    head, unit, tail = BOMBS[bomb]
    many = unit * (MIB // len(unit))
    document = (text_of(index.read_bytes()) + "}").encode()
    packer, total, packed = zlib.compressobj(), 0, b""
    for piece in (
        document[:-1] + b',"more":' + head,
        *[many] * (nbytes // MIB),
        unit * (nbytes % MIB // len(unit)) + tail,
    ):
        total = crc32c(piece, total)
        packed += packer.compress(piece)
    packed += packer.compress(b',"crc32c":"%08x"}' % total) + packer.flush()
    index.write_bytes(packed + crc32c(packed).to_bytes(4, "big"))


@contextmanager
def memory_bounded() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * MIB


@pytest.mark.sample(2)
@pytest.mark.parametrize("bomb", BOMBS)
def test_bomb_is_refused_before_it_is_unpacked(saved: Path, bomb: str) -> None:
    plant(saved, bomb, FAR)
    target = small_state(0)
    with ckpipe.SyncPipeline(saved) as pipeline, memory_bounded():
        for call in (lambda: pipeline.load(target, step=5), lambda: pipeline.verify(5)):
            with pytest.raises(errors.OversizedMetadata, match="unpacks") as caught:
                call()
            assert caught.value.step == 5
            assert str(caught.value.key).startswith("step-000000000005")
        assert same(target, small_state(0))
        with pytest.warns(RuntimeWarning, match="damaged"):
            result = load_existing(pipeline, target, fallback=True)
        assert result.step == 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("bomb", BOMBS)
def test_what_an_object_of_any_size_may_unpack_to_takes_little_memory(
    saved: Path, bomb: str
) -> None:
    signs = sum(BOMBS[bomb][1].count(each) for each in b",:[{")
    units = min((1 << 19) // max(1, signs), 8 * MIB // len(BOMBS[bomb][1])) - 2000
    plant(saved, bomb, units * len(BOMBS[bomb][1]))
    with ckpipe.SyncPipeline(saved) as pipeline, memory_bounded():
        if bomb in ("digits", "nested lists"):
            with pytest.raises(errors.InvalidManifest):
                pipeline.load(step=5)
        else:
            assert pipeline.load(step=5) is not None


def test_command_says_what_is_wrong(saved: Path) -> None:
    plant(saved, "empty lists", FAR)
    done = program("info", saved, "5")
    assert done.code == 1
    assert "unpacks" in done.err
    assert "step-000000000005" in done.err


@pytest.mark.parametrize(
    "state",
    [
        pytest.param({"a": [{} for _ in range(100_000)]}, id="empty dicts"),
        pytest.param({"a": " " * (10 << 20)}, id="blanks"),
        pytest.param({"a": bytes(10 << 20)}, id="zero bytes"),
    ],
)
def test_state_that_packs_better_than_any_model_loads(tmp_path: Path, state: Any) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.save(state | {"w": torch.ones(3)}, step=1).wait()
        pipeline.verify(1)
        loaded = loaded_state(pipeline)
    assert loaded["a"] == state["a"]
