"""Compute the norms of weights by layer over the steps of a run.

A batch of tensors is read from one checkpoint after the other, so each byte is read once, and host
memory holds two batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack, closing, suppress
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from ckpipe.catalog.inspect import batches, check_expansion, tensor_bytes
from ckpipe.catalog.opened import Opened
from ckpipe.errors import CheckpointNotFound, CorruptCheckpoint, UsageError
from ckpipe.foreign.source import Place
from ckpipe.format.labels import label_filter
from ckpipe.loading.labelled_tensors import LabelledTensors
from ckpipe.memory.arena import Arena
from ckpipe.pages.facts import HeatMap, part_of
from ckpipe.reading.comparison import Comparison, flat, slices
from ckpipe.settings import Settings
from ckpipe.state.training_form import heads_in
from ckpipe.threads import in_thread
from ckpipe.types import CheckpointInfo, first_of

_Table = NDArray[np.float64]

MOST_STEPS, MOST_LAYERS = 24, 150
"""The most checkpoints of which weights are read, and the most layers of a heat map."""

_BATCH_BYTES = 128 << 20


async def heat_map(
    place: Place,
    settings: Settings,
    complete: Sequence[CheckpointInfo],
    match: Sequence[str] | None,
) -> HeatMap:
    """Compute the norms of the weights of a run.

    Args:
        place: The root.
        settings: The lanes, and the size of blocks.
        complete: The complete checkpoints, the oldest first; of many every n-th is read.
        match: Globs of the labels of the weights; None for those of the model.

    Raises:
        UsageError: If no tensor matches the globs.
        StoreError: If the store failed.
    """
    every = max(1, -(-len(complete) // MOST_STEPS))
    opened: list[Opened] = []
    async with AsyncExitStack() as stack:
        for each in complete[::-1][::every][::-1]:
            with suppress(CheckpointNotFound, CorruptCheckpoint):  # it was deleted meanwhile
                opened.append(await stack.enter_async_context(place.opened(each, lease=False)))
        layers = _layers(opened, match)
        sums = await _filled(opened, layers, settings)
    names, steps = [*dict.fromkeys(layers.values())], [each.document.id.step for each in opened]
    notes = [f"{len(opened)} of {len(complete)} checkpoints"] * (len(opened) < len(complete))
    notes += [f"the first {MOST_LAYERS} of {len(names)} layers"] * (len(names) > MOST_LAYERS)
    if unread := sorted(sums.unread):
        notes.append(f"without step {first_of([steps[each] for each in unread])}, not readable")
        sums.seen[:, unread] = sums.compared[:, unread] = 0
    with np.errstate(divide="ignore", invalid="ignore"):
        change = np.where(sums.change == 0, 0.0, np.sqrt(sums.change / sums.base))

    def table(values: _Table, known: _Table) -> dict[str, tuple[float | None, ...]]:
        rows = np.ma.array(values, mask=known == 0).tolist()  # None where it is unknown
        return dict(zip(names[:MOST_LAYERS], map(tuple, rows), strict=False))

    norms, changes = table(np.sqrt(sums.norm), sums.seen), table(change, sums.compared)
    return HeatMap(tuple(steps), norms, changes, ", ".join(notes))


class _Sums:
    """The sums of squares by layer and step: of weights, of their changes, and of the base."""

    def __init__(self, rows: int, columns: int) -> None:
        self.unread = set[int]()
        self.norm, self.change, self.base, self.seen, self.compared = np.zeros((5, rows, columns))

    def add(self, row: int, column: int, now: torch.Tensor, before: torch.Tensor | None) -> None:
        """Add a tensor of a step, and its change since the step before; blocking."""
        self.seen[row, column] = 1
        for each in slices(flat(now)):
            self.norm[row, column] += float(each.abs().double().square().sum())
        if before is not None and (before.shape, before.dtype) == (now.shape, now.dtype):
            comparison = Comparison(before, now)
            for a, b in comparison.pieces():
                comparison.add(a, b)
            self.change[row, column] += comparison.squares
            self.base[row, column] += comparison.base
            self.compared[row, column] = 1


def _layers(opened: Sequence[Opened], match: Sequence[str] | None) -> dict[str, str]:
    """Return the labels of the weights of all checkpoints, each with its layer."""
    select, found = label_filter(match), dict[str, str]()
    for structure in (each for one in opened for each in one.document.structures):
        heads = heads_in([row.label for row in structure.tensors])
        parts = {row.label: part_of(row.label, heads) for row in structure.tensors}
        wanted = {"model"} & set(parts.values()) or {"other"}
        for row in structure.tensors:
            chosen = select(row.label) if match else parts[row.label] in wanted
            if chosen and row.dtype.startswith(("float", "bfloat", "complex")):
                found[row.label] = layer_of(row.label)
    if match and not found:
        told = f"No tensor matches {' or '.join(match)}"
        raise UsageError(told, hint="`ckpipe info` lists the names")
    return found


def layer_of(label: str) -> str:
    """Return the layer of a weight: its name up to the first number, or without its last key."""
    keys = label.split(".")
    number = next((n for n, key in enumerate(keys) if n and key.isdecimal()), None)
    return ".".join(keys[: number + 1] if number is not None else keys[:-1] or keys)


async def _filled(opened: Sequence[Opened], layers: dict[str, str], settings: Settings) -> _Sums:
    sizes: dict[str, int] = {}
    for each in opened:
        rows = [row for structure in each.document.structures for row in structure.tensors]
        mine = {row.label: tensor_bytes(row) for row in rows if row.label in layers}
        hint = "Leave the tensor out with match="
        check_expansion("Norms of weights", [each.document], sum(mine.values()), mine, hint)
        sizes |= mine
    make = partial(LabelledTensors, labels=layers)
    tensors = [await in_thread(make, each) for each in opened]
    rows_of = {name: row for row, name in enumerate(dict.fromkeys(layers.values()))}
    sums, lanes = _Sums(len(rows_of), len(opened)), settings.load.lanes
    with closing(Arena(settings.staging.block_bytes)) as arena:
        for batch in batches(layers, sizes.__getitem__, _BATCH_BYTES):
            before: dict[str, torch.Tensor] = {}
            for column, saved in enumerate(tensors):
                try:
                    now = {} if column in sums.unread else await saved.read(batch, arena, lanes)
                except CorruptCheckpoint:  # it is damaged, or was deleted meanwhile
                    sums.unread.add(column)
                    now = {}
                for label, tensor in now.items():
                    row = rows_of[layers[label]]
                    await in_thread(sums.add, row, column, tensor, before.get(label))
                before = now
    return sums
