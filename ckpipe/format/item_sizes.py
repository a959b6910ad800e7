"""Sizes of elements by the names of dtypes, for whoever moves bytes and has no torch.

A process that brings checkpoints to a store reads and merges manifests and never sees a tensor;
importing torch for the sizes of its dtypes would cost more memory than all the rest of it.
"""

from __future__ import annotations

STORED_ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""Bytes of one element, by safetensors name."""

_ITEM_BYTES = {
    "complex128": 16,
    "float64": 8, "int64": 8, "uint64": 8, "complex64": 8,
    "float32": 4, "int32": 4, "uint32": 4, "complex32": 4,
    "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


def item_bytes(dtype: str) -> int | None:
    """Bytes of one element of a torch dtype, by its name without ``torch.``; None if there is none.

    Asks torch about a name that is in no table here: each of its versions has more.
    """
    known = _ITEM_BYTES.get(dtype)
    if known is None:
        from ckpipe.format.dtypes import DTYPES

        found = DTYPES.get(dtype)
        return None if found is None else found.itemsize
    return known
