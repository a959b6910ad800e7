"""Time loads of checkpoints that other programs wrote beside loads of our own, and the peers'.

Each round loads the same tensors in place from every format, in another order, once from the page
cache (warm) and once after the files were dropped from it (cold). Printed are medians of the times
in seconds and of the ratios to our own verified load of the same round.

    python benchmarks/foreign.py --folder /tmp/foreign --mib 500 --rounds 15
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
TENSORS = 20


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
    folder: Path, state: Tensors, target: Tensors, pipeline: ckpipe.SyncPipeline
) -> dict[str, tuple[Callable[[], object], Path]]:
    """Write the state in each format; return for each name the load of it and its place."""
    ours, bare, st, pt, dcp = (
        folder / each for each in ("ours", "ours.safetensors", "w.safetensors", "w.pt", "dcp")
    )
    pipeline.save(state, step=1).wait()
    (data,) = ours.glob("step-*/*.safetensors")
    shutil.copy(data, bare)
    safetensors.torch.save_file(state, st)
    torch.save(state, pt)
    state_dict_saver.save(state, checkpoint_id=dcp, no_dist=True)
    os.sync()

    def source(place: Path) -> tuple[Callable[[], object], Path]:
        return lambda: pipeline.load(target, source=place), place

    return {
        "ours": (lambda: pipeline.load(target, 1), ours),
        "ours, unverified": source(bare),
        "safetensors": source(st),
        "torch.save": source(pt),
        "DCP": source(dcp),
        "safetensors.torch.load_file": (
            lambda: copied(target, safetensors.torch.load_file(st)), st),
        "torch.load(mmap=True)": (
            lambda: copied(target, torch.load(pt, mmap=True, weights_only=True)), pt),
        "dcp.load": (
            lambda: state_dict_loader.load(target, checkpoint_id=dcp, no_dist=True), dcp),
    }  # fmt: skip


def main() -> None:
    """Measure, and print a table."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--mib", type=int, default=500)
    options.add_argument("--rounds", type=int, default=15)
    given = options.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    shutil.rmtree(given.folder, ignore_errors=True)
    given.folder.mkdir(parents=True)
    rows = given.mib * 256 // TENSORS
    state = {f"layer.{n}": torch.randn(rows, 1024) for n in range(TENSORS)}
    target = {name: torch.zeros_like(each) for name, each in state.items()}
    times: dict[tuple[str, str], list[float]] = {}
    with ckpipe.SyncPipeline(given.folder / "ours") as pipeline:
        every = loads(given.folder, state, target, pipeline)
        for number in range(given.rounds + 1):
            for how in ("warm", "cold"):
                for name in random.Random(number).sample(list(every), len(every)):
                    load, place = every[name]
                    cached(place, keep=how == "warm")
                    began = time.perf_counter()
                    load()
                    if number:  # the first round warms up
                        times.setdefault((name, how), []).append(time.perf_counter() - began)
        assert all(torch.equal(target[name], each) for name, each in state.items())
    print("| load | warm, s | to ours | cold, s | to ours |\n|---|---|---|---|---|")
    for name in every:
        cells = [name]
        for how in ("warm", "cold"):
            found = times[name, how]
            ratios = [one / ours for one, ours in zip(found, times["ours", how], strict=True)]
            cells += [f"{median(found):.2f}", f"{median(ratios):.2f}"]
        print(f"| {' | '.join(cells)} |")
    shutil.rmtree(given.folder)


if __name__ == "__main__":
    main()
