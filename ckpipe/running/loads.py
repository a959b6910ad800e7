"""Load a checkpoint, the same on all ranks, and fall back if it is damaged.

Theory. Each of many ranks verifies only the bytes that it reads, so a checkpoint is known to be
whole only after all ranks have read. For each candidate they agree on a verdict
(:mod:`ckpipe.ranks.agree`). A rank that finds damage decides at once, for all: reject this
checkpoint, and try that one next. The last rank to accept decides that the checkpoint is whole. The
first decision stands, and the two verdicts cannot compete: a rank that found damage does not
accept. Objects get their state only after the decision. Ranks wait for it for a bounded time, since
a rank may have died.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import anyio

from ckpipe.backend import without_secrets
from ckpipe.catalog.complete import find_repaired, newest_repaired
from ckpipe.catalog.find import discover, read_index
from ckpipe.catalog.manifest_selection import read_near
from ckpipe.catalog.opened import Opened
from ckpipe.errors import (
    CheckpointIncomplete,
    CheckpointNotFound,
    CkpipeError,
    CorruptCheckpoint,
    InvalidManifest,
    PipelineClosed,
    StoreUnavailable,
    UnsupportedTopology,
    UsageError,
    naming_refusals,
)
from ckpipe.events import CheckpointDamaged, EventBus, Loaded, LoadFailed, LoadProgress, LoadStarted
from ckpipe.format.labels import Json
from ckpipe.format.manifest import ManifestDocument
from ckpipe.loading.labelled_tensors import LabelledTensors, TensorBox
from ckpipe.loading.load import LeavesUnfilled, MatchedLoad, read_all, telling_touched
from ckpipe.loading.request import LoadRequest
from ckpipe.loading.stateful import InspectionMemo
from ckpipe.lock.state_lock import LoadHold
from ckpipe.loop_thread import on_caller
from ckpipe.ranks.agree import Agreements, ObjectAgreements, TorchAgreements
from ckpipe.ranks.launch import Launch, agreeing_store
from ckpipe.ranks.world import Topology
from ckpipe.reading.reader import ReadTally
from ckpipe.running import lines
from ckpipe.running.choose import begin_anew, choose
from ckpipe.running.joint_loads import Joint, JointLoads
from ckpipe.running.saves import Saves
from ckpipe.save.context import SaveContext
from ckpipe.store.retry import pauses
from ckpipe.threads import BackgroundTask
from ckpipe.types import CheckpointId, CheckpointInfo, LoadReport, LoadResult, first_of

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 1.0
_PROGRESS_SECONDS = 0.2

_WHOLE: Json = {"fault": None, "how": "", "next": None}
_FALL_BACK = "Load another checkpoint, or let fallback=True do so"
_MOST_TRIED = 8
"""Number of checkpoints after which a load gives up if one more is deleted meanwhile."""


@dataclass(frozen=True, slots=True)
class _RanksVerdict:
    """The ranks' decision on a checkpoint.

    Args:
        fault: ``"damaged"``; ``"deleted"``; ``"unfit"`` if it would leave values of one that was
            begun before it in the target; None if it is whole.
        how: The error of the rank that decided, in words.
        next: The next candidate.
        error: The error of this rank.
    """

    fault: str | None = None
    how: str = ""
    next: str | None = None
    error: CkpipeError | None = None


_Vote = tuple[Agreements, str]
"""The agreements of the ranks, and the name of the question whether a checkpoint is whole."""


@dataclass(frozen=True, slots=True)
class _LoadEvents:
    """The events of the load of one checkpoint.

    Args:
        bus: Gets them.
        name: The id of the checkpoint, or the place of one of another program.
        step: Its step, or 0.
        rank: The rank that loads.
        address: Where the log finds one that is not below the root; empty for all others.
    """

    bus: EventBus
    name: str
    step: int
    rank: int
    address: str = ""

    @contextmanager
    def told(self) -> Iterator[None]:
        """Tell that the load has begun, and that it failed if the block raises."""
        self.bus.emit(LoadStarted(self.name, self.step, self.rank))
        try:
            yield
        except BaseException as error:
            cancelled = isinstance(error, anyio.get_cancelled_exc_class())
            self.failed("it was cancelled" if cancelled else f"{type(error).__name__}: {error}")
            raise

    async def progress(self, tally: ReadTally) -> None:
        """Tell of the progress, until it is cancelled."""
        told = 0
        while True:
            await anyio.sleep(_PROGRESS_SECONDS)
            done, total = tally.bytes, max(tally.bytes, tally.planned)
            if done != told:
                self.bus.emit(LoadProgress(self.name, self.step, self.rank, done, total))
            told = done

    def failed(self, how: str) -> None:
        """Tell that the load failed."""
        self.bus.emit(LoadFailed(self.name, self.step, self.rank, how))

    def damaged(self, how: str) -> None:
        """Tell that the checkpoint is damaged, also by a warning."""
        self.bus.emit(CheckpointDamaged(self.name, self.step, self.rank, how))
        warnings.warn(f"{self.name} is damaged: {how}", RuntimeWarning, stacklevel=1)

    def loaded(self, report: LoadReport) -> None:
        """Tell that the checkpoint is loaded."""
        event = Loaded(self.name, self.step, self.rank, report.seconds, report.bytes)
        self.bus.emit(event, address=self.address)


class Loads:
    """The loads of one pipeline.

    Args:
        context: The context of the pipeline.
        launch: The launch, which is claimed before ranks agree through objects.
        saves: The saves of the pipeline; a load of a checkpoint under way waits for its save.
        place: The root, for messages.
    """

    def __init__(self, context: SaveContext, launch: Launch, saves: Saves, place: str) -> None:
        self._context, self._launch, self._saves, self._place = context, launch, saves, place
        self._agreements: Agreements | None = None
        self._calls = 0
        self._failed_after: int | None = None
        self._under_way: dict[anyio.CancelScope, tuple[LoadHold | None, anyio.Event]] = {}
        self._waits: set[anyio.CancelScope] = set()
        self._closed = False
        self._joint = JointLoads(context, self._agreeing, self._waiting)

    async def load(
        self,
        which: int | str | None,
        request: LoadRequest,
        *,
        source: str | None = None,
    ) -> LoadResult | None:
        """Load a checkpoint; return None if none was named and none exists.

        Args:
            which: The step or id; None for the newest.
            request: The target and the options.
            source: The path or URL of a checkpoint of another program, to load that one.

        Raises:
            UsageError: If a source is given beside a step or a fallback, or its format is known
                and not opened.
            CheckpointNotFound: If the named one is absent or incomplete, or the source is none
                that ckpipe opens.
            CheckpointIncomplete: If other ranks have not committed a save of this run in time.
            CorruptCheckpoint: If it is damaged; with a fallback, if all are.
            AttemptReused: If several ranks agree through objects, and ``attempt_id`` was used
                before.
            UnsupportedTopology: If several ranks that may not write cannot agree. If, with a
                fallback, some ranks do not report in time whether the checkpoint is whole for them.
            PipelineClosed: If the pipeline is closed before the load has its hold.
            CkpipeError: Any error of :func:`ckpipe.loading.load.read_all`.
        """
        if request.without_nan and which is not None:
            raise _chosen()
        if source is not None:
            if which is not None or request.fallback:
                raise UsageError("source is given alone, without step and fallback")
            with telling_touched(request), self._until_closed(request.hold):
                async with self._joint.begun(request) as joint:
                    return await self._from_source(source, request, joint, named=True)
        alone, named = self._context.world_size == 1, which is not None and not request.fallback
        left = self._until_closed(request.hold)
        naming = naming_refusals(step=which if isinstance(which, int) else None)
        with telling_touched(request), left, self._numbered(named) as asked, naming:
            async with self._joint.begun(request) as joint:
                if which is not None:
                    await self._saves.settled(which)
                agreements = None if alone or named else await self._agreeing()
                result = await self._first_whole(which, request, agreements, asked, joint)
                initial = self._context.settings.initial
                if result is None:
                    await begin_anew(self._context, self._place)
                if result is None and initial is not None:
                    return await self._from_source(initial, request, joint)
                return result

    async def choose(self, which: int | str | None, name: str | None) -> CheckpointInfo | None:
        """Choose the checkpoint that a load would take, the same on all ranks, with its summary.

        Args:
            which: The step or id; None for the newest.
            name: The name of the checkpoint in its metadata; None for any.

        Raises:
            UsageError: If both are given.
            CheckpointNotFound: If ``which`` is absent or incomplete. If there is none to resume
                from, and the setting ``resume`` is ``"must"``.
            CkpipeError: Any error of an agreement of ranks.
        """
        if which is not None and name is not None:
            raise UsageError("step and name are given, and only one of them can be")
        catalog, resume = self._context.store.catalog, self._context.settings.resume
        alone, named = self._context.world_size == 1, which is not None
        find = partial(newest_repaired, self._context.store.retrying)
        if name is not None:
            find = partial(catalog.named, name)
        info = None
        with self._until_closed(None), self._numbered(named) as asked:
            if which is not None:
                await self._saves.settled(which)
            agreements = None if alone or named else await self._agreeing()
            if named or name is not None or resume != "never":
                with self._waiting():
                    info = await choose(
                        self._context, self._saves, which, agreements, asked, find=find
                    )
        if info is not None:
            if which is None and name is None:
                await self._tell_greater(info.key)
            return await catalog.inspected(info)
        if name is None:
            await begin_anew(self._context, self._place)
        return None

    async def _from_source(
        self, url: str, request: LoadRequest, joint: Joint | None, *, named: bool = False
    ) -> LoadResult:
        """Load a checkpoint that another program wrote; each rank reads what it needs."""
        # A run that opens no source does not import the readers of foreign formats.
        from ckpipe.foreign.source import open_place

        context, address = self._context, without_secrets(url)
        events = _LoadEvents(context.events, address, 0, context.rank, address)
        with events.told():
            async with open_place(url, context.settings) as place:
                opened = Opened(place.store, await place.described())
                if named and request.without_nan:
                    raise _chosen()
                load = await self._read_all(opened, events, request, joint)
                await opened.check_unchanged()
                return await self._finish(events, load, joint)

    async def read_boxes(self, which: int | str, boxes: Sequence[TensorBox]) -> None:
        """Fill tensors with boxes of saved ones, whichever ranks have written them."""
        store, arena = self._context.store, self._context.arena
        lanes = self._context.settings.load.lanes
        with self._until_closed(None):
            await self._saves.settled(which)
            info = await find_repaired(store.retrying, which)
            async with store.catalog.opened(info.key) as opened:
                labels = {label for label, _, _ in boxes}
                take = partial(LabelledTensors, opened, first_wins=False, labels=labels)
                await (await anyio.to_thread.run_sync(take)).fill(boxes, arena, lanes)
            lines.record(store.catalog, opened.document)

    async def _first_whole(
        self,
        which: int | str | None,
        request: LoadRequest,
        agreements: Agreements | None,
        asked: str,
        joint: Joint | None,
    ) -> LoadResult | None:
        """Load the wanted checkpoint; with a fallback, the first that is whole; None if none is."""
        info = None
        if which is not None or self._context.settings.resume != "never":
            with self._waiting():
                find = partial(self._without_nan, request) if request.without_nan else None
                info = await choose(self._context, self._saves, which, agreements, asked, find=find)
        damaged: dict[str, str] = {}
        first: CkpipeError | None = None
        tried = 0
        while info is not None:
            vote = None
            if agreements is not None and request.fallback:
                vote = agreements, f"{asked}.ranks.{tried}"
            tried += 1
            try:
                verdict = await self._attempt(info, request, vote, joint, damaged)
            except CheckpointIncomplete as error:
                if self._context.world_size > 1 or (which is not None and not damaged):
                    error.hint = "Load another, or the newest, on all ranks alike"
                    raise
                verdict = await self._refuse(info, error, None, damaged, request)
            if isinstance(verdict, LoadResult):
                self._saves.loaded(verdict.step)
                if which is None and not damaged:
                    await self._tell_greater(info.key)
                assert verdict.report is not None
                return replace(verdict, report=replace(verdict.report, damaged=damaged))
            first = first or verdict.error or _error_elsewhere(info, verdict)
            if verdict.fault == "unfit":
                raise _unreplaced(first, info, verdict)
            if verdict.fault == "damaged":
                damaged[info.id] = verdict.how
                self._events_of(info).damaged(verdict.how)
            elif tried > _MOST_TRIED or (tried == 1 and which is not None):
                raise first
            info = None if verdict.next is None else _info(verdict.next)
        if damaged and first is not None:
            first.add_note(f"None of the {len(damaged)} checkpoints that could serve is whole")
        if first is not None and (damaged or request.filled or agreements is not None):
            raise first
        return None

    async def _without_nan(
        self, request: LoadRequest, before: CheckpointId | None = None
    ) -> CheckpointInfo | None:
        """Find the newest checkpoint without NaN; None if none is complete, or older than one.

        Raises:
            CheckpointNotFound: If all of the root have NaN.
        """
        catalog = self._context.store.catalog
        unread: Literal["raise", "take"] = "take" if request.fallback else "raise"
        found = await catalog.without_nan(before=before, unread=unread)
        if found is None and before is None and await newest_repaired(catalog.backend):
            raise CheckpointNotFound(
                f"Every complete checkpoint at {self._place} has NaN",
                hint="`ckpipe info --match` shows in which tensors; load a step by its number",
            )
        return found

    async def _tell_greater(self, loaded: CheckpointId) -> None:
        """Tell, once and on the first rank, of a greater step of another line."""
        store = self._context.store
        if self._context.rank == 0 and store.is_first("a greater step"):
            await lines.tell_greater(store.catalog, loaded, self._place)

    async def _attempt(
        self,
        info: CheckpointInfo,
        request: LoadRequest,
        vote: _Vote | None,
        joint: Joint | None,
        damaged: Collection[str],
    ) -> LoadResult | _RanksVerdict:
        """Load one checkpoint; return the verdict if it is damaged and a fallback is allowed."""
        events = self._events_of(info)
        with events.told(), naming_refusals(step=info.step):
            fault: CorruptCheckpoint | CheckpointIncomplete | None = None
            try:
                load = await self._read(info, events, request, joint)
                if vote is None:
                    return await self._finish(events, load, joint)
            except CorruptCheckpoint as error:
                error.located(step=info.step)
                if not request.fallback and not isinstance(error, LeavesUnfilled):
                    error.hint = error.hint or _FALL_BACK
                    raise
                fault = error
            except CheckpointIncomplete as error:
                if vote is None:
                    raise
                fault = error
            except Exception:
                # Not a fault of the checkpoint: this rank's program must handle it.
                if vote is not None:
                    await vote[0].accept(vote[1], _WHOLE)
                raise
            if fault is not None:
                verdict = await self._refuse(info, fault, vote, damaged, request)
                if joint is not None:
                    await joint.give_up(fault, self._context.rank)
                if verdict.fault is None:
                    raise InvalidManifest(
                        f"The ranks agreed that {info.id} is whole, and it is not"
                    )
            else:
                assert vote is not None
                verdict = await self._accept(info, vote)
                if verdict.fault is None:
                    return await self._finish(events, load, joint)
            if joint is not None:
                joint.attempts += 1
            events.failed(verdict.how)
        return verdict

    async def _read(
        self, info: CheckpointInfo, events: _LoadEvents, request: LoadRequest, joint: Joint | None
    ) -> MatchedLoad:
        """Read a checkpoint under a lease, and verify it; no object has its state yet."""
        context = self._context
        retrying, rank, world_size = context.store.retrying, context.rank, context.world_size

        async def look() -> ManifestDocument:
            near = await read_near(retrying, info.key, rank, world_size)
            return near or await read_index(retrying, info.key)

        async with context.store.catalog.opened(info.key, look) as opened:
            return await self._read_all(opened, events, request, joint)

    async def _read_all(
        self, opened: Opened, events: _LoadEvents, request: LoadRequest, joint: Joint | None
    ) -> MatchedLoad:
        """Match and read an opened checkpoint; tell of the progress."""
        context, tally = self._context, ReadTally()

        async def look_at_objects(memo: InspectionMemo) -> None:
            if joint is not None:
                await self._joint.all_at("matching", joint, events.name, events.step)
                await on_caller(request.caller, joint.look, request, memo)

        async with BackgroundTask(lambda: events.progress(tally)).started():
            return await read_all(
                opened,
                request,
                context.arena,
                lanes=context.settings.load.lanes,
                rank=context.rank,
                world_size=context.world_size,
                tally=tally,
                before_match=look_at_objects,
            )

    async def _refuse(
        self,
        info: CheckpointInfo,
        error: CorruptCheckpoint | CheckpointIncomplete,
        vote: _Vote | None,
        damaged: Collection[str],
        request: LoadRequest,
    ) -> _RanksVerdict:
        """Propose the fault of a checkpoint and the next candidate; return the decision."""
        backend, fault = self._context.store.retrying, "damaged"
        if isinstance(error, CheckpointIncomplete):
            fault = "deleted"
        elif isinstance(error, LeavesUnfilled):
            fault = "unfit"
        if request.without_nan:
            following = await self._without_nan(request, before=info.key)
        elif fault == "deleted" and not damaged:
            following = await newest_repaired(backend)
        else:
            older = (each for each in await discover(backend) if each.key < info.key)
            following = next((each for each in older if each.complete), None)
        kind = "" if fault == "unfit" else f"{type(error).__name__}: "
        how, name = f"{kind}{error}", None if following is None else following.id
        if vote is None:
            return _RanksVerdict(fault, how, name, error)
        agreements, question = vote
        how = f"rank {self._context.rank} found {how}"
        decision = await agreements.decide(question, {"fault": fault, "how": how, "next": name})
        return replace(_read_verdict(decision), error=error)

    async def _accept(self, info: CheckpointInfo, vote: _Vote) -> _RanksVerdict:
        """Accept a checkpoint for this rank, and wait for the decision for a bounded time."""
        agreements, question = vote
        decided = await agreements.accept(question, _WHOLE)
        seconds = self._context.settings.load.agreement_timeout_seconds
        until = time.monotonic() + seconds
        with self._waiting():
            for pause in pauses(until, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS):
                await anyio.sleep(pause)
                decided = decided or await agreements.decided(question)
                if decided is not None:
                    return _read_verdict(decided[0])
            absent = await agreements.absent(question)
        raise UnsupportedTopology(
            f"Ranks {first_of(absent)} did not say within {seconds:g} s whether {info.id} is whole",
            step=info.step,
            rank=self._context.rank,
            hint="Call load(fallback=True) on all ranks alike, or raise "
            "load.agreement_timeout_seconds",
        )

    async def _finish(
        self, events: _LoadEvents, load: MatchedLoad, joint: Joint | None
    ) -> LoadResult:
        if joint is not None:
            await self._joint.all_at("applying", joint, events.name, events.step)
        result = await load.apply()
        lines.record(self._context.store.catalog, load.document)
        assert result.report is not None
        events.loaded(result.report)
        return result

    def _events_of(self, info: CheckpointInfo) -> _LoadEvents:
        return _LoadEvents(self._context.events, info.id, info.step, self._context.rank)

    async def close(self) -> None:
        """Wait for loads that fill a state; cancel those that wait for the lock or other ranks."""
        self._closed = True
        for wait in self._waits:
            wait.cancel()
        under_way = list(self._under_way.items())
        for scope, (hold, _) in under_way:
            if hold is not None and hold.is_pending:
                scope.cancel()
        for _, (_, ended) in under_way:
            await ended.wait()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Mark a wait for other ranks, which closing cancels.

        Raises:
            PipelineClosed: If the pipeline is closed.
        """
        if self._closed:
            raise _left()
        with anyio.CancelScope() as scope:
            self._waits.add(scope)
            try:
                yield
            finally:
                self._waits.discard(scope)
        if scope.cancelled_caught:
            raise _left()

    @contextmanager
    def _until_closed(self, hold: LoadHold | None) -> Iterator[None]:
        if self._closed:
            raise _left()
        ended = anyio.Event()
        with anyio.CancelScope() as scope:
            self._under_way[scope] = (hold, ended)
            try:
                yield
            finally:
                if hold is not None:
                    hold.end()
                del self._under_way[scope]
                ended.set()
        if scope.cancelled_caught:
            raise _left()

    @contextmanager
    def _numbered(self, named: bool) -> Iterator[str]:
        """Name the question of this load by a counter, equal on all ranks since all call alike."""
        if named:
            yield ""
            return
        if self._failed_after not in (None, self._saves.accepted):
            self._calls += 1  # the load that the store failed was not repeated
        number, self._failed_after = self._calls, None
        self._calls += 1
        try:
            yield f"load-{number}"
        except StoreUnavailable:
            # A repeated call must ask the same question as ranks for which the store did not fail.
            if self._calls == number + 1:
                self._calls, self._failed_after = number, self._saves.accepted
            raise

    async def _agreeing(self) -> Agreements:
        """Return the agreements: in the torch.distributed Store, else through objects."""
        if self._agreements is None:
            context, launch = self._context, self._launch
            topology = Topology(context.rank, context.world_size)
            store = await anyio.to_thread.run_sync(
                agreeing_store, topology, context.settings, launch.attempt, abandon_on_cancel=True
            )
            if store is not None:
                self._agreements = TorchAgreements(store, topology)
            elif context.settings.read_only:
                raise UnsupportedTopology(
                    "Several ranks that read only need torch.distributed to agree on a checkpoint, "
                    "and they have no process group",
                    rank=context.rank,
                    hint="Call torch.distributed.init_process_group before, or name the same step "
                    "or id on all ranks, without fallback; steps() lists the checkpoints",
                )
            else:
                self._agreements = ObjectAgreements(
                    context.store.retrying, launch.attempt, topology, launch.claim
                )
        return self._agreements


