"""Measure the cost of saves for a training loop: ckpipe in a thread and in a process, and peers.

    python benchmarks/interference.py [--mib 1024] [--rounds 5] [--minutes 5] [--s3] [--root DIR]
    python benchmarks/interference.py --loop python --only ckpipe --niceness 0 10 --minutes 0.5

One thread trains: a loop of plain Python, or products of matrices that torch computes in the one
thread. Every round has one *turn* of each contender, so that a drift of the machine's speed affects
all of them. A turn steps undisturbed for a while, then saves and continues stepping until the save
is durable, and then steps undisturbed again. It is repeated if the machine changed its speed
(`undisturbed.py`).

*Rate* is the number of steps from the return of the call until durable, relative to undisturbed
steps. *Captured* are saves with a guarded optimizer that owns the weights: they are copied beside
steps, none of which is one of the optimizer's. *Lost* is the training time that the save costs,
including the call, for which the trainer waits. *Held up* is the call and the time after it in
which the training thread could not run. Unlike *lost*, it does not change with the machine's speed.
*Others* is the processor time of unrelated programs, from the undisturbed steps on: if it is large,
the figures have no meaning.

One contender is a process that only writes as many bytes (`raw_process.py`). Any save on this
machine loses at least as much, and every contender is compared with it, round by round. A round
does not begin if, by the longest round before, it would end later than ``--minutes`` after the
start. With ``--s3``, ckpipe also saves to a server on this machine. With ``--niceness``, it also
saves by workers of other niceness than the default.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import contenders
import psutil
import raw
import torch
import torch.distributed as dist
from contenders import Contender, Wait
from raw_process import RawWrite
from stall import Ending
from undisturbed import MOST_CHANGE, Undisturbed, calm_seconds, mean_step, steady, steps

import ckpipe

if TYPE_CHECKING:
    from tests.support import s3_servers

Step = Callable[[], object]
Worker = Literal["thread", "process"]
PEERS = (contenders.DcpThread, contenders.DcpProcess, contenders.TorchCheckpointing)
WARM_UP_SAVES = 2
PYTHON_ROUNDS = 20_000
MATRIX = 384


class Ours(contenders.Ours):
    """ckpipe with one kind of worker; with a guarded optimizer it saves until captured."""

    def __init__(
        self, root: Path, worker: Worker | dict[str, Any], url: str = "", **fields: Any
    ) -> None:
        Contender.__init__(self, root)
        self._until: Literal["captured", "staged"] = "captured" if "guard" in fields else "staged"
        self._pipeline = ckpipe.SyncPipeline(url or root, worker=worker, keep_last=1, **fields)
        self._pipeline.__enter__()

    def save(self, state: dict[str, Any]) -> Wait:
        self.number += 1
        self.handle = self._pipeline.save(state, step=self.number, until=self._until)
        return self.handle.wait


def python_step() -> int:
    """Hold the GIL for some milliseconds."""
    total = 0
    for number in range(PYTHON_ROUNDS):
        total = (total * 31 + number) & 0xFFFF
    return total


def matmul_step() -> Step:
    """Make a step that releases the GIL most of the time."""
    left, right = torch.randn(MATRIX, MATRIX), torch.randn(MATRIX, MATRIX)
    target = torch.empty(MATRIX, MATRIX)
    return lambda: torch.mm(left, right, out=target)


@dataclass(slots=True)
class Turn:
    """The seconds of one save and of the steps beside it."""

    undisturbed: Undisturbed
    call: float
    durable: float
    steps: list[float]
    held_up: float
    others: float

    @property
    def rate(self) -> float:
        """The steps beside the save, relative to undisturbed ones in the same time."""
        return len(self.steps) * self.undisturbed.step / (self.durable - self.call)

    @property
    def lost(self) -> float:
        """The training time that the save cost."""
        return self.durable - len(self.steps) * self.undisturbed.step


@dataclass(slots=True)
class Measured:
    """All turns of one contender beside one loop."""

    turns: list[Turn] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        """The figures of the table."""
        every = sorted(step for turn in self.turns for step in turn.steps)

        def median(of: Callable[[Turn], float]) -> float:
            return statistics.median(map(of, self.turns))

        return {
            "rate": median(lambda turn: turn.rate),
            "p99 step, ms": every[int(len(every) * 0.99)] * 1e3,
            "turns": float(len(self.turns)),
            "unsteady": sum(turn.undisturbed.change > MOST_CHANGE for turn in self.turns),
            "undisturbed, ms": median(lambda turn: turn.undisturbed.step) * 1e3,
            "call, ms": median(lambda turn: turn.call) * 1e3,
            "durable, s": median(lambda turn: turn.durable),
            "lost, ms": median(lambda turn: turn.lost) * 1e3,
            "held up, ms": median(lambda turn: turn.held_up) * 1e3,
            "others, ms": median(lambda turn: turn.others) * 1e3,
        }


def beside_raw(measured: Measured, bare: Measured) -> dict[str, float]:
    """Compare a contender with the raw write of the same rounds."""
    pairs = list(zip(measured.turns, bare.turns, strict=True))
    return {
        "rate / raw": statistics.median(each.rate / other.rate for each, other in pairs),
        "lost - raw, ms": statistics.median(each.lost - other.lost for each, other in pairs) * 1e3,
    }


def turn(step: Step, contender: Contender, state: dict[str, Any]) -> Turn:
    """Take one save, with undisturbed steps before it and after it."""
    others = used_by_others()
    before = mean_step(step, calm_seconds(contender.took))
    began = time.perf_counter()
    ending = Ending(contender.save(state))
    call = time.perf_counter() - began
    ran = time.thread_time()
    beside = steps(step, lambda _: ending.over)
    durable = time.perf_counter() - began
    ran = time.thread_time() - ran
    ending.wait()
    contender.took = durable
    undisturbed = Undisturbed(before, mean_step(step, calm_seconds(durable)))
    others = used_by_others() - others
    tidy(contender)
    return Turn(undisturbed, call, durable, beside, durable - ran, others)


def used_by_others() -> float:
    """Measure the processor seconds used by other programs than this process and its children."""
    load = psutil.cpu_times()
    own = [psutil.Process(), *psutil.Process().children(recursive=True)]
    times = [each.cpu_times() for each in own]
    mine = sum(each.user + each.system for each in times) + times[0].children_user
    return sum(load) - load.idle - load.iowait - load.guest - load.guest_nice - mine


def contestants(
    root: Path,
    server: s3_servers.S3Server | None,
    given: argparse.Namespace,
    optimizer: torch.optim.Optimizer,
) -> dict[str, Contender]:
    """Make the requested contenders that are available here, by name."""
    found: dict[str, Contender] = {}
    kinds: tuple[Worker, ...] = ("thread", "process")
    for kind in kinds:
        if wanted(f"ckpipe, {kind}", given.only):
            found[f"ckpipe, {kind}"] = Ours(root / kind, kind)
        if wanted(f"ckpipe, {kind}, captured", given.only):
            where = root / f"{kind}-captured"
            found[f"ckpipe, {kind}, captured"] = Ours(where, kind, guard=optimizer)
    if wanted(RawWrite.name, given.only):
        found[RawWrite.name] = RawWrite(root / "raw", given.mib * raw.MIB)
    for number in given.niceness:
        worker = {"mode": "process", "niceness": number}
        found[f"ckpipe, niceness {number}"] = Ours(root / f"niceness-{number}", worker)
    for kind in kinds if server is not None else ():
        assert server is not None
        options = {"s3": {"endpoint_url": server.url, "region": "us-east-1"}}
        url = f"s3://bench/{kind}"
        found[f"ckpipe, {kind}, S3"] = Ours(root / f"{kind}-s3", kind, url, backends=options)
    for peer in PEERS:
        if not wanted(peer.name, given.only):
            continue
        try:
            found[peer.name] = peer(root / peer.name.replace(" ", "-"))
        except ImportError:
            print(f"{peer.name}: not installed")
    return found


def wanted(name: str, only: list[str]) -> bool:
    """Tell whether a name contains one of the given texts; true without texts."""
    return not only or any(part in name for part in only)


def measure(
    root: Path, server: s3_servers.S3Server | None, given: argparse.Namespace
) -> dict[str, dict[str, Measured]]:
    """Measure all contenders beside both loops."""
    ends = time.monotonic() + given.minutes * 60
    state = {
        "model": {
            f"weight.{number}": torch.randn(8, raw.MIB // 4) for number in range(given.mib // 8)
        }
    }
    optimizer = torch.optim.SGD(state["model"].values(), lr=0.1)
    everybody = contestants(root, server, given, optimizer)
    for contender in everybody.values():
        for _ in range(WARM_UP_SAVES):
            contender.save(state)()
            tidy(contender)
    every: dict[str, Step] = {"python": python_step, "matmul": matmul_step()}
    loops = {name: step for name, step in every.items() if given.loop in (None, name)}
    results: dict[str, dict[str, Measured]] = {loop: {} for loop in loops}
    longest = 0.0
    for _ in range(given.rounds):
        began = time.monotonic()
        if longest and began + longest > ends:
            break
        for loop, step in loops.items():
            for name, contender in everybody.items():
                once = partial(turn, step, contender, state)
                found = steady(once, lambda turn: turn.undisturbed)
                results[loop].setdefault(name, Measured()).turns.append(found)
        longest = max(longest, time.monotonic() - began)
    for contender in everybody.values():
        contender.close()
    return results


def tidy(contender: Contender) -> None:
    """Remove the save of a peer, outside of all measured times; ckpipe's retention removes its own.

    Delayed writes of the system must not slow down the next contender.
    """
    if not isinstance(contender, Ours):
        contender.forget()
    os.sync()


def goals(rows: dict[str, dict[str, dict[str, float]]]) -> Iterator[tuple[str, float, str, float]]:
    """Yield the goals on two cores and a local disk: name, figure, sense, goal."""
    for loop, found in rows.items():
        thread, process = found.get("ckpipe, thread"), found.get("ckpipe, process")
        if process is not None:
            yield f"{loop}: rate, process", process["rate"], ">=", 0.95
        if thread is not None:
            yield f"{loop}: rate, thread", thread["rate"], ">=", 0.80
        if thread is None or process is None:
            continue
        longer = process["durable, s"] / thread["durable, s"]
        yield f"{loop}: durable, process against thread", longer, "<=", 1.10
        if (peer := found.get(contenders.DcpProcess.name)) is not None:
            for name in ("lost, ms", "held up, ms"):
                yield f"{loop}: process, {name}", process[name], "<=", peer[name] / 2
                if (captured := found.get("ckpipe, process, captured")) is not None:
                    mode = f"{loop}: process, captured, {name}"
                    yield mode, captured[name], "<=", peer[name] / 2


def report(results: dict[str, dict[str, Measured]], mib: int) -> dict[str, Any]:
    """Print the tables and return them."""
    rows = {
        loop: {name: measured.row() for name, measured in found.items()}
        for loop, found in results.items()
    }
    for loop, found in results.items():
        if (bare := found.get(RawWrite.name)) is not None:
            for name, measured in found.items():
                rows[loop][name] |= beside_raw(measured, bare)
    for loop, row_of in rows.items():
        names = list(next(iter(row_of.values())))
        print(f"{loop + ' loop':24s}" + "".join(f"{name:>17s}" for name in names))
        for contender, row in row_of.items():
            print(f"{contender:24s}" + "".join(f"{row[name]:17.3f}" for name in names))
        print()
    figures = {}
    for name, value, sense, goal in goals(rows):
        ok = value >= goal if sense == ">=" else value <= goal
        print(f"{name:42s} {value:9.3f}   to reach {sense} {goal:.3f}   {'ok' if ok else 'MISSED'}")
        figures[name] = {"value": value, "to reach": f"{sense} {goal:.3f}"}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
        "versions": {"ckpipe": ckpipe.__version__, "torch": torch.__version__},
        "mib": mib,
        "loops": rows,
        "figures": figures,
    }


@contextlib.contextmanager
def bucket(folder: Path) -> Iterator[s3_servers.S3Server]:
    """Start a server on this machine, with a bucket."""
    # Only with --s3: a comparison with peers need not have a client of S3.
    from tests.support import s3_servers

    s3_servers.set_up_process()
    with s3_servers.seaweedfs(folder) as server:
        server.make_bucket("bench")
        yield server


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5, help="saves of each, beside each loop")
    parser.add_argument("--minutes", type=float, default=5.0, help="begin no round after these")
    parser.add_argument("--loop", choices=["python", "matmul"], help="one of the loops only")
    parser.add_argument("--only", nargs="+", default=[], help="parts of names")
    parser.add_argument("--niceness", type=int, nargs="+", default=[], help="more workers")
    parser.add_argument("--s3", action="store_true", help="save to a server on this machine too")
    parser.add_argument("--root", type=Path, default=None, help="a folder on the disk to measure")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="ckpipe-interference-", dir=arguments.root or Path.cwd()))
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)  # DCP's process needs one
    try:
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(bucket(folder)) if arguments.s3 else None
            found = measure(folder, server, arguments)
    finally:
        dist.destroy_process_group()
        shutil.rmtree(folder, ignore_errors=True)
    results = report(found, arguments.mib)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
