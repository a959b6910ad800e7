"""Damaged and forged checkpoints: each kind has its own error, and older checkpoints load."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpipe
from ckpipe import errors, events, register_backend
from ckpipe.backend import ObjectReader
from ckpipe_local import LocalBackend
from tests.support.one_checkpoint import data_of, index_of, load_one, save_one, says
from tests.support.pipelines import load_existing, loaded_state, same, small_state
from tests.support.sampling import EVERY, SEED
from tests.support.stored_files import Document, forge


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A root with one checkpoint, of step 5."""
    root = tmp_path / "run"
    save_one(root, small_state(5))
    return root


def in_place_of_data(put: Callable[[Path], object], root: Path) -> None:
    path = data_of(root)
    path.unlink()
    put(path)


DAMAGE: list[tuple[str, Callable[[Path], object], type[errors.CkpipeError], list[str]]] = [
    (
        "data file cut off",
        lambda root: os.truncate(data_of(root), data_of(root).stat().st_size - 3),
        errors.TruncatedObject,
        ["step 5", "key 'step-000000000005.*safetensors'"],
    ),
    (
        "data file empty",
        lambda root: os.truncate(data_of(root), 0),
        errors.TruncatedObject,
        ["step 5", "key 'step-000000000005.*safetensors'"],
    ),
    (
        "data file gone",
        lambda root: data_of(root).unlink(),
        errors.MissingObject,
        ["step 5", "gone", "key 'step-000000000005.*safetensors'"],
    ),
    *(
        (
            f"{what} in place of the data file",
            partial(in_place_of_data, put),
            errors.MissingObject,
            ["step 5", f"not a file but {what}", "key 'step-000000000005.*tensors'"],
        )
        for what, put in (
            ("a pipe", os.mkfifo),
            ("a directory", os.mkdir),
            ("a device", partial(os.symlink, "/dev/zero")),
        )
    ),
    (
        "index cut off",
        lambda root: os.truncate(index_of(root), 100),
        errors.TruncatedObject,
        ["step 5", "key 'step-000000000005.*json'"],
    ),
    (
        "index empty",
        lambda root: os.truncate(index_of(root), 0),
        errors.TruncatedObject,
        ["step 5", "key 'step-000000000005.*json'"],
    ),
    (
        "index gone",
        lambda root: index_of(root).unlink(),
        errors.CheckpointIncomplete,
        ["step 5", "no index", "Name another step"],
    ),
    (
        "index of another checkpoint",
        lambda root: index_of(root).rename(root / index_of(root).name.replace("05.", "06.")),
        errors.CheckpointNotFound,
        ["step 5|checkpoint 5"],
    ),
]


@pytest.mark.parametrize(
    ("damage", "error", "patterns"), [pytest.param(*case[1:], id=case[0]) for case in DAMAGE]
)
def test_damage_is_found_and_older_checkpoints_load(
    saved: Path,
    damage: Callable[[Path], object],
    error: type[errors.CkpipeError],
    patterns: list[str],
) -> None:
    damage(saved)
    target = small_state(0)
    with ckpipe.SyncPipeline(saved) as pipeline:
        for call in (lambda: pipeline.verify(5), lambda: pipeline.load(target, step=5)):
            with pytest.raises(error) as caught:
                call()
            says(caught.value, *patterns)
            if isinstance(caught.value, errors.CorruptCheckpoint):
                says(caught.value, r"another checkpoint.*fallback=True")
        assert same(target, small_state(0))
        pipeline.save(small_state(7), step=7).wait()
        assert same(loaded_state(pipeline), small_state(7))


def test_fallback_loads_the_newest_that_is_whole(saved: Path) -> None:
    damaged = save_one(saved, small_state(6), step=6)
    path = next(saved.glob(f"{damaged.id}/*.safetensors"))
    os.truncate(path, 10)
    told: list[events.Event] = []
    with ckpipe.SyncPipeline(saved) as pipeline:
        pipeline.events.add(told.append)
        with pytest.warns(RuntimeWarning, match="step-000000000006.* is damaged: Truncated"):
            result = load_existing(pipeline, fallback=True)
    assert result.step == 5
    assert same(result.state, small_state(5))
    (event,) = [each for each in told if isinstance(each, events.CheckpointDamaged)]
    assert (event.id, event.step) == (damaged.id, 6)
    assert "TruncatedObject" in event.error


def flipped(path: Path, number: int) -> bytes:
    """Flip one bit of one byte of a file; return the bytes as they were."""
    good = path.read_bytes()
    path.write_bytes(good[:number] + bytes([good[number] ^ 1 << number % 8]) + good[number + 1 :])
    return good


