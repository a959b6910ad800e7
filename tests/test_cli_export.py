"""The command ``export``: any checkpoint in other forms, beside it or elsewhere."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from commands import Commands, save_steps
from pipelines import Stores, loaded_state, same, small_state

import ckpipe
from ckpipe.catalog import inspect
from ckpipe.export import INDEX, TORCH_FILE


def model_of(root: Path, id: str) -> dict[str, torch.Tensor]:
    with ckpipe.SyncPipeline(root, read_only=True) as pipeline:
        loaded = loaded_state(pipeline, id)
    return dict(sorted(loaded["model"].items()))


def shards_of(folder: Path) -> dict[str, torch.Tensor]:
    files = json.loads((folder / INDEX).read_text())["weight_map"]
    loaded = {name: safetensors.torch.load_file(folder / name) for name in set(files.values())}
    return {key: loaded[name][key] for key, name in files.items()}


def test_beside_the_newest_or_a_named_checkpoint(call: Commands, tmp_path: Path) -> None:
    root = tmp_path / "run"
    one, two = save_steps(root, 1, 2)
    done = call("export", root, "--format", "hf", "--max-shard", "30B", "--json")
    assert done.code == 0
    folder = root / f"{two}.hf"
    assert (done.data["id"], done.data["folder"]) == (two, folder.name)
    assert set(done.data["files"]) == {each.name for each in folder.iterdir()}
    assert done.data["bytes"] == sum(each.stat().st_size for each in folder.iterdir())
    assert len(done.data["files"]) == 3, "two shards and their index"
    assert same(shards_of(folder), model_of(root, two))
    assert call("export", root, 1, "--format", "torch").code == 0
    found = torch.load(root / f"{one}.torch" / TORCH_FILE, weights_only=True)
    assert same(dict(sorted(found["model"].items())), model_of(root, one))
    assert same({key: found[key] for key in small_state()}, small_state(1))
    with ckpipe.SyncPipeline(root) as pipeline:
        assert [info.id for info in pipeline.steps()] == [one, two], "exports are no checkpoints"


def test_the_state_of_the_readme_loads_with_torch_as_it_is(call: Commands, tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "rng": ckpipe.RngState()}
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        id = pipeline.save(state, step=0).wait().id
    expected = (random.gauss(0, 1), np.random.rand(), float(torch.rand(1)))
    assert call("export", tmp_path, "--format", "torch").code == 0
    found = torch.load(tmp_path / f"{id}.torch" / TORCH_FILE)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    ckpipe.RngState().load_state_dict(found["rng"])
    assert (random.gauss(0, 1), np.random.rand(), float(torch.rand(1))) == expected


def test_elsewhere_again_and_after_it_was_cut_short(call: Commands, tmp_path: Path) -> None:
    root, hub = tmp_path / "run", tmp_path / "hub"
    one, two = save_steps(root, 1, 2)
    before = {path for path in root.rglob("*") if ".ckpipe" not in path.parts}
    for step in (1, 2):
        assert call("export", root, step, "--format", "hf", "--to", hub).code == 0
    assert {path for path in root.rglob("*") if ".ckpipe" not in path.parts} == before
    assert same(shards_of(hub / f"{one}.hf"), model_of(root, one))
    folder = hub / f"{two}.hf"
    made = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    (folder / INDEX).unlink()
    assert call("export", root, 2, "--format", "hf", "--to", hub).code == 0
    after = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert after.keys() == made.keys()
    assert [path.name for path in made if after[path] != made[path]] == [INDEX]
    assert same(shards_of(folder), model_of(root, two))


def test_from_one_kind_of_store_to_another(call: Commands, store: Stores, tmp_path: Path) -> None:
    (id,) = save_steps(store.url, 1)
    done = call("export", store.url, "--format", "torch", "--to", tmp_path, "--part", "model")
    assert done.code == 0
    assert "exported step 1: " in done.out
    found = torch.load(tmp_path / f"{id}.torch" / TORCH_FILE, weights_only=True)
    assert set(found) == {"weight", "bias"}


def test_what_is_wrong_is_said(call: Commands, tmp_path: Path) -> None:
    root = tmp_path / "run"
    (id,) = save_steps(root, 1)
    wrong = {
        ("--format", "pickle"): "pickle",
        (): "--format",
        ("--format", "hf", "--part", "nothing"): "nothing to export under 'nothing'",
        ("--format", "hf", "--max-shard", "tall"): "export.max_shard_bytes",
        ("7", "--format", "hf"): "no checkpoint 7",
    }
    for options, text in wrong.items():
        done = call("export", root, *options)
        assert (done.code, done.out) == (2, "")
        assert text in done.err
    assert not (tmp_path / "missing").exists()
    assert call("export", tmp_path / "missing", "--format", "hf").code == 3
    assert not (tmp_path / "missing").exists()
    path = root / id / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    done = call("export", root, "--format", "torch", "--to", tmp_path / "hub")
    assert (done.code, done.out) == (1, "")
    assert not list((tmp_path / "hub").rglob(TORCH_FILE)), "nothing unverified is seen"


@pytest.mark.parametrize("form", ["torch", "hf"])
def test_a_like_named_part_of_the_same_shapes_is_not_taken_for_it(
    call: Commands, tmp_path: Path, form: str
) -> None:
    with ckpipe.SyncPipeline(tmp_path / "run") as pipeline:
        parts = {
            name: {"w": torch.full((300,), at)} for name, at in (("model", 1.0), ("mean", 2.0))
        }
        pipeline.save(parts, step=1)
    assert call("export", tmp_path / "run", "--format", form).code == 0
    assert call("export", tmp_path / "run", "--format", form).code == 0, "the same is no conflict"
    done = call("export", tmp_path / "run", "--format", form, "--part", "mean")
    assert done.code == 3
    assert "A file with other bytes has the name" in done.err


def test_expanded_tensor_is_not_written_out_unasked(call: Commands, tmp_path: Path) -> None:
    root = tmp_path / "run"
    for n in range(2):
        with ckpipe.SyncPipeline(root) as pipeline:
            mask = torch.full((1,), n).expand(1 << 40)
            state = {"model": {"weight": torch.ones(4), "mask": mask}}
            pipeline.save(state, step=n).wait()
    for command in (("export", root, 1, "--format", "hf"), ("diff", root, 0, 1)):
        done = call(*command)
        assert done.code == 2
        for part in ("8.8 TB", "key 'model.mask'", "kB are stored", "--expanded"):
            assert part in done.err
    assert not list(root.glob("*.hf"))
    assert call("diff", root, 0, 1, "--match", "model.weight").code == 0
    assert call("diff", root, 0, 1, "--structure").code == 0
    assert call("export", root, 1, "--format", "torch").code == 0
    (file,) = root.glob(f"*.torch/{TORCH_FILE}")
    assert torch.load(file, weights_only=True)["model"]["mask"].shape == (1 << 40,)


def test_flag_writes_expanded_tensors_out(
    call: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect, "_ALWAYS_BYTES", 1 << 20)
    for n in range(2):
        with ckpipe.SyncPipeline(tmp_path) as pipeline:
            pipeline.save({"mask": torch.full((1,), float(n)).expand(1 << 19)}, step=n).wait()
    assert call("export", tmp_path, 1, "--format", "hf").code == 2
    done = call("export", tmp_path, 1, "--format", "hf", "--expanded", "--json")
    assert done.code == 0
    found = shards_of(tmp_path / done.data["folder"])
    assert found["mask"].eq(1).all()
    assert call("diff", tmp_path, 0, 1).code == 2
    assert call("diff", tmp_path, 0, 1, "--expanded").code == 1
