"""accelerate with ckpipe: ``save_state`` copies and returns, ``load_state`` resumes to the bit.

``attach(accelerator, url)`` replaces ``save_state`` and ``load_state`` of one ``Accelerator``. Its
hooks, its registered objects, its automatic names and ``total_limit`` stay. Tried with accelerate
1.15, of which it uses some private names: another version without them is refused.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SeedableRandomSampler
from accelerate.state import GradientState
from accelerate.utils import DistributedType, broadcast_object_list
from torch.utils.data import DistributedSampler, IterableDataset, SequentialSampler

from ckpipe import CheckpointInfo, Progress, RngState, SyncPipeline
from ckpipe.distributed import training_state
from ckpipe.errors import UsageError
from ckpipe.events import Completed
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
from ckpipe.state.kinds import is_stateful

logger = logging.getLogger("ckpipe")

check_names(
    "accelerate",
    "1.15.0",
    {
        Accelerator.__init__: "_models _optimizers _schedulers _dataloaders _custom_objects "
        "_save_model_state_pre_hook _load_model_state_pre_hook project_configuration scaler step",
        Accelerator: "sync_gradients save_iteration get_state_dict",
        GradientState: "active_dataloader in_dataloader end_of_dataloader",
        DataLoaderShard: "_update_state_dict get_sampler set_epoch",
        DataLoaderDispatcher: "_update_state_dict get_sampler set_epoch",
    },
)


def attach(accelerator: Accelerator, url: str | os.PathLike[str], **settings: Any) -> SyncPipeline:
    """Let an accelerator save and load with ckpipe, and open the pipeline that does it.

    Call it after ``Accelerator(...)``, on all ranks. From then on:

    * ``save_state(output_dir=None, *, step=None)`` returns when the state is copied: models, the
      bare optimizers, schedulers, scaler, registered objects, ``step``, ``iteration``, random
      generators, and position, sampler and epoch of the prepared loaders. ``output_dir`` becomes a
      folder with a pointer (:mod:`ckpipe.integrations.pointers`) once the checkpoint is complete;
      it may be absent without automatic names too. ``step`` is by default one more than the last.
    * ``load_state()`` resumes from the newest complete checkpoint, the same on all ranks, and
      returns its :class:`~ckpipe.CheckpointInfo`; or None if the run begins, as the setting
      ``resume`` says. ``load_state(output_dir)`` takes the checkpoint that the pointer in this
      folder leads to. Without a pointer it takes the newest that was saved under this path, or
      under a name without a folder. Files that accelerate wrote there without ckpipe are loaded as
      ever; then the result is None. A run that saves without a load, though there is a complete
      checkpoint, warns; with ``resume="must"`` it raises.
    * Inside an epoch the generators go back when the loader in which the checkpoint was saved has
      fetched its first batch after a load, or else before the first forward pass in training: a
      restore in ``load_state``, as accelerate's own, is changed again by the loader. To the bit
      resumes a loop with ``use_seedable_sampler=True`` whose loaders are stateful, or which skips
      the consumed batches with ``skip_first_batches``.
    * ``end_training()`` waits until all saves are durable and closes the pipeline.

    Gradients are not saved: with accumulation save after a step of the optimizer; any other save
    warns.
    Hooks are called as ever. A hook that takes the weights of a model out of the list keeps the
    model out of the checkpoint; other changes of weights have no effect. With ``total_limit`` the
    newest checkpoints stay, unless the settings have ``keep_last`` or ``retention``; folders
    without a pointer stay in any case.

    Args:
        accelerator: The accelerator.
        url: The root of the checkpoints.
        settings: Fields of :class:`~ckpipe.Settings`.

    Returns:
        The open pipeline.

    Raises:
        UsageError: If DeepSpeed or Megatron holds the state, or ``initial`` is set. A save raises
            it if a stateful loader has persistent workers over a dataset with a position of its
            own and without ``set_epoch``.
        CkpipeError: Any error of opening a pipeline.
    """
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise UsageError(
            f"{accelerator.distributed_type} keeps model and optimizer in a form of its own",
            hint="Save with its own functions, without attach",
        )
    chosen = checked("accelerate", settings, "initial", hint="Load the weights yourself")
    limit = accelerator.project_configuration.total_limit
    if limit is not None and chosen.retention.rule is None:
        chosen = chosen.override(keep_last=limit)
    pipeline = TrainerPipeline(
        url, "the arguments of attach()", "load_state(id)", settings=chosen
    ).open()
    attached = _Attached(accelerator, pipeline, limit)
    keep_names(pipeline, attached.on_complete, attached.names)
    accelerator.save_state, accelerator.load_state = attached.save_state, attached.load_state
    end_training = accelerator.end_training

    def end() -> None:
        try:
            pipeline.close()
        finally:
            end_training()

    accelerator.end_training = end
    return pipeline


class _Attached:
    """The methods of an accelerator that save and load with a pipeline."""

    def __init__(self, accelerator: Any, pipeline: TrainerPipeline, limit: int | None) -> None:
        self._accelerator, self._pipeline, self._limit = accelerator, pipeline, limit
        self._load_own, self._rng = accelerator.load_state, RngState(apply="later")
        self._begun, self._told, self._folders = False, False, set[Path]()

    def names(self) -> list[Path]:
        return [n for each in self._folders for n in pointer_folders(each, self._pipeline.url)]

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        step: int | None = None,
    ) -> Any:
        accelerator = self._accelerator
        if not self._begun:
            self._check_begin()
        if not self._told and any(each.persistent_workers for each in accelerator._dataloaders):
            self._told = True
            logger.warning(
                "A loader has persistent_workers=True: a resumed run draws other random numbers in "
                "later epochs and evaluations. With False it resumes to the bit"
            )
        configuration = accelerator.project_configuration
        if configuration.automatic_checkpoint_naming:
            name = f"checkpoint_{accelerator.save_iteration}"
            output_dir = os.path.join(accelerator.project_dir, "checkpoints", name)
        metadata = None
        if output_dir is not None:
            output_dir = os.path.abspath(os.path.expanduser(output_dir))
            metadata = {"name": os.path.basename(output_dir), "path": output_dir}
            if accelerator.is_main_process:
                with naming(output_dir, "Nothing was saved"):
                    set_aside(output_dir)
        exclude = self._call_save_hooks(output_dir)
        if not accelerator.sync_gradients:
            logger.warning(
                "This save lies between two steps of the optimizer, and the gradients accumulated "
                "until now are in no checkpoint: save when accelerator.sync_gradients is true"
            )
        state = self._state(configuration.iteration + 1)
        handle = self._pipeline.save(state, step, metadata=metadata, exclude=exclude)
        configuration.iteration += 1
        return handle

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> CheckpointInfo | None:
        accelerator = self._accelerator
        if input_dir is not None:
            input_dir = os.path.expanduser(input_dir)
            if broadcast_object_list([_is_own(input_dir)])[0]:
                self._load_own(input_dir, load_kwargs, **load_model_func_kwargs)
                self._begun = True
                return None
        if given := [*(load_kwargs or {}), *load_model_func_kwargs]:
            raise UsageError(
                f"{', '.join(given)} has no effect on a checkpoint of ckpipe",
                hint="Call load_state without it",
            )
        if input_dir is None:
            chosen = self._pipeline.choose()
            if chosen is None:
                self._tell_of_own()
                for each in accelerator._dataloaders:
                    _order_anew(each)
                self._begun = True
                return None
        else:
            chosen = choose_path(self._pipeline, input_dir, self._pipeline.pointer)
        exclude = self._call_load_hooks(input_dir, chosen)
        state = self._state(0)
        self._pipeline.load(state, chosen, exclude=exclude)
        self._begun = True
        counters = state["counters"]
        accelerator.step = counters.step
        accelerator.project_configuration.iteration = counters.iteration
        if counters.inside:
            self._restore_generators(counters.loader)
        else:  # the next epoch begins with them
            self._rng.apply()
        self._tell_resumed(chosen, counters.accumulated, state["loaders"])
        return chosen

    def _call_save_hooks(self, output_dir: str | None) -> list[str] | None:
        """Return the globs of the models whose weights the hooks of accelerate have taken out."""
        accelerator = self._accelerator
        hooks = accelerator._save_model_state_pre_hook.values()
        if not hooks:
            return None
        if output_dir is None:
            raise UsageError(
                "Hooks of save_state write into a folder, and none is given",
                hint="Call save_state(output_dir), or use automatic names",
            )
        with naming(output_dir, "Nothing was saved"):
            os.makedirs(output_dir, exist_ok=True)
        models = accelerator._models
        if accelerator.distributed_type == DistributedType.FSDP:
            models = []  # accelerate gives hooks no weights then
        whole = [accelerator.get_state_dict(each, unwrap=False) for each in models]
        weights = list(whole)
        for hook in hooks:
            hook(accelerator._models, weights, output_dir)
        return self._globs_of_absent(whole, weights)

    def _call_load_hooks(self, input_dir: str | None, chosen: CheckpointInfo) -> list[str] | None:
        """Return the globs of the models that the hooks of accelerate have taken out."""
        models = list(self._accelerator._models)
        if hooks := self._accelerator._load_model_state_pre_hook.values():
            folder = input_dir
            if folder is None or not os.path.isdir(folder):
                folder = (chosen.metadata or {}).get("path")
            if folder is None or not os.path.isdir(folder):
                raise UsageError(
                    f"Hooks of load_state read from the folder of a checkpoint, and {chosen.id} "
                    f"has none here: {folder}",
                    step=chosen.step,
                    hint="Save with save_state(output_dir), and load with load_state(output_dir)",
                )
            for hook in hooks:
                hook(models, folder)
        return self._globs_of_absent(self._accelerator._models, models)

    def _globs_of_absent(self, before: list[Any], after: list[Any]) -> list[str] | None:
        kept = [id(each) for each in after]
        absent = [n for n, each in enumerate(before) if id(each) not in kept]
        if absent and len(self._accelerator._models) == 1:
            return ["training.model"]
        return [f"training.model.model{n}.*" for n in absent] or None

    def _check_begin(self) -> None:
        """Warn if a run saves that has loaded nothing, though there is a checkpoint."""
        chosen, pipeline = self._pipeline.choose(), self._pipeline
        if chosen is not None:
            said = f"The run begins anew, though {pipeline.url} has {chosen.id}"
            hint = "Call load_state() before training"
            if pipeline.settings.resume == "must":
                raise UsageError(said, hint=hint)
            if self._accelerator.is_main_process:
                logger.warning("%s. %s", said, hint)
        self._begun = True

    def _tell_resumed(
        self, chosen: CheckpointInfo, accumulated: int, loaders: list[_Loader]
    ) -> None:
        """Log the line of a resume, and warn if the data go on in another way than they were."""
        accelerator = self._accelerator
        compared = [("batch size of a loader", each.before, each.batch) for each in loaders]
        steps = accelerator.gradient_accumulation_steps
        compared.append(("gradient_accumulation_steps", accumulated, steps))
        for name, before, now in compared:
            if before != now and accelerator.is_main_process:
                logger.warning(
                    "The %s was %s at step %d and is %s: samples may be left out or come twice",
                    name, before, chosen.step, now,
                )  # fmt: skip
        if accelerator.is_main_process and any(each.another_order for each in loaders):
            logger.warning(
                "The epoch of a loader goes on at step %d in another order: samples may be left "
                "out or come twice. Its order is kept with use_seedable_sampler=True, and with "
                "workers if load_state() is called before the first epoch of a run",
                chosen.step,
            )
        goes_on = loaders and all(each.goes_on for each in loaders)
        epochs = ", ".join(str(each.loader.iteration) for each in loaders)
        tell_resumed(
            chosen.step, f"{self._pipeline.url}/{chosen.id}", accelerator.process_index,
            f"the data go on in epoch {epochs}, where the loader was" if goes_on else "",
        )  # fmt: skip

    def _tell_of_own(self) -> None:
        """Warn if a run begins beside checkpoints that accelerate saved without ckpipe."""
        accelerator = self._accelerator
        if (
            self._pipeline.settings.resume == "never"
            or not accelerator.is_main_process
            or not accelerator.project_configuration.automatic_checkpoint_naming
        ):
            return
        folder = Path(accelerator.project_dir, "checkpoints")
        own = sorted(str(each) for each in folder.glob("checkpoint_*") if _is_own(each))
        if own:
            logger.warning(
                "training starts fresh beside checkpoints that accelerate saved without ckpipe: "
                "%s. load_state(folder) loads one of them",
                ", ".join(own),
            )

    def on_complete(self, event: Completed) -> None:
        folder = (event.info.metadata or {}).get("path")
        if folder is None:
            return
        self._folders.add(Path(folder).parent)
        if is_newest(folder, self._pipeline.url, event.info):
            write_pointer_folder(folder, self._pipeline.url, event.info, {})
        if self._limit and self._accelerator.project_configuration.automatic_checkpoint_naming:
            names = pointer_folders(Path(folder).parent, self._pipeline.url, event.info.line or "")
            for each in names[: -self._limit]:
                shutil.rmtree(each, ignore_errors=True)

    def _state(self, iteration: int) -> dict[str, Any]:
        accelerator, models = self._accelerator, self._accelerator._models
        gradients = accelerator.gradient_state
        inside = gradients.in_dataloader and not gradients.end_of_dataloader
        active = gradients.active_dataloader
        loader = next((n for n, each in enumerate(accelerator._dataloaders) if each is active), -1)
        state: dict[str, Any] = {
            "schedulers": list(accelerator._schedulers),
            "loaders": [_Loader(each, gradients) for each in accelerator._dataloaders],
            "objects": list(accelerator._custom_objects),
            "counters": Progress(
                step=accelerator.step,
                iteration=iteration,
                inside=inside,
                loader=loader,
                accumulated=accelerator.gradient_accumulation_steps,
            ),
            "rng": self._rng,
        }
        if models:
            several = {f"model{n}": each for n, each in enumerate(models)}
            model = several if len(models) > 1 else models[0]
            state["training"] = training_state(model, *accelerator._optimizers)
        if accelerator.scaler is not None:
            state["scaler"] = accelerator.scaler
        return state

    def _restore_generators(self, loader: int) -> None:
        """Put them back once this loader has a first batch, or before the first forward pass.

        Other loaders, such as those of an evaluation before it, draw numbers that do not count.
        """
        handles: list[Any] = []

        def restore(module: Any = None, *_: Any) -> None:
            if module is None or module.training:
                self._rng.apply()
                while handles:
                    handles.pop().remove()

        if 0 <= loader < len(self._accelerator._dataloaders):
            _before_once(self._accelerator._dataloaders[loader], "_update_state_dict", restore)
        # Such as for a loader of skip_first_batches, which is a new one.
        handles += [each.register_forward_pre_hook(restore) for each in self._accelerator._models]


def _is_own(folder: str | os.PathLike[str]) -> bool:
    """Tell whether accelerate saved into a folder without ckpipe."""
    return any(Path(folder).glob("random_states_*.pkl")) and read_pointer(folder) is None


def _before_once(obj: Any, name: str, function: Callable[[], None]) -> None:
    """Call a function before the next call of a method of one object."""
    method = getattr(obj, name)

    def first(*args: Any, **kwargs: Any) -> Any:
        vars(obj).pop(name, None)
        function()
        return method(*args, **kwargs)

    setattr(obj, name, first)


def _has_begun(position: dict[str, Any]) -> bool:
    """Tell whether a stateful loader had given a batch when its position was saved.

    If it had not, its next epoch draws no seed, since it has made an iterator already.
    """
    if "_snapshot" in position:  # of workers
        return bool(position["_steps_since_snapshot"] + position["_snapshot"]["_snapshot_step"])
    return bool(position.get("_num_yielded", True))


def _is_early(loader: Any) -> bool:
    """Tell whether workers take an epoch from an order that no seed of the sampler gives.

    A stateful loader makes its first iterator before accelerate puts the seedable sampler in.
    """
    return (
        getattr(loader, "use_stateful_dataloader", False)
        and loader.num_workers > 0
        and isinstance(loader.get_sampler(), SeedableRandomSampler)
        and loader.iteration == 0
        and "ckpipe_ordered" not in vars(loader)
    )


def _order_anew(loader: Any) -> None:
    """Let the first epoch take its order from the sampler too."""
    if _is_early(loader) and not _has_begun(loader.state_dict()):
        loader.load_state_dict({})
        loader.ckpipe_ordered = True


class _Loader:
    """The epoch and order of a prepared loader, and its position if it is stateful."""

    def __init__(self, loader: Any, gradients: Any) -> None:
        self.loader, self._gradients = loader, gradients
        sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
        self._sampler = sampler if isinstance(sampler, SeedableRandomSampler) else None
        self._stateful = getattr(loader, "use_stateful_dataloader", False)
        self.goes_on, self.batch = False, getattr(loader, "total_batch_size", None)
        self.before, self.another_order = self.batch, False
        data = loader.dataset
        remembers = isinstance(data, IterableDataset) and is_stateful(data)
        told = hasattr(data, "set_epoch")  # accelerate tells it each epoch
        if self._stateful and loader.persistent_workers and remembers and not told:
            raise UsageError(
                f"The dataset {type(data).__qualname__} in persistent workers would begin later "
                "epochs at a loaded position",
                hint="Make the loader with persistent_workers=False, or give the dataset set_epoch",
            )

    def state_dict(self) -> dict[str, Any]:
        # The last batch of an epoch is saved as the beginning of the next one.
        last = self._gradients.active_dataloader is self.loader and self.loader.end_of_dataloader
        state: dict[str, Any] = {"iteration": self.loader.iteration + last, "batch": self.batch}
        state["early"] = _is_early(self.loader)
        if self._sampler is not None:
            state["seed"] = self._sampler.initial_seed
        if self._stateful:
            state["position"] = dict(self.loader.state_dict())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._sampler is not None:
            self._sampler.initial_seed = state.get("seed", self._sampler.initial_seed)
        early = state.get("early", _is_early(self.loader) and state["iteration"] == 0)
        if self._stateful and _has_begun(position := state["position"]):
            ended = position.get("_iterator_finished")
            ended &= self._sampler is not None or not is_stateful(self.loader.dataset)
            # Without a state the next epoch begins with an iterator of its own, as in the run that
            # was saved: not with the one that the loader has made already.
            self.loader.load_state_dict({} if ended else position)
            self.loader.dl_state_dict = position  # for a save before the first batch
            self.loader.ckpipe_ordered = True
            self.another_order = not ended and (early or not self._has_order("seed" in state))
        elif not early:
            _order_anew(self.loader)
        self.before = state.get("batch", self.batch)
        self.goes_on = self._stateful and self.before == self.batch and not self.another_order
        self.loader.set_epoch(state["iteration"])

    def _has_order(self, seeded: bool) -> bool:
        """Tell whether an epoch has the same order in another process."""
        if seeded or self._sampler is not None:
            return seeded and self._sampler is not None
        batches = getattr(self.loader, "batch_sampler", None)
        sampler = getattr(getattr(batches, "batch_sampler", batches), "sampler", None)
        known = isinstance(sampler, SequentialSampler | DistributedSampler)
        return known or isinstance(self.loader.dataset, IterableDataset)
