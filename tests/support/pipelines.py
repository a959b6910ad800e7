"""What tests of whole pipelines share: states, and stores that can be made to misbehave."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

import ckpipe
from ckpipe.backend import Backend
from ckpipe.testing import FaultyBackend, MemoryBackend, SlowBackend
from ckpipe.types import LoadResult

_numbers = itertools.count()


def small_state(seed: int = 0) -> dict[str, Any]:
    """A state with a bit of everything, of a few kilobytes."""
    made = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 6, generator=made)
    return {
        "weight": weight,
        "tied": weight,
        "rows": weight[1:3],
        "turned": torch.randn(3, 5, generator=made).t(),
        "half": torch.randn(7, generator=made).bfloat16(),
        "scalar": torch.tensor(seed),
        "empty": torch.empty(0, 3),
        "inline": [1, 2.5, None, "text", b"bytes", {1: "int", "1": "str"}, (seed, True)],
    }


def same(left: Any, right: Any) -> bool:
    """Whether two states are equal in structure, types and bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and _bits(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def _bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    flat = [each.contiguous().reshape(-1).view(torch.uint8) for each in (left, right)]
    return torch.equal(*flat)


class Stateful:
    """An object whose state is what a function returns.

    Args:
        state: The function.
        load: Called with a state that is loaded.
    """

    def __init__(self, state: Callable[[], Any], load: Callable[[Any], object] = bool) -> None:
        self._state, self._load = state, load

    def state_dict(self) -> Any:
        return self._state()

    def load_state_dict(self, state: Any) -> None:
        self._load(state)


def values(tensor: Any) -> list[float]:
    """The values in a tensor or of a number, each once."""
    return sorted(set(torch.as_tensor(tensor).flatten().tolist()))


class Stores:
    """Hands one store out to every pipeline that opens its URL."""

    def __init__(self) -> None:
        self.scheme = f"test{next(_numbers)}"
        self.url = f"{self.scheme}://store"
        self.memory = MemoryBackend(f"memory://{self.scheme}")
        self.faulty = FaultyBackend(self.memory)
        self.slow = SlowBackend(self.faulty)

    def backend(self, url: str) -> Backend:
        """The store, whatever the URL."""
        return self.slow


@contextlib.contextmanager
def stores() -> Iterator[Stores]:
    """A store in memory behind a URL of its own, which can be slowed down and made to fail."""
    made = Stores()
    ckpipe.register_backend(made.scheme, made.backend)
    yield made


def load_existing(pipeline: ckpipe.SyncPipeline, *args: Any, **how: Any) -> LoadResult:
    """Load a checkpoint that is there, as ``pipeline.load`` does."""
    result = pipeline.load(*args, **how)
    assert result is not None
    return result


def newest_of(pipeline: ckpipe.SyncPipeline) -> ckpipe.CheckpointInfo:
    """Return the newest checkpoint, which must be there."""
    newest = pipeline.latest()
    assert newest is not None
    return newest


def loaded_state(
    pipeline: ckpipe.SyncPipeline, step: int | str | ckpipe.CheckpointInfo | None = None
) -> Any:
    """Load a checkpoint that is there, or the newest, as a fresh state."""
    return load_existing(pipeline, step=step).state


def checked_whole(
    pipeline: ckpipe.SyncPipeline, content: Callable[[int], Any]
) -> list[ckpipe.CheckpointInfo]:
    """Check that each complete checkpoint verifies and loads what its step has; return them."""
    complete = [info for info in pipeline.steps() if info.complete]
    for info in complete:
        pipeline.verify(info)
        assert same(loaded_state(pipeline, info), content(info.step)), f"{info.id} has other values"
    return complete


async def awaited_state(pipeline: ckpipe.Pipeline, step: int | None = None) -> Any:
    """Load a checkpoint that is there, or the newest, as a fresh state."""
    result = await pipeline.load(step=step)
    assert result is not None
    return result.state
