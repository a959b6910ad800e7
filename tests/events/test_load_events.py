"""What a load tells while it runs: events from its beginning to its end, and a line of the log."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors, events
from ckpipe.testing import Operation, SlowBackend
from tests.support.pipelines import Stores
from tests.support.rank_pipelines import ranks

STATE: dict[str, Any] = {"a": torch.ones(250_000)}


def told(heard: list[events.Event]) -> list[tuple[str, int]]:
    """Return name and step of the events of loads, without progress."""
    names = ("LoadStarted", "Loaded", "LoadFailed", "CheckpointDamaged")
    found = [(type(each).__name__, each.step) for each in heard]
    return [each for each in found if each[0] in names]


def damage(root: Path, name: str) -> None:
    """Empty the data files of a checkpoint."""
    for each in (root / name).rglob("*.safetensors"):
        each.write_bytes(b"")


def into_a_state(root: Path) -> Any:
    with ckpipe.SyncPipeline(root) as pipeline:
        return pipeline.load({"a": torch.zeros(250_000)})


def afresh(root: Path) -> Any:
    with ckpipe.SyncPipeline(root) as pipeline:
        return pipeline.load(step=500)


def in_one_line(root: Path) -> Any:
    return asyncio.to_thread(ckpipe.load, root)


async def on_a_loop(root: Path) -> Any:
    async with ckpipe.Pipeline(root) as pipeline:
        return await pipeline.load()


@pytest.mark.parametrize("load", [into_a_state, afresh, in_one_line, on_a_loop])
async def test_a_load_is_one_line_with_step_size_seconds_and_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, load: Callable[[Path], Any]
) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        handle = pipeline.save(STATE, step=500)
    caplog.set_level(logging.INFO, "ckpipe")
    found = load(tmp_path)
    result = await found if isinstance(found, Awaitable) else found
    lines = [each.getMessage() for each in caplog.records if "load" in each.getMessage()]
    place = re.escape(f"{tmp_path}/{handle.id}")
    assert len(lines) == 1, lines
    assert re.fullmatch(rf"loaded step 500: 1 MB in \d+\.\d\d s from {place}", lines[0])
    assert f"{result.report.seconds:.2f} s" in lines[0]


@pytest.mark.parametrize("form", ["{}", "file://{}", "relative", "here"])
@pytest.mark.parametrize("name", ["model.pt", "step-000000000001.20250101T000000000Z-a.0", "."])
def test_a_load_of_another_programs_file_names_its_place_once(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    form: str,
) -> None:
    folder = tmp_path / "sh"
    folder.mkdir()
    torch.save({"w": torch.ones(1)}, folder / ("pytorch_model.bin" if name == "." else name))
    monkeypatch.chdir(folder if form == "here" else tmp_path)
    relative = {"relative": str(Path("sh", name)), "here": name}
    place = relative.get(form) or form.format(folder / name)
    caplog.set_level(logging.INFO, "ckpipe")
    ckpipe.load(place)
    with ckpipe.SyncPipeline(tmp_path / "run") as pipeline:
        pipeline.load(source=place)
    lines = [each.getMessage() for each in caplog.records if "loaded" in each.getMessage()]
    assert [each.partition(" s from ")[2] for each in lines] == [place, place]


def test_a_load_tells_its_beginning_and_end_until_the_listener_is_removed(store: Stores) -> None:
    heard: list[events.Event] = []
    with ckpipe.SyncPipeline(store.url) as pipeline:
        handle = pipeline.save(STATE, step=1, until="committed")
        pipeline.events.add(heard.append)
        pipeline.load(STATE)
        with pytest.raises(errors.StructureMismatch):
            pipeline.load({"b": torch.zeros(3)})
        with pytest.raises(errors.CheckpointNotFound):
            pipeline.load(step=7)
        pipeline.events.remove(heard.append)
        pipeline.load(STATE)
    assert told(heard) == [("LoadStarted", 1), ("Loaded", 1), ("LoadStarted", 1), ("LoadFailed", 1)]
    (loaded,) = [each for each in heard if isinstance(each, events.Loaded)]
    (failed,) = [each for each in heard if isinstance(each, events.LoadFailed)]
    assert (loaded.id, loaded.bytes, loaded.rank) == (handle.id, 1_000_000, 0)
    assert loaded.seconds > 0
    assert failed.error.startswith("StructureMismatch: ")


def test_a_load_that_fails_is_raised_and_not_logged(
    store: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    with ckpipe.SyncPipeline(store.url) as pipeline:
        pipeline.save(STATE, step=1, until="committed")
        with pytest.raises(errors.StructureMismatch):
            pipeline.load({"b": torch.zeros(3)})
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


def test_a_load_that_falls_back_tells_of_each_checkpoint_it_tries(tmp_path: Path) -> None:
    heard: list[events.Event] = []
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        handles = [pipeline.save(STATE, step=step, until="committed") for step in (1, 2)]
        damage(tmp_path, handles[1].id)
        pipeline.events.add(heard.append)
        with pytest.warns(RuntimeWarning, match="is damaged"):
            pipeline.load(fallback=True)
    assert told(heard) == [
        ("LoadStarted", 2), ("LoadFailed", 2), ("CheckpointDamaged", 2),
        ("LoadStarted", 1), ("Loaded", 1),
    ]  # fmt: skip


def test_each_rank_tells_of_its_load_and_the_first_logs_it(
    store: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[events.Event] = []
    caplog.set_level(logging.INFO, "ckpipe")
    with ranks(store.url, 2) as pipelines:
        for each in pipelines:
            each.save(STATE, step=1)
    with ranks(store.url, 2, attempt_id="again") as pipelines:
        for each in pipelines:
            each.events.add(heard.append)
            each.load(step=1)
    assert [each.rank for each in heard if isinstance(each, events.Loaded)] == [0, 1]
    assert caplog.text.count("loaded step 1") == 1


async def test_a_load_that_is_cancelled_tells_so(store: Stores) -> None:
    heard: list[events.Event] = []
    async with ckpipe.Pipeline(store.url) as pipeline:
        await (await pipeline.save(STATE, step=1))
        pipeline.events.add(heard.append)
        store.slow.hold("read_into")
        task = asyncio.create_task(pipeline.load())
        await asyncio.to_thread(store.slow.gate.wait_until_held)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        store.slow.release()
    assert told(heard) == [("LoadStarted", 1), ("LoadFailed", 1)]
    assert [each.error for each in heard if isinstance(each, events.LoadFailed)] == [
        "it was cancelled"
    ]


class Halfway(SlowBackend):
    """Lets one read pass, and holds all others until it is released."""

    reads = 0

    async def around(self, operation: Operation, call: Callable[[], Awaitable[Any]]) -> Any:
        if operation.verb == "read_into":
            self.reads += 1
            if self.reads > 1:
                await self.gate.passed()
        return await call()


def test_a_load_that_takes_longer_tells_how_far_it_is(store: Stores) -> None:
    store.slow = slow = Halfway(store.faulty)
    heard: list[events.Event] = []

    def listen(event: events.Event) -> None:
        heard.append(event)
        if isinstance(event, events.LoadProgress):
            slow.release()

    with ckpipe.SyncPipeline(store.url) as pipeline:
        pipeline.save({"a": torch.ones(8_000_000)}, step=1, until="committed")
        pipeline.events.add(listen)
        slow.gate.hold()
        result = pipeline.load()
    assert result is not None
    assert result.report is not None
    # The save may end meanwhile.
    started, first, *_, loaded = [each for each in heard if "Load" in type(each).__name__]
    assert isinstance(started, events.LoadStarted)
    assert isinstance(first, events.LoadProgress)
    assert isinstance(loaded, events.Loaded)
    assert 0 < first.bytes_done < first.bytes_total == result.report.bytes
