"""Checkpoints of other programs, taken over as ckpipe's own."""

from __future__ import annotations

import json
import shutil
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpipe
from ckpipe.errors import (
    CheckpointNotFound,
    CkpipeError,
    CorruptCheckpoint,
    PerRankValue,
    StoreUnavailable,
    StructureMismatch,
    UsageError,
)
from ckpipe.testing import Landing
from tests.foreign.dcp_folders import save as save_by_dcp
from tests.foreign.places import assert_loaded, counted, replaced_at_second_look, weights
from tests.foreign.test_torch_files import everything
from tests.support.command_line import (
    Commands,
    ends_by_failed_request,
    interrupted,
    script,
)
from tests.support.pipelines import Stores, same, small_state
from tests.support.rank_pipelines import ranks
from tests.support.wrapper_tensors import scaled

SMALL = ckpipe.Settings(staging={"block_bytes": "64 KiB", "bytes": "256 KiB"})


def large() -> dict[str, Any]:
    """Tensors that lie in many small blocks."""
    made = torch.Generator().manual_seed(3)
    return {
        **weights(),
        "turned": torch.randn(300, 200, generator=made).t(),
        "cube": torch.randn(7, 90, 301, generator=made),
        "experts.0.up": torch.randn(90, 101, generator=made),
        "experts.1.up": torch.randn(90, 101, generator=made),
        "few": torch.ones(70_000).expand(3, 70_000),
    }


def of_torch(folder: Path, state: Any) -> Path:
    torch.save(state, folder / "state.pt")
    return folder / "state.pt"


def of_dcp(folder: Path, state: Any) -> Path:
    save_by_dcp(state, folder / "dcp")
    return folder / "dcp"


def of_hugging_face(folder: Path, state: Any) -> Path:
    (folder / "hf").mkdir()
    names = list(state)
    for number in range(2):
        part = {name: state[name].contiguous() for name in names[number::2]}
        save_file(part, folder / f"hf/{number}.safetensors")
    return folder / "hf"


Write = Callable[[Path, Any], Path]
WRITERS = [of_torch, of_dcp, of_hugging_face]


