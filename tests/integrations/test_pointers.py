"""Pointers lead to their own checkpoint, and to no other weights."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import ckpipe
from ckpipe.integrations.pointers import (
    Pointer,
    read_pointer,
    set_aside,
    write_pointer,
    write_pointer_folder,
)


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


def test_a_pointer_to_a_folder_at_home_leads_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    info = saved("~/root", 4)
    write_pointer(tmp_path / "last", "~/root", info)
    assert read_pointer(tmp_path / "last") == Pointer(str(tmp_path / "root"), info.id, 4)
