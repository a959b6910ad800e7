"""State that only some ranks have for a sharded parameter, and state that torch mixes up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ckpipe import SyncPipeline
from ckpipe.distributed import training_state
from ckpipe.errors import StructureMismatch
from tests.support.rank_processes import Gang, told
from tests.training.state_of_some_ranks import CASES, KINDS, SHAPE

KEY = "t.optimizer.state.experts"


def test_state_of_some_ranks_goes_back_to_them_or_the_load_names_them(
    world: Gang, root: Path
) -> None:
    world.succeed("tests.training.state_of_some_ranks:save_and_load", root, 2)
    loads = told(root, "loads")
    assert {rank: len(every) for rank, every in loads.items()} == dict.fromkeys(
        range(2), 6 * len(CASES)
    )
    saved_by = {rank: [each[4] for each in every] for rank, every in loads.items()}
    for rank, every in loads.items():
        for number, each in enumerate(every):
            kind, had, layout, stepped, saved, before, found, missing, error = each
            where = f"{kind}, rank {had} had state, {layout} on rank {rank}, stepped: {stepped}"
            if layout == "columns":  # each rank needs elements of both
                assert found == before, where
                assert error is not None, where
                assert error.startswith("StructureMismatch"), where
                assert f"Ranks {1 - had} saved no state" in error, where
                assert KEY in error, where
                continue
            assert error is None, f"{where}: {error}"
            expected = saved if layout == "same" else saved_by[1 - rank][number]
            assert found == expected, where
            assert missing == ([] if expected else [KEY]), where
    # One process needs the elements of all.
    with SyncPipeline(root) as pipeline:
        for step, (kind, had) in enumerate(CASES):
            net = nn.Module()
            net.experts = nn.Parameter(torch.zeros(SHAPE))
            optimizer = KINDS[kind](net.parameters())
            with pytest.raises(StructureMismatch, match=f"Ranks {1 - had} saved no") as caught:
                pipeline.load({"t": training_state(net, optimizer)}, step=step)
            assert caught.value.key
            assert caught.value.key.startswith(KEY)
            assert not optimizer.state
            assert not net.experts.any()
            pipeline.load({"t": training_state(net, optimizer)}, step=step, exclude=[KEY])
            assert net.experts.any()


def test_flat_parameters_over_tensor_parallel_are_refused_with_their_optimizer(
    world: Gang, tmp_path: Path
) -> None:
    world.succeed("tests.training.state_of_some_ranks:flat_over_tensor_parallel", tmp_path, 4)
    for every in told(tmp_path, "flat").values():
        (parallel, error, same), (alone, none, alike) = every
        assert (parallel, same, alone, none, alike) == (True, True, False, None, True)
        assert error.startswith("UnsupportedState")
        assert "'0.weight'" in error
