"""Saving and loading through the whole pipeline, awaiting and blocking."""

from __future__ import annotations

import asyncio
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors, events
from tests.support.pipelines import Stateful, Stores, load_existing, loaded_state, same, small_state
from tests.support.settling import SettlingPipeline, settle


async def test_saves_and_loads_the_same_bits(tmp_path: Path) -> None:
    state = small_state()
    async with ckpipe.Pipeline(tmp_path / "run") as pipeline:
        handle = await pipeline.save(state, step=7, metrics={"loss": math.nan}, metadata={"a": [1]})
        info = await handle
        assert (info.step, info.complete, info.id) == (7, True, handle.id)
        result = await pipeline.load()
        assert result is not None
        assert same(result.state, state)
        assert result.step == 7
        assert math.isnan(result.metrics["loss"])
        assert result.metadata == {"a": [1]}


def test_state_may_change_as_soon_as_save_returns(store: Stores) -> None:
    state = {"weight": torch.zeros(100_000)}
    store.slow.hold("write")
    with ckpipe.SyncPipeline(store.url, staging_bytes="1MiB", staging={"block_bytes": 65536}) as p:
        handle = p.save(state, step=0)
        state["weight"].fill_(1)
        assert handle.status == "uploading"
        store.slow.release()
        handle.wait()
        assert torch.equal(loaded_state(p)["weight"], torch.zeros(100_000))


