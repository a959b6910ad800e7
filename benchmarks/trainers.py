"""Measure how long a save blocks training: each trainer's own way and ckpipe in turns.

The state is GPT-2 124M with AdamW, 1.49 GB. The disk is idle before each save. The first save of
each way is not counted.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from states import gpt2_with_adamw
from torch.utils.data import DataLoader, TensorDataset

import ckpipe
from ckpipe.integrations.pointers import read_pointer

SAVES = 5
Seconds = dict[str, list[float]]


def timed(seconds: Seconds, way: str, save: Callable[[], Any]) -> Any:
    """Call a save once the disk is idle, and note how long it blocked."""
    os.sync()
    begin = time.perf_counter()
    result = save()
    seconds[way].append(time.perf_counter() - begin)
    return result


def wait_for(name: Path) -> None:
    """Wait until a name points to a complete checkpoint."""
    while read_pointer(name) is None:
        time.sleep(0.01)


def group_of_one() -> None:
    """Make the process group that DCP needs; trainers before it would take it for their own."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def loop(root: Path, seconds: Seconds) -> None:
    """``torch.save`` of the state dicts."""
    state = gpt2_with_adamw()
    with ckpipe.SyncPipeline(root / "ckpipe", keep_last=1) as pipeline:
        for number in range(1 + SAVES):
            plain = {name: each.state_dict() for name, each in state.items()}
            timed(seconds, "own", partial(torch.save, plain, root / "own.pt"))
            timed(seconds, "ckpipe", partial(pipeline.save, state, number)).wait()


def trainer(root: Path, seconds: Seconds) -> None:
    """``Trainer`` of transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from ckpipe.integrations.transformers import CkpipeTrainer

    class Both(CkpipeTrainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            if self.state.global_step % 2:
                timed(seconds, "own", partial(Trainer._save_checkpoint, self, model, trial))
            else:
                timed(seconds, "ckpipe", partial(super()._save_checkpoint, model, trial))
                wait_for(root / f"checkpoint-{self.state.global_step}")

    samples = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 16
    arguments = TrainingArguments(
        str(root), max_steps=2 * (1 + SAVES), save_steps=1, save_total_limit=1, use_cpu=True,
        report_to=[], disable_tqdm=True, logging_strategy="no", per_device_train_batch_size=1,
    )  # fmt: skip
    Both(GPT2LMHeadModel(GPT2Config()), arguments, train_dataset=samples).train()


def accelerate(root: Path, seconds: Seconds) -> None:
    """``save_state`` of accelerate."""
    from accelerate import Accelerator

    from ckpipe.integrations.accelerate import attach

    accelerator: Any = Accelerator(cpu=True)
    accelerator.prepare(*gpt2_with_adamw().values())
    own = accelerator.save_state
    attach(accelerator, root / "ckpipe", keep_last=1)
    for _ in range(1 + SAVES):
        timed(seconds, "own", partial(own, str(root / "own")))
        timed(seconds, "ckpipe", accelerator.save_state).wait()
    accelerator.end_training()


def lightning(root: Path, seconds: Seconds) -> None:
    """``Trainer.save_checkpoint`` of Lightning."""
    import lightning as pl
    from lightning.fabric.plugins.io import TorchCheckpointIO

    from ckpipe.integrations.lightning import CkpipeCallback, CkpipeCheckpointIO

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.chosen = gpt2_with_adamw().values()

        def training_step(self, batch: Any, number: int) -> Any:
            return self.net.ln_f.weight.square().mean()

        def configure_optimizers(self) -> Any:
            return self.chosen

    io = CkpipeCheckpointIO(root / "ckpipe", keep_last=1)
    fit: Any = pl.Trainer(
        accelerator="cpu", max_steps=1, default_root_dir=root, logger=False, plugins=[io],
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        callbacks=[CkpipeCallback()],
    )  # fmt: skip
    fit.fit(Module(), DataLoader(TensorDataset(torch.zeros(2, 1))))
    for number in range(1 + SAVES):
        fit.strategy.checkpoint_io = TorchCheckpointIO()
        timed(seconds, "own", partial(fit.save_checkpoint, root / "own.ckpt"))
        fit.strategy.checkpoint_io = io
        timed(seconds, "ckpipe", partial(fit.save_checkpoint, root / f"{number}.ckpt"))
        wait_for(root / f"{number}.ckpt")
    io.teardown()


def dcp(root: Path, seconds: Seconds, *, beside: bool) -> None:
    """``dcp.save`` or ``dcp.async_save``, with ``FileSystemWriter``."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import async_save, save

    from ckpipe.integrations.dcp import CkpipeStorageWriter

    state = gpt2_with_adamw()
    whole = dict(zip(state, get_state_dict(*state.values()), strict=True))
    group_of_one()
    own, ours = FileSystemWriter(root / "own"), CkpipeStorageWriter(root / "ckpipe", keep_last=1)
    for way, writer in [("own", own), ("ckpipe", ours)] * (1 + SAVES):
        call: Any = partial(async_save if beside else save, dict(whole), storage_writer=writer)
        done = timed(seconds, way, call)
        if beside:
            done.result()


