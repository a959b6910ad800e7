"""Ranks that write the same tensors say so once: in the log, in a report and in a list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe.cli.app import run
from tests.support.rank_pipelines import ranks
from tests.support.settling import settle


def state(rank: int) -> dict[str, Any]:
    """What all ranks hold alike, with a tensor that shares its memory, and what each has."""
    weight = torch.arange(25_000, dtype=torch.float32)
    own = torch.full((100,), float(rank))
    return {"weight": weight, "tied": weight, "rows": weight[10:], "own": own, "rank": rank}


def save_all(
    url: Path, states: list[dict[str, Any]], steps: tuple[int, ...] = (1,), **fields: Any
) -> list[ckpipe.SyncSaveHandle]:
    """Save with all ranks, each after the one before; return the handles."""
    handles = []
    with ranks(str(url), len(states), staging={"pinned": "never"}, **fields) as world:
        for step in steps:
            # Another rank completes each checkpoint.
            for number in range(len(world)):
                rank = (number + step) % len(world)
                handles.append(world[rank].save(states[rank], step=step))
                handles[-1].wait()
                settle(world[rank])
    return handles


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each for each in caplog.messages if "copies" in each]


@pytest.mark.sample(1)
@pytest.mark.parametrize("worker", ["thread", "process"])
def test_copies_are_told_once(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    worker: str,
) -> None:
    handles = save_all(tmp_path, [state(rank) for rank in range(4)], (1, 2, 3), worker=worker)
    [message] = said(caplog)
    assert "300 kB of the " in message
    assert "training_state" in message
    assert "replicated" in message
    # Whoever completed a checkpoint knows of them: the last of each step.
    assert [handle.report.copied_bytes for handle in handles] == [0, 0, 0, 300_000] * 3
    assert "300 kB of the checkpoint are copies" in repr(handles[-1].report)
    assert run(["ls", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert told.out.count("300 kB of copies") == 3
    assert told.err.count("training_state") == 1
    for more in ([], ["--read"]):
        assert run(["--json", "ls", str(tmp_path), *more]) == 0
        found = json.loads(capsys.readouterr().out)["checkpoints"]
        assert [each["copied_bytes"] for each in found] == [300_000] * 3


SILENT: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "other values on a rank": ([{"w": torch.full((25_000,), n // 3)} for n in range(4)], {}),
    "each its own": ([{"own": torch.full((25_000,), float(rank))} for rank in range(4)], {}),
    "named as replicated": (
        [state(rank) for rank in range(4)], {"plan": {"replicated": ["weight", "tied", "rows"]}},
    ),
    "a small part": (
        [{"step": torch.ones(1000), "own": torch.full((99_999,), float(n))} for n in range(4)], {},
    ),
    "one rank": ([state(0)], {}),
}  # fmt: skip


@pytest.mark.parametrize("case", SILENT)
def test_nothing_is_told_where_there_are_no_copies(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    case: str,
) -> None:
    states, fields = SILENT[case]
    save_all(tmp_path, states, **fields)
    assert said(caplog) == []
    assert run(["ls", str(tmp_path)]) == 0
    assert "copies" not in "".join(capsys.readouterr())
