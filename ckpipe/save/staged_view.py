"""The state of a save as it lies in host memory: objects over the blocks that it was copied to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ckpipe.errors import UnsupportedTopology
from ckpipe.format.data_file import file_rows
from ckpipe.format.keys import LabelFilter
from ckpipe.format.manifest import ManifestDocument, RankManifest, Structure, TensorRow
from ckpipe.format.tree import shared_containers
from ckpipe.loading.chunks import StoredTensor, StoredTensors
from ckpipe.loading.fill import contiguous_stride, with_lazy_bits
from ckpipe.loading.match import Matching
from ckpipe.loading.saved_state import state_of_part
from ckpipe.loading.targets import Targets
from ckpipe.save.save import Save, StagedBlock
from ckpipe.state.flatten import Captured

_MAX_ITEM = 16


class FileImage:
    """The bytes of one save's data files, as they lie in blocks.

    Args:
        blocks: All blocks of all files.
        block_bytes: The size of a block; only the last of a file holds less.
    """

    def __init__(self, blocks: Sequence[StagedBlock], block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._blocks = {(each.plan.file, each.plan.offset): each for each in blocks}

    def bytes_of(self, file: int, begin: int, nbytes: int) -> torch.Tensor:
        """A range of a file: a view where it lies in one block, else a copy.

        Args:
            file: The number of the file.
            begin: The first byte.
            nbytes: How many.
        """
        pieces = []
        done = 0
        while done < nbytes:
            at = (begin + done) % self._block_bytes
            block = self._blocks[file, begin + done - at].block
            piece = block.tensor[at : min(self._block_bytes, at + nbytes - done)]
            pieces.append(piece)
            done += piece.numel()
        if not pieces:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class _LentTargets(Targets):
    """Tensors over an image of files, in place of fresh ones."""

    def __init__(self, stored: StoredTensors, image: FileImage) -> None:
        super().__init__(stored, cast=False)
        self._image = image
        self._lent: dict[int, torch.Tensor] = {}
        self._entries: dict[int, torch.Tensor] = {}

    def fresh(self, stored: StoredTensor) -> torch.Tensor:
        tensor = self._lent.get(stored.number)
        if tensor is None:
            tensor = self._lent[stored.number] = self._seen(stored)
        return tensor

    def _seen(self, stored: StoredTensor) -> torch.Tensor:
        (piece,) = self.stored.copies(stored)
        entry = self._entry(piece.entry, aligned=piece.shared)
        flat = entry[piece.start : piece.stop].view(stored.dtype)
        stride = (piece.stride if piece.shared else None) or contiguous_stride(stored.shape)
        tensor = flat.as_strided(stored.shape, stride)
        return with_lazy_bits(tensor, stored.row.lazy) if piece.shared else tensor

    def _entry(self, number: int, *, aligned: bool) -> torch.Tensor:
        """The bytes of an entry; one and the same for all tensors that share it."""
        entry = self._entries.get(number)
        if entry is None:
            row = self.stored.data.entry(number)
            entry = self._image.bytes_of(row.file, self.stored.data.begins[number], row.nbytes)
            if aligned and entry.data_ptr() % _MAX_ITEM:
                entry = entry.clone()  # it may be of bytes, and hold tensors of larger items
            self._entries[number] = entry
        return entry


def _rows(captured: Captured) -> tuple[TensorRow, ...]:
    return tuple(
        TensorRow(
            leaf.label, leaf.dtype, leaf.full_shape, "cpu", leaf.kind, leaf.detail,
            leaf.requires_grad, leaf.lazy, leaf.attributes,
        )
        for leaf in captured.tensors
    )  # fmt: skip


def lent_state(save: Save, held: Sequence[StagedBlock]) -> Any:
    """The state of a save over the blocks that hold it.

    Args:
        save: A save that is staged.
        held: All of its blocks; the state may be used for as long as they are held.

    Raises:
        UnsupportedTopology: If this rank stages a part of the state only.
    """
    captured, program = save.captured, save.program
    assert captured is not None
    assert program is not None
    for chunk in program.plan.layout.chunks:
        if chunk.owner is not None or chunk.box is not None:
            raise UnsupportedTopology(
                "This rank stages only a part of the tensor",
                key=captured.tensors[chunk.tensor].label,
                hint="Leave what several ranks hold out of the save, or load the checkpoint",
            )
    rows = _rows(captured)
    headers = [0] * len(program.plan.files)
    part = RankManifest(
        rank=save.rank, structure=0, layout=0, values=tuple(captured.values),
        files=file_rows(program.plan.files, headers), checksums=(), token="", started="", writer={},
    )  # fmt: skip
    structure = Structure(captured.tree, rows, len(captured.values))
    bundle = ManifestDocument("manifest", save.id, 1, (structure,), (program.plan.layout,), (part,))
    saved = state_of_part(bundle, 0)
    stored = StoredTensors(bundle, saved.rows, saved.homes)
    block_bytes = len(held[0].block.view) if held else 1
    targets = _LentTargets(stored, FileImage(held, block_bytes))
    attributes = (row.attributes for row in rows if row.attributes)
    definitions = shared_containers([captured.tree, *attributes])
    matching = Matching(
        saved,
        targets,
        definitions,
        select=LabelFilter(),
        strict=True,
        pickling=True,
        distributed=False,
    )
    with torch.no_grad():
        return matching.plan(captured.tree, "")()
