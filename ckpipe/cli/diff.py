"""The work of ``diff``: compare two checkpoints in batches and show their differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import RenderableType
from rich.text import Text

from ckpipe.backend import Backend
from ckpipe.checkpoints.comparing import (
    Comparison,
    StructureDifference,
    TensorDifference,
    batches,
    compare_structures,
    labels_of,
    sizes_of,
)
from ckpipe.checkpoints.discovery import naming_one, read_index
from ckpipe.checkpoints.inspection import check_expansion, labels_per_rank
from ckpipe.checkpoints.leases import reading
from ckpipe.cli.running import FOUND, OK, chosen
from ckpipe.cli.screen import Screen, Share, one_line, table
from ckpipe.format.keys import LabelFilter, label_filter
from ckpipe.format.manifest import Bundle
from ckpipe.loads.tensor_reading import read_tensors
from ckpipe.memory.arena import Arena
from ckpipe.settings import Settings
from ckpipe.stores.opening import Access, open_store
from ckpipe.tasks.awaited_threads import in_thread

BATCH_BYTES = 128 << 20
"""How many bytes of each checkpoint are held in memory, unless a single tensor is larger."""

Side = tuple[Backend, Bundle]


@dataclass(frozen=True, slots=True)
class Sides:
    """What to compare.

    Args:
        urls: Where the two checkpoints lie.
        steps: Their steps or ids.
        patterns: Globs of the names to look at; None for all.
        expanded: Whether expanded tensors may take far more than the checkpoints store.
    """

    urls: tuple[str, str]
    steps: tuple[str, str]
    patterns: Sequence[str] | None = None
    expanded: bool = False

    @property
    def select(self) -> LabelFilter:
        """Which names to look at."""
        return label_filter(self.patterns)


async def differences(screen: Screen, sides: Sides, *, structure: bool) -> int:
    """Compares two checkpoints; returns the exit code.

    Args:
        screen: Where the result goes.
        sides: What to compare.
        structure: Whether to compare no values of tensors.
    """
    settings = screen.settings
    with screen.meter("comparing") as meter:
        share = Share(meter)
        async with (
            open_store(sides.urls[0], settings, Access.READ, share.count) as one,
            open_store(sides.urls[1], settings, Access.READ, share.count) as two,
        ):
            with naming_one():
                infos = [await chosen(one, sides.steps[0]), await chosen(two, sides.steps[1])]

            async def compare() -> tuple[StructureDifference, list[TensorDifference]]:
                left, right = [
                    await read_index(backend, info.key)
                    for backend, info in zip((one, two), infos, strict=True)
                ]
                if not any(map(sides.select, labels_of(left) | labels_of(right))):
                    screen.matches_nothing(sides.patterns)
                found = _selected(compare_structures(left, right), sides.select)
                if structure:
                    return found, []
                comparing = _Comparing((one, left), (two, right), share, settings)
                return found, await comparing.run(found.common, expanded=sides.expanded)

            found, differing = await reading(
                one, infos[0].key, lambda: reading(two, infos[1].key, compare)
            )
    data = _data(found, differing, 0 if structure else len(found.common))
    ids = {"first": infos[0].id, "second": infos[1].id}
    screen.result({**ids, **data}, *_shown(found, differing), Text(_summary(data, structure)))
    return OK if data["same"] else FOUND


def _data(
    found: StructureDifference, differing: list[TensorDifference], compared: int
) -> dict[str, Any]:
    return {
        "same": not (found.only_first or found.only_second or found.changed or differing),
        "compared": compared,
        "only_first": found.only_first,
        "only_second": found.only_second,
        "changed": [
            {"label": label, "first": a, "second": b} for label, (a, b) in found.changed.items()
        ],
        "tensors": [asdict(each) for each in differing],
    }


def _selected(found: StructureDifference, select: LabelFilter) -> StructureDifference:
    return StructureDifference(
        tuple(filter(select, found.only_first)),
        tuple(filter(select, found.only_second)),
        {label: texts for label, texts in found.changed.items() if select(label)},
        tuple(filter(select, found.common)),
    )


class _Comparing:
    """Reads tensors that two checkpoints have alike, and compares them.

    What is shown of it counts every tensor four times: as it is read on either side, and as its
    two are compared.
    """

    def __init__(self, one: Side, two: Side, share: Share, settings: Settings) -> None:
        self._sides, self._share, self._lanes = (one, two), share, settings.load.lanes
        self._sizes = sizes_of(one[1])
        self._arena = Arena(settings.staging.block_bytes)

    async def run(self, labels: Sequence[str], *, expanded: bool) -> list[TensorDifference]:
        """Those that differ of the tensors with these labels."""
        one, two = (bundle for _, bundle in self._sides)
        own = labels_per_rank(one) | labels_per_rank(two)
        if one.world_size != two.world_size:
            own = set()  # the ranks do not correspond, and those of the lowest are compared
        alike = [label for label in labels if label not in own]
        mine = [label for label in labels if label in own]
        ranks = range(one.world_size if mine else 0)
        nbytes = self._bytes(alike) + len(ranks) * self._bytes(mine)
        if not expanded:
            sizes = {label: self._sizes[label] for label in labels}
            check_expansion("A comparison", (one, two), nbytes, sizes)
        self._share.expect(4 * nbytes)
        try:
            found = await self._of_rank(alike, None)
            for rank in ranks:
                found += await self._of_rank(mine, rank)
        finally:
            self._arena.close()
        return found

    def _bytes(self, labels: Sequence[str]) -> int:
        return sum(self._sizes[label] for label in labels)

    async def _of_rank(self, labels: Sequence[str], rank: int | None) -> list[TensorDifference]:
        differing: list[TensorDifference] = []
        for batch in batches(self._sides[0][1], labels, BATCH_BYTES):
            left, right = [await self._read(side, batch, rank) for side in self._sides]
            for label in batch:
                with self._share.of(2 * self._sizes[label]):
                    # A rank need not have everything that others have.
                    if label in left and label in right:
                        tensors = left.pop(label), right.pop(label)
                        name = label if rank is None else f"{label} of rank {rank}"
                        found = await self._compared(name, *tensors)
                        differing += [] if found is None else [found]
        return differing

    async def _read(
        self, side: Side, batch: Sequence[str], rank: int | None
    ) -> dict[str, torch.Tensor]:
        with self._share.of(self._bytes(batch)):
            return await read_tensors(*side, batch, self._arena, lanes=self._lanes, rank=rank)

    async def _compared(
        self, name: str, one: torch.Tensor, two: torch.Tensor
    ) -> TensorDifference | None:
        comparison = await in_thread(Comparison, name, one, two)
        for a, b in comparison.pieces():
            # A thread is never abandoned, so one for each piece lets an interrupt through.
            await in_thread(comparison.add, a, b)
            self._share.count(a.nbytes + b.nbytes)
        return comparison.result()


def _summary(data: dict[str, Any], structure: bool) -> str:
    if structure:
        return f"the structures are {'alike' if data['same'] else 'not alike'}"
    return f"{len(data['tensors'])} of {data['compared']} tensors compared differ"


def _shown(
    found: StructureDifference, differing: list[TensorDifference]
) -> Iterator[RenderableType]:
    for sign, labels in (("-", found.only_first), ("+", found.only_second)):
        for label in labels:
            yield Text(one_line(f"{sign} {label}"))
    for label, (a, b) in found.changed.items():
        yield Text(one_line(f"~ {label}: {a} → {b}"))
    if differing:
        rows = [
            (
                each.label,
                f"{each.different}/{each.elements}",
                f"{each.norm:.6g}",
                f"{each.relative:.3g}",
                f"{each.largest:.6g}",
            )
            for each in differing
        ]
        headings = ("tensor", "elements", "|b-a|", "|b-a|/|a|", "largest")
        yield table(headings, rows, *headings[1:])
