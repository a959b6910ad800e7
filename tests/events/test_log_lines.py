"""The log of a run: one readable line for each event, and nothing said twice."""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors, events
from ckpipe.testing.wrappers import Operation
from tests.support.actors import PATIENCE
from tests.support.pipelines import Stores, load_existing

STATE: dict[str, Any] = {"a": torch.ones(250_000)}


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, "ckpipe")
    return caplog


def lines(log: pytest.LogCaptureFixture, least: int, most: int = logging.CRITICAL) -> list[str]:
    """Return the messages of the library from one level to another."""
    found = [each for each in log.records if each.name == "ckpipe"]
    return [each.getMessage() for each in found if least <= each.levelno <= most]


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_a_save_is_one_line_with_step_size_seconds_and_place(
    tmp_path: Path, log: pytest.LogCaptureFixture, worker: Any
) -> None:
    with ckpipe.SyncPipeline(tmp_path, worker=worker) as pipeline:
        handle = pipeline.save(STATE, step=500)
    told = [each for each in lines(log, logging.INFO) if "500" in each and "worker" not in each]
    place = re.escape(f"{tmp_path}/{handle.id}")
    assert len(told) == 1, told
    assert re.fullmatch(rf"saved step 500: 1 MB in \d+\.\d\d s to {place}", told[0])


def test_no_line_shows_a_dataclass(store: Stores, log: pytest.LogCaptureFixture) -> None:
    with ckpipe.SyncPipeline(store.url, keep_last=1) as pipeline:
        for step in (1, 2):
            pipeline.save(STATE, step=step)
        pipeline.save(STATE, step=3, final=True)
    told = lines(log, logging.DEBUG)
    assert [each for each in told if re.search(r"\w\(\w+=", each)] == []
    assert {"saving step 1", "step 1 ended: committed"} < set(told)
    assert any(re.fullmatch(r"copied step 1: 1 MB in \d+\.\d\d s", each) for each in told)
    assert any(re.fullmatch(r"pruned step-0+1\S+: .+", each) for each in told)


def test_a_listener_that_is_removed_hears_nothing_more(store: Stores) -> None:
    heard: list[events.Event] = []
    with ckpipe.SyncPipeline(store.url) as pipeline:
        pipeline.events.add(heard.append)
        pipeline.save(STATE, step=1, until="committed")
        pipeline.events.remove(heard.append)
        pipeline.save(STATE, step=2, until="committed")
        with pytest.raises(errors.UsageError, match="does not listen"):
            pipeline.events.remove(heard.append)
    assert {each.step for each in heard} == {1}


def is_commit(operation: Operation) -> bool:
    """A commit comes after the state is staged, so that ``save()`` itself does not raise it."""
    return operation.key.endswith(".0.json")


@pytest.mark.parametrize("awaited", [False, True])
def test_a_failure_that_is_raised_is_not_logged(
    store: Stores, log: pytest.LogCaptureFixture, awaited: bool
) -> None:
    pipeline = ckpipe.SyncPipeline(store.url).open()
    store.faulty.fail(errors.StoreFull("no room"), is_commit)
    handle = pipeline.save(STATE, step=5, until="staged")
    with pytest.raises(errors.StoreFull):
        handle.wait() if awaited else pipeline.close()
    pipeline.close()
    assert lines(log, logging.WARNING) == []


class Told(logging.Handler):
    """Notes that a warning was logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.event = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.event.set()


@pytest.mark.parametrize(("on_error", "how"), [("raise", "raised"), ("warn", "warned of")])
def test_a_failure_that_no_caller_comes_for_is_logged_once(
    store: Stores,
    log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    on_error: Any,
    how: str,
) -> None:
    monkeypatch.setattr("ckpipe.running.saves.UNSEEN_SECONDS", 0)
    told = Told()
    logger = logging.getLogger("ckpipe")
    logger.addHandler(told)
    pipeline = ckpipe.SyncPipeline(store.url, on_error=on_error).open()
    try:
        store.faulty.fail(errors.StoreFull("no room"), is_commit)
        pipeline.save(STATE, step=5, until="staged")
        assert told.event.wait(PATIENCE)
    finally:
        logger.removeHandler(told)
        with pytest.warns() if on_error == "warn" else pytest.raises(errors.StoreFull):
            pipeline.close()
    (line,) = lines(log, logging.WARNING)
    assert re.fullmatch(
        rf"StoreFull: no room \[.*step 5.*\]\S*\nThis is {how} by the next .*", line
    )


def test_a_failure_that_another_exception_hides_is_logged(
    store: Stores, log: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ZeroDivisionError), ckpipe.SyncPipeline(store.url) as pipeline:  # noqa: PT012
        store.faulty.fail(errors.StoreFull("no room"), is_commit)
        pipeline.save(STATE, step=5, until="staged")
        raise ZeroDivisionError
    (told,) = lines(log, logging.ERROR)
    assert re.search(r"no room.*step 5", told)


def test_a_damaged_checkpoint_is_warned_of_and_not_logged(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        handles = [pipeline.save(STATE, step=step, until="committed") for step in (1, 2)]
        for each in (tmp_path / handles[1].id).rglob("*.safetensors"):
            each.write_bytes(b"")
        with pytest.warns(RuntimeWarning, match="is damaged"):
            result = load_existing(pipeline, fallback=True)
    assert result.step == 1
    assert lines(log, logging.WARNING) == []


def test_the_warning_of_a_failed_hook_names_the_hook(store: Stores) -> None:
    def broken(event: events.Staged) -> None:
        raise ZeroDivisionError

    pipeline = ckpipe.SyncPipeline(store.url, on_error="warn").open()
    pipeline.on_staged(broken)
    pipeline.save(STATE, step=5)
    with pytest.warns(RuntimeWarning, match="(?s)by the hook .*broken on Staged of step-0"):
        pipeline.close()


def test_retries_of_a_save_are_one_warning_and_a_count(
    store: Stores, log: pytest.LogCaptureFixture
) -> None:
    upload: Any = {"backoff_seconds": 0, "retries": 9}
    for step in (1, 2):
        log.clear()
        with ckpipe.SyncPipeline(store.url, upload=upload) as pipeline:
            pipeline.load()
            store.faulty.fail(errors.StoreUnavailable("It broke"), "write", times=3)
            pipeline.save(STATE, step=step)
        (warned,) = lines(log, logging.WARNING)
        assert re.fullmatch(
            rf"step {step}: trying again in 0\.0 s after StoreUnavailable: It broke.*", warned
        )
        assert f"step {step}: the store failed 3 times until now" in lines(log, logging.INFO)


def test_retries_outside_a_save_are_one_warning(
    store: Stores, log: pytest.LogCaptureFixture
) -> None:
    with ckpipe.SyncPipeline(store.url, upload={"backoff_seconds": 0, "retries": 9}) as pipeline:
        pipeline.save(STATE, step=1, until="committed")
        store.faulty.fail(errors.StoreUnavailable("It broke"), "get", times=3)
        assert pipeline.load() is not None
    (warned,) = lines(log, logging.WARNING)
    assert re.fullmatch(r"Trying again in 0\.0 s after StoreUnavailable: It broke.*", warned)
