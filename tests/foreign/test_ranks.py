"""Several ranks load a foreign checkpoint, each the part that it needs, or write one together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import ckpipe
from tests.foreign.dcp_folders import save
from tests.support.rank_processes import Gang, told
from tests.support.sampling import sample
from tests.support.wrapped_models import Net

_UNNORMALIZED = ("tp", "plain", "2d")


def files_of(folder: Path, kinds: list[str]) -> dict[str, str]:
    """Write the weights of the model that each wrapper has."""
    files = {}
    for kind in kinds:
        torch.manual_seed(11)
        net = Net(normalized=kind not in _UNNORMALIZED)
        files[kind] = str(folder / f"{kind}.safetensors")
        safetensors.torch.save_file(net.state_dict(), files[kind])
    return files


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("count", "kinds"),
    [(2, ["plain", "ddp", "fsdp", "tp"]), (4, ["fsdp", "hsdp", "tp", "2d"])],
)
def test_every_wrapper_takes_a_foreign_file(
    world: Gang, tmp_path: Path, count: int, kinds: list[str]
) -> None:
    files, root = files_of(tmp_path, kinds), tmp_path / "run"
    case = {"kinds": kinds, "files": files}
    codes = world.run("tests.foreign.rank_runs:into_wrappers", root, count, **case)
    assert codes == [0] * count
    assert len(told(root, "done")) == count


def test_a_rank_reads_its_own_rows(world: Gang, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("w.safetensors", "w.pt", "dcp")]
    state = {"w": torch.randn(24 << 10, 1024)}  # 96 MiB
    safetensors.torch.save_file(state, files[0])
    torch.save(state, files[1])
    save(state, files[2])
    case = {"files": list(map(str, files)), "rows": 24 << 10}
    root = tmp_path / "run"
    assert world.run("tests.foreign.rank_runs:share_of_rows", root, 4, **case) == [0] * 4
    read, needed, used = (told(root, name) for name in ("read", "needed", "used"))
    for rank in range(4):
        assert needed[rank] == [24 << 20] * 3
        assert max(read[rank]) <= 1.1 * (24 << 20)
        assert max(used[rank]) <= 64 << 20  # and blocks of 64 KiB


def test_ranks_export_together_and_dcp_loads_it_on_any_number(world: Gang, tmp_path: Path) -> None:
    root = tmp_path / "run"
    settings = {"final_format": "dcp", "export": {"max_shard_bytes": 4000}}
    case = {"settings": settings}
    assert world.run("tests.foreign.rank_runs:export_together", root, 3, **case) == [0] * 3
    (folder,) = root.glob("*.dcp")
    ((files,),) = {tuple(map(tuple, each)) for each in told(root, "files").values()}
    assert files[-1] == ".metadata"
    assert set(files) == {each.name for each in folder.iterdir()}
    assert len(files) > 3
    ckpipe.export(root, tmp_path / "torch", form="torch")
    alone = ckpipe.export(root, tmp_path / "alone", form="dcp", max_shard_bytes=4000)
    for name in alone.files:
        assert (tmp_path / "alone" / name).read_bytes() == (folder / name).read_bytes()
    given = {"folder": str(folder), "expected": str(tmp_path / "torch/state.pt")}
    for count in sample((1, 2, 4), 1):
        codes = world.run(
            "tests.foreign.rank_runs:load_by_dcp", tmp_path / str(count), count, **given
        )
        assert codes == [0] * count
        assert len(told(tmp_path / str(count), "done")) == count


def test_an_export_without_the_files_of_one_rank_fails_on_all(world: Gang, tmp_path: Path) -> None:
    root = tmp_path / "run"
    settings: dict[str, Any] = {"final_format": "hf", "export": {"max_shard_bytes": 400}}
    settings |= {"incomplete_after_seconds": 2.0}
    case = {"settings": settings, "fails": 1}
    assert world.run("tests.foreign.rank_runs:export_together", root, 3, **case) == [0] * 3
    assert told(root, "files") == {}
    errors = {rank: each for rank, (each,) in told(root, "error").items()}
    assert errors[1][0] == "UsageError"
    for rank in (0, 2):
        kind, text = errors[rank]
        assert kind == "CheckpointIncomplete"
        assert "incomplete_after_seconds" in text
    assert "model-00002-of-" in errors[0][1]
    (folder,) = root.glob("*.hf")
    assert not (folder / "model.safetensors.index.json").exists()
    with ckpipe.SyncPipeline(root, read_only=True) as pipeline:
        assert [info.complete for info in pipeline.steps()] == [True]
    done = ckpipe.export(root, max_shard_bytes=400)
    assert set(done.files) == {each.name for each in folder.iterdir()}


def test_the_recipe_of_the_format_puts_shards_together(
    world: Gang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    assert world.run("tests.foreign.rank_runs:save_shards", root, 2) == [0, 0]
    page = Path(__file__).parents[2] / "docs" / "format.md"
    (recipe,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(recipe, found)
    expected = torch.load(f"{root}.expected.pt", weights_only=True)
    assert found["boxes"].keys() & expected.keys()
    assert all(torch.equal(found["merged"][name], each) for name, each in expected.items())
