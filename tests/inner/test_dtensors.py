"""DTensors in a state: what they are beside their parts, and that the next save follows them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpipe.format.labels import LabelFilter
from ckpipe.planning import fingerprint
from ckpipe.state.capture_cache import capture_cache_of
from ckpipe.state.flatten import OpenedState, flatten
from tests.inner.stored_ranks import capture

RANK, WORLD = 1, 4


@pytest.fixture(scope="module", autouse=True)
def _world_of_one_process() -> Iterator[None]:
    """Rank 1 of 4; the others do not exist, so that a collective could bring nothing."""
    dist.init_process_group("fake", rank=RANK, world_size=WORLD, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2))


def test_parameters_and_buffers_stay_what_they_are(mesh: DeviceMesh) -> None:
    made = DTensor.from_local(torch.ones(2), mesh, [Shard(0), Shard(0)], run_check=False)
    state = {
        "parameter": torch.nn.Parameter(made),
        "frozen": torch.nn.Parameter(made.detach().clone(), requires_grad=False),
        "buffer": torch.nn.Buffer(made.detach().clone(), persistent=False),
    }
    setattr(state["parameter"], "colour", "red")  # noqa: B010 - mypy knows no such attribute
    captured = capture(state)
    kinds = [(leaf.kind, leaf.detail, leaf.requires_grad) for leaf in captured.tensors]
    assert kinds == [
        ("parameter", None, True), ("parameter", None, False), ("buffer", "transient", False)
    ]  # fmt: skip
    attributes = [leaf.attributes for leaf in captured.tensors]
    assert attributes == [["dict", ["colour"], [["value", 0]]], None, None]


class Vouching:
    """An object that says which of its tensors all ranks hold alike."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state

    def __ckpipe_replicated__(self, label: str) -> bool:
        return label.startswith("model.")


def test_object_vouches_for_its_tensors() -> None:
    shared = torch.ones(3)
    state = {
        "train": Vouching({"model": {"w": torch.ones(2), "tied": shared}, "rng": torch.ones(1)}),
        "model": {"w": torch.ones(4)},
        "again": shared,
    }
    captured = capture(state)
    labels = [captured.tensors[number].label for number in sorted(captured.replicated)]
    assert labels == ["train.model.w", "train.model.tied"]
    (top,) = capture(Vouching({"model": {"w": torch.ones(2)}})).replicated
    assert top == 0
    nested = capture({"a": {"b": Vouching({"own": 1, "model": {"w": torch.ones(2)}})}})
    assert nested.replicated == {0: None}


def test_tensor_that_stands_elsewhere_first_is_vouched_for_too() -> None:
    shared = torch.ones(3)
    state = {"first": shared, "train": Vouching({"model": {"w": shared}})}
    assert capture(state).replicated == {0: None}


@pytest.mark.parametrize(
    ("told", "group"),
    [
        (True, None),
        (np.True_, None),
        (1, None),
        ((1, 0), (0, 1)),
        ([0, 0, 1], (0, 1)),
        ({np.int64(1), 0}, (0, 1)),
    ],
)
def test_ranks_that_hold_a_tensor_alike(told: Any, group: tuple[int, ...] | None) -> None:
    state = Vouching({"model": torch.ones(2)})
    state.__ckpipe_replicated__ = lambda label: told  # type: ignore[method-assign]
    assert capture(state).replicated == {0: group}


# ---- the next save ----


class Tagged(torch.Tensor):
    """A subclass of tensors."""


def placed(mesh: DeviceMesh, *placements: Any, shape: tuple[int, ...] = (4, 3)) -> DTensor:
    return DTensor.from_local(torch.ones(shape), mesh, list(placements), run_check=False)


def follow(before: Any, after: Any) -> bool:
    """Whether the cache of a state serves another, and finds in it what a walk does."""
    select = LabelFilter()
    with torch.no_grad():
        cache = capture_cache_of(flatten(OpenedState(before), select, pickling=False))
        assert cache is not None
        assert cache.capture(OpenedState(before), select) is not None
        found, expected = cache.capture(OpenedState(after), select), capture(after)
    if found is None:
        return False
    assert (found.tree, found.tensors) == (expected.tree, expected.tensors)
    assert fingerprint(found) == fingerprint(expected)
    assert [each.data_ptr() for each in found.memory] == [
        each.data_ptr() for each in expected.memory
    ]
    return True


def test_sharded_tensors_that_are_alike_are_found_in_the_cache(mesh: DeviceMesh) -> None:
    one = placed(mesh, Shard(0), Replicate())
    assert follow({"w": one}, {"w": one.detach()})
    assert follow({"w": one}, {"w": placed(mesh, Shard(0), Replicate())})
    assert follow({"w": one}, {"w": placed(init_device_mesh("cpu", (2, 2)), Shard(0), Replicate())})


def test_sharded_tensors_that_say_something_else_than_before_are_a_miss(
    mesh: DeviceMesh,
) -> None:
    one = placed(mesh, Shard(0), Replicate())
    select = LabelFilter()
    cache = capture_cache_of(flatten(OpenedState({"w": one}), select, pickling=False))
    assert cache is not None
    assert cache.capture(OpenedState({"w": one}), select) is not None
    one._spec.placements = (Shard(1), Replicate())
    assert cache.capture(OpenedState({"w": one}), select) is None


def test_sharded_tensors_that_are_not_alike_are_a_miss(mesh: DeviceMesh) -> None:
    one = placed(mesh, Shard(0), Replicate())
    strided = _StridedShard(0, split_factor=2)
    others: dict[str, Any] = {
        "placements": placed(mesh, Shard(1), Replicate()),
        "a strided shard": placed(mesh, strided, Replicate()),
        "mesh": placed(init_device_mesh("cpu", (4, 1)), Shard(0), Replicate()),
        "global shape": DTensor.from_local(
            torch.ones(4, 3), mesh, [Shard(0), Replicate()], run_check=False,
            shape=torch.Size((7, 3)), stride=(3, 1),
        ),
        "local shape": placed(mesh, Shard(0), Replicate(), shape=(4, 4)),
        "dtype": DTensor.from_local(
            torch.ones(4, 3).half(), mesh, [Shard(0), Replicate()], run_check=False
        ),
        "gradient": placed(mesh, Shard(0), Replicate()).requires_grad_(),
        "parameter": torch.nn.Parameter(placed(mesh, Shard(0), Replicate())),
        "plain": torch.ones(4, 3),
    }  # fmt: skip
    others["local class"] = placed(mesh, Shard(0), Replicate())
    others["local class"]._local_tensor = torch.ones(4, 3).as_subclass(Tagged)
    for what, other in others.items():
        assert not follow({"w": one}, {"w": other}), what


def test_sharded_parameters_are_followed(mesh: DeviceMesh) -> None:
    parameter = torch.nn.Parameter(placed(mesh, Shard(0), Replicate()))
    assert follow({"w": parameter}, {"w": parameter})
    assert not follow({"w": parameter}, {"w": placed(mesh, Shard(0), Replicate())})
    parameter.note = 1  # type: ignore[attr-defined]
    assert not follow(
        {"w": torch.nn.Parameter(placed(mesh, Shard(0), Replicate()))}, {"w": parameter}
    )
