"""Small language models under their original names: Meta's and torchtitan's, and nanoGPT's."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of tensors with batch, position, head and size; heads share k and v."""
    groups, length = q.shape[2] // k.shape[2], q.shape[1]
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    k, v = (each.repeat_interleave(groups, 1) for each in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)
    return (functional.softmax(scores + mask, -1) @ v).transpose(1, 2).flatten(2)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, form: str) -> None:
        super().__init__()
        self.size, self.form = width // heads, form
        bias = form == "qwen2"
        self.wq = nn.Linear(width, width, bias)
        self.wk = nn.Linear(width, kv_heads * self.size, bias)
        self.wv = nn.Linear(width, kv_heads * self.size, bias)
        self.wo = nn.Linear(width, width, False)
        if form == "qwen3":
            self.q_norm, self.k_norm = Norm(self.size), Norm(self.size)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate pairs of elements: neighbours in Meta's layout, else one of each half."""
        if self.form == "llama":
            x = x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
        speed = 1.0 / (10000.0 ** (torch.arange(0, self.size, 2).float() / self.size))
        angle = (torch.arange(x.shape[1])[:, None].float() * speed)[None, :, None]
        a, b = x.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], -1, self.size)
        q, k, v = (w(x).view(shape) for w in (self.wq, self.wk, self.wv))
        if self.form == "qwen3":
            q, k = self.q_norm(q), self.k_norm(k)
        attended: Tensor = self.wo(attend(self.rotate(q), self.rotate(k), v))
        return attended


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, inner, False), nn.Linear(width, inner, False)
        self.w2 = nn.Linear(inner, width, False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return out


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, inner: int, form: str) -> None:
        super().__init__()
        self.attention = Attention(width, heads, kv_heads, form)
        self.feed_forward = FeedForward(width, inner)
        self.attention_norm, self.ffn_norm = Norm(width), Norm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Transformer(nn.Module):
    """Llama by Meta's names, or Qwen by torchtitan's.

    Args:
        vocabulary: The number of tokens.
        width: The size of a token.
        heads: The heads of attention.
        kv_heads: The heads with keys and values of their own.
        inner: The size inside the feed-forward network.
        layers: The number of layers.
        form: ``llama``, ``qwen2`` or ``qwen3``.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        heads: int,
        kv_heads: int,
        inner: int,
        layers: int,
        form: str,
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            Layer(width, heads, kv_heads, inner, form) for _ in range(layers)
        )
        self.norm, self.output = Norm(width), nn.Linear(width, vocabulary, False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.output(self.norm(x))
        return logits


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict(
            {"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)}
        )
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)}
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.attn["c_attn"](self.ln_1(x)).unflatten(-1, (3, self.heads, -1))
        x = x + self.attn["c_proj"](attend(*qkv.unbind(2)))
        inner = functional.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
        out: Tensor = x + self.mlp["c_proj"](inner)
        return out


class Body(nn.Module):
    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, context: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        out: Tensor = self.ln_f(x)
        return out


class GPT(nn.Module):
    """GPT-2 by nanoGPT's names, with its tied weight."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, context: int) -> None:
        super().__init__()
        self.transformer = Body(vocabulary, width, heads, layers, context)
        self.lm_head = nn.Linear(width, vocabulary, False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.transformer(tokens))
        return logits
