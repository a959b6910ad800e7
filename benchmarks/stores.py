"""ckpipe on S3 against the bare requests of its own client, interleaved in one run.

    python benchmarks/stores.py [--mib 1024] [--rounds 5] [--json FILE]
    python benchmarks/stores.py --url s3://bucket/bench --endpoint-url http://127.0.0.1:8333
    python benchmarks/stores.py --beside boto3 obstore sockets    the same bytes by other clients
    python benchmarks/stores.py --trainer [--worker process]    while a thread runs Python
    sudo unshare --net python benchmarks/stores.py --link 1000 …    at the rate of a network link

The other clients come with the extra ``bench``. Without a URL it starts SeaweedFS on this machine.

A save, from the call until the commit, is compared with the same bytes sent as the parts of one
upload, from existing memory, with the same client, part size and lanes, and without checksums. A
load of it in place is compared with the same bytes read in ranges into memory that is not checked.
Deletions do not count. Every round takes each measure once; ratios are medians of each round's
ratio. With a trainer each save is measured twice, alone and while another thread of this process
runs pure Python. CPU time is that of this process, without a worker process. Memory is the memory
that a first save and load, outside of the measured time, add to this process beyond the arena.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import link
import psutil
import raw
import torch
from store_contenders import CONTENDERS, Contender
from store_sockets import Lanes

import ckpipe
from ckpipe_http.requests import MemoryBody
from ckpipe_s3 import S3Backend
from tests.support import s3_servers

PART = 16 * raw.MIB
LANES, READ_LANES = 4, 6  # ckpipe's own defaults
OBJECT = "bare-object"
MEMORY_MIB = 80

FIGURES = {
    "save against bare upload_part": ("bare write", "save", 0.92),
    "load against bare ranged GET": ("bare read", "load", 0.92),
    "save beside a trainer": ("save", "save beside a trainer", 0.85),
    "save against bare, both beside": (
        "bare write beside a trainer",
        "save beside a trainer",
        0.85,
    ),
}
"""The comparisons: a measure, its reference, and the goal as a share of the reference's speed."""


@dataclass(frozen=True)
class Cost:
    """The cost of an action.

    Args:
        seconds: By the clock.
        cpu: Of this process, in seconds.
    """

    seconds: float
    cpu: float


Costs = dict[str, list[Cost]]
Work = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Plan:
    """The extent of the measurement.

    Args:
        mib: Size of the state.
        rounds: The number of rounds.
        trainer: Whether to measure also beside a thread that runs Python.
        beside: Names of other clients.
        fields: Settings of the pipeline.
        link_mbit: The rate of the link to the server; None for the speed of the machine.
    """

    mib: int
    rounds: int
    trainer: bool
    beside: tuple[str, ...]
    fields: dict[str, Any]
    link_mbit: int | None = None


async def in_lanes(
    lanes: int, pieces: Iterable[int], work: Callable[[int], Awaitable[None]]
) -> None:
    """Do work items one after the other in each of several lanes."""
    waiting = iter(pieces)

    async def lane() -> None:
        for piece in waiting:
            await work(piece)

    async with anyio.create_task_group() as tasks:
        for _ in range(lanes):
            tasks.start_soon(lane)


