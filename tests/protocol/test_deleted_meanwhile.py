"""Checkpoints that retention deletes while a process without a lease loads them: not damage."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.testing.wrappers import Operation
from tests.support.pipelines import Stores, load_existing, values
from tests.support.stored_files import tombstone_key

FAST: dict[str, Any] = {
    "upload": {"backoff_seconds": 0, "retries": 1},
    "load": {"lanes": 1},
    "staging": {"block_bytes": 2 << 20},
}
Objects = dict[str, Any]


def state(step: int, *, b: bool = True) -> dict[str, torch.Tensor]:
    """A state that is read in two requests, the first of which has all of ``b``."""
    big = {"a": torch.full((1_200_000,), float(step))}
    return {**big, "b": torch.full((1000,), float(step), dtype=torch.float64)} if b else big


def save_apart(store: Stores, *states: Any) -> list[tuple[str, Objects]]:
    """Save states as the steps from 1 on; take their objects away, and return these with the id."""
    found = []
    with ckpipe.SyncPipeline(store.url, **FAST) as pipeline:
        for step, each in enumerate(states, 1):
            id = pipeline.save(each, step=step).wait().id
            found.append(id)
    objects = store.memory._store.objects
    return [
        (id, {key: objects.pop(key) for key in list(objects) if key.startswith(id)}) for id in found
    ]


def delete(store: Stores, id: str, *, swept: bool) -> None:
    """Delete a checkpoint; leave the mark of the deletion, unless a sweep has been there since."""
    objects = store.memory._store.objects
    for key in [key for key in objects if key.startswith(id)]:
        del objects[key]
    if not swept:
        some = next(iter(objects.values()))
        objects[tombstone_key(id)] = type(some)(b"{}", some.modified)


def reads_data(id: str) -> Callable[[Operation], bool]:
    return lambda operation: operation.verb == "read_into" and operation.key.startswith(id)


def replace_at(
    store: Stores, old: tuple[str, Objects], new: Objects, nth: int, *, swept: bool
) -> None:
    """Put an old checkpoint there; have a new one replace it at the nth request for its data."""
    id, objects = old
    store.memory._store.objects |= objects

    def prune(_: Operation) -> None:
        store.memory._store.objects |= new
        delete(store, id, swept=swept)

    store.faulty.call(prune, reads_data(id), nth=nth)


@pytest.mark.sample(12)
@pytest.mark.parametrize("swept", [False, True])
@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_the_newest_is_replaced_by_the_next_and_a_named_one_is_told(
    store: Stores,
    swept: bool,
    fallback: bool,
    nth: int,
    into: bool,
    named: bool,
) -> None:
    (id, old), (_, new) = save_apart(store, state(1), state(2))
    replace_at(store, (id, old), new, nth, swept=swept)
    target = {name: torch.zeros_like(each) for name, each in state(1).items()}
    with ckpipe.SyncPipeline(store.url, read_only=True, **FAST) as pipeline:
        given = target if into else None
        if named:
            with pytest.raises(errors.CheckpointIncomplete, match="deleted just now") as caught:
                pipeline.load(given, 1, fallback=fallback)
            assert caught.value.target_touched is (into and nth == 2)
            return
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = load_existing(pipeline, given, fallback=fallback)
    assert result.report is not None
    assert (result.step, result.report.damaged) == (2, {})
    assert all(bool((each == 2).all()) for each in result.state.values())


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("nth", [1, 2])
def test_the_next_is_not_mixed_with_it(store: Stores, fallback: bool, nth: int) -> None:
    (id, old), (_, new) = save_apart(store, state(1), state(2, b=False))
    replace_at(store, (id, old), new, nth, swept=False)
    target = {name: torch.zeros_like(each) for name, each in state(1).items()}
    with ckpipe.SyncPipeline(store.url, read_only=True, **FAST) as pipeline:
        if nth == 1:
            result = load_existing(pipeline, target, fallback=fallback, strict=False)
            assert (result.step, values(target["b"])) == (2, [0])
            return
        with pytest.raises(errors.CheckpointIncomplete, match="deleted just now") as caught:
            pipeline.load(target, fallback=fallback, strict=False)
    assert caught.value.target_touched
    assert "does not fill 'b'" in caught.value.__notes__[0]


def test_the_search_for_the_next_ends(store: Stores) -> None:
    """Each is deleted while it is read, and the next is there by then."""
    saved = save_apart(store, *({"a": torch.ones(3)} for _ in range(30)))
    store.memory._store.objects |= saved[0][1]
    for (id, _), (_, new) in itertools.pairwise(saved):

        def prune(_: Operation, id: str = id, new: Objects = new) -> None:
            store.memory._store.objects |= new
            delete(store, id, swept=False)

        store.faulty.call(prune, reads_data(id))
    with (
        ckpipe.SyncPipeline(store.url, read_only=True, **FAST) as pipeline,
        pytest.raises(errors.CheckpointIncomplete, match="deleted just now"),
    ):
        pipeline.load()


def test_damage_of_one_that_is_there_stays_damage(store: Stores) -> None:
    ((_, objects),) = save_apart(store, state(1))
    store.memory._store.objects |= {
        key: each for key, each in objects.items() if not key.endswith(".safetensors")
    }
    with (
        ckpipe.SyncPipeline(store.url, read_only=True, **FAST) as pipeline,
        pytest.raises(errors.MissingObject, match="is gone"),
    ):
        pipeline.load()
