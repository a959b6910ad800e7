"""Imports and exports against a plain copy of the bytes, interleaved in one run.

    python benchmarks/give_and_take.py [--root DIR] [--rounds 10] [--megabytes 500] [--json FILE]

A plain copy reads the files, writes them in turn in the blocks of ckpipe, and makes them durable.
The sources are warm. Every round takes each measure once, in alternating order; the table shows
medians, and the ratio of the copy's median to that of each other measure. Deletions do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

import ckpipe

_BLOCK_BYTES = 16 << 20


def plain_copy(source: Path, target: Path) -> None:
    """Copy the files of a folder, each made durable."""
    target.mkdir()
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    for path in source.iterdir():
        with path.open("rb", buffering=0) as given, (target / path.name).open("wb", 0) as taken:
            while count := given.readinto(buffer):
                taken.write(buffer[:count])
            os.fsync(taken.fileno())
    folder = os.open(target, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def exports(root: Path, weights: dict[str, torch.Tensor]) -> dict[str, Callable[[Path], object]]:
    """Save weights, and return a measure of their export in each form."""
    with ckpipe.SyncPipeline(root / "run") as pipeline:
        pipeline.save({"model": weights}, step=1).wait()
    export = partial(ckpipe.export, root / "run")
    return {
        "export as hf": export,
        "export as hf in half the bytes": partial(export, dtype="bfloat16"),
        "export as torch": partial(export, form="torch"),
        "export as dcp": partial(export, form="dcp"),
    }


def main() -> None:
    """Measure, print the table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--json", type=Path, default=None)
    asked = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=asked.root))
    times: dict[str, list[float]] = defaultdict(list)
    try:
        count = 8 * -(-asked.megabytes // 80)
        weights = {f"layers.{n}.weight": torch.randn(1280, 2048) for n in range(count)}
        (root / "safetensors").mkdir()
        for part in range(2):  # two shards
            names = sorted(weights)[part::2]
            save_file({n: weights[n] for n in names}, root / f"safetensors/{part}.safetensors")
        (root / "torch").mkdir()
        torch.save(weights, root / "torch/weights.pt")
        half = [ckpipe.Cast({"*": "bfloat16"})]
        fused = [ckpipe.Fuse(["layers.*1.weight", "layers.*2.weight"], "pair.*")]
        take = partial(ckpipe.import_checkpoint, root / "safetensors")
        measures: dict[str, Callable[[Path], object]] = {
            "copy": partial(plain_copy, root / "safetensors"),
            "import of safetensors": take,
            "import of torch.save": partial(ckpipe.import_checkpoint, root / "torch/weights.pt"),
            "import with Fuse": partial(take, transform=fused),
            "import with Cast to half the bytes": partial(take, transform=half),
            **exports(root, weights),
        }
        for number in range(asked.rounds + 1):
            for name in list(measures)[:: 1 if number % 2 else -1]:
                began = time.perf_counter()
                measures[name](root / "target")
                if number:  # the first round warms up
                    times[name].append(time.perf_counter() - began)
                shutil.rmtree(root / "target")
    finally:
        shutil.rmtree(root)
    copied = statistics.median(times["copy"])
    for name, taken in times.items():
        median = statistics.median(taken)
        print(f"{name:36} {median:7.3f} s   {copied / median:5.2f} of a copy")
    if asked.json is not None:
        asked.json.write_text(json.dumps({"megabytes": asked.megabytes, "seconds": times}) + "\n")


if __name__ == "__main__":
    main()
