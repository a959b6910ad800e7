"""What torch tells of many tensors at once is what it tells of each, one by one."""

from __future__ import annotations

import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpipe.state import leaf_facts, tensor_looks
from ckpipe.state.tensor_looks import Looks


def said_of(tensor: torch.Tensor) -> object:
    """All that a leaf says of a tensor, attribute by attribute."""
    if tensor.layout is not torch.strided:
        return tensor.layout
    facts = [column[0] for column in leaf_facts._facts([tensor])]
    return type(tensor), *facts, tensor.is_conj()


Spec = tuple[torch.dtype, tuple[int, ...], str]
SPECS: st.SearchStrategy[Spec] = st.tuples(
    st.sampled_from([torch.float32, torch.int32, torch.complex64]),
    st.sampled_from([(), (0,), (1,), (4,), (2, 2), (1, 4), (4, 1), (0, 4)]),
    st.sampled_from(
        ["plain", "turned", "spread", "negative", "conjugate", "learned", "parameter", "sparse"]
    ),
)


def made(spec: Spec) -> torch.Tensor:
    dtype, shape, how = spec
    tensor = torch.zeros(shape, dtype=dtype)
    match how:
        case "turned":
            return torch.zeros(shape[::-1], dtype=dtype).permute(tuple(range(len(shape)))[::-1])
        case "spread":
            return torch.zeros((), dtype=dtype).expand(shape)
        case "negative":
            return torch._neg_view(tensor)
        case "conjugate":
            return tensor.conj()
        case "learned" if dtype is not torch.int32:
            return tensor.requires_grad_()
        case "parameter":
            return torch.nn.Parameter(tensor, requires_grad=False)
        case "sparse" if shape == (4,):
            return tensor.to_sparse()
    return tensor


@given(SPECS, SPECS)
def test_tensors_that_look_alike_say_the_same(one: Spec, other: Spec) -> None:
    first, second = made(one), made(other)
    looks = Looks([first])
    assert looks.are_those_of([made(one)])
    if looks.are_those_of([second]):
        assert said_of(first) == said_of(second)


def test_this_torch_tells_what_matters() -> None:
    assert Looks([torch.ones(2), torch.ones(3)]).are_those_of([torch.zeros(2), torch.zeros(3)])


@pytest.mark.parametrize("count", [1, 1024, 1025, 2500])
def test_one_of_many_that_differs_is_found(count: int) -> None:
    before = [torch.ones(n % 5, 2) for n in range(count)]
    looks = Looks(before)
    for number in {0, 137 % count, min(1024, count - 1), count - 1}:
        after = [each.clone() for each in before]
        assert looks.are_those_of(after)
        after[number] = after[number].clone().requires_grad_()
        assert not looks.are_those_of(after)


def test_gradients_are_told_apart_where_none_are_computed() -> None:
    with torch.no_grad():
        assert not Looks([torch.ones(2)]).are_those_of([torch.ones(2).requires_grad_()])


def test_no_tensor_is_kept() -> None:
    one = torch.ones(3)
    kept, looks = weakref.ref(one), Looks([one])
    assert looks.are_those_of([one])
    del one
    assert kept() is None


def test_nothing_is_claimed_of_one_that_stands_there_twice_or_of_none() -> None:
    one = torch.ones(3)
    assert not Looks([one, one]).are_those_of([one, one])
    assert not Looks([]).are_those_of([])


def test_a_torch_that_misses_a_difference_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    real = tensor_looks._question

    def blind_to_strides(tensors: list[torch.Tensor]) -> object:
        same = real([each.contiguous() for each in tensors])
        assert same is not None
        return lambda *others: same(*[each.contiguous() for each in others])

    tensor_looks._is_reliable.cache_clear()
    monkeypatch.setattr(tensor_looks, "_question", blind_to_strides)
    try:
        one = torch.ones(3, 2)
        assert not Looks([one]).are_those_of([one])
    finally:
        tensor_looks._is_reliable.cache_clear()


def test_a_release_that_no_test_has_run_with_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor_looks._is_reliable.cache_clear()
    monkeypatch.setattr(tensor_looks, "RELEASES", ("1.0.",))
    try:
        one = torch.ones(3, 2)
        assert not Looks([one]).are_those_of([one])
    finally:
        tensor_looks._is_reliable.cache_clear()
