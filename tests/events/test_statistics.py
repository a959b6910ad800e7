"""What a pipeline tells while it runs: statistics, lines of JSON, a live line, and reprs."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import re
import threading
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from rich.console import Console

import ckpipe
from ckpipe import event_lines, events, live_line
from ckpipe.errors import SaveSkipped, StoreFull, StoreUnavailable
from ckpipe.types import SaveReport, StageReport
from tests.support.actors import PATIENCE
from tests.support.command_line import forked, script
from tests.support.pipelines import Stores
from tests.support.settling import SettlingPipeline, settle

SCHEMA = Path(__file__).parents[2] / "docs" / "schema" / "event-v1.json"
STATE = {"a": torch.ones(100_000)}
QUICK: dict[str, Any] = {
    "staging": {"block_bytes": 65536}, "upload": {"backoff_seconds": 0}, "on_error": "warn",
}  # fmt: skip


def check_by_schema(lines: list[Any]) -> None:
    schema = json.loads(SCHEMA.read_text())
    for each in lines:
        jsonschema.validate(each, schema)


def test_statistics_count_everything(store: Stores) -> None:
    pipeline = ckpipe.SyncPipeline(store.url, **QUICK)
    assert pipeline.statistics() == ckpipe.Statistics(lanes=4)
    with pipeline:
        for step in (1, 2):
            pipeline.save(STATE, step=step, until="committed")
        store.faulty.fail(StoreUnavailable("It broke"), "write")
        pipeline.save(STATE, step=3, until="committed")
        store.faulty.fail(StoreFull("It is full"), "write")
        with pytest.raises(StoreFull):
            pipeline.save(STATE, step=4).wait()
        store.slow.hold("write")
        handle = pipeline.save(STATE, step=5)
        now = pipeline.statistics()
        assert now.saves == {"committed": 3, "failed": 1, "uploading": 1}
        assert now.budget_used > 0
        assert now.budget_capacity >= now.budget_used >= now.pool_used > 0
        assert now.pool_bytes >= now.pool_used
        assert re.search(
            r"\[1 uploading \| .*B of .*B \| 3 committed, 1 failed, 1 tried", repr(pipeline)
        )
        store.slow.release()
        handle.wait()
        size = handle.report.bytes
        assert pipeline.statistics().pool_bytes > 0
    found = pipeline.statistics()
    assert (found.saves, found.retries) == ({"committed": 4, "failed": 1}, 1)
    assert (found.bytes, found.budget_used) == (4 * size, 0)
    assert found.seconds.keys() >= {"lock", "walk", "stage", "serialize", "upload", "commit"}
    assert found.waits.keys() == found.seconds.keys()
    assert 0 < found.seconds["commit"] < found.active_seconds
    assert found.staged_seconds > 0
    assert found.throughput == pytest.approx(found.bytes / found.active_seconds)
    assert "closed" in repr(pipeline)
    assert "4 committed" in repr(pipeline)


def test_a_save_counts_whole_once_its_commit_is_known_and_never_twice(store: Stores) -> None:
    seen = []
    with ckpipe.SyncPipeline(store.url, keep_last=9, **QUICK) as pipeline:

        def ended(event: events.Event) -> None:
            if isinstance(event, events.SaveEnded):
                seen.append(pipeline.statistics())

        pipeline.events.add(ended)
        store.slow.hold("list")  # retention, after the commit
        handle = pipeline.save(STATE, step=1)
        handle.wait()
        now, shown = pipeline.statistics(), repr(pipeline)
        store.slow.release()
    assert (now.saves, now.bytes) == ({"committed": 1}, handle.report.bytes)
    assert now.seconds["commit"] > 0
    assert re.search(r"\[idle \| .*B of .* kB \| 1 committed, .* kB\]", shown)
    assert [each.saves for each in [*seen, pipeline.statistics()]] == [{"committed": 1}] * 2
    assert pipeline.statistics().bytes == handle.report.bytes


def test_every_save_ends_once_with_any_result(store: Stores) -> None:
    ended: list[tuple[int, str]] = []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.SaveEnded):
            ended.append((event.step, event.status))

    with ckpipe.SyncPipeline(store.url, keep_last=0, **QUICK) as pipeline:
        pipeline.events.add(listen)
        with pytest.raises(SaveSkipped):
            pipeline.save(STATE, step=1).wait()
        store.slow.hold("write")
        handle = pipeline.save(STATE, step=2, final=True)
        handle.cancel()
        store.slow.release()
        pipeline.save(STATE, step=3, final=True)
    assert ended == [(1, "skipped"), (2, "cancelled"), (3, "committed")]
    assert pipeline.statistics().saves == {"skipped": 1, "cancelled": 1, "committed": 1}


def decode(line: str) -> dict[str, Any]:
    """Decode a line as a program does that takes JSON by its standard, which has no NaN."""
    found: dict[str, Any] = json.loads(line, parse_constant=pytest.fail)
    return found


def test_lines_of_json_tell_every_event(store: Stores, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text('{"event": "before"}\n')
    with (
        event_lines.JsonLines(file) as lines,
        SettlingPipeline(store.url, **QUICK, keep_last=1) as pipeline,
    ):
        pipeline.events.add(lines)
        store.faulty.fail(StoreUnavailable("It broke"), "write")
        metrics = {"loss": math.nan, "best": 0.5}
        pipeline.save(STATE, step=1, metrics=metrics, until="committed")
        settle(pipeline)  # else it may prune itself, when the next one is complete
        pipeline.save(STATE, step=2, until="committed")
    before, *found = map(decode, file.read_text().splitlines())
    assert before == {"event": "before"}
    names = [each["event"] for each in found if each["step"] == 1]
    assert sorted(names) == [
        "Completed", "RankCommitted", "Retrying", "SaveEnded", "SaveStarted", "Staged",
    ]  # fmt: skip
    assert "Pruned" in [each["event"] for each in found]
    check_by_schema(found)
    (ended,) = [e for e in found if e["event"] == "SaveEnded" and e["step"] == 1]
    assert ended["status"] == "committed"
    assert ended["report"]["stages"]["upload"]["bytes"] == ended["report"]["bytes"]
    assert "blocks" not in ended["report"]
    (completed,) = [e for e in found if e["event"] == "Completed" and e["step"] == 1]
    assert completed["info"]["metrics"] == {"loss": "nan", "best": 0.5}


def test_the_schema_knows_every_event_and_all_of_its_fields() -> None:
    schema = json.loads(SCHEMA.read_text())
    known = {
        branch["if"]["properties"]["event"]["const"]: set(branch["then"]["required"])
        for branch in schema["allOf"]
    }
    every = {
        cls.__name__: {field.name for field in dataclasses.fields(cls)} - {"id", "step", "rank"}
        for cls in events.Event.__subclasses__()
        if cls.__module__ == events.__name__
    }
    assert known | {"SaveStarted": set(), "LoadStarted": set()} == every
    assert schema["properties"]["event"]["enum"] == sorted(every)


def test_progress_is_written_if_it_is_wanted_and_a_stream_stays_open(store: Stores) -> None:
    out = io.StringIO()
    with (
        event_lines.JsonLines(out, skip=()) as lines,
        ckpipe.SyncPipeline(store.url, **QUICK) as pipeline,
    ):
        pipeline.events.add(lines)
        pipeline.save(STATE, step=1, until="committed")
        pipeline.load()
        lines(events.LoadProgress("id", 1, 0, 5, 7))
    found = [json.loads(line) for line in out.getvalue().splitlines()]
    check_by_schema(found)
    loading = [each["event"] for each in found if each["event"].startswith("Load")]
    assert loading == ["LoadStarted", "Loaded", "LoadProgress"]
    blocks = [each for each in found if each["event"] == "BlockUploaded"]
    assert blocks[-1]["bytes_done"] == blocks[-1]["bytes_total"] > 400_000


class _Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left")


def test_a_target_that_fails_is_told_once_and_no_save_suffers(
    store: Stores, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with (
        event_lines.JsonLines(_Full()) as lines,
        ckpipe.SyncPipeline(store.url, **QUICK) as pipeline,
    ):
        pipeline.events.add(lines)
        pipeline.save(STATE, step=1, until="committed")
    assert caplog.text.count("Events can no longer be written") == 1
    with pytest.raises(IsADirectoryError):
        event_lines.JsonLines(tmp_path)


def test_a_listener_of_lines_does_not_wait_for_the_file() -> None:
    held, go_on = threading.Event(), threading.Event()

    class Held(io.StringIO):
        def write(self, text: str) -> int:
            held.set()
            assert go_on.wait(30)
            return super().write(text)

    out = Held()
    with event_lines.JsonLines(out) as lines:
        for step in range(3):
            lines(events.SaveStarted("id", step, 0))
        assert held.wait(30)
        assert out.getvalue() == ""
        go_on.set()
    assert [json.loads(line)["step"] for line in out.getvalue().splitlines()] == [0, 1, 2]


def test_event_data_is_json_for_all_kinds() -> None:
    info = ckpipe.CheckpointInfo("id", 1, "a", 0, complete=True)
    absent = events.IncompleteCheckpoint("id", 1, 0, (3, 4), 2.0)
    assert event_lines.event_data(absent)["absent"] == [3, 4]
    assert str(absent).endswith("without a commit: ranks 3, 4")
    assert event_lines.event_data(events.Completed("id", 1, 0, info))["info"]["saved_at"] is None


def drawn(line: live_line.LiveLine, out: io.StringIO) -> str:
    """What a line shows now."""
    out.truncate(0)
    line._console.print(line._line())
    return out.getvalue()


def test_the_live_line_shows_saves_under_way_and_the_last_that_ended() -> None:
    out = io.StringIO()
    line = live_line.LiveLine(Console(file=out, width=150, force_terminal=False))
    at = ("id", 500, 0)
    assert "no save yet" in drawn(line, out)
    line(events.SaveStarted(*at))
    assert "step 500" in drawn(line, out)
    assert "copying" in drawn(line, out)
    line(events.Staged(*at, 0.1, 4_000_000))
    line(events.BlockUploaded(*at, 10**6, 10**6, 4_000_000))
    line(events.SaveStarted("other", 501, 0))
    shown = drawn(line, out)
    assert re.search(r"uploading 1 MB of 4 MB, .*B/s, .* s left and 1 more", shown)
    report = SaveReport({"upload": StageReport(0.5)}, 0.1, 0.58, 4_000_000, 3, planned=False)
    line(events.SaveEnded(*at, "committed", report))
    line(events.SaveEnded("other", 501, 0, "failed", report))
    assert "step 501 failed" in drawn(line, out)
    line(events.SaveStarted(*at))
    line(events.SaveEnded(*at, "committed", report))
    assert re.search(r"saved step 500: 4 MB in 0\.58 s +\(2 saved\)", drawn(line, out))


def test_the_live_line_shows_a_load_under_way_and_how_it_ended() -> None:
    out = io.StringIO()
    line = live_line.LiveLine(Console(file=out, width=150, force_terminal=False))
    at = ("id", 500, 0)
    line(events.LoadStarted(*at))
    assert re.search(r"step 500 .* loading", drawn(line, out))
    line(events.LoadProgress(*at, 10**6, 4_000_000))
    assert re.search(r"loading 1 MB of 4 MB, .*B/s, .* s left", drawn(line, out))
    line(events.Loaded(*at, 0.31, 4_000_000))
    assert "loaded step 500: 4 MB in 0.31 s" in drawn(line, out)
    line(events.LoadStarted(*at))
    line(events.LoadFailed(*at, "TruncatedObject: too short"))
    assert "load of step 500 failed" in drawn(line, out)


def test_the_live_line_draws_nothing_where_there_is_no_terminal(tmp_path: Path) -> None:
    out = io.StringIO()
    with live_line.LiveLine(Console(file=out)) as line, ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.events.add(line)
        pipeline.save(STATE, step=7, until="committed")
    assert out.getvalue() == ""


def test_the_live_line_draws_on_a_real_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    ours, theirs = os.openpty()
    try:
        with open(theirs, "w") as file:
            console = Console(file=file)  # which finds out by itself that it is one
            with live_line.LiveLine(console) as line, ckpipe.SyncPipeline(tmp_path) as pipeline:
                pipeline.events.add(line)
                pipeline.save(STATE, step=7, until="committed")
        shown = b""
        with contextlib.suppress(OSError):  # which is how the end of a terminal is told
            while True:
                shown += os.read(ours, 1 << 16)
    finally:
        os.close(ours)
    assert b"step 7" in shown
    assert b"\x1b[2K" in shown  # the line is wiped at the end


NOTEBOOK = """
import sys
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from rich.console import Console
import ckpipe
from ckpipe import live_line

