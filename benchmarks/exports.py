"""Measure the processor time of an export by the number of its windows.

An export reads the tensors of a file window by window. Each round exports the same tensors into one
file, which is one window if they have at most 64 MiB, and into many files of one window each, in
turns. Printed is the processor time of each round in seconds, and the ratio.

    python benchmarks/exports.py --folder /tmp/exports
    python benchmarks/exports.py --folder /tmp/exports --tensors 20000 --windows 8 --rounds 9
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

import torch

import ckpipe

MOST_BYTES = 60 << 20


def seconds(root: Path, target: Path, file_bytes: int) -> float:
    """Export into files of a size; return the processor time."""
    began = time.process_time()
    ckpipe.export(root, target, max_shard_bytes=file_bytes)
    taken = time.process_time() - began
    shutil.rmtree(target)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tensors", type=int, default=8000)
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    elements = MOST_BYTES // 4 // asked.tensors
    per_file = -(-asked.tensors // asked.windows)
    state = {f"layer.{n}": torch.full((elements,), float(n)) for n in range(asked.tensors)}
    root, target = asked.folder / "run", asked.folder / "exported"
    with ckpipe.SyncPipeline(root) as pipeline:
        pipeline.save({"model": state}, step=1).wait()
    sizes = {"one window": MOST_BYTES, f"{asked.windows} windows": per_file * elements * 4}
    for each in sizes.values():  # the first export of a process imports, and takes new memory
        seconds(root, target, each)
    print(*sizes, "ratio", sep="\t")
    for _ in range(asked.rounds):
        one, many = (seconds(root, target, each) for each in sizes.values())
        print(f"{one:.2f}\t{many:.2f}\t{many / one:.2f}", flush=True)
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
