"""Reading the reports of saves that manifests keep."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ckpipe.backend import Backend
from ckpipe.checkpoints.discovery import read_index
from ckpipe.errors import CkpipeError, MissingObject, ObjectNotFound, UsageError
from ckpipe.format.manifest import Bundle
from ckpipe.format.manifest_codec import MAX_STORED_BYTES, decode_bundle
from ckpipe.format.object_names import manifest_key
from ckpipe.reports import RankReport, save_report_from_data
from ckpipe.stores.second_reading import read_decoded
from ckpipe.tasks.lanes import run_lanes
from ckpipe.types import CheckpointId

MOST_RANKS = 32
"""How many ranks are looked at if none are named: the lowest."""

_AT_ONCE = 16


async def read_reports(
    backend: Backend, id: CheckpointId, ranks: Sequence[int] = ()
) -> tuple[list[RankReport], int]:
    """The reports of a checkpoint's ranks, and how many ranks it has.

    Costs the index, and with many ranks the manifest of each that is looked at.

    Args:
        backend: The store.
        id: A complete checkpoint.
        ranks: The ranks to look at; none for all, or the lowest :data:`MOST_RANKS` of many.

    Raises:
        UsageError: If a rank is named that the checkpoint has not.
        CorruptCheckpoint: If the index, a manifest or a report is damaged, or one is gone.
        StoreError: If the store failed.
    """
    index = await read_index(backend, id)
    world_size = index.world_size
    chosen = sorted(set(ranks)) or list(range(min(world_size, MOST_RANKS)))
    if chosen[0] < 0 or chosen[-1] >= world_size:
        those = "rank 0 only" if world_size == 1 else f"the ranks 0 to {world_size - 1}"
        raise UsageError(f"The checkpoint has {those}", step=id.step)
    found = {0: _report(index)} if world_size == 1 else {}
    pending = iter([rank for rank in chosen if rank not in found])

    async def lane() -> None:
        for rank in pending:
            found[rank] = _report(await _read_manifest(backend, id, rank))

    await run_lanes(min(_AT_ONCE, len(chosen)), lane)
    return [found[rank] for rank in chosen], world_size


async def _read_manifest(backend: Backend, id: CheckpointId, rank: int) -> Bundle:
    key = manifest_key(id, rank)
    decode = partial(decode_bundle, key=key, id=id, kind="manifest")
    try:
        return await read_decoded(backend, key, MAX_STORED_BYTES, decode)
    except ObjectNotFound as error:
        raise MissingObject("A manifest is gone", step=id.step, rank=rank, key=key) from error


def _report(bundle: Bundle) -> RankReport:
    part = bundle.parts[0]
    try:
        report = None if bundle.report is None else save_report_from_data(bundle.report)
    except CkpipeError as error:
        raise error.located(step=bundle.id.step, rank=part.rank) from None
    return RankReport(part.rank, part.started, report)


__all__ = ["MOST_RANKS", "read_reports"]
