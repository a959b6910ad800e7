"""The state of optimizers follows its parameters through transforms, or they are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpipe
from ckpipe import Drop, Fuse, Rearrange, Rename, Split, Stack, Unstack, name_table
from ckpipe.distributed import training_state
from ckpipe.errors import StructureMismatch
from tests.support.one_checkpoint import save_one

AT = "layers.0.attention."
NAMES = [f"{AT}w{each}.weight" for each in "qkvo"]
FACTORS = {"exp_avg": 2.0, "exp_avg_sq": 3.0}
"""Each moment of a parameter is made a multiple of it, so that it tells whose it is."""


def weights() -> dict[str, torch.Tensor]:
    return {name: torch.rand(8, 8) for name in NAMES}


def moments(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"step": torch.tensor(1.0), **{key: weight * n for key, n in FACTORS.items()}}


OPTIONS = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
OPTIONS |= dict.fromkeys(("maximize", "capturable", "differentiable"), False)
OPTIONS |= {"foreach": None, "fused": None, "decoupled_weight_decay": True}


def numbered(model: Mapping[str, torch.Tensor], groups: int = 1) -> dict[str, Any]:
    each = len(model) // groups
    params = [list(range(n * each, (n + 1) * each)) for n in range(groups)]
    return {
        "state": {number: moments(weight) for number, weight in enumerate(model.values())},
        "param_groups": [{**OPTIONS, "params": each} for each in params],
    }


def named(model: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    state = {name: moments(weight) for name, weight in model.items()}
    return {"state": state, "param_groups": [{**OPTIONS, "params": list(model)}]}


def flat(model: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    state = {f"state.{n}.{key}": t for n, w in model.items() for key, t in moments(w).items()}
    groups = {f"param_groups.{n}.{key}": each for n in model for key, each in OPTIONS.items()}
    return {**state, **groups}


FORMS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "numbered": numbered,
    "in two groups": lambda model: numbered(model, 2),
    "named": named,
    "flat": flat,
}
PLACES: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "optimizer": lambda model, optimizer: {"model": model, "optimizer": optimizer},
    "optim": lambda model, optimizer: {"model": model, "optim": optimizer},
    "a list": lambda model, optimizer: {"model": model, "optimizers": [optimizer]},
    "lightning": lambda model, optimizer: {"model": model, "optimizer_states": [optimizer]},
    "deep": lambda model, optimizer: {"model": model, "run": {"any": {"thing": optimizer}}},
    "in one": lambda model, optimizer: {"run": {"model": model, "sgd": optimizer}},
    "root": lambda model, optimizer: {"model": model, **optimizer},
    "flat labels": lambda model, optimizer: {
        **{f"model.{name}": weight for name, weight in model.items()},
        **{f"opt.{key}": each for key, each in flattened(optimizer).items()},
    },
}


def flattened(state: Any) -> dict[str, Any]:
    if not isinstance(state, dict | list) or not state:
        return {"": state}
    items = state.items() if isinstance(state, dict) else enumerate(state)
    return {f"{k}.{end}".rstrip("."): v for k, each in items for end, v in flattened(each).items()}


Q, K, V, OUT = (f"*model.{name}" for name in NAMES)
TRANSFORMS: dict[str, list[Any]] = {
    "prefix": [Rename({"*model.layers": "*model.body.layers"})],
    "swap": [Rename({Q: K, K: Q})],
    "swap in steps": [Rename({Q: "*model.x"}), Rename({K: Q}), Rename({"*model.x": K})],
    "ring": [Rename({Q: K, K: V, V: Q})],
    "rearrange": [Rearrange(V, [[2, -1], -1], [[1, 0], 2])],
    "rearrange under a new name": [Rearrange(V, [-1, -1], [1, 0]), Rename({V: "*model.v"})],
    "split": [Split(V, ["*model.v", "*model.w"])],
    "split under the old name": [Split(V, [V, "*model.w"])],
    "fuse": [Fuse([Q, K, V], "*model.qkv")],
    "stack": [Rename({Q: "*model.e.0", K: "*model.e.1"}), Stack("*model.e.{}", "*model.e")],
    "unstack": [Unstack(OUT, "*model.o.{}")],
    "table": name_table("llama-to-hf", heads=2, kv_heads=2),
}
TRANSFORMS["rearrange after a rename"] = [
    Rename({"*model.*": "*net.*"}),
    Rearrange(V.replace("model", "net"), [[2, -1], -1], [[1, 0], 2]),
]


def check(state: Any) -> None:
    """Check that each parameter of a loaded state has the moments that are its own."""
    labels = flattened(state)
    model = {k: v for k, v in labels.items() if "state." not in k and torch.is_tensor(v)}
    held = {k: v for k, v in labels.items() if k.endswith(tuple(FACTORS))}
    assert len(held) == 8
    for label, moment in held.items():
        name, _, key = label.partition("state.")[2].rpartition(".")
        if name.isdigit():  # the order is that of the program's model, which has these names
            order = [each for end in NAMES for each in model if each.endswith(end)]
            (parameter,) = [model[(order if len(order) == 4 else list(model))[int(name)]]]
        else:
            (parameter,) = (each for at, each in model.items() if at.endswith(name))
        assert torch.equal(moment, parameter * FACTORS[key]), label


def fresh(source: Path, transform: list[Any], folder: Path) -> Any:
    return ckpipe.load(source, transform=transform).state


def imported(source: Path, transform: list[Any], folder: Path) -> Any:
    ckpipe.import_checkpoint(source, folder / "own", transform=transform)
    return ckpipe.load(folder / "own").state


def exported(source: Path, transform: list[Any], folder: Path) -> Any:
    save_one(folder / "own", torch.load(source), step=1)
    done = ckpipe.export(folder / "own", folder / "out", form="torch", transform=transform)
    return torch.load(Path(done.url) / "state.pt")


def own(source: Path, transform: list[Any], folder: Path) -> Any:
    save_one(folder / "own", torch.load(source), step=1)
    return ckpipe.load(folder / "own", transform=transform).state


MATRIX = [
    (place, form, rule, way)
    for place in PLACES
    for form in FORMS
    for rule in TRANSFORMS
    for way in (fresh, own, imported, exported)
]


@pytest.mark.sample(12)
@pytest.mark.parametrize(("place", "form", "rule", "way"), MATRIX)
def test_moments_follow_or_the_transforms_are_refused(
    place: str, form: str, rule: str, way: Callable[..., Any], tmp_path: Path
) -> None:
    model = weights()
    torch.save(PLACES[place](model, FORMS[form](model)), tmp_path / "old.pt")
    try:
        state = way(tmp_path / "old.pt", TRANSFORMS[rule], tmp_path)
    except StructureMismatch:
        assert rule != "prefix"
    else:
        check(state)


class Layers(nn.Module):
    """Layers of one shape, declared in the order of their names."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.register_module(name, nn.Linear(8, 8, bias=False))


