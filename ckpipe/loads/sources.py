"""Where the elements of a tensor are, over all parts of a checkpoint.

Theory. What a rank wrote stands in its own part as chunks without an owner. All of these together
are everything that the checkpoint holds of a tensor, so a rank that loads finds any element by
label, shape and dtype among them. Chunks with an owner say which of these a rank shares; they are
followed first, since a rank that loads what it saved needs nothing else then, and no other part
is looked at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from ckpipe.format.boxes import Box, whole
from ckpipe.format.layouts import ChunkColumns, chunk_columns_at_hand
from ckpipe.format.manifest import Bundle, ChunkRow, Layout, TensorRow

Candidate = tuple[int, ChunkRow]
"""The number of the part whose entries a chunk points into, and the chunk."""

_Key = tuple[str, tuple[int, ...], str]


class Elsewhere(Exception):
    """What is looked for may be in parts that were not read: the index has all."""


class Sources:
    """Finds chunks of tensors.

    Args:
        bundle: The checkpoint, or some of its parts. In an index, a part's number is its rank.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._held: dict[int, Held] = {}
        self._by_part: dict[int, Held] = {}
        self._numbers: dict[int, dict[str, int]] = {}
        self._everything: dict[_Key, list[Candidate]] | None = None

    def named_by(self, part: int, tensor: int) -> list[Candidate]:
        """The chunks that a part lists of a tensor, each where it was written.

        What cannot be followed is left out, so that the elements are missing.

        Args:
            part: The number of the part.
            tensor: The number of the tensor in its structure.

        Raises:
            Elsewhere: If another rank's part, which is not here, says where it is.
        """
        held = self._by_part.get(part) or self.held(part)
        rows = held.by_tensor.get(tensor, ())
        if len(rows) == 1 and (chunk := rows[0]).owner is None:
            return [(part, chunk)]
        found: list[Candidate] = []
        for chunk in rows:
            if chunk.owner is None:
                found.append((part, chunk))
            else:
                found += self._written(chunk.owner, chunk, self.row(part, tensor))
        return found

    def everywhere(self, row: TensorRow) -> list[Candidate]:
        """All chunks that any rank wrote of the tensor of a label, shape and dtype.

        Raises:
            Elsewhere: If not all parts are here.
        """
        if not self._bundle.whole:
            raise Elsewhere
        if self._everything is None:
            self._everything = self._gathered()
        return self._everything.get(_key(row), [])

    def held(self, part: int) -> Held:
        """The chunks of a part, by tensor."""
        found = self._by_part.get(part)
        if found is None:
            layout = self._bundle.parts[part].layout
            if layout not in self._held:
                self._held[layout] = Held(self._bundle.layouts[layout])
            found = self._by_part[part] = self._held[layout]
        return found

    def row(self, part: int, tensor: int) -> TensorRow:
        """What a part's structure says of a tensor."""
        return self._bundle.structures[self._bundle.parts[part].structure].tensors[tensor]

    def number_in(self, part: int, row: TensorRow) -> int | None:
        """The number that a part has for the tensor of a label, shape and dtype, if it has it."""
        structure = self._bundle.parts[part].structure
        rows = self._bundle.structures[structure].tensors
        if structure not in self._numbers:
            self._numbers[structure] = {each.label: n for n, each in enumerate(rows)}
        number = self._numbers[structure].get(row.label)
        return number if number is not None and _key(rows[number]) == _key(row) else None

    def _written(self, owner: int, chunk: ChunkRow, row: TensorRow) -> list[Candidate]:
        """The chunk of the owner that another rank's chunk stands for."""
        part = self._bundle.number_of(owner)
        if part is None:
            if self._bundle.whole:
                return []
            raise Elsewhere
        if chunk.entry is not None:
            return [(part, chunk)]
        number = self.number_in(part, row)
        rows = () if number is None else self.held(part).by_tensor.get(number, ())
        wanted = chunk_box(chunk, row.shape)
        own = (each for each in rows if each.owner is None)
        return [(part, each) for each in own if chunk_box(each, row.shape) == wanted][:1]

    def _gathered(self) -> dict[_Key, list[Candidate]]:
        found: defaultdict[_Key, list[Candidate]] = defaultdict(list)
        told: list[tuple[Callable[[Candidate], object], Candidate]] = []
        lists = [[found[_key(row)] for row in each.tensors] for each in self._bundle.structures]
        for number, part in enumerate(self._bundle.parts):
            by_tensor = lists[part.structure]
            for chunk in self._bundle.layouts[part.layout].chunks:
                if chunk.owner is None:
                    by_tensor[chunk.tensor].append((number, chunk))
                elif chunk.entry is not None and chunk.owner < len(self._bundle.parts):
                    told.append((by_tensor[chunk.tensor].append, (chunk.owner, chunk)))
        # Behind what the ranks say of themselves, and nearly always the same once more.
        for append, candidate in told:
            append(candidate)
        return found


