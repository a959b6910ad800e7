"""Modules with load hooks, scalers and schedulers: refused untouched, or loaded as torch loads."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, spectral_norm
from torch.optim import lr_scheduler

from ckpipe import Progress, RngState, SyncPipeline
from ckpipe.distributed import training_state
from ckpipe.errors import CkpipeError, ShapeMismatch, StructureMismatch
from tests.support.pipelines import load_existing
from tests.support.placed_tensors import rank_of

# torch's functions that register hooks have no types.
PRE, POST = "register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"


def hooked(module: Any, name: str, hook: Callable[..., Any]) -> Any:
    getattr(module, name)(hook)
    return module


class Own(nn.Linear):
    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


class OwnRoot(nn.Sequential):
    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state, strict, assign)


def linear() -> Any:
    return nn.Linear(3, 3)


def clones(module: nn.Module, state: Any, *rest: Any) -> None:
    for key in state:
        state[key] = state[key].clone()


def sharded(layers: list[Any]) -> Any:
    net = nn.Sequential(*layers)
    for each in (*layers, net):
        fully_shard(each, mesh=init_device_mesh("cpu", (1,)))
    return net


Layer: TypeAlias = Callable[[], Any]
Root: TypeAlias = Callable[[list[Any]], Any]


def in_sequence(layers: list[Any]) -> Any:
    return nn.Sequential(*layers)


KINDS: dict[str, tuple[Layer, Root]] = {
    "plain": (linear, in_sequence),
    "spectral_norm": (lambda: spectral_norm(linear()), in_sequence),
    "weight_norm": (lambda: parametrizations.weight_norm(linear()), in_sequence),
    "pre-hook": (lambda: hooked(linear(), PRE, lambda *_: None), in_sequence),
    "post-hook": (lambda: hooked(linear(), POST, lambda *_: None), in_sequence),
    "_load_from_state_dict": (lambda: Own(3, 3), in_sequence),
    "load_state_dict": (linear, lambda layers: OwnRoot(*layers)),
    "checkpoint_wrapper": (lambda: checkpoint_wrapper(linear()), in_sequence),
    "compiled": (lambda: spectral_norm(linear()), lambda each: torch.compile(in_sequence(each))),
    "save hook": (
        linear, lambda layers: hooked(in_sequence(layers), "_register_state_dict_hook", clones)
    ),
    "in a container": (
        lambda: spectral_norm(linear()), lambda layers: nn.ModuleDict({"a": in_sequence(layers)})
    ),
    "fully_shard": (linear, sharded),
    "fully_shard, pre-hook": (lambda: hooked(linear(), PRE, lambda *_: None), sharded),
}  # fmt: skip
CELLS = list(itertools.product(KINDS, [(1, 2), (2, 1)], ["raw", "training_state"]))


def made(kind: str, layers: int, form: str, seed: int) -> dict[str, Any]:
    """A state of one model after some steps, and objects before and after it."""
    torch.manual_seed(seed)
    layer, root = KINDS[kind]
    model = root([layer() for _ in range(layers)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state: dict[str, Any] = {"first": torch.rand(3), "scaler": GradScaler("cpu", init_scale=seed)}
    if form == "raw":
        state |= {"model": model, "optimizer": optimizer}
    else:
        state["model"] = training_state(model, optimizer)
    return state | {"progress": Progress(seed=seed), "rng": RngState(), "last": torch.rand(2)}


def contents(state: dict[str, Any]) -> Any:
    """A copy of all values of a state."""
    return copy.deepcopy(
        {
            key: each.state_dict() if hasattr(each, "state_dict") else each
            for key, each in state.items()
        }
    )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        local = getattr(one, "_local_tensor", one), getattr(other, "_local_tensor", other)
        return one.dtype == other.dtype and torch.equal(*local)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def traces(model: nn.Module) -> Any:
    """Other facts of a module that a rehearsal could change."""
    tensors = [*model.parameters(), *model.buffers()]
    return (
        [(id(vars(each)), list(vars(each))) for each in model.modules()],
        [(id(each), each._version) for each in tensors],
    )


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[SyncPipeline]:
    with SyncPipeline(tmp_path / "run", attempt_id="one") as pipeline:
        yield pipeline


@pytest.mark.sample(4)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # that of torch.compile
@pytest.mark.parametrize(("kind", "layers", "form"), CELLS)
def test_another_number_of_layers_is_refused_untouched(
    tmp_path: Path, kind: str, layers: tuple[int, int], form: str
) -> None:
    world = rank_of(0, 1) if kind.startswith("fully_shard") else nullcontext()
    with world, SyncPipeline(tmp_path, attempt_id="one") as pipeline:
        pipeline.save(made(kind, layers[0], form, 1), step=0).wait()
        target = made(kind, layers[1], form, 2)
        model = target["model"] if form == "raw" else target["model"]._modules[0]
        before, was = contents(target), traces(model)
        with pytest.raises(StructureMismatch, match=r"1\.(\w+\.)*(weight|bias|param)") as caught:
            pipeline.load(target)
        assert caught.value.key == "model"
        assert same(contents(target), before)
        assert traces(model) == was
        pipeline.load(again := made(kind, layers[0], form, 3))
        pipeline.load(once := made(kind, layers[0], form, 4))
        assert same(contents(again), contents(once))


def refusing(how: str) -> nn.Module:
    """A module that takes no state, for a reason of its own."""

    def raises(module: Any, state: Any, prefix: str, *rest: Any) -> None:
        if prefix == "1.":
            state[prefix + "nothing"]

    def complains(module: Any, state: Any, prefix: str, *rest: Any) -> None:
        if prefix == "1.":
            rest[-1].append(f"{prefix}weight is of another model")

    def leaves_out(module: Any, state: Any, *rest: Any) -> None:
        del state["1.weight"]

    class Strict(nn.Linear):
        def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
            raise ValueError(f"{prefix}weight is of another model")

    second = Strict(3, 3) if how == "override" else linear()
    net = nn.Sequential(linear(), second)
    if how in ("raises", "complains"):
        hooked(second, PRE, {"raises": raises, "complains": complains}[how])
    if how == "save hook":
        hooked(net, "_register_state_dict_hook", leaves_out)
    return net


@pytest.mark.parametrize("form", ["raw", "training_state"])
@pytest.mark.parametrize("how", ["raises", "complains", "override", "save hook"])
def test_a_module_that_refuses_its_state_is_asked_first(
    pipeline: SyncPipeline, how: str, form: str
) -> None:
    def state(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        net = refusing(how)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1 * seed)
        whole = {"model": net, "optimizer": optimizer}
        kept = whole if form == "raw" else {"model": training_state(net, optimizer)}
        return {"first": torch.rand(2), **kept, "last": list(net.parameters())}

    pipeline.save(state(1), step=0).wait()
    target = state(2)
    before = contents(target)
    with pytest.raises(StructureMismatch, match=r"1\.(weight|nothing)") as caught:
        pipeline.load(target)
    assert (caught.value.key, caught.value.step, caught.value.rank) == ("model", 0, 0)
    assert same(contents(target), before)


def optimizer_of(rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=rate)


def step_lr(optimizer: Any) -> Any:
    return lr_scheduler.StepLR(optimizer, 3)


def cosine(optimizer: Any) -> Any:
    return lr_scheduler.CosineAnnealingLR(optimizer, 9)


def one_after_another(*kinds: Any) -> Any:
    def make(optimizer: Any) -> Any:
        borders = list(range(2, 2 * len(kinds), 2))
        return lr_scheduler.SequentialLR(optimizer, [each(optimizer) for each in kinds], borders)

    return make


def by_lambda(optimizer: Any) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)


OBJECTS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "a scaler that is disabled": (
        lambda: GradScaler("cpu", enabled=False), lambda: GradScaler("cpu", init_scale=8)
    ),
    "another class of scheduler": (
        lambda: step_lr(optimizer_of(1)), lambda: cosine(optimizer_of(2))
    ),
    "a scheduler without functions": (
        lambda: step_lr(optimizer_of(1)), lambda: by_lambda(optimizer_of(2))
    ),
    "fewer schedulers": (
        lambda: one_after_another(step_lr, step_lr)(optimizer_of(1)),
        lambda: one_after_another(step_lr, step_lr, step_lr)(optimizer_of(2)),
    ),
    "more schedulers": (
        lambda: one_after_another(step_lr, step_lr, step_lr)(optimizer_of(1)),
        lambda: one_after_another(step_lr, step_lr)(optimizer_of(2)),
    ),
    "one scheduler for several": (
        lambda: one_after_another(step_lr, step_lr)(optimizer_of(1)),
        lambda: step_lr(optimizer_of(2)),
    ),
    "other schedulers inside": (
        lambda: one_after_another(step_lr, cosine)(optimizer_of(1)),
        lambda: one_after_another(step_lr, step_lr)(optimizer_of(2)),
    ),
    "no generators": (lambda: Progress(torch=1), lambda: RngState()),
}  # fmt: skip


@pytest.mark.parametrize("case", OBJECTS)
def test_the_state_of_another_object_is_refused_untouched(
    pipeline: SyncPipeline, case: str
) -> None:
    saved, wanted = OBJECTS[case]
    pipeline.save({"net": linear(), "object": saved(), "x": torch.ones(2)}, step=0).wait()
    target = {"net": linear(), "object": wanted(), "x": torch.zeros(2)}
    before = contents(target)
    with pytest.raises(StructureMismatch) as caught:
        pipeline.load(target)
    assert caught.value.key is not None
    assert caught.value.key.startswith("object")
    assert same(contents(target), before)
    pipeline.load(target, exclude=["object"])
    assert target["x"].tolist() == [1, 1]


def test_objects_of_the_saved_class_load(pipeline: SyncPipeline) -> None:
    kinds = [step_lr, cosine, by_lambda, one_after_another(step_lr, cosine)]
    saved = [kind(optimizer_of(1)) for kind in kinds]
    for each in saved:
        each.optimizer.step()
        each.step()
    pipeline.save({"all": saved, "scaler": GradScaler("cpu", init_scale=4)}, step=0).wait()
    target = [kind(optimizer_of(2)) for kind in kinds]
    disabled = GradScaler("cpu", enabled=False)
    result = load_existing(pipeline, {"all": target, "scaler": disabled})
    assert [each.state_dict() for each in target] == [each.state_dict() for each in saved]
    assert "scaler.scale" in result.unexpected


@pytest.mark.parametrize("form", ["raw", "training_state"])
@pytest.mark.parametrize("kind", ["plain", "spectral_norm"])
def test_a_module_that_was_made_in_inference_mode_loads(
    pipeline: SyncPipeline, kind: str, form: str
) -> None:
    def state(seed: int) -> tuple[nn.Module, dict[str, Any]]:
        torch.manual_seed(seed)
        with torch.inference_mode():
            layer, root = KINDS[kind]
            net = root([layer()])
        return net, {"model": net if form == "raw" else training_state(net)}

    source, saved = state(1)
    target, wanted = state(2)
    pipeline.save(saved, step=0).wait()
    pipeline.load(wanted)
    assert same(dict(target.state_dict()), dict(source.state_dict()))


# Modules that take state of another size


class Resizing(nn.Module):
    """Takes a table of any size when it loads."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2))
        self.register_buffer("table", torch.rand(rows, 2))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.table = torch.zeros_like(state[prefix + "table"])
        super()._load_from_state_dict(state, prefix, *rest)


