"""ckpipe on S3 against the bare requests of its own client, interleaved in one run.

    python benchmarks/stores.py [--mib 1024] [--rounds 5] [--json FILE]
    python benchmarks/stores.py --url s3://bucket/bench --endpoint-url http://127.0.0.1:8333

Without a URL it starts SeaweedFS on this machine. A save, from the call until it is committed, is
measured against the same bytes sent as the parts of one upload, from memory that is there already,
with the same client, part size and lanes and no checksums; a load of it in place against the same
bytes read in ranges into memory that nobody looks at. What is deleted is deleted outside of the
clock. Every round measures each thing once; ratios are medians of each round's ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import raw
import torch

import ckpipe
from ckpipe_s3.address import Address, parse_address
from ckpipe_s3.body import MemoryBody
from ckpipe_s3.client import Access, open_client

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import s3_servers

PART = 16 * raw.MIB
LANES, READ_LANES = 4, 6  # ckpipe's own defaults
OBJECT = "bare-object"

Times = dict[str, list[float]]


async def in_lanes(
    lanes: int, pieces: Iterable[int], work: Callable[[int], Awaitable[None]]
) -> None:
    """Does a piece of work after the other in each of so many lanes."""
    waiting = iter(pieces)

    async def lane() -> None:
        for piece in waiting:
            await work(piece)

    async with anyio.create_task_group() as tasks:
        for _ in range(lanes):
            tasks.start_soon(lane)


class Bare:
    """The requests that a save and a load cannot do without, and nothing else.

    Args:
        client: The client.
        address: Where.
        data: The bytes of the object, and where they are read into.
    """

    def __init__(self, client: Any, address: Address, data: memoryview) -> None:
        self._client, self._data = client, data
        self._where = {"Bucket": address.bucket, "Key": address.prefix + OBJECT}

    async def write(self) -> None:
        """Sends the object in parts."""
        begun = await self._client.create_multipart_upload(**self._where)
        upload = {**self._where, "UploadId": begun["UploadId"]}
        parts: dict[int, Any] = {}

        async def send(offset: int) -> None:
            body, number = MemoryBody(self._data[offset : offset + PART]), offset // PART + 1
            answer = await self._client.upload_part(**upload, PartNumber=number, Body=body)
            parts[number] = {"PartNumber": number, "ETag": answer["ETag"]}

        await in_lanes(LANES, range(0, len(self._data), PART), send)
        ordered = {"Parts": [parts[number] for number in sorted(parts)]}
        await self._client.complete_multipart_upload(**upload, MultipartUpload=ordered)

    async def read(self) -> None:
        """Reads the object in ranges."""

        async def fetch(offset: int) -> None:
            end = min(offset + PART, len(self._data))
            answer = await self._client.get_object(**self._where, Range=f"bytes={offset}-{end - 1}")
            async for piece in answer["Body"].raw_stream.content.iter_any():
                self._data[offset : offset + len(piece)] = piece
                offset += len(piece)

        await in_lanes(READ_LANES, range(0, len(self._data), PART), fetch)

    async def remove(self) -> None:
        """Deletes the object."""
        await self._client.delete_object(**self._where)


async def timed(work: Callable[[], Awaitable[None]]) -> float:
    """Seconds that some work takes."""
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def measure(url: str, access: Access, mib: int, rounds: int) -> Times:
    """Saves and loads, bare and ours, in turn."""
    times: Times = defaultdict(list)
    tensors = [torch.randn(8, raw.MIB // 4) for _ in range(mib // 8)]
    state = {f"layer.{number}": tensor for number, tensor in enumerate(tensors)}
    memory = raw.touched(mib * raw.MIB)
    options = {"s3": {"endpoint_url": access.endpoint_url, "region": access.region}}
    async with (
        open_client(access) as client,
        ckpipe.Pipeline(f"{url}/ours", backends=options) as pipeline,
    ):
        bare = Bare(client, parse_address(url), memoryview(memory)[: mib * raw.MIB])

        async def save() -> None:
            await pipeline.save(state, until="committed")

        async def load() -> None:
            await pipeline.load(state)

        for turn in range(-1, rounds):
            into: Times = times if turn >= 0 else defaultdict(list)
            into["bare write"].append(await timed(bare.write))
            into["save"].append(await timed(save))
            into["bare read"].append(await timed(bare.read))
            into["load"].append(await timed(load))
            await bare.remove()
            for info in (await pipeline.steps())[:-1]:  # the newest was loaded and may not go
                await pipeline.delete(info.id)
    return times


@contextlib.contextmanager
def store(url: str | None, endpoint: str | None) -> Iterator[tuple[str, str | None]]:
    """The URL and endpoint that were given, or those of a server that is started."""
    if url is not None:
        yield url, endpoint
        return
    s3_servers.set_up_process()
    with (
        tempfile.TemporaryDirectory(prefix="ckpipe-bench-", dir=Path.cwd()) as folder,
        s3_servers.seaweedfs(Path(folder)) as server,
    ):
        server.make_bucket("bench")
        yield "s3://bench/run", server.url


def ratio(times: Times, base: str, name: str) -> float:
    """The median over the rounds of the speed of one thing, as a share of another's."""
    return statistics.median(a / b for a, b in zip(times[base], times[name], strict=True))


def report(times: Times, mib: int) -> dict[str, Any]:
    """Prints the table, and returns what was measured."""
    for name, values in times.items():
        speeds = sorted(mib * raw.MIB / 1e6 / value for value in values)
        print(
            f"{name:12s} median {statistics.median(speeds):7.0f} MB/s   "
            f"({speeds[0]:.0f} to {speeds[-1]:.0f})"
        )
    figures = {
        "save against bare upload_part": ratio(times, "bare write", "save"),
        "load against bare ranged GET": ratio(times, "bare read", "load"),
    }
    for name, value in figures.items():
        print(f"{name:32s} {value:5.2f}   to reach 0.92   {'ok' if value >= 0.92 else 'MISSED'}")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
        "versions": {"ckpipe": ckpipe.__version__, "torch": torch.__version__},
        "mib": mib,
        "seconds": dict(times),
        "figures": figures,
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", help="s3://bucket/prefix to measure; else a server is started")
    parser.add_argument("--endpoint-url", help="of a compatible store")
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    with store(arguments.url, arguments.endpoint_url) as (url, endpoint):
        access = Access(endpoint_url=endpoint)
        times = anyio.run(measure, url, access, arguments.mib, arguments.rounds)
    results = report(times, arguments.mib)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
