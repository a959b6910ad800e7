"""Features of the Hugging Face Trainer with ckpipe, each a case of :mod:`trainer_runs`.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerState

import ckpipe
from ckpipe.errors import (
    CheckpointNotFound,
    SettingsError,
    StructureMismatch,
    UnsupportedState,
    UsageError,
)
from ckpipe.integrations.pointers import read_pointer
from ckpipe.integrations.transformers import CkpipeTrainer, CkpipeTrainerMixin
from tests.integrations import trainer_ranks
from tests.integrations.trainer_runs import (
    Samples,
    new_model,
    new_trainer,
    outcome,
)
from tests.support.differences import difference
from tests.support.fork_server import Case
from tests.support.sampling import SEED, sample


class Stops(TrainerCallback):
    """Ends the training after a step, as a limit of time does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


def scripted(scores: Sequence[float]) -> Any:
    """A metric that has these values, one after the other."""
    values = iter(scores)
    return lambda predictions: {"score": next(values)}


def of(case: Case, name: str, **arguments: Any) -> Case:
    """The case of a run of its own."""
    return trainer_ranks.of(case, name, arguments=case["arguments"] | arguments)


def messages(level: int) -> list[str]:
    """A list that grows with what ckpipe logs."""
    said: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ckpipe")
    logger.addHandler(handler)
    logger.setLevel(level)
    return said


def check_same(found: Any, expected: Any) -> None:
    """Compare to the last bit."""
    if (difference_found := difference(found, expected)) is not None:
        raise AssertionError(difference_found)


def names(case: Case) -> list[str]:
    return sorted(path.name for path in Path(case["out"]).glob("checkpoint-*"))


def undisturbed(case: Case, **more: Any) -> dict[str, Any]:
    """What a run comes to that nothing disturbs."""
    trainer = new_trainer(case, **more)
    trainer.train()
    return outcome(trainer)


def resumed(case: Case, at: int, **more: Any) -> Any:
    """Train to a step, begin anew as another process would, and train to the end."""
    new_trainer(case, callbacks=[Stops(at)], **more).train()
    trainer = new_trainer(case, **more)
    trainer.train()
    return trainer


def names_and_best_are_those_of_the_trainer(case: Case) -> None:
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
            trainer = new_trainer(one, kind, compute_metrics=scripted(scores))
            trainer.train()
            state = trainer.state
            best = state.best_model_checkpoint and os.path.basename(state.best_model_checkpoint)
            found.append((names(one), best, state.best_metric, trainer.model.state_dict()))
        assert found[0][:3] == found[1][:3], (limit, greater, strategy, steps)
        check_same(found[1][3], found[0][3])
        with ckpipe.SyncPipeline(one["root"], read_only=True) as pipeline:
            complete = {f"checkpoint-{info.step}" for info in pipeline.steps() if info.complete}
        # The newest stays in any case; the trainer drops its name at the end with a limit of 1.
        assert complete >= set(found[0][0])
        assert len(complete) <= max(limit or 20, 2)


def resume_takes_what_it_is_given(case: Case) -> None:
    one = of(case, "run", num_train_epochs=1)
    with pytest.raises(CheckpointNotFound, match="no complete checkpoint"):
        new_trainer(one).train(resume_from_checkpoint=True)
    whole = new_trainer(one)
    whole.train()
    ids = {info.step: info.id for info in ckpipe.SyncPipeline(one["root"]).open().steps()}
    folder = Path(one["out"])
    for given, step in [
        (None, 10),
        (True, 10),
        (str(folder / "checkpoint-6"), 6),
        (f"checkpoint-{3}", 3),
        (ids[6], 6),
        (False, 0),
    ]:
        trainer = new_trainer(one)
        trainer.train(resume_from_checkpoint=given)
        assert len(trainer.model.seen) == 10 - step
        check_same(trainer.model.state_dict(), whole.model.state_dict())
    other = of(case, "other", num_train_epochs=1)
    new_trainer(other).train()
    for given, said in [
        (str(folder / "checkpoint-4"), "no complete checkpoint"),
        ("/of/another/run/checkpoint-6", f"was saved as {folder / 'checkpoint-6'}"),
        (str(Path(other["out"], "checkpoint-6")), f"leads to a checkpoint at {other['root']}"),
    ]:
        with pytest.raises(CheckpointNotFound, match=re.escape(said)):
            new_trainer(one).train(resume_from_checkpoint=given)


