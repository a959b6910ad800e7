"""The world of a pipeline: launchers, process groups and the order in which they come."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.spawn import start_processes

import ckpipe
from ckpipe.errors import UnsupportedTopology
from tests.ranks import process_group_runs
from tests.ranks.process_group_runs import Trial
from tests.support.fork_server import FRESH, Forks, forks
from tests.support.killed_runs import notes
from tests.support.sampling import sample

RANKED = {"RANK": "{rank}", "WORLD_SIZE": "{size}"}
ONE_OF_ONE = {"RANK": "0", "WORLD_SIZE": "1"}
STEP = {"SLURM_STEP_NUM_TASKS": "{size}", "SLURM_PROCID": "{rank}", "SLURM_NTASKS": "{size}"}

#: The variables of a process that the launcher counts, and the one by which a save finds others.
LAUNCHERS: dict[str, tuple[dict[str, str], str | None]] = {
    "none": ({}, None),
    "torchrun": (RANKED, None),
    "torchrun in srun": (RANKED | STEP, None),
    "torchrun of one in srun": (ONE_OF_ONE | STEP, None),
    "sbatch": ({"SLURM_NTASKS": "{size}", "SLURM_PROCID": "0", "SLURM_NPROCS": "{size}"}, None),
    "srun --pty": (STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
    "mpirun of one": ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, None),
    "srun": (STEP, "SLURM_STEP_NUM_TASKS=2"),
    "mpirun": (
        {"OMPI_COMM_WORLD_SIZE": "{size}", "OMPI_COMM_WORLD_RANK": "{rank}", "PMIX_RANK": "{rank}"},
        "OMPI_COMM_WORLD_SIZE=2",
    ),
    "mpiexec": ({"PMI_SIZE": "{size}", "PMI_RANK": "{rank}"}, "PMI_SIZE=2"),
    "mpirun in salloc": (
        STEP | {"SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "{size}", "PMI_RANK": "{rank}"},
        "PMI_SIZE=2",
    ),
    "mpirun_rsh": (
        {"MV2_COMM_WORLD_SIZE": "{size}", "MV2_COMM_WORLD_RANK": "{rank}"},
        "MV2_COMM_WORLD_SIZE=2",
    ),
    "pals": (
        {"PALS_LOCAL_SIZE": "{size}", "PALS_RANKID": "{rank}", "PMIX_RANK": "{rank}"},
        "PALS_LOCAL_SIZE=2",
    ),
    "jsrun": (
        {"JSM_NAMESPACE_SIZE": "{size}", "JSM_NAMESPACE_RANK": "{rank}"},
        "JSM_NAMESPACE_SIZE=2",
    ),
    "horovodrun": ({"HOROVOD_SIZE": "{size}", "HOROVOD_RANK": "{rank}"}, "HOROVOD_SIZE=2"),
    "spawn": ({"WORLD_SIZE": "{size}"}, "WORLD_SIZE=2"),
}

Told = dict[str, str]
"""How each act ended."""

LOADS = ["load", "load step", "load fallback"]
SAVES = ["should_save", "save"]
LOOKS = ["steps", "latest", "verify"]


@pytest.fixture(scope="module")
def worlds() -> Iterator[Forks]:
    with forks(process_group_runs.__file__) as process:
        yield process


@pytest.fixture(params=sample(["blocks", "awaits"], 1))
def awaits(request: pytest.FixtureRequest) -> bool:
    """True for ``Pipeline``, False for ``SyncPipeline``."""
    return bool(request.param == "awaits")


def make_trial(
    variables: dict[str, str], acts: list[str], *, apart: bool = False, **fields: Any
) -> Trial:
    """Make a trial; the ranks have a root in common, unless they are apart."""
    fields = {"meeting_timeout_seconds": 60, **fields}
    return {"variables": variables, "acts": acts, "apart": apart, "fields": fields}


def run(
    process: Forks, folder: Path, trials: dict[str, Trial], awaits: bool
) -> tuple[dict[str, list[Told]], set[str]]:
    """Run trials on two ranks, with a checkpoint of step 0 on each root.

    Returns:
        What each rank told in each trial, and the trials that changed something on their roots.
    """
    for name, trial in trials.items():
        trial["root"] = str(folder / name) + ("-{rank}" if trial["apart"] else "")
        for root in set(roots(trial)):
            with ckpipe.SyncPipeline(root, solo=True) as pipeline:
                pipeline.save({"w": torch.ones(3)}, step=0).wait()
    before = {name: contents(trial) for name, trial in trials.items()}
    case = {"root": str(folder / "case"), "awaits": awaits, "trials": trials}
    assert process.ranks(case, 2) == [0, 0]
    told: dict[str, list[Told]] = {name: [{}, {}] for name in trials}
    for line in notes(folder / "case"):
        entry = json.loads(line)
        told[entry["trial"]][entry["rank"]] = entry["told"]
    return told, {name for name, trial in trials.items() if contents(trial) != before[name]}


def roots(trial: Trial) -> list[Path]:
    """Return the roots of the ranks."""
    return [Path(trial["root"].format(rank=rank)) for rank in range(2)]


def contents(trial: Trial) -> dict[str, bytes | None]:
    found = [each for root in roots(trial) for each in root.rglob("*")]
    return {str(each): None if each.is_dir() else each.read_bytes() for each in found}


def complete(root: Path) -> list[tuple[int, int | None]]:
    """Return the step and the number of ranks of each checkpoint that counts."""
    with ckpipe.SyncPipeline(root, read_only=True) as pipeline:
        return [(each.step, each.world_size) for each in pipeline.steps(metadata=True)]


def assert_told(told: Told, refused: dict[str, str]) -> None:
    """Assert that all acts were done but those refused, each with a text."""
    wrong = {act: how for act, how in told.items() if act not in refused and how != "done"}
    wrong |= {
        act: told.get(act, "was not tried")
        for act, text in refused.items()
        if not re.match(f"UnsupportedTopology: .*{text}", told.get(act, ""))
    }
    assert not wrong


OTHERS = "The pipeline was opened as rank 0 of 1, .* is now rank {rank} of 2 by its process group"


@pytest.mark.sample(1)
@pytest.mark.parametrize("group", ["before", "after", "never"])
def test_save_and_load_count_the_ranks_as_all_others_do(
    worlds: Forks, tmp_path: Path, group: str, awaits: bool
) -> None:
    begin = {"before": ["join", "open"], "after": ["open", "join"], "never": ["open"]}[group]
    acts = [*begin, *LOADS, *LOOKS, *SAVES]
    trials = {name: make_trial(variables, acts) for name, (variables, _) in LAUNCHERS.items()}
    told, touched = run(worlds, tmp_path, trials, awaits)
    saved = set[str]()
    for name, (variables, finding) in LAUNCHERS.items():
        refused: dict[str, str] = {}
        if group != "before" and RANKED.items() <= variables.items():
            refused = {"open": "runs on 2 ranks, and they have no way to agree on a name"}
        elif group == "after":
            refused = dict.fromkeys([*LOADS, *SAVES], OTHERS)
        elif group == "never" and finding is not None:
            text = f"one of several of a launch, by {finding}, and they have no way to agree"
            refused = dict.fromkeys(SAVES, text)
        for rank in range(2):
            texts = {act: text.format(rank=rank) for act, text in refused.items()}
            assert_told(told[name][rank], texts)
            if "save" in refused:
                assert "step 1" in told[name][rank]["save"]
                assert "solo=True" in told[name][rank]["save"]
        of_step_1 = {"before": [(1, 2)], "after": [], "never": [(1, 1), (1, 1)]}[group]
        assert complete(tmp_path / name) == [(0, 1), *([] if refused else of_step_1)], name
        if not refused:
            saved.add(name)
    assert touched == saved


#: What is right although a process group or a variable says otherwise.
RIGHT: dict[str, Trial] = {
    "solo": make_trial(STEP, ["open", "join", *SAVES, *LOADS], apart=True, solo=True),
    "named, and joined later": make_trial(
        RANKED, ["open", "load", "join", *SAVES, *LOADS], attempt_id="a"
    ),
    "named, and joined others": make_trial(
        RANKED, ["open", "join alone", *LOADS, *SAVES], attempt_id="a"
    ),
    "named, and renamed": make_trial(
        RANKED, ["open", "WORLD_SIZE=7", *LOADS, *SAVES], attempt_id="a"
    ),
    "one at open": make_trial(STEP, ["join alone", "open", *SAVES, *LOADS], apart=True),
    "one later": make_trial(STEP, ["open", "join alone", *SAVES, *LOADS], apart=True),
    "group gone": make_trial({}, ["join", "open", "save", "part", *LOADS, "save again"]),
    "group gone in srun": make_trial(STEP, ["join", "open", "part", *LOADS, *SAVES]),
    "group renewed": make_trial({}, ["join", "open", "save", "part", "join", *LOADS, "save again"]),
    "variables of others": make_trial(
        {"RANK": "{rank}", "WORLD_SIZE": "4"},
        ["join", "open", *LOADS, *SAVES, "part", "save again"],
    ),
    "variables of one": make_trial(
        STEP, ["open", "RANK=0", "WORLD_SIZE=1", *SAVES, *LOADS], apart=True
    ),
    "looks only": make_trial({}, ["open", "join", *LOOKS], read_only=True),
    "reads in srun": make_trial(STEP, ["open", *LOOKS, *LOADS], read_only=True),
}  # fmt: skip


def test_what_the_program_says_itself_stays_right(
    worlds: Forks, tmp_path: Path, awaits: bool
) -> None:
    told, _ = run(worlds, tmp_path, RIGHT, awaits)
    for each in told.values():
        assert_told(each[0], {})
        assert_told(each[1], {})
    for name, trial in RIGHT.items():
        steps = [n for n, act in enumerate(("save", "save again"), 1) if act in trial["acts"]]
        size = 1 if trial["apart"] else 2
        for root in roots(trial):
            assert complete(root) == [(0, 1), *((step, size) for step in steps)], name


AGAIN = ["should_save", "save again"]

#: What another world refuses from then on, and how the error tells of it.
WRONG: dict[str, tuple[Trial, list[str], str]] = {
    "smaller": (
        make_trial({}, ["join", "open", "save", "part", "join alone", *LOADS, *AGAIN, *LOOKS]),
        [*LOADS, *AGAIN],
        "opened as rank {rank} of 2, .* is now rank 0 of 1 by its process group",
    ),
    "larger": (
        make_trial({}, ["join alone", "open", "part", "join", *LOADS, *AGAIN, *LOOKS]),
        [*LOADS, *AGAIN],
        OTHERS,
    ),
    "variables set": (
        make_trial({}, ["open", "RANK={rank}", "WORLD_SIZE={size}", *LOADS, *AGAIN]),
        [*LOADS, *AGAIN],
        "is now rank {rank} of 2 by RANK and WORLD_SIZE",
    ),
    "variables changed": (
        make_trial(ONE_OF_ONE, ["open", "RANK={rank}", "WORLD_SIZE={size}", *LOADS, *AGAIN]),
        [*LOADS, *AGAIN],
        "is now rank {rank} of 2 by RANK and WORLD_SIZE",
    ),
    "variables contradict": (
        make_trial({}, ["open", "RANK=7", "WORLD_SIZE=7", *LOADS, *AGAIN]),
        [*LOADS, *AGAIN],
        "RANK is '7' and WORLD_SIZE is '7'",
    ),
    "named without a rank": (
        make_trial({}, ["open", "join", *LOADS, *AGAIN], attempt_id="a"),
        [*LOADS, *AGAIN],
        OTHERS,
    ),
    "named without a rank in srun": (
        make_trial(STEP, ["open", *LOADS, *AGAIN], attempt_id="a"),
        AGAIN,
        "by SLURM_STEP_NUM_TASKS=2, .* RANK and WORLD_SIZE on all ranks",
    ),
    "read only": (
        make_trial({}, ["open", "join", *LOOKS, *LOADS], read_only=True),
        LOADS,
        OTHERS,
    ),
}


def test_another_world_than_at_open_is_refused(worlds: Forks, tmp_path: Path, awaits: bool) -> None:
    trials = {name: trial for name, (trial, _, _) in WRONG.items()}
    told, touched = run(worlds, tmp_path, trials, awaits)
    for name, (_, refused, text) in WRONG.items():
        for rank in range(2):
            assert_told(told[name][rank], dict.fromkeys(refused, text.format(rank=rank)))
        assert 2 not in dict(complete(tmp_path / name)), name
    assert touched == {"smaller"}, "it saved before"


def test_spawned_ranks_that_join_after_opening_save_nothing(root: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # "spawn", which is the default, would have either rank import torch anew.
    starting = {"nprocs": 2, "start_method": FRESH.get_start_method()}
    start_processes(process_group_runs.spawned, (str(root), port), **starting)  # type: ignore[no-untyped-call]
    told = {each["rank"]: each["told"] for each in map(json.loads, notes(root))}
    for rank in range(2):
        assert_told({"save": told[rank]}, {"save": OTHERS.format(rank=rank)})
    assert not root.exists()


@pytest.mark.parametrize("name", ["PMIX_RANK", "PALS_RANKID"])
def test_a_higher_rank_alone_tells_of_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "0")
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.save({"a": 1}, step=0).wait()
    monkeypatch.setenv(name, "3")
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        assert pipeline.load(step=0) is not None
        with pytest.raises(UnsupportedTopology, match=f"by {name}=3"):
            pipeline.save({"a": 1}, step=1)
