"""The command ``bench``: measure the limits of this machine and a store, and propose settings.

It measures the elements of a save: copies into host memory, checksums, and writes and reads of
large objects through a backend, in lanes of blocks. No pipeline is involved, so the figures are
limits and not results.
"""

from __future__ import annotations

import json
import mmap
import secrets
import shutil
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
import anyio.to_thread
import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import RenderableType
from rich.text import Text

from ckpipe.backend import Backend, PutMode
from ckpipe.catalog.copy import aborted_on_error
from ckpipe.cli.running import OK, Url, serve
from ckpipe.cli.screen import Meter, Screen, table
from ckpipe.errors import UsageError
from ckpipe.format.checksum import crc32c
from ckpipe.format.names import BENCH
from ckpipe.settings import Size
from ckpipe.store.registry import Access, open_store, scheme_of
from ckpipe.threads import run_lanes
from ckpipe.types import size_text


def bench(
    ctx: typer.Context,
    url: Url,
    lanes: Annotated[str, typer.Option(help="Numbers of lanes to try.")] = "1,4,8",
    blocks: Annotated[str, typer.Option(help="Sizes of blocks to try.")] = "4MiB,16MiB",
    object_size: Annotated[
        str, typer.Option("--size", help="The size of the object for each combination.")
    ] = "256MiB",
) -> None:
    """Measure the limits of this machine and a store, and propose settings.

    It writes and reads an object for each number of lanes and size of blocks, and removes it.
    """

    async def work(screen: Screen) -> int:
        tried = (
            _values(lanes, int, "--lanes is a list of numbers such as 1,4,8"),
            _values(blocks, Size, "--blocks is a size such as 16MiB"),
        )
        nbytes, *_ = _values(object_size, Size, "--size is a size such as 16MiB")
        await anyio.to_thread.run_sync(_check_sizes, url, *tried, nbytes)
        with screen.meter("measuring") as meter:
            meter.expect(2 * nbytes * (len(tried[0]) * len(tried[1]) + 1))
            async with open_store(url, screen.settings, Access.CREATE) as backend:
                found = await measure(backend, *tried, nbytes, meter)
        advice = advise(found)
        screen.result(
            {"url": url, **asdict(found), "advice": asdict(advice)},
            *_shown(found, advice),
        )
        return OK

    serve(ctx, work)


def _values(text: str, kind: Any, meaning: str) -> list[int]:
    try:
        found = [TypeAdapter(kind).validate_python(each.strip()) for each in text.split(",")]
    except ValidationError:
        raise UsageError(f"{meaning}, not {text!r}") from None
    return list(dict.fromkeys(found))


def _check_sizes(url: str, lanes: Sequence[int], blocks: Sequence[int], nbytes: int) -> None:
    """Refuse sizes that measure nothing, or that do not fit into memory or on the disk; block."""
    from ckpipe.save.memory import available_bytes  # needs torch

    if min([*lanes, *blocks, nbytes], default=0) < 1:
        raise UsageError("Lanes, blocks and objects have a size of at least 1")
    most = max(lanes) * max(blocks)
    memory = available_bytes()
    if most > memory:
        raise UsageError(
            f"{max(lanes)} lanes with blocks of {_setting(max(blocks))} need {size_text(most)} of "
            f"memory, and {size_text(memory)} are free",
            hint="Try fewer lanes with --lanes, or smaller blocks with --blocks",
        )
    least = max(most, _LEAST_BYTES)
    if nbytes < least:
        raise UsageError(
            f"An object of {size_text(nbytes)} measures nothing: {max(lanes)} lanes with blocks of "
            f"{_setting(max(blocks))} need one of {_setting(least)}",
            hint=f"Write --size {-(-least >> 20)}MiB or more, of the size of your checkpoints",
        )
    if scheme_of(url) == "file":
        folder = Path(url.removeprefix("file://")).absolute()
        there = next(each for each in (folder, *folder.parents) if each.exists())
        free = shutil.disk_usage(there).free
        if nbytes > free:
            raise UsageError(
                f"An object of {size_text(nbytes)} does not fit on the disk of {there}, which has "
                f"{size_text(free)} free",
                hint="Write a smaller --size, or name a root on another disk",
            )


