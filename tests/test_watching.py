"""Samples of tensors: changed with the tensor, and by nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpipe.lock.late_copies import (
    LEAST_MEAN_BYTES,
    MANY_TENSORS,
    ByteSample,
    MutationDetector,
    worth_watching,
)
from ckpipe.memory import native
from ckpipe.state.flatten import capture

shapes = st.lists(st.integers(0, 40), max_size=3)
dtypes = st.sampled_from([torch.uint8, torch.float16, torch.float32, torch.complex128])


@st.composite
def states(draw: st.DrawFn) -> list[torch.Tensor]:
    """Tensors that are rows of larger ones, so that other bytes stand beside theirs."""
    found = []
    for shape in draw(st.lists(shapes, min_size=1, max_size=8)):
        base = torch.zeros(3, *shape, dtype=draw(dtypes))
        found.append(base[1].permute(draw(st.permutations(range(len(shape))))))
    return found


def made(state: Any) -> tuple[ByteSample, MutationDetector]:
    captured = capture(state)
    sample = ByteSample(captured.tensors, iter(range(len(captured.tensors))))
    return sample, MutationDetector(captured, [], [sample])


@pytest.fixture(params=["gathered", "one by one"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "one by one":
        monkeypatch.setattr(native, "_held", None)


@given(states(), st.data())
def test_a_write_to_one_is_noticed_and_named(
    state: list[torch.Tensor], data: st.DataObject
) -> None:
    sample, watch = made(state)
    assert watch.changed_in(sample) is None
    number = data.draw(st.integers(0, len(state) - 1))
    state[number].data.fill_(1)
    found = watch.changed_in(sample)
    assert (found and found.label) == (str(number) if state[number].numel() else None)


@given(states())
def test_writes_beside_them_are_not_noticed(state: list[torch.Tensor]) -> None:
    sample, watch = made(state)
    for tensor in state:
        assert tensor._base is not None
        tensor._base[[0, 2]] = 1
    assert watch.changed_in(sample) is None


def test_what_lies_between_the_elements_of_a_tensor_is_nobodys() -> None:
    base = torch.zeros(100)
    sample, watch = made([base[::2], base.as_strided((3, 3), (1, 1))])
    base.fill_(1)
    assert watch.changed_in(sample) is None


@pytest.mark.parametrize(
    ("count", "nbytes", "device", "worth"),
    [
        (MANY_TENSORS, 1, "cpu", True),
        (MANY_TENSORS + 1, LEAST_MEAN_BYTES - 1, "cpu", False),
        (MANY_TENSORS + 1, LEAST_MEAN_BYTES, "cpu", True),
        (MANY_TENSORS + 1, 1, "cuda:0", True),
    ],
)
def test_many_small_tensors_of_host_memory_are_not_worth_it(
    count: int, nbytes: int, device: str, worth: bool
) -> None:
    state = capture([torch.zeros(nbytes, dtype=torch.uint8) for _ in range(count)])
    state.tensors[-1] = replace(state.tensors[-1], device=device)
    assert worth_watching(state.tensors) is worth
