"""Names that name nothing: globs, classes and checkpoints. Nobody is left to find out later."""

from __future__ import annotations

import collections
import dataclasses
import enum
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_type_hints

import pytest
import torch

import ckpipe
from ckpipe import errors
from tests.support.pipelines import Stores, load_existing
from tests.support.rank_pipelines import ranks
from tests.support.settling import settle


def state() -> dict[str, Any]:
    shared = {"x": 1}
    model = {"head": {"w": torch.ones(3)}, "base": torch.zeros(2)}
    return {"model": model, "empty": {}, "one": shared, "other": shared}


def test_a_load_tells_of_globs_that_name_nothing(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.save(state(), step=1).wait()
        for target in (None, state()):
            with pytest.raises(errors.StructureMismatch, match=r"optimzer.*holds empty, model"):
                pipeline.load(target, include=["model.*", "optimzer"])
            result = load_existing(pipeline, target, include=["model.*", "optimzer"], strict=False)
            assert result.missing == ("optimzer",)
            for globs in (["model"], ["*.w"], ["empty"], ["other.x"], ["model.head"], []):
                result = load_existing(pipeline, target, include=globs)
                assert result.missing == ()


def test_a_save_that_would_be_empty_is_refused_and_one_that_lacks_something_warns(
    tmp_path: Path,
) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        with pytest.raises(errors.UsageError, match=r"not in the state: modle\.\*"):
            pipeline.save(state(), step=1, include=["modle.*"])
        with pytest.warns(RuntimeWarning, match="not in the state: optimzer"):
            pipeline.save(state(), step=2, include=["model.*", "optimzer"]).wait()
        pipeline.save(state(), step=3, include=["model.*", "empty"]).wait()
        assert [info.step for info in pipeline.steps()] == [2, 3]


@pytest.mark.parametrize(
    "selection",
    [{"exclude": ["*"]}, {"include": []}, {"include": ["model"], "exclude": ["*.w", "model.base"]}],
)
def test_a_save_of_which_nothing_is_left_takes_no_checkpoints_place(
    tmp_path: Path, selection: Any
) -> None:
    with ckpipe.SyncPipeline(tmp_path, keep_last=1) as pipeline:
        pipeline.save(state(), step=1).wait()
        for each in (state(), {"only": {1}}, [torch.ones(1)]):
            for _ in range(2):
                with pytest.raises(errors.UsageError, match=r"leave nothing|not in the state"):
                    pipeline.save(each, step=2, **selection)
        assert [info.step for info in pipeline.steps()] == [1]


@pytest.mark.parametrize("nothing", [{}, {"a": {}, "b": []}])
def test_a_state_that_is_empty_by_itself_is_saved(tmp_path: Path, nothing: Any) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        selections: list[dict[str, Any]] = [{}, {"exclude": ["*"]}, {"include": []}]
        for step, selection in enumerate(selections):
            pipeline.save(nothing, step=step, **selection).wait()
            result = load_existing(pipeline)
            assert (result.step, result.state) == (step, nothing)
        pipeline.save({"s": {1}, "x": 1}, step=9, include=["s"]).wait()


def test_what_another_rank_has_saved_may_be_named_and_only_that(store: Stores) -> None:
    settings: dict[str, Any] = {"staging": {"block_bytes": 65536}}
    with ranks(store.url, 2, attempt_id="before", **settings) as world:
        for rank, pipeline in enumerate(world):
            mine = {f"layer{rank}": torch.ones(3), "rank": rank}
            # Rank 1 has nothing of what is named first, which is no mistake.
            pipeline.save(mine, step=1, include=["layer0", "layer1"]).wait()
            settle(pipeline)
        for rank, pipeline in enumerate(world):
            target: dict[str, Any] = {f"layer{rank}": torch.zeros(3), "rank": rank}
            assert pipeline.load(target, step=1, include=["layer0", "layer1"]) is not None
            assert target[f"layer{rank}"].tolist() == [1, 1, 1]
            with pytest.raises(errors.StructureMismatch, match="layer2"):
                pipeline.load(target, step=1, include=["layer0", "layer2"])


def test_references_that_multiply_are_not_followed_for_ever(tmp_path: Path) -> None:
    tree: Any = {"leaf": 1}
    for _ in range(40):
        tree = [tree, tree]
    looped: dict[str, Any] = {"x": 1}
    looped["me"] = looped
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.save({"tree": tree}, step=1).wait()
        result = load_existing(pipeline, include=["tree.*.leaf"])
        found = result.state["tree"]
        pipeline.save({"loop": looped}, step=2).wait()
        result = load_existing(pipeline, include=["loop.x", "loop.me.me", "loop.y"], strict=False)
        assert result.missing == ("loop.me.me", "loop.y")
    for _ in range(40):
        assert found[0] is found[1]
        found = found[0]
    assert found == {"leaf": 1}


def test_objects_of_a_class_that_is_not_found_again_are_told_of(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Inner:
        x: int

    pair = collections.namedtuple("pair", "a b")
    for number, value in enumerate((Inner(1), pair(1, 2))):
        with ckpipe.SyncPipeline(tmp_path / str(number)) as pipeline:
            with pytest.warns(RuntimeWarning, match=r"(Inner|pair) is not found by that name"):
                pipeline.save({"v": value}, step=1).wait()
            assert pipeline.load({"v": value}) is not None
            with pytest.raises(errors.StructureMismatch, match="not defined here"):
                pipeline.load()


def test_a_checkpoint_is_named_by_a_step_an_id_or_its_info(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        for step in (0, 1):
            info = pipeline.save(state(), step=step).wait()
        for wrong in (True, None, 1.0, [1]):
            with pytest.raises(errors.UsageError, match="its step, its id or its info"):
                pipeline.pin(wrong)  # type: ignore[arg-type]
        with pytest.raises(errors.CheckpointNotFound, match="A step is an int, not a string: 1"):
            pipeline.load(step="1")
        for right in (1, info, info.id, torch.tensor(1)):
            pipeline.pin(right)  # type: ignore[arg-type]
        assert [each.pinned for each in pipeline.steps()] == [False, True]


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Spot:
    x: int


class Pair(NamedTuple):
    x: int


class Marked(torch.Tensor):
    pass


OF_CLASSES = {
    "enum": Colour.RED,
    "dataclass": Spot(1),
    "named tuple": Pair(1),
    "tensor": torch.zeros(2).as_subclass(Marked),
}


@pytest.mark.parametrize("what", OF_CLASSES)
def test_a_class_that_is_gone_is_named_with_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    value = OF_CLASSES[what]
    with ckpipe.SyncPipeline(tmp_path / "run") as pipeline:
        pipeline.save({"in": {"it": value, "n": 1}}, step=1, until="committed")
        monkeypatch.delattr(sys.modules[__name__], type(value).__name__)
        with pytest.raises(errors.StructureMismatch, match=type(value).__name__) as caught:
            pipeline.load()
        assert caught.value.key == "in.it"
        rest = load_existing(pipeline, exclude=["in.it"])
        assert rest.state["in"]["n"] == 1


def test_a_member_of_an_enum_that_is_gone_is_named_with_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckpipe.SyncPipeline(tmp_path / "run") as pipeline:
        pipeline.save({"in": [0, Colour.RED]}, step=1, until="committed")
        other = enum.Enum("Colour", {"BLUE": 1}, module=__name__)  # type: ignore[misc]
        monkeypatch.setattr(sys.modules[__name__], "Colour", other)
        for target in (None, {"in": [0, other(1)]}):
            with pytest.raises(errors.StructureMismatch, match="no member 'RED'") as caught:
                pipeline.load(target)
            assert caught.value.key == "in.1"


def test_a_relative_root_in_a_directory_that_is_gone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    refused = r"working directory was deleted.*'run'.*absolute path"
    with pytest.raises(errors.UsageError, match=refused):
        ckpipe.load("run")
    with pytest.raises(errors.UsageError, match=refused), ckpipe.SyncPipeline("run"):
        pass


class Asked:
    """Counts how often it is asked and loaded; a part of its state is empty."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        self.calls.append("state_dict")
        return {"number": 1, "empty": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append("load_state_dict")


@pytest.mark.parametrize("select", [{"exclude": ["asked"]}, {"include": ["num*"]}])
@pytest.mark.parametrize("was_saved", [True, False])
def test_an_object_that_is_left_out_is_neither_asked_nor_loaded(
    tmp_path: Path, select: dict[str, Any], was_saved: bool
) -> None:
    state = {"number": 1} | ({"asked": Asked()} if was_saved else {})
    with ckpipe.SyncPipeline(tmp_path / "run") as pipeline:
        pipeline.save(state, step=1, until="committed")
        asked = Asked()
        target = {"number": 0, "asked": asked}
        pipeline.load(target, **select)
        assert target["number"] == 1
        assert asked.calls == []
        pipeline.save(state, step=2, until="committed", **select)
        fresh = load_existing(pipeline)
        assert fresh.state == {"number": 1}


def test_an_unknown_option_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        with pytest.raises(TypeError, match=r"save\(\) .*'metric'. Did you mean 'metrics'\?"):
            pipeline.save(state(), step=1, metric={})  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=r"load\(\) .*'exclud'. Did you mean 'exclude'\?"):
            pipeline.load(state(), exclud=["model"])  # type: ignore[call-arg]
        assert pipeline.steps() == []
    with pytest.raises(errors.SettingsError, match="exclud"):
        ckpipe.load(tmp_path, exclud=["model"])  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "name", ["settings", "caller", "call", "guards", "unwrap", "begun", "select"]
)
def test_no_argument_of_the_inside_is_an_option(tmp_path: Path, name: str) -> None:
    given: dict[str, Any] = {name: None}
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        with pytest.raises(TypeError, match=rf"save\(\) got an unexpected .*'{name}'"):
            pipeline.save(state(), 1, **given)
        with pytest.raises(TypeError, match=rf"load\(\) got an unexpected .*'{name}'"):
            pipeline.load(state(), **given)


@pytest.mark.parametrize("call", [ckpipe.load, ckpipe.Pipeline.load, ckpipe.SyncPipeline.load])
def test_types_of_options_can_be_looked_up(call: Callable[..., Any]) -> None:
    hints = get_type_hints(call)
    assert hints["strict"] == bool | Literal["shapes"]
    assert "options" not in hints
