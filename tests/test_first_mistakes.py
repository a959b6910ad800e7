"""Mistakes of a first afternoon: each is refused at once, with what to write instead."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Commands
from ranks import ranks
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

import ckpipe
from ckpipe.errors import StructureMismatch, UsageError


async def test_each_pipeline_names_the_other_where_it_is_entered_the_wrong_way(
    tmp_path: Path,
) -> None:
    refused = pytest.raises(UsageError, match=r"Write with ckpipe\.SyncPipeline")
    with refused, ckpipe.Pipeline(tmp_path):
        pass
    with pytest.raises(UsageError, match=r"Write async with ckpipe\.Pipeline"):
        async with ckpipe.SyncPipeline(tmp_path):
            pass


def test_nothing_is_not_saved(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        with pytest.raises(UsageError, match=r"There is no state to save.* \[step 3\]"):
            pipeline.save(None, step=3)
        assert pipeline.steps() == []
        pipeline.save({"nothing": None}, step=3)


def test_a_dict_of_optimizers_is_refused_with_what_to_pass(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
    wrong: Any = {"o": optimizer}
    with pytest.raises(UsageError, match=r"A dict cannot be guarded.*\*optimizers.values\(\)"):
        ckpipe.SyncPipeline(tmp_path, guard=wrong)
    pipeline = ckpipe.SyncPipeline(tmp_path, guard=[*wrong.values()])
    with pipeline, pytest.raises(UsageError, match=r"values\(\)"):
        pipeline.guard(wrong)


OPTIMIZERS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "rmsprop": torch.optim.RMSprop,
}


def stepped(kind: str) -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer: torch.optim.Optimizer = OPTIMIZERS[kind]([weight])
    torch.optim.lr_scheduler.StepLR(optimizer, 3)  # adds an option of its own
    weight.grad = torch.ones(3)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("saved", ["sgd", "momentum", "rmsprop", "adamw"])
def test_the_state_of_another_kind_of_optimizer_is_refused(tmp_path: Path, saved: str) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.save({"optimizer": stepped(saved)}, step=1, until="committed")
        other = stepped("sgd" if saved == "adamw" else "adamw")
        before = repr(other.state_dict())
        with pytest.raises(
            StructureMismatch, match="another kind of optimizer: it lacks"
        ) as caught:
            pipeline.load({"optimizer": other})
        assert (caught.value.step, caught.value.key) == (1, "optimizer")
        assert repr(other.state_dict()) == before
        same = stepped(saved)
        assert pipeline.load({"optimizer": same}) is not None
        same.step()


def test_what_one_kind_takes_of_another_is_taken(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        for step, (saved, other) in enumerate([("sgd", "momentum"), ("adam", "adamw")]):
            pipeline.save({"optimizer": stepped(saved)}, step=step, until="committed")
            target = stepped(other)
            assert pipeline.load({"optimizer": target}) is not None
            target.step()


def test_options_that_torch_adds_to_older_state_are_not_missed(tmp_path: Path) -> None:
    optimizer = stepped("adamw")
    old = optimizer.state_dict()
    for name in ("foreach", "maximize", "capturable", "differentiable", "fused"):
        del old["param_groups"][0][name]
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.save({"optimizer": old}, step=1, until="committed")
        assert pipeline.load({"optimizer": optimizer}) is not None
    optimizer.step()


def test_a_run_that_finds_nothing_to_load_says_where_it_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "ckpipe")
    monkeypatch.chdir(tmp_path)
    for number in range(2):
        with ckpipe.SyncPipeline("runs/one") as pipeline:
            assert (pipeline.load() is None) == (number == 0)
            pipeline.save({"w": 1}, step=number)
    told = [each.getMessage() for each in caplog.records if "fresh" in each.getMessage()]
    assert told == [f"no complete checkpoint: training starts fresh at {tmp_path}/runs/one"]
    caplog.clear()
    with ranks(str(tmp_path / "runs" / "two"), 2) as pipelines:
        assert [each.load() for each in pipelines] == [None, None]
    assert caplog.text.count("training starts fresh") == 1


def test_folders_of_other_programs_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = Commands(capsys)
    distributed, hub, empty = (tmp_path / name for name in ("distributed", "hub", "empty"))
    with pytest.warns(UserWarning, match="single process"):
        save_distributed({"w": torch.ones(3)}, checkpoint_id=distributed, no_dist=True)
    for folder in (hub, empty):
        folder.mkdir()
    (hub / "model.safetensors").write_bytes(b"")
    for folder, text in ((distributed, "(DCP)"), (hub, "Hugging Face")):
        shown = call("ls", folder)
        assert (shown.code, text in shown.out) == (0, True), shown
        assert text in call("info", folder).err
    assert call("ls", empty).out == "no checkpoints here\n"
