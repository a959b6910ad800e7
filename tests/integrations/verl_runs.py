"""Runs of verl's fine-tuning trainer on CPU ranks, which a case may kill.

verl has no platform for CPUs, but takes one of its user's. As a script this is a process that has
imported verl and forks the ranks of each case.
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from hydra import compose, initialize_config_module
from tokenizers import Tokenizer, models
from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_base import PlatformBase

import ckpipe
from ckpipe.errors import CheckpointNotFound, CkpipeError, UsageError
from ckpipe.integrations.pointers import read_pointer
from tests.support.fork_server import Case, serve
from tests.support.killed_runs import die, mortal_backend

PER_EPOCH, STEPS, SAVE_FREQ = 7, 14, 4


class Device(ModuleType):
    """Answers the questions that verl asks ``torch.cuda``."""

    is_available = staticmethod(lambda: False)
    mem_get_info = staticmethod(lambda: (0, 0))
    get_device_name = staticmethod(lambda *_: "cpu")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: 0


class Cpu(PlatformBase):
    """A platform of verl for ranks on CPUs; what is not here does nothing."""

    device_name, vendor_name, device_module = "cpu", "none", Device("device")

    def is_available(self) -> bool:
        return False

    def current_device(self) -> str:
        return "cpu"

    def communication_backend_name(self) -> str:
        return "gloo"

    def ray_resource_name(self) -> str:
        return "CPU"

    def visible_devices_envvar(self) -> str:
        return "NO_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return nullcontext()


for _name in PlatformBase.__abstractmethods__ - vars(Cpu).keys():
    setattr(Cpu, _name, lambda *_: None)
Cpu.__abstractmethods__ = frozenset()


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Texts of several lengths, whose first token is their number."""

    def __init__(self, **_: Any) -> None:
        pass

    def __len__(self) -> int:
        return 4 * PER_EPOCH

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        chance = torch.Generator().manual_seed(number)
        ids = torch.randint(30, 50, (4 + number % 5,), generator=chance)
        ids[0] = number
        positions, mask = torch.arange(len(ids)), torch.ones_like(ids)
        return {"input_ids": ids, "position_ids": positions, "loss_mask": mask}


def make_model(case: Case) -> None:
    """Write a tiny model with dropout and a tokenizer."""
    words = models.WordLevel({str(number): number for number in range(50)}, unk_token="0")
    tokens = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="1", eos_token="0"
    )
    tokens.save_pretrained(case["model"])
    transformers.set_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16,
        attention_dropout=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(case["model"])


class Run:
    """verl's trainer, and the samples and losses that it comes to."""

    def __init__(self, case: Case, *overrides: str) -> None:
        from verl.trainer.sft_trainer import SFTTrainer
        from verl.workers.utils.losses import sft_loss

        given = [
            f"model.path={case['model']}", f"trainer.default_local_dir={case['root']}",
            f"trainer.save_freq={SAVE_FREQ}", "trainer.total_epochs=2", "trainer.device=cpu",
            "trainer.logger=[]", "data.train_files=none", "data.num_workers=0",
            "data.train_batch_size=4", "data.micro_batch_size_per_gpu=2",
            "data.use_dynamic_bsz=False", "data.custom_cls.path=pkg://tests.integrations.verl_runs",
            "data.custom_cls.name=Samples", "model.use_remove_padding=False",
            "model.enable_gradient_checkpointing=False", "engine.strategy=fsdp2",
            "+model.override_config.attn_implementation=eager", "engine.use_torch_compile=False",
        ]  # fmt: skip
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose("sft_trainer_engine", [*given, *case.get("overrides", []), *overrides])
        torch.manual_seed(8 + dist.get_rank())
        self.trainer = SFTTrainer(config)
        self.first = self.trainer.resume_global_step
        self.losses: list[float] = []
        self.seen: list[list[float]] = []

        def noted(model_output: Any, data: Any, dp_group: Any = None) -> Any:
            if self.first + len(self.losses) == case.get("dies"):
                dist.barrier()
                die()
            loss, metrics = sft_loss(None, model_output, data, dp_group)
            self.losses.append(loss.item())
            self.seen.append([ids[0].item() for ids in data["input_ids"].unbind()])
            return loss, metrics

        self.trainer.training_client.set_loss_fn(noted)

    def fit(self) -> Run:
        self.trainer.fit()
        return self

    def outcome(self) -> dict[str, Any]:
        engine = self.trainer.engine
        state = {name: _whole(value) for name, value in engine.module.state_dict().items()}
        moments = [
            {name: _whole(value) for name, value in each.items()}
            for each in engine.optimizer.state_dict()["state"].values()
        ]
        return {
            "weights": state,
            "optimizer": moments,
            "schedule": engine.lr_scheduler.state_dict(),
            "random": torch.rand(1).item(),
            "losses": self.losses,
            "seen": self.seen,
        }


def _whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _register(case: Case, **settings: Any) -> None:
    from ckpipe_verl import register

    register(case["root"], **{"staging": {"block_bytes": 65536}, **settings})


def train(case: Case) -> None:
    """Go on from the newest checkpoint to the end, and note all that it has come to."""
    url = None
    if "store" in case:
        killed = case.get("victim") == dist.get_rank()
        mortal_backend({**(case if killed else {}), "root": case["store"]})
        url = "mortal://store"
    _register(case, url=url)
    torch.save(Run(case).fit().outcome(), f"{case['out']}.result-{dist.get_rank()}")


