"""Places of foreign checkpoints that count what is read of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import ckpipe
from ckpipe.backend import ObjectInfo, run_in_thread
from ckpipe_local import LocalBackend
from tests.support.pipelines import same

_numbers = itertools.count()

Tensors = Mapping[str, torch.Tensor]


class Counted(LocalBackend):
    """A directory that is read by ranged requests, as a bucket is; it counts them and their bytes.

    Attributes:
        reads: The number of requests.
        bytes: The bytes read.
        before_stat: Called before each look at an object.
    """

    reads = bytes = 0

    def __init__(self, url: str, before_stat: Callable[[str], object]) -> None:
        super().__init__(url.partition("://")[2])
        self.before_stat = before_stat

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.reads += 1
        self.bytes += len(buffer)
        await super().read_into(key, offset, buffer)

    async def stat(self, key: str) -> ObjectInfo:
        await run_in_thread(self.before_stat, key)
        return await super().stat(key)


@contextmanager
def counted(
    folder: Path, before_stat: Callable[[str], object] = str
) -> Iterator[tuple[str, list[Counted]]]:
    """Give the URL of a folder or file in a store of ranged requests, and its opened backends."""
    scheme, opened = f"counted{next(_numbers)}", list[Counted]()

    def make(url: str) -> Counted:
        opened.append(Counted(url, before_stat))
        return opened[-1]

    ckpipe.register_backend(scheme, make)
    yield f"{scheme}://{folder}", opened


def replaced_at_second_look(folder: Path, *, shorter: bool = False) -> Callable[[str], None]:
    """Make what puts a copy of a file in its place; the first look is before its header is read.

    Args:
        folder: Where the file lies.
        shorter: Whether the copy lacks the last byte.
    """
    looks = []

    def replace(key: str) -> None:
        looks.append(key)
        if len(looks) == 2:
            data = (folder / key).read_bytes()
            new = folder.parent / "new"
            new.write_bytes(data[: len(data) - shorter])
            new.rename(folder / key)

    return replace


def weights(*, seed: int = 0) -> dict[str, torch.Tensor]:
    """Make named tensors of several dtypes and shapes, one empty and one without dimensions."""
    made = torch.Generator().manual_seed(seed)
    return {
        "layer.0.weight": torch.randn(40, 30, generator=made),
        "layer.0.bias": torch.randn(40, generator=made).half(),
        "layer.1.weight": torch.randn(7, 5, generator=made).bfloat16(),
        "scale": torch.randn((), generator=made).double(),
        "empty": torch.empty(0, 3),
        "mask": torch.randn(9, generator=made) > 0,
        "small": torch.randn(6, generator=made).to(torch.float8_e4m3fn),
        "count": torch.tensor([1, -(2**40)]),
    }


def _resolved(value: Any) -> Any:
    """Return a tensor without lazy bits, which have no bytes to compare; other values as they are.

    A parameter stays one.
    """
    lazy = isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg())
    return value.resolve_conj().resolve_neg() if lazy else value


def assert_loaded(result: ckpipe.LoadResult, expected: Any, source: str | Path) -> None:
    """Check that a load of a source has exactly what was saved, in any order of names."""
    state = result.state
    if isinstance(state, dict):
        assert state.keys() == expected.keys()
        state = {name: _resolved(state[name]) for name in expected}
        expected = {name: _resolved(each) for name, each in expected.items()}
    assert same(state, expected)
    assert (result.id, result.step, result.source) == (None, 0, str(source))
