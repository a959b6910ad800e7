"""Several ranks load a foreign checkpoint, each the part that it needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.support.rank_processes import Gang, told
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
    file, root = tmp_path / "w.safetensors", tmp_path / "run"
    safetensors.torch.save_file({"w": torch.randn(32 << 10, 1024)}, file)  # 128 MiB
    case = {"file": str(file), "rows": 32 << 10}
    assert world.run("tests.foreign.rank_runs:share_of_rows", root, 4, **case) == [0] * 4
    for rank, (read,) in told(root, "read").items():
        (needed,) = told(root, "needed")[rank]
        assert needed == 32 << 20
        assert read <= 1.1 * needed
