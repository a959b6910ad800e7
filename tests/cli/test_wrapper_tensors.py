"""Wrapper tensors in ``info``, ``diff`` and exports."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from textwrap import dedent

import pytest
import safetensors.torch
import torch

from tests.support.command_line import Commands, save
from tests.support.wrapper_tensors import CONTEXT, Granularity, halves, nested, scaled


def test_info_shows_class_and_inner_tensors(tmp_path: Path, call: Commands) -> None:
    save(tmp_path, {"a.b": {"w": scaled()}, "v": nested()})
    shown = call("info", tmp_path).out
    assert "w Scaled of float32[4, 3] (2 tensors" in shown
    assert "codes int8[4, 3]" in shown
    wrappers = call("info", tmp_path, "--json").data["wrappers"]
    assert wrappers == {"a.b.w": "Scaled of float32[4, 3]", "v": "Scaled of float32[6]"}


def test_diff_compares_contexts_and_inner_tensors(tmp_path: Path, call: Commands) -> None:
    other = {**CONTEXT, "granularity": Granularity(2)}
    save(tmp_path, {"w": scaled()}, {"w": scaled(start=1)}, {"w": scaled(context=other)})
    values = call("diff", tmp_path, "0", "1", "--json").data
    assert [each["label"] for each in values["tensors"]] == ["w.codes", "w.scale"]
    assert values["changed"] == []
    contexts = call("diff", tmp_path, "0", "2", "--json").data
    assert contexts["tensors"] == []
    assert [each["label"] for each in contexts["changed"]] == ["w"]
    assert call("diff", tmp_path, "0", "0").code == 0


@pytest.mark.parametrize("form", ["hf", "torch"])
def test_exports_dequantise_only_when_asked(tmp_path: Path, call: Commands, form: str) -> None:
    save(tmp_path, {"model": {"w": scaled(), "b": torch.ones(2)}, "other": halves()})
    refused = call("export", tmp_path, "--form", form)
    assert refused.code == 2
    assert "model.w" in refused.err
    assert not list(tmp_path.glob(f"*.{form}"))
    done = call("export", tmp_path, "--form", form, "--part", "model", "--dtype", "float16")
    assert done.code == 0, done.err
    if form == "hf":
        (path,) = tmp_path.glob("*.hf/*.safetensors")
        found = safetensors.torch.load_file(path)
    else:
        (path,) = tmp_path.glob("*.torch/state.pt")
        found = torch.load(path)
    assert found.keys() == {"w", "b"}
    assert torch.equal(found["w"], scaled().dequantize().half())
    unable = call("export", tmp_path, "--form", form, "--part", "other", "--dtype", "float16")
    assert unable.code != 0


def test_export_imports_the_classes_that_it_is_told(
    tmp_path: Path, call: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
        from tests.support.wrapper_tensors import CONTEXT, Scaled, scaled

        class Mine(Scaled):
            pass

        def mine():
            return Mine(scaled().codes, scaled().scale, CONTEXT, (4, 3))
    """
    (tmp_path / "own_tensors.py").write_text(dedent(code))
    monkeypatch.syspath_prepend(tmp_path)
    save(tmp_path / "run", {"model": {"w": import_module("own_tensors").mine()}})
    monkeypatch.delitem(sys.modules, "own_tensors")
    words = ("export", tmp_path / "run", "--form", "hf", "--dtype", "float32")
    unknown = call(*words)
    assert unknown.code != 0
    assert "--import own_tensors" in unknown.err
    absent = call(*words, "--import", "no_such_module")
    assert (absent.code, "no_such_module" in absent.err) == (2, True)
    done = call(*words, "--import", "own_tensors")
    assert done.code == 0, done.err
    (path,) = tmp_path.glob("run/*.hf/*.safetensors")
    assert torch.equal(safetensors.torch.load_file(path)["w"], scaled().dequantize())
