"""The names under which transformers 5 publishes its models, by its own table, there and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpipe
from ckpipe.distributed import training_state
from ckpipe.errors import StructureMismatch, UsageError
from tests.support.command_line import Commands
from tests.support.late_module import LateModule
from tests.support.one_checkpoint import save_one

transformers: Any = LateModule("transformers")
conversion_mapping: Any = LateModule("transformers.conversion_mapping")
core_model_loading: Any = LateModule("transformers.core_model_loading")

TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
KV = TEXT | {"num_key_value_heads": 2}
IMAGE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
LLAVA: dict[str, Any] = {
    "vision_config": {"model_type": "clip_vision_model", **IMAGE},
    "text_config": {"model_type": "llama", **KV},
    "image_token_index": 63,
}
ESM = TEXT | {"pad_token_id": 1, "mask_token_id": 32, "max_position_embeddings": 64}
SWIN: dict[str, Any] = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "image_size": 16}
RESNET: dict[str, Any] = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 8, 16],
    "depths": [1] * 4,
    "out_features": ["stage4"],
}
DETR: dict[str, Any] = {
    "use_timm_backbone": False,
    "backbone": None,
    "use_pretrained_backbone": False,
    "backbone_config": RESNET,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}
DEEPSEEK = KV | {
    "n_routed_experts": 4,
    "moe_intermediate_size": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
MODELS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": KV | {"num_local_experts": 4},
    "Qwen2MoeForCausalLM": KV | EXPERTS | {"shared_expert_intermediate_size": 8},
    "ViTForImageClassification": IMAGE,
    "LlavaForConditionalGeneration": LLAVA,
    "GPTNeoXForCausalLM": TEXT,
}
OTHERS: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": KV | EXPERTS | {"head_dim": 8},
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "EsmForMaskedLM": ESM,
    "SwinForImageClassification": SWIN | {"patch_size": 2, "window_size": 4},
    "DetrForObjectDetection": DETR,
    "LlamaForCausalLM": KV,  # has the same names in its files
}


def made(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    cls = getattr(transformers, name)
    return cls(cls.config_class(**(MODELS | OTHERS)[name])).eval()


def logits(model: Any) -> torch.Tensor:
    torch.manual_seed(1)
    size = getattr(model.config, "image_size", 32)
    given: dict[str, Any] = {"pixel_values": torch.randn(1, 3, size, size)}
    if model.main_input_name == "input_ids":
        given = {"input_ids": torch.arange(2, 10)[None]}
    with torch.no_grad():
        found: torch.Tensor = model(**given).logits
    return found


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: each
        for file in folder.glob("*.safetensors")
        for name, each in load_file(file).items()
    }


def check_there_and_back(name: str, tmp_path: Path) -> None:
    model = made(name)
    expected, theirs, ours = logits(model), tmp_path / "theirs", tmp_path / "ours"
    model.save_pretrained(theirs)
    wraps: list[Callable[[Any], Any]] = [lambda net: net, lambda net: {"model": net}]
    for number, wrap in enumerate([*wraps, training_state]):
        fresh = made(name, seed=2)
        before = logits(fresh)
        table = ckpipe.name_table("transformers", model=fresh)
        if name != "LlamaForCausalLM":
            with pytest.raises(StructureMismatch, match=r"name_table\('transformers', model=model"):
                ckpipe.load(theirs, wrap(fresh))
            assert torch.equal(logits(fresh), before)
        ckpipe.load(theirs, wrap(fresh), transform=table)
        assert torch.equal(logits(fresh), expected), number
    with ckpipe.SyncPipeline(tmp_path / "run") as pipeline:
        pipeline.save({"train": training_state(model), "epoch": 1}, step=1).wait()
        fresh = made(name, seed=3)  # the names of the model itself stay in a load
        pipeline.load(
            {"train": training_state(fresh), "epoch": 0},
            transform=ckpipe.name_table("transformers", model=fresh),
        )
        assert torch.equal(logits(fresh), expected)
    back = ckpipe.name_table("transformers", model=model)
    ckpipe.export(tmp_path / "run", ours, transform=back, extra=[theirs / "config.json"])
    found, published = weights_in(ours), weights_in(theirs)
    assert found.keys() == published.keys()
    assert all(torch.equal(each, published[label]) for label, each in found.items())
    again, info = type(model).from_pretrained(ours, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(logits(again.eval()), expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_of_transformers_goes_there_and_back_to_the_bit(name: str, tmp_path: Path) -> None:
    check_there_and_back(name, tmp_path)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_of_transformers_go_there_and_back(name: str, tmp_path: Path) -> None:
    check_there_and_back(name, tmp_path)


def test_a_config_and_a_file_of_transforms_do_what_the_model_does(
    tmp_path: Path, call: Commands
) -> None:
    model = made("MixtralForCausalLM")
    theirs, root, file = tmp_path / "theirs", tmp_path / "root", tmp_path / "names.toml"
    model.save_pretrained(theirs)
    for given in (model.config, theirs, str(theirs / "config.json")):
        fresh = made("MixtralForCausalLM", seed=2)
        ckpipe.load(theirs, fresh, transform=ckpipe.name_table("transformers", model=given))
        assert torch.equal(logits(fresh), logits(model))
    file.write_text(f'[[transform]]\nkind = "transformers"\nmodel = "{theirs}"\n')
    assert not call("import", theirs, root, "--step", 1, "--transform", file).code
    fresh = made("MixtralForCausalLM", seed=3)
    ckpipe.load(root, fresh)
    assert torch.equal(logits(fresh), logits(model))
    ours = tmp_path / "ours"
    assert not call("export", root, ours, "--form", "hf", "--transform", file).code
    assert weights_in(ours).keys() == weights_in(theirs).keys()


def test_weights_of_the_bare_model_go_into_one_with_a_head(tmp_path: Path) -> None:
    model = made("MixtralForCausalLM")
    model.model.save_pretrained(tmp_path)
    fresh = made("MixtralForCausalLM", seed=2)
    head = fresh.lm_head.weight.clone()
    table = ckpipe.name_table("transformers", model=fresh)
    ckpipe.load(tmp_path, fresh, transform=table, allow_missing=["lm_head.weight"])
    assert torch.equal(fresh.lm_head.weight, head)
    assert all(
        torch.equal(each, fresh.model.state_dict()[name])
        for name, each in model.model.state_dict().items()
    )


def test_names_of_other_models_are_refused(tmp_path: Path) -> None:
    made("ViTForImageClassification").save_pretrained(tmp_path)
    target = made("GPTNeoXForCausalLM")
    with pytest.raises(StructureMismatch, match="no tensor of a GPTNeoXForCausalLM"):
        ckpipe.load(tmp_path, target, transform=ckpipe.name_table("transformers", model=target))


def test_what_transformers_ignores_in_a_file_is_left_out_unless_it_is_a_weight(
    tmp_path: Path,
) -> None:
    class Renamed(transformers.LlamaForCausalLM):  # type: ignore[misc]
        """A model that ignores in its files what its own weights are called there, and a mask."""

        _keys_to_ignore_on_load_unexpected = ("backbone", r"\.masked_bias$")

    rename = core_model_loading.WeightRenaming(r"^backbone\.", "model.")
    conversion_mapping.register_checkpoint_conversion_mapping("Renamed", [rename], overwrite=True)
    model, fresh = (Renamed(transformers.LlamaConfig(**KV)) for _ in range(2))
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("backbone.") for name in weights)
    save_file(weights | {"a.masked_bias": torch.ones(1)}, tmp_path / "model.safetensors")
    table = ckpipe.name_table("transformers", model=fresh)
    result = ckpipe.load(tmp_path, fresh, transform=table)
    assert all(torch.equal(each, fresh.state_dict()[n]) for n, each in model.state_dict().items())
    assert result.transformed["a.masked_bias"] == ()


@pytest.mark.parametrize("changed", ["operation", "attribute"])
def test_an_operation_that_is_not_known_is_refused_by_its_name(
    changed: str, tmp_path: Path
) -> None:
    class Reverse(core_model_loading.ConversionOps):  # type: ignore[misc]
        """An operation that transformers might have next year."""

        def convert(self, input_dict: Any, *args: Any, **kwargs: Any) -> Any:
            return {key: each[0].flip(0) for key, each in input_dict.items()}

        @property
        def reverse_op(self) -> Any:
            return self

    class OfItsOwn(transformers.LlamaForCausalLM):  # type: ignore[misc]
        """A model whose files have weights in another order."""

    operation: Any = Reverse()
    if changed == "attribute":  # the same operation of another version
        operation = core_model_loading.Transpose(0, 1)
        operation.by_blocks_of = 2
    name = type(operation).__name__
    convert = core_model_loading.WeightConverter("o_proj.weight", "o_proj.weight", [operation])
    conversion_mapping.register_checkpoint_conversion_mapping("OfItsOwn", [convert], overwrite=True)
    model = OfItsOwn(transformers.LlamaConfig(**KV))
    with pytest.raises(UsageError, match=rf"OfItsOwn with {name}.*from_pretrained"):
        ckpipe.name_table("transformers", model=model)


LLAMA = object()  # the configuration of one, in a case


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("transformers", {}, "takes model and nothing else"),
        ("transformers", {"model": torch.nn.Linear(1, 1)}, "not a Linear"),
        ("transformers", {"model": "nowhere"}, "There is no nowhere"),
        ("transformers", {"model": LLAMA}, "names no class of transformers in architectures"),
        ("transformers", {"model": LLAMA, "heads": 2}, "takes model and nothing else"),
        ("gpt2-to-hf", {"model": LLAMA}, "no other table takes it"),
    ],
)
def test_what_is_no_model_of_transformers_is_refused(name: str, given: Any, said: str) -> None:
    if given.get("model") is LLAMA:
        given = given | {"model": transformers.LlamaConfig(**KV)}
    with pytest.raises(UsageError, match=said) as caught:
        ckpipe.name_table(name, **given)
    assert caught.value.hint


MASKED = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
TIED = {
    **dict.fromkeys(
        ("BertForMaskedLM", "RobertaForMaskedLM", "XLMRobertaForMaskedLM", "CamembertForMaskedLM"),
        MASKED | {"num_attention_heads": 2},
    ),
    "GPT2LMHeadModel": {"vocab_size": 64, "n_embd": 16, "n_head": 2, "n_layer": 1},
    "T5ForConditionalGeneration": T5 | {"decoder_start_token_id": 0},
}


@pytest.mark.parametrize("name", TIED)
def test_an_export_keeps_the_name_that_save_pretrained_keeps_of_tied_ones(
    name: str, tmp_path: Path
) -> None:
    cls = getattr(transformers, name)
    config = cls.config_class(**TIED[name], tie_word_embeddings=True)
    model, theirs, ours = cls(config), tmp_path / "theirs", tmp_path / "ours"
    model.save_pretrained(theirs)
    save_one(tmp_path / "run", {"model": model}, step=1)
    ckpipe.export(tmp_path / "run", ours, extra=[theirs / "config.json"])
    table = ckpipe.name_table("transformers", model=model)
    ckpipe.export(tmp_path / "run", tmp_path / "table", transform=table)
    for folder in (ours, tmp_path / "table"):
        assert weights_in(folder).keys() == weights_in(theirs).keys()
    bare = transformers.AutoModel.from_pretrained(ours)
    wanted = model.get_input_embeddings().weight
    assert torch.equal(bare.get_input_embeddings().weight, wanted)


def test_an_export_has_the_file_name_that_is_asked_for(tmp_path: Path, call: Commands) -> None:
    net = torch.nn.Linear(4, 4)
    save_one(tmp_path / "run", {"model": net}, step=1)
    name = "diffusion_pytorch_model.safetensors"
    done = ckpipe.export(tmp_path / "run", tmp_path / "one", file_name=name)
    assert done.files == (name,)
    done = ckpipe.export(tmp_path / "run", tmp_path / "two", file_name=name, max_shard_bytes=20)
    stem = "diffusion_pytorch_model-0000"
    assert done.files[:2] == (f"{stem}1-of-00002.safetensors", f"{stem}2-of-00002.safetensors")
    index = json.loads((tmp_path / "two" / f"{name}.index.json").read_text())
    assert set(index["weight_map"].values()) == set(done.files[:2])
    for folder in ("one", "two"):
        fresh = torch.nn.Linear(4, 4)
        ckpipe.load(tmp_path / folder, fresh)
        assert torch.equal(fresh.weight, net.weight)
    target = tmp_path / "three"
    asked = ("--form", "hf", "--file-name", name)
    assert not call("export", tmp_path / "run", target, *asked).code
    assert [each.name for each in target.iterdir()] == [name]
    for wrong in ("a/b.safetensors", "model.bin"):
        with pytest.raises(UsageError, match="file_name"):
            ckpipe.export(tmp_path / "run", tmp_path / "four", file_name=wrong)


compiled: Callable[[Any], Any] = partial(torch.compile, backend="eager")
WRAPPERS: dict[str, Any] = {
    "compiled": compiled,
    "parallel": torch.nn.DataParallel,
    "both": lambda net: torch.nn.DataParallel(compiled(net)),
    "inside": lambda net: torch.nn.Sequential(compiled(net[0]), net[1]),
    "bare": lambda net: net,
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("form", ["module", "part", "dict"])
def test_an_export_has_no_names_of_wrappers(
    wrapper: str, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    wrapped = WRAPPERS[wrapper](net)
    states = {
        "module": wrapped,
        "part": {"model": wrapped},
        "dict": {"model": wrapped.state_dict()},
    }
    save_one(tmp_path / "run", states[form], step=1)
    with caplog.at_level("INFO", "ckpipe"):
        ckpipe.export(tmp_path / "run", tmp_path / "out")
    found = weights_in(tmp_path / "out")
    assert found.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert all(torch.equal(each, net.state_dict()[name]) for name, each in found.items())
    assert ("names of wrappers" in caplog.text) == (wrapper != "bare")


def test_a_module_called_module_beside_another_keeps_its_name(tmp_path: Path) -> None:
    net = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 2)})
    save_one(tmp_path / "run", {"model": net}, step=1)
    ckpipe.export(tmp_path / "run", tmp_path / "out")
    assert weights_in(tmp_path / "out").keys() == net.state_dict().keys()


@pytest.mark.parametrize("form", ["module", "dict", "folder"])
def test_a_state_that_is_one_model_is_exported_whole(form: str, tmp_path: Path) -> None:
    model, theirs = made("LlamaForCausalLM"), tmp_path / "theirs"
    model.save_pretrained(theirs)
    source = theirs if form == "folder" else tmp_path / "run"
    if form != "folder":
        save_one(source, model if form == "module" else model.state_dict(), step=1)
    ckpipe.export(source, tmp_path / "out")
    assert weights_in(tmp_path / "out").keys() == weights_in(theirs).keys()


@pytest.mark.parametrize("part", [None, "model"])
@pytest.mark.parametrize("form", ["hf", "torch"])
@pytest.mark.parametrize("name", ["MixtralForCausalLM", "ViTForImageClassification"])
def test_a_training_state_is_exported_under_published_names(
    name: str, form: Any, part: str | None, tmp_path: Path
) -> None:
    model = made(name)
    optimizer = torch.optim.AdamW(model.parameters())
    sum(each.square().sum() for each in model.parameters()).backward()
    optimizer.step()
    model.save_pretrained(tmp_path / "published")
    save_one(tmp_path / "run", training_state(model, optimizer), step=1)
    table = ckpipe.name_table("transformers", model=model)

    def export() -> None:
        ckpipe.export(tmp_path / "run", tmp_path / "out", form=form, part=part, transform=table)

    if form == "torch" and part is None and name == "MixtralForCausalLM":  # moments stay behind
        with pytest.raises(StructureMismatch, match=r"optimizer\.state\.model\.layers\.0"):
            export()
        return
    export()
    wanted = weights_in(tmp_path / "published")
    if form == "hf":
        found = weights_in(tmp_path / "out")
    else:
        state = torch.load(tmp_path / "out" / "state.pt")
        found = state if part else state["model"]
    assert found.keys() >= wanted.keys()
    assert all(torch.equal(found[key], each) for key, each in wanted.items())
