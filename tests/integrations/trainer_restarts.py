"""What a restart of the Hugging Face Trainer keeps or tells, each a case of :mod:`trainer_runs`."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import IterableDataset, Sampler
from transformers import (
    EarlyStoppingCallback,
    PretrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
)

import ckpipe
from ckpipe.errors import UsageError
from ckpipe.integrations.transformers import CkpipeTrainer
from tests.integrations.trainer_features import (
    Stops,
    check_same,
    messages,
    of,
    resumed,
    scripted,
    undisturbed,
)
from tests.integrations.trainer_runs import Samples, new_model, new_trainer, outcome
from tests.support.fork_server import Case

GOES_ON = "the data go on"


def complete(case: Case) -> list[str]:
    with ckpipe.SyncPipeline(case["root"], read_only=True) as pipeline:
        return [info.id for info in pipeline.steps() if info.complete]


def finished_runs_end_at_once(case: Case) -> None:
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
            trainer = new_trainer(one, compute_metrics=metric, callbacks=stopping)
            trainer.train()
            assert trainer.state.global_step == last, length
            found.append((complete(one), trainer.model.state_dict()))
        assert len(trainer.model.seen) == 0
        for ids, weights in found[1:]:
            assert ids == found[0][0], length
            check_same(weights, found[0][1])
    longer = {**of(case, "0"), "arguments": one["arguments"] | {"max_steps": 9}}
    trainer = new_trainer(longer)
    trainer.train()
    assert trainer.state.global_step == 9


class Normed(PreTrainedModel):
    """A model with batch norm, in its head and in the base that peft freezes."""

    config_class = PretrainedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.words, self.line, self.first = nn.Embedding(50, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.head = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 50))
        self.post_init()

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        found = self.head(self.first(self.line(self.words(input_ids)).mean(1)))
        return {"loss": nn.functional.cross_entropy(found, labels[:, 0]), "logits": found}


def normed() -> Any:
    torch.manual_seed(7)
    config = LoraConfig(r=2, target_modules=["line"], modules_to_save=["head"])
    model = get_peft_model(Normed(PretrainedConfig()), config)
    model.seen = []
    return model


def buffers_of_adapted_models_go_on(case: Case) -> None:
    scores = [1.0, 9.0, *[2.0] * 9]
    expected = undisturbed(of(case, "whole", load_best_model_at_end=False), model=normed)
    one = of(case, "one", load_best_model_at_end=False)
    check_same(outcome(resumed(one, 12, model=normed)), expected)
    found = {}
    for kind in (Trainer, CkpipeTrainer):
        best = of(case, kind.__name__, greater_is_better=True)
        trainer = new_trainer(best, kind, model=normed, compute_metrics=scripted(scores))
        trainer.train()
        found[kind] = trainer.model.state_dict()
    # The plain trainer leaves the statistics of the base as they were at the last step.
    own = {name: each for name, each in found[Trainer].items() if ".first." not in name}
    check_same({name: found[CkpipeTrainer][name] for name in own}, own)
    tracked = "base_model.model.first.num_batches_tracked"
    assert (found[Trainer][tracked].item(), found[CkpipeTrainer][tracked].item()) == (20, 6)


class Stream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.samples = Samples(count)

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[number] for number in range(self.samples.count))


def streams_are_passed_over_again(case: Case) -> None:
    for accumulated in (1, 2):
        steps: dict[str, Any] = {"max_steps": 12, "gradient_accumulation_steps": accumulated}
        expected = undisturbed(of(case, f"whole-{accumulated}", **steps), samples=Stream(10))
        seen = expected.pop("seen")
        assert seen[5:10] == seen[:5], "the stream is passed over more than once"
        for step in (3, 6, 9):
            one = of(case, f"{accumulated}-{step}", **steps)
            found = outcome(resumed(one, step, samples=Stream(10)))
            rest = found.pop("seen")
            assert rest == seen[len(seen) - len(rest) :]
            assert len(rest) < len(seen) - 2
            check_same(found, expected)


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


def generators_of_samplers_go_on(case: Case) -> None:
    said = messages(logging.INFO)
    arguments = {"num_train_epochs": 3, "load_best_model_at_end": False}
    whole = new_trainer(of(case, "whole", **arguments), OwnOrder)
    whole.train()
    for step in (9, 13, 20):
        one = of(case, f"{step}", save_steps=1, **arguments)
        new_trainer(one, OwnOrder, callbacks=[Stops(step)]).train()
        trainer = new_trainer(one, OwnOrder)
        trainer.train()
        assert trainer.model.seen == whole.model.seen[step:]
        check_same(trainer.model.state_dict(), whole.model.state_dict())
    assert not any(GOES_ON in each for each in said), "an order that ckpipe does not know"


def another_order_is_told(case: Case) -> None:
    one = of(case, "one", load_best_model_at_end=False, per_device_train_batch_size=1)
    new_trainer(one, callbacks=[Stops(6)]).train()
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
        again = {**one, "arguments": one["arguments"] | change}
        stops = [Stops(7)]
        again["arguments"] = again["arguments"] | {"save_strategy": "no"}
        new_trainer(again, samples=samples, callbacks=stops).train("checkpoint-6")
        assert any(GOES_ON in each for each in said) == (not expected), said
        assert any(each.endswith(expected) for each in said if "left out" in each) == bool(expected)
    streamed = of(case, "stream", load_best_model_at_end=False, max_steps=12)
    for workers, step in ((0, 6), (0, 9), (1, 12)):
        said.clear()
        again = {**streamed, "arguments": {**streamed["arguments"]}}
        again["arguments"]["dataloader_num_workers"] = workers
        new_trainer(again, samples=Stream(20), callbacks=[Stops(step)]).train()
        told = [each for each in said if "dataloader_num_workers was 0 and is 1" in each]
        assert bool(told) == bool(workers), said


def what_differs_is_told(case: Case) -> None:
    with pytest.raises(UsageError, match="enable_jit_checkpoint") as raised:
        new_trainer(of(case, "jit", enable_jit_checkpoint=True))
    assert "preemption" in (raised.value.hint or "")
    said = messages(logging.WARNING)
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    new_trainer(of(case, "workers", num_train_epochs=1, **workers)).train()
    assert [each for each in said if "dataloader_persistent_workers" in each]


class Mean(TrainerCallback):
    """Keeps a mean of the weights, and tensors that stay as they are."""

    def __init__(self) -> None:
        self.probe, self.mean = torch.ones(3), list[torch.Tensor]()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        weights = [each.detach() for each in kwargs["model"].parameters()]
        self.mean = self.mean or [each.clone() for each in weights]
        for mean, each in zip(self.mean, weights, strict=True):
            mean.lerp_(each, 0.5)


class Teacher(CkpipeTrainer):
    """Has a model beside the trained one that moves, and one that does not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.moves, self.stays = copy.deepcopy(self.model), copy.deepcopy(self.model)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        for mean, each in zip(self.moves.parameters(), self.model.parameters(), strict=True):
            mean.data.lerp_(each.data, 0.5)
        return super().training_step(*args, **kwargs)