def test_steps_count_on_from_the_last(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        assert pipeline.save({"a": 1}).step == 0
        assert pipeline.save({"a": 2}, step=10).step == 10
        assert pipeline.save({"a": 3}, until="committed").step == 11
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        loaded = load_existing(pipeline)
        assert (loaded.step, loaded.state) == (11, {"a": 3})
        assert pipeline.save({"a": 4}).step == 12


def test_same_step_twice_makes_two_checkpoints(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        first = pipeline.save({"a": 1}, step=5, until="committed")
        second = pipeline.save({"a": 2}, step=5, until="committed")
        assert first.id != second.id
        newest = loaded_state(pipeline, 5)
        older = loaded_state(pipeline, first.id)
        assert (newest, older) == ({"a": 2}, {"a": 1})


async def test_training_that_blocks_its_coroutine_stops_no_upload(store: Stores) -> None:
    async with ckpipe.Pipeline(store.url) as pipeline:
        committed = threading.Event()
        pipeline.events.add(
            lambda event: committed.set() if isinstance(event, events.Completed) else None
        )
        handle = await pipeline.save({"a": torch.ones(1000)}, step=0)
        assert committed.wait(30)  # this coroutine's loop is blocked here
        assert (await handle.committed()).step == 0


async def test_a_waiter_may_be_cancelled_without_cancelling_the_save(store: Stores) -> None:
    store.slow.hold("write")
    async with ckpipe.Pipeline(store.url) as pipeline:
        handle = await pipeline.save({"a": torch.ones(1000)}, step=0)
        waiter = asyncio.create_task(handle.committed())
        await asyncio.to_thread(store.slow.gate.wait_until_held)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        store.slow.release()
        assert (await handle).complete


async def test_cancelling_a_save_leaves_nothing_and_the_next_one_works(store: Stores) -> None:
    store.slow.hold("write")
    async with ckpipe.Pipeline(store.url) as pipeline:
        handle = await pipeline.save({"a": torch.ones(1000)}, step=0)
        await asyncio.to_thread(store.slow.gate.wait_until_held)
        await handle.cancel()
        assert handle.status == "cancelled"
        with pytest.raises(errors.SaveCancelled, match="save again if"):
            await handle
        store.slow.release()
        assert await pipeline.steps() == []
        info = await (await pipeline.save({"a": torch.ones(1000)}, step=1))
        assert [each.id for each in await pipeline.steps()] == [info.id]
        far = datetime.max.replace(tzinfo=UTC)
        assert await store.memory.remove_stale_uploads("", before=far) == 0


class TestBusy:
    """Two saves, and memory for one."""

    SETTINGS: dict[str, Any] = {"staging": {"bytes": 65536, "block_bytes": 65536}}  # noqa: RUF012
    STATE: dict[str, Any] = {"a": torch.ones(1000)}  # noqa: RUF012

    def test_skip_says_so_and_loses_nothing(self, store: Stores) -> None:
        with ckpipe.SyncPipeline(store.url, on_busy="skip", **self.SETTINGS) as pipeline:
            pipeline.save(self.STATE, step=0, until="committed")
            store.slow.hold("write")
            first = pipeline.save(self.STATE, step=1)
            second = pipeline.save(self.STATE, step=2)
            assert second.status == "skipped"
            with pytest.raises(errors.SaveSkipped, match="memory"):
                second.wait()
            store.slow.release()
            assert first.wait().step == 1
            assert [each.step for each in pipeline.steps()] == [0, 1]

    def test_fail_raises_and_the_pipeline_goes_on(self, store: Stores) -> None:
        with ckpipe.SyncPipeline(store.url, on_busy="fail", **self.SETTINGS) as pipeline:
            store.slow.hold("write")
            first = pipeline.save(self.STATE, step=1)
            with pytest.raises(errors.PipelineBusy, match="step 2"):
                pipeline.save(self.STATE, step=2)
            store.slow.release()
            first.wait()
            pipeline.save(self.STATE, step=3, until="committed")

    def test_wait_stages_the_second_once_the_first_is_written(self, store: Stores) -> None:
        with ckpipe.SyncPipeline(store.url, **self.SETTINGS) as pipeline:
            store.slow.hold("write")
            first = pipeline.save(self.STATE, step=1)
            made: list[ckpipe.SyncSaveHandle] = []
            saver = threading.Thread(target=lambda: made.append(pipeline.save(self.STATE, step=2)))
            saver.start()
            store.slow.gate.wait_until_held()
            assert not made
            store.slow.release()
            saver.join(30)
            assert first.wait().step == 1
            assert made[0].wait().step == 2

    def test_several_saves_are_in_flight_within_the_budget(self, store: Stores) -> None:
        settings: dict[str, Any] = {"staging": {"bytes": 3 * 65536, "block_bytes": 65536}}
        with ckpipe.SyncPipeline(store.url, **settings) as pipeline:
            store.slow.hold("write")
            handles = [pipeline.save(self.STATE, step=step) for step in range(3)]
            assert [each.status for each in handles] == ["uploading"] * 3
            store.slow.release()
            assert [each.wait().step for each in handles] == [0, 1, 2]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_state_larger_than_the_memory_for_it_is_saved(tmp_path: Path, overlap: bool) -> None:
    state = {str(n): torch.full((100_000 + n,), float(n)) for n in range(20)}
    staging = {"bytes": 262_144, "block_bytes": 65_536, "overlap": overlap}
    with SettlingPipeline(tmp_path, staging=staging) as pipeline:
        used = []
        pipeline.events.add(lambda event: used.append(pipeline.statistics().budget_used))
        for step in range(3):
            pipeline.save(state, step=step).wait()
            settle(pipeline)
            assert 0 < pipeline.trim() <= 262_144
        assert same(loaded_state(pipeline), state)
    assert 0 < max(used) <= 262_144


def test_one_pipeline_follows_a_state_that_changes_its_shape(tmp_path: Path) -> None:
    states: list[dict[str, Any]] = [
        {"a": torch.ones(5)},
        {"a": torch.ones(5)},
        {"a": torch.ones(5000), "b": torch.zeros(3)},
        {"b": torch.zeros(3), "c": None},
        {"a": torch.ones(5).double()},
    ]
    tied = torch.ones(4)
    states += [{"a": tied, "b": tied.clone()}, {"a": tied, "b": tied[:]}]
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        planned = []
        for step, state in enumerate(states):
            handle = pipeline.save(state, step=step, until="committed")
            planned.append(handle.report.planned)
        for step, state in enumerate(states):
            assert same(loaded_state(pipeline, step), state)
        assert planned == [True, False, True, True, True, True, True]
        last = loaded_state(pipeline, 6)
        assert last["a"].data_ptr() == last["b"].data_ptr()


def test_include_and_exclude_select_by_label(tmp_path: Path) -> None:
    state = {"model": {"a": torch.ones(2), "b": torch.ones(3)}, "opt": [1, 2], "epoch": 3}
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.save(state, step=0, include=["model", "epoch"], exclude=["*.b"], until="committed")
        assert same(loaded_state(pipeline), {"model": {"a": torch.ones(2)}, "epoch": 3})


def test_settings_and_topology_are_checked_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(errors.SettingsError, match="on_busy"):
        ckpipe.SyncPipeline(tmp_path, on_bussy="wait")  # type: ignore[call-arg]
    with pytest.raises(errors.SettingsError, match="url"):
        ckpipe.SyncPipeline()
    with pytest.raises(errors.BackendNotFound, match="nosuch"):
        ckpipe.SyncPipeline("nosuch://x").__enter__()


def test_no_save_begins_while_another_thread_closes(store: Stores) -> None:
    staging = {"bytes": "64MiB", "block_bytes": 65536}
    pipeline = ckpipe.SyncPipeline(store.url, staging=staging)
    pipeline.__enter__()
    store.slow.hold("write")
    handles = [pipeline.save({"a": torch.ones(10)}, step=0)]
    closer = threading.Thread(target=pipeline.__exit__, args=(None, None, None))
    closer.start()
    saves = (pipeline.save({"a": torch.ones(10)}, step=step) for step in range(1, 500))
    try:
        with pytest.raises(errors.PipelineClosed, match="closed meanwhile"):
            handles.extend(saves)
    finally:
        store.slow.release()
        closer.join(30)
    assert {each.status for each in handles} == {"committed"}
    with pytest.raises(errors.PipelineClosed, match="is closed"):
        pipeline.save({"a": torch.ones(10)}, step=500)


def test_unsupported_object_is_named_by_its_path(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        with pytest.raises(errors.UnsupportedState, match=r"outer\.inner\.1") as caught:
            pipeline.save({"outer": {"inner": [1, object()]}}, step=4)
        assert caught.value.step == 4
        assert pipeline.steps() == []
        pipeline.save({"outer": {"inner": [1, 2]}}, step=5, until="committed")
        with pytest.raises(errors.UnsupportedState, match=r"outer\.inner\.1"):
            pipeline.save({"outer": {"inner": [1, object()]}}, step=6)
        with pipeline.lock.mutating(timeout=30):
            pass
        pipeline.save({"a": 1}, step=7, until="committed")
        assert pipeline.statistics().budget_used == 0


class Strange:
    """An object that only pickle can save."""


def test_pickle_is_needed_at_both_ends(tmp_path: Path) -> None:
    state = {"strange": Strange()}
    with (
        ckpipe.SyncPipeline(tmp_path) as pipeline,
        pytest.raises(errors.UnsupportedState, match="strange"),
    ):
        pipeline.save(state, step=1)
    with ckpipe.SyncPipeline(tmp_path, pickle="allow") as pipeline:
        pipeline.save(state, step=1).wait()
    with pytest.raises(ckpipe.CkpipeError, match='pickle="allow"'):
        ckpipe.load(tmp_path)
    assert isinstance(ckpipe.load(tmp_path, pickle="allow").state["strange"], Strange)


def test_a_pipeline_loads_by_pickle_if_it_saves_by_it(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path, pickle="allow") as pipeline:
        pipeline.save({"strange": Strange()}, step=1)
        for result in (pipeline.load(), pipeline.load(pickle=None)):
            assert result is not None
            assert isinstance(result.state["strange"], Strange)
        with pytest.raises(errors.UnsupportedState, match="strange"):
            pipeline.load(pickle="refuse")
    settings = ckpipe.Settings(pickle="allow")
    assert isinstance(ckpipe.load(tmp_path, settings=settings).state["strange"], Strange)
    with (
        ckpipe.SyncPipeline(tmp_path) as pipeline,
        pytest.raises(errors.UnsupportedState, match="strange"),
    ):
        pipeline.load()


def test_a_save_that_waits_for_memory_ends_with_its_pipeline(store: Stores) -> None:
    staging = {"bytes": 65536, "block_bytes": 65536}
    state = {"a": torch.ones(10)}
    raised: list[BaseException] = []
    pipeline = ckpipe.SyncPipeline(store.url, drain_timeout_seconds=0, staging=staging)

    def wait_for_memory() -> None:
        try:
            pipeline.save(state, step=1)
        except errors.SaveError as error:
            raised.append(error)

    with pytest.raises(errors.DrainTimeout), pipeline:  # noqa: PT012
        waits = threading.Event()
        pipeline.events.add(
            lambda event: waits.set() if event == events.SaveStarted(event.id, 1, 0) else None
        )
        store.slow.hold("write")
        pipeline.save(state, step=0)
        saver = threading.Thread(target=wait_for_memory)
        saver.start()
        assert waits.wait(30)
        pipeline.preempt()
    saver.join(30)
    assert not saver.is_alive()
    assert [type(each) for each in raised] == [errors.DrainTimeout]


def test_saves_of_one_new_structure_at_once_have_the_memory_they_need(store: Stores) -> None:
    # The second is walked when the first has replaced the plan that its memory was reserved for.
    walked, go_on = threading.Event(), threading.Event()

    def late() -> bool:
        walked.set()
        return go_on.wait(30)

    large = torch.arange(100_000)
    settings: dict[str, Any] = {"staging_bytes": "4MiB", "staging": {"block_bytes": 65536}}
    with ckpipe.SyncPipeline(store.url, **settings) as pipeline:
        pipeline.save({"small": torch.zeros(1)}, until="committed")
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(pipeline.save, {"w": large, "o": Stateful(late)}, step=1)
            assert walked.wait(30)
            pipeline.save({"w": large, "o": Stateful(bool)}, step=2)
            go_on.set()
            waiting.result(30).wait()
        assert torch.equal(loaded_state(pipeline, 1)["w"], large)


async def test_saves_of_different_structures_at_once_do_not_disturb_each_other(
    store: Stores,
) -> None:
    states = [{f"{name}{n}": torch.zeros(n + 1) for n in range(100)} for name in "abcd"]
    async with ckpipe.Pipeline(store.url) as pipeline:
        handles = await asyncio.gather(*(pipeline.save(state) for state in states * 4))
        infos = await asyncio.gather(*(handle.committed() for handle in handles))
    assert len({info.id for info in infos}) == 16


def test_trainers_go_on_while_a_save_waits_for_memory(store: Stores) -> None:
    store.slow.hold("write")
    settings: dict[str, Any] = {"staging_bytes": "128KiB", "staging": {"block_bytes": 65536}}
    with ckpipe.SyncPipeline(store.url, **settings) as pipeline:
        pipeline.save({"w": torch.zeros(100)})
        # It needs both blocks, as only the walk finds out, and one is taken.
        walked = threading.Event()
        state = {"w": torch.zeros(20_000), "o": Stateful(walked.set)}
        saving = threading.Thread(target=pipeline.save, args=(state,))
        saving.start()
        try:
            assert walked.wait(30)
            waits = False
            while not waits:  # each round makes way for a capture
                waits = pipeline.statistics().budget_waiting > 0
                with pipeline.lock.mutating(timeout=30):
                    pass
        finally:
            store.slow.release()
            saving.join(30)
    with ckpipe.SyncPipeline(store.url) as pipeline:
        assert len(pipeline.steps()) == 2
