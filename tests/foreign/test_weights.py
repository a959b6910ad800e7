"""Weights that other programs saved: safetensors files and Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import ckpipe
from ckpipe.distributed import training_state
from ckpipe.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    DtypeMismatch,
    DuplicateName,
    InvalidManifest,
    MissingObject,
    ShapeMismatch,
    StructureMismatch,
    UnsupportedState,
    UsageError,
)
from tests.foreign.places import Tensors, assert_loaded, counted, replaced_at_second_look, weights
from tests.support.one_checkpoint import save_one
from tests.support.pipelines import load_existing


def one_file(folder: Path, tensors: Tensors) -> None:
    safetensors.torch.save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})


def in_shards(folder: Path, tensors: Tensors, files: int = 3) -> None:
    """Write shards and their index as ``save_pretrained`` does."""
    names = list(tensors)
    of_file = {f"model-{n + 1:05d}-of-{files:05d}.safetensors": names[n::files] for n in range(3)}
    for file, mine in of_file.items():
        safetensors.torch.save_file({name: tensors[name] for name in mine}, folder / file)
    weight_map = {name: file for file, mine in of_file.items() for name in mine}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def loose(folder: Path, tensors: Tensors) -> None:
    for number, (name, tensor) in enumerate(tensors.items()):
        safetensors.torch.save_file({name: tensor}, folder / f"part{number}.safetensors")


def adapter(folder: Path, tensors: Tensors) -> None:
    safetensors.torch.save_file(dict(tensors), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")


FORMS: dict[str, Callable[[Path, Tensors], object]] = {
    each.__name__: each for each in (one_file, in_shards, loose, adapter)
}


@pytest.fixture(params=FORMS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    FORMS[request.param](folder, weights())
    (folder / "config.json").write_text("{}")
    return folder


def test_a_folder_loads_to_the_bit(folder: Path, pipeline: ckpipe.SyncPipeline) -> None:
    assert_loaded(load_existing(pipeline, source=folder), weights(), folder)
    target = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
    result = load_existing(pipeline, target, source=str(folder))
    assert_loaded(result, weights(), folder)
    assert result.state is target
    assert result.report is not None
    assert result.report.unverified_bytes == result.report.bytes > 0
    assert result.report.to_data()["unverified_bytes"] == result.report.bytes


@pytest.mark.sample(1)
@pytest.mark.parametrize("mib", [17, 94])
def test_headers_and_indexes_of_nearly_100_mb_are_read(
    mib: int, tmp_path: Path, pipeline: ckpipe.SyncPipeline
) -> None:
    """Of many experts they have 20 MB; here their text is long, which is read faster."""
    long = {"note": "n" * (mib << 20)}
    whole, shards = tmp_path / "whole.safetensors", tmp_path / "shards"
    safetensors.torch.save_file(weights(), whole, long)
    assert_loaded(load_existing(pipeline, source=whole), weights(), whole)
    shards.mkdir()
    in_shards(shards, weights())
    index = shards / "model.safetensors.index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "metadata": long}))
    assert_loaded(load_existing(pipeline, source=shards), weights(), shards)


RARE = ("float4_e2m1fn_x2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "complex64")


def rare(*, value: int = 1) -> dict[str, torch.Tensor]:
    """Tensors of all dtypes that newer versions of safetensors write, each of 3 rows."""
    dtypes = {name: getattr(torch, name) for name in RARE if hasattr(torch, name)}
    return {
        name: (torch.arange(12 * dtype.itemsize).reshape(3, -1) * value).to(torch.uint8).view(dtype)
        for name, dtype in dtypes.items()
    }


def bits(tensors: Tensors) -> dict[str, Any]:
    return {
        name: (each.dtype, each.shape, each.view(torch.uint8).tolist())
        for name, each in tensors.items()
    }


def test_rare_dtypes_are_read_and_exported(tmp_path: Path, pipeline: ckpipe.SyncPipeline) -> None:
    one_file(tmp_path, rare())
    assert bits(load_existing(pipeline, source=tmp_path).state) == bits(rare())
    target = rare(value=0)
    load_existing(pipeline, target, source=tmp_path)
    assert bits(target) == bits(rare())
    pipeline.save({"model": rare()}, step=1).wait()
    ckpipe.export(tmp_path / "run", tmp_path / "out")
    assert bits(safetensors.torch.load_file(tmp_path / "out/model.safetensors")) == bits(rare())


def test_dtypes_that_torch_or_safetensors_lack_are_refused_by_name(
    tmp_path: Path, pipeline: ckpipe.SyncPipeline
) -> None:
    for dtype, shape, nbytes, match in (
        ("F6_E2M3", [4], 3, "F6_E2M3', of which torch"),
        ("F4", [2, 3], 3, "half a byte in a row"),
        ("F4", [], 1, "half a byte in a row"),
    ):
        row = {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}
        header = json.dumps({"w": row}).encode()
        data = len(header).to_bytes(8, "little") + header + bytes(nbytes)
        (tmp_path / "model.safetensors").write_bytes(data)
        with pytest.raises(InvalidManifest, match=match):
            pipeline.load(source=tmp_path)
    four = torch.zeros((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    for step, (tensor, match) in enumerate(
        ((torch.zeros(2, dtype=torch.complex128), "no dtype complex128"),
         (four, "no scalars of the dtype float4"))
    ):  # fmt: skip
        pipeline.save({"w": tensor}, step=step).wait()
        with pytest.raises(UnsupportedState, match=match):
            ckpipe.export(tmp_path / "run", tmp_path / "out")


def test_a_folder_loads_by_ranged_requests(folder: Path, pipeline: ckpipe.SyncPipeline) -> None:
    with counted(folder) as (url, _):
        assert_loaded(load_existing(pipeline, source=url), weights(), url)
        assert_loaded(ckpipe.load(url), weights(), url)


def test_one_call_opens_a_folder_a_file_and_a_run(tmp_path: Path) -> None:
    one_file(tmp_path, weights())
    file = tmp_path / "model.safetensors"
    assert_loaded(ckpipe.load(tmp_path), weights(), tmp_path)
    assert_loaded(ckpipe.load(file), weights(), file)
    save_one(tmp_path / "run.safetensors", {"a": 1}, step=4)
    assert ckpipe.load(tmp_path / "run.safetensors").step == 4
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFound, match="There is no checkpoint in"):
        ckpipe.load(tmp_path / "empty")


async def test_an_async_pipeline_takes_a_source(tmp_path: Path) -> None:
    one_file(tmp_path, weights())
    async with ckpipe.Pipeline(tmp_path / "run") as pipeline:
        result = await pipeline.load(source=tmp_path)
        assert result is not None
        assert_loaded(result, weights(), tmp_path)
        assert await pipeline.load() is None


class Net(nn.Module):
    """Two layers and a head whose weight is that of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight


