"""Worlds of real ranks: processes that are joined by gloo, and that may die.

As a script this is a process that has imported all there is to import and has one thread. For
every line of JSON on its standard input it forks the ranks of a world, each of which does what
the line says, and answers with their exit codes once all have ended. So a world costs little.
What a line says is the name of a case here, or ``module:function`` of one elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first DTensor imports it, which costs each rank a second
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import ckpipe
import ckpipe.distributed
from ckpipe.backend import Backend
from ckpipe.testing import FaultyBackend, Landing, SlowBackend
from ckpipe.testing.wrappers import Operation
from ckpipe_gcs import GcsBackend
from ckpipe_local import LocalBackend
from ckpipe_s3 import S3Backend
from tests.inner.made_up_ranks import hurried
from tests.support.fork_server import Case, Forks, forks, serve
from tests.support.joint_plans import check_layouts, check_shared, joint_planner, shared
from tests.support.killed_runs import die, note, notes
from tests.support.worker_runs import worker_of
from tests.support.wrapped_models import trained, wrapped

URL = "gang://store"
SETTINGS: dict[str, Any] = {"staging": {"block_bytes": 65536}, "meeting_timeout_seconds": 60}


def mortal(case: Case) -> None:
    """Put the store of a case behind ``URL``; it kills one rank at an operation, or slows one."""
    inner: Backend = LocalBackend(case["root"])
    url = case.get("bucket", "")
    if url.startswith("s3:"):
        inner = S3Backend(url, endpoint_url=case["endpoint"])
    elif url.startswith("gs:"):
        inner = GcsBackend(url, endpoint_url=case["endpoint"], anonymous=True)
    if case.get("slow") == dist.get_rank():
        inner = SlowBackend(inner, latency=case.get("latency", 0.1))
    faulty = FaultyBackend(inner)
    if case.get("victim") == dist.get_rank():
        key, nth = case["key"], case.get("nth", 1)

        def fatal(operation: Operation) -> bool:
            return operation.verb == case["verb"] and key in operation.key

        faulty.call(die, fatal, Landing(case["landing"]), nth=nth)
    ckpipe.register_backend("gang", lambda url: faulty)


def tell(case: Case, **what: Any) -> None:
    """Add a line to what the world's log says of this rank."""
    note(case["root"], json.dumps({"rank": dist.get_rank()} | what))


def collectives() -> list[int]:
    """How many collectives each process group of this process has begun."""
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    return [group._get_sequence_number_for_group() for group in groups]


def meet(case: Case) -> None:
    """Save with two pipelines, one after the other, and tell the names of their attempts."""
    for step in range(2):
        with ckpipe.SyncPipeline(case["root"], **SETTINGS) as pipeline:
            tell(case, attempt=pipeline.save({"a": 1}, step=step).wait().attempt)


def private(rank: int, step: int) -> dict[str, Any]:
    """A state of a rank's own."""
    return {"mine": torch.full((1000,), float(rank * 1000 + step)), "step": step}


def run(case: Case) -> None:
    """Load what is newest and go on for some saves, in orders that differ between ranks."""
    if case.get("group_size"):
        for name in ("ckpipe.format.names", "ckpipe.catalog.complete"):
            vars(pkgutil.resolve_name(name))["GROUP_SIZE"] = case["group_size"]
    mortal(case)
    before = collectives()
    with ckpipe.SyncPipeline(URL, **SETTINGS) as pipeline:
        rank = dist.get_rank()
        loaded = pipeline.load()
        tell(case, loaded=loaded.step if loaded else None)
        if loaded:
            assert torch.equal(loaded.state["mine"], private(rank, loaded.step)["mine"])
        first = loaded.step + 1 if loaded else 0
        for step in range(first, first + case["saves"]):
            if case.get("victim") == rank and step == case.get("dies_before"):
                die()
            pipeline.save(private(rank, step), step=step).wait()
            tell(case, committed=step)
        if case.get("together"):
            pipeline.latest()
            last = pipeline.save(private(rank, first + 100), step=first + 100)
            assert last.wait_complete(timeout=300).complete
    assert collectives() == before