def objects(root: Path) -> set[str]:
    """The files below a root, but for those of leases and launches."""
    files = (str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    return {name for name in files if not name.startswith(".ckpipe/")}


@pytest.mark.parametrize("write", WRITERS)
def test_an_imported_checkpoint_is_an_ordinary_one(write: Write, tmp_path: Path) -> None:
    source, root = write(tmp_path, large()), tmp_path / "run"
    with ckpipe.SyncPipeline(root) as pipeline:
        pipeline.save({"old": 1}, step=900, until="committed")
    with counted(source) as (place, _):
        made = [
            ckpipe.import_checkpoint(source, root, step=3, staging=SMALL.staging),
            ckpipe.import_checkpoint(place, root),
        ]
    assert [info.step for info in made] == [3, 0]
    expected = ckpipe.load(source).state
    with ckpipe.SyncPipeline(root, read_only=True) as pipeline:
        assert pipeline.latest() == made[-1]
        for info, name in zip(made, (source, place), strict=True):
            assert pipeline.verify(info).files == 1
            found = ckpipe.load(root, step=info)
            assert same(found.state, expected)
            assert found.metadata == {"imported_from": str(name)}
            assert found.report is not None
            assert found.report.unverified_bytes == 0
            assert ckpipe.verify(root, info).source is None
    target = {name: torch.zeros_like(each) for name, each in large().items() if name != "few"}
    ckpipe.load(root, target, exclude=["few"])
    assert all(same(target[name], each) for name, each in expected.items() if name != "few")


def test_an_import_keeps_all_that_a_checkpoint_of_ckpipe_says(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    state = {"wrapped": scaled(), "optimizer": torch.optim.AdamW([parameter])}
    said: dict[str, Any] = {"metrics": {"loss": 0.5}, "metadata": {"tokens": 4096}}
    with ckpipe.SyncPipeline(tmp_path / "a") as pipeline:
        pipeline.save(state, step=4, **said).wait()
    info = ckpipe.import_checkpoint(tmp_path / "a", tmp_path / "b")
    assert (info.step, {name: getattr(info, name) for name in said}) == (4, said)
    for root in (tmp_path / "a", tmp_path / "b"):
        target: dict[str, Any] = {
            "wrapped": scaled(start=9),
            "optimizer": torch.optim.SGD([parameter]),
        }
        with pytest.raises(StructureMismatch, match="AdamW"):
            ckpipe.load(root, target)
        target["optimizer"] = torch.optim.AdamW([parameter])
        ckpipe.load(root, target)
        assert torch.equal(target["wrapped"].dequantize(), scaled().dequantize())


def test_memory_that_tensors_share_is_stored_once(tmp_path: Path) -> None:
    state = everything() | {"far": torch.ones(2**18).expand(2**20, 2**18)}
    torch.save(state, tmp_path / "state.pt")
    info = ckpipe.import_checkpoint(tmp_path / "state.pt", tmp_path / "run", settings=SMALL)
    assert info.bytes is not None
    assert info.bytes < 1.1 * (tmp_path / "state.pt").stat().st_size
    found = ckpipe.load(tmp_path / "run", exclude=["far"]).state
    expected = torch.load(tmp_path / "state.pt", weights_only=True)
    assert_loaded(ckpipe.load(tmp_path / "state.pt", exclude=["far"]), found, tmp_path / "state.pt")
    assert found["tied"].data_ptr() == found["again"].data_ptr() == found["turned"].data_ptr()
    assert found["turned"].stride() == expected["turned"].stride()
    assert (found["conjugate"].is_conj(), found["negative"].is_neg()) == (True, True)
    with pytest.raises(UsageError, match="An import would take") as raised:
        ckpipe.import_checkpoint(
            tmp_path / "state.pt", tmp_path / "other", transform=[ckpipe.Cast({"far": "float16"})]
        )
    assert raised.value.key == "far"
    hint = raised.value.hint or ""
    assert "Drop" in hint
    assert "expanded" not in hint, "an import has no such argument"
    with pytest.raises(StructureMismatch, match="shares memory"):
        ckpipe.import_checkpoint(
            tmp_path / "state.pt", tmp_path / "other", transform=[ckpipe.Split("far", ["a", "b"])]
        )
    assert objects(tmp_path / "other") == set()


TOML = """
[[transform]]
kind = "Split"
name = "cube"
into = ["cube.a", "cube.b"]
dim = 1
sizes = [1, 89]

[[transform]]
kind = "Fuse"
names = ["cube.b", "cube.a"]
into = "cuboid"
dim = 1

[[transform]]
kind = "Rearrange"
name = "cuboid"
shape = [-1, [45, 2], -1]
order = [3, [2, 1], 0]

[[transform]]
kind = "Unstack"
name = "layer.0.weight"
into = "row.{}"

[[transform]]
kind = "Stack"
name = "experts.{}.up"
into = "experts.up"

[[transform]]
kind = "Cast"
dtypes = {"turned" = "bfloat16", "experts.*" = "float64"}

[[transform]]
kind = "Rename"
names = "^layer[.]"
replacement = "block."

[[transform]]
kind = "Rename"
names = {"*" = "model.*"}

[[transform]]
kind = "Drop"
globs = ["model.row.1*", "model.few"]

[[transform]]
kind = "Only"
globs = ["model"]
"""
TRANSFORMS = [
    ckpipe.Split("cube", ["cube.a", "cube.b"], 1, sizes=[1, 89]),
    ckpipe.Fuse(["cube.b", "cube.a"], "cuboid", 1),
    ckpipe.Rearrange("cuboid", [-1, [45, 2], -1], [3, [2, 1], 0]),
    ckpipe.Unstack("layer.0.weight", "row.{}"),
    ckpipe.Stack("experts.{}.up", "experts.up"),
    ckpipe.Cast({"turned": torch.bfloat16, "experts.*": torch.float64}),
    ckpipe.Rename("^layer[.]", "block."),
    ckpipe.Rename({"*": "model.*"}),
    ckpipe.Drop("model.row.1*", "model.few"),
    ckpipe.Only("model"),
]


@pytest.mark.parametrize("write", WRITERS)
def test_an_import_with_transforms_has_what_a_load_with_them_gives(
    write: Write, tmp_path: Path, call: Commands
) -> None:
    source, root = write(tmp_path, large()), tmp_path / "run"
    expected = ckpipe.load(source, transform=TRANSFORMS).state
    ckpipe.import_checkpoint(source, root, transform=TRANSFORMS, settings=SMALL)
    assert same(ckpipe.load(root).state, expected)
    (tmp_path / "transforms.toml").write_text(TOML)
    done = call("import", source, root, "--step", 7, "--transform", tmp_path / "transforms.toml")
    assert (done.code, "imported step 7" in done.out) == (0, True)
    assert same(ckpipe.load(root).state, expected)
    back = [ckpipe.Rename({"model": "net"}), ckpipe.Cast({"*": "float32"})]
    again = ckpipe.import_checkpoint(root, tmp_path / "again", which=7, transform=back)
    assert (again.step, ckpipe.verify(tmp_path / "again").id) == (7, again.id)
    assert same(ckpipe.load(tmp_path / "again").state, ckpipe.load(root, transform=back).state)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no array of tables"),
        ("transform = 5", "holds no array of tables"),
        ("[[transform]]\nkind='Only'\nglobs=['a']\n[other]", "holds other"),
        ("[[transform]", "is not TOML"),
        ("[[transform]]\nkind = 'eval'", "transform 1: there is no kind 'eval'"),
        ("[[transform]]\nkind = ['Only']", "transform 1: there is no kind"),
        ("[[transform]]\nglobs = ['a']", "transform 1: there is no kind None"),
        ("transform = [5]", "transform 1: there is no kind None"),
        ("[[transform]]\nkind='Only'\nglobs=['*']\n[[transform]]\nkind='Drop'", "2: Drop needs"),
        ("[[transform]]\nkind='Only'\nglobs='*'", "globs is '*'"),
        ("[[transform]]\nkind='llama-to-hf'\nheads=0\nkv_heads=2", "takes heads and kv_heads"),
        ("[[transform]]\nkind='Only'\nglobs=[5]", "globs is [5]"),
        ("[[transform]]\nkind='Only'\nglobs=[]", "takes names as texts"),
        ("[[transform]]\nkind='Only'\nglob=['*']", "Only has no glob"),
        ("[[transform]]\nkind='Cast'\ndtypes={'*'='int8'}", "no floating-point dtype"),
        ("[[transform]]\nkind='Split'\nname='a'\ninto=['b']\ndim='0'", "dim is '0'"),
        ("[[transform]]\nkind='Rename'\nnames='('\nreplacement=''", "cannot be used"),
        ("[[transform]]\nkind='Rearrange'\nname='a'\nshape=['b']\norder=[0]", "shape is ['b']"),
    ],
)
def test_a_wrong_file_of_transforms_is_refused_by_entry(
    text: str, said: str, tmp_path: Path, call: Commands
) -> None:
    (tmp_path / "t.toml").write_text(text)
    torch.save(weights(), tmp_path / "w.pt")
    done = call("import", tmp_path / "w.pt", tmp_path / "run", "--transform", tmp_path / "t.toml")
    assert (done.code, done.out) == (2, "")
    assert str(tmp_path / "t.toml") in done.err
    assert said in done.err
    assert not (tmp_path / "run").exists()


