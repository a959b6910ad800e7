"""``allow_missing`` and ``allow_unexpected``: labels that only one of target and checkpoint has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ckpipe import Rename
from ckpipe.distributed import training_state
from ckpipe.errors import StructureMismatch, UsageError
from ckpipe.testing import MemoryBackend
from tests.support.stored_states import load, store


class Hooked(nn.Module):
    """A module that is asked by a rehearsal, since it loads by code of its own."""

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


def net(*names: str, cls: type[nn.Module] = nn.Module) -> nn.Module:
    made = cls()
    for name in names:
        made.add_module(name, nn.Linear(3, 3))
    return made


FORMS: dict[str, Callable[..., Any]] = {
    "module": net,
    "module with code": lambda *names: net(*names, cls=Hooked),
    "dict": lambda *names: dict(net(*names).state_dict()),
    "dicts": lambda *names: {name: dict(nn.Linear(3, 3).state_dict()) for name in names},
    "training state": lambda *names: training_state(net(*names)),
}


def weights(state: Any) -> dict[str, torch.Tensor]:
    """The tensors of one of the forms by name, live."""
    if hasattr(state, "state_dict"):
        state = state.state_dict()
    found = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            found[key] = value
        elif isinstance(value, dict):
            found |= {each if key == "model" else f"{key}.{each}": v for each, v in value.items()
                      if isinstance(v, torch.Tensor)}  # fmt: skip
    return found


def names(labels: tuple[str, ...]) -> list[str]:
    return sorted(each.removeprefix("net.").removeprefix("model.") for each in labels)


@pytest.mark.parametrize("form", FORMS)
async def test_only_what_may_be_missing_or_left_over_is(form: str) -> None:
    make, backend = FORMS[form], MemoryBackend()
    saved, target = make("body", "old"), make("body", "head")
    await store({"net": saved, "step": 4}, backend)
    into = {"net": target, "step": 0}
    before = {name: each.clone() for name, each in weights(target).items()}
    some: list[dict[str, Any]] = [
        {},
        {"allow_missing": ["*head*"]},
        {"allow_unexpected": ["*old*"]},
        {"allow_missing": ["*head.bias"], "allow_unexpected": ["*"]},
        {"allow_missing": ["*"], "allow_unexpected": ["*old.bias"]},
    ]
    for allowed in some:
        with pytest.raises(StructureMismatch):
            await load(backend, into, **allowed)
    assert all(torch.equal(before[name], each) for name, each in weights(target).items())
    for allowed in ({"allow_missing": ["*head*"], "allow_unexpected": ["*old*"]},
                    {"allow_missing": ["*"], "allow_unexpected": ["*"]}):  # fmt: skip
        result = await load(backend, into, **allowed)
        after = weights(target)
        for name in ("weight", "bias"):
            assert torch.equal(after[f"body.{name}"], weights(saved)[f"body.{name}"])
            assert torch.equal(after[f"head.{name}"], before[f"head.{name}"])
        assert names(result.missing) == ["head.bias", "head.weight"]
        assert names(result.unexpected) == ["old.bias", "old.weight"]
        assert into["step"] == 4


async def test_names_are_those_that_transforms_give() -> None:
    backend, target = MemoryBackend(), net("up", "head")
    saved = net("0", "1")
    await store(saved, backend)
    rules = [Rename({"0": "up", "1": "other"})]
    allowed = {"allow_missing": ["head"], "allow_unexpected": ["other"]}
    result = await load(backend, target, transform=rules, **allowed)
    assert result.missing == ("head.weight", "head.bias")
    assert result.unexpected == ("other.weight", "other.bias")
    assert torch.equal(target.get_submodule("up").weight, saved.get_submodule("0").weight)  # type: ignore[arg-type]


async def test_the_arguments_are_lists_of_globs() -> None:
    backend = MemoryBackend()
    await store({"a": 1}, backend)
    for name in ("allow_missing", "allow_unexpected"):
        with pytest.raises(UsageError, match=name):
            await load(backend, {"a": 0}, **{name: "a"})
