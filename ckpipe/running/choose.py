"""Choose the checkpoint to load, the same on all ranks, once saves under way have ended.

Own saves. The newest checkpoint may be one that this pipeline has copied and is still storing. So a
load of the newest first waits until such saves are durable or have failed. With several ranks it
also waits, for a bounded time, until the newest of them is complete on all, or a rank has decided
for all: a rank whose own save failed decides at once.

A worker of an ended trainer may still be finishing a checkpoint, and holds a lease on it. A load
waits for that: otherwise a restart that loads the newest would take the one before, and repeat the
steps that are just being stored.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio

from ckpipe.backend import Backend, without_secrets
from ckpipe.catalog.complete import (
    discover_repaired,
    find_repaired,
    newest_likely,
    newest_repaired,
)
from ckpipe.catalog.find import NO_INDEX, discover, list_root, pick, present
from ckpipe.catalog.leases import leased
from ckpipe.errors import (
    CheckpointIncomplete,
    CheckpointNotFound,
    CorruptCheckpoint,
    InvalidManifest,
    StoreError,
)
from ckpipe.format.names import ATTEMPTS, launch_id
from ckpipe.ranks.agree import Agreements
from ckpipe.running.saves import Saves
from ckpipe.save.context import SaveContext
from ckpipe.save.follow_up import until_complete
from ckpipe.store.retry import pauses
from ckpipe.types import CheckpointId, CheckpointInfo

logger = logging.getLogger("ckpipe")

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 1.0


async def choose(
    context: SaveContext,
    saves: Saves,
    which: int | str | None,
    agreements: Agreements | None,
    question: str,
    *,
    find: Callable[[], Awaitable[CheckpointInfo | None]] | None = None,
) -> CheckpointInfo | None:
    """Find the checkpoint to load, the same on all ranks; None if there is none.

    The first rank decides for all. So a checkpoint may become complete between the lists of two
    ranks, and both still load the same one.

    Args:
        context: The context of the pipeline.
        saves: The saves of the pipeline.
        which: The step or id; None for the newest.
        agreements: The agreements of the ranks; None if there is no need to agree.
        question: The name of the question, the same on all ranks.
        find: Finds the checkpoint in place of a load of the newest, which may find one that is
            being deleted.
    """
    decided = None if agreements is None else await agreements.decided(question)
    if decided is None:

        async def is_decided() -> bool:
            return agreements is not None and await agreements.decided(question) is not None

        seconds = context.settings.worker.resume_wait_seconds
        if which is None:
            await _until_own_complete(context, saves, is_decided)
        await _until_finished(context.store.retrying, which, seconds, is_decided)
        if which is not None:
            found: CheckpointInfo | None
            if agreements is None and isinstance(which, int):
                found = await _find_step(context, which)
            else:
                found = await find_repaired(context.store.retrying, which)
        elif find is not None:
            found = await find()
        elif agreements is None:  # Alone: its lease tells whether the newest is being deleted.
            found, context.store.catalog.greatest = await newest_likely(context.store.retrying)
        else:
            found = await newest_repaired(context.store.retrying)
        if agreements is None:
            return found
        decided = (await agreements.decide(question, None if found is None else found.id),)
    (name,) = decided
    if name is None:
        return None
    if not isinstance(name, str):
        raise InvalidManifest(f"The ranks agreed to load {name!r:.100}, which is no checkpoint")
    try:
        return await find_repaired(context.store.retrying, name)
    except CheckpointIncomplete as error:
        error.hint = "Another process has deleted it since; load again on all ranks"
        raise


async def _until_own_complete(
    context: SaveContext, saves: Saves, is_decided: Callable[[], Awaitable[bool]]
) -> None:
    """Wait for the saves of this pipeline that were copied before the load."""
    newest = await saves.durable()
    if newest is None:
        return
    until = time.monotonic() + context.settings.load.agreement_timeout_seconds
    for pause in pauses(until, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS):
        await anyio.sleep(pause)
        if await is_decided():
            return
        try:
            with suppress(CheckpointIncomplete, CorruptCheckpoint):  # an older one is newest
                await until_complete(context.store, newest, 0)
            return
        except TimeoutError as error:
            late = error
    logger.warning("The load no longer waits for %s", late)


async def _find_step(context: SaveContext, step: int) -> CheckpointInfo:
    """Find the newest checkpoint of a step, after a wait for one that ranks still commit.

    Otherwise a rank that lists earlier would find an older one, and ranks would load different
    ones. There is no wait if there is no older one, or if only an earlier launch could commit
    the newer.
    """
    seconds = context.settings.load.agreement_timeout_seconds
    everything = await discover_repaired(context.store.retrying, step)
    found = pick(everything, step)
    launch = launch_id(context.attempt)
    for info in everything if context.world_size > 1 else ():
        if info.key == found.key:
            break
        if info.step != step or info.reason != NO_INDEX or launch_id(info.attempt) != launch:
            continue
        try:
            with suppress(CheckpointIncomplete, CorruptCheckpoint):
                await until_complete(context.store, info, seconds)
                return await find_repaired(context.store.retrying, step)
        except TimeoutError as error:
            raise CheckpointIncomplete(
                f"{error}, within {seconds:g} s",
                step=step,
                rank=context.rank,
                hint=f"Load another step on all ranks, or {found.id}, which is older; "
                "raise load.agreement_timeout_seconds to wait longer",
            ) from None
    return found


_FIRST_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.05, 2.0


async def _until_finished(
    backend: Backend,
    which: int | str | None,
    seconds: float,
    is_decided: Callable[[], Awaitable[bool]],
) -> None:
    """Wait until no worker is finishing a checkpoint that a load might take.

    Costs one list if there is no lease. If present leases cannot be told from expired ones, since
    the store is full, failing or not writable, there is no wait: it is better to load an older
    checkpoint than none.

    Args:
        backend: The store.
        which: The step or id to be loaded; None for the newest.
        seconds: Seconds to wait at most.
        is_decided: Returns True if another rank has meanwhile decided for all.
    """
    until, told = time.monotonic() + seconds, False
    for pause in pauses(until, _FIRST_LOOK_SECONDS, _LONGEST_LOOK_SECONDS):
        await anyio.sleep(pause)
        names = await _unfinished(backend, which)
        if not names or await is_decided():
            return
        if not told and seconds > 0:
            logger.info("Workers of an earlier launch still finish %s", ", ".join(names))
            told = True
    logger.warning("The load no longer waits for %s", ", ".join(names))


async def _unfinished(backend: Backend, which: int | str | None) -> list[str]:
    try:
        held = {CheckpointId.parse(subject) for subject in await leased(backend)} - {None}
        known = await discover(backend) if held else []
    except StoreError as error:
        logger.warning("Workers that finish a newer checkpoint cannot be looked up: %s", error)
        return []
    settled = {info.key for info in known if info.complete or info.reason != NO_INDEX}
    # A save that is only staged may have no object on the store but its lease.
    open_ones = [id for id in held if id is not None and id not in settled]
    complete = [info.key for info in known if info.complete]
    if which is not None:
        complete, open_ones = (
            [id for id in ids if which in (str(id), id.step)] for ids in (complete, open_ones)
        )
    newest = max(complete, default=None)
    return [str(id) for id in open_ones if newest is None or id > newest]


_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""Variables in which ``torchrun`` and Slurm count the restarts of a job.

Sources: ``torch/distributed/elastic/agent/server/local_elastic_agent.py`` and ``sbatch(1)``.
"""