def test_bad_input_is_refused_with_the_way_round(tmp_path: Path, call: Commands) -> None:
    torch.save(weights(), tmp_path / "w.pt")
    (tmp_path / "orbax").mkdir()
    (tmp_path / "orbax/_METADATA").touch()
    (tmp_path / "empty").mkdir()
    bad: list[tuple[Any, dict[str, Any], type[CkpipeError], str]] = [
        ("google/gemma", {}, CheckpointNotFound, "snapshot_download"),
        (tmp_path / "orbax", {}, UsageError, "Orbax"),
        (tmp_path / "empty", {}, CheckpointNotFound, "no checkpoint"),
        (tmp_path / "empty", {"which": 3}, CheckpointNotFound, "no checkpoint 3"),
        (5, {}, UsageError, "URL or a path"),
        (tmp_path / "w.pt", {"step": -1}, UsageError, "step"),
        (tmp_path / "w.pt", {"transform": ckpipe.Only("a")}, UsageError, "a list of transforms"),
        (tmp_path / "w.pt", {"transform": [ckpipe.Only("a")]}, StructureMismatch, "matches noth"),
    ]
    for source, options, kind, said in bad:
        with pytest.raises(kind, match=said):
            ckpipe.import_checkpoint(source, tmp_path / "run", **options)
        assert not (tmp_path / "run").exists() or objects(tmp_path / "run") == set()
    assert call("import", tmp_path / "empty", tmp_path / "run").code == 2
    data = (tmp_path / "w.pt").read_bytes()
    (tmp_path / "w.pt").write_bytes(data[:-100])
    assert call("import", tmp_path / "w.pt", tmp_path / "run").code == 1


@pytest.mark.parametrize("change", ["replaced", "shortened"])
def test_a_source_that_changes_meanwhile_leaves_nothing(change: str, tmp_path: Path) -> None:
    folder, root = tmp_path / "weights", tmp_path / "run"
    folder.mkdir()
    save_file(weights(), folder / "model.safetensors")
    spoil = replaced_at_second_look(folder, shorter=change == "shortened")
    with counted(folder, spoil) as (url, _), pytest.raises(CorruptCheckpoint) as raised:
        ckpipe.import_checkpoint(url, root)
    assert raised.value.key == "model.safetensors"
    assert [path for path in root.rglob("*") if path.is_file()] == []