TARGETS: dict[str, Callable[[Any, Any], Any]] = {
    "live": lambda model, optimizer: {"model": model, "optimizer": optimizer},
    "training state": lambda model, optimizer: {"run": training_state(model, optimizer)},
}
RIGHT = {"a": "up", "b": "down"}
ORDERS = {("up", "down"): True, ("down", "up"): False}


@pytest.mark.parametrize("names", ORDERS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("form", ["numbered", "named", "flat"])
def test_new_names_have_the_moments_of_the_old_ones(
    form: str, target: str, names: tuple[str, str], tmp_path: Path
) -> None:
    old = {f"{name}.weight": torch.rand(8, 8) for name in RIGHT}
    saved = {"model_state_dict": old, "optimizer_state_dict": FORMS[form](old)}
    torch.save(saved, tmp_path / "old.pt")
    model = Layers(*names)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters())
    outer = {"model_state_dict.*": "model.*", "optimizer_state_dict.*": "optimizer.*"}
    inner = {f"model.{name}": f"model.{new}" for name, new in RIGHT.items()}
    into = TARGETS[target](model, optimizer)
    try:
        ckpipe.load(tmp_path / "old.pt", into, transform=[Rename(outer), Rename(inner)])
    except StructureMismatch:
        assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
        assert not optimizer.state
        assert form != "numbered" or not ORDERS[names]
        return
    for parameter in model.parameters():
        for key, factor in FACTORS.items():
            assert torch.equal(optimizer.state[parameter][key], parameter * factor)


LEFT_OUT: list[tuple[str, dict[str, Any]]] = [
    ("dropped", {"transform": [ckpipe.Drop("optim"), *TRANSFORMS["rearrange"]]}),
    ("dropped at the end", {"transform": [*TRANSFORMS["rearrange"], ckpipe.Drop("optim")]}),
    ("only", {"transform": [ckpipe.Only("model"), *TRANSFORMS["rearrange"]]}),
    ("included", {"include": ["model"], "transform": TRANSFORMS["rearrange"]}),
    ("excluded", {"exclude": ["optim"], "transform": TRANSFORMS["rearrange"]}),
    ("without a place", {"strict": False, "transform": TRANSFORMS["rearrange"]}),
]


