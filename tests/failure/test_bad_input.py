"""Bad input: each kind has its own clear error, and nothing is lost by it.

Messages are held to what users need: the step, the key where there is one, and what to do next.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpipe
from ckpipe import errors
from tests.failure.mounts import mounted
from tests.support.one_checkpoint import load_one, save_one, says, verify_one
from tests.support.pipelines import load_existing, loaded_state, same, small_state

# Targets that cannot be written


class TestTarget:
    """Where checkpoints cannot go."""

    def test_path_below_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("mine")
        with pytest.raises(errors.StoreError) as caught, ckpipe.SyncPipeline(tmp_path / "file/run"):
            pass
        says(caught.value, re.escape(str(tmp_path / "file/run")), "file", "Remove|name another")
        assert (tmp_path / "file").read_text() == "mine"

    def test_mount_that_is_read_only(self, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        with (
            mounted(["-o", "bind,ro", str(tmp_path / "run")], tmp_path / "ro") as root,
            pytest.raises(errors.PermissionDenied) as caught,
            ckpipe.SyncPipeline(root / "sub"),
        ):
            pass
        says(caught.value, "(?i)read-only", "Mount .* for writing, name another", "read_only=True")

    def test_directory_that_is_taken_away_during_a_run(self, tmp_path: Path) -> None:
        root = tmp_path / "run"
        with ckpipe.SyncPipeline(root) as pipeline:
            pipeline.save(small_state(), step=0).wait()
            # In one go: what a save leaves for later may still write into the directory.
            root.rename(tmp_path / "taken")
            root.write_text("something else")
            with pytest.raises(errors.StoreError) as caught:
                pipeline.save(small_state(), step=1).wait()
            says(caught.value, "step 1", "key 'step-000000000001")
            root.unlink()
            root.mkdir()
            pipeline.save(small_state(), step=2).wait()
            pipeline.verify(2)


# Keys

ODD_KEYS: list[dict[Any, Any]] = [
    {1: 0, "1": 1},
    {"a.b": 0, "a": {"b": 1}},
    {"/": 0, "..": {"..": 1}, ".": 2, "a/b": 3, "a": {"b": 4}},
    {"@": 0, "a@0:1": 1, "a": 2, "~": 3, "~0": 4, "~~": 5},
    {"__metadata__": 0, "__class__": 1, "dict": 2},
    {"ä": 0, "a\u0308": 1, "日本": 2, "🎉": 3, "\u202e": 4, "\0": 5, "\n": 6, "\x7f": 7},
    {"\ud800": 0, "\udfff\ud800": 1, "a\udc80": 2},
    {"k" * 4096: 0, "k" * 4095: 1},
    {"": 0, "x": {"": {"": 1}}, " ": 2},
    {(1, "a"): 0, (1, ("a", None)): 1, (): 2, ("1",): 3, (1,): 4},
    {1.5: 0, -0.0: 1, math.inf: 2, -math.inf: 3, 1e300: 4, 2: 5},
    {True: 0, "True": 1, None: 2, "None": 3},
    {False: 0, "0": 1, 2**70: 2, -(2**70): 3, "state": 4, "param_groups": 5},
]


@pytest.mark.sample(10)
@pytest.mark.parametrize("values", ["tensors", "numbers"])
@pytest.mark.parametrize("keys", ODD_KEYS, ids=range(len(ODD_KEYS)))
def test_odd_keys_survive_exactly(tmp_path: Path, keys: dict[Any, Any], values: str) -> None:
    make = (lambda n: torch.tensor([n, n])) if values == "tensors" else (lambda n: n)
    state, target = mapped(keys, make), mapped(keys, lambda n: make(n + 100))
    save_one(tmp_path, state)
    verify_one(tmp_path)
    fresh = load_one(tmp_path).state
    assert same(fresh, state)
    assert typed_keys(fresh) == typed_keys(state)
    assert same(load_one(tmp_path, target).state, state)
    assert same(target, state)


def mapped(keys: dict[Any, Any], make: Callable[[int], Any]) -> dict[Any, Any]:
    return {k: mapped(v, make) if isinstance(v, dict) else make(v) for k, v in keys.items()}


def typed_keys(state: Any) -> Any:
    """The keys with their types, since to Python 1, 1.0 and True are one key."""
    if not isinstance(state, dict):
        return None
    return [(type(key), repr(key), typed_keys(item)) for key, item in state.items()]


@pytest.mark.parametrize("keys", [(1, True), (1, 1.0), (0, False), (1, "1")])
def test_keys_that_python_takes_for_one_stay_apart(
    tmp_path: Path, keys: tuple[object, object]
) -> None:
    saved, other = keys
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.save({"a": {saved: torch.ones(3)}}, step=1, until="committed")
        target = {"a": {other: torch.zeros(3)}}
        with pytest.raises(errors.StructureMismatch):
            pipeline.load(target)
        assert not target["a"][other].any()


def test_keys_that_make_one_label_stay_apart(tmp_path: Path) -> None:
    a, b, c, d = (torch.full((3,), n) for n in range(4))
    state = {"x.y.z": a, "x.y": {"z": b}, "x": {"y.z": c, "y": {"z": d}}}
    save_one(tmp_path, state, step=1)
    assert same(load_one(tmp_path).state, state)


@pytest.mark.parametrize("key", [b"bytes", frozenset(), object()], ids=["bytes", "set", "object"])
def test_keys_that_no_checkpoint_can_hold_are_refused(tmp_path: Path, key: Any) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        with pytest.raises(errors.UnsupportedState) as caught:
            pipeline.save({"outer": {key: 1}}, step=6)
        says(caught.value, "step 6", "outer", type(key).__name__)
        assert pipeline.steps() == []


@pytest.mark.parametrize(
    ("bad", "where", "what"),
    [
        ({"a": [1, object()]}, "a.1", "object"),
        ({"s": torch.ones(2).to_sparse()}, "s", "sparse"),
        ({"m": torch.empty(1, device="meta")}, "m", "meta"),
        ({"n": np.array([object()])}, "n", "A numpy array of dtype object cannot be saved"),
        ({"n": np.ma.array([1])}, "n", "numpy array of the class MaskedArray cannot be saved"),
        ({"d": defaultdict(lambda: 0)}, "d", "default"),
        ({"f": verify_one}, "f", "function"),
        ({"x": {1, (2, frozenset())}}, "x", "set"),
    ],
)
def test_values_that_no_checkpoint_can_hold_are_named(
    tmp_path: Path, bad: Any, where: str, what: str
) -> None:
    with pytest.raises(errors.UnsupportedState, match=what) as caught:
        save_one(tmp_path, bad)
    assert caught.value.key == where


# Calls that come at the wrong time, or twice


@pytest.mark.parametrize("attempt_id", ["", "a/b", "..", "a.b", "ä", "x" * 300])
def test_attempt_ids_that_are_no_names_are_refused(tmp_path: Path, attempt_id: str) -> None:
    with (
        pytest.raises(errors.SettingsError, match="attempt_id"),
        ckpipe.SyncPipeline(tmp_path, attempt_id=attempt_id),
    ):
        pass


def test_steps_of_numpy_are_steps(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path, save_every_steps=5) as pipeline:
        assert pipeline.should_save(np.int64(5))
        pipeline.save({"a": 1}, np.int64(5)).wait()
        (info,) = pipeline.steps()
        assert info.step == 5


@pytest.mark.parametrize("step", [-1, 10**12, 1.5, "7", True])
def test_steps_that_are_no_steps_are_refused(tmp_path: Path, step: Any) -> None:
    with (
        ckpipe.SyncPipeline(tmp_path) as pipeline,
        pytest.raises(errors.UsageError, match=re.escape(repr(step))),
    ):
        pipeline.save({"a": 1}, step=step)


# Values


@pytest.mark.parametrize("state", [{"at": 10**4300}, {"at": {-(10**4300): 1}}])
def test_integers_that_no_reader_would_take_are_refused(tmp_path: Path, state: Any) -> None:
    save_one(tmp_path, {"at": {10**4300 - 1: -(10**4300) + 1}})
    assert load_one(tmp_path).state == {"at": {10**4300 - 1: -(10**4300) + 1}}
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        with pytest.raises(errors.UnsupportedState) as caught:
            pipeline.save(state, step=8)
        says(caught.value, "step 8", "key 'at'", "more than 4300 digits")
    state = {"at": 10**4300}
    with ckpipe.SyncPipeline(tmp_path, pickle="allow") as pipeline:
        pipeline.save(state, step=9).wait()
        result = load_existing(pipeline, pickle="allow")
        assert result.state == state


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"metrics": {"loss": "low"}}, "Metrics"),
        ({"metrics": {"loss": torch.ones(3)}}, "Metrics are.*Pass one number"),
        ({"metrics": {1: 1.0, "1": 2.0}}, "Metrics.*'1'"),
        ({"metadata": {"in": {1: "a", "1": "b"}}}, "Metadata.*'1'"),
        ({"metadata": {"a": math.nan}}, "Metadata"),
        ({"metadata": {"a": object()}}, "Metadata must be plain JSON.*key 'a'"),
        ({"metadata": {"a": {1, 2}}}, "Metadata"),
    ],
)
def test_metrics_and_metadata_are_checked(
    tmp_path: Path, arguments: dict[str, Any], what: str
) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        with pytest.raises(errors.UsageError) as caught:
            pipeline.save({"a": 1}, step=8, **arguments)
        says(caught.value, what, "step 8")
        assert pipeline.steps() == []


@pytest.mark.parametrize("kind", ["tensor", "parameter"])
def test_tensors_whose_memory_was_freed_are_refused(tmp_path: Path, kind: str) -> None:
    # FSDP frees parameters between uses; reading where they were would end the process.
    weight = torch.nn.Parameter(torch.ones(1000)) if kind == "parameter" else torch.ones(1000)
    state = {"weight": weight, "other": torch.ones(4)}
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        for step in range(2):  # the second goes by the plan of the first
            pipeline.save(state, step=step).wait()
        weight.untyped_storage().resize_(0)
        with pytest.raises(errors.UnsupportedState, match="no memory") as refused:
            pipeline.save(state, step=2)
        assert (refused.value.key, refused.value.step) == ("weight", 2)
        state["other"].zero_()
        with pytest.raises(errors.StructureMismatch, match="no memory") as unfit:
            pipeline.load(state)
        assert (unfit.value.key, unfit.value.step) == ("weight", 1)
        assert not state["other"].any()
        weight.untyped_storage().resize_(4000)
        assert pipeline.load(state) is not None
        assert weight.eq(1).all()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("until", ["staged", "captured"])
def test_a_tensor_that_has_become_nested_is_refused_by_name(
    tmp_path: Path, layout: torch.layout, until: Any
) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight])
    state: dict[str, Any] = {"weight": weight, "other": torch.zeros(2, 2)}
    with ckpipe.SyncPipeline(tmp_path, guard=optimizer) as pipeline:
        pipeline.save(state, step=0, until=until).wait()
        state["other"] = torch.nested.nested_tensor(
            [torch.zeros(2, 2), torch.zeros(1, 2)], layout=layout
        )
        with pytest.raises(errors.UnsupportedState, match=r"tensor .*(nested|layout)") as refused:
            pipeline.save(state, step=1, until=until)
        assert (refused.value.key, refused.value.step) == ("other", 1)
        # What the optimizer owns besides is looked at, too.
        optimizer.state[weight]["lengths"] = state.pop("other")
        pipeline.save(state, step=2, until=until).wait()
        pipeline.verify(2)


@pytest.fixture
def recursion_limit() -> Iterator[int]:
    limit = sys.getrecursionlimit()
    yield limit
    sys.setrecursionlimit(limit)


def nested(levels: int) -> Any:
    found: Any = torch.ones(1)
    for _ in range(levels):
        found = [found]
    return {"deep": found}


def test_nesting_that_fits_the_recursion_limit_survives(
    tmp_path: Path, recursion_limit: int
) -> None:
    save_one(tmp_path, nested(150), step=1)
    assert same(load_one(tmp_path).state, nested(150))
    for levels in (400, 100_000):
        with pytest.raises(errors.UnsupportedState) as caught:
            save_one(tmp_path, nested(levels))
        says(
            caught.value,
            f"limit of {recursion_limit}",
            "about \\d+ containers",
            "sys.setrecursionlimit",
        )
    sys.setrecursionlimit(20 * recursion_limit)
    save_one(tmp_path, nested(400))
    verify_one(tmp_path)
    found, levels = load_one(tmp_path).state["deep"], 0
    while isinstance(found, list):
        (found,), levels = found, levels + 1
    assert levels == 400
    sys.setrecursionlimit(recursion_limit)
    with pytest.raises(errors.CkpipeError, match="nested too deeply"):
        load_one(tmp_path)


class Holder:
    """An object that only pickle can save."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("pickle", ["allow", "refuse"])
