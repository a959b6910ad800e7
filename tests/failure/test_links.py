"""Faults of incremental saves: at the link, at its source, and of the saves around it.

Whatever fails, a checkpoint is absent or complete and right, nothing of a failed save is left, and
later saves link only to what is committed.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe.errors import (
    CorruptCheckpoint,
    LinkUnavailable,
    SaveCancelled,
    SaveError,
    StoreError,
    StoreUnavailable,
)
from ckpipe.events import Event, SaveEnded
from ckpipe.testing import Landing
from ckpipe.testing.wrappers import Operation
from tests.failure import link_runs
from tests.failure.link_runs import (
    LINKS,
    Links,
    Store,
    check_apart,
    check_whole,
    in_memory,
    on_disk,
    save,
    state_of,
    step_of,
)
from tests.support.actors import PATIENCE
from tests.support.dead_runs import age
from tests.support.fork_server import Forks, forks
from tests.support.killed_runs import notes
from tests.support.pipelines import checked_whole, loaded_state, same
from tests.support.rank_pipelines import ranks
from tests.support.sampling import EVERY, sample
from tests.support.settling import settle

FAULTS = list(itertools.product(Landing, range(1, LINKS + 1)))
Make = Callable[[], Store]


@pytest.fixture(params=["memory", "disk"] if EVERY else ["memory"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Make a new store with each call; in the long form also of real files."""
    numbers = itertools.count()
    if request.param == "memory":
        return in_memory
    return lambda: on_disk(tmp_path / f"store-{next(numbers)}")


# The link fails


def test_an_error_of_a_link_that_may_pass_is_tried_again(make: Make) -> None:
    for landing, nth in sample(FAULTS, 2):
        store = make()
        with store.opened() as pipeline:
            links = Links(pipeline)
            save(pipeline, 1, 2)
            store.faulty.fail(StoreUnavailable("try later"), "link", landing, nth=nth)
            save(pipeline, 3, 4)
        assert (links.of(3), links.of(4)) == ([2] * LINKS, [3] * LINKS)
        check_whole(store, 1, 2, 3, 4)


def test_an_error_of_a_link_that_stays_leaves_nothing_of_the_save(make: Make) -> None:
    for landing, nth in sample(FAULTS, 2):
        store = make()
        with store.opened() as pipeline:
            links = Links(pipeline)
            save(pipeline, 1, 2)
            store.faulty.fail(StoreError("broken", key="k"), "link", landing, nth=nth)
            with pytest.raises(StoreError, match="broken"):
                save(pipeline, 3)
            assert not left_of(store, 3)
            save(pipeline, 4)
        assert links.of(4) == [2] * LINKS
        check_whole(store, 1, 2, 4)


def left_of(store: Store, step: int) -> list[str]:
    """The keys of a checkpoint's objects."""
    return [key for key in store.stored() if step_of(key) == step]


@pytest.mark.sample(1)
@pytest.mark.parametrize("landing", Landing)
def test_a_link_without_an_answer_is_tried_again(make: Make, landing: Landing) -> None:
    store = make()
    upload = {"backoff_seconds": 0, "retries": 1, "attempt_timeout_seconds": 0.5}
    with store.opened(upload=upload) as pipeline:
        links = Links(pipeline)
        save(pipeline, 1, 2)
        held = store.faulty.pause("link", landing)
        save(pipeline, 3)
        held.release()
        assert links.of(3) == [2] * LINKS
        holds = [store.faulty.pause("link", landing, nth=n) for n in range(1, 2 * LINKS + 1)]
        with pytest.raises(StoreUnavailable, match="did not answer"):
            save(pipeline, 4)
        for each in holds:
            each.release()
        assert not left_of(store, 4)
        store.faulty.heal()
        save(pipeline, 5)
        assert links.of(5) == [3] * LINKS
    check_whole(store, 1, 2, 3, 5)


