"""Loads that fall back when part of the target is filled: they never mix two steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors
from tests.support.pipelines import Stores, load_existing, values
from tests.support.rank_pipelines import ranks

FAST: dict[str, Any] = {"upload": {"backoff_seconds": 0, "retries": 1}, "load": {"lanes": 1}}
State = dict[str, Any]


def filled(value: float, *, b: int = 1000) -> State:
    """A state whose data file has all of ``b`` before the first byte of ``a``."""
    return {
        "a": torch.full((600_000,), value, dtype=torch.float32),
        "b": torch.full((b,), value, dtype=torch.float64),
    }


def without_b(value: float) -> State:
    return {"a": filled(value)["a"]}


class Part(torch.nn.Module):
    """A module with ``a``, and with ``b`` if asked for."""

    def __init__(self, state: State) -> None:
        super().__init__()
        for name, tensor in state.items():
            self.register_buffer(name, tensor)


def save(store: Stores, old: State, new: State, *, old_ranks: int = 1) -> None:
    """Save the old state as step 1 by a number of ranks, and the new one as step 2."""
    with ranks(store.url, old_ranks, attempt_id="old", plan={"replicated": ["a"]}, **FAST) as world:
        for rank, pipeline in enumerate(world):
            mine = {**old, "b": old["b"] + rank} if old_ranks > 1 else old
            pipeline.save(mine, step=1)
    with ckpipe.SyncPipeline(store.url, **FAST) as pipeline:
        pipeline.save(new, step=2)


def data_file(store: Stores, name: str) -> tuple[str, Any]:
    """The only data file whose key begins like this, and its key."""
    (found,) = [
        each
        for each in store.memory._store.objects.items()
        if each[0].startswith(name) and each[0].endswith(".safetensors")
    ]
    return found


def flip(store: Stores, name: str, at: int) -> None:
    """Flip a bit of the only data file whose key begins like this."""
    key, found = data_file(store, name)
    data = bytearray(found.data)
    data[at] ^= 1
    store.memory._store.objects[key] = type(found)(bytes(data), found.modified)


def header_bytes(store: Stores, name: str) -> int:
    _, found = data_file(store, name)
    return 8 + int.from_bytes(found.data[:8], "little")


NEWEST = "step-000000000002"
Case = tuple[State, State, dict[str, Any], int]
HOWS: dict[str, Callable[[], Case]] = {
    "strict=False": lambda: (without_b(1), filled(2), {"strict": False}, 1),
    "allow_missing": lambda: (without_b(1), filled(2), {"allow_missing": ["b"]}, 1),
    "shapes": lambda: (filled(1, b=7), filled(2), {"strict": "shapes"}, 1),
    "drop": lambda: (filled(1), filled(2), {"per_rank": "drop"}, 2),
    "module": lambda: (
        {"m": Part(without_b(1))},
        {"m": Part(filled(2))},
        {"strict": False, "allow_missing": ["m.b"]},
        1,
    ),
    "transform": lambda: (
        {**without_b(1), "x.b": torch.full((7,), 1.0, dtype=torch.float64)},
        {**without_b(2), "x.b": filled(2)["b"]},
        {"strict": "shapes", "transform": [ckpipe.Rename({"x.b": "b"})]},
        1,
    ),
}
UNFIT: dict[str, Callable[[], Case]] = {
    "another shape": lambda: (filled(1, b=7), filled(2), {}, 1),
    "a missing key": lambda: (without_b(1), filled(2), {}, 1),
    "another dtype": lambda: ({**filled(1), "b": torch.ones(1000)}, filled(2), {}, 1),
    "shared memory": lambda: (
        {**filled(1), "c": filled(3)["b"]},
        {**filled(2), "c": filled(2)["b"]},
        {},
        1,
    ),
    "values of ranks": lambda: (filled(1), filled(2), {}, 2),
}


def target_of(case: Case) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A target of zeros for a case, and the two tensors in it."""
    zeros = filled(0)
    if "c" in case[0]:
        zeros["c"] = zeros["b"][:]
    if "m" in case[0]:
        return {"m": Part(zeros)}, zeros["a"], zeros["b"]
    return zeros, zeros["a"], zeros["b"]


