"""Loading in place where the target shares bytes, or the checkpoint did, in every combination."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpipe
from ckpipe.errors import SharingConflict
from tests.support.stored_states import round_trip, run_round_trip


async def test_overlapping_views_agree_or_not_byte_by_byte() -> None:
    base = torch.zeros(6)
    target: dict[str, Any] = {
        "low": base[:4],
        "high": base[2:],
        "row": torch.zeros(1, 3).expand(2, 3),
    }
    row = torch.tensor([1.0, 2.0, float("nan")])
    saved: dict[str, Any] = {
        "low": torch.arange(4.0),
        "high": torch.arange(2.0, 6.0),
        "row": row.repeat(2, 1),
    }
    await round_trip(saved, target)
    assert base.tolist() == [0, 1, 2, 3, 4, 5]
    assert repr(target["row"]) == repr(saved["row"])
    saved["high"] = torch.ones(4)
    with pytest.raises(SharingConflict):
        await round_trip(saved, target)
    saved["high"], saved["row"] = torch.arange(2.0, 6.0), torch.arange(6.0).reshape(2, 3)
    with pytest.raises(SharingConflict, match="shares bytes within 'row', but"):
        await round_trip(saved, target)
    assert base.tolist() == [0, 1, 2, 3, 4, 5]


def test_pieces_of_a_tensor_agree_where_its_own_elements_overlap(tmp_path: Path) -> None:
    one = torch.full((1,), -1.0)
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.save({"x0": torch.ones(2), "x1": torch.ones(2)}, step=0)
        pipeline.save({"x0": torch.ones(2), "x1": torch.zeros(2)}, step=1)
        stack = [ckpipe.Stack("x{}", "x")]
        with pytest.raises(SharingConflict, match="shares bytes within 'x', but"):
            pipeline.load({"x": one.expand(2, 2)}, step=1, transform=stack)
        assert one.item() == -1
        pipeline.load({"x": one.expand(2, 2)}, step=0, transform=stack)
        assert one.item() == 1


@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 4), st.integers(1, 2)), min_size=1, max_size=4
    ),
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 4), st.integers(1, 2)), min_size=1, max_size=4
    ),
    st.booleans(),
)
def test_any_sharing_loads_into_any_other_or_is_refused_untouched(
    saved: list[tuple[int, int, int]], target: list[tuple[int, int, int]], equal: bool
) -> None:
    target = [(at, n, step) for (at, _, step), (_, n, _) in zip(target, saved, strict=False)]
    source = torch.zeros(24) if equal else torch.arange(24.0)
    memory = torch.full((24,), -1.0)
    ours = [memory.as_strided((n,), (step,), at) for at, n, step in target]
    theirs = [source.as_strided((n,), (step,), at) for at, n, step in saved[: len(target)]]
    places: dict[int, float] = {}
    agree = True
    for (at, _, step), values in zip(target, theirs, strict=True):
        for index, value in enumerate(values.tolist()):
            agree &= places.setdefault(at + index * step, value) == value
    if agree:
        run_round_trip(theirs, ours)
        assert memory.tolist() == [places.get(at, -1.0) for at in range(24)]
    else:
        with pytest.raises(SharingConflict):
            run_round_trip(theirs, ours)
        assert memory.tolist() == [-1.0] * 24
