"""Read files of ``torch.save``: tensors lie in a zip without compression, and are read in place.

Source: ``torch/serialization.py`` and ``caffe2/serialize/inline_container.cc`` of torch 2.13. The
records lie below one folder: ``data.pkl`` is the pickle of the object, ``data/<n>`` a storage,
``byteorder`` the order of bytes. The central directory has their sizes, and the local header of a
record has the length of the padding before its data.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from typing import Any, NamedTuple

import torch

from ckpipe.backend import Backend, ObjectInfo, for_each
from ckpipe.errors import DuplicateName, InvalidExtent, InvalidManifest, UnsupportedState
from ckpipe.foreign.files import (
    AT_ONCE,
    DAMAGED,
    LEGACY,
    MAX_PICKLE_BYTES,
    TORCH_FILES,
    Range,
    Reads,
    are_sizes,
    check_shards,
    join_near,
    read_metadata,
    read_range,
    together,
    weight_map,
)
from ckpipe.foreign.pickles import PLAIN, RECORDS, Unread, read_pickle
from ckpipe.foreign.virtual import Extent, ForeignTensor, virtual_manifest
from ckpipe.format.boxes import contiguous_stride
from ckpipe.format.dtypes import DTYPES, NAMES
from ckpipe.format.manifest import MAX_DIMENSIONS, ManifestDocument

_FIRST = (
    "pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.bin",
    "diffusion_pytorch_model.bin", "diffusion_pytorch_model.bin.index.json",
)  # fmt: skip
"""The files that count in a folder, in the order of transformers, peft and diffusers."""

_TAIL_BYTES = 256 << 10
_LOCAL = struct.Struct("<4s22xHH")

_STORAGES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16",
    "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8",
    "Bool": "bool", "ComplexDouble": "complex128", "ComplexFloat": "complex64",
}  # fmt: skip

_NOT_READ = {
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_qtensor": "a quantised tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor on the device meta, without data",
    "torch._utils._rebuild_device_tensor_from_numpy": "a tensor in the form of a numpy array",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "a tensor of a device without storage",
    "torch._utils._rebuild_wrapper_subclass": "a tensor that wraps others",
    "torch._utils._rebuild_parameter_with_state": "a parameter with attributes of its own",
    "torch._tensor._rebuild_from_type_v2": "a tensor of a subclass, or with attributes of its own",
}


_LAYOUTS = {str(each): each for each in (torch.strided, torch.sparse_coo, torch.sparse_csr,
            torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)}  # fmt: skip


class TorchSource:
    """A file of ``torch.save``, or a folder of Hugging Face's ``pytorch_model*.bin``."""

    name = "torch"

    def recognizes(self, listing: Sequence[ObjectInfo]) -> bool:
        """Tell whether the place is a file of torch, or has weights in such files."""
        names = {each.key for each in listing}
        alone = len(names) == 1 and min(names).endswith(TORCH_FILES)
        return alone or not names.isdisjoint(_FIRST)

    async def describe(
        self, store: Backend, listing: Sequence[ObjectInfo], place: str
    ) -> ManifestDocument:
        """Describe the saved object of a file, or the weights of a folder as one flat dict.

        Raises:
            UnsupportedState: If a file is of another machine, or of torch before 1.6.
            CorruptCheckpoint: If a file contradicts itself.
            StoreError: If the store failed.
        """
        there = {each.key: each for each in listing}
        weights: Mapping[str, str] = {}
        names = [next((name for name in _FIRST if name in there), listing[0].key)]
        if not place.endswith(names[0]):  # one of several files may be loaded by its name
            check_shards(names)
        if (index := names[0]).endswith(".index.json"):
            weights = weight_map(await read_metadata(store, there[index]), index, there)
            names = list(dict.fromkeys(weights.values()))
        files = await for_each(names, store.stat, at_once=AT_ONCE)
        found = await for_each(files, partial(read_object, store), at_once=AT_ONCE)
        state: Any = found[0][0]
        if weights:
            tensors = []
            for (each, _), file in zip(found, files, strict=True):
                if not isinstance(each, dict):
                    raise InvalidManifest("The file has no dict of weights", key=file.key)
                tensors.append(each)
            state = together(files, tensors, weights)
        most = 4 * sum(nbytes for _, nbytes in found) + 1000
        return virtual_manifest(state, files, place, most_nodes=most)


