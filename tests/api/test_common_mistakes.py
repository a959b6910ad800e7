"""Mistakes of a first afternoon: each is refused at once, with what to write instead."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

import ckpipe
from ckpipe.backend import Children
from ckpipe.errors import (
    CheckpointNotFound,
    PermissionDenied,
    PipelineClosed,
    SettingsError,
    StructureMismatch,
    UnsupportedState,
    UsageError,
)
from ckpipe.testing import MemoryBackend
from tests.support.command_line import Commands
from tests.support.rank_pipelines import ranks


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


def test_a_checkpoint_in_place_of_its_root_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ckpipe.SyncPipeline(tmp_path / "run") as pipeline:
        handle = pipeline.save({"w": 1}, step=7, until="committed")
    for wrong in (tmp_path / "run" / handle.id, tmp_path / "run" / f"{handle.id}.json"):
        says = rf"is one checkpoint.*\[step 7\].*{tmp_path}/run, and name the step"
        with pytest.raises(UsageError, match=says), ckpipe.SyncPipeline(wrong):
            pass
        with pytest.raises(UsageError, match=says):
            ckpipe.load(wrong)
        shown = Commands(capsys)("info", wrong)
        assert (shown.code, f"{tmp_path}/run, and name the step" in shown.err) == (2, True), shown


def test_a_state_in_place_of_a_step_is_named_and_not_printed(tmp_path: Path) -> None:
    state: Any = {"w": torch.ones(1000)}
    wrong: Any = 5
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        with pytest.raises(
            UsageError, match=r"A step is an int .*, not a dict\..*state comes first"
        ):
            pipeline.save(wrong, state)
        with pytest.raises(UsageError, match=r"by its step.*, not a dict\..*state comes first"):
            pipeline.load(wrong, state)
        with pytest.raises(UsageError, match="not '500'"):
            pipeline.save(state, step=cast("Any", "500"))


def test_parameters_are_refused_with_what_to_save(tmp_path: Path) -> None:
    state = {"model": torch.nn.Linear(2, 2).parameters()}
    with (
        ckpipe.SyncPipeline(tmp_path) as pipeline,
        pytest.raises(UnsupportedState, match=r"generator.*key 'model'.*the module itself"),
    ):
        pipeline.save(state, step=1)


class Broken:
    """Its state can be neither taken nor put back."""

    def state_dict(self) -> dict[str, int]:
        raise RuntimeError("not ready")

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise RuntimeError("not ready")


class Whole(Broken):
    def state_dict(self) -> dict[str, int]:
        return {"a": 1}


def test_what_user_code_raises_says_where_in_the_state(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        with pytest.raises(RuntimeError, match="not ready") as caught:
            pipeline.save({"x": [Broken()]}, step=1)
        assert caught.value.__notes__ == ["raised by state_dict of 'x.0'"]
        pipeline.save({"x": Whole()}, step=2, until="committed")
        with pytest.raises(RuntimeError, match="not ready") as caught:
            pipeline.load({"x": Whole()})
        assert caught.value.__notes__ == ["raised by load_state_dict of 'x'"]


@pytest.mark.parametrize("table", ["ckpipe", "tool.ckpipe"])
def test_settings_in_a_table_are_found_with_its_name(tmp_path: Path, table: str) -> None:
    file = tmp_path / "project.toml"
    file.write_text(f"[{table}]\nkeep_last = 3\n")
    with pytest.raises(SettingsError, match=rf"in the table \[{table}\].*table='{table}'"):
        ckpipe.Settings.from_file(file)
    assert ckpipe.Settings.from_file(file, table=table).retention.keep_last == 3


def test_a_step_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.save({"w": 1}, step=1, until="committed")
        for call in (pipeline.delete, pipeline.pin, pipeline.verify):
            with pytest.raises(CheckpointNotFound, match=r"steps are: 1 .*Name one of those\.$"):
                call(9)
        with pytest.raises(CheckpointNotFound, match="Name no step for the newest"):
            pipeline.load(step="latest")


def test_a_pipeline_that_is_not_open_says_how_to_open_one(tmp_path: Path) -> None:
    pipeline = ckpipe.SyncPipeline(tmp_path)
    with pytest.raises(PipelineClosed, match=r"not open yet.*open\(\) first"):
        pipeline.save({"w": 1}, step=1)
    pipeline.open()
    pipeline.close()
    with pytest.raises(PipelineClosed, match=r"is closed.*make a new one"):
        pipeline.save({"w": 1}, step=1)


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
        with pytest.raises(StructureMismatch, match=r"and the target is a torch\.optim") as caught:
            pipeline.load({"optimizer": other})
        assert (caught.value.step, caught.value.key) == (1, "optimizer")
        assert repr(other.state_dict()) == before
        same = stepped(saved)
        assert pipeline.load({"optimizer": same}) is not None
        same.step()


def test_what_one_kind_takes_of_another_is_taken(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.save({"optimizer": stepped("sgd")}, step=0, until="committed")
        momentum = stepped("momentum")  # the same class
        assert pipeline.load({"optimizer": momentum}) is not None
        momentum.step()
        pipeline.save({"optimizer": stepped("adam")}, step=1, until="committed")
        adamw = stepped("adamw")
        assert pipeline.load({"optimizer": adamw}, optimizer_class="any") is not None
        adamw.step()


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


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # DCP of torch 2.10 uses it
def test_a_fresh_start_beside_something_to_resume_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings() -> list[str]:
        found = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        caplog.clear()
        return [each for each in found if "fresh" in each]

    with ranks(str(tmp_path / "run"), 2) as pipelines:
        for step in (5, 6):
            pipelines[0].save({"w": 1}, step=step).wait()  # rank 1 never saves its own
        ids = [each.id for each in pipelines[0].steps()]
    with ckpipe.SyncPipeline(tmp_path / "run") as pipeline:
        assert pipeline.load() is None
    (told,) = warnings()
    assert f"training starts fresh at {tmp_path}/run" in told
    assert f"the newest of 2 incomplete checkpoints there, {ids[-1]}, is incomplete" in told

    with pytest.warns(UserWarning, match="single process"):
        save_distributed({"w": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with ckpipe.SyncPipeline(tmp_path / "dcp") as pipeline:
        assert pipeline.load() is None
    (told,) = warnings()
    assert "ckpipe.load opens it" in told


def test_a_store_that_does_not_list_all_does_not_fail_a_fresh_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Denying(MemoryBackend):
        async def children(self, prefix: str = "") -> Children:
            if prefix:
                raise PermissionDenied("Lists are not allowed here")
            return await super().children(prefix)

    caplog.set_level(logging.INFO, "ckpipe")
    ckpipe.register_backend("denying", Denying)
    with ckpipe.SyncPipeline("denying://run", read_only=True) as pipeline:
        assert pipeline.load() is None
    assert "training starts fresh at denying://run; other contents are unknown" in caplog.text


def test_folders_of_other_programs_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    call = Commands(capsys)
    distributed, hub, empty = (tmp_path / name for name in ("distributed", "hub", "empty"))
    with pytest.warns(UserWarning, match="single process"):
        save_distributed({"w": torch.ones(3)}, checkpoint_id=distributed, no_dist=True)
    for folder in (hub, empty):
        folder.mkdir()
    save_file({"w": torch.ones(3)}, hub / "model.safetensors")
    caplog.set_level(logging.INFO, "ckpipe")
    for folder, text in ((distributed, "(dcp)"), (hub, "(safetensors)")):
        shown = call("ls", folder)
        assert (shown.code, text in shown.out) == (0, True), shown
        assert "float32[3]" in call("info", folder).out
        assert f"ckpipe in {folder}" in call("cp", folder, tmp_path / "copy").err
        with ckpipe.SyncPipeline(folder, read_only=True) as pipeline:
            assert pipeline.load() is None
        assert f"of another program {text} is there" in caplog.text
    assert call("ls", empty).out == "no checkpoints here\n"
