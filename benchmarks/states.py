"""The states that the benchmarks save."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

WIDTH, LAYERS, VOCABULARY, CONTEXT = 768, 12, 50257, 1024


class Block(nn.Module):
    """Make the parameters of one GPT-2 block."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.ModuleDict(
            {"c_attn": nn.Linear(WIDTH, 3 * WIDTH), "c_proj": nn.Linear(WIDTH, WIDTH)}
        )
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(WIDTH, 4 * WIDTH), "c_proj": nn.Linear(4 * WIDTH, WIDTH)}
        )


def gpt2_with_adamw(layers: int = LAYERS, words: int = VOCABULARY) -> dict[str, Any]:
    """Make GPT-2 124M and its AdamW: with all layers and words 592 tensors, 1.49 GB in float32."""
    model = nn.Module()
    model.wte, model.wpe = nn.Embedding(words, WIDTH), nn.Embedding(CONTEXT, WIDTH)
    model.h = nn.ModuleList(Block() for _ in range(layers))
    model.ln_f = nn.LayerNorm(WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad = None
    return {"model": model, "optimizer": optimizer}


def tiny_tensors(count: int = 20_000) -> dict[str, Any]:
    """Make many tensors of 32 bytes, named like an optimizer's state."""
    names = ("exp_avg", "exp_avg_sq", "step", "max_exp_avg_sq")
    state = {
        number: {name: torch.randn(8) for name in names} for number in range(count // len(names))
    }
    return {"optimizer": {"state": state}}


def large_tensors(count: int = 4) -> dict[str, Any]:
    """Make a few tensors of 256 MiB."""
    return {"model": {f"weight.{number}": torch.randn(64 << 20) for number in range(count)}}


def state_bytes(state: Any) -> int:
    """Count the bytes of all tensors of a state."""
    if isinstance(state, torch.Tensor):
        return state.numel() * state.itemsize
    if hasattr(state, "state_dict"):
        return state_bytes(state.state_dict())
    if isinstance(state, dict):
        return sum(state_bytes(each) for each in state.values())
    if isinstance(state, list | tuple):
        return sum(state_bytes(each) for each in state)
    return 0


GPT2, SMALL_GPT2 = "GPT-2 124M + AdamW", "a quarter of GPT-2 + AdamW"
TINY, LARGE, TRIAL = "20,000 tiny tensors", "four of 256 MiB", "a trial"
STATES: dict[str, Callable[[], dict[str, Any]]] = {
    GPT2: gpt2_with_adamw,
    SMALL_GPT2: partial(gpt2_with_adamw, 3, VOCABULARY // 4),
    TINY: tiny_tensors,
    LARGE: large_tensors,
    TRIAL: partial(tiny_tensors, 40),
}
