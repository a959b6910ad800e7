"""The tables of the commands on a terminal, which is a real pseudo terminal, and in a pipe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len
from rich.text import Text

import ckpipe
from tests.support.command_line import Commands, Done, damage, on_terminal, save, save_steps
from tests.support.pipelines import small_state, stores

WIDTHS = (60, 100, 200)


def plain(done: Done) -> str:
    """Return a screen without colours."""
    return Text.from_ansi(done.out.replace("\r\n", "\n")).plain


def lines(done: Done) -> list[str]:
    return [each.rstrip() for each in plain(done).splitlines()]


def run_with_metrics(root: Path) -> list[str]:
    """Save four checkpoints, one of them pinned and one incomplete; return their ids."""
    metrics = {"loss": 0.0, "val/accuracy": 0.75, "val/perplexity": 12.5, "lr": 3e-4}
    ids = []
    with ckpipe.SyncPipeline(root) as pipeline:
        for step, loss in ((1000, 0.5), (2000, 0.25), (3000, 0.375), (4000, 1.0)):
            state = small_state() | {"weight": torch.full((3,), float(step)), "only": {step: 1}}
            handle = pipeline.save(state, step=step, metrics=metrics | {"loss": loss})
            ids.append(handle.wait().id)
        pipeline.pin(1000)
    (root / f"{ids[3]}.json").unlink()
    return ids


def test_tables_are_as_wide_as_the_terminal_and_keep_the_facts(tmp_path: Path) -> None:
    root = tmp_path / "root"
    ids = run_with_metrics(root)
    damage(root, ids[0])
    commands = [
        ("ls", root),
        ("ls", root, "--metric", "loss", "--sort", "metric"),
        ("info", root),
        ("prune", root, "--keep-last", 1, "--dry-run"),
        ("sweep", root, "--dry-run"),
        ("verify", root, "--all"),
        ("diff", root, 2000, 3000),
        ("timeline", root),
    ]
    shown = on_terminal(*((width, each) for width in WIDTHS for each in commands))
    for number, done in enumerate(shown):
        width, command = WIDTHS[number // len(commands)], commands[number % len(commands)]
        assert done.code in (0, 1), plain(done)
        assert max(map(cell_len, lines(done))) <= width, (width, command, plain(done))
        assert re.search(r"\x1b\[(1;)?3", done.out) or command[0] in ("info", "timeline"), command
    for number, width in enumerate(WIDTHS):
        ls, best, info, prune, sweep, verify, diff, _ = shown[
            number * len(commands) : (number + 1) * len(commands)
        ]
        launch = ids[0].split("-")[-1].split(".")[0]
        heading, *rows = lines(ls)
        words = heading.split()
        assert words[0] == "step"
        assert words[-1] == "id"
        assert [row.split()[0] for row in rows[:4]] == ["4000", "3000", "2000", "1000"]
        assert [row.split()[-1] for row in rows[:2]] == [f"{n}.{launch[:4]}" for n in (4000, 3000)]
        assert ("loss=0.375" in rows[1]) == (width >= 100 or "+4" not in rows[1])
        assert re.search(r"\+[1-4] |lr=0.0003", rows[1])
        assert "pinned" in plain(ls)
        assert "incomplete: it has no index" in plain(ls)
        assert rows[-1].startswith("3 complete, 1 incomplete, ")
        assert [row.split()[0] for row in lines(best)[1:5]] == ["2000", "3000", "1000", "4000"]
        assert "best" in plain(best).split("3000")[0]
        assert ids[2] in "".join(plain(info).split())
        assert "ago" in plain(info)
        assert re.search(r"goes +2000 .*\d kB", plain(prune))
        assert re.search(r"2 stay with .*, 1 go: would free [\d.]+ kB", plain(prune))
        assert re.search(r"stays +4000 .*\d kB", plain(sweep))
        assert "damaged  step 1000" in plain(verify)
        assert f"ok       step 3000.{launch[:4]}: " in plain(verify)
        assert lines(diff)[:2] == ["- only.2000", "+ only.3000"]
        assert re.search(r"(?m)^weight +3/3 +1732.05 +0.5 +1000$", plain(diff))


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_without_colour_the_words_say_the_same(tmp_path: Path, variables: dict[str, str]) -> None:
    run_with_metrics(tmp_path)
    (done,) = on_terminal((100, ("ls", tmp_path)), **variables)
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", done.out), done.out
    for word in ("complete", "incomplete", "pinned"):
        assert word in done.out


def test_a_pipe_gets_whole_ids_and_every_column_and_metric(call: Commands, tmp_path: Path) -> None:
    ids = run_with_metrics(tmp_path)
    done = call("ls", tmp_path)
    heading, *rows = done.out.splitlines()
    assert heading.split() == ["step", "saved", "at", "size", "ranks", "state", "metrics", "id"]
    assert [row.split()[-1] for row in rows] == ids[::-1]
    assert "loss=0.375 val/accuracy=0.75 val/perplexity=12.5 lr=0.0003" in rows[1]
    assert "incomplete: it has no index" in rows[0]


# Order, limits and metrics


def test_ls_sorts_and_limits(call: Commands, tmp_path: Path) -> None:
    run_with_metrics(tmp_path)

    def steps(*words: object) -> list[int]:
        found = call("ls", tmp_path, "--json", *words).data["checkpoints"]
        return [each["step"] for each in found]

    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.load(step=3000)
        pipeline.save({"x": torch.zeros(5000)}, step=500, metrics={"loss": 0.75}).wait()
    assert steps() == [500, 4000, 3000, 2000, 1000]
    assert steps("--limit", 2) == [500, 4000]
    assert steps("--sort", "step", "--limit", 2) == [4000, 3000]
    assert steps("--sort", "size", "--limit", 1) == [500]
    best = ("--metric", "loss", "--sort", "metric")
    assert steps(*best) == [2000, 3000, 1000, 500, 4000]
    assert steps(*best, "--mode", "max", "--limit", 2) == [500, 1000]
    (marked,) = [e for e in call("ls", tmp_path, "--metric", "loss", "--json").data["checkpoints"]
                 if e["best"]]  # fmt: skip
    assert marked["step"] == 2000
    for words, said in (
        (("--metric", "los"), "metrics are: loss, lr, val/accuracy"),
        (("--sort", "metric"), "--sort metric needs --metric"),
        (("--brief", "--sort", "size"), "--brief reads neither"),
        (("--limit", 0), "limit"),
    ):
        done = call("ls", tmp_path, *words)
        assert (done.code, said in done.err) == (2, True), done.err


def test_a_terminal_shows_no_column_without_a_text(tmp_path: Path) -> None:
    save(tmp_path, {"x": torch.zeros(3)}, {"x": torch.ones(3)})
    small, brief = on_terminal((40, ("ls", tmp_path)), (60, ("ls", tmp_path, "--brief")))
    assert lines(small)[0].split() == ["step", "size", "state", "id"]
    assert lines(brief)[0].split() == ["step", "age", "state", "id"]
    assert max(map(len, lines(small))) <= 40


def test_a_limit_saves_the_reads_of_other_summaries(call: Commands) -> None:
    with stores() as made:
        save_steps(made.url, *range(1, 9))
        before = len(made.faulty.operations)
        assert len(call("ls", made.url, "--limit", 2, "--json").data["checkpoints"]) == 2
        reads = [each for each in made.faulty.operations[before:] if each.verb == "get"]
        assert len(reads) == 2


def test_ls_of_a_folder_of_runs_names_each(call: Commands) -> None:
    with stores() as made:
        objects = made.memory._store.objects
        for name, steps in (("old", (1, 2)), ("new", (7,))):
            ids = save_steps(made.url, *steps)
            for key in [each for each in objects if not each.startswith("old/")]:
                objects[f"{name}/{key}"] = objects.pop(key)
            objects.pop(f"old/{ids[1]}.json") if name == "old" else None
        done = call("ls", made.url, "--json").data
        assert done["checkpoints"] == []
        new, old = done["runs"]
        assert (new["name"], new["step"], new["complete"], new["incomplete"]) == ("new", 7, 1, 0)
        assert (old["name"], old["step"], old["complete"], old["incomplete"]) == ("old", 1, 1, 1)
        assert new["bytes"] == old["bytes"] > 0
        heading, *rows = call("ls", made.url, "--brief", "--limit", 1).out.splitlines()
        assert heading.split()[:2] == ["run", "newest"]
        assert [row.split()[:3] for row in rows] == [["new", "7", "1"]]


# Short names


def test_a_short_name_is_taken_where_an_id_is(call: Commands, tmp_path: Path) -> None:
    one, *_ = save_steps(tmp_path, 1)
    two, *_ = save_steps(tmp_path, 1)
    launches = [each.split("-")[-1].split(".")[0] for each in (one, two)]
    for id, launch in zip((one, two), launches, strict=True):
        assert call("info", tmp_path, f"1.{launch}", "--json").data["id"] == id
        assert call("pin", tmp_path, f"1.{launch}.0", "--json").data["pinned"] == id
    assert call("verify", tmp_path, f"1.{launches[0]}", "--json").data["results"][0]["id"] == one
    done = call("rm", tmp_path, f"1.{launches[0]}", "--force", "--json")
    assert done.data["removed"] == one
    assert call("info", tmp_path, "1.nosuch").code == 2


def test_an_ambiguous_short_name_is_refused_and_names_those(call: Commands, tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        ids = [pipeline.save(small_state(), step=1).wait().id for _ in range(2)]
    launch = ids[0].split("-")[-1].split(".")[0]
    done = call("rm", tmp_path, f"1.{launch[:4]}", "--force")
    assert (done.code, all(each in done.err for each in ids)) == (2, True)
    assert len(call("ls", tmp_path, "--json").data["checkpoints"]) == 2
    one, every = on_terminal((200, ("verify", tmp_path)), (200, ("verify", tmp_path, "--all")))
    assert ids[1] in plain(one)
    assert [f"step 1.{launch[:4]}.{n}: " in lines(every)[n] for n in range(2)] == [True, True]
    (tmp_path / f"{ids[0]}.json").unlink()
    assert call("info", tmp_path, f"1.{launch[:4]}", "--json").data["id"] == ids[1]