async def begin_anew(context: SaveContext, place: str) -> None:
    """Decide whether a run may begin without a checkpoint, and log it on the first rank.

    Raises:
        CheckpointNotFound: If the setting ``resume`` is ``"must"``.
    """
    settings = context.settings
    start = f"training starts fresh at {place}"
    if settings.initial is not None:
        start = f"training at {place} starts from {without_secrets(settings.initial)}"
    if settings.resume == "never":
        if context.rank == 0:
            logger.info('resume="never": %s', start)
        return
    unknown, foreign = "", None
    try:
        remains = await _remains(context)
        if not remains and settings.initial is None:
            foreign = await _foreign_contents(context.store.retrying, place)
    except StoreError as error:  # the result of the load is decided already
        remains, unknown = [], f"; other contents are unknown: {error}"
    if foreign is not None:
        what, way = foreign
        unknown = f". A checkpoint of another program ({what}) is there"
    if settings.resume == "must":
        raise CheckpointNotFound(
            f"There is no complete checkpoint to resume from at {place}{unknown}"
            + "".join(f"; {each}" for each in remains),
            rank=context.rank,
            hint='resume="auto" begins a run here',
        )
    if context.rank > 0:
        return
    if remains:
        logger.warning("no complete checkpoint: %s; %s", start, "; ".join(remains))
    elif foreign is not None:
        logger.warning("no complete checkpoint: %s%s: %s", start, unknown, way)
    else:
        logger.info("no complete checkpoint: %s%s", start, unknown)


