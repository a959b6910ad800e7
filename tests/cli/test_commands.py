"""The commands that look and keep house, on real files, also where Ctrl-C ends them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.cli.app import run
from ckpipe.cli.commands import COMMANDS
from tests.support.command_line import Commands, Done, damage, interrupted, save_steps
from tests.support.pipelines import small_state, stores
from tests.support.rank_pipelines import ranks
from tests.support.settling import settle


def crashed(root: Path) -> str:
    """Leave what a save leaves that was killed before its commit."""
    (id,) = save_steps(root, 7)
    (root / f"{id}.json").unlink()
    return id


def test_ls_shows_every_checkpoint_and_what_it_is(call: Commands, tmp_path: Path) -> None:
    one, two = save_steps(tmp_path, 1, 2)
    lost = crashed(tmp_path)
    assert call("pin", tmp_path, 1).code == 0
    done = call("ls", tmp_path)
    assert done.code == 0
    heading, *lines = done.out.splitlines()
    assert heading.split()[:3] == ["step", "saved", "at"]
    assert [line.split()[-1] for line in lines] == [lost, two, one]
    assert "incomplete: it has no index" in lines[0]
    assert "pinned" in lines[2]
    assert "loss=0.5" in lines[1]
    data = call("ls", tmp_path, "--json").data
    assert data["url"] == str(tmp_path)
    last, middle, first = data["checkpoints"]
    assert (last["complete"], last["bytes"], middle["complete"]) == (False, None, True)
    assert last["reason"].startswith("it has no index")
    assert (first["pinned"], middle["pinned"]) == (True, False)
    assert first["metrics"] == {"loss": 1.0}
    size_on_disk = (tmp_path / one / "rank-00000.safetensors").stat().st_size
    assert (first["bytes"], first["world_size"]) == (size_on_disk, 1)


def test_ls_brief_reads_no_index_and_ls_tells_of_a_damaged_one(
    call: Commands, tmp_path: Path
) -> None:
    one, two = save_steps(tmp_path, 1, 2)
    index = tmp_path / f"{one}.json"
    index.write_bytes(index.read_bytes().replace(b"ckpipe", b"ckpIpe"))
    read = call("--json", "ls", "--read", tmp_path).data["checkpoints"]
    (found,) = [e for e in read if e["id"] == one]
    assert found["problem"]
    assert call("pin", tmp_path, one).code == 0
    assert re.search(r"damaged: .*, pinned", call("ls", "--read", tmp_path).out)
    # Without it summaries are read, and this one says what was saved.
    (told,) = [e for e in call("--json", "ls", tmp_path).data["checkpoints"] if e["id"] == one]
    assert (told["metrics"], told["world_size"], told["problem"]) == ({"loss": 1.0}, 1, "")
    for each in (tmp_path / ".ckpipe" / "digests").iterdir():
        each.unlink()
    assert "damaged" in call("ls", tmp_path).out
    brief = call("ls", "--brief", "--json", tmp_path).data["checkpoints"]
    assert [(e["id"], e["problem"], e["bytes"]) for e in brief] == [
        (two, "", None),
        (one, "", None),
    ]


def test_ls_of_an_empty_root(call: Commands, tmp_path: Path) -> None:
    assert call("ls", tmp_path).out == "no checkpoints here\n"
    assert call("ls", tmp_path, "--json").data["checkpoints"] == []


def test_info_names_everything(call: Commands, tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    data = call("info", tmp_path, "--json").data
    assert data["step"] == 2
    tensors = {each["label"]: each for each in data["tensors"]}
    assert tensors["model.weight"]["shape"] == [2, 3]
    assert tensors["model.weight"]["bytes"] == 24
    assert tensors["weight"]["also"] == ["tied"]
    assert tensors["weight"]["shares_with"] == ["rows"]
    assert tensors["half"]["dtype"] == "bfloat16"
    values = {each["label"]: each["value"] for each in data["values"]}
    assert values["inline.1"] == "2.5"
    assert {values["inline.5.1"], values["inline.5.1~2"]} == {'"int"', '"str"'}
    text = call("info", tmp_path, 1).out
    assert re.search(r"tied → weight", text)
    assert re.search(r"bias float32\[2\], 8 B", text)
    assert "loss=1.0" in text


def test_info_tells_what_was_linked(call: Commands, tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path, incremental=True) as pipeline:
        for step in (1, 2, 3):
            pipeline.save({"weight": torch.zeros(4)}, step=step, until="committed")
    assert re.search(r" in 1 data file$", call("info", tmp_path, 2).out, re.MULTILINE)
    assert re.search(
        r"(\S+ k?B) in 1 data file, \1 linked$", call("info", tmp_path).out, re.MULTILINE
    )
    data = call("info", tmp_path, "--json").data
    assert data["linked_bytes"] == data["bytes"] > 0


def test_info_selects_by_globs_and_depth(call: Commands, tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    chosen = call("info", tmp_path, "--match", "*.bias", "--match", "inline.0", "--json").data
    assert [each["label"] for each in chosen["tensors"]] == ["model.bias"]
    assert [each["label"] for each in chosen["values"]] == ["inline.0"]
    shallow = call("info", tmp_path, "--depth", 1).out
    assert "model (2 tensors, 32 B)" in shallow
    assert "bias" not in shallow


def test_keys_with_dots_and_newlines_are_one_branch_each(call: Commands, tmp_path: Path) -> None:
    tied = torch.zeros(1)
    state = {1.5: tied, "1": {"x": 2, "a.b": tied}, "": 3, "two\nlines": 4, "a.b": 5, "a": {"b": 6}}
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.save(state, step=1, metadata={"note": "two\nlines"})
    out = call("info", tmp_path).out
    assert out[out.index("state\n") :].splitlines() == [
        "state",
        "├── 1.5 float32[1], 4 B",
        "├── 1",
        "│   ├── a.b → 1.5",
        "│   └── x = 2",
        "├── ~ = 3",
        "├── two\\nlines = 4",
        "├── a.b = 5",
        "└── a",
        "    └── b~2 = 6",
    ]
    assert "note=two\\nlines\n" in out


def test_verify_finds_a_flipped_bit(call: Commands, tmp_path: Path) -> None:
    one, two = save_steps(tmp_path, 1, 2)
    assert call("verify", tmp_path, "--all").code == 0
    damage(tmp_path, one)
    assert call("verify", tmp_path).code == 0
    done = call("verify", tmp_path, 1)
    assert done.code == 1
    assert done.out.startswith("damaged  step 1: ")
    every = call("verify", tmp_path, "--all", "--json")
    assert every.code == 1
    bad, good = every.data["results"]
    assert (bad["id"], bad["ok"], bad["error"]) == (one, False, "ChecksumMismatch")
    assert (good["id"], good["ok"], good["files"]) == (two, True, 1)


def test_verify_counts_a_missing_file_and_a_damaged_index_as_damage(
    call: Commands, tmp_path: Path
) -> None:
    one, two = save_steps(tmp_path, 1, 2)
    (tmp_path / one / "rank-00000.safetensors").unlink()
    index = tmp_path / f"{two}.json"
    index.write_bytes(index.read_bytes()[:-9])
    results = call("verify", tmp_path, "--all", "--json").data["results"]
    assert [each["error"] for each in results] == ["MissingObject", "TruncatedObject"]


@pytest.mark.parametrize("moment", ["{}.json", "{}/rank-00000.safetensors"])
def test_a_checkpoint_whose_tombstone_was_swept_meanwhile_is_not_called_damaged(
    call: Commands, tmp_path: Path, moment: str
) -> None:
    with stores() as made:
        one, two = save_steps(made.url, 1, 2)
        objects = made.memory._store.objects
        kept = dict(objects)

        def delete_and_sweep(_: object) -> None:
            for key in [key for key in objects if key.startswith(one)]:
                del objects[key]

        for command in (["verify", made.url, "--all"], ["cp", made.url, tmp_path / "b", "--all"]):
            objects.update(kept)
            made.faulty.call(delete_and_sweep, lambda each: each.key == moment.format(one))
            done = call(*command, "--json")
            results = done.data.get("results") or done.data["copied"]
            assert (done.code, [each["id"] for each in results]) == (0, [two])
            assert done.err == f"{one} was deleted meanwhile and is left out\n"
        objects.update(kept)
        made.faulty.call(delete_and_sweep, lambda each: each.key == moment.format(one))
        with (
            ckpipe.SyncPipeline(made.url) as pipeline,
            pytest.raises(errors.CheckpointNotFound),
        ):
            pipeline.verify(one)


def test_a_checkpoint_that_is_deleted_while_it_is_listed_is_not_called_damaged(
    call: Commands,
) -> None:
    with stores() as made:
        one, two = save_steps(made.url, 1, 2)

        def delete(_: object) -> None:
            made.memory._store.create(f".ckpipe/deleted/{one}", b"{}")
            made.memory._store.objects.pop(f"{one}.json")

        made.faulty.call(delete, lambda operation: operation.key == f"{one}.json")
        newest, older = call("ls", "--read", made.url, "--json").data["checkpoints"]
        assert (newest["id"], newest["complete"]) == (two, True)
        assert (older["id"], older["complete"], older["problem"]) == (one, False, "")
        assert older["reason"] == "it is being deleted"


@pytest.mark.parametrize("command", ["verify", "cp"])
def test_the_sizes_of_all_are_known_before_the_first_is_read(
    call: Commands, tmp_path: Path, command: str
) -> None:
    with stores() as made:
        save_steps(made.url, 1, 2, 3)
        before = len(made.faulty.operations)
        target = (tmp_path,) if command == "cp" else ()
        assert call(command, made.url, *target, "--all").code == 0
        keys = [each.key for each in made.faulty.operations[before:] if each.key]
        reads = [n for n, key in enumerate(keys) if key.endswith((".safetensors", ".0.json"))]
        sizes = [n for n in reads if keys[n].startswith(".ckpipe/")]
        assert len(sizes) == 3
        assert max(sizes) < min({*reads} - {*sizes})


def test_verifying_no_checkpoint_is_no_success(call: Commands, tmp_path: Path) -> None:
    for prepare in (lambda root: None, crashed):
        prepare(tmp_path)
        done = call("verify", "--all", tmp_path, "--json")
        assert (done.code, done.data["error"]) == (2, "CheckpointNotFound")
        assert "There is no complete checkpoint here" in done.err
        done = call("cp", "--all", tmp_path, tmp_path / "copy")
        assert (done.code, done.out) == (0, "no complete checkpoints here\n")
        assert call("cp", "--all", tmp_path, tmp_path / "copy", "--json").data["copied"] == []


def test_wrong_use_is_told_apart_from_a_failing_store(call: Commands, tmp_path: Path) -> None:
    save_steps(tmp_path / "root", 1)
    wrong = [
        ("info", tmp_path / "root", 9),
        ("verify", tmp_path / "root", "1", "--all"),
        ("ls", "nosuch://place"),
        ("ls",),
        ("lss", tmp_path),
        ("prune", tmp_path / "root"),
        ("prune", tmp_path / "root", "--rule", "{"),
        ("prune", tmp_path / "root", "--rule", '{"keep": "least"}'),
        ("--settings", tmp_path / "none.toml", "ls", tmp_path),
        ("sweep", tmp_path / "root", "--older-than", "inf"),
        ("timeline", tmp_path / "root", "--html", ""),
    ]
    for arguments in wrong:
        done = call(*arguments)
        assert (done.code, done.out) == (2, ""), arguments
        assert done.err, arguments
    done = call("ls", tmp_path / "missing")
    assert (done.code, done.out) == (3, "")
    assert "missing" in done.err
    for command in (("rm", tmp_path / "missing", 1), ("pin", tmp_path / "missing", 1)):
        assert call(*command).code == 3
    assert not (tmp_path / "missing").exists()


def test_a_glob_that_matches_nothing_is_wrong(call: Commands, tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    found = call("info", tmp_path, "--match", "model.*", "--match", "zz")
    assert (found.code, found.err) == (0, "")
    done = call("info", tmp_path, "--match", "modle.*", "--match", "zz")
    assert (done.code, done.out) == (2, "")
    assert "No name matches modle.* or zz. The nearest names are: model" in done.err
    assert "model.weight" in call("info", tmp_path, "--match", "model.wieght").err
    assert "No name matches ''" in call("info", tmp_path, "--match", "", "--json").data["message"]


def test_wrong_use_is_told_as_any_error_with_a_line_of_usage(call: Commands) -> None:
    for arguments, message, command in (
        (("ls",), "Missing argument 'URL'", "ls"),
        (("export", "here"), "Missing option '--form'. Choose from: torch, hf, dcp", "export"),
        (("info", "here", "--matsch", "x"), "No such option: --matsch", "info"),
    ):
        done = call(*arguments)
        first, usage = done.err.splitlines()
        assert (done.code, done.out) == (2, "")
        assert first.startswith(f"error: {message}")
        assert usage.startswith(f"Usage: ckpipe {command} [OPTIONS] URL")
        assert usage.endswith(f"ckpipe {command} --help tells more")
    assert "Did you mean 'ls'?" in call("lss", "here").err.splitlines()[0]


STARTING = """
import os, signal, sys
class Impatient:
    def find_spec(self, name, path=None, target=None):
        if name == "{package}":
            {action}
