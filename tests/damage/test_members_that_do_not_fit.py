"""Indexes and manifests with right checksums, of which one member has a value that does not fit.

Each member of a real object is given a value of each other type of JSON. Whatever is asked of the
checkpoint then gives a result or an error of ckpipe, and a load that fails has touched nothing.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import ckpipe
from ckpipe.distributed import training_state
from ckpipe.errors import CkpipeError, CorruptCheckpoint, InvalidManifest
from tests.support.rank_pipelines import ranks
from tests.support.sampling import EVERY, SEED
from tests.support.stored_files import document_of, manifest_key, sealed

Path_ = tuple[Any, ...]

DROPPED: Any = object()
OTHERS: list[Any] = [
    None, True, 3, -1, 1.5, 10**400, 1 << 62, "x", "", [], [1], [None], {}, {"a": 1}, DROPPED,
]  # fmt: skip


def state() -> dict[Any, Any]:
    """Make a state of all kinds that ckpipe itself takes apart, with values of its own."""
    base = torch.arange(6, dtype=torch.int32)
    model = torch.nn.Linear(3, 2)
    adam = torch.optim.AdamW(model.parameters())
    model(torch.rand(3)).sum().backward()
    adam.step()
    attributed: Any = torch.rand(2)
    attributed.mine = 3
    shared = [random.random()]
    batches = ckpipe.Batches(DataLoader(list(range(8)), batch_size=2))  # type: ignore[arg-type]
    next(iter(batches))
    return {
        "w": torch.rand(2, 3), "t": torch.rand(2, 3).T, "views": [base[:4], base[2:]],
        "one": 1, "big": 2**70, "nan": float("nan"), "bytes": b"abc", "complex": 1j,
        ("k", 1): {"again": None}, 2.5: {2**60: torch.float16}, "set": {1, 2},
        "deque": deque([1, 2], maxlen=3), "ordered": OrderedDict(a=shared),
        "default": defaultdict(list, {"a": shared}), "attributed": attributed,
        "model": model, "adam": adam, "training": training_state(model, adam),
        "schedule": torch.optim.lr_scheduler.StepLR(adam, 2),
        "rng": ckpipe.RngState(), "progress": ckpipe.Progress(step=5), "batches": batches,
    }  # fmt: skip


def facts(state: dict[Any, Any]) -> str:
    """Return all values of a state as text, and those of the generators that a load sets."""
    plain = {key: each.state_dict() if hasattr(each, "state_dict") else each
             for key, each in state.items()}  # fmt: skip
    return repr((plain, state["attributed"].mine, random.getstate(), torch.get_rng_state().sum()))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a checkpoint of one rank, and a later one whose index tests replace."""
    root = tmp_path_factory.mktemp("members")
    for step in (1, 2):
        with ckpipe.SyncPipeline(root) as pipeline:
            if step == 2:
                pipeline.load(include=["w"])
            metadata = {"name": "x", "a": [1, {"b": None}]}
            pipeline.save(state(), step=step, metrics={"loss": 2.0 - step}, metadata=metadata)
    return root


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a checkpoint of two ranks, which share a tensor and differ in another."""
    root = tmp_path_factory.mktemp("together")
    with ranks(str(root), 2, plan={"replicated": ["same"]}) as pipelines:
        for rank, pipeline in enumerate(pipelines):
            shares = {"same": torch.ones(3), "own": torch.full((2,), float(rank)), "rank": rank}
            pipeline.save(shares, step=2, metrics={"loss": float(rank)})
    return root


def members(value: Any, at: Path_ = ()) -> Iterator[Path_]:
    """Yield the paths of all members of a document and of their own."""
    keyed = dict(enumerate(value)) if isinstance(value, list) else value
    for key, each in keyed.items() if isinstance(keyed, dict) else ():
        yield (*at, key)
        yield from members(each, (*at, key))


def changed(document: Any, at: Path_, new: Any) -> bytes:
    """Return a document with another value at a path, with right checksums."""
    document = inside = copy.deepcopy(document)
    for key in at[:-1]:
        inside = inside[key]
    if new is DROPPED:
        del inside[at[-1]]
    else:
        inside[at[-1]] = new
    return sealed(document)


def cases(document: Any, count: int) -> list[tuple[Path_, Any]]:
    """Draw changes of so many kinds of members: those of one name, at any number."""
    kinds: defaultdict[Any, list[tuple[Path_, Any]]] = defaultdict(list)
    for at in members(document):
        names = [key for key in at if isinstance(key, str)]
        kinds[*names[:3], len(at) if "tree" in names else 0] += [(at, new) for new in OTHERS]
    draw, most = random.Random(SEED), 8 if EVERY else 1
    drawn = [*kinds.values()] if EVERY else draw.sample([*kinds.values()], count)
    return [each for group in drawn for each in draw.sample(group, min(most, len(group)))]


def questions(root: Path, pipeline: ckpipe.SyncPipeline) -> list[Callable[[], object]]:
    return [
        lambda: pipeline.load(step=2, per_rank="rank0"),
        lambda: pipeline.steps(metadata=True),
        lambda: pipeline.best("loss"),
        lambda: pipeline.choose(name="x"),
        lambda: pipeline.prune(dry_run=True),
        lambda: pipeline.verify(2),
        lambda: repr(ckpipe.inspect(root, 2)),
    ]


def asked(question: Callable[[], object]) -> CkpipeError | None:
    """Return the error of a question; any but those of ckpipe is raised."""
    try:
        question()
    except CkpipeError as error:
        return error
    return None


def loaded_or_untouched(pipeline: ckpipe.SyncPipeline, at: Path_) -> CkpipeError | None:
    target = state()
    before = facts(target)
    error = asked(lambda: pipeline.load(target, 2))
    if isinstance(error, CorruptCheckpoint) and error.target_touched:
        assert at[:2] == ("parts", "checksums")  # those of bytes, found when these are read
    elif error is not None:
        assert facts(target) == before, at
    return error


def test_a_value_that_does_not_fit_is_refused_or_does_no_harm(root: Path) -> None:
    path = max(root.glob("*.json"))
    whole = path.read_bytes()
    document = document_of(whole)
    for at, new in cases(document, 40):
        path.write_bytes(changed(document, at, new))
        for each in root.glob(".ckpipe/digests/*"):
            each.unlink()  # so that the index is read
        with ckpipe.SyncPipeline(root, keep_last=1) as pipeline:
            loaded_or_untouched(pipeline, at)
            for question in questions(root, pipeline):
                asked(question)
    path.write_bytes(whole)


@pytest.mark.parametrize("kind", ["index", "manifest"])
def test_a_value_that_does_not_fit_among_ranks(together: Path, kind: str) -> None:
    (index,) = together.glob("*.json")
    path = index if kind == "index" else together / manifest_key(index.stem, 1)
    kept = {each: each.read_bytes() for each in (index, path)}
    document = document_of(kept[path])
    for at, new in cases(document, 15):
        index.unlink(missing_ok=True)  # made anew from the manifests, unless it is the changed one
        path.write_bytes(changed(document, at, new))
        with ckpipe.SyncPipeline(together, keep_last=1) as pipeline:
            target = {"same": torch.zeros(3)}
            error = asked(lambda: pipeline.load(target, 2, include=["same"]))  # noqa: B023
            if not (isinstance(error, CorruptCheckpoint) and error.target_touched):
                assert (target["same"] == float(error is None)).all(), at
            for question in questions(together, pipeline):
                asked(question)
        index.write_bytes(kept[index])
    for each, data in kept.items():
        each.write_bytes(data)


def node_at(tree: Any, *keys: Any) -> Path_:
    """Return the path in a document of the node under some keys of its tree."""
    at: Path_ = ("structures", 0, "tree")
    for key in keys:
        while tree[0] in ("stateful", "shared"):
            at, tree = (*at, len(tree) - 1), tree[-1]
        place = tree[1].index(key) if "dict" in tree[0] else key
        at, tree = (*at, len(tree) - 1, place), tree[-1][place]
    while tree[0] in ("stateful", "shared"):
        at, tree = (*at, len(tree) - 1), tree[-1]
    return at


FOUND: dict[str, tuple[Any, ...]] = {
    "optimizer without state": ("adam", "rename", "state"),
    "optimizer without groups": ("adam.param_groups", "empty"),
    "group without parameters": ("adam.param_groups.0", "rename", "params"),
    "state without a step": ("adam.state.0", "rename", "step"),
    "generator of another class": ("rng.numpy.bit_generator", "value", "other"),
    "generator of a position that is text": ("rng.numpy.state.pos", "value", "x"),
    "generator of a huge position": ("rng.numpy.state.pos", "value", 1 << 50),
    "generator without a version": ("rng.python.version", "value", None),
    "generators of batches": ("batches.generators.python.version", "value", 9),
    "epochs of batches": ("batches.begun.epochs", "value", 1.5),
    "own generators of batches": ("batches.own", "value", "x"),
    "names that are numbers": ("training.model", "rename", "weight"),
    "shape that is a number": ("training.optimizer.groups.weight.params", "values", 3),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("case", FOUND)
def test_states_of_known_objects_that_do_not_fit_are_refused(root: Path, case: str) -> None:
    where, how, *more = FOUND[case]
    path = max(root.glob("*.json"))
    whole = path.read_bytes()
    document = document_of(whole)
    tree = document["structures"][0]["tree"]
    at = node_at(tree, *(int(key) if key.isdigit() else key for key in where.split(".")))
    node: Any = document
    for key in at:
        node = node[key]
    if how == "rename":
        node[1][node[1].index(more[0])] = 3
    elif how == "empty":
        node[-1].clear()
    else:
        leaves = [node] if how == "value" else node[-1]
        for leaf in leaves:
            document["values"][0][leaf[1]] = more[0]
    path.write_bytes(sealed(document))
    try:
        with ckpipe.SyncPipeline(root, read_only=True) as pipeline:
            assert loaded_or_untouched(pipeline, at) is not None
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("metrics", [None, True, "x", [], {}, 10**400], ids=range(6))
def test_metrics_that_are_no_numbers_are_refused_untouched(root: Path, metrics: Any) -> None:
    path = max(root.glob("*.json"))
    whole = path.read_bytes()
    path.write_bytes(changed(document_of(whole), ("metrics", 0, "loss"), metrics))
    try:
        with ckpipe.SyncPipeline(root, read_only=True) as pipeline:
            error = loaded_or_untouched(pipeline, ())
        assert type(error) is InvalidManifest
        assert error.key == path.name
    finally:
        path.write_bytes(whole)
