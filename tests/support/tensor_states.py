"""States of tensors that lie in memory in every way torch knows, drawn by hypothesis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int16, torch.uint8,
    torch.bool, torch.float8_e4m3fn, torch.complex64, torch.complex128,
)  # fmt: skip


@dataclass(frozen=True)
class View:
    """One tensor over a buffer: how it looks at it, and two numbers that choose where."""

    kind: str
    a: int
    b: int


@dataclass(frozen=True)
class Buffer:
    """Memory of some tensors: its dtype, its elements, a seed for its bytes, who looks at it."""

    dtype: torch.dtype
    elements: int
    seed: int
    views: tuple[View, ...]


Spec = tuple[Buffer, ...]

_VIEWS = st.builds(
    View,
    st.sampled_from(["all", "slice", "steps", "turned", "spread", "scalar", "lazy", "bytes"]),
    st.integers(0, 40),
    st.integers(1, 9),
)
_BUFFERS = st.builds(
    Buffer,
    st.sampled_from(DTYPES),
    st.one_of(st.integers(0, 40), st.integers(0, 3000)),
    st.integers(0, 9),
    st.lists(_VIEWS, min_size=1, max_size=4).map(tuple),
)
SPECS: st.SearchStrategy[Spec] = st.lists(_BUFFERS, max_size=6).map(tuple)


def build(spec: Spec) -> dict[str, torch.Tensor]:
    """The tensors of a specification, in new memory."""
    state: dict[str, torch.Tensor] = {}
    for number, buffer in enumerate(spec):
        memory = filled(buffer)
        for index, view in enumerate(buffer.views):
            state[f"t{number}.{index}"] = look(memory, view)
    return state


def filled(buffer: Buffer) -> torch.Tensor:
    """A flat tensor of random bytes; of bool, of random truth values."""
    drawn = torch.Generator().manual_seed(buffer.seed)
    size = buffer.elements * buffer.dtype.itemsize
    high = 2 if buffer.dtype == torch.bool else 256
    raw = torch.randint(0, high, (size,), dtype=torch.uint8, generator=drawn)
    return raw.view(buffer.dtype)


def look(memory: torch.Tensor, view: View) -> torch.Tensor:
    """A tensor over a buffer."""
    elements = memory.numel()
    start = min(view.a, elements)
    match view.kind:
        case "slice":
            return memory[start : start + view.b * 7]
        case "steps":
            return memory[start :: view.b]
        case "turned":
            rows = elements // view.b
            return memory[: rows * view.b].view(rows, view.b).t()
        case "spread":
            return memory[:1].expand(view.b, 3, -1) if elements else memory[:]
        case "scalar":
            return memory[min(start, elements - 1)] if elements else memory[:]
        case "lazy" if memory.dtype.is_complex:
            return memory[start:].conj() if view.b % 2 else memory[start:].conj().imag
        case "lazy" if memory.dtype in (torch.float32, torch.float64):
            return torch._neg_view(memory[start :: view.b])
        case "bytes":
            return memory.view(torch.uint8)[start : start + view.b]
        case _:
            return memory[:]
