"""Only tensors that something keeps equal on several ranks are written once; others stay apart."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.ranks.equal_tensors import RANKS, ROWS, value_of
from tests.support.command_line import script
from tests.support.rank_processes import Gang, told
from tests.support.sampling import sample


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", ["local", "global"])
def test_each_rank_gets_back_what_it_saved(
    world: Gang, root: Path, tmp_path: Path, plan: str
) -> None:
    rows = sample(ROWS, 8)
    world.succeed("tests.ranks.equal_tensors:save", root, RANKS, plan=plan, rows=rows)
    wrong = []
    for rank, every in told(root, "loaded").items():
        for name, form, values in every:
            expected = [[value_of(ROWS[name], rank)]] * len(values)
            if values != expected:
                wrong.append(f"{name}, {form}, rank {rank}: {values}, not {expected}")
    saved = told(root, "saved")[0]
    for name, form, id, nbytes in saved:
        times = ROWS[name].times
        written = written_bytes(root / "store" / f"step-{id.removeprefix('step-')}")
        if times is not None and not times * nbytes <= written < (times + 0.5) * nbytes:
            wrong.append(f"{name}, {form}: {written / nbytes:.2f} times its bytes, not {times}")
    assert not wrong, "\n".join(wrong)

    steps = [[name, form, id] for name, form, id, _ in saved]
    other = tmp_path / "other"
    world.succeed("tests.ranks.equal_tensors:load_alone", other, 1, saved=str(root), steps=steps)
    for name, form, values in told(other, "alone")[0]:
        row = ROWS[name]
        alone = [[1.0]] * len(values) if row.values == "all" else "PerRankValue"
        if values != alone:
            wrong.append(f"{name}, {form}, alone: {values}, not {alone}")
    assert not wrong, "\n".join(wrong)


WRAPPED_EARLY = """
import os, sys
import torch._dynamo  # which the wrapper imports
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

other = os.fork()  # so that torch is imported once
os.environ["RANK"] = "0" if other else "1"
dist.init_process_group("gloo")
net = nn.Sequential(nn.Linear(400, 250, bias=False), nn.Linear(3, 3, bias=False))
net[0].requires_grad_(False)
ddp = DistributedDataParallel(net)

import ckpipe

with ckpipe.SyncPipeline(sys.argv[1]) as pipeline:
    pipeline.save({"net": ddp}, step=0).wait_complete(timeout=300)
    net[0].requires_grad_(True)  # its gradients are not reduced
    pipeline.save({"net": ddp}, step=1).wait_complete(timeout=300)
if other:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


def test_a_model_that_was_wrapped_before_ckpipe_is_imported_is_written_once(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    run = script(WRAPPED_EARLY, root, env=os.environ | where)
    assert run.code == 0, run.err
    once = 4 * (400 * 250 + 3 * 3)
    found = [written_bytes(path) for path in sorted(root.glob("step-*")) if path.is_dir()]
    assert found == [once, 2 * once]


def written_bytes(checkpoint: Path) -> int:
    """The bytes of all entries of a checkpoint."""
    total = 0
    for path in checkpoint.glob("rank-*.safetensors"):
        with safe_open(path, "pt") as file:
            total += sum(file.get_tensor(name).nbytes for name in list(file.keys()))
    return total
