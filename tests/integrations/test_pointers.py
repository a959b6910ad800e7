"""Pointers lead to their own checkpoint, and to no other weights."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import ckpipe
from ckpipe.errors import CheckpointNotFound, CkpipeError
from ckpipe.integrations.pointers import (
    Pointer,
    read_pointer,
    set_aside,
    write_pointer,
    write_pointer_folder,
)
from ckpipe.integrations.shared import TrainerPipeline, choose_path

if TYPE_CHECKING:
    from tests.support.rank_processes import Gang


def lead_to_none(case: dict[str, Any]) -> None:
    """Look for a name that cannot be read on rank 0, and is absent on the others' machines."""
    name = Path(case["root"], "name" if dist.get_rank() == 0 else "absent")
    with ckpipe.SyncPipeline(case["root"]) as pipeline, pytest.raises(IsADirectoryError):
        choose_path(pipeline, name)


def test_all_ranks_are_told_what_rank_0_cannot_read(world: Gang, tmp_path: Path) -> None:
    (tmp_path / "name" / "ckpipe.json").mkdir(parents=True)
    assert world.run("tests.integrations.test_pointers:lead_to_none", tmp_path, 2) == [0, 0]


def saved(root: Path | str, step: int) -> ckpipe.CheckpointInfo:
    with ckpipe.SyncPipeline(root) as pipeline:
        return pipeline.save({"w": step}, step=step).wait()


@pytest.mark.parametrize(
    ("files", "moved"),
    [
        (["model.safetensors"], True),
        (["unet/pytorch_model.bin", "trainer_state.json"], True),
        (["pytorch_model_fsdp_0/__0_0.distcp"], True),
        (["optimizer.pt", "ckpipe.json"], True),  # one that is no pointer
        (["trainer_state.json"], False),
        (["data/model.safetensors", "weights.pt", "train.py"], False),  # somebody's own folder
        (["run/rank-00000.safetensors"], False),
        ([], False),
    ],
)
def test_weights_of_another_run_are_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, files: list[str], moved: bool
) -> None:
    info, name = saved(tmp_path / "root", 4), tmp_path / "checkpoint-4"
    for number in (1, 2):
        for file in files:
            (name / file).parent.mkdir(parents=True, exist_ok=True)
            (name / file).write_text(f"{number}")
        with caplog.at_level(logging.WARNING, "ckpipe"):
            other = set_aside(name)
        assert (other is not None) == moved == any("now called" in each for each in caplog.messages)
        write_pointer_folder(name, str(tmp_path / "root"), info, {})
        caplog.clear()
        if moved:
            assert other == tmp_path / f"before-ckpipe.checkpoint-4{'.2' * (number - 1)}"
            assert [(other / file).read_text() for file in files] == [f"{number}"] * len(files)
            assert [each.name for each in name.iterdir()] == ["ckpipe.json"]
            (name / "ckpipe.json").unlink()
    if moved:
        write_pointer_folder(name, str(tmp_path / "root"), info, {})
    (name / "model.safetensors").touch()  # such as a hook of accelerate writes beside it
    assert set_aside(name) is None


def test_a_folder_in_use_is_not_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path / "run" / "deep" / "root", 4)
    work = tmp_path / "project" / "src"
    work.mkdir(parents=True)
    monkeypatch.chdir(work)
    for folder in (tmp_path / "run", work, work.parent):
        (folder / "model.safetensors").touch()
        assert set_aside(folder) is None
        assert f"{folder} has weights that ckpipe did not save" in caplog.text
    assert set_aside(".") is None
    assert sorted(each.name for each in tmp_path.iterdir()) == ["project", "run"]


@pytest.mark.parametrize("root", ["~/root", "root"])
def test_a_pointer_leads_to_its_root_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with ckpipe.SyncPipeline(root) as pipeline:
        info = pipeline.save({"w": 4}, step=4).wait()
        monkeypatch.chdir("/")
        write_pointer(tmp_path / "last", pipeline.url, info)
    assert read_pointer(tmp_path / "last") == Pointer(str(tmp_path / "root"), info.id, 4)