def _chosen() -> UsageError:
    return UsageError(
        "without_nan chooses among the checkpoints of a run, and NaN are not counted in those of "
        "other programs",
        hint="Leave it out, or leave out step and source",
    )


def _error_elsewhere(info: CheckpointInfo, verdict: _RanksVerdict) -> CkpipeError:
    if verdict.fault == "deleted":
        return CheckpointIncomplete(f"{info.id} was deleted: {verdict.how}", step=info.step)
    return CorruptCheckpoint(f"{info.id} is damaged: {verdict.how}", step=info.step)


def _unreplaced(error: CkpipeError, info: CheckpointInfo, verdict: _RanksVerdict) -> CkpipeError:
    """Return the error of a target that is partly filled, and that the next candidate would mix."""
    error.add_note(f"The checkpoint {info.id} does not replace it: {verdict.how}")
    error.hint = "Build the target anew, and load a step into it that is whole"
    error.target_touched = True
    return error


def _read_verdict(data: Json) -> _RanksVerdict:
    try:
        return _RanksVerdict(data["fault"], data["how"], data["next"])
    except (KeyError, TypeError) as error:
        raise InvalidManifest(f"The decision of the ranks is unreadable: {data!r:.100}") from error


def _left() -> PipelineClosed:
    return PipelineClosed(
        "The pipeline was closed while the load waited for saves, the state lock or other ranks",
        hint="Wait for loads before you leave the pipeline",
    )


def _info(name: str) -> CheckpointInfo:
    id = CheckpointId.parse(name)
    if id is None:
        raise InvalidManifest(f"The ranks agreed to load {name!r:.100}, which is no checkpoint")
    return CheckpointInfo(name, id.step, id.attempt, id.count, complete=True)