sys.meta_path.insert(0, Impatient())
from ckpipe.cli import main
main()
"""


def python(code: str, *arguments: object) -> Done:
    """Run some code in an interpreter of its own."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def starting(package: str, action: str, *arguments: object) -> Done:
    """Run the program with an action at the import of a package."""
    return python(STARTING.format(package=package, action=action), *arguments)


@pytest.mark.parametrize("package", ["typer", "ckpipe.cli.ls_info", "pydantic"])
def test_an_interrupt_while_it_starts_is_no_traceback(package: str, tmp_path: Path) -> None:
    done = starting(package, "os.kill(os.getpid(), signal.SIGINT)", "ls", tmp_path)
    assert (done.code, done.out) == (130, "")
    assert "Traceback" not in done.err


def test_a_fault_of_the_program_is_not_taken_for_damage(tmp_path: Path) -> None:
    done = starting("ckpipe.cli.ls_info", "raise RuntimeError('broken')", "ls", tmp_path)
    assert done.code == 70
    assert "RuntimeError: broken" in done.err


def test_rm_deletes_what_nothing_protects(call: Commands, tmp_path: Path) -> None:
    one, two, three = save_steps(tmp_path, 1, 2, 3)
    assert call("pin", tmp_path, 2).out == f"pinned {two}\n"
    for step, reason in ((2, "it is pinned"), (3, "the newest")):
        done = call("rm", tmp_path, step)
        assert done.code == 2
        assert reason in done.err
    for command in ("unpin", "pin"):
        data = call(command, tmp_path, 2, "--json").data
        assert data == {"url": str(tmp_path), f"{command}ned": two}
    size = sum(each.stat().st_size for each in (tmp_path / one).rglob("*") if each.is_file())
    done = call("rm", tmp_path, one, "--json")
    assert done.data == {"url": str(tmp_path), "removed": one, "bytes": size}
    assert not (tmp_path / one).exists()
    assert call("unpin", tmp_path, 2).code == 0
    assert call("rm", tmp_path, 2).code == 0
    assert call("rm", tmp_path, 3, "--force").code == 0
    assert call("ls", tmp_path).out == "no checkpoints here\n"
    assert call("rm", tmp_path, three).code == 2