@pytest.mark.parametrize(("kind", "options"), LEFT_OUT)
@pytest.mark.parametrize("form", FORMS)
def test_state_that_is_left_out_is_not_asked(
    form: str, kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = weights()
    torch.save({"model": model, "optim": FORMS[form](model)}, tmp_path / "old.pt")
    into: Any = {"model": weights()} if kind == "without a place" else None
    state = ckpipe.load(tmp_path / "old.pt", into, **options).state
    turned = model[NAMES[2]].view(2, 4, 8).transpose(0, 1).reshape(8, 8)
    assert torch.equal((into or state)["model"][NAMES[2]], turned)


def beside(more: Callable[[Any], dict[str, Any]]) -> Callable[[Any, Any], dict[str, Any]]:
    """Make the inner container of a trainer, with its optimizer and other tensors in it."""
    return lambda model, opt: {"model": model, "trainer": {**more(model), "optim": opt}}


CONTAINERS: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "no groups": lambda model, opt: {"model": model, "optim": {"state": opt["state"]}},
    "no group": lambda model, opt: {"model": model, "optim": {**opt, "param_groups": []}},
    "ema": beside(lambda model: {"ema": {name: each * 2 for name, each in model.items()}}),
    "random state": beside(lambda model: {"rng": torch.get_rng_state(), "cuda": torch.ones(9)}),
    "scaler": beside(lambda model: {"scaler": {"scale": torch.ones(()), "n": torch.ones(())}}),
    "history": beside(lambda model: dict.fromkeys("abcde", torch.ones(3))),
    "steps of one element": lambda model, opt: {
        "model": {**model, "scale": torch.ones(1)},
        "optim": {
            "state": {key: {**own, "step": torch.ones(1)} for key, own in opt["state"].items()},
            "param_groups": opt["param_groups"],
        },
    },
}
RULES: dict[str, list[Any]] = {
    "turned": [Rearrange(V, [-1, -1], [1, 0])],
    "exchanged": [Rename({Q: K, K: Q})],
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", ["numbered", "named"])
@pytest.mark.parametrize("place", CONTAINERS)
def test_optimizers_are_found_in_containers(
    place: str, form: str, rule: str, tmp_path: Path
) -> None:
    model = weights()
    torch.save(CONTAINERS[place](model, FORMS[form](model)), tmp_path / "old.pt")
    with pytest.raises(StructureMismatch, match="leave the state"):
        ckpipe.load(tmp_path / "old.pt", transform=RULES[rule])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("key", ["exp_avg", "velocity"])
@pytest.mark.parametrize("form", ["numbered", "named"])
def test_optimizers_without_groups_are_known_by_new_names(
    form: str, key: str, rule: str, tmp_path: Path
) -> None:
    model = weights()
    optimizer = FORMS[form](model)
    optimizer["state"] = {n: {key: each["exp_avg"]} for n, each in optimizer["state"].items()}
    torch.save({"model": model, "optim": optimizer}, tmp_path / "old.pt")
    before = [Drop("optim.param_groups"), Rename({"optim.*": "opt.*"})]
    with pytest.raises(StructureMismatch, match="leave the state"):
        ckpipe.load(tmp_path / "old.pt", transform=[*before, *RULES[rule]])


def test_factored_state_does_not_tell_the_shapes_of_its_parameters(tmp_path: Path) -> None:
    model = {**weights(), "norm.weight": torch.rand(8)}
    factors = {"exp_avg_sq_row": torch.rand(8), "exp_avg_sq_col": torch.rand(8)}
    optimizer = {"state": dict.fromkeys(range(4), factors), "param_groups": [{"params": [0, 1]}]}
    torch.save({"model": model, "optim": optimizer}, tmp_path / "old.pt")
    with pytest.raises(StructureMismatch, match="leave the state"):
        ckpipe.load(tmp_path / "old.pt", transform=RULES["turned"])


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 3, 2), (3, 1, 2, 0)])
def test_models_may_stand_in_another_order_in_the_target(
    order: tuple[int, ...], swap: bool, tmp_path: Path
) -> None:
    nets = [{f"{name}.weight": torch.rand(8, 8) for name in "ab"} for _ in range(2)]
    one, two = map(numbered, nets)
    torch.save({"netG": nets[0], "netD": nets[1], "optG": one, "optD": two}, tmp_path / "old.pt")
    models = [Layers("x", "y") for _ in nets]
    optimizers = [torch.optim.AdamW(each.parameters()) for each in models]
    into = [*zip(("netG", "netD", "optG", "optD"), [*models, *optimizers], strict=True)]
    rules = [Rename({"net*.a.*": "net*.x.*", "net*.b.*": "net*.y.*"})]
    target = {into[place][0]: into[place][1] for place in order}
    if swap:
        rules.append(Rename({"netG.*": "netD.*", "netD.*": "netG.*"}))
        with pytest.raises(StructureMismatch, match="leave the state"):
            ckpipe.load(tmp_path / "old.pt", target, transform=rules)
        return
    ckpipe.load(tmp_path / "old.pt", target, transform=rules)
    for model, optimizer in zip(models, optimizers, strict=True):
        for parameter in model.parameters():
            assert torch.equal(optimizer.state[parameter]["exp_avg"], parameter * 2)


