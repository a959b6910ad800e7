"""Reading a checkpoint through to find out whether it is what was saved."""

from __future__ import annotations

from functools import partial

import anyio.to_thread

from ckpipe.backend import Backend
from ckpipe.format.manifest import Bundle
from ckpipe.loads.entry_tables import PartData
from ckpipe.loads.reading import Reader, lane_buffers
from ckpipe.memory.arena import Arena
from ckpipe.types import VerifyResult


async def verify(backend: Backend, bundle: Bundle, arena: Arena, *, lanes: int) -> VerifyResult:
    """Reads every byte of every data file of a checkpoint and checks all of them.

    Args:
        backend: The store.
        bundle: The checkpoint's index or manifest, validated.
        arena: Lends the blocks that are read into; used on the caller's thread only.
        lanes: How many reads run at once.

    Raises:
        ChecksumMismatch: If bytes differ from those that were saved, or a file is too long.
        TruncatedObject: If a data file is too short.
        MissingObject: If one is gone.
        StoreError: If the store failed.
    """
    files = 0
    with lane_buffers(arena, backend, lanes) as buffers:
        reader = Reader(backend, bundle.id, buffers)
        for part in bundle.parts:
            make_data = partial(PartData, part, bundle.layouts[part.layout])
            data = await anyio.to_thread.run_sync(make_data)
            for number in range(len(data.files)):
                await reader.size(data, number)
                await reader.header(data, number)
            await reader.read(data, data.all_needs(), {})
            files += len(data.files)
    return VerifyResult(str(bundle.id), files, sum(f.size for p in bundle.parts for f in p.files))


__all__ = ["verify"]