def test_a_save_that_is_cancelled_at_a_link_leaves_nothing(make: Make) -> None:
    for landing, nth in sample(FAULTS, 2):
        store = make()
        with store.opened() as pipeline:
            links = Links(pipeline)
            save(pipeline, 1, 2)
            held = store.faulty.pause("link", landing, nth=nth)
            handle = pipeline.save(state_of(3), step=3)
            held.wait_until_held()
            handle.cancel()
            with pytest.raises(SaveCancelled):
                handle.wait()
            held.release()
            assert not left_of(store, 3)
            save(pipeline, 4)
        assert links.of(4) == [2] * LINKS
        check_whole(store, 1, 2, 4)


@pytest.fixture(scope="module")
def mortal() -> Iterator[Forks]:
    with forks(link_runs.__file__) as made:
        yield made


def committed(root: Path) -> list[int]:
    """The steps that runs on this root reported committed."""
    return [int(line.split()[1]) for line in notes(root) if line.startswith("committed")]


def links_of(root: Path, step: int) -> list[int]:
    """The steps of the checkpoints to which runs on this root have linked a save."""
    words = [line.split() for line in notes(root)]
    return [int(each[2]) for each in words if each[:2] == ["linked", str(step)]]


def test_killed_at_a_link(mortal: Forks, tmp_path: Path) -> None:
    """The run dies at a link of step 3 or 4; step 4 has a prune before it."""
    cases = list(itertools.product(("before", "after"), range(1, 2 * LINKS + 1), (None, 1)))
    for landing, nth, keep_last in sample(cases, 2):
        root = tmp_path / f"run-{landing}-{nth}-{keep_last}"
        case = {"root": str(root), "saves": 4, "keep_last": keep_last}
        assert mortal.run(case | {"verb": "link", "landing": landing, "nth": nth}) is None
        last = 2 + (nth > LINKS)
        assert committed(root) == list(range(1, last + 1))
        store = on_disk(root)
        with store.opened() as pipeline:
            assert checked_whole(pipeline, state_of)[-1].step == last
        age(root, 2)
        with store.opened() as pipeline:
            pipeline.sweep()
        kept = range(1, last + 1) if keep_last is None else [last]
        check_whole(store, *kept)
        assert mortal.run(case | {"saves": 2}) == 0
        # The first save of the next run has taken the number of the one that died.
        assert links_of(root, last + 1) == [last] * LINKS
        assert links_of(root, last + 2) == [last + 1] * LINKS
        check_apart(store, last + 2)


# The store refuses links


