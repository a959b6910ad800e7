"""Train a small model and save it, as a run that chaos.py kills at each of its file events.

The same command resumes. Beside the folder of the run, in ``<out>.told``, it keeps the newest step
of which it was told that its checkpoint is complete; a resume from an older one exits with an
error.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

STEPS, EVERY, SAMPLES, BATCH = 12, 3, 24, 4

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def report_file_calls() -> None:
    """Report calls to ckpt-chaos of which Python tells no path: beside descriptors, and pwritev.

    ckpt-chaos learns of file events by audit events with paths. A path beside a directory's
    descriptor is looked up in ``/proc/self/fd``. A torn write is the first half of its bytes.
    """
    from ckpt_chaos import inject

    def directory(number: int | None) -> str:
        return "" if number is None else os.readlink(f"/proc/self/fd/{number}")

    def beside(real: Callable[..., Any], names: str, which: int) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            number = options.get(names)
            path = os.path.join(directory(number), os.fspath(args[which]))
            # Python tells of a path without a descriptor itself, except of that of a link.
            known = number is None and real is not link
            if not known and inject._under(path) and (real is not open_ or args[1] & _WRITES):
                inject._event(f"os.{real.__name__}", path, tornable=False)
            return real(*args, **options)

        return call

    def write(file: int, buffers: Any, offset: int, flags: int = 0) -> int:
        path = directory(file)
        if inject._under(path) and inject._event("os.pwritev", path, tornable=True):
            data = b"".join(map(bytes, buffers))
            # The file may be open for direct writes, which take whole pages only.
            again = open_(f"/proc/self/fd/{file}", os.O_WRONLY)
            os.pwrite(again, data[: len(data) // 2], offset)
            os._exit(137)
        return pwritev(file, buffers, offset, flags)

    open_, link, pwritev = os.open, os.link, os.pwritev
    changes: Any = os
    for name in ("open", "mkdir", "unlink", "rmdir"):
        setattr(changes, name, beside(getattr(os, name), "dir_fd", 0))
    for name in ("link", "rename", "replace"):
        setattr(changes, name, beside(getattr(os, name), "dst_dir_fd", 1))
    changes.pwritev = write


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Make a model with dropout, and its optimizer, from a fixed seed."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 64), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(64, 1)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def samples(count: int = SAMPLES) -> torch.Tensor:
    """Return the data: a row is eight inputs and the value to learn."""
    return torch.linspace(-1, 1, count * 9).reshape(count, 9).sin()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
    """Take one step."""
    loss = torch.nn.functional.mse_loss(model(rows[:, :8]), rows[:, 8:])
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def loop_own(out: Path, told: Callable[[int], None]) -> Any:
    """Train with torch.save: a file for each save, and the newest file at the start."""
    model, optimizer = model_and_optimizer()
    begin = 0
    saved = sorted(out.glob("step-*.pt"), key=lambda path: int(path.stem[5:]))
    if saved:
        state = torch.load(saved[-1])
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["generator"])
        begin = state["step"] + 1
    resumed(out, begin)
    for step in range(begin, STEPS):
        rows = samples()[torch.arange(step * BATCH, (step + 1) * BATCH) % SAMPLES]
        train(model, optimizer, rows)
        if (step + 1) % EVERY == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "generator": torch.get_rng_state(),
                "step": step,
            }
            torch.save(state, out / f"step-{step}.pt")
            told(step)
    return model.state_dict()


def loop_ckpipe(out: Path, told: Callable[[int], None]) -> Any:
    """Train with a pipeline, in the middle of shuffled epochs."""
    import ckpipe

    model, optimizer = model_and_optimizer()
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(samples()), batch_size=BATCH, shuffle=True
    )
    data = ckpipe.Batches(loader)
    state = {"model": model, "optimizer": optimizer, "data": data}
    with ckpipe.SyncPipeline(out, keep_last=2) as pipeline:
        pipeline.on_complete(lambda event: told(event.info.step))
        restored = pipeline.load(state)
        step = restored.step + 1 if restored else 0
        resumed(out, step)
        while step < STEPS:
            for (rows,) in data:
                train(model, optimizer, rows)
                if (step + 1) % EVERY == 0:
                    pipeline.save(state, step=step)
                step += 1
                if step == STEPS:
                    break
    return model.state_dict()


def trainer(out: Path, told: Callable[[int], None], *, own: bool) -> Any:
    """Train with the Trainer of transformers; its own way resumes from its newest folder."""
    import transformers
    from transformers.trainer_utils import get_last_checkpoint

    from ckpipe.integrations.transformers import CkpipeTrainer

    class Tells(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            resumed(out, state.global_step)

        def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if own:
                told(state.global_step - 1)

    class Asynchronous(CkpipeTrainer):
        def _ckpipe_on_complete(self, event: Any) -> None:
            super()._ckpipe_on_complete(event)
            told(event.info.step - 1)

    transformers.set_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    ids = torch.arange(SAMPLES * 8).reshape(SAMPLES, 8) * 7 % 50
    arguments = transformers.TrainingArguments(
        str(out), max_steps=STEPS, save_steps=EVERY, save_total_limit=2, learning_rate=1e-2,
        per_device_train_batch_size=BATCH, use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    chosen = (transformers.Trainer if own else Asynchronous)(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": each, "labels": each} for each in ids],
        callbacks=[Tells()],
    )
    chosen.train(resume_from_checkpoint=get_last_checkpoint(str(out)) if own else None)
    return model.state_dict()


def accelerate(out: Path, told: Callable[[int], None], *, own: bool) -> Any:
    """Train a loop of accelerate; its own way resumes from the folder with the highest number."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration

    from ckpipe.integrations.accelerate import attach

    model, optimizer = model_and_optimizer()
    accelerator: Any = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=True, use_stateful_dataloader=True
        ),
        project_config=ProjectConfiguration(
            str(out), automatic_checkpoint_naming=True, total_limit=2
        ),
    )
    if not own:
        pipeline = attach(accelerator, out / "root")
        pipeline.on_complete(lambda event: told(event.info.step - 1))
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(samples()), batch_size=BATCH, shuffle=True
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    if not own:
        chosen = accelerator.load_state()
        step = chosen.step if chosen else 0
    elif folders := list(out.glob("checkpoints/checkpoint_*")):
        newest = max(int(folder.name.rpartition("_")[2]) for folder in folders)
        accelerator.load_state(str(out / f"checkpoints/checkpoint_{newest}"))
        # accelerate does not restore the number of the next folder.
        accelerator.project_configuration.iteration = newest + 1
        step = (newest + 1) * EVERY
    resumed(out, step)
    while step < STEPS:
        prepared: Any = loader
        prepared.set_epoch(step // len(loader))
        for (rows,) in loader:
            train(model, optimizer, rows)
            step += 1
            if step % EVERY == 0:
                accelerator.save_state(**({} if own else {"step": step}))
                if own:
                    told(step - 1)
            if step == STEPS:
                break
    accelerator.end_training()
    return accelerator.unwrap_model(model).state_dict()


def lightning(out: Path, told: Callable[[int], None], *, own: bool) -> Any:
    """Train with the Trainer of Lightning; its own way resumes from ``last``."""
    import lightning as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torchdata.stateful_dataloader import StatefulDataLoader

    from ckpipe.integrations.lightning import CkpipeCallback, CkpipeCheckpointIO

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.chosen = model_and_optimizer()

        def training_step(self, batch: Any, number: int) -> Any:
            return torch.nn.functional.mse_loss(self.net(batch[0][:, :8]), batch[0][:, 8:])

        def configure_optimizers(self) -> Any:
            return self.chosen

    class Tells(pl.Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            begun.append(trainer.global_step)
            resumed(out, trainer.global_step)

        def on_train_batch_start(self, trainer: Any, module: Any, *batch: Any) -> None:
            # Lightning calls the callbacks that save after all others.
            if own and trainer.global_step and trainer.global_step % EVERY == 0:
                told(trainer.global_step - 1)

    class Asynchronous(CkpipeCheckpointIO):
        def _on_complete(self, event: Any) -> None:
            super()._on_complete(event)
            told(event.info.step - 1)

    begun: list[int] = []
    io = None if own else Asynchronous(out / "root")
    module = Module()
    saves = ModelCheckpoint(out / "names", every_n_train_steps=EVERY, save_last=own)
    fit: Any = pl.Trainer(
        accelerator="cpu", max_steps=STEPS, default_root_dir=out, logger=False,
        enable_progress_bar=False, enable_model_summary=False, plugins=[io] if io else [],
        callbacks=[saves, Tells(), *([] if own else [CkpipeCallback()])],
    )  # fmt: skip
    # Saves lie inside epochs: a StatefulDataLoader in Lightning loses an epoch at its end.
    rows = torch.utils.data.TensorDataset(samples(SAMPLES + BATCH))
    loader = StatefulDataLoader(rows, batch_size=BATCH, shuffle=True)
    fit.fit(module, loader, ckpt_path=io.newest() if io else "last")
    if not begun:  # the run was over
        resumed(out, fit.global_step)
    return module.net.state_dict()


def resumed(out: Path, begin: int) -> None:
    """Say where the run begins; exit if a newer checkpoint was complete."""
    file = _told_file(out)
    newest = int(file.read_text()) if file.exists() else -1
    print(f"begins at step {begin}", flush=True)
    if begin <= newest:
        raise SystemExit(f"lost work: step {newest} was complete, and the run begins at {begin}")


def _told_file(out: Path) -> Path:
    return out.with_name(out.name + ".told")


def _tell(out: Path, step: int) -> None:
    file = _told_file(out)
    newest = int(file.read_text()) if file.exists() else -1
    part = file.with_suffix(".part")
    part.write_text(str(max(step, newest)))
    part.rename(file)


RUNS: dict[str, Callable[[Path, Callable[[int], None]], Any]] = {
    "loop-own": loop_own,
    "loop-ckpipe": loop_ckpipe,
    "trainer-own": partial(trainer, own=True),
    "trainer-ckpipe": partial(trainer, own=False),
    "accelerate-own": partial(accelerate, own=True),
    "accelerate-ckpipe": partial(accelerate, own=False),
    "lightning-own": partial(lightning, own=True),
    "lightning-ckpipe": partial(lightning, own=False),
}


def main() -> None:
    """Train as the command line says, and leave the final state in ``<out>/final.pt``."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("run", choices=RUNS)
    parser.add_argument("out", type=Path)
    chosen = parser.parse_args()
    if "CKPT_CHAOS_WATCH" in os.environ:
        report_file_calls()
    torch.set_num_threads(1)
    out = chosen.out
    out.mkdir(parents=True, exist_ok=True)
    final = RUNS[chosen.run](out, partial(_tell, out))
    part = out.with_name("final.part")
    torch.save(final, part)
    part.rename(out.with_name("final.pt"))


if __name__ == "__main__":
    main()
