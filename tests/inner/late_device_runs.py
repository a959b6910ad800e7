"""Runs with a device whose work is done late; a program, since a device stays registered."""

from __future__ import annotations

import asyncio
import faulthandler
import sys
from typing import Any

import torch

import ckpipe
from ckpipe.memory import cuda
from tests.inner.late_device import Late, kernel, late
from tests.support.actors import PATIENCE

SIZE = 100_000


class Averaged:
    """An object whose state is computed when it is asked for."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        self.steps += 1
        steps, average = self.steps, torch.zeros(SIZE)
        kernel(lambda: average.fill_(steps))
        return {"average": late(average)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def check(found: ckpipe.LoadResult | None, **expected: float) -> None:
    assert found is not None
    state = {**found.state, **found.state["averaged"]}
    for name, value in expected.items():
        assert state[name].unique().tolist() == [value], (name, state[name].unique())


def save_blocking(url: str) -> None:
    weight, averaged = torch.zeros(SIZE), Averaged()
    with ckpipe.SyncPipeline(url) as pipeline, Late.stream(Late.Stream()):
        for step in range(3):
            kernel(lambda step=step: weight.fill_(step))  # type: ignore[misc]
            pipeline.save({"weight": late(weight), "averaged": averaged}, step=step).wait()
            check(pipeline.load(step=step), weight=step, average=averaged.steps)


async def save_awaiting(url: str) -> None:
    weight, averaged = torch.zeros(SIZE), Averaged()
    async with ckpipe.Pipeline(url) as pipeline:
        for step in range(3):
            kernel(lambda step=step: weight.fill_(step))  # type: ignore[misc]
            await (await pipeline.save({"weight": late(weight), "averaged": averaged}, step=step))
            check(await pipeline.load(step=step), weight=step, average=averaged.steps)


def save_captured(url: str) -> None:
    weight, averaged = torch.zeros(SIZE), Averaged()
    parameter = torch.nn.Parameter(late(weight))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    state = {"weight": parameter, "averaged": averaged}
    with ckpipe.SyncPipeline(url, guard=optimizer) as pipeline:
        for step in range(4):
            with pipeline.lock.mutating():
                kernel(lambda step=step: weight.fill_(step))  # type: ignore[misc]
            handle = pipeline.save(state, step=step, until="captured")
            with pipeline.lock.mutating():
                kernel(lambda: weight.fill_(-1))
            handle.wait()
            check(pipeline.load(step=step), weight=step, average=averaged.steps)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(4 * PATIENCE, exit=True)
    kind, url = sys.argv[1:]
    if kind == "fenced":
        cuda.FENCED.add("late")
    save_blocking(f"{url}/blocking")
    asyncio.run(save_awaiting(f"{url}/awaiting"))
    save_captured(f"{url}/captured")
