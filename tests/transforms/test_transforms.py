"""Transforms: other names, cut and joined tensors and other dtypes on the way into a target."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import anyio
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import ckpipe
from ckpipe import (
    Cast,
    Drop,
    Fuse,
    Only,
    Rearrange,
    Rename,
    Split,
    Stack,
    Unstack,
    name_table,
)
from ckpipe.distributed import training_state
from ckpipe.errors import (
    CkpipeError,
    DtypeMismatch,
    ShapeMismatch,
    StructureMismatch,
    UsageError,
)
from ckpipe.testing import MemoryBackend
from tests.support import pipelines
from tests.support.one_checkpoint import save_one
from tests.support.stored_states import load, store

MIB = 1 << 20


def net(names: list[str]) -> nn.Module:
    """Two layers under given names."""
    made = nn.Module()
    for name, layer in zip(names, (nn.Linear(4, 6), nn.Linear(6, 2)), strict=True):
        made.add_module(name, layer)
    return made


def numbered(*shape: int, first: int = 0) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(first, first + count, dtype=torch.float32).reshape(shape)


async def stored(state: Any) -> MemoryBackend:
    backend = MemoryBackend()
    await store(state, backend)
    return backend


RENAMES = [
    Rename({"model.0.*": "model.up.*", "model.1": "model.down"}),
    Rename(r"^model\.([01])\.", r"model.layer\1."),
    Rename(lambda label: label.replace("model.", "model.inner_")),
]


@pytest.mark.parametrize(
    ("rename", "names"),
    [
        (RENAMES[0], ["up", "down"]),
        (RENAMES[1], ["layer0", "layer1"]),
        (RENAMES[2], ["inner_0", "inner_1"]),
    ],
)
async def test_a_module_with_other_names_is_filled(rename: Rename, names: list[str]) -> None:
    saved, target = net(["0", "1"]), net(names)
    backend = await stored({"model": saved, "step": 3})
    result = await load(backend, {"model": target, "step": 0}, transform=[rename])
    assert result.state["step"] == 3
    for old, new in zip(saved.parameters(), target.parameters(), strict=True):
        assert torch.equal(old, new)
    assert result.transformed["model.0.weight"] == (f"model.{names[0]}.weight",)
    assert "step" not in result.transformed


async def test_names_move_into_out_of_and_with_containers() -> None:
    first, second = torch.ones(2), torch.zeros(3)
    state = {"net": {"a.w": first, "deep": {"w": second}}, "other": 1, "list": [{"x": 5}]}
    backend = await stored(state)

    async def loaded(*rules: Rename) -> Any:
        return (await load(backend, transform=rules)).state

    renamed = await loaded(Rename({"net": "model"}))
    assert list(renamed) == ["model", "other", "list"]
    assert list(renamed["model"]) == ["a.w", "deep"]
    flat = await loaded(Rename({"net.*": "*"}))
    assert list(flat) == ["other", "list", "a.w", "deep"]
    assert torch.equal(flat["deep"]["w"], second)
    wrapped = await loaded(Rename({"*": "all.state.*"}))
    assert list(wrapped["all"]["state"]) == ["net", "other", "list"]
    moved = await loaded(Rename({"other": "net.deep.other", "net.a.w": "w"}))
    assert list(moved) == ["net", "list", "w"]
    assert moved["net"]["deep"]["other"] == 1
    assert (await loaded(Rename({"list.0.x": "list.0.y"})))["list"] == [{"y": 5}]
    swapped = await loaded(Rename({"net.a.w": "other", "other": "net.a.w"}))
    assert swapped["net"]["a.w"] == 1
    assert torch.equal(swapped["other"], first)


async def test_a_wrapped_module_takes_the_state_of_the_bare_one() -> None:
    bare = nn.Linear(2, 3)
    backend = await stored({"model": bare})
    wrapped: Any = nn.ModuleDict({"module": nn.Linear(2, 3)})
    await load(backend, {"model": wrapped}, transform=[Rename({"model.*": "model.module.*"})])
    assert torch.equal(wrapped["module"].weight, bare.weight)
    for saved in (bare, dict(bare.state_dict())):
        alone: Any = nn.ModuleDict({"module": nn.Linear(2, 3)})
        await load(await stored(saved), alone, transform=[Rename({"*": "module.*"})])
        assert torch.equal(alone["module"].bias, bare.bias)
    back = nn.Linear(2, 3)
    await load(await stored(wrapped), {"model": back}, transform=[Rename({"module.*": "model.*"})])
    assert torch.equal(back.weight, bare.weight)


async def test_keys_that_are_no_texts_stay_as_they_are() -> None:
    backend = await stored({"a": {1: torch.ones(2), (2, 3): 4, "x.y": 5}})
    state = (await load(backend, transform=[Rename({"a.x.*": "a.z.*"})])).state
    assert list(state["a"]) == [1, (2, 3), "z.y"]


async def test_an_optimizer_under_another_label_keeps_its_class() -> None:
    parameters = [nn.Parameter(torch.ones(3))]
    backend = await stored({"opt": torch.optim.AdamW(parameters)})
    wrong = {"optimizer": torch.optim.SGD(parameters)}
    with pytest.raises(StructureMismatch, match="AdamW"):
        await load(backend, wrong, transform=[Rename({"opt": "optimizer"})])
    right = {"optimizer": torch.optim.AdamW(parameters)}
    await load(backend, right, transform=[Rename({"opt": "optimizer"})])


def trained(names: str, rate: float, steps: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Three layers and a parameter under given names, with an optimizer of two groups."""
    model = nn.Module()
    parts = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.Parameter(torch.ones(3))
    for path, part in zip(names.split(), parts, strict=True):
        home, (*above, name) = model, path.split(".")
        for each in above:
            if each not in home._modules:
                home.add_module(each, nn.Module())
            home = home.get_submodule(each)
        setattr(home, name, part)
    first, last = ([*part.parameters()] for part in parts[1:3])
    groups: list[dict[str, Any]]
    groups = [{"params": [*parts[0].parameters(), *first, parts[3]], "lr": rate}, {"params": last}]
    optimizer = torch.optim.AdamW(groups, lr=2 * rate)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return model, optimizer