def net_state(*, seed: int = 1) -> dict[str, torch.Tensor]:
    """The tensors of a ``Net`` without the tied name, as ``save_pretrained`` writes them."""
    torch.manual_seed(seed)
    return {name: each.detach().clone() for name, each in Net().named_parameters()}


def holds(net: Net, expected: Tensors) -> bool:
    assert net.head.weight is net.embedding.weight
    return all(torch.equal(each, expected[name]) for name, each in net.named_parameters())


def test_weights_go_to_the_model_of_any_state(
    tmp_path: Path, pipeline: ckpipe.SyncPipeline
) -> None:
    one_file(tmp_path, net_state())
    for put, kept in (
        (lambda net, optimizer: net, ()),
        (lambda net, optimizer: {"model": net, "optimizer": optimizer, "step": 7},
         ("optimizer", "step")),
        (lambda net, optimizer: training_state(net, optimizer), ()),
        (lambda net, optimizer: {"training": training_state(net, optimizer), "step": 7},
         ("step",)),
        (lambda net, optimizer: {"all": {"net": net}, "step": 7}, None),
        (lambda net, optimizer: {"teacher": net, "student": Net()}, None),
    ):  # fmt: skip
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
        state = put(net, optimizer)
        if kept is None:  # which of several dicts, or of two models, is not guessed
            with pytest.raises(StructureMismatch):
                pipeline.load(state, source=tmp_path)
            continue
        result = load_existing(pipeline, state, source=tmp_path)
        assert holds(net, net_state())
        assert result.missing == kept
        assert result.state is state
        assert optimizer.param_groups[0]["lr"] == 0.5
        if isinstance(state, dict):
            assert state["step"] == 7


def test_a_source_is_no_checkpoint(tmp_path: Path) -> None:
    one_file(tmp_path, net_state())
    net = Net()
    with ckpipe.SyncPipeline(tmp_path / "run") as pipeline:
        load_existing(pipeline, net, source=tmp_path)
        assert pipeline.latest() is None
        assert pipeline.save(net).wait().step == 0
        for wrong in ({"step": 0}, {"fallback": True}):
            with pytest.raises(UsageError, match="source is given alone"):
                pipeline.load(net, source=tmp_path, **wrong)


def test_the_first_start_and_a_restart_are_the_same_line(tmp_path: Path) -> None:
    one_file(tmp_path, net_state())
    found = []
    for _ in range(3):
        net = Net()
        with ckpipe.SyncPipeline(tmp_path / "run", initial=tmp_path) as pipeline:
            result = load_existing(pipeline, {"model": net})
            found.append((result.step, result.source))
            assert torch.equal(net.inner.bias, net_state()["inner.bias"] + result.step)
            with torch.no_grad():
                net.inner.bias.add_(1)
            pipeline.save({"model": net}, step=result.step + 1)
    assert found == [(0, str(tmp_path)), (1, None), (2, None)]


