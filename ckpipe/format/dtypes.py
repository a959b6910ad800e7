"""Names of torch dtypes, and what the safetensors format calls them.

Safetensors names: the format's README in its repository, revision 0.5, which is what the oldest
readers in use understand. A dtype that has no name there is stored as bytes (``U8``).
"""

from __future__ import annotations

import torch

_SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}

_QUANTIZED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and value not in _QUANTIZED
}
"""Every dtype a tensor may have, by the name torch prints without ``torch.``."""

NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
"""The name of every dtype a tensor may have."""


def stored_dtype(dtype: torch.dtype) -> str | None:
    """The safetensors name of a dtype, or None if the format has none."""
    return _SAFETENSORS.get(dtype)