def settings_keep_their_meaning(case: Case) -> None:
    """The limit, the files of Hugging Face, other folders, and the first save of a run."""
    _register(case, url=f"{case['out']}/store")
    root, last = Path(case["root"]), f"global_step_{STEPS}"
    run = Run(case, "trainer.max_ckpt_to_keep=1", "checkpoint.save_contents=[model,hf_model,extra]")
    run.fit()
    expected = run.outcome()["weights"]
    while not (read_pointer(root / last) and not (root / f"global_step_{SAVE_FREQ}").exists()):
        os.sched_yield()
    # The save of the last step leaves the one that the trainer's file named until then.
    with ckpipe.SyncPipeline(f"{case['out']}/store/language_model", solo=True) as pipeline:
        assert {info.step for info in pipeline.steps()} <= {8, 12, STEPS}
    found = transformers.AutoModelForCausalLM.from_pretrained(root / last / "huggingface")
    assert all(
        map(torch.equal, found.state_dict().values(), (v.bfloat16() for v in expected.values()))
    )
    pointer = read_pointer(root / last)
    assert pointer is not None
    target = {"training": {"model": {name: torch.zeros_like(v) for name, v in expected.items()}}}
    only = ["training.model"]
    assert ckpipe.load(pointer.root, target, step=pointer.id, include=only).step == STEPS
    assert all(map(torch.equal, target["training"]["model"].values(), expected.values()))
    with pytest.raises(CkpipeError, match="outside"):
        run.trainer.engine.save_checkpoint(f"{case['out']}/other/global_step_1")
    with pytest.raises(CheckpointNotFound):
        run.trainer.engine.load_checkpoint(str(root / "global_step_5"))
    with pytest.raises(UsageError, match="without model"):
        Run(case, "checkpoint.save_contents=[hf_model]")


def runs_that_begin_say_so(case: Case) -> None:
    """A run with checkpoints, or their remains, does not begin at 0 in silence."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpipe").addHandler(handler)
    logging.getLogger("ckpipe").setLevel(logging.INFO)
    _register(case, resume=case["resume"])
    tracker = Path(case["root"], "latest_checkpointed_iteration.txt")

    def again(text: str | None) -> None:
        dist.barrier()
        if dist.get_rank() == 0 and text is not None:
            tracker.write_text(text)
        elif dist.get_rank() == 0:
            tracker.unlink(missing_ok=True)
        dist.barrier()
        said.clear()

    if case["resume"] == "must":
        with pytest.raises(CheckpointNotFound):
            Run(case)
        return
    assert Run(case, "trainer.total_training_steps=8").fit().first == 0
    again(None)
    assert Run(case).first == 0
    assert dist.get_rank() or any("begins at step 0, but" in each for each in said)
    for text in ("12", ""):  # of a save that did not complete; and of a kill while it was written
        again(text)
        assert Run(case).first == 8
        assert dist.get_rank() or any("now it names step 8" in each for each in said)
        assert any("resumed step 8" in each for each in said) == (dist.get_rank() == 0)


def checkpoints_of_verl_go_on(case: Case) -> None:
    """A run that has saved without ckpipe goes on with it."""
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp import FSDPEngineWithLMHead

    EngineRegistry.register("language_model", ["fsdp2"], "cpu")(FSDPEngineWithLMHead)
    before = Run(case, "trainer.total_training_steps=8").fit().outcome()
    _register(case)
    run = Run(case)
    assert run.first == 8
    after = run.outcome()
    assert all(map(torch.equal, after["weights"].values(), before["weights"].values()))
    run.fit()
    assert Run(case).first == STEPS


def adapters_are_saved_alone(case: Case) -> None:
    """With ``save_lora_only`` a checkpoint has adapters, and a run goes on with them."""
    _register(case)
    lora = ["model.lora_rank=2", "+checkpoint.save_lora_only=True"]
    before = Run(case, *lora).fit().outcome()["weights"]
    with ckpipe.SyncPipeline(f"{case['root']}/ckpipe/language_model", solo=True) as pipeline:
        loaded = pipeline.load(include=["training.model"])
    assert loaded is not None
    state = loaded.state["training"]["model"]
    assert state
    assert all("lora_" in name for name in state)
    run = Run(case, *lora)
    assert run.first == STEPS
    assert all(map(torch.equal, run.outcome()["weights"].values(), before.values()))


def _live(case: Case, rank: int, number: int) -> None:
    warnings.simplefilter("ignore")  # verl uses what transformers and torch have deprecated
    torch.set_num_threads(1)
    size = case["ranks"]
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "LOCAL_WORLD_SIZE": str(size)}
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), **place)
    store = dist.FileStore(f"{case['out']}.store-{number}", size)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300)
    )
    dist.barrier()  # a rank that leaves earlier breaks the connecting of the others
    globals()[case["do"]](case)


if __name__ == "__main__":
    platform_manager.set_platform(Cpu())
    importlib.import_module("verl.trainer.sft_trainer")  # so that no child has to
    importlib.import_module("ckpipe_verl")

    serve(_live)
