"""A training state loads to the bit, or raises and leaves model and optimizer as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer

from ckpipe import SyncPipeline
from ckpipe.distributed import training_state
from ckpipe.errors import (
    CkpipeError,
    DtypeMismatch,
    ShapeMismatch,
    SharingConflict,
    StructureMismatch,
    UnsupportedState,
    UsageError,
)
from ckpipe.types import LoadResult
from tests.support.differences import difference
from tests.support.pipelines import load_existing

Run = tuple[nn.Module, Optimizer]
_Net = TypeVar("_Net", bound=nn.Module)


class Net(nn.Module):
    """Two layers, a head that forward does not use, and a buffer."""

    def __init__(self, width: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.unused = nn.Linear(width, 2)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.norm(x)
        return out


def step(net: nn.Module, *optimizers: Optimizer, steps: int = 2) -> list[float]:
    """Train, and return the losses."""
    losses = []
    width = next(net.parameters()).shape[-1]
    for number in range(steps):
        inputs = torch.arange(3.0 * width).view(3, width).sin() + number
        inputs = inputs.to(next(net.parameters()).dtype)

        def loss(inputs: torch.Tensor = inputs) -> torch.Tensor:
            for optimizer in optimizers:
                optimizer.zero_grad()
            value: torch.Tensor = (net(inputs) - 1).square().mean()
            value.backward()  # type: ignore[no-untyped-call]
            return value

        losses.append(loss().item())
        for optimizer in optimizers:
            if isinstance(optimizer, LBFGS):
                optimizer.step(loss)  # type: ignore[no-untyped-call]
            else:
                optimizer.step()
    return losses


def made(
    kind: Callable[..., Optimizer] = AdamW, seed: int = 0, **options: Any
) -> tuple[Net, Optimizer]:
    torch.manual_seed(seed)
    net = Net()
    return net, kind(net.parameters(), **{"lr": 0.1} | options)


def everything(net: nn.Module, *optimizers: Optimizer) -> Any:
    """A copy of all that a load could touch."""
    held = [
        (
            [(key, dict(value)) for key, value in optimizer.state_dict()["state"].items()],
            [dict(group) for group in optimizer.param_groups],
        )
        for optimizer in optimizers
    ]
    return copy.deepcopy((dict(net.state_dict()), held, torch.get_rng_state()))


def assert_same(found: Any, expected: Any) -> None:
    """Compare to the bit, dtypes included."""
    wrong = difference(found, expected)
    assert wrong is None, wrong


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[SyncPipeline]:
    with SyncPipeline(tmp_path / "run") as opened:
        yield opened


def save(pipeline: SyncPipeline, net: Any, *optimizers: Optimizer) -> None:
    pipeline.save({"training": training_state(net, *optimizers)}).wait()


def trained_and_saved(
    pipeline: SyncPipeline, run: tuple[_Net, Optimizer]
) -> tuple[_Net, Optimizer]:
    """Train a model, and save it."""
    step(*run)
    save(pipeline, *run)
    return run


def stored(
    pipeline: SyncPipeline, kind: Callable[..., Optimizer] = AdamW, **options: Any
) -> tuple[Net, Optimizer]:
    """Make and train a model, and save it."""
    return trained_and_saved(pipeline, made(kind, **options))


def load(pipeline: SyncPipeline, net: Any, *optimizers: Optimizer, **how: Any) -> LoadResult:
    return load_existing(pipeline, {"training": training_state(net, *optimizers)}, **how)


def refused(
    pipeline: SyncPipeline,
    error: type[CkpipeError],
    match: str,
    net: nn.Module,
    *optimizers: Optimizer,
    **how: Any,
) -> None:
    """Make sure that a load raises, and leave everything as it was."""
    before = everything(net, *optimizers)
    with pytest.raises(error, match=match) as caught:
        load(pipeline, net, *optimizers, **how)
    assert caught.value.key
    assert caught.value.hint
    assert_same(everything(net, *optimizers), before)


def test_a_parameter_without_state_stays_without_and_is_named(pipeline: SyncPipeline) -> None:
    stored(pipeline)
    other, its = made(seed=1)
    its.state[other.unused.weight] = {"step": torch.tensor(3.0)}
    result = load(pipeline, other, its)
    assert other.unused.weight not in its.state
    assert result.missing == (
        "training.optimizer.state.unused.weight",
        "training.optimizer.state.unused.bias",
    )


def test_state_that_no_optimizer_takes_is_never_dropped_in_silence(pipeline: SyncPipeline) -> None:
    net, optimizer = stored(pipeline)
    other = made(seed=1)[0]
    its = AdamW([*other.layers[1].parameters(), *other.norm.parameters()], lr=0.1)
    refused(pipeline, StructureMismatch, "layers.0.weight.*exclude", other, its)
    dropped = [f"training.optimizer.state.layers.0.{name}" for name in ("weight", "bias")]
    result = load(pipeline, other, its, exclude=dropped)
    assert "training.optimizer.state.unused.weight" in result.unexpected
    assert_same(other.state_dict(), dict(net.state_dict()))
    assert_same(
        its.state[other.get_parameter("layers.1.weight")],
        optimizer.state[net.get_parameter("layers.1.weight")],
    )


@pytest.mark.parametrize("layer", ["layers.1", "unused"])
def test_what_is_left_out_may_have_another_shape(pipeline: SyncPipeline, layer: str) -> None:
    net, optimizer = stored(pipeline)
    other = made(seed=1)[0]
    wide = nn.Linear(4, 6)
    other.set_submodule(layer, wide)
    its = AdamW(other.parameters(), lr=0.2)
    refused(pipeline, ShapeMismatch, "shape", other, its)
    names = [f"{layer}.weight", f"{layer}.bias"]
    left_out = [f"training.model.{name}" for name in names]
    refused(pipeline, ShapeMismatch, "shape", other, its, exclude=left_out)
    left_out += [f"training.optimizer.state.{name}" for name in names]
    before = wide.weight.detach().clone()
    result = load(pipeline, other, its, exclude=left_out)
    assert_same(wide.weight.detach(), before)
    assert not its.state[wide.weight]
    assert its.param_groups[0]["lr"] == 0.1
    assert_same(other.layers[0].state_dict(), dict(net.layers[0].state_dict()))
    kept = optimizer.state[net.get_parameter("layers.0.weight")]
    assert_same(its.state[other.get_parameter("layers.0.weight")], kept)
    assert not {*result.missing, *result.unexpected}.intersection(left_out)


class TestGroups:
    """Param groups, matched by the names of their parameters."""

    def groups(self, net: Net, **second: Any) -> list[dict[str, Any]]:
        return [
            {"params": list(net.layers.parameters())},
            {"params": [*net.unused.parameters(), *net.norm.parameters()], **second},
        ]

    def test_one_is_never_divided(self, pipeline: SyncPipeline) -> None:
        save(pipeline, *made())
        net = made(seed=1)[0]
        its = AdamW(self.groups(net), lr=0.3)
        refused(pipeline, StructureMismatch, "'layers.0.weight' and 'unused.weight'", net, its)

    def test_two_that_differ_never_become_one(self, pipeline: SyncPipeline) -> None:
        net = made()[0]
        save(pipeline, net, AdamW(self.groups(net, lr=0.5), lr=0.1))
        refused(pipeline, StructureMismatch, "differ in lr.*unused.weight", *made(seed=1))

    def test_optimizers_are_matched_by_names(self, pipeline: SyncPipeline) -> None:
        def run(seed: int) -> tuple[Net, list[Optimizer]]:
            net = made(seed=seed)[0]
            return net, [
                Adam([parameter], lr=0.1 * n) for n, parameter in enumerate(net.parameters(), 1)
            ]

        net, optimizers = run(0)
        step(net, *optimizers)
        save(pipeline, net, *optimizers)
        other, its = run(1)
        load(pipeline, other, *its[::-1])
        assert step(other, *its) == step(net, *optimizers)
        assert_same(everything(other, *its)[:2], everything(net, *optimizers)[:2])

    @staticmethod
    def with_empty_groups(*names: str | None, seed: int = 0, lr: Any = 9.0) -> Run:
        """One group with all parameters, and groups without any."""
        torch.manual_seed(seed)
        net = Net()
        groups: list[dict[str, Any]] = [{"params": [], "lr": lr} for _ in names]
        for number, (group, name) in enumerate(zip(groups, names, strict=True)):
            group["weight_decay"] = number / 4
            if name is not None:
                group["name"] = name
        groups.insert(1, {"params": list(net.parameters())})
        return net, SGD(groups, lr=0.1, momentum=0.9)

    @pytest.mark.parametrize("names", [(None,), (None, None), ("a", "b")])
    @pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)])
    def test_options_of_groups_without_parameters_are_kept(
        self, pipeline: SyncPipeline, names: tuple[str | None, ...], lr: Any
    ) -> None:
        net, optimizer = trained_and_saved(pipeline, self.with_empty_groups(*names, lr=lr))
        for other_lr in (9.0, torch.tensor(9.0)):
            other, its = self.with_empty_groups(*names[::-1], seed=1, lr=other_lr)
            load(pipeline, other, its)
            found, saved = its.param_groups, optimizer.param_groups
            if names[0] is not None:  # matched by name, in another order
                found = [found[2], found[1], found[0]]
            for ours, theirs in zip(found, saved, strict=True):
                assert float(ours["lr"]) == float(theirs["lr"])
                for key in ("weight_decay", "name", "momentum"):
                    assert ours.get(key) == theirs.get(key), key
            assert its.param_groups[0]["params"] == []
        in_memory, its = self.with_empty_groups(*names, seed=1)
        training_state(in_memory, its).load_state_dict(training_state(net, optimizer).state_dict())
        assert [float(each["lr"]) for each in its.param_groups] == [
            0.5,
            0.1,
            *[0.5] * len(names[1:]),
        ]

    def test_another_number_of_groups_without_parameters_is_refused(
        self, pipeline: SyncPipeline
    ) -> None:
        net, optimizer = trained_and_saved(pipeline, self.with_empty_groups(None))
        expected = step(net, optimizer)
        for names in ((), (None, None)):
            other, its = self.with_empty_groups(*names, seed=1)
            refused(pipeline, StructureMismatch, "1 param groups without parameters", other, its)
            load(pipeline, other, its, exclude=["training.optimizer.empty"])
            assert step(other, its) == expected

    def test_a_group_without_parameters_may_be_new(self, pipeline: SyncPipeline) -> None:
        save(pipeline, *self.with_empty_groups())
        net, optimizer = self.with_empty_groups(None, seed=1)
        load(pipeline, net, optimizer)
        assert [each["lr"] for each in optimizer.param_groups] == [9.0, 0.1]

    def test_another_kind_of_optimizer_is_refused(self, pipeline: SyncPipeline) -> None:
        stored(pipeline, SGD, momentum=0.9)
        refused(pipeline, StructureMismatch, "sgd:SGD.*adamw:AdamW.*betas", *made(seed=1))


class TestModel:
    """Names, shapes and dtypes."""

    @pytest.mark.parametrize("layers", [1, 3])
    @pytest.mark.parametrize("how", [{}, {"strict": False}, {"fallback": True}])
    def test_other_layers_are_refused(
        self, pipeline: SyncPipeline, layers: int, how: dict[str, bool]
    ) -> None:
        stored(pipeline)
        other = Net(layers=layers)
        its = AdamW(other.parameters())
        refused(pipeline, StructureMismatch, f"layers.{min(layers, 2)}", other, its, **how)

    def test_other_shapes_are_refused(self, pipeline: SyncPipeline) -> None:
        save(pipeline, *made())
        other = Net(width=5)
        its = AdamW(other.parameters())
        refused(pipeline, ShapeMismatch, "shape", other, its)
        refused(pipeline, ShapeMismatch, "shape", other, its, include=["training.optimizer"])

    def test_other_dtypes_are_refused(self, pipeline: SyncPipeline) -> None:
        stored(pipeline)
        other, its = made(seed=1)
        other.to(torch.bfloat16)
        refused(pipeline, DtypeMismatch, "cast", other, its)

    def test_state_in_float_32_of_bfloat_16_parameters_stays_so(
        self, pipeline: SyncPipeline
    ) -> None:
        net, optimizer = made()
        step(net, optimizer)
        net.to(torch.bfloat16)
        save(pipeline, net, optimizer)
        for hooked in (False, True):
            other, its = made(seed=1)
            other.to(torch.bfloat16)
            if hooked:
                its.register_load_state_dict_pre_hook(lambda *_: None)
            load(pipeline, other, its)
            found = its.state[other.get_parameter("layers.0.weight")]
            assert_same(found, optimizer.state[net.get_parameter("layers.0.weight")])

    def test_a_model_without_memory_is_refused(self, pipeline: SyncPipeline) -> None:
        save(pipeline, *made())
        with torch.device("meta"):
            net = Net()
        with pytest.raises(StructureMismatch, match="to_empty") as caught:
            load(pipeline, net, AdamW(net.parameters()))
        assert caught.value.key

    def test_the_module_is_asked_as_torch_asks_it(self, pipeline: SyncPipeline) -> None:
        class Counting(Net):
            count = 0

            def get_extra_state(self) -> Any:
                return {"count": self.count}

            def set_extra_state(self, state: Any) -> None:
                self.count = state["count"]

        net, other = Counting(), Counting()
        net.count = 5
        net.register_buffer("scratch", torch.ones(2), persistent=False)
        other.register_buffer("scratch", torch.zeros(2), persistent=False)
        loaded: list[Any] = []
        other.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
            lambda *_: loaded.append(1)
        )
        save(pipeline, net)
        load(pipeline, other)
        assert other.count == 5
        assert loaded == [1]
        assert torch.equal(other.get_buffer("scratch"), torch.zeros(2))

    def test_versions_of_modules_reach_the_module(self, pipeline: SyncPipeline) -> None:
        seen: list[Any] = []

        class Versioned(nn.Linear):
            _version = 3

            def _load_from_state_dict(
                self, state: Any, prefix: str, facts: Any, *rest: Any
            ) -> None:
                seen.append(facts.get("version"))
                super()._load_from_state_dict(state, prefix, facts, *rest)

        save(pipeline, Versioned(2, 2))
        target = Versioned(2, 2)
        target._version = 4
        load(pipeline, target)
        assert seen == [3, 3]  # it was asked before the first byte, and loaded

    def test_a_wrappers_prefix_is_stripped_only_of_a_wrapper(self, pipeline: SyncPipeline) -> None:
        class Holder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.module = nn.Linear(2, 2)
                self._orig_mod = nn.Linear(2, 2)

        holder = Holder()
        compiled: Any = torch.compile(holder, backend="eager")
        names = training_state(compiled).state_dict()["model"]
        assert set(names) == set(holder.state_dict())

    def test_plain_states_with_a_wrappers_names_are_told_of_training_state(
        self, pipeline: SyncPipeline
    ) -> None:
        net = Net()
        pipeline.save({"model": torch.compile(net, backend="eager")}).wait()
        with pytest.raises(StructureMismatch, match=r"training_state\(model, optimizer\)"):
            pipeline.load({"model": Net()})
        with pytest.raises(StructureMismatch, match=r"training_state\(model, optimizer\)"):
            pipeline.load({"model": Net().state_dict()})


class TestStages:
    """A list of modules, the stages of one model."""

    def stages(self, seed: int) -> tuple[list[nn.Module], Optimizer]:
        torch.manual_seed(seed)
        stages: list[nn.Module] = [
            nn.ModuleDict({"one": nn.Linear(3, 3)}),
            nn.ModuleDict({"two": nn.Linear(3, 3)}),
        ]
        return stages, Adam([p for stage in stages for p in stage.parameters()])

    def test_load_into_one_module_and_back(self, pipeline: SyncPipeline) -> None:
        stages, optimizer = self.stages(0)
        for stage in stages:
            for parameter in stage.parameters():
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        save(pipeline, stages, optimizer)
        whole = nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 3)})
        its = Adam(whole.parameters())
        load(pipeline, whole, its)
        assert_same(dict(whole.state_dict()), stages[0].state_dict() | stages[1].state_dict())
        assert_same(its.state_dict()["state"], optimizer.state_dict()["state"])
        save(pipeline, whole, its)
        again = self.stages(1)
        load(pipeline, *again)
        assert_same(again[1].state_dict()["state"], optimizer.state_dict()["state"])

    def test_names_must_differ(self, pipeline: SyncPipeline) -> None:
        with pytest.raises(UsageError, match="Two tensors") as caught:
            save(pipeline, [nn.Linear(2, 2), nn.Linear(2, 2)])
        assert caught.value.key


class Tied(nn.Module):
    def __init__(self, *, tied: bool, first: str = "one") -> None:
        super().__init__()
        names = ["one", "two"] if first == "one" else ["two", "one"]
        for name in names:
            setattr(self, name, nn.Linear(3, 3, bias=False))
        if tied:
            setattr(self, names[1], getattr(self, names[0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.two(self.one(x))  # type: ignore[operator]
        return out


class TestTied:
    """Parameters that have several names."""

    def run(self, *, tied: bool, seed: int = 0, first: str = "one") -> Run:
        torch.manual_seed(seed)
        net = Tied(tied=tied, first=first)
        return net, Adam(net.parameters(), lr=0.1)

    def test_any_name_will_do(self, pipeline: SyncPipeline) -> None:
        net, optimizer = trained_and_saved(pipeline, self.run(tied=True))
        other, its = self.run(tied=True, seed=1, first="two")
        load(pipeline, other, its)
        assert step(other, its) == step(net, optimizer)

    def test_those_that_differ_are_never_tied(self, pipeline: SyncPipeline) -> None:
        trained_and_saved(pipeline, self.run(tied=False))
        refused(pipeline, SharingConflict, "one|two", *self.run(tied=True, seed=1))


class TestTogether:
    """State that an optimizer keeps for all its parameters together."""

    def test_another_order_is_refused(self, pipeline: SyncPipeline) -> None:
        stored(pipeline, LBFGS)
        other = made(seed=1)[0]
        its = LBFGS(list(other.parameters())[::-1], lr=0.1)
        refused(pipeline, StructureMismatch, "in this order", other, its)

    def test_what_a_class_adds_is_saved_and_given_back(self, pipeline: SyncPipeline) -> None:
        class Counting(Adam):
            count = 0

            def state_dict(self) -> dict[str, Any]:
                return {**super().state_dict(), "count": self.count}

            def load_state_dict(self, state_dict: dict[str, Any]) -> None:
                self.count = state_dict.pop("count")
                super().load_state_dict(state_dict)

        net, optimizer = made(Counting)
        step(net, optimizer)
        assert isinstance(optimizer, Counting)
        optimizer.count = 7
        save(pipeline, net, optimizer)
        other, its = made(Counting, seed=1)
        group = its.param_groups[0]
        load(pipeline, other, its)
        assert isinstance(its, Counting)
        assert its.count == 7
        assert its.param_groups[0] is group
        assert step(other, its) == step(net, optimizer)


class TestParts:
    """Include and exclude."""

    def test_the_model_alone_and_what_lacks_an_optimizer(self, pipeline: SyncPipeline) -> None:
        net, optimizer = made()
        save(pipeline, net)
        other, its = made(seed=1)
        refused(pipeline, StructureMismatch, "no optimizer", other, its)
        load(pipeline, other, its, include=["training.model"])
        assert_same(dict(other.state_dict()), dict(net.state_dict()))
        save(pipeline, net, optimizer)
        assert load(pipeline, made(seed=1)[0]).unexpected == ("training.optimizer",)

    def test_one_layer(self, pipeline: SyncPipeline) -> None:
        net, _ = stored(pipeline)
        other, its = made(seed=1)
        before = everything(other, its)
        load(pipeline, other, its, include=["training.*.layers.0"])
        load(pipeline, other, its, include=["training.model.layers.0"])
        assert_same(dict(other.layers[0].state_dict()), dict(net.layers[0].state_dict()))
        assert_same(
            dict(other.layers[1].state_dict()),
            {key: before[0][f"layers.1.{key}"] for key in ("weight", "bias")},
        )

    def test_a_part_of_a_parameters_state_leaves_the_rest(self, pipeline: SyncPipeline) -> None:
        net, optimizer = stored(pipeline)
        other, its = made(seed=1)
        step(other, its, steps=3)
        kept = copy.deepcopy(its.state[other.get_parameter("layers.0.weight")])
        load(pipeline, other, its, include=["training.optimizer.state.layers.0.weight.exp_avg"])
        found, saved = (
            its.state[other.get_parameter("layers.0.weight")],
            optimizer.state[net.get_parameter("layers.0.weight")],
        )
        assert_same(found, {**kept, "exp_avg": saved["exp_avg"]})


def test_a_state_of_dcps_functions_loads(pipeline: SyncPipeline) -> None:
    def grouped() -> tuple[Net, Optimizer]:
        net, _ = made(seed=1)
        groups: list[dict[str, Any]] = [
            {"params": [net.norm.weight, net.norm.bias], "lr": 0.5, "weight_decay": 0.25},
            {"params": net.layers.parameters(), "betas": (0.5, 0.75)},
        ]
        return net, AdamW(groups)

    net, optimizer = grouped()
    step(net, optimizer)
    state = dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))
    pipeline.save({"training": state}).wait()
    other, its = grouped()
    step(other, its, steps=3)
    for group in its.param_groups:
        group["lr"] = 7.0
    load(pipeline, other, its)
    assert_same(everything(other, its)[:2], everything(net, optimizer)[:2])


def test_a_parameter_that_is_not_the_models_is_refused(pipeline: SyncPipeline) -> None:
    with pytest.raises(UnsupportedState, match="no parameter of the model"):
        save(pipeline, nn.Linear(2, 2), SGD(nn.Linear(2, 2).parameters(), lr=1))
    net = nn.Linear(2, 2)
    twice = [SGD(net.parameters(), lr=1) for _ in range(2)]
    with pytest.raises(UnsupportedState, match="Two optimizers"):
        save(pipeline, net, *twice)


@pytest.mark.parametrize("replicated", [None, 1, [3], {"model.*": True}])
def test_another_form_of_replicated_is_refused(replicated: Any) -> None:
    with pytest.raises(UsageError, match="replicated is True, False, a glob"):
        training_state(nn.Linear(2, 2), replicated=replicated)


def test_a_state_in_memory_loads_as_a_checkpoint_does() -> None:
    net, optimizer = made()
    step(net, optimizer)
    state = copy.deepcopy(training_state(net, optimizer).state_dict())
    other, its = made(seed=1)
    training_state(other, its).load_state_dict(state)
    assert_same(everything(other, its)[:2], everything(net, optimizer)[:2])
    state["model"]["layers.0.weight"] = torch.zeros(2, 2)
    before = everything(other, its)
    with pytest.raises(ShapeMismatch, match="has the shape"):
        training_state(other, its).load_state_dict(state)
    assert_same(everything(other, its), before)


class Pair:
    """Two models of one shape, each with an optimizer of its own, as one training state."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.nets = {"generator": Net(), "critic": Net()}
        self.optimizers = [AdamW(net.parameters()) for net in self.nets.values()]
        self.state = training_state(self.nets, *self.optimizers)

    def losses(self) -> list[list[float]]:
        pairs = zip(self.nets.values(), self.optimizers, strict=True)
        return [step(net, optimizer) for net, optimizer in pairs]


def test_several_models_by_name_load_to_the_bit_and_apart(tmp_path: Path) -> None:
    run, other = Pair(1), Pair(2)
    run.losses()
    with SyncPipeline(tmp_path) as pipeline:
        pipeline.save({"training": run.state}, step=1).wait()
        pipeline.load({"training": other.state})
        alone = Net()
        one = {"training": training_state({"critic": alone})}
        pipeline.load(one, include=["training.model.critic*"])
    assert difference(run.state.state_dict(), other.state.state_dict()) is None
    assert difference(run.nets["critic"].state_dict(), alone.state_dict()) is None
    assert run.losses() == other.losses()


@pytest.mark.parametrize("names", [("a.b", "c"), ("", "c"), (1, "c")], ids=str)
def test_models_get_names_that_labels_can_hold(names: tuple[Any, Any]) -> None:
    with pytest.raises(UsageError, match="without a dot"):
        training_state({name: Net() for name in names})
