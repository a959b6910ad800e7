"""Memory, threads and calls that the system refuses: an error of ckpipe, and work goes on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import ckpipe
from ckpipe.errors import UsageError
from tests.support.command_line import forked

VERBS = """
import asyncio, ctypes, json, os, resource, sys, warnings
import torch, ckpipe

warnings.simplefilter("ignore")
root, settings = sys.argv[1], json.loads(sys.argv[2])
state = {"w": torch.ones(5 << 20), "n": 3}
target = {"w": torch.zeros(5 << 20), "n": 0}
told = []

def open_(): ckpipe.SyncPipeline(root, **settings).open().close()

async def opened():
    async with ckpipe.Pipeline(root, **settings) as pipeline:
        await pipeline.steps()

def used(pipeline, step):
    return {
        "save": lambda: pipeline.save(state, step=step, until="committed"),
        "load": lambda: pipeline.load(target, step=1),
        "fresh load": lambda: pipeline.load(step=1),
        "verify": lambda: pipeline.verify(1),
        "steps": pipeline.steps,
        "prune": pipeline.prune,
    }

def alone(number):
    return {
        "ckpipe.load": lambda: ckpipe.load(root, step=1),
        "ckpipe.verify": lambda: ckpipe.verify(root, 1),
        "ckpipe.copy": lambda: ckpipe.copy(root, f"{root}-copy-{number}", 1),
        "ckpipe.export": lambda: ckpipe.export(root, f"{root}-{number}", step=1, form="torch"),
        "open": open_,
        "async": lambda: asyncio.run(opened()),
    }

def attempt(verbs, limited):
    for verb, call in verbs.items():
        with limited():
            error = None
            try:
                call()
            except BaseException as raised:
                error = raised
        told.append({
            "verb": verb,
            "kind": type(error).__name__ if error else None,
            "ours": error is None or isinstance(error, ckpipe.CkpipeError),
            "text": str(error),
            "step": getattr(error, "step", None),
            "hint": getattr(error, "hint", None),
        })

def run(limits):
    open_()
    with ckpipe.SyncPipeline(root, **settings) as pipeline:
        pipeline.save(state, step=1, until="committed")
    for number, limited in enumerate(limits):
        with ckpipe.SyncPipeline(root, **settings) as pipeline:
            attempt(used(pipeline, 10 + number), limited)
            pipeline.save(state, step=100 + number, until="committed")
            target["w"].zero_()
            pipeline.load(target)
            assert torch.equal(target["w"], state["w"])
        attempt(alone(number), limited)
    print(json.dumps(told))
"""

MEMORY = """
from contextlib import contextmanager

# Python waits for ever for a thread that has no memory for its first objects, so that stays free.
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.mallopt(-8, 1)  # M_ARENA_MAX: threads share one heap,
libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD: which keeps what is freed
for each in [libc.malloc(60_000) for _ in range(600)]:
    libc.free(each)
small = [bytes(400) for _ in range(60_000)]
kept = small[::1500]  # in each arena of Python, which would go back to the system otherwise
del small

_, hard = resource.getrlimit(resource.RLIMIT_AS)

def leaving(spare):
    @contextmanager
    def limited():
        pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + spare, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    return limited

run([leaving(spare << 20) for spare in (1, 4, 40, 130)])
"""

THREADS = """
from contextlib import contextmanager

if os.getuid() == 0:  # the limit does not count for root, or for a user with its capabilities
    libc = ctypes.CDLL(None)
    os.setresuid(100_000 + os.getpid(), 0, 0)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, sets)
    sets[0] &= ~(1 << 21 | 1 << 24)  # CAP_SYS_ADMIN, CAP_SYS_RESOURCE
    assert not libc.capset(header, sets)

_, hard = resource.getrlimit(resource.RLIMIT_NPROC)

