"""A state that changes its shape between saves, and memory that follows it."""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import ckpipe
from ckpipe.errors import UsageError
from tests.support.pipelines import Stores, loaded_state

BLOCK = 1 << 16
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.uint8)

State = dict[str, torch.Tensor]
Change = Callable[[random.Random, State], None]


def drawn(rng: random.Random) -> torch.Tensor:
    shape = (rng.randrange(1, 200), rng.randrange(1, 200))
    return torch.randint(0, 100, shape).to(rng.choice(DTYPES))


def add(rng: random.Random, state: State) -> None:
    state[f"new{rng.randrange(1 << 30)}"] = drawn(rng)


def drop(rng: random.Random, state: State) -> None:
    if len(state) > 1:
        del state[rng.choice(list(state))]


def replace(rng: random.Random, state: State) -> None:
    name = rng.choice(list(state))
    state[name] = state[name].clone()


def resize(rng: random.Random, state: State) -> None:
    state[rng.choice(list(state))] = drawn(rng)


def resize_in_place(rng: random.Random, state: State) -> None:
    chosen = state[rng.choice(list(state))]
    if chosen._base is None and chosen.untyped_storage().resizable():
        chosen.resize_(rng.randrange(1, 300), 7).fill_(3)


def retype(rng: random.Random, state: State) -> None:
    name = rng.choice(list(state))
    state[name] = state[name].to(rng.choice(DTYPES))


def tie(rng: random.Random, state: State) -> None:
    state[rng.choice(list(state))] = state[rng.choice(list(state))]


def tie_a_part(rng: random.Random, state: State) -> None:
    whole = state[rng.choice(list(state))]
    state[f"part{rng.randrange(1 << 30)}"] = whole[: rng.randrange(1, len(whole) + 1)].t()


def untie(rng: random.Random, state: State) -> None:
    for name, tensor in state.items():
        state[name] = tensor.clone()


def turn(rng: random.Random, state: State) -> None:
    name = rng.choice(list(state))
    state[name] = state[name].t()


def write(rng: random.Random, state: State) -> None:
    for tensor in state.values():
        tensor.add_(1)


CHANGES: tuple[Change, ...] = (
    add, drop, replace, resize, resize_in_place, retype, tie, tie_a_part, untie, turn, write,
)  # fmt: skip


def by_torch(state: State) -> State:
    """What torch makes of a state that goes through a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: State = torch.load(file, weights_only=True)
    return loaded


def overlaps(state: State) -> set[tuple[str, str]]:
    """The pairs of names that share a byte."""

    def window(tensor: torch.Tensor) -> tuple[int, int]:
        reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.itemsize

    windows = {name: window(tensor) for name, tensor in state.items()}
    return {
        (a, b)
        for a, (begin, end) in windows.items()
        for b, (other_begin, other_end) in windows.items()
        if begin < other_end and other_begin < end
    }


def apart_from(state: State, owned: list[torch.Tensor]) -> State:
    """The tensors that share no byte with those that an optimizer owns."""
    names = {name for name, tensor in state.items() if any(tensor is each for each in owned)}
    touched = {one for one, other in overlaps(state) if other in names}
    return {name: tensor for name, tensor in state.items() if name not in touched}


@pytest.mark.parametrize("until", ["staged", "captured"])
def test_every_save_sees_the_state_as_it_is_now(until: Any, store: Stores) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    sys.stdout.write(f"seed {seed}\n")
    rng = random.Random(seed)
    torch.manual_seed(seed)
    state: State = {"first": drawn(rng), "second": drawn(rng)}
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter])
    staging = {"block_bytes": BLOCK, "bytes": 1 << 26}
    with ckpipe.SyncPipeline(store.url, guard=optimizer, staging=staging, keep_last=2) as pipeline:
        lents = 0
        for step in range(40):
            for _ in range(rng.randrange(4)):
                rng.choice(CHANGES)(rng, state)
            # What an optimizer owns today may be another tensor than yesterday.
            free = [t for t in state.values() if t.is_floating_point() and t._base is None]
            owned = rng.sample(free, len(free) // 2)
            optimizer.param_groups[0]["params"] = owned or [parameter]
            wanted, shared = by_torch(state), overlaps(state)
            handle = pipeline.save(state, step=step, until=until)
            write(rng, state if until == "staged" else apart_from(state, owned))
            handle.wait()
            try:
                with handle.staged_state() as lent:
                    check(lent, wanted)
                    assert overlaps(lent) == shared
                lents += 1
            except UsageError:
                pass  # it streamed through cold memory, or a smaller state let memory go since
            found = loaded_state(pipeline, step)
            check(found, wanted)
            assert all(strides(found[name]) == strides(each) for name, each in wanted.items())
            assert overlaps(found) == shared
    assert lents > 0


def strides(tensor: torch.Tensor) -> list[int]:
    """The strides that say where elements are; those of dimensions of one element do not."""
    return [step for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n != 1]


def check(found: State, wanted: State) -> None:
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


class Mapped(Dataset[bool]):
    """Says, from inside a worker, whether an address of the parent is mapped there."""

    def __init__(self, address: int) -> None:
        self.address = address

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> bool:
        if index >= len(self):
            raise IndexError
        ranges = [
            [int(end, 16) for end in line.split()[0].split("-")]
            for line in Path("/proc/self/maps").read_text().splitlines()
        ]
        return any(low <= self.address < high for low, high in ranges)


def test_forked_loaders_have_no_part_of_the_staging_memory(tmp_path: Path) -> None:
    state = {"weight": torch.arange(100_000.0)}
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        first = pipeline.save(state, step=0)
        first.wait()
        with first.staged_state() as lent:
            dataset = Mapped(lent["weight"].data_ptr())
        assert dataset[0]
        loader = DataLoader(dataset, num_workers=2, multiprocessing_context="fork")
        handles = []
        for step, batch in enumerate(loader, start=1):
            assert not batch.any()
            handles.append(pipeline.save(state, step=step))
            state["weight"].add_(1)
        for handle in handles:
            handle.wait()
        for step in range(5):
            found = loaded_state(pipeline, step)["weight"]
            assert torch.equal(found, torch.arange(100_000.0) + max(0, step - 1))
