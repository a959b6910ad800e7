"""One state for each feature of the format, saved by an older ckpipe into ``data/features``.

The committed checkpoints are never written again. New ones go beside them:
``python -c "from tests.format import earlier_states as e; e.write(NAME)"``. All is done through
public names, so that any version of ckpipe can run it.
"""

from __future__ import annotations

import collections
import datetime as dt
import enum
import itertools
import math
import pathlib
import sys
import tarfile
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ckpipe
from ckpipe.backend import Backend, UploadLimits
from ckpipe_local import LocalBackend
from tests.support import wrapper_tensors
from tests.support.placed_tensors import placed, rank_of
from tests.support.random_numbers import generators_left, seed

DATA = Path(__file__).parents[1] / "data" / "features"
STEP = 500
State = dict[Any, Any]
_numbers = itertools.count()


@dataclass(frozen=True)
class Feature:
    """A state, and how it is saved and loaded.

    Attributes:
        state: Makes the state of a rank, always the same.
        ranks: How many ranks save it.
        settings: Fields of the settings of those who save.
        save: What ``save`` is given besides.
        load: What ``load`` is given besides.
        alone: Makes what one process loads of all ranks; None if that is the state of rank 0.
        max_blocks: How many blocks the store takes for one file; None for any number.
        saves: How many saves in a row are made of it, of which the last stays.
        together: Labels of replicas that the ranks plan for together, as ``plan="global"`` does.
    """

    state: Callable[[int], State]
    ranks: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    save: dict[str, Any] = field(default_factory=dict)
    load: dict[str, Any] = field(default_factory=dict)
    alone: Callable[[], State] | None = None
    max_blocks: int | None = None
    saves: int = 1
    together: tuple[str, ...] = ()


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Frozen:
    weight: torch.Tensor
    name: str


@dataclass
class Nested:
    inner: Any
    points: list[Point]


class Color(enum.Enum):
    RED = 1
    BLUE = "blue"


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Celsius:
    """An object of a registered type."""

    def __init__(self, degrees: float) -> None:
        self.degrees = degrees

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Celsius) and other.degrees == self.degrees

    def __hash__(self) -> int:
        return hash(self.degrees)

    def __repr__(self) -> str:
        return f"Celsius({self.degrees})"


class Tagged(torch.Tensor):
    """A subclass of tensors."""


class Strange(Celsius):
    """An object that only pickle can save."""


# The committed checkpoints name these classes as of a module ``features``.
sys.modules["features"] = sys.modules[__name__]
for _class in (Point, Frozen, Nested, Color, Rights, Celsius, Tagged, Strange):
    _class.__module__ = "features"

ckpipe.register_type(
    Celsius, to_state=lambda each: {"degrees": each.degrees}, from_state=lambda s: Celsius(**s)
)

DTYPES = """
    float64 float32 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8
    float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu complex64 complex128
"""


def dtypes(rank: int) -> State:
    """Bit patterns of all kinds in every dtype."""
    raw = torch.arange(256, dtype=torch.uint8).repeat(2)
    state = {name: raw.view(getattr(torch, name)).clone() for name in DTYPES.split()}
    return state | {"bool": torch.tensor([True, False, True])}


def sharing(rank: int) -> State:
    """Tensors that share memory, whole or in part."""
    weight = torch.arange(12.0).view(3, 4)
    base, turned = torch.arange(10, dtype=torch.int16), torch.arange(15.0).view(3, 5)
    return {
        "weight": weight,
        "tied": weight,
        "row": weight[1],
        "column": weight[:, 2],
        "overlap": [base[:6], base[4:]],
        "bytes": base.view(torch.uint8)[3:7],
        "turned": turned.t(),
        "expanded": torch.arange(3.0).view(3, 1).expand(3, 4),
        "apart": torch.arange(100.0)[90:],
    }


def tensors(rank: int) -> State:
    """What a tensor is besides its numbers."""
    named = torch.arange(3.0)
    vars(named)["note"] = {"kept": [1, "two"]}
    pair = torch.tensor([1 + 2j, 3 - 4j])
    return {
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "buffer": torch.nn.Buffer(torch.arange(2.0)),
        "transient": torch.nn.Buffer(torch.arange(2.0), persistent=False),
        "subclass": torch.arange(4.0).as_subclass(Tagged),
        "needs a gradient": torch.ones(2, requires_grad=True),
        "attributes": named,
        "conjugate": pair.conj(),
        "negative": pair.conj().imag,
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "a.b": torch.tensor(1),
        "a": {"b": torch.tensor(2)},
        "../@~/ü😀": {"__metadata__": torch.tensor(3)},
        "__metadata__": torch.tensor(4),
        "": torch.tensor(5),
    }