def matrix(rows: int, step: int) -> DTensor:
    """A matrix of rows of 8 KiB that are divided between the ranks; some may get none."""
    size, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.arange(rows << 10, dtype=torch.float64).reshape(rows, 1024) + step
    parts = whole.chunk(size)
    part = parts[rank] if rank < len(parts) else whole[:0]
    mesh = init_device_mesh("cpu", (size,))
    return DTensor.from_local(
        part, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def divide(case: Case) -> None:
    """Load a matrix that is divided between the ranks, and save others some times."""
    mortal(case)
    settings = SETTINGS | {"keep_last": case.get("keep_last")}
    with ckpipe.SyncPipeline(URL, **settings) as pipeline:
        target = {"w": matrix(case["rows"], -1)}
        loaded = pipeline.load(target)
        tell(case, loaded=loaded.step if loaded else None)
        if loaded:
            assert torch.equal(target["w"].to_local(), matrix(case["rows"], loaded.step).to_local())
        for step in range(case["first"], case["first"] + case["saves"]):
            pipeline.save({"w": matrix(case["rows"], step)}, step=step).wait()
            tell(case, committed=step)
        if case.get("prune"):
            pipeline.prune()


def plan_together(case: Case) -> None:
    """Save states that differ more or less between ranks, with one plan for all of them."""
    rank, root = dist.get_rank(), Path(case["root"])
    planner = joint_planner(case["store"], root, case["seconds"])
    before = collectives()
    with ckpipe.SyncPipeline(root, plan=planner, **SETTINGS) as pipeline:
        for step, what in enumerate(case["saves"]):
            if what == "more-killed" and rank == 1:
                die()
            while what == "more-late" and rank == 1 and len(told(root, "failed")) < 2:
                os.sched_yield()
            # Rank 1 comes too late or never; the others wait for each other as long as it takes.
            alone = what in ("more-late", "more-killed")
            waits = hurried(0.5, present=[0, 2]) if alone else contextlib.nullcontext()
            try:
                with waits:
                    pipeline.save(shared(rank, what), step=step).wait()
                tell(case, committed=step)
            except ckpipe.CkpipeError as error:
                tell(case, failed=[step, type(error).__name__, str(error)])
        check_shared(pipeline)
    assert collectives() == before
    tell(case, over=True)
    while rank == 0 and len(told(root, "over")) < dist.get_world_size() - case.get("dead", 0):
        os.sched_yield()  # the store may live here


def place(case: Case) -> None:
    """Save a state in some layouts and load each into others."""
    before = collectives()
    with ckpipe.SyncPipeline(case["root"], plan=case["plan"], **SETTINGS) as pipeline:
        for saved, loaded in case["pairs"]:
            check_layouts(pipeline, saved, loaded)
    assert collectives() == before


def alone(case: Case) -> None:
    """Rank 0 saves and loads after all others have gone for good."""
    pipeline = ckpipe.SyncPipeline(case["root"], **SETTINGS)
    with pipeline:
        if dist.get_rank():
            tell(case, gone=True)
            os._exit(0)
        while len(told(Path(case["root"]), "gone")) < dist.get_world_size() - 1:
            os.sched_yield()
        pipeline.save(private(0, 1), step=1).wait()
        assert pipeline.latest() is None


def barrier(case: Case) -> None:
    """Show that a collective would be noticed, of whatever kind and in whatever group."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("outer", "inner"))
    part, inner = torch.ones(2), mesh.get_group("inner")
    each: list[Any] = [None] * size
    calls: list[Callable[[], Any]] = [
        dist.barrier,
        lambda: dist.broadcast(part, 0),
        lambda: dist.all_reduce(part, group=inner),
        lambda: dist.reduce(part, 0),
        lambda: dist.all_gather([torch.zeros(2) for _ in range(size)], part),
        lambda: dist.gather_object(1, each if dist.get_rank() == 0 else None),
        lambda: dist.all_gather_object(each, 1),
        lambda: dist.scatter_object_list([None], each if dist.get_rank() == 0 else None),
        lambda: dist.new_group(list(range(size))),
        DTensor.from_local(part, mesh["inner"], [Shard(0)]).full_tensor,
    ]
    for call in calls:
        before = collectives()
        call()
        assert collectives() != before, calls.index(call)


def preempted(case: Case) -> None:
    """Take steps together until one rank gets a signal; tell what was saved, and who handled."""
    rank, handled = dist.get_rank(), []
    watched = signal.SIGUSR1 if case["how"] == "SIGUSR1" else signal.SIGTERM
    signal.signal(watched, lambda number, frame: handled.append(number))
    before = signal.getsignal(watched)
    settings = {**SETTINGS, "look_every_seconds": 0.05}
    with ckpipe.SyncPipeline(case["root"], preemption=True, **settings) as pipeline:
        for step in range(10**6):
            dist.all_reduce(torch.ones(1))
            if rank == case["victim"] and step == 20:
                for _ in range(case["times"]):
                    signal.raise_signal(watched)
                if case["how"] == "event":
                    pipeline.preempt()
            if pipeline.should_save(step):
                pipeline.save(private(rank, step), step=step).wait_complete(timeout=300)
                tell(case, saved=step)
            if pipeline.preempted:
                break
    assert signal.getsignal(watched) is before
    tell(case, handled=len(handled))


def retain(case: Case) -> None:
    """Save up to a step and keep two; some ranks prune besides, after each of their saves."""
    mortal(case)
    rank, hurry = dist.get_rank(), case.get("slow") != dist.get_rank()
    with ckpipe.SyncPipeline(URL, keep_last=2, **SETTINGS) as pipeline:
        loaded = pipeline.load()
        first = loaded.step + 1 if loaded else 0
        tell(case, loaded=first - 1)
        for step in range(first, case["until"]):
            if not hurry:  # it has more to compute
                torch.linalg.svd(torch.randn(200, 200))
            pipeline.save(private(rank, step), step=step).wait()
            if rank in case["pruners"]:
                pipeline.prune()
        tell(case, ended=True)


def train(case: Case) -> None:
    """Train, save or load, and go on: the loss tells whether all of it came back."""
    model = wrapped(case["kind"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    replicated = case.get("replicated", False)
    state = {"training": ckpipe.distributed.training_state(model, optimizer, replicated=replicated)}
    if case["first"]:
        trained(model, optimizer, range(case["first"]))
    before = collectives()
    settings = SETTINGS | case.get("settings", {})
    with ckpipe.SyncPipeline(case["root"], guard=optimizer, **settings) as pipeline:
        if case["save"]:
            final = bool(case.get("final"))
            pipeline.save(state, step=case["first"], final=final).wait_complete(timeout=300)
        else:
            loaded = pipeline.load(state, per_rank="rank0")
            assert loaded is not None
            assert loaded.step == case["step"]
    assert collectives() == before
    names = sorted(state["training"].state_dict()["model"])
    tell(case, loss=trained(model, optimizer, range(case["step"], case["step"] + 3)), names=names)


def stage_and_die(case: Case) -> None:
    """Every rank stages a save whose worker sleeps, waits for all others, and dies."""
    rank = dist.get_rank()
    pipeline = ckpipe.SyncPipeline(case["root"], worker="process", **SETTINGS).__enter__()
    pipeline.save(private(rank, 1), step=1).wait_complete(timeout=300)
    process = worker_of(pipeline)
    os.kill(process, signal.SIGSTOP)
    pipeline.save(private(rank, 2), step=2)
    tell(case, worker=process)
    dist.barrier()
    die()


class Counting(torch.optim.Optimizer):
    """Sets its parameters and their averages to the number of its steps."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self.number = 0
        for parameter in model.parameters():
            self.state[parameter]["average"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.number += 1
        for parameter, state in self.state.items():
            parameter.fill_(self.number)
            state["average"].fill_(self.number)


def instants(case: Case) -> None:
    """Steps go on while sharded tensors are copied: every checkpoint holds one number."""
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = Counting(model)
    running = torch.zeros(50_000)
    state = {"model": model, "optimizer": optimizer, "running": running}
    sharded = [*model.parameters(), *(each["average"] for each in optimizer.state.values())]
    optimizer.step()
    running.fill_(1)
    patient = SETTINGS | {"lock": {"max_step_wait_seconds": 60}}
    with ckpipe.SyncPipeline(case["root"], guard=optimizer, **patient) as pipeline:
        handles = []
        for step in range(1, case["saves"] + 1):
            handles.append(pipeline.save(state, step=step, until="captured"))
            running.fill_(step + 1)
            optimizer.step()
        for handle in handles:
            handle.wait_complete(timeout=300)
        for step in range(1, case["saves"] + 1):
            result = pipeline.load(state, step=step)
            assert result is not None
            parts = [each._local_tensor for each in sharded]
            assert {each.item() for part in (*parts, running) for each in part.unique()} == {step}


_CASES = (
    meet, run, divide, alone, barrier, preempted, retain, train, stage_and_die, instants,
    plan_together, place,
)  # fmt: skip
CASES: dict[str, Callable[[Case], None]] = {each.__name__: each for each in _CASES}


def _live(case: Case, rank: int, number: int) -> None:
    warnings.simplefilter("error")
    size = case["ranks"]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    store = dist.FileStore(f"{case['root']}.store-{number}", size)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300)
    )
    dist.barrier()  # a rank that leaves earlier breaks the connecting of the others
    (CASES.get(case["do"]) or pkgutil.resolve_name(case["do"]))(case)


