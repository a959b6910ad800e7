"""Folders of ``torch.distributed.checkpoint``, of one rank and of several."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as Properties
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save as save_by_dcp

import ckpipe
from ckpipe.errors import (
    CkpipeError,
    InvalidExtent,
    InvalidManifest,
    MissingObject,
    OversizedMetadata,
    ShapeMismatch,
    UnsafePath,
    UnsupportedState,
    UsageError,
)
from tests.foreign.dcp_folders import save
from tests.foreign.places import assert_loaded, counted, weights
from tests.foreign.test_hostile import MARK, Mark, refused
from tests.support.rank_processes import Gang, told


def test_a_folder_is_the_state_that_was_saved(tmp_path: Path) -> None:
    tensors = weights()
    del tensors["empty"]  # DCP does not keep it on one rank
    state = tensors | {
        "nested": {"w": torch.randn(4, 5).t(), "list": [torch.ones(2), 5, {"x": torch.zeros(1)}]},
        "step": 3,
        "values": [1, "two", 3.0],
        "pair": (1, 2),
        "model.with.dots": torch.randn(3),
        "conjugate": torch.randn(3, dtype=torch.cfloat).conj(),
    }
    safetensors = {"serialization_format": SerializationFormat.SAFETENSORS}
    every: list[dict[str, Any]] = [{}, {"thread_count": 2}, {"single_file_per_rank": False}]
    for number, options in enumerate([*every, safetensors]):
        folder = tmp_path / str(number)
        if options is safetensors:
            del state["conjugate"], state["nested"]  # it has neither lazy bits nor strides
        save(state, folder, **options)
        assert_loaded(ckpipe.load(folder), state, folder)
        with counted(folder) as (url, _):
            assert_loaded(ckpipe.load(url), state, url)


def in_form_of_torch_2_6(metadata: Metadata) -> None:
    """Take away what later versions have added."""
    for each, names in (
        (metadata, ["version"]),
        (metadata.storage_meta, ["modules"]),
        *((info, ["transform_descriptors"]) for info in metadata.storage_data.values()),
    ):
        for name in names:
            vars(each).pop(name, None)


def in_form_of_torch_2_1(metadata: Metadata) -> None:
    """Put the older class of properties, whose state is a tuple, in place of the newer one."""
    in_form_of_torch_2_6(metadata)
    for about in metadata.state_dict_metadata.values():
        if isinstance(about, TensorStorageMetadata):
            older: Any = Properties(dtype=about.properties.dtype)
            about.properties = older


def of_many_ranks(metadata: Metadata) -> None:
    """Make the metadata larger than those of any file."""
    in_form_of_torch_2_6(metadata)
    metadata.storage_meta = "x" * (20 << 20)  # type: ignore[assignment]


@pytest.mark.parametrize("change", [in_form_of_torch_2_6, in_form_of_torch_2_1, of_many_ranks])
def test_metadata_of_older_torch(change: Callable[[Metadata], object], tmp_path: Path) -> None:
    state = {"w": torch.randn(4, 5), "nested": {"list": [torch.ones(2), 5]}, "step": 3}
    save(state, tmp_path / "dcp")
    data = changed(tmp_path / "dcp", change)
    assert b"transform_descriptors" not in data
    (tmp_path / "dcp" / ".metadata").write_bytes(data)
    assert_loaded(ckpipe.load(tmp_path / "dcp"), state, tmp_path / "dcp")


def test_folders_of_ranks_apart_and_incomplete_ones_are_refused_by_name(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_by_dcp({"w": torch.ones(2)}, checkpoint_id=tmp_path, use_collectives=False)
    metadata = tmp_path / "__0.metadata"
    assert metadata.exists()
    with pytest.raises(UsageError, match="use_collectives=False"):
        ckpipe.load(tmp_path)
    metadata.unlink()
    with pytest.raises(UsageError, match=r"incomplete.*\.metadata"):
        ckpipe.load(tmp_path)


def test_the_structure_of_items_is_read_together(tmp_path: Path) -> None:
    state = {f"w{n}": torch.ones(1 << 16) for n in range(10)}
    state |= {f"small{n}": torch.ones(100) for n in range(100)}
    save(state, tmp_path / "dcp")
    with counted(tmp_path / "dcp") as (url, opened):
        assert len(ckpipe.inspect(url).tensors) == len(state)
        assert sum(each.reads for each in opened) <= 1 + 11


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((1, "bare"), (2, "fsdp")), ((4, "hsdp"), (1, "bare")), ((4, "2d"), (2, "tp"))],
)
def test_any_ranks_load_what_others_saved(
    world: Gang, tmp_path: Path, saved: tuple[int, str], loaded: tuple[int, str]
) -> None:
    root = tmp_path / "run"
    for do, (count, kind) in (("save_with_dcp", saved), ("load_from_dcp", loaded)):
        codes = world.run(f"tests.foreign.dcp_runs:{do}", root, count, kind=kind)
        assert codes == [0] * count
    assert len(told(root, "loaded")) == loaded[0]


def test_shards_of_its_hugging_face_writer_are_put_together(world: Gang, tmp_path: Path) -> None:
    folder, root = tmp_path / "shards", tmp_path / "run"
    case = {"kind": "fsdp", "folder": str(folder)}
    do = "tests.foreign.dcp_runs:save_with_its_hugging_face_writer"
    assert world.run(do, root, 2, **case) == [0, 0]
    assert len(list(folder.glob("shard-*.safetensors"))) == 2
    expected = torch.load(f"{root}.expected.pt", weights_only=True)
    assert_loaded(ckpipe.load(folder), expected, folder)
    target = {name: torch.zeros_like(each) for name, each in expected.items()}
    last, first = sorted(folder.glob("shard-*"), reverse=True)
    for lost, error in ((last, ShapeMismatch), (first, MissingObject)):
        lost.rename(tmp_path / "lost")
        with pytest.raises(error):
            ckpipe.load(folder, target)
        assert not any(each.any() for each in target.values())
        (tmp_path / "lost").rename(lost)
    last.rename(first)
    with pytest.raises(InvalidManifest, match="No part of the checkpoint has the elements"):
        ckpipe.load(folder)


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


def name_of(metadata: Metadata, name: Any) -> None:
    for index in metadata.storage_data:
        object.__setattr__(index, "fqn", name)


def chunk(metadata: Metadata, **facts: Any) -> None:
    about: Any = metadata.state_dict_metadata["w"]
    vars(about.chunks[0]).update(facts)


TWICE: tuple[Any, ...] = ()
for _ in range(60):
    TWICE = (TWICE, TWICE)

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
    "a path of another tensor": (
        lambda m: m.planner_data.__setitem__("a", ("w",)), InvalidManifest),
    "no metadata of DCP": (lambda m: pickle.dumps([1, 2]), InvalidManifest),
    "truncated": (lambda m: pickle.dumps(m)[:-50], InvalidManifest),
    "70 MB": (lambda m: bytes(70 << 20), OversizedMetadata),
    "a name of 2^60": (lambda m: name_of(m, TWICE), InvalidManifest),
    "a path of 2^60": (lambda m: m.planner_data.__setitem__("w", (TWICE,)), InvalidManifest),
    "a long path": (lambda m: m.planner_data.__setitem__("w", ("w",) * 3000), InvalidManifest),
    "offsets of 2^60": (lambda m: chunk(m, offsets=(TWICE,)), InvalidManifest),
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
    with pytest.raises(UnsupportedState) as raised:
        ckpipe.load(tmp_path / "other")
    assert raised.value.key == "value"
    assert ckpipe.load(tmp_path / "other", include=["w"]).state["w"].tolist() == [1.0]
    assert not (tmp_path / MARK).exists()
