"""Pruning that is cut short at every operation, before it lands and after, then done again."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ckpipe.backend import PutMode
from ckpipe.catalog.find import discover
from ckpipe.catalog.leases import Lease
from ckpipe.catalog.metadata_cache import MetadataCache, MetadataSummary
from ckpipe.catalog.prune import decide_on, prune
from ckpipe.format.metrics_sidecar import MetricsSidecar
from ckpipe.format.names import index_key
from ckpipe.retention import KeepBest, KeepEvery, KeepLast, Rule
from ckpipe.testing import FaultyBackend, Landing, MemoryBackend
from ckpipe.types import CheckpointId

DAY = timedelta(days=1)


class Crash(BaseException):
    """What ends a process; nobody handles it."""


def saved(step: int) -> CheckpointId:
    return CheckpointId("20250101T000000000Z-x", step, 0)


async def with_checkpoints(losses: list[float]) -> tuple[FaultyBackend, MetadataCache]:
    backend = FaultyBackend(MemoryBackend())
    facts = MetadataCache()
    for step, loss in enumerate(losses):
        await backend.inner.put(f"{saved(step)}/rank-00000.safetensors", b"x", PutMode.CREATE)
        await backend.inner.put(index_key(saved(step)), b"{}", PutMode.CREATE)
        facts.learn(str(saved(step)), MetadataSummary(MetricsSidecar(1, 1, False, {"loss": loss})))
    return backend, facts


def known(facts: MetadataCache) -> MetadataCache:
    return MetadataCache(dict(facts.known))


async def complete(backend: FaultyBackend) -> set[str]:
    return {each.id for each in await discover(backend.inner) if each.complete}


async def crash_everywhere(losses: list[float], rule: Rule, leased: int, landing: Landing) -> None:
    for number in range(1, 200):
        backend, facts = await with_checkpoints(losses)
        await Lease(backend.inner, str(saved(leased))).renew()
        protected = {str(saved(leased)): "leased"}
        now = datetime.now(UTC)
        planned = await decide_on(backend.inner, rule, protected, known(facts), now=now)
        backend.fail(Crash(), number, landing)
        crashed = False
        try:
            await prune(backend, rule, protected, known(facts), sweep_after=DAY)
        except Crash:
            crashed = True
        backend.heal()
        assert set(planned.keep) <= await complete(backend), "whenever it crashes"
        await prune(backend, rule, protected, known(facts), sweep_after=DAY)
        assert await complete(backend) == set(planned.keep), "what was planned is what happens"
        again = await prune(backend, rule, protected, known(facts), sweep_after=DAY)
        assert again.remove == ()
        left = {each.key.partition("/")[0] async for each in backend.inner.list("")}
        assert not left & set(planned.remove), "no data of a deleted one is left"
        if not crashed:
            return
    raise AssertionError("it never got through")


RULES = [KeepLast(1), KeepEvery(steps=2) | KeepBest("loss"), KeepLast(2) | KeepBest("loss", n=2)]


@pytest.mark.parametrize("landing", list(Landing))
@hypothesis_settings(max_examples=8)
@given(st.data())
async def test_a_crash_anywhere_loses_nothing_and_is_made_good(
    landing: Landing, data: st.DataObject
) -> None:
    losses = data.draw(st.lists(st.sampled_from([0.5, 1.0, float("nan")]), min_size=2, max_size=5))
    leased = data.draw(st.integers(0, len(losses) - 1))
    await crash_everywhere(losses, data.draw(st.sampled_from(RULES)), leased, landing)
