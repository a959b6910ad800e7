"""Digests: what their names say, and that nothing is lost or claimed on their word alone."""

from __future__ import annotations

import base64
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Literal

import torch
from bundles import manifest_of
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from sampling import EVERY

from ckpipe.backend import Backend, PutMode
from ckpipe.catalog.metadata_cache import MetadataCache
from ckpipe.catalog.prune import best, decide_on, prune
from ckpipe.catalog.sweep import sweep
from ckpipe.errors import CheckpointNotFound
from ckpipe.format.checksum import crc32c
from ckpipe.format.codec import encode_bundle
from ckpipe.format.keys import encode_float
from ckpipe.format.manifest import ManifestDocument
from ckpipe.format.metrics_sidecar import (
    MOST_PIECES,
    MetricsSidecar,
    read_sidecars,
    sidecar_keys,
    sidecar_of,
    sidecar_owner,
)
from ckpipe.format.names import DIGESTS, index_key
from ckpipe.retention import KeepBest, KeepEvery, KeepIf, KeepLast, Rule
from ckpipe.testing import MemoryBackend
from ckpipe.types import CheckpointId, CheckpointInfo

DAY = timedelta(days=1)
ATTEMPT = "20250101T000000000Z-x"
ID = CheckpointId(ATTEMPT, 7, 0)

metrics = st.dictionaries(st.text(max_size=30), st.floats(), max_size=12)
sizes = st.integers(0, 1 << 62)
digests = st.builds(MetricsSidecar, sizes, sizes, st.booleans(), metrics)
ids = st.builds(
    CheckpointId,
    st.text("abcXYZ019_-", min_size=1, max_size=64).map("20250101T000000000Z-{}".format),
    st.integers(0, 10**18 - 1),
    st.integers(0, 10**18 - 1),
)


@given(ids, digests, st.randoms())
def test_what_names_say_is_read_back_in_any_order(
    id: CheckpointId, digest: MetricsSidecar, chance: random.Random
) -> None:
    keys = list(sidecar_keys(id, digest))
    assert len(keys) <= MOST_PIECES
    assert all(len(key.removeprefix(DIGESTS)) <= 255 and key.isascii() for key in keys)
    assert all(key.count("/") == DIGESTS.count("/") for key in keys)
    assert {sidecar_owner(key) for key in keys} <= {id}
    chance.shuffle(keys)
    found = read_sidecars([*keys, *keys])
    assert {id: each.text for id, each in found.items()} == ({id: digest.text} if keys else {})


def test_few_metrics_take_one_object_and_too_many_none() -> None:
    def keys(count: int) -> int:
        return len(
            sidecar_keys(
                ID, MetricsSidecar(10**12, 4096, False, {f"m{n}": 0.1 for n in range(count)})
            )
        )

    assert [keys(0), keys(3), keys(20), keys(200)] == [1, 1, 2, 0]
    long = {"loss/" + "x" * 300: 0.123456789012345}
    assert len(sidecar_keys(ID, MetricsSidecar(1, 1, True, long))) == 3


@given(digests, st.data())
def test_names_that_were_changed_cut_or_given_to_another_say_nothing(
    digest: MetricsSidecar, data: st.DataObject
) -> None:
    keys = list(sidecar_keys(ID, digest))
    if not keys:
        return
    number = data.draw(st.integers(0, len(keys) - 1))
    key = keys[number]
    at = data.draw(st.integers(len(DIGESTS), len(key) - 1))
    changed = key[:at] + data.draw(st.sampled_from("Aa0-_.9")) + key[at + 1 :]
    other = key.replace(str(ID), str(replace(ID, step=8)))
    for damaged in ([changed], [key[:at]], [other], []):
        left = [*keys[:number], *damaged, *keys[number + 1 :]]
        expected = {ID: digest.text} if changed == key and damaged == [changed] else {}
        assert {id: each.text for id, each in read_sidecars(left).items()} == expected


def sealed(text: bytes, place: str = "11") -> str:
    head = f"{ID}.{place}."
    total = crc32c(text, crc32c(head.encode())).to_bytes(4)
    return DIGESTS + head + base64.urlsafe_b64encode(total + text).rstrip(b"=").decode()


@given(st.lists(st.one_of(st.text(max_size=300), st.binary(max_size=100).map(sealed))))
def test_hostile_names_are_nothing(names: list[str]) -> None:
    assert read_sidecars([*names, *(DIGESTS + name for name in names)]) == {}


def test_well_sealed_lies_about_the_form_are_nothing() -> None:
    assert ID in read_sidecars([sealed(b'[1,5,1,false,{"a":0.5}]')])
    for text in (
        b"[" * 120,
        b"[" * 60 + b"]" * 60,
        b"1e999",
        b"\xff",
        b"[2,5,1,false,{}]",
        b"[1,5,1,0,{}]",
        b"[1,true,1,false,{}]",
        b"[1,-5,1,false,{}]",
        b"[1,9223372036854775808,1,false,{}]",
        b'[1, 5,1,false,{"a":0.5}]',
        b'[1,5,1,false,{"a":0.5,"a":0.5}]',
        b'[1,5,1,false,{"a":1}]',
        b'[1,5,1,false,{"a":1e999}]',
        b'[1,5,1,false,{"a":NaN}]',
        b'[1,5,1,false,{"a":null}]',
        b'[1,5,1,false,{"a":[]}]',
        b'[1,5,1,false,{"\\u0061":0.5}]',
        b"[1,5,1,false,[]]",
    ):
        assert read_sidecars([sealed(text)]) == {}, text
    good = sidecar_keys(ID, MetricsSidecar(1, 1, False, {}))
    two_of_them = [*good, *sidecar_keys(ID, MetricsSidecar(2, 1, False, {}))]
    assert read_sidecars(two_of_them) == {}, "two that differ tell nothing"


