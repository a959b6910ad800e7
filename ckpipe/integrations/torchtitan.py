"""torchtitan with ckpipe: saves beside training, and resumes to the bit.

Put ``CkpipeCheckpointManager.Config(enable=True)`` into ``Trainer.Config.checkpoint``. The settings
of torchtitan keep their meaning. Made for torchtitan 0.3.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torchtitan.components.checkpointer.base import BaseCheckpointManager, ModelWrapper
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools import filesystem

from ckpipe.distributed import training_state
from ckpipe.errors import UsageError
from ckpipe.integrations.shared import TrainerPipeline, checked, tell_resumed
from ckpipe.running.validation import absolute
from ckpipe.settings import Settings
from ckpipe.state_helpers import RngState
from ckpipe.types import CheckpointInfo, Until

logger = logging.getLogger("ckpipe")

_HINTS = "settings of the checkpoint's Config", "checkpoint.load_step"

_UNTIL: dict[str, Until] = {
    "disabled": "committed",
    "async": "staged",
    "async_with_pinned_mem": "captured",
}
_NAMES = "names of the model"
"""The key in the metadata of model-only saves that says whose names these have."""


def _settings(config: Any) -> Settings:
    """Make the settings of a manager, with the limit of torchtitan if no rule is given."""
    settings = checked(
        "torchtitan", config.settings, "initial", "preemption", "save_every_seconds",
        "save_every_steps",
        hint="Set interval and initial_load_path of the checkpoint's Config",
    )  # fmt: skip
    if settings.retention.rule is None:
        settings = settings.override(keep_last=config.keep_latest_k or None)
    return settings


class CkpipeCheckpointManager(BaseCheckpointManager):
    """The checkpoint manager of a ``Trainer`` of torchtitan, which saves with ckpipe.

    The root is ``folder`` in the dump folder, or ``folder`` alone if it is a URL. Each rank saves
    its part of models and optimizers, the schedule, its position in the data, the trainer's own
    state, and its random generators; these go back once the loader has its iterator. ``load`` takes
    the newest complete checkpoint, the same on all ranks, as the setting ``resume`` says.

    The model-only save of the last step, which ``last_save_model_only`` asks for, lies in a root of
    its own beside the other, which ends in ``-last``: no run resumes from it by mistake. With
    ``last_save_in_hf`` safetensors are exported there.

    Args:
        config: The settings.
        dataloader: The loader, or None.
        model_parts: The models of this rank.
        optimizers: Their optimizers.
        lr_schedulers: Their schedules.
        states: Other stateful objects, by name.
        sd_adapter: Converts names and shapes to those of Hugging Face, or None.
        base_folder: The dump folder.

    Raises:
        UsageError: If ``last_save_in_hf`` lacks an adapter, ``exclude_from_loading`` names a part
            that the state lacks, or a setting of ckpipe says when to save, or what a run begins
            with; ``Config`` raises it for this one and for a mistyped ``async_mode``.
        CkpipeError: Any error of opening a pipeline.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """The settings of torchtitan, and those of ckpipe."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        """A save returns when all is durable (``disabled``), when the state is copied (``async``),
        or at once (``async_with_pinned_mem``); the optimizers' step then waits for the copy."""

        settings: dict[str, Any] = field(default_factory=dict)
        """Fields of ``ckpipe.Settings``. With ``keep_last`` or ``retention`` these rules decide in
        place of ``keep_latest_k``."""

        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)
            if isinstance(self.async_mode, str):
                self.async_mode = self.async_mode.lower()  # type: ignore[assignment]
            if not isinstance(self.settings, dict) or {*map(type, self.settings)} - {str}:
                hint = "It is a dict of fields of ckpipe.Settings"
                raise UsageError(f"Invalid settings: {self.settings!r:.100}", hint=hint)
            for name, allowed in (("async_mode", _UNTIL), ("export_dtype", TORCH_DTYPE_MAP)):
                given = getattr(self, name)
                if not isinstance(given, str) or given not in allowed:
                    hint = f"It is one of {', '.join(allowed)}"
                    raise UsageError(f"Invalid {name}: {given!r:.100}", hint=hint)
            if self.enable:
                _settings(self)

    def __init__(
        self,
        config: Any,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable: bool = config.enable
        self.save_future: Any = None
        if not self.enable:
            return
        if config.last_save_in_hf and sd_adapter is None:
            raise UsageError(
                "last_save_in_hf needs a sd_adapter, and the model has none",
                hint="Export a checkpoint with ckpipe export, or unset it",
            )
        self._config, self._adapter, self._loader = config, sd_adapter, dataloader
        self._model, self._rng = ModelWrapper(model_parts), RngState(apply="later")
        parts = model_parts if len(model_parts) > 1 else model_parts[0]
        self._state = {
            **states,
            "training": training_state(parts, *optimizers),
            "lr_scheduler": lr_schedulers,
            "rng": self._rng,
        }
        if dataloader is not None:
            self._state["dataloader"] = dataloader
        self._labels = {name: name for name in self._state} | {"optimizer": "training.optimizer"}
        if unknown := set(config.exclude_from_loading) - self._labels.keys():
            raise UsageError(
                f"exclude_from_loading names {sorted(unknown)}, which the state lacks",
                hint=f"It has {sorted(self._labels)}",
            )
        self._settings = _settings(config)
        self._root = absolute(filesystem.join(base_folder, config.folder))
        guard = tuple(optimizers)
        self._pipeline = TrainerPipeline(
            self._root, *_HINTS, guard=guard, settings=self._settings
        ).open()

    def _load(self, step: int = -1) -> bool:
        config = self._config
        chosen = self._pipeline.choose(None if step == -1 else step)
        if chosen is None:
            return self._load_initial()
        exclude = [self._labels[name] for name in config.exclude_from_loading]
        seed = chosen.step == 0  # of create_seed_checkpoint
        self._pipeline.load(
            self._state, chosen, include=["training.model"] if seed else None, exclude=exclude
        )
        has_position = not seed and "dataloader" in self._state.keys() - exclude
        data = "the loader has its saved state" if has_position else ""
        tell_resumed(chosen.step, f"{self._pipeline.url}/{chosen.id}", dist.get_rank(), data)
        get_iterator = getattr(self._loader, "_get_iterator", None)
        if get_iterator is None:
            self._rng.apply()
            return True

        def first() -> Any:
            made = get_iterator()  # draws a seed
            vars(self._loader).pop("_get_iterator")
            self._rng.apply()
            return made

        self._loader._get_iterator = first
        return True

    def _load_initial(self) -> bool:
        config, adapter = self._config, self._adapter
        path = config.initial_load_path
        if config.initial_load_in_hf:
            if adapter is None or not (path or adapter.hf_assets_path):
                raise UsageError(
                    "initial_load_in_hf needs a sd_adapter and a path",
                    hint="Set initial_load_path, or hf_assets_path of the model",
                )
            exports = sorted(Path(path or "").glob("step-*.hf"))  # of last_save_in_hf
            reader = adapter.get_hf_storage_reader(
                str(exports[-1]) if path and exports else path or adapter.hf_assets_path,
                config.initial_load_in_hf_quantized,
            )
            weights = adapter.to_hf(self._model.state_dict())
            load_dcp(weights, storage_reader=reader)
            self._model.load_state_dict(adapter.from_hf(weights))
        elif path and filesystem.isfile(filesystem.join(path, ".metadata")):
            if not config.initial_load_model_only:
                raise UsageError(
                    f"{path} is a checkpoint of DCP, of which ckpipe takes the model only",
                    hint="Resume it with torchtitan's own manager and save with this one",
                )
            weights = self._model.state_dict()
            load_dcp(weights, checkpoint_id=path)
            self._model.load_state_dict(weights)
        elif path:
            fixed: Any = {"settings": self._settings, "read_only": True, "resume": "must"}
            with TrainerPipeline(path, *_HINTS, **fixed) as other:
                chosen = other.choose()
                names = chosen and (chosen.metadata or {}).get(_NAMES)
                if names:
                    self._load_model(other, chosen, names)
                else:
                    only = ["training.model"] if config.initial_load_model_only else None
                    other.load(self._state, chosen, include=only)
                    self._rng.apply()
        else:
            return False
        logger.info("the run begins with %s", path or adapter.hf_assets_path)
        return True

    def _load_model(
        self, other: TrainerPipeline, chosen: CheckpointInfo | None, names: str
    ) -> None:
        """Load a model-only save of the last step of another run."""
        adapter, path = self._adapter, self._config.initial_load_path
        if not self._config.initial_load_model_only:
            raise UsageError(
                f"{path} has the weights of a last step only",
                hint=f"Set initial_load_model_only, or take the root {path.removesuffix('-last')}",
            )
        if names == "torchtitan":
            weights = self._model.state_dict()
            other.load({"model": weights}, chosen, cast=True)
        elif adapter is None:
            raise UsageError(
                f"{path} has the names of Hugging Face, and the model has no sd_adapter",
                hint="Give the model an adapter, or save without last_save_in_hf",
            )
        else:
            named = adapter.to_hf(self._model.state_dict())
            other.load({"model": named}, chosen, cast=True)
            weights = adapter.from_hf(named)
        self._model.load_state_dict(weights)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self._config
        first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (first or last_step or curr_step % config.interval == 0):
            return False
        if last_step and config.last_save_model_only and curr_step:
            self._save_model(curr_step)
        else:
            until = "committed" if last_step else _UNTIL[config.async_mode.lower()]
            self.save_future = self._pipeline.save(self._state, curr_step, until=until)
        return True

    @torch.no_grad()
    def _save_model(self, step: int) -> None:
        dtype = TORCH_DTYPE_MAP[self._config.export_dtype]
        weights = {
            name: value.to(dtype) if torch.is_floating_point(value) else value
            for name, value in self._model.state_dict().items()
        }
        hf = self._config.last_save_in_hf
        fixed: Any = {"settings": self._settings, "final_format": "hf" if hf else "ckpipe"}
        with TrainerPipeline(f"{self._root}-last", *_HINTS, **fixed) as pipeline:
            state = {"model": self._adapter.to_hf(weights) if hf else weights}
            about = {_NAMES: "hugging face" if hf else "torchtitan"}
            pipeline.save(state, step, final=True, metadata=about)

    def _maybe_wait_for_staging(self) -> None:
        if self.save_future is not None:
            self.save_future.wait_staged()

    def _wait_for_saving(self) -> None:
        save, self.save_future = self.save_future, None
        save.wait()

    def _close(self) -> None:
        self._pipeline.close()
