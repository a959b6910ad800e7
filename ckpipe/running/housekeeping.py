"""Find, check and delete checkpoints that are on the store."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ckpipe.catalog import prune as pruning
from ckpipe.catalog.complete import find_repaired, newest_repaired, repaired
from ckpipe.catalog.find import check_still_there, read_index
from ckpipe.catalog.metadata_cache import MetadataCache, MetadataQuery, described, inspected
from ckpipe.catalog.prune import remove
from ckpipe.catalog.sweep import SweepReport, sweep
from ckpipe.errors import CorruptCheckpoint, UsageError
from ckpipe.format.names import launch_id
from ckpipe.loading.reader import verify
from ckpipe.retention import Decision
from ckpipe.running.saves import Saves
from ckpipe.save import retention
from ckpipe.save.context import SaveContext
from ckpipe.save.follow_up import until_complete
from ckpipe.types import CheckpointId, CheckpointInfo, VerifyResult

_PASS_OVER = "Load another checkpoint; load(fallback=True) passes over this one"


class Housekeeping:
    """Discovery and housekeeping of one pipeline.

    Args:
        site: Where checkpoints lie.
        saves: The saves of the pipeline, which some calls wait for.
    """

    def __init__(self, site: SaveContext, saves: Saves) -> None:
        self._site, self._saves = site, saves
        self._last = MetadataCache()

    async def steps(self, *, metadata: bool) -> list[CheckpointInfo]:
        """All checkpoints, the oldest first."""
        patient, facts = self._site.patient, self._site.facts
        listing = await pruning.listed(patient, facts)
        infos = list(reversed(await repaired(patient, listing.infos())))
        if metadata:
            return await inspected(patient, infos, facts)
        await MetadataQuery(patient, [each for each in infos if each.complete], facts, few=0).hear()
        return [replace(described(each, facts), metadata=None) for each in infos]

    async def latest(self) -> CheckpointInfo | None:
        """The newest complete checkpoint."""
        info = await newest_repaired(self._site.patient)
        return None if info is None else await self._inspected(info)

    async def complete(self, info: CheckpointInfo, timeout: float | None) -> CheckpointInfo:
        """Look until a checkpoint that this rank has committed is complete."""
        return await self._inspected(await until_complete(self._site, info, timeout))

    async def _inspected(self, info: CheckpointInfo) -> CheckpointInfo:
        """Fill in what the index says; of the last one asked for it is remembered."""
        if info.id in self._site.facts.known:
            return described(info, self._site.facts)
        if info.id not in self._last:
            self._last = MetadataCache()
        (found,) = await inspected(self._site.patient, [info], self._last)
        return found

    async def verify(self, which: int | str) -> VerifyResult:
        """Read and check every byte of a checkpoint."""
        await self._saves.settled(which)
        site = self._site
        info = await find_repaired(site.patient, which)

        async def work() -> VerifyResult:
            bundle = await read_index(site.patient, info.key)
            lanes = site.settings.load.lanes
            return await verify(site.patient, bundle, site.arena, lanes=lanes)

        try:
            return await site.reading(info.key, work)
        except CorruptCheckpoint as error:
            await check_still_there(site.patient, info.key)
            error.hint = error.hint or _PASS_OVER
            raise error.located(step=info.step) from error.__cause__

    async def delete(self, which: int | str, *, force: bool) -> None:
        """Delete a checkpoint, also an incomplete one if its exact id is given."""
        site = self._site
        id = CheckpointId.parse(which) if isinstance(which, str) else None
        if id is None:
            id = (await find_repaired(site.patient, which)).key
        if self._saves.is_writing(id):
            raise UsageError(
                f"{id} cannot be deleted now: it is being written",
                step=id.step,
                hint="Cancel the save, or wait for it",
            )
        await remove(site.patient, str(id), protected=site.protected(), force=force)

    async def pin(self, which: int | str) -> None:
        """Protect a checkpoint from retention."""
        await self._saves.settled(which)
        await pruning.pin(self._site.patient, (await find_repaired(self._site.patient, which)).key)

    async def unpin(self, which: int | str) -> None:
        """End the protection."""
        await pruning.unpin(
            self._site.patient, (await find_repaired(self._site.patient, which)).key
        )

    async def prune(self, *, dry_run: bool) -> Decision:
        """Apply the retention rules now, or say what they would do."""
        launch = launch_id(self._site.attempt)
        return await (
            retention.decide(self._site, launch) if dry_run else retention.prune(self._site, launch)
        )

    async def best(self, metric: str, mode: Literal["min", "max"]) -> CheckpointInfo | None:
        """The complete checkpoint with the best value of a metric."""
        return await pruning.best(self._site.patient, metric, mode, self._site.facts)

    async def sweep(self, *, dry_run: bool) -> SweepReport:
        """Remove what crashed runs left, or say what it would remove."""
        site = self._site
        after = site.settings.retention.sweep_after
        return await sweep(site.patient, after, running=(site.attempt,), dry_run=dry_run)
