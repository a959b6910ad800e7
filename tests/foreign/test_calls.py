"""The calls with a URL, of ckpipe's checkpoints and of those of others, and the commands."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
import torch

import ckpipe
from ckpipe.errors import CheckpointNotFound, CorruptCheckpoint, StoreError, UsageError
from ckpipe.testing import FaultyBackend
from tests.foreign.places import Counted, assert_loaded, counted, weights
from tests.foreign.test_imports import (
    WRITERS,
    Write,
    objects,
    of_dcp,
    of_hugging_face,
    of_torch,
)
from tests.support.command_line import Commands, damage, save_steps
from tests.support.pipelines import load_existing
from tests.support.rank_pipelines import ranks


@pytest.mark.parametrize("write", WRITERS)
def test_commands_and_calls_take_what_others_wrote(
    write: Write, tmp_path: Path, call: Commands
) -> None:
    source, state = write(tmp_path, weights()), weights()
    with counted(source) as (place, _):
        about = ckpipe.inspect(place)
        tensors = {each.label: each for each in about.tensors}
        assert {name: list(each.shape) for name, each in tensors.items()} == {
            name: list(each.shape) for name, each in state.items()
        }
        assert (about.id, about.step, about.source) == (None, None, place)
        done = ckpipe.verify(place)
        assert (done.id, done.source, done.bytes) == (None, place, about.bytes)
    shown = call("ls", source, "--json").data
    assert shown["checkpoints"] == []
    assert shown["foreign"]["tensors"] == len(state)
    assert shown["foreign"]["bytes"] == about.bytes
    (described,) = ckpipe.inspect(source, include=["layer.0.bias"]).tensors
    assert (described.dtype, described.bytes) == ("float16", 80)
    assert "layer.0.bias float16[40]" in call("info", source).out
    said = call("verify", source)
    assert (said.code, "no checksums to check" in said.out) == (0, True)
    ckpipe.import_checkpoint(source, tmp_path / "run", step=2)
    same = call("diff", source, "-", 2, "--in", tmp_path / "run", "--json")
    assert (same.code, same.data["compared"]) == (0, len(state))
    changed = {**state, "layer.0.bias": state["layer.0.bias"] + 1}
    (tmp_path / "other").mkdir()
    other = write(tmp_path / "other", changed)
    differs = call("diff", source, "-", "-", "--in", other, "--json")
    assert differs.code == 1
    assert [each["label"] for each in differs.data["tensors"]] == ["layer.0.bias"]


def test_what_others_wrote_is_verified_as_far_as_it_can_be(tmp_path: Path, call: Commands) -> None:
    folder = of_hugging_face(tmp_path, weights())
    whole = (folder / "0.safetensors").read_bytes()
    (folder / "0.safetensors").write_bytes(whole[:-1])
    with pytest.raises(CorruptCheckpoint) as raised:
        ckpipe.verify(folder)
    assert raised.value.key == "0.safetensors"
    (result,) = call("verify", folder, "--json").data["results"]
    assert (result["ok"], result["source"]) == (False, str(folder))
    assert call("verify", folder).code == call("ls", folder).code == 1
    (folder / "0.safetensors").write_bytes(whole)
    looks = []

    def cut(key: str) -> None:
        looks.append(key)
        if len(looks) == 3:  # behind the look at each of the two files
            (folder / key).write_bytes((folder / key).read_bytes() + b"more")

    with counted(folder, cut) as (url, _), pytest.raises(CorruptCheckpoint, match="changed"):
        ckpipe.verify(url)


@pytest.mark.parametrize("write", WRITERS)
def test_a_load_looks_for_no_marks_of_ckpipe_beside_what_others_wrote(
    write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, opened = write(tmp_path, weights()), list[FaultyBackend]()
    scheme = write.__name__.replace("_", "-")

    def open_counted(url: str) -> FaultyBackend:
        opened.append(FaultyBackend(Counted(url, str)))
        return opened[-1]

    ckpipe.register_backend(scheme, open_counted)
    caplog.set_level(logging.INFO, "ckpipe")
    place = f"{scheme}://{source}"
    assert_loaded(ckpipe.load(place), weights(), place)
    asked = {each.key for store in opened for each in store.operations}
    assert asked - {""}
    assert [key for key in asked if ".ckpipe" in key] == []
    assert [each for each in caplog.messages if "training" in each] == []


@pytest.mark.parametrize(
    ("write", "besides"), [(of_hugging_face, 64 << 10), (of_torch, 512 << 10), (of_dcp, 256 << 10)]
)
def test_only_what_is_wanted_is_read(
    write: Write, besides: int, tmp_path: Path, pipeline: ckpipe.SyncPipeline
) -> None:
    tensors = {f"w{n}": torch.full((1 << 20,), float(n)) for n in range(8)}
    with counted(write(tmp_path, tensors)) as (place, opened):
        result = load_existing(pipeline, source=place, include=["w3"])
        assert torch.equal(result.state["w3"], tensors["w3"])
        assert sum(each.bytes for each in opened) <= 1.1 * (4 << 20) + besides


def test_inspect_reads_metadata_only(tmp_path: Path) -> None:
    folder = of_hugging_face(tmp_path, {"x": torch.zeros(4 << 20), "y": torch.zeros(2)})
    with counted(folder) as (url, opened):
        assert ckpipe.inspect(url).bytes > 16 << 20
        assert sum(store.bytes for store in opened) < 1 << 20


def test_calls_take_checkpoints_of_ours(tmp_path: Path) -> None:
    one, two = save_steps(tmp_path / "a", 1, 2)
    about = ckpipe.inspect(tmp_path / "a", 1, include=["model.*"])
    assert (about.id, about.step, about.source) == (one, 1, None)
    assert about.metrics == {"loss": 1.0}
    assert [each.label for each in about.tensors] == ["model.weight", "model.bias"]
    assert ckpipe.inspect(tmp_path / "a").id == two
    assert [each.label for each in ckpipe.inspect(tmp_path / "a").tensors if each.shares_with]
    copied = ckpipe.copy(tmp_path / "a", tmp_path / "b")
    assert (copied.id, copied.files, copied.copied_files) == (two, 1, 1)
    assert ckpipe.copy(tmp_path / "a", tmp_path / "b", two).copied_files == 0
    assert {name.partition("/")[0] for name in objects(tmp_path / "b")} == {two, f"{two}.json"}
    assert ckpipe.verify(tmp_path / "b") == ckpipe.VerifyResult(two, 1, copied.bytes)
    damage(tmp_path / "b", two)
    with pytest.raises(CorruptCheckpoint) as raised:
        ckpipe.verify(tmp_path / "b", 2)
    assert raised.value.step == 2
    for call in (ckpipe.inspect, ckpipe.verify):
        with pytest.raises(CheckpointNotFound, match="the newest complete steps are: 1, 2"):
            call(tmp_path / "a", 3)
    with pytest.raises(CheckpointNotFound, match="import_checkpoint"):
        ckpipe.copy(of_torch(tmp_path, {"x": torch.ones(2)}), tmp_path / "c")

    async def inside() -> str | None:
        return ckpipe.inspect(tmp_path / "a").id

    assert asyncio.run(inside()) == two


def test_calls_take_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    (id,) = save_steps(tmp_path / "a", 1)
    with ranks(str(tmp_path / "a"), 2) as world:
        world[0].save({"w": torch.ones(2)}, step=2).wait()  # the other rank saves nothing
    assert ckpipe.inspect(tmp_path / "a").id == id
    assert ckpipe.verify(tmp_path / "a").id == id
    assert ckpipe.export(tmp_path / "a", tmp_path / "b", part="model").id == id
    assert ckpipe.import_checkpoint(tmp_path / "a", tmp_path / "c").step == 1


def test_a_file_is_loaded_with_any_initial(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    for initial in (None, str(tmp_path / "w.pt")):
        assert ckpipe.load(tmp_path / "w.pt", initial=initial).state["w"].tolist() == [1.0, 1.0]


def test_a_place_without_a_checkpoint_is_told_by_every_call(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    calls = (
        ckpipe.load,
        ckpipe.inspect,
        ckpipe.verify,
        lambda place: ckpipe.import_checkpoint(place, tmp_path / "new"),
        lambda place: ckpipe.export(place, tmp_path / "new", form="torch"),
        lambda place: ckpipe.load(tmp_path / "run", initial=str(place)),
    )
    (tmp_path / "run").mkdir()
    for use in calls:
        with pytest.raises(StoreError, match=r"There is no file or folder .*absent\.pt"):
            use(tmp_path / "absent.pt")
        with pytest.raises(UsageError, match=r"model\.gguf is a GGUF file"):
            use(tmp_path / "model.gguf")
        with pytest.raises(CheckpointNotFound, match=r"id of a model.*snapshot_download"):
            use("meta-llama/Llama-3.1-8B")
    assert not (tmp_path / "new").exists()
