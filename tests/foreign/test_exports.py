"""Exports by ``ckpipe.export``, loaded by the libraries whose forms they have."""

from __future__ import annotations

import asyncio
import collections
import datetime
import enum
import json
import os
import pathlib
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_by_dcp

import ckpipe
from ckpipe import errors
from ckpipe.distributed import training_state
from ckpipe.events import CheckpointExported
from tests.support.one_checkpoint import save_one
from tests.support.pipelines import Stores, same
from tests.support.rank_pipelines import ranks
from tests.support.settling import settle
from tests.support.wrapper_tensors import scaled


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.mid = nn.Linear(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(3))


def trained() -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(2)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model.mid(model.embed(torch.arange(5))).sum().backward()
    optimizer.step()
    return model, optimizer


def blank(value: Any) -> Any:
    """A state of the same form, for ``dcp.load`` to fill."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value, memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: blank(each) for key, each in value.items()}
    if isinstance(value, list):
        return [blank(each) for each in value]
    return None


def dcp_loaded(folder: Path, like: Any) -> Any:
    target = blank(like)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they differ between versions of torch
        load_by_dcp(target, checkpoint_id=folder, no_dist=True)
    return target


# Weights


def test_weights_load_by_safetensors_with_tied_tensors_once(tmp_path: Path) -> None:
    model, _ = trained()
    save_one(tmp_path / "run", {"model": model})
    done = ckpipe.export(tmp_path / "run", tmp_path / "out")
    assert (done.step, done.files) == (5, ("model.safetensors",))
    assert done.url == str(tmp_path / "out")
    assert done.bytes == (tmp_path / "out/model.safetensors").stat().st_size
    found = safetensors.torch.load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == {"embed.weight", "mid.weight", "mid.bias", "count"}
    again = Tied()
    safetensors.torch.load_model(again, tmp_path / "out/model.safetensors")
    assert same(dict(again.state_dict()), dict(model.state_dict()))


def test_views_that_are_not_the_same_tensor_are_all_written(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    state = {
        "whole": base,
        "part": base[3:5],
        "turned": base.view(3, 4).t(),
        "again": base,
        "empty": torch.empty(0, 2),
        "other": torch.empty(0, 2),
        "scalar": torch.tensor(2.0),
        "pair": torch.tensor(2.0),
    }
    save_one(tmp_path / "run", state)
    ckpipe.export(tmp_path / "run", tmp_path / "out")
    found = safetensors.torch.load_file(tmp_path / "out/model.safetensors")
    del state["again"]
    assert same(dict(sorted(found.items())), dict(sorted(state.items())))


def test_tensors_on_the_same_bytes_of_other_kinds_are_no_duplicates(tmp_path: Path) -> None:
    bits, complex = torch.arange(2, dtype=torch.int32), torch.tensor([1 + 2j])
    state = {
        "bits": bits,
        "floats": bits.view(torch.float32),
        "plain": complex.imag,
        "negative": complex.conj().imag,
        "again": bits.view(torch.int32),
    }
    save_one(tmp_path / "run", state)
    for form in ("hf", "dcp"):
        ckpipe.export(tmp_path / "run", tmp_path / form, form=form)
    found = safetensors.torch.load_file(tmp_path / "hf/model.safetensors")
    by_dcp = dcp_loaded(tmp_path / "dcp", state)
    assert all(torch.equal(by_dcp[name], each) for name, each in state.items())
    del state["again"]
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], each) for name, each in state.items())


def test_weights_have_the_names_that_the_state_has(tmp_path: Path) -> None:
    names = ["a@b", "~", "~1", "x.y", "~0@"]
    state = {"net@1": {name: torch.tensor([float(n)]) for n, name in enumerate(names)}}
    save_one(tmp_path / "run", state)
    expected = dict(sorted(state["net@1"].items()))
    for part in ("net~11", None):
        ckpipe.export(tmp_path / "run", tmp_path / str(part), part=part)
        found = safetensors.torch.load_file(tmp_path / str(part) / "model.safetensors")
        above = "" if part else "net@1."
        assert same(dict(sorted(found.items())), {f"{above}{n}": t for n, t in expected.items()})
    for part, value in {"net~11": state["net@1"], "net~11.x.y": state["net@1"]["x.y"]}.items():
        ckpipe.export(tmp_path / "run", tmp_path / f"{part}-t", form="torch", part=part)
        assert same(torch.load(tmp_path / f"{part}-t/state.pt"), value)


@pytest.mark.parametrize("state", [
    {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}},
    {0: torch.ones(2), "0": torch.zeros(2)},
    {"m": {"x": {1: torch.ones(2), "1": torch.zeros(2)}}},
])  # fmt: skip
@pytest.mark.parametrize("form", ["hf", "dcp"])
def test_two_tensors_of_one_name_are_refused(tmp_path: Path, state: Any, form: Any) -> None:
    save_one(tmp_path / "run", state)
    with pytest.raises(errors.UnsupportedState, match=r"(?i)two|same|twice"):
        ckpipe.export(tmp_path / "run", tmp_path / "out", form=form)
    assert not (tmp_path / "out").exists()


def test_one_of_several_models_must_be_named(tmp_path: Path) -> None:
    save_one(
        tmp_path / "run", {name: {"model": {"w": torch.ones(2)}} for name in ("gen", "critic")}
    )
    with pytest.raises(errors.UsageError, match=r"gen\.model, critic\.model") as refused:
        ckpipe.export(tmp_path / "run", tmp_path / "out")
    assert "export.part" in str(refused.value.hint)
    done = ckpipe.export(tmp_path / "run", tmp_path / "out", part="critic.model")
    assert done.files == ("model.safetensors",)


@pytest.mark.parametrize(("state", "expected"), [
    ({"model.a": 1, "optim.state.a.exp_avg": 2, "optim.param_groups.a.lr": 0.1}, ["a"]),
    ({"model.a": 1, "state.model.a.exp_avg": 2, "param_groups.model.a.lr": 0.1}, ["a"]),
    ({"model.a": 1, "optimizer": {"state": {0: {"exp_avg": 2}}, "param_groups": [0.1]}}, ["a"]),
    ({"run": {"model.a": 1, "opt.state.a.x": 2, "opt.groups.0.options.lr": 0.1}}, ["a"]),
    ({"model.a": 1, "lm_head.b": 2}, ["lm_head.b", "model.a"]),
    ({"model.state.a": 1, "model.groups.b": 2, "c": 3}, ["c", "model.groups.b", "model.state.a"]),
])  # fmt: skip
def test_flat_names_of_a_model_are_told_from_those_beside(
    tmp_path: Path, state: Any, expected: list[str]
) -> None:
    def tensors(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: tensors(each) for key, each in value.items()}
        return torch.full((2,), value) if isinstance(value, int) else value

    save_one(tmp_path / "run", tensors(state))
    ckpipe.export(tmp_path / "run", tmp_path / "out")
    found = safetensors.torch.load_file(tmp_path / "out/model.safetensors")
    assert sorted(found) == expected


def test_shards_have_an_index_as_transformers_writes_it(tmp_path: Path) -> None:
    model, _ = trained()
    save_one(tmp_path / "run", {"model": model})
    (tmp_path / "config.json").write_text("{}")
    done = ckpipe.export(
        tmp_path / "run", tmp_path / "out", max_shard_bytes=2000, extra=[tmp_path / "config.json"]
    )
    assert set(done.files) == {each.name for each in (tmp_path / "out").iterdir()}
    assert (tmp_path / "out/config.json").read_text() == "{}"
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    tensors = {name: each for name, each in model.state_dict().items() if name != "head.weight"}
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"] == {
        "total_parameters": sum(each.numel() for each in model.parameters()),
        "total_size": sum(each.nbytes for each in tensors.values()),
    }
    for name, file in index["weight_map"].items():
        assert torch.equal(
            safetensors.torch.load_file(tmp_path / "out" / file)[name], tensors[name]
        )


@pytest.mark.parametrize("form", ["hf", "torch", "dcp"])
def test_transforms_then_part_then_dtype(tmp_path: Path, form: Any) -> None:
    weights = {"qkv.weight": torch.randn(6, 4), "ids": torch.arange(3), "w": scaled()}
    save_one(tmp_path / "run", {"net": weights, "log": datetime.date(2026, 1, 2)})
    ckpipe.export(
        tmp_path / "run",
        tmp_path / "out",
        form=form,
        part="model",
        dtype="bfloat16",
        transform=[
            ckpipe.Rename({"net": "model"}),
            ckpipe.Split("model.qkv.weight", [f"model.{n}" for n in "qkv"]),
        ],
    )
    expected = {
        n: each.bfloat16()
        for n, each in zip("qkv", torch.split(weights["qkv.weight"], 2), strict=True)
    }
    expected |= {"ids": weights["ids"], "w": scaled().dequantize().bfloat16()}
    if form == "hf":
        found = safetensors.torch.load_file(tmp_path / "out/model.safetensors")
    elif form == "torch":
        found = torch.load(tmp_path / "out/state.pt")
    else:
        found = dcp_loaded(tmp_path / "out", expected)
    assert same(dict(sorted(found.items())), dict(sorted(expected.items())))


# torch.save


class Color(enum.Enum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


def noted(tensor: Any, note: object) -> torch.Tensor:
    tensor.note = note
    return tensor  # type: ignore[no-any-return]


SHARED = torch.arange(6.0)
PLAIN: dict[str, Any] = {
    "scalars": [None, True, 3, 1 << 90, 0.5, float("inf"), 2j, "text"],
    "bytes": (b"a", bytearray(b"b")),
    "torch": [torch.float16, torch.device("cpu"), torch.Size([1]), torch.strided],
    "containers": {"set": {1, (2, "x")}, 3: (1, [2]), None: (), 1.5: [{}]},
    "ordered": collections.OrderedDict(b=1, a=torch.ones(1)),
    "counter": collections.Counter("aab"),
    "tied": [SHARED, SHARED, SHARED[2:4], SHARED.view(2, 3).t()],
    "strided": torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)[1:],
    "expanded": torch.ones(1).expand(5),
    "dtypes": {
        str(dtype): torch.ones(3).to(dtype)
        for dtype in (torch.bfloat16, torch.uint8, torch.bool, torch.complex64, torch.uint16,
                      torch.float8_e4m3fn)
    },
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "negative": torch.tensor([1 + 2j]).conj().imag,
    "empty": [torch.empty(0), torch.empty(2, 0)],
    "parameter": nn.Parameter(torch.ones(2)),
    "buffer": nn.Buffer(torch.ones(2)),
    "scheduler": torch.optim.lr_scheduler.MultiStepLR(
        torch.optim.SGD([nn.Parameter(torch.ones(1))]), [3, 5]
    ),
    "rng": ckpipe.RngState(),
}  # fmt: skip
OTHERS: dict[str, Any] = {
    "enum": Color.RED,
    "path": pathlib.PurePosixPath("x"),
    "date": datetime.date(2026, 1, 2),
    "range": range(3),
    "frozenset": frozenset({1}),
    "deque": collections.deque([torch.ones(2)]),
    "default": collections.defaultdict(list, a=[1]),
    "named": Point(1, torch.ones(1)),
    "numpy": torch.ones(2).numpy(),
    "number": torch.ones(2).numpy()[0],
    "format": torch.channels_last,
    "attribute": noted(torch.ones(2), Color.RED),
}


def test_torch_load_opens_all_that_is_plain(tmp_path: Path) -> None:
    save_one(tmp_path / "run", PLAIN)
    done = ckpipe.export(tmp_path / "run", tmp_path / "out", form="torch")
    assert done.files == ("state.pt",)
    found = torch.load(tmp_path / "out/state.pt")
    loaded = ckpipe.load(tmp_path / "run").state
    assert found["conjugate"].is_conj()
    assert found["negative"].is_neg()
    for name in ("conjugate", "negative"):
        assert torch.equal(found.pop(name), loaded.pop(name))
    assert same(found, loaded)
    tied = found["tied"]
    assert len({each.untyped_storage().data_ptr() for each in tied}) == 1
    assert found["expanded"].stride() == (0,)
    with zipfile.ZipFile(tmp_path / "out/state.pt") as archive:
        assert len(archive.namelist()) == len(set(archive.namelist()))


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_what_is_not_plain_is_named_and_left_out_only_when_asked(tmp_path: Path, form: Any) -> None:
    state = {"model": {"w": torch.ones(2)}, **OTHERS}
    save_one(tmp_path / "run", state)
    for name in OTHERS:
        rest = [each for each in OTHERS if each != name]
        with pytest.raises(errors.UnsupportedState, match="which torch") as refused:
            ckpipe.export(
                tmp_path / "run", tmp_path / "out", form=form, transform=[ckpipe.Drop(*rest)]
            )
        assert refused.value.key == ("attribute.note" if name == "attribute" else name)
    assert not [*(tmp_path / "out").glob("*")]
    ckpipe.export(tmp_path / "run", tmp_path / "out", form=form, transform=[ckpipe.Drop(*OTHERS)])
    ckpipe.export(tmp_path / "run", tmp_path / "part", form=form, part="model")
    if form == "torch":
        assert same(torch.load(tmp_path / "out/state.pt"), {"model": state["model"]})


# DCP


def test_dcp_loads_what_was_saved(tmp_path: Path) -> None:
    model, optimizer = trained()
    plain = {name: PLAIN[name] for name in PLAIN if name not in ("empty", "scheduler", "rng")}
    state = {"model": model, "optimizer": optimizer, "epoch": 4, **plain}
    save_one(tmp_path / "run", state)
    done = ckpipe.export(tmp_path / "run", tmp_path / "out", form="dcp", max_shard_bytes=9000)
    assert done.files[-1] == ".metadata"
    assert len(done.files) > 3
    expected = {
        **state,
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "containers": {str(key): each for key, each in PLAIN["containers"].items()},
    }
    found = dcp_loaded(tmp_path / "out", expected)
    assert same(found["model"], expected["model"])
    assert same(found["optimizer"], expected["optimizer"])
    for name in ("conjugate", "negative"):
        assert torch.equal(found[name], expected[name])
    for name in plain.keys() - {
        "ordered",
        "counter",
        "parameter",
        "buffer",
        "conjugate",
        "negative",
    }:
        assert same(found[name], expected[name]), name
    ckpipe.export(tmp_path / "run", tmp_path / "model", form="dcp", part="model")
    assert same(dict(ckpipe.load(tmp_path / "model").state), expected["model"])


@pytest.mark.parametrize(
    ("value", "lacks"),
    [([{}, 1], "x.0"), ([{"a": 1}, {"b": {}}], "x.1"),
     ([1, [{"b": 3, "a": [2, [{}]]}]], "x.1.0.a.1"),
     ([{}], None), ([[], (), {"a": 1, "b": {}}], None), ({"y": {}}, None)],
)  # fmt: skip
def test_dcp_gets_no_list_that_lacks_an_element(tmp_path: Path, value: Any, lacks: Any) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))]).state_dict()  # no step, no state
    state = {"w": torch.ones(2), "x": value, "optimizer": optimizer}
    save_one(tmp_path / "run", state)
    if lacks:
        with pytest.raises(errors.UnsupportedState, match="no empty dict") as refused:
            ckpipe.export(tmp_path / "run", tmp_path / "out", form="dcp")
        assert refused.value.key == lacks
    else:
        ckpipe.export(tmp_path / "run", tmp_path / "out", form="dcp")
        found = dcp_loaded(tmp_path / "out", {**state, "x": {}})
        assert same({**found, "x": value}, state)
        assert ckpipe.load(tmp_path / "out").state["optimizer"] == optimizer


def test_dcp_has_the_optimizer_of_a_training_state_as_torch_has_it(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    groups: list[dict[str, Any]]
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters()}]
    optimizer = torch.optim.AdamW(groups)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    save_one(tmp_path / "run", {"training": training_state(model, optimizer)})
    ckpipe.export(tmp_path / "run", tmp_path / "out", form="dcp", part="training")
    expected = optimizer.state_dict()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    loaded = dcp_loaded(tmp_path / "out", {"model": model_state, "optimizer": optimizer_state})
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    groups = [{"params": other[0].parameters(), "lr": 0.5}, {"params": other[1].parameters()}]
    again = torch.optim.AdamW(groups)
    set_state_dict(
        other, again, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert same(again.state_dict(), expected)


# Targets


@pytest.mark.parametrize("form", ["hf", "torch", "dcp"])
def test_export_is_repeated_alike_and_never_replaces_another(
    tmp_path: Path, store: Stores, form: Any
) -> None:
    save_one(store.url, {"model": {"w": torch.randn(300), "x": torch.randn(300)}})
    done = ckpipe.export(store.url, tmp_path / "out", form=form)
    first = {each.name: each.read_bytes() for each in (tmp_path / "out").iterdir()}
    assert ckpipe.export(store.url, tmp_path / "out", form=form) == done
    assert {each.name: each.read_bytes() for each in (tmp_path / "out").iterdir()} == first
    with pytest.raises(errors.CommitConflict, match="other bytes"):
        ckpipe.export(store.url, tmp_path / "out", form=form, part="model", dtype="float16")
    other: Any = "torch" if form == "hf" else "hf"
    with pytest.raises(errors.CommitConflict, match="another export"):
        ckpipe.export(store.url, tmp_path / "out", form=other)
    with pytest.raises(errors.CommitConflict, match="another export"):
        ckpipe.export(store.url, tmp_path / "out", form=other, max_shard_bytes=1000)
    assert {each.name: each.read_bytes() for each in (tmp_path / "out").iterdir()} == first


def test_ranks_answer_for_the_files_of_each_other_and_tell_of_the_same(
    tmp_path: Path, store: Stores
) -> None:
    (tmp_path / "config.json").write_text("{}")
    export = {"max_shard_bytes": 1, "extra": [tmp_path / "config.json"]}
    state = {name: torch.ones(300) for name in "abc"}
    told: list[CheckpointExported] = []
    with ranks(store.url, 2, final_format="hf", export=export) as world:
        for rank in world:
            rank.events.add(
                lambda event: told.append(event) if isinstance(event, CheckpointExported) else None
            )
        for damaged in (False, True):
            first = world[0].save(state, step=1 + damaged, final=True)
            folder = f"{first.wait().id}.hf/"  # rank 0 waits for the other one
            if damaged:
                store.memory._store.create(f"{folder}model-00002-of-00003.safetensors", b"other")
            world[1].save(state, step=1 + damaged, final=True)
            for rank in world:
                settle(rank)
            written = store.memory._store.objects.items()
            sizes = {
                key.removeprefix(folder): len(each.data) for key, each in written if folder in key
            }
            if not damaged:
                assert [set(each.files) for each in told] == [sizes.keys()] * 2
                assert [each.bytes for each in told] == [sum(sizes.values())] * 2
        assert "model.safetensors.index.json" not in sizes
        assert len(told) == 2
        for rank in world:
            with pytest.raises(errors.CommitConflict, match="other bytes"):
                rank.save(state, step=9)


def test_wrong_arguments_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    save_one(tmp_path / "run", {"model": {"w": torch.ones(2, dtype=torch.complex128)}})
    (tmp_path / "model.safetensors").write_bytes(b"")
    out = tmp_path / "out"
    for match, arguments in {
        "complex128": {},
        "dict at the top": {"form": "dcp", "part": "model.w"},
        "nothing to export under 'net'": {"form": "torch", "part": "net"},
        "list of transforms": {"transform": ckpipe.Drop("model")},
        "matches nothing": {"transform": [ckpipe.Drop("net")]},
        "cannot be read": {"form": "torch", "extra": [tmp_path / "absent.json"]},
        "names of their own": {"form": "torch", "extra": [tmp_path / "model.safetensors"]},
        "export.dtype": {"dtype": "int8"},
        "no checkpoint 7": {"step": 7},
        "or 'dcp', not 'safetensors'": {"form": "safetensors"},
        r"or 'dcp', not \['hf'\]": {"form": ["hf"]},
    }.items():
        with pytest.raises(errors.CkpipeError, match=match):
            ckpipe.export(tmp_path / "run", out, **arguments)  # type: ignore[arg-type]
        assert not [*out.glob("*")], match
    with pytest.raises(errors.UsageError, match="list of transforms"):
        ckpipe.SyncPipeline(tmp_path, export={"transform": ["rename"]})


def test_coroutine_may_call_it(tmp_path: Path) -> None:
    save_one(tmp_path / "run", {"w": torch.ones(2)})

    async def main() -> None:
        ckpipe.export(tmp_path / "run", tmp_path / "out")

    asyncio.run(main())
    assert (tmp_path / "out/model.safetensors").exists()


def test_checkpoint_of_another_program_is_written_in_a_third_form(tmp_path: Path) -> None:
    model, _ = trained()
    weights = {name: each for name, each in model.state_dict().items() if name != "head.weight"}
    (tmp_path / "hub").mkdir()
    safetensors.torch.save_file(weights, tmp_path / "hub/model.safetensors")
    with pytest.raises(errors.UsageError, match="beside which"):
        ckpipe.export(tmp_path / "hub", form="dcp")
    changes = [ckpipe.Rename({"*": "net.*"})]
    done = ckpipe.export(tmp_path / "hub", tmp_path / "out", form="dcp", transform=changes)
    assert (done.id, done.step) == (None, None)
    assert same(dcp_loaded(tmp_path / "out", {"net": weights})["net"], weights)
    ckpipe.export(tmp_path / "out", tmp_path / "torch", form="torch", part="net")
    assert same(
        dict(sorted(torch.load(tmp_path / "torch/state.pt").items())), dict(sorted(weights.items()))
    )
    ckpipe.export(tmp_path / "torch/state.pt", tmp_path / "again")
    found = safetensors.torch.load_file(tmp_path / "again/model.safetensors")
    assert same(dict(sorted(found.items())), dict(sorted(weights.items())))


@pytest.mark.parametrize(
    ("form", "most", "nth"),
    [("hf", "1GB", 1), ("hf", 1, 2), ("torch", "1GB", 1), ("dcp", "1GB", 1), ("dcp", 1, 2)],
)
def test_no_file_is_written_from_a_source_that_is_replaced_meanwhile(
    tmp_path: Path, store: Stores, form: Any, most: int | str, nth: int
) -> None:
    source, other = tmp_path / "hub/model.safetensors", tmp_path / "other"
    source.parent.mkdir()
    for path, value in ((source, 1.0), (other, 2.0)):
        safetensors.torch.save_file({n: torch.full((300,), value) for n in "ab"}, path)
        os.utime(path, (value, value))
    gate = store.faulty.pause("open_upload", nth=nth)
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(
            ckpipe.export, source.parent, store.url, form=form, max_shard_bytes=most
        )
        gate.wait_until_held()
        other.replace(source)
        gate.release()
        with pytest.raises(errors.CorruptCheckpoint, match="replaced or changed"):
            done.result()
    assert len(store.memory._store.objects) == nth - 1
