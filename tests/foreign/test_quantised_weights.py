"""Codes of quantised weights never become weights without their scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

import ckpipe
from ckpipe.errors import DtypeMismatch
from tests.support.one_checkpoint import save_one
from tests.support.pipelines import same

FLOAT8 = torch.float8_e4m3fn
PAIRS = {
    "deepseek": ("m.w.weight", "m.w.weight_scale_inv", FLOAT8),
    "deepseek's own": ("m.w.weight", "m.w.scale", FLOAT8),
    "compressed-tensors": ("m.w.weight", "m.w.weight_scale", FLOAT8),
    "mistral": ("m.w.weight", "m.w.qscale_weight", torch.float8_e5m2),
    "fused experts": ("m.experts.up", "m.experts.up_scale_inv", FLOAT8),
    "flat experts": ("m.w1_weight", "m.w1_scale", FLOAT8),
    "quark": ("m.w.weight", "m.w.weight_quantizer.scale", FLOAT8),
    "at the root": ("weight", "weight_scale_inv", FLOAT8),
    "tensorrt-llm": ("m.w.weight", "m.w.weights_scaling_factor", FLOAT8),
    "a scaling factor": ("m.w.weight", "m.w.weight_scaling_factor", FLOAT8),
    "modelopt": ("m.w.weight", "m.w.weight_quantizer._amax", FLOAT8),
    "a maximum": ("m.w.weight", "m.w.weight_amax", FLOAT8),
    "integers": ("m.w.weight", "m.w.weight_scale", torch.int8),
    "quanto": ("m.w.weight._data", "m.w.weight._scale", torch.int8),
    "bitsandbytes": ("m.w.weight", "m.w.SCB", torch.int8),
    "gpt-oss": ("m.experts.up_blocks", "m.experts.up_scales", torch.uint8),
}


def saved(pair: str, folder: Path) -> tuple[Path, str, str, dict[str, torch.Tensor]]:
    """Write codes with their scale, and a weight without one."""
    label, scale, dtype = PAIRS[pair]
    codes = torch.arange(16).reshape(4, 4).to(dtype)
    state = {label: codes, scale: torch.full((1, 1), 0.5), "m.norm.weight": torch.ones(4)}
    save_file(state, folder / "model.safetensors")
    return folder / "model.safetensors", label, scale, state


def cast(source: Path, label: str, folder: Path) -> Any:
    return ckpipe.load(source, transform=[ckpipe.Cast({label: "bfloat16"})])


def cast_all(source: Path, label: str, folder: Path) -> Any:
    return ckpipe.load(source, transform=[ckpipe.Cast({"*": "bfloat16"})])


def cast_a_new_name(source: Path, label: str, folder: Path) -> Any:
    rules = [ckpipe.Drop("*scal*", "*SCB", "*amax", strict=False), ckpipe.Rename({label: "new"})]
    return ckpipe.load(source, transform=[*rules, ckpipe.Cast({"new": "bfloat16"})])


def imported(source: Path, label: str, folder: Path) -> Any:
    rule = [ckpipe.Cast({label: "float32"})]
    return ckpipe.import_checkpoint(source, folder / "own", transform=rule)


def exported(source: Path, label: str, folder: Path) -> Any:
    ckpipe.import_checkpoint(source, folder / "own")
    return ckpipe.export(folder / "own", folder / "out", form="hf", dtype="bfloat16")


def exported_whole(source: Path, label: str, folder: Path) -> Any:
    return ckpipe.export(source, folder / "out", form="torch", dtype="bfloat16")


FLOATING = [cast, cast_all, cast_a_new_name, imported, exported, exported_whole]


@pytest.mark.parametrize("pair", PAIRS)
def test_codes_are_never_converted_beside_their_scale(pair: str, tmp_path: Path) -> None:
    source, label, scale, state = saved(pair, tmp_path)
    for way in FLOATING if state[label].is_floating_point() else ():
        (folder := tmp_path / way.__name__).mkdir()
        with pytest.raises(DtypeMismatch, match="codes of a quantised") as caught:
            way(source, label, folder)
        assert scale in str(caught.value)
        assert "QuantizedHuggingFaceStorageReader" in (caught.value.hint or "")
    targets: list[tuple[dict[str, Any], list[Any]]] = [
        ({label: torch.zeros(4, 4)}, []),
        ({"new": torch.zeros(4, 4)}, [ckpipe.Rename({label: "new"})]),
        ({"model": {label: torch.zeros(4, 4)}}, [ckpipe.Rename({label: f"model.{label}"})]),
    ]
    for target, rules in targets:
        with pytest.raises(DtypeMismatch, match="codes of a quantised"):
            ckpipe.load(source, target, transform=rules, cast=True, strict=False)
        assert not any(map(torch.count_nonzero, target.get("model", target).values()))
    assert same(dict(sorted(ckpipe.load(source).state.items())), dict(sorted(state.items())))
    into = {key: torch.zeros_like(each) for key, each in state.items()}
    into["m.norm.weight"] = into["m.norm.weight"].double()
    ckpipe.load(source, into, cast=True)
    assert torch.equal(into[label].float(), state[label].float())
    half = [ckpipe.Cast({"m.norm.*": "bfloat16"})]
    if state[label].is_floating_point():
        half += [ckpipe.Cast({label: state[label].dtype})]
    assert ckpipe.load(source, transform=half).state["m.norm.weight"].dtype is torch.bfloat16


CODES = "m.w.weight"
UNUSED: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "included": ([], {"include": ["m.norm.weight"]}, "fresh"),
    "excluded": ([], {"exclude": [CODES]}, "fresh"),
    "dropped later": ([ckpipe.Drop(CODES)], {}, "fresh"),
    "no place": ([], {"strict": False}, "own"),
    "other dtype later": ([ckpipe.Cast({CODES: FLOAT8})], {}, "fresh"),
}


@pytest.mark.parametrize("unused", UNUSED)
def test_a_cast_passes_codes_that_are_not_of_use(unused: str, tmp_path: Path) -> None:
    source, *_, state = saved("deepseek", tmp_path)
    rules, given, place = UNUSED[unused]
    into: Any = {"m.norm.weight": torch.zeros(4, dtype=torch.bfloat16)}
    rules = [ckpipe.Cast({"*": "bfloat16"}), *rules]
    if place == "fresh":
        into = ckpipe.load(source, transform=rules, **given).state
    else:
        ckpipe.load(source, into, transform=rules, **given)
    assert torch.equal(into["m.norm.weight"], state["m.norm.weight"].bfloat16())
    save_one(tmp_path / "run", {"model": state}, step=1)
    part = {"model": {"m.norm.weight": torch.zeros(4, dtype=torch.bfloat16)}}
    ckpipe.load(tmp_path / "run", part, transform=rules[:1], strict=False)
    assert part["model"]["m.norm.weight"].all()
    norms = ckpipe.export(
        source, tmp_path / "out", form="hf", transform=[*rules, ckpipe.Drop(CODES, strict=False)]
    )
    assert norms.files == ("model.safetensors",)


JOINED = [
    ckpipe.Fuse(["a.0.w", "a.1.w"], "joined"),
    ckpipe.Fuse(["a.1.w", "a.0.w"], "joined"),
    ckpipe.Stack("a.{}.w", "joined"),
]


@pytest.mark.parametrize("rule", JOINED)
@pytest.mark.parametrize("scaled", [["a.0.w"], ["a.1.w"], ["a.0.w", "a.1.w"]])
def test_joined_codes_are_codes_if_one_of_them_has_a_scale(
    rule: Any, scaled: list[str], tmp_path: Path
) -> None:
    state = {f"a.{n}.w": torch.ones(4, 4).to(FLOAT8) for n in range(2)}
    state |= {f"{label}_scale": torch.ones(1) for label in scaled}
    save_file(state, tmp_path / "model.safetensors")
    rules = [rule, ckpipe.Cast({"joined": "bfloat16"})]
    with pytest.raises(DtypeMismatch, match="codes of a quantised"):
        ckpipe.load(tmp_path / "model.safetensors", transform=rules)


@pytest.mark.parametrize("form", ["hf", "torch", "dcp"])
def test_an_export_casts_no_codes(form: Any, tmp_path: Path) -> None:
    source, *_ = saved("deepseek", tmp_path)
    with pytest.raises(DtypeMismatch, match="codes of a quantised"):
        ckpipe.export(
            source, tmp_path / "out", form=form, transform=[ckpipe.Cast({"*": "bfloat16"})]
        )


@pytest.mark.parametrize("dtype", [FLOAT8, torch.int8])
def test_tensors_without_a_scale_are_converted(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.arange(8).to(dtype)
    state = {"w.weight": values, "scaled.bias": torch.ones(2), "other.scale": torch.ones(1)}
    save_file(state, tmp_path / "model.safetensors")
    target = {"w.weight": torch.zeros(8)}
    ckpipe.load(tmp_path / "model.safetensors", target, cast=True, strict=False)
    assert torch.equal(target["w.weight"], values.float())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_reader_that_the_hint_names_applies_the_scales(tmp_path: Path) -> None:
    source, label, _, state = saved("deepseek", tmp_path)
    files = dict.fromkeys(state, source.name)
    index = {"metadata": {}, "weight_map": files}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    weights = {label: torch.zeros(4, 4)}
    load(weights, storage_reader=QuantizedHuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    save_one(tmp_path / "run", weights, step=1)
    assert torch.equal(ckpipe.load(tmp_path / "run").state[label], state[label].float() * 0.5)


def test_a_module_takes_no_codes(tmp_path: Path) -> None:
    state = {"weight": torch.ones(4, 4).to(FLOAT8), "bias": torch.ones(4)}
    save_file({**state, "weight_scale_inv": torch.ones(1, 1)}, tmp_path / "model.safetensors")
    model = torch.nn.Linear(4, 4)
    before = model.weight.clone()
    with pytest.raises(DtypeMismatch, match="weight_scale_inv"):
        ckpipe.load(
            tmp_path / "model.safetensors", model, allow_unexpected=["*scale_inv"], cast=True
        )
    assert torch.equal(model.weight, before)
