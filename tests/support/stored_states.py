"""Puts a state on a store in memory and loads it again, each time by a pipeline of its own."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import anyio

import ckpipe
from ckpipe.backend import Backend
from ckpipe.testing import MemoryBackend
from ckpipe.types import LoadResult, VerifyResult

STEP = 7
BLOCK_BYTES = 2 << 20

Pickling = Literal["refuse", "allow"]

_numbers = itertools.count()


def opened(backend: Backend, **settings: Any) -> ckpipe.Pipeline:
    """A pipeline on a backend, with two lanes and blocks of 2 MiB.

    Args:
        backend: Where it saves to and loads from.
        settings: More of its settings.
    """
    scheme = f"stored{next(_numbers)}"
    ckpipe.register_backend(scheme, lambda url: backend)
    settings = {"keep_reports": False, "load": {"lanes": 2}, **settings}
    return ckpipe.Pipeline(f"{scheme}://store", staging={"block_bytes": BLOCK_BYTES}, **settings)


async def store(state: Any, backend: Backend, *, pickle: Pickling = "refuse") -> str:
    """Save a state as step 7; return the id of the checkpoint."""
    async with opened(backend, pickle=pickle) as pipeline:
        handle = await pipeline.save(state, step=STEP, until="committed")
    return handle.id


async def load(backend: Backend, into: Any = None, **options: Any) -> LoadResult:
    """Load step 7.

    Args:
        backend: Where it lies.
        into: The target.
        options: Those of ``Pipeline.load``, or ``settings`` of the pipeline.
    """
    async with opened(backend, **options.pop("settings", {})) as pipeline:
        result = await pipeline.load(into, STEP, **options)
    assert result is not None
    return result


async def verified(backend: Backend) -> VerifyResult:
    """Verify step 7."""
    async with opened(backend) as pipeline:
        return await pipeline.verify(STEP)


async def round_trip(
    state: Any, into: Any = None, *, save_pickle: Pickling = "refuse", **options: Any
) -> LoadResult:
    """What a state is after it was stored and loaded."""
    backend = MemoryBackend()
    await store(state, backend, pickle=save_pickle)
    return await load(backend, into, **options)


def run_round_trip(state: Any, into: Any = None, **options: Any) -> LoadResult:
    """The same for tests that are not coroutines."""

    async def main() -> LoadResult:
        return await round_trip(state, into, **options)

    return anyio.run(main)
