"""Modules that save more than their own load takes are refused at their first save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.distributed import training_state


class Quantized(torch.nn.Linear):
    """Saves beside its weight what torch's own loading does not know, as layers of four bits do."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = torch.ones(2)


class Parent(torch.nn.Sequential):
    """Takes back what its layer saves."""

    def __init__(self, size: int) -> None:
        super().__init__(Quantized(size, size))

    def load_state_dict(self, state_dict: Any, *others: Any, **options: Any) -> Any:
        state = {key: value for key, value in state_dict.items() if key != "0.weight.absmax"}
        return super().load_state_dict(state, *others, **options)


class TakesBack(Quantized):
    """Takes back what it saves."""

    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        state.pop(f"{prefix}weight.absmax")
        super()._load_from_state_dict(state, prefix, *others)


class ByHook(Quantized):
    """Takes back what it saves, by a hook."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
            lambda module, state, prefix, *_: state.pop(f"{prefix}weight.absmax")
        )


def layers(*, head: bool = False) -> torch.nn.Module:
    return torch.nn.Sequential(Quantized(2, 2), *([torch.nn.Linear(2, 2)] if head else []))


REFUSING: dict[str, tuple[Callable[[], Any], list[str] | None, bool]] = {
    # the state, what is left out of it, and whether its first save is refused
    "a module": (lambda: Quantized(2, 2), None, True),
    "inside": (lambda: {"m": layers()}, None, True),
    "training state": (lambda: training_state(layers()), None, True),
    "a part": (lambda: {"m": layers(head=True)}, ["m.0"], True),
    "left out": (lambda: {"m": layers(), "w": torch.ones(2)}, ["m"], False),
    "a part of a training state": (lambda: training_state(layers(head=True)), ["model.0"], False),
    "a dict": (lambda: {"m": layers().state_dict()}, None, False),
    "taken back": (lambda: {"m": torch.nn.Sequential(TakesBack(2, 2))}, None, False),
    "taken back by the parent": (lambda: {"m": Parent(2)}, None, False),
    "beside a key of this name": (
        lambda: {"t": training_state(layers(head=True)), "weight": {"absmax": torch.ones(2)}},
        ["t.model.0"],
        False,
    ),
    "taken back by a hook": (lambda: {"m": torch.nn.Sequential(ByHook())}, None, False),
}


@pytest.mark.parametrize("name", REFUSING)
def test_modules_that_refuse_what_they_save_are_refused_at_the_save(
    tmp_path: Path, name: str
) -> None:
    make, exclude, refused = REFUSING[name]
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        if refused:
            with pytest.raises(errors.UnsupportedState, match=r"Quantized.*weight\.absmax"):
                pipeline.save(make(), step=1, exclude=exclude)
            return
        for step in (1, 2):
            pipeline.save(make(), step=step, exclude=exclude)
        assert pipeline.load(make(), exclude=exclude) is not None