def saves_of_the_trainer_stay(case: Case) -> None:
    """Checkpoints without ckpipe are resumed from as ever, and no limit removes them."""
    whole = new_trainer(of(case, "whole", num_train_epochs=1))
    whole.train()
    said = messages(logging.INFO)
    for number, given in enumerate([None, True, "checkpoint-6"]):
        plain = of(case, f"{number}", num_train_epochs=1)
        new_trainer(plain, Trainer, callbacks=[Stops(6)]).train()
        if isinstance(given, str):
            given = str(Path(plain["out"], given))
        plain["arguments"] |= {"save_total_limit": 1}
        said.clear()
        trainer = new_trainer(plain)
        trainer.train(resume_from_checkpoint=given)
        assert len(trainer.model.seen) == 4
        check_same(trainer.model.state_dict(), whole.model.state_dict())
        assert [
            name for name in names(plain) if Path(plain["out"], name, "optimizer.pt").exists()
        ] == ["checkpoint-3", "checkpoint-6"]
        assert any("saved without ckpipe" in each for each in said) == (number < 2)
        assert not any("fresh" in each for each in said)
    # A run that is told to begin anew puts those aside whose names it needs.
    trainer = new_trainer({**plain, "root": f"{plain['root']}-2", "settings": {"resume": "never"}})
    trainer.train()
    assert len(trainer.model.seen) == 10
    aside = sorted(each.name for each in Path(plain["out"]).glob("before-*"))
    assert aside == ["before-ckpipe.checkpoint-3", "before-ckpipe.checkpoint-6"]
    # Names of another root are told.
    said.clear()
    new_trainer({**plain, "root": f"{plain['root']}-3"}, callbacks=[Stops(1)]).train()
    assert any("whose checkpoint is not at this root" in each for each in said)


def roots_of_the_trainer_go_on(case: Case) -> None:
    """From a root that is a folder of the plain Trainer the run goes on, or it says so."""
    whole = new_trainer(of(case, "whole", num_train_epochs=1))
    whole.train()
    old = of(case, "old", num_train_epochs=1)
    new_trainer(old, Trainer, callbacks=[Stops(6)]).train()
    Path(old["out"], "checkpoint-9").mkdir()  # as after a kill inside a save
    said = messages(logging.INFO)
    for resume, steps in ((None, 4), (True, 4), (False, 10)):
        one = {
            **of(case, f"new-{resume}", num_train_epochs=1),
            "root": str(Path(case["out"], "to")),
        }
        shutil.copytree(old["out"], one["root"])
        said.clear()
        trainer = new_trainer(one)
        trainer.train(resume_from_checkpoint=resume)
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
    trainer = new_trainer(weights, callbacks=[Stops(1)])
    trainer.train()
    assert any("training starts fresh" in each and "checkpoint-3" in each for each in said)


def names_that_cannot_be_written_are_told(case: Case) -> None:
    plain = {"num_train_epochs": 1, "load_best_model_at_end": False}
    said = messages(logging.INFO)
    for number, in_place in enumerate(("checkpoint-3", "checkpoint-10")):
        one = of(case, f"{number}", **plain)
        name = Path(one["out"], in_place)
        name.touch()
        with pytest.raises(ckpipe.CkpipeError, match=f"{name} .*is complete at {one['root']}"):
            new_trainer(one).train()
        with ckpipe.SyncPipeline(one["root"], read_only=True) as pipeline:
            steps = [info.step for info in pipeline.steps() if info.complete]
        assert int(in_place.rpartition("-")[2]) in steps
        if in_place == "checkpoint-3":
            with pytest.raises(ckpipe.CkpipeError, match=f"{name} .*move away a file"):
                new_trainer(one).train(resume_from_checkpoint="checkpoint-3")
        name.unlink()
        trainer = new_trainer(one)
        trainer.train()
        assert len(trainer.model.seen) == 10 - steps[-1]
        # With warnings in place of errors the run ends, and no checkpoint is called a failed one.
        one = {**of(case, f"warns-{number}", **plain), "settings": {"on_error": "warn"}}
        Path(one["out"], in_place).touch()
        with pytest.warns(RuntimeWarning) as warned:
            new_trainer(one).train()
        said += [str(each.message) for each in warned]
    assert any("cannot be written" in each for each in said)
    assert not any("A checkpoint failed" in each for each in said)


class Strange:
    """An object that only pickle can save."""


def refusals_name_what_the_trainer_has(case: Case) -> None:
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
    new_trainer(one := of(case, "damaged", num_train_epochs=1), callbacks=[Stops(6)]).train()
    (data,) = Path(one["root"]).glob("step-*6.*/*.safetensors")
    data.write_bytes(data.read_bytes()[:-8])
    with pytest.raises(ckpipe.errors.CorruptCheckpoint, match="resume_from_checkpoint='") as hurt:
        new_trainer(one).train()
    assert "fallback" not in str(hurt.value)
    trainer = new_trainer(one)
    trainer.model.double()
    with pytest.raises(ckpipe.errors.TargetMismatch, match="resume_from_checkpoint='") as other:
        trainer.train(resume_from_checkpoint="checkpoint-3")
    assert not re.search("exclude|strict|allow_|cast=", str(other.value))