def wrappers(rank: int) -> State:
    """Tensors that wrap others, nested and tied, with all that contexts hold."""
    one = wrapper_tensors.scaled()
    return {
        "parameter": torch.nn.Parameter(wrapper_tensors.scaled(start=20), requires_grad=False),
        "buffer": torch.nn.Buffer(wrapper_tensors.halves(), persistent=False),
        "nested": wrapper_tensors.nested(),
        "tied": [one, one],
        "context": wrapper_tensors.scaled(
            context=[None, True, 2**60, math.inf, b"x", torch.device("cpu"), {1: (), "b": []}]
        ),
    }


def containers(rank: int) -> State:
    """Containers of all kinds, and keys of all kinds."""
    ordered = collections.OrderedDict(b=1, a=torch.tensor(2))
    vars(ordered)["_metadata"] = {"version": 2}
    common = {"in": "two places"}
    ring: list[Any] = [1]
    ring.append(ring)
    return {
        "ordered": ordered,
        "default": collections.defaultdict(list, {"x": [1]}),
        "no default": collections.defaultdict(None, {"x": 1}),
        "counter": collections.Counter("abracadabra"),
        "list": [1, [2, [3, []]]],
        "tuple": (1, (2,), ()),
        "deque": collections.deque([1, 2], maxlen=5),
        "set": {3, "a", (1, None), 2.5},
        "frozenset": frozenset({1, 2}),
        "point": Point(torch.tensor(1), [2]),
        "frozen": Frozen(torch.arange(2.0), "name"),
        "nested": Nested(Frozen(torch.ones(1), "inner"), [Point(1, 2)]),
        "registered": Celsius(36.6),
        "shared": [common, common],
        "ring": ring,
        "empty": {},
        1: "int",
        "1": "text",
        2**60: "large",
        None: "null",
        "bools": {True: "yes", False: "no"},
        2.5: "float",
        math.inf: "infinite",
        (1, ("x", False)): "tuple",
    }


def values(rank: int) -> State:
    """Inline values of all kinds."""
    utc = dt.UTC
    return {
        "plain": [None, True, False, 0, -7, 2**52, "text", "ü😀\ud800", 0.1, -0.0, 1e300],
        "numbers": [2**80, -(2**53), math.nan, math.inf, -math.inf, 1j, complex(math.nan, -0.0)],
        "bytes": [b"", b"\x00\xff", bytearray(b"ab")],
        "torch": [
            torch.float16, torch.device("cpu"), torch.device("cuda", 1), torch.Size([2, 3]),
            torch.strided, torch.channels_last,
        ],
        "times": [
            dt.datetime(2026, 11, 21, 3, 42, 5, 123456),
            dt.datetime(2026, 11, 21, 3, 42, tzinfo=utc, fold=1),
            dt.time(23, 59, 1), dt.date(2026, 11, 21), dt.timedelta(days=-1, microseconds=3),
        ],
        "others": [range(1, 10, 3), ..., Color.RED, Color.BLUE, Rights.READ | Rights.WRITE],
        "flags": [Rights(0), Rights.READ],
        "numpy": [np.float32(1.5), np.int64(-3), np.bool_(True), np.datetime64("2026-11-21", "s")],
        "paths": [
            pathlib.Path("a/b"), pathlib.PurePosixPath("/x"), pathlib.PureWindowsPath("C:/y"),
        ],
    }  # fmt: skip


def arrays(rank: int) -> State:
    """Numpy arrays."""
    return {
        "float": np.arange(6.0).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3)),
        "big endian": np.arange(4, dtype=">i4"),
        "times": np.array(["2026-11-21", "NaT"], dtype="<M8[s]"),
        "text": np.array(["ab", "c"]),
        "bool": np.array([True, False]),
        "scalar": np.array(7),
        "empty": np.empty((0, 2)),
    }


def seeded(call: Callable[[], State]) -> State:
    """What a call returns that draws from random generators, which are as before afterwards."""
    with generators_left():
        seed(5)
        return call()


def training(rank: int) -> State:
    """Objects with ``state_dict`` as they are after two steps."""

    def make() -> State:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
        for step in range(2):
            optimizer.zero_grad()
            model(torch.arange(6.0).view(2, 3) + step).square().sum().backward()
            # Sums of floats differ between machines in the last bit.
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, step + 1.0)
            optimizer.step()
            scheduler.step()
        with torch.no_grad():
            for number, tensor in enumerate(tensors_of([model, optimizer])):
                tensor.copy_((torch.arange(tensor.numel()).view(tensor.shape) + number) / 8)
        progress = ckpipe.Progress(epoch=3, best=0.5)
        return {
            "model": model, "optimizer": optimizer, "scheduler": scheduler, "progress": progress,
        }  # fmt: skip

    return seeded(make)