FOLLOWED = [
    (Rename({"train.model.0.*": "train.model.up.*", "train.model.1": "train.model.norm"}),
     "0 1 2 w", "up norm 2 w"),
    (Rename({"*model.0": "*model.2", "*model.2": "*model.0"}), "0 1 2 w", "2 1 0 w"),
    (Rename(r"\b0\.", "10."), "0 1 2 w", "10 1 2 w"),
    (Rename(lambda label: label.replace("model.", "model.in.")), "a b c d", "in.a in.b in.c in.d"),
    (Rename(lambda label: re.sub(r"(?<=\.)[ac](?=\.(weight|bias)(\.|$))", r"new_\g<0>", label)),
     "a b c d", "new_a b new_c d"),
    (Rename({"*.w": "*.w.weight", "*model.1": "*model.z.n"}), "0 1 2 w", "0 z.n 2 w.weight"),
    (Rename({"*.w.weight": "*.w"}), "0 1 2 w.weight", "0 1 2 w"),
    (name_table("qwen-to-hf"), "tok_embeddings layers.3.ffn_norm output norm.weight",
     "model.embed_tokens model.layers.3.post_attention_layernorm lm_head model.norm.weight"),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "old", "new"), FOLLOWED)
async def test_a_training_state_is_renamed_with_its_optimizer(
    rules: Any, old: str, new: str
) -> None:
    saved, optimizer = trained(old, 0.1, steps=2)
    backend = await stored({"train": training_state(saved, optimizer)})
    target, other = trained(new, 0.7)
    rules = rules if isinstance(rules, list) else [rules]
    await load(backend, {"train": training_state(target, other)}, transform=rules)
    for mine, theirs in zip(
        *([each for group in opt.param_groups for each in group["params"]]
          for opt in (optimizer, other)), strict=True,
    ):  # fmt: skip
        assert torch.equal(mine, theirs)
        for key, value in optimizer.state[mine].items():
            assert torch.equal(value, other.state[theirs][key])
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.2]
    moved = [*rules, Rename({"train.*": "net.*"})]
    fresh = (await load(backend, transform=moved)).state["net"]
    assert fresh["versions"] == {new.split()[1]: 2}
    assert fresh["optimizer"]["groups"].keys() <= fresh["optimizer"]["state"].keys()


UNFOLLOWED = [
    Rearrange("*model.a.weight", [[2, 2], -1], [[1, 0], 2]),
    Split("*model.a.weight", ["*model.x", "*model.y"]),
    Unstack("*model.d", "*model.d{}"),
    Fuse(["*model.c.weight"], "*model.c.weight"),
]
TORN = [
    Rename({"*groups.a.weight.params": "*groups.params"}),
    Rename({"*groups.a.weight.options.lr": "*groups.lr"}),
    Rename({"*state.d.exp_avg": "*state.exp"}),
    Rename({"*state.d.exp_avg": "*joint"}),
]


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        *(("numbered", rule) for rule in UNFOLLOWED),
        *((kind, rule) for rule in UNFOLLOWED + TORN for kind in ("named", "root")),
    ],
)
async def test_state_that_would_not_follow_its_parameter_is_refused_untouched(
    kind: str, rule: Any
) -> None:
    def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        state: Any = {"model": model, "optimizer": optimizer}
        state = state if kind == "numbered" else training_state(model, optimizer)
        return state if kind == "root" else {"train": state}

    backend = await stored(held(*trained("a b c d", 0.1, steps=1)))
    model, optimizer = trained("a b c d", 0.7, steps=1)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    text = "no part of the state|this parameter another"
    with pytest.raises(StructureMismatch, match=text) as caught:
        await load(backend, held(model, optimizer), transform=[rule])
    assert str((model.state_dict(), optimizer.state_dict())) == str(before)
    hint = re.search(r"ckpipe\.(Drop\('[^)]*'\))", caught.value.hint or "")
    assert rule in TORN or hint
    if hint and rule not in TORN:
        await load(backend, transform=[eval(hint[1]), rule])


async def test_state_that_is_rearranged_with_its_parameter_is_loaded() -> None:
    (saved, optimizer), (target, other) = trained("a b c d", 0.1, steps=1), trained("a b c d", 0.7)
    backend = await stored(training_state(saved, optimizer))
    globs = "model.a.weight", "optimizer.state.a.weight.exp_avg*"
    rules = [Rearrange(glob, [[2, 2], -1], [[1, 0], 2]) for glob in globs]
    await load(backend, training_state(target, other), transform=rules)
    mine, theirs = saved.get_parameter("a.weight"), target.get_parameter("a.weight")
    turned = mine[[0, 2, 1, 3]]
    assert torch.equal(theirs, turned)
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(other.state[theirs][key], optimizer.state[mine][key][[0, 2, 1, 3]])
    alone, _ = trained("a b c d", 0.7)
    await load(backend, {"model": alone}, transform=rules[:1], include=["model"])
    assert torch.equal(alone.get_parameter("a.weight"), turned)


def cut(rule: Callable[..., Any], name: str, *more: Any) -> list[Any]:
    """Transforms that change a parameter of a training state and its moments alike."""
    heads = "t.model", *(f"t.optimizer.state|.{key}" for key in ("exp_avg", "exp_avg_sq"))
    rules = []
    for head in heads:
        home, _, end = head.partition("|")
        at = [
            [f"{home}.{each}{end}" for each in part] if type(part) is tuple
            else f"{home}.{part}{end}" if type(part) is str else part
            for part in more
        ]  # fmt: skip
        rules.append(rule(f"{home}.{name}{end}", *at))
    return rules


PARTS: list[tuple[list[Any], dict[str, Callable[[torch.Tensor], torch.Tensor]]]] = [
    (cut(Split, "a.weight", ("x.weight", "y.weight")),
     {"x.weight": lambda old: old[:2], "y.weight": lambda old: old[2:]}),
    (cut(Split, "a.weight", ("a.weight", "y")),
     {"a.weight": lambda old: old[:2], "y": lambda old: old[2:]}),
    (cut(partial(Split, sizes=[1, 2], dim=1), "a.weight", ("x", "y")),
     {"x": lambda old: old[:, :1], "y": lambda old: old[:, 1:]}),
    (cut(Unstack, "a.weight", "r.{}"), {f"r.{n}": itemgetter(n) for n in range(4)}),
    (cut(Rearrange, "a.weight", [-1, -1], [1, 0]), {"a.weight": torch.t}),
    ([*cut(Split, "a.weight", ("x", "y")), Rename({"t": "run"}), Rename({"run": "t"})],
     {"x": lambda old: old[:2], "y": lambda old: old[2:]}),
    ([*cut(Split, "a.weight", ("x", "y")),
      Rename({"t.model.x": "t.model.in.x", "t.optimizer.state.x.*": "t.optimizer.state.in.x.*"})],
     {"in.x": lambda old: old[:2], "y": lambda old: old[2:]}),
]  # fmt: skip


