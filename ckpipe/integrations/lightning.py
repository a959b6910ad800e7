"""Lightning with ckpipe: saves beside training, and resumes inside an epoch to the bit.

``CkpipeCheckpointIO`` goes among the plugins of a ``Trainer`` and ``CkpipeCallback`` among its
callbacks; ``ModelCheckpoint`` decides as ever when to save and under which names. Checkpoints lie
below the root, and each name of Lightning, such as ``last.ckpt``, is a small file that points to
one (:mod:`ckpipe.integrations.pointers`). It appears when its checkpoint is complete. Tried with
Lightning 2.6.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

from ckpipe.distributed import training_state
from ckpipe.errors import CkpipeError, UnsupportedState, UsageError
from ckpipe.events import Completed
from ckpipe.integrations.pointers import read_pointer, write_pointer
from ckpipe.integrations.shared import (
    TrainerPipeline,
    checked,
    choose_path,
    keep_names,
    tell_resumed,
)
from ckpipe.retention import KeepIf
from ckpipe.running.pipeline import load
from ckpipe.running.validation import absolute
from ckpipe.state_helpers import RngState
from ckpipe.types import CheckpointId

logger = logging.getLogger("ckpipe")

GENERATORS = "ckpipe_generators"
"""The key under which a checkpoint of Lightning has the random generators of all ranks."""

M = TypeVar("M", bound=LightningModule | LightningDataModule)


class CkpipeCheckpointIO(TorchCheckpointIO):
    """A plugin by which a ``Trainer`` saves and loads with ckpipe: ``Trainer(plugins=[io])``.

    A save returns when the state is copied. ``fit`` returns, also by an exception or a signal, once
    all saves are durable. As ever rank 0 saves and every rank loads. Files that Lightning wrote
    without ckpipe are loaded and removed as ever.

    If Lightning removes a name or writes it anew, its checkpoint is deleted once a newer one is
    complete; no other is. With ``keep_last`` or ``retention`` these rules decide instead.

    Args:
        root: The root of the checkpoints, as a path or URL.
        settings: Fields of :class:`~ckpipe.Settings`.

    Raises:
        UsageError: If a setting says when to save, or what a run begins with.
    """

    sharded = False
    """True if each rank saves its part, as :class:`CkpipeModelParallelStrategy` lets it."""

    def __init__(self, root: str | os.PathLike[str], **settings: Any) -> None:
        self.settings = checked(
            "Lightning", settings, "initial", "preemption", "save_every_seconds",
            "save_every_steps",
            hint="ModelCheckpoint decides when to save; your module loads first weights",
        )  # fmt: skip
        self.root = absolute(os.fspath(root))
        self._pipeline: TrainerPipeline | None = None
        self._calls, self._removed, self._dropped = 0, dict[str, int](), set[str]()
        self._folders = set[str]()

    def _new(self, **fields: Any) -> TrainerPipeline:
        if self.settings.retention.rule is None:
            rule = KeepIf(lambda each: each.id not in self._dropped, "Lightning")
            # It names the checkpoints to delete, of whatever line.
            fields["retention"] = {"rules": rule, "lines": "all"}
        fields = {"solo": not self.sharded, **fields}
        hints = "the arguments of CkpipeCheckpointIO", "ckpt_path with an id of `ckpipe ls`"
        return TrainerPipeline(self.root, *hints, settings=self.settings, **fields)

    def _open(self) -> TrainerPipeline:
        if self._pipeline is None:
            names = self.sharded or rank_zero_only.rank == 0
            self._pipeline = self._new(read_only=self.settings.read_only or not names).open()
            keep_names(self._pipeline, self._on_complete, self._names)
        return self._pipeline

    def _names(self) -> list[Path]:
        return [each for folder in self._folders for each in Path(folder).iterdir()]

    def newest(self) -> str | None:
        """Choose the checkpoint to resume from: ``trainer.fit(model, ckpt_path=io.newest())``.

        Unlike ``"last"`` it needs no file under a name of Lightning, and obeys the setting
        ``resume``. Checkpoints with ``save_weights_only`` do not count beside others.

        Returns:
            The id of the newest complete checkpoint, which ``ckpt_path`` takes; None if the run
            begins.

        Raises:
            CheckpointNotFound: If there is none and ``resume`` is ``"must"``.
            StoreError: If the store failed.
        """
        with self._new(solo=True) as pipeline:
            chosen = pipeline.choose()
            if chosen is not None and (chosen.metadata or {}).get("weights_only"):
                for each in pipeline.steps(metadata=True):  # from the oldest
                    # One that cannot be read may be it: its load raises.
                    about = {"weights_only": False} if each.metadata is None else each.metadata
                    if each.complete and not about.get("weights_only", True):
                        chosen = each
        return None if chosen is None else chosen.id

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Save what Lightning has put together; return when it is copied.

        Raises:
            UsageError: If the name is not one of this machine, or there are ``storage_options``; or
                if ``resume`` is ``"must"`` and no :class:`CkpipeCallback` has seen to it.
            CkpipeError: Any error of a save, also of an earlier one.
        """
        if storage_options is not None or "://" in os.fspath(path):
            raise UsageError(
                f"The name {path} is not that of a file on this machine, or has storage_options",
                hint="Give ModelCheckpoint a folder, and the store to CkpipeCheckpointIO",
            )
        if "global_step" not in checkpoint:  # weights that a spawned process gives back
            super().save_checkpoint(checkpoint, path)
            return
        whole = "callbacks" in checkpoint
        if whole and GENERATORS not in checkpoint and self.settings.resume == "must":
            raise UsageError(
                'The setting resume="must" has no effect without CkpipeCallback',
                hint="Put CkpipeCallback() among the callbacks of the trainer",
            )
        path = os.path.abspath(path)
        os.makedirs(os.path.dirname(path), exist_ok=True)  # Lightning puts its links there
        self._calls += 1
        about = {"path": path, "call": self._calls, "weights_only": not whole}
        about["name"] = os.path.basename(path)
        self._open().save(checkpoint, checkpoint["global_step"], metadata=about)

    def _on_complete(self, event: Completed) -> None:
        metadata: Any = event.info.metadata
        path = metadata["path"]
        self._folders.add(os.path.dirname(path))
        with _locked(path):
            old = None if os.path.islink(path) else read_pointer(path)
            own = old if old is not None and old.root == self.root else None
            key = own and CheckpointId.parse(own.id)
            if metadata["call"] <= self._removed.get(path, 0) or (key and key > event.info.key):
                self._dropped.add(event.info.id)
                return
            write_pointer(path, self.root, event.info)
            if key and key != event.info.key:  # another rank may have written it already
                self._dropped.add(str(key))

    def load_checkpoint(
        self,
        path: Any,
        map_location: Any = None,
        weights_only: bool | None = None,
        *,
        training: Any = None,
    ) -> dict[str, Any]:
        """Load a checkpoint by its name or id, the same on all ranks, onto the CPU.

        Without a file of this name, as on another machine, the newest checkpoint that was saved
        under it is taken; see :func:`ckpipe.integrations.shared.choose_path`.

        Args:
            path: The name, its last part, or an id.
            map_location: For files that Lightning wrote.
            weights_only: For files that Lightning wrote.
            training: A training state to load into, if each rank has saved its part.

        Raises:
            CheckpointNotFound: If it is absent or incomplete.
            CkpipeError: Any error of a load.
        """
        if os.path.isfile(path) and read_pointer(path) is None:
            found: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
            return found
        pipeline = self._open()
        box: list[Any] = []
        try:
            box.append(choose_path(pipeline, path))
        except CkpipeError as error:
            box.append(error)
        if dist.is_initialized():  # without shards each rank has chosen for itself
            dist.broadcast_object_list(box)
        (chosen,) = box
        if isinstance(chosen, CkpipeError):
            raise chosen
        if training is not None:
            pipeline.load({"training": training}, chosen, include=["training"])
        loaded = pipeline.load(None, chosen, exclude=None if training is None else ["training"])
        assert loaded is not None
        state: dict[str, Any] = loaded.state
        return state

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a name; its checkpoint is deleted once a newer one is complete."""
        path = os.path.abspath(path)
        self._removed[path] = self._calls
        if not os.path.isdir(os.path.dirname(path)):
            return
        with _locked(path):
            if os.path.islink(path):
                os.unlink(path)  # what it leads to has a name of its own
            elif (pointer := read_pointer(path)) is not None:
                self._dropped.add(pointer.id)
                os.unlink(path)
            else:
                super().remove_checkpoint(path)

    def teardown(self) -> None:
        """Wait until all saves are durable, and delete what has lost its name."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.close()
            if self._dropped and self.settings.retention.rule is None:
                with self._new(solo=True) as again:
                    again.prune()