def leaving(spare):
    @contextmanager
    def limited():
        threads = len(os.listdir("/proc/self/task"))
        resource.setrlimit(resource.RLIMIT_NPROC, (threads + spare, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
    return limited

"""

EACH = "run([leaving(spare) for spare in (0, 1, 4, 9, 10, 11)])"

LEAVES = """
import threading, anyio, anyio.to_thread

async def leave():
    release, waiting = threading.Event(), []
    def wait():
        waiting.append(1)
        release.wait()
    pipeline = await ckpipe.Pipeline(root, **settings).open()
    await pipeline.save(state, step=1)
    async with anyio.create_task_group() as tasks:
        for _ in range(10):  # threads of this loop that could close the pipeline
            tasks.start_soon(anyio.to_thread.run_sync, wait)
        while len(waiting) < 10:
            await anyio.lowlevel.checkpoint()
        with leaving(0)():
            await pipeline.aclose()
        release.set()

asyncio.run(leave())
with ckpipe.SyncPipeline(root, **settings) as pipeline:
    print([info.step for info in pipeline.steps() if info.complete])
"""


def check(told: list[dict[str, Any]], *words: str) -> set[str]:
    """Check that each verb works or says in an error of ckpipe what the system refused.

    Returns:
        The verbs that were refused.
    """
    refused = [each for each in told if each["kind"] is not None]
    assert [each for each in told if not each["ours"]] == []
    for each in refused:
        assert each["hint"], each
        assert any(word in each["text"] for word in words), each
        if each["verb"] in ("load", "fresh load", "verify"):
            assert each["step"] == 1, each
        if each["verb"] == "save":
            assert each["step"] >= 10, each
    return {each["verb"] for each in refused}


@pytest.mark.sample(1)
@pytest.mark.parametrize("block", [None, 1 << 20], ids=["blocks", "small blocks"])
def test_no_memory_is_an_error_that_names_step_and_remedy(
    tmp_path: Path, block: int | None
) -> None:
    settings: dict[str, Any] = {"worker": "thread"}
    if block is not None:  # too small for a chunk: reads have buffers of their own
        settings["staging"] = {"block_bytes": block}
    done = forked(VERBS + MEMORY, tmp_path / "run", json.dumps(settings))
    assert done.code == 0, done.err
    told = json.loads(done.out)
    check(told, "has no memory", "cannot start another thread")
    no_memory = {each["verb"] for each in told if "has no memory" in each["text"]}
    # The process may have enough left for some of them.
    assert no_memory & {"load", "fresh load", "verify", "ckpipe.load", "ckpipe.verify"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("worker", ["thread", "process"])
def test_no_thread_is_an_error_that_names_the_remedy(tmp_path: Path, worker: str) -> None:
    done = forked(VERBS + THREADS + EACH, tmp_path / "run", json.dumps({"worker": worker}))
    assert done.code == 0, done.err
    refused = check(json.loads(done.out), "cannot start another thread")
    expected = {"ckpipe.load", "ckpipe.verify", "ckpipe.copy", "ckpipe.export", "open", "async"}
    assert expected <= refused


def test_a_pipeline_is_closed_without_a_thread_for_that(tmp_path: Path) -> None:
    done = forked(VERBS + THREADS + LEAVES, tmp_path / "run", "{}")
    assert done.out == "[1]\n", done.err


NO_MEMFD = """
import ctypes, platform, logging, sys
import torch, ckpipe

class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

class Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte),
                ("value", ctypes.c_uint)]

number = {"x86_64": 319, "aarch64": 279}[platform.machine()]
filter = (Instruction * 4)(
    (0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)
)  # load the number of the call; EPERM if it is memfd_create, else allow it
program = Program(4, ctypes.addressof(filter))
libc = ctypes.CDLL(None, use_errno=True)
assert not libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
assert not libc.prctl(22, 2, ctypes.byref(program), 0, 0)  # PR_SET_SECCOMP
logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
with ckpipe.SyncPipeline(sys.argv[1], worker="process") as pipeline:
    pipeline.save({"w": torch.ones(1 << 20)}, step=1, until="committed")
    assert pipeline.load() is not None
"""


def test_a_thread_saves_where_memory_cannot_be_shared_and_a_line_says_so(tmp_path: Path) -> None:
    done = forked(NO_MEMFD, tmp_path)
    assert done.code == 0, done.err
    [line] = done.out.splitlines()
    assert "by a thread: the system refuses memfd_create" in line
    assert "Operation not permitted" in line


def nested(depth: int, kind: type) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = {"a": value} if kind is dict else [value]
    return value


@pytest.mark.parametrize("kind", [dict, list])
@pytest.mark.parametrize("worker", ["thread", "process"])
def test_metadata_is_refused_before_it_is_nested_too_deeply_to_be_read(
    tmp_path: Path, kind: type, worker: Any
) -> None:
    with ckpipe.SyncPipeline(tmp_path, worker=worker) as pipeline:
        for depth in (200, 500, 990, 3_000, 200_000):
            with pytest.raises(UsageError, match=r"Metadata must be plain JSON.*step 7"):
                pipeline.save({}, step=7, metadata={"deep": nested(depth, kind)})
        given = {"deep": nested(190, kind)}
        pipeline.save({}, step=8, metadata=given, until="committed")
        newest = pipeline.latest()
        assert newest is not None
        assert newest.metadata == given
        assert pipeline.load() is not None
    assert ckpipe.verify(str(tmp_path), 8)
    ckpipe.copy(str(tmp_path), str(tmp_path / "copy"), 8)


def test_a_state_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    refused: list[ckpipe.CkpipeError] = []
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        for depth in range(100, 400, 30):
            try:
                pipeline.save({"deep": nested(depth, dict)}, step=depth, until="committed")
                pipeline.load(step=depth)
            except ckpipe.CkpipeError as error:
                refused.append(error)
        assert pipeline.load(step=100) is not None
    assert refused
    for each in refused:
        assert each.step is not None
        assert re.search(r"nested too deeply.*sys\.setrecursionlimit", str(each))
