"""When data files are opened in the store."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

import anyio
from anyio import create_memory_object_stream

from ckpipe.backend import Upload
from ckpipe.events import EventBus
from ckpipe.format.data_file import BlockRange, DataFile, DataFiles
from ckpipe.format.manifest import Layout
from ckpipe.save import upload
from ckpipe.save.context import StoreContext
from ckpipe.save.record import FilledBlock, ManifestFields, SaveRecord
from ckpipe.store.retry import RetryPolicy
from ckpipe.testing import MemoryBackend
from ckpipe.types import CheckpointId, CheckpointInfo

SIZE = 8192


PLAN = BlockRange(0, 0, SIZE, ())


class Held(FilledBlock):
    """A block of zeros."""

    def release(self) -> None:
        return


class Planned(SaveRecord):
    """A save of one block that only the upload knows."""

    def contents(self) -> ManifestFields:
        raise AssertionError("nothing is committed here")

    def settle(self, info: CheckpointInfo) -> None:
        raise AssertionError("nothing is committed here")


class Telling(MemoryBackend):
    """Tells when a file is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = anyio.Event()

    async def open_upload(self, key: str, *, size: int, block_bytes: int) -> Upload:
        self.opened.set()
        return await super().open_upload(key, size=size, block_bytes=block_bytes)


def depot(backend: MemoryBackend) -> StoreContext:
    return StoreContext(
        backend=backend, patient=backend, events=EventBus(), rank=0, world_size=1,
        block_bytes=SIZE, lanes=2, retry=RetryPolicy(1, 0.0, 0.0, 1.0),
        sweep_after=timedelta(days=1),
    )  # fmt: skip


def planned() -> Planned:
    save = Planned(CheckpointId("20261121T034205123Z-9f3a2c01", 1, 0), 0, 0.0, "token")
    file = DataFile("rank-00000.safetensors", b"{}", range(0), SIZE)
    save.files = DataFiles((file,), Layout((), ()), (PLAN,))
    return save


async def test_the_first_file_is_opened_before_there_is_a_block_of_it() -> None:
    backend = Telling()
    blocks, inbox = create_memory_object_stream[FilledBlock](math.inf)
    out, stored = create_memory_object_stream[DataFiles](1)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(upload.run, planned(), depot(backend), inbox, out)
            await backend.opened.wait()
            async with blocks:
                await blocks.send(Held(PLAN, memoryview(bytes(SIZE))))
        async with stored:
            assert len((await stored.receive()).header_sums) == 1
    assert [each.size async for each in backend.list("")] == [SIZE]


async def test_a_file_that_was_opened_for_nothing_is_given_up() -> None:
    backend = Telling()
    blocks, inbox = create_memory_object_stream[FilledBlock](math.inf)
    out, stored = create_memory_object_stream[DataFiles](1)
    with anyio.fail_after(30):
        async with blocks, stored, anyio.create_task_group() as tasks:
            tasks.start_soon(upload.run, planned(), depot(backend), inbox, out)
            await backend.opened.wait()
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    assert await backend.remove_stale_uploads("", before=tomorrow) == 0