class _SavedStorage(NamedTuple):
    """A storage that a pickle names: its record, its dtype (None for bytes) and its bytes."""

    record: str
    dtype: str | None
    nbytes: int


_FindExtent = Callable[[_SavedStorage], Extent]


class _StorageClass(NamedTuple):
    """The class of a storage, by the dtype of its elements; None for bytes."""

    dtype: str | None


async def read_object(
    store: Reads,
    info: ObjectInfo,
    base: int = 0,
    size: int | None = None,
    *,
    tail_bytes: int = _TAIL_BYTES,
) -> tuple[Any, int]:
    """Return the object of a file of ``torch.save``, with tensors that are not read.

    It has placeholders of objects that ckpipe does not know.

    Reads the central directory, the pickle and the local headers.

    Args:
        store: The store.
        info: The file.
        base: The start of the zip in the file, in bytes.
        size: The size of the zip in bytes; None for the rest of the file.
        tail_bytes: The bytes at its end that are read first, in which the directory is looked for.

    Returns:
        The object, and the size of its pickle in bytes.

    Raises:
        UnsupportedState: If it is of another machine, or of torch before 1.6.
        CorruptCheckpoint: If the file contradicts itself.
        StoreError: If the store failed.
    """
    size = info.size - base if size is None else size
    records, end = await _directory(store, info, base, size, tail_bytes)
    folder = next((name for name in records if name.endswith("/data.pkl")), None)
    if folder is None:
        raise InvalidManifest("The zip has no data.pkl: it is no file of torch.save", key=info.key)
    prefix = folder.removesuffix("data.pkl")
    read = (folder, f"{prefix}byteorder")
    starts, known = await _data_starts(store, info, base, records, end, read)

    async def content(name: str) -> bytes:
        if name in known:
            return known[name]
        size = records[name].file_size
        return await read_metadata(store, info, base + starts[name], size, most=MAX_PICKLE_BYTES)

    if f"{prefix}byteorder" in records and await content(f"{prefix}byteorder") != b"little":
        raise UnsupportedState(
            "The file was written on a machine with another order of bytes",
            key=info.key,
            hint="Load it with torch.load and save it again here",
        )
    data = await content(folder)

    def extent(storage: _SavedStorage) -> Extent:
        name = f"{prefix}data/{storage.record}"
        if name not in records or records[name].file_size < storage.nbytes:
            raise InvalidExtent(f"The zip has no record {name!r:.100} of {storage.nbytes} bytes")
        return Extent(info.key, base + starts[name], storage.nbytes)

    return read_pickle(data, info.key, _known(extent), _persistent), len(data)


# The zip


class _BeforeTail(Exception):
    """Raised if bytes before the known end of a zip are needed, at an offset."""


class _Tail(io.RawIOBase):
    """The end of a file as the whole of it."""

    def __init__(self, data: bytes, size: int) -> None:
        self._data, self._size, self._at = data, size, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        if not 0 <= self._at <= self._size:
            raise OSError("an offset is outside the file")
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        begin = self._at - (self._size - len(self._data))
        if begin < 0:
            raise _BeforeTail(self._at)
        found = self._data[begin:] if size < 0 else self._data[begin : begin + size]
        self._at += len(found)
        return found


