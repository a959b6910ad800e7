"""Tables of names that ship, between models under their original names and transformers' models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import ckpipe
from ckpipe.errors import ShapeMismatch, StructureMismatch, UsageError
from tests.support.late_module import LateModule
from tests.transforms.reference_models import GPT, Transformer

peft, transformers = LateModule("peft"), LateModule("transformers")

VOCABULARY, WIDTH, HEADS, KV_HEADS, INNER, LAYERS, CONTEXT = 96, 64, 8, 2, 128, 2, 32
FORMS = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gpt2": "GPT2"}


def original(form: str) -> torch.nn.Module:
    if form == "gpt2":
        made: torch.nn.Module = GPT(VOCABULARY, WIDTH, HEADS, LAYERS, CONTEXT)
    else:
        made = Transformer(VOCABULARY, WIDTH, HEADS, KV_HEADS, INNER, LAYERS, form)
    with torch.no_grad():  # Norms and biases differ from those of any fresh model.
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return made


def of_transformers(form: str, **more: Any) -> Any:
    common: dict[str, Any] = {"vocab_size": VOCABULARY, "attn_implementation": "eager"}
    if form == "gpt2":
        own: dict[str, Any] = {"n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS}
        own |= {"n_positions": CONTEXT, "activation_function": "gelu_pytorch_tanh"}
    else:
        own = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
        own |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
        own |= {"head_dim": WIDTH // HEADS, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    config = getattr(transformers, f"{FORMS[form]}Config")(**common, **own, **more)
    name = f"{FORMS[form]}{'LMHeadModel' if form == 'gpt2' else 'ForCausalLM'}"
    return getattr(transformers, name)(config).eval()


def table(form: str, *, back: bool = False) -> list[Any]:
    name = form.replace("qwen2", "qwen").replace("qwen3", "qwen")
    numbers = {"heads": HEADS, "kv_heads": KV_HEADS} if form == "llama" else {}
    return ckpipe.name_table(f"hf-to-{name}" if back else f"{name}-to-hf", **numbers)


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_logits_are_the_same_to_the_bit_there_and_back(form: str, tmp_path: Path) -> None:
    tokens = torch.randint(0, VOCABULARY, (2, CONTEXT))
    model, theirs, again = original(form), of_transformers(form), original(form)
    expected = model(tokens)
    weights = dict(model.state_dict())
    if form == "llama":
        weights["rope.freqs"] = torch.ones(4)
    torch.save(weights, tmp_path / "consolidated.00.pth")
    with ckpipe.SyncPipeline(tmp_path / "run") as pipeline:
        source = tmp_path / "consolidated.00.pth"
        pipeline.load({"model": theirs}, source=source, transform=table(form))
        assert torch.equal(theirs(tokens).logits, expected)
        theirs.save_pretrained(tmp_path / "hf")
        pipeline.load(again, source=tmp_path / "hf", transform=table(form, back=True))
        assert torch.equal(again(tokens), expected)
        # Our own checkpoints have the names below that of the model.
        pipeline.save({"model": model}, 1).wait()
        fresh = of_transformers(form)
        pipeline.load({"model": fresh}, transform=table(form))
        assert torch.equal(fresh(tokens).logits, expected)


@torch.no_grad()
def test_biases_of_llama_go_with_their_weights(tmp_path: Path) -> None:
    tokens = torch.randint(0, VOCABULARY, (2, CONTEXT))
    expected = of_transformers("llama", attention_bias=True)
    for parameter in expected.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.2)
    with ckpipe.SyncPipeline(tmp_path / "run") as pipeline:
        pipeline.save(expected, 1).wait()
        metas = ckpipe.load(tmp_path / "run", transform=table("llama", back=True)).state
        pipeline.save(metas, 2).wait()
        again = of_transformers("llama", attention_bias=True)
        pipeline.load(again, transform=table("llama"))
    assert torch.equal(again(tokens).logits, expected(tokens).logits)
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        theirs = expected.get_parameter(f"model.layers.1.self_attn.{name}_proj.bias")
        turned = theirs.view(heads, 2, -1).transpose(1, 2).flatten()
        assert torch.equal(metas[f"layers.1.attention.w{name}.bias"], turned)


WRONG_HEADS = [
    {"heads": 8, "kv_heads": 8},
    {"heads": 2, "kv_heads": 2},
    {"heads": 2, "kv_heads": 8},
    {"heads": 16, "kv_heads": 2},
    {"heads": 8, "kv_heads": 1},
    {"heads": 4, "kv_heads": 1},  # of heads of another size
]


@pytest.mark.parametrize("numbers", WRONG_HEADS)
@pytest.mark.parametrize("back", [False, True])
def test_numbers_of_heads_that_contradict_the_shapes_are_refused(
    numbers: dict[str, int], back: bool, tmp_path: Path
) -> None:
    q, k = ("self_attn.q_proj", "self_attn.k_proj") if back else ("attention.wq", "attention.wk")
    prefix = "model.layers.0." if back else "layers.0."
    weights = {f"{prefix}{q}.weight": torch.rand(64, 64), f"{prefix}{k}.weight": torch.rand(16, 64)}
    weights[f"{prefix}self_attn.rotary_emb.inv_freq" if back else "rope.freqs"] = torch.ones(4)
    torch.save(weights, tmp_path / "old.pt")
    name = "hf-to-llama" if back else "llama-to-hf"
    with pytest.raises(ShapeMismatch, match="not those of the model"):
        ckpipe.load(tmp_path / "old.pt", transform=ckpipe.name_table(name, **numbers))
    ckpipe.load(tmp_path / "old.pt", transform=ckpipe.name_table(name, heads=8, kv_heads=2))


@pytest.mark.parametrize("ending", ["lora_B.default.weight", "weight_scale", "magnitude"])
def test_other_rows_of_heads_are_refused(ending: str, tmp_path: Path) -> None:
    at = "layers.0.attention"
    weights = {f"{at}.wq.{ending}": torch.rand(64, 4), f"{at}.wq.lora_A": torch.rand(4, 64)}
    weights |= {f"{at}.wq.weight": torch.rand(64, 64), f"{at}.wk.weight": torch.rand(16, 64)}
    torch.save(weights, tmp_path / "old.pt")
    with pytest.raises(StructureMismatch, match="rows of heads") as caught:
        ckpipe.load(tmp_path / "old.pt", transform=table("llama"))
    assert caught.value.key == f"{at}.wq.{ending}"


@pytest.mark.parametrize("flat", [False, True])
def test_moments_that_are_not_of_use_are_no_rows_of_heads(flat: bool, tmp_path: Path) -> None:
    model = {f"layers.0.attention.{name}.weight": torch.rand(64, 64) for name in ("wq", "wk")}
    model["rope.freqs"] = torch.rand(4)
    moments = {name: {"exp_avg": torch.rand_like(each)} for name, each in model.items()}
    state: dict[str, Any] = {
        "model": model,
        "optim": {"state": moments, "param_groups": [{"lr": 0.1}]},
    }
    if flat:
        state = {f"model.{name}": each for name, each in model.items()}
        state |= {f"optim.state.{name}.exp_avg": of["exp_avg"] for name, of in moments.items()}
        state |= {f"optim.param_groups.{name}.lr": 0.1 for name in model}
    torch.save(state, tmp_path / "old.pt")
    rules = ckpipe.name_table("llama-to-hf", heads=8, kv_heads=8)
    found = ckpipe.load(tmp_path / "old.pt", transform=rules, exclude=["optim*"])
    assert found.state
    with pytest.raises(StructureMismatch, match="state of its optimizer"):
        ckpipe.load(tmp_path / "old.pt", transform=rules)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("llama", {}),
        ("../llama-to-hf", {}),
        ("llama-to-hf", {"heads": 8}),
        ("gpt2-to-hf", {"heads": 8}),
        ("llama-to-hf", {"heads": 0, "kv_heads": 2}),
        ("llama-to-hf", {"heads": 8, "kv_heads": "2"}),
    ],
)
def test_tables_and_numbers_that_do_not_exist_are_refused(name: str, numbers: Any) -> None:
    with pytest.raises(UsageError):
        ckpipe.name_table(name, **numbers)


def test_a_table_for_other_names_is_refused(tmp_path: Path) -> None:
    safetensors.torch.save_file({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    for name in ("qwen-to-hf", "gpt2-to-hf"):
        with pytest.raises(StructureMismatch, match="matches nothing"):
            ckpipe.load(tmp_path / "x.safetensors", transform=ckpipe.name_table(name))


def adapted(seed: int) -> Any:
    """A model of transformers with an adapter whose weights are not those of a fresh one."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    model = peft.get_peft_model(of_transformers("llama"), config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model.eval()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, asked by peft
