"""ckpipe on Google Cloud Storage against the bare requests of its own client.

    python benchmarks/stores_gcs.py [--mib 512] [--rounds 5] [--json FILE]
    python benchmarks/stores_gcs.py --url gs://bucket/bench

Without a URL it starts servers on this machine. Each of the two emulators does the work in which it
is faster: that of our tests takes saves, fake-gcs-server serves loads. The measures are those of
`stores.py` on S3: a save is compared with the same bytes sent as parts by one request each and
composed by one, and a load with the same bytes read in ranges, with the same client, part size and
lanes.
"""

from __future__ import annotations

import argparse
import json
import secrets
import tempfile
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import anyio
import raw
import torch
from stores import LANES, OBJECT, PART, READ_LANES, Costs, Plan, cost, in_lanes, peak_bytes, report

import ckpipe
from ckpipe_gcs import GcsBackend
from ckpipe_gcs.resources import json_body, related
from ckpipe_gcs.uploads import MAX_SOURCES
from ckpipe_http.requests import MemoryBody

# isort: split
# Importing `stores` has made the servers of the tests importable.
from tests.support import gcs_servers

REMOVE_LANES = 16
BOTH = ("save", "load")


class Bare:
    """The requests that a save and a load need at least.

    Args:
        store: Sends the requests.
        data: The bytes of the object, and the memory for reads; at most 32 parts.
    """

    def __init__(self, store: GcsBackend, data: memoryview) -> None:
        if len(data) > MAX_SOURCES * PART:
            raise SystemExit(f"Measure at most {MAX_SOURCES * PART // raw.MIB} MiB")
        self._store, self._data = store, data
        self._name = store.prefix + OBJECT

    async def _send(self, method: str, url: Any, body: MemoryBody | None = None) -> None:
        async with self._store.answer(method, url, body=body) as answer:
            await answer.read()

    async def write(self) -> None:
        """Send the object in parts, compose them, and delete the parts."""
        token, offsets = secrets.token_hex(4), range(0, len(self._data), PART)
        names = {offset: f"{self._name}.{token}.{offset}" for offset in offsets}

        async def send(offset: int) -> None:
            url = self._store.upload_url("multipart", names[offset])
            await self._send("POST", url, related({}, self._data[offset : offset + PART]))

        async def remove(offset: int) -> None:
            await self._send("DELETE", self._store.object_url(names[offset]))

        await in_lanes(LANES, offsets, send)
        sources = {"sourceObjects": [{"name": names[offset]} for offset in offsets]}
        url = self._store.object_url(self._name, "/compose")
        await self._send("POST", url, json_body(sources))
        await in_lanes(REMOVE_LANES, offsets, remove)

    async def read(self) -> None:
        """Read the object in ranges."""
        url = self._store.object_url(self._name, alt="media")

        async def fetch(offset: int) -> None:
            end = min(offset + PART, len(self._data))
            span = {"Range": f"bytes={offset}-{end - 1}"}
            async with self._store.answer("GET", url, headers=span) as answer:
                async for piece in answer.content.iter_any():
                    self._data[offset : offset + len(piece)] = piece
                    offset += len(piece)

        await in_lanes(READ_LANES, range(0, len(self._data), PART), fetch)

    async def remove(self) -> None:
        """Delete the object."""
        await self._send("DELETE", self._store.object_url(self._name))


async def measure(
    url: str, options: dict[str, Any], plan: Plan, things: Collection[str]
) -> tuple[Costs, float]:
    """Measure saves and loads, bare and by ckpipe, and the MiB that ckpipe takes.

    Args:
        url: The URL of the root.
        options: The options of the backend.
        plan: The size and the number of rounds.
        things: ``"save"``, ``"load"`` or both. A load reads the save of the first round.
    """
    costs: Costs = defaultdict(list)
    tensors = [torch.randn(8, raw.MIB // 4) for _ in range(plan.mib // 8)]
    state = {f"layer.{number}": tensor for number, tensor in enumerate(tensors)}
    memory = memoryview(raw.touched(plan.mib * raw.MIB))[: plan.mib * raw.MIB]
    endpoint = options.get("endpoint_url")
    async with (
        GcsBackend(
            url, endpoint_url=endpoint, anonymous=endpoint is not None, request_timeout=600.0
        ) as store,
        ckpipe.Pipeline(f"{url}/ours", backends={"gs": options}, **plan.fields) as pipeline,
    ):
        bare = Bare(store, memory)

        async def save() -> None:
            await pipeline.save(state, until="committed")

        async def load() -> None:
            await pipeline.load(state)

        most = await peak_bytes(save)
        arena = pipeline._engine.context.arena
        memory_mib = (most - arena.blocks * arena.block_bytes) / raw.MIB
        await bare.write()
        works = {"save": ("bare write", bare.write, save), "load": ("bare read", bare.read, load)}
        for turn in range(-1, plan.rounds):
            into: Costs = costs if turn >= 0 else defaultdict(list)
            for thing in things:
                name, bare_work, ours = works[thing]
                if thing == "save":
                    await bare.remove()
                into[name].append(await cost(bare_work))
                into[thing].append(await cost(ours))
            if "save" in things:  # the newest may have been loaded, and must stay
                for info in (await pipeline.steps())[:-1]:
                    await pipeline.delete(info.id, force=True)
    return costs, memory_mib


def measure_here(plan: Plan) -> tuple[Costs, float]:
    """Start servers on this machine, and measure."""
    gcs_servers.set_up_process()
    costs: Costs = {}
    memory: list[float] = []
    servers = {"save": gcs_servers.emulator, "load": gcs_servers.fake_gcs}
    with tempfile.TemporaryDirectory(prefix="ckpipe-bench-", dir=Path.cwd()) as folder:
        for thing, server in servers.items():
            with server(Path(folder)) as gcs:
                gcs.make_bucket("bench")
                options = {"endpoint_url": gcs.url, "anonymous": True}
                found, most = anyio.run(measure, "gs://bench/run", options, plan, [thing])
                costs |= found
                memory.append(most)
    return costs, max(memory)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", help="gs://bucket/prefix to measure; else servers are started")
    parser.add_argument("--mib", type=int, default=512, help="size of the state, at most 512")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", help="the pipeline's setting of this name")
    parser.add_argument("--json", type=Path, default=None)
    asked = parser.parse_args()
    fields = {"worker": asked.worker} if asked.worker else {}
    plan = Plan(asked.mib, asked.rounds, False, (), fields)
    url = asked.url
    measured = anyio.run(measure, url, {}, plan, BOTH) if url else measure_here(plan)
    results = report(*measured, plan)
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
