"""The Trainer of transformers with ckpipe: killed runs go on to the bit, and its features stay.

Where it can be, the expectation is what the Trainer does by itself.
"""

from __future__ import annotations

import copy
import itertools
import logging
import os
import random
import re
import shutil
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import Sampler

import ckpipe
from ckpipe.errors import (
    CheckpointNotFound,
    SettingsError,
    StructureMismatch,
    UnsupportedState,
    UsageError,
)
from tests.integrations.trainer_ranks import (
    Runs,
    Strange,
    check_end,
    check_kills_inside_saves,
    check_resumed,
    check_same,
    complete,
    forked,
    ids,
    keep_outcome,
    messages,
    new_case,
    outcomes,
    pointer_at,
    serve_runs,
)
from tests.support.fork_server import Case
from tests.support.sampling import SEED, sample

if TYPE_CHECKING or __name__ == "__main__":  # pytest does without it
    import transformers
    from peft import LoraConfig, get_peft_model
    from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerState

    from ckpipe.integrations.transformers import CkpipeTrainer, CkpipeTrainerMixin
    from tests.integrations.transformers_runs import (
        Follows,
        Mean,
        Samples,
        Stops,
        Stream,
        Teacher,
        new_model,
        new_trainer,
        normed,
        outcome,
        resumed,
        scripted,
        trained,
    )

SAVE_STEPS = 3
STEPS = {1: 20, 2: 12}
"""The steps of a run, by the number of ranks."""

GOES_ON = "the data go on"

feature = forked(sample=3)
restart = forked(sample=2)


def train(case: Case) -> None:
    """Train from wherever the run is, and keep all that it has come to."""
    keep_outcome(case, outcome(trained(case)))


def run_case(folder: Path, ranks: int = 1, **more: Any) -> Case:
    # Two ranks take half as many steps for an epoch, and accumulate gradients over two batches.
    arguments = {"num_train_epochs": 4, "gradient_accumulation_steps": 2} if ranks > 1 else {}
    return new_case(folder, arguments=arguments, **more)