def test_a_path_leads_to_its_own_checkpoint_or_to_none(tmp_path: Path) -> None:
    out, named = tmp_path / "out", {}
    with ckpipe.SyncPipeline(tmp_path / "other") as other:
        stranger = other.save({"w": 0}, step=9).wait()
        write_pointer(tmp_path / "stranger" / "last.ckpt", other.url, stranger)
    with ckpipe.SyncPipeline(tmp_path / "root") as pipeline:
        for step, name in enumerate(("first.ckpt", "last.ckpt", "last.ckpt")):
            about = {"name": name, "path": str(out / name)}
            named[step] = pipeline.save({"w": step}, step=step, metadata=about).wait()
        write_pointer(tmp_path / "moved" / "best.ckpt", pipeline.url, named[1])
        for path, step in {
            named[0].id: 0,
            "last.ckpt": 2,
            f"{out}/last.ckpt": 2,
            f"{out}/../out/first.ckpt/": 0,
            f"{tmp_path}/moved/best.ckpt": 1,
        }.items():
            assert choose_path(pipeline, path).step == step, path
        for path, said in {
            "next.ckpt": "no complete checkpoint 'next.ckpt' at",
            f"{tmp_path}/typo/last.ckpt": f"was saved as {out}/last.ckpt",
            f"{tmp_path}/stranger/last.ckpt": f"leads to a checkpoint at {tmp_path}/other",
        }.items():
            with pytest.raises(CheckpointNotFound, match=said):
                choose_path(pipeline, path)


class Strange:
    """An object that only pickle can save."""


class Fails(torch.nn.Linear):
    """Refuses a state by an error that has a parameter in it."""

    def _load_from_state_dict(self, *_: Any, **__: Any) -> None:
        raise KeyError(self.weight)


def weights(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {"model": torch.nn.Linear(2, 3).to(dtype)}


def stepped(kind: type[torch.optim.Optimizer], layers: int = 1) -> dict[str, Any]:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(layers)))
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


States = Callable[[], dict[str, Any]]
REFUSED: dict[str, tuple[States, States]] = {
    "another dtype": (weights, lambda: weights(torch.float64)),
    "another key": (weights, lambda: {**weights(), "more": 1}),
    "another kind": (weights, lambda: {"model": [1]}),
    "another optimizer": (
        lambda: stepped(torch.optim.AdamW),
        lambda: stepped(torch.optim.SGD),
    ),
    "more layers": (
        lambda: stepped(torch.optim.AdamW),
        lambda: stepped(torch.optim.AdamW, 2),
    ),
    "a parameter in the error": (
        lambda: {"model": torch.nn.Linear(2, 3)},
        lambda: {"model": Fails(2, 3)},
    ),
    "a generator": (lambda: {"rng": ckpipe.RngState()}, lambda: {"rng": {"seed": 1}}),
    "damage": (weights, weights),
    "a pickled object": (lambda: {"odd": Strange()}, lambda: {"odd": Strange()}),
}
ARGUMENTS = (
    r"\b(fallback|include|exclude|strict|cast|optimizer_class|transform|allow_missing|source)\b"
)


@pytest.mark.parametrize("kind", REFUSED)
def test_refusals_name_what_a_trainer_has(tmp_path: Path, kind: str) -> None:
    saved, target = (make() for make in REFUSED[kind])
    with ckpipe.SyncPipeline(tmp_path, pickle="allow") as pipeline:
        pipeline.save(saved, step=1)
    if kind == "damage":
        (data,) = tmp_path.glob("step-*/*.safetensors")
        data.write_bytes(data.read_bytes()[:-4])
    with TrainerPipeline(tmp_path, "SETTINGS", "resume(id)") as trainers:
        with pytest.raises(CkpipeError) as caught:
            trainers.load(target)
        texts = [str(caught.value)]
        if kind == "a pickled object":
            with pytest.raises(CkpipeError) as caught:
                trainers.save(saved, step=2)
            texts.append(str(caught.value))
    for text in texts:
        assert not re.search(ARGUMENTS, text), text
        assert "tensor(" not in text
        assert "\n" not in text
        if kind == "a pickled object":
            assert 'pickle="allow" in SETTINGS' in text
        if kind == "damage":
            assert "resume(id)" in text
    with TrainerPipeline(tmp_path / "new", "SETTINGS", "resume(id)", pickle="allow") as trainers:
        trainers.save(saved, step=1)
        assert trainers.load() is not None


def test_a_copy_of_what_holds_a_trainers_pipeline_shares_it(tmp_path: Path) -> None:
    with TrainerPipeline(tmp_path, "SETTINGS", "resume(id)") as pipeline:
        assert copy.deepcopy({"callback": [pipeline]})["callback"][0] is pipeline