def _gigabytes(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s"


def _setting(nbytes: int) -> str:
    """Write a size in the form of a setting, exact to the byte."""
    return f"{nbytes} B" if nbytes % (1 << 20) else f"{nbytes >> 20} MiB"


def _shown(found: Measurements, advice: Advice) -> Iterator[RenderableType]:
    yield Text(
        f"copy {_gigabytes(found.copy)}, checksum {_gigabytes(found.checksum)} "
        f"on one thread; a small object takes {found.put_seconds * 1000:.1f} ms"
    )
    rows = [
        (rate.lanes, _setting(rate.block_bytes), _gigabytes(rate.write), _gigabytes(rate.read))
        for rate in found.rates
    ]
    headings = ("lanes", "block", "write", "read")
    yield table(headings, rows, *headings)
    beside = _gigabytes(found.write_beside)
    yield Text(f"beside a thread of pure Python: {beside} written from a thread")
    groups: dict[str, dict[str, int | str]] = {
        "upload": {"lanes": advice.upload_lanes},
        "load": {"lanes": advice.load_lanes},
        "staging": {"block_bytes": _setting(advice.block_bytes)},
    }
    keywords = ", ".join(f"{name}={json.dumps(group)}" for name, group in groups.items())
    tables = "".join(
        f"\n[{group}]\n{name} = {json.dumps(value)}\n"
        for group, members in groups.items()
        for name, value in members.items()
    )
    yield Text(
        f"{advice.bottleneck}.\n\nKeywords of a pipeline:\n\n"
        f'{keywords}, worker="{advice.worker}"\n\n'
        f'Or a file of settings, in TOML:\n\nworker = "{advice.worker}"\n{tables}'.rstrip()
    )


_LEAST_BYTES = 32 << 20
"""The least object to measure: of a smaller one the start and end take most of the time."""

_SMALL_PUTS = 9
_MEMORY_BYTES = 64 << 20
_TRIES = 5
_GOOD_ENOUGH, _FAST_ENOUGH = 0.95, 0.7


@dataclass(frozen=True, slots=True)
class Rate:
    """The rates of writing and reading objects with one number of lanes and size of blocks.

    Args:
        lanes: The number of blocks transferred at a time.
        block_bytes: The size of a block in bytes.
        write: Bytes a second that became durable.
        read: Bytes a second that were read.
    """

    lanes: int
    block_bytes: int
    write: float
    read: float


@dataclass(frozen=True, slots=True)
class Measurements:
    """The results of a measurement.

    Args:
        copy: Bytes a second that one thread copies within host memory.
        checksum: Bytes a second that one thread checksums.
        put_seconds: The median time of creating an object of a hundred bytes.
        rates: The rates of the store, for each number of lanes and size of blocks.
        write_beside: Bytes a second that are written with the proposed lanes and blocks beside a
            thread of Python that never waits.
    """

    copy: float
    checksum: float
    put_seconds: float
    rates: tuple[Rate, ...]
    write_beside: float


@dataclass(frozen=True, slots=True)
class Advice:
    """Settings to use, derived from measurements.

    Args:
        upload_lanes: ``upload.lanes``: the fewest that write nearly as fast as any.
        load_lanes: ``load.lanes``: the fewest that read nearly as fast as any.
        block_bytes: ``staging.block_bytes``: the smallest blocks that reach these rates.
        worker: ``worker``: a process if a trainer in pure Python would slow down writes.
        bottleneck: The bottleneck of a save, as a sentence.
    """

    upload_lanes: int
    load_lanes: int
    block_bytes: int
    worker: Literal["thread", "process"]
    bottleneck: str


def advise(found: Measurements) -> Advice:
    """Derive settings from measurements. Pure.

    Settings within five percent of the best count as equally good. Of those the smallest are
    taken, since lanes and blocks cost host memory.

    Args:
        found: The measurements, with at least one rate.
    """
    writing = _smallest(found.rates, lambda rate: rate.write)
    same_blocks = [rate for rate in found.rates if rate.block_bytes == writing.block_bytes]
    reading = _smallest(same_blocks, lambda rate: rate.read)
    parts = {
        "the copy into host memory": found.copy,
        "checksums": found.checksum,
        "writes to the store": writing.write,
    }
    slowest = min(parts, key=lambda name: parts[name])
    return Advice(
        writing.lanes,
        reading.lanes,
        writing.block_bytes,
        "thread" if found.write_beside >= _FAST_ENOUGH * writing.write else "process",
        f"A save will wait for {slowest} ({_gigabytes(parts[slowest])})",
    )


def _smallest(rates: Sequence[Rate], speed: Callable[[Rate], float]) -> Rate:
    best = max(map(speed, rates))
    good = [rate for rate in rates if speed(rate) >= _GOOD_ENOUGH * best]
    return min(good, key=lambda rate: (rate.lanes * rate.block_bytes, rate.lanes))


async def measure(
    backend: Backend,
    lanes: Sequence[int],
    block_bytes: Sequence[int],
    object_bytes: int,
    meter: Meter,
) -> Measurements:
    """Measure this machine and a store, and remove the objects that were written.

    Args:
        backend: The store, open for writing.
        lanes: Numbers of lanes to try.
        block_bytes: Sizes of blocks to try, in bytes.
        object_bytes: The size of the object that is written and read for each, in bytes.
        meter: Shows the progress.

    Raises:
        UsageError: If the store cannot have such blocks.
        StoreError: If the store failed.
    """
    least = backend.limits.min_block_bytes
    if min(block_bytes) < least:
        raise UsageError(
            f"The store takes no blocks smaller than {least} bytes", hint="Try larger blocks"
        )
    copy, checksum = await anyio.to_thread.run_sync(measure_memory)
    below = f"{BENCH}{secrets.token_hex(8)}/"
    try:
        put_seconds = await _put_seconds(backend, below)
        rates = [
            await _rate(backend, f"{below}{count}-{block}", count, block, object_bytes, meter)
            for block, count in product(block_bytes, lanes)
        ]
        best = _smallest(rates, lambda rate: rate.write)
        with python_bound_thread():
            beside = await _rate(
                backend, f"{below}beside", best.lanes, best.block_bytes, object_bytes, meter
            )
    finally:
        with anyio.CancelScope(shield=True):
            await backend.delete([each.key async for each in backend.list(below)])
    return Measurements(copy, checksum, put_seconds, tuple(rates), beside.write)


@contextmanager
def python_bound_thread() -> Iterator[None]:
    """Run a thread that holds the GIL whenever it can, as a trainer may do."""
    over = threading.Event()

    def spin() -> None:
        total = 0
        while not over.is_set():
            for number in range(10_000):
                total += number

    thread = threading.Thread(target=spin, name="ckpipe bench", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def measure_memory() -> tuple[float, float]:
    """Measure the rates of a copy in host memory and of a checksum, on one thread; block."""
    memory = bytearray(secrets.token_bytes(_MEMORY_BYTES))
    import torch  # takes seconds, and the help of the command must not wait for it

    source, view = torch.frombuffer(memory, dtype=torch.uint8), memoryview(memory)
    target = torch.ones(_MEMORY_BYTES, dtype=torch.uint8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        copy = min(_timed(lambda: target.copy_(source)) for _ in range(_TRIES))
    finally:
        torch.set_num_threads(threads)
    checksum = min(_timed(lambda: crc32c(view)) for _ in range(_TRIES))
    return _MEMORY_BYTES / copy, _MEMORY_BYTES / checksum


def _timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


async def _put_seconds(backend: Backend, below: str) -> float:
    times, keys = [], []
    for number in range(_SMALL_PUTS):
        keys.append(f"{below}small-{number}")
        began = time.perf_counter()
        await backend.put(keys[-1], bytes(100), PutMode.CREATE)
        times.append(time.perf_counter() - began)
    # At once, so that none is left if the process is ended while it measures large objects.
    await backend.delete(keys)
    return statistics.median(times)


async def _rate(
    backend: Backend, key: str, lanes: int, block_bytes: int, size: int, meter: Meter
) -> Rate:
    # Page-aligned memory with bytes that no store can compress.
    buffers = [memoryview(mmap.mmap(-1, min(block_bytes, size))) for _ in range(lanes)]
    for buffer in buffers:
        buffer[:] = secrets.token_bytes(len(buffer))

    async def in_lanes(use: Callable[[int, memoryview], Awaitable[None]]) -> float:
        offsets, free = iter(range(0, size, block_bytes)), iter(buffers)

        async def lane() -> None:
            buffer = next(free)
            for offset in offsets:
                block = buffer[: min(block_bytes, size - offset)]
                await use(offset, block)
                meter.advance(len(block))

        await run_lanes(lanes, lane)
        return time.perf_counter()

    upload = await backend.open_upload(key, size=size, block_bytes=block_bytes)
    began = time.perf_counter()
    async with aborted_on_error(upload):
        await in_lanes(upload.write)
        await upload.complete()
    written = time.perf_counter()
    ended = await in_lanes(partial(backend.read_into, key))
    await backend.delete([key])
    return Rate(lanes, block_bytes, size / (written - began), size / (ended - written))
