"""Commands tell which checkpoints have NaN, and in which tensors."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import ckpipe
from tests.support.command_line import Commands, save

NAN = math.nan


@pytest.fixture
def diverged(tmp_path: Path) -> Path:
    """A run of three steps, of which the last two have 1 and 3 NaN."""
    model = {"bias": torch.zeros(2), "scale": torch.ones(3)}
    one = {"bias": torch.tensor([NAN, 0.0]), "scale": torch.ones(3)}
    two = {"bias": torch.tensor([NAN, 0.0]), "scale": torch.tensor([1.0, NAN, NAN])}
    save(tmp_path, {"model": model}, {"model": one}, {"model": two})
    return tmp_path


def test_ls(call: Commands, diverged: Path) -> None:
    for arguments in ([], ["--read"]):
        done = call("ls", diverged, "--json", *arguments)
        assert [each["nan"] for each in done.data["checkpoints"]] == [3, 1, 0]
        lines = call("ls", diverged, *arguments).out.splitlines()
        assert ["NaN" in each for each in lines] == [False, True, True, False]
        assert "complete, 3 NaN" in lines[1]


def test_info(call: Commands, diverged: Path) -> None:
    about = call("info", diverged, "--json", "--match", "model.s*").data
    assert about["nan"] == 3
    assert [(each["label"], each["nan"]) for each in about["tensors"]] == [("model.scale", 2)]
    out = call("info", diverged).out
    assert "3 NaN" in out
    assert "bias float32[2], 8 B, 1 NaN" in out
    assert "NaN" not in call("info", diverged, 0).out


def test_diff(call: Commands, diverged: Path) -> None:
    done = call("diff", diverged, 0, 2)
    assert done.out.splitlines()[-1].endswith("the first has 0 NaN, the second 3")
    assert call("diff", diverged, 0, 2, "--json").data["nan"] == [0, 3]
    assert "NaN" not in call("diff", diverged, 0, 0).out


def test_report(call: Commands, diverged: Path, tmp_path: Path) -> None:
    html = tmp_path / "run.html"
    done = call("report", diverged, "--html", html)
    assert "It has 3 NaN; with without_nan=True a resume takes step 0." in done.out
    assert "complete, 3 NaN" in html.read_text()
    data = call("report", diverged, "--json").data
    assert [each["nan"] for each in data["checkpoints"]] == [0, 1, 3]


def test_prune_and_rm(call: Commands, diverged: Path) -> None:
    done = call("prune", diverged, "--keep-last", 1, "--dry-run", "--json").data
    reasons = {each["step"]: each["reason"] for each in done["keep"]}
    assert reasons == {2: "the newest", 0: "the newest without NaN"}
    refused = call("rm", diverged, 0)
    assert refused.code
    assert "the newest without NaN" in refused.err
    assert call("rm", diverged, 0, "--force").code == 0
    with ckpipe.SyncPipeline(diverged, read_only=True) as pipeline:
        assert [each.step for each in pipeline.steps()] == [1, 2]
