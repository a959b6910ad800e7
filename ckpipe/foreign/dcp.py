"""Read folders of ``torch.distributed.checkpoint`` (DCP), of torch 2.6 and later.

Source: ``metadata.py``, ``filesystem.py`` and ``_nested_dict.py`` of that package in torch 2.6 and
2.13. ``.metadata`` is a pickle with the names, shapes and chunks of tensors, the path of each name
in the saved state, and for each chunk or value a range of a ``.distcp`` file. The range is a file
of ``torch.save``. With ``SerializationFormat.SAFETENSORS`` the tensors of a ``.distcp`` file are a
``.safetensors`` file at its end: the range of each begins there, and is as long as the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from operator import add
from typing import Any, NamedTuple

import torch

from ckpipe.backend import Backend, ObjectInfo, for_each
from ckpipe.errors import CkpipeError, InvalidExtent, InvalidManifest, UnsupportedState
from ckpipe.foreign.files import (
    AT_ONCE,
    MAX_PICKLE_BYTES,
    Range,
    are_sizes,
    check_named,
    read_ahead,
    read_metadata,
)
from ckpipe.foreign.pickles import PATHS, PLAIN, Record, RecordOf, Unread, read_pickle
from ckpipe.foreign.safetensors import read_header
from ckpipe.foreign.torch_zip import read_object
from ckpipe.foreign.virtual import Extent, ForeignTensor, virtual_manifest
from ckpipe.format.dtypes import DTYPES, NAMES
from ckpipe.format.manifest import MAX_DIMENSIONS, ManifestDocument
from ckpipe.state.training_form import PARAM_GROUPS, STATE, groups_of

METADATA = ".metadata"

_MOST_DEPTH = 200
_ITEM_HEAD_BYTES, _ITEM_TAIL_BYTES = 2 << 10, 4 << 10
_ITEMS_TOGETHER = 256
_HOME = "torch.distributed.checkpoint.metadata."
_RECORDS = (
    *(_HOME + name for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata",
        "ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    *PATHS,
)  # fmt: skip

_KNOWN: dict[str, Any] = {
    **PLAIN,
    **{name: RecordOf(name.rpartition(".")[2]) for name in _RECORDS},
    "torch.Size": lambda numbers: torch.Size(numbers),
    "torch.serialization._get_layout": str,
    **{f"torch.{name}": dtype for name, dtype in DTYPES.items()},
}


class _Item(NamedTuple):
    """A range of a ``.distcp`` file: the name and the offsets of what it holds."""

    name: str
    offsets: tuple[int, ...] | None
    file: str
    begin: int
    nbytes: int


class DcpSource:
    """A folder that ``torch.distributed.checkpoint.save`` wrote."""

    name = "dcp"

    def recognizes(self, listing: Sequence[ObjectInfo]) -> bool:
        """Tell whether the folder has the metadata of DCP."""
        return any(each.key == METADATA for each in listing)

    async def describe(
        self, store: Backend, listing: Sequence[ObjectInfo], place: str
    ) -> ManifestDocument:
        """Describe the state that was saved, with the names that DCP has flattened nested again.

        Raises:
            UnsupportedState: If the metadata names a class that DCP does not write.
            CorruptCheckpoint: If files contradict themselves.
            StoreError: If the store failed.
        """
        there = {each.key: each for each in listing}
        data = await read_metadata(store, there[METADATA], most=MAX_PICKLE_BYTES)
        try:
            metadata = read_pickle(data, METADATA, _KNOWN, strict=True).state
            items = [
                _item(index, where, there) for index, where in metadata["storage_data"].items()
            ]
            described = metadata["state_dict_metadata"]
            paths = metadata.get("planner_data") or {}
            names = sorted({each.file for each in items})
            files = await for_each(names, store.stat, at_once=AT_ONCE)
            infos = dict(zip(names, files, strict=True))
            found, pickled = await _read(store, infos, items, _chunk_bytes(described))
            state: Any = _Nested()
            for name, about in described.items():
                path = paths.get(name, (name,)) if isinstance(paths, dict) else (name,)
                _put(state, path, _value(name, about, found), name)
            state = _restored(state)
        except CkpipeError:  # some are ValueErrors too
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise InvalidManifest(
                f"The metadata is not as DCP writes it: {error!r:.200}", key=METADATA
            ) from None
        most = 4 * (len(data) + pickled) + 1000
        return virtual_manifest(state, files, place, most_nodes=most)


def _item(index: Record, info: Record, there: Mapping[str, ObjectInfo]) -> _Item:
    """Check where an item of the storage data lies."""
    file, begin, nbytes = (info.state[each] for each in ("relative_path", "offset", "length"))
    name, offsets = index.state["fqn"], index.state.get("offset")
    check_named(file, there, METADATA)
    if type(name) is not str:
        raise ValueError("a name is no text")
    if info.state.get("transform_descriptors"):
        raise UnsupportedState(
            f"The data of {name!r:.200} are transformed, such as compressed", key=METADATA
        )
    if not are_sizes((begin, nbytes)):
        raise ValueError("an offset or length is out of range")
    if begin + nbytes > there[file].size:
        raise InvalidExtent(
            f"{name!r:.200} would end at byte {begin + nbytes}, and the file has "
            f"{there[file].size}",
            key=file,
            hint="The file is truncated or damaged; copy it again",
        )
    return _Item(name, None if offsets is None else _numbers(offsets), file, begin, nbytes)


def _numbers(found: Any) -> tuple[int, ...]:
    """Check the numbers of a shape or of offsets."""
    numbers = tuple(found)
    if len(numbers) > MAX_DIMENSIONS or not are_sizes(numbers):
        raise ValueError("a size or an offset is out of range")
    return numbers


async def _read(
    store: Backend,
    infos: Mapping[str, ObjectInfo],
    items: Sequence[_Item],
    chunk_bytes: Mapping[Any, int],
) -> tuple[dict[Any, Any], int]:
    """Return the object of each item, by its name and offsets, with tensors that are not read.

    Returns:
        The objects, and the size of all their pickles in bytes.
    """
    places = {each[2:4] for each in items if each.nbytes == chunk_bytes.get(each[:2])}
    headers: dict[tuple[str, int], Mapping[str, Any]] = {place: {} for place in places}

    async def header(place: tuple[str, int]) -> None:
        headers[place], _ = await read_header(store, infos[place[0]], place[1])

    await for_each(sorted(places), header, at_once=AT_ONCE)
    found = {each[:2]: headers[each[2:4]][each.name] for each in items if each[2:4] in headers}
    pickled = 0
    others = sorted((each for each in items if each[2:4] not in headers), key=lambda each: each[2:])
    for number in range(0, len(others), _ITEMS_TOGETHER):
        together = others[number : number + _ITEMS_TOGETHER]
        ahead = await read_ahead(store, infos, chain.from_iterable(map(_ends, together)))
        for item in together:
            try:
                found[item[:2]], nbytes = await read_object(
                    ahead, infos[item.file], item.begin, item.nbytes, tail_bytes=_ITEM_TAIL_BYTES
                )
            except UnsupportedState as error:
                error.key = item.name
                raise
            pickled += nbytes
    return found, pickled


def _ends(item: _Item) -> Iterator[Range]:
    """Yield the ranges of an item where its structure is."""
    end = item.begin + item.nbytes
    yield Range(item.file, item.begin, min(item.begin + _ITEM_HEAD_BYTES, end))
    yield Range(item.file, max(item.begin, end - _ITEM_TAIL_BYTES), end)


def _chunk_bytes(described: Mapping[str, Record]) -> dict[tuple[str, tuple[int, ...]], int]:
    """Return the bytes of each chunk of a tensor without those of a file around it."""
    return {
        (name, _numbers(chunk.state["offsets"])): (
            prod(_numbers(chunk.state["sizes"])) * _dtype(about).itemsize
        )
        for name, about in described.items()
        if about.name != "BytesStorageMetadata"
        for chunk in about.state["chunks"]
    }


def _dtype(about: Record) -> torch.dtype:
    properties = about.state["properties"].state
    found = properties.get("dtype") or properties[""][0]
    if not isinstance(found, torch.dtype) or found not in NAMES:
        raise ValueError("a tensor has no dtype")
    return found


def _value(name: str, about: Record, found: Mapping[Any, Any]) -> Any:
    """Return the value of a name: a tensor of all its chunks, or an object."""
    if about.name == "BytesStorageMetadata":
        return found[name, None]
    shape, dtype = _numbers(about.state["size"]), NAMES[_dtype(about)]
    extents: list[Extent] = []
    lazy: str | None = None
    for chunk in about.state["chunks"]:
        lower, sizes = (_numbers(chunk.state[each]) for each in ("offsets", "sizes"))
        if 0 in sizes:
            continue
        part = found[name, lower]
        if isinstance(part, Unread):
            return part
        fits = isinstance(part, ForeignTensor) and (part.dtype, part.shape) == (dtype, sizes)
        if not fits or part.lazy != (part.lazy if lazy is None else lazy):
            raise InvalidExtent(
                f"A chunk of {name!r:.200} has not the shape {list(sizes)} and the {dtype} that "
                f"{METADATA} tells",
                key=METADATA,
            )
        lazy = part.lazy
        box = None if sizes == shape else (lower, tuple(map(add, lower, sizes)))
        extents += (each._replace(box=box) for each in part.extents)
    return ForeignTensor(dtype, shape, tuple(extents), lazy=lazy or "")


class _Nested(dict[Any, Any]):
    """A dict or list of the state, unlike a dict that is one value."""


def _put(state: _Nested, path: Sequence[Any], value: Any, name: str) -> None:
    """Put a value at its path, with lists as dicts of their places."""
    if len(path) > _MOST_DEPTH or any(type(key) not in (str, int) for key in path):
        raise ValueError("a path is too long, or no texts and numbers")
    *above, last = (_ListIndex(key) if type(key) is int else key for key in path)
    here: Any = state
    for key in above:
        here = here.setdefault(key, _Nested())
        if type(here) is not _Nested:
            break
    if type(here) is not _Nested or last in here:
        raise ValueError(f"the path of {name!r:.200} leads to another value")
    here[last] = value


class _ListIndex(int):
    """A place in a list; keys of dicts are text."""


def _restored(item: Any) -> Any:
    """Return a tree with its lists, and with what DCP loses of an optimizer's state.

    These are the numbers of its parameters, of which DCP makes text, and a state that is empty.
    """
    if type(item) is not _Nested:
        return item
    if any(type(key) is _ListIndex for key in item):
        if sorted(item) != list(range(len(item))):
            raise ValueError("a list lacks some of its places")
        return [_restored(item[number]) for number in range(len(item))]
    found = {key: _restored(each) for key, each in item.items()}
    groups, state = groups_of(found.get(PARAM_GROUPS)), found.get(STATE, {})
    if groups and isinstance(state, dict):
        listed = [number for group in groups for number in group.get("params", ())]
        numbers = {str(number): number for number in listed if type(number) is int}
        found[STATE] = {numbers.get(key, key): each for key, each in state.items()}
    return found