class CkpipeCallback(Callback):
    """Saves the random generators of all ranks, puts them back, and tells where a run resumes.

    Inside an epoch they go back when its first batch has been fetched, since the loader changes
    them; at the end of an epoch they go back at once. With another number of ranks a resume warns
    and leaves them as they are.

    A run that begins though the root of :class:`CkpipeCheckpointIO` has a complete checkpoint
    warns; with ``resume="must"`` it raises.
    """

    def __init__(self) -> None:
        self._rng, self._positions = RngState(apply="later"), 0

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Check that the strategy saves and loads with the plugin.

        Raises:
            UsageError: If it goes past the plugin.
        """
        strategy = trainer.strategy
        past = isinstance(strategy, FSDPStrategy | ModelParallelStrategy | DeepSpeedStrategy)
        io = strategy.checkpoint_io
        if past and isinstance(io, CkpipeCheckpointIO) and not io.sharded:
            raise UsageError(
                f"{type(strategy).__name__} saves and loads past CkpipeCheckpointIO",
                hint="Give it to CkpipeModelParallelStrategy(io) in place of the trainer",
            )

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """Put the generators of all ranks into the checkpoint of rank 0, or each into its own."""
        own, states = self._rng.state_dict(), None
        if trainer.world_size == 1 or getattr(trainer.strategy.checkpoint_io, "sharded", False):
            states = [own]
        elif trainer.global_rank == 0:
            states = [own] * trainer.world_size
            dist.gather_object(own, states)
        else:
            dist.gather_object(own)
        checkpoint[GENERATORS] = states

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """Keep the generators of this rank for the first batch."""
        states, io = checkpoint.get(GENERATORS), trainer.strategy.checkpoint_io
        if trainer.state.fn != "fit" or "loops" not in checkpoint:
            return
        loop = checkpoint["loops"]["fit_loop"]
        self._positions = len(loop["state_dict"].get("combined_loader", []))
        if states is None:
            return
        sharded = getattr(io, "sharded", False)
        if len(states) != (1 if sharded else trainer.world_size):
            logger.warning(
                "%d ranks resume what %d ranks saved: random numbers differ from now on",
                trainer.world_size, len(states),
            )  # fmt: skip
            return
        self._rng.load_state_dict(states[0 if sharded else trainer.global_rank])
        if loop["epoch_loop.batch_progress"]["is_last_batch"]:
            self._rng.apply()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Tell where the run resumes, or that it begins."""
        io, loop = trainer.strategy.checkpoint_io, trainer.fit_loop
        if trainer.ckpt_path:
            done, data = loop.epoch_loop.batch_progress, ""
            if self._positions == len(loop._combined_loader.flattened):
                if not done.is_last_batch:
                    place = f"in epoch {trainer.current_epoch} after batch {done.current.ready}"
                    data = f"the data go on {place}"
            elif done.is_last_batch:
                data = "the data go on with the next epoch"
            else:
                data = "a loader keeps no position, so its data begin anew"
            tell_resumed(trainer.global_step, trainer.ckpt_path, trainer.global_rank, data)
            return
        if not isinstance(io, CkpipeCheckpointIO) or trainer.global_step:
            return
        if (newest := io.newest()) is not None:
            said = f"The run begins at step 0, though {io.root} has {newest}"
            hint = "Resume with trainer.fit(model, ckpt_path=io.newest())"
            if io.settings.resume == "must":
                raise UsageError(said, hint=hint)
            logger.warning("%s. %s", said, hint)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        """Put the generators back, once after a load."""
        self._rng.apply()