def torchtitan(root: Path, seconds: Seconds, *, mode: Any) -> None:
    """``save`` of torchtitan's checkpoint manager."""
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    from ckpipe.integrations.torchtitan import CkpipeCheckpointManager

    group_of_one()
    model = gpt2_with_adamw()["model"]
    config: Any = default_adamw(lr=1e-4)
    config.implementation = "for-loop"
    optimizers = config.build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=1).build(
        optimizers=optimizers, training_steps=100
    )
    kinds: dict[str, Any] = {"own": CheckpointManager, "ckpipe": CkpipeCheckpointManager}
    managers = {
        way: kind.Config(
            enable=True, interval=1, folder=way, async_mode=mode, keep_latest_k=2
        ).build(
            dataloader=None, model_parts=[model], optimizers=optimizers, lr_schedulers=schedulers,
            states={}, sd_adapter=None, base_folder=str(root),
        )
        for way, kind in kinds.items()
    }  # fmt: skip
    for step in range(1, 2 + SAVES):
        for way, manager in managers.items():
            timed(seconds, way, partial(manager.save, step))
            manager.maybe_wait_for_saving()
    for manager in managers.values():
        manager.close()


def ray_train(root: Path, seconds: Seconds) -> None:
    """``report`` of Ray Train with a folder that ``torch.save`` fills."""
    import ray
    from ray.train import CheckpointConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    here = {"PYTHONPATH": str(Path(__file__).parent)}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": here})
    TorchTrainer(
        ray_worker,
        train_loop_config={"root": str(root)},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(
            name="run", storage_path=str(root), checkpoint_config=CheckpointConfig(num_to_keep=1)
        ),
    ).fit()
    ray.shutdown()
    seconds.update(json.loads((root / "seconds.json").read_text()))


def ray_worker(config: dict[str, str]) -> None:
    """Save in both ways in a worker of Ray, and write the seconds into the root."""
    from ray.train import Checkpoint
    from ray.train import report as report_to_ray

    from ckpipe.integrations.ray import report

    root, seconds, state = Path(config["root"]), Seconds(own=[], ckpipe=[]), gpt2_with_adamw()
    metrics = {"loss": 1.0}

    def own() -> None:
        plain = {name: each.state_dict() for name, each in state.items()}
        with tempfile.TemporaryDirectory(dir=root) as folder:
            torch.save(plain, Path(folder, "state.pt"))
            report_to_ray(metrics, checkpoint=Checkpoint.from_directory(folder))

    def ours(pipeline: ckpipe.SyncPipeline, number: int) -> ckpipe.SyncSaveHandle:
        handle = pipeline.save(state, number)
        report(handle, metrics)
        return handle

    with ckpipe.SyncPipeline(root / "ckpipe", keep_last=1) as pipeline:
        for number in range(1 + SAVES):
            timed(seconds, "own", own)
            timed(seconds, "ckpipe", partial(ours, pipeline, number)).wait()
    (root / "seconds.json").write_text(json.dumps(seconds))


CASES: dict[str, Callable[[Path, Seconds], None]] = {
    "torch.save": loop,
    "Trainer": trainer,
    "accelerate": accelerate,
    "Lightning": lightning,
    "Ray Train": ray_train,
    "dcp.save": partial(dcp, beside=False),
    "dcp.async_save": partial(dcp, beside=True),
    "torchtitan, disabled": partial(torchtitan, mode="disabled"),
    "torchtitan, async": partial(torchtitan, mode="async"),
}


def main() -> None:
    """Print a table of the medians in seconds, for all cases or those that are named."""
    print("| trainer | own | with ckpipe | ratio |\n|---|---|---|---|")
    for name in sys.argv[1:] or CASES:
        seconds: Seconds = {"own": [], "ckpipe": []}
        with tempfile.TemporaryDirectory() as root:
            CASES[name](Path(root), seconds)
        own, ours = (statistics.median(seconds[way][1:]) for way in ("own", "ckpipe"))
        print(f"| {name} | {own:.2f} s | {ours:.2f} s | {own / ours:.1f} |", flush=True)


if __name__ == "__main__":
    main()
