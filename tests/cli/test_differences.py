"""Commands tell of which tensors ranks hold different copies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.command_line import Commands
from tests.support.rank_pipelines import ranks


@pytest.fixture
def drifted(tmp_path: Path) -> Path:
    """A run of two ranks and two steps, of which the last has other bytes on rank 1."""
    with ranks(str(tmp_path), 2, plan={"replicated": ["*"]}, replicas={"share": 1}) as world:
        for step in range(2):
            handles = [
                pipeline.save({"t": torch.full((9,), float(rank * step))}, step=step)
                for rank, pipeline in enumerate(world)
            ]
            assert all(each.wait_complete(300).complete for each in handles)
    return tmp_path


def test_commands_tell_differing_copies(call: Commands, drifted: Path) -> None:
    for arguments in ([], ["--read"]):
        done = call("ls", drifted, "--json", *arguments)
        assert [each["differences"] for each in done.data["checkpoints"]] == [1, 0]
        lines = call("ls", drifted, *arguments).out.splitlines()
        assert ["1 differing copies" in each for each in lines] == [False, True, False]
    (each,) = call("info", drifted, "--json").data["differing"]
    assert (each["tensor"], each["box"], each["mebibytes"]) == ("t", None, [0])
    assert sorted([each["owner"], *each["witnesses"]]) == [0, 1]
    text = f"t: written by rank {each['owner']}, other bytes on rank {each['witnesses'][0]}"
    assert text in call("info", drifted).out
    assert "differ" not in call("info", drifted, 0).out.partition("state")[0]
    assert "1 differing copies" in call("verify", drifted).out
    assert [each["differences"] for each in call("verify", drifted, "--json").data["results"]] == [
        1
    ]