class CkpipeModelParallelStrategy(ModelParallelStrategy):
    """``ModelParallelStrategy`` whose ranks save and load their parts with ckpipe.

    For modules with FSDP2 or tensor parallelism.

    Args:
        io: The plugin to save with; it is not given to the trainer.
        arguments: Those of ``ModelParallelStrategy``.
    """

    def __init__(self, io: CkpipeCheckpointIO, **arguments: Any) -> None:
        super().__init__(**arguments)
        io.sharded = True
        self.checkpoint_io = io

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: each rank saves its part."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: each rank saves its part."""
        return {}

    def _training(self, *optimizers: Any) -> Any:
        return training_state(
            self.model, *(getattr(each, "_optimizer", each) for each in optimizers)
        )

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save the part of this rank."""
        weights = self._training(*(self.optimizers if "optimizer_states" in checkpoint else ()))
        checkpoint = {**checkpoint, "training": weights}
        self.checkpoint_io.save_checkpoint(checkpoint, self.broadcast(filepath), storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        """Load the part of this rank; an evaluation has no optimizers and loads the model alone."""
        path, training = self.broadcast(checkpoint_path), self._training(*self.optimizers)
        found: dict[str, Any] = self.checkpoint_io.load_checkpoint(path, training=training)
        return found

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a name, which any rank may be about to write."""
        self.checkpoint_io.remove_checkpoint(filepath)

    def teardown(self) -> None:
        """Wait until all saves are durable."""
        self.checkpoint_io.teardown()
        super().teardown()


def load_from_checkpoint(cls: type[M], path: Any, **arguments: Any) -> M:
    """Do ``cls.load_from_checkpoint(path, **arguments)`` for a name that points to ckpipe.

    That method reads the file itself, past the plugin. Any other file is left to it. Optimizers are
    not read.

    Args:
        cls: The class of the module or data module.
        path: The name, such as ``best_model_path``.
        arguments: Those of the method; ``weights_only=False`` also loads pickled objects.

    Raises:
        CheckpointNotFound: If the checkpoint behind the name is absent.
        CkpipeError: Any error of a load.
    """
    made: M
    if (pointer := read_pointer(path)) is None:
        made = cls.load_from_checkpoint(path, **arguments)
        return made
    optimizers = ["optimizer_states", "training.optimizer"]
    allowed: Any = {"pickle": "allow"} if arguments.get("weights_only") is False else {}
    try:
        state = load(pointer.root, step=pointer.id, exclude=optimizers, **allowed).state
    except UnsupportedState as error:
        error.hint = "Pass weights_only=False if you trust its writer"
        raise
    if "training" in state:
        state["state_dict"] = state.pop("training")["model"]
    file = BytesIO()
    torch.save(state, file)
    file.seek(0)
    made = cls.load_from_checkpoint(file, **arguments)
    return made


@contextmanager
def _locked(path: str) -> Iterator[None]:
    """Make the folder of a name, and hold it against other threads and ranks."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
