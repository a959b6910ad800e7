"""Read ``.safetensors`` files and the folders in which Hugging Face's libraries save weights.

Source: ``hf_storage.py`` of ``torch.distributed.checkpoint`` 2.13 for shards of ranks, the README
of the safetensors repository (8 bytes with the length of the header, the header
as JSON, the data; entries lie without holes, and nothing follows the last one), and
``save_pretrained`` of transformers 5.24 and peft 0.21 for the names of files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from operator import add
from typing import Any

import torch

from ckpipe.backend import Backend, ObjectInfo, for_each
from ckpipe.errors import InvalidExtent, InvalidManifest
from ckpipe.foreign.files import (
    AT_ONCE,
    BAD_JSON,
    are_sizes,
    check_shards,
    parse_json,
    read_metadata,
    read_range,
    together,
    weight_map,
)
from ckpipe.foreign.virtual import Extent, ForeignTensor, virtual_manifest
from ckpipe.format.data_file import FOREIGN_DTYPES, LENGTH_BYTES, stored_dtype
from ckpipe.format.dtypes import DTYPES
from ckpipe.format.manifest import MAX_DIMENSIONS, ManifestDocument
from ckpipe.interpreter import gc_paused

INDEX = ".safetensors.index.json"
SUFFIX = ".safetensors"

_TORCH_NAMES = {stored: name for name in DTYPES if (stored := stored_dtype(name))}
_TORCH_NAMES |= {stored: name for name, stored in FOREIGN_DTYPES.items()}
_SHARDING = "DCP_SHARDING_INFO"
_FIRST_BYTES = 64 << 10

Header = tuple[dict[str, ForeignTensor], Mapping[str, str]]
"""The tensors of a file by name, and its metadata."""


class SafetensorsSource:
    """A ``.safetensors`` file, or a folder of them."""

    name = "safetensors"

    def recognizes(self, listing: Sequence[ObjectInfo]) -> bool:
        """Tell whether the place has weights in safetensors files."""
        return any(each.key.endswith(SUFFIX) for each in listing)

    async def describe(
        self, store: Backend, listing: Sequence[ObjectInfo], place: str
    ) -> ManifestDocument:
        """Describe the weights as one flat dict by name.

        Raises:
            CorruptCheckpoint: If a header or the index contradicts itself or the files.
            StoreError: If the store failed.
        """
        there = {each.key: each for each in listing}
        index = _index_of(there)
        if index is not None:
            weights = weight_map(await read_metadata(store, there[index]), index, there)
            files = [there[name] for name in dict.fromkeys(weights.values())]
        else:
            weights, files = {}, _loose(there)
            if not place.endswith(files[0].key):  # one of several may be loaded by its name
                check_shards([each.key for each in files])
        files = await for_each(files, lambda each: store.stat(each.key), at_once=AT_ONCE)
        headers = await for_each(files, lambda each: read_header(store, each), at_once=AT_ONCE)
        if any(_SHARDING in metadata for _, metadata in headers):
            tensors = _of_shards(files, headers)
        else:
            tensors = together(files, [each for each, _ in headers], weights)
        return virtual_manifest(tensors, files, place)


def _index_of(there: Mapping[str, ObjectInfo]) -> str | None:
    """Return the name of the index that tells which files count; None if there is none."""
    if f"model{SUFFIX}" in there:  # as transformers decides
        return None
    if f"model{INDEX}" in there:
        return f"model{INDEX}"
    found = [name for name in there if name.endswith(INDEX)]
    return found[0] if len(found) == 1 else None


def _loose(there: Mapping[str, ObjectInfo]) -> list[ObjectInfo]:
    """Return the files of a folder without an index."""
    for name in (f"model{SUFFIX}", f"adapter_model{SUFFIX}"):
        if name in there:
            return [there[name]]
    named = [there[name] for name in sorted(there) if name.endswith(SUFFIX)]
    return named or list(there.values())  # one file of another name


def _of_shards(files: Sequence[ObjectInfo], headers: Sequence[Header]) -> dict[str, ForeignTensor]:
    """Return the tensors of the shards that the ranks of DCP's Hugging Face writer have saved.

    Each file tells the offsets of its shards. The shape of a tensor is where they end.

    Raises:
        InvalidManifest: If offsets are malformed, or shards contradict each other.
    """
    found: defaultdict[str, list[tuple[tuple[int, ...], ForeignTensor]]] = defaultdict(list)
    for file, (tensors, metadata) in zip(files, headers, strict=True):
        info = parse_json(metadata.get(_SHARDING, "").encode(), file.key)
        for name, tensor in tensors.items():
            try:
                lower = tuple(info[name]["saved_offsets"])
                fits = are_sizes(lower)
            except (KeyError, TypeError):
                fits = False
            if not fits or len(lower) != len(tensor.shape):
                raise InvalidManifest(f"The shard of {name!r:.200} has no offsets", key=file.key)
            found[name].append((lower, tensor))
    return {name: _joined(name, parts) for name, parts in found.items()}


def _joined(name: str, parts: Sequence[tuple[tuple[int, ...], ForeignTensor]]) -> ForeignTensor:
    (lower, first), *others = parts
    if any((each.dtype, len(at)) != (first.dtype, len(lower)) for at, each in others):
        raise InvalidManifest("Its shards have several dtypes or numbers of dimensions", key=name)
    boxes = [(at, tuple(map(add, at, each.shape))) for at, each in parts]
    shape = tuple(map(max, zip(*(upper for _, upper in boxes), strict=True)))
    extents = [
        each.extents[0]._replace(box=box)
        for box, (_, each) in zip(boxes, parts, strict=True)
        if 0 not in each.shape
    ]
    return ForeignTensor(first.dtype, shape, tuple(extents))


async def read_header(store: Backend, info: ObjectInfo, base: int = 0) -> Header:
    """Read and check the header of a file, which begins at an offset.

    Reads 64 KiB, and the rest of a longer header, of at most 100 MB.

    Raises:
        OversizedMetadata: If the header is longer.
        InvalidExtent: If entries overlap, leave holes, or do not end where the file ends.
        DuplicateName: If a name stands twice.
        InvalidManifest: If it is malformed otherwise.
        StoreError: If the store failed.
    """
    first = await read_range(store, info, base, min(info.size - base, _FIRST_BYTES))
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    start = base + LENGTH_BYTES + length
    if len(first) < LENGTH_BYTES or start > info.size:
        raise InvalidExtent(
            f"The header would end at byte {start}, and the file has {info.size}",
            key=info.key,
            hint=BAD_JSON,
        )
    data = first[LENGTH_BYTES : LENGTH_BYTES + length]
    if len(data) < length:
        data = await read_metadata(store, info, base + LENGTH_BYTES, length)
    return _described(data, info, start)


@gc_paused()
def _described(data: bytes, info: ObjectInfo, start: int) -> Header:
    header = parse_json(data, info.key)
    if not isinstance(header, dict):
        raise InvalidManifest("The header is no JSON object", key=info.key, hint=BAD_JSON)
    metadata = header.pop("__metadata__", {})
    texts = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    if not texts:
        raise InvalidManifest(
            "The metadata of the header are no texts", key=info.key, hint=BAD_JSON
        )
    tensors = {name: _tensor(name, row, info, start) for name, row in header.items()}
    _check_extents(tensors, info, start)
    return tensors, metadata


def _tensor(name: str, row: Any, info: ObjectInfo, start: int) -> ForeignTensor:
    try:
        stored, shape, (begin, end) = row["dtype"], tuple(row["shape"]), row["data_offsets"]
        if not are_sizes((*shape, begin, end)) or begin > end:
            raise ValueError("a size or offset is out of range")
        if len(shape) > MAX_DIMENSIONS:
            raise ValueError(f"there are more than {MAX_DIMENSIONS} dimensions")
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidManifest(
            f"The header's row of {name!r:.200} is malformed: {error!r:.100}",
            key=info.key,
            hint=BAD_JSON,
        ) from None
    dtype = _TORCH_NAMES.get(stored) if isinstance(stored, str) else None
    if dtype not in DTYPES:
        raise InvalidManifest(
            f"The tensor {name!r:.200} has the dtype {stored!r:.50}, of which torch "
            f"{torch.__version__} has no tensors",
            key=info.key,
        )
    if stored == "F4" and shape[-1:] and shape[-1] % 2 == 0:
        shape = (*shape[:-1], shape[-1] // 2)
    elif stored == "F4":
        raise InvalidManifest(
            f"The tensor {name!r:.200} of shape {list(shape)!s:.100} has half a byte in a row, "
            "which torch cannot hold",
            key=info.key,
        )
    if prod(shape) * DTYPES[dtype].itemsize != end - begin:
        raise InvalidExtent(
            f"The tensor {name!r:.200} of shape {list(shape)!s:.100} and dtype {dtype} does not "
            f"fill the bytes {begin} to {end}",
            key=info.key,
            hint=BAD_JSON,
        )
    return ForeignTensor(dtype, shape, (Extent(info.key, start + begin, end - begin),))


def _check_extents(tensors: Mapping[str, ForeignTensor], info: ObjectInfo, start: int) -> None:
    """Check that the data is filled without overlaps and holes, to the end of the file."""
    end = start
    places = ((each.extents[0].begin, each.extents[0].nbytes, n) for n, each in tensors.items())
    for begin, nbytes, name in sorted(places):
        if begin != end:
            what = "overlaps" if begin < end else "leaves a hole behind"
            raise InvalidExtent(
                f"The tensor {name!r:.200} {what} the one before it",
                key=info.key,
                hint=BAD_JSON,
            )
        end += nbytes
    if end != info.size:
        raise InvalidExtent(
            f"The tensors end at byte {end}, and the file has {info.size}",
            key=info.key,
            hint="The file is truncated, or something was appended; copy or download it again",
        )
