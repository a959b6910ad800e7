"""Wrapper tensors of two made-up classes: one may hold another, one has aliasing inner tensors."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Rounding(enum.Enum):
    NEAREST = "nearest"
    DOWN = "down"


@dataclass(frozen=True)
class Granularity:
    rows: int
    rounding: Rounding = Rounding.NEAREST


class Range(NamedTuple):
    low: float
    high: float


class _Wrapper(torch.Tensor):
    """Pass the few operations of both classes on to each inner tensor."""

    names: tuple[str, str]
    looks_like: torch.dtype
    context: Any

    @staticmethod
    def __new__(cls, first: torch.Tensor, second: torch.Tensor, context: Any, size: Any) -> Any:
        made = torch.Tensor._make_wrapper_subclass(
            cls, size, dtype=cls.looks_like, device=first.device
        )
        for name, inner in zip(cls.names, (first, second), strict=True):
            setattr(made, name, inner)
        made.context = context
        return made

    def __init__(self, *_: Any) -> None:
        pass

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.names), self.context

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(*(inner[name] for name in cls.names), context, size)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        if func is aten.copy_.default:
            for name in cls.names:
                getattr(args[0], name).copy_(getattr(args[1], name))
            return args[0]
        if func in (aten.detach.default, aten.alias.default, aten.view.default, aten.clone.default):
            own = args[0]
            keep = torch.clone if func is aten.clone.default else torch.Tensor.detach
            return cls(*(keep(getattr(own, name)) for name in cls.names), own.context, own.shape)
        raise NotImplementedError(f"{cls.__name__} does not support {func}")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<{type(self).__name__} of {list(self.shape)}>"


class Scaled(_Wrapper):
    """Codes with a scale for each row; the codes may be a wrapper."""

    names = ("codes", "scale")
    looks_like = torch.float32
    codes: torch.Tensor
    scale: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        return self.codes.float() * self.scale[:, None]


class Halves(_Wrapper):
    """A buffer, and a view of its second half."""

    names = ("whole", "second")
    looks_like = torch.bfloat16
    whole: torch.Tensor
    second: torch.Tensor


CONTEXT = {"granularity": Granularity(1), "range": Range(-1.0, 1.0), "dtype": torch.int8}


def scaled(rows: int = 4, columns: int = 3, *, start: int = 0, context: Any = CONTEXT) -> Scaled:
    codes = torch.arange(start, start + rows * columns, dtype=torch.int8).view(rows, columns)
    return Scaled(codes, torch.arange(start, start + rows) / 8, context, codes.shape)


def halves(*, start: int = 0) -> Halves:
    whole = torch.arange(start, start + 6.0)
    return Halves(whole, whole[3:], ["half"], torch.Size((6,)))


def nested(*, start: int = 0) -> Scaled:
    return Scaled(halves(start=start), torch.ones(1) + start, (1, torch.Size((6,))), (6,))


def inner_of(tensor: torch.Tensor, path: str = "") -> dict[str, torch.Tensor]:
    """The plain tensors in a wrapper, by their paths."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return {path: tensor}
    local: Any = tensor
    found: dict[str, torch.Tensor] = {}
    for name in local.__tensor_flatten__()[0]:
        found |= inner_of(getattr(local, name), f"{path}.{name}")
    return found


def equal(one: Any, other: Any) -> bool:
    """Tell whether two wrappers have one class, equal contexts and equal inner tensors."""
    if type(one) is not type(other) or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.__tensor_flatten__()[1] != other.__tensor_flatten__()[1]:
        return False
    left, right = inner_of(one), inner_of(other)
    return left.keys() == right.keys() and all(same_bytes(left[name], right[name]) for name in left)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two plain tensors have one dtype and equal bytes."""
    return one.dtype == other.dtype and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