class Bare:
    """The requests that a save and a load need at least.

    Args:
        store: The open store.
        data: The bytes of the object, and the memory for reads.
    """

    def __init__(self, store: S3Backend, data: memoryview) -> None:
        self._client, self._data = store.client, data
        self._where = {"Bucket": store.bucket, "Key": store.prefix + OBJECT}

    async def write(self) -> None:
        """Send the object in parts."""
        begun = await self._client.create_multipart_upload(**self._where)
        upload = {**self._where, "UploadId": begun["UploadId"]}
        parts: dict[int, Any] = {}

        async def send(offset: int) -> None:
            data, number = self._data[offset : offset + PART], offset // PART + 1
            answer = await self._client.upload_part(
                **upload, PartNumber=number, Body=MemoryBody(data), ContentLength=len(data)
            )
            parts[number] = {"PartNumber": number, "ETag": answer["ETag"]}

        await in_lanes(LANES, range(0, len(self._data), PART), send)
        ordered = {"Parts": [parts[number] for number in sorted(parts)]}
        await self._client.complete_multipart_upload(**upload, MultipartUpload=ordered)

    async def read(self) -> None:
        """Read the object in ranges."""

        async def fetch(offset: int) -> None:
            end = min(offset + PART, len(self._data))
            answer = await self._client.get_object(**self._where, Range=f"bytes={offset}-{end - 1}")
            async for piece in answer["Body"].raw_stream.content.iter_any():
                self._data[offset : offset + len(piece)] = piece
                offset += len(piece)

        await in_lanes(READ_LANES, range(0, len(self._data), PART), fetch)

    async def remove(self) -> None:
        """Delete the object."""
        await self._client.delete_object(**self._where)


async def cost(work: Work) -> Cost:
    """Measure the cost of some work."""
    began, cpu = time.perf_counter(), time.process_time()
    await work()
    return Cost(time.perf_counter() - began, time.process_time() - cpu)


