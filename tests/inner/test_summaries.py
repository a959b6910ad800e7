"""Summaries: what their objects say, and that nothing is lost or claimed on their word alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ckpipe.backend import Backend, PutMode
from ckpipe.catalog.catalog import Catalog
from ckpipe.catalog.delete import delete
from ckpipe.errors import CheckpointNotFound, CorruptCheckpoint, OversizedMetadata, StoreError
from ckpipe.format.codec import encode_bundle
from ckpipe.format.labels import encode_float
from ckpipe.format.manifest import ManifestDocument
from ckpipe.format.names import index_key, summary_id
from ckpipe.format.summary import Summary, decode_summary, encode_summary, summary_of
from ckpipe.retention import KeepBest, KeepEvery, KeepIf, KeepLast, Rule
from ckpipe.testing import FaultyBackend, MemoryBackend
from ckpipe.types import CheckpointId, CheckpointInfo
from tests.inner.stored_ranks import manifest_of
from tests.support.sampling import EVERY
from tests.support.stored_files import SUMMARIES, sealed, sealed_text, summary_data, summary_key

DAY = timedelta(days=1)
ATTEMPT = "20250101T000000000Z-x"
ID = CheckpointId(ATTEMPT, 7, 0)

metrics = st.dictionaries(st.text(max_size=30), st.floats(), max_size=12)
sizes = st.integers(0, 1 << 62)
names = st.none() | st.text(max_size=30)
summaries = st.builds(Summary, sizes, sizes, st.booleans(), metrics, sizes, name=names)


@given(summaries)
def test_a_summary_is_read_back(summary: Summary) -> None:
    found = decode_summary(ID, encode_summary(ID, summary))
    assert repr(found) == repr(summary)


@given(summaries, st.data())
def test_a_damaged_summary_is_none(summary: Summary, data: st.DataObject) -> None:
    whole = encode_summary(ID, summary)
    at = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytearray(whole)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    for damaged in (bytes(flipped), whole[:at], bytes(len(whole))):
        with pytest.raises(CorruptCheckpoint):
            decode_summary(ID, damaged)
    with pytest.raises(CorruptCheckpoint, match="no summary of this checkpoint"):
        decode_summary(replace(ID, step=8), whole)


@pytest.mark.parametrize(
    "other",
    [
        {"version": 2},
        {"kind": "index"},
        {"more": 1},
        {"final": 0},
        {"bytes": True},
        {"bytes": -5},
        {"bytes": 1 << 63},
        {"copied_bytes": None},
        {"metrics": []},
        {"metrics": {"a": None}},
        {"metrics": {"a": []}},
        {"metrics": {"a": "high"}},
        {"name": 1},
    ],
    ids=str,
)
def test_a_summary_of_another_form_is_none(other: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpoint):
        decode_summary(ID, summary_data(ID, 5, **{"metrics": {"a": 0.5}, **other}))


@pytest.mark.parametrize("text", [b"{", b"[" * 9000, b'{"a":1e999', b'{"a":NaN', b'{"a":1,"a":1'])
def test_a_summary_that_is_no_json_is_none(text: bytes) -> None:
    with pytest.raises(CorruptCheckpoint):
        decode_summary(ID, sealed_text(text))


def test_a_summary_of_too_many_metrics_is_not_written() -> None:
    with pytest.raises(OversizedMetadata):
        encode_summary(ID, Summary(1, 1, False, {f"m{n}": 0.1 for n in range(10_000)}))


def test_names_of_all_versions_belong_to_their_checkpoint() -> None:
    for rest in (".json", ".11.AAAAAAbx-_", ".2.zst"):
        assert summary_id(f"{SUMMARIES}{ID}{rest}") == ID
    for key in (f"{SUMMARIES}{ID}", f"{SUMMARIES}x.json", f"{ID}.json", f"{SUMMARIES}{ID}.a/b"):
        assert summary_id(key) is None


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


def saved(states: Sequence[State]) -> st.SearchStrategy[list[Saved]]:
    whole = st.sampled_from([True, True, True, False])
    one = st.builds(Saved, LOSSES, st.booleans(), whole, st.sampled_from(states), LOSSES)
    return st.lists(one, min_size=1, max_size=9)


TEMPLATE, _ = manifest_of({"t": torch.tensor([1])})


def index_of(step: int, each: Saved) -> ManifestDocument:
    (part,) = TEMPLATE.parts
    part = replace(part, metrics={"loss": encode_float(each.loss)}, final=each.final)
    id = CheckpointId(ATTEMPT, step, 0)
    return replace(TEMPLATE, kind="index", id=id, parts=(part,))


async def with_checkpoints(everything: Sequence[Saved]) -> tuple[MemoryBackend, MemoryBackend]:
    """A root, and the same root without summaries."""
    told, untold = MemoryBackend(), MemoryBackend()
    for step, each in enumerate(everything):
        index = index_of(step, each)
        data = encode_bundle(index) if each.index_is_whole else b"{}"
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


async def best_by(told: Backend, metric: str, mode: Literal["min", "max"]) -> CheckpointInfo | None:
    try:
        return await Catalog(told).best(metric, mode)
    except CheckpointNotFound:
        return None


MODES: st.SearchStrategy[Literal["min", "max"]] = st.sampled_from(["min", "max"])


@hypothesis_settings(max_examples=1000 if EVERY else 60)
@given(saved(STATES), MODES)
async def test_the_best_is_what_the_indexes_say(
    everything: list[Saved], mode: Literal["min", "max"]
) -> None:
    told, _ = await with_checkpoints(everything)
    found = await best_by(told, "loss", mode)
    values = key_of(everything, mode)
    expected = max(values, key=lambda step: (values[step], step), default=None)
    assert (None if found is None else found.step) == expected
    assert await best_by(told, "accuracy", mode) is None


@hypothesis_settings(max_examples=1000 if EVERY else 60)
@given(saved([*STATES, "contradicting"]), MODES)
async def test_the_best_is_what_it_claims_to_be_whatever_summaries_claim(
    everything: list[Saved], mode: Literal["min", "max"]
) -> None:
    told, _ = await with_checkpoints(everything)
    found = await best_by(told, "loss", mode)
    values = key_of(everything, mode)
    honest = [step for step in values if everything[step].summary != "contradicting"]
    if found is None:
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
@given(saved([*STATES, "contradicting"]), st.sampled_from(RULES), st.integers(-1, 8))
async def test_nothing_is_deleted_on_the_word_of_a_summary(
    everything: list[Saved], rule: Rule, protected: int
) -> None:
    told, untold = await with_checkpoints(everything)
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
    told, untold = await with_checkpoints([Saved(1.0, False, True, "contradicting", nan), *others])
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
            data = encode_bundle(index) if whole else b"{}"
            await told.put(index_key(id), data, PutMode.CREATE)
            summary = encode_summary(id, summary_of(index))
            await told.put(summary_key(id), summary, PutMode.CREATE)
    decision = await Catalog(told, KeepLast(1)).prune(launches[0])
    kept = [(each.attempt, each.step) for each in map(CheckpointId.parse, decision.keep) if each]
    # The newest of the first cannot be read, which leaves the one before to be its newest.
    assert sorted(kept) == [(launches[0], 1), (launches[0], 2), (launches[1], 2)]


async def test_one_summary_that_lies_ends_the_belief_in_all() -> None:
    told, _ = await with_checkpoints(
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
        data = b"{}" if count else encode_bundle(index)
        await told.put(index_key(id), data, PutMode.CREATE)
        summary = encode_summary(id, summary_of(index))
        await told.put(summary_key(id), summary, PutMode.CREATE)
    decision = await Catalog(told, KeepEvery(steps=1)).prune()
    assert decision.remove == ()


async def test_a_summary_that_the_store_does_not_give_costs_a_read_of_the_index() -> None:
    told, _ = await with_checkpoints([Saved(loss, False, True, "right", loss) for loss in (1, 2)])
    faulty = FaultyBackend(told)
    faulty.fail(StoreError("no"), lambda each: each.verb == "get" and SUMMARIES in each.key)
    found = await Catalog(faulty).best("loss", "min")
    assert found is not None
    assert found.step == 0
    assert [each.verb for each in faulty.operations].count("get") == 4


@pytest.mark.parametrize("how", ["prune", "delete", "sweep"])
async def test_summaries_of_earlier_versions_go_with_their_checkpoint(how: str) -> None:
    everything = [Saved(float(step), False, True, "missing", 0.0) for step in range(3)]
    told, _ = await with_checkpoints(everything)
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