def test_storage_is_refused(tmp_path: Path, inside: bool, pickle: Any) -> None:
    weight = torch.arange(4.0)
    storage = weight.untyped_storage()
    state = {"it": Holder(storage) if inside else storage, "weight": weight}
    with ckpipe.SyncPipeline(tmp_path, pickle=pickle) as pipeline:
        with pytest.raises(errors.UnsupportedState) as refused:
            pipeline.save(state, step=1)
        assert (refused.value.key, refused.value.step) == ("it", 1)
        says(refused.value, "state_dict" if inside else "tensor over it: torch.empty")
        state["it"] = torch.empty(0, dtype=torch.uint8).set_(storage)
        pipeline.save(state, step=2).wait()
        loaded = loaded_state(pipeline)
    assert loaded["it"].tolist() == list(weight.view(torch.uint8))


def test_structured_array_is_refused_with_what_works(tmp_path: Path) -> None:
    table = np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i4"), ("b", "f8")])
    for array, way in [(table, "Save arr"), (np.rec.array(table), "np.asarray(arr)")]:
        with pytest.raises(errors.UnsupportedState) as refused:
            save_one(tmp_path, {"table": array})
        assert refused.value.key == "table"
        says(refused.value, re.escape(f"{way}.view(np.uint8)"))
    save_one(tmp_path, {"table": table.view(np.uint8)})
    assert load_one(tmp_path).state["table"].view(table.dtype).tolist() == table.tolist()


