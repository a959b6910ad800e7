"""The line of launches that a launch belongs to; retention counts and deletes within one line.

Theory. A launch that has loaded nothing of its root begins a line, named by its id. A launch that
has loaded takes over the line of the checkpoint that it loaded last before its first save. Loads of
weights alone count too, and so do loads of this process that only read, such as ``ckpipe.load``, if
the checkpoint lay on the root when the pipeline was opened. So a run and its restarts are one line,
also if they go back or fall back, and a script without a load, or a second experiment on the root,
deletes nothing of others.

Each rank writes the name into its manifest. The chain of ``resumed_from`` would not do: it breaks
when retention deletes a link. The line of a checkpoint is that of its first rank that had loaded
(:attr:`ckpipe.format.manifest.ManifestDocument.line`).
"""

from __future__ import annotations

import itertools
import logging

from ckpipe.catalog.catalog import Catalog
from ckpipe.catalog.find import read_index
from ckpipe.errors import CorruptCheckpoint, StoreError, UnsupportedVersion
from ckpipe.format.manifest import ManifestDocument
from ckpipe.format.names import launch_id
from ckpipe.ranks.launch import Launch
from ckpipe.types import CheckpointId

logger = logging.getLogger("ckpipe")

_numbers = itertools.count()
_read: dict[str, tuple[int, str, str]] = {}
"""Loads that only read, by the id of the checkpoint: as :attr:`Catalog.loaded`."""


def record(catalog: Catalog, document: ManifestDocument) -> None:
    """Record that a checkpoint of ckpipe was loaded."""
    if document.source is not None:
        return
    catalog.resumed_from = name = str(document.id)
    catalog.loaded = next(_numbers), name, document.line
    if catalog.read_only:
        _read[name] = catalog.loaded


def settle(catalog: Catalog, launch: Launch) -> None:
    """Settle the line of a launch, at its first save, by the last load before."""
    loads = [found for name, found in [*_read.items()] if name in launch.names]
    if catalog.loaded is not None:
        loads.append(catalog.loaded)
    if loads:
        _, catalog.resumed_from, catalog.line = max(loads)


def tell_begun(launch: Launch, place: str) -> None:
    """Warn that a launch begins a line beside the complete checkpoints of others at a place."""
    logger.warning(
        "Launch %s has loaded nothing, so it begins a line of its own beside the %d complete "
        "checkpoints of other launches at %s, the newest %s: they stay. To go on with them, load "
        "before the first save. `ckpipe ls %s` shows the lines, `ckpipe prune %s --line LINE "
        '--keep-last N` removes old ones; retention={"lines": "all"} counts all lines together',
        launch.id, launch.beside.count, place, launch.beside.newest, place, place,
    )  # fmt: skip


async def tell_greater(catalog: Catalog, loaded: CheckpointId, place: str) -> None:
    """Warn that the greatest step of a root is of another line than the newest checkpoint.

    Costs the two indexes if another launch has saved a greater step, and else nothing.
    """
    other = catalog.greatest
    if other is None or other.step <= loaded.step:
        return
    if launch_id(other.attempt) == launch_id(loaded.attempt):
        return
    try:
        here, there = [(await read_index(catalog.backend, each)).line for each in (loaded, other)]
    except (CorruptCheckpoint, StoreError, UnsupportedVersion):  # it may be deleted by now
        return
    if here != there:
        logger.warning(
            "The newest checkpoint at %s, step %d, is of line %s; step %d of line %s is there too, "
            "and step=%r loads it",
            place, loaded.step, here or "-", other.step, there or "-", str(other),
        )  # fmt: skip
