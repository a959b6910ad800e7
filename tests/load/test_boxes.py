"""Boxes of saved tensors fill tensors of any dtype, and nothing else is touched."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe.errors import (
    CheckpointNotFound,
    CkpipeError,
    ShapeMismatch,
    SharingConflict,
    StructureMismatch,
    UsageError,
)

SMALL = {"block_bytes": 65536}
Box = tuple[str, tuple[int, ...], torch.Tensor]


def test_boxes_of_any_place_and_dtype(tmp_path: Path) -> None:
    cube = torch.arange(40 * 50 * 60, dtype=torch.float64).view(40, 50, 60)
    turned = cube.permute(2, 0, 1)
    state = {"a": {"cube": cube, "turned": turned}, "one": torch.tensor(7)}
    boxes = [
        ("a.cube", (0, 0, 0), torch.empty_like(cube), cube),
        ("a.cube", (3, 20, 59), torch.empty(37, 5, 1), cube[3:, 20:25, 59:]),
        ("a.cube", [39, 0, 7], torch.zeros(50, 50, 2)[1:2], cube[39:, :, 7:9]),
        ("a.turned", (10, 2, 3), torch.empty(9, 30, 4).double(), turned[10:19, 2:32, 3:7]),
        ("a.cube", (40, 50, 60), torch.empty(0, 0, 0), cube[:0, :0, :0]),
        ("one", (), torch.empty((), dtype=torch.bfloat16), torch.tensor(7.0)),
    ]
    with ckpipe.SyncPipeline(tmp_path, staging=SMALL) as pipeline:
        pipeline.save({"one": torch.tensor(8)}, step=4).wait()
        pipeline.save(state, step=5)  # which is waited for
        pipeline.read_boxes(5, (each[:3] for each in boxes))
    for label, lower, into, expected in boxes:
        assert torch.equal(into, expected.to(into.dtype)), (label, lower)

    async def read() -> torch.Tensor:
        into = torch.empty(2)
        async with ckpipe.Pipeline(tmp_path, read_only=True) as other:
            info = await other.latest()
            assert info is not None
            await other.read_boxes(info, [("a.cube", (1, 2, 3), into.view(1, 1, 2))])
        return into

    assert torch.equal(asyncio.run(read()), cube[1, 2, 3:5].float())


def test_targets_that_share_memory_agree_or_are_refused(tmp_path: Path) -> None:
    saved = torch.arange(12.0).view(3, 4)
    whole, part, one = torch.full((3, 4), -1.0), torch.full((2, 2), -1.0), torch.full((1,), -1.0)
    wrong: list[list[Box]] = [
        [("w", (0, 0), part), ("w", (1, 2), part)],
        [("w", (0, 0), part), ("w", (0, 0), part.view(torch.int32))],
        [("w", (0, 0), one.expand(2, 2))],
    ]
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.save({"w": saved}, step=1).wait()
        for number, boxes in enumerate(wrong):
            with pytest.raises(SharingConflict):
                pipeline.read_boxes(1, boxes)
            assert {*part.flatten().tolist(), *one.tolist()} == {-1.0}, number
        pipeline.read_boxes(1, [("w", (0, 0), whole[:1]), ("w", (0, 0), whole)])
    assert torch.equal(whole, saved)


def test_a_box_that_does_not_fit_leaves_all_as_it_was(tmp_path: Path) -> None:
    good = torch.full((2,), -1.0)
    wrong: list[tuple[type[CkpipeError], str, tuple[int, ...], torch.Tensor]] = [
        (StructureMismatch, "absent", (0,), torch.empty(1)),
        (ShapeMismatch, "w", (2,), torch.empty(2)),
        (ShapeMismatch, "w", (-1,), torch.empty(2)),
        (ShapeMismatch, "w", (), torch.empty(2)),
        (ShapeMismatch, "w", (0, 0), torch.empty(2)),
        (ShapeMismatch, "w", (0, 0), torch.empty(1, 1)),
        (StructureMismatch, "w", (0,), torch.empty(3, device="meta")),
        (SharingConflict, "w", (0,), torch.empty(1).expand(3)),
    ]
    none: list[Any] = [7, {"w": good}, [("w", good)], [(0, (0,), good)], [("w", 0, good)],
                       [("w", (0,), good.numpy())]]  # fmt: skip
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.save({"w": torch.arange(3.0)}, step=1).wait()
        for boxes in none:
            with pytest.raises(UsageError, match="boxes is a list of labels, lower corners and"):
                pipeline.read_boxes(1, boxes)
        for error, label, lower, into in wrong:
            with pytest.raises(error) as caught:
                pipeline.read_boxes(1, [("w", (0,), good), (label, lower, into)])
            assert (caught.value.key, caught.value.step) == (label, 1)
        with pytest.raises(CheckpointNotFound):
            pipeline.read_boxes(2, [])
        assert torch.equal(good, torch.full((2,), -1.0))
        pipeline.read_boxes(1, [])
