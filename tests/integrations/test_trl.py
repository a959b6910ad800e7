"""Trainers of trl with ckpipe: runs that stop go on to the bit."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.integrations.trainer_ranks import Runs, check_same, messages, new_case, serve_runs
from tests.support.fork_server import Case
from tests.support.sampling import EVERY

if TYPE_CHECKING or __name__ == "__main__":  # pytest does without it
    import transformers
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

    from ckpipe.integrations.transformers import CkpipeTrainerMixin
    from tests.integrations.transformers_runs import Stops

pytestmark = [
    pytest.mark.skipif(find_spec("trl") is None, reason="pip install --group integrations"),
    pytest.mark.skipif(not EVERY, reason="the extra integrations is for make test-all"),
]

COUNT = 16
TIMES = ("runtime", "per_second", "flos", "time", "train_loss")


def texts(seed: int) -> list[str]:
    chance = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 100, (COUNT, 3), generator=chance).tolist()
    return [" ".join(map(str, each)) for each in numbers]


PROMPTS, GOOD, BAD = texts(1), texts(2), texts(3)


def new_model(kind: Any = None, **more: Any) -> Any:
    transformers.set_seed(7)
    ends = {"bos_token_id": 257, "eos_token_id": 257, "pad_token_id": 256}
    sizes = {"vocab_size": 258, "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return (kind or GPT2LMHeadModel)(GPT2Config(**sizes, **ends, **more))


def new_tokens() -> Any:
    words = {each: n for n, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(words | {"<pad>": 256, "<eos>": 257}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(sum(map(ord, each)) % 11) for each in completions]


def prompts(**columns: Any) -> dict[str, Any]:
    return {"train_dataset": Dataset.from_dict({"prompt": PROMPTS, **columns})}


def pairs() -> dict[str, Any]:
    return prompts(chosen=GOOD, rejected=BAD)


def labelled() -> dict[str, Any]:
    return prompts(completion=GOOD, label=[n % 2 == 0 for n in range(COUNT)])


def rewarded() -> dict[str, Any]:
    return {**prompts(), "reward_funcs": reward}


GROUPS = {
    "max_completion_length": 4,
    "num_generations": 2,
    "per_device_train_batch_size": 4,
    "steps_per_generation": 4,
    "num_iterations": 2,
}

SYNC = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}

TRAINERS: dict[str, tuple[str, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "sft": ("SFT", {}, lambda: {"train_dataset": Dataset.from_dict({"text": PROMPTS})}),
    "dpo": ("DPO", {}, pairs),
    "dpo with a moving reference": ("DPO", SYNC, lambda: {**pairs(), "ref_model": new_model()}),
    "dpo, precomputed": ("DPO", {"precompute_ref_log_probs": True}, pairs),
    "kto with a moving reference": ("KTO", SYNC, lambda: {**labelled(), "ref_model": new_model()}),
    "reward": (
        "Reward",
        {},
        lambda: {
            "train_dataset": Dataset.from_dict({"chosen": GOOD, "rejected": BAD}),
            "model": new_model(GPT2ForSequenceClassification, num_labels=1),
        },
    ),
    "grpo": ("GRPO", GROUPS, rewarded),
    "grpo with a moving reference": ("GRPO", {**GROUPS, **SYNC, "beta": 0.1}, rewarded),
    "grpo with an entropy that adapts": (
        "GRPO",
        {**GROUPS, "use_adaptive_entropy": True, "entropy_coef": 0.01, "num_iterations": 1},
        rewarded,
    ),
    "rloo": ("RLOO", {**GROUPS, "beta": 0.0}, rewarded),
    "distillation": (
        "Distillation",
        {"max_completion_length": 4, "gradient_accumulation_steps": 2},
        lambda: {**prompts(), "teacher_model": new_model()},
    ),
}


def train(case: Case, name: str, folder: str, *stops: Any) -> Any:
    base = Path(case["out"], "base")
    if not base.exists():
        new_model().save_pretrained(base)
    transformers.set_seed(5)
    kind, arguments, more = TRAINERS[name]
    own = getattr(trl, f"{kind}Trainer")
    given = {
        "max_steps": 10,
        "save_steps": 3,
        "logging_steps": 2,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "log_level": "error",
        **arguments,
    }
    config = getattr(trl, f"{kind}Config")(f"{case['out']}/{folder}", **given)
    trainer = type(own.__name__, (CkpipeTrainerMixin, own), {})(
        **{"model": str(base), **more()},
        args=config,
        processing_class=new_tokens(),
        callbacks=[*stops],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer


def history(trainer: Any) -> list[dict[str, Any]]:
    return [
        {name: each for name, each in row.items() if not any(time in name for time in TIMES)}
        for row in trainer.state.log_history
    ]


def go_on(case: Case) -> None:
    """Stop inside a batch of generated texts, and at the end of an epoch."""
    warnings.simplefilter("ignore")  # trl uses what transformers has deprecated
    os.environ["HF_HUB_OFFLINE"] = "1"
    said = messages(logging.WARNING)
    whole = train(case, case["trainer"], "whole")
    for step in (3, 6, 9):
        train(case, case["trainer"], f"{step}", Stops(step))
        found = train(case, case["trainer"], f"{step}")
        check_same(found.model.state_dict(), whole.model.state_dict())
        assert history(found) == history(whole)
        for name in ("ref_model", "teacher_model"):
            if (expected := getattr(whole, name, None)) is not None:
                check_same(getattr(found, name).state_dict(), expected.state_dict())
    assert not said, said


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainer_that_stops_goes_on_to_the_bit(run: Runs, tmp_path: Path, trainer: str) -> None:
    assert run(go_on, new_case(tmp_path, trainer=trainer)) == [0]


if __name__ == "__main__":
    # By peft, the second.
    serve_runs("'pin_memory' argument is set as true", "`is_gradient_checkpointing` is deprecated")
