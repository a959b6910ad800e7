"""The virtual manifest: a nested state whose tensors lie in files of another program."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckpipe.backend import ObjectInfo
from ckpipe.catalog.opened import ForeignFile
from ckpipe.errors import CorruptCheckpoint, InvalidExtent, InvalidManifest, UnsupportedState
from ckpipe.foreign.files import DAMAGED
from ckpipe.foreign.pickles import Record, RecordOf, Unread, plain_of
from ckpipe.format.boxes import Box
from ckpipe.format.check import check_virtual
from ckpipe.format.labels import Json, encode_key, join, unique_label
from ckpipe.format.manifest import (
    Chunk,
    Entry,
    Layout,
    ManifestDocument,
    PerRank,
    RankManifest,
    Structure,
    TensorRow,
)
from ckpipe.format.tree import Node
from ckpipe.interpreter import gc_paused
from ckpipe.state.values import UNREAD, NotInline, encode_value
from ckpipe.types import CheckpointId, first_of

logger = logging.getLogger("ckpipe")

MOST_NODES = 3_000_000
"""Most tensors, values and containers of a foreign state; each takes 200 bytes."""

_NODE_BYTES = 128
"""Bytes of a name or value that count as one node more; a pickle can name a long one many times."""

_MOST_DEPTH = 200
"""Most containers around a value: other programs nest a few, hostile files many."""


class Extent(NamedTuple):
    """The bytes of one box of a tensor in a foreign file.

    Attributes:
        file: The key of the file.
        begin: The start of the memory that holds the box, in the file, in bytes.
        nbytes: The size of this memory. Tensors of one memory share it again after a fresh load.
        offset: The start of the box in the memory, in bytes.
        stride: Its strides in elements; None if it lies row by row.
        box: Its lower and upper bounds in the tensor; None for all of it.
    """

    file: str
    begin: int
    nbytes: int
    offset: int = 0
    stride: tuple[int, ...] | None = None
    box: Box | None = None


@dataclass(slots=True, unsafe_hash=True)  # as TensorRow
class ForeignTensor:
    """A tensor in foreign files.

    Args:
        dtype: Its torch dtype's name, ``float32``.
        shape: Its shape.
        extents: The bytes of its boxes.
        lazy: Its lazy bits: any of ``c`` (conjugate) and ``n`` (negative).
        kind: ``tensor`` or ``parameter``.
        requires_grad: Whether it collects gradients.
    """

    dtype: str
    shape: tuple[int, ...]
    extents: tuple[Extent, ...]
    lazy: str = ""
    kind: str = "tensor"
    requires_grad: bool = False


@gc_paused()
def virtual_manifest(
    state: Any, files: Iterable[ObjectInfo], source: str, *, most_nodes: int = MOST_NODES
) -> ManifestDocument:
    """Describe a foreign checkpoint as ckpipe's own index would.

    Args:
        state: Dicts, lists and tuples with plain values, and a :class:`ForeignTensor` for each
            tensor. Any other object is refused by its label, if a load asks for it.
        files: The files that hold the tensors.
        source: The place of the checkpoint, without secrets.
        most_nodes: The most nodes of the state, if fewer than 3 million; more are refused.

    Raises:
        InvalidExtent: If bytes lie outside their file, or a box outside its tensor.
        InvalidManifest: If there is another contradiction, or the state is too large.
    """
    listed = list(files)
    made = _Tables(source, {each.key: (number, each.size) for number, each in enumerate(listed)})
    made.most_nodes = min(most_nodes, MOST_NODES)
    tree = made.node(state, "", 0)
    if made.plain:
        classes = [
            f"{name} ({first_of([f'{each!r:.200}' for each in labels], 3)})"
            for name, labels in made.plain.items()
        ]
        logger.info("%s: plain values are read in place of %s", source, "; ".join(classes))
    document = ManifestDocument(
        kind="index",
        id=CheckpointId("foreign", 0, 0),
        world_size=1,
        structures=(Structure(tree, tuple(made.rows), len(made.values)),),
        layouts=(Layout(made.entries, made.chunks),),
        parts=(
            RankManifest(
                rank=0,
                structure=0,
                layout=0,
                values=tuple(made.values),
                files=tuple(ForeignFile(each.key, each.size, 0, 0, info=each) for each in listed),
                checksums=(),
                token="",
                started="",
                writer={},
            ),
        ),
        per_rank=(PerRank(),),
        source=source,
    )
    try:
        check_virtual(document)
    except CorruptCheckpoint as error:
        error.key = error.key or (listed[0].key if len(listed) == 1 else source)
        raise
    return document


class _Tables:
    """The tables of a virtual manifest while its state is walked."""

    def __init__(self, source: str, files: dict[str, tuple[int, int]]) -> None:
        self.rows: list[TensorRow] = []
        self.values: list[Json] = []
        self.entries: list[Entry] = []
        self.chunks: list[Chunk] = []
        self.most_nodes = MOST_NODES
        self.plain: dict[str, list[str]] = {}
        self._source, self._files, self._nodes = source, files, 0
        self._above: list[int] = []
        self._labels: set[str] = set()
        self._known: dict[tuple[int, int, int], int] = {}
        self._tensors: dict[int, int] = {}

    def node(self, item: Any, label: str, depth: int) -> Node:
        if isinstance(item, Record):
            self._nodes += len(item.args) + len(item.state)
            name, item = item.name, plain_of(item)
            if not isinstance(item, Unread):
                self.plain.setdefault(name, []).append(label)
        self._nodes += 1 + len(label) // _NODE_BYTES
        if type(item) in (set, frozenset):
            self._nodes += len(item)
        if type(item) in (str, bytes):
            self._nodes += len(item) // _NODE_BYTES
        if self._nodes > self.most_nodes:
            raise InvalidManifest(
                f"The state has more than {self.most_nodes} items: no real checkpoint has",
                key=label[:200],
            )
        if depth > _MOST_DEPTH:
            item = Unread(f"an object in more than {_MOST_DEPTH} others")
        if type(item) in (dict, OrderedDict, Counter, list, tuple):
            if id(item) in self._above[:depth]:
                item = Unread("an object that contains itself")
            self._above[depth:] = [id(item)]
        if isinstance(item, ForeignTensor):
            return Node("tensor", self._tensor(item, label))
        keys: list[Json] = []
        if type(item) in (dict, OrderedDict, set, frozenset):
            try:
                keys = [encode_key(key, label) for key in item]
            except UnsupportedState:
                self._nodes += len(item)
                item = Unread(f"a {type(item).__name__} with keys that ckpipe does not keep")
        if type(item) in (dict, OrderedDict):
            kind = "dict" if type(item) is dict else "ordered_dict"
            nodes = [self.node(item[key], join(label, key), depth + 1) for key in item]
            attributes = dict(vars(item)) if kind == "ordered_dict" else {}
            more = self.node(attributes, join(label, "__dict__"), depth + 1) if attributes else None
            return Node(kind, None, keys, nodes, more)
        if type(item) is Counter:
            counts = self.node(dict(item), label, depth + 1)
            return Node("registered", "collections:Counter", nodes=[counts])
        if type(item) in (list, tuple):
            nodes = [self.node(each, join(label, n), depth + 1) for n, each in enumerate(item)]
            return Node(type(item).__name__, nodes=nodes)
        if type(item) in (set, frozenset):
            return Node(type(item).__name__, keys=keys)
        self.values.append(self._value(item))
        return Node("value", len(self.values) - 1)

    def _value(self, item: Any) -> Json:
        if not isinstance(item, Unread):
            try:
                return encode_value(item)
            except NotInline:
                kind = f"an object of {type(item).__module__}.{type(item).__qualname__}"
                if callable(item):
                    kind = item.name if isinstance(item, RecordOf) else "a class or function"
                item = Unread(f"{kind}, which ckpipe does not keep")
        return [UNREAD, item.what, self._source]

    def _tensor(self, tensor: ForeignTensor, label: str) -> int:
        number = self._tensors.get(id(tensor))
        if number is not None:
            return number
        number = self._tensors[id(tensor)] = len(self.rows)
        self.rows.append(
            TensorRow(
                unique_label(label, self._labels),
                tensor.dtype,
                tensor.shape,
                kind=tensor.kind,
                requires_grad=tensor.requires_grad,
                lazy=tensor.lazy,
            )
        )
        for each in tensor.extents:
            stride = each.stride if each.stride is None or tensor.shape else None
            entry = self._entry(each, label)
            self.chunks.append(Chunk(number, entry, each.offset, stride, None, each.box))
        return number

    def _entry(self, extent: Extent, label: str) -> int:
        file, size = self._files[extent.file]
        if not 0 <= extent.begin <= extent.begin + extent.nbytes <= size:
            raise InvalidExtent(
                f"The bytes {extent.begin} to {extent.begin + extent.nbytes} of {label!r:.200} are "
                f"not in {extent.file}, which has {size}",
                key=extent.file,
                hint=DAMAGED,
            )
        place = file, extent.begin, extent.nbytes
        known = self._known.get(place)
        if known is None:
            known = self._known[place] = len(self.entries)
            name = f"{extent.begin}+{extent.nbytes}"
            shape = (extent.nbytes,)
            self.entries.append(Entry(name, "U8", shape, file, extent.begin, extent.nbytes))
        return known
