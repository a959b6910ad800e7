"""Hugging Face ``Trainer`` with ckpipe: saves beside training, resumes inside an epoch to the bit.

Write ``CkpipeTrainer`` for ``Trainer``, or put the mixin before another trainer, such as that of
trl: ``class MyTrainer(CkpipeTrainerMixin, SFTTrainer): ...``. The methods that the mixin overrides
are those of transformers 5.24; most of them are private there, and another version without them is
refused.

Checkpoints lie below the root, and ``output_dir/checkpoint-N`` is a small folder with a pointer
(:mod:`ckpipe.integrations.pointers`) and ``trainer_state.json``. It appears when its checkpoint is
complete, and ``save_total_limit`` removes it as ever.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast_object_list
from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_pt_utils import nested_gather
from transformers.trainer_utils import has_length

from ckpipe import CheckpointInfo, KeepLast, Progress, RngState
from ckpipe.distributed import training_state
from ckpipe.errors import (
    CheckpointNotFound,
    CkpipeError,
    CorruptCheckpoint,
    StructureMismatch,
    UsageError,
)
from ckpipe.events import Completed
from ckpipe.integrations.held_state import (
    held,
    put_back,
    references,
    sampler_generators,
    samples,
    trained_buffers,
)
from ckpipe.integrations.pointers import read_pointer, set_aside, write_pointer_folder
from ckpipe.integrations.shared import (
    TrainerPipeline,
    check_names,
    checked,
    choose_path,
    is_newest,
    keep_names,
    naming,
    pointer_folders,
    tell_resumed,
)
from ckpipe.running.validation import absolute

logger = logging.getLogger("ckpipe")

check_names(
    "transformers",
    "5.24.0",
    {
        Trainer: "_load_from_checkpoint _load_optimizer_and_scheduler _load_scaler _load_rng_state "
        "_save_checkpoint _finalize_training _load_best_model _get_output_dir init_hf_repo "
        "create_accelerator_and_postprocess",
        Trainer._inner_training_loop: "_tr_loss _total_loss_scalar _globalstep_last_logged",
        Trainer._run_epoch: "epoch epochs_trained steps_trained_in_current_epoch train_dataloader",
        TrainerState: "load_from_json best_metric best_global_step best_model_checkpoint",
    },
)

STATE_NAME = "trainer_state.json"
BEST = "best_metric"
"""The metric that only those checkpoints have that were better than all before them."""
_ORDER = (
    "gradient_accumulation_steps steps_per_generation num_iterations num_generations seed "
    "data_seed train_sampling_strategy dataloader_drop_last"
)
"""Arguments that the order of the samples, or the position in it, depends on."""
_LACKING = {
    "held": "generated texts and counts of the trainer",
    "references": "reference models that callbacks move",
}
_ORDER_OF_ACCELERATE = ("use_seedable_sampler", "split_batches", "dispatch_batches")


class CkpipeTrainerMixin(Trainer if TYPE_CHECKING else object):  # type: ignore[misc]
    """Makes a trainer save and resume with ckpipe; to be put before a ``Trainer`` among the bases.

    ``train()`` resumes from the newest complete checkpoint, if there is one, and begins a run
    otherwise, as the setting ``resume`` says. ``train(resume_from_checkpoint=True)`` raises without
    a checkpoint, ``False`` begins anew. A path takes the checkpoint that the pointer there leads
    to, and a name ``checkpoint-500`` or an id that one. A folder that the trainer wrote without
    ckpipe is taken as ever if it is named, or if there is no checkpoint of ckpipe and it is the
    newest in ``output_dir``. Such folders are never removed.

    A save returns when the state is copied; leaving ``train()`` waits until all saves are durable.
    Each rank saves its own part, and ranks that resume agree on a checkpoint. Saved are model,
    optimizer, scheduler, scaler, random generators, the trainer's state with those of callbacks,
    the loss since the last log, and what trainers of trl hold: generated texts, counts, reference
    models that follow the trained one. Of a peft model the trainable tensors are saved, with their
    buffers. A save warns of other tensors of the trainer and its callbacks that have changed.
    ``save_model`` and ``push_to_hub`` at the end write what they always do.

    Inside an epoch a run resumes with the next batch. Exact to the bit are all steps if loading a
    sample draws no random number. Augmentations differ: those of the first batches after a resume,
    which are loaded before the generators go back, and with workers those of the rest of the epoch.
    An evaluation or save at the end of an epoch is not made up for, if the checkpoint to resume
    from lies at its last step.

    Args:
        args: Arguments of the trainer.
        checkpoints: The root of the checkpoints, as a path or URL; by default the folder ``ckpipe``
            in ``output_dir``. Each trial of a search has a root of its own below it.
        ckpipe_settings: Fields of :class:`~ckpipe.Settings`. ``save_every_seconds``,
            ``save_every_steps`` and ``preemption`` save besides ``save_steps``; a signal also ends
            the training. Without ``retention`` or ``keep_last`` here, ``save_total_limit`` decides
            which checkpoints stay; the best counts among them. With these and
            ``load_best_model_at_end`` the best stays besides.
        kwargs: Arguments of the trainer.

    Raises:
        UsageError: If checkpoints are to be pushed to the Hub, which takes the trainer's own files;
            or if ``initial`` is set, since ``from_pretrained`` gives a model its first weights; or
            if DeepSpeed holds the state; or if ``enable_jit_checkpoint`` is set.
        SettingsError: If a setting is unknown or out of range.
    """

    def __init__(
        self,
        *args: Any,
        checkpoints: str | os.PathLike[str] | None = None,
        ckpipe_settings: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        root = os.fspath(checkpoints or os.path.join(self.args.output_dir, "ckpipe"))
        self._ckpipe_root = absolute(root)
        if self.is_deepspeed_enabled:
            raise UsageError(
                "DeepSpeed keeps model and optimizer in a form of its own",
                hint="Use the trainer without ckpipe, or without DeepSpeed",
            )
        settings = checked(
            "a Trainer", ckpipe_settings or {}, "initial", hint="Call from_pretrained instead"
        )
        limit, best = self.args.save_total_limit or 0, self.args.load_best_model_at_end
        self._ckpipe_limit, self._ckpipe_over = limit, False
        if settings.retention.rule is None and limit > 0:
            settings = settings.override(retention=KeepLast(limit, including=BEST))
        elif settings.retention.rule is not None and best and settings.keep_last != 0:
            rules, kept = settings.retention.rules, KeepLast(1, including=BEST)
            settings = settings.override(retention=kept if rules is None else rules | kept)
        self._ckpipe_settings = settings
        self._ckpipe_pipeline: Any = None
        self._ckpipe_chosen: CheckpointInfo | None = None
        self._ckpipe_line = ""
        self._ckpipe_rng = RngState(apply="later")
        self._ckpipe_progress = Progress()
        self._ckpipe_samplers: list[torch.Generator] = []
        self._ckpipe_samples, self._ckpipe_told = dict[str, str](), set[str]()
        self.add_callback(_Schedule(self))

    def create_accelerator_and_postprocess(self) -> None:
        if getattr(self.args, "enable_jit_checkpoint", False):  # before it takes the signal
            raise UsageError(
                "enable_jit_checkpoint saves in the middle of a step: that is not resumed exactly",
                hint='Set ckpipe_settings={"preemption": True}, which saves after the step',
            )
        super().create_accelerator_and_postprocess()

    def init_hf_repo(self, token: str | None = None) -> None:
        if self.args.hub_strategy != "end":
            raise UsageError(
                "Checkpoints of ckpipe are not pushed to the Hub",
                hint='Set hub_strategy="end", which pushes the model at the end of the training',
            )
        super().init_hf_repo(token)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train as the trainer does; return once all checkpoints are durable.

        Args:
            resume_from_checkpoint: None resumes as the setting ``resume`` says; True must resume,
                False begins anew. A path, a name ``checkpoint-N`` or an id takes that checkpoint.
            trial: The trial of a search, which begins anew.
            ignore_keys_for_eval: As for the trainer.

        Raises:
            CheckpointNotFound: If the checkpoint, or one to resume from, is absent or incomplete.
            StructureMismatch: If the checkpoint was not saved by such a trainer.
            CkpipeError: Any error of a save or load.
        """
        root, settings = self._ckpipe_root, self._ckpipe_settings
        self._ckpipe_run_dir = run = os.path.abspath(self._get_output_dir(trial))
        if trial is not None:
            root = f"{root}/{os.path.basename(run)}"
        if isinstance(resume_from_checkpoint, bool) or trial is not None:
            settings = settings.override(resume="must" if resume_from_checkpoint else "never")
        (last,) = broadcast_object_list([_last_of(run, root)])
        own = last[0] if last and last[1] and settings.resume != "never" else None
        if own is not None:  # so there is one to resume from in any case
            settings = settings.override(resume="must")
        if self.args.dataloader_persistent_workers and self.args.should_save:
            logger.warning(
                "With dataloader_persistent_workers=True a resumed run draws other random numbers, "
                "as for dropout, in later epochs and evaluations. With False it resumes to the bit"
            )
        hints = "ckpipe_settings", "train(resume_from_checkpoint='checkpoint-N')"
        with TrainerPipeline(root, *hints, settings=settings) as pipeline:
            self._ckpipe_pipeline, self._ckpipe_over = pipeline, False
            keep_names(pipeline, self._ckpipe_on_complete, self._ckpipe_names)
            try:
                folder = self._ckpipe_choose(resume_from_checkpoint, own)
                if folder is None and last and settings.resume != "never" and self.args.should_save:
                    logger.warning(
                        "training starts fresh beside %s, whose checkpoint is not at this root",
                        last[0],
                    )
                return super().train(folder, trial, ignore_keys_for_eval)
            finally:
                self._ckpipe_chosen = None

    # Names

    def _ckpipe_folder(self, step: int) -> str:
        return os.path.join(self._ckpipe_run_dir, f"checkpoint-{step}")

    def _ckpipe_write_name(self, info: CheckpointInfo, text: str | None = None) -> None:
        text = text or (info.metadata or {}).get("trainer_state")
        files = {} if text is None else {STATE_NAME: text}
        folder, url = self._ckpipe_folder(info.step), self._ckpipe_pipeline.url
        with naming(folder, f"{info.id} is complete at {url}"):
            write_pointer_folder(folder, url, info, files)

    def _ckpipe_name_again(self, best: str) -> None:
        try:
            self._ckpipe_write_name(self._ckpipe_pipeline.choose(_step_of(best)))
        except CheckpointNotFound:
            return
        except CkpipeError as error:  # the run does not need this name
            logger.warning("%s", error)

    def _ckpipe_names(self, line: str | None = None) -> list[Path]:
        return pointer_folders(self._ckpipe_run_dir, self._ckpipe_pipeline.url, line)

    def _ckpipe_on_complete(self, event: Completed) -> None:
        self._ckpipe_line = event.info.line or ""
        if is_newest(self._ckpipe_folder(event.step), self._ckpipe_pipeline.url, event.info):
            self._ckpipe_write_name(event.info)
        self._ckpipe_limit_names()

    def _ckpipe_limit_names(self) -> None:
        """Remove the names that the trainer would; saves may become complete in any order."""
        limit, best = self._ckpipe_limit, self.state.best_model_checkpoint
        names = self._ckpipe_names(self._ckpipe_line)
        if limit <= 0 or not names:
            return
        stay = {names[-1], Path(best or "")} & {*names}
        if self._ckpipe_over and limit == 1 and best is not None:
            stay &= {Path(best)}
        old = [each for each in names if each not in stay]
        for each in old[: max(0, len(names) - max(limit, len(stay)))]:
            shutil.rmtree(each, ignore_errors=True)

    # Resume

    def _ckpipe_choose(self, resume: str | bool | None, own: str | None) -> str | None:
        """Choose the checkpoint, and return the folder that the trainer reads its state from.

        Args:
            resume: As for :meth:`train`.
            own: The folder without a pointer to take if there is no checkpoint.
        """
        pipeline = self._ckpipe_pipeline
        if isinstance(resume, str):
            if os.path.isdir(resume) and read_pointer(resume) is None:
                return resume
            chosen = choose_path(pipeline, resume, pipeline.pointer)
        else:
            try:
                chosen = pipeline.choose()
            except CheckpointNotFound:
                if own is None:
                    raise
                if self.args.should_save:
                    logger.info("resuming from %s, which was saved without ckpipe", own)
                return own
        if chosen is None:
            return None
        if chosen.metadata is None:
            raise CorruptCheckpoint(
                f"The index of {chosen.id} cannot be read",
                step=chosen.step,
                hint="Name an older one: train(resume_from_checkpoint='checkpoint-N')",
            )
        if "trainer_state" not in chosen.metadata:
            raise StructureMismatch(
                f"{chosen.id} was not saved by a trainer of transformers",
                step=chosen.step,
                hint="Load it into the model before: ckpipe.load(root, {'training': …})",
            )
        self._ckpipe_line = chosen.line or ""
        self._ckpipe_chosen, state = chosen, json.loads(chosen.metadata["trainer_state"])
        if best := state["best_model_checkpoint"]:
            # It may be of another machine. Without the folder the trainer would forget the best.
            state["best_model_checkpoint"] = path = self._ckpipe_folder(_step_of(best))
            if not os.path.isdir(path):
                self._ckpipe_name_again(best)
        folder = self._ckpipe_folder(chosen.step)
        with (
            self.args.main_process_first(),
            naming(folder, f"{chosen.id} is complete at {pipeline.url}"),
        ):
            set_aside(folder)
            self._ckpipe_write_name(chosen, json.dumps(state, indent=2, sort_keys=True) + "\n")
        return folder

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._ckpipe_chosen is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._ckpipe_chosen is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        self._ckpipe_progress = Progress()
        state, lacking = self._ckpipe_state(), self._ckpipe_lacking(self._ckpipe_chosen)
        # The loss and the generators of an epoch's beginning belong to a rank of the same world.
        other = self._ckpipe_chosen.world_size != self.args.world_size
        exclude = {"progress", "held"} if other else set()
        chosen, pipeline = self._ckpipe_chosen, self._ckpipe_pipeline
        if "held" in state:
            state["held"] = Progress()
        self._ckpipe_tell_lacking(chosen.step, lacking)
        include, exclude = self._ckpipe_include(lacking), exclude.union(lacking) & {*state}
        pipeline.load(state, chosen, include=include, exclude=[*exclude] or None)
        same_order = self._ckpipe_compare_order(chosen)
        if "held" in state:
            put_back(self, state["held"].state_dict(), buffers=same_order)
        over = self.state.global_step >= self.state.max_steps
        exact = "generators" in vars(self._ckpipe_progress) and not self.args.ignore_data_skip
        exact = exact and same_order and self._ckpipe_knows_order()
        tell_resumed(
            chosen.step, f"{pipeline.url}/{chosen.id}", self.args.process_index,
            f"the data go on with those of step {chosen.step + 1}" if exact and not over else "",
        )  # fmt: skip

    def _ckpipe_lacking(self, chosen: CheckpointInfo) -> list[str]:
        """Return what an older ckpipe, which noted no order, has not saved."""
        if "order" in (chosen.metadata or {}):
            return []
        moving = {"held": held(self), "references": references(self)}
        lacking = [name for name, each in moving.items() if each]
        if hasattr(self.model, "peft_config"):
            lacking += [f"training.model.{name}" for name in trained_buffers(self.model)]
        return lacking

    def _ckpipe_tell_lacking(self, step: int, lacking: list[str]) -> None:
        if lacking and self.args.should_save:
            logger.warning(
                "Step %d was saved by an older ckpipe, without what now begins anew: %s",
                step,
                ", ".join(sorted({_LACKING.get(name, _glob(name)) for name in lacking})),
            )

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._ckpipe_chosen is None:
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._ckpipe_chosen is None:
            super()._load_rng_state(checkpoint)
            return
        self._ckpipe_rng.apply()
        if "loss" in vars(progress := self._ckpipe_progress):
            loss: Any = progress.loss.to(self.args.device)
            self._tr_loss, self._globalstep_last_logged = loss, progress.logged
            # The mean loss of this call counts its own steps only.
            self._total_loss_scalar -= nested_gather(loss, self.args.parallel_mode).mean().item()

    def _run_epoch(self, **kwargs: Any) -> None:
        chosen, progress = self._ckpipe_chosen, self._ckpipe_progress
        if self._ckpipe_ended():
            self.control.should_training_stop = True
            return
        streamed = not has_length(kwargs["train_dataloader"]) and not self.args.ignore_data_skip
        if chosen is not None and streamed and kwargs["epochs_trained"] == 0:
            # The trainer takes all steps for one pass over a stream, and would skip its batches.
            saved = json.loads((chosen.metadata or {})["trainer_state"])
            passed = int(saved["epoch"])
            if kwargs["epoch"] < passed:
                return
            batches = saved["max_steps"] * self.args.gradient_accumulation_steps
            kwargs["epochs_trained"] = passed
            kwargs["steps_trained_in_current_epoch"] = round((saved["epoch"] - passed) * batches)
        epoch, skipped = kwargs["epoch"], kwargs["steps_trained_in_current_epoch"]
        samplers = self._ckpipe_samplers = sampler_generators(kwargs["train_dataloader"])
        if chosen is not None and epoch == kwargs["epochs_trained"]:
            if not skipped:
                self._ckpipe_rng.apply()
                orders = vars(progress).get("next_orders", [])
            else:
                if "generators" in vars(progress):  # the order may be drawn when the epoch begins
                    RngState().load_state_dict(progress.generators)
                orders = vars(progress).get("orders", [])
            for sampler, order in zip(samplers, orders, strict=False):
                sampler.set_state(order)
        progress.generators = RngState().state_dict()
        progress.orders = [each.get_state() for each in samplers]
        super()._run_epoch(**kwargs)

    def _ckpipe_ended(self) -> bool:
        """Tell whether the run had ended when its checkpoint was saved."""
        stopped = self._ckpipe_chosen is not None and any(
            isinstance(each, EarlyStoppingCallback)
            and each.early_stopping_patience_counter >= each.early_stopping_patience
            for each in self.callback_handler.callbacks
        )
        return stopped or self.state.global_step >= self.state.max_steps

    # Save

    def _ckpipe_order(self) -> dict[str, Any]:
        order = {name: getattr(self.args, name, None) for name in _ORDER.split()}
        order["per_device_train_batch_size"] = self._train_batch_size // max(1, self.args.n_gpu)
        order["processes"] = self.args.world_size
        config = self.args.accelerator_config
        order |= {name: getattr(config, name, None) for name in _ORDER_OF_ACCELERATE}
        if isinstance(self.train_dataset, IterableDataset):  # its parts take turns
            order["dataloader_num_workers"] = self.args.dataloader_num_workers
        order["samples"] = len(self.train_dataset) if has_length(self.train_dataset) else None
        return order

    def _ckpipe_compare_order(self, chosen: CheckpointInfo) -> bool:
        """Tell whether the checkpoint's data have the order of this run; warn if they have not."""
        before, now = (chosen.metadata or {}).get("order", {}), self._ckpipe_order()
        changed = [each for each in now if before and before.get(each) != now[each]]
        if changed and self.args.should_save:
            logger.warning(
                "The data do not go on where step %d was saved, so samples may be left out or come "
                "twice: %s",
                chosen.step,
                ", ".join(f"{each} was {before.get(each)} and is {now[each]}" for each in changed),
            )
        return bool(before) and not changed

    def _ckpipe_knows_order(self) -> bool:
        """Tell whether the samples come in an order that is restored, and not of the user's own."""
        methods = [type(self).get_train_dataloader, type(self)._get_train_sampler]
        known = all(each.__module__.startswith(("transformers.", "trl.")) for each in methods)
        return known and not isinstance(self.train_dataset, IterableDataset)

    def _ckpipe_state(self) -> dict[str, Any]:
        if self.args.save_only_model:
            return {"training": training_state(self.model_wrapped)}
        state = {
            "training": training_state(self.model_wrapped, self.optimizer),
            "scheduler": self.lr_scheduler,
            "rng": self._ckpipe_rng,
            "progress": self._ckpipe_progress,
            "scaler": getattr(self.accelerator, "scaler", None),
            "held": Progress(**moving) if (moving := held(self)) else None,
            "references": [training_state(each) for each in references(self)] or None,
        }
        return {name: value for name, value in state.items() if value is not None}

    def _ckpipe_include(self, lacking: Sequence[str] = ()) -> list[str] | None:
        """Return globs of what is saved of a peft model, but not these; None for all of others."""
        if not hasattr(self.model, "peft_config"):
            return None
        trained = [name for name, each in self.model.named_parameters() if each.requires_grad]
        trained += trained_buffers(self.model)
        names = {f"training.model.{name}" for name in trained}
        others = ["training.optimizer", "training.versions", *self._ckpipe_state()]
        others = [each for each in others if each != "training" and each not in lacking]
        return [*sorted({_glob(name) for name in names.difference(lacking)}), *others]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        state, step, metrics = self.state, self.state.global_step, {}
        if state.best_global_step == step:
            metrics[BEST] = float(state.best_metric)
        if state.best_global_step:
            folder = self._ckpipe_folder(state.best_global_step)
            if state.best_global_step == step or os.path.isdir(folder):
                state.best_model_checkpoint = folder
        if (name := self.args.metric_for_best_model) is not None:
            name = name if name.startswith("eval_") else f"eval_{name}"
            here = (each for each in reversed(state.log_history) if each["step"] == step)
            if (value := next((each[name] for each in here if name in each), None)) is not None:
                metrics[name] = float(value)
        exportable = [*self.callback_handler.callbacks, self.control]
        exportable = [each for each in exportable if isinstance(each, ExportableState)]
        state.stateful_callbacks = TrainerState(stateful_callbacks=exportable).stateful_callbacks
        progress = self._ckpipe_progress
        progress.loss, progress.logged = self._tr_loss, self._globalstep_last_logged
        progress.next_orders = [each.get_state() for each in self._ckpipe_samplers]
        # One rank's is enough, and a run with many logs has megabytes.
        text = json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True) + "\n"
        path = self._ckpipe_folder(step)
        if self.args.should_save:
            with naming(path, "Nothing was saved"):
                set_aside(path)
            self._ckpipe_tell_lost()
        first: dict[str, Any] = {"name": os.path.basename(path), "path": path}
        first |= {"trainer_state": text, "order": self._ckpipe_order()}
        self._ckpipe_pipeline.save(
            self._ckpipe_state(),
            step,
            metrics=metrics,
            metadata=first if self.args.process_index == 0 else None,
            include=self._ckpipe_include(),
        )

    def _ckpipe_tell_lost(self) -> None:
        """Warn of tensors beside the known parts that have changed since the training began."""
        now = samples(self)
        lost = [name for name in now if self._ckpipe_samples.get(name) != now[name]]
        if hasattr(self, "rollout_worker"):  # of trl's asynchronous trainers
            lost.append(f"{type(self).__qualname__}.rollout_worker")
        if lost := sorted({*lost} - self._ckpipe_told):
            logger.warning(
                "No checkpoint has %s, which change in training: they begin anew after a resume. "
                "Keep them in buffers of the model, or save them yourself",
                ", ".join(lost),
            )
            self._ckpipe_told.update(lost)

    # End

    def _finalize_training(self, *args: Any) -> Any:
        best, limit = self.state.best_model_checkpoint, self.args.save_total_limit
        if self.args.should_save and best is not None and not os.path.isdir(best):
            self._ckpipe_name_again(best)
        self.args.save_total_limit = None  # the trainer would remove folders without a pointer too
        try:
            return super()._finalize_training(*args)
        finally:
            self.args.save_total_limit, self._ckpipe_over = limit, True
            if self.args.should_save:
                self._ckpipe_limit_names()

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if os.path.isdir(best) and read_pointer(best) is None:
            super()._load_best_model()
            return
        state, step = {"training": training_state(self.model_wrapped)}, _step_of(best)
        try:
            chosen = self._ckpipe_pipeline.choose(step)
            adapters = self._ckpipe_include(self._ckpipe_lacking(chosen)) or ["training.model"]
            include = [each for each in adapters if each.startswith("training.model")]
            self._ckpipe_pipeline.load(state, chosen, include=include)
        except CheckpointNotFound:  # the trainer warns too
            logger.warning(
                "The best model, of step %d, is gone: the model stays the last one", step
            )
            return
        if self.args.process_index == 0:
            logger.info("loaded the best model, of step %d", step)


