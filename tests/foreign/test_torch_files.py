"""Files of ``torch.save``: opened by their structure, with tensors read in place."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpipe
from ckpipe.errors import ShapeMismatch, StructureMismatch, UnsupportedState
from tests.foreign.places import assert_loaded, counted, weights
from tests.support.pipelines import load_existing, same


def everything() -> dict[str, Any]:
    """A state with all that ``weights_only`` allows."""
    weight = torch.randn(6, 8)
    return {
        **weights(),
        "tied": weight,
        "again": weight,
        "rows": weight[2:4],
        "turned": weight.t(),
        "parameter": nn.Parameter(weight),
        "frozen": nn.Parameter(weight.clone(), requires_grad=False),
        "conjugate": torch.randn(3, dtype=torch.cfloat).conj(),
        "negative": torch.randn(3, dtype=torch.cfloat).conj().imag,
        "few": torch.ones(4).to(torch.uint16),
        "plain": [1, 2.5, None, True, "text", b"bytes", 1 << 70, (3, [4]), {5, 6}, 1 + 2j],
        "keys": {1: "a", "1": "b", (2, 3): "c", None: "d"},
        "torch": [torch.device("cpu"), torch.Size([2, 3]), torch.bfloat16, torch.strided],
        "ordered": OrderedDict([("b", 1), ("a", torch.ones(2))]),
    }


@pytest.mark.parametrize("suffix", ["pt", "pth", "bin", "ckpt", "pth.tar"])
def test_a_file_is_what_torch_load_makes_of_it(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"state.{suffix}"
    torch.save(everything(), file)
    found, expected = ckpipe.load(file), torch.load(file, weights_only=True)
    assert_loaded(found, expected, file)
    state = found.state
    assert state["tied"].data_ptr() == state["again"].data_ptr() == state["turned"].data_ptr()
    for name in ("turned", "rows"):
        assert state[name].stride() == expected[name].stride()
    for name in ("parameter", "frozen"):
        assert type(state[name]) is nn.Parameter
        assert state[name].requires_grad == expected[name].requires_grad
    assert (state["conjugate"].is_conj(), state["negative"].is_neg()) == (True, True)


def test_a_file_fills_a_state_in_place(tmp_path: Path, pipeline: ckpipe.SyncPipeline) -> None:
    file = tmp_path / "state.pt"
    torch.save(everything(), file)
    names = ("layer.0.weight", "turned", "rows", "conjugate", "negative", "empty", "scale")
    expected = torch.load(file, weights_only=True)
    target = {name: torch.zeros_like(expected[name]) for name in names}
    with counted(tmp_path) as (url, _):
        result = load_existing(pipeline, target, source=f"{url}/state.pt", include=list(names))
    assert result.state is target
    assert all(torch.equal(each, expected[name]) for name, each in target.items())


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def test_a_training_script_goes_on_from_its_old_file(
    tmp_path: Path, pipeline: ckpipe.SyncPipeline
) -> None:
    model, optimizer = trained()
    old = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}
    torch.save(old, tmp_path / "old.pt")
    other, theirs = trained()
    state = {"model": other, "optimizer": theirs, "step": 0}
    load_existing(pipeline, state, source=tmp_path / "old.pt")
    assert state["step"] == 2
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert same(theirs.state_dict(), optimizer.state_dict())
    narrow = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    into = {"optimizer": torch.optim.AdamW(narrow.parameters())}
    with pytest.raises((ShapeMismatch, StructureMismatch)):
        pipeline.load(into, source=tmp_path / "old.pt", include=["optimizer"])


def test_a_lightning_checkpoint_proposes_the_rename_of_its_model(
    tmp_path: Path, pipeline: ckpipe.SyncPipeline
) -> None:
    model, _ = trained()
    lightning = {
        "epoch": 1,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": model.state_dict(),
        "hyper_parameters": {"lr": 0.1},
    }
    torch.save(lightning, tmp_path / "last.ckpt")
    with pytest.raises(StructureMismatch, match=r"Rename\(\{'state_dict\.\*': '\*'\}\)"):
        pipeline.load(model, source=tmp_path / "last.ckpt")
    assert same(ckpipe.load(tmp_path / "last.ckpt", include=["epoch"]).state, {"epoch": 1})


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin"])
def test_a_folder_with_a_bin_file(name: str, tmp_path: Path) -> None:
    torch.save(weights(), tmp_path / name)
    (tmp_path / "training_args.bin").write_bytes(b"pickled")
    assert_loaded(ckpipe.load(tmp_path), weights(), tmp_path)


def test_a_folder_with_shards_of_bin_files(tmp_path: Path) -> None:
    tensors, files = weights(), [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    names = list(tensors)
    for number, file in enumerate(files):
        torch.save({name: tensors[name] for name in names[number::2]}, tmp_path / file)
    weight_map = {name: files[number % 2] for number, name in enumerate(names)}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_loaded(ckpipe.load(tmp_path), tensors, tmp_path)


def test_a_file_of_old_torch_is_refused_with_the_lines_that_convert_it(tmp_path: Path) -> None:
    file = tmp_path / "old.pt"
    torch.save(weights(), file, _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedState, match=r"torch\.load.*weights_only=True.*torch\.save"):
        ckpipe.load(file)


def _with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.note = "mine"  # type: ignore[attr-defined]
    return tensor


def test_many_small_parameters_in_a_short_pickle_are_no_lie(tmp_path: Path) -> None:
    one = torch.ones(1)
    state = {str(number): torch.nn.Parameter(one[:]) for number in range(9000)}
    torch.save(state, tmp_path / "small.pt", pickle_protocol=5)
    assert len(ckpipe.load(tmp_path / "small.pt").state) == 9000


@pytest.mark.filterwarnings("ignore")  # torch warns of prototypes and deprecations
def test_tensors_that_have_no_bytes_of_their_own_are_refused_by_kind(tmp_path: Path) -> None:
    kinds: dict[str, Callable[[], torch.Tensor]] = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "sparse tensor": lambda: torch.eye(3).to_sparse_csr(),
        "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "on the device meta": lambda: torch.empty(3, device="meta"),
        "attributes of its own": lambda: _with_attribute(torch.ones(3)),
        "parameter with attributes": lambda: _with_attribute(torch.nn.Parameter(torch.ones(3))),
    }
    for kind, make in kinds.items():
        for state, key in (
            ({"w": torch.ones(2), "v": [{}, (7, make())], "x": make()}, "v.1.1"),
            (make(), str(tmp_path / "kind.pt")),
        ):
            torch.save(state, tmp_path / "kind.pt")
            match = rf"kind\.pt holds a .*{kind}"
            with pytest.raises(UnsupportedState, match=match) as raised:
                ckpipe.load(tmp_path / "kind.pt")
            assert raised.value.key == key