def tensors_of(objects: list[Any]) -> list[torch.Tensor]:
    """The floating tensors of model and optimizer, in a fixed order."""
    model, optimizer = objects
    state = [each for one in optimizer.state.values() for each in one.values()]
    found = [*model.parameters(), *model.buffers(), *state]
    return [each for each in found if each.is_floating_point() and each.dim()]


def generators(rank: int) -> State:
    """The states of random generators, as ``RngState`` saves them."""
    return seeded(lambda: {"rng": ckpipe.RngState().state_dict()})


def many(rank: int) -> State:
    """So many tensors that the index is compressed."""
    return {f"layer.{n}.weight": torch.tensor([n, -n]) for n in range(1000)}


def pickled(rank: int) -> State:
    """What only pickle can keep."""
    return {"strange": Strange(1.5), "weight": torch.arange(3.0)}


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(rows * columns).view(rows, columns).to(dtype)


WHOLE = {
    "even": matrix(4, 6),
    "uneven": matrix(5, 3),
    "few": matrix(1, 6),
    "columns": matrix(3, 5, torch.bfloat16),
    "replica": matrix(6, 2, torch.float64),
    "large": matrix(400, 200),
    "scalar": torch.tensor(7),
    "none": matrix(0, 3),
}


def shards(rank: int) -> State:
    """DTensors of two ranks: even, uneven, with no rows for one of them, and replicas."""
    rows = {"columns": Shard(1)} | dict.fromkeys(("replica", "large", "scalar"), Replicate())
    return {name: placed(full, [2], [rows.get(name, Shard(0))]) for name, full in WHOLE.items()} | {
        "epoch": 3
    }


def meshes(rank: int) -> State:
    """DTensors on a mesh of two by two."""
    return {
        "hybrid": placed(matrix(5, 6), [2, 2], [Replicate(), Shard(0)]),
        "both": placed(matrix(5, 6), [2, 2], [Shard(0), Shard(1)]),
        "twice": placed(matrix(7, 2), [2, 2], [Shard(0), Shard(0)]),
        "strided": placed(matrix(8, 2), [2, 2], [_StridedShard(0, split_factor=2), Shard(0)]),
        "replica": placed(matrix(300, 300), [2, 2], [Replicate(), Replicate()]),
    }


def meshes_alone() -> State:
    return {
        "hybrid": matrix(5, 6), "both": matrix(5, 6), "twice": matrix(7, 2),
        "strided": matrix(8, 2), "replica": matrix(300, 300),
    }  # fmt: skip


def per_rank(rank: int) -> State:
    """Values and tensors of a rank's own, beside some that all ranks have alike."""
    return {
        "mine": torch.full((3,), rank),
        "shape": torch.zeros(rank),
        "common": torch.arange(4.0),
        "rank": rank,
        "epoch": 3,
        "nested": [{"position": 10 * rank}, ("same", b"bytes")],
    }


def replicated(rank: int) -> State:
    """Plain tensors of which globs say that all ranks have them."""
    return {"model": {"weight": matrix(300, 200), "bias": torch.arange(7.0)}, "rank": rank}


def stages(rank: int) -> State:
    """Tensors that only some of the ranks have, as in pipeline parallelism."""
    held = {0: ("first", "tied"), 1: ("first", "last"), 2: ("last", "tied")}[rank]
    model = {name: stages_alone()["model"][name] for name in held}
    return {"model": model, "mine": torch.tensor([rank])}


def stages_alone() -> State:
    model = {"first": matrix(300, 200), "tied": torch.arange(9.0), "last": matrix(5, 3)}
    return {"model": model, "mine": torch.tensor([0])}


def crowd(rank: int) -> State:
    """What one of more than a hundred ranks has."""
    return {"model": {"weight": matrix(101, 3)}, "mine": torch.tensor([rank]), "rank": rank}


NAN_DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
    torch.float8_e5m2,
)  # fmt: skip


def nan(rank: int) -> State:
    """NaN of each dtype that has some, of rank 1 alone, and infinities."""
    made = {str(each): torch.arange(6.0).to(each) for each in NAN_DTYPES}
    if rank == 1:
        for number, dtype in enumerate(NAN_DTYPES):
            made[str(dtype)][number:] = torch.tensor(math.nan).to(dtype)
    return {"mine": made, "mask": torch.full((3,), -math.inf), "value": math.nan}


