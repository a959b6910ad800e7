"""Tied tensors, of which other programs write one name: all names of the target are filled."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import ckpipe
from ckpipe.distributed import training_state
from ckpipe.errors import StructureMismatch


class Tied(nn.Module):
    """A module with a tensor under two names, in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Module()
        buffer = torch.randn(5)
        if kind == "parameter":
            self.b.weight = self.a.weight
        elif kind == "memory":
            self.b.weight = nn.Parameter(self.a.weight.data)
        elif kind == "module":
            self.b = self.a
        elif kind == "buffer of a parameter":
            self.b.register_buffer("copy", self.a.weight.data)
        else:
            self.register_buffer("first", buffer, persistent=kind != "first is not saved")
            held = buffer.detach() if kind == "buffer of memory" else buffer
            self.b.register_buffer("second", held, persistent=kind != "second is not saved")


class Up(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.transformer = inner


class Compiled(nn.Module):
    """A wrapper with the names of ``torch.compile``, whose import takes many seconds."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner


KINDS = (
    "parameter", "memory", "module", "buffer", "buffer of memory", "buffer of a parameter",
    "first is not saved", "second is not saved",
)  # fmt: skip
TARGETS: dict[str, tuple[Callable[[nn.Module], Any], Any]] = {
    "module": (lambda model: model, None),
    "dict": (lambda model: {"model": model}, None),
    "training state": (lambda model: training_state(model, sgd(model)), None),
    "compiled": (lambda model: Compiled(model), {"*": "_orig_mod.*"}),
    "data parallel": (nn.DataParallel, {"*": "module.*"}),
    "prefix": (Up, {"*": "transformer.*"}),
    "prefixes in a dict": (
        lambda model: {"x": Up(Up(model))}, {"*": "transformer.transformer.*"}),
    "prefix in a training state": (
        lambda model: {"x": training_state(Up(model), sgd(model))}, {"*": "transformer.*"}),
}  # fmt: skip


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_all_names_of_a_tied_tensor_are_filled(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    saved = Tied(kind)
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_model(saved, str(file))
    with ckpipe.SyncPipeline(tmp_path / "run") as pipeline:
        for name, (wrapped, rename) in TARGETS.items():
            model = Tied(kind)
            transform = [ckpipe.Rename(rename)] if rename else []
            pipeline.load(wrapped(model), source=file, transform=transform)
            for key, each in saved.state_dict().items():
                assert torch.equal(model.state_dict()[key], each), (name, key)


NESTED: dict[str, tuple[Callable[[Any], Any], Callable[[nn.Module], Any], Any]] = {
    "dict": (lambda names: {"model": names, "step": 3}, lambda m: {"model": m, "step": 0}, None),
    "dict in a dict": (
        lambda names: {"net": {"model": names}}, lambda m: {"net": {"model": m}}, None),
    "renamed": (
        lambda names: {"model": names, "step": 3}, lambda m: {"net": m, "step": 0},
        {"model.*": "net.*"}),
    "one of two": (lambda names: names, lambda m: {"a": Tied("module"), "b": m}, {"*": "b.*"}),
}  # fmt: skip


@pytest.mark.parametrize("form", NESTED)
@pytest.mark.parametrize("kind", ["parameter", "module", "buffer"])
def test_tied_names_inside_of_a_file_are_filled(kind: str, form: str, tmp_path: Path) -> None:
    saved, model = Tied(kind), Tied(kind)
    left_out = "b.second" if kind == "buffer" else "b.weight"
    names = {key: each for key, each in saved.state_dict().items() if key != left_out}
    wrapped, target, rename = NESTED[form]
    torch.save(wrapped(names), tmp_path / "model.pt")
    ckpipe.load(
        tmp_path / "model.pt",
        target(model),
        transform=[ckpipe.Rename(rename)] if rename else [],
        allow_missing=["a"],
    )
    for key, each in saved.state_dict().items():
        assert torch.equal(model.state_dict()[key], each), key


@pytest.mark.parametrize("wrapped", [lambda each: each, lambda each: {"model": each}])
@pytest.mark.parametrize("nested_last", [True, False])
def test_two_equal_names_of_a_file_are_refused(
    nested_last: bool, wrapped: Callable[[Any], Any], tmp_path: Path
) -> None:
    names: list[tuple[str, Any]] = [
        ("a.bias", torch.ones(4)), ("a", {"bias": torch.zeros(4)}), ("a.weight", torch.ones(4, 4))
    ]  # fmt: skip
    torch.save(wrapped(dict(names if nested_last else names[::-1])), tmp_path / "model.pt")
    with pytest.raises(StructureMismatch, match=r"a\.bias"):
        ckpipe.load(tmp_path / "model.pt", wrapped(Tied("parameter")))


class Gpt(nn.Module):
    """A model with a head that is tied to the embedding of its inner model."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Module()
        self.transformer.wte = nn.Embedding(5, 4)
        self.transformer.h = nn.ModuleList([Tied("parameter") for _ in range(12)])
        self.lm_head = nn.Linear(4, 5, bias=False)
        self.lm_head.weight = self.transformer.wte.weight


@pytest.mark.parametrize(
    "wrapped", [lambda m: m, lambda m: {"model": m}, lambda m: training_state(m, sgd(m))]
)
def test_the_proposed_prefix_counts_a_tied_tensor_once(
    wrapped: Callable[[nn.Module], Any], tmp_path: Path
) -> None:
    """As for GPT-2 of the hub: names without prefix, masks in each layer, and no head."""
    saved, model = Gpt(), Gpt()
    names = dict(saved.transformer.named_parameters())
    masks = {f"h.{n}.{kind}": torch.ones(2) for n in range(12) for kind in ("mask", "masked_bias")}
    safetensors.torch.save_file(
        {name: each.detach().clone() for name, each in names.items()} | masks,
        tmp_path / "model.safetensors",
    )
    with pytest.raises(StructureMismatch) as raised:
        ckpipe.load(tmp_path, wrapped(model))
    assert "lm_head" not in str(raised.value)
    (proposed,) = re.findall(r"transform=(\[.*?\)\])", str(raised.value.hint))
    assert "ckpipe.Drop('h.*.mask', 'h.*.masked_bias')" in proposed
    ckpipe.load(tmp_path, wrapped(model), transform=eval(proposed))
    assert all(
        torch.equal(each, dict(model.transformer.named_parameters())[name])
        for name, each in names.items()
    )
    assert torch.equal(model.lm_head.weight, names["wte.weight"])