class Held:
    """The chunks of a layout by tensor.

    Args:
        layout: The layout.

    Attributes:
        entry_count: How many entries the layout has.
        shared: The layout's own entries that are memory of several tensors, or of one with strides.
        plain: The entry of each tensor that is one chunk, of all of it, row by row from the start
            of an entry that no other tensor is in, and lay without gaps when it was saved.
    """

    def __init__(self, layout: Layout) -> None:
        self.entry_count = len(layout.entries)
        self.shared: set[int] = set()
        self._layout = layout
        self._by_tensor: Mapping[int, Sequence[ChunkRow]] | None = None
        columns = chunk_columns_at_hand(layout)
        plain = None if columns is None else self._all_plain(columns)
        self.plain = self._find() if plain is None else plain

    @property
    def by_tensor(self) -> Mapping[int, Sequence[ChunkRow]]:
        """The chunks of each tensor that has some."""
        found = self._by_tensor
        if found is None:
            chunks = self._layout.chunks
            found = self._by_tensor = {chunk.tensor: (chunk,) for chunk in chunks}
        return found

    def _all_plain(self, chunks: ChunkColumns) -> dict[int, int] | None:
        """What all chunks are if all are plain, as nearly always: a short way."""
        tensor, entry, offset, *others = chunks
        if any(offset) or any(each.count(None) < len(each) for each in others):
            return None
        entries = [number for number in entry if number is not None]
        found = dict(zip(tensor, entries, strict=False))
        apart = len(found) == len(tensor) == len(entries) == len(set(entries))
        fits = min(entries, default=0) >= 0 and max(entries, default=-1) < self.entry_count
        return found if apart and fits else None

    def _find(self) -> dict[int, int]:
        """Looks at chunks one by one; returns those that are plain."""
        by_tensor: defaultdict[int, list[ChunkRow]] = defaultdict(list)
        for chunk in self._layout.chunks:
            by_tensor[chunk.tensor].append(chunk)
        self._by_tensor = by_tensor
        own = [
            (chunk.entry, chunk)
            for chunk in self._layout.chunks
            if chunk.owner is None and chunk.entry is not None
        ]
        holder: dict[int, int] = {}
        for entry, chunk in own:
            first = holder.setdefault(entry, chunk.tensor)
            if chunk.stride is not None or first != chunk.tensor:
                self.shared.add(entry)
        return {
            chunk.tensor: entry
            for entry, chunk in own
            if entry not in self.shared
            and len(by_tensor[chunk.tensor]) == 1
            and self._is_plain(chunk)
        }

    def _is_plain(self, chunk: ChunkRow) -> bool:
        """Whether a chunk that is the rank's own says of itself what is said of plain ones."""
        return (
            chunk.box is None
            and chunk.stride is None
            and chunk.original_stride is None
            and chunk.offset == 0
            and chunk.entry is not None
            and 0 <= chunk.entry < self.entry_count
        )


def chunk_box(chunk: ChunkRow, shape: Sequence[int]) -> Box:
    """Which part of a tensor a chunk is."""
    return whole(shape) if chunk.box is None else chunk.box


def _key(row: TensorRow) -> _Key:
    return row.label, row.shape, row.dtype
