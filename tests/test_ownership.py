"""Which tensors may be copied later: exactly those of which every byte belongs to an optimizer."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ckpipe.ownership import OwnedMemory, owned_leaves, owned_tensors
from ckpipe.structure import capture
from ckpipe.tensors import is_dense, tensor_leaf

SIZE = 24


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A view of some part of the memory that all examples share, of any strides."""
    rank = draw(st.integers(0, 2))
    shape = [draw(st.integers(0, 4)) for _ in range(rank)]
    stride = [draw(st.integers(0, 5)) for _ in range(rank)]
    reach = sum(max(n - 1, 0) * step for n, step in zip(shape, stride, strict=True))
    return MEMORY.as_strided(shape, stride, draw(st.integers(0, SIZE - 1 - min(reach, SIZE - 1))))


MEMORY = torch.zeros(SIZE + 40, dtype=torch.int16)


def elements(tensor: torch.Tensor) -> set[int]:
    """The places in the shared memory that a view touches."""
    places = torch.arange(MEMORY.numel())
    seen = places.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return set(seen.flatten().tolist())


@given(st.lists(views(), max_size=4), views())
def test_nothing_is_owned_of_which_a_byte_is_not(
    owned: list[torch.Tensor], asked: torch.Tensor
) -> None:
    touched = set().union(*map(elements, owned)) if owned else set()
    if OwnedMemory(owned).covers(tensor_leaf(asked, "asked")[0]):
        assert elements(asked) <= touched


@given(st.lists(views(), max_size=4))
def test_what_an_optimizer_has_is_owned(owned: list[torch.Tensor]) -> None:
    memory = OwnedMemory(owned)
    for tensor in owned:
        if tensor.numel():
            assert memory.covers(tensor_leaf(tensor, "own")[0])


@given(views())
def test_dense_means_each_place_of_the_window_once(tensor: torch.Tensor) -> None:
    if not tensor.numel():
        return
    window = max(elements(tensor)) - min(elements(tensor)) + 1
    expected = len(elements(tensor)) == window == tensor.numel()
    assert is_dense(tuple(tensor.shape), tensor.stride()) == expected


def test_of_an_optimizer_are_its_parameters_and_the_tensors_of_its_state() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    captured = capture({"model": model, "optimizer": optimizer})
    owned = {captured.tensors[n].label for n in owned_leaves(captured.tensors, [optimizer])}
    others = {leaf.label for leaf in captured.tensors} - owned
    assert others == {
        "model.1.running_mean",
        "model.1.running_var",
        "model.1.num_batches_tracked",
        "optimizer.param_groups.0.lr",
    }
    assert len(owned) == 4 + 3 * 4


def test_tensors_deep_in_a_state_are_found() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter])
    deep = torch.zeros(2)
    optimizer.state[parameter] = {"history": [(1, {"deep": deep})], "count": 3}
    assert [id(each) for each in owned_tensors([optimizer])] == [id(parameter), id(deep)]


def test_sparse_and_meta_tensors_are_passed_over() -> None:
    odd = [torch.zeros(3).to_sparse(), torch.zeros(3, device="meta")]
    assert not OwnedMemory(odd).covers(tensor_leaf(torch.zeros(3), "plain")[0])
