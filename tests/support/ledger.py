"""What pipelines ask of a store, kept as text: which calls, on which keys, with which answers.

The ledgers lie in ``data/ledger``. ``CKPIPE_TEST_REGENERATE=1`` writes them anew.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import math
import os
import re
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

import ckpipe
from ckpipe import SyncPipeline
from ckpipe.backend import Children, ObjectInfo, PutMode, Upload
from ckpipe.events import Event, SaveEnded
from ckpipe.testing import MemoryBackend
from tests.support.rank_pipelines import open_rank

DATA = Path(__file__).parents[1] / "data" / "ledger"
REGENERATE = bool(os.environ.get("CKPIPE_TEST_REGENERATE"))

_numbers = itertools.count()
_NAMES = [
    (re.compile(r"\d{8}T\d{9}Z-before"), "BEFORE"),
    (re.compile(r"\d{8}T\d{9}Z-run"), "RUN"),
    (re.compile(r"(?<=\.ckpipe/leases/)(.*?/)[0-9a-f]{16}(?=\.)"), r"\1HOLDER"),
]
"""What is different in every run, and the name that ledgers have for it."""


@dataclass
class Call:
    """One call of a method of a backend; a deletion of several objects is one for each.

    Attributes:
        part: The part of the scenario in which it was begun.
        rank: The rank that made it.
        key: The key or prefix that it was about, with what differs between runs normalised.
        text: The method and what it was given.
        offset: Where in the object a range lies.
        began: Its place in the order of all beginnings and ends.
        ended: The place of its end; infinite until then.
        answer: The error that it raised, if any.
    """

    part: str
    rank: int
    key: str
    text: str
    offset: int
    began: int
    ended: float = math.inf
    answer: str = ""

    def __str__(self) -> str:
        answer = f" -> {self.answer}" if self.answer else ""
        return f"{self.rank} {self.key or '(root)'}: {self.text}{answer}"


class Ledger:
    """A store in memory, behind a URL for each rank, that writes down all that is asked of it."""

    def __init__(self) -> None:
        self._scheme = f"ledger{next(_numbers)}"
        self._ticks = itertools.count()
        self._lock = threading.Condition()
        self._part = ""
        self.calls: list[Call] = []
        ckpipe.register_backend(self._scheme, self._backend)

    def url(self, rank: int = 0) -> str:
        """The store as one rank calls it."""
        return f"{self._scheme}://store/{rank}"

    def _backend(self, url: str) -> Recording:
        return Recording(self, int(url.rpartition("/")[2]), f"memory://{self._scheme}")

    def begin(self, part: str) -> None:
        """Begin a part of the scenario."""
        with self._lock:
            self._part = part

    @contextmanager
    def call(self, rank: int, keys: Iterable[str], text: str, offset: int = 0) -> Iterator[None]:
        """Write down a call, which lasts as long as the context."""
        with self._lock:
            now = next(self._ticks)
            made = [Call(self._part, rank, _named(key), text, offset, now) for key in keys]
            self.calls += made
        answer = ""
        try:
            yield
        except BaseException as error:
            answer = type(error).__name__
            raise
        finally:
            with self._lock:
                now = next(self._ticks)
                for each in made:
                    each.ended, each.answer = now, answer
                self._lock.notify_all()

    def wait_for(self, kind: str, count: int) -> None:
        """Wait until so many calls of a kind have ended, which nothing else waits for."""

        def have_ended() -> bool:
            ended = [call for call in self.calls if call.ended < math.inf]
            return sum(bool(re.search(kind, str(call))) for call in ended) >= count

        with self._lock:
            assert self._lock.wait_for(have_ended, 60), f"not {count} calls are like {kind!r}"

    def text(self, *parts: str) -> str:
        """The calls of some parts, sorted by rank and key.

        Calls on one key stand in their order, and ranges of one object by offset: lanes write and
        read them in any order.
        """
        lines = []
        for part in parts:
            found = [call for call in self.calls if call.part == part]
            found.sort(key=lambda call: (call.rank, call.key))
            lines.append(f"[{part}]")
            for (_, _, ranged), group in itertools.groupby(found, _range_of):
                same = list(group)
                lines += map(str, sorted(same, key=lambda call: call.offset) if ranged else same)
            lines.append("")
        return "\n".join(lines)

    def check(self, name: str, *parts: str) -> None:
        """Compare some parts with the ledger of this name, or write it."""
        path, text = DATA / f"{name}.txt", self.text(*parts)
        if REGENERATE:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        kept = path.read_text().splitlines()
        changes = "\n".join(difflib.unified_diff(kept, text.splitlines(), path.name, "now", n=1))
        assert not changes, f"CKPIPE_TEST_REGENERATE=1 writes it anew:\n{changes}"

    def check_order(self, *kinds: str, part: str = "") -> None:
        """Check that all calls of a kind have ended before any of the next kind begins.

        Args:
            kinds: Patterns of lines.
            part: The part in which; empty for all of them.
        """
        found = []
        for kind in kinds:
            calls = [each for each in self.calls if part in ("", each.part)]
            calls = [each for each in calls if re.search(kind, str(each))]
            assert calls, f"no call is like {kind!r}"
            found.append(calls)
        for earlier, later in itertools.pairwise(found):
            last = max(earlier, key=lambda call: call.ended)
            first = min(later, key=lambda call: call.began)
            assert last.ended < first.began, f"{first} began before {last} had ended"


def _named(key: str) -> str:
    for pattern, name in _NAMES:
        key = pattern.sub(name, key)
    return key


def _range_of(call: Call) -> tuple[int, str, bool]:
    return call.rank, call.key, call.text.startswith(("write", "read_into"))


class Recording(MemoryBackend):
    """A store in memory that writes down what one rank asks of it.

    Args:
        ledger: Where it is written down.
        rank: The rank.
        url: The URL of the store in memory.
    """

    def __init__(self, ledger: Ledger, rank: int, url: str) -> None:
        super().__init__(url)
        self._ledger, self._rank = ledger, rank

    def _call(self, text: str, *keys: str, offset: int = 0) -> AbstractContextManager[None]:
        return self._ledger.call(self._rank, keys, text, offset)

    async def put(self, key: str, data: bytes, mode: PutMode) -> None:
        with self._call(f"put {mode.name}", key):
            await super().put(key, data, mode)

    async def put_volatile(self, key: str, data: bytes) -> None:
        with self._call("put_volatile", key):
            await super().put(key, data, PutMode.CREATE)

    async def link(self, source: str, target: str) -> None:
        with self._call("link", source, target):
            await super().link(source, target)

    async def open_upload(self, key: str, *, size: int, block_bytes: int) -> Upload:
        with self._call(f"open_upload of {size} bytes in blocks of {block_bytes}", key):
            upload = await super().open_upload(key, size=size, block_bytes=block_bytes)
        return RecordingUpload(self._ledger, self._rank, key, upload)

    async def get(self, key: str, *, max_bytes: int) -> bytes:
        with self._call("get", key):
            return await super().get(key, max_bytes=max_bytes)

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        with self._call(f"read_into {len(buffer)} bytes at {offset}", key, offset=offset):
            await super().read_into(key, offset, buffer)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        with self._call("list", prefix):
            found = [each async for each in super().list(prefix)]
        for each in found:
            yield each

    async def children(self, prefix: str = "") -> Children:
        with self._call("children", prefix):
            # The default goes through list, which is no request of its own here.
            found = [each async for each in MemoryBackend.list(self, prefix)]
        heads = {each.key: each.key[len(prefix) :].partition("/") for each in found}
        return Children(
            tuple(each for each in found if not heads[each.key][1]),
            tuple(sorted({f"{prefix}{head}/" for head, slash, _ in heads.values() if slash})),
        )

    async def stat(self, key: str) -> ObjectInfo:
        with self._call("stat", key):
            return await super().stat(key)

    async def delete(self, keys: Iterable[str]) -> None:
        known = tuple(keys)
        with self._call(f"delete, {len(known)} in one call", *known):
            await super().delete(known)

    async def remove_stale_uploads(self, prefix: str, *, before: datetime) -> int:
        with self._call("remove_stale_uploads", prefix):
            return await super().remove_stale_uploads(prefix, before=before)


class RecordingUpload(Upload):
    """An upload whose calls are written down."""

    def __init__(self, ledger: Ledger, rank: int, key: str, inner: Upload) -> None:
        self._ledger, self._rank, self._key, self._inner = ledger, rank, key, inner

    async def write(self, offset: int, data: memoryview) -> None:
        text = f"write {len(data)} bytes at {offset}"
        with self._ledger.call(self._rank, [self._key], text, offset):
            await self._inner.write(offset, data)

    async def complete(self) -> None:
        with self._ledger.call(self._rank, [self._key], "complete"):
            await self._inner.complete()

    async def abort(self) -> None:
        with self._ledger.call(self._rank, [self._key], "abort"):
            await self._inner.abort()


SETTINGS: dict[str, Any] = {
    "staging": {"block_bytes": 65536},
    "plan": {"replicated": ["model.*"]},
    "attempt_id": "run",
}


def state(rank: int, seed: int) -> dict[str, Any]:
    """A state with replicas of several blocks, a tensor of the rank's own, and values."""
    weight = torch.arange(120_000.0).view(300, 400) + seed
    return {
        "model": {"weight": weight, "bias": torch.arange(7.0)},
        "mine": torch.full((1000,), rank + seed, dtype=torch.int16),
        "epoch": seed,
    }


