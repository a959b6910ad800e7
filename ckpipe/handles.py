"""What ``save`` returns: where the save stands, and ways to wait for it."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from ckpipe.loop_thread import wait_for
from ckpipe.saving import Save
from ckpipe.types import CheckpointInfo, SaveReport, SaveStatus

if TYPE_CHECKING:
    from ckpipe.pipeline_core import PipelineCore

T = TypeVar("T")


class _Handle:
    def __init__(self, core: PipelineCore, save: Save) -> None:
        self._core, self._save = core, save

    @property
    def id(self) -> str:
        """The exact name of the checkpoint; accepted wherever a step is."""
        return self._save.name

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self._save.id.step

    @property
    def status(self) -> SaveStatus:
        """Where the save stands now."""
        return self._save.status

    @property
    def report(self) -> SaveReport:
        """Seconds and bytes of each stage, until now."""
        return self._save.report()

    def _result(self, future: Future[T]) -> T:
        try:
            return future.result()
        except Exception as error:
            self._core.saw(error)
            raise

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.status}>"


class SaveHandle(_Handle):
    """A save on its way. Awaiting the handle waits for :meth:`committed`.

    Waiting may be cancelled without cancelling the save, and may be done any number of times, by
    any number of tasks.
    """

    async def staged(self) -> None:
        """Waits until the state has been copied, and training may go on.

        Raises:
            CkpipeError: If the save failed or was cancelled before that.
        """
        await _until_done(self._save.staged)
        self._result(self._save.staged)

    async def committed(self) -> CheckpointInfo:
        """Waits until this rank's part is durable.

        Raises:
            SaveSkipped: If the save was skipped.
            CkpipeError: If the save failed or was cancelled.
        """
        await _until_done(self._save.committed)
        return self._result(self._save.committed)

    async def complete(self, timeout: float | None = None) -> CheckpointInfo:
        """Waits until every rank's part is durable, and asks the store whether it is.

        Args:
            timeout: Seconds to wait; None waits for as long as it takes.

        Raises:
            TimeoutError: If it is not complete by then.
            CheckpointIncomplete: If the store says that it is not complete.
            CkpipeError: If this rank's part failed.
        """
        with anyio.fail_after(timeout):
            await self.committed()
            return await wait_for(self._core.submit(self._core.engine.find, self.id))

    async def cancel(self) -> None:
        """Gives the save up unless it is committed already; returns once it has ended."""
        await wait_for(self._core.submit(self._core.engine.cancel, self._save))

    def __await__(self) -> Generator[Any, Any, CheckpointInfo]:
        return self.committed().__await__()


class SyncSaveHandle(_Handle):
    """A save on its way, for code without an event loop."""

    def wait_staged(self, timeout: float | None = None) -> None:
        """Blocks until the state has been copied, and training may go on.

        Args:
            timeout: Seconds to wait; None waits for as long as it takes.

        Raises:
            TimeoutError: If it is not staged by then.
            CkpipeError: If the save failed or was cancelled before that.
        """
        _block(self._save.staged, timeout)
        self._result(self._save.staged)

    def wait(self, timeout: float | None = None) -> CheckpointInfo:
        """Blocks until this rank's part is durable.

        Args:
            timeout: Seconds to wait; None waits for as long as it takes.

        Raises:
            TimeoutError: If it is not durable by then.
            SaveSkipped: If the save was skipped.
            CkpipeError: If the save failed or was cancelled.
        """
        _block(self._save.committed, timeout)
        return self._result(self._save.committed)

    def wait_complete(self, timeout: float | None = None) -> CheckpointInfo:
        """Blocks until every rank's part is durable, and asks the store whether it is.

        Args:
            timeout: Seconds to wait for this rank; None waits for as long as it takes.

        Raises:
            TimeoutError: If it is not durable by then.
            CheckpointIncomplete: If the store says that it is not complete.
            CkpipeError: If this rank's part failed.
        """
        self.wait(timeout)
        return self._core.submit(self._core.engine.find, self.id).result()

    def cancel(self) -> None:
        """Gives the save up unless it is committed already; returns once it has ended."""
        self._core.submit(self._core.engine.cancel, self._save).result()


async def _until_done(future: Future[Any]) -> None:
    """Waits for the end of a future, whatever it is."""
    try:
        await wait_for(future)
    except Exception:
        if not future.done():
            raise


def _block(future: Future[Any], timeout: float | None) -> None:
    """Blocks until the end of a future, whatever it is."""
    if future.exception(timeout) is None:
        future.result()
