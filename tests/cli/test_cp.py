"""Copying checkpoints between stores: verified, taken up again, complete or absent."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

import ckpipe
from ckpipe.errors import PermissionDenied
from ckpipe.testing import Landing
from tests.support.command_line import (
    Commands,
    ends_by_failed_request,
    interrupted,
    program,
    save_steps,
)
from tests.support.pipelines import Stores, loaded_state, same
from tests.support.rank_pipelines import ranks
from tests.support.stored_files import data_file_key, entries_of, flip

CHUNK_BYTES = 1 << 20


def files(root: Path) -> dict[str, bytes]:
    """Every file of the checkpoints below a root, by name."""
    paths = (path for path in root.rglob("*") if path.is_file())
    named = {str(path.relative_to(root)): path.read_bytes() for path in paths}
    return {name: data for name, data in named.items() if not name.startswith(".ckpipe/")}


def test_a_copy_is_the_same_to_the_byte(call: Commands, tmp_path: Path) -> None:
    one, two = save_steps(tmp_path / "a", 1, 2)
    done = call("cp", tmp_path / "a", tmp_path / "b", 1, "--json")
    assert done.code == 0
    (copied,) = done.data["copied"]
    assert (copied["id"], copied["files"], copied["copied_files"]) == (one, 1, 1)
    assert not any(name.startswith(two) for name in files(tmp_path / "b"))
    again = call("cp", tmp_path / "a", tmp_path / "b", "--all", "--json").data["copied"]
    assert [(each["id"], each["copied_files"]) for each in again] == [(one, 0), (two, 1)]
    assert files(tmp_path / "b") == files(tmp_path / "a")


def test_copies_go_to_another_kind_of_store_and_back(
    call: Commands, tmp_path: Path, store: Stores
) -> None:
    save_steps(tmp_path / "a", 1)
    assert call("cp", tmp_path / "a", store.url).code == 0
    assert call("verify", store.url).code == 0
    assert call("cp", store.url, tmp_path / "b").code == 0
    assert files(tmp_path / "b") == files(tmp_path / "a")
    with ckpipe.SyncPipeline(tmp_path / "a") as a, ckpipe.SyncPipeline(store.url) as b:
        assert same(loaded_state(a, 1), loaded_state(b, 1))


@pytest.fixture
def odd_run(tmp_path: Path) -> str:
    """A run of one checkpoint whose chunks begin and end within blocks; returns its id."""
    with ckpipe.SyncPipeline(tmp_path / "a") as pipeline:
        state = {
            "large": torch.arange(2 * CHUNK_BYTES + 77, dtype=torch.uint8),
            "exact": torch.zeros(CHUNK_BYTES, dtype=torch.uint8),
            "small": torch.arange(5.0),
            "empty": torch.empty(0),
        }
        id = pipeline.save(state, step=1).wait().id
    (tmp_path / "small.toml").write_text("[staging]\nblock_bytes = 69632\n")
    return id


def test_a_large_file_goes_in_many_blocks(call: Commands, tmp_path: Path, odd_run: str) -> None:
    done = call("--settings", tmp_path / "small.toml", "cp", tmp_path / "a", tmp_path / "b")
    assert done.code == 0
    assert files(tmp_path / "b") == files(tmp_path / "a")


def test_a_damaged_source_is_named_and_not_copied(
    call: Commands, tmp_path: Path, odd_run: str
) -> None:
    path = tmp_path / "a" / data_file_key(odd_run)
    header_end, begins = entries_of(path.read_bytes())
    places = {"its header": {9, header_end - 1}}
    for name, nbytes in (("large", 2 * CHUNK_BYTES + 77), ("exact", CHUNK_BYTES), ("small", 20)):
        edges = {0, nbytes - 1} | {n for n in (CHUNK_BYTES - 1, CHUNK_BYTES) if n < nbytes}
        places[repr(name)] = {begins[name] + at for at in edges}
    for name, found in places.items():
        for at in found:
            flip(path, at)
            done = call("--settings", tmp_path / "small.toml", "cp", tmp_path / "a", tmp_path / "b")
            assert (done.code, done.out) == (1, "")
            assert "The source is damaged" in done.err
            assert name in done.err
            assert files(tmp_path / "b") == {}
            flip(path, at)
    path.unlink()
    assert call("cp", tmp_path / "a", tmp_path / "b").code == 1


def test_a_copy_that_fails_gives_its_upload_up(
    call: Commands, tmp_path: Path, store: Stores
) -> None:
    (id,) = save_steps(tmp_path / "a", 1)
    flip(tmp_path / "a" / data_file_key(id), 9)
    assert call("cp", tmp_path / "a", store.url).code == 1
    assert store.memory._store.uploads == {}


def test_a_damaged_manifest_is_not_copied(call: Commands, tmp_path: Path) -> None:
    with ranks(str(tmp_path / "a"), 2) as world:
        saves = [each.save({"w": 1}, step=1) for each in world]
        for each in saves:
            each.wait_complete(timeout=60)
    manifest = tmp_path / "a" / saves[0].id / "m" / "0" / "000" / "rank-00001.json"
    (manifest.parent / "notes.txt").write_text("not ckpipe's")
    whole = manifest.read_bytes()
    manifest.write_bytes(whole.replace(b"1", b"2", 1))
    done = call("cp", tmp_path / "a", tmp_path / "b")
    assert (done.code, done.out) == (1, "")
    assert "its checksum differs" in done.err
    assert "rank-00001.json" in done.err
    # The other manifest may be there already, or nothing yet, not even the directory.
    assert not (tmp_path / "b" / f"{saves[0].id}.json").exists()
    manifest.write_bytes(whole)
    assert call("cp", tmp_path / "a", tmp_path / "b").code == 0
    assert call("verify", tmp_path / "b").code == 0
    assert not list(tmp_path.glob("b/*/m/0/000/notes.txt"))


def test_a_damaged_file_of_the_target_is_replaced(call: Commands, tmp_path: Path) -> None:
    (id,) = save_steps(tmp_path / "a", 1)
    call("cp", tmp_path / "a", tmp_path / "b")
    path = tmp_path / "b" / id / "rank-00000.safetensors"
    for spoilt in (path.read_bytes()[:-1], path.read_bytes()[:-1] + b"x", None):
        path.unlink() if spoilt is None else path.write_bytes(spoilt)
        (copied,) = call("cp", tmp_path / "a", tmp_path / "b", "--json").data["copied"]
        assert copied["copied_files"] == 1
        assert files(tmp_path / "b") == files(tmp_path / "a")


@pytest.mark.parametrize("leased", [True, False])
def test_what_is_pruned_meanwhile_is_left_out_and_the_rest_is_copied(
    call: Commands, tmp_path: Path, store: Stores, leased: bool
) -> None:
    one, two, three = save_steps(store.url, 1, 2, 3)
    if not leased:
        store.faulty.fail(PermissionDenied("read only"), "put", times=None)

    def prune(_: object) -> None:
        inside = store.memory._store
        inside.create(f".ckpipe/deleted/{two}", b"{}")
        inside.objects.pop(f"{two}/rank-00000.safetensors")

    store.faulty.call(prune, lambda each: each.key == f"{one if leased else two}.json")
    done = call("cp", "--all", store.url, tmp_path / "b", "--json")
    assert (done.code, [each["id"] for each in done.data["copied"]]) == (0, [one, three])
    assert done.err == f"{two} was deleted meanwhile and is left out\n"
    assert call("cp", store.url, tmp_path / "b", two).code == 2


def test_other_metadata_under_the_name_is_a_conflict(call: Commands, tmp_path: Path) -> None:
    (id,) = save_steps(tmp_path / "a", 1)
    call("cp", tmp_path / "a", tmp_path / "b")
    index = tmp_path / "b" / f"{id}.json"
    index.write_bytes(index.read_bytes() + b" ")
    before = files(tmp_path / "b")
    assert call("cp", tmp_path / "a", tmp_path / "b").code == 3
    assert files(tmp_path / "b") == before


def test_what_was_deleted_on_the_target_is_not_revived(call: Commands, tmp_path: Path) -> None:
    save_steps(tmp_path / "a", 1)
    call("cp", tmp_path / "a", tmp_path / "b")
    assert call("rm", tmp_path / "b", 1, "--force").code == 0
    done = call("cp", tmp_path / "a", tmp_path / "b")
    assert done.code == 2
    assert "deleted on the target" in done.err
    assert files(tmp_path / "b") == {}


@pytest.mark.parametrize("landing", list(Landing))
def test_a_store_that_fails_once_at_any_request_is_copied_to(
    call: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, landing: Landing
) -> None:
    monkeypatch.setenv("CKPIPE_UPLOAD__BACKOFF_SECONDS", "0")
    save_steps(tmp_path / "a", 1)
    for url, _ in ends_by_failed_request(landing, lambda url: call("cp", tmp_path / "a", url).code):
        assert call("cp", tmp_path / "a", url).code == 0
        assert call("verify", url).code == 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_copy_leaves_nothing_half_done_and_goes_on(
    tmp_path: Path, signum: signal.Signals
) -> None:
    one, two, three = save_steps(tmp_path / "a", 1, 2, 3)
    arguments = ["cp", "--all", str(tmp_path / "a"), f"stuck://{tmp_path / 'b'}"]
    key = "step-000000000002"
    done = interrupted("write", *arguments, key=key, signum=signum)
    assert done.code == (130 if signum == signal.SIGINT else -signum)
    if signum == signal.SIGINT:
        assert {name.partition("/")[0] for name in files(tmp_path / "b")} == {one, f"{one}.json"}
    with ckpipe.SyncPipeline(tmp_path / "b", read_only=True) as pipeline:
        assert [info.id for info in pipeline.steps() if info.complete] == [one]
    done = program("cp", "--all", tmp_path / "a", tmp_path / "b", "--json")
    assert done.code == 0
    copied = [(each["id"], each["copied_files"]) for each in done.data["copied"]]
    assert copied == [(one, 0), (two, 1), (three, 1)]
    left = files(tmp_path / "b")
    assert {name: left.pop(name) for name in files(tmp_path / "a")} == files(tmp_path / "a")
    # What a killed one was writing, sweep removes once it is old.
    assert len(left) == (0 if signum == signal.SIGINT else 1)