@contextlib.contextmanager
def opened(ledger: Ledger, world_size: int, **fields: Any) -> Iterator[list[SyncPipeline]]:
    """Open a pipeline for each rank, one after the other."""
    with contextlib.ExitStack() as stack:
        pipelines = []
        for rank in range(world_size):
            made = open_rank(ledger.url(rank), rank, world_size, **SETTINGS | fields)
            stack.push(made)
            pipelines.append(made)
        yield pipelines


def save(pipeline: SyncPipeline, state: Any, step: int) -> None:
    """Save a state and wait until nothing more happens to the save."""
    ended = threading.Event()

    def listen(event: Event) -> None:
        if isinstance(event, SaveEnded) and event.step == step:
            ended.set()

    pipeline.events.add(listen)
    pipeline.save(state, step=step, metrics={"loss": step / 4}).wait()
    assert ended.wait(60)
    pipeline.events.remove(listen)


def save_each(ledger: Ledger, pipelines: list[SyncPipeline], step: int, *, first: bool) -> None:
    """Save a step by each rank, one after the other.

    Args:
        ledger: The store.
        pipelines: The ranks.
        step: The step; that of number 3 has more tensors than others.
        first: Whether this launch has saved nothing yet.
    """
    for rank, pipeline in enumerate(pipelines):
        more = {"more": torch.full((50_000,), float(rank))} if step == 3 else {}
        save(pipeline, state(rank, step) | more, step)
    if not first:
        # Ranks that did not see the previous checkpoint complete look for it beside the save.
        previous = rf"step-0*{step - 1}\.\w+\.0"
        ledger.wait_for(rf"\d {previous}\.json: stat$", len(pipelines) - 1)
        ledger.wait_for(rf"deleted/{previous}: stat -> ", len(pipelines) - 1)


def prepare(ledger: Ledger, world_size: int, steps: int) -> None:
    """Have an earlier launch save some steps."""
    ledger.begin("before")
    with opened(ledger, world_size, attempt_id="before") as pipelines:
        for step in range(1, steps + 1):
            save_each(ledger, pipelines, step, first=step == 1)