@pytest.mark.sample(5)
@pytest.mark.parametrize("way", ["load", "import", "export"])
@pytest.mark.parametrize(("rules", "parts"), PARTS)
def test_parts_of_a_parameter_have_its_moments_steps_and_group(
    rules: Any, parts: Any, way: str, tmp_path: Path
) -> None:
    saved, optimizer = trained("a b c d", 0.1, steps=2)
    save_one(tmp_path / "run", {"t": training_state(saved, optimizer)}, step=1)
    mine = saved.get_parameter("a.weight")
    target = nn.Module()
    wanted = {name: take(mine.detach()) for name, take in parts.items()}
    for name, each in [*wanted.items(), *saved.named_parameters(), *saved.named_buffers()]:
        if name == "a.weight" and each is mine:
            continue
        home, (*above, last) = target, name.split(".")
        for part in above:
            if part not in home._modules:
                home.add_module(part, nn.Module())
            home = home.get_submodule(part)
        if name in dict(saved.named_buffers()):
            home.register_buffer(last, torch.zeros_like(each))
        else:
            home.register_parameter(last, nn.Parameter(torch.zeros_like(each)))
    last_group = [each for name, each in target.named_parameters() if name.startswith("c.")]
    first = [each for name, each in target.named_parameters() if not name.startswith("c.")]
    groups: list[dict[str, Any]] = [{"params": first, "lr": 0.5}, {"params": last_group}]
    other = torch.optim.AdamW(groups, lr=0.7)
    state: Any = {"t": training_state(target, other)}
    place, left = tmp_path / "run", rules
    if way == "import":
        place, left = tmp_path / "other", []
        ckpipe.import_checkpoint(tmp_path / "run", place, transform=rules)
    if way == "export":
        folder, left = tmp_path / "out", []
        done = ckpipe.export(tmp_path / "run", folder, form="torch", transform=rules)
        place = Path(done.url) / "state.pt"
    ckpipe.load(place, state, transform=left, exclude=["t.versions"])
    for name, take in parts.items():
        parameter = target.get_parameter(name)
        assert torch.equal(parameter, take(mine))
        for key, value in optimizer.state[mine].items():
            assert torch.equal(other.state[parameter][key], value if key == "step" else take(value))
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.2]


def test_only_what_would_hold_the_old_state_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained("a b c d", 0.1, steps=1)
    save_one(tmp_path / "run", training_state(model, optimizer), step=1)
    rule = [Rearrange("model.a.weight", [[2, 2], -1], [[1, 0], 2])]
    done = ckpipe.export(tmp_path / "run", form="hf", transform=rule)
    weights = ckpipe.load(done.url).state
    assert torch.equal(weights["a.weight"], model.get_parameter("a.weight")[[0, 2, 1, 3]])
    ckpipe.export(tmp_path / "run", tmp_path / "m", form="torch", part="model", transform=rule)
    with pytest.raises(StructureMismatch, match="leave the state"):
        ckpipe.export(tmp_path / "run", tmp_path / "all", form="torch", transform=rule)
    with pytest.raises(StructureMismatch, match="leave the state"):
        ckpipe.import_checkpoint(tmp_path / "run", tmp_path / "other", transform=rule)
    assert not (tmp_path / "all").exists()


async def test_only_and_drop_leave_labels_out() -> None:
    model = nn.Linear(2, 2)
    backend = await stored({"model": model, "head": torch.ones(5), "step": 1})
    target = nn.Linear(2, 2)
    rules = [Only("model", "head"), Drop("head"), Rename({"model.*": "*"})]
    result = await load(backend, target, transform=rules)
    assert torch.equal(target.weight, model.weight)
    assert result.transformed["head"] == result.transformed["step"] == ()
    assert result.transformed["model.weight"] == ("weight",)


async def test_containers_that_were_empty_are_left_out_with_their_names() -> None:
    empty: Any = {"callbacks": {}, "optimizer_states": [{"state": {}, "groups": []}], "loop": [()]}
    model = nn.Linear(2, 2)
    backend = await stored({"model": {**model.state_dict(), "kept": {}}, **empty})
    kept = await load(backend, transform=[Only("model")])
    assert list(kept.state) == ["model"]
    assert kept.state["model"]["kept"] == {}
    target = nn.Linear(2, 2)
    rules = [Only("model.weight", "model.bias"), Rename({"model.*": "*"})]
    await load(backend, target, transform=rules)
    assert torch.equal(target.weight, model.weight)


async def test_a_module_refuses_an_empty_container_untouched() -> None:
    backend = await stored({**nn.Linear(2, 2).state_dict(), "callbacks": {}})
    target = nn.Linear(2, 2)
    before = target.weight.detach().clone()
    with pytest.raises(StructureMismatch, match="unexpected in it: 'callbacks'"):
        await load(backend, target)
    assert torch.equal(target.weight, before)
    await load(backend, target, allow_unexpected=["callbacks"])
    assert not torch.equal(target.weight, before)


async def test_a_dropped_name_can_be_taken_by_another_tensor_of_its_shape() -> None:
    backend = await stored({"a": torch.zeros(3), "b": torch.ones(3)})
    state = (await load(backend, transform=[Drop("a"), Rename({"b": "a"})])).state
    assert torch.equal(state["a"], torch.ones(3))