InteractiveShell.instance()
with capture_output() as cell:
    console = Console(stderr=True, force_jupyter=True)
    with live_line.LiveLine(console) as line, ckpipe.SyncPipeline(sys.argv[1]) as pipeline:
        pipeline.events.add(line)
        pipeline.save({"a": torch.ones(1000)}, step=2)
first, *others = cell._outputs
assert not first["update"], first
assert others and all(each["update"] for each in others), others
assert {each["transient"]["display_id"] for each in others} == {first["transient"]["display_id"]}
print(first["data"]["text/plain"], others[-1]["data"]["text/plain"], sep="\\n")
print(cell.stdout + cell.stderr, end="")
"""


def test_the_live_line_in_a_notebook_is_one_output_that_changes_in_place(tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    done = forked(NOTEBOOK, tmp_path / "run", env=os.environ | {"IPYTHONDIR": str(tmp_path)})
    assert done.code == 0, done.err
    first, last = done.out.splitlines()
    assert first == "ckpipe no save yet (0 saved)"
    assert re.fullmatch(r"ckpipe saved step 2: \S+ kB in \d+\.\d\d s \(1 saved\)", last)


def test_without_rich_the_live_line_says_what_to_install() -> None:
    code = "import sys; sys.modules['rich.console'] = None; import ckpipe.live_line"
    assert "pip install '.[cli]'" in script(code).err


def test_reprs_are_diagnostics_and_show_no_tensors(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        handle = pipeline.save(STATE, step=0, until="committed")
        assert re.search(
            r"<SyncSaveHandle step-0+\.\S+ committed: 404 kB in 1 tensors, staged in \S+ s, "
            r"durable in \S+ s: .* took longest: .*>",
            repr(handle),
        )
        result = pipeline.load()
    assert "tensor(" not in repr(result)
    assert "<LoadReport 400 kB in" in repr(result)


def test_a_handler_of_a_signal_may_ask_who_is_just_asking(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.save({"a": 1}, step=0).wait()

        def ask() -> None:
            with pipeline._recorder._lock:  # where the handler strikes
                pipeline.statistics()

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(PATIENCE)
        assert not asking.is_alive()