def callbacks_can_be_copied(case: Case) -> None:
    class Copies(TrainerCallback):
        copied: Any = None

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.copied = copy.deepcopy(trainer.callback_handler.callbacks)
            assert copy.deepcopy(trainer._ckpipe_pipeline) is trainer._ckpipe_pipeline

    trainer = new_trainer(of(case, "one", num_train_epochs=1), callbacks=[Copies()])
    trainer.train()
    kinds = [type(each) for each in trainer.callback_handler.callbacks]
    assert [type(each) for each in trainer.callback_handler.callbacks[-2].copied] == kinds


def another_run_deletes_nothing(case: Case) -> None:
    limits: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"save_total_limit": 1}, {}),
        ({}, {"keep_last": 1}),
    ]
    for number, (limit, settings) in enumerate(limits):
        once = {"load_best_model_at_end": False, "num_train_epochs": 1, **limit}
        one = of(case, f"{number}", **once)
        one["settings"] = settings
        new_trainer(one).train()
        (last,) = names(one)
        another = {**one, "arguments": one["arguments"] | {"max_steps": 8, "save_steps": 4}}
        new_trainer(another).train(resume_from_checkpoint=False)
        assert names(one) == sorted([last, "checkpoint-8"]), names(one)
        with ckpipe.SyncPipeline(one["root"], read_only=True) as pipeline:
            complete = {info.id: info.line for info in pipeline.steps() if info.complete}
        pointers = [read_pointer(Path(one["out"], name)) for name in names(one)]
        assert complete.keys() >= {each.id for each in pointers if each is not None}
        assert len(set(complete.values())) == 2


def best_stays_with_rules_of_the_user(case: Case) -> None:
    warnings.filterwarnings("ignore", "keep_last=0 keeps only final checkpoints")
    scores = [9.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0]
    for keep_last, left in ((1, [3, 20]), (0, [])):
        one = of(case, f"{keep_last}", num_train_epochs=2)
        one["settings"] = {"keep_last": keep_last}
        said = messages(logging.WARNING)
        weights = []
        for _ in range(2):
            trainer = new_trainer(one, compute_metrics=scripted(scores))
            trainer.train()
            weights.append(trainer.model.state_dict())
        with ckpipe.SyncPipeline(one["root"], read_only=True) as pipeline:
            found = [info.step for info in pipeline.steps() if info.complete]
        assert found == left, found
        if keep_last:
            saved = ckpipe.load(one["root"], step=3).state["training"]["model"]
            for each in weights:
                check_same({name: each[name] for name in saved}, saved)
        assert any("best model" in each for each in said) == (keep_last == 0)


def scalers_go_on(case: Case) -> None:
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


def settings_come_from_the_environment(case: Case) -> None:
    one = of(case, "one", save_total_limit=1, load_best_model_at_end=False, num_train_epochs=1)
    os.environ["CKPIPE_KEEP_LAST"] = "2"
    new_trainer(one).train()
    with ckpipe.SyncPipeline(one["root"], read_only=True) as pipeline:
        assert [info.step for info in pipeline.steps() if info.complete] == [9, 10]
    os.environ["CKPIPE_INITIAL"] = "/weights"
    with pytest.raises(UsageError, match="CKPIPE_INITIAL"):
        new_trainer(one)


def runs_move_to_another_folder(case: Case) -> None:
    one, other = of(case, "one"), of(case, "moved")
    new_trainer(one, callbacks=[Stops(9)]).train()
    os.rmdir(other["out"])
    shutil.copytree(one["root"], other["root"])  # the names stay behind
    trainer = new_trainer(other)
    trainer.train()
    assert len(trainer.model.seen) == 11
    best = Path(trainer.state.best_model_checkpoint)
    assert best.parent == Path(other["out"])
    pointer = read_pointer(best)
    assert pointer is not None
    assert pointer.root == other["root"]


def tools_read_the_state_and_the_model(case: Case) -> None:
    one, plain = of(case, "one"), of(case, "plain")
    for kind, run in ((CkpipeTrainer, one), (Trainer, plain)):
        each = new_trainer(run, kind)
        each.train()
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


