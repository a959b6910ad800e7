"""Runs a short form of every example as a user would: as a program of its own."""

from __future__ import annotations

import json
import os
import runpy
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import TORCHRUN, Done, forked
from tests.support.s3_servers import S3Server

EXAMPLES = Path(__file__).parents[2] / "examples"
# Much state and little to compute: a save takes far longer than the reaction to its begin.
SMALL_GPT = ["--layers", "1", "--width", "384", "--context", "8", "--batch", "1", "--threads", "1"]
RUNS = ("undisturbed", "killed")


def run_example(name: str, *arguments: str, folder: Path) -> Done:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return forked(EXAMPLES / name, *arguments, cwd=folder, env=environment)


def indexes(folder: Path) -> list[int]:
    return sorted(int(path.name[5:17]) for path in folder.glob("step-*.json"))


def records(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_training_saves_and_a_second_start_has_nothing_left_to_do(tmp_path: Path) -> None:
    command = ("--checkpoints", "here", "--log", "log.jsonl", "--steps", "6", "--save-every", "3")
    first = run_example("train_gpt.py", *command, *SMALL_GPT, folder=tmp_path)
    assert first.code == 0, first.err
    assert "starting from scratch" in first.out
    assert indexes(tmp_path / "here") == [3, 6]

    second = run_example("train_gpt.py", *command, *SMALL_GPT, folder=tmp_path)
    assert second.code == 0, second.err
    assert "resumed from step 6" in second.out

    *steps, finished, finished_again = records(tmp_path / "log.jsonl")
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in steps if "blocked_seconds" in record] == [3, 6]
    assert finished == finished_again


FSDP = ["--checkpoints", "run", "--steps", "16", "--save-every", "4"]
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def launch(ranks: int, *arguments: str, folder: Path) -> Done:
    program = str(EXAMPLES / "fsdp_torchrun.py")
    options = ["--standalone", "--nproc-per-node", str(ranks), program, *FSDP]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return forked(TORCHRUN, *options, *arguments, cwd=folder, env=environment)


class TestRunsThatAreKilled:
    """The examples that start, kill and resume runs of several processes, one of them each time."""

    sample = 1

    def test_demo_kills_a_save_and_the_resumed_run_is_identical(self, tmp_path: Path) -> None:
        demo = run_example(
            "demo.py", "--folder", "runs", "--kill-from", "10", "--picture", "curves.png",
            "--steps", "40", "--save-every", "5", *SMALL_GPT, folder=tmp_path,
        )  # fmt: skip
        assert demo.code == 0, demo.out + demo.err
        assert "IDENTICAL to the last bit." in demo.out
        assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")

        undisturbed, killed = (records(tmp_path / "runs" / run / "log.jsonl") for run in RUNS)
        losses = {record["step"]: record["loss"] for record in undisturbed if "step" in record}
        assert list(losses) == list(range(1, 41))
        again = [record for record in killed if "step" in record]
        assert len(again) > 40, "some steps were taken twice, because a save was lost"
        assert all(losses[record["step"]] == record["loss"] for record in again)
        assert undisturbed[-1] == killed[-1]

    def test_sharded_run_is_killed_and_goes_on_with_fewer_ranks(self, tmp_path: Path) -> None:
        undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
        undisturbed.mkdir()
        killed.mkdir()
        environment = os.environ | ALONE
        alone = forked(EXAMPLES / "fsdp_torchrun.py", *FSDP, cwd=undisturbed, env=environment)
        assert alone.code == 0, alone.err
        assert launch(2, "--die-at", "12", folder=killed).code != 0
        resumed = launch(1, folder=killed)
        assert resumed.code == 0, resumed.err
        assert "1 ranks, from step 4" in resumed.out or "1 ranks, from step 8" in resumed.out

        expected = {record["step"]: record["loss"] for record in records(undisturbed / "run.jsonl")}
        found = records(killed / "run.jsonl")
        assert {record["ranks"] for record in found} == {1, 2}
        assert found[-1]["step"] == 16
        for record in found:
            assert record["loss"] == pytest.approx(expected[record["step"]], rel=1e-4)


def write_run(folder: Path, lines: list[dict[str, object]]) -> Path:
    folder.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "log.jsonl").write_text(text)
    return folder


def step(number: int, loss: float = 0.5) -> dict[str, object]:
    return {"step": number, "loss": loss.hex()}


END: dict[str, object] = {"sha256": "same", "bytes_seen": 9}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([step(1), step(2), END], []),
        ([step(1), step(1), step(2), END], []),
        ([step(1), step(2, 0.5000000000000001), END], ["step 2"]),
        ([step(1), step(1, 0.25), step(2), END], ["step 1"]),
        ([step(1), END], ["steps never taken: [2]"]),
        ([step(1), step(2), END | {"sha256": "other"}], ["final sha256"]),
        ([step(1), step(2), END | {"bytes_seen": 8}], ["final bytes_seen"]),
    ],
)
def test_demo_finds_every_difference(
    tmp_path: Path, lines: list[dict[str, object]], expected: list[str]
) -> None:
    demo = runpy.run_path(str(EXAMPLES / "demo.py"))
    undisturbed = demo["Run"](write_run(tmp_path / RUNS[0], [step(1), step(2), END]), [])
    killed = demo["Run"](write_run(tmp_path / RUNS[1], lines), [])
    found = demo["differences"](undisturbed, killed)
    assert len(found) == len(expected)
    assert all(line.startswith(start) for line, start in zip(found, expected, strict=True))


def test_async_loop_saves_while_its_coroutine_blocks_and_goes_on_when_run_again(
    tmp_path: Path,
) -> None:
    command = ("--checkpoints", "here", "--steps", "60", "--save-every", "20")
    first = run_example("async_loop.py", *command, folder=tmp_path)
    assert first.code == 0, first.err
    assert "starting from scratch" in first.out
    # The example looks at the handle before it awaits again: only a loop of the pipeline's own
    # can have carried the save to its end by then.
    assert "by now the save of step 20 is committed" in first.out
    assert indexes(tmp_path / "here") == [20, 40, 60]

    second = run_example("async_loop.py", *command, folder=tmp_path)
    assert second.code == 0, second.err
    assert "going on from step 60" in second.out
    assert indexes(tmp_path / "here") == [20, 40, 60, 80, 100, 120]


def test_s3_quickstart_goes_on_where_it_stopped(moto_server: S3Server, tmp_path: Path) -> None:
    if not metadata.entry_points(group="ckpipe.backends", name="s3"):
        pytest.skip("This environment was made before the S3 backend: run make clean test")
    moto_server.make_bucket("examples")
    command = ("s3://examples/run-1", "--endpoint-url", moto_server.url, "--steps", "5")
    first = run_example("s3_quickstart.py", *command, folder=tmp_path)
    assert first.code == 0, first.err
    assert "starting from scratch" in first.out
    second = run_example("s3_quickstart.py", *command, folder=tmp_path)
    assert second.code == 0, second.err
    assert "going on from step 5" in second.out
    assert second.out.count("in the bucket: ") == 2
