"""The report of a run: its facts, and the page that shows them."""

from __future__ import annotations

import math
import os
import shutil
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe.errors import CorruptCheckpoint, UsageError
from tests.cli.pages import HOSTILE, Page, killed_run, tree_of
from tests.support.command_line import Commands, forked
from tests.support.pipelines import stores
from tests.support.rank_pipelines import ranks
from tests.support.stored_files import flip, forge

NO_JINJA = """
import sys
sys.modules["jinja2"] = None
import ckpipe
try:
    ckpipe.report(sys.argv[1])
except ckpipe.errors.UsageError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two launches, which no test changes."""
    return killed_run(tmp_path_factory.mktemp("run") / "root")


def test_report_tells_what_a_resume_takes_and_what_was_lost(call: Commands, run: Path) -> None:
    done = call("report", run, "--html", run.with_name("page.html"), "--json")
    assert (done.code, done.err) == (0, "")
    assert done.data["verdict"].startswith("A resume takes step 40, ")
    assert "a kill now would lose" in done.data["verdict"]
    assert "5 complete checkpoints" in done.data["verdict"]
    assert "1 incomplete." in done.data["verdict"]
    (lost,) = done.data["lost"]
    assert (lost["lane"], lost["first"], lost["last"]) == (0, 20, 35)
    states = [(each["step"], each["state"]) for each in done.data["checkpoints"]]
    assert states == [
        (10, "complete"), (20, "complete"), (30, "complete"), (35, "incomplete"),
        (30, "complete"), (40, "complete"),
    ]  # fmt: skip
    assert done.data["parts"].keys() == {"model", "optimizer", "data", "other"}
    page = Page(run.with_name("page.html").read_text())
    assert len(page.of_class("launch")) == 2
    assert len(page.of_class("m-incomplete")) == 2  # on the lane, and in the key
    assert "launch 2" in page.text
    assert "Launch 1 lost its work from step 20 to at least 35" in page.text
    assert "lost: steps 20 to 35" in page.texts


def test_report_for_people_is_short(call: Commands, run: Path) -> None:
    done = call("report", run)
    lines = done.out.splitlines()
    assert lines[0].startswith("A resume takes step 40")
    assert [line.split()[:1] for line in lines[1:4]] == [["launch"], ["1"], ["2"]]
    assert "20 to 35" in lines[2]
    assert "step 20" in lines[3]
    assert lines[-1].startswith("no retention rules are given: ")
    assert call("report", run, "--open").code == 2
    assert call("report", run, "--match", "model.*").code == 2


def test_report_writes_nothing(run: Path) -> None:
    before = tree_of(run)
    ckpipe.report(run, verify=True, weights=True, keep_last=2)
    assert tree_of(run) == before


def test_report_reads_each_index_once() -> None:
    with stores() as made:
        with ckpipe.SyncPipeline(made.url) as pipeline:
            for step in range(12):
                pipeline.save({"a": torch.ones(3)}, step=step, metrics={"loss": 1.0}).wait()
        before = len(made.faulty.operations)
        found = ckpipe.report(made.url, keep_last=2)
        gets = [each.key for each in made.faulty.operations[before:] if each.verb == "get"]
    assert len(found.run.complete) == len(gets) == len(set(gets)) == 12


def test_retention_of_a_report_is_that_of_a_dry_run(
    call: Commands, run: Path, tmp_path: Path
) -> None:
    settings = tmp_path / "rules.toml"
    settings.write_text("[retention]\nkeep_last = 2\n")
    report = call("--settings", settings, "report", run, "--json").data
    prune = call("--settings", settings, "prune", run, "--dry-run", "--json").data
    for member, decided in (("kept", "keep"), ("goes", "remove")):
        told = {each["id"]: each[member] for each in report["checkpoints"] if each[member]}
        assert told == {each["id"]: each["reason"] for each in prune[decided]}
    assert prune["remove"][0]["id"].startswith("step-000000000010.")
    found = ckpipe.report(run, keep_last=2)
    assert found.run.retention.next_step == 50
    (next_goes,) = found.run.retention.next_goes
    assert next_goes.startswith("step-000000000030.")
    text = Page(found.html).text
    assert "Rules: KeepLast(n=2)" in text
    assert "The next save, about step 50, removes step 30." in text
    assert "No rules are given" in Page(ckpipe.report(run).html).text


