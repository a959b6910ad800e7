"""Optimizers that other programs saved, in each form, go on from live and named ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import ckpipe
from ckpipe.distributed import training_state
from ckpipe.errors import ShapeMismatch, StructureMismatch
from tests.foreign.dcp_folders import save
from tests.support.pipelines import load_existing, same

FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "torch": lambda model, optimizer: (model.state_dict(), optimizer.state_dict()),
    "plain": lambda model, optimizer: (model.state_dict(), optimizer.state_dict()),
    "nested": get_state_dict,
    "flat": lambda model, optimizer: get_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    ),
}


def made(kind: str, *, steps: int, rate: float, width: int = 6) -> tuple[Any, Any]:
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    first, *others = model.parameters()
    every: dict[str, Callable[[], Any]] = {
        "adamw": lambda: torch.optim.AdamW([first, *others], lr=rate),
        "without state": lambda: torch.optim.SGD([first, *others], lr=rate),
        "two groups": lambda: torch.optim.AdamW(
            [{"params": [first], "lr": rate}, {"params": others, "lr": 2 * rate}]
        ),
        "not all": lambda: torch.optim.SGD(others, lr=rate, momentum=0.9),
        "a rate that is a tensor": lambda: torch.optim.Adam(
            [*others, first], lr=torch.tensor(rate), amsgrad=True
        ),
    }
    optimizer = every[kind]()
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def saved(kind: str, form: str, folder: Path) -> tuple[Path, Any, Any]:
    model, optimizer = made(kind, steps=2, rate=0.1)
    weights, state = FORMS[form](model, optimizer)
    place = folder / ("old.pt" if form == "torch" else form)
    whole = {"model": weights, "optimizer": state, "step": 2}
    if form == "torch":
        torch.save(whole, place)
    else:
        save(whole, place)
    return place, model, optimizer


KINDS = ["adamw", "without state", "two groups", "not all", "a rate that is a tensor"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_every_form_goes_on_where_it_was(kind: str, tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path / "run") as pipeline:
        for form in FORMS:
            place, model, optimizer = saved(kind, form, tmp_path)
            for target in ("live", "named", "named beside others"):
                other, theirs = made(kind, steps=1, rate=0.7)
                into: Any = {"model": other, "optimizer": theirs, "step": 0}
                if target == "named":
                    into = training_state(other, theirs)
                if target == "named beside others":
                    into = {"step": 0, "training": training_state(other, theirs)}
                if (form, target) == ("flat", "live"):
                    with pytest.raises(StructureMismatch, match="training_state"):
                        load_existing(pipeline, into, source=place)
                    assert theirs.param_groups[0]["lr"] == pytest.approx(0.7)
                    continue
                kept = ["step"] if target == "named" else []
                load_existing(pipeline, into, source=place, exclude=kept)
                assert target == "named" or into["step"] == 2
                assert same(dict(other.state_dict()), dict(model.state_dict())), (form, target)
                assert same(theirs.state_dict(), optimizer.state_dict()), (form, target)


def test_numbers_of_other_parameters_are_refused(tmp_path: Path) -> None:
    for form in ("torch", "plain"):
        place, _, _ = saved("adamw", form, tmp_path)
        model, _ = made("adamw", steps=0, rate=0.7)
        parameters = list(model.parameters())
        one, two = (torch.optim.AdamW(each) for each in (parameters[:3], parameters[3:]))
        with ckpipe.SyncPipeline(tmp_path / "run") as pipeline:
            for optimizers, error, what in (
                ([torch.optim.AdamW(parameters[::-1])], ShapeMismatch, "parameter 0"),
                ([torch.optim.AdamW(parameters[1:])], StructureMismatch, "groups of"),
                ([one, two], StructureMismatch, "one optimizer"),
            ):
                before = [each.detach().clone() for each in parameters]
                with pytest.raises(error, match=what):
                    load_existing(pipeline, training_state(model, *optimizers), source=place)
                assert same(before, [each.detach() for each in parameters])
                assert not any(each.state for each in optimizers)
            model_alone = training_state(model, one, two)
            assert (
                load_existing(pipeline, model_alone, source=place, include=["model"]).missing == ()
            )


def test_the_names_that_the_tutorials_of_torch_give(tmp_path: Path) -> None:
    model, optimizer = made("adamw", steps=2, rate=0.1)
    old = {
        "epoch": 3,
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
    }
    torch.save(old, tmp_path / "old.pt")
    names = {"model_state_dict.*": "model.*", "optimizer_state_dict.*": "optimizer.*"}
    other, theirs = made("adamw", steps=0, rate=0.7)
    with ckpipe.SyncPipeline(tmp_path / "run") as pipeline:
        for into in (
            {"epoch": 0, "model": other, "optimizer": theirs},
            {"epoch": 0, "training": training_state(other, theirs)},
        ):
            load_existing(
                pipeline, into, source=tmp_path / "old.pt", transform=[ckpipe.Rename(names)]
            )
            assert into["epoch"] == 3
            assert same(theirs.state_dict(), optimizer.state_dict())


def test_a_list_of_optimizers_is_no_training_state(tmp_path: Path) -> None:
    model, optimizer = made("adamw", steps=1, rate=0.1)
    state = {"model": model.state_dict(), "optimizer": [optimizer.state_dict()]}
    torch.save(state, tmp_path / "old.pt")
    with (
        ckpipe.SyncPipeline(tmp_path / "run") as pipeline,
        pytest.raises(StructureMismatch, match="a list") as raised,
    ):
        load_existing(pipeline, training_state(model, optimizer), source=tmp_path / "old.pt")
    assert raised.value.key == "optimizer"