@pytest.mark.parametrize("target", ["live", "training state"])
@pytest.mark.parametrize("names", [("c", "b"), ("b", "c")])
def test_one_new_name_in_another_order_is_refused(
    names: tuple[str, str], target: str, tmp_path: Path
) -> None:
    old = {f"{name}.weight": torch.rand(8, 8) for name in "ab"}
    torch.save({"model": old, "optimizer": numbered(old)}, tmp_path / "old.pt")
    model = Layers(*names)
    optimizer = torch.optim.AdamW(model.parameters())
    into, rule = TARGETS[target](model, optimizer), Rename({"model.a.*": "model.c.*"})
    if names == ("b", "c"):
        with pytest.raises(StructureMismatch, match="leave the state"):
            ckpipe.load(tmp_path / "old.pt", into, transform=[rule])
        return
    ckpipe.load(tmp_path / "old.pt", into, transform=[rule])
    for parameter in model.parameters():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], parameter * 2)


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("form", ["named", "flat"])
def test_groups_that_keep_old_names_are_refused(form: str, alike: bool, tmp_path: Path) -> None:
    old = {f"{name}.weight": torch.rand(8, 8) for name in "ab"}
    torch.save({"model": old, "optim": FORMS[form](old)}, tmp_path / "old.pt")
    names = {"model.a.*": "model.c.*", "optim.state.a.*": "optim.state.c.*"}
    rule = Rename({"*a.weight*": "*c.weight*"} if alike else names)
    if form == "named" or not alike:
        with pytest.raises(StructureMismatch, match="another name"):
            ckpipe.load(tmp_path / "old.pt", transform=[rule])
        return
    state = ckpipe.load(tmp_path / "old.pt", transform=[rule]).state
    assert state["optim"]["param_groups.c.weight.lr"] == OPTIONS["lr"]


def test_an_optimizer_of_other_parameters_is_not_asked(tmp_path: Path) -> None:
    net, head = {"a.weight": torch.rand(4, 6)}, {"b.weight": torch.rand(8, 8)}
    saved = [(form(net), form(head)) for form in FORMS.values() if form != FORMS["in two groups"]]
    for one, two in saved:
        runs = {"net": {"model": net, "opt": one}, "head": {"model": head, "opt": two}}
        together = {"model": {**net, **head}, "opt": two}
        for state, names in ((runs, "net.model.a.*"), (together, "model.a.*")):
            torch.save(state, tmp_path / "old.pt")
            rule = Rearrange(names, [-1, -1], [1, 0])
            left = ckpipe.load(tmp_path / "old.pt", exclude=["net.opt"], transform=[rule]).state
            assert ("net" in left) == (state is runs)
    torch.save({"net": net, "head": head, "opt": numbered(net)}, tmp_path / "old.pt")
    with pytest.raises(StructureMismatch, match="leave the state"):
        ckpipe.load(tmp_path / "old.pt", transform=[Rearrange("net.a.*", [-1, -1], [1, 0])])


@pytest.mark.parametrize("place", ["training state", "live"])
@pytest.mark.parametrize("rule", ["turned", "exchanged"])
def test_state_of_no_single_parameter_is_refused(place: str, rule: str, tmp_path: Path) -> None:
    model = Layers("a", "b")
    optimizer = torch.optim.LBFGS(model.parameters())

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = sum((layer(torch.ones(1, 8)) for layer in model.children()), torch.zeros(1, 8))
        (total := found.square().sum()).backward()
        return total

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    save_one(tmp_path / "run", TARGETS[place](model, optimizer), step=1)
    rules = {
        "turned": Rearrange("*model.a.weight", [-1, -1], [1, 0]),
        "exchanged": Rename({"*model.a": "*model.b", "*model.b": "*model.a"}),
    }
    with pytest.raises(StructureMismatch, match="leave the state"):
        ckpipe.load(tmp_path / "run", transform=[rules[rule]])
