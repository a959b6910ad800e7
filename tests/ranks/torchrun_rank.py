"""A rank of a run that torchrun starts again after one of its processes has died."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import ckpipe
import ckpipe.distributed
from tests.support.killed_runs import die, note

SAVES = 4


def state(rank: int) -> dict[str, Any]:
    """Something of the rank's own, and a model that all ranks have alike."""
    model = torch.nn.Linear(4, 4)
    return {
        "mine": torch.full((10,), rank),
        "model": ckpipe.distributed.training_state(model),
    }


def forget_dead_addresses() -> None:
    """Remove from the launcher's store what gloo wrote before a restart, and nothing else."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store: Any = TCPStore(*address, is_master=False)
    forgotten = f"forgotten/{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    if os.environ["RANK"] == "0":
        for key in store.list_keys():
            if "//cpu//" in key:
                store.delete_key(key)
        store.set(forgotten, "")
    store.wait([forgotten])


def main(root: str, plan: Any, rendezvous: str) -> None:
    """Go on from what is there; in the first launch rank 1 dies after two saves."""
    if rendezvous == "static":
        forget_dead_addresses()
    dist.init_process_group("gloo")
    rank, restarts = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with ckpipe.SyncPipeline(root, plan=plan, staging={"block_bytes": 65536}) as pipeline:
        loaded = pipeline.load()
        first = loaded.step + 1 if loaded else 0
        for step in range(first, SAVES):
            handle = pipeline.save(state(rank), step=step)
            attempt = handle.wait().attempt
            if step == first:
                note(root, json.dumps({"rank": rank, "launch": [restarts, attempt, first]}))
            if step == 1 and restarts == 0 and rank == 1:
                handle.wait_complete(timeout=300)
                die()


if __name__ == "__main__":
    main(*sys.argv[1:])