async def test_floating_tensors_are_converted_and_others_are_not() -> None:
    narrow = torch.randn(5).bfloat16()
    backend = await stored({"a": narrow, "b": torch.ones(2, dtype=torch.float64), "n": 3})
    cast = [Cast({"a": torch.float32, "*": "float16"})]
    state = (await load(backend, transform=cast)).state
    assert state["a"].dtype is torch.float32
    assert torch.equal(state["a"], narrow.float())
    assert state["b"].dtype is torch.float16
    target: dict[str, Any] = {"a": torch.zeros(5), "b": torch.zeros(2).half(), "n": 0}
    await load(backend, target, transform=cast)
    assert torch.equal(target["a"], narrow.float())
    with pytest.raises(DtypeMismatch):
        await load(backend, {**target, "a": narrow.clone()}, transform=cast)


async def test_tensors_that_share_memory_are_converted_and_share_it_again() -> None:
    weight = torch.randn(4, 6)
    backend = await stored({"w": weight, "tied": weight, "rows": weight[1:3], "t": weight.t()})
    state: dict[str, torch.Tensor] = (
        await load(backend, transform=[Cast({"*": torch.float64})])
    ).state
    for label, value in {"w": weight, "tied": weight, "rows": weight[1:3], "t": weight.t()}.items():
        assert state[label].dtype is torch.float64
        assert torch.equal(state[label], value.double()), label
    assert state["w"] is state["tied"] or state["w"].data_ptr() == state["tied"].data_ptr()


@pytest.mark.parametrize("source", ["own", "torch"])
async def test_each_name_of_one_tensor_gets_its_own_dtype(source: str, tmp_path: Path) -> None:
    weight = torch.randn(4, 6)
    saved = {"a": weight, "b": {"c": weight}, "d": weight, "e": weight}
    backend = await stored(saved)
    torch.save(saved, tmp_path / "old.pt")
    half, wide, kept = torch.bfloat16, torch.float64, torch.float32
    for dtypes, expected in (
        ({"d": half}, [kept, kept, half, kept]),
        ({"a": half}, [half, kept, kept, kept]),
        ({"a": "fp32", "*": "bf16"}, [kept, half, half, half]),
        ({"b": half, "d": "fp64"}, [kept, half, wide, kept]),
    ):
        rules: list[Any] = [Cast(cast("dict[str, Any]", dtypes))]
        for more in ([], [Drop("a")], [Rename({"b.c": "b.z"})], [Rearrange("d", [-1, -1], [1, 0])]):
            if source == "own":
                done = await load(backend, transform=rules + more)
            else:
                done = await anyio.to_thread.run_sync(
                    partial(ckpipe.load, tmp_path / "old.pt", transform=rules + more)
                )
            found: dict[str, Any] = done.state
            values = [found.get("a"), *found["b"].values(), found["d"].reshape(6, 4), found["e"]]
            turned = bool(more) and isinstance(more[0], Rearrange)
            for value, dtype, place in zip(values, expected, range(4), strict=True):
                if value is None:
                    continue
                right = weight.t().reshape(6, 4) if turned and place == 2 else weight
                assert torch.equal(value, right.to(dtype).reshape(value.shape)), (dtypes, more)


async def test_a_dict_with_two_names_has_one_dtype() -> None:
    weights = {"w": torch.randn(4)}
    backend = await stored({"a": weights, "b": weights})
    with pytest.raises(StructureMismatch, match="also held as"):
        await load(backend, transform=[Cast({"a": torch.bfloat16})])
    state: dict[str, Any] = (await load(backend, transform=[Cast({"?": torch.bfloat16})])).state
    assert state["a"]["w"].dtype is state["b"]["w"].dtype is torch.bfloat16


async def test_one_of_several_tensors_with_one_memory_is_cut() -> None:
    weight = numbered(4, 6)
    backend = await stored({"w": weight, "tied": weight, "turned": weight.t(), "rows": weight[1:3]})
    rules = [
        Split("tied", ["a", "b"], dim=1),
        Split("turned", ["c", "d"]),
        Unstack("rows", "row.{}"),
    ]
    state = (await load(backend, transform=rules)).state
    assert torch.equal(state["w"], weight)
    assert torch.equal(state["b"], weight[:, 3:])
    assert torch.equal(state["d"], weight.t()[3:])
    assert torch.equal(state["row.1"], weight[2])


ATTENTION = [
    Fuse(["*.q.weight", "*.k.weight", "*.v.weight"], "*.qkv.weight"),
    Split("*.qkv.weight", ["*.q.weight", "*.k.weight", "*.v.weight"], sizes=[8, 4, 4]),
]


async def test_projections_are_joined_and_cut_again() -> None:
    q, k, v = (numbered(n, 8, first=100 * n) for n in (8, 4, 4))
    layers = {f"{n}.{name}.weight": each + n for n in (0, 1) for name, each in
              (("q", q), ("k", k), ("v", v))}  # fmt: skip
    backend = await stored({"layers": layers, "norm": torch.ones(8)})
    target: Any = {
        "layers": {f"{n}.qkv.weight": torch.zeros(16, 8) for n in (0, 1)},
        "norm": torch.zeros(8),
    }
    result = await load(backend, target, transform=ATTENTION[:1])
    assert torch.equal(target["layers"]["1.qkv.weight"], torch.cat([q, k, v]) + 1)
    assert result.transformed["layers.0.k.weight"] == ("layers.0.qkv.weight",)
    again = await load(backend, transform=ATTENTION)
    assert list(again.state["layers"]) == list(layers)
    assert all(torch.equal(again.state["layers"][name], layers[name]) for name in layers)
    backend = await stored(target)
    apart = await load(backend, transform=ATTENTION[1:])
    assert torch.equal(apart.state["layers"]["1.v.weight"], v + 1)
    assert apart.transformed["layers.0.qkv.weight"] == (
        "layers.0.q.weight",
        "layers.0.k.weight",
        "layers.0.v.weight",
    )


async def test_experts_are_stacked_and_taken_apart() -> None:
    experts = {f"experts.{n}.up.weight": numbered(3, 2, first=n) for n in range(11)}
    backend = await stored({"mlp": experts})
    stack = Stack("*.experts.{}.up.weight", "*.experts.up")
    stacked = (await load(backend, transform=[stack])).state["mlp"]["experts.up"]
    assert torch.equal(stacked, torch.stack(list(experts.values())))
    backend = await stored({"mlp": {"experts.up": stacked}})
    unstack = Unstack("*.experts.up", "*.experts.{}.up.weight")
    apart = (await load(backend, transform=[unstack])).state["mlp"]
    assert list(apart) == list(experts)
    assert all(torch.equal(apart[name], experts[name]) for name in experts)
    assert all(each.untyped_storage().nbytes() == 24 for each in apart.values())