class Gang:
    """Starts worlds and waits for their end.

    Args:
        process: The process that forks them.
    """

    def __init__(self, process: Forks) -> None:
        self._process = process

    def run(self, do: str, root: Path, ranks: int, **case: Any) -> list[int | None]:
        """Run a world; return the exit codes of its ranks, None for one that was killed."""
        return self._process.ranks({"do": do, "root": str(root), **case}, ranks)

    def succeed(self, do: str, root: Path, ranks: int, **case: Any) -> None:
        """Run a world of which all ranks come to their end."""
        assert self.run(do, root, ranks, **case) == [0] * ranks


def told(root: Path, what: str) -> dict[int, list[Any]]:
    """What each rank has told of one thing, in order."""
    found: dict[int, list[Any]] = {}
    for line in notes(root):
        entry = json.loads(line)
        if what in entry:
            found.setdefault(entry["rank"], []).append(entry[what])
    return found


def same_everywhere(root: Path, what: str, launch: slice = slice(None)) -> list[Any]:
    """What all ranks told alike."""
    found = {rank: values[launch] for rank, values in told(root, what).items()}
    first = found[0]
    assert all(values == first for values in found.values()), found
    return first


def newest_whole(root: Path, ranks: int) -> int | None:
    """The newest step that all ranks have committed, whether or not somebody has noticed."""
    found = [
        int(each.name.split(".")[0].removeprefix("step-"))
        for each in root.glob("step-*")
        if len(list(each.glob("m/0/*/rank-*.json"))) == ranks
    ]
    return max(found, default=None)


@contextmanager
def gang() -> Iterator[Gang]:
    """The process that forks worlds, for as long as it is needed."""
    with forks(__file__) as process:
        yield Gang(process)


if __name__ == "__main__":
    serve(_live)
