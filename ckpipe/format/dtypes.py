"""The dtypes that a tensor may have, and their names."""

from __future__ import annotations

import torch

from ckpipe.errors import InvalidManifest

_QUANTIZED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and value not in _QUANTIZED
}
"""All dtypes that a tensor may have, by torch's name without ``torch.``."""

NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
"""The names of these dtypes."""


def dtype_of(name: str, key: str | None) -> torch.dtype:
    """Return the dtype that a manifest names.

    Raises:
        InvalidManifest: If it is unknown.
    """
    dtype = DTYPES.get(name)
    if dtype is None:
        raise InvalidManifest(f"This dtype is unknown: {name!r:.100}", key=key)
    return dtype
