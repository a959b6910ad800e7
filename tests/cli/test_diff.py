"""Differences between checkpoints, as the command ``diff`` tells them."""

from __future__ import annotations

import math
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.command_line import Commands, damage, save, save_steps
from tests.support.fork_server import ForkedProgram
from tests.support.rank_pipelines import ranks
from tests.support.sampling import SEED
from tests.support.signals import HEARING

NAN = math.nan
ODD_DTYPES = [
    torch.bool, torch.uint8, torch.uint16, torch.uint64, torch.int64, torch.float16,
    torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
]  # fmt: skip


NUMBERS = [0.0, -0.0, 1.5, -3.0, NAN, math.inf]


def compare(
    call: Commands, root: Path, pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]
) -> dict[str, dict[str, Any]]:
    """The differences of pairs of tensors that ``diff`` finds, by name."""
    save(root, *({name: pair[side] for name, pair in pairs.items()} for side in (0, 1)))
    found = call("diff", root, 0, 1, "--json").data
    assert found["compared"] == len(pairs)
    return {each["label"]: each for each in found["tensors"]}


def test_differences_are_those_of_plain_arithmetic(call: Commands, tmp_path: Path) -> None:
    draw = random.Random(SEED)
    sizes = draw.choices(range(1, 10), k=300)
    lists = {
        f"x{number}": tuple(draw.choices(NUMBERS, k=size) for _ in range(2))
        for number, size in enumerate(sizes)
    }
    pairs = {name: (torch.tensor(a), torch.tensor(b)) for name, (a, b) in lists.items()}
    differing = compare(call, tmp_path, pairs)
    assert len(differing) > 200
    for name, (first, second) in pairs.items():
        both = list(zip(*lists[name], strict=True))
        gaps = [0.0 if x == y or (x != x and y != y) else abs(y - x) for x, y in both]
        if name not in differing:
            assert torch.equal(first.view(torch.int32), second.view(torch.int32))
            continue
        found = differing[name]
        assert found["different"] == sum(not (x == y or (x != x and y != y)) for x, y in both)
        expected = math.sqrt(sum(gap * gap for gap in gaps))
        assert float(found["norm"]) == pytest.approx(expected, nan_ok=True)
        largest = NAN if any(gap != gap for gap in gaps) else max(gaps)
        assert float(found["largest"]) == pytest.approx(largest, nan_ok=True)


def test_every_dtype_is_compared(call: Commands, tmp_path: Path) -> None:
    first, second = torch.tensor([0, 1, 0, 1]), torch.tensor([0, 1, 1, 1])
    pairs = {str(each).replace(".", " "): (first.to(each), second.to(each)) for each in ODD_DTYPES}
    whole = torch.tensor([2**60, 2**60])  # a double holds not all such numbers
    pairs["same"] = (first.clone(), first.clone())
    pairs["whole"] = (whole, whole + torch.tensor([0, 1]))
    found = compare(call, tmp_path, pairs)
    assert found.pop("whole")["different"] == 1
    assert len(found) == len(ODD_DTYPES)
    for each in found.values():
        assert (each["elements"], each["different"], each["norm"], each["largest"]) == (4, 1, 1, 1)
        assert each["relative"] == pytest.approx(1 / math.sqrt(2))


def test_structures(call: Commands, tmp_path: Path) -> None:
    one = {"a": torch.zeros(2), "b": torch.zeros(3), "lr": 0.1, "gone": 1, "set": {1}}
    two = {"a": torch.zeros(2), "b": torch.zeros(4), "lr": 0.2, "new": torch.zeros(1), "set": {2}}
    save(tmp_path, one, two)
    found = call("diff", tmp_path, 0, 1, "--json").data
    assert (found["compared"], found["tensors"]) == (1, [])
    assert (found["only_first"], found["only_second"]) == (["gone"], ["new"])
    changed = {each["label"]: (each["first"], each["second"]) for each in found["changed"]}
    assert changed["b"] == ("float32[3]", "float32[4]")
    assert changed["lr"] == ("0.1", "0.2")
    assert set(changed) == {"b", "lr", "set"}


def test_diff_of_states_with_everything(call: Commands, tmp_path: Path) -> None:
    one, two = save_steps(tmp_path, 1, 2)
    done = call("diff", tmp_path, 1, two, "--json")
    assert done.code == 1
    data = done.data
    assert (data["first"], data["second"], data["same"]) == (one, two, False)
    assert data["compared"] == 8
    found = {each["label"]: each for each in data["tensors"]}
    assert set(found) >= {"weight", "rows", "turned", "half", "scalar", "model.weight"}
    assert found["scalar"]["norm"] == 1.0
    assert [each["label"] for each in data["changed"]] == ["inline.6.0"]
    same = call("diff", tmp_path, 1, 1)
    assert (same.code, same.out) == (0, "0 of 8 tensors compared differ\n")
    chosen = call("diff", tmp_path, 1, 2, "--match", "model", "--json").data
    assert {each["label"] for each in chosen["tensors"]} == {"model.weight", "model.bias"}
    assert chosen["changed"] == []
    structure = call("diff", tmp_path, 1, 2, "--structure", "--json").data
    assert (structure["compared"], structure["tensors"]) == (0, [])
    assert call("diff", tmp_path, 1, 2, "--structure").out.endswith(
        "the structures are not alike\n"
    )
    assert call("diff", tmp_path, 1, 1, "--structure").out == "the structures are alike\n"


