"""Compare trees of values and tensors bit by bit."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def difference(found: Any, expected: Any, where: str = "") -> str | None:
    """Find where two trees differ in a bit, a dtype or a shape; None if nowhere."""
    if isinstance(expected, dict) and isinstance(found, dict):
        if found.keys() != expected.keys():
            extra, missing = found.keys() - expected.keys(), expected.keys() - found.keys()
            return f"{where}: extra {sorted(map(str, extra))}, lacks {sorted(map(str, missing))}"
        pairs = [(f"{where}/{key}", found[key], expected[key]) for key in expected]
    elif isinstance(expected, list | tuple) and type(found) is type(expected):
        if len(found) != len(expected):
            return f"{where}: {len(found)} instead of {len(expected)}"
        pairs = [
            (f"{where}/{n}", *each) for n, each in enumerate(zip(found, expected, strict=True))
        ]
    else:
        same = type(found) is type(expected) and bits(found) == bits(expected)
        return None if same else f"{where}: {_short(found)} instead of {_short(expected)}"
    return next(
        (each for name, a, b in pairs if (each := difference(a, b, name)) is not None), None
    )


def bits(value: Any) -> Any:
    """Describe a value, with bytes in place of tensors."""
    if isinstance(value, DTensor):
        return ("sharded", bits(value.to_local()), value.placements)
    if isinstance(value, torch.Tensor):
        facts = (value.dtype, tuple(value.shape), value.device.type, value.requires_grad)
        if value.is_meta:
            return facts
        if value.is_sparse:
            value = value.to_dense()
        return (*facts, value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    if isinstance(value, dict):
        return [(key, bits(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [bits(each) for each in value]
    return repr(value)


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}{value.reshape(-1)[:3].tolist()}"
    return repr(value)[:80]
