"""The line of launches that a launch belongs to; retention counts and deletes within one line.

Theory. A launch that has loaded nothing of its root begins a line, named by its id. A launch that
has loaded takes over the line of the checkpoint that it loaded last before its first save. Loads of
weights alone count too. A launch whose pipeline has loaded nothing takes over the line of a load by
``ckpipe.load``, or by another pipeline of this process that saves nothing, if the checkpoint lay on
the root when the pipeline was opened. Such a load serves one launch. So a run and its restarts are
one line, also if they go back or fall back, and a script without a load, or a second experiment on
the root, deletes nothing of others.

Each rank writes the name into its manifest. The chain of ``resumed_from`` would not do: it breaks
when retention deletes a link (note 24 of ``docs/design.md``). The line of a checkpoint is that of
its first rank that had loaded (:attr:`ckpipe.format.manifest.ManifestDocument.line`).
"""

from __future__ import annotations

import logging

from ckpipe.catalog.catalog import Catalog
from ckpipe.catalog.find import discover, read_index
from ckpipe.errors import CorruptCheckpoint, StoreError, UnsupportedVersion
from ckpipe.format.manifest import ManifestDocument
from ckpipe.format.names import launch_id
from ckpipe.ranks.launch import Launch
from ckpipe.types import CheckpointId

logger = logging.getLogger("ckpipe")

_read: dict[str, str] = {}
"""The lines of loaded checkpoints for the next launch, by id, the last load last."""


def record(catalog: Catalog, document: ManifestDocument) -> None:
    """Record that a checkpoint of ckpipe was loaded."""
    if document.source is None:
        catalog.resumed_from, catalog.loaded_line = str(document.id), document.line
        if catalog.read_only:
            leave_to_next(catalog)


def leave_to_next(catalog: Catalog) -> None:
    """Leave the last load of a pipeline that saves nothing to the next launch of the process."""
    if catalog.resumed_from is not None and catalog.loaded_line is not None:
        _read.pop(catalog.resumed_from, None)
        _read[catalog.resumed_from] = catalog.loaded_line


def line_to_join(catalog: Catalog, launch: Launch, resume: str) -> tuple[str | None, str] | None:
    """Return the checkpoint and the line that a launch would take over now; None for neither."""
    if catalog.loaded_line is not None:
        return catalog.resumed_from, catalog.loaded_line
    if resume == "never":
        return None
    found = [each for each in [*_read.items()] if each[0] in launch.names]
    return found[-1] if found else None


def settle(catalog: Catalog, launch: Launch, resume: str) -> None:
    """Settle the line of a launch, at its first save, by the last load before."""
    found = line_to_join(catalog, launch, resume)
    if found is not None and catalog.loaded_line is None:
        logger.info("This run goes on with the line of %s, which this process has loaded", found[0])
        for name in launch.names:
            _read.pop(name, None)
    catalog.resumed_from, catalog.line = (None, launch.id) if found is None else found


async def tell_begun(catalog: Catalog, launch: Launch, place: str) -> None:
    """Warn that a launch begins a line beside the complete checkpoints of others at a place.

    Raises:
        StoreError: If the store failed.
    """
    known = await discover(catalog.backend)
    others = [each for each in known if each.complete and launch_id(each.attempt) != launch.id]
    if not others:
        return
    logger.warning(
        "Launch %s has loaded nothing, so it begins a line of its own beside the %d complete "
        "checkpoints of other launches at %s, the newest %s: they stay. To go on with them, load "
        "before the first save. `ckpipe ls %s` shows the lines, `ckpipe prune %s --line LINE "
        '--keep-last N` removes old ones; retention={"lines": "all"} counts all lines together',
        launch.id, len(others), place, others[0].id, place, place,
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