def test_diff_says_that_no_name_matches(call: Commands, tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    for options in ((), ("--structure",)):
        done = call("diff", tmp_path, 1, 2, "--match", "zz", "--match", "", *options)
        assert (done.code, done.out) == (2, "")
        assert "No name matches zz or ''. The nearest names are: " in done.err
    assert call("diff", tmp_path, 1, 2, "--match", "inline.0").err == ""
    assert call("diff", tmp_path, 1, 2).err == ""


def test_diff_of_arrays_views_and_lazy_bits(call: Commands, tmp_path: Path) -> None:
    def state(value: float) -> dict[str, Any]:
        base = torch.full((4, 4), value, dtype=torch.complex64)
        return {
            "array": np.full(3, value),
            "words": np.array(["a", str(value)]),
            "conj": base.conj(),
            "turned": base.t()[1:, ::2],
            "a.b": torch.tensor([value]),
            "a": {"b": torch.tensor([0.0])},
        }

    save(tmp_path, state(1), state(1), state(2))
    assert call("diff", tmp_path, 0, 1).code == 0
    found = call("diff", tmp_path, 0, 2, "--json").data
    assert {each["label"] for each in found["tensors"]} == {
        "array", "words", "conj", "turned", "a.b",
    }  # fmt: skip


def test_diff_over_two_roots_and_of_what_is_missing(call: Commands, tmp_path: Path) -> None:
    save(tmp_path / "a", {"x": torch.zeros(2), "old": torch.zeros(1)})
    save(tmp_path / "b", {"x": torch.zeros(2), "new": 1})
    done = call("diff", tmp_path / "a", 0, 0, "--in", tmp_path / "b")
    assert done.code == 1
    assert done.out.splitlines() == ["- old", "+ new", "0 of 1 tensors compared differ"]
    assert call("diff", tmp_path / "a", 0, 5).code == 2


def test_diff_of_a_damaged_checkpoint_says_so(call: Commands, tmp_path: Path) -> None:
    one, _ = save_steps(tmp_path, 1, 2)
    damage(tmp_path, one)
    done = call("diff", tmp_path, 1, 2)
    assert (done.code, done.out) == (1, "")
    assert "is not what was saved" in done.err


def save_ranks(root: Path, step: int, *seeds: int) -> str:
    """Leave a checkpoint of several ranks: one tensor alike, one and a value for each."""
    with ranks(str(root), len(seeds), attempt_id=f"run-{step}") as world:
        for pipeline, seed in zip(world, seeds, strict=True):
            state = {"alike": torch.ones(4), "own": torch.full((3,), float(seed)), "seed": seed}
            handle = pipeline.save(state, step=step)
            handle.wait()
        world[0].latest()
    return handle.id


def test_what_each_rank_has_for_itself_is_compared_rank_by_rank(
    call: Commands, tmp_path: Path
) -> None:
    one, two = save_ranks(tmp_path, 0, 5, 6), save_ranks(tmp_path, 1, 5, 7)
    three = save_ranks(tmp_path, 2, 5, 7, 8)
    assert call("verify", tmp_path, "--all").code == 0
    assert call("diff", tmp_path, one, one).code == 0
    data = call("diff", tmp_path, one, two, "--json").data
    assert [(each["label"], each["norm"]) for each in data["tensors"]] == [
        ("own of rank 1", pytest.approx(3**0.5))
    ]
    assert data["changed"] == [{"label": "seed", "first": "5 | 6", "second": "5 | 7"}]
    other = call("diff", tmp_path, two, three, "--json").data
    assert (other["tensors"], other["same"]) == ([], False)
    assert call("cp", tmp_path, tmp_path / "copy", three).code == 0
    assert call("diff", tmp_path, three, three, "--in", tmp_path / "copy").code == 0


def test_ranks_of_different_structures_are_compared_rank_by_rank(
    call: Commands, tmp_path: Path
) -> None:
    def state(rank: int, value: float, size: int) -> dict[str, Any]:
        own = torch.full((3 if rank == 0 else size,), rank + value * (rank == 1))
        return {"own": own, "alike": torch.ones(2), f"stage{rank}": rank}

    for step, (value, size) in enumerate([(0.0, 3), (5.0, 3), (0.0, 4)]):
        with ranks(str(tmp_path), 2, attempt_id=f"run-{step}") as world:
            for rank, pipeline in enumerate(world):
                pipeline.save(state(rank, value, size), step=step).wait()
            world[0].latest()
    assert call("diff", tmp_path, 0, 0).code == 0
    for step in (1, 2):
        done = call("diff", tmp_path, 0, step, "--json")
        assert done.code == 1
        assert [each["label"] for each in done.data["tensors"]] == ["own of rank 1"]
    described = {
        each["label"]: each["differs"]
        for each in call("info", tmp_path, 0, "--json").data["tensors"]
    }
    assert described == {"own": True, "alike": False}


STEPWISE = """
import sys, torch
equal = torch.equal

def when_told(a, b):
    print("comparing", flush=True)
    sys.stdin.readline()
    return equal(a, b)

torch.equal = when_told
from ckpipe.cli import main
main()
"""


def test_an_interrupt_ends_the_comparison_of_a_large_tensor(tmp_path: Path) -> None:
    large = {"large": torch.zeros((4 << 20) + 1, dtype=torch.uint8)}
    save(tmp_path, large, large)
    with ForkedProgram(HEARING + STEPWISE, "diff", tmp_path, 0, 1) as process:
        assert process.stdout.readline() == "comparing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate() == ("", "")
        assert process.returncode == 130
    assert not [path for path in tmp_path.glob(".ckpipe/leases/**/*") if path.is_file()]
