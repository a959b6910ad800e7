"""Exports that ``from_pretrained`` of transformers loads; models are made from a config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import ckpipe
from tests.support.late_module import LateModule
from tests.support.one_checkpoint import save_one

transformers: Any = LateModule("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
GPT2: dict[str, Any] = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2 | {"n_positions": 16}),
    "llama": ("LlamaForCausalLM", SIZES),
    "tied llama": ("LlamaForCausalLM", SIZES | {"tie_word_embeddings": True}),
}
TOKENS = torch.arange(8)[None]


@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained_gives_equal_logits(tmp_path: Path, name: str) -> None:
    model_class, sizes = MODELS[name]
    cls = getattr(transformers, model_class)
    config = cls.config_class(**sizes)
    torch.manual_seed(0)
    model = cls(config).eval()
    logits = model(TOKENS).logits
    theirs = tmp_path / "theirs"
    model.save_pretrained(theirs, max_shard_size="20kB")
    save_one(tmp_path / "run", {"model": model}, step=1)
    for most in ("1GB", "20kB"):
        folder = tmp_path / most
        ckpipe.export(
            tmp_path / "run", folder, max_shard_bytes=most, extra=[theirs / "config.json"]
        )
        again, info = cls.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        assert torch.equal(again.eval()(TOKENS).logits, logits)
    index = "model.safetensors.index.json"
    ours, expected = (json.loads((each / index).read_text()) for each in (folder, theirs))
    assert ours["metadata"] == expected["metadata"]
    assert ours["weight_map"].keys() == expected["weight_map"].keys()
    other = cls(config).eval()
    safetensors.torch.load_model(other, tmp_path / "1GB/model.safetensors")
    assert torch.equal(other(TOKENS).logits, logits)
    half = tmp_path / "half"
    ckpipe.export(tmp_path / "run", half, dtype="bfloat16", extra=[theirs / "config.json"])
    narrow = cls.from_pretrained(half, dtype=torch.bfloat16).state_dict()
    for label, each in model.state_dict().items():
        assert torch.equal(narrow[label], each.bfloat16()), label