@contextlib.contextmanager
def falling_back(store: Stores) -> Iterator[ckpipe.SyncPipeline]:
    """A pipeline that tells of a damaged checkpoint."""
    with (
        ckpipe.SyncPipeline(store.url, **FAST) as pipeline,
        pytest.warns(RuntimeWarning, match="is damaged"),
    ):
        yield pipeline


@pytest.mark.parametrize("how", [*HOWS, *UNFIT])
def test_an_older_one_that_lacks_what_is_filled_is_not_taken(store: Stores, how: str) -> None:
    case = (HOWS | UNFIT)[how]()
    old, new, options, old_ranks = case
    save(store, old, new, old_ranks=old_ranks)
    flip(store, NEWEST, -1)
    target, a, b = target_of(case)
    with ckpipe.SyncPipeline(store.url, **FAST) as pipeline:
        with (
            pytest.warns(RuntimeWarning, match="is damaged"),
            pytest.raises(errors.ChecksumMismatch, match="Build the target anew") as caught,
        ):
            pipeline.load(target, fallback=True, **options)
        assert caught.value.target_touched
        assert caught.value.step == 2
        assert "step-000000000001" in caught.value.__notes__[0]
        assert values(a) == [0, 2]
        assert values(b) == [0 if how == "shared memory" else 2]
        if how in HOWS and how != "drop":  # a fresh state holds no values of another step
            with pytest.warns(RuntimeWarning, match="is damaged"):
                fresh = load_existing(pipeline, fallback=True)
            assert fresh.step == 1


@pytest.mark.parametrize("how", HOWS)
def test_an_older_one_is_taken_if_nothing_is_filled(store: Stores, how: str) -> None:
    case = HOWS[how]()
    old, new, options, old_ranks = case
    save(store, old, new, old_ranks=old_ranks)
    flip(store, NEWEST, header_bytes(store, NEWEST))
    target, a, b = target_of(case)
    with falling_back(store) as pipeline:
        result = load_existing(pipeline, target, fallback=True, **options)
    assert result.step == 1
    assert (values(a), values(b)) == ([1], [0])


@pytest.mark.parametrize("how", UNFIT)
def test_one_that_does_not_fit_says_so_if_nothing_is_filled(store: Stores, how: str) -> None:
    case = UNFIT[how]()
    old, new, options, old_ranks = case
    save(store, old, new, old_ranks=old_ranks)
    flip(store, NEWEST, header_bytes(store, NEWEST))
    target, _, _ = target_of(case)
    with falling_back(store) as pipeline, pytest.raises(errors.TargetMismatch) as caught:
        pipeline.load(target, fallback=True, **options)
    assert not caught.value.target_touched
    assert not any(tensor.any() for tensor in target.values())


@pytest.mark.parametrize("strict", [True, False])
def test_an_older_one_that_fills_the_same_is_taken(store: Stores, strict: bool) -> None:
    save(store, {**filled(1), "c": 1}, {**filled(2), "c": 2})
    flip(store, NEWEST, -1)
    target = {**filled(0), "c": 0}
    with falling_back(store) as pipeline:
        pipeline.load(target, fallback=True, strict=strict)
    assert {name: values(each) for name, each in target.items()} == {name: [1] for name in "abc"}


def test_all_damaged_says_that_a_later_one_filled_a_part(store: Stores) -> None:
    save(store, filled(1), filled(2))
    flip(store, NEWEST, header_bytes(store, NEWEST))
    flip(store, "step-000000000001", -1)
    target = filled(0)
    with falling_back(store) as pipeline, pytest.raises(errors.ChecksumMismatch) as caught:
        pipeline.load(target, fallback=True)
    assert (caught.value.step, caught.value.target_touched) == (2, True)
    assert values(target["b"]) == [1]