def tensors_that_move_are_told(case: Case) -> None:
    said = messages(logging.WARNING)
    new_trainer(of(case, "one"), callbacks=[Stops(6)]).train()
    assert not said
    new_trainer(of(case, "two"), Teacher, callbacks=[Stops(6), Mean()]).train()
    assert [each.partition(", which")[0] for each in said] == [
        "No checkpoint has Mean.mean, Teacher.moves"
    ]


class Follows(TrainerCallback):
    """Moves a reference model after the trained one, as that of trl."""

    def __init__(self) -> None:
        self.ref_model = new_model()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        moved = zip(self.ref_model.parameters(), kwargs["model"].parameters(), strict=True)
        for reference, each in moved:
            reference.data.lerp_(each.data, 0.5)


def reference_models_go_on(case: Case) -> None:
    said, found = messages(logging.WARNING), []
    for name, steps in (("whole", [None]), ("one", [7, None])):
        for step in steps:
            follows = Follows()
            stops = [] if step is None else [Stops(step)]
            new_trainer(of(case, name), callbacks=[follows, *stops]).train()
        found.append(follows.ref_model.state_dict())
    check_same(found[1], found[0])
    assert not said


class Counts(CkpipeTrainer):
    """Holds counts, as trainers of trl do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._metrics = {"train": [1.0]}


Counts.__module__ = "trl.counts"


def save_as_before(pipeline: Any, state: Any, step: int, **more: Any) -> Any:
    """Save what the first release of the integration did, under the names of the present one."""
    state = {name: each for name, each in state.items() if name not in ("held", "references")}
    more["metadata"].pop("order")
    if more["include"]:
        gone = "held", "references", "running_mean", "running_var", "num_batches_tracked"
        more["include"] = [each for each in more["include"] if not each.endswith(gone)]
    return SAVE(pipeline, state, step, **more)


SAVE = ckpipe.SyncPipeline.save


def older_checkpoints_go_on(case: Case) -> None:
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
            save: Any = save_as_before if step == 7 else SAVE
            ckpipe.SyncPipeline.save = save  # type: ignore[method-assign]
            new_trainer(
                one,
                kind,
                model=model,
                compute_metrics=scripted(scores[step == 10 :]),
                callbacks=[Stops(step), *[each() for each in follows]],
            ).train()
        assert any("resumed step 6" in each for each in said), said
        assert any("loaded the best model, of step 3" in each for each in said), said
        told = [each.partition("begins anew: ")[2] for each in said if "older ckpipe" in each]
        assert [each[: len(lacking)] for each in told] == [lacking] * bool(lacking), said
        assert not any(GOES_ON in each for each in said), said
