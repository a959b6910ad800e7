"""Lightning with ckpipe: saves beside training, and resumes inside an epoch to the bit.

``CkpipeCheckpointIO`` goes among the plugins of a ``Trainer`` and ``CkpipeCallback`` among its
callbacks; ``ModelCheckpoint`` decides as ever when to save and under which names. Checkpoints lie
below the root, and each name of Lightning, such as ``last.ckpt``, is a small file that points to
one (:mod:`ckpipe.integrations.pointers`). Tried with Lightning 2.6.

Names. Lightning asks the file system whether a name is there, to choose another one, so a name is
there when the call of a save returns. It is marked until its checkpoint is complete. A load by it
waits for that. If the save was killed, a load by its name is refused, since the checkpoint that had
this name before is another one. With :class:`CkpipeCallback` ``fit`` goes on from that, with a
warning, and gives the name back to it.

Removals. A removed checkpoint stays until a newer one is complete, since that may yet fail. A mark
on the store (``.ckpipe/removed/ID``) says that the newest is removed, such as the tuner's. It is
written once all saves before the removal have ended. A tuner that is killed removes nothing, so its
names are known too.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose

from ckpipe.backend import Backend
from ckpipe.calls import load
from ckpipe.distributed import training_state
from ckpipe.errors import (
    CheckpointIncomplete,
    CheckpointNotFound,
    CkpipeError,
    UnsupportedState,
    UsageError,
)
from ckpipe.events import Completed
from ckpipe.format.names import REMOVED
from ckpipe.handles import SyncSaveHandle
from ckpipe.integrations.pointers import (
    Pointer,
    may_run,
    read_pointer,
    this_process,
    write_pointer,
)
from ckpipe.integrations.shared import (
    TrainerPipeline,
    by_first,
    checked,
    choose_path,
    keep_names,
    naming,
    tell_resumed,
)
from ckpipe.retention import KeepIf
from ckpipe.running.validation import absolute
from ckpipe.state_helpers import RngState
from ckpipe.store.retry import create_once
from ckpipe.types import CheckpointId, CheckpointInfo

logger = logging.getLogger("ckpipe")

GENERATORS = "ckpipe_generators"
"""The key under which a checkpoint of Lightning has the random generators of all ranks."""

BATCHES = "ckpipe_batches"
"""The key of the numbers that a position inside an epoch is counted by."""

_LONGEST_WAIT = 60.0
"""Seconds that a load by a name waits for a save in another process."""

M = TypeVar("M", bound=LightningModule | LightningDataModule)


_saves: dict[str, tuple[str, SyncSaveHandle]] = {}
"""The name and the handle of each save of this process by id, the newest last.