Rule = tuple[Any, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]]


def factors(size: int) -> list[list[int]]:
    """All ways to divide a size, without ones but one."""
    found = [[size], [1, size]]
    for n in range(2, size):
        if size % n == 0:
            found += [[n, *rest] for rest in factors(size // n)]
    return found


def resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    at = dim % len(shape)
    return (*shape[:at], size, *shape[at + 1 :])


@st.composite
def rules(draw: st.DrawFn) -> list[Rule]:
    """Transforms of tensors called by one letter, each with the same in torch."""
    shapes: dict[str, tuple[int, ...]] = {"a": (4, 6), "b": (4, 6)}
    found: list[Rule] = []
    for number in range(draw(st.integers(1, 5))):
        name = draw(st.sampled_from(sorted(shapes)))
        shape = shapes[name]
        new = [f"{chr(ord('c') + number)}{part}" for part in "xyz"]
        kind = draw(st.sampled_from(["split", "fuse", "stack", "unstack", "rearrange"]))
        if kind == "split":
            dim = draw(st.integers(-len(shape), len(shape) - 1))
            size = draw(st.integers(0, shape[dim]))
            sizes = [size, shape[dim] - size]
            rule: Any = Split(name, new[:2], dim, sizes=sizes)

            def same(each: Any, name: str = name, new: Any = new, sizes: Any = sizes,
                     dim: int = dim) -> Any:  # fmt: skip
                parts = each.pop(name).split(sizes, dim)
                return each | dict(zip(new[:2], parts, strict=True))

            del shapes[name]
            for part, count in zip(new[:2], sizes, strict=True):
                shapes[part] = resized(shape, dim, count)
        elif kind == "unstack" and shape[0] > 0 and len(shape) > 1:
            rule = Unstack(name, f"{new[0]}{{}}")

            def same(each: Any, name: str = name, new: Any = new) -> Any:  # type: ignore[misc]
                parts = each.pop(name).unbind(0)
                return each | {f"{new[0]}{n}": part for n, part in enumerate(parts)}

            del shapes[name]
            shapes |= {f"{new[0]}{n}": shape[1:] for n in range(shape[0])}
        elif kind == "rearrange" and 0 not in shape:
            divided = [draw(st.sampled_from(factors(size))) for size in shape]
            parts = [n for each in divided for n in each]
            numbers = draw(st.permutations(range(len(parts))))
            cuts = sorted(
                draw(st.sets(st.sampled_from(range(1, len(parts))))) if numbers[1:] else ()
            )
            order = [numbers[a:b] for a, b in pairwise([0, *cuts, len(parts)])]
            shapes[name] = tuple(math.prod(parts[n] for n in group) for group in order)
            rule = Rearrange(name, divided, order)

            def same(each: Any, name: str = name, parts: Any = parts,  # type: ignore[misc]
                     numbers: Any = numbers, shape: Any = shapes[name]) -> Any:  # fmt: skip
                return each | {name: each[name].reshape(parts).permute(numbers).reshape(shape)}

        elif kind == "fuse":
            others = sorted(each for each in shapes if shapes[each] == shape and each != name)
            olds = [name, *others[:1]]
            dim = draw(st.integers(-len(shape), len(shape) - 1))
            rule = Fuse(olds, new[0], dim)

            def same(each: Any, olds: Any = olds, new: Any = new,  # type: ignore[misc]
                     dim: int = dim) -> Any:  # fmt: skip
                return each | {new[0]: torch.cat([each.pop(old) for old in olds], dim)}

            for old in olds:
                del shapes[old]
            shapes[new[0]] = resized(shape, dim, len(olds) * shape[dim])
        else:
            rule = [Rename({name: f"{new[0]}.0"}), Stack(f"{new[0]}.{{}}", new[0])]

            def same(each: Any, name: str = name, new: Any = new) -> Any:  # type: ignore[misc]
                return each | {new[0]: each.pop(name)[None]}

            del shapes[name]
            shapes[new[0]] = (1, *shape)
        found.append((rule if isinstance(rule, list) else [rule], same))
    return found


@given(rules(), st.booleans())
async def test_any_transforms_do_what_torch_does(chosen: list[Rule], turned: bool) -> None:
    state = {"a": numbered(4, 6), "b": numbered(4, 6, first=100)}
    if turned:
        state["b"] = state["b"].t().contiguous().t()
    backend = await stored(dict(state))
    expected, transform = dict(state), []
    for rule, same in chosen:
        transform += rule
        expected = same(expected)
    loaded = (await load(backend, transform=transform)).state
    assert sorted(loaded) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), (name, [type(each) for each in transform])
    live = {name: torch.full(tensor.shape, -1.0) for name, tensor in expected.items()}
    await load(backend, live, transform=transform)
    assert all(torch.equal(live[name], expected[name]) for name in expected)


@settings(max_examples=8, deadline=None)
@example([[3], [2, 3]], -1, False)
@given(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(-4, 3),
    st.booleans(),
)
async def test_each_group_is_joined_and_cut_in_its_own_dimension(
    shapes: list[list[int]], dim: int, longer: bool
) -> None:
    """The names of one glob may belong to tensors of several ranks, such as weights and biases."""
    names = ["*.a", "*.b"]
    state: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for number, shape in enumerate(shapes):
        other = resized(shape, dim, shape[dim % len(shape)] + longer)
        state |= {f"{number}.a": numbered(*shape), f"{number}.b": numbered(*other, first=50)}
    fuse = [Fuse(names, "*.ab", dim)]
    try:
        for number in range(len(shapes)):
            expected[f"{number}.ab"] = torch.cat([state[f"{number}.{n}"] for n in "ab"], dim)
    except IndexError:  # a tensor lacks the dimension
        with pytest.raises(ShapeMismatch, match="no dimension"):
            await load(await stored(state), transform=fuse)
        return
    joined = (await load(await stored(state), transform=fuse)).state
    assert all(torch.equal(joined[name], each) for name, each in expected.items())
    split = Split("*.ab", names, dim)
    if not longer:
        again = (await load(await stored(joined), transform=[split])).state
        assert all(torch.equal(again[name], each) for name, each in state.items())
        stack = [Rename({"*.a": "*.0", "*.b": "*.1"}), Stack("*.{}", "*"), Unstack("*", "*.{}")]
        stacked = (await load(await stored(state), transform=stack)).state
        assert all(torch.equal(stacked[f"{n[:-1]}{'ab'.index(n[-1])}"], state[n]) for n in state)


@pytest.mark.parametrize("dim", [-1, 1])
async def test_sizes_that_differ_elsewhere_are_refused_in_every_group(dim: int) -> None:
    groups = {"0.a": numbered(3, 2), "0.b": numbered(3, 2)}
    groups |= {"1.a": numbered(2, 3), "1.b": numbered(4, 3)}
    vectors = {"n.a": numbered(3), "n.b": numbered(3)} if dim < 0 else {}
    backend = await stored(vectors | groups)
    with pytest.raises(ShapeMismatch, match=r"'1.a' has the shape \[2, 3\] and '1.b' \[4, 3\]"):
        await load(backend, transform=[Fuse(["*.a", "*.b"], "*.ab", dim)])


async def test_a_part_is_read_and_not_the_whole_and_nothing_is_read_twice() -> None:
    fused = torch.arange(12 * MIB, dtype=torch.float32).reshape(12 * 1024, 1024)
    backend = await stored({"qkv": fused})
    rule = Split("qkv", ["q", "k", "v"])
    part = await load(backend, transform=[rule], include=["k"])
    assert torch.equal(part.state["k"], fused[4096:8192])
    assert part.state["k"].untyped_storage().nbytes() == 16 * MIB
    assert part.report is not None
    assert part.report.bytes <= 1.1 * 16 * MIB
    for dim in (0, 1):
        rule = Split("qkv", ["q", "k"], dim)
        both = await load(backend, transform=[rule])
        assert both.report is not None
        assert both.report.bytes <= 1.1 * 48 * MIB
        assert torch.equal(torch.cat([both.state["q"], both.state["k"]], dim), fused)


async def test_a_part_of_a_rearranged_tensor_is_read_and_nothing_twice() -> None:
    full = torch.arange(12 * MIB, dtype=torch.float32).reshape(12 * 1024, 1024)
    backend = await stored({"w": full})
    heads = Rearrange("w", [[12, -1, 2], -1], [[0, 2, 1], 3])
    turned = full.reshape(12, 512, 2, 1024).transpose(1, 2).reshape(12 * 1024, 1024)
    whole = await load(backend, transform=[heads])
    assert torch.equal(whole.state["w"], turned)
    part = await load(backend, transform=[heads, Split("w", ["a", "b", "c"])], include=["b"])
    assert torch.equal(part.state["b"], turned[4096:8192])
    assert part.report is not None
    assert part.report.bytes <= 1.1 * 16 * MIB
    transpose = await load(backend, transform=[Rearrange("w", [-1, -1], [1, 0])])
    assert torch.equal(transpose.state["w"], full.t())
    for result in (whole, transpose):
        assert result.report is not None
        assert result.report.bytes <= 1.1 * 48 * MIB


async def test_tensors_that_a_rearrangement_would_scatter_are_refused() -> None:
    backend = await stored({"w": torch.zeros(2, 400, 400, dtype=torch.int8)})
    with pytest.raises(ShapeMismatch, match="more than 100000 pieces") as caught:
        await load(backend, transform=[Rearrange("w", [-1, -1, -1], [[2, 1, 0]])])
    assert caught.value.key == "w"


async def test_views_whose_values_are_not_their_bytes_are_not_cut() -> None:
    memory = torch.arange(10.0)
    window = memory.as_strided((3, 4), (2, 1))
    turned = torch.tensor([1 + 2j, 3 - 4j])
    backend = await stored({"m": memory, "w": window, "z": turned, "c": turned.conj()})
    for label, text in (("w", "neither cut nor joined"), ("c", "a conjugate")):
        with pytest.raises(StructureMismatch, match=text):
            await load(backend, transform=[Split(label, ["x"])])


STATE = {
    "model": {"0.weight": torch.ones(4, 6), "1.weight": torch.zeros(4, 6), "n": torch.tensor(1)},
    "list": [1, 2],
}

WRONG: list[tuple[Any, type[CkpipeError], str]] = [
    (Rename({"modle.*": "x.*"}), StructureMismatch, r"'modle\.\*' matches nothing.*model\."),
    (Rename(r"^nowhere", "x"), StructureMismatch, "'.nowhere' matches nothing"),
    (Rename({"model.0.weight": "model.1.weight"}), StructureMismatch, "'model.0.weight', 'model.1"),
    (Rename(lambda label: "same"), StructureMismatch, "one name"),
    (Rename(lambda label: label + "."), StructureMismatch, "is no name"),
    (Rename({"list.0": "first"}), StructureMismatch, "element of a list"),
    (Only("other"), StructureMismatch, "Only: 'other' matches nothing"),
    (Drop("other"), StructureMismatch, "Drop: 'other' matches nothing"),
    (Cast({"list": torch.float16}), StructureMismatch, "Cast: 'list' matches nothing"),
    (Split("model.2.*", ["a"]), StructureMismatch, "matches nothing"),
    (Split("model.0.weight", ["a", "b", "c"]), ShapeMismatch, "has not 3 equal parts.*sizes"),
    (Split("model.0.weight", ["a", "b"], sizes=[1, 2]), ShapeMismatch, "3 together.* has 4"),
    (Split("model.0.weight", ["a"], dim=2), ShapeMismatch, "no dimension 2"),
    (Split("model.0.weight", ["model.1.weight"]), StructureMismatch, "one name"),
    (Split("model.0.weight", ["a", "a"]), StructureMismatch, "one name"),
    (Fuse(["model.0.weight", "model.n"], "a"), StructureMismatch, "saved alike"),
    (Fuse(["model.*.weight", "model.*.bias"], "a.*"), StructureMismatch, "bias' matches nothing"),
    (Fuse(["*.0.weight", "*.n"], "*.n"), StructureMismatch, "saved alike"),
    (Rearrange("model.2", [-1], [0]), StructureMismatch, "Rearrange: 'model.2' matches nothing"),
    (
        Rearrange("*.0.weight", [-1], [0]),
        ShapeMismatch,
        r"\[4, 6\] cannot be .* \[\[-1\]",
    ),
    (Rearrange("*.0.weight", [[3, -1], -1], [0, 1, 2]), ShapeMismatch, "cannot be divided"),
    (Rearrange("*.0.weight", [4, 5], [1, 0]), ShapeMismatch, "cannot be divided"),
    (Stack("model.{}.bias", "a"), StructureMismatch, "matches nothing"),
    (Unstack("model.n", "a.{}"), ShapeMismatch, "no dimension 0"),
]


@pytest.mark.parametrize(("rule", "error", "text"), WRONG)
async def test_what_does_not_fit_is_refused_untouched(
    rule: Any, error: type[CkpipeError], text: str
) -> None:
    backend = await stored(STATE)
    target: Any = {"model": {"0.weight": torch.full((4, 6), 7.0)}}
    with pytest.raises(error, match=text) as caught:
        await load(backend, target, strict=False, transform=[rule])
    assert caught.value.hint
    assert (target["model"]["0.weight"] == 7).all()


async def test_numbers_and_counts_beyond_any_stack_are_refused_at_once() -> None:
    backend = await stored({"e": {"0.w": torch.ones(2), "999999999.w": torch.ones(2)}})
    with pytest.raises(StructureMismatch, match="but not number 1"):
        await load(backend, transform=[Stack("e.{}.w", "e.w")])
    backend = await stored({"e": torch.ones(100_001, 0)})
    with pytest.raises(ShapeMismatch, match="100001 parts"):
        await load(backend, transform=[Unstack("e", "e.{}")])


async def test_groups_must_be_complete() -> None:
    backend = await stored({"0.q": torch.ones(2), "1.q": torch.ones(2), "0.k": torch.ones(2)})
    with pytest.raises(StructureMismatch, match=r"has '1.q' but not \*\.k"):
        await load(backend, transform=[Fuse(["*.q", "*.k"], "*.qk")])
    backend = await stored({"e": {"0.w": torch.ones(2), "2.w": torch.ones(2)}})
    with pytest.raises(StructureMismatch, match="but not number 1"):
        await load(backend, transform=[Stack("e.{}.w", "e.w")])
    backend = await stored({"e": {"0.w": torch.ones(2), "1.w": torch.ones(3)}})
    with pytest.raises(ShapeMismatch, match=r"\[2\] and 'e.1.w' \[3\]"):
        await load(backend, transform=[Stack("e.{}.w", "e.w")])


UNTYPED: list[Any] = [Split, Fuse, Rearrange, Rename]
SPLIT, FUSE, REARRANGE, RENAME = UNTYPED

MISUSED: list[Callable[[], object]] = [
    lambda: Rename({"a.*": "*.*"}),
    lambda: Rename("a"),
    lambda: Rename("(", ""),
    lambda: Rename({"a": ""}),
    lambda: Rename(3),  # type: ignore[arg-type]
    lambda: Only(),
    lambda: Drop(3),  # type: ignore[arg-type]
    lambda: Cast({"*": torch.int8}),
    lambda: Cast({"*": "float33"}),
    lambda: Split("a", "bc"),
    lambda: Split("a", ["b", "c"], sizes=[1]),
    lambda: Split("a", ["*"]),
    lambda: Fuse(["a", "b"], "*"),
    lambda: Rearrange("a", [[-1, -1], 2], [0, 1, 2]),
    lambda: Rearrange("a", [2, 0], [0, 1]),
    lambda: Rearrange("a", [2, 3], [0, 0]),
    lambda: Rearrange("a", [2, 3], [0]),
    lambda: Rearrange("a", 3, [0]),  # type: ignore[arg-type]
    lambda: Rearrange("a", [], []),
    lambda: Stack("a.*", "b"),
    lambda: Unstack("a", "b"),
    *(
        partial(kind, dim=dim)
        for kind in (partial(SPLIT, "a", ["b"]), partial(FUSE, ["a"], "b"))
        for dim in (None, 1.0, "1", True)
    ),
    *(partial(SPLIT, "a", ["b"], sizes=sizes) for sizes in (3, [1.0], ["1"], "1", [True], [None])),
    *(
        partial(REARRANGE, "a", *wrong)
        for wrong in (
            ([2.0, 3], [0, 1]),
            ([[2, 3.0]], [[0, 1]]),
            ([2, 3], [[0.0, 1.0]]),
            ([2, 3], [True, False]),
            (["2"], [0]),
            ([2], ["0"]),
            (None, [0]),
        )
    ),
    *(partial(RENAME, {glob: "b"}) for glob in ("[qk].*", "a[0]", "[")),
    partial(RENAME, "a", 3),
    partial(FUSE, 3, "b"),
    partial(SPLIT, "a", None),
    partial(SPLIT, "[qk]", ["b"]),
    partial(FUSE, ["a", "[qk]"], "b"),
    partial(Stack, "[ab].{}", "b"),
    partial(Unstack, "[ab]", "b.{}"),
    partial(REARRANGE, "[ab]", [-1], [0]),
]


@pytest.mark.parametrize("make", MISUSED)
def test_wrong_arguments_are_refused_where_they_are_written(make: Callable[[], object]) -> None:
    with pytest.raises(UsageError):
        make()


async def test_numbers_may_be_those_of_numpy() -> None:
    one, two = cast(list[int], [np.int64(1), np.int32(2)])
    backend = await stored({"a": numbered(2, 2)})
    rules = [Rearrange("a", [two, [one, -one]], [2, [one, 0]]), Split("a", ["b", "c"], -one)]
    state = (await load(backend, transform=[*rules, Fuse(["c", "b"], "a", one)])).state
    assert torch.equal(state["a"], numbered(2, 2).t()[:, [1, 0]])


def test_the_argument_is_a_list_of_transforms(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.save({"a": torch.ones(2)}, 1).wait()
        for wrong in (Rename({"a": "b"}), [{"a": "b"}], 3):
            with pytest.raises(UsageError, match="list of transforms"):
                pipeline.load(transform=wrong)  # type: ignore[arg-type]
        assert list(pipelines.load_existing(pipeline, transform=[Rename({"a": "b"})]).state) == [
            "b"
        ]
    assert list(ckpipe.load(tmp_path, transform=[Rename({"a": "c"})]).state) == ["c"]


PREFIXES = [
    ("model.0.weight model.0.bias", "0.weight 0.bias", "Rename({'model.*': '*'})"),
    ("0.weight 0.bias", "module.0.weight module.0.bias", "Rename({'*': 'module.*'})"),
    ("_orig_mod.a.w _orig_mod.b.w", "a.w b.w", "Rename({'_orig_mod.*': '*'})"),
    (
        "state_dict.model.a.w state_dict.model.b.w epoch",
        "a.w b.w",
        "Only('state_dict'), ckpipe.Rename({'state_dict.model.*': '*'})",
    ),
]


@pytest.mark.parametrize(("saved", "target", "proposed"), PREFIXES)
async def test_names_that_differ_by_a_prefix_have_their_transform_proposed(
    saved: str, target: str, proposed: str
) -> None:
    backend = await stored(
        {name: torch.full((2,), float(n)) for n, name in enumerate(saved.split())}
    )
    live = {name: torch.zeros(2) for name in target.split()}
    with pytest.raises(StructureMismatch) as caught:
        await load(backend, live)
    assert caught.value.hint is not None
    assert f"transform=[ckpipe.{proposed}]" in caught.value.hint
    transform = eval(caught.value.hint.partition("transform=")[2].partition("]")[0] + "]")
    await load(backend, live, transform=transform)
    assert [each[0].item() for each in live.values()] == [0, 1]


async def test_a_module_is_told_how_to_take_its_part_of_a_state() -> None:
    saved, target = nn.Linear(2, 2), nn.Linear(2, 2)
    backend = await stored({"model": saved, "epoch": 1})
    with pytest.raises(StructureMismatch) as caught:
        await load(backend, target)
    transform = [Only("model"), Rename({"model.*": "*"})]
    said = "[ckpipe.Only('model'), ckpipe.Rename({'model.*': '*'})]"
    assert said in (caught.value.hint or "")
    await load(backend, target, transform=transform)
    assert torch.equal(saved.weight, target.weight)
    with pytest.raises(StructureMismatch) as caught:
        await load(await stored({"a.w": torch.ones(2)}), {"b.x": torch.ones(2)})
    assert "transform" not in (caught.value.hint or "")


LAYERS = [
    # One layer has another name.
    ("up.w down.w embed_out.w", "up.w down.w lm_head.w", "Rename({'embed_out.*': 'lm_head.*'})"),
    ("up.w down.w net.a.w", "up.w down.w a.w", "Rename({'net.*': '*'})"),
    (
        "up.w old.n embed_out.w",
        "up.w lm_head.w",
        "Drop('old.n'), ckpipe.Rename({'embed_out.*': 'lm_head.*'})",
    ),
    # Another layer is left over.
    ("up.w down.w other.w", "up.w down.w lm_head.w", ""),
    ("up.w down.w norm.w", "up.w down.w lm_head.w", ""),
    ("0.w 1.w", "0.w 2.w", ""),
    ("up.w encoder.0.w encoder.1.w", "up.w decoder.0.w decoder.1.w", ""),
    ("up.w experts.0.w experts.1.w", "up.w experts.joined", ""),
    ("up.w down.w linear.w linear.b", "up.w down.w fc1.w fc1.b", ""),
    ("up.w q_proj.w", "up.w k_proj.w", ""),
    ("up.w a.gate.w", "up.w a.up.w", ""),
    ("up.w norm1.w", "up.w norm2.w", ""),
    ("up.w vision.a.w vision.b.w", "up.w text.a.w text.b.w", ""),
    # A new head, or a layer that the checkpoint lacks.
    ("up.w down.w", "up.w down.w lm_head.w", "allow_missing"),
    ("up.w lm_head.w", "up.w classifier.w classifier.b", "allow_missing"),
    ("up.w lm_head.wide", "up.w score.wide", "allow_missing"),
]


def layers(names: str, width: int) -> nn.Module:
    """A module with parameters of these names; those called ``wide`` have this width."""
    made = nn.Module()
    for name in names.split():
        at, (*path, last) = made, name.split(".")
        for part in path:
            if part not in dict(at.named_children()):
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        size = {"wide": width, "joined": 2 * width}.get(last, 2)
        at.register_parameter(last, nn.Parameter(torch.full((size,), float(width))))
    return made


@pytest.mark.parametrize(("saved", "target", "proposed"), LAYERS)
@pytest.mark.parametrize("form", ["module", "dict", "training_state"])
async def test_no_hint_gives_a_layer_the_weights_of_another_or_leaves_it_random(
    saved: str, target: str, proposed: str, form: str
) -> None:
    forms: dict[str, Callable[[nn.Module], Any]] = {
        "module": lambda net: net,
        "dict": lambda net: dict(net.state_dict()),
        "training_state": training_state,
    }
    backend, live = await stored(forms[form](layers(saved, 3))), layers(target, 5)
    before = copy.deepcopy(live.state_dict())
    with pytest.raises(StructureMismatch) as caught:
        await load(backend, forms[form](live))
    hint = caught.value.hint or ""
    assert all(torch.equal(each, before[name]) for name, each in live.state_dict().items())
    if "wide" in saved and form == "training_state":
        return  # its shapes are not looked at
    if "Rename" in proposed:
        transform = eval(hint.partition("transform=")[2].partition("]")[0] + "]")
        await load(backend, forms[form](live), transform=transform)
        assert proposed in hint.replace("model.", "")
    else:
        assert "transform=" not in hint
    if form != "training_state":  # which takes no layers that are missing
        assert ("allow_missing" in hint) == (proposed == "allow_missing"), hint


async def test_a_hint_proposes_what_may_be_missing_unless_a_model_is_left_over() -> None:
    backend = await stored({"net": nn.Linear(2, 2), "epoch": 1})
    with pytest.raises(StructureMismatch) as caught:
        await load(backend, {"net": nn.Linear(2, 2), "step": 0})
    assert "allow_missing" in (caught.value.hint or "")
    with pytest.raises(StructureMismatch) as caught:
        await load(backend, {"model": nn.Linear(2, 2), "epoch": 0})
    assert "allow_missing" not in (caught.value.hint or "")