class Extra(nn.Linear):
    """Has extra state of any size, as Transformer Engine's modules have."""

    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class ExtraFirst(Extra):
    """Sets it itself, before it loads."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.set_extra_state(bytes(state[prefix + "_extra_state"].numpy()))
        super()._load_from_state_dict(state, prefix, *rest)

    def set_extra_state(self, state: Any) -> None:
        data = state if isinstance(state, bytes) else bytes(state.numpy())
        self.extra = torch.frombuffer(bytearray(data), dtype=torch.uint8)


def per_channel(name: str, channels: int) -> Any:
    """A layer with a module of quantisation that may have seen so many channels."""
    from torch.ao import quantization

    made = getattr(quantization, name)()
    if channels:
        made(torch.rand(channels, 4))
    return nn.Sequential(linear(), made)


def lazy(size: int) -> Any:
    net = nn.Sequential(linear(), nn.LazyLinear(3), nn.LazyBatchNorm1d())
    if size:
        net[1:](torch.rand(2, size))
    return net


def with_bytes(count: int) -> Any:
    return nn.Sequential(linear(), Extra(torch.arange(count, dtype=torch.uint8)))


def nested(count: int) -> Any:
    return Extra({"scales": [torch.rand(count)], "count": count})


def first(count: int) -> Any:
    return nn.Sequential(linear(), ExtraFirst(torch.arange(count, dtype=torch.uint8)))


SIZES: dict[str, tuple[Callable[[int], Any], list[tuple[int, int]]]] = {
    "observer": (partial(per_channel, "PerChannelMinMaxObserver"), [(3, 0), (0, 3), (3, 5)]),
    "fake quantize": (
        partial(per_channel, "default_per_channel_weight_fake_quant"), [(3, 0), (3, 5)]),
    "lazy": (lazy, [(3, 0)]),
    "own resize": (Resizing, [(3, 5), (5, 3)]),
    "extra bytes": (with_bytes, [(3, 5), (5, 3)]),
    "extra bytes that are set first": (first, [(3, 5), (5, 3)]),
    "extra containers": (nested, [(3, 5), (5, 3)]),
}  # fmt: skip
RESIZED = [(kind, sizes) for kind, (_, all_sizes) in SIZES.items() for sizes in all_sizes]


def loaded_by_torch(source: nn.Module, target: nn.Module) -> dict[str, Any]:
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    return dict(target.state_dict())


@pytest.mark.parametrize("form", ["raw", "training_state"])
@pytest.mark.parametrize(("kind", "sizes"), RESIZED)
def test_a_module_takes_state_of_another_size_as_from_torch(
    pipeline: SyncPipeline, kind: str, sizes: tuple[int, int], form: str
) -> None:
    make = SIZES[kind][0]
    source, target, other = make(sizes[0]), make(sizes[1]), make(sizes[1])
    wrapped = (lambda net: net) if form == "raw" else training_state
    pipeline.save({"model": wrapped(source)}, step=0).wait()
    own = {name: each for name, each in target.named_parameters() if kind != "lazy"}
    pipeline.load({"model": wrapped(target)})
    assert same(dict(target.state_dict()), loaded_by_torch(source, other))
    for name, each in target.named_parameters():
        assert each is own.get(name, each)


def test_only_what_changes_its_size_is_made_anew(pipeline: SyncPipeline) -> None:
    given: dict[str, Any] = {}

    class Seen(nn.Sequential):
        def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
            given.update(state)
            return super().load_state_dict(state, strict, assign)

    target = Seen(linear(), Resizing(5), spectral_norm(linear()))
    own = {id(each) for each in (*target.parameters(), *target.buffers())}
    pipeline.save({"m": Seen(linear(), Resizing(3), spectral_norm(linear()))}, step=0).wait()
    pipeline.load({"m": target})
    assert [key for key, each in given.items() if id(each) not in own] == ["1.table"]


def test_a_module_that_takes_no_other_size_names_the_key(pipeline: SyncPipeline) -> None:
    pipeline.save({"m": nn.Sequential(spectral_norm(nn.Linear(3, 4)))}, step=0).wait()
    target = nn.Sequential(spectral_norm(nn.Linear(3, 3)))
    before = contents({"m": target})
    with pytest.raises(ShapeMismatch) as caught:
        pipeline.load({"m": target})
    assert caught.value.key in ("m.0.bias", "m.0.weight_orig", "m.0.weight_u", "m.0.weight_v")
    assert same(contents({"m": target}), before)


# Hooks that change the state


def renames(state: Any, names: dict[str, str]) -> None:
    for key, value in {key: state.pop(key) for key in names if key in state}.items():
        state[names[key]] = value


def swaps(state: Any) -> None:
    renames(state, {"0.weight": "1.weight", "1.weight": "0.weight"})


def moves_up(state: Any) -> None:
    """Has counted layers from one."""
    renames(
        state, {f"{n + 1}.{part}": f"{n}.{part}" for n in range(2) for part in ("weight", "bias")}
    )


def doubles(state: Any) -> None:
    state["0.weight"] = state["0.weight"] * 2


def doubles_in_place(state: Any) -> None:
    state["0.weight"].mul_(2)


def transposes(state: Any) -> None:
    state["1.weight"] = state["1.weight"].t().contiguous()


def shares(state: Any) -> None:
    state["1.weight"] = state["0.weight"]


def drops(state: Any) -> None:
    del state["1.weight"]


def splits(state: Any) -> None:
    fused = state.pop("fused")
    state["0.weight"], state["1.weight"] = fused[:3], fused[3:]


def moves(state: Any) -> None:
    for key in state:
        state[key] = state[key].detach().to("cpu", torch.float32)


CHANGES: dict[str, tuple[Callable[[Any], None], Callable[[Any], Any]]] = {
    "swaps": (swaps, dict),
    "renames": (
        lambda state: renames(state, {"old": "0.weight"}),
        lambda state: {("old" if key == "0.weight" else key): each for key, each in state.items()},
    ),
    "moves up": (
        moves_up,
        lambda state: {f"{int(key[0]) + 1}{key[1:]}": each for key, each in state.items()},
    ),
    "doubles": (doubles, dict),
    "doubles in place": (doubles_in_place, dict),
    "transposes": (transposes, dict),
    "shares": (shares, dict),
    "drops": (drops, dict),
    "splits": (
        splits,
        lambda state: {
            "0.bias": state["0.bias"], "1.bias": state["1.bias"],
            "fused": torch.cat([state["0.weight"], state["1.weight"]]),
        },
    ),
    "moves": (moves, dict),
}  # fmt: skip


def changing(change: Callable[[Any], None]) -> nn.Module:
    def hook(module: Any, state: Any, *rest: Any) -> None:
        change(state)

    net = nn.Sequential(linear(), linear())
    hooked(net, POST, lambda _, keys: keys.missing_keys.clear())
    return hooked(net, PRE, hook)  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", ["raw", "training_state"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_hook_changes_the_saved_state_as_in_torch(
    pipeline: SyncPipeline, name: str, form: str
) -> None:
    change, as_saved = CHANGES[name]
    source = as_saved(nn.Sequential(linear(), linear()).state_dict())
    target = changing(change)
    expected = copy.deepcopy(target)
    expected.load_state_dict(copy.deepcopy(source))
    own = dict(target.named_parameters())
    if form == "raw":
        pipeline.save({"model": source}, step=0).wait()
        pipeline.load({"model": target})
    else:
        pipeline.save({"model": {"model": source, "versions": {}}}, step=0).wait()
        wanted = {"model": training_state(target)}
        if name == "splits":  # by name, it would not be known that all is there
            with pytest.raises(StructureMismatch, match="fused"):
                pipeline.load(wanted)
            return
        pipeline.load(wanted)
    assert same(dict(target.state_dict()), dict(expected.state_dict()))
    assert all(each is own[key] for key, each in target.named_parameters())


def once() -> Any:
    """A layer with a hook that removes itself."""

    def hook(module: Any, state: Any, *rest: Any) -> None:
        state["weight"] = state["weight"] * 2
        handle.remove()

    layer = nn.Linear(3, 3)
    handle = getattr(layer, PRE)(hook)
    return layer


def parametrizes() -> Any:
    def hook(module: Any, state: Any, *rest: Any) -> None:
        if not nn.utils.parametrize.is_parametrized(module):
            parametrizations.weight_norm(module)
            state["parametrizations.weight.original0"] = state["weight"].norm(dim=1, keepdim=True)
            state["parametrizations.weight.original1"] = state.pop("weight")

    return hooked(linear(), PRE, hook)


def by_hook(change: Callable[[Any, Any, Any], object]) -> Callable[[], Any]:
    def hook(module: Any, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        change(module, state, metadata)

    return lambda: hooked(linear(), PRE, hook)


def converts(module: Any, state: Any, metadata: Any) -> None:
    if metadata["version"] == 1:
        metadata["version"] = 2
        state["weight"] = state["weight"] * 2


def takes_old_values(module: Any, state: Any, metadata: Any) -> None:
    state["bias"] = torch.cat([module.weight[0], state["weight"][1]])[:3]


def wants_host_memory(module: Any, state: Any, metadata: Any) -> None:
    assert state["weight"].device.type == "cpu"


def wants_memory(module: Any, state: Any, metadata: Any) -> None:
    assert not state["weight"].is_meta


def counts(module: Any, state: Any, metadata: Any) -> None:
    torch.repeat_interleave(torch.zeros_like(state["bias"], dtype=torch.int64))


def swaps_after_a_read(module: Any, state: Any, metadata: Any) -> None:
    if state["bias"].sum().item() != 0:
        state["weight"], state["second"] = state["second"], state["weight"]


def with_second(make: Callable[[], Any]) -> Any:
    layer = make()
    layer.register_parameter("second", nn.Parameter(torch.rand(3, 3)))
    return layer


STEPS: dict[str, Callable[[], Any]] = {
    "once": once,
    "parametrizes": parametrizes,
    "converts": by_hook(converts),
    "takes old values": by_hook(takes_old_values),
    "wants host memory": by_hook(wants_host_memory),
    "wants memory": by_hook(wants_memory),
    "counts": by_hook(counts),
    "swaps after a read": lambda: with_second(by_hook(swaps_after_a_read)),
}


@pytest.mark.parametrize("form", ["raw", "training_state"])
@pytest.mark.parametrize("name", STEPS)
def test_a_hook_finds_in_the_load_what_it_finds_in_torch(
    pipeline: SyncPipeline, name: str, form: str
) -> None:
    def made(make: Callable[[], Any], seed: int) -> Any:
        torch.manual_seed(seed)
        return make()

    source = made(lambda: with_second(linear) if name.startswith("swaps") else linear(), 1)
    target, expected = made(STEPS[name], 2), made(STEPS[name], 2)
    expected.load_state_dict(copy.deepcopy(source.state_dict()))
    saved, wanted = (each if form == "raw" else training_state(each) for each in (source, target))
    pipeline.save({"model": saved}, step=0).wait()
    pipeline.load({"model": wanted})
    assert same(dict(target.state_dict()), dict(expected.state_dict()))
    hooks = [dict(each._load_state_dict_pre_hooks) for each in (target, expected)]
    assert len(hooks[0]) == len(hooks[1])


# What cannot be asked


def test_code_that_reads_values_loads_without_being_asked(pipeline: SyncPipeline) -> None:
    def reads(module: Any, state: Any, *rest: Any) -> None:
        if state["bias"].sum().item() == 0:
            raise ValueError("nothing was saved")

    target, source = hooked(linear(), PRE, reads), linear()
    pipeline.save({"m": source}, step=0).wait()
    pipeline.load({"m": target})
    assert same(dict(target.state_dict()), dict(source.state_dict()))


def test_a_load_that_fails_half_way_tells_what_it_has_touched(pipeline: SyncPipeline) -> None:
    class Refuses(Progress):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ValueError("another data set")

    state = {"net": linear(), "epochs": Progress(n=1), "loader": Refuses(n=1), "end": Progress(n=1)}
    pipeline.save(state, step=0).wait()
    with pytest.raises(ValueError, match="another data set") as caught:
        pipeline.load(state)
    where, touched = caught.value.__notes__
    assert where == "raised by load_state_dict of 'loader'"
    assert "'net.weight'" in touched
    assert "'end', 'epochs'" in touched  # in the order of labels
    assert "'net'" not in touched
    assert not isinstance(caught.value, CkpipeError)