def test_a_damaged_run_does_not_begin_again(tmp_path: Path) -> None:
    one_file(tmp_path, net_state())
    with ckpipe.SyncPipeline(tmp_path / "run", initial=tmp_path) as pipeline:
        pipeline.save({"model": Net()}, step=1).wait()
        (data,) = (tmp_path / "run").glob("step-*/*.safetensors")
        data.write_bytes(data.read_bytes()[:-1])
        with (
            pytest.warns(RuntimeWarning, match="is damaged"),
            pytest.raises(CorruptCheckpoint),
        ):
            pipeline.load({"model": Net()}, fallback=True)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("model.{}", "Rename({'model.*': '*'})"),
        ("module.{}", "Rename({'module.*': '*'})"),
        ("_orig_mod.{}", "Rename({'_orig_mod.*': '*'})"),
        ("model.module.{}", "Rename({'model.module.*': '*'})"),
    ],
)
def test_other_names_propose_the_rename_that_fits(
    before: str, after: str, tmp_path: Path, pipeline: ckpipe.SyncPipeline
) -> None:
    one_file(tmp_path, {before.format(name): each for name, each in net_state().items()})
    for wrap in (lambda net: net, lambda net: {"model": net}, training_state):
        net = Net()
        kept = {name: each.clone() for name, each in net.state_dict().items()}
        with pytest.raises(StructureMismatch) as raised:
            pipeline.load(wrap(net), source=tmp_path)
        assert after in str(raised.value)
        assert all(torch.equal(each, kept[name]) for name, each in net.state_dict().items())


@pytest.mark.parametrize("wrap", [lambda net: net, lambda net: {"model": net}, training_state])
def test_transforms_see_the_names_of_the_file(
    wrap: Callable[[Net], Any], tmp_path: Path, pipeline: ckpipe.SyncPipeline
) -> None:
    one_file(tmp_path, {f"module.{name}": each for name, each in net_state().items()})
    net = Net()
    rules = [ckpipe.Rename({"module.*": "*"})]
    result = load_existing(pipeline, wrap(net), source=tmp_path, transform=rules)
    assert result.transformed["module.inner.bias"] == ("inner.bias",)
    assert all(torch.equal(net.state_dict()[name], each) for name, each in net_state().items())
    fresh = ckpipe.load(tmp_path, transform=[ckpipe.Only("module.inner")]).state
    assert set(fresh) == {"module.inner.weight", "module.inner.bias"}


def test_a_target_with_a_prefix_proposes_the_rename_that_fits(
    tmp_path: Path, pipeline: ckpipe.SyncPipeline
) -> None:
    one_file(tmp_path, net_state())
    with pytest.raises(StructureMismatch, match=r"Rename\(\{'\*': 'model\.\*'\}\)"):
        pipeline.load(nn.ModuleDict({"model": Net()}), source=tmp_path)


def test_what_does_not_fit_is_refused_before_a_byte_is_written(
    tmp_path: Path, pipeline: ckpipe.SyncPipeline
) -> None:
    one_file(tmp_path, net_state())
    for target, error in (
        ({"inner.weight": torch.ones(4, 5)}, ShapeMismatch),
        ({"inner.weight": torch.ones(4, 4).half()}, DtypeMismatch),
        ({"inner.weight": torch.ones(4, 4), "more": torch.ones(1)}, StructureMismatch),
    ):
        with pytest.raises(error):
            pipeline.load(target, source=tmp_path)
        assert all(torch.equal(each, torch.ones_like(each)) for each in target.values())
    cast = {"inner.weight": torch.ones(4, 4, dtype=torch.float64)}
    load_existing(pipeline, cast, source=tmp_path, strict=False, cast=True)
    assert torch.equal(cast["inner.weight"].float(), net_state()["inner.weight"])


def test_a_file_that_is_replaced_meanwhile_is_an_error(
    tmp_path: Path, pipeline: ckpipe.SyncPipeline
) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    one_file(folder, weights())
    target = {name: torch.zeros_like(each) for name, each in weights().items()}
    with (
        counted(folder, replaced_at_second_look(folder)) as (url, _),
        pytest.raises(CorruptCheckpoint, match="replaced or changed") as raised,
    ):
        pipeline.load(target, source=url)
    assert raised.value.key == "model.safetensors"
    assert raised.value.target_touched