A name is empty once it is removed. Saves that had ended at the next save are left out.
"""

_ENDED = ("committed", "skipped", "failed", "cancelled")


class CkpipeCheckpointIO(TorchCheckpointIO):
    """A plugin by which a ``Trainer`` saves and loads with ckpipe: ``Trainer(plugins=[io])``.

    A save returns when the state is copied; the one before a requeue by SLURM when it is durable.
    ``fit`` returns, also by an exception or a signal, once all saves are durable. As ever rank 0
    saves and every rank loads. Files that Lightning wrote without ckpipe are loaded and removed as
    ever.

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

    resumes = False
    """True in ``fit``: a name whose save was killed leads to what it was before."""

    def __init__(self, root: str | os.PathLike[str], **settings: Any) -> None:
        self.settings = checked(
            "Lightning", settings, "initial", "preemption", "save_every_seconds",
            "save_every_steps",
            hint="ModelCheckpoint decides when to save; your module loads first weights",
        )  # fmt: skip
        self.root = absolute(os.fspath(root))
        self._pipeline: TrainerPipeline | None = None
        self._dropped, self._marks, self._folders = set[str](), set[str](), set[str]()
        self._named, self._failed = defaultdict[str, list[str]](list), False
        self._begun = set[str]()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pipeline": None}  # a copy opens one of its own

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
        ``resume``. It waits for saves of this plugin. Checkpoints of Lightning's tuner do not
        count; those that Lightning has removed, or with ``save_weights_only``, not beside others.

        Returns:
            The id of the newest complete checkpoint, which ``ckpt_path`` takes; None if the run
            begins.

        Raises:
            CheckpointNotFound: If there is none and ``resume`` is ``"must"``.
            StoreError: If the store failed.
        """
        own = None if self.sharded else self._pipeline
        with self._new(solo=True) if own is None else nullcontext(own) as pipeline:
            chosen = pipeline.choose()
            if chosen is None:
                return None
            self._marks |= pipeline._call(_marks, pipeline._engine.context.store.retrying)
            self._dropped |= self._marks
            whole = not (chosen.metadata or {}).get("weights_only")
            if whole and chosen.id not in self._marks and not _is_tuners(chosen):
                return chosen.id
            steps = pipeline.steps(metadata=True)  # from the oldest
        every = [each for each in steps if each.complete and not _is_tuners(each)]
        left = [each for each in every if each.id not in self._marks] or every
        # One that cannot be read may be it: its load raises.
        best = [
            each for each in left
            if each.metadata is None or not each.metadata.get("weights_only", True)
        ]  # fmt: skip
        if not left and self.settings.resume == "must":
            raise CheckpointNotFound(f"All checkpoints at {self.root} are those of a tuner")
        return (best or left)[-1].id if left else None

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
        with naming(path, "Nothing was saved"):
            os.makedirs(os.path.dirname(path), exist_ok=True)  # Lightning puts its links there
        about = {"path": path, "name": os.path.basename(path), "weights_only": not whole}
        with _requeue_later():
            handle = self._open().save(checkpoint, checkpoint["global_step"], metadata=about)
            if handle.status != "skipped":
                self._begin_name(path, handle)

    def _begin_name(self, path: str, handle: SyncSaveHandle) -> None:
        self._forget_ended()
        _saves[handle.id] = path, handle
        named = [each for each in self._named[path] if each not in self._dropped]
        self._named[path] = [*named, handle.id]
        if re.fullmatch(r"hpc_ckpt_\d+\.ckpt", os.path.basename(path)):  # SLURM ends the job soon
            self._complete_name(path, handle.wait_complete())
        elif rank_zero_only.rank == 0:
            with naming(path, f"{handle.id} is saved at {self.root}"), _locked(path):
                old = self._own(path)
                before = () if old is None else (old.id, *(old.before or ()))
                free = old or os.path.islink(path) or not os.path.isfile(path)
                # It may be complete already. A file of Lightning stays until then.
                if free and handle.id not in before:
                    new = Pointer(self.root, handle.id, handle.step, "", before, this_process())
                    write_pointer(path, self.root, new)
                self._begun.add(handle.id)

    def _own(self, path: str) -> Pointer | None:
        found = None if os.path.islink(path) else read_pointer(path)
        return found if found is not None and found.root == self.root else None

    def _on_complete(self, event: Completed) -> None:
        metadata: Any = event.info.metadata
        self._complete_name(metadata["path"], event.info)

    def _complete_name(self, path: str, info: CheckpointInfo) -> None:
        self._folders.add(os.path.dirname(path))
        with _locked(path):
            if info.id in self._dropped:
                return
            if os.path.islink(path) and info.id in self._begun:
                self._dropped.add(info.id)  # Lightning has put a link in place of the name
                return
            old = self._own(path)
            ids = {info.id} if old is None else {info.id, old.id, *(old.before or ())}
            # The newest has the name, once it is complete; until then it falls back to this one.
            keys = sorted(filter(None, map(CheckpointId.parse, ids)), reverse=True)
            at = keys.index(info.key)
            self._dropped.update(map(str, keys[at + 1 :]))
            if old is None or at == 0:
                write_pointer(path, self.root, info)
            elif old.before is None:
                self._dropped.add(info.id)
            else:
                write_pointer(
                    path, self.root, replace(old, before=tuple(map(str, keys[1 : at + 1])))
                )

    def _forget_ended(self) -> None:
        for id, (path, handle) in [*_saves.items()]:
            if handle.status in _ENDED:
                del _saves[id]
                if handle.status != "committed" and id in self._named.get(path, ()):
                    self._named[path].remove(id)
                    self._failed = True

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
        under it is taken; see :func:`ckpipe.integrations.shared.choose_path`. If the save of this
        name is under way, the load waits for it.

        Args:
            path: The name, its last part, an id, or the URL of a file that Lightning wrote.
            map_location: For files that Lightning wrote.
            weights_only: For files that Lightning wrote.
            training: A training state to load into, if each rank has saved its part.

        Raises:
            CheckpointNotFound: If it is absent or incomplete.
            CkpipeError: Any error of a load, or of the save of this name.
        """
        local = os.fspath(path).removeprefix("file://")
        pointer = None if "://" in local else by_first(lambda: self._ended_pointer(local))
        if "://" in local or (pointer is None and os.path.isfile(local)):
            found: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
            return found
        pipeline = self._open()
        box: list[Any] = []
        try:
            box.append(choose_path(pipeline, local, lambda _: pointer))
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

    def _ended_pointer(self, path: str) -> Pointer | None:
        """Read a name whose save has ended; if it was killed, what it was before or an error."""
        pointer = _ended_pointer(path)
        if pointer is None or pointer.before is None:
            return pointer
        found = self._first_complete(pointer.id, *pointer.before)
        if found is None and self.resumes and not may_run(pointer.writer):
            found = self._end_name(path)
        if found is None or not (self.resumes or found.id == pointer.id):
            raise _killed(path, pointer, found)
        if found.id != pointer.id:
            _warn_killed(path, found)
        return Pointer(pointer.root, found.id, found.step)

    def _end_name(self, path: str) -> CheckpointInfo | None:
        """Lead a link of Lightning to the newest; without one remove the name, so that fit begins.

        Lightning's link led to an earlier checkpoint until the call of the killed save returned.
        """
        found, dead = None, os.path.realpath(path)
        if self._own(dead) is None:
            return None
        last = os.path.basename(path).startswith(ModelCheckpoint.CHECKPOINT_NAME_LAST)
        if last and os.path.islink(path) and (newest := self.newest()) is not None:
            found = self._first_complete(newest)
        with naming(path, "Its save was killed"):
            if found is not None:
                write_pointer(path, self.root, found)
            else:
                os.unlink(dead)
        return found

    def _first_complete(self, *ids: str) -> CheckpointInfo | None:
        with self._new(solo=True) as pipeline:
            for id in ids:
                with suppress(CheckpointNotFound):
                    return pipeline.choose(id)
        return None

    def _restore_names(self, folder: str | os.PathLike[str]) -> None:
        """Give names whose save was killed what they were before, and remove new ones."""
        self._forget_ended()
        for path in Path(folder).glob("*.ckpt"):
            with suppress(OSError):  # of other files
                if path.is_file():
                    self._restore_name(path)

    def _restore_name(self, path: Path) -> None:
        pointer = self._own(str(path))
        if pointer is None or pointer.before is None or pointer.id in _saves:
            return
        if may_run(pointer.writer):
            return
        found = self._first_complete(pointer.id, *pointer.before)
        if found is None or found.id != pointer.id:
            path.unlink(missing_ok=True)
        if found is not None:
            if found.id != pointer.id:
                _warn_killed(path, found)
            self._complete_name(str(path), found)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a name; its checkpoint is deleted once a newer one is complete."""
        if "://" in os.fspath(path):
            super().remove_checkpoint(path)
            return
        path = os.path.abspath(path)
        ids = self._named.pop(path, [])
        for id in set(ids) & set(_saves):
            _saves[id] = "", _saves[id][1]
        if not os.path.isdir(os.path.dirname(path)):
            return
        if not os.path.islink(path) and (pointer := read_pointer(path)) is not None:
            ids += [pointer.id, *(pointer.before or ())]
        self._dropped.update(ids)
        if ids and rank_zero_only.rank == 0:
            self._mark(self._open())
        with _locked(path):
            if os.path.islink(path) or read_pointer(path) is not None:
                os.unlink(path)  # what a link leads to has a name of its own
            else:
                super().remove_checkpoint(path)

    def _mark(self, pipeline: TrainerPipeline) -> None:
        """Mark removed checkpoints that are newer than all with a name, once saves have ended.

        If saves under other names have failed, and none is left, the removed one may be needed.
        """
        self._forget_ended()
        named = [CheckpointId.parse(id) for ids in self._named.values() for id in ids]
        newest = max(filter(None, named), default=None)
        waits = any(each.status not in _ENDED for _, each in _saves.values())
        if waits or (newest is None and self._failed) or self.settings.read_only:
            return
        for id in self._dropped - self._marks:
            if newest is None or ((key := CheckpointId.parse(id)) and key > newest):
                backend = pipeline._engine.context.store.retrying
                pipeline._call(create_once, backend, f"{REMOVED}{id}")
                self._marks.add(id)

    def teardown(self) -> None:
        """Wait until all saves are durable, and delete what has lost its name."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is None:
            return
        try:
            pipeline.close()
        except CkpipeError:
            with suppress(CkpipeError):
                self._delete_removed()
            raise
        self._delete_removed()

    def _delete_removed(self) -> None:
        if not (self._dropped and (self.sharded or rank_zero_only.rank == 0)):
            return
        with self._new(solo=True) as pipeline:
            if rank_zero_only.rank == 0:
                self._mark(pipeline)
            if self.settings.retention.rule is None:
                pipeline.prune()
            if self._marks and not self.settings.read_only:
                gone = self._marks - {each.id for each in pipeline.steps()}
                backend = pipeline._engine.context.store.retrying
                pipeline._call(backend.delete, [f"{REMOVED}{each}" for each in gone])
                self._marks -= gone


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
        self._batches: dict[str, Any] | None = None

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Check that the strategy saves and loads with the plugin.

        Raises:
            UsageError: If it goes past the plugin.
        """
        strategy = trainer.strategy
        if isinstance(strategy.checkpoint_io, CkpipeCheckpointIO):
            strategy.checkpoint_io.resumes = stage == "fit"
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
        alone = trainer.world_size == 1 or not dist.is_initialized()  # as after ddp_spawn
        if alone or getattr(trainer.strategy.checkpoint_io, "sharded", False):
            states = [own]
        elif trainer.global_rank == 0:
            states = [own] * trainer.world_size
            dist.gather_object(own, states)
        else:
            dist.gather_object(own)
        checkpoint[GENERATORS], checkpoint[BATCHES] = states, _batches(trainer)

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """Keep the generators of this rank for the first batch."""
        states, io = checkpoint.get(GENERATORS), trainer.strategy.checkpoint_io
        if trainer.state.fn != "fit" or "loops" not in checkpoint:
            return
        loop = checkpoint["loops"]["fit_loop"]
        self._positions = len(loop["state_dict"].get("combined_loader", []))
        self._batches = checkpoint.get(BATCHES)
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

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """Give names whose save was killed what they were before."""
        io = trainer.strategy.checkpoint_io
        if isinstance(io, CkpipeCheckpointIO) and trainer.is_global_zero:
            folders = [getattr(each, "dirpath", None) for each in trainer.checkpoint_callbacks]
            for folder in {trainer.default_root_dir, *filter(None, folders)}:
                io._restore_names(folder)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Tell where the run resumes, or that it begins."""
        io, loop = trainer.strategy.checkpoint_io, trainer.fit_loop
        if trainer.ckpt_path:
            done, data = loop.epoch_loop.batch_progress, ""
            saved, now = self._batches, _batches(trainer)
            if saved not in (None, now) and not done.is_last_batch:
                logger.warning(
                    "The epoch was begun with %s and goes on with %s: "
                    "it leaves samples out, repeats some, or takes other steps",
                    saved, now,
                )  # fmt: skip
            elif self._positions == len(loop._combined_loader.flattened):
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