def test_values_of_ranks_are_left_out_or_refused(tmp_path: Path) -> None:
    with ranks(str(tmp_path / "a"), 2) as world:
        shared = torch.arange(9.0)
        saves = [each.save({"all": shared, "own": n}, step=1) for n, each in enumerate(world)]
        for each in saves:
            each.wait_complete(timeout=60)
    with pytest.raises(PerRankValue, match="own") as raised:
        ckpipe.import_checkpoint(tmp_path / "a", tmp_path / "b")
    assert "Drop" in str(raised.value)
    info = ckpipe.import_checkpoint(tmp_path / "a", tmp_path / "b", transform=[ckpipe.Drop("own")])
    assert info.world_size == 1
    assert same(ckpipe.load(tmp_path / "b").state, {"all": shared})


def test_imports_go_to_any_store_and_back(tmp_path: Path, store: Stores) -> None:
    of_torch(tmp_path, small_state())
    ckpipe.import_checkpoint(tmp_path / "state.pt", store.url)
    ckpipe.import_checkpoint(store.url, tmp_path / "run")
    expected = ckpipe.load(tmp_path / "state.pt").state
    assert same(ckpipe.load(store.url).state, expected)
    assert same(ckpipe.load(tmp_path / "run").state, expected)


@pytest.mark.parametrize("landing", list(Landing))
def test_a_store_that_fails_once_at_any_request_is_imported_to(
    call: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, landing: Landing
) -> None:
    monkeypatch.setenv("CKPIPE_UPLOAD__BACKOFF_SECONDS", "0")
    of_torch(tmp_path, small_state())
    for url, code in ends_by_failed_request(
        landing, lambda url: call("import", tmp_path / "state.pt", url).code
    ):
        if not code:
            assert ckpipe.verify(url).files == 1


def test_an_import_whose_store_fails_for_good_leaves_no_data(tmp_path: Path, store: Stores) -> None:
    of_torch(tmp_path, small_state())
    for verb in ("write", "complete"):
        store.faulty.fail(StoreUnavailable("It broke"), verb, times=None)
        quick = ckpipe.Settings(upload={"deadline_seconds": 0.1, "backoff_seconds": 0.01})
        with pytest.raises(StoreUnavailable):
            ckpipe.import_checkpoint(tmp_path / "state.pt", store.url, settings=quick)
        assert store.memory._store.uploads == {}
        left = [key for key in store.memory._store.objects if not key.startswith(".ckpipe/")]
        assert left == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_import_leaves_no_checkpoint_and_begins_anew(
    tmp_path: Path, signum: signal.Signals
) -> None:
    source, root = of_torch(tmp_path, small_state()), tmp_path / "run"
    done = interrupted("write", "import", source, f"stuck://{root}", key="rank-", signum=signum)
    assert done.code == (130 if signum == signal.SIGINT else -signum)
    if signum == signal.SIGINT:
        assert [path for path in root.rglob("*") if path.is_file()] == []
    with pytest.raises(CheckpointNotFound):
        ckpipe.load(root)
    info = ckpipe.import_checkpoint(source, root)
    with ckpipe.SyncPipeline(root, read_only=True) as pipeline:
        assert [each for each in pipeline.steps() if each.complete] == [info]
    # The drafts that a killed one was writing are removed by a sweep once they are old.
    left = {name for name in objects(root) if not name.startswith(info.id)}
    assert len(left) == (signum == signal.SIGKILL)


_BOUNDED = """
import resource, sys, ckpipe
from ckpipe.testing import SlowBackend
from ckpipe_local import LocalBackend
source, target = sys.argv[1:]
slow = SlowBackend(LocalBackend(target), bytes_per_second=200e6)  # slower than it is read
ckpipe.register_backend("slow", lambda url: slow)
small = ckpipe.Settings(staging={"bytes": "48 MiB"})
ckpipe.inspect(source)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ckpipe.import_checkpoint(source, "slow://run", settings=small)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_an_import_takes_the_memory_of_its_blocks(tmp_path: Path) -> None:
    """One tensor of 384 MiB, in a file with holes, goes through 48 MiB."""
    count = 96 << 20
    header = json.dumps({"x": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}})
    with (tmp_path / "x.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header.encode())
        file.truncate(8 + len(header) + 4 * count)
    done = script(_BOUNDED, tmp_path / "x.safetensors", tmp_path / "run")
    assert done.code == 0, done.err
    assert int(done.out) < (48 + 32) << 10
    shutil.rmtree(tmp_path / "run")