def _last_of(*folders: str) -> tuple[str, bool] | None:
    """Return the last checkpoint-N of the first folder with one, and whether it has no pointer.

    Without ``trainer_state.json`` or a pointer it is none, as after a kill inside a save.
    """
    for folder in folders:
        found = {}
        for each in Path(folder).glob("checkpoint-*"):
            pointer = read_pointer(each) if each.is_dir() else None
            is_one = pointer is not None or Path(each, STATE_NAME).is_file()
            if is_one and re.fullmatch(r".*-\d+", each.name):
                found[_step_of(each.name)] = str(each), pointer is None
        if found:
            return found[max(found)]
    return None


def _glob(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _step_of(folder: str) -> int:
    return int(folder.rpartition("-")[2])


class _Schedule(TrainerCallback):
    """Saves when the settings of ckpipe say so, and ends the training after a signal."""

    def __init__(self, trainer: CkpipeTrainerMixin) -> None:
        self._trainer = trainer

    def __deepcopy__(self, memo: object) -> _Schedule:
        return _Schedule(self._trainer)  # callbacks are copied without the trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._ckpipe_samples = samples(self._trainer)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pipeline = self._trainer._ckpipe_pipeline
        chosen = pipeline.settings
        if chosen.preemption.enabled or chosen.save_every_steps or chosen.save_every_seconds:
            control.should_save |= pipeline.should_save(state.global_step)
            control.should_training_stop |= pipeline.preempted


class CkpipeTrainer(CkpipeTrainerMixin, Trainer):
    """``transformers.Trainer`` that saves and resumes with ckpipe; see the mixin."""
