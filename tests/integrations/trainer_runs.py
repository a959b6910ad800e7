"""Runs of the Hugging Face Trainer in processes of their own, which a case may kill.

As a script this is a process that has imported transformers and forks the ranks of each case.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # the first optimizer imports it
import torch.distributed as dist
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from ckpipe.integrations.transformers import CkpipeTrainer, CkpipeTrainerMixin
from tests.integrations.trainer_ranks import serve_runs
from tests.support.fork_server import Case
from tests.support.killed_runs import die, mortal_backend

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


def dist_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def train(case: Case) -> None:
    """Train from wherever the run is, and note all that it has come to."""
    if "url" in case:
        mortal_backend(case if case.get("victim") == dist_rank() else {"root": case["root"]})
    trainer = new_trainer(case)
    trainer.train(**case.get("train", {}))
    rank = trainer.args.process_index
    torch.save(outcome(trainer), f"{case['out']}.result-{rank}")


if __name__ == "__main__":
    # By peft, the second.
    serve_runs("'pin_memory' argument is set as true", "`is_gradient_checkpointing` is deprecated")
