"""Stage 6: makes the save count, by one small object that is created or not."""

from __future__ import annotations

import platform
import secrets
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime

import anyio.to_thread
import torch
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from ckpipe.backend import PutMode
from ckpipe.collector import collector_paused
from ckpipe.completion import ascend
from ckpipe.errors import CkpipeError, CommitConflict, CommitUnknown, ObjectNotFound, StoreError
from ckpipe.events import Completed, RankCommitted
from ckpipe.keys import Json, decode_float
from ckpipe.manifest import Bundle, BundleKind, Part, Structure, TensorRow
from ckpipe.manifest_codec import MAX_STORED_BYTES, decode_bundle, encode_bundle
from ckpipe.object_names import index_key, manifest_key
from ckpipe.planning import file_rows
from ckpipe.retrying import Tries, policy_of
from ckpipe.saving import Save, StoredFiles, resolve
from ckpipe.site import Site
from ckpipe.types import CheckpointInfo
from ckpipe.version import __version__

_OTHERS = "whether all other ranks have committed is for the store to say"


async def run(
    save: Save,
    site: Site,
    inbox: MemoryObjectReceiveStream[StoredFiles],
    sums: MemoryObjectReceiveStream[list[int]],
    out: MemoryObjectSendStream[CheckpointInfo],
) -> None:
    """Writes this rank's manifest, and the index if the checkpoint is complete then.

    In a world of one rank the index takes the manifest's place. With many, whether the others
    have committed is seen after this rank's part counts as committed, and nobody is waited for.

    Raises:
        CommitConflict: If another writer owns the name.
        CommitUnknown: If the answer was lost and the object cannot be read back.
        CorruptCheckpoint: If another rank's manifest is damaged; this rank has committed.
        StoreError: If the store failed; nothing was written, unless this rank has committed.
    """
    async with inbox, sums, out:
        async for stored in inbox:
            checksums = await sums.receive()
            with save.clock.timing("commit"):
                token = secrets.token_hex(16)
                data = await anyio.to_thread.run_sync(_encode, save, site, stored, checksums, token)
                await _create(save, site, data, token)
            info = _commit(save, site, len(data))
            if site.world_size > 1:
                with save.clock.timing("complete"):
                    if not await _completed(save, site, info):
                        continue
            await out.send(info)


def _commit(save: Save, site: Site, metadata_bytes: int) -> CheckpointInfo:
    """Tells everybody that this rank's part is durable."""
    info = _info(save, site)
    save.durable_seconds = save.elapsed
    save.status = "committed"
    size = metadata_bytes + (save.program.plan.size if save.program else 0)
    if site.world_size == 1:
        site.facts[info.id] = (_metrics(save.request.metrics), save.request.final)
    else:
        save.unsettled = info
    resolve(save.committed, info)
    where = (save.name, save.id.step, save.rank)
    site.events.emit(RankCommitted(*where, save.durable_seconds, size))
    if info.complete:
        site.events.emit(Completed(*where, info))
    return info


async def _completed(save: Save, site: Site, info: CheckpointInfo) -> bool:
    """Completes the checkpoint if this was the last commit; True if this rank wrote the index."""
    outcome = await ascend(site.patient, save.id, save.rank, site.world_size)
    if outcome.complete or outcome.deleted:
        save.unsettled = None
    if outcome.complete:
        whole = replace(info, complete=True, reason="")
        site.events.emit(Completed(save.name, save.id.step, save.rank, whole))
    if outcome.index is None:
        return False
    parts = outcome.index.parts
    site.facts[info.id] = (_metrics(parts[0].metrics), any(part.final for part in parts))
    return True


def _metrics(metrics: Mapping[str, Json]) -> dict[str, float]:
    return {name: decode_float(value) for name, value in metrics.items()}


def _info(save: Save, site: Site) -> CheckpointInfo:
    id = save.id
    info = CheckpointInfo(str(id), id.step, id.attempt, id.count, complete=False, reason=_OTHERS)
    if site.world_size > 1:
        return info
    return replace(info, complete=True, reason="", saved_at=datetime.now(UTC))


def _kind(site: Site) -> BundleKind:
    """What a rank commits: with others a manifest, alone the index."""
    return "manifest" if site.world_size > 1 else "index"


def _key(save: Save, site: Site) -> str:
    return manifest_key(save.id, save.rank) if site.world_size > 1 else index_key(save.id)


def _encode(save: Save, site: Site, stored: StoredFiles, checksums: list[int], token: str) -> bytes:
    captured, program = save.captured, save.program
    assert captured is not None
    assert program is not None
    rows = tuple(
        TensorRow(
            leaf.label, leaf.dtype, leaf.full_shape, leaf.device.partition(":")[0], leaf.kind,
            leaf.detail, leaf.requires_grad, leaf.lazy, leaf.attributes,
        )
        for leaf in captured.tensors
    )  # fmt: skip
    part = Part(
        rank=save.rank,
        structure=0,
        layout=0,
        values=tuple(captured.values),
        files=file_rows(program.plan, stored.header_sums),
        checksums=tuple(checksums),
        token=token,
        started=datetime.fromtimestamp(save.started_at, UTC).isoformat(timespec="milliseconds"),
        writer={
            "ckpipe": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        metadata=save.request.metadata,
        metrics=save.request.metrics,
        resumed_from=site.resumed_from,
        final=save.request.final,
    )
    structure = Structure(captured.tree, rows, len(captured.values))
    bundle = Bundle(
        _kind(site), save.id, site.world_size, (structure,), (program.plan.layout,), (part,)
    )
    with collector_paused():
        return encode_bundle(bundle)


async def _create(save: Save, site: Site, data: bytes, token: str) -> None:
    """Creates this rank's object once, and finds out what became of it if the answer was lost."""
    key = _key(save, site)
    tries = Tries(policy_of(site.settings.upload, site.events, save.id, save.rank))
    while True:
        try:
            return await tries.once(lambda: site.backend.put(key, data, PutMode.CREATE))
        except StoreError as error:
            if await _landed(save, site, key, token, error):
                return None
            await tries.wait_after(error)


async def _landed(save: Save, site: Site, key: str, token: str, cause: BaseException) -> bool:
    """Reads the object back: True if it is ours, False if there is none.

    Raises:
        CommitConflict: If it is another writer's.
        CommitUnknown: If it cannot be read.
    """
    try:
        found = await site.patient.get(key, max_bytes=MAX_STORED_BYTES)
        bundle = await anyio.to_thread.run_sync(
            lambda: decode_bundle(found, key=key, id=save.id, kind=_kind(site))
        )
    except ObjectNotFound:
        return False
    except CkpipeError as error:
        raise CommitUnknown(
            f"Whether the commit landed is unknown: writing said {cause!r}, reading {error!r}",
            step=save.id.step,
            rank=save.rank,
            key=key,
            hint="Nothing was deleted. Look at the store; verify() tells whether it is complete",
        ) from cause
    if any(part.rank == save.rank and part.token == token for part in bundle.parts):
        return True
    raise CommitConflict(
        "Another writer has committed under this name",
        step=save.id.step,
        rank=save.rank,
        key=key,
        hint="Two processes use one attempt id on this root; give each run its own root",
    ) from cause