@pytest.fixture(scope="module")
def undisturbed(run: Runs, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What runs of one and two ranks come to that nothing disturbs."""
    found = {}
    for ranks in (1, 2):
        case = run_case(tmp_path_factory.mktemp("undisturbed"), ranks)
        assert run(train, case, ranks) == [0] * ranks
        found[ranks] = outcomes(case, ranks)
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("moment", ["inside an epoch", "after a save"])
def test_a_killed_run_goes_on_to_the_bit(
    run: Runs, undisturbed: dict[int, Any], tmp_path: Path, moment: str, ranks: int
) -> None:
    chance = random.Random(SEED)
    step = chance.randrange(SAVE_STEPS + 1, STEPS[ranks])
    if moment == "after a save":
        step = SAVE_STEPS * chance.randrange(1, STEPS[ranks] // SAVE_STEPS)
    case, saved = run_case(tmp_path, ranks), step - step % SAVE_STEPS
    assert run(train, case, ranks, dies=step, named=f"checkpoint-{saved}") == [None] * ranks
    assert run(train, case, ranks) == [0] * ranks
    batches = len(undisturbed[ranks][0]["seen"])
    check_resumed(case, undisturbed[ranks], done=saved * batches // STEPS[ranks])


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_killed_inside_a_save_goes_on_to_the_bit(
    run: Runs, undisturbed: dict[int, Any], tmp_path: Path, ranks: int
) -> None:
    def case_of(name: str) -> Case:
        return run_case(tmp_path / name, ranks, url="mortal://store")

    check_kills_inside_saves(run, train, case_of, undisturbed[ranks], range(8, 40))


def other_ranks_go_on(case: Case) -> None:
    with pytest.raises(ckpipe.CkpipeError, match="per_rank"):
        trained(case)
    trainer = trained({**case, "settings": {"per_rank": "derive"}})
    assert trainer.state.global_step == trainer.state.max_steps
    assert len(trainer.model.seen) == 2 * (trainer.state.max_steps - case["saved"])


def test_one_rank_goes_on_where_two_were(run: Runs, tmp_path: Path) -> None:
    case = run_case(tmp_path, 2)
    assert run(train, case, 2, dies=7, named="checkpoint-6") == [None] * 2
    assert run(other_ranks_go_on, case, saved=6) == [0]


def of(case: Case, name: str, **arguments: Any) -> Case:
    """The case of another run, with these arguments of the Trainer."""
    return new_case(Path(case["out"], name), arguments=arguments)


def names(case: Case) -> list[str]:
    return sorted(path.name for path in Path(case["out"]).glob("checkpoint-*"))


@feature
def test_names_and_best_are_those_of_the_trainer(case: Case) -> None:
    strategies = [("steps", 3), ("steps", 5), ("epoch", 1), ("best", 2)]
    matrix = itertools.product([None, 1, 2, 3], [True, False], strategies)
    # The first one is the best in a case that each sample has.
    first_best = (2, True, ("steps", 3))
    for limit, greater, (strategy, steps) in (first_best, *sample(matrix, 2)):
        scores = [random.Random(SEED + n).random() for n in range(20)]
        scores[0] += (limit, greater, (strategy, steps)) == first_best
        found = []
        for kind in (Trainer, CkpipeTrainer):
            one = of(
                case,
                f"{kind.__name__}-{limit}-{greater}-{strategy}-{steps}",
                save_total_limit=limit,
                greater_is_better=greater,
                save_strategy=strategy,
                eval_strategy="steps" if strategy == "best" else strategy,
                save_steps=steps,
                eval_steps=steps,
                load_best_model_at_end=strategy != "best",
            )
            trainer = trained(one, kind, compute_metrics=scripted(scores))
            state = trainer.state
            best = state.best_model_checkpoint and os.path.basename(state.best_model_checkpoint)
            found.append((names(one), best, state.best_metric, trainer.model.state_dict()))
        assert found[0][:3] == found[1][:3], (limit, greater, strategy, steps)
        check_same(found[1][3], found[0][3])
        # The newest stays in any case; the trainer drops its name at the end with a limit of 1.
        assert {f"checkpoint-{info.step}" for info in complete(one)} >= set(found[0][0])
        assert len(complete(one)) <= max(limit or 20, 2)


@feature
def test_resume_takes_what_it_is_given(case: Case) -> None:
    one = of(case, "run", num_train_epochs=1)
    with pytest.raises(CheckpointNotFound, match="no complete checkpoint"):
        trained(one, resume=True)
    whole = trained(one)
    saved = {info.step: info.id for info in complete(one)}
    folder = Path(one["out"])
    for given, step in [
        (None, 10),
        (True, 10),
        (str(folder / "checkpoint-6"), 6),
        (f"checkpoint-{3}", 3),
        (saved[6], 6),
        (False, 0),
    ]:
        trainer = trained(one, resume=given)
        assert len(trainer.model.seen) == 10 - step
        check_same(trainer.model.state_dict(), whole.model.state_dict())
    other = of(case, "other", num_train_epochs=1)
    trained(other)
    for given, said in [
        (str(folder / "checkpoint-4"), "no complete checkpoint"),
        ("/of/another/run/checkpoint-6", f"was saved as {folder / 'checkpoint-6'}"),
        (str(Path(other["out"], "checkpoint-6")), f"leads to a checkpoint at {other['root']}"),
    ]:
        with pytest.raises(CheckpointNotFound, match=re.escape(said)):
            trained(one, resume=given)


@feature
def test_saves_of_the_trainer_stay(case: Case) -> None:
    """Checkpoints without ckpipe are resumed from as ever, and no limit removes them."""
    whole = trained(of(case, "whole", num_train_epochs=1))
    said = messages(logging.INFO)
    for number, given in enumerate([None, True, "checkpoint-6"]):
        plain = of(case, f"{number}", num_train_epochs=1)
        trained(plain, Trainer, callbacks=[Stops(6)])
        if isinstance(given, str):
            given = str(Path(plain["out"], given))
        plain["arguments"] |= {"save_total_limit": 1}
        said.clear()
        trainer = trained(plain, resume=given)
        assert len(trainer.model.seen) == 4
        check_same(trainer.model.state_dict(), whole.model.state_dict())
        assert [
            name for name in names(plain) if Path(plain["out"], name, "optimizer.pt").exists()
        ] == ["checkpoint-3", "checkpoint-6"]
        assert any("saved without ckpipe" in each for each in said) == (number < 2)
        assert not any("fresh" in each for each in said)
    # A run that is told to begin anew puts those aside whose names it needs.
    trainer = trained({**plain, "root": f"{plain['root']}-2", "settings": {"resume": "never"}})
    assert len(trainer.model.seen) == 10
    aside = sorted(each.name for each in Path(plain["out"]).glob("before-*"))
    assert aside == ["before-ckpipe.checkpoint-3", "before-ckpipe.checkpoint-6"]
    # Names of another root are told.
    said.clear()
    trained({**plain, "root": f"{plain['root']}-3"}, callbacks=[Stops(1)])
    assert any("whose checkpoint is not at this root" in each for each in said)


@feature
def test_roots_of_the_trainer_go_on(case: Case) -> None:
    """From a root that is a folder of the plain Trainer the run goes on, or it says so."""
    whole = trained(of(case, "whole", num_train_epochs=1))
    old = of(case, "old", num_train_epochs=1)
    trained(old, Trainer, callbacks=[Stops(6)])
    Path(old["out"], "checkpoint-9").mkdir()  # as after a kill inside a save
    said = messages(logging.INFO)
    for resume, steps in ((None, 4), (True, 4), (False, 10)):
        one = {
            **of(case, f"new-{resume}", num_train_epochs=1),
            "root": str(Path(case["out"], "to")),
        }
        shutil.copytree(old["out"], one["root"])
        said.clear()
        trainer = trained(one, resume=resume)
        assert len(trainer.model.seen) == steps, (resume, trainer.model.seen)
        check_same(trainer.model.state_dict(), whole.model.state_dict())
        assert any("to/checkpoint-6, which was saved without" in each for each in said) == (
            resume is not False
        )
        shutil.rmtree(one["root"])
    # Of a folder without the trainer's state it says that it is there.
    weights = of(case, "weights", num_train_epochs=1)
    shutil.copytree(Path(old["out"], "checkpoint-3"), Path(weights["root"], "checkpoint-3"))
    Path(weights["root"], "checkpoint-3", "trainer_state.json").unlink()
    said = messages(logging.WARNING)
    trainer = trained(weights, callbacks=[Stops(1)])
    assert any("training starts fresh" in each and "checkpoint-3" in each for each in said)


@feature
def test_names_that_cannot_be_written_are_told(case: Case) -> None:
    plain = {"num_train_epochs": 1, "load_best_model_at_end": False}
    said = messages(logging.INFO)
    for number, in_place in enumerate(("checkpoint-3", "checkpoint-10")):
        one = of(case, f"{number}", **plain)
        name = Path(one["out"], in_place)
        name.touch()
        with pytest.raises(ckpipe.CkpipeError, match=f"{name} .*is complete at {one['root']}"):
            trained(one)
        steps = [info.step for info in complete(one)]
        assert int(in_place.rpartition("-")[2]) in steps
        if in_place == "checkpoint-3":
            with pytest.raises(ckpipe.CkpipeError, match=f"{name} .*move away a file"):
                trained(one, resume="checkpoint-3")
        name.unlink()
        trainer = trained(one)
        assert len(trainer.model.seen) == 10 - steps[-1]
        # With warnings in place of errors the run ends, and no checkpoint is called a failed one.
        one = {**of(case, f"warns-{number}", **plain), "settings": {"on_error": "warn"}}
        Path(one["out"], in_place).touch()
        with pytest.warns(RuntimeWarning) as warned:
            trained(one)
        said += [str(each.message) for each in warned]
    assert any("cannot be written" in each for each in said)
    assert not any("A checkpoint failed" in each for each in said)


@feature
def test_refusals_name_what_the_trainer_has(case: Case) -> None:
    class Odd(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return super().state_dict() | {"odd": Strange()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict({name: state[name] for name in ("state", "param_groups")})

    def odd(one: Case, **more: Any) -> Any:
        trainer = new_trainer(one, **more)
        trainer.optimizer = Odd(trainer.model.parameters(), lr=0.1)
        return trainer

    one = of(case, "pickle", num_train_epochs=1)
    with pytest.raises(UnsupportedState, match='pickle="allow" in ckpipe_settings') as caught:
        odd(one).train()
    assert "exclude" not in str(caught.value)
    allowed = {**of(case, "allowed", num_train_epochs=1), "settings": {"pickle": "allow"}}
    odd(allowed, callbacks=[Stops(6)]).train()
    trainer = odd(allowed)
    trainer.train()
    assert len(trainer.model.seen) == 4
    with pytest.raises(UnsupportedState, match='pickle="allow" in ckpipe_settings'):
        odd({**allowed, "settings": {}}).train()
    # Damage, and a model of another dtype.
    trained(one := of(case, "damaged", num_train_epochs=1), callbacks=[Stops(6)])
    (data,) = Path(one["root"]).glob("step-*6.*/*.safetensors")
    data.write_bytes(data.read_bytes()[:-8])
    with pytest.raises(ckpipe.errors.CorruptCheckpoint, match="resume_from_checkpoint='") as hurt:
        trained(one)
    assert "fallback" not in str(hurt.value)
    trainer = new_trainer(one)
    trainer.model.double()
    with pytest.raises(ckpipe.errors.TargetMismatch, match="resume_from_checkpoint='") as other:
        trainer.train(resume_from_checkpoint="checkpoint-3")
    assert not re.search("exclude|strict|allow_|cast=", str(other.value))


@feature
def test_callbacks_can_be_copied(case: Case) -> None:
    class Copies(TrainerCallback):
        copied: Any = None

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.copied = copy.deepcopy(trainer.callback_handler.callbacks)
            assert copy.deepcopy(trainer._ckpipe_pipeline) is trainer._ckpipe_pipeline

    trainer = new_trainer(of(case, "one", num_train_epochs=1), callbacks=[Copies()])
    trainer.train()
    kinds = [type(each) for each in trainer.callback_handler.callbacks]
    assert [type(each) for each in trainer.callback_handler.callbacks[-2].copied] == kinds


@feature
def test_another_run_deletes_nothing(case: Case) -> None:
    limits: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"save_total_limit": 1}, {}),
        ({}, {"keep_last": 1}),
    ]
    for number, (limit, settings) in enumerate(limits):
        once = {"load_best_model_at_end": False, "num_train_epochs": 1, **limit}
        one = {**of(case, f"{number}", **once), "settings": settings}
        trained(one)
        (last,) = names(one)
        another = {**one, "arguments": one["arguments"] | {"max_steps": 8, "save_steps": 4}}
        trained(another, resume=False)
        assert names(one) == sorted([last, "checkpoint-8"]), names(one)
        assert ids(complete(one)) >= ids(Path(one["out"]).iterdir())
        assert len({info.line for info in complete(one)}) == 2


@feature
def test_best_stays_with_rules_of_the_user(case: Case) -> None:
    warnings.filterwarnings("ignore", "keep_last=0 keeps only final checkpoints")
    scores = [9.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0]
    for keep_last, left in ((1, [3, 20]), (0, [])):
        one = {**of(case, f"{keep_last}", num_train_epochs=2), "settings": {"keep_last": keep_last}}
        said = messages(logging.WARNING)
        weights = []
        for _ in range(2):
            trainer = trained(one, compute_metrics=scripted(scores))
            weights.append(trainer.model.state_dict())
        assert [info.step for info in complete(one)] == left
        if keep_last:
            saved = ckpipe.load(one["root"], step=3).state["training"]["model"]
            for each in weights:
                check_same({name: each[name] for name in saved}, saved)
        assert any("best model" in each for each in said) == (keep_last == 0)


@feature
def test_scalers_go_on(case: Case) -> None:
    def scaled(one: Case, **more: Any) -> Any:
        trainer = new_trainer(one, **more)  # as with mixed precision on a GPU
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", growth_interval=3)
        trainer.train()
        return trainer

    whole, one = scaled(of(case, "whole")), of(case, "one")
    scaled(one, callbacks=[Stops(13)])
    found = scaled(one)
    scalers = [each.accelerator.scaler.state_dict() for each in (whole, found)]
    assert scalers[0] == scalers[1]
    assert scalers[0]["scale"] > 65536
    check_same(found.model.state_dict(), whole.model.state_dict())


@feature
def test_settings_come_from_the_environment(case: Case) -> None:
    one = of(case, "one", save_total_limit=1, load_best_model_at_end=False, num_train_epochs=1)
    os.environ["CKPIPE_KEEP_LAST"] = "2"
    trained(one)
    assert [info.step for info in complete(one)] == [9, 10]
    os.environ["CKPIPE_INITIAL"] = "/weights"
    with pytest.raises(UsageError, match="CKPIPE_INITIAL"):
        new_trainer(one)


@feature
def test_runs_move_to_another_folder(case: Case) -> None:
    one, other = of(case, "one"), of(case, "moved")
    trained(one, callbacks=[Stops(9)])
    shutil.copytree(one["root"], other["root"])  # the names stay behind
    trainer = trained(other)
    assert len(trainer.model.seen) == 11
    best = Path(trainer.state.best_model_checkpoint)
    assert best.parent == Path(other["out"])
    assert pointer_at(best).root == other["root"]


@feature
def test_tools_read_the_state_and_the_model(case: Case) -> None:
    one, plain = of(case, "one"), of(case, "plain")
    for kind, run in ((CkpipeTrainer, one), (Trainer, plain)):
        each = trained(run, kind)
        each.save_model(str(Path(each.args.output_dir, "final")))
    assert names(one) == names(plain)
    for name in names(one):
        read = [
            TrainerState.load_from_json(str(Path(each["out"], name, "trainer_state.json")))
            for each in (one, plain)
        ]
        assert read[0].global_step == read[1].global_step == int(name.rpartition("-")[2])
        assert read[0].best_metric == read[1].best_metric
        assert list(read[0].stateful_callbacks) == list(read[1].stateful_callbacks)
        assert [each["step"] for each in read[0].log_history] == [
            each["step"] for each in read[1].log_history
        ]
    final = transformers.GPT2LMHeadModel.from_pretrained(Path(one["out"], "final"))
    check_same(final.state_dict(), each.model.state_dict())


@feature
def test_callbacks_go_on(case: Case) -> None:
    def stopping() -> list[Any]:
        return [EarlyStoppingCallback(early_stopping_patience=3)]

    scores = [5.0, 9.0, 8.0, 7.0, 6.0, 5.0]
    for kept in (True, False):
        one = of(case, f"{kept}", restore_callback_states_from_checkpoint=kept)
        before, after = scripted(scores[:3]), scripted(scores[3:])
        trained(one, compute_metrics=before, callbacks=[*stopping(), Stops(9)])
        trainer = trained(one, compute_metrics=after, callbacks=stopping())
        # It had seen one step without progress: with its state it waits for two more.
        assert trainer.state.global_step == (15 if kept else 18)


@feature
def test_data_is_skipped_or_not(case: Case) -> None:
    whole = trained(of(case, "whole", num_train_epochs=1))
    said = messages(logging.INFO)
    for ignore in (False, True):
        one = of(case, f"{ignore}", ignore_data_skip=ignore, num_train_epochs=1)
        said.clear()
        trainer = resumed(one, 6)
        trained(one)  # which is over
        told = [each.rpartition(": ")[2] for each in said if "resumed step" in each]
        assert len(told) == 2
        assert ("the data go on with those of step 7" in told) == (not ignore)
        assert trainer.model.seen == (whole.model.seen[:4] if ignore else whole.model.seen[6:])


@feature
def test_order_by_length_goes_on(case: Case) -> None:
    arguments = {"train_sampling_strategy": "group_by_length", "per_device_train_batch_size": 1}
    samples = Samples(lengths=True)
    expected = outcome(trained(of(case, "whole", **arguments), samples=samples))
    found = outcome(resumed(of(case, "resumed", **arguments), 27, samples=samples))
    assert len(found["seen"]) == len(expected["seen"]) - 27
    check_end(found, expected)


@feature
def test_only_adapters_are_saved(case: Case) -> None:
    def adapted() -> Any:
        base = new_model()
        config = LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.2, fan_in_fan_out=True)
        model = get_peft_model(base, config)
        model.seen = base.seen
        return model

    expected, one = outcome(trained(of(case, "whole"), model=adapted)), of(case, "one")
    found = outcome(resumed(one, 12, model=adapted))
    assert len(found["seen"]) == len(expected["seen"]) - 12
    check_end(found, expected)
    model = ckpipe.load(one["root"], include=["training.model"]).state["training"]["model"]
    assert model
    assert all("lora" in name for name in model), list(model)


@feature
def test_weights_alone_are_saved(case: Case) -> None:
    one = of(case, "one", save_only_model=True, load_best_model_at_end=False)
    trainer = resumed(one, 9)
    assert trainer.state.global_step == 20
    assert len(trainer.model.seen) == 11
    state = ckpipe.load(one["root"]).state
    assert state["training"].keys() == {"model", "versions"}
    assert state.keys() == {"training"}


@feature
def test_signals_and_settings_save(case: Case) -> None:
    class Signals(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 7:
                signal.raise_signal(signal.SIGTERM)

    one = of(case, "one", save_strategy="no", load_best_model_at_end=False)
    one["settings"] = {"preemption": True, "save_every_steps": 5}
    trainer = trained(one, callbacks=[Signals()])
    assert 7 <= trainer.state.global_step <= 8
    with ckpipe.SyncPipeline(one["root"], read_only=True) as pipeline:
        assert [info.step for info in pipeline.steps()] == [5, trainer.state.global_step]


@feature
def test_wrong_uses_are_refused(case: Case) -> None:
    hub = {"push_to_hub": True, "hub_model_id": "a/b", "hub_strategy": "every_save"}
    with pytest.raises(UsageError, match="not pushed to the Hub"):
        new_trainer(of(case, "hub", **hub))

    class Deep(CkpipeTrainerMixin, Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.is_deepspeed_enabled = True  # as a plugin of accelerate says

    with pytest.raises(UsageError, match="DeepSpeed keeps"):
        new_trainer(of(case, "deep"), Deep)
    with pytest.raises(UsageError, match="from_pretrained"):
        trained({**of(case, "initial"), "settings": {"initial": "/weights"}})
    with pytest.raises(SettingsError, match="keep_lst"):
        trained({**of(case, "unknown"), "settings": {"keep_lst": 1}})
    other = of(case, "other")
    with ckpipe.SyncPipeline(other["root"]) as pipeline:
        pipeline.save({"w": 1}, step=5)
    with pytest.raises(StructureMismatch, match="not saved by a trainer"):
        trained(other)
    damaged = of(case, "damaged", num_train_epochs=1)
    trained(damaged)
    newest = max(Path(damaged["root"]).glob("step-*.json"))
    newest.write_bytes(newest.read_bytes()[:-40])
    with pytest.raises(ckpipe.errors.CorruptCheckpoint):
        trained(damaged)


@restart
def test_finished_runs_end_at_once(case: Case) -> None:
    lengths: list[tuple[dict[str, Any], int]] = [
        ({"max_steps": 7}, 7),
        ({"num_train_epochs": 0.7}, 7),
        ({"num_train_epochs": 1}, 10),
        ({"max_steps": 13, "save_strategy": "epoch", "load_best_model_at_end": False}, 13),
        ({"restore_callback_states_from_checkpoint": True}, 6),
    ]
    for number, (length, last) in enumerate(lengths):
        one, found = of(case, f"{number}", **length), []
        for _ in range(3):
            stopping = [EarlyStoppingCallback(1)] if last == 6 else []
            metric = scripted([9.0, 5.0, *[1.0] * 20])
            trainer = trained(one, compute_metrics=metric, callbacks=stopping)
            assert trainer.state.global_step == last, length
            found.append((ids(complete(one)), trainer.model.state_dict()))
        assert len(trainer.model.seen) == 0
        for left, weights in found[1:]:
            assert left == found[0][0], length
            check_same(weights, found[0][1])
    longer = {**of(case, "0"), "arguments": one["arguments"] | {"max_steps": 9}}
    assert trained(longer).state.global_step == 9


@restart
def test_buffers_of_adapted_models_go_on(case: Case) -> None:
    scores = [1.0, 9.0, *[2.0] * 9]
    expected = outcome(trained(of(case, "whole", load_best_model_at_end=False), model=normed))
    one = of(case, "one", load_best_model_at_end=False)
    check_same(outcome(resumed(one, 12, model=normed)), expected)
    found = {}
    for kind in (Trainer, CkpipeTrainer):
        best = of(case, kind.__name__, greater_is_better=True)
        trainer = trained(best, kind, model=normed, compute_metrics=scripted(scores))
        found[kind] = trainer.model.state_dict()
    # The plain trainer leaves the statistics of the base as they were at the last step.
    own = {name: each for name, each in found[Trainer].items() if ".first." not in name}
    check_same({name: found[CkpipeTrainer][name] for name in own}, own)
    tracked = "base_model.model.first.num_batches_tracked"
    assert (found[Trainer][tracked].item(), found[CkpipeTrainer][tracked].item()) == (20, 6)


@restart
def test_streams_are_passed_over_again(case: Case) -> None:
    for accumulated in (1, 2):
        steps: dict[str, Any] = {"max_steps": 12, "gradient_accumulation_steps": accumulated}
        expected = outcome(trained(of(case, f"whole-{accumulated}", **steps), samples=Stream(10)))
        seen = expected.pop("seen")
        assert seen[5:10] == seen[:5], "the stream is passed over more than once"
        for step in (3, 6, 9):
            one = of(case, f"{accumulated}-{step}", **steps)
            found = outcome(resumed(one, step, samples=Stream(10)))
            rest = found.pop("seen")
            assert rest == seen[len(seen) - len(rest) :]
            assert len(rest) < len(seen) - 2
            check_same(found, expected)


@restart
def test_generators_of_samplers_go_on(case: Case) -> None:
    class InTurns(Sampler[int]):
        """An order for each epoch, drawn from a generator of its own."""

        def __init__(self, count: int) -> None:
            self.count, self.generator = count, torch.Generator().manual_seed(5)

        def __len__(self) -> int:
            return self.count

        def __iter__(self) -> Iterator[int]:
            yield from torch.randperm(self.count, generator=self.generator).tolist()

    class OwnOrder(CkpipeTrainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return InTurns(20)

    said = messages(logging.INFO)
    arguments = {"num_train_epochs": 3, "load_best_model_at_end": False}
    whole = trained(of(case, "whole", **arguments), OwnOrder)
    for step in (9, 13, 20):
        one = of(case, f"{step}", save_steps=1, **arguments)
        trainer = resumed(one, step, OwnOrder)
        assert trainer.model.seen == whole.model.seen[step:]
        check_same(trainer.model.state_dict(), whole.model.state_dict())
    assert not any(GOES_ON in each for each in said), "an order that ckpipe does not know"


@restart
def test_another_order_is_told(case: Case) -> None:
    one = of(case, "one", load_best_model_at_end=False, per_device_train_batch_size=1)
    trained(one, callbacks=[Stops(6)])
    said = messages(logging.INFO)
    changes: list[tuple[dict[str, Any], Any, str]] = [
        ({}, None, ""),
        ({"gradient_accumulation_steps": 2}, None, "gradient_accumulation_steps was 1 and is 2"),
        ({"per_device_train_batch_size": 2}, None, "per_device_train_batch_size was 1 and is 2"),
        ({"seed": 3}, None, "seed was 42 and is 3"),
        ({"dataloader_drop_last": True}, None, "dataloader_drop_last was False and is True"),
        *[
            ({"accelerator_config": {name: not was}}, None, f"{name} was {was} and is {not was}")
            for name, was in (("use_seedable_sampler", True), ("split_batches", False))
        ],
        ({}, Samples(22), "samples was 20 and is 22"),
        ({"max_steps": 30}, Stream(40), "samples was 20 and is None"),
    ]
    for change, samples, expected in changes:
        said.clear()
        again = {**one, "arguments": one["arguments"] | change | {"save_strategy": "no"}}
        trained(again, samples=samples, callbacks=[Stops(7)], resume="checkpoint-6")
        assert any(GOES_ON in each for each in said) == (not expected), said
        assert any(each.endswith(expected) for each in said if "left out" in each) == bool(expected)
    streamed = {"load_best_model_at_end": False, "max_steps": 12}
    for workers, step in ((0, 6), (0, 9), (1, 12)):
        said.clear()
        again = of(case, "stream", dataloader_num_workers=workers, **streamed)
        trained(again, samples=Stream(20), callbacks=[Stops(step)])
        told = [each for each in said if "dataloader_num_workers was 0 and is 1" in each]
        assert bool(told) == bool(workers), said


@restart
def test_what_differs_is_told(case: Case) -> None:
    with pytest.raises(UsageError, match="enable_jit_checkpoint") as raised:
        new_trainer(of(case, "jit", enable_jit_checkpoint=True))
    assert "preemption" in (raised.value.hint or "")
    said = messages(logging.WARNING)
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    trained(of(case, "workers", num_train_epochs=1, **workers))
    assert [each for each in said if "dataloader_persistent_workers" in each]


@restart
def test_tensors_that_move_are_told(case: Case) -> None:
    said = messages(logging.WARNING)
    trained(of(case, "one"), callbacks=[Stops(6)])
    assert not said
    trained(of(case, "two"), Teacher, callbacks=[Stops(6), Mean()])
    assert [each.partition(", which")[0] for each in said] == [
        "No checkpoint has Mean.mean, Teacher.moves"
    ]


@restart
def test_reference_models_go_on(case: Case) -> None:
    said, found = messages(logging.WARNING), []
    for name, steps in (("whole", [None]), ("one", [7, None])):
        for step in steps:
            follows = Follows()
            stops = [] if step is None else [Stops(step)]
            trained(of(case, name), callbacks=[follows, *stops])
        found.append(follows.ref_model.state_dict())
    check_same(found[1], found[0])
    assert not said


@restart
def test_older_checkpoints_go_on(case: Case) -> None:
    class Counts(CkpipeTrainer):
        """Holds counts, as trainers of trl do."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._metrics = {"train": [1.0]}

    Counts.__module__ = "trl.counts"
    saves = ckpipe.SyncPipeline.save

    def save_as_before(pipeline: Any, state: Any, step: int, **more: Any) -> Any:
        """Save what the first release of the integration did, under the present names."""
        state = {name: each for name, each in state.items() if name not in ("held", "references")}
        more["metadata"].pop("order")
        if more["include"]:
            gone = "held", "references", "running_mean", "running_var", "num_batches_tracked"
            more["include"] = [each for each in more["include"] if not each.endswith(gone)]
        return saves(pipeline, state, step, **more)

    said = messages(logging.INFO)
    scores, counts = [9.0, *[2.0] * 9], "generated texts and counts of the trainer"
    for name, kind, model, follows, lacking in [
        ("plain", CkpipeTrainer, new_model, [], ""),
        ("both", Counts, new_model, [Follows], f"{counts}, reference models that callbacks move"),
        ("peft", Counts, normed, [], f"{counts}, training.model.base_model.model.first.num"),
    ]:
        one = of(case, name, greater_is_better=True)
        for step in (7, 10):
            said.clear()
            save: Any = save_as_before if step == 7 else saves
            ckpipe.SyncPipeline.save = save  # type: ignore[method-assign]
            trained(
                one,
                kind,
                model=model,
                compute_metrics=scripted(scores[step == 10 :]),
                callbacks=[Stops(step), *[each() for each in follows]],
            )
        assert any("resumed step 6" in each for each in said), said
        assert any("loaded the best model, of step 3" in each for each in said), said
        told = [each.partition("begins anew: ")[2] for each in said if "older ckpipe" in each]
        assert [each[: len(lacking)] for each in told] == [lacking] * bool(lacking), said
        assert not any(GOES_ON in each for each in said), said


if __name__ == "__main__":
    # By peft, the second.
    serve_runs("'pin_memory' argument is set as true", "`is_gradient_checkpointing` is deprecated")