State = Literal["right", "missing", "damaged", "contradicting"]
STATES: list[State] = ["right", "right", "right", "missing", "damaged"]
LOSSES = st.sampled_from([0.5, 1.0, 2.0, 3.0, float("nan"), float("-inf")])


@dataclass(frozen=True)
class Saved:
    """A checkpoint of a root, and what became of its index and its digest."""

    loss: float
    final: bool
    index_is_whole: bool
    digest: State
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
    """A root, and the same root without digests."""
    told, untold = MemoryBackend(), MemoryBackend()
    for step, each in enumerate(everything):
        index = index_of(step, each)
        data = encode_bundle(index) if each.index_is_whole else b"{}"
        for backend in (told, untold):
            await backend.put(index_key(index.id), data, PutMode.CREATE)
        digest = sidecar_of(index)
        if each.digest == "contradicting":
            digest = replace(digest, metrics={"loss": each.claim})
        for key in sidecar_keys(index.id, digest) if each.digest != "missing" else ():
            key = key[:-1] if each.digest == "damaged" else key
            await told.put(key, b"{}", PutMode.CREATE)
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
        return await best(told, metric, mode, MetadataCache())
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
async def test_the_best_is_what_it_claims_to_be_whatever_digests_claim(
    everything: list[Saved], mode: Literal["min", "max"]
) -> None:
    told, _ = await with_checkpoints(everything)
    found = await best_by(told, "loss", mode)
    values = key_of(everything, mode)
    honest = [step for step in values if everything[step].digest != "contradicting"]
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
async def test_nothing_is_deleted_on_the_word_of_a_digest(
    everything: list[Saved], rule: Rule, protected: int
) -> None:
    told, untold = await with_checkpoints(everything)
    kept = {str(CheckpointId(ATTEMPT, protected, 0)): "leased"}
    now = datetime.now(UTC)
    truth = await decide_on(untold, rule, kept, MetadataCache(), now=now)
    planned = await decide_on(told, rule, kept, MetadataCache(), now=now)
    done = await prune(told, rule, kept, MetadataCache(), sweep_after=DAY)
    assert (done.keep, done.remove) == (planned.keep, planned.remove), "as the dry run said"
    assert set(done.remove) <= set(truth.remove)
    again = await decide_on(told, rule, kept, MetadataCache(), now=now)
    assert set(again.remove) <= set(truth.remove)
    if all(each.digest != "contradicting" for each in everything):
        assert (done.keep, done.remove) == (truth.keep, truth.remove)
        assert again.remove == ()
    await sweep(told, timedelta(microseconds=-1))
    left = {id for each in told._store.objects if (id := sidecar_owner(each))}
    assert not set(map(str, left)) & set(done.remove), "no digest of a deleted one is left"


async def test_that_no_checkpoint_has_a_metric_is_not_believed_of_digests() -> None:
    nan = float("nan")
    others = [Saved(nan, False, True, "right", nan) for _ in range(5)]
    told, untold = await with_checkpoints([Saved(1.0, False, True, "contradicting", nan), *others])
    rule, now = KeepIf(lambda each: each.step != 1) & KeepBest("loss"), datetime.now(UTC)
    truth = await decide_on(untold, rule, {}, MetadataCache(), now=now)
    assert (await decide_on(told, rule, {}, MetadataCache(), now=now)).keep == truth.keep


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
            for key in sidecar_keys(id, sidecar_of(index)):
                await told.put(key, b"{}", PutMode.CREATE)
    decision = await prune(told, KeepLast(1), {"a": "lives"}, MetadataCache(), sweep_after=DAY)
    kept = [(each.attempt, each.step) for each in map(CheckpointId.parse, decision.keep) if each]
    # The newest of the first cannot be read, which leaves the one before to be its newest.
    assert sorted(kept) == [(launches[0], 1), (launches[0], 2), (launches[1], 2)]


async def test_one_digest_that_lies_ends_the_belief_in_all() -> None:
    told, _ = await with_checkpoints(
        [
            Saved(0.1, False, True, "contradicting", 5.0),
            Saved(3.0, False, True, "contradicting", 0.05),
            Saved(2.0, False, True, "right", 2.0),
        ]
    )
    found = await best(told, "loss", "min", MetadataCache())
    assert found is not None
    assert found.step == 0, "though its own digest had hidden it"


async def test_what_takes_the_place_of_another_in_a_stretch_can_be_read() -> None:
    told = MemoryBackend()
    for step, count in ((1, 0), (1, 1), (2, 0), (3, 0), (4, 0)):
        id = CheckpointId(ATTEMPT, step, count)
        index = replace(index_of(step, Saved(1.0, False, True, "right", 1.0)), id=id)
        data = b"{}" if count else encode_bundle(index)
        await told.put(index_key(id), data, PutMode.CREATE)
        for key in sidecar_keys(id, sidecar_of(index)):
            await told.put(key, b"{}", PutMode.CREATE)
    decision = await prune(told, KeepEvery(steps=1), {}, MetadataCache(), sweep_after=DAY)
    assert decision.remove == ()