def test_pin_completes_a_checkpoint_that_lacks_only_its_index(
    call: Commands, tmp_path: Path
) -> None:
    with ranks(str(tmp_path), 2) as world:
        id, _ = [pipeline.save(small_state(), step=1).wait().id for pipeline in world]
        settle(world[1])
    (tmp_path / f"{id}.json").unlink()
    assert call("pin", tmp_path, 1).out == f"pinned {id}\n"
    assert "pinned" in call("ls", tmp_path).out


def test_rm_takes_an_incomplete_checkpoint_by_its_id_only(call: Commands, tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    lost = crashed(tmp_path)
    refused = call("rm", tmp_path, 7)
    assert refused.code == 2
    assert "By its id it is deleted" in refused.err
    assert call("rm", tmp_path, lost).code == 0
    assert not (tmp_path / lost).exists()


def test_what_is_leased_or_resumed_from_stays(call: Commands, tmp_path: Path) -> None:
    one, two, *_ = save_steps(tmp_path, 1, 2, 3)
    lease = tmp_path / ".ckpipe" / "leases" / one / "reader.0"
    lease.parent.mkdir(parents=True)
    lease.write_text("{}")
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.load(step=2)
        pipeline.save(small_state(), step=3)
    done = call("prune", tmp_path, "--keep-last", 1, "--json")
    kept = {each["id"]: each["reason"] for each in done.data["keep"]}
    assert "lease" in kept[one]
    assert "resumed" in kept[two]
    assert len(kept) == 3
    assert "lease" in call("rm", tmp_path, one).err
    os.utime(lease, (0, 0))
    assert call("rm", tmp_path, one).code == 0


def test_an_interrupted_deletion_counts_and_is_finished_later(
    call: Commands, tmp_path: Path
) -> None:
    one, two = save_steps(tmp_path, 1, 2)
    assert interrupted("delete", "rm", f"stuck://{tmp_path}", 1, "--force").code == 130
    found = {each["id"]: each for each in call("ls", tmp_path, "--json").data["checkpoints"]}
    assert (found[one]["complete"], found[two]["complete"]) == (False, True)
    assert call("verify", tmp_path, "--all").code == 0
    assert call("sweep", tmp_path).code == 0
    assert not (tmp_path / one).exists()
    assert [e["id"] for e in call("ls", tmp_path, "--json").data["checkpoints"]] == [two]


def test_prune_does_what_the_dry_run_says(call: Commands, tmp_path: Path) -> None:
    ids = save_steps(tmp_path, 1, 2, 3, 4, 5)
    call("pin", tmp_path, 1)
    rules = ("--keep-last", 1, "--rule", '{"keep": "every", "steps": 3}')
    dry = call("prune", tmp_path, *rules, "--dry-run", "--json").data
    assert dry["dry_run"] is True
    assert [each["id"] for each in dry["remove"]] == [ids[1], ids[3]]
    assert [each["id"] for each in dry["keep"]] == [ids[4], ids[2], ids[0]]
    assert {each["reason"] for each in dry["keep"]} >= {"the newest", "it is pinned"}
    assert len(call("ls", tmp_path, "--json").data["checkpoints"]) == 5
    text = call("prune", tmp_path, *rules, "--dry-run").out.splitlines()
    assert [line.split()[0] for line in text[1:]] == ["stays"] * 3 + ["goes"] * 2
    done = call("prune", tmp_path, *rules, "--json").data
    assert {**done, "dry_run": True} == dry
    left = call("ls", tmp_path, "--json").data["checkpoints"]
    assert [each["id"] for each in left] == [ids[4], ids[2], ids[0]]


def test_prune_takes_the_line_of_the_newest_unless_another_is_named(
    call: Commands, tmp_path: Path
) -> None:
    old, new = save_steps(tmp_path, 100, 200, 300), save_steps(tmp_path, 1, 2, 3)
    first, second = (ids[0].split(".")[1].partition("Z-")[2] for ids in (old, new))
    listed = call("ls", tmp_path).out
    assert "line" in listed.splitlines()[0]
    assert first in listed
    rule = (tmp_path, "--keep-last", 1, "--json")

    def pruned(*words: object) -> list[str]:
        return [each["id"] for each in call("prune", *rule, *words).data["remove"]]

    assert pruned("--all-lines", "--dry-run") == [*old, *new[:2]]
    assert pruned() == new[:2]
    assert pruned("--line", first, "--dry-run") == old[:2]
    refused = call("prune", *rule, "--line", "none")
    assert (refused.code, "ls shows lines" in refused.err) == (2, True)
    assert call("prune", *rule, "--line", second, "--all-lines").code == 2
    assert pruned("--all-lines") == old
    assert call("info", tmp_path, "--json").data["line"] == second


def test_prune_takes_rules_from_the_settings(
    call: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = save_steps(tmp_path / "root", 1, 2, 3)
    file = tmp_path / "ckpipe.toml"
    file.write_text("[retention]\nkeep_last = 2\n")
    done = call("--settings", file, "prune", tmp_path / "root", "--dry-run", "--json")
    assert [each["id"] for each in done.data["remove"]] == [ids[0]]
    monkeypatch.setenv("CKPIPE_RETENTION__KEEP_LAST", "1")
    done = call("prune", tmp_path / "root", "--dry-run", "--json")
    assert [each["id"] for each in done.data["remove"]] == ids[:2]


def test_looking_writes_nothing(call: Commands, tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    before[tmp_path] = tmp_path.stat().st_mtime_ns
    for command in ("ls", "info"):
        assert call(command, tmp_path).code == 0
    assert call("prune", tmp_path, "--keep-last", 1, "--dry-run").code == 0
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    after[tmp_path] = tmp_path.stat().st_mtime_ns
    assert after == before
    assert call("verify", tmp_path).code == 0
    assert set(tmp_path.rglob("*")) | {tmp_path} == before.keys(), "but for a lease"


@pytest.mark.parametrize("command", ["verify", "diff", "cp"])
def test_what_a_command_reads_is_not_removed_meanwhile(
    call: Commands, tmp_path: Path, command: str
) -> None:
    with stores() as made, ThreadPoolExecutor(1) as pool:
        save_steps(made.url, 1, 2)
        more = {"verify": (), "diff": ("2",), "cp": ()}[command]
        place = (str(tmp_path),) if command == "cp" else ()
        gate = made.faulty.pause("read_into")
        reader = pool.submit(run, [command, made.url, *place, "1", *more])
        gate.wait_until_held()
        refused = call("rm", made.url, 1)
        assert (refused.code, "lease" in refused.err) == (2, True)
        assert call("prune", made.url, "--keep-last", 1).code == 0
        gate.release()
        assert reader.result(300) in (0, 1)
        assert call("rm", made.url, 1).code == 0


def test_who_may_not_write_may_read(call: Commands, caplog: pytest.LogCaptureFixture) -> None:
    with stores() as made:
        save_steps(made.url, 1)
        made.faulty.fail(errors.PermissionDenied("read only"), "put", times=None)
        assert call("verify", made.url).code == 0
        assert not [each for each in caplog.records if each.levelname == "WARNING"]


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_extra_the_command_says_what_to_install(missing: str) -> None:
    done = program_without(missing, "ls", "/somewhere")
    assert done.code == 2
    assert "pip install '.[cli]'" in done.err


@pytest.mark.parametrize("missing", ["typer", "rich"])
@pytest.mark.parametrize("words", [["--help"], ["-h"], ["ls", "--help"]])
def test_help_needs_no_extra(missing: str, words: list[str]) -> None:
    done = program_without(missing, *words)
    assert (done.code, done.err) == (0, "")
    assert "pip install '.[cli]'" in done.out
    for command in COMMANDS:
        line = rf"(?m)^  {command.name} +{re.escape(command.summary)}$"
        assert re.search(line, done.out)


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_the_version_needs_no_extra(missing: str) -> None:
    done = program_without(missing, "--version")
    assert (done.code, done.out, done.err) == (0, f"ckpipe {ckpipe.__version__}\n", "")
    done = program_without(missing, "--version", "--json")
    assert done.data == {"version": ckpipe.__version__}


def program_without(module: str, *words: str) -> Done:
    """Call the program where a module is not installed."""
    code = f"import sys; sys.modules[{module!r}] = None; from ckpipe.cli import main; main()"
    return python(code, *words)


def test_what_needs_no_tensors_does_not_wait_for_torch(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    root = str(tmp_path)
    commands = [["ls", root], ["info", root], ["rm", root, "1"], ["--help"]]
    commands += [[command.name, "--help"] for command in COMMANDS]
    program = (
        "import json, sys; from ckpipe.cli.app import run\n"
        "for command in json.loads(sys.argv[1]):\n"
        "    code = run(command)\n"
        "    assert code == 0 and 'torch' not in sys.modules, command"
    )
    done = python(program, json.dumps(commands))
    assert done.code == 0, done.err


# Ctrl-C


@pytest.mark.parametrize(
    "arguments", [("verify",), ("verify", "--all"), ("timeline", "--html", "page.html")]
)
def test_an_interrupt_ends_a_command_that_waits_for_the_store(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    save_steps(tmp_path / "root", 1)
    before = set(tmp_path.rglob("*"))
    verbs = ("read_into", "get")
    done = interrupted(verbs, *arguments, f"stuck://{tmp_path / 'root'}", cwd=tmp_path)
    assert (done.code, done.out, done.err) == (130, "", "")
    assert set(tmp_path.rglob("*")) == before
