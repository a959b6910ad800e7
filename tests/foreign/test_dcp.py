"""Folders of ``torch.distributed.checkpoint``, of one rank and of several."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save as save_by_dcp

import ckpipe
from ckpipe.errors import (
    CkpipeError,
    InvalidExtent,
    InvalidManifest,
    MissingObject,
    OversizedMetadata,
    UnsafePath,
    UnsupportedState,
)
from tests.foreign.places import assert_loaded, counted, load, weights
from tests.foreign.test_hostile import MARK, Mark, refused
from tests.support.rank_processes import Gang, gang, told


@pytest.fixture(scope="module")
def ranks() -> Iterator[Gang]:
    with gang() as started:
        yield started


def save(state: Any, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # they differ between versions of torch
        save_by_dcp(state, checkpoint_id=folder, no_dist=True)


def test_a_folder_is_the_state_that_was_saved(tmp_path: Path) -> None:
    tensors = weights()
    del tensors["empty"]  # DCP does not keep it on one rank
    state = tensors | {
        "nested": {"w": torch.randn(4, 5).t(), "list": [torch.ones(2), 5, {"x": torch.zeros(1)}]},
        "step": 3,
        "values": [1, "two", 3.0],
        "pair": (1, 2),
        "model.with.dots": torch.randn(3),
    }
    save(state, tmp_path / "dcp")
    assert_loaded(ckpipe.load(tmp_path / "dcp"), state, tmp_path / "dcp")
    with counted(tmp_path / "dcp") as (url, _):
        assert_loaded(ckpipe.load(url), state, url)


def test_only_what_is_wanted_is_read(tmp_path: Path) -> None:
    state = {f"w{n}": torch.full((1 << 20,), float(n)) for n in range(8)}
    save(state, tmp_path / "dcp")
    with (
        ckpipe.SyncPipeline(tmp_path / "run") as pipeline,
        counted(tmp_path / "dcp") as (url, opened),
    ):
        result = load(pipeline, source=url, include=["w3"])
        assert torch.equal(result.state["w3"], state["w3"])
        assert sum(each.bytes for each in opened) <= 1.1 * (4 << 20) + (256 << 10)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((1, "bare"), (2, "fsdp")), ((2, "fsdp"), (1, "bare")), ((4, "2d"), (2, "tp"))],
)
def test_any_ranks_load_what_others_saved(
    ranks: Gang, tmp_path: Path, saved: tuple[int, str], loaded: tuple[int, str]
) -> None:
    root = tmp_path / "run"
    for do, (count, kind) in (("save_with_dcp", saved), ("load_from_dcp", loaded)):
        codes = ranks.run(f"tests.foreign.dcp_runs:{do}", root, count, kind=kind)
        assert codes == [0] * count
    assert len(told(root, "loaded")) == loaded[0]


def test_shards_of_its_hugging_face_writer_are_put_together(ranks: Gang, tmp_path: Path) -> None:
    folder, root = tmp_path / "shards", tmp_path / "run"
    case = {"kind": "fsdp", "folder": str(folder)}
    do = "tests.foreign.dcp_runs:save_with_its_hugging_face_writer"
    assert ranks.run(do, root, 2, **case) == [0, 0]
    assert len(list(folder.glob("shard-*.safetensors"))) == 2
    expected = torch.load(f"{root}.expected.pt", weights_only=True)
    assert_loaded(ckpipe.load(folder), expected, folder)


def test_shards_without_offsets_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    for info in ("{}", '{"w": {"saved_offsets": [-1]}}', '{"w": {"saved_offsets": [0, 0]}}', "["):
        metadata = {"DCP_SHARDING_INFO": info}
        safetensors.torch.save_file({"w": torch.ones(2)}, file, metadata)
        with pytest.raises(InvalidManifest) as raised:
            ckpipe.load(tmp_path)
        assert raised.value.key == file.name


def changed(folder: Path, change: Callable[[Metadata], object]) -> bytes:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    made = change(metadata)
    return made if isinstance(made, bytes) else pickle.dumps(metadata if made is None else made)


def storage(metadata: Metadata, **facts: Any) -> None:
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = replace(info, **facts)


def shape(metadata: Metadata, size: list[int]) -> None:
    about: Any = metadata.state_dict_metadata["w"]
    about.size = torch.Size(size)
    about.chunks[0].sizes = torch.Size(size)


LIES: dict[str, tuple[Callable[[Metadata], object], type[CkpipeError]]] = {
    "a file above": (lambda m: storage(m, relative_path="../__0_0.distcp"), UnsafePath),
    "a file that is missing": (lambda m: storage(m, relative_path="x.distcp"), MissingObject),
    "a range beyond the file": (lambda m: storage(m, offset=1 << 40), InvalidExtent),
    "a range of 2^60": (lambda m: storage(m, length=1 << 60), InvalidExtent),
    "a range below zero": (lambda m: storage(m, offset=-1), InvalidManifest),
    "another range": (lambda m: storage(m, offset=1), InvalidManifest),
    "data that is compressed": (lambda m: storage(m, transform_descriptors=["zstd"]),
                                UnsupportedState),
    "a shape of 2^60": (lambda m: shape(m, [1 << 60]), InvalidExtent),
    "no data": (lambda m: m.storage_data.clear(), InvalidManifest),
    "a path to a list of 2^60": (
        lambda m: m.planner_data.__setitem__("w", ("w", 1 << 60)), InvalidManifest),
    "a path that is none": (lambda m: m.planner_data.__setitem__("w", ()), InvalidManifest),
    "a path through a tensor": (
        lambda m: m.planner_data.__setitem__("a", ("w", "a")), InvalidManifest),
    "no metadata of DCP": (lambda m: pickle.dumps([1, 2]), InvalidManifest),
    "truncated": (lambda m: pickle.dumps(m)[:-50], InvalidManifest),
    "20 MB": (lambda m: bytes(20 << 20), OversizedMetadata),
    "a global": (lambda m: b"cos\nsystem\n.", UnsupportedState),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_metadata_that_lie(lie: str, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    save({"w": torch.ones(1), "a": torch.ones(2)}, folder)
    change, expected = LIES[lie]
    (folder / ".metadata").write_bytes(changed(folder, change))
    assert refused(folder, expected).key is not None


def test_metadata_and_values_run_nothing(tmp_path: Path) -> None:
    folder, mark = tmp_path / "theirs", Mark(tmp_path / MARK)
    save({"w": torch.ones(1)}, folder)
    (folder / ".metadata").write_bytes(pickle.dumps(mark))
    assert refused(folder, UnsupportedState).key == ".metadata"
    save({"w": torch.ones(1), "value": mark}, tmp_path / "other")
    assert refused(tmp_path / "other", UnsupportedState).key == "__0_0.distcp"
    assert not (tmp_path / MARK).exists()