def test_a_store_that_refuses_links_gets_files_and_one_warning(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    store = make()
    with store.opened() as pipeline:
        links = Links(pipeline)
        store.faulty.fail(LinkUnavailable("other owner", key="k"), "link", times=None)
        save(pipeline, 1, 2, 3)
        assert store.reads_from(2)
        tried = store.links_tried()
        assert 1 <= tried <= LINKS
        save(pipeline, 4, 5)
        assert store.links_tried() == tried
        assert not links.found
    said = [each.getMessage() for each in caplog.records if "refuses to link" in each.getMessage()]
    assert len(said) == 1
    assert "other owner" in said[0]
    check_whole(store, 1, 2, 3, 4, 5)
    check_apart(store, 3)


@pytest.mark.parametrize("refused", range(1, LINKS + 1))
def test_saves_link_again_after_a_file_had_too_many_links(make: Make, refused: int) -> None:
    store = make()
    with store.opened() as pipeline:
        links = Links(pipeline)
        save(pipeline, 1, 2, 3)
        store.faulty.fail(LinkUnavailable("too many links", key="k"), "link", times=refused)
        save(pipeline, 4, 5, 6)
        assert links.of(4) == [3] * (LINKS - refused)
        assert links.of(5) == [4] * LINKS
        assert links.of(6) == [5] * LINKS
    check_whole(store, 1, 2, 3, 4, 5, 6)
    check_apart(store, 4)


# The source is gone or damaged


def check_full_then_linked(pipeline: ckpipe.SyncPipeline, store: Store, step: int) -> None:
    """Check that the next save writes all, the one after digests, and the third links."""
    links, tried = Links(pipeline), store.links_tried()
    save(pipeline, step, step + 1)
    assert store.links_tried() == tried
    save(pipeline, step + 2)
    assert links.of(step + 2) == [step + 1] * LINKS


def test_a_source_that_was_deleted_by_force_fails_one_save(make: Make) -> None:
    store = make()
    with store.opened() as pipeline:
        save(pipeline, 1, 2, 3)
        pipeline.delete(3, force=True)
        with pytest.raises(SaveError, match=r"are lost: step-0*3\.\S* is gone") as caught:
            save(pipeline, 4)
        assert "next save writes all" in str(caught.value)
        assert not left_of(store, 4)
        check_full_then_linked(pipeline, store, 5)
    check_whole(store, 1, 2, 5, 6, 7)


def test_a_source_that_goes_during_the_save_fails_it(tmp_path: Path) -> None:
    for nth in sample(range(1, LINKS + 1), 1):
        store = on_disk(tmp_path / str(nth))
        with store.opened() as pipeline:
            save(pipeline, 1, 2)
            (base,) = store.directory.glob("step-000000000002.*/")
            held = store.faulty.pause("link", nth=nth)
            handle = pipeline.save(state_of(3), step=3)
            held.wait_until_held()
            shutil.rmtree(base)
            held.release()
            with pytest.raises(SaveError, match="is gone"):
                handle.wait()
            settle(pipeline)
            assert not left_of(store, 3)
            check_full_then_linked(pipeline, store, 4)
            pipeline.delete(2, force=True)
        check_whole(store, 1, 4, 5, 6)


def data_files(store: Store, step: int) -> list[Path]:
    """The data files of a checkpoint, the largest first."""
    return sorted(
        store.directory.glob(f"step-{step:012}.*/*"), key=lambda path: -path.stat().st_size
    )


def file_of(store: Store, step: int, tensor: str) -> Path:
    """The data file of a checkpoint that has a tensor."""
    (found,) = (
        p for p in data_files(store, step) if f'"{tensor}"'.encode() in p.read_bytes()[:999]
    )
    return found


def flip(path: Path, at: int) -> None:
    """Change a byte of a file in place."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def cut(path: Path) -> None:
    """Shorten a file in place."""
    os.truncate(path, 1000)


@pytest.mark.parametrize("damage", ["flipped", "shortened", "unreadable"])
def test_a_damaged_source_of_a_block_fails_one_save(tmp_path: Path, damage: str) -> None:
    store = on_disk(tmp_path)
    with store.opened() as pipeline:
        save(pipeline, 1, 2)
        path = file_of(store, 2, "partly")
        if damage == "flipped":
            flip(path, 20_000)
        elif damage == "shortened":
            cut(path)
        else:
            error = StoreError("bad sector", key="k")
            error.unreadable = error.transient = True
            key = str(path.relative_to(store.directory))
            bad = lambda each: (each.verb, each.key) == ("read_into", key)  # noqa: E731
            store.faulty.fail(error, bad, times=None)
        with pytest.raises(
            SaveError, match=r"are lost: step-0*2\.\S* (is damaged at byte|cannot be read)"
        ):
            save(pipeline, 3)
        assert not left_of(store, 3)
        check_full_then_linked(pipeline, store, 4)
        pipeline.delete(2, force=True)
    check_whole(store, 1, 4, 5, 6)


def test_a_save_that_began_before_the_damage_was_seen_is_no_source(tmp_path: Path) -> None:
    store = on_disk(tmp_path)
    with store.opened() as pipeline:
        links = Links(pipeline)
        save(pipeline, 1, 2)
        flip(file_of(store, 2, "partly"), 20_000)
        held = [store.faulty.pause("link", nth=nth) for nth in range(1, LINKS + 1)]
        third = pipeline.save(state_of(3), step=3)
        held[-1].wait_until_held()
        commit = store.faulty.pause(put_of(4))
        moved = {**state_of(4), "partly": torch.zeros(40_000)}
        fourth = pipeline.save(moved, step=4)
        commit.wait_until_held()
        for each in held:
            each.release()
        try:
            with pytest.raises(SaveError, match="is damaged"):
                third.wait()
        finally:
            commit.release()
        fourth.wait()
        settle(pipeline)
        assert links.of(4) == [2] * LINKS
        assert same(loaded_state(pipeline, 4), moved)
        check_full_then_linked(pipeline, store, 5)


def test_damage_of_a_linked_file_is_found_by_all_that_have_it(tmp_path: Path) -> None:
    store = on_disk(tmp_path)
    with store.opened() as pipeline:
        links = Links(pipeline)
        save(pipeline, 1, 2, 3)
        flip(file_of(store, 3, "frozen"), 100_000)
        save(pipeline, 4)
        assert links.of(4) == [3] * LINKS
        for step in (2, 3, 4):  # one file with three names
            for call in (pipeline.verify, lambda step: loaded_state(pipeline, step)):
                with pytest.raises(CorruptCheckpoint) as caught:
                    call(step)
                assert str(file_of(store, step, "frozen").name) in str(caught.value)
        pipeline.verify(1)
        assert same(loaded_state(pipeline, 1), state_of(1))


# Only committed checkpoints are sources


def put_of(step: int) -> Callable[[Operation], bool]:
    """The commit of a step."""
    return lambda each: each.verb == "put" and each.key.startswith(f"step-{step:012}")


def swinging(step: int, value: float) -> dict[str, Any]:
    """A state that has one file more, with a value."""
    return {**state_of(step), "swinging": torch.full((40_000,), value)}


@pytest.mark.parametrize("how", ["failed", "cancelled"])
def test_a_save_that_is_not_committed_is_never_a_source(make: Make, how: str) -> None:
    store = make()
    with store.opened() as pipeline:
        links = Links(pipeline)
        for step in (1, 2):
            pipeline.save(swinging(step, 1), step=step).wait()
        if how == "failed":
            store.faulty.fail(StoreError("broken", key="k"), put_of(3))
            with pytest.raises(StoreError, match="broken"):
                pipeline.save(swinging(3, 2), step=3).wait()
        else:
            held = store.faulty.pause(put_of(3))
            handle = pipeline.save(swinging(3, 2), step=3)
            held.wait_until_held()
            handle.cancel()
            held.release()
        settle(pipeline)
        pipeline.save(swinging(4, 2), step=4).wait()  # rests as to step 3, and moved since step 2
        assert links.of(4) == [2] * LINKS
        pipeline.save(swinging(5, 2), step=5).wait()
        assert links.of(5) == [4] * (LINKS + 1)
        for step in (1, 2, 4, 5):
            assert same(loaded_state(pipeline, step), swinging(step, 1 + (step > 2)))


def test_a_prune_leaves_the_base_of_a_save_under_way(make: Make) -> None:
    """Step 4 has bytes of step 2 that step 3, whose commit prunes, has not."""
    store, ended = make(), threading.Event()

    def see(event: Event) -> None:
        if isinstance(event, SaveEnded) and event.step == 3:
            ended.set()

    with store.opened(keep_last=1, staging={"block_bytes": link_runs.BLOCK}) as pipeline:
        links = Links(pipeline)
        pipeline.events.add(see)
        for step in (1, 2):
            pipeline.save(swinging(step, 1), step=step).wait()
            settle(pipeline)
        commit = store.faulty.pause(put_of(3))
        third = pipeline.save(swinging(3, 2), step=3)
        commit.wait_until_held()
        held = [store.faulty.pause("link", nth=nth) for nth in range(1, LINKS + 2)]
        fourth = pipeline.save(swinging(4, 1), step=4)
        held[0].wait_until_held()
        commit.release()
        third.wait()
        assert ended.wait(PATIENCE)
        there = {step_of(key) for key in store.stored()}
        for each in held:
            each.release()
        fourth.wait()
        settle(pipeline)
        assert there == {2, 3}
        assert 2 in links.of(4)
        assert {step_of(key) for key in store.stored()} == {4}
        assert same(loaded_state(pipeline), swinging(4, 1))


# The last save


@pytest.mark.sample(1)
@pytest.mark.parametrize("landing", Landing)
def test_the_last_save_before_an_end_links(make: Make, landing: Landing) -> None:
    store = make()
    preemption = {"enabled": True, "signals": ["SIGUSR2"]}
    with store.opened(preemption=preemption, keep_last=1, save_every_steps=1) as pipeline:
        links = Links(pipeline)
        save(pipeline, 1, 2)
        store.faulty.fail(StoreUnavailable("try later"), "link", landing)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert pipeline.preempted
        assert pipeline.should_save(3)
        pipeline.save(state_of(3), step=3, final=True)
    assert links.of(3) == [2] * LINKS
    check_whole(store, 3)


# Sweeps


def dead_at_a_link(mortal: Forks, root: Path, **case: Any) -> tuple[Store, Path]:
    """Leave step 3 of a run that was killed with its first link; return it and its folder."""
    case |= {"root": str(root), "saves": 3}
    assert mortal.run(case | {"verb": "link", "landing": "after", "nth": 1}) is None
    (dead,) = root.glob("step-000000000003.*/")
    assert any(path.stat().st_nlink > 1 for path in dead.glob("rank-*"))
    return on_disk(root), dead


def test_a_sweep_goes_by_the_time_of_the_link(mortal: Forks, tmp_path: Path) -> None:
    store, dead = dead_at_a_link(mortal, tmp_path / "run", aged=10)
    with store.opened() as pipeline:
        assert list(pipeline.sweep().keep) == [dead.name]
        assert dead.exists()
        age(store.directory, 2)
        assert list(pipeline.sweep().remove) == [dead.name]
    check_whole(store, 1, 2)


def test_links_of_a_later_run_keep_no_remains(mortal: Forks, tmp_path: Path) -> None:
    store, dead = dead_at_a_link(mortal, tmp_path / "run")
    age(store.directory, 2)
    with store.opened() as pipeline:
        links = Links(pipeline)
        assert pipeline.load() is not None
        save(pipeline, 3)
        assert links.of(3) == [2] * LINKS
        assert list(pipeline.sweep().remove) == [dead.name]


# Other ranks


def test_a_prune_by_another_rank_fails_a_save_that_needs_the_old_bytes() -> None:
    store, ended = in_memory(), threading.Event()

    def own(rank: int, step: int) -> Callable[[Operation], bool]:
        return lambda each: put_of(step)(each) and each.key.endswith(f"rank-{rank:05}.json")

    def see(event: Event) -> None:
        if isinstance(event, SaveEnded) and event.step == 3:
            ended.set()

    fields = link_runs.SETTINGS | {"staging": {"block_bytes": link_runs.BLOCK}, "plan": "local"}
    with ranks(store.url, 2, keep_last=1, **fields) as (first, second):
        first.events.add(see)
        for step in (1, 2):
            for handle in [each.save(swinging(step, 1), step=step) for each in (first, second)]:
                handle.wait_complete()
            settle(first)
            settle(second)
        commits = [store.faulty.pause(own(rank, 3)) for rank in (0, 1)]
        third = [each.save(swinging(3, 2), step=3) for each in (first, second)]
        for gate in commits:
            gate.wait_until_held()
        held = [store.faulty.pause("link", nth=nth) for nth in range(1, LINKS + 2)]
        fourth = second.save(swinging(4, 1), step=4)
        held[0].wait_until_held()
        commits[1].release()
        third[1].wait()
        commits[0].release()
        third[0].wait()
        pruned = ended.wait(PATIENCE)
        for gate in held:
            gate.release()
        assert pruned
        with pytest.raises(SaveError, match="is gone"):
            fourth.wait()
        fifth = [each.save(swinging(5, 1), step=5) for each in (first, second)]
        for handle in fifth:
            handle.wait_complete()
        assert fifth[1].report.linked_bytes == 0
        assert same(loaded_state(first, 5), swinging(5, 1))
