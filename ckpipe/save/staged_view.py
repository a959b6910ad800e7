"""The state of a save as it lies in host memory: objects over the blocks that it was copied to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ckpipe.errors import UnsupportedTopology
from ckpipe.format.data_file import file_rows
from ckpipe.format.keys import LabelFilter
from ckpipe.format.manifest import ManifestDocument, RankManifest
from ckpipe.format.tree import shared_containers
from ckpipe.loading.chunks import StoredTensor, StoredTensors
from ckpipe.loading.fill import contiguous_stride, with_lazy_bits
from ckpipe.loading.match import Matching
from ckpipe.loading.saved_state import state_of_part
from ckpipe.loading.targets import Targets
from ckpipe.save.save import Save, StagedBlock

_MAX_ITEM = 16


class _LentTargets(Targets):
    """Tensors over the blocks of data files, in place of fresh ones."""

    def __init__(self, stored: StoredTensors, held: Sequence[StagedBlock]) -> None:
        super().__init__(stored, cast=False)
        self._block_bytes = len(held[0].block.view) if held else 1
        self._blocks = {(each.plan.file, each.plan.offset): each.block.tensor for each in held}
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
        """The bytes of an entry: a view where it lies in one block, else a copy.

        One and the same for all tensors that share it.
        """
        entry = self._entries.get(number)
        if entry is None:
            row, data = self.stored.data.entry(number), self.stored.data
            begin, done, pieces = data.begins[number], 0, []
            while done < row.nbytes:
                at = (begin + done) % self._block_bytes
                block = self._blocks[row.file, begin + done - at]
                pieces.append(block[at : min(self._block_bytes, at + row.nbytes - done)])
                done += pieces[-1].numel()
            none = torch.empty(0, dtype=torch.uint8, device="cpu")
            entry = pieces[0] if len(pieces) == 1 else torch.cat(pieces or [none])
            if aligned and entry.data_ptr() % _MAX_ITEM:
                entry = entry.clone()  # it may be of bytes, and hold tensors of larger items
            self._entries[number] = entry
        return entry


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
    fields = save.contents()
    rows = tuple(replace(row, device="cpu") for row in fields.structure.tensors)
    structure = replace(fields.structure, tensors=rows)
    headers = [0] * len(program.plan.files)
    part = RankManifest(
        rank=save.rank, structure=0, layout=0, values=fields.values,
        files=file_rows(program.plan.files, headers), checksums=(), token="", started="", writer={},
    )  # fmt: skip
    bundle = ManifestDocument("manifest", save.id, 1, (structure,), (program.plan.layout,), (part,))
    saved = state_of_part(bundle, 0)
    stored = StoredTensors(bundle, saved.rows, saved.homes)
    targets = _LentTargets(stored, held)
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
