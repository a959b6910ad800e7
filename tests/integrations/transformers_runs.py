"""A tiny training with the Hugging Face Trainer, which a case may kill."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # the first optimizer imports it
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import IterableDataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PretrainedConfig,
    PreTrainedModel,
    TrainerCallback,
    TrainingArguments,
)

from ckpipe.integrations.transformers import CkpipeTrainer, CkpipeTrainerMixin
from tests.support.fork_server import Case
from tests.support.killed_runs import die

SAMPLES = 20
TIMES = ("runtime", "per_second", "total_flos")


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Texts whose first token is their number; their lengths differ if they are to be grouped."""

    def __init__(self, count: int = SAMPLES, *, lengths: bool = False) -> None:
        self.count, self.lengths = count, lengths

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        if number >= self.count:
            raise IndexError(number)
        chance = torch.Generator().manual_seed(number)
        length = 4 + number % 5 if self.lengths else 8
        ids = torch.randint(30, 50, (length,), generator=chance)
        ids[0] = number
        return {"input_ids": ids, "labels": ids.clone()}


def new_model() -> Any:
    """A tiny GPT-2 with dropout, which notes the samples that it is trained on."""
    transformers.set_seed(7)
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, **tokens)
    model = GPT2LMHeadModel(config)
    model.seen = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        if module.training:
            model.seen.append(kwargs["input_ids"][:, 0].tolist())

    model.register_forward_pre_hook(note, with_kwargs=True)
    return model


class Dies(TrainerCallback):
    """Ends the process before a step; if it is told, once the checkpoint before it has its name."""

    def __init__(self, step: int, named: str | None) -> None:
        self.step, self.named = step, named

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            while self.named and not Path(args.output_dir, self.named).is_dir():
                os.sched_yield()
            if dist.is_initialized():
                dist.barrier()
            die()


def score(predictions: Any) -> dict[str, float]:
    """A metric that goes up and down, and is the same for a state of the model."""
    return {"score": float(np.asarray(predictions.predictions).sum() * 1e3 % 7)}


def new_trainer(case: Case, kind: Any = CkpipeTrainer, **more: Any) -> Any:
    """The trainer of a case."""
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
        "save_steps": 3,
        "eval_steps": 3,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "load_best_model_at_end": True,
        "metric_for_best_model": "score",
        "learning_rate": 1e-2,
        "use_cpu": True,
        "ddp_backend": "gloo" if dist.is_initialized() else None,
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
        **case.get("arguments", {}),
    }
    if issubclass(kind, CkpipeTrainerMixin):
        more["checkpoints"] = case.get("url") or case.get("root")
        more["ckpipe_settings"] = {"staging": {"block_bytes": 65536}, **case.get("settings", {})}
    callbacks = [Dies(case["dies"], case.get("named"))] if "dies" in case else []
    trainer = kind(
        model=more.pop("model", new_model)(),
        args=TrainingArguments(output_dir=case["out"], **arguments),
        train_dataset=more.pop("samples", None) or Samples(),
        eval_dataset=Samples(6),
        compute_metrics=more.pop("compute_metrics", score),
        callbacks=[*callbacks, *more.pop("callbacks", [])],
        **more,
    )
    for each in (transformers.PrinterCallback, transformers.ProgressCallback):
        trainer.remove_callback(each)
    return trainer


def history(trainer: Any) -> list[dict[str, Any]]:
    """What the run has logged, without times; the mean loss of a call counts its own steps."""
    return [
        {
            name: value
            for name, value in entry.items()
            if name != "train_loss" and not any(each in name for each in TIMES)
        }
        for entry in trainer.state.log_history
    ]


def outcome(trainer: Any) -> dict[str, Any]:
    """All that a run has come to."""
    return {
        "weights": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "history": history(trainer),
        "seen": trainer.model.seen,
        "best": (trainer.state.best_metric, trainer.state.best_global_step),
        "random": (torch.rand(1).item(), float(np.random.rand()), random.random()),
    }


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


def trained(case: Case, kind: Any = CkpipeTrainer, resume: Any = None, **more: Any) -> Any:
    """The trainer of a case after its training, from wherever the run is if nothing is given."""
    trainer = new_trainer(case, kind, **more)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def resumed(case: Case, at: int, kind: Any = CkpipeTrainer, **more: Any) -> Any:
    """Train to a step, begin anew as another process would, and train to the end."""
    trained(case, kind, callbacks=[Stops(at)], **more)
    return trained(case, kind, **more)


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


class Stream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.samples = Samples(count)

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[number] for number in range(self.samples.count))


class Follows(TrainerCallback):
    """Moves a reference model after the trained one, as that of trl."""

    def __init__(self) -> None:
        self.ref_model = new_model()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        moved = zip(self.ref_model.parameters(), kwargs["model"].parameters(), strict=True)
        for reference, each in moved:
            reference.data.lerp_(each.data, 0.5)


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
