"""torchtitan with ckpipe: killed runs go on to the bit, and its settings keep their meaning."""

from __future__ import annotations

import logging
import os
import random
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

import ckpipe
from ckpipe.errors import CheckpointNotFound, UsageError
from ckpipe.testing import SlowBackend
from ckpipe_local import LocalBackend
from tests.integrations.trainer_ranks import (
    Runs,
    check_kills_inside_saves,
    check_resumed,
    complete,
    forked,
    keep_outcome,
    messages,
    new_case,
    of,
    outcomes,
    serve_runs,
    whole,
)
from tests.support.fork_server import Case
from tests.support.sampling import SEED

if TYPE_CHECKING or __name__ == "__main__":  # pytest does without it
    from torchtitan.components.checkpointer import CheckpointManager

    from ckpipe.integrations.torchtitan import CkpipeCheckpointManager
    from tests.integrations.torchtitan_runs import Run

pytestmark = pytest.mark.skipif(
    find_spec("torchtitan") is None, reason="the extra integrations is not installed"
)

STEPS, INTERVAL, RANKS = 20, 3, 2

setting = forked(RANKS)


def train(case: Case) -> None:
    """Go on from the newest checkpoint to the end, and keep all that it has come to."""
    made = Run(case)
    made.train(STEPS)
    keep_outcome(case, made.outcome())


def weights(run: Run) -> dict[str, Any]:
    return dict(whole(run.model.state_dict()))