@dataclass
class Box:
    inner: Any


ckpipe.register_type(Box, to_state=lambda box: {"inner": box.inner}, from_state=lambda s: Box(**s))


@pytest.mark.parametrize(
    "filters", [{"include": ["w", "counts.a"]}, {"exclude": ["*.a"]}], ids=["include", "exclude"]
)
def test_a_part_of_an_object_of_a_registered_type_is_refused(
    tmp_path: Path, filters: dict[str, Any]
) -> None:
    state: dict[str, Any] = {"w": torch.ones(2), "counts": Counter(a=1, b=2)}
    with pytest.raises(errors.UsageError, match=r"leave a part of .*Select all") as raised:
        save_one(tmp_path, state, **filters)
    assert raised.value.key == "counts"
    save_one(tmp_path, state)
    target: dict[str, Any] = {"w": torch.zeros(2), "counts": Counter(a=9, b=9)}
    with pytest.raises(errors.UsageError, match=r"leave a part of .*Select all") as raised:
        load_one(tmp_path, target, **filters)
    assert raised.value.key == "counts"
    assert target["counts"] == Counter(a=9, b=9)
    assert same(target["w"], torch.zeros(2))
    # The same, where it was left out of a dict that stands elsewhere too.
    shared = {"u": 1, "v": 2}
    state = {"a": shared, "box": Box(shared)}
    with pytest.raises(errors.UsageError, match=r"leave a part of .*Select all") as raised:
        save_one(tmp_path / "shared", state, exclude=["a.v"])
    assert raised.value.key == "box"
    save_one(tmp_path / "shared", state)
    with pytest.raises(errors.UsageError, match=r"leave a part of .*Select all") as raised:
        load_one(tmp_path / "shared", exclude=["a.v"])
    assert raised.value.key == "box"
    for whole in ({"include": ["counts"]}, {"include": ["counts.*"]}, {"exclude": ["w"]}):
        load_one(tmp_path, target, **whole)
        assert target["counts"] == Counter(a=1, b=2)
        target["counts"] = Counter(a=9, b=9)