def test_damaged_and_deleted_checkpoints_do_not_stop_a_report(
    call: Commands, run: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(run, root)
    newest = max(root.glob("step-000000000040*.json"))
    flip(newest, 100)
    found = ckpipe.report(root)
    assert found.verdict.startswith(
        "A resume fails on step 40, which is damaged; with fallback=True it takes step 30, "
    )
    with pytest.raises(CorruptCheckpoint):
        ckpipe.load(root)
    with pytest.warns(RuntimeWarning, match="is damaged"):
        assert ckpipe.load(root, fallback=True).step == 30
    assert "1 damaged." in found.verdict
    page = Page(found.html)
    assert any(text.startswith("Damaged: step 40: ") for text in page.texts)
    assert page.of_class("m-damaged")
    assert call("report", root).code == 1
    data = next(root.glob("step-000000000020*/*.safetensors"))
    for at in range(4096, data.stat().st_size, 64):  # behind the header, in every tensor
        flip(data, at)
    assert len(ckpipe.report(root).run.of_state("damaged")) == 1
    steps = [each.step for each in ckpipe.report(root, verify=True).run.of_state("damaged")]
    assert steps == [20, 40]
    heat = ckpipe.report(root, weights=True).run.heat
    assert heat is not None
    assert "without step 20, not readable" in heat.note
    assert heat.steps[1] == 20
    assert {row[1] for row in heat.norms.values()} == {None}


def test_norms_and_changes_of_weights_by_layer(tmp_path: Path) -> None:
    before, after = torch.arange(6.0), torch.arange(6.0) + 1
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        for step, weight in enumerate((before, after, after * math.nan)):
            layers = {"layers.0.w": weight, "layers.1.w": torch.ones(4), "head.w": torch.ones(1)}
            optimizer = {"state": {0: {"exp_avg": torch.ones(9)}}, "param_groups": []}
            pipeline.save({"model": layers, "optimizer": optimizer}, step=step).wait()
    found = ckpipe.report(tmp_path, weights=True)
    heat = found.run.heat
    assert heat is not None
    assert heat.steps == (0, 1, 2)
    assert heat.norms.keys() == {"model.layers.0", "model.layers.1", "model.head"}
    norms, changes = heat.norms["model.layers.0"], heat.changes["model.layers.0"]
    assert norms[:2] == pytest.approx((float(before.norm()), float(after.norm())))
    assert changes[0] is None
    assert changes[1] == pytest.approx(float((after - before).norm() / before.norm()))
    assert math.isnan(norms[2] or 0)
    assert math.isnan(changes[2] or 0)
    assert heat.norms["model.layers.1"] == (2.0, 2.0, 2.0)
    assert heat.changes["model.layers.1"] == (None, 0.0, 0.0)
    assert len(Page(found.html).of_class("heat-nan")) == 2
    chosen = ckpipe.report(tmp_path, weights=True, match=["*head*"]).run.heat
    assert chosen is not None
    assert [*chosen.norms] == ["model.head"]
    with pytest.raises(UsageError, match="No tensor matches"):
        ckpipe.report(tmp_path, weights=True, match=["nothing"])


def test_names_from_a_store_cannot_break_out_of_a_page(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        for step in range(2):
            metrics = dict.fromkeys(HOSTILE, 1.0) | {"nan": math.nan, "most": math.inf}
            state = {"model": {name: torch.ones(2) for name in HOSTILE}}
            pipeline.save(state, step=step, metrics=metrics).wait()
    found = ckpipe.report(tmp_path, weights=True, retention=ckpipe.KeepBest(HOSTILE[0]))
    page = Page(found.html)
    assert not {tag for tag, _ in page.elements} & {"img", "script", "link", "iframe", "object"}
    assert not any({"src", "href", "onerror"} & attrs.keys() for _, attrs in page.elements)
    assert len(found.html) < 200_000
    assert all(text.isprintable() for text in page.text.split())
    assert "NaN" in page.text


def test_places_without_checkpoints_get_a_plain_page(tmp_path: Path) -> None:
    empty, theirs = tmp_path / "empty", tmp_path / "theirs"
    empty.mkdir()
    theirs.mkdir()
    torch.save({"w": torch.ones(3)}, theirs / "model.pt")
    found = ckpipe.report(empty)
    assert found.verdict == "There are no checkpoints here: a run starts from scratch."
    assert found.verdict in Page(found.html).text
    foreign = ckpipe.report(theirs / "model.pt")
    assert foreign.verdict.startswith("Another program's checkpoint is here: ")
    assert "ckpipe import" in Page(foreign.html).text


def test_copies_of_several_ranks_and_costs_are_shown(tmp_path: Path) -> None:
    with ranks(str(tmp_path), 2) as world:
        for step in (1, 2):
            for rank, pipeline in enumerate(world):
                state = {"model": torch.ones(1000), "mine": torch.full((5,), rank)}
                pipeline.save(state, step=step).wait()
        world[0].latest()
    found = ckpipe.report(tmp_path)
    newest = found.run.newest
    assert newest is not None
    assert newest.copied_bytes == 4000
    assert newest.blocked is not None
    assert newest.durable is not None
    assert "Several ranks wrote 4 kB of it twice" in Page(found.html).text


def test_a_notebook_shows_the_page_in_a_frame(run: Path) -> None:
    found = ckpipe.report(run)
    (frame,) = [attrs for tag, attrs in Page(found._repr_html_()).elements if tag == "iframe"]
    assert frame["srcdoc"] == found.html
    assert frame["sandbox"] == ""
    assert repr(found) == f"<Report of {run}: {found.verdict}>"


def test_without_jinja2_the_error_tells_the_remedy(run: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(NO_JINJA)
    done = forked(program, run, cwd=tmp_path)
    assert "pip install '.[cli]'" in done.out, done.err


def test_all_facts_of_a_report_are_plain(call: Commands, run: Path) -> None:
    data: dict[str, Any] = call("report", run, "--weights", "--verify", "--json").data
    assert data["verified"] == 5
    assert data["heat"]["steps"] == [10, 20, 30, 30, 40]


def test_rules_that_call_functions_are_decided_too(run: Path) -> None:
    rule = ckpipe.KeepLast(1) | ckpipe.KeepIf(lambda each: each.metrics["loss"] > 0.4)
    found = ckpipe.report(run, retention=rule).run
    kept = [each.step for each in found.complete if each.kept]
    assert kept == [10, 20, 40]
    assert [each.step for each in found.complete if each.id in found.retention.next_goes] == [40]


def test_lanes_last_from_the_first_time_to_the_end_of_the_saves(run: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(run, root)
    for index in root.glob("step-*.json"):
        os.utime(index, (4 * 10**9, 4 * 10**9))  # as if it was copied
    saved = ckpipe.report(run).run
    pairs = zip(ckpipe.report(root).run.complete, saved.complete, strict=True)
    gaps = [(a.time - b.time).total_seconds() for a, b in pairs if a.time and b.time]
    assert gaps == pytest.approx([0.0] * 5, abs=60)
    for index in root.glob("step-000000000010*.json"):
        os.utime(index, (10**9, 10**9))  # as if a clock went backwards
    found = ckpipe.report(root)
    assert found.run.launches[0].began.timestamp() == 10**9
    places = [attrs["x"] or "" for _, attrs in Page(found.html).elements if "x" in attrs]
    assert places
    assert not [place for place in places if place.startswith("-")]
    (lost,) = found.run.lost
    assert lost.began < lost.ended


def test_the_share_that_training_waited_is_that_of_the_newest_launch(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        for step in (10, 20, 30):
            pipeline.save({"a": torch.ones(3)}, step=step).wait()
    started = "2026-01-01T00:{:02}:00+00:00"
    for minute, index in enumerate(sorted(tmp_path.glob("step-*.json"))):
        forge(index, partial(timed, started.format(minute), 3.0 * minute))
    found = ckpipe.report(tmp_path).run
    assert found.waited_share == pytest.approx((3 + 6) / (120 + 6), rel=0.01)
    assert "Training waited" in Page(ckpipe.report(tmp_path).html).text


@pytest.mark.parametrize(("apart", "steps"), [(600.0, 20), (1.0, None)])
def test_steps_at_risk_are_told_only_where_the_pace_is_known(
    tmp_path: Path, apart: float, steps: int | None
) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        for step in (10, 20, 30):
            pipeline.save({"a": torch.ones(3)}, step=step).wait()
    newest = datetime.now(UTC) - timedelta(seconds=1200)
    for back, index in enumerate(sorted(tmp_path.glob("step-*.json"), reverse=True)):
        began = newest - timedelta(seconds=apart * back)
        forge(index, partial(timed, began.isoformat(), 0.0))
    at_risk = ckpipe.report(tmp_path).run.at_risk
    assert at_risk is not None
    assert at_risk[0] >= 1199
    assert at_risk[1] == (None if steps is None else pytest.approx(steps, rel=0.2))


def timed(started: str, blocked: float, document: dict[str, Any]) -> None:
    """Sets when the save of an index began, and how long it held up training."""
    document["parts"]["started"] = [started]
    document["report"].update(staged_seconds=blocked, captured_seconds=None)
