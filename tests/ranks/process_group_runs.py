"""Processes that launchers start: each opens a pipeline, joins process groups, saves and loads.

As a script this forks the ranks of the cases on its standard input. A case has *trials*, which a
rank runs one after the other. A trial is a list of acts, so that their order can be anything.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore

import ckpipe
from ckpipe.errors import CkpipeError
from tests.support.fork_server import Case, serve
from tests.support.killed_runs import note

Trial = dict[str, Any]
"""The variables of the launcher, the fields of the pipeline, and the acts, all by name."""


def state(rank: int) -> dict[str, Any]:
    return {"w": torch.full((3,), float(rank))}


CALLS: dict[str, Callable[[Any, int], Any]] = {
    "save": lambda pipeline, rank: pipeline.save(state(rank), step=1, until="committed"),
    "save again": lambda pipeline, rank: pipeline.save(state(rank), step=2, until="committed"),
    "should_save": lambda pipeline, rank: pipeline.should_save(1, last=1),
    "load": lambda pipeline, rank: pipeline.load(state(-1)),
    "load step": lambda pipeline, rank: pipeline.load(state(-1), 0),
    "load fallback": lambda pipeline, rank: pipeline.load(state(-1), 0, fallback=True),
    "steps": lambda pipeline, rank: pipeline.steps(),
    "latest": lambda pipeline, rank: pipeline.latest(),
    "verify": lambda pipeline, rank: pipeline.verify(0),
}


class Life:
    """One rank in one trial.

    Args:
        case: The case.
        trial: The trial.
        rank: The rank.
        place: A path that all ranks have for this trial alone, to meet at.
    """

    def __init__(self, case: Case, trial: Trial, rank: int, place: str) -> None:
        self._case, self._trial, self._rank, self._place = case, trial, rank, place
        self._groups, self._runner = itertools.count(), asyncio.Runner()
        self._pipeline: Any = None
        self.told: dict[str, str] = {}

    def run(self) -> None:
        """Do all acts, and tell of each call how it ended; none follows a failed open."""
        for name, value in self._trial["variables"].items():
            os.environ[name] = self._filled(value)
        with self._runner:
            for act in self._trial["acts"]:
                try:
                    self._do(act)
                except CkpipeError as error:
                    self.told[act] = f"{type(error).__name__}: {error}"
                    if act == "open":
                        break
                else:
                    self.told[act] = "done"
            if self._pipeline is not None:
                self._now(getattr(self._pipeline, "aclose" if self._awaits else "close")())
        self._part()

    @property
    def _awaits(self) -> bool:
        return bool(self._case["awaits"])

    def _do(self, act: str) -> None:
        if act == "open":
            kind = ckpipe.Pipeline if self._awaits else ckpipe.SyncPipeline
            made = kind(self._filled(self._trial["root"]), **self._trial.get("fields", {}))
            self._now(made.open())
            self._pipeline = made
        elif act == "join":
            self._join(self._rank, self._case["ranks"])
        elif act == "join alone":
            self._join(0, 1)
        elif act == "part":
            self._part()
        elif "=" in act:
            name, _, value = act.partition("=")
            os.environ[name] = self._filled(value)
        else:
            self._now(CALLS[act](self._pipeline, self._rank))

    def _join(self, rank: int, size: int) -> None:
        path = f"{self._place}-{next(self._groups)}"
        store = FileStore(path, size) if size > 1 else HashStore()
        seconds = timedelta(seconds=300)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=seconds)
        dist.barrier()

    def _part(self) -> None:
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()

    def _filled(self, text: str) -> str:
        return text.format(rank=self._rank, size=self._case["ranks"])

    def _now(self, result: Any) -> Any:
        return self._runner.run(result) if inspect.iscoroutine(result) else result


def live(case: Case, rank: int, number: int) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    known = {name for trial in case["trials"].values() for name in trial["variables"]}
    before = {name: value for name, value in os.environ.items() if name not in known}
    for name, trial in case["trials"].items():
        os.environ.clear()
        os.environ.update(before)
        life = Life(case, trial, rank, f"{case['root']}.{number}-{name}")
        life.run()
        note(case["root"], json.dumps({"rank": rank, "trial": name, "told": life.told}))


def spawned(rank: int, root: str, port: int) -> None:
    """Save as a rank of ``torch.multiprocessing.spawn`` that opens before it joins."""
    with ckpipe.SyncPipeline(root) as pipeline:
        where = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
        try:
            pipeline.save(state(rank), step=1).wait()
            how = "done"
        except CkpipeError as error:
            how = f"{type(error).__name__}: {error}"
        note(root, json.dumps({"rank": rank, "told": how}))
        dist.barrier()


if __name__ == "__main__":
    serve(live)
