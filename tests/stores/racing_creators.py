"""Processes that race for keys; what they import is little, since each may start anew."""

from __future__ import annotations

import os
from functools import partial
from multiprocessing.context import BaseContext
from multiprocessing.synchronize import Barrier
from pathlib import Path

import anyio

from ckpipe.backend import PutMode
from ckpipe.errors import ObjectExists
from ckpipe_local import LocalBackend

RACERS, KEYS = 3, 40

_all_there: Barrier


def _meet_at(barrier: Barrier) -> None:
    global _all_there
    _all_there = barrier


def _create_all(root: str, number: int) -> list[int]:
    """Try to create each key, and return those that this process won."""

    async def main() -> list[int]:
        won: list[int] = []
        async with LocalBackend(root) as backend:
            for key in range(KEYS):
                try:
                    data = f"{number:06}".encode()
                    await backend.put(f"d{key % 3}/{key}", data, PutMode.CREATE)
                except ObjectExists:
                    continue
                won.append(key)
        return won

    _all_there.wait()
    return anyio.run(main)


def check_race(context: BaseContext, root: Path) -> None:
    """Let processes create the same keys at the same time; check that exactly one wins each."""
    barrier = context.Barrier(RACERS)
    with context.Pool(RACERS, _meet_at, (barrier,)) as pool:
        won = pool.map(partial(_create_all, str(root)), range(RACERS), chunksize=1)
        pool.close()
        pool.join()
    assert sorted(key for keys in won for key in keys) == list(range(KEYS))
    for number, keys in enumerate(won):
        for key in keys:
            assert (root / f"d{key % 3}/{key}").read_text() == f"{number:06}"
    assert sum(len(names) for _, _, names in os.walk(root)) == KEYS
