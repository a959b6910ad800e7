"""Find quantised weights: codes that are values only together with a scale beside them.

Sources of the names: files of DeepSeek (``weight_scale_inv``, ``scale``), compressed-tensors and
fbgemm (``weight_scale``), ModelOpt (``weight_scale_2``, ``_amax``), TensorRT-LLM
(``weights_scaling_factor``), gpt-oss (``_blocks`` and ``_scales``), Mistral (``qscale_weight``),
quanto (``_data`` and ``_scale``), Quark (``weight_quantizer.scale``), bitsandbytes (``SCB``,
``weight.absmax``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from ckpipe.errors import DtypeMismatch
from ckpipe.format.manifest import ManifestDocument, TensorRow

_SCALE = re.compile(r"(?:.*scal(?:es?|ing)(?:_?\w+)?|(?:.*_)?amax|SCB|absmax)", re.IGNORECASE)
_CODES = ("float8", "float4", "int8", "uint8", "int4", "uint4", "int16", "int32")


def with_scales(document: ManifestDocument) -> ManifestDocument:
    """Return a manifest in which the rows of codes name their scales."""
    rows = {row.label: row for each in document.structures for row in each.tensors}
    scales = [label for label in rows if _SCALE.fullmatch(label.rpartition(".")[2])]
    if not scales:
        return document
    found: dict[str, str] = {}
    for scale in scales:
        for label in _codes_of(scale):
            if label in rows and rows[label].dtype.startswith(_CODES):
                found.setdefault(label, scale)
    for scale in scales:
        found.pop(scale, None)
    structures = tuple(
        replace(
            each,
            tensors=tuple(
                replace(row, scale=found[row.label]) if row.label in found else row
                for row in each.tensors
            ),
        )
        for each in document.structures
    )
    return replace(document, structures=structures)


def _codes_of(scale: str) -> Iterator[str]:
    """Yield the labels that the codes of a scale may have."""
    yield re.sub(r"_scales?$", "_blocks", scale)
    last = max(0, scale.rfind(".", 0, scale.rfind(".")))
    for end in re.finditer(r"[._]", scale[last:]):
        head = scale[: last + end.start()]
        yield from (head, *(f"{head}.{each}" for each in ("weight", "qweight", "_data")))
        yield f"{head}_weight"
    yield "weight"  # at the root


def refuse_codes(row: TensorRow, dtype: str, label: str) -> None:
    """Refuse to convert codes to another dtype, since they would become other weights.

    Raises:
        DtypeMismatch: If the tensor has codes.
    """
    if row.scale is not None and dtype != row.dtype:
        raise DtypeMismatch(
            f"These are codes of a quantised weight, whose scale is {row.scale!r}; converted from "
            f"{row.dtype} to {dtype} without it, they would be other weights",
            key=label,
            hint="Load both as they are and multiply in the program. For folders of Hugging Face, "
            "QuantizedHuggingFaceStorageReader of torch.distributed.checkpoint.quantized_hf_storage"
            " applies the scales: load with dcp.load, and save the result with ckpipe",
        )