@torch.no_grad()
def test_an_adapter_of_peft_goes_there_and_back(tmp_path: Path) -> None:
    tokens = torch.randint(0, VOCABULARY, (2, CONTEXT))
    model, target, by_name = adapted(1), adapted(2), adapted(3)
    for each in (target, by_name):
        each.base_model.load_state_dict(
            {k: v for k, v in model.base_model.state_dict().items() if "lora" not in k},
            strict=False,
        )
    expected = model(tokens).logits
    model.save_pretrained(tmp_path / "adapter")
    with ckpipe.SyncPipeline(tmp_path / "run") as pipeline:
        # Into the module: its names have that of the adapter, and the file has no base.
        rename = ckpipe.Rename(r"\.lora_([AB])\.", r".lora_\1.default.")
        result = pipeline.load(
            target,
            source=tmp_path / "adapter",
            transform=[rename],
            allow_missing=["*base_layer*", "*embed_tokens*", "*proj.weight", "*norm*", "*lm_head*"],
        )
        assert torch.equal(target(tokens).logits, expected)
        assert result is not None
        assert not any("lora" in each for each in result.missing)
        # By peft's own names, and back from one of our checkpoints.
        state = peft.get_peft_model_state_dict(by_name)
        pipeline.load(state, source=tmp_path / "adapter")
        peft.set_peft_model_state_dict(by_name, state)
        assert torch.equal(by_name(tokens).logits, expected)
        pipeline.save(peft.get_peft_model_state_dict(model), 1).wait()
    fresh = adapted(4)
    saved = ckpipe.load(tmp_path / "run").state
    fresh.base_model.load_state_dict(model.base_model.state_dict())
    for name, parameter in fresh.named_parameters():
        if "lora" in name:
            parameter.zero_()
    peft.set_peft_model_state_dict(fresh, saved)
    assert torch.equal(fresh(tokens).logits, expected)
