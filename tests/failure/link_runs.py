"""Incremental saves that a test can follow: their states, stores and links.

As a script it forks runs that die by SIGKILL at a link; see ``tests/support/killed_runs.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import ckpipe
from ckpipe.backend import Backend
from ckpipe.events import Event, FileLinked
from ckpipe.testing import FaultyBackend, MemoryBackend
from ckpipe_local import LocalBackend
from tests.support.dead_runs import age
from tests.support.fork_server import serve
from tests.support.killed_runs import URL, mortal_backend, note
from tests.support.pipelines import checked_whole, same
from tests.support.settling import SettlingPipeline, settle

BLOCK = 65536
SETTINGS: dict[str, Any] = {
    "incremental": True,
    "upload": {"backoff_seconds": 0, "retries": 2, "lanes": 2},
    # Saves wait for memory, so blocks are digested beside the copy, and the first ones that rest
    # of a file are put aside before the last one, which moves, is known.
    "staging": {"bytes": 2 * BLOCK, "block_bytes": BLOCK},
}
LINKS = 2
"""Number of files that a save of the states below links."""

_numbers = itertools.count()


def state_of(step: int) -> dict[str, Any]:
    """Make a state of four files: two rest, of one the last block moves, and one moves."""
    frozen = torch.arange(40_000, dtype=torch.float32)
    partly = frozen.clone()
    partly[-1] = -step
    moving = torch.full((5_000,), float(step))
    return {"frozen": frozen, "still": frozen + 1, "partly": partly, "moving": moving, "step": step}


@dataclass
class Links:
    """Collects the links of a pipeline's saves.

    Args:
        pipeline: The pipeline.
    """

    pipeline: ckpipe.SyncPipeline
    found: list[FileLinked] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pipeline.events.add(self._add)

    def _add(self, event: Event) -> None:
        if isinstance(event, FileLinked):
            self.found.append(event)

    def of(self, step: int) -> list[int]:
        """Return the steps of the checkpoints to which a save linked, in order."""
        return sorted(step_of(each.source) for each in self.found if each.step == step)


def step_of(key: str) -> int:
    """Return the step of the checkpoint of a data file."""
    return int(key.removeprefix("step-").partition(".")[0])


@dataclass
class Store:
    """A store behind a URL of its own, which fails at chosen operations.

    Args:
        url: The URL.
        faulty: The store, for as long as one pipeline has it open.
        inner: The store itself.
        root: Its directory, unless it lies in memory.
    """

    url: str
    faulty: FaultyBackend
    inner: Backend
    root: Path | None

    @property
    def directory(self) -> Path:
        """Its directory."""
        assert self.root is not None
        return self.root

    def opened(self, **settings: Any) -> SettlingPipeline:
        """Make a pipeline on it."""
        return SettlingPipeline(self.url, **SETTINGS | settings)

    def links_tried(self) -> int:
        """Return the number of calls of ``link``."""
        return sum(each.verb == "link" for each in self.faulty.operations)

    def reads_from(self, step: int) -> int:
        """Return the number of reads of data files of a checkpoint."""
        return sum(
            each.verb == "read_into" and step_of(each.key) == step
            for each in self.faulty.operations
        )

    def stored(self) -> list[str]:
        """List the keys of all checkpoints' objects."""

        async def listed() -> list[str]:
            # Leaving the store itself would close it for the pipeline.
            inner = self.inner if self.root is None else LocalBackend(str(self.root))
            async with inner:
                return [each.key async for each in inner.list() if each.key.startswith("step-")]

        return asyncio.run(listed())


def in_memory() -> Store:
    """Make a store in memory."""
    scheme = f"links{next(_numbers)}"
    return _made(scheme, MemoryBackend(f"memory://{scheme}"), None)


def on_disk(root: Path) -> Store:
    """Make a store of real files."""
    return _made(f"links{next(_numbers)}", LocalBackend(str(root)), root)


def _made(scheme: str, inner: Backend, root: Path | None) -> Store:
    faulty = FaultyBackend(inner)
    ckpipe.register_backend(scheme, lambda url: faulty)
    return Store(f"{scheme}://store", faulty, inner, root)


def save(pipeline: ckpipe.SyncPipeline, *steps: int) -> None:
    """Save steps one after the other, until nothing of them is under way."""
    for step in steps:
        pipeline.save(state_of(step), step=step).wait()
        settle(pipeline)


def check_whole(store: Store, *steps: int) -> None:
    """Check that just these checkpoints are complete and right, and that nothing else is there."""
    store.faulty.heal()
    with store.opened() as pipeline:
        complete = checked_whole(pipeline, state_of)
    assert [info.step for info in complete] == list(steps)
    names = {info.id for info in complete}
    assert {key.partition("/")[0].removesuffix(".json") for key in store.stored()} <= names


def check_apart(store: Store, step: int) -> None:
    """Check that a checkpoint loads to the bit after all others were deleted."""
    with store.opened() as pipeline:
        for info in pipeline.steps():
            if info.step != step:
                pipeline.delete(info.id, force=True)
    check_whole(store, step)


def run_some(case: dict[str, Any]) -> None:
    """Go on from the newest checkpoint for some saves; note what is linked and committed.

    Args:
        case: That of :func:`mortal_backend`; ``saves`` is their number. With ``aged``, all that is
            there before the last save becomes as many days old.
    """
    mortal_backend(case)
    root, settings = case["root"], SETTINGS | {"keep_last": case.get("keep_last")}
    with contextlib.ExitStack() as stack:
        pipeline = stack.enter_context(SettlingPipeline(URL, **settings))
        links = Links(pipeline)
        loaded = pipeline.load()
        first = 1 if loaded is None else loaded.step + 1
        assert loaded is None or same(loaded.state, state_of(loaded.step))
        for step in range(first, first + case["saves"]):
            if "aged" in case and step == first + case["saves"] - 1:
                age(Path(root), case["aged"])
            save(pipeline, step)
            note(root, f"committed {step}")
            for source in links.of(step):
                note(root, f"linked {step} {source}")


def _live(case: dict[str, Any], rank: int, number: int) -> None:
    run_some(case)


if __name__ == "__main__":
    serve(_live)
