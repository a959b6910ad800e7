"""Checkpoints in other forms: the final one of a run, any one by ``export``, and who loads them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import ckpipe
from ckpipe import errors, events
from ckpipe.testing import Landing
from tests.support.command_line import Commands, damage, save_steps
from tests.support.pipelines import Stores, loaded_state, same, small_state, stores
from tests.support.sampling import EVERY
from tests.support.settling import SettlingPipeline, settle
from tests.support.stored_files import LEASES

WEIGHTS, INDEX, TORCH_FILE = "model.safetensors", "model.safetensors.index.json", "state.pt"
SMALL: dict[str, Any] = {"staging": {"block_bytes": 65536}}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.mid = nn.Linear(16, 16).bfloat16()
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("none", torch.empty(0, 4))
        self.register_buffer("turned", torch.randn(4, 6).t())


def training() -> tuple[Tied, dict[str, Any]]:
    torch.manual_seed(1)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model.embed(torch.arange(5)).sum().backward()
    optimizer.step()
    return model, {"model": model, "optimizer": optimizer, "epoch": 4}


def export(root: Path, form: str) -> Path:
    (folder,) = root.glob(f"*.{form}")
    return folder


def load_shards(folder: Path) -> dict[str, torch.Tensor]:
    """What a reader of a single file or of an index finds, as transformers does."""
    if (folder / WEIGHTS).exists():
        assert [each.name for each in folder.iterdir()] == [WEIGHTS]
        return safetensors.torch.load_file(folder / WEIGHTS)
    index = json.loads((folder / INDEX).read_text())
    names = set(index["weight_map"].values())
    shards = {name: safetensors.torch.load_file(folder / name) for name in names}
    assert {each.name for each in folder.iterdir()} == {INDEX, *names}
    for name, tensors in shards.items():
        assert {key for key, file in index["weight_map"].items() if file == name} == set(tensors)
    found = {key: shards[file][key] for key, file in index["weight_map"].items()}
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in found.values())
    return found


def test_hub_form_loads_into_the_model_in_any_number_of_shards(tmp_path: Path) -> None:
    model, state = training()
    for number, most in enumerate(["1GB", "3kB", 1] if EVERY else ["1GB", "3kB"]):
        root = tmp_path / str(number)
        sizes: dict[str, Any] = {"export": {"max_shard_bytes": most}}
        with ckpipe.SyncPipeline(root, final_format="hf", **sizes, **SMALL) as pipeline:
            pipeline.save(state, step=1)
            pipeline.save(state, step=2, final=True)
        found = load_shards(export(root, "hf"))
        expected = dict(sorted(model.state_dict().items()))
        assert same(
            dict(sorted(found.items())), {n: expected[n] for n in expected if n != "head.weight"}
        )
        other = Tied()
        assert other.load_state_dict(found, strict=False).missing_keys == ["head.weight"]
        shards = len(list(export(root, "hf").glob("*.safetensors")))
        assert (shards == 1) if number == 0 else (shards > 1)
        with safetensors.safe_open(next(export(root, "hf").glob("*.safetensors")), "pt") as file:
            assert file.metadata()["format"] == "pt"


def test_torch_form_loads_without_running_code(tmp_path: Path) -> None:
    model, state = training()
    with ckpipe.SyncPipeline(tmp_path, final_format="torch", **SMALL) as pipeline:
        pipeline.save(state, step=2, final=True)
    found = torch.load(export(tmp_path, "torch") / TORCH_FILE, weights_only=True)
    assert found["epoch"] == 4
    assert same(dict(found["model"]), dict(model.state_dict()))
    tied = [found["model"][f"{name}.weight"].data_ptr() for name in ("head", "embed")]
    assert tied[0] == tied[1], "what was tied is tied"
    assert same(found["optimizer"], state["optimizer"].state_dict())


def test_a_part_can_be_named(tmp_path: Path) -> None:
    adapter = {"net": {"lora.a": torch.ones(3), "lora.b": torch.zeros(2)}, "other": torch.ones(1)}
    for form in ("hf", "torch"):
        settings: dict[str, Any] = {"final_format": form, "export": {"part": "net"}}
        with ckpipe.SyncPipeline(tmp_path, **settings, **SMALL) as pipeline:
            pipeline.save(adapter, step=1, final=True, include=["net.*"])
    assert same(dict(sorted(load_shards(export(tmp_path, "hf")).items())), adapter["net"])
    found = torch.load(export(tmp_path, "torch") / TORCH_FILE, weights_only=True)
    assert same(found, adapter["net"])


def test_intermediate_ones_are_not_exported_and_retention_leaves_exports(tmp_path: Path) -> None:
    seen: list[events.Event] = []
    settings = {"final_format": "hf", "keep_last": 1, **SMALL}
    with ckpipe.SyncPipeline(tmp_path, **settings) as pipeline:
        pipeline.events.add(seen.append)
        for step in range(3):
            pipeline.save({"w": torch.ones(3)}, step=step, final=step == 1).wait()
    (told,) = [each for each in seen if isinstance(each, events.CheckpointExported)]
    assert told.step == 1
    assert [each.name for each in export(tmp_path, "hf").parent.glob("step-*2.*.json")]
    assert told.folder == f"{export(tmp_path, 'hf').name}/"
    assert set(told.files) == {each.name for each in export(tmp_path, "hf").iterdir()}
    assert told.bytes == sum(each.stat().st_size for each in export(tmp_path, "hf").iterdir())
    with ckpipe.SyncPipeline(tmp_path, keep_last=1) as pipeline:
        pipeline.prune()  # which may have been done, if the export had ended before the last save
        assert pipeline.sweep().remove == {}
        assert [info.step for info in pipeline.steps()] == [2], "an export is no checkpoint"
    assert load_shards(export(tmp_path, "hf"))["w"].tolist() == [1, 1, 1]


def test_one_save_is_exported_whatever_the_settings_say(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    with ckpipe.SyncPipeline(tmp_path, final_format="torch", keep_last=1, **SMALL) as pipeline:
        ids = [pipeline.save(state, n, export="hf" if n in (1, 3) else None, final=n == 3).wait().id
               for n in range(4)]  # fmt: skip
        for wrong in ("safetensors", "ckpipe", ["hf"]):
            with pytest.raises(errors.UsageError, match="export is 'torch', 'hf' or 'dcp', not"):
                pipeline.save(state, export=wrong)  # type: ignore[arg-type]
    found = {each.name for each in tmp_path.glob("*.*") if each.suffix in (".hf", ".torch")}
    assert found == {f"{ids[1]}.hf", f"{ids[3]}.hf"}
    assert load_shards(tmp_path / f"{ids[1]}.hf")["w"].tolist() == [1, 1, 1]


def test_no_other_process_prunes_what_is_about_to_be_exported(store: Stores) -> None:
    rule: Any = {"keep_last": 1, "lines": "all"}
    with SettlingPipeline(store.url, final_format="hf", **SMALL) as trainer:
        # Between the commit and the lease of the export's own reading.
        gate = store.faulty.pause(
            lambda each: each.verb == "put" and each.key.startswith(f"{LEASES}step-000000000001"),
            nth=2,
        )
        last = trainer.save({"w": torch.ones(3)}, step=1, final=True).wait()
        gate.wait_until_held()
        with SettlingPipeline(store.url, retention=rule, **SMALL) as other:
            other.save({"w": torch.zeros(3)}, step=2).wait()
            settle(other)  # else its own retention may remove it, once the export has ended
            reason = other.prune().reasons[last.id]
            assert reason == "a process holds a lease on it: it is being loaded or written"
            gate.release()
    assert any(key.endswith(WEIGHTS) for key in store.memory._store.objects)
    with SettlingPipeline(store.url, retention=rule) as other:
        assert other.prune().remove == (last.id,), "the lease has ended with the export"


def test_what_cannot_be_exported_is_said_and_the_checkpoint_stands(tmp_path: Path) -> None:
    with SettlingPipeline(tmp_path, final_format="hf", **SMALL) as pipeline:
        for state, error, match in (
            ({"z": torch.ones(2, dtype=torch.complex128)}, errors.UnsupportedState, "complex128"),
            ({"text": "no tensors"}, errors.UsageError, "no tensors"),
        ):
            handle = pipeline.save(state, final=True)
            assert handle.wait().complete
            settle(pipeline)
            with pytest.raises(error, match=match):
                pipeline.save({}, final=False)


@pytest.mark.parametrize("form", ["hf", "torch"])
def test_cut_short_anywhere_it_is_not_there_and_made_again_it_is_whole(
    store: Stores, form: str
) -> None:
    state = {"model": {f"w{n}": torch.randn(40, 40) for n in range(3)}}
    settings = {"final_format": form, "export": {"max_shard_bytes": 7000}, **SMALL}
    once: dict[str, Any] = {"upload": {"retries": 0}}
    found = INDEX if form == "hf" else TORCH_FILE
    broken = 0
    for number in range(1, 50):
        with stores() as made, SettlingPipeline(made.url, **settings, **once) as pipeline:
            exported: list[events.Event] = []
            pipeline.events.add(
                lambda event, exported=exported: (  # type: ignore[misc]
                    exported.append(event) if isinstance(event, events.CheckpointExported) else None
                )
            )
            lost = errors.StoreUnavailable("lost")
            made.faulty.fail(lost, lambda each: f".{form}/" in each.key, Landing.BEFORE, nth=number)
            pipeline.save(state, step=1, final=True).wait()
            settle(pipeline)
            keys = [key for key in made.memory._store.objects if f".{form}/" in key]
            assert any(key.endswith(found) for key in keys) == bool(exported)
            if exported:
                break
            broken += 1
            with pytest.raises(errors.StoreUnavailable, match="lost"):
                pipeline.save(state, step=1)
            pipeline.save(state, step=1, final=True).wait()
            settle(pipeline)
            again = [key for key in made.memory._store.objects if key.endswith(found)]
            assert len(again) == 1
    assert broken >= 3


# The command


def model_of(root: Path, id: str) -> dict[str, torch.Tensor]:
    with ckpipe.SyncPipeline(root, read_only=True) as pipeline:
        loaded = loaded_state(pipeline, id)
    return dict(sorted(loaded["model"].items()))


def test_beside_the_newest_or_a_named_checkpoint(call: Commands, tmp_path: Path) -> None:
    root = tmp_path / "run"
    one, two = save_steps(root, 1, 2)
    done = call("export", root, "--form", "hf", "--max-shard", "30B", "--json")
    assert done.code == 0
    folder = root / f"{two}.hf"
    assert (done.data["id"], done.data["url"]) == (two, str(folder))
    assert set(done.data["files"]) == {each.name for each in folder.iterdir()}
    assert done.data["bytes"] == sum(each.stat().st_size for each in folder.iterdir())
    assert len(done.data["files"]) == 3, "two shards and their index"
    assert same(load_shards(folder), model_of(root, two))
    assert call("export", root, "-", 1, "--form", "torch").code == 0
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
    assert call("export", tmp_path, "--form", "torch").code == 0
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
        to, small = hub / str(step), ("--max-shard", "30B")
        assert call("export", root, to, step, "--form", "hf", *small).code == 0
    assert {path for path in root.rglob("*") if ".ckpipe" not in path.parts} == before
    assert same(load_shards(hub / "1"), model_of(root, one))
    folder = hub / "2"
    made = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    (folder / INDEX).unlink()
    assert call("export", root, folder, "--form", "hf", "--max-shard", "30B").code == 0
    after = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert after.keys() == made.keys()
    assert [path.name for path in made if after[path] != made[path]] == [INDEX]
    assert same(load_shards(folder), model_of(root, two))


def test_from_one_kind_of_store_to_another(call: Commands, store: Stores, tmp_path: Path) -> None:
    save_steps(store.url, 1)
    done = call("export", store.url, tmp_path, "--form", "torch", "--part", "model")
    assert done.code == 0
    assert "exported step 1: " in done.out
    assert set(torch.load(tmp_path / TORCH_FILE, weights_only=True)) == {"weight", "bias"}


def test_a_target_that_ends_like_a_file_of_torch_is_that_file(
    call: Commands, store: Stores, tmp_path: Path
) -> None:
    one, _ = save_steps(store.url, 1, 2)
    (tmp_path / TORCH_FILE).write_bytes(b"of another export")
    file = tmp_path / "new" / "one.pt"
    for target in (file, tmp_path / "one.pth"):
        assert call("export", store.url, target, 1, "--form", "torch", "--dtype", "bf16").code == 0
    found = torch.load(file, weights_only=True)
    assert found["model"]["weight"].dtype == torch.bfloat16
    made = {each.name for each in tmp_path.rglob("*") if each.is_file()}
    assert made == {TORCH_FILE, "one.pt", "one.pth"}
    before = file.read_bytes()
    assert call("export", store.url, file, one, "--form", "torch", "--dtype", "fp16").code == 3
    assert file.read_bytes() == before, "no file is replaced"
    to = f"{store.url}-exported/deep/two.bin"
    done = ckpipe.export(store.url, to, form="torch", part="model")
    assert (done.url, done.files) == (f"{store.url}-exported/deep", ("two.bin",))
    again = ckpipe.load(to)
    assert same(again.state, ckpipe.load(store.url, step=2).state["model"])


def test_what_is_wrong_is_said(call: Commands, tmp_path: Path) -> None:
    root = tmp_path / "run"
    (id,) = save_steps(root, 1)
    wrong = {
        ("--form", "pickle"): "pickle",
        (): "--form",
        ("--form", "hf", "--part", "nothing"): "nothing to export under 'nothing'",
        ("--form", "hf", "--max-shard", "tall"): "export.max_shard_bytes",
        ("-", 7, "--form", "hf"): "no checkpoint 7",
        (1, "--form", "hf"): f"Write the target first: ckpipe export {root} - 1",
        (id, "--form", "hf"): "is a step, and stands where the target stands",
        ("--form", "hf", "--dtype", "f4"): "'f4' is not one of 'bf16'",
    }
    for options, text in wrong.items():
        done = call("export", root, *options)
        assert (done.code, done.out) == (2, "")
        assert text in done.err
    assert not (tmp_path / "missing").exists()
    assert call("export", tmp_path / "missing", "--form", "hf").code == 3
    assert not (tmp_path / "missing").exists()
    damage(root, id)
    done = call("export", root, tmp_path / "hub", "--form", "torch")
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
    assert call("export", tmp_path / "run", "--form", form).code == 0
    assert call("export", tmp_path / "run", "--form", form).code == 0, "the same is no conflict"
    done = call("export", tmp_path / "run", "--form", form, "--part", "mean")
    assert done.code == 3
    assert "A file with other bytes has the name" in done.err


def test_expanded_tensor_is_not_written_out_unasked(call: Commands, tmp_path: Path) -> None:
    root = tmp_path / "run"
    for n in range(2):
        with ckpipe.SyncPipeline(root) as pipeline:
            mask = torch.full((1,), n).expand(1 << 40)
            state = {"model": {"weight": torch.ones(4), "mask": mask}}
            pipeline.save(state, step=n).wait()
    for command in (("export", root, "-", 1, "--form", "hf"), ("diff", root, 0, 1)):
        done = call(*command)
        assert done.code == 2
        for part in ("8.8 TB", "key 'model.mask'", "kB are stored", "--expanded"):
            assert part in done.err
    assert not list(root.glob("*.hf"))
    assert call("diff", root, 0, 1, "--match", "model.weight").code == 0
    assert call("diff", root, 0, 1, "--structure").code == 0
    assert call("export", root, "-", 1, "--form", "torch").code == 0
    (file,) = root.glob(f"*.torch/{TORCH_FILE}")
    assert torch.load(file, weights_only=True)["model"]["mask"].shape == (1 << 40,)


def test_flag_writes_expanded_tensors_out(
    call: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpipe.catalog.inspect._ALWAYS_BYTES", 1 << 20)
    for n in range(2):
        with ckpipe.SyncPipeline(tmp_path) as pipeline:
            pipeline.save({"mask": torch.full((1,), float(n)).expand(1 << 19)}, step=n).wait()
    assert call("export", tmp_path, "-", 1, "--form", "hf").code == 2
    done = call("export", tmp_path, "-", 1, "--form", "hf", "--expanded", "--json")
    assert done.code == 0
    found = load_shards(Path(done.data["url"]))
    assert found["mask"].eq(1).all()
    assert call("diff", tmp_path, 0, 1).code == 2
    assert call("diff", tmp_path, 0, 1, "--expanded").code == 1