async def _remains(context: SaveContext) -> list[str]:
    """Describe what earlier launches left on the root, and that the launcher tells of one."""
    retrying, own = context.store.retrying, launch_id(context.attempt)
    listing = await list_root(retrying)
    # Another rank may have begun its first save meanwhile.
    known = [each for each in listing.infos() if launch_id(each.attempt) != own]
    found = []
    without_index = [each for each in known if each.reason == NO_INDEX]
    if incomplete := await present(retrying, without_index):
        count = len(incomplete)
        which = f"the newest of {count} incomplete checkpoints" if count > 1 else "the only one"
        found.append(f"{which} there, {incomplete[0].id}, is incomplete: {NO_INDEX}")
    if deleted := listing.tombstones:
        which = f"{len(deleted)} checkpoints were" if len(deleted) > 1 else "a checkpoint was"
        found.append(f"{which} deleted there, the newest is {max(deleted)}")
    if context.settings.read_only:
        return found
    # Not by prefixes, since a store may keep empty ones.
    claims = [each.key async for each in retrying.list(ATTEMPTS)]
    launches = {each.removeprefix(ATTEMPTS).partition("/")[0] for each in claims}
    if not found and (earlier := sorted(launches - {own})):
        found.append(f"launch {earlier[-1]} has claimed it and left no checkpoint")
    counts = {name: os.environ.get(name, "") for name in _RESTARTS}
    return found + [
        f"{name}={count} says that this is a restart"
        for name, count in counts.items()
        if count.isdecimal() and int(count)
    ]


async def _foreign_contents(backend: Backend, place: str) -> tuple[str, str] | None:
    """Describe what another program has left on a root, and the way to load it; None if nothing."""
    listing = await backend.children("")
    if not listing.objects and not listing.prefixes:  # most new runs import no readers of formats
        return None
    from ckpipe.foreign.files import TORCH_FILES
    from ckpipe.foreign.source import contents, recognized

    if (source := await recognized(listing.objects)) is not None:
        way = "ckpipe.load opens it, and so does load(state, source=…) of a pipeline elsewhere"
        return source.name, way
    names = [each for each in listing.prefixes if _OF_TRAINERS.match(each)]
    names += [each.key for each in listing.objects if each.key.endswith(TORCH_FILES)]
    found = contents(names, place)
    return None if found is None else found[1:]


_OF_TRAINERS = re.compile(
    r"(checkpoint|checkpoints|ckpt|epoch|step|iter|global_step)[-_]?\d*/|lightning_logs/"
)
"""The folders in which trainers put their checkpoints."""
