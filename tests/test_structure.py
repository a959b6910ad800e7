"""Which tensors of a state share bytes, and which overlap themselves."""

from __future__ import annotations

import torch
from bundles import capture
from hypothesis import given
from hypothesis import strategies as st

from ckpipe.state.tensors import alias_groups, overlaps_itself, tensor_leaf


def groups(*tensors: torch.Tensor) -> list[list[int]]:
    return alias_groups([tensor_leaf(each, str(n))[0] for n, each in enumerate(tensors)])


def test_numpy_arrays_over_tensors_belong_to_them() -> None:
    base = torch.zeros(4)
    captured = capture({"t": base, "n": base.numpy()[2:]})
    assert alias_groups(captured.tensors) == [[0, 1]]


def test_expanded_tensor_is_a_group_by_itself() -> None:
    assert groups(torch.zeros(1).expand(5), torch.zeros(4)) == [[0]]
    assert groups(torch.arange(8).as_strided((3, 4), (1, 1))) == [[0]]
    assert groups(torch.arange(6).reshape(2, 3).T) == []


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=3))
def test_self_overlap_is_never_missed(dims: list[tuple[int, int]]) -> None:
    shape, stride = tuple(n for n, _ in dims), tuple(step for _, step in dims)
    places = [0]
    for n, step in dims:
        places = [place + k * step for place in places for k in range(n)]
    if len(set(places)) < len(places):
        assert overlaps_itself(shape, stride)