@pytest.fixture(scope="module")
def undisturbed(run: Runs, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank of a run comes to that nothing disturbs."""
    case = new_case(tmp_path_factory.mktemp("undisturbed"))
    assert run(train, case, RANKS) == [0] * RANKS
    return outcomes(case, RANKS)


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
@pytest.mark.parametrize("moment", ["between saves", "after a save"])
def test_a_killed_run_goes_on_to_the_bit(
    run: Runs, undisturbed: list[Any], tmp_path: Path, moment: str, mode: str
) -> None:
    chance = random.Random(SEED)
    step = chance.randrange(INTERVAL + 1, STEPS)
    if moment == "after a save":
        step = INTERVAL * chance.randrange(1, STEPS // INTERVAL)
    case = new_case(tmp_path, fields={"async_mode": mode})
    assert run(train, case, RANKS, dies=step) == [None] * RANKS
    assert run(train, case, RANKS) == [0] * RANKS
    check_resumed(case, undisturbed, done=step - step % INTERVAL)


def test_a_run_killed_inside_a_save_goes_on_to_the_bit(
    run: Runs, undisturbed: list[Any], tmp_path: Path
) -> None:
    fields = {"folder": "mortal://store", "last_save_model_only": False}

    def case_of(name: str) -> Case:
        return new_case(tmp_path / name, fields=fields)

    check_kills_inside_saves(run, train, case_of, undisturbed, range(10, 50))


@setting
def test_settings_keep_their_meaning(case: Case) -> None:
    one = of(case, "one", fields={"keep_latest_k": 2, "enable_first_step_checkpoint": True})
    run = Run(one)
    assert not run.train(2)
    run = Run(one)
    assert run.train(14)
    dist.barrier()
    # The checkpoint that a run has resumed from stays.
    assert {info.step for info in complete(one)} == {1, 9, 12}
    # The last save is the model alone, in a root of its own.
    expected = weights(run)
    target = {"model": {name: torch.zeros_like(value) for name, value in expected.items()}}
    assert ckpipe.load(f"{one['root']}-last", target).step == 14
    assert all(map(torch.equal, target["model"].values(), expected.values()))
    # The rest goes on from the newest whole one, or from one that is named.
    run = Run({**one, "fields": {"load_only": True, "exclude_from_loading": ["optimizer"]}})
    assert run.checkpointer.load(9)
    assert run.step == 9
    assert not run.optimizers.optimizers[0].state
    assert not run.checkpointer.save(9, last_step=True)
    with pytest.raises(CheckpointNotFound):
        run.checkpointer.load(5)
    run.checkpointer.close()
    with pytest.raises(UsageError, match="other"):
        Run({**one, "fields": {"exclude_from_loading": ["other"]}})
    run = Run(of(case, "new", settings={"resume": "must"}))
    with pytest.raises(CheckpointNotFound):
        run.checkpointer.load()
    run.checkpointer.close()


@setting
def test_settings_of_ckpipe_hold(case: Case) -> None:
    said = messages(logging.INFO)
    one = of(case, "one", settings={"keep_last": 1})
    Run(one).train(8)
    dist.barrier()
    # Its rules decide in place of keep_latest_k.
    assert [info.step for info in complete(one)] == [6]
    for excluded, data in (([], "the loader has its saved state"), (["dataloader"], "")):
        said.clear()
        run = Run({**one, "fields": {"exclude_from_loading": excluded, "load_only": True}})
        assert run.checkpointer.load()
        run.checkpointer.close()
        lines = [each for each in said if "resumed step 6 from" in each]
        assert [each.partition(": ")[2] for each in lines] == [data] * (run.rank == 0)
    with pytest.raises(UsageError, match="The setting initial has no effect with torchtitan"):
        Run({**one, "settings": {"initial": "weights"}})
    os.environ["CKPIPE_PREEMPTION"] = "1"
    with pytest.raises(UsageError, match=r"\(from CKPIPE_PREEMPTION\) has no effect"):
        Run(one)


@setting
def test_first_weights_are_loaded(case: Case) -> None:
    source = of(case, "source", fields={"last_save_model_only": False})
    run = Run(source)
    run.train(4)
    own = Run(of(case, "own"), CheckpointManager)
    own.train(3)
    assert Path(own.checkpointer.folder, "step-3").is_dir()
    for path, expected in (
        (source["root"], weights(run)),
        (f"{own.checkpointer.folder}/step-3", None),
    ):
        fields = {"initial_load_path": path}
        again = Run(of(case, path[-4:], fields=fields))
        assert again.checkpointer.load()
        assert again.step == 0
        assert not again.optimizers.optimizers[0].state
        if expected is None:
            target = own.checkpointer.states["model"].state_dict()
            load_dcp(target, checkpoint_id=path)
            expected = whole(target)
        assert all(map(torch.equal, weights(again).values(), expected.values()))
        again.checkpointer.close()


@setting
def test_weights_of_hugging_face_come_and_go(case: Case) -> None:
    fields = {"last_save_in_hf": True, "export_dtype": "bfloat16"}
    one = of(case, "one", fields=fields)
    run = Run(one)
    run.train(4)
    dist.barrier()
    (file,) = Path(f"{one['root']}-last").rglob("model*.safetensors")
    path = {"initial_load_path": str(file.parent), "initial_load_in_hf": True}
    again = Run(of(case, "again", fields={**path, "initial_load_in_hf_quantized": True}))
    assert again.checkpointer.load()
    assert again.adapter.from_quantized  # it dequantises, if it has the code
    expected = [each.bfloat16().float() for each in weights(run).values()]
    assert all(map(torch.equal, weights(again).values(), expected))
    again.checkpointer.close()
    with pytest.raises(UsageError, match="needs a sd_adapter"):
        Run(of(case, "none", adapter=False, fields=fields))


@setting
def test_last_weights_begin_a_run(case: Case) -> None:
    kinds: list[dict[str, Any]] = [
        {}, {"export_dtype": "bfloat16"}, {"last_save_in_hf": True, "export_dtype": "float16"},
    ]  # fmt: skip
    for number, saved in enumerate(kinds):
        one = of(case, f"one-{number}", fields=saved)
        Run(one).train(4)
        dist.barrier()
        run = Run(one)
        run.train(8)  # the later one of two saves of a last step counts
        dist.barrier()
        dtype = getattr(torch, saved.get("export_dtype", "float32"))
        expected = [each.to(dtype).float() for each in weights(run).values()]
        root, in_hf = f"{one['root']}-last", "last_save_in_hf" in saved
        for asked in ({}, {"initial_load_in_hf": True})[: 1 + in_hf]:
            fields = {"initial_load_path": root, **asked}
            again = Run(of(case, f"again-{number}{len(asked)}", fields=fields))
            assert again.checkpointer.load()
            assert again.step == 0
            assert all(map(torch.equal, weights(again).values(), expected))
            again.train(2)
        for more, text in (
            ({"fields": {"initial_load_path": root, "initial_load_model_only": False}}, "only"),
            ({"fields": {"initial_load_path": root}, "adapter": False}, "no sd_adapter"),
        ):
            again = Run(of(case, f"refused-{number}-{len(more)}", **more))
            refused = in_hf or text == "only"
            with pytest.raises(UsageError, match=text) if refused else nullcontext():
                again.checkpointer.load()
            again.checkpointer.close()


@forked()
def test_mistakes_are_told_by_the_config(case: Case) -> None:
    kind: Any = CkpipeCheckpointManager.Config
    assert kind(async_mode="Async").async_mode == "async"  # as torchtitan's own takes it
    mistakes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"async_mode": "asinc"}, "Invalid async_mode: 'asinc'"),
        *(({"async_mode": each}, "Invalid async_mode") for each in (None, 3, ["async"])),
        ({"export_dtype": "float64"}, "Invalid export_dtype: 'float64'"),
        *(({"export_dtype": each}, "Invalid export_dtype") for each in (None, 3, ["float32"])),
        *(({"settings": each}, "Invalid settings") for each in (None, [1], "keep_last", {3: 4})),
        ({"settings": {"keep_lst": 3}}, "keep_lst"),
        ({"settings": {"save_every_steps": 3}}, "save_every_steps has no effect"),
        ({"interval": 0}, "interval"),
    )
    for fields, text in mistakes:
        with pytest.raises(ValueError, match=text):
            kind(enable=True, **fields)


@setting
def test_a_load_waits_for_its_save(case: Case) -> None:
    slow = SlowBackend(LocalBackend(case["root"]), latency=0.01)
    ckpipe.register_backend("slow", lambda url: slow)
    for number, mode in enumerate(("async", "async_with_pinned_mem")):
        fields = {"async_mode": mode, "interval": 1, "folder": "slow://store"}
        run = Run(of(case, mode, fields=fields))
        for step, asked in ((1, -1), (2, -1), (3, 3), (3, 3)):
            step, asked = step + 10 * number, asked if asked < 0 else asked + 10 * number
            run.step = step
            run.ntokens_seen += 1
            seen = run.ntokens_seen
            assert run.checkpointer.save(step)
            run.checkpointer.maybe_wait_for_staging()
            run.ntokens_seen = -1
            assert run.checkpointer.load(asked)
            assert (run.step, run.ntokens_seen) == (step, seen)
            dist.barrier()  # a rank that loads sees no later save of another
        run.checkpointer.close()


if __name__ == "__main__":
    serve_runs(quiet="torch")
