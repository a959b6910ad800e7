"""Damage in a manifest or group object while the index is whole: told by name, never passed on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import ckpipe
from ckpipe import errors
from tests.support.command_line import Commands
from tests.support.rank_pipelines import one_rank, ranks
from tests.support.stored_files import Document, flip, forge

MANY = 101


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks."""
    root = tmp_path_factory.mktemp("two")
    with ranks(str(root), 2) as world:
        saves = [
            each.save({"w": torch.ones(50) * rank}, step=1, metadata={"rank": rank})
            for rank, each in enumerate(world)
        ]
        for each in saves:
            each.wait_complete(timeout=60)
    return root


@pytest.fixture(scope="module")
def of_many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of so many ranks that group objects are between manifests and index."""
    root = tmp_path_factory.mktemp("many")
    with one_rank(str(root), 0, MANY) as pipeline:
        id = pipeline.save({"w": 1}, step=1).wait().id
    first = manifest(root, 0)
    for rank in range(1, MANY):
        path = root / id / f"m/0/{rank // 100:03d}/rank-{rank:05d}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(first.read_bytes())
        forge(path, partial(of_rank, rank))
    with ckpipe.SyncPipeline(root) as pipeline:
        assert [each.complete for each in pipeline.steps()] == [True]
    return root


def manifest(root: Path, rank: int = 1) -> Path:
    (path,) = root.glob(f"step-*/m/0/*/rank-{rank:05d}.json")
    return path


def group(root: Path, number: int = 1) -> Path:
    (path,) = root.glob(f"step-*/m/1/*/group-{number:05d}.json")
    return path


def of_rank(rank: int, document: Document) -> None:
    document["parts"]["rank"] = [rank]


def of_another_save(path: Path) -> None:
    forge(path, lambda document: document["parts"].update(token=["0"]))


def swapped(path: Path) -> None:
    """Put the first object of the same directory, or of the one before, in place of this one."""
    other = min(path.parent.parent.glob("*/*.json"))
    assert other != path
    path.write_bytes(other.read_bytes())


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped at the start": lambda path: flip(path, 3),
    "flipped in the middle": lambda path: flip(path, path.stat().st_size // 2),
    "flipped in its checksum": lambda path: flip(path, path.stat().st_size - 4),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-30]),
    "empty": lambda path: path.write_bytes(b""),
    "gone": Path.unlink,
    "swapped": swapped,
    "of another save": of_another_save,
}


def files(root: Path) -> dict[str, bytes]:
    """Every file below a root, by name."""
    paths = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def copied_tree(root: Path, target: Path) -> Path:
    for name, data in files(root).items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(data)
    return target


def check_told_everywhere(root: Path, path: Path, where: list[str], call: Commands) -> None:
    """Check that each verb of ``verify`` and ``copy`` names the object, and passes nothing on."""
    before, target = files(root), root.parent / "target"

    def by_pipeline() -> object:
        with ckpipe.SyncPipeline(root, read_only=True) as pipeline:
            return pipeline.verify(1)

    for work in (
        lambda: ckpipe.verify(root, 1), by_pipeline, lambda: ckpipe.copy(root, target, 1),
    ):  # fmt: skip
        with pytest.raises(errors.CorruptCheckpoint) as caught:
            work()
        assert all(each in str(caught.value) for each in (path.name, "step 1", *where))
        assert "load the checkpoint, and save it again" in str(caught.value)
    for command in (["verify", root, 1], ["verify", "--all", root], ["cp", root, target, 1]):
        done = call(*command)
        assert done.code == 1
        assert path.name in done.out + done.err
    assert files(root) == before
    copied = files(target)
    assert not any(name.endswith(path.name) for name in copied), "the damage is not passed on"
    assert not any(name.startswith("step-") and name.count("/") == 0 for name in copied)


@pytest.mark.sample(4)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_manifest_is_told_by_verify_and_copy(
    of_two: Path, tmp_path: Path, call: Commands, damage: str
) -> None:
    root = copied_tree(of_two, tmp_path / "root")
    assert ckpipe.verify(root, 1).files == 2
    DAMAGE[damage](manifest(root))
    check_told_everywhere(root, manifest(root) if damage != "gone" else Path("rank-00001.json"),
                          ["rank 1"], call)  # fmt: skip
    with ckpipe.SyncPipeline(root) as pipeline:  # as the hint says
        assert pipeline.load(step=1, per_rank="rank0") is not None


@pytest.mark.sample(2)
@pytest.mark.parametrize("damage", [each for each in DAMAGE if each != "of another save"])
def test_a_damaged_group_object_is_told_by_verify_and_copy(
    of_many: Path, tmp_path: Path, call: Commands, damage: str
) -> None:
    root = copied_tree(of_many, tmp_path / "root")
    ckpipe.verify(root, 1)
    DAMAGE[damage](group(root))
    check_told_everywhere(root, Path("group-00001.json"), [], call)


def test_a_whole_checkpoint_of_many_ranks_is_copied_with_all_its_objects(
    of_many: Path, tmp_path: Path
) -> None:
    ckpipe.copy(of_many, tmp_path / "copy")
    whole = {name: data for name, data in files(of_many).items() if name.startswith("step-")}
    assert len(whole) == MANY + 2 + 1
    copy = {name: data for name, data in files(tmp_path / "copy").items() if "step-" in name}
    assert {name: data for name, data in copy.items() if name.startswith("step-")} == whole