def callbacks_go_on(case: Case) -> None:
    def stopping() -> list[Any]:
        return [EarlyStoppingCallback(early_stopping_patience=3)]

    scores = [5.0, 9.0, 8.0, 7.0, 6.0, 5.0]
    for kept in (True, False):
        one = of(case, f"{kept}", restore_callback_states_from_checkpoint=kept)
        before, after = scripted(scores[:3]), scripted(scores[3:])
        new_trainer(one, compute_metrics=before, callbacks=[*stopping(), Stops(9)]).train()
        trainer = new_trainer(one, compute_metrics=after, callbacks=stopping())
        trainer.train()
        # It had seen one step without progress: with its state it waits for two more.
        assert trainer.state.global_step == (15 if kept else 18)


def data_is_skipped_or_not(case: Case) -> None:
    whole = new_trainer(of(case, "whole", num_train_epochs=1))
    whole.train()
    said = messages(logging.INFO)
    for ignore in (False, True):
        one = of(case, f"{ignore}", ignore_data_skip=ignore, num_train_epochs=1)
        said.clear()
        trainer = resumed(one, 6)
        new_trainer(one).train()  # which is over
        told = [each.rpartition(": ")[2] for each in said if "resumed step" in each]
        assert len(told) == 2
        assert ("the data go on with those of step 7" in told) == (not ignore)
        assert trainer.model.seen == (whole.model.seen[:4] if ignore else whole.model.seen[6:])


def order_by_length_goes_on(case: Case) -> None:
    arguments = {"train_sampling_strategy": "group_by_length", "per_device_train_batch_size": 1}
    samples = Samples(lengths=True)
    expected = undisturbed(of(case, "whole", **arguments), samples=samples)
    found = outcome(resumed(of(case, "resumed", **arguments), 27, samples=samples))
    assert expected.pop("seen")[27:] == found.pop("seen")
    check_same(found, expected)


def only_adapters_are_saved(case: Case) -> None:
    def adapted() -> Any:
        base = new_model()
        config = LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.2, fan_in_fan_out=True)
        model = get_peft_model(base, config)
        model.seen = base.seen
        return model

    expected, one = undisturbed(of(case, "whole"), model=adapted), of(case, "one")
    found = outcome(resumed(one, 12, model=adapted))
    assert expected.pop("seen")[12:] == found.pop("seen")
    check_same(found, expected)
    model = ckpipe.load(one["root"], include=["training.model"]).state["training"]["model"]
    assert model
    assert all("lora" in name for name in model), list(model)


def other_ranks_go_on(case: Case) -> None:
    """Resume with one rank what two have saved."""
    with pytest.raises(ckpipe.CkpipeError, match="per_rank"):
        new_trainer(case).train()
    trainer = new_trainer({**case, "settings": {"per_rank": "derive"}})
    trainer.train()
    assert trainer.state.global_step == trainer.state.max_steps
    assert len(trainer.model.seen) == 2 * (trainer.state.max_steps - case["saved"])


def weights_alone_are_saved(case: Case) -> None:
    one = of(case, "one", save_only_model=True, load_best_model_at_end=False)
    trainer = resumed(one, 9)
    assert trainer.state.global_step == 20
    assert len(trainer.model.seen) == 11
    state = ckpipe.load(one["root"]).state
    assert state["training"].keys() == {"model", "versions"}
    assert state.keys() == {"training"}


class Signals(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 7:
            signal.raise_signal(signal.SIGTERM)


def signals_and_settings_save(case: Case) -> None:
    one = of(case, "one", save_strategy="no", load_best_model_at_end=False)
    one["settings"] = {"preemption": True, "save_every_steps": 5}
    trainer = new_trainer(one, callbacks=[Signals()])
    trainer.train()
    assert 7 <= trainer.state.global_step <= 8
    with ckpipe.SyncPipeline(one["root"], read_only=True) as pipeline:
        assert [info.step for info in pipeline.steps()] == [5, trainer.state.global_step]


def wrong_uses_are_refused(case: Case) -> None:
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
        new_trainer({**of(case, "initial"), "settings": {"initial": "/weights"}}).train()
    with pytest.raises(SettingsError, match="keep_lst"):
        new_trainer({**of(case, "unknown"), "settings": {"keep_lst": 1}}).train()
    other = of(case, "other")
    with ckpipe.SyncPipeline(other["root"]) as pipeline:
        pipeline.save({"w": 1}, step=5)
    with pytest.raises(StructureMismatch, match="not saved by a trainer"):
        new_trainer(other).train()
    damaged = of(case, "damaged", num_train_epochs=1)
    new_trainer(damaged).train()
    newest = max(Path(damaged["root"]).glob("step-*.json"))
    newest.write_bytes(newest.read_bytes()[:-40])
    with pytest.raises(ckpipe.errors.CorruptCheckpoint):
        new_trainer(damaged).train()