@contextlib.contextmanager
def trainer() -> Iterator[None]:
    """Run a thread of pure Python until the end of the block."""
    stop = threading.Event()

    def train() -> None:
        steps = 0
        while not stop.is_set():
            for _ in range(10_000):
                steps += 1

    thread = threading.Thread(target=train, name="trainer")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def other_trainer() -> Iterator[None]:
    """Run a process of pure Python until the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield
    finally:
        process.kill()
        process.communicate()


BESIDE = {"save": trainer, "bare write": other_trainer}
"""The actions that are measured again with a trainer, each with the kind of trainer."""


async def peak_bytes(work: Work) -> int:
    """Measure the peak memory of this process during some work, above its memory before."""
    process = psutil.Process()
    before = most = process.memory_info().rss
    stop = threading.Event()

    def watch() -> None:
        nonlocal most
        while not stop.wait(0.005):
            most = max(most, process.memory_info().rss)

    thread = threading.Thread(target=watch, name="memory")
    thread.start()
    try:
        await work()
    finally:
        stop.set()
        thread.join()
    return most - before


async def measure(url: str, endpoint: str | None, plan: Plan) -> tuple[Costs, float]:
    """Measure saves and loads, bare, by ckpipe and by others, and the MiB that ckpipe takes."""
    costs: Costs = defaultdict(list)
    tensors = [torch.randn(8, raw.MIB // 4) for _ in range(plan.mib // 8)]
    state = {f"layer.{number}": tensor for number, tensor in enumerate(tensors)}
    memory = memoryview(raw.touched(plan.mib * raw.MIB))[: plan.mib * raw.MIB]
    options = {"s3": {"endpoint_url": endpoint}}
    async with (
        S3Backend(url, endpoint_url=endpoint) as bucket,
        ckpipe.Pipeline(f"{url}/ours", backends=options, **plan.fields) as pipeline,
    ):
        bare = Bare(bucket, memory)
        lanes = Lanes(LANES, READ_LANES)
        others = {
            name: CONTENDERS[name](url, endpoint, memory, PART, lanes) for name in plan.beside
        }

        async def save() -> None:
            await pipeline.save(state, until="committed")

        async def load() -> None:
            await pipeline.load(state)

        async def both() -> None:
            await save()
            await load()

        most = await peak_bytes(both)
        arena = pipeline._engine.context.arena
        memory_mib = (most - arena.blocks * arena.block_bytes) / raw.MIB
        for turn in range(-1, plan.rounds):
            into: Costs = costs if turn >= 0 else defaultdict(list)
            for name, work in works(bare, others, save, load, turn).items():
                into[name].append(await cost(work))
                if plan.trainer and name in BESIDE:
                    with BESIDE[name]():
                        into[f"{name} beside a trainer"].append(await cost(work))
            for each in (bare, *others.values()):
                await each.remove()
            for info in (await pipeline.steps())[:-1]:  # the newest was loaded and must stay
                await pipeline.delete(info.id, force=True)
    return costs, memory_mib


def works(
    bare: Contender, others: dict[str, Contender], save: Work, load: Work, turn: int
) -> dict[str, Work]:
    """List the actions of a round, in their order.

    The first action rotates, since the first one after the writes finds the server busy.
    """
    writes = [("bare write", bare.write), ("save", save)]
    writes += [(f"{name} write", each.write) for name, each in others.items()]
    reads = [("bare read", bare.read), ("load", load)]
    reads += [(f"{name} read", each.read) for name, each in others.items()]
    first = turn % len(reads)
    return dict([*writes[first:], *writes[:first], *reads[first:], *reads[:first]])


@contextlib.contextmanager
def store(
    url: str | None, endpoint: str | None, mib: int, mbit: int | None
) -> Iterator[tuple[str, str | None]]:
    """Return the given URL and endpoint, or start a server with room for a number of MiB."""
    if url is not None:
        yield url, endpoint
        return
    if mbit:
        link.up()
    s3_servers.set_up_process()
    with (
        tempfile.TemporaryDirectory(prefix="ckpipe-bench-", dir=Path.cwd()) as folder,
        s3_servers.seaweedfs(Path(folder), volumes=100 + mib // 32) as server,
    ):
        server.make_bucket("bench")
        if mbit:
            link.limit(server.port, mbit)
        yield "s3://bench/run", server.url


def ratio(costs: Costs, base: str, name: str) -> float:
    """Compute the median over the rounds of one speed, as a share of another."""
    pairs = zip(costs[base], costs[name], strict=True)
    return statistics.median(a.seconds / b.seconds for a, b in pairs)


def report(costs: Costs, memory_mib: float, plan: Plan) -> dict[str, Any]:
    """Print the table, and return the results."""
    for name, values in costs.items():
        speeds = sorted(plan.mib * raw.MIB / 1e6 / each.seconds for each in values)
        cpu = statistics.median(each.cpu for each in values) * 1024 / plan.mib
        print(
            f"{name:22s} median {statistics.median(speeds):7.0f} MB/s   "
            f"({speeds[0]:.0f} to {speeds[-1]:.0f})   {cpu:5.2f} CPU s/GiB"
        )
    figures = {}
    for name, (base, ours, reach) in FIGURES.items():
        if ours in costs:
            figures[name] = value = ratio(costs, base, ours)
            met = "ok" if value >= reach else "MISSED"
            print(f"{name:32s} {value:5.2f}   to reach {reach:.2f}   {met}")
    met = "ok" if memory_mib <= MEMORY_MIB else "MISSED"
    print(f"memory above the arena {memory_mib:6.0f} MiB   at most {MEMORY_MIB}   {met}")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
        "versions": {"ckpipe": ckpipe.__version__, "torch": torch.__version__},
        "plan": asdict(plan),
        "costs": {name: [asdict(each) for each in values] for name, values in costs.items()},
        "memory_mib": memory_mib,
        "figures": figures,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", help="s3://bucket/prefix to measure; else a server is started")
    parser.add_argument("--endpoint-url", help="of a compatible store")
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trainer", action="store_true", help="also beside a thread of Python")
    parser.add_argument("--worker", help="the pipeline's setting of this name")
    parser.add_argument("--link", type=int, help="rate of the way to the server, in Mbit/s")
    parser.add_argument("--beside", nargs="*", default=[], choices=sorted(CONTENDERS))
    parser.add_argument("--json", type=Path, default=None)
    asked = parser.parse_args()
    fields = {"worker": asked.worker} if asked.worker else {}
    plan = Plan(asked.mib, asked.rounds, asked.trainer, tuple(asked.beside), fields, asked.link)
    written = asked.mib * (asked.rounds + 3) * (2 + len(asked.beside) + 3 * asked.trainer)
    with store(asked.url, asked.endpoint_url, written, asked.link) as (url, endpoint):
        measured = anyio.run(measure, url, endpoint, plan)
    results = report(*measured, plan)
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