def _batches(trainer: Any) -> dict[str, Any]:
    loaders = getattr(trainer.fit_loop._combined_loader, "flattened", [])
    together = trainer.accumulate_grad_batches
    for each in trainer.callbacks:
        if isinstance(each, GradientAccumulationScheduler):  # it sets the number at each epoch
            together = each.get_accumulate_grad_batches(trainer.current_epoch)
    return {
        "processes": trainer.world_size,
        "accumulate_grad_batches": together,
        "batch_size": [getattr(each, "batch_size", None) for each in loaders],
    }


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

    That method reads the file itself, past the plugin. Any other file is left to it. Optimizers and
    random generators are not read. A save of this name that is under way is waited for.

    Args:
        cls: The class of the module or data module.
        path: The name, such as ``best_model_path``.
        arguments: Those of the method; ``weights_only=False`` also loads pickled objects.

    Raises:
        CheckpointNotFound: If the checkpoint behind the name is absent.
        CkpipeError: Any error of a load.
    """
    made: M
    local = os.fspath(path).removeprefix("file://")
    if (pointer := _ended_pointer(local)) is None:
        made = cls.load_from_checkpoint(path, **arguments)
        return made
    others = ["optimizer_states", "training.optimizer", GENERATORS]
    allowed: Any = {"pickle": "allow"} if arguments.get("weights_only") is False else {}
    try:
        state = load(pointer.root, step=pointer.id, exclude=others, **allowed).state
    except UnsupportedState as error:
        error.hint = "Pass weights_only=False if you trust its writer"
        raise
    except CheckpointNotFound as error:
        raise (error if pointer.before is None else _killed(local, pointer)) from None
    if "training" in state:
        state["state_dict"] = state.pop("training")["model"]
    file = BytesIO()
    torch.save(state, file)
    file.seek(0)
    made = cls.load_from_checkpoint(file, **arguments)
    return made


def _is_tuners(info: CheckpointInfo) -> bool:
    name = str((info.metadata or {}).get("name"))
    return name.startswith((".lr_find_", ".scale_batch_size_"))


def _ended_pointer(path: str) -> Pointer | None:
    """Read a pointer once its save has ended, or after a wait if another process saves.

    Raises:
        CkpipeError: The error of its save, in this process.
    """
    until = time.monotonic() + _LONGEST_WAIT
    while True:
        pointer, whole = read_pointer(path), os.path.abspath(path)
        for id, (name, handle) in reversed([*_saves.items()]):
            if pointer is not None and pointer.root == handle._pipeline.url:
                found = id == pointer.id
            else:  # an id, the last part of a name, or a file that the save replaces at its end
                found = whole == name or (pointer is None and path in (id, os.path.basename(name)))
            if found:
                handle.wait_complete()
                return Pointer(handle._pipeline.url, id, handle.step)
        ended = pointer is None or pointer.before is None or may_run(pointer.writer) is False
        if ended or time.monotonic() > until:
            return pointer
        time.sleep(0.05)


def _killed(
    path: str, pointer: Pointer, found: CheckpointInfo | None = None
) -> CheckpointIncomplete:
    before = "" if found is None else f"; before, the name led to {found.id}"
    return CheckpointIncomplete(
        f"The save of {path} has not ended, or it failed or was killed{before}",
        step=pointer.step,
        hint="Wait for it if it runs elsewhere, or resume from io.newest(); with CkpipeCallback() "
        "among the callbacks, fit goes on from what the name led to before",
    )


def _warn_killed(path: str | Path, found: CheckpointInfo) -> None:
    logger.warning("The save of %s failed or was killed: it leads to %s again", path, found.id)


async def _marks(backend: Backend) -> set[str]:
    return {each.key.removeprefix(REMOVED) async for each in backend.list(REMOVED)}


@contextmanager
def _requeue_later() -> Iterator[None]:
    """Let signal handlers of Lightning, which save, run at the end: saves do not nest."""
    late, handlers = list[Any](), dict[Any, Any]()
    if threading.current_thread() is threading.main_thread():
        for number in signal.valid_signals():
            if isinstance(handler := signal.getsignal(number), _HandlersCompose):
                handlers[number] = handler
                signal.signal(number, lambda *arguments: late.append(arguments))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in late:
            handlers[number](number, frame)


@contextmanager
def _locked(path: str) -> Iterator[None]:
    """Make the folder of a name, and hold it against other threads and ranks."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with _requeue_later():
        folder = os.open(os.path.dirname(path), os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)
