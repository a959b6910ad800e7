"""Time loads of checkpoints that other programs wrote beside loads of our own, and the peers'.

Each round loads the same tensors in place from every format, in another order, once from the page
cache (warm) and once after the files were dropped from it (cold). Printed are medians of the times
in seconds and of the ratios to our own verified load of the same round; and of the processor time
of warm loads, which other programs on the machine change less, with the ratio to the peer that
reads the same format. Loads named "fresh" make new tensors.

    python benchmarks/foreign.py --folder /tmp/foreign --mib 500 --rounds 15
    python benchmarks/foreign.py --folder /tmp/foreign --mib 20 --tensors 20000 --without DCP
    python benchmarks/foreign.py --folder /tmp/foreign --mib 500 --tensors 60 --one
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median

import safetensors.torch
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

import ckpipe

Tensors = dict[str, torch.Tensor]
PEERS = {
    "safetensors": "safetensors.torch.load_file",
    "safetensors, fresh": "load_file, fresh",
    "torch.save": "torch.load(mmap=True)",
    "DCP": "dcp.load",
}


def cached(place: Path, *, keep: bool) -> None:
    """Drop the files of a place from the page cache, and read them into it again to keep them.

    Pages that a mapped file was read into are small ones, which later reads copy more slowly.
    """
    for file in [each for each in (place, *place.rglob("*")) if each.is_file()]:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while keep and opened.read(1 << 20):
                pass


def copied(target: Tensors, loaded: Tensors) -> None:
    for name, tensor in target.items():
        tensor.copy_(loaded[name])


def loads(
    folder: Path,
    state: Tensors,
    target: Tensors,
    pipeline: ckpipe.SyncPipeline,
    without: list[str],
) -> dict[str, tuple[Callable[[], object], Path]]:
    """Write the state in each format; return for each name the load of it and its place.

    Tensors that the target lacks are left out of the loads.
    """
    ours, bare, st, pt, dcp = (
        folder / each for each in ("ours", "ours.safetensors", "w.safetensors", "w.pt", "dcp")
    )
    pipeline.save(state, step=1).wait()
    (data,) = ours.glob("step-*/*.safetensors")
    shutil.copy(data, bare)
    safetensors.torch.save_file(state, st)
    torch.save(state, pt)
    if "DCP" not in without:
        state_dict_saver.save(state, checkpoint_id=dcp, no_dist=True)
    os.sync()
    include = None if len(target) == len(state) else list(target)

    def source(place: Path, into: Tensors | None = target) -> tuple[Callable[[], object], Path]:
        return lambda: pipeline.load(into, source=place, include=include), place

    def fresh() -> Tensors:
        loaded = safetensors.torch.load_file(st)
        return {name: loaded[name].clone() for name in target}

    found = {
        "ours": (lambda: pipeline.load(target, 1, include=include), ours),
        "ours, unverified": source(bare),
        "safetensors": source(st),
        "safetensors, fresh": source(st, None),
        "torch.save": source(pt),
        "DCP": source(dcp),
        "safetensors.torch.load_file": (
            lambda: copied(target, safetensors.torch.load_file(st)), st),
        "load_file, fresh": (fresh, st),
        "torch.load(mmap=True)": (
            lambda: copied(target, torch.load(pt, mmap=True, weights_only=True)), pt),
        "dcp.load": (
            lambda: state_dict_loader.load(target, checkpoint_id=dcp, no_dist=True), dcp),
    }  # fmt: skip
    left_out = {*without, *(PEERS[each] for each in without)}
    return {name: load for name, load in found.items() if name not in left_out}


def main() -> None:
    """Measure, and print a table."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--mib", type=int, default=500)
    options.add_argument("--tensors", type=int, default=20)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--one", action="store_true", help="load one tensor of all")
    options.add_argument("--without", nargs="*", default=[], choices=list(PEERS))
    given = options.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    shutil.rmtree(given.folder, ignore_errors=True)
    given.folder.mkdir(parents=True)
    size = (given.mib << 18) // given.tensors
    state = {f"layer.{n}.weight": torch.randn(size) for n in range(given.tensors)}
    wanted = list(state)[given.tensors // 2 :][:1] if given.one else list(state)
    target = {name: torch.zeros_like(state[name]) for name in wanted}
    times: dict[tuple[str, str], list[float]] = {}
    with ckpipe.SyncPipeline(given.folder / "ours") as pipeline:
        every = loads(given.folder, state, target, pipeline, given.without)
        for number in range(given.rounds + 1):
            for how in ("warm", "cold"):
                for name in random.Random(number).sample(list(every), len(every)):
                    load, place = every[name]
                    cached(place, keep=how == "warm")
                    began, busy = time.perf_counter(), time.process_time()
                    load()
                    took = {how: time.perf_counter() - began}
                    if how == "warm":
                        took["processor"] = time.process_time() - busy
                    for kind, seconds in took.items() if number else ():  # the first warms up
                        times.setdefault((name, kind), []).append(seconds)
        assert all(torch.equal(each, state[name]) for name, each in target.items())
    report(times, list(every))
    shutil.rmtree(given.folder)


def report(times: dict[tuple[str, str], list[float]], names: list[str]) -> None:
    """Print the table."""

    def ratio(name: str, other: str, kind: str) -> str:
        pairs = zip(times[name, kind], times[other, kind], strict=True)
        return f"{median(one / their for one, their in pairs):.2f}"

    print("| load | warm, s | to ours | cold, s | to ours | processor, s | to the peer |")
    print("|---|---|---|---|---|---|---|")
    for name in names:
        cells = [name]
        for how in ("warm", "cold"):
            cells += [f"{median(times[name, how]):.3f}", ratio(name, "ours", how)]
        cells.append(f"{median(times[name, 'processor']):.4f}")
        cells.append(ratio(name, PEERS[name], "processor") if name in PEERS else "")
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
