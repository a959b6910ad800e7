"""Read the files of other programs: names that metadata tell, shards, JSON, ranges."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

from ckpipe.backend import Backend, ObjectInfo, for_each
from ckpipe.errors import (
    DuplicateName,
    InvalidManifest,
    MissingObject,
    ObjectNotFound,
    OversizedMetadata,
    UnsafePath,
)
from ckpipe.format.manifest import MAX_NUMBER
from ckpipe.types import first_of

MAX_METADATA_BYTES = 100_000_000
"""Bytes of the longest header or index that is read, as in the safetensors library. The memory for
it is about twenty times as large, and 33 times if its rows are as short as can be."""

MAX_PICKLE_BYTES = 64 << 20
"""Bytes of the longest pickle that is read; the memory for it is at most forty times as large."""

AT_ONCE = 16
"""Files of a foreign checkpoint whose metadata is read at the same time."""

LEGACY = b"\x80\x02\x8a\x0a"
"""The first bytes of a file of ``torch.save`` before torch 1.6."""

TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
"""The ends of the names of files of ``torch.save``."""

DAMAGED = "The file is truncated or damaged; copy or download it again"
BAD_JSON = "The file is damaged or no safetensors file; copy or download it again"

_BASE_CONTAINERS, _BYTES_PER_CONTAINER = 10_000, 12  # the shortest row has 54 bytes and three
_NEAR_BYTES, _MOST_JOINED = 64 << 10, 1 << 20
"""Bytes between ranges that are read together, and the most bytes of such a read."""


def check_named(name: object, there: Container[str], by: str) -> None:
    """Check that a file which metadata name lies directly in the folder.

    Args:
        name: The name.
        there: The names of the files in the folder.
        by: The file that names it.

    Raises:
        UnsafePath: If it is no plain name.
        MissingObject: If there is no such file.
    """
    if not isinstance(name, str) or "/" in name or "\\" in name or name in ("", ".", ".."):
        raise UnsafePath(f"It names the file {name!r:.200}", key=by)
    if name not in there:
        raise MissingObject(
            f"It names {name:.200}, which is not in the folder",
            key=by,
            hint="Copy or download the missing file",
        )


_SHARD = re.compile(r"(?:shard-(\d{1,9})-)?(.*)-(\d{1,9})-of-(\d{1,9})(\..*)")


def check_shards(names: Iterable[str]) -> None:
    """Check that none is missing of files that are numbered, as ``model-00001-of-00003`` is.

    Files of ranks, as ``shard-00001-model-00001-of-00001``, do not tell how many there were: the
    last ones may be missing.

    Args:
        names: The names of the files of a folder.

    Raises:
        MissingObject: If some are missing.
    """
    numbers: defaultdict[tuple[str, int | None], set[int]] = defaultdict(set)
    for name in names:
        found = _SHARD.fullmatch(name)
        if found is None:
            continue
        shard, before, number, count, after = found.groups()
        numbers[f"{before}-…-of-{count}{after}", int(count)].add(int(number))
        if shard is not None:
            numbers["shard-…", None].add(int(shard))
    for (kind, count), there in numbers.items():
        first = min(*there, 1)
        stop = max(there) + 1 if count is None else first + count
        missing = list(islice((n for n in range(first, stop) if n not in there), 9))
        if missing:
            raise MissingObject(
                f"The number {first_of(missing, 8)} of these files is not there",
                key=kind,
                hint="Copy or download the missing files; to load one file alone, name it"
                + ("" if count else ". If a rank had nothing to save, give later files its number"),
            )


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
    found = parse_json(data, index)
    weights = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(each, str) for each in weights.values()):
        raise InvalidManifest("The index has no weight_map of names and files", key=index)
    for name in dict.fromkeys(weights.values()):
        check_named(name, there, index)
    return weights


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


def parse_json(data: bytes, key: str) -> Any:
    if data.count(b"{") + data.count(b"[") > _BASE_CONTAINERS + len(data) // _BYTES_PER_CONTAINER:
        raise InvalidManifest(
            "This JSON has more objects and arrays than real files, which would take much memory",
            key=key,
            hint=BAD_JSON,
        )
    try:
        return json.loads(data, object_pairs_hook=_unique, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise InvalidManifest(f"This is no JSON: {error!r:.200}", key=key, hint=BAD_JSON) from None
    except DuplicateName as error:
        error.key = key
        raise


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise DuplicateName(f"The name {twice!r:.200} stands twice", hint=BAD_JSON)
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def are_sizes(found: Iterable[object]) -> bool:
    """Tell whether all objects are numbers that a size or an offset may be."""
    return all(type(each) is int and 0 <= each <= MAX_NUMBER for each in found)


class Reads(Protocol):
    """A store, or a part of one, that is read by ranges."""

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None: ...


async def read_metadata(
    store: Reads,
    info: ObjectInfo,
    offset: int = 0,
    size: int | None = None,
    *,
    most: int = MAX_METADATA_BYTES,
) -> bytes:
    """Read a header, index, directory or pickle whole.

    Args:
        store: The store.
        info: The file.
        offset: Its start in the file, in bytes.
        size: Its size in bytes; None for the rest of the file.
        most: The most bytes that are read; 100 MB if not given.

    Raises:
        OversizedMetadata: If it is larger.
        CorruptCheckpoint: If the file is gone or shorter by now.
        StoreError: If the store failed.
    """
    size = info.size - offset if size is None else size
    if size > most:
        raise OversizedMetadata(
            f"Its metadata have {size} bytes, more than the {most} that are read",
            key=info.key,
            hint="Load it with the program that wrote it, and save it with ckpipe or in more files",
        )
    return await read_range(store, info, offset, size)


async def read_range(store: Reads, info: ObjectInfo, offset: int, size: int) -> bytes:
    """Read a range of a foreign file that was found to have these bytes.

    Raises:
        StoreError: If the store failed.
        CorruptCheckpoint: If the file is gone or shorter by now.
    """
    buffer = bytearray(size)
    if size:
        try:
            await store.read_into(info.key, offset, memoryview(buffer))
        except ObjectNotFound as error:
            raise MissingObject("The file is gone", key=info.key) from error
    return bytes(buffer)


class Range(NamedTuple):
    """Bytes of a file."""

    file: str
    begin: int
    end: int


def join_near(ranges: Iterable[Range]) -> list[tuple[Range, int]]:
    """Join ranges that lie near each other, since a read costs more than the bytes between them.

    Args:
        ranges: The ranges, by files and by where they begin.

    Returns:
        The joined ranges, each with the number of those that it joins.
    """
    found: list[tuple[Range, int]] = []
    for file, begin, end in ranges:
        last, count = found[-1] if found else (Range("", 0, 0), 0)
        near = last.file == file and begin - last.end < _NEAR_BYTES
        if near and last.begin <= begin and end - last.begin < _MOST_JOINED:
            found[-1] = Range(file, last.begin, max(last.end, end)), count + 1
        else:
            found.append((Range(file, begin, end), 1))
    return found


class ReadAhead:
    """A store of which some ranges have been read."""

    def __init__(self, store: Backend, ranges: Mapping[Range, bytes]) -> None:
        self._store, self._ranges = store, sorted(ranges.items())

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        number = bisect_right(self._ranges, (key, offset), key=lambda each: each[0][:2]) - 1
        if number >= 0 and self._ranges[number][0].file == key:
            there, data = self._ranges[number]
            found = data[offset - there.begin :][: len(buffer)]
            if len(found) == len(buffer):
                buffer[:] = found
                return
        await self._store.read_into(key, offset, buffer)


async def read_ahead(
    store: Backend, infos: Mapping[str, ObjectInfo], ranges: Iterable[Range]
) -> ReadAhead:
    """Read ranges of files, those near each other together.

    Args:
        store: The store.
        infos: The files by their keys.
        ranges: As for :func:`join_near`.

    Raises:
        As :func:`read_range` does.
    """
    joined = [each for each, _ in join_near(ranges)]
    read = await for_each(
        joined,
        lambda each: read_range(store, infos[each.file], each.begin, each.end - each.begin),
        at_once=AT_ONCE,
    )
    return ReadAhead(store, dict(zip(joined, read, strict=True)))
