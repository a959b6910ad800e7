"""Places that are no root of checkpoints: the error tells their contents, and the line to write."""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as safetensors

import ckpipe
from ckpipe.errors import BackendNotFound, CheckpointNotFound, CkpipeError, StoreError, UsageError
from tests.support.one_checkpoint import save_one
from tests.support.pipelines import load_existing

SAFETENSORS = safetensors({"w": torch.ones(3)})
HUB = r"source=huggingface_hub\.snapshot_download\('o/n'\)"


def torch_file() -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(3)}, buffer)
    return buffer.getvalue()


FOLDERS: dict[str, tuple[list[str], str, str]] = {
    # files; what the error tells; the path below the folder that ckpipe.load then takes
    "trainer": (["checkpoint-9/model.safetensors", "checkpoint-20/model.safetensors"],
                r"Trainer of transformers \(checkpoint-20/\)", "checkpoint-20"),
    "trainer with files": (["checkpoint-500/model.safetensors", "training_args.bin", "config.json"],
                           "Trainer of transformers", "checkpoint-500"),
    "meta": (["consolidated.00.pth", "params.json"], "Meta's form", "consolidated.00.pth"),
    "cut": (["consolidated.00.pth", "consolidated.01.pth"], "several files.*convert_llama", ""),
    "revisions": (["snapshots/1/model.safetensors"], "a folder for each revision", ""),
    "diffusers": (["model_index.json", "unet/diffusion_pytorch_model.safetensors",
                   "vae/diffusion_pytorch_model.safetensors"], "diffusers", "unet"),
    "another diffusers": (["prior/diffusion_pytorch_model.bin", "text_encoder/config.json"],
                          "diffusers", "prior"),
    "parts of diffusers": (["vae/diffusion_pytorch_model.bin", "notes.txt"], "diffusers", "vae"),
    "lightning": (["epoch=9.ckpt", "epoch=10.ckpt"], r"torch\.save", "epoch=10.ckpt"),
    "lightning logs": (["version_0/checkpoints/epoch=0.ckpt"], "Lightning", ""),
    "by step": (["step-9/model.safetensors", "step-10/model.safetensors"], "each step", "step-10"),
    "hub": (["models--o--n/refs/main"], HUB, ""),
    "models--o--n": (["refs/main", "snapshots/1/model.safetensors"], HUB, ""),
    "without weights": (["config.json"], "without its weights", ""),
    "cache of another name": (["models--gpt2/refs/main", "models--o--n/refs/main"],
                              r"snapshot_download\('gpt2'\)", ""),
    "orbax": (["9/_METADATA", "10/_METADATA"], r"Orbax checkpoint.*\(10/\)", ""),
    "steps of DeepSpeed": (["step-10/mp_rank_00_model_states.pt"], "zero_to_fp32", ""),
    "layers of DeepSpeed": (["global_step9/layer_01-model_00-model_states.pt"], "DeepSpeed", ""),
    "steps of DCP": (["step-10/__0_0.distcp"], "incomplete folder of torch.distributed", ""),
    "ranks of megatron": (["mp_rank_00/model_optim_rng.pt", "mp_rank_01/a.pt"], "Megatron", ""),
    "deepspeed": (["latest", "global_step10/mp_rank_00_model_states.pt"], "zero_to_fp32", ""),
    "megatron": (["iter_0000010/common.pt", "iter_0000010/metadata.json"], "Megatron", ""),
    "tensorflow": (["ckpt-1.index", "ckpt-1.data-00000-of-00001"], "TensorFlow", ""),
    "flax": (["flax_model.msgpack", "config.json"], "Flax", ""),
    "unknown": (["notes.txt"], "there are: notes.txt", ""),
    "empty": ([], "there are: no files", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_is_no_root_tells_its_contents_and_the_line(
    tmp_path: Path, name: str, pipeline: ckpipe.SyncPipeline
) -> None:
    files, tells, below = FOLDERS[name]
    place = tmp_path / name
    place.mkdir()
    for file in files:
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_bytes(SAFETENSORS if file.endswith("safetensors") else torch_file())
    with pytest.raises(CheckpointNotFound, match=tells) as caught:
        ckpipe.load(place)
    assert str(place) in str(caught.value)
    with pytest.raises(CheckpointNotFound, match=tells):
        pipeline.load({"w": torch.zeros(3)}, source=place)
    if below:
        assert f"pipeline.load(state, source={str(place / below)!r})" in str(caught.value)
        state = {"w": torch.zeros(3)}
        ckpipe.load(place / below, state)
        assert state["w"].sum() == 3


ROOTS: dict[str, tuple[str, str]] = {
    # a file in the root, and what the warning of a run that begins there tells
    "plain trainer": ("checkpoint-9/model.safetensors", r"Trainer of transformers \(checkpoint-9/"),
    "accelerate": ("checkpoint_3/random_states_0.pkl", r"a folder for each step \(checkpoint_3/"),
    "project of accelerate": ("checkpoints/checkpoint_0/optimizer.bin", r"\(checkpoints/"),
    "lightning": ("epoch=9.ckpt", "torch"),
    "logs of lightning": ("lightning_logs/version_0/checkpoints/a.ckpt", "Lightning"),
    "torchtitan": ("step-10/.metadata", r"a folder for each step \(step-10/\)"),
    "verl": ("global_step_5/actor/model_world_size_1_rank_0.pt", r"\(global_step_5/\)"),
    "deepspeed": ("global_step5/mp_rank_00_model_states.pt", "DeepSpeed"),
}


@pytest.mark.parametrize("name", ROOTS)
def test_a_run_tells_that_its_root_has_checkpoints_of_another_program(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    file, tells = ROOTS[name]
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_bytes(torch_file())
    for begin in (ckpipe.SyncPipeline.choose, ckpipe.SyncPipeline.load):
        with ckpipe.SyncPipeline(tmp_path) as pipeline:
            assert begin(pipeline) is None
        (told,) = [each for each in caplog.records if each.levelname == "WARNING"]
        assert re.search(f"another program .*{tells}", told.getMessage())
        caplog.clear()
        with (
            ckpipe.SyncPipeline(tmp_path, resume="must") as pipeline,
            pytest.raises(CheckpointNotFound, match=f"another program .*{tells}"),
        ):
            begin(pipeline)
    save_one(tmp_path, {"w": 1}, step=1)
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        assert pipeline.load() is not None
    assert not [each for each in caplog.records if "another program" in each.getMessage()]


@pytest.mark.parametrize("name", ["config.json", "data.npz", "2024/log.txt", "run_1/x", "vae/x"])
def test_a_root_with_other_files_begins_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("{}")
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        assert pipeline.load() is None
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


@pytest.mark.parametrize("config", [True, False])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", "model-00001-of-00002.safetensors"]
)
def test_a_link_of_the_hubs_cache_whose_file_is_gone(
    tmp_path: Path, name: str, config: bool, pipeline: ckpipe.SyncPipeline
) -> None:
    (tmp_path / name).symlink_to("../../blobs/gone")
    if config:
        (tmp_path / "config.json").touch()
    for call in (ckpipe.load, lambda place: pipeline.load(source=place)):
        with pytest.raises(CheckpointNotFound, match=rf"links lead are gone: {name}"):
            call(tmp_path)
        with pytest.raises(StoreError, match=r"link to a file that is gone.*Download"):
            call(tmp_path / name)


@pytest.mark.parametrize("prefix", ["", "file://"])
@pytest.mark.parametrize(
    ("gone", "there"),
    [
        ("model.safetensors", "other.safetensors"),
        ("model.safetensors", "pytorch_model.bin"),
        ("model.safetensors.index.json", "other.safetensors"),
        ("model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors"),
        ("pytorch_model.bin", "adapter_model.bin"),
        ("pytorch_model.bin.index.json", "adapter_model.bin"),
        ("b.pt", "a.pt"),
    ],
)
def test_no_file_is_taken_in_place_of_one_that_is_gone(
    tmp_path: Path, gone: str, there: str, prefix: str
) -> None:
    (tmp_path / there).write_bytes(SAFETENSORS if "safe" in there else torch_file())
    (tmp_path / gone).symlink_to("../../blobs/gone")
    for call in (ckpipe.load, ckpipe.inspect):
        with pytest.raises(CheckpointNotFound, match=rf"links lead are gone: {gone}.*Download"):
            call(f"{prefix}{tmp_path}")


@pytest.mark.parametrize(
    ("gone", "there"),
    [
        ("pytorch_model.bin", "model.safetensors"),
        ("other.safetensors", "model.safetensors"),
        ("model.safetensors.index.json", "model.safetensors"),
        ("adapter_model.bin", "pytorch_model.bin"),
        ("tf_model.h5", "pytorch_model.bin"),
        ("config.json", "a.pt"),
    ],
)
def test_a_link_that_nothing_needs_may_be_gone(tmp_path: Path, gone: str, there: str) -> None:
    (tmp_path / there).write_bytes(SAFETENSORS if "safe" in there else torch_file())
    (tmp_path / gone).symlink_to("../../blobs/gone")
    assert ckpipe.load(tmp_path).state["w"].sum() == 3


FILES = {
    "a.npz": "numpy", "a.npy": "numpy", "a.pkl": "pickle", "a.h5": "Keras", "a.keras": "Keras",
    "a.msgpack": "Flax", "a.onnx": "ONNX",
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_library_tells_what_to_do(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    for use in (ckpipe.load, ckpipe.inspect):
        with pytest.raises(UsageError, match=f"{FILES[name]}.*safetensors.numpy.save_file"):
            use(tmp_path / name)
    save_one(tmp_path / "runs" / name, {"w": 1}, step=3)  # a root may have such a name
    assert ckpipe.load(tmp_path / "runs" / name).step == 3


@pytest.mark.parametrize("name", ["a.tar", "a.model", "a", "random_states_0.pkl", "a.dat"])
def test_files_of_any_name_are_known_by_their_first_bytes(tmp_path: Path, name: str) -> None:
    for content in (torch_file(), SAFETENSORS):
        if content is SAFETENSORS and name == "a.tar":
            continue  # an ending of torch
        (tmp_path / name).write_bytes(content)
        state = {"w": torch.zeros(3)}
        ckpipe.load(tmp_path / name, state)
        assert state["w"].sum() == 3
        assert ckpipe.load(f"file://{tmp_path / name}").state["w"].sum() == 3
        assert ckpipe.inspect(tmp_path / name).tensors
        with ckpipe.SyncPipeline(tmp_path / "run") as pipeline:
            assert load_existing(pipeline, source=tmp_path / name).state["w"].sum() == 3


SCRIPT = (("a/data.pkl", b""), ("a/code/__torch__/linear.py", b"class Linear: ..."))
OTHERS: dict[str, tuple[bytes, str]] = {
    "script.pt": (b"", r"TorchScript.*torch\.jit\.load\('script\.pt'\)\.state_dict\(\)"),
    "script": (b"", r"TorchScript.*torch\.jit\.load\('script'\)\.state_dict\(\)"),
    "text.pt": (b"hello", "no zip of torch.save"),
    "notes": (b"hello", "no directory.*files of torch.save and safetensors are opened by"),
    "notes.zip": (b"PK\3\4", "no directory.*files of torch.save and safetensors are opened by"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_that_is_no_checkpoint_says_what_it_is(
    tmp_path: Path, name: str, pipeline: ckpipe.SyncPipeline
) -> None:
    content, says = OTHERS[name]
    (tmp_path / name).write_bytes(content)
    if "script" in name:
        with zipfile.ZipFile(tmp_path / name, "w") as file:
            for record, data in SCRIPT:
                file.writestr(record, data, zipfile.ZIP_DEFLATED if data else zipfile.ZIP_STORED)
    for call in (ckpipe.load, lambda place: pipeline.load(source=place)):
        with pytest.raises(CkpipeError, match=says):
            call(tmp_path / name)


def _loaded(place: Any) -> object:
    with ckpipe.SyncPipeline(place) as pipeline:
        return pipeline.load()


def _evaluated(place: Any) -> object:
    with ckpipe.SyncPipeline(place, read_only=True) as pipeline:
        return pipeline.load()


@pytest.mark.parametrize("place", ["none", "runs/one", "runs/deep/one"])
def test_an_absent_folder_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """As at the first run of a script that tries to load."""
    monkeypatch.chdir(tmp_path)
    calls: list[Callable[[Any], object]] = [ckpipe.load, _evaluated]
    for call in calls:
        with pytest.raises(CheckpointNotFound, match=f"no (directory|folder).*{place}"):
            call(place)
    assert not (tmp_path / place).exists()
    assert _loaded(place) is None


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("az://container/run", "blobfuse2"),
        ("abfss://c@account/run", "blobfuse2"),
        ("hf://org/model", "snapshot_download"),
        ("hdfs://host/run", "Mount it"),
        ("https://host/model.safetensors", "Download it"),
        ("r2://bucket/run", "endpoint_url"),
        ("gcs://bucket/run", "Write gs://"),
    ],
)
def test_a_store_without_a_backend_says_what_to_do_today(url: str, says: str) -> None:
    for use in (ckpipe.load, ckpipe.inspect, _loaded):
        scheme = url.partition(":")[0]
        with pytest.raises(BackendNotFound, match=f"no backend for '{scheme}'.*{says}") as caught:
            use(url)
        assert "register_backend" in str(caught.value)


@pytest.mark.parametrize("name", ["save", "async_save", "save_checkpoint"])
def test_a_save_as_of_torch_says_what_to_write(name: str) -> None:
    with pytest.raises(AttributeError, match=r"with ckpipe\.SyncPipeline\(path\) as pipeline: pip"):
        getattr(ckpipe, name)
    assert name not in dir(ckpipe)


def test_the_package_can_be_pickled_as_modules_are() -> None:
    assert pickle.loads(pickle.dumps(ckpipe)) is ckpipe  # for functions that are sent elsewhere


def test_the_line_that_the_error_of_save_gives_is_right(tmp_path: Path) -> None:
    with pytest.raises(AttributeError) as caught:
        ckpipe.save({"w": 1}, tmp_path)  # type: ignore[operator]
    (line,) = re.findall("Write: (.*)", str(caught.value))
    names = {"ckpipe": ckpipe, "path": tmp_path / "run", "state": {"w": 1}, "step": 7}
    exec(line, names)  # as it stands in the message
    assert ckpipe.load(tmp_path / "run").step == 7


def test_strict_false_is_about_dicts_only(tmp_path: Path, pipeline: ckpipe.SyncPipeline) -> None:
    """As the pages say: the keys of a module are named to be left out."""
    torch.save({"a": 1, "model": {"weight": torch.ones(2, 2), "old": 1.0}}, tmp_path / "a.pt")
    state: dict[str, Any] = {"model": torch.nn.Linear(2, 2), "b": 2}

    def load_existing(**how: Any) -> None:
        pipeline.load(state, source=tmp_path / "a.pt", strict=False, **how)

    with pytest.raises(CkpipeError, match="allow_missing"):
        load_existing()
    load_existing(allow_missing=["model.bias"], allow_unexpected=["model.old"])
    assert state["model"].weight.sum() == 4
