"""verl with ckpipe: its FSDP engines save and load by ckpipe, and its trainers stay as they are.

Copy this file to where verl can import it, call :func:`register` in a module of your own and let
verl import that: ``model.external_lib``. The extension points used are ``EngineRegistry.register``,
whose entry for a vendor goes before verl's own for the device, and ``checkpoint_manager`` of an
engine. Read and tried with verl 0.9.1 (``verl/workers/engine/base.py``, ``verl/utils/checkpoint``).
Experimental: not tried on GPUs.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import uuid
from pathlib import Path
from typing import Any, cast

from verl.utils.checkpoint.checkpoint_manager import get_checkpoint_tracker_filename
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.device import get_device_name, get_vendor
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import (
    FSDPEngineWithLMHead,
    FSDPEngineWithValueHead,
)

from ckpipe.distributed import training_state
from ckpipe.errors import UsageError
from ckpipe.events import Completed
from ckpipe.integrations.pointers import POINTER_FILE, read_pointer, write_pointer
from ckpipe.integrations.shared import TrainerPipeline, by_first, checked, naming, tell_resumed
from ckpipe.retention import KeepIf, KeepLast
from ckpipe.settings import Settings
from ckpipe.state_helpers import RngState

logger = logging.getLogger("ckpipe")

_HINTS = "the arguments of register()", "trainer.resume_from_path"

_LABELS = {
    "model": ["training.model"],
    "optimizer": ["training.optimizer"],
    "extra": ["lr_scheduler", "rng"],
}


def register(
    folder: str | os.PathLike[str], url: str | os.PathLike[str] | None = None, **settings: Any
) -> None:
    """Let the engines of the strategies ``fsdp`` and ``fsdp2`` save and load with ckpipe.

    Call it once in each process that trains, before its engine is made. Reference models are left
    as they are.

    Args:
        folder: The setting ``trainer.default_local_dir``, which the trainer and all ranks share.
        url: The root of the checkpoints, by default ``ckpipe`` in the folder. Those of the actor,
            or of fine-tuning, lie below it in ``language_model``, those of a critic in
            ``value_model``.
        settings: Fields of :class:`~ckpipe.Settings`.

    Raises:
        UsageError: If a setting has no effect with verl.
        SettingsError: If a setting is unknown or out of range.
        AssertionError: By verl, if engines are registered for this vendor already.
    """
    ready = checked(
        "verl", settings, "initial", "preemption", "save_every_steps", "save_every_seconds",
        hint="trainer.save_freq says when to save, and the model's path where a run begins",
    )  # fmt: skip
    place = os.path.abspath(os.path.expanduser(folder))
    root = os.path.join(place, "ckpipe") if url is None else os.fspath(url)
    if "://" not in root:
        root = os.path.abspath(os.path.expanduser(root))
    for kind, base in (
        ("language_model", FSDPEngineWithLMHead),
        ("value_model", FSDPEngineWithValueHead),
    ):
        made = _engine(base, place, f"{root}/{kind}", ready)
        EngineRegistry.register(kind, ["fsdp", "fsdp2"], get_device_name(), get_vendor())(made)


def _engine(base: Any, folder: str, root: str, settings: Settings) -> Any:
    class CkpipeEngine(base):
        checkpoint_manager: Any

        def initialize(self) -> None:
            super().initialize()
            if not self.engine_config.forward_only:
                steps = self.optimizer_config.total_training_steps
                self.checkpoint_manager = CkpipeFSDPCheckpointManager(
                    self.checkpoint_manager, folder, root, settings, steps
                )

        def train_mode(self, **arguments: Any) -> Any:
            self.checkpoint_manager.rng.apply()  # the trainer's loader has drawn its seed by now
            return super().train_mode(**arguments)

    return CkpipeEngine


class CkpipeFSDPCheckpointManager(FSDPCheckpointManager):
    """The checkpoint manager of an engine of verl, which saves with ckpipe; made by the engine.

    The files beside the weights are verl's own: configuration, tokenizer, with ``hf_model`` the
    whole model. The folder of a step gets a pointer too, and is removed once its checkpoint is.

    verl's trainers resume the step that ``latest_checkpointed_iteration.txt`` names. Retention
    keeps this step. A file that names a save which did not complete is set back to the newest step
    before it that is complete and has the loader's position. If the file is absent though there are
    checkpoints, or there is nothing complete to load, it is a warning, or with ``resume="must"`` an
    error.

    Args:
        manager: The one that verl has made.
        folder: The folder of the trainer.
        root: The root of the checkpoints.
        settings: The settings of ckpipe.
        total_steps: The last step, whose save returns when it is durable.

    Raises:
        UsageError: If ``checkpoint.save_contents`` lacks the model, or the run begins though there
            is a checkpoint and ``resume`` is ``"must"``.
        CheckpointNotFound: If there is none and ``resume`` is ``"must"``.
        CkpipeError: Any error of reading the root.
    """

    checkpoint_save_contents: list[str]

    def __init__(
        self, manager: Any, folder: str, root: str, settings: Settings, total_steps: int
    ) -> None:
        self.__dict__.update(vars(manager))
        if not self.should_save_model:
            raise UsageError(
                f"checkpoint.save_contents is {list(self.checkpoint_save_contents)}, without model",
                hint="Add model: nothing could be resumed",
            )
        self._folder, self._root, self._settings = folder, root, settings
        self._asynchronous = bool((self.checkpoint_config or {}).get("async_save", False))
        self._total_steps, self._pipeline = total_steps, cast(Any, None)
        self._tracker = Path(get_checkpoint_tracker_filename(folder))
        self.rng = RngState(apply="later")
        training = training_state(self.model, self.optimizer)
        self._state = {"training": training, "lr_scheduler": self.lr_scheduler, "rng": self.rng}
        by_first(self._mend_tracker)

    def _mend_tracker(self) -> None:
        """Let the trainer resume a complete checkpoint, or say that it begins."""
        told, folder = self._told(), Path(self._folder)
        if any(folder.glob(f"global_step_{told}/**/model_world_size_*.pt")):
            return  # saved by verl alone
        with TrainerPipeline(self._root, *_HINTS, settings=self._settings, solo=True) as pipeline:
            steps = {each.step for each in pipeline.steps() if each.complete}
            if not steps:
                pipeline.choose()  # warns of remains, or raises
        named = "no step" if told == sys.maxsize else f"step {told}"
        where = f"{self._tracker} names {named}, and {pipeline.url} has steps {sorted(steps)}"
        before = {each for each in steps if told is not None and each < told}
        if told in steps or not (steps or told):
            return
        if usable := [each for each in before if any(folder.glob(f"global_step_{each}/data*.pt"))]:
            self._tell(max(usable))
            logger.warning("%s: now it names step %d", where, max(usable))
        elif not (steps and told):  # with both, the load raises
            if steps and self._settings.resume == "must":
                raise UsageError(
                    f"The run begins at step 0, but {where}",
                    hint="trainer.resume_mode=resume_path resumes",
                )
            logger.warning("The run begins at step 0, but %s", where)
            self._tracker.unlink(missing_ok=True)

    def _told(self) -> int | None:
        if not self._tracker.exists():
            return None
        text = self._tracker.read_text().strip()
        # verl's driver writes over the file, so a kill can leave it empty: behind every step then.
        return int(text) if text.isdigit() else sys.maxsize

    def _tell(self, step: int) -> None:
        made = self._tracker.with_name(f".{uuid.uuid4().hex}")
        made.write_text(str(step))
        made.replace(self._tracker)

    def _labels(self, contents: Any) -> list[str]:
        labels = [label for name in contents for label in _LABELS.get(name, ())]
        if self.should_save_lora_only and hasattr(self.model, "peft_config"):
            labels = [f"{each}.*lora_*" if each == "training.model" else each for each in labels]
        return labels

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Save this rank's part; return when it is durable.

        With ``checkpoint.async_save`` it returns when the state is copied, except at the last step;
        the trainer's file names the step once it is complete.

        Args:
            local_path: The folder of the step.
            hdfs_path: Unused, as in verl.
            global_step: The step.
            max_ckpt_to_keep: The number of checkpoints to keep, beside the one that the trainer's
                file names; if ``keep_last`` or ``retention`` is set, that decides.

        Raises:
            UsageError: If the path is outside the folder that was registered.
            CkpipeError: Any error of a save, also of an earlier one.
        """
        if local_path is None:
            return
        path = os.path.relpath(os.path.abspath(local_path), self._folder)
        if path.startswith(os.pardir):
            raise UsageError(
                f"verl saves at {local_path}, outside {self._folder}",
                hint="Give register() the folder trainer.default_local_dir",
            )
        contents: list[str] = self.checkpoint_save_contents
        self.checkpoint_save_contents = [each for each in contents if each == "hf_model"]
        try:
            super().save_checkpoint(local_path, hdfs_path, global_step)
        finally:
            self.checkpoint_save_contents = contents
        if self._pipeline is None:
            rule: dict[str, Any] = {}
            if max_ckpt_to_keep and self._settings.retention.rule is None:
                told = KeepIf(lambda each: each.step == self._told(), "verl")
                rule["retention"] = KeepLast(max_ckpt_to_keep) | told
            rule["settings"] = self._settings
            self._pipeline = TrainerPipeline(self._root, *_HINTS, **rule).open()
            self._pipeline.on_complete(self._on_complete)
        later = self._asynchronous and global_step != self._total_steps
        self._pipeline.save(
            self._state, global_step, metadata={"path": path},
            until="staged" if later else "committed", include=self._labels(contents),
        )  # fmt: skip

    def _on_complete(self, event: Completed) -> None:
        metadata: Any = event.info.metadata
        path, url = metadata["path"], self._pipeline.url
        with naming(os.path.join(self._folder, path), f"{event.id} is complete at {url}"):
            write_pointer(Path(self._folder, path, POINTER_FILE), url, event.info)
            if self._asynchronous:  # the trainer leaves it to the engine
                self._tell(event.step)
        there = {each.id for each in self._pipeline.steps()}
        for folder in Path(self._folder).glob(re.sub(r"global_step_\d+", "global_step_*", path)):
            pointer = read_pointer(folder)
            if pointer and pointer.root == url and pointer.id not in there:
                shutil.rmtree(folder, ignore_errors=True)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Load this rank's part of the step that a folder names; without a pointer, of this root.

        A folder that verl saved without ckpipe is loaded by verl.

        Args:
            local_path: The folder.
            hdfs_path: Unused, as in verl.
            del_local_after_load: Unused: there are no copies.

        Raises:
            CheckpointNotFound: If the checkpoint is absent or incomplete.
            CkpipeError: Any error of a load.
        """
        if local_path is None:
            return
        pointer = by_first(lambda: read_pointer(local_path))
        if pointer is None and any(Path(local_path).glob("model_world_size_*.pt")):
            super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
            return
        step = re.search(r"global_step_(\d+)", local_path)
        which = pointer.id if pointer else int(step[1]) if step else None
        root = pointer.root if pointer else self._root
        with TrainerPipeline(root, *_HINTS, settings=self._settings, read_only=True) as pipeline:
            chosen = pipeline.choose(which)
            assert chosen is not None
            pipeline.load(self._state, chosen, include=self._labels(self.checkpoint_load_contents))
            tell_resumed(chosen.step, f"{pipeline.url}/{chosen.id}", self.rank)