FEATURES = {
    "dtypes": Feature(dtypes, settings={"nan": {"check": False}}),  # which it was saved without
    "sharing": Feature(sharing),
    "tensors": Feature(tensors),
    "wrappers": Feature(wrappers),
    "containers": Feature(containers),
    "values": Feature(values),
    "arrays": Feature(arrays),
    "training": Feature(training),
    "captured": Feature(training, save={"until": "captured"}),
    "generators": Feature(generators),
    "many": Feature(many),
    "pickle": Feature(pickled, settings={"pickle": "allow"}, load={"pickle": "allow"}),
    "metadata": Feature(
        lambda rank: {"weight": torch.ones(1)},
        save={
            "metrics": {"loss": 0.25, "worst": math.inf, "none": math.nan, "steps": 3.0},
            "metadata": {"note": "für alle", "nested": [1, 2.5, None, {"x": True}]},
            "final": True,
        },
    ),
    "several files": Feature(
        lambda rank: {str(n): torch.arange(20_000.0) + n for n in range(5)},
        settings={"staging": {"block_bytes": 65536}}, max_blocks=2,
    ),
    "no tensors": Feature(lambda rank: {"epoch": 3}),
    "shards": Feature(shards, ranks=2, alone=lambda: WHOLE | {"epoch": 3}),
    "meshes": Feature(meshes, ranks=4, alone=meshes_alone),
    "per rank": Feature(per_rank, ranks=3, load={"per_rank": "rank0"}),
    "replicated": Feature(
        replicated, ranks=3, settings={"plan": {"replicated": ["model.*"]}},
        load={"per_rank": "rank0"},
    ),
    "stages": Feature(
        stages, ranks=3, load={"per_rank": "rank0"}, alone=stages_alone, together=("model.*",)
    ),
    "nan": Feature(nan, ranks=3, load={"per_rank": "rank0"}),
    "witnesses": Feature(
        lambda rank: {"shared": torch.arange(300.0), "rank": rank},
        ranks=2, settings={"plan": {"replicated": ["shared"]}, "replicas": {"share": 1}},
        load={"per_rank": "rank0"},
    ),
    "incremental": Feature(
        lambda rank: {"base": torch.zeros(3, 1 << 18), "more": torch.ones(1 << 18), "small": WHOLE},
        settings={"incremental": True, "keep_last": 1, "staging": {"block_bytes": 1 << 20}},
        saves=3,
    ),
    "crowd": Feature(
        crowd, ranks=101, settings={"plan": {"replicated": ["model.*"]}},
        load={"per_rank": "rank0"},
    ),
}  # fmt: skip


def save(make: Callable[[], Backend], feature: Feature) -> None:
    """Save a feature by each of its ranks, one after the other.

    Args:
        make: Makes a backend of the store, for each rank.
        feature: The feature.
    """

    def backend(url: str) -> Backend:
        made = make()
        made.limits = UploadLimits(max_blocks=feature.max_blocks)
        return made

    scheme = f"features{next(_numbers)}"
    ckpipe.register_backend(scheme, backend)
    settings: dict[str, Any] = {"attempt_id": "old", "keep_reports": False}
    if "replicas" in ckpipe.Settings.model_fields:  # most were saved without
        settings["replicas"] = {"mode": "off"}
    settings |= feature.settings
    if feature.together:
        _save_together(f"{scheme}://store", feature, settings)
        return
    for rank in range(feature.ranks):
        with ExitStack() as stack:
            if feature.ranks > 1:
                stack.enter_context(rank_of(rank, feature.ranks))
            state = feature.state(rank)
            guard = state["optimizer"] if "until" in feature.save else None
            opened = ckpipe.SyncPipeline(f"{scheme}://store", guard=guard, **settings)
            pipeline = stack.enter_context(opened)
            for step in range(STEP - feature.saves + 1, STEP + 1):
                pipeline.save(state, step=step, **feature.save).wait()


def _save_together(url: str, feature: Feature, settings: dict[str, Any]) -> None:
    """Save a feature by all of its ranks at once, which plan together."""
    store: Any = HashStore()
    with ExitStack() as stack:
        pipelines = []
        for rank in range(feature.ranks):
            plan = ckpipe.GlobalPlanner(store, replicated=feature.together)
            with rank_of(rank, feature.ranks):
                opened = ckpipe.SyncPipeline(url, plan=plan, **settings)
                pipelines.append(stack.enter_context(opened))

        def save_rank(rank: int) -> None:
            pipelines[rank].save(feature.state(rank), step=STEP).wait()

        threads = stack.enter_context(ThreadPoolExecutor(feature.ranks))
        list(threads.map(save_rank, range(feature.ranks)))


def write(*names: str) -> None:
    """Write checkpoints that are not there yet."""
    DATA.mkdir(exist_ok=True)
    for name in names or FEATURES:
        with tempfile.TemporaryDirectory() as root:
            save(partial(LocalBackend, root), FEATURES[name])
            with tarfile.open(DATA / f"{name}.tar.xz", "x:xz") as archive:
                for path in sorted(Path(root).glob("step-*")):
                    archive.add(path, path.name)
