"""What a pipeline does besides for the final checkpoint of a run: writes it in another form."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import anyio

from ckpipe.checkpoints.discovery import read_index
from ckpipe.checkpoints.leases import EXPORTING, Lease
from ckpipe.events import CheckpointExported
from ckpipe.exports.exporting import Exported, ExportSettings, export
from ckpipe.saves.following import until_complete
from ckpipe.saves.saving import Save
from ckpipe.saves.site import Site
from ckpipe.stores.retrying import logging_policy


@asynccontextmanager
async def exported(site: Site, save: Save) -> AsyncIterator[None]:
    """Exports a save that is made inside, if it is final and the settings ask for that.

    Of several ranks, the first does. Meanwhile no retention removes the checkpoint, neither that of
    this process nor, by a lease that is there before the save begins, that of its worker or of
    another rank.

    Args:
        site: Where it is saved.
        save: The save.

    Raises:
        TimeoutError: If the other ranks do not commit within ``incomplete_after_seconds``.
        CkpipeError: Whatever :func:`ckpipe.exports.exporting.export` raises.
    """
    form = site.settings.final_format
    if form == "ckpipe" or site.rank != 0 or not save.request.final:
        yield
        return
    async with _protected(site, save.name):
        yield
        with save.clock.timing("export"):
            done = await _export(site, save, form)
    where = (save.name, save.id.step, save.rank)
    site.events.emit(CheckpointExported(*where, done.folder, done.files, done.bytes))


@asynccontextmanager
async def _protected(site: Site, name: str) -> AsyncIterator[None]:
    """Keeps retention away from a checkpoint that may not be there yet."""
    lease = Lease(site.patient, name + EXPORTING)
    site.loading[name] += 1  # also where no lease can be written
    try:
        await lease.renew()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lease.keep, name=f"lease on {name}")
            yield
            tasks.cancel_scope.cancel()
    finally:
        site.loading[name] -= 1
        with anyio.CancelScope(shield=True):
            await lease.release()


async def _export(site: Site, save: Save, form: Literal["torch", "hf"]) -> Exported:
    settings = site.settings
    chosen = ExportSettings(
        form,
        settings.export.part,
        settings.export.max_shard_bytes,
        settings.staging.block_bytes,
        settings.load.lanes,
        logging_policy(settings.upload),
        pickling=settings.pickle == "allow",
    )
    info = save.committed.result()
    if not info.complete:
        info = await until_complete(site, info, settings.incomplete_after_seconds)

    async def work() -> Exported:
        bundle = await read_index(site.patient, info.key)
        return await export(site.patient, bundle, site.arena, chosen)

    return await site.reading(info.key, work)


__all__ = ["exported"]
