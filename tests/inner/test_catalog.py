"""The catalog deletes nothing that is in use, and believes no summary without the indexes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import anyio
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ckpipe
from ckpipe import errors
from ckpipe.backend import Backend, Children, ObjectInfo, PutMode
from ckpipe.catalog import leases
from ckpipe.catalog.catalog import Catalog
from ckpipe.catalog.delete import Removal, delete, finish_deletions, pin
from ckpipe.catalog.find import NO_INDEX, matching
from ckpipe.catalog.leases import LEASE_LIFE, Lease, live_subjects, under_lease
from ckpipe.catalog.summaries import Summaries
from ckpipe.catalog.sweep import Leftovers, plan_sweep, uploads_before
from ckpipe.errors import CheckpointNotFound, CorruptCheckpoint, StoreError
from ckpipe.format.codec import encode_document
from ckpipe.format.labels import encode_float
from ckpipe.format.manifest import ManifestDocument
from ckpipe.format.names import (
    LEASES,
    PINS,
    index_key,
    launch_id,
    lease_key,
    short_names,
    summary_id,
    tombstone_key,
)
from ckpipe.format.summary import Summary, encode_summary, summary_of
from ckpipe.retention import KeepBest, KeepEvery, KeepIf, KeepLast, Rule
from ckpipe.testing import FaultyBackend, MemoryBackend
from ckpipe.testing.wrappers import Operation
from ckpipe.types import CheckpointId, CheckpointInfo
from tests.inner.made_up_ranks import manifest_of
from tests.support.pipelines import Stores
from tests.support.sampling import EVERY
from tests.support.stored_files import SUMMARIES, sealed, summary_key

STATE: dict[str, Any] = {"a": torch.ones(1000)}
LONG_AGO = datetime.min.replace(tzinfo=UTC)


async def keys(backend: ckpipe.Backend, prefix: str = "") -> list[str]:
    return sorted([each.key async for each in backend.list(prefix)])


def found(subject: str, age: float, holder: str = "x", renewal: int = 0) -> ObjectInfo:
    modified = datetime(2025, 1, 1, tzinfo=UTC) - timedelta(seconds=age)
    return ObjectInfo(lease_key(subject, holder, renewal), 2, modified)


def test_a_lease_lives_as_long_as_its_newest_object_is_young() -> None:
    life = LEASE_LIFE.total_seconds()
    there = [
        found("a", life + 1), found("a", life - 1, renewal=1),
        found("b", life + 1), found("c", life),
    ]  # fmt: skip
    assert live_subjects(there, datetime(2025, 1, 1, tzinfo=UTC)) == {"a", "c"}


def saved(step: int) -> CheckpointId:
    return CheckpointId("20250101T000000000Z-x", step, 0)


async def with_checkpoints(*steps: int) -> FaultyBackend:
    backend = FaultyBackend(MemoryBackend())
    for step in steps:
        await backend.put(f"{saved(step)}/rank-00000.safetensors", b"data", PutMode.CREATE)
        await backend.put(index_key(saved(step)), b"{}", PutMode.CREATE)
    return backend


def lies_below(id: CheckpointId, found: list[str]) -> list[str]:
    return [key for key in found if key.startswith(str(id))]


async def test_a_lease_that_comes_before_the_tombstone_keeps_the_data() -> None:
    backend = await with_checkpoints(1)
    lease = Lease(backend.inner, str(saved(1)))
    await lease.renew()
    assert await delete(backend, saved(1)) is Removal.WAITS
    assert len(lies_below(saved(1), await keys(backend))) == 2
    finished: set[CheckpointId] = set()
    # However old the tombstone is, it is not forgotten while there is data.
    await finish_deletions(backend, finished, forget_before=datetime.max.replace(tzinfo=UTC))
    assert len(lies_below(saved(1), await keys(backend))) == 2
    assert tombstone_key(saved(1)) in await keys(backend)
    await lease.release()
    await finish_deletions(backend, finished, forget_before=LONG_AGO)
    assert lies_below(saved(1), await keys(backend)) == []
    assert finished == {saved(1)}


async def test_a_lease_is_renewed_while_work_lasts_and_released_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leases, "RENEW_EVERY", timedelta(microseconds=1))
    backend = FaultyBackend(MemoryBackend())
    renewed = anyio.Event()

    def is_lease(operation: Operation) -> bool:
        return operation.verb == "put"

    backend.call(lambda _: renewed.set(), is_lease, nth=4)
    async with under_lease(backend, "x"):
        await renewed.wait()
        seen = await keys(backend.inner)
    assert 1 <= len(seen) <= 2, "the one before goes when the next is there"
    assert await keys(backend.inner) == []


async def test_what_work_raises_comes_without_a_group_and_ends_the_lease() -> None:
    backend = MemoryBackend()
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with under_lease(backend, "x"):
            assert len(await keys(backend)) == 1
            raise ZeroDivisionError
    assert await keys(backend) == []


async def test_cancelled_work_ends_its_lease() -> None:
    backend, begun = MemoryBackend(), anyio.Event()

    async def work() -> None:
        async with under_lease(backend, "x"):
            begun.set()
            await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work)
        await begun.wait()
        tasks.cancel_scope.cancel()
    assert await keys(backend) == []


async def test_an_index_waits_for_no_lease_and_its_failure_is_told() -> None:
    memory, id = MemoryBackend(), CheckpointId("20250101T000000000Z-a", 1, 0)
    backend = FaultyBackend(memory)
    lease = backend.pause("put")

    async def look() -> ManifestDocument:
        lease.release()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        async with Catalog(backend).opened(id, look):
            raise AssertionError
    assert await keys(memory) == []


async def test_a_pin_that_comes_after_the_tombstone_is_refused() -> None:
    backend, id = MemoryBackend(), CheckpointId("20250101T000000000Z-a", 1, 0)
    await backend.put(index_key(id), b"{}", PutMode.CREATE)
    await pin(backend, id)
    await Catalog(backend).unpin(str(id))
    await backend.put(tombstone_key(id), b"{}", PutMode.CREATE)  # by who has just chosen it
    with pytest.raises(errors.CheckpointIncomplete, match="deleted just now"):
        await pin(backend, id)
    assert not [key async for key in backend.list(PINS)]


def saved_steps(url: object, *steps: int) -> list[CheckpointInfo]:
    with ckpipe.SyncPipeline(str(url)) as pipeline:
        return [pipeline.save(STATE, step=step).wait() for step in steps]


def steps(pipeline: ckpipe.SyncPipeline) -> list[int]:
    return [info.step for info in pipeline.steps()]


DAY = timedelta(days=1)
NOW, LATER = datetime.now(UTC), datetime.now(UTC) + 30 * DAY


@pytest.mark.parametrize("by_another", [False, True])
async def test_deletions_are_remembered_for_as_long_as_their_marks_stay(
    store: Stores, by_another: bool
) -> None:
    *gone, _ = await anyio.to_thread.run_sync(saved_steps, store.url, 0, 1, 2, 3)
    backend, rule = store.memory, KeepLast(1)
    finished: set[CheckpointId] = set()
    another: set[CheckpointId] = set()
    for _ in range(2):
        await Catalog(backend, rule, summaries=Summaries(deleted=finished)).prune(now=NOW)
        assert finished == {each.key for each in gone}
    who = another if by_another else finished
    await Catalog(backend, rule, summaries=Summaries(deleted=who)).prune(now=LATER)
    await Catalog(backend, rule, summaries=Summaries(deleted=finished)).prune(now=LATER)
    assert finished == set()


@pytest.mark.parametrize("how", ["prune", "decide", "best"])
async def test_what_others_have_removed_is_forgotten(store: Stores, how: str) -> None:
    *gone, newest = await anyio.to_thread.run_sync(saved_steps, store.url, 0, 1, 2, 3)
    backend, summaries = store.memory, Summaries()
    await Catalog(backend, KeepLast(1), summaries=summaries).prune(now=NOW, dry_run=True)
    assert summaries.names() == {newest.id, *(each.id for each in gone)}
    await Catalog(backend, KeepLast(1)).prune(now=NOW)
    if how == "prune":
        await Catalog(backend, KeepLast(1), summaries=summaries).prune(now=NOW)
    elif how == "decide":
        await Catalog(backend, KeepLast(1), summaries=summaries).prune(now=NOW, dry_run=True)
    else:
        with pytest.raises(errors.CheckpointNotFound):  # it was saved_steps without metrics
            await Catalog(backend, summaries=summaries).best("loss", "min")
    assert summaries.names() == {newest.id}


async def test_what_is_learned_while_a_root_is_listed_is_not_forgotten() -> None:
    summaries, name = Summaries(), "step-000000000001.20250101T000000000Z-x.0"

    class Committing(MemoryBackend):
        async def children(self, prefix: str = "") -> Children:
            found = await super().children(prefix)
            summaries.learn(name, Summary(0, 1, final=False, metrics={}))
            return found

    await Catalog(Committing(), summaries=summaries).prune(now=NOW, dry_run=True)
    assert summaries.names() == {name}


# ---- sweeps ----

ATTEMPTS = [f"2026112{n}T000000000Z-{name}" for n, name in enumerate("ab")]


def incomplete(attempt: str, step: int) -> CheckpointInfo:
    id = CheckpointId(attempt, step, 0)
    return CheckpointInfo(str(id), step, attempt, 0, complete=False, reason=NO_INDEX)


times = st.integers(0, 72).map(lambda hours: NOW - timedelta(hours=hours))


@st.composite
def leftovers(draw: st.DrawFn) -> Leftovers:
    found = draw(
        st.lists(
            st.builds(incomplete, st.sampled_from(ATTEMPTS), st.integers(1, 4)),
            unique_by=lambda each: each.id,
        )
    )
    subjects = [*ATTEMPTS, *map(launch_id, ATTEMPTS), *(each.id for each in found), "x"]
    leases = draw(st.lists(st.tuples(st.sampled_from(subjects), times), max_size=3))
    return Leftovers(
        tuple(found),
        draw(st.dictionaries(st.sampled_from(["a", "b"]), times)),
        tuple(ObjectInfo(f"{LEASES}{name}/holder.{n}", 2, t) for n, (name, t) in enumerate(leases)),
        tuple(ObjectInfo(f".ckpipe/deleted/{each.id}", 2, draw(times)) for each in found[:1]),
        (),
        claims=draw(st.dictionaries(st.sampled_from(["a", "b"]), times.map(lambda t: (t, t)))),
    )


@given(leftovers(), st.sets(st.sampled_from(ATTEMPTS)), st.integers(0, 1))
def test_a_sweep_removes_only_what_is_old_and_unused(
    found: Leftovers, running: set[str], days: int
) -> None:
    threshold = DAY * days
    report = plan_sweep(found, NOW, threshold, running)
    assert {*report.remove} | {*report.keep} == {each.id for each in found.incomplete}
    assert not {*report.remove} & {*report.keep}
    leased = {each.key.split("/")[2] for each in found.leases if NOW - each.modified <= DAY / 96}
    for info in found.incomplete:
        launch = launch_id(info.attempt)
        young = launch not in found.active or NOW - found.active[launch] < threshold
        began = found.claims.get(launch, (LONG_AGO, LONG_AGO))[1]
        in_use = (
            leased & {info.id, info.attempt, launch}
            or info.attempt in running
            or NOW - began <= LEASE_LIFE
        )
        assert (info.id in report.keep) == bool(young or in_use)
    for objects, gone in ((found.tombstones, report.tombstones), (found.leases, report.leases)):
        assert set(gone) == {each.key for each in objects if NOW - each.modified > threshold}


@given(leftovers(), st.dictionaries(st.sampled_from(["a", "b"]), times), st.sampled_from([0, 1, 2]))
def test_no_upload_goes_that_a_running_launch_may_have_begun(
    found: Leftovers, opened: dict[str, datetime], days: int
) -> None:
    claims = {name: (time, time) for name, time in opened.items()}
    before = uploads_before(replace(found, claims=claims), NOW, days * DAY, [ATTEMPTS[1]])
    assert before <= NOW - days * DAY
    for launch, opened_at in opened.items():
        young = NOW - opened_at <= LEASE_LIFE
        leased = any(
            NOW - each.modified <= LEASE_LIFE
            and each.key.split("/")[2]
            in {launch, *(i.id for i in found.incomplete if launch_id(i.attempt) == launch)}
            for each in found.leases
        )
        if young or leased or launch == "b":
            assert before <= opened_at
    if not opened:
        assert before == NOW - days * DAY


# ---- summaries: nothing is lost or claimed on their word alone ----

ATTEMPT = "20250101T000000000Z-x"

State = Literal["right", "missing", "damaged", "torn", "future", "large", "contradicting"]
UNREADABLE: dict[State, Callable[[bytes], bytes]] = {
    "damaged": lambda data: data.replace(b"metrics", b"metrica"),
    "torn": lambda data: data[: len(data) // 2],
    "future": lambda data: sealed({"format": "ckpipe", "version": 2, "metrics": {"loss": -9.0}}),
    "large": lambda data: data + bytes(1 << 17),
}
STATES: list[State] = ["right", "right", "right", "missing", *UNREADABLE]
LOSSES = st.sampled_from([0.5, 1.0, 2.0, 3.0, float("nan"), float("-inf")])


@dataclass(frozen=True)
class Saved:
    """A checkpoint of a root, and what became of its index and its summary."""

    loss: float
    final: bool
    index_is_whole: bool
    summary: State
    claim: float


def some_saved(states: Sequence[State]) -> st.SearchStrategy[list[Saved]]:
    whole = st.sampled_from([True, True, True, False])
    one = st.builds(Saved, LOSSES, st.booleans(), whole, st.sampled_from(states), LOSSES)
    return st.lists(one, min_size=1, max_size=9)


TEMPLATE, _ = manifest_of({"t": torch.tensor([1])})


def index_of(step: int, each: Saved) -> ManifestDocument:
    (part,) = TEMPLATE.parts
    part = replace(part, metrics={"loss": encode_float(each.loss)}, final=each.final)
    id = CheckpointId(ATTEMPT, step, 0)
    return replace(TEMPLATE, kind="index", id=id, parts=(part,))


async def told_and_untold(everything: Sequence[Saved]) -> tuple[MemoryBackend, MemoryBackend]:
    """A root, and the same root without summaries."""
    told, untold = MemoryBackend(), MemoryBackend()
    for step, each in enumerate(everything):
        index = index_of(step, each)
        data = encode_document(index) if each.index_is_whole else b"{}"
        for backend in (told, untold):
            await backend.put(index_key(index.id), data, PutMode.CREATE)
        summary = summary_of(index)
        if each.summary == "contradicting":
            summary = replace(summary, metrics={"loss": each.claim})
        data = encode_summary(index.id, summary)
        if each.summary in UNREADABLE:
            data = UNREADABLE[each.summary](data)
        if each.summary != "missing":
            await told.put(summary_key(index.id), data, PutMode.CREATE)
    return told, untold


def key_of(everything: Sequence[Saved], mode: str) -> dict[int, float]:
    """The values that count, the greater the better."""
    sign = 1 if mode == "max" else -1
    return {
        step: sign * each.loss
        for step, each in enumerate(everything)
        if each.index_is_whole and each.loss == each.loss
    }


async def best_by(
    told: Backend, metric: str, mode: Literal["min", "max"]
) -> CheckpointInfo | Literal["damaged"] | None:
    try:
        return await Catalog(told).best(metric, mode)
    except CheckpointNotFound:
        return None
    except CorruptCheckpoint:
        return "damaged"


MODES: st.SearchStrategy[Literal["min", "max"]] = st.sampled_from(["min", "max"])


@hypothesis_settings(max_examples=1000 if EVERY else 60)
@given(some_saved(STATES), MODES)
async def test_the_best_is_what_the_indexes_say(
    everything: list[Saved], mode: Literal["min", "max"]
) -> None:
    told, _ = await told_and_untold(everything)
    found = await best_by(told, "loss", mode)
    damaged = {step for step, each in enumerate(everything) if not each.index_is_whole}
    # Of a single checkpoint no summary is read.
    summed = {step for step in damaged if everything[step].summary == "right" and everything[1:]}
    if damaged - summed:
        assert found == await best_by(told, "accuracy", mode) == "damaged"
        return
    values = key_of([replace(each, index_is_whole=True) for each in everything], mode)
    expected = max(values, key=lambda step: (values[step], step), default=None)
    if expected in damaged:
        assert found == "damaged"
    else:
        assert (None if found is None else found.step) == expected  # type: ignore[union-attr]
    assert await best_by(told, "accuracy", mode) is None


@hypothesis_settings(max_examples=1000 if EVERY else 60)
@given(some_saved([*STATES, "contradicting"]), MODES)
async def test_the_best_is_what_it_claims_to_be_whatever_summaries_claim(
    everything: list[Saved], mode: Literal["min", "max"]
) -> None:
    told, _ = await told_and_untold(everything)
    found = await best_by(told, "loss", mode)
    values = key_of(everything, mode)
    honest = [step for step in values if everything[step].summary != "contradicting"]
    if found == "damaged":
        assert not all(each.index_is_whole for each in everything)
    elif found is None:
        assert honest == []
    else:
        assert found.step in values
        assert all(values[found.step] >= values[step] for step in honest)


RULES: list[Rule] = [
    KeepBest("loss"),
    KeepBest("loss", "max", 2) | KeepEvery(steps=4),
    KeepLast(2) | KeepBest("loss"),
    KeepLast(0),
    KeepEvery(steps=3) & KeepBest("loss", n=4) | KeepLast(1),
]


@hypothesis_settings(max_examples=1500 if EVERY else 80)
@given(some_saved([*STATES, "contradicting"]), st.sampled_from(RULES), st.integers(-1, 8))
async def test_nothing_is_deleted_on_the_word_of_a_summary(
    everything: list[Saved], rule: Rule, protected: int
) -> None:
    told, untold = await told_and_untold(everything)
    kept = Counter([str(CheckpointId(ATTEMPT, protected, 0))])
    now = datetime.now(UTC)
    truth = await Catalog(untold, rule, loading=kept).prune(now=now, dry_run=True)
    planned = await Catalog(told, rule, loading=kept).prune(now=now, dry_run=True)
    done = await Catalog(told, rule, loading=kept).prune()
    assert (done.keep, done.remove) == (planned.keep, planned.remove), "as the dry run said"
    assert set(done.remove) <= set(truth.remove)
    again = await Catalog(told, rule, loading=kept).prune(now=now, dry_run=True)
    assert set(again.remove) <= set(truth.remove)
    if all(each.summary != "contradicting" for each in everything):
        assert (done.keep, done.remove) == (truth.keep, truth.remove)
        assert again.remove == ()
    await Catalog(told, sweep_after=timedelta(microseconds=-1)).sweep()
    left = {id for each in told._store.objects if (id := summary_id(each))}
    assert not set(map(str, left)) & set(done.remove), "no summary of a deleted one is left"


async def test_that_no_checkpoint_has_a_metric_is_not_believed_of_summaries() -> None:
    nan = float("nan")
    others = [Saved(nan, False, True, "right", nan) for _ in range(5)]
    told, untold = await told_and_untold([Saved(1.0, False, True, "contradicting", nan), *others])
    rule, now = KeepIf(lambda each: each.step != 1) & KeepBest("loss"), datetime.now(UTC)
    truth = await Catalog(untold, rule).prune(now=now, dry_run=True)
    assert (await Catalog(told, rule).prune(now=now, dry_run=True)).keep == truth.keep


async def test_what_a_running_launch_keeps_is_known_for_sure() -> None:
    launches = ["20250101T000000000Z-a", "20250102T000000000Z-b"]
    told = MemoryBackend()
    for attempt in launches:
        for step in range(3):
            id = CheckpointId(attempt, step, 0)
            index = replace(index_of(step, Saved(1.0, False, True, "right", 1.0)), id=id)
            whole = (attempt, step) != (launches[0], 2)
            data = encode_document(index) if whole else b"{}"
            await told.put(index_key(id), data, PutMode.CREATE)
            summary = encode_summary(id, summary_of(index))
            await told.put(summary_key(id), summary, PutMode.CREATE)
    decision = await Catalog(told, KeepLast(1)).prune(launches[0])
    kept = [(each.attempt, each.step) for each in map(CheckpointId.parse, decision.keep) if each]
    # The newest of the first cannot be read, which leaves the one before to be its newest.
    assert sorted(kept) == [(launches[0], 1), (launches[0], 2), (launches[1], 2)]


async def test_one_summary_that_lies_ends_the_belief_in_all() -> None:
    told, _ = await told_and_untold(
        [
            Saved(0.1, False, True, "contradicting", 5.0),
            Saved(3.0, False, True, "contradicting", 0.05),
            Saved(2.0, False, True, "right", 2.0),
        ]
    )
    found = await Catalog(told).best("loss", "min")
    assert found is not None
    assert found.step == 0, "though its own summary had hidden it"


async def test_what_takes_the_place_of_another_in_a_stretch_can_be_read() -> None:
    told = MemoryBackend()
    for step, count in ((1, 0), (1, 1), (2, 0), (3, 0), (4, 0)):
        id = CheckpointId(ATTEMPT, step, count)
        index = replace(index_of(step, Saved(1.0, False, True, "right", 1.0)), id=id)
        data = b"{}" if count else encode_document(index)
        await told.put(index_key(id), data, PutMode.CREATE)
        summary = encode_summary(id, summary_of(index))
        await told.put(summary_key(id), summary, PutMode.CREATE)
    decision = await Catalog(told, KeepEvery(steps=1)).prune()
    assert decision.remove == ()


async def test_a_summary_that_the_store_does_not_give_costs_a_read_of_the_index() -> None:
    told, _ = await told_and_untold([Saved(loss, False, True, "right", loss) for loss in (1, 2)])
    faulty = FaultyBackend(told)
    faulty.fail(StoreError("no"), lambda each: each.verb == "get" and SUMMARIES in each.key)
    found = await Catalog(faulty).best("loss", "min")
    assert found is not None
    assert found.step == 0
    assert [each.verb for each in faulty.operations].count("get") == 4


@pytest.mark.parametrize("how", ["prune", "delete", "sweep"])
async def test_summaries_of_earlier_versions_go_with_their_checkpoint(how: str) -> None:
    everything = [Saved(float(step), False, True, "missing", 0.0) for step in range(3)]
    told, _ = await told_and_untold(everything)
    for step in range(3):
        for piece in ("12.AAAA", "22.AAAA"):
            key = f"{SUMMARIES}{CheckpointId(ATTEMPT, step, 0)}.{piece}"
            await told.put(key, b"{}", PutMode.CREATE)
    if how == "prune":
        await Catalog(told, KeepLast(1)).prune()
    else:
        for step in range(2):
            await delete(told, CheckpointId(ATTEMPT, step, 0), None if how == "delete" else ())
    if how == "sweep":
        await Catalog(told, sweep_after=timedelta(microseconds=-1)).sweep()
    left = {summary_id(key) for key in told._store.objects if key.startswith(SUMMARIES)}
    assert left == {CheckpointId(ATTEMPT, 2, 0)}


def test_short_names_are_unique_and_found_again() -> None:
    def id(attempt: str, step: int, count: int = 0) -> CheckpointId:
        return CheckpointId(f"20261121T03420512{attempt}", step, count)

    ids = [
        id("3Z-9f3a2c01", 5), id("3Z-9f3a2c01", 5, 1), id("3Z-9f3a7", 5), id("3Z-job", 5),
        id("3Z-job2", 5), id("3Z-same", 6), id("4Z-same", 6),
    ]  # fmt: skip
    infos = [
        CheckpointInfo(str(each), each.step, each.attempt, each.count, complete=True)
        for each in ids
    ]
    names = short_names(ids)
    assert [*names.values()][:5] == ["5.9f3a2.0", "5.9f3a2.1", "5.9f3a7", "5.job", "5.job2"]
    assert [*names][5:] == [*names.values()][5:]
    for each in ids:
        assert [found.id for found in matching(infos, names[str(each)])] == [str(each)]
    assert len(matching(infos, "5.9f3a2")) == 2