async def _directory(
    store: Reads, info: ObjectInfo, base: int, size: int, tail_bytes: int
) -> tuple[dict[str, zipfile.ZipInfo], int]:
    """Return the records of a zip by name, and the start of its central directory."""
    known = min(size, tail_bytes)
    while True:
        tail = await read_metadata(store, info, base + size - known, known)
        try:
            with zipfile.ZipFile(_Tail(tail, size)) as opened:
                found, end = opened.infolist(), opened.start_dir
            break
        except _BeforeTail as before:
            known = size - int(before.args[0])
        except Exception as error:  # any may come of any bytes
            head = await read_range(store, info, base, min(size, len(LEGACY)))
            raise _no_zip(info.key, head, error) from None
    records = {each.filename: each for each in found}
    if any("/code/__torch__" in name for name in records):
        raise UnsupportedState(
            "The file is TorchScript, a program with its weights, which ckpipe does not run",
            key=info.key,
            hint=f"Save its weights once: torch.save(torch.jit.load({info.key!r}).state_dict(), …)",
        )
    if len(records) < len(found):
        raise DuplicateName("Two records of the zip have the same name", key=info.key)
    for each in found:
        if each.compress_type or each.flag_bits & 1 or each.compress_size != each.file_size:
            raise UnsupportedState(
                f"The record {each.filename!r:.100} is compressed or encrypted, as torch.save "
                "writes none",
                key=info.key,
                hint="Load it with the program that wrote it, and save it with torch.save",
            )
    return records, end


def _no_zip(key: str, head: bytes, error: Exception) -> InvalidManifest | UnsupportedState:
    if head == LEGACY:
        return UnsupportedState(
            "The file is in the form of torch before 1.6, whose tensors cannot be read in place",
            key=key,
            hint=f"Convert it once: state = torch.load({key!r}, weights_only=True); "
            f"torch.save(state, {key!r})",
        )
    return InvalidManifest(f"This is no zip of torch.save: {error}", key=key, hint=DAMAGED)


async def _data_starts(
    store: Reads,
    info: ObjectInfo,
    base: int,
    records: Mapping[str, zipfile.ZipInfo],
    end: int,
    read: Container[str],
) -> tuple[dict[str, int], dict[str, bytes]]:
    """Return the start of the data of each record, by their local headers.

    Headers that are near each other are read together.

    Returns:
        The starts by name; and the data of those records to read that lie between headers.

    Raises:
        InvalidExtent: If a record is not where the directory says, or overlaps the next one.
    """
    ordered = sorted(records.values(), key=lambda each: each.header_offset)
    headers = [Range(info.key, each.header_offset, _most_end(each)) for each in ordered]
    left = iter(ordered)
    spans = [(span, list(islice(left, count))) for span, count in join_near(headers)]
    starts: dict[str, int] = {}
    known: dict[str, bytes] = {}

    async def look(joined: tuple[Range, list[zipfile.ZipInfo]]) -> None:
        (_, first, last), inside = joined
        if not 0 <= first < end:
            raise _misplaced(info.key)
        data = await read_range(store, info, base + first, min(last, end) - first)
        for each in inside:
            at = each.header_offset - first
            head = data[at : at + _LOCAL.size]
            if len(head) < _LOCAL.size:
                raise _misplaced(info.key)
            magic, names, extra = _LOCAL.unpack(head)
            at += _LOCAL.size
            name = data[at : at + names].decode("utf-8", "replace")
            if magic != b"PK\3\4" or name != each.orig_filename:
                raise _misplaced(info.key)
            at += names + extra
            starts[each.filename] = first + at
            if each.filename in read and at + each.file_size <= len(data):
                known[each.filename] = data[at : at + each.file_size]

    await for_each(spans, look, at_once=AT_ONCE)
    for here, behind in pairwise([*ordered, None]):
        limit = end if behind is None else behind.header_offset
        assert here is not None
        if starts[here.filename] + here.file_size > limit:
            raise _misplaced(info.key)
    return starts, known


def _most_end(record: zipfile.ZipInfo) -> int:
    """Return where the local header of a record ends at the latest: its name may be UTF-8."""
    return record.header_offset + _LOCAL.size + 4 * len(record.filename)


def _misplaced(key: str) -> InvalidExtent:
    return InvalidExtent(
        "A record of the zip is not where its directory says", key=key, hint=DAMAGED
    )


