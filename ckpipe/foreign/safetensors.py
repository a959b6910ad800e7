"""Read ``.safetensors`` files and the folders in which Hugging Face's libraries save weights.

Source: ``hf_storage.py`` of ``torch.distributed.checkpoint`` 2.13 for shards of ranks, the README
of the safetensors repository (8 bytes with the length of the header, the header
as JSON, the data; entries lie without holes, and nothing follows the last one), and
``save_pretrained`` of transformers 5.24 and peft 0.21 for the names of files.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from operator import add
from typing import Any

import torch

from ckpipe.backend import Backend, ObjectInfo, for_each
from ckpipe.errors import (
    DuplicateName,
    InvalidExtent,
    InvalidManifest,
)
from ckpipe.foreign.source import AT_ONCE, check_named, check_shards, read_metadata, read_range
from ckpipe.foreign.virtual import Extent, ForeignTensor, virtual_manifest
from ckpipe.format.data_file import FOREIGN_DTYPES, LENGTH_BYTES, stored_dtype
from ckpipe.format.dtypes import DTYPES
from ckpipe.format.manifest import MAX_DIMENSIONS, MAX_NUMBER, ManifestDocument
from ckpipe.interpreter import gc_paused

INDEX = ".safetensors.index.json"
SUFFIX = ".safetensors"

_TORCH_NAMES = {stored: name for name in DTYPES if (stored := stored_dtype(name))}
_TORCH_NAMES |= {stored: name for name, stored in FOREIGN_DTYPES.items()}
_SHARDING = "DCP_SHARDING_INFO"
_FIRST_BYTES = 64 << 10
_BASE_CONTAINERS, _BYTES_PER_CONTAINER = 10_000, 12  # the shortest row has 54 bytes and three
_AGAIN = "The file is damaged or no safetensors file; copy or download it again"

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


def together(
    files: Sequence[ObjectInfo], tensors: Sequence[Mapping[Any, Any]], weights: Mapping[str, str]
) -> dict[Any, Any]:
    """Return the tensors of several files by name.

    Args:
        files: The files.
        tensors: For each file, its tensors by name.
        weights: The file of each tensor, as an index tells; empty without an index.

    Raises:
        DuplicateName: If two files have a name, and no index says which one counts.
        InvalidManifest: If the index names a tensor that its file lacks.
    """
    found: dict[Any, Any] = {}
    homes: dict[Any, str] = {}
    for file, inside in zip(files, tensors, strict=True):
        for name, tensor in inside.items():
            if weights.get(name, file.key) != file.key:
                continue
            if name in found:
                raise DuplicateName(
                    f"Both {homes[name]} and {file.key} have a tensor of this name",
                    key=name,
                    hint="Name the file to load, or move the other one away",
                )
            found[name], homes[name] = tensor, file.key
    for name, key in weights.items():
        if name not in found:
            raise InvalidManifest(f"The index names a tensor that {key} does not have", key=name)
    return found


def _of_shards(files: Sequence[ObjectInfo], headers: Sequence[Header]) -> dict[str, ForeignTensor]:
    """Return the tensors of the shards that the ranks of DCP's Hugging Face writer have saved.

    Each file tells the offsets of its shards. The shape of a tensor is where they end.

    Raises:
        InvalidManifest: If offsets are malformed, or shards contradict each other.
    """
    found: defaultdict[str, list[tuple[tuple[int, ...], ForeignTensor]]] = defaultdict(list)
    for file, (tensors, metadata) in zip(files, headers, strict=True):
        info = _parsed(metadata.get(_SHARDING, "").encode(), file.key)
        for name, tensor in tensors.items():
            try:
                lower = tuple(info[name]["saved_offsets"])
                fits = all(type(n) is int and 0 <= n <= MAX_NUMBER for n in lower)
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


def weight_map(data: bytes, index: str, there: Mapping[str, ObjectInfo]) -> dict[str, str]:
    """Return the file of each tensor, as an index of Hugging Face's libraries tells.

    Args:
        data: The content of the index.
        index: Its name.
        there: The files of the folder.

    Raises:
        UnsafePath: If it names a file that is not directly in the folder.
        MissingObject: If it names a file that is not there.
        InvalidManifest: If it is malformed.
    """
    found = _parsed(data, index)
    weights = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(each, str) for each in weights.values()):
        raise InvalidManifest("The index has no weight_map of names and files", key=index)
    for name in dict.fromkeys(weights.values()):
        check_named(name, there, index)
    return weights


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
            hint=_AGAIN,
        )
    data = first[LENGTH_BYTES : LENGTH_BYTES + length]
    if len(data) < length:
        data = await read_metadata(store, info, base + LENGTH_BYTES, length)
    return _described(data, info, start)


@gc_paused()
def _described(data: bytes, info: ObjectInfo, start: int) -> Header:
    header = _parsed(data, info.key)
    if not isinstance(header, dict):
        raise InvalidManifest("The header is no JSON object", key=info.key, hint=_AGAIN)
    metadata = header.pop("__metadata__", {})
    texts = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    if not texts:
        raise InvalidManifest("The metadata of the header are no texts", key=info.key, hint=_AGAIN)
    tensors = {name: _tensor(name, row, info, start) for name, row in header.items()}
    _check_extents(tensors, info, start)
    return tensors, metadata


def _parsed(data: bytes, key: str) -> Any:
    if data.count(b"{") + data.count(b"[") > _BASE_CONTAINERS + len(data) // _BYTES_PER_CONTAINER:
        raise InvalidManifest(
            "This JSON has more objects and arrays than real files, which would take much memory",
            key=key,
            hint=_AGAIN,
        )
    try:
        return json.loads(data, object_pairs_hook=_unique, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise InvalidManifest(f"This is no JSON: {error!r:.200}", key=key, hint=_AGAIN) from None
    except DuplicateName as error:
        error.key = key
        raise


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise DuplicateName(f"The name {twice!r:.200} stands twice", hint=_AGAIN)
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _tensor(name: str, row: Any, info: ObjectInfo, start: int) -> ForeignTensor:
    try:
        stored, shape, (begin, end) = row["dtype"], tuple(row["shape"]), row["data_offsets"]
        numbers = (*shape, begin, end)
        plain = set(map(type, numbers)) == {int} and min(numbers) >= 0 and begin <= end
        if not plain or max(numbers) > MAX_NUMBER:
            raise ValueError("a size or offset is out of range")
        if len(shape) > MAX_DIMENSIONS:
            raise ValueError(f"there are more than {MAX_DIMENSIONS} dimensions")
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidManifest(
            f"The header's row of {name!r:.200} is malformed: {error!r:.100}",
            key=info.key,
            hint=_AGAIN,
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
            hint=_AGAIN,
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
                f"The tensor {name!r:.200} {what} the one before it", key=info.key, hint=_AGAIN
            )
        end += nbytes
    if end != info.size:
        raise InvalidExtent(
            f"The tensors end at byte {end}, and the file has {info.size}",
            key=info.key,
            hint="The file is truncated, or something was appended; copy or download it again",
        )
