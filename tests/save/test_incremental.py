"""Incremental saves: what rests is linked, what moves is written, and each checkpoint is whole."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from awscrt.checksums import crc32c
from safetensors.torch import load_file

import ckpipe
from ckpipe.errors import SettingsError
from ckpipe.events import BlockUploaded, Event, FileLinked
from tests.support.one_checkpoint import index_of
from tests.support.pipelines import Stores, loaded_state, same

#: Sixteen blocks to a file of a tensor of a mebibyte.
SMALL: dict[str, Any] = {"incremental": True, "staging": {"block_bytes": 64 * 1024}}
MIB = 1 << 20


def state_of(tensors: int = 4, nbytes: int = MIB) -> dict[str, Any]:
    """A dict of tensors of one size each, a mebibyte and more, and of small ones."""
    made = torch.Generator().manual_seed(tensors)
    sizes = {f"t{n}": nbytes // 4 + 256 * n for n in range(tensors)}
    state: dict[str, Any] = {k: torch.randn(n, generator=made) for k, n in sizes.items()}
    return state | {f"s{n}": torch.randn(50, generator=made) for n in range(5)} | {"epoch": 1}


def saved(pipeline: ckpipe.SyncPipeline, state: Any, step: int) -> ckpipe.types.SaveReport:
    handle = pipeline.save(state, step=step)
    handle.wait()
    return handle.report


def listened(pipeline: ckpipe.SyncPipeline) -> list[Event]:
    events: list[Event] = []
    pipeline.events.add(events.append)
    return events


def folder_of(root: Path, step: int) -> Path:
    (path,) = (each for each in root.glob(f"step-{step:012}.*") if each.is_dir())
    return path


@pytest.mark.sample(1)
@pytest.mark.parametrize("worker", ["thread", "process"])
def test_the_third_save_links_what_rests(tmp_path: Path, worker: Any) -> None:
    state = state_of()
    with ckpipe.SyncPipeline(tmp_path, worker=worker, **SMALL) as pipeline:
        events = listened(pipeline)
        contents = {}
        for step in range(1, 6):
            state["t1"].add_(1)
            report = saved(pipeline, state, step)
            contents[step] = {k: v.clone() if torch.is_tensor(v) else v for k, v in state.items()}
            resting = sum(state[name].nbytes for name in ("t0", "t2", "t3"))
            if step < 3:
                assert report.linked_bytes == 0
            else:
                assert resting < report.linked_bytes < resting + 5 * 8192  # with headers
        links = [each for each in events if isinstance(each, FileLinked)]
        assert {each.step for each in links} == {3, 4, 5}
        assert sum(each.bytes for each in links) == pipeline.statistics().linked_bytes
        uploads = [each for each in events if isinstance(each, BlockUploaded) and each.step == 5]
        assert sum(each.bytes for each in uploads) + report.linked_bytes == report.bytes
        assert ckpipe.inspect(tmp_path, step=5).linked_bytes == report.linked_bytes
        assert ckpipe.inspect(tmp_path, step=1).linked_bytes == 0
        for step in (1, 2, 4, 5):
            pipeline.delete(step, force=True)
        assert same(loaded_state(pipeline, 3), contents[3])
        pipeline.verify(3)
    alone: dict[str, Any] = {}
    for file in folder_of(tmp_path, 3).glob("*.safetensors"):
        alone |= load_file(file)
    assert same(
        dict(sorted(alone.items())), {k: v for k, v in sorted(contents[3].items()) if k in alone}
    )
    assert {"t0", "t1", "t2", "t3"} <= alone.keys()


def test_a_linked_file_is_the_same_file(tmp_path: Path) -> None:
    state = state_of(tensors=1)
    with ckpipe.SyncPipeline(tmp_path, **SMALL) as pipeline:
        for step in (1, 2, 3):
            saved(pipeline, state, step)
    inodes = [
        {file.name: file.stat().st_ino for file in folder_of(tmp_path, step).iterdir()}
        for step in (1, 2, 3)
    ]
    assert inodes[1] == inodes[2] != inodes[0]


def same_sum() -> bytes:
    """Bytes that change no CRC-32C if they are added to others: a multiple of its polynomial."""
    bits = [1, *(0x1EDC6F41 >> n & 1 for n in range(31, -1, -1))]
    value = sum(bit << n for n, bit in enumerate(bits))
    return value.to_bytes(5, "little")


def test_bytes_that_keep_their_checksums_are_written(tmp_path: Path) -> None:
    state = state_of(tensors=2)
    weight = state["t0"].view(torch.uint8)
    settings: dict[str, Any] = {**SMALL, "staging": {"block_bytes": 2 * MIB}}  # of whole checksums
    with ckpipe.SyncPipeline(tmp_path, **settings) as pipeline:
        saved(pipeline, state, 1)
        saved(pipeline, state, 2)
        before = crc32c(weight.numpy().tobytes())
        weight[4096:4101] ^= torch.frombuffer(bytearray(same_sum()), dtype=torch.uint8)
        assert crc32c(weight.numpy().tobytes()) == before
        saved(pipeline, state, 3)
        assert same(loaded_state(pipeline, 3), state)
        assert not same(loaded_state(pipeline, 2), state)


def test_blocks_of_a_file_that_rest_come_from_the_earlier_one(store: Stores) -> None:
    state: dict[str, Any] = {"whole": torch.randn(1 << 19), "epoch": 0}  # 2 MiB in 33 blocks
    with ckpipe.SyncPipeline(store.url, **SMALL) as pipeline:
        saved(pipeline, state, 1)
        saved(pipeline, state, 2)
        state["whole"][-1] += 1
        before = len(store.faulty.operations)
        report = saved(pipeline, state, 3)
        verbs = [each.verb for each in store.faulty.operations[before:]]
        assert report.linked_bytes == 0
        assert verbs.count("link") == 0
        assert verbs.count("read_into") > 16
        assert same(loaded_state(pipeline, 3), state)
        assert saved(pipeline, state, 4).linked_bytes == report.bytes


@pytest.mark.sample(1)
@pytest.mark.parametrize("worker", ["thread", "process"])
def test_a_run_that_resumed_links_with_its_first_save(tmp_path: Path, worker: Any) -> None:
    state = state_of()
    with ckpipe.SyncPipeline(tmp_path, worker=worker, **SMALL) as pipeline:
        saved(pipeline, state, 1)
        saved(pipeline, state, 2)
    with ckpipe.SyncPipeline(tmp_path, worker=worker, **SMALL) as pipeline:
        pipeline.load(state)
        report = saved(pipeline, state, 3)
        assert report.linked_bytes == report.bytes
    with ckpipe.SyncPipeline(tmp_path, worker=worker, resume="never", **SMALL) as pipeline:
        assert saved(pipeline, state, 4).linked_bytes == 0
    other: dict[str, Any] = {**SMALL, "staging": {"block_bytes": 128 * 1024}}
    with ckpipe.SyncPipeline(tmp_path, worker=worker, **other) as pipeline:
        pipeline.load(state, step=3)
        assert [saved(pipeline, state, step).linked_bytes > 0 for step in (5, 6, 7)] == [0, 1, 1]


def test_every_so_manieth_save_writes_all(tmp_path: Path) -> None:
    state = state_of()
    settings: dict[str, Any] = {**SMALL, "incremental": {"full_every": 4}}
    with ckpipe.SyncPipeline(tmp_path, **settings) as pipeline:
        linked = [saved(pipeline, state, step).linked_bytes > 0 for step in range(1, 10)]
    assert linked == [False, False, True, False, True, True, True, False, True]


def test_without_links_a_checkpoint_is_as_ever(tmp_path: Path) -> None:
    state = state_of()
    for root, settings in (("a", {}), ("b", SMALL)):
        with ckpipe.SyncPipeline(tmp_path / root, keep_reports=False, **settings) as pipeline:
            saved(pipeline, state, 1)
    texts = [index_of(tmp_path / root, 1).read_text() for root in "ab"]
    for name in ('"digests"', '"block_bytes"', '"linked"'):
        assert name not in texts[0] + texts[1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("worker", ["thread", "process"])
def test_a_run_that_goes_back_links_to_what_it_loaded(tmp_path: Path, worker: Any) -> None:
    state = state_of()
    with ckpipe.SyncPipeline(tmp_path, worker=worker, **SMALL) as pipeline:
        for step in (1, 2, 3):
            saved(pipeline, state, step)
        pipeline.load(state, step=2)
        pipeline.delete(3, force=True)
        state["t1"].add_(1)
        report = saved(pipeline, state, 3)
        assert 3 * MIB < report.linked_bytes < report.bytes - MIB
        assert same(loaded_state(pipeline, step=3), state)


def test_a_store_without_links_is_refused(store: Stores, monkeypatch: Any) -> None:
    monkeypatch.setattr(store.slow, "can_link", False)
    with (
        pytest.raises(SettingsError, match=r"SlowBackend cannot link .* Leave the setting"),
        ckpipe.SyncPipeline(store.url, incremental=True),
    ):
        pass


def test_a_store_without_links_is_read_with_the_setting(
    store: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of()
    with ckpipe.SyncPipeline(store.url) as pipeline:
        saved(pipeline, state, 1)
    monkeypatch.setattr(store.slow, "can_link", False)
    monkeypatch.setenv("CKPIPE_INCREMENTAL", "1")
    target = state_of(nbytes=MIB) | {"t0": torch.zeros_like(state["t0"])}
    with ckpipe.SyncPipeline(store.url, read_only=True) as pipeline:
        pipeline.load(target)
    assert same(target, state)


def test_a_planner_of_ones_own_is_refused(tmp_path: Path) -> None:
    class Planner:
        def plan(self, captured: Any, *, rank: int, world_size: int) -> Any:
            raise AssertionError

    with (
        pytest.raises(SettingsError, match="a planner of your own"),
        ckpipe.SyncPipeline(tmp_path, incremental=True, plan=Planner()),
    ):
        pass


def test_larger_files_than_a_store_links_are_written(
    store: Stores, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from dataclasses import replace

    limits = replace(store.slow.limits, max_link_bytes=3 * MIB // 2)
    monkeypatch.setattr(store.slow, "limits", limits)
    state = {"large": torch.randn(MIB // 2), "small": torch.randn(MIB // 4), "epoch": 0}
    with (
        caplog.at_level(logging.WARNING),
        ckpipe.SyncPipeline(store.url, **SMALL) as pipeline,
    ):
        reports = [saved(pipeline, state, step) for step in (1, 2, 3)]
        assert MIB < reports[-1].linked_bytes < 2 * MIB
        assert same(loaded_state(pipeline, 3), state)
    assert not caplog.records


def test_a_removed_checkpoint_takes_nothing_from_the_others(tmp_path: Path) -> None:
    state = state_of()
    with ckpipe.SyncPipeline(tmp_path, keep_last=1, **SMALL) as pipeline:
        for step in range(1, 7):
            state["t2"].mul_(2)
            saved(pipeline, state, step)
        pipeline.prune()
        assert same(loaded_state(pipeline), state)
    assert len(list(tmp_path.glob("step-*.json"))) == 1
    shutil.copytree(folder_of(tmp_path, 6), tmp_path / "copy")
    assert any("t0" in load_file(each) for each in (tmp_path / "copy").glob("*.safetensors"))


@pytest.mark.parametrize("change", [lambda s: s.pop("t1"), lambda s: s.update(new=torch.ones(9))])
def test_a_changed_structure_still_links(tmp_path: Path, change: Callable[[Any], None]) -> None:
    state = state_of()
    with ckpipe.SyncPipeline(tmp_path, **SMALL) as pipeline:
        saved(pipeline, state, 1)
        saved(pipeline, state, 2)
        change(state)
        report = saved(pipeline, state, 3)
        assert report.linked_bytes > state["t0"].nbytes + state["t3"].nbytes
        assert same(loaded_state(pipeline, 3), state)


@pytest.mark.parametrize("count", [16, 17])
def test_many_rare_sizes_share_files(tmp_path: Path, count: int) -> None:
    state = {str(n): torch.zeros(MIB // 4 + 64 * n) for n in range(count)}
    with ckpipe.SyncPipeline(tmp_path, incremental=True) as pipeline:
        saved(pipeline, state, 1)
        assert len(list(folder_of(tmp_path, 1).iterdir())) == (16 if count == 16 else 2)
        assert same(loaded_state(pipeline), state)