@pytest.mark.sample(1)
@pytest.mark.parametrize("which", ["index", "data"])
def test_any_flipped_bit_is_found(saved: Path, which: str) -> None:
    path = index_of(saved) if which == "index" else data_of(saved)
    expected, header = small_state(5), 4096 if which == "data" else 0
    stride = 1 if EVERY else 23
    numbers = range(SEED % stride, path.stat().st_size, stride)
    with ckpipe.SyncPipeline(saved) as pipeline:
        for number in numbers:
            good = flipped(path, number)
            with pytest.raises(errors.CkpipeError, match="step 5"):
                pipeline.verify(5)
            target = small_state(0)
            try:
                result = pipeline.load(target)
            except errors.CorruptCheckpoint as error:
                says(error, "step 5", "key 'step-")
            else:
                # Loading does not need the header: all it says is in the index.
                assert number < header
                assert result is not None
                assert same(result.state, expected)
            path.write_bytes(good)
        pipeline.verify(5)


class CutShort(LocalBackend):
    """A directory whose data files are cut off as soon as a load has found them in memory."""

    looked = False

    def open_object(self, key: str) -> ObjectReader | None:
        found = super().open_object(key)
        assert found is not None
        assert found.is_cached(0, 6_000_000), "the page cache holds what was just written"
        if "step-000000000005" in key and self.looked:
            os.truncate(Path(self._root.path) / key, 6_000_000)
        self.looked = True
        return found


def test_file_that_is_cut_off_while_it_is_read_from_the_page_cache(tmp_path: Path) -> None:
    state = {"weight": torch.arange(3_000_000.0)}
    with ckpipe.SyncPipeline(tmp_path, backends={"file": {"direct": False}}) as pipeline:
        for step in (1, 5):
            pipeline.save(state, step=step).wait()
    register_backend("cut", lambda url: CutShort(str(tmp_path)))
    with ckpipe.SyncPipeline("cut://", solo=True) as pipeline:
        with pytest.raises(errors.TruncatedObject) as caught:
            pipeline.load()
        says(caught.value, "step 5", "rank 0", "key 'step-000000000005", "bytes")
        with pytest.warns(RuntimeWarning, match="damaged"):
            result = load_existing(pipeline, fallback=True)
    assert result.step == 1
    assert same(result.state, state)


def test_newer_format_says_to_upgrade(saved: Path) -> None:
    forge(index_of(saved), lambda document: document.update(version=9))
    with pytest.raises(errors.UnsupportedVersion) as caught:
        load_one(saved)
    says(caught.value, "version 2", "Upgrade ckpipe")


HOSTILE_DTYPES = ["(1,", "f4,,", "i4,(2", "2i4", "i4,i4", "O", "<f3", "<M8[", "<M8[xx]", "S" * 5000]


def first_step_lasts(root: Path, into: Any) -> None:
    """Check that step 5 cannot be loaded, and that a load which may falls back to step 1."""
    with pytest.raises(errors.InvalidManifest) as caught:
        load_one(root, into, step=5)
    says(caught.value, "step 5", "numpy dtype|inline value")
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert load_one(root, into, fallback=True).step == 1


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", HOSTILE_DTYPES)
@pytest.mark.parametrize("fresh", [True, False])
def test_text_that_is_no_numpy_dtype_is_refused(tmp_path: Path, dtype: str, fresh: bool) -> None:
    state = {"table": np.ones(3), "number": np.float32(2)}
    for step in (1, 5):
        save_one(tmp_path, state, step=step)
    good = index_of(tmp_path).read_bytes()
    forge(index_of(tmp_path), lambda d: d["structures"][0]["tensors"].update(detail=[dtype]))
    first_step_lasts(tmp_path, None if fresh else {"table": np.zeros(3), "number": 0})
    index_of(tmp_path).write_bytes(good)
    forge(index_of(tmp_path), lambda d: d.update(values=[[["numpy", dtype, "AAAAAA=="]]]))
    first_step_lasts(tmp_path, None if fresh else {"table": np.zeros(3), "number": 0})


def test_name_of_a_class_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lazy_parts.py").write_text("class Mode: ...")
    (tmp_path / "lazy_whole.py").write_text(
        "def __getattr__(name):\n    import lazy_parts\n    return lazy_parts\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("lazy_whole")
    save_one(tmp_path, {"path": Path("a"), "w": torch.ones(1)})
    load_one(tmp_path)
    before = set(sys.modules)
    for value, error in [
        (["enum", "lazy_whole:parts.Mode", "x"], errors.StructureMismatch),
        (["enum", "lazy_parts:Mode", "x"], errors.StructureMismatch),
        (["enum", "os:system", "x"], errors.StructureMismatch),
        (["dtype", "_inductor"], errors.InvalidManifest),
    ]:
        forge(index_of(tmp_path), partial(Document.update, values=[[value]]))
        with pytest.raises(error):
            load_one(tmp_path)
        assert set(sys.modules) == before