def test_a_name_in_two_files_is_refused_unless_the_index_decides(
    tmp_path: Path, pipeline: ckpipe.SyncPipeline
) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        file = tmp_path / f"{name}.safetensors"
        tensors = {"w": torch.tensor([value]), f"own of {name}": torch.ones(1)}
        safetensors.torch.save_file(tensors, file)
    with pytest.raises(DuplicateName, match=r"Both a\.safetensors and b\.safetensors"):
        pipeline.load(source=tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {"w": "b.safetensors", "own of a": "a.safetensors"}})
    )
    assert load_existing(pipeline, source=tmp_path).state["w"].item() == 2
    index.write_text(json.dumps({"weight_map": {"w": "c.safetensors"}}))
    with pytest.raises(MissingObject, match=r"c\.safetensors, which is not in the folder"):
        pipeline.load(source=tmp_path)
    index.write_text(json.dumps({"weight_map": {"w": "b.safetensors", "x": "b.safetensors"}}))
    with pytest.raises(InvalidManifest, match="does not have") as raised:
        pipeline.load(source=tmp_path)
    assert raised.value.key == "x"


def test_one_whole_file_counts_before_an_index(
    tmp_path: Path, pipeline: ckpipe.SyncPipeline
) -> None:
    in_shards(tmp_path, weights(seed=1))
    one_file(tmp_path, weights())  # as when a model of shards was saved again, with a larger limit
    assert_loaded(load_existing(pipeline, source=tmp_path), weights(), tmp_path)
    bins = tmp_path / "bins"
    bins.mkdir()
    for name, value in (("pytorch_model.bin", 1), ("adapter_model.bin", 2), ("other.bin", 3)):
        torch.save({"w": torch.tensor(value)}, bins / name)
    index = bins / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "other.bin"}}))
    for expected in (1, 3, 2):
        assert load_existing(pipeline, source=bins).state["w"].item() == expected
        (bins / "pytorch_model.bin" if expected == 1 else index).unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("there", "missing"),
    [
        (["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"], "number 2 of"),
        (["model-00002-of-00004.safetensors"], "number 1, 3, 4 of"),
        (["model-00000-of-00002.safetensors"], "number 1 of"),
        (["a-1-of-1.safetensors", "b-1-of-999999999.safetensors"], "number 2, 3, .* and 1 more of"),
        (["pytorch_model-00001-of-00002.bin"], "number 2 of"),
        (["shard-00002-model-00001-of-00001.safetensors"], "number 1 of"),
        (["shard-00001-model-00002-of-00002.safetensors"], "number 1 of"),
    ],
)
def test_shards_that_are_missing_are_named(
    there: list[str], missing: str, tmp_path: Path, pipeline: ckpipe.SyncPipeline
) -> None:
    for number, name in enumerate(there):
        save = torch.save if name.endswith(".bin") else safetensors.torch.save_file
        save({f"w{number}": torch.ones(2)}, tmp_path / name)
    with pytest.raises(MissingObject, match=missing) as caught:
        load_existing(pipeline, source=tmp_path)
    assert list(load_existing(pipeline, source=tmp_path / there[0]).state) == ["w0"]
    if "had nothing to save" in str(caught.value):  # do as it says
        (tmp_path / there[0]).rename(tmp_path / there[0].replace("shard-00002", "shard-00001"))
        assert list(load_existing(pipeline, source=tmp_path).state) == ["w0"]
    else:
        assert "shard-00002" not in there[0]


OTHERS = {
    "Orbax": ["_METADATA", "manifest.ocdbt"],
    "Megatron": [".metadata", "common.pt", "metadata.json", "__0_0.distcp"],
    "DeepSpeed": ["zero_to_fp32.py", "latest"],
    "DeepSpeed ": ["mp_rank_00_model_states.pt"],
    "GGUF": ["model.gguf"],
}


@pytest.mark.parametrize("format", OTHERS)
def test_other_formats_are_refused_by_name_with_the_way_round(
    format: str, pipeline: ckpipe.SyncPipeline, theirs: Path
) -> None:
    for name in OTHERS[format]:
        (theirs / name).write_bytes(b"\0" * 100)
    for load_theirs in (pipeline.load, ckpipe.load):
        where: dict[str, Any] = {"source" if load_theirs == pipeline.load else "url": theirs}
        with pytest.raises(UsageError, match=format.strip()) as raised:
            load_theirs(**where)
        assert raised.value.hint


def test_a_hub_id_and_a_root_of_ours_are_told_apart_from_folders(
    tmp_path: Path, pipeline: ckpipe.SyncPipeline
) -> None:
    with pytest.raises(CheckpointNotFound, match="snapshot_download"):
        pipeline.load(source="meta-llama/Llama-3.1-8B")
    pipeline.save({"a": 1}, step=1).wait()
    with pytest.raises(CheckpointNotFound, match=r"root of ckpipe's own.*ckpipe\.load"):
        pipeline.load(source=tmp_path / "run")
