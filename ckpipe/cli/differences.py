"""What ``diff`` does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import anyio.to_thread
from rich.console import RenderableType
from rich.text import Text

from ckpipe.backend import Backend
from ckpipe.checkpoints.comparing import (
    StructureDifference,
    TensorDifference,
    batches,
    compare_structures,
    compare_tensors,
)
from ckpipe.checkpoints.discovery import read_index
from ckpipe.checkpoints.inspection import data_bytes, labels_per_rank
from ckpipe.checkpoints.leases import reading
from ckpipe.cli.running import FOUND, OK, chosen
from ckpipe.cli.screen import Screen, table, visible
from ckpipe.format.keys import LabelFilter
from ckpipe.format.manifest import Bundle
from ckpipe.loads.tensor_reading import read_tensors
from ckpipe.memory.arena import Arena
from ckpipe.settings import Settings
from ckpipe.stores.opening import Access, open_store

BATCH_BYTES = 128 << 20
"""How many bytes of each checkpoint are held in memory, unless a single tensor is larger."""

Side = tuple[Backend, Bundle]


@dataclass(frozen=True, slots=True)
class Sides:
    """What to compare.

    Args:
        urls: Where the two checkpoints lie.
        steps: Their steps or ids.
        select: Which names to look at.
    """

    urls: tuple[str, str]
    steps: tuple[str, str]
    select: LabelFilter


async def differences(screen: Screen, sides: Sides, *, structure: bool) -> int:
    """Compares two checkpoints; returns the exit code.

    Args:
        screen: Where the result goes.
        sides: What to compare.
        structure: Whether to compare no values of tensors.
    """
    settings = screen.settings
    with screen.meter("comparing") as meter:
        async with (
            open_store(sides.urls[0], settings, Access.READ, meter.advance) as one,
            open_store(sides.urls[1], settings, Access.READ, meter.advance) as two,
        ):
            infos = [await chosen(one, sides.steps[0]), await chosen(two, sides.steps[1])]

            async def compare() -> tuple[StructureDifference, list[TensorDifference]]:
                left, right = [
                    await read_index(backend, info.key)
                    for backend, info in zip((one, two), infos, strict=True)
                ]
                found = _selected(compare_structures(left, right), sides.select)
                if structure:
                    return found, []
                meter.expect(data_bytes(left) + data_bytes(right))
                return found, await _compare((one, left), (two, right), found.common, settings)

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


async def _compare(
    one: Side, two: Side, labels: tuple[str, ...], settings: Settings
) -> list[TensorDifference]:
    own = labels_per_rank(one[1]) | labels_per_rank(two[1])
    if one[1].world_size != two[1].world_size:
        own = set()  # the ranks do not correspond, and those of the lowest are compared
    arena = Arena(settings.staging.block_bytes)
    try:
        alike = [label for label in labels if label not in own]
        found = await _compare_of(one, two, alike, arena, settings.load.lanes, None)
        for rank in range(one[1].world_size if own else 0):
            mine = [label for label in labels if label in own]
            found += await _compare_of(one, two, mine, arena, settings.load.lanes, rank)
    finally:
        arena.close()
    return found


async def _compare_of(
    one: Side, two: Side, labels: Sequence[str], arena: Arena, lanes: int, rank: int | None
) -> list[TensorDifference]:
    differing: list[TensorDifference] = []
    for batch in batches(one[1], labels, BATCH_BYTES):
        left, right = [
            await read_tensors(*side, batch, arena, lanes=lanes, rank=rank) for side in (one, two)
        ]
        # A rank need not have everything that others have.
        for label in [each for each in batch if each in left and each in right]:
            tensors = left.pop(label), right.pop(label)
            name = label if rank is None else f"{label} of rank {rank}"
            found = await anyio.to_thread.run_sync(compare_tensors, name, *tensors)
            differing += [] if found is None else [found]
    return differing


def _summary(data: dict[str, Any], structure: bool) -> str:
    if structure:
        return f"the structures are {'alike' if data['same'] else 'not alike'}"
    return f"{len(data['tensors'])} of {data['compared']} tensors compared differ"


def _shown(
    found: StructureDifference, differing: list[TensorDifference]
) -> Iterator[RenderableType]:
    for sign, labels in (("-", found.only_first), ("+", found.only_second)):
        for label in labels:
            yield Text(visible(f"{sign} {label}"))
    for label, (a, b) in found.changed.items():
        yield Text(visible(f"~ {label}: {a} → {b}"))
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


__all__ = ["Sides", "differences"]