# The pickle


def _persistent(pid: Any) -> _SavedStorage:
    kind, storage, record, _, count = pid
    if kind != "storage" or not isinstance(storage, _StorageClass) or not isinstance(record, str):
        raise ValueError("a persistent id names no storage")
    if not are_sizes([count]):
        raise ValueError("a storage has a wrong size")
    item = 1 if storage.dtype is None else DTYPES[storage.dtype].itemsize
    return _SavedStorage(record, storage.dtype, count * item)


def _known(extent: _FindExtent) -> dict[str, Any]:
    """Return what a pickle of ``torch.save`` may name; ``extent`` finds the bytes of a storage."""
    return {
        **_KNOWN,
        "torch._utils._rebuild_tensor": partial(_tensor, extent),
        "torch._utils._rebuild_tensor_v2": partial(_tensor, extent),
        "torch._utils._rebuild_tensor_v3": partial(_tensor_of_dtype, extent),
    }


def _tensor(
    extent: _FindExtent,
    storage: _SavedStorage,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool = False,
    hooks: Any = None,
    metadata: Any = None,
    *,
    dtype: str | None = None,
) -> ForeignTensor | Unread:
    dtype = dtype or storage.dtype
    if dtype is None or type(requires_grad) is not bool:
        raise ValueError("a tensor has no dtype")
    if not are_sizes((offset, *shape, *stride)):
        raise ValueError("a size of a tensor is out of range")
    if len(shape) != len(stride) or len(shape) > MAX_DIMENSIONS:
        raise ValueError("a tensor has a wrong number of dimensions")
    if hooks or not dict(metadata or {}).keys() <= {"conj", "neg"}:
        return Unread("a tensor with hooks or metadata that ckpipe does not keep")
    lazy = "".join(name[0] for name in ("conj", "neg") if (metadata or {}).get(name))
    place = extent(storage)._replace(offset=offset * DTYPES[dtype].itemsize)
    if lazy or not (0 in shape or _is_contiguous(shape, stride)):
        place = place._replace(stride=tuple(stride))
    return ForeignTensor(dtype, tuple(shape), (place,), lazy=lazy, requires_grad=requires_grad)


def _tensor_of_dtype(extent: Any, storage: Any, offset: Any, shape: Any, stride: Any, grad: Any,
                     hooks: Any, dtype: Any, metadata: Any = None) -> Any:  # fmt: skip
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor has no dtype")
    name = NAMES[dtype]
    return _tensor(extent, storage, offset, shape, stride, grad, hooks, metadata, dtype=name)


def _parameter(data: ForeignTensor, requires_grad: bool, hooks: Any = None) -> ForeignTensor:
    if type(requires_grad) is not bool:
        raise ValueError("requires_grad is no bool")
    return replace(data, kind="parameter", requires_grad=requires_grad)


def _device(*args: Any) -> torch.device | Unread:
    try:
        return torch.device(*args)
    except RuntimeError:
        return Unread(f"the device {args!r:.100}, which this torch does not know")


_KNOWN: dict[str, Any] = {
    **PLAIN,
    **RECORDS,
    **{name: Unread(kind) for name, kind in _NOT_READ.items()},
    "torch._utils._rebuild_parameter": _parameter,
    "torch.storage.UntypedStorage": _StorageClass(None),
    "torch.UntypedStorage": _StorageClass(None),
    "torch.device": _device,
    "torch.Size": lambda numbers: torch.Size(numbers),
    "torch.serialization._get_layout": lambda name: _LAYOUTS.get(
        name, Unread("a layout of tensors that ckpipe does not know")
    ),
    **{f"torch.{name}Storage": _StorageClass(dtype) for name, dtype in _STORAGES.items()},
    **{f"torch.{name}": dtype for name, dtype in DTYPES.items()},
}


def _is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    steps = zip(shape, stride, contiguous_stride(shape), strict=True)
    return all(size == 1 or step == dense for size, step, dense in steps)
