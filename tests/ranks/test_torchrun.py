"""A launcher that restarts its ranks, with a rendezvous store that outlives them."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

import pytest

import ckpipe
from tests.ranks.torchrun_rank import SAVES
from tests.support.command_line import TORCHRUN, forked
from tests.support.pipelines import newest_of
from tests.support.rank_processes import told

SCRIPT = Path(__file__).with_name("torchrun_rank.py")


CASES = list(itertools.product(["local", "global"], ["standalone", "static"]))


def rendezvous(kind: str) -> list[str]:
    """The options by which torchrun's ranks find each other."""
    if kind == "standalone":
        return ["--standalone"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = ["--master-addr=127.0.0.1", f"--master-port={port}"]
    return ["--rdzv-backend=static", "--nnodes=1", "--node-rank=0", *where]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("plan", "kind"), CASES)
def test_restarted_ranks_are_a_new_attempt_and_go_on(plan: str, kind: str, root: Path) -> None:
    """With a static rendezvous the ranks of all launches share one store, ckpipe's keys in it.

    torch gives gloo that store too, without a prefix of the launch's own, so that every other
    restart fails in ``init_process_group``: a rank connects to the address of a dead one. (The
    variable that gives each launch a store of its own is for other rendezvous.) Therefore the ranks
    remove gloo's keys, and only those, before they join.
    """
    # Without it torch's own restart over gloo meets the keys of the launch before.
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    options = ["--nproc_per_node=2", "--max-restarts=1", "--monitor-interval=0.1"]
    command = [*rendezvous(kind), *options, SCRIPT, root, plan, kind]
    done = forked(TORCHRUN, *command, env=environment)
    assert done.code == 0, done.err
    first, second = told(root, "launch").values()
    assert first == second
    (_, attempt, begin), (_, again, resumed) = first
    assert begin == 0
    assert resumed >= 2
    assert again > attempt
    with ckpipe.SyncPipeline(root) as pipeline:
        newest = newest_of(pipeline)
        assert (newest.step, newest.attempt) == (SAVES - 1, again)
        pipeline.verify(newest)
