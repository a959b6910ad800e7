"""Load into objects that call collectives, on all their ranks at once.

Objects that call collectives (:mod:`ckpipe.loading.collectives`) are called only when all their
ranks have come to the same point: before the match, which reads their present state, and before
they get the loaded state. A rank that fails tells the others, which then raise as well.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256

import anyio

from ckpipe.errors import CkpipeError, CorruptCheckpoint, StoreUnavailable, UnsupportedTopology
from ckpipe.format.labels import Json
from ckpipe.loading.collectives import CollectiveObjects, collective_objects
from ckpipe.loading.request import LoadRequest
from ckpipe.loading.stateful import InspectionMemo
from ckpipe.loop_thread import on_caller
from ckpipe.ranks.agree import Agreements, TorchAgreements
from ckpipe.save.context import SaveContext
from ckpipe.store.retry import pauses
from ckpipe.types import first_of

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 1.0
_LAST_WORDS_SECONDS = 5.0

_ABSENT = "absent"


@dataclass(slots=True)
class Joint:
    """A load into objects that call collectives.

    Args:
        agreements: The agreements of all ranks.
        name: Its name, the same on all ranks of the objects.
        objects: The objects.
        attempts: The number of damaged checkpoints that it has left behind.
        is_waiting: Whether this rank waits for others, none of which has called the objects.
    """

    agreements: TorchAgreements
    name: str
    objects: CollectiveObjects
    attempts: int = 0
    is_waiting: bool = False

    @property
    def attempt(self) -> str:
        """The name of the load of one checkpoint."""
        return f"{self.name}.{self.attempts}"

    @property
    def label(self) -> str | None:
        """The label of the first of its objects."""
        return self.objects.objects[0][0] or None

    async def give_up(self, error: BaseException, rank: int) -> None:
        """Tell the other ranks that this one does not go on with this checkpoint."""
        kind = "store" if isinstance(error, StoreUnavailable) else "other"
        if self.is_waiting:
            kind = _ABSENT
        if isinstance(error, CorruptCheckpoint):
            kind = "damage"
        said, key = str(error), None
        if isinstance(error, CkpipeError):  # its hint is for this rank
            said, key = error.message, error.key
        how = f"{type(error).__name__}: {said}" if said else type(error).__name__
        # Also a load that is cancelled tells, but does not wait for a Store that is gone.
        with anyio.move_on_after(_LAST_WORDS_SECONDS, shield=True), suppress(CkpipeError):
            failed = {"kind": kind, "rank": rank, "how": how, "key": key}
            await self.agreements.decide(f"{self.attempt}.failed", failed)

    def look(self, request: LoadRequest, memo: InspectionMemo) -> None:
        """Look at the state of the objects; on the caller's thread."""
        with request.holding():
            self.objects.look(memo)


class JointLoads:
    """Begins the joint loads of a pipeline, and lets their ranks wait for each other.

    Args:
        context: The context of the pipeline.
        agreeing: Returns the agreements of the ranks.
        waiting: Marks a wait for other ranks, which closing the pipeline cancels.
    """

    def __init__(
        self,
        context: SaveContext,
        agreeing: Callable[[], Awaitable[Agreements]],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._context, self._agreeing, self._waiting = context, agreeing, waiting
        self._calls: Counter[tuple[int, ...]] = Counter()

    @asynccontextmanager
    async def begun(self, request: LoadRequest) -> AsyncIterator[Joint | None]:
        """Begin a joint load if objects of the target call collectives; tell others of its error.

        Such objects are called by all their ranks alike, so their joint loads have equal numbers.
        """
        objects = None
        if request.into is not None and self._context.world_size > 1:
            objects = await on_caller(
                request.caller, collective_objects, request.into, request.select
            )
        agreements = None if objects is None else await self._agreeing()
        if objects is None or not isinstance(agreements, TorchAgreements):
            yield None
            return
        members = sha256(repr(objects.ranks).encode()).hexdigest()[:16]
        while True:
            number = self._calls[objects.ranks]
            self._calls[objects.ranks] += 1
            joint = Joint(agreements, f"joint-{members}-{number}", objects)
            failed = await agreements.decided(f"{joint.attempt}.failed")
            if failed is None or failed[0]["kind"] != _ABSENT:
                break  # Others no longer wait for this rank in a load that it did not join.
        try:
            yield joint
        except BaseException as error:
            await joint.give_up(error, self._context.rank)
            raise

    async def all_at(self, point: str, joint: Joint, name: str, step: int) -> None:
        """Wait until all ranks of a joint load have come to a point, for a bounded time.

        Args:
            point: The point.
            joint: The load.
            name: The name of the checkpoint, as in events.
            step: Its step.

        Raises:
            CorruptCheckpoint: If one of them found damage.
            StoreUnavailable: If the store failed one of them.
            UnsupportedTopology: If another failed in another way, or has not come in time.
        """
        agreements, ranks = joint.agreements, joint.objects.ranks
        seconds = self._context.settings.load.agreement_timeout_seconds
        until, here = time.monotonic() + seconds, f"{joint.attempt}.{point}.{name}"
        await agreements.arrive(here)
        joint.is_waiting = True
        with self._waiting():
            for pause in pauses(until, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS):
                await anyio.sleep(pause)
                behind = await agreements.behind(here, ranks)
                if not behind:
                    break
                failed = await agreements.decided(f"{joint.attempt}.failed")
                if failed is not None:
                    raise _failed_elsewhere(failed[0], step)
            else:
                raise UnsupportedTopology(
                    f"Ranks {first_of(behind)} did not join the load of {name} into objects "
                    f"that call collectives, within {seconds:g} s",
                    step=step,
                    rank=self._context.rank,
                    key=joint.label,
                    hint="Call load on all ranks of these objects alike, or raise "
                    "load.agreement_timeout_seconds",
                )
            failed = await agreements.decided(f"{joint.attempt}.failed")
            if failed is not None and failed[0]["kind"] == _ABSENT:
                raise _failed_elsewhere(failed[0], step)
        joint.is_waiting = False


def _failed_elsewhere(failed: Json, step: int) -> CkpipeError:
    """Return the error for a joint load that another rank has given up."""
    rank, key, kind = failed["rank"], failed["key"], failed["kind"]
    if kind == "damage":
        return CorruptCheckpoint(
            f"Rank {rank} found {failed['how']}", step=step, rank=rank, key=key
        )
    said = f"Rank {rank} cannot load, so none can that loads these objects with it: {failed['how']}"
    if kind == "store":
        hint = "Load again on all ranks"
        return StoreUnavailable(said, step=step, rank=rank, key=key, hint=hint)
    hint = f"Correct the error of rank {rank}, and load again on all ranks"
    return UnsupportedTopology(said, step=step, rank=rank, key=key, hint=hint)
